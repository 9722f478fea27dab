"""Causal attention without the T x T matrix: tiles of it are made, used and forgotten. Meaning: `plain.py`.

Dao, Fu, Ermon, Rudra and Re, "FlashAttention", 2022: a running maximum and sum of each row's exponentials
make the softmax exact over tiles; the backward pass makes each tile's probabilities again from the saved log
of those sums.
"""
import math

import numpy as np

from .attention_backward import backward_head
from .attention_tiles import BLOCK, aligned, column_of_tiles, pack_columns, pack_lines, write_transposed
from .bfloat16 import rounded, widened
from .cache import jit
from .dtypes import bits, is_bfloat16, sums_dtype
from .polynomials import VECTOR_FLAGS, exp
from .threads import parallel_for
from .vector import address, lanes, size_of, stand_alone
from .views import ranges, same_dtype, same_shape
from .wide import wide_vectors


def attention_forward(q, k, v, out, lse):
    """out = softmax(q k^T / sqrt(hd)) v, causal; lse[b, h, t] is the log of the softmax's denominator.

    q, k, v, out: [B, T, H, hd], float32, float64 or bfloat16, unit stride in hd and any other strides, so that
    slices of one [B, T, 3, H, hd] array serve as they are; lse: [B, H, T], C-contiguous, float32 where they are
    bfloat16. Extra memory: O(T hd) for each thread."""
    dtype = _numbers(lse, q, k, v, out)
    B, T, H, width = _check(lse, q, k, v, out)
    if T:
        factor, heads = dtype.type(1 / math.sqrt(max(width, 1))), _heads([q, k, v], [out])
        some = _forward_some_bfloat16 if is_bfloat16(q.dtype) else _forward_some
        parallel_for(some, [(*heads, lse, cut.start, cut.stop, width, factor) for cut in ranges(B * H, 1)])
    return out


def attention_backward(q, k, v, out, lse, dout, dq, dk, dv):
    """Writes dq, dk, dv from the arrays of the forward pass and dout, all [B, T, H, hd] as there."""
    dtype = _numbers(lse, q, k, v, out, dout, dq, dk, dv)
    B, T, H, width = _check(lse, q, k, v, out, dout, dq, dk, dv)
    if T:
        factor, heads = dtype.type(1 / math.sqrt(max(width, 1))), _heads([q, k, v, out, dout], [dq, dk, dv])
        some = _backward_some_bfloat16 if is_bfloat16(q.dtype) else _backward_some
        parallel_for(some, [(*heads, lse, cut.start, cut.stop, width, factor) for cut in ranges(B * H, 1)])


def warm(dtype):
    """Compiles or loads every kernel of this file for a dtype."""
    x = [np.zeros((1, 2, 1, 4), dtype) for _ in range(8)]
    lse = np.zeros((1, 1, 2), sums_dtype(dtype))
    attention_forward(*x[:4], lse)
    attention_backward(*x[:4], lse, *x[4:])


def _heads(read, written):
    """The arrays [B, T, H, hd] as flat memory, and [n, 3] of numbers: how far the next sample of each lies, the next
    head and the next token."""
    flats, steps = [], []
    for x in (*read, *written):
        flat, *step = _flat(bits(x), len(flats) >= len(read))
        flats.append(flat)
        steps.append(step)
    return tuple(flats), np.array(steps)


