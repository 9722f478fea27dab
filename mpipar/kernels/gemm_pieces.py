"""The blocked product of float32 on AMX: panels of three pieces of bfloat16 (see `pieces.py`), float32 sums."""

import functools

import numpy as np
from numba import types

from .cache import compile_only, jit, once
from .gemm_finish import NOTHING, finish_part
from .gemm_kept import kept
from .gemm_plan import dense, flat
from .host import host
from .memory import ThreadMemory
from .pairs import AMX, BLOCK, begin, end, tile_shapes, units
from .pieces import AHEAD, PIECES_BYTES, move_block, pack_and_sum, pack_pieces, square_of_pieces
from .vector import address, stand_alone

GROUP = 4  # panels of B that are packed together, so that a row of b is read some cache lines at a time
DEEPEST = 16  # blocks along k
LEAST = 1 << 22  # multiplications of the smallest product that gains (measured)
SIZE = 4  # bytes of a number


def suits(m, k, n):
    """Whether products of this shape are made here: the CPU has AMX, and packing is small beside the product."""
    return min(m, k, n) >= 64 and m * k * n >= LEAST and has_amx()


@functools.lru_cache(maxsize=None)
def has_amx():
    """Whether this process can use AMX."""
    return "amx" in units()


def run(a, b, out, bias, accumulate, finish, thin=0, packed=0, column_sums=None):
    """One thread's product, see `gemm`: out (+)= a @ b (+ bias), with the last pass `finish`, (what, other or none).

    bias: empty for none. thin: 0. packed: of b, see `panels`. column_sums: [n] or none, where b has unit stride along its
    rows and is not packed: gets the sums of b's columns added.
    """
    (m, k), n = a.shape, b.shape[1]
    a, b = dense(a), dense(b)
    depth = _depth(k)
    per_panel = depth * PIECES_BYTES
    rows = max(1, host().l2 // 2 // per_panel) * BLOCK
    rows = -(-m // -(-m // rows) // BLOCK) * BLOCK
    columns = -(-n // BLOCK) * BLOCK
    if not packed and rows < m:
        columns = min(columns, max(GROUP, min(8 << 20, host().l3 // 2) // per_panel // GROUP * GROUP) * BLOCK)
    work_a = _memory.address("a", per_panel * -(-min(rows, m) // BLOCK))
    work_b = packed or _memory.address("b", per_panel * (GROUP if rows >= m else -(-columns // BLOCK)))
    totals = _NONE if column_sums is None else column_sums
    what, other = finish
    flats = (_NONE, 0, _NONE, 0)
    if what != NOTHING:
        flats = flat(out), out.strides[0] // SIZE, flat(other), other.strides[0] // SIZE
    _compile()
    pieces_product(_SHAPES, a, b, out, bias, accumulate, what, *flats, packed > 0, totals, depth, rows, columns,
                   work_a, work_b)


def panels(b):
    """Address of all panels of b, if it is one that doesn't change for now; else 0."""
    k, n = b.shape
    return kept.panels(b, -(-k // BLOCK) * -(-n // BLOCK) * (PIECES_BYTES // SIZE), np.float32, _pack)


def _pack(b, target):
    _compile()
    b = dense(b)
    pack_all(b, _depth(b.shape[0]), target)


def _depth(k):
    """Blocks along k that are packed at a time."""
    blocks = -(-k // BLOCK)
    return -(-blocks // -(-blocks // DEEPEST))


@jit
def pieces_product(shapes, a, b, out, bias, accumulate, finish, flat, row, other, other_row, is_packed, column_sums,
                   depth, block_rows, block_columns, work_a, work_b):
    """See `run`; finish, flat, row, other, other_row: as in `blocked_product`. a and b have unit stride along a side.

    depth: blocks along k that are packed at a time; block_rows, block_columns: of A and of B. work_a, work_b: addresses
    of memory for their panels (one group of B's if block_rows >= m; all of b, packed, if is_packed). The order of each
    sum depends on k only: sums over `depth` blocks, which are added one after the other.
    """
    m, k = a.shape
    n = b.shape[1]
    a_row, a_k, b_k, b_column, c_row = a.strides[0], a.strides[1], b.strides[0], b.strides[1], out.strides[0]
    none = n - n
    whole = -(-n // BLOCK)
    totals = np.zeros(whole * BLOCK if column_sums.size else 0)
    sums = np.empty(BLOCK * BLOCK, np.float32)
    starts = np.zeros(n + BLOCK if bias.size else 0, np.float32)
    for j in range(bias.size):
        starts[j] = bias[j]
    begin(AMX + none, address(shapes))
    for j0 in range(0, n, block_columns):
        width = min(block_columns, n - j0)
        for p0 in range(0, k, depth * BLOCK):
            steps = min(depth * BLOCK, k - p0)
            blocks = -(-steps // BLOCK)
            panel = blocks * PIECES_BYTES
            adding, is_last = accumulate or p0 > 0, p0 + steps == k
            for i0 in range(0, m, block_rows):
                height = min(block_rows, m - i0)
                at = address(a) + i0 * a_row + p0 * a_k
                for i in range(0, height, BLOCK):
                    _pack_panel(True, at + i * a_row, a_row, a_k, min(BLOCK, height - i), steps, work_a + i // BLOCK * panel)
                for j in range(0, width, BLOCK):
                    in_group = j // BLOCK % GROUP
                    b_panel = work_b + (j // BLOCK if block_rows < m else in_group) * panel
                    if is_packed:
                        b_panel = work_b + (p0 // BLOCK * whole + (j0 + j) // BLOCK * blocks) * PIECES_BYTES
                    elif i0 == 0 and in_group == 0:
                        _pack_group(address(b) + p0 * b_k + (j0 + j) * b_column, b_column, b_k, min(GROUP * BLOCK, width - j),
                                    steps, b_panel, totals[j0 + j:])
                    columns = min(BLOCK, width - j)
                    # What comes next: the next panel, or where a row of it will be read for each block.
                    ahead, ahead_step = b_panel + panel, AHEAD * 64 + none
                    if i0 == 0 and not is_packed and b_k != SIZE:
                        ahead, ahead_step = address(b) + p0 * b_k + (j0 + j + (GROUP - in_group) * BLOCK) * b_column, b_k
                        ahead += in_group * -(-height // BLOCK) * blocks * b_k
                    start = address(starts) + (j0 + j) * SIZE if bias.size and p0 == 0 else none
                    _panel_of_b(work_a, b_panel, blocks, address(out) + i0 * c_row + (j0 + j) * SIZE, c_row, height, columns,
                                start, adding, sums, ahead, ahead_step)
                    if finish != NOTHING and is_last and (in_group == GROUP - 1 or j + BLOCK >= width):
                        first = j0 + j - in_group * BLOCK
                        finish_part(finish, flat, i0 * row + first, row, other, i0 * other_row + first, other_row,
                                    height, in_group * BLOCK + columns)
    end(AMX + none)
    for j in range(column_sums.size):
        column_sums[j] += totals[j]


@jit
def _panel_of_b(a_panels, b_panel, blocks, c, c_row, height, columns, start, adding, sums, ahead, ahead_step):
    """One panel of B against every panel of A: the panel of B stays near. c, start: addresses; start: of 32 numbers, or
    0. sums: memory for a block of c."""
    stand_alone(blocks)
    at_sums, sums_row = address(sums), BLOCK * SIZE + blocks - blocks
    for i in range(0, height, BLOCK):
        rows = min(BLOCK, height - i)
        direct = not adding and rows % 16 == 0 and columns % 16 == 0
        to, to_row = (c, c_row) if direct else (at_sums, sums_row)
        square_of_pieces(a_panels, b_panel, blocks, start, to, to_row, rows, columns, c, c_row, ahead, ahead_step)
        if not direct:
            move_block(at_sums, sums_row, c, c_row, rows, columns, adding)
        a_panels += blocks * PIECES_BYTES
        ahead += blocks * ahead_step
        c += BLOCK * c_row


@jit
def pack_all(b, depth, target):
    """All panels of b [k, n]: for each `depth` blocks along k the panels of all columns."""
    k, n = b.shape
    no_sums = np.zeros(0)
    for p0 in range(0, k, depth * BLOCK):
        steps = min(depth * BLOCK, k - p0)
        for j in range(0, n, GROUP * BLOCK):
            here = min(GROUP * BLOCK, n - j)
            _pack_group(address(b) + p0 * b.strides[0] + j * b.strides[1], b.strides[1], b.strides[0], here, steps, target,
                        no_sums)
            target += -(-here // BLOCK) * -(-steps // BLOCK) * PIECES_BYTES


@jit
def _pack_panel(is_a, source, line_step, k_step, lines, steps, target):
    stand_alone(lines)
    for p in range(0, steps, BLOCK):
        pack_pieces(is_a, k_step == SIZE, source + p * k_step, line_step, k_step, lines, min(BLOCK, steps - p), target)
        target += PIECES_BYTES


@jit
def _pack_group(source, column_step, k_step, columns, steps, target, totals):
    """Panels of up to GROUP * BLOCK columns; totals: gets their sums added if it is not empty."""
    stand_alone(columns)
    panel = -(-steps // BLOCK) * PIECES_BYTES
    along_k = k_step == SIZE and column_step != SIZE
    for p in range(0, steps, BLOCK):
        for j in range(0, columns, BLOCK):
            at, to = source + p * k_step + j * column_step, target + j // BLOCK * panel + p // BLOCK * PIECES_BYTES
            here, depth = min(BLOCK, columns - j), min(BLOCK, steps - p)
            if totals.size:
                pack_and_sum(at, k_step, here, depth, to, address(totals) + j * 8)
            else:
                pack_pieces(False, along_k, at, column_step, k_step, here, depth, to)


@once
def _compile():
    assert has_amx()  # which also asks the system for it
    word, line = types.int64, types.Array(types.float32, 1, "C")
    operand = types.Array(types.float32, 2, "A", readonly=True)
    compile_only(pieces_product, types.Array(types.uint8, 1, "C", readonly=True), operand, operand,
                 types.Array(types.float32, 2, "A"), types.Array(types.float32, 1, "A", readonly=True), types.boolean, word,
                 line, word, line, word, types.boolean, line, *[word] * 5)
    compile_only(pack_all, operand, word, word)


_memory = ThreadMemory()
_NONE = np.empty(0, np.float32)
_SHAPES = np.frombuffer(tile_shapes(), np.uint8)
