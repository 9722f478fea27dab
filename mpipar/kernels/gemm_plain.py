"""The steps that lead to the blocked product (lecture section 2.6), each runnable, checked and measured.

    triple_loop        three loops, one sum at a time
    row_parallel       the same, rows shared out among threads
    tiled              blocks of `tile` x `tile` that stay in cache while they are used
    splat_rows         (i) an element of A, copied to all lanes, times a vector of B
    dot_columns        (ii) a block of B transposed, then vector dot products along k
    register_block     (iii) a block of C in registers, as many rows as a vector has lanes

The last step is `gemm.gemm`: packed panels, a larger register block, and blocks for each level of cache. All
compute out[m, n] = a[m, k] @ b[k, n] for float32 or float64 arrays of one dtype and return out. out may not
overlap a or b.
"""

import numpy as np

from .cache import jit
from .gemm_pack import pack_panel
from .settings import settings
from .threads import parallel_for
from .vector import TILE_ROWS, address, lanes, size_of, tile

REASSOCIATE = {"contract", "reassoc"}  # lets LLVM sum a dot product in several lanes


def triple_loop(a, b, out):
    """out[i, j] = sum over p of a[i, p] * b[p, j]: the definition."""
    _rows(a, b, out, 0, out.shape[0])
    return out


def row_parallel(a, b, out):
    """The triple loop, its rows shared out among `settings.threads` threads: no two write one element."""
    m, parts = out.shape[0], settings.threads
    parallel_for(_rows, [(a, b, out, m * i // parts, m * (i + 1) // parts) for i in range(parts)])
    return out


def tiled(a, b, out, *, tile=64):
    """The triple loop over tile x tile x tile blocks: an element read from memory is used `tile` times."""
    if tile < 1:
        raise ValueError(f"tile is {tile}; valid values: integers from 1")
    out.fill(0)
    _tiled(a, b, out, tile)
    return out


def splat_rows(a, b, out):
    """Variant (i): each a[i, p] is copied to all lanes and multiplied with the contiguous row b[p, :]."""
    out.fill(0)
    _splat_rows(a, b, out)
    return out


def dot_columns(a, b, out, *, tile=32):
    """Variant (ii): `tile` columns of b are transposed, so that both operands of a dot run along k."""
    if tile < 1:
        raise ValueError(f"tile is {tile}; valid values: integers from 1")
    _dot_columns(a, b, out, np.empty((tile, a.shape[1]), b.dtype), np.empty(a.shape[1], a.dtype))
    return out


def register_block(a, b, out):
    """Variant (iii): V x V sums (V lanes; fewer rows if registers are short) stay in registers over k."""
    k = a.shape[1]
    zero = out.dtype.type(0)
    width = max(64, TILE_ROWS)  # no vector has more lanes
    panels = np.empty((2, (k + 1) * width), out.dtype)
    _register_block(zero, a, b, out, panels, 0, False)
    return out


@jit
def _rows(a, b, out, first, last):
    for i in range(first, last):
        for j in range(b.shape[1]):
            total = out.dtype.type(0)
            for p in range(a.shape[1]):
                total += a[i, p] * b[p, j]
            out[i, j] = total


@jit
def _tiled(a, b, out, tile):
    m, k = a.shape
    n = b.shape[1]
    for i0 in range(0, m, tile):
        for p0 in range(0, k, tile):
            for j0 in range(0, n, tile):
                for i in range(i0, min(i0 + tile, m)):
                    for p in range(p0, min(p0 + tile, k)):
                        for j in range(j0, min(j0 + tile, n)):
                            out[i, j] += a[i, p] * b[p, j]


@jit(fastmath=REASSOCIATE)
def _splat_rows(a, b, out):
    for i in range(a.shape[0]):
        row = out[i]
        for p in range(a.shape[1]):
            element, line = a[i, p], b[p]
            for j in range(b.shape[1]):
                row[j] += element * line[j]


@jit(fastmath=REASSOCIATE)
def _dot_columns(a, b, out, columns, row):
    tile, k = columns.shape
    n = b.shape[1]
    for j0 in range(0, n, tile):
        here = min(tile, n - j0)
        for p in range(k):
            for j in range(here):
                columns[j, p] = b[p, j0 + j]
        for i in range(a.shape[0]):
            for p in range(k):
                row[p] = a[i, p]
            for j in range(here):
                total = out.dtype.type(0)
                for p in range(k):
                    total += row[p] * columns[j, p]
                out[i, j0 + j] = total


@jit
def _register_block(zero, a, b, out, panels, start, accumulate):
    m, k = a.shape
    n = b.shape[1]
    size, width = size_of(zero), lanes(zero)
    height = min(width, TILE_ROWS)
    a_row, a_k, b_k, b_column, c_row = a.strides[0], a.strides[1], b.strides[0], b.strides[1], out.strides[0]
    a_panel, b_panel = address(panels[0]), address(panels[1])
    for j in range(0, n, width):
        columns = min(width, n - j)
        pack_panel(zero, address(b) + j * b_column, b_column, b_k, columns, k, width, b_panel)
        for i in range(0, m, height):
            rows = min(height, m - i)
            pack_panel(zero, address(a) + i * a_row, a_row, a_k, rows, k, rows, a_panel)
            tile(zero, a_panel, b_panel, width * size, address(out) + i * c_row + j * size, c_row, k, rows,
                 columns, start, accumulate)
