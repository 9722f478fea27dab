"""The first steps towards the blocked product (lecture section 2.6), each runnable, checked and measured.

    triple_loop        three loops, one sum at a time
    row_parallel       the same, rows shared out among threads
    tiled              blocks of `tile` x `tile` that stay in cache while they are used

The next three, which compute such a block with vectors, are in `gemm_vectorised.py`. The last step is
`gemm.gemm`: packed panels, a larger register block, and blocks for each level of cache. All compute
out[m, n] = a[m, k] @ b[k, n] for float32 or float64 arrays of one dtype and return out. out may not overlap
a or b.
"""

from .cache import jit
from .settings import settings
from .threads import parallel_for


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
    """The triple loop over tile x tile x tile blocks: an element read from memory is used `tile` times.

    A block of out stays near while the blocks of a and b that belong to it pass by, so out is written to
    memory once. ValueError if tile < 1.
    """
    check_tile(tile)
    out.fill(0)
    _tiled(a, b, out, tile)
    return out


def check_tile(tile):
    """ValueError unless tile >= 1."""
    if tile < 1:
        raise ValueError(f"tile is {tile}; valid values: integers from 1")


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
        for j0 in range(0, n, tile):
            for p0 in range(0, k, tile):
                for i in range(i0, min(i0 + tile, m)):
                    for p in range(p0, min(p0 + tile, k)):
                        for j in range(j0, min(j0 + tile, n)):
                            out[i, j] += a[i, p] * b[p, j]
