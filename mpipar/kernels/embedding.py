"""Rows of an embedding table that may be divided over ranks, and learned positions. Meaning: `plain.py`."""
import numpy as np

from .blocks import by_blocks, read, update, whole
from .cache import jit
from .dtypes import bits, is_bfloat16, sums_dtype
from .threads import parallel_for
from .views import ranges, same_dtype, source, target

GRAIN = 65536  # elements of a task
COLUMNS = 64  # smallest width of a task of embedding_backward


def embedding_forward(tokens, weight, lo, out):
    """out[r] = weight[tokens[r] - lo], zero where the token's row is in another shard.

    tokens: int64 [R]; weight: [Vlocal, D], rows lo .. lo + Vlocal of the whole; out: [R, D]."""
    same_dtype(weight, out, bfloat16=True)
    _check(tokens, weight, out)
    weight, bit_rows = bits(weight), bits(out)  # a row is copied as it is
    columns = weight.shape[1]
    t, w, y = _indices(tokens), source(weight, columns), target(bit_rows, columns)
    parallel_for(_forward, [(t[cut], w, int(lo), y[cut]) for cut in _row_ranges(out)])
    return out


def embedding_backward(tokens, dy, lo, dweight):
    """dweight[tokens[r] - lo] += dy[r] for the tokens of this shard, in the order of the rows.

    dweight: float32 where dy is bfloat16."""
    if is_bfloat16(dy.dtype):
        by_blocks(embedding_backward, read(tokens), read(dy), lo, dweight, ordered=True)
        return dweight
    same_dtype(dy, dweight)
    _check(tokens, dweight, dy)
    columns = dy.shape[1]
    t, d, w = _indices(tokens), source(dy, columns), target(dweight, columns)
    parallel_for(_backward, [(t, d, int(lo), w, cut.start, cut.stop) for cut in ranges(columns, COLUMNS)])
    return dweight


def add_positions(x, positions):
    """x[b, t] += positions[t], in place. x: [B, T, D]; positions: [Tmax, D], Tmax >= T."""
    if is_bfloat16(x.dtype):
        by_blocks(add_positions, update(x), whole(_positions_of(x, positions)))
        return x
    same_dtype(x, positions)
    table = _positions_of(x, positions)
    y, p = target(x, x.shape[2]), source(table, x.shape[2])
    parallel_for(_add_positions, [(y[cut], p, cut.start) for cut in _row_ranges(y)])
    return x


def positions_backward(dy, dpositions):
    """dpositions[t] += sum over b of dy[b, t]. dy: [B, T, D]; dpositions: [Tmax, D],
    float32 where dy is bfloat16."""
    if is_bfloat16(dy.dtype):
        by_blocks(positions_backward, read(dy), dpositions, ordered=True)
        return dpositions
    same_dtype(dy, dpositions)
    table = _positions_of(dy, dpositions)
    d, p = source(dy, dy.shape[2]), target(table, dy.shape[2])
    parallel_for(_positions_backward, [(d, p[cut], cut.start, dy.shape[1]) for cut in _row_ranges(p)])
    return dpositions


def warm(dtype):
    """Compiles or loads every kernel of this file for a dtype."""
    tokens, x, y = np.zeros(2, np.int64), np.zeros((2, 4), dtype), np.zeros((2, 4), dtype)
    sums = np.zeros((2, 4), sums_dtype(dtype))
    embedding_forward(tokens, x, 0, y)
    embedding_backward(tokens, x, 0, sums)
    add_positions(x[None], y)
    positions_backward(x[None], sums)


def _row_ranges(x):
    return ranges(x.shape[0], max(1, GRAIN // max(1, x.shape[1])))


def _check(tokens, table, rows):
    if rows.shape != (*tokens.shape, table.shape[1]) or tokens.ndim != 1:
        raise ValueError(f"tokens {tokens.shape} of a table {table.shape} give rows of "
                         f"{(tokens.size, table.shape[1])}, not {rows.shape}")


def _positions_of(x, positions):
    if x.ndim != 3 or positions.ndim != 2 or positions.shape[1] != x.shape[2] or len(positions) < x.shape[1]:
        raise ValueError(f"activations {x.shape} need positions of at least {x.shape[1:]}, "
                         f"not {positions.shape}")
    return positions[:x.shape[1]]


def _indices(tokens):
    return source(tokens.astype(np.int64, copy=False))


@jit
def _forward(tokens, weight, lo, out):
    columns = out.shape[1]
    for r in range(tokens.size):
        local = tokens[r] - lo
        if 0 <= local < weight.shape[0]:
            for d in range(columns):
                out[r, d] = weight[local, d]
        else:
            for d in range(columns):
                out[r, d] = 0


@jit
def _backward(tokens, dy, lo, dweight, first, last):
    for r in range(tokens.size):
        local = tokens[r] - lo
        if 0 <= local < dweight.shape[0]:
            row, gradient = dweight[local, first:last], dy[r, first:last]
            for d in range(row.size):
                row[d] += gradient[d]


@jit
def _add_positions(x, positions, first):
    tokens = positions.shape[0]
    for r in range(x.shape[0]):
        t = (first + r) % tokens
        for d in range(x.shape[1]):
            x[r, d] += positions[t, d]


@jit
def _positions_backward(dy, dpositions, first, tokens):
    batch = dy.shape[0] // tokens
    for t in range(dpositions.shape[0]):
        for b in range(batch):
            for d in range(dpositions.shape[1]):
                dpositions[t, d] += dy[b * tokens + first + t, d]
