"""The blocked product in compiled code: loops over blocks that fit the caches, around the register kernel.

While tiles are computed, the cache lines that the next panels come from are asked for, one with each step of k; without that,
packing waits for memory.
"""

from .cache import jit
from .gemm_pack import pack_panel
from .vector import TILE_ROWS, address, lanes, load, size_of, store, tile_ahead

LINE = 64  # bytes of a cache line


@jit
def blocked_product(zero, a, b, out, bias, accumulate, kc, mc, nc, work_a, work_b, work_bias):
    """out (+)= a @ b (+ bias) for 2-D arrays of any strides (out: unit stride along a row), all of zero's type.

    bias: [n], or empty for none. kc, mc, nc: block sizes along k, m, n. work_a, work_b, work_bias: addresses of at least
    kc * mc, kc * nc (kc * 2 V if m <= mc) and n elements, and four vectors beyond (V the lanes of a vector). The order of each
    sum depends on k and kc only.
    """
    m, k = a.shape
    n = b.shape[1]
    size, vector = size_of(zero), lanes(zero)
    panel = 2 * vector
    none = n - n  # a zero that Numba does not take for a constant
    a_at, a_row, a_k = address(a), a.strides[0], a.strides[1]
    b_at, b_k, b_column = address(b), b.strides[0], b.strides[1]
    c_at, c_row = address(out), out.strides[0]
    has_bias = bias.shape[0] > 0
    if has_bias:
        _copy_bias(zero, bias, n, panel, work_bias)
    for j0 in range(0, n, nc):
        columns_here = min(nc, n - j0)
        for p0 in range(0, k, kc):
            depth = min(kc, k - p0)
            adding = accumulate or p0 > 0
            for i0 in range(0, m, mc):
                rows_here = min(mc, m - i0)
                panels = -(-rows_here // TILE_ROWS)
                base, longer = rows_here // panels, rows_here % panels
                next_a = a_at + i0 * a_row + p0 * a_k
                _pack_rows(zero, next_a, a_row, a_k, panels, base, longer, depth, work_a)
                next_a += rows_here * a_row
                end_a = next_a + min(mc, m - i0 - rows_here) * a_row
                for j in range(0, columns_here, panel):
                    columns = min(panel, columns_here - j)
                    width = vector if columns <= vector else panel
                    b_panel = work_b
                    if mc < m:  # kept for the next block of rows; otherwise one panel's memory serves all
                        b_panel += j * depth * size
                    # The next panel of B, as `lines` lines `line` bytes apart, each a line for each step of k.
                    next_b, line, step, lines = b_panel + depth * width * size, LINE * depth, LINE + none, panel * size // LINE
                    if i0 == 0:
                        source = b_at + p0 * b_k + (j0 + j) * b_column
                        pack_panel(zero, source, b_column, b_k, columns, depth, width, b_panel)
                        next_b, line, step = source + panel * b_column, LINE + none, b_k
                        if b_column != size:
                            line, lines = b_column, panel
                    start = none
                    if has_bias and p0 == 0:
                        start = work_bias + (j0 + j) * size
                    # One panel of B against every panel of A: the panel of B stays near.
                    a_panel = work_a
                    c = c_at + i0 * c_row + (j0 + j) * size
                    for q in range(panels):
                        rows = base + 1 if q < longer else base
                        ahead, ahead_step = next_b + q * line, step
                        if q >= lines:
                            ahead, ahead_step = next_a, a_k
                            if next_a != end_a:
                                next_a += a_row
                        tile_ahead(zero, a_panel, b_panel, width * size, c, c_row, depth, rows, columns, start, adding,
                                   ahead, ahead_step)
                        a_panel += rows * depth * size
                        c += rows * c_row


@jit(inline=True)
def _copy_bias(zero, bias, n, panel, target):
    size = size_of(zero)
    for j in range(n + panel):  # zeros beyond, for the edge tile
        value = zero
        if j < n:
            value = load(zero, address(bias) + j * bias.strides[0])
        store(value, target + j * size)


@jit(inline=True)
def _pack_rows(zero, source, a_row, a_k, panels, base, longer, depth, target):
    size = size_of(zero)
    for q in range(panels):
        rows = base + 1 if q < longer else base
        pack_panel(zero, source, a_row, a_k, rows, depth, rows, target)
        source += rows * a_row
        target += rows * depth * size
