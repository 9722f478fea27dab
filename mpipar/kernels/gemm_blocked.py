"""The blocked product in compiled code: loops over blocks that fit the caches, around the register kernel.

Where the register kernel asks for cache lines (see `host.prefetches`), each step of k asks for one of those that
the next panels come from; without that, packing waits for memory.
"""

import numpy as np

from .cache import jit
from .gemm_finish import finish_part
from .gemm_pack import pack_panel, sum_columns
from .host import host
from .vector import LINE, TILE_ROWS, address, lanes, load, number_of, size_of, store, tile, tile_ahead

GAP = 64  # bytes between panels of A: packing writes up to a vector beyond each
GROUP = 4  # panels of B that are packed together
# Where lines lie side by side, each step of k is a short piece of a far row. So several panels are packed
# together, STRIP steps at a time: each piece of memory is then read once and as a whole, also where rows a
# power of two apart share cache sets.
STRIP = 16
TILES_ASK = host().prefetches


@jit
def blocked_product(zero, a, b, out, bias, accumulate, finish, flat, row, other, other_row, thin, packed, column_sums,
                    kc, mc, nc, work_a, work_b, work_bias):
    """out (+)= a @ b (+ bias) for 2-D arrays of any strides (out: unit stride along a row).

    All have zero's type; or zero and out are float32, and a, b and bias the bits of bfloat16 (uint16), which packing
    turns into float32 (`thin` is then false: nothing is read in place). bias: [n], or empty for none. kc, mc, nc:
    block sizes along k, m, n, multiples of nothing in particular. finish: what is done to each part of out while it is
    still near (see `gemm_finish.py`); flat, other: out and the other array of it as flat memory, row and other_row:
    elements from one of their rows to the next. thin: m is small, b has unit stride along its rows and is read where it
    lies. packed: address of all panels of b, as `pack_whole` makes them for kc, or 0. column_sums: [n], or empty: gets
    the sums of b's columns added, which are made while the panels are near; neither thin nor packed. work_a, work_b,
    work_bias: addresses of memory for a block of A (all of A if thin), for a block of B (one group of panels if m <= mc,
    none if packed) and for the bias. The order of each sum depends on k and kc only.
    """
    m, k = a.shape
    n = b.shape[1]
    size, vector = size_of(zero), lanes(zero)
    panel = 2 * vector
    group = GROUP * panel
    whole_n = -(-n // panel) * panel
    element, element_bias = a.dtype.type(0), bias.dtype.type(0)
    source_size = size_of(element)  # of an element of a or b; `size` is that of a number in panels and in out
    none = n - n  # a zero that Numba does not take for a constant
    a_at, a_row, a_k = address(a), a.strides[0], a.strides[1]
    b_at, b_k, b_column = address(b), b.strides[0], b.strides[1]
    c_at, c_row = address(out), out.strides[0]
    has_bias, has_sums = bias.shape[0] > 0, column_sums.shape[0] > 0
    totals, block = np.zeros(n if has_sums else 0), np.empty(vector, flat.dtype)
    if has_bias:
        _copy_bias(element_bias, bias, n, panel, work_bias)
    if thin:
        panels = -(-m // TILE_ROWS)
        base, longer = m // panels, m % panels
        _pack_rows(element, a_at, a_row, a_k, panels, base, longer, none, k, work_a)
        for p0 in range(0, k, kc):
            depth = min(kc, k - p0)
            adding = accumulate or p0 > 0
            for j in range(0, n, panel):
                columns = min(panel, n - j)
                source, step = b_at + p0 * b_k + j * size, b_k
                next_b = source + panel * size
                if columns % vector != 0:  # whole vectors would reach beyond b
                    width = vector if columns <= vector else panel
                    pack_panel(element, source, size + none, b_k, columns, none, depth, width, work_b)
                    source, step = work_b, width * size
                start = none
                if has_bias and p0 == 0:
                    start = work_bias + j * size
                a_panel, c = work_a, c_at + j * size
                for q in range(panels):
                    rows = base + 1 if q < longer else base
                    tile_ahead(zero, a_panel + p0 * rows * size, source, step, c, c_row, depth, rows, columns,
                               start, adding, next_b + q * LINE, b_k)
                    a_panel += rows * k * size + GAP
                    c += rows * c_row
                in_group = j % group
                if finish != 0 and p0 + depth == k and (in_group + panel == group or j + panel >= n):
                    finish_part(finish, flat, j - in_group, row, other, j - in_group, other_row, m, in_group + columns)
        return
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
                _pack_rows(element, next_a, a_row, a_k, panels, base, longer, m - i0 - rows_here, depth, work_a)
                # What the next block of A is read from: `ask` rows of cache lines, `a_line` bytes apart.
                next_a += rows_here * a_row
                a_line, asked, ask = a_row, none, min(mc, m - i0 - rows_here)
                if a_row == source_size:
                    a_line, ask = LINE + none, -(-ask * source_size // LINE)
                for j in range(0, columns_here, panel):
                    columns = min(panel, columns_here - j)
                    width = vector if columns <= vector else panel
                    in_group = j % group
                    # Kept for the next block of rows; if there is none, the memory of one group serves all.
                    b_panel = work_b + (j if mc < m else in_group) * depth * size
                    b_panel = b_panel if packed == 0 else packed + (p0 * whole_n + (j0 + j) * depth) * size
                    # What the next panel of B is read from: `lines` rows of cache lines, `line` bytes apart.
                    next_b, line, step, lines = b_panel + depth * width * size, LINE * depth, LINE + none, panel * size // LINE
                    if i0 == 0 and packed == 0:
                        source = b_at + p0 * b_k + (j0 + j) * b_column
                        if in_group == 0:
                            here = min(group, columns_here - j)
                            _pack_columns(element, source, b_column, b_k, here, n - j0 - j - here, depth, b_panel)
                            if has_sums:
                                sum_columns(element, b_panel, here, depth, block, totals[j0 + j:j0 + j + here])
                        next_b, line, step = source + group * b_column, LINE + none, b_k
                        if b_column != source_size:
                            line, lines = b_column, panel
                    start = none
                    if has_bias and p0 == 0:
                        start = work_bias + (j0 + j) * size
                    # One panel of B against every panel of A: the panel of B stays near.
                    a_panel, c = work_a, c_at + i0 * c_row + (j0 + j) * size
                    for q in range(panels):
                        rows = base + 1 if q < longer else base
                        ahead, ahead_step = b_panel, none
                        if q < lines:
                            ahead, ahead_step = next_b + q * line, step
                        elif asked < ask:
                            ahead, ahead_step = next_a + asked * a_line, a_k
                            asked += 1
                        if TILES_ASK:
                            tile_ahead(zero, a_panel, b_panel, width * size, c, c_row, depth, rows, columns,
                                       start, adding, ahead, ahead_step)
                        else:
                            tile(zero, a_panel, b_panel, width * size, c, c_row, depth, rows, columns, start, adding)
                        a_panel += rows * depth * size + GAP
                        c += rows * c_row
                    if finish != 0 and p0 + depth == k and (in_group + panel == group or j + panel >= columns_here):
                        first = j0 + j - in_group
                        finish_part(finish, flat, i0 * row + first, row, other, i0 * other_row + first, other_row,
                                    rows_here, in_group + columns)
    for j in range(column_sums.shape[0]):
        column_sums[j] += totals[j]


@jit
def pack_whole(zero, b, kc, target):
    """All panels of b [k, n], for products in blocks of kc along k: for each block the panels of all columns."""
    k, n = b.shape
    size, panel = size_of(number_of(zero)), 2 * lanes(zero)
    group = GROUP * panel
    whole_n = -(-n // panel) * panel
    for p0 in range(0, k, kc):
        depth = min(kc, k - p0)
        for j in range(0, n, group):
            here = min(group, n - j)
            _pack_columns(zero, address(b) + p0 * b.strides[0] + j * b.strides[1], b.strides[1], b.strides[0], here,
                          n - j - here, depth, target + (p0 * whole_n + j * depth) * size)


@jit(inline=True)
def _copy_bias(zero, bias, n, panel, target):
    size = size_of(number_of(zero))
    for j in range(n + panel):  # zeros beyond, for the edge tile
        value = number_of(zero)
        if j < n:
            value = load(zero, address(bias) + j * bias.strides[0])
        store(value, target + j * size)


@jit(inline=True)
def _pack_rows(zero, source, a_row, a_k, panels, base, longer, beyond, depth, target):
    # Panels of base + 1 rows (the first `longer` of them) and of base rows; `beyond` more rows follow in memory.
    size = size_of(number_of(zero))
    strip = STRIP if a_row == size_of(zero) else depth
    for p in range(0, depth, strip):
        steps = min(strip, depth - p)
        a, to = source + p * a_k, target
        for q in range(panels):
            rows = base + 1 if q < longer else base
            more = beyond + (panels - q - 1) * base  # at least
            pack_panel(zero, a, a_row, a_k, rows, more, steps, rows, to + p * rows * size)
            a += rows * a_row
            to += rows * depth * size + GAP


@jit(inline=True)
def _pack_columns(zero, source, b_column, b_k, columns, beyond, depth, target):
    size, vector = size_of(number_of(zero)), lanes(zero)
    strip = STRIP if b_column == size_of(zero) else depth
    for p in range(0, depth, strip):
        steps = min(strip, depth - p)
        for j in range(0, columns, 2 * vector):
            here = min(2 * vector, columns - j)
            width = vector if here <= vector else 2 * vector
            pack_panel(zero, source + p * b_k + j * b_column, b_column, b_k, here, beyond + columns - j - here, steps,
                       width, target + (j * depth + p * width) * size)