def _flat(x, is_written):
    size = x.itemsize
    plain = x.size == 0 or (
        x.flags.writeable and all(step >= 0 and step % size == 0 for step in x.strides)
        and (x.strides[3] == size or x.shape[3] < 2))
    if is_written and not plain:
        raise ValueError(f"a result of attention has strides {x.strides}: give a writable view of unit stride in hd")
    if not plain:
        x = np.array(x, order="C")
    length = 1 + sum((n - 1) * step // size for n, step in zip(x.shape, x.strides)) if x.size else 0
    sample, token, head = (step // size for step in x.strides[:3])
    return np.lib.stride_tricks.as_strided(x, (length,), (size,)), sample, head, token


def _numbers(lse, *heads):
    """The dtype to compute in; ValueError unless the heads are of one dtype and lse of that of its sums."""
    dtype = sums_dtype(same_dtype(*heads, bfloat16=True))
    if lse.dtype != dtype:
        raise ValueError(f"lse of {lse.dtype} for heads of {heads[0].dtype}: give {dtype}")
    return dtype


def _check(lse, *heads):
    same_shape(*heads)
    if heads[0].ndim != 4:
        raise ValueError(f"attention of an array of shape {heads[0].shape}: give [B, T, H, hd]")
    B, T, H, width = heads[0].shape
    if lse.shape != (B, H, T) or not lse.flags.carray:
        raise ValueError(f"lse of shape {lse.shape}: give a C-contiguous array of {(B, H, T)}")
    return B, T, H, width


@jit(inline=True)
def _place(i, steps, lse):
    """Where head i begins in each array, how far its next token lies there, and its part of lse."""
    b, h = i // lse.shape[1], i % lse.shape[1]
    return b * steps[:, 0] + h * steps[:, 1], steps[:, 2], lse[b, h]


@jit
def _forward_some(x, steps, lse, lo, hi, width, factor):
    """Heads lo to hi - 1 of [B, H] flattened; x: q, k, v, out; x and steps: see `_heads`."""
    for i in range(lo, hi):
        at, row, sums = _place(i, steps, lse)
        _forward_head(x[0][at[0]:], x[1][at[1]:], x[2][at[2]:], x[3][at[3]:], sums, row[0], row[1], row[2], row[3], width,
                      factor)


@jit
def _backward_some(x, steps, lse, lo, hi, width, factor):
    """The same; x: q, k, v, out, dout, dq, dk, dv."""
    for i in range(lo, hi):
        at, row, sums = _place(i, steps, lse)
        backward_head(x[0][at[0]:], x[1][at[1]:], x[2][at[2]:], x[3][at[3]:], x[4][at[4]:], x[5][at[5]:], x[6][at[6]:],
                      x[7][at[7]:], sums, row[0], row[1], row[2], row[3], row[4], row[5], row[6], row[7], width, factor)


@jit
def _forward_some_bfloat16(x, steps, lse, lo, hi, width, factor):
    """`_forward_some` of bfloat16: each head as float32 in memory of this call, then rounded."""
    heads = np.empty((4, lse.shape[2] * width), np.float32)
    for i in range(lo, hi):
        at, row, sums = _place(i, steps, lse)
        for j in range(3):
            _widen_rows(x[j][at[j]:], row[j], width, heads[j])
        _forward_head(heads[0], heads[1], heads[2], heads[3], sums, width, width, width, width, width, factor)
        _round_rows(heads[3], x[3][at[3]:], row[3], width)


@jit
def _backward_some_bfloat16(x, steps, lse, lo, hi, width, factor):
    heads = np.empty((8, lse.shape[2] * width), np.float32)
    for i in range(lo, hi):
        at, row, sums = _place(i, steps, lse)
        for j in range(5):
            _widen_rows(x[j][at[j]:], row[j], width, heads[j])
        backward_head(heads[0], heads[1], heads[2], heads[3], heads[4], heads[5], heads[6], heads[7], sums, width,
                      width, width, width, width, width, width, width, width, factor)
        for j in range(5, 8):
            _round_rows(heads[j], x[j][at[j]:], row[j], width)


@jit
def _forward_head(q, k, v, out, lse, q_row, k_row, v_row, out_row, width, factor):
    # Tiles stand transposed, [keys, queries]: the softmax then runs along vectors of queries without any sum
    # across a vector, and the probabilities are the right operand of O^T = V^T P^T just where they lie.
    tokens = lse.size
    zero = q.dtype.type(0)
    size, panel = size_of(zero), 2 * lanes(zero)
    step = BLOCK * size
    begin, no = np.int64(0), np.bool_(False)  # not constants: those would be compiled for anew
    wide = -(-width // panel) * panel
    keys, values = aligned(q, tokens * width + panel), aligned(q, tokens * width + panel)
    queries = aligned(q, BLOCK * width + panel)
    scores, sums = aligned(q, BLOCK * BLOCK + panel), aligned(q, width * BLOCK + panel)
    work = aligned(q, BLOCK * wide + panel)
    largest, total, shrink = aligned(q, BLOCK + panel), aligned(q, BLOCK + panel), aligned(q, BLOCK + panel)
    keys_at, values_at, scores_at, sums_at = address(keys), address(values), address(scores), address(sums)
    for j0 in range(0, tokens, BLOCK):
        n = min(BLOCK, tokens - j0)
        at, k_step, v_step = j0 * width * size, k_row * size, v_row * size
        pack_lines(zero, address(k) + j0 * k_step, k_step, size, n, width, keys_at + at)
        pack_lines(zero, address(v) + j0 * v_step, size, v_step, width, n, values_at + at)
    for i0 in range(0, tokens, BLOCK):
        rows = min(BLOCK, tokens - i0)
        pack_columns(zero, address(q) + i0 * q_row * size, q_row * size, size, rows, width, address(queries))
        for i in range(queries.size):
            queries[i] *= factor
        largest[:] = -np.inf
        total[:] = 0
        for j0 in range(0, i0 + 1, BLOCK):
            n = min(BLOCK, tokens - j0)
            diagonal, adding = j0 == i0, j0 > 0
            at = j0 * width * size
            for i in range(0, rows, panel):
                columns = min(panel, rows - i)
                seen = min(n, i + columns) if diagonal else n
                column_of_tiles(zero, keys_at + at, width, n, begin, seen,
                                address(queries) + i * width * size, panel * size,
                                scores_at + i * size, step, columns, begin, width, no)
            if _softmax_tile(scores, rows, n, diagonal, largest, total, shrink) and adding:
                for d in range(width):
                    line = sums[d * BLOCK:d * BLOCK + rows]
                    for i in range(line.size):
                        line[i] *= shrink[i]
            for i in range(0, rows, panel):
                columns = min(panel, rows - i)
                seen = min(n, i + columns) if diagonal else n
                column_of_tiles(zero, values_at + at, n, width, begin, width, scores_at + i * size, step,
                                sums_at + i * size, step, columns, begin, seen, adding)
        for i in range(rows):
            lse[i0 + i] = largest[i] + math.log(total[i])
            shrink[i] = q.dtype.type(1) / total[i]
        for d in range(width):
            line = sums[d * BLOCK:d * BLOCK + rows]
            for i in range(line.size):
                line[i] *= shrink[i]
        write_transposed(zero, sums_at, step, width, rows, work, out[i0 * out_row:], out_row)


@jit
def _widen_rows(x, row, width, out):
    for r in range(out.size // max(width, 1)):
        a, y = x[r * row:r * row + width], out[r * width:(r + 1) * width]
        for d in range(y.size):
            y[d] = widened(a[d])


@jit
def _round_rows(x, out, row, width):
    for r in range(x.size // max(width, 1)):
        a, y = x[r * width:(r + 1) * width], out[r * row:r * row + width]
        for d in range(y.size):
            y[d] = rounded(a[d])


@jit(fastmath=VECTOR_FLAGS)
def _softmax_tile(scores, rows, keys, diagonal, largest, total, shrink):
    """scores[keys, rows] become exponentials relative to the running maximum, total their running sum.

    shrink[i] = exp(old maximum - new one), by which earlier sums are to be multiplied; returns whether any is
    not 1."""
    stand_alone(scores.dtype.type(0))
    wide_vectors()
    # Columns beyond `rows`, up to the end of a whole row, hold nothing that is used: they keep the loops free
    # of remainders.
    count = BLOCK if rows > BLOCK // 2 else rows
    masked = scores.dtype.type(-np.inf)
    top, sums = largest[:count], total[:count]
    for i in range(count):
        shrink[i] = top[i]
    for j in range(keys):
        line, lo = scores[j * BLOCK:j * BLOCK + count], j if diagonal else 0
        for i in range(line.size):
            value = line[i] if i >= lo else masked
            line[i] = value
            top[i] = top[i] if top[i] > value else value
    changed = 0
    for i in range(rows):
        changed += 1 if shrink[i] != top[i] else 0
        shrink[i] = exp(shrink[i] - top[i])
        sums[i] *= shrink[i]
    for j in range(keys):
        line = scores[j * BLOCK:j * BLOCK + count]
        for i in range(line.size):
            value = exp(line[i] - top[i])
            line[i] = value
            sums[i] += value
    return changed > 0
