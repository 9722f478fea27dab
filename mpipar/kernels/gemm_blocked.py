"""The blocked product in compiled code: loops over blocks that fit the caches, around the register kernel."""

from .cache import jit
from .gemm_pack import pack_panel
from .vector import TILE_ROWS, address, lanes, load, size_of, store, tile


@jit
def blocked_product(zero, a, b, out, bias, accumulate, kc, mc, nc, in_place, work_a, work_b, work_bias):
    """out (+)= a @ b (+ bias) for 2-D arrays of any strides (out: unit stride along a row), all of zero's type.

    bias: [n], or empty for none. kc, mc, nc: block sizes along k, m, n. in_place: read b without packing it where it has unit
    stride along its rows. work_a, work_b, work_bias: addresses of at least kc * mc, kc * nc and n elements, and two vectors
    beyond. The order of each sum depends on k and kc only.
    """
    m, k = a.shape
    n = b.shape[1]
    size, vector = size_of(zero), lanes(zero)
    panel = 2 * vector
    a_at, a_row, a_k = address(a), a.strides[0], a.strides[1]
    b_at, b_k, b_column = address(b), b.strides[0], b.strides[1]
    c_at, c_row = address(out), out.strides[0]
    bias_step = 0
    if bias.shape[0] > 0:
        bias_step = size
        for j in range(n + panel):  # zeros beyond, for the edge tile
            value = zero
            if j < n:
                value = load(zero, address(bias) + j * bias.strides[0])
            store(value, work_bias + j * size)
    for j0 in range(0, n, nc):
        columns_here = min(nc, n - j0)
        for p0 in range(0, k, kc):
            depth = min(kc, k - p0)
            adding = accumulate or p0 > 0
            for i0 in range(0, m, mc):
                rows_here = min(mc, m - i0)
                panels = -(-rows_here // TILE_ROWS)
                base, longer = rows_here // panels, rows_here % panels
                _pack_rows(zero, a_at + i0 * a_row + p0 * a_k, a_row, a_k, panels, base, longer, depth, work_a)
                for j in range(0, columns_here, panel):
                    columns = min(panel, columns_here - j)
                    width = vector if columns <= vector else panel
                    source = b_at + p0 * b_k + (j0 + j) * b_column
                    b_panel, b_step = work_b, width * size
                    if in_place and b_column == size and columns == width:
                        b_panel, b_step = source, b_k
                    else:
                        if mc < m:  # kept for the next block of rows; otherwise one panel's memory serves all
                            b_panel += j * depth * size
                        if i0 == 0:
                            pack_panel(zero, source, b_column, b_k, columns, depth, width, b_panel)
                    start = 0
                    if bias_step > 0 and p0 == 0:
                        start = work_bias + (j0 + j) * size
                    _row_of_tiles(zero, work_a, b_panel, b_step, c_at + i0 * c_row + (j0 + j) * size, c_row, depth,
                                  panels, base, longer, columns, start, adding)


@jit(inline=True)
def _pack_rows(zero, source, a_row, a_k, panels, base, longer, depth, target):
    size = size_of(zero)
    for q in range(panels):
        rows = base + 1 if q < longer else base
        pack_panel(zero, source, a_row, a_k, rows, depth, rows, target)
        source += rows * a_row
        target += rows * depth * size


@jit(inline=True)
def _row_of_tiles(zero, a_panel, b_panel, b_step, c, c_row, depth, panels, base, longer, columns, start, adding):
    # One panel of B against every panel of A: the panel of B stays in the nearest cache.
    size = size_of(zero)
    for q in range(panels):
        rows = base + 1 if q < longer else base
        tile(zero, a_panel, b_panel, b_step, c, c_row, depth, rows, columns, start, adding)
        a_panel += rows * depth * size
        c += rows * c_row
