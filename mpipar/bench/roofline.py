"""The two limits of a loop, measured on the spot, and what a loop asks of memory (lecture, 2.6 and 4.4).

A loop that does f operations for each byte it moves (its arithmetic intensity) runs at no more than
min(peak, f * bandwidth): the roofline. The intensities here follow from the sizes alone.
"""

import time
from pathlib import Path

import numpy as np

from ..kernels.cache import jit
from ..kernels.fusion import triad
from ..kernels.host import host
from ..kernels.memory import aligned_zeros
from ..kernels.pairs import AMX, BLOCK, begin, end, tile_shapes
from ..kernels.pieces import PIECES_BYTES, square_of_pieces
from ..kernels.vector import TILE_ROWS, address, tile

TIMES_CACHES = 4  # the three arrays of the triad together are so many times the last cache
SHARE_OF_MEMORY = 0.25  # but never more than this share of the memory that is free


class Peak:
    """The register kernel alone, on one panel of A and one of B that fit the nearest cache together."""

    TIMES = 500

    def __init__(self, dtype):
        rows, columns = host().register_tile(dtype)
        self.k = max(16, host().l1 // 2 // ((rows + columns) * dtype.itemsize))
        self.flops = 2 * rows * columns * self.k * self.TIMES
        self.zero = dtype.type(0)
        shapes = (self.k, rows), (self.k, columns), (rows, columns)
        self.arrays = [np.zeros(shape, dtype) for shape in shapes]
        self.measure()

    def measure(self) -> float:
        """GFLOP/s of one thread."""
        start = time.perf_counter()
        self.repeat()
        return self.flops / (time.perf_counter() - start) / 1e9

    def repeat(self):
        """The kernel, TIMES times."""
        _repeat_tile(self.zero, *self.arrays, 0, False, self.TIMES)


class PeakOfPieces(Peak):
    """The same for float32 on AMX; counted are the operations of float32, not those of the pieces."""

    def __init__(self):
        self.blocks = max(1, host().l1 // 4 // PIECES_BYTES)
        self.flops = 2 * BLOCK**3 * self.blocks * self.TIMES
        panels = [aligned_zeros(self.blocks * PIECES_BYTES, np.uint8) for _ in range(2)]
        self.arrays = [np.frombuffer(tile_shapes(), np.uint8), *panels, aligned_zeros(BLOCK * BLOCK, np.float32)]
        self.measure()

    def repeat(self):
        """The kernel, TIMES times."""
        _repeat_square(*self.arrays, self.blocks, self.TIMES)


@jit
def _repeat_tile(zero, a, b, c, start, accumulate, times):
    k, rows, columns = a.shape[0], min(TILE_ROWS, c.shape[0]), c.shape[1]
    for _ in range(times):
        tile(zero, address(a), address(b), b.strides[0], address(c), c.strides[0], k, rows, columns, start,
             accumulate)


@jit
def _repeat_square(shapes, a, b, c, blocks, times):
    none = blocks - blocks
    begin(AMX + none, address(shapes))
    for _ in range(times):
        square_of_pieces(address(a), address(b), blocks, none, address(c), 4 * BLOCK + none, BLOCK + none, BLOCK + none,
                         address(c), 4 * BLOCK + none, address(b), none)
    end(AMX + none)


class Bandwidth:
    """The stream triad a = b + s * c (McCalpin) over arrays that no cache holds.

    Counts three moves of the array a run, as STREAM does; that a's lines are read before they are written
    is not counted. `bytes` says how large the three arrays are together.
    """

    def __init__(self, dtype, size=None):
        size = _triad_bytes() if size is None else size
        dtype = np.dtype(dtype)
        count = max(1, size // (3 * dtype.itemsize))
        self.bytes = 3 * count * dtype.itemsize
        self.factor = dtype.type(3)
        self.arrays = [np.zeros(count, dtype) for _ in range(3)]
        for array in self.arrays:
            array.fill(1)  # zeros may all be one page
        self.measure()

    def measure(self) -> float:
        """GB/s of `settings.threads` threads together."""
        start = time.perf_counter()
        triad(self.arrays[1], self.arrays[2], self.factor, self.arrays[0])
        return self.bytes / (time.perf_counter() - start) / 1e9


def product_bytes(m, k, n, itemsize, tile=None):
    """Bytes that out[m, n] = a[m, k] @ b[k, n] moves between memory and caches.

    tile: blocks of tile x tile, of which one of each matrix stays near: every block of a is read once for
    each block of columns of out, every block of b once for each block of rows (lecture section 3.2; tile=1 is
    the plain loop, which uses nothing twice). tile=None: each matrix once, less than which no order of the
    loops can move (lecture section 4.4).
    """
    over_m, over_n = (1, 1) if tile is None else (-(-m // tile), -(-n // tile))
    return itemsize * (m * k * over_n + k * n * over_m + m * n)


def tile_intensity(tile, itemsize):
    """FLOP/byte of a tile: 2 tile^2 k operations on 2 tile k elements (section 3.2: TILE/4 in float32)."""
    return tile / itemsize


def roofline(intensity, peak_gflops, bandwidth_gbs):
    """GFLOP/s that a loop of this intensity (FLOP/byte) cannot exceed."""
    return min(peak_gflops, intensity * bandwidth_gbs)


def _triad_bytes():
    caches = host().l1 + host().l2 + host().l3
    return int(max(64 << 20, min(TIMES_CACHES * caches, SHARE_OF_MEMORY * _free_memory())))


def _free_memory():
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass
    return 4 << 30
