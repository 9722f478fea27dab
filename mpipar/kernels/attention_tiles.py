"""What the forward and the backward pass of attention share: packed operands, and one column of tiles of a
product.

Addresses, byte steps and packed panels are those of `vector.py`; nothing is checked. None of these functions
is copied into its callers (`stand_alone`), and none is to be given a constant argument: both would multiply
the time to compile.
"""
import numpy as np

from .cache import jit
from .gemm_pack import pack_panel
from .vector import TILE_ROWS, address, lanes, size_of, stand_alone, tile

BLOCK = 64  # queries and keys of a tile of the attention matrix


@jit
def pack_lines(zero, source, line_step, k_step, lines, k, target):
    """The left operand of a product: panels of at most TILE_ROWS lines, nearly equal, one behind the
    other."""
    stand_alone(zero)
    panels = -(-lines // TILE_ROWS)
    left = lines
    for q in range(panels):
        rows = lines // panels + (1 if q < lines % panels else 0)
        left -= rows
        pack_panel(zero, source, line_step, k_step, rows, left, k, rows, target)
        source += rows * line_step
        target += rows * k * size_of(zero)


@jit
def pack_columns(zero, source, column_step, k_step, columns, k, target):
    """The right operand: panels of two vectors of columns, the last one filled up, one behind the other."""
    stand_alone(zero)
    panel = 2 * lanes(zero)
    for j in range(0, columns, panel):
        here = min(panel, columns - j)
        pack_panel(zero, source + j * column_step, column_step, k_step, here, columns - j - here, k, panel, target)
        target += panel * k * size_of(zero)


@jit
def column_of_tiles(zero, a, a_depth, lines, lo, hi, b, b_step, c, c_step, columns, first, depth, accumulate):
    """c[lo .. hi, columns] (+)= A[:, first .. first + depth] @ B for at most two vectors of columns.

    A: `lines` x `a_depth`, packed by `pack_lines` at address a. B: rows first .. of it are at b, b + b_step,
    ... . Whole panels of A are used: some lines before lo and after hi may be written too."""
    stand_alone(zero)
    size = size_of(zero)
    panels = -(-lines // TILE_ROWS)
    start, done = np.int64(0), 0
    for q in range(panels):
        rows = lines // panels + (1 if q < lines % panels else 0)
        if done + rows > lo and done < hi:
            tile(zero, a + (done * a_depth + first * rows) * size, b, b_step, c + done * c_step, c_step, depth, rows,
                 columns, start, accumulate)
        done += rows


@jit
def write_transposed(zero, source, step, columns, rows, work, out, out_row):
    """out[r * out_row + d] = source[d, r] for d < columns, r < rows; source: address, lines `step` bytes
    apart.

    work: an array of rows * (columns rounded up to whole vectors) elements and a vector."""
    stand_alone(zero)
    vector = lanes(zero)
    width = -(-columns // vector) * vector
    pack_panel(zero, source, step, size_of(zero), columns, width - columns, rows, width, address(work))
    for r in range(rows):
        line, target = work[r * width:r * width + columns], out[r * out_row:r * out_row + columns]
        for d in range(line.size):
            target[d] = line[d]


@jit
def aligned(like, elements):
    """Uninitialised array of `elements` of like's type, beginning on a cache line."""
    zero = like.dtype.type(0)
    stand_alone(zero)
    spare = 64 // size_of(zero)
    memory = np.empty(elements + spare, like.dtype)
    skip = (-address(memory) % 64) // size_of(zero)
    return memory[skip:skip + elements]
