"""The blocked product of bfloat16 on the units of `pairs.py`: 16-bit panels, float32 sums, each result rounded once.

One block is as deep as k, so a sum never leaves the registers before it is whole; the 32 x 32 of them that come out go
through one pass in the nearest cache, which adds the bias, adds or activates and rounds.
"""

import numpy as np
from numba import types

from .bfloat16 import widened
from .cache import compile_only, jit, once
from .gelu import erf_value
from .gemm_finish import ADD, GELU, SUMS
from .gemm_kept import kept
from .gemm_plan import dense, flat
from .host import host
from .memory import ThreadMemory
from .pairs import (AMX, AVX512, BLOCK, BLOCK_BYTES, ask, begin, end, pack_block, round_line, round_line_with, square,
                    tile_shapes)
from .polynomials import VECTOR_FLAGS
from .vector import address, stand_alone
from .wide import wide_vectors

UNITS = {"amx": AMX, "avx512": AVX512}
GROUP = 8  # panels of B that are packed together, so that a row of b is read some cache lines at a time
HALF = 2  # bytes


def run(unit, a, b, out, bias, accumulate, finish, packed=0):
    """One thread's product: out (+)= a @ b (+ bias), with the last pass `finish`, (what, other array or none).

    unit: of UNITS. a, b, bias: uint16, the bits of bfloat16; a, b: any strides; bias: empty for none. out: float32, or
    uint16 with other of uint16 too; unit stride along their rows. packed: of b, see `panels`.
    """
    (m, k), n = a.shape, b.shape[1]
    a, b = dense(a), dense(b)
    blocks = max(1, -(-k // BLOCK))
    rows = max(BLOCK, host().l2 // 2 // (blocks * BLOCK_BYTES) * BLOCK)
    columns = GROUP * BLOCK  # with one block of rows each panel of b is used once, so it need not be kept
    if packed:
        columns = -(-n // BLOCK) * BLOCK
    elif m > rows:
        columns = max(columns, max(host().l2, min(8 << 20, host().l3 // 2)) // (blocks * BLOCK_BYTES) * BLOCK)
    work_a = _memory.address("a", blocks * -(-min(rows, m) // BLOCK) * BLOCK_BYTES)
    work_b = packed or _memory.address("b", blocks * -(-min(columns, n) // BLOCK) * BLOCK_BYTES)
    what, other = finish
    halves, numbers = (_NO_HALVES, flat(out)) if out.dtype == np.float32 else (flat(out), _NO_NUMBERS)
    beside = halves if other is None else flat(other)
    beside_row = 0 if other is None else _row(other)
    _compile()
    what = what if numbers is _NO_NUMBERS else SUMS
    pairs_product(UNITS[unit], _SHAPES, a, b, bias, accumulate, what, numbers, halves, _row(out), beside, beside_row,
                  rows, columns, work_a, work_b, packed > 0)


def panels(b):
    """Address of all panels of b (uint16), if it is one that doesn't change for now; else 0."""
    k, n = b.shape
    return kept.panels(b, -(-k // BLOCK) * -(-n // BLOCK) * (BLOCK_BYTES // HALF), np.uint16, _pack)


def _pack(b, target):
    """The panels are those of a product without rows."""
    _compile()
    b = dense(b)
    pairs_product(AVX512, _SHAPES, b[:0].reshape(0, b.shape[0]), b, _NO_HALVES, False, SUMS, _NO_NUMBERS, _NO_HALVES, 0,
                  _NO_HALVES, 0, BLOCK, -(-b.shape[1] // BLOCK) * BLOCK, target, target, False)


@jit
def pairs_product(unit, shapes, a, b, bias, accumulate, what, numbers, halves, row, other, other_row, block_rows,
                  block_columns, a_panels, b_panels, is_packed):
    """See `run`. what: SUMS, into numbers (float32); or NOTHING, ADD or GELU, into halves and other (uint16): flat
    memory, `row` and `other_row` elements from one row to the next. a and b have unit stride along a side. a_panels,
    b_panels: addresses of memory for the panels of block_rows of a and of block_columns of b (multiples of 32), all of
    k deep. is_packed: b_panels holds those of all columns.
    """
    m, k = a.shape
    n = b.shape[1]
    zero = n - n
    blocks = -(-k // BLOCK)
    panel_bytes = blocks * BLOCK_BYTES
    a_row, a_k, b_k, b_column = a.strides[0], a.strides[1], b.strides[0], b.strides[1]
    a_along, b_along = a_k == HALF, b_k == HALF and b_column != HALF
    sums = np.empty(BLOCK * BLOCK, np.float32)
    starts = np.full(n + 2 * BLOCK, np.float32(-0.0), np.float32)  # adding -0 leaves +0 and -0 as they are
    for j in range(bias.size):
        starts[j] = widened(bias[j])
    direct = what == SUMS and not accumulate and bias.size == 0
    begin(unit, address(shapes))
    for j0 in range(0, n, block_columns):
        width = min(block_columns, n - j0)
        for j in range(0, 0 if is_packed else width, GROUP * BLOCK):
            for t in range(blocks):
                for jj in range(j, min(j + GROUP * BLOCK, width), BLOCK):
                    ahead = min(BLOCK, k - (t + 1) * BLOCK)
                    if ahead > 0:
                        ask(address(b) + (t + 1) * BLOCK * b_k + (j0 + jj) * b_column, b_column if b_along else b_k,
                            min(BLOCK, width - jj) if b_along else ahead)
                    pack_block(zero, False, b_along, address(b) + t * BLOCK * b_k + (j0 + jj) * b_column, b_column, b_k,
                               min(BLOCK, width - jj), min(BLOCK, k - t * BLOCK),
                               b_panels + jj // BLOCK * panel_bytes + t * BLOCK_BYTES)
        for i0 in range(0, m, block_rows):
            height = min(block_rows, m - i0)
            for i in range(0, height if m > block_rows or j0 == 0 else 0, BLOCK):
                for t in range(blocks):
                    pack_block(zero, True, a_along, address(a) + (i0 + i) * a_row + t * BLOCK * a_k, a_row, a_k,
                               min(BLOCK, height - i), min(BLOCK, k - t * BLOCK),
                               a_panels + i // BLOCK * panel_bytes + t * BLOCK_BYTES)
            for j in range(0, width, BLOCK):
                for i in range(0, height, BLOCK):
                    rows, columns = min(BLOCK, height - i), min(BLOCK, width - j)
                    first = (i0 + i) * row + j0 + j
                    panel_a, panel_b = a_panels + i // BLOCK * panel_bytes, b_panels + j // BLOCK * panel_bytes
                    if direct and rows == BLOCK and columns == BLOCK:
                        square(unit, panel_a, panel_b, blocks, address(numbers) + first * 4, row * 4)
                        continue
                    square(unit, panel_a, panel_b, blocks, address(sums), BLOCK * 4)
                    _finish(what, accumulate, sums, starts[j0 + j:], rows, columns, numbers, halves, first, row,
                            other, (i0 + i) * other_row + j0 + j, other_row)
    end(unit)


@jit(fastmath=VECTOR_FLAGS)
def _finish(what, accumulate, sums, starts, rows, columns, numbers, halves, first, row, other, other_first, other_row):
    """The last pass over a block of sums [32, 32]; starts: what is added to each column, 32 times -0 at its end."""
    stand_alone(row)
    wide_vectors()
    at_sums, at_starts, none = address(sums), address(starts), row - row
    at, at_other = address(halves) + first * HALF, address(other) + other_first * HALF
    if what == SUMS:
        for i in range(rows):
            x, y = sums[i * BLOCK:i * BLOCK + columns], numbers[first + i * row:first + i * row + columns]
            if accumulate:
                for j in range(columns):
                    y[j] += x[j] + starts[j]
            else:
                for j in range(columns):
                    y[j] = x[j] + starts[j]
        return
    for i in range(rows):
        if what == ADD:
            round_line_with(at_sums + i * BLOCK * 4, at_starts, at_other + i * other_row * HALF, at + i * row * HALF,
                            columns)
        else:
            round_line(at_sums + i * BLOCK * 4, at_starts, none, at + i * row * HALF, columns)
    if what == GELU:
        for j in range(rows * BLOCK):
            sums[j] = erf_value(sums[j])
        for i in range(rows):
            round_line(at_sums + i * BLOCK * 4, at_starts + (starts.size - BLOCK) * 4, none,
                       at_other + i * other_row * HALF, columns)


@once
def _compile():
    word, line = types.int64, types.Array(types.uint16, 1, "C")
    shapes, numbers = types.Array(types.uint8, 1, "C", readonly=True), types.Array(types.float32, 1, "C")
    operand, bias = (types.Array(types.uint16, dims, "A", readonly=True) for dims in (2, 1))
    compile_only(pairs_product, word, shapes, operand, operand, bias, types.boolean, word, numbers, line, word, line, word,
                 word, word, word, word, types.boolean)


def _row(x):
    return x.strides[0] // x.itemsize


_memory = ThreadMemory()
_NO_HALVES, _NO_NUMBERS = np.empty(0, np.uint16), np.empty(0, np.float32)
_SHAPES = np.frombuffer(tile_shapes(), np.uint8)
