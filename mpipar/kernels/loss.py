"""Softmax cross-entropy over a vocabulary that may be divided over ranks, and the sum of squares.

Each function does the part of one shard; the caller combines the rows' results between the calls (a maximum,
then sums). Meaning: `plain.py`.
"""
import numpy as np

from .blocks import by_blocks, read, write
from .cache import jit
from .dtypes import is_bfloat16
from .polynomials import SUM_FLAGS, exp
from .threads import parallel_for
from .views import begin_together, ranges, same_dtype, same_shape, source, target
from .wide import wide_vectors

GRAIN = 32768  # elements of a task
LANES = 32  # columns whose maxima run side by side
BLOCK = 4096  # elements whose squares are summed on their own


def row_max(logits, out):
    """out[r] = the largest of logits[r, :]; -inf if this shard has no column. logits: [R, Vlocal]; out:
    [R], float32 where logits are bfloat16 (as are all numbers of a row below)."""
    if is_bfloat16(logits.dtype):
        by_blocks(row_max, read(logits), write(out))
        return out
    same_dtype(logits, out)
    a, y = source(logits, logits.shape[1]), target(out)
    _check_rows(logits, out)
    parallel_for(_row_max, [(a[cut], y[cut]) for cut in _row_ranges(a)])
    return out


def cross_entropy_sums(logits, maximum, targets, lo, sum_exp, target_logit):
    """sum_exp[r] = sum of exp(logits[r] - maximum[r]) over this shard; target_logit[r] = logits[r, targets[r]
    - lo].

    logits: [R, Vlocal], columns lo .. lo + Vlocal of the whole. targets: int64 [R]; target_logit is 0 where
    the target lies in another shard or is negative (ignored). With both summed over the shards, the loss of a
    row is log(sum_exp) + maximum - target_logit. Megatron-LM (Shoeybi et al. 2019), section 3."""
    if is_bfloat16(logits.dtype):
        by_blocks(cross_entropy_sums, read(logits), read(maximum), read(targets), lo, write(sum_exp),
                  write(target_logit))
        return
    same_dtype(logits, maximum, sum_exp, target_logit)
    _check_rows(logits, maximum, targets, sum_exp, target_logit)
    a, m, t = source(logits, logits.shape[1]), source(maximum), _indices(targets)
    y, z = target(sum_exp), target(target_logit)
    parallel_for(_sums, [(a[cut], m[cut], t[cut], int(lo), y[cut], z[cut]) for cut in _row_ranges(a)])


def cross_entropy_backward(logits, maximum, sum_exp, targets, lo, scale, dlogits):
    """dlogits = (softmax - onehot(target)) * scale, zero in rows whose target is ignored; dlogits may be
    logits.

    maximum, sum_exp: [R], over the whole vocabulary; the rest as for `cross_entropy_sums`."""
    if is_bfloat16(logits.dtype):
        by_blocks(cross_entropy_backward, read(logits), read(maximum), read(sum_exp), read(targets), lo, scale,
                  write(dlogits))
        return dlogits
    dtype = same_dtype(logits, maximum, sum_exp, dlogits)
    same_shape(logits, dlogits)
    _check_rows(logits, maximum, targets, sum_exp)
    m, s, t = source(maximum), source(sum_exp), _indices(targets)
    y, lo, number = target(dlogits, dlogits.shape[1]), int(lo), dtype.type(scale)
    cuts = _row_ranges(y)
    if begin_together(logits, dlogits):
        parallel_for(_backward_in_place, [(m[cut], s[cut], t[cut], lo, number, y[cut]) for cut in cuts])
    else:
        a = source(logits, logits.shape[1])
        parallel_for(_backward, [(a[cut], m[cut], s[cut], t[cut], lo, number, y[cut]) for cut in cuts])
    return dlogits


def sum_squares(x):
    """Sum of squares of all elements, as a float. Summed in float64, in blocks, in one order for any number
    of threads."""
    if is_bfloat16(x.dtype):
        sums = []
        by_blocks(lambda block: sums.append(sum_squares(block)), read(source(x)), ordered=True)
        return float(sum(sums))
    same_dtype(x)
    a = source(x)
    partial = np.empty(-(-a.size // BLOCK))
    parallel_for(_sum_squares, [(a[cut], partial[cut.start // BLOCK:-(-cut.stop // BLOCK)])
                                for cut in ranges(a.size, 16 * BLOCK)])
    return float(partial.sum())


def warm(dtype):
    """Compiles or loads every kernel of this file for a dtype."""
    x, row, targets = np.zeros((2, 4), dtype), np.ones(2, dtype), np.zeros(2, np.int64)
    row_max(x, row)
    cross_entropy_sums(x, row, targets, 0, row.copy(), row)
    cross_entropy_backward(x, row, row, targets, 0, 1.0, x.copy())
    cross_entropy_backward(x, row, row, targets, 0, 1.0, x)
    sum_squares(x)


def _row_ranges(x):
    return ranges(x.shape[0], max(1, GRAIN // max(1, x.shape[1])))


def _check_rows(logits, *per_row):
    for array in per_row:
        if array.shape != logits.shape[:1]:
            raise ValueError(f"logits of {logits.shape} and a row array of {array.shape}: "
                             "give one number for each row")


def _indices(targets):
    return source(targets.astype(np.int64, copy=False))


@jit
def _row_max(logits, out):
    # Numba's comparisons carry no leave to reorder a running maximum, so the columns run side by side in
    # LANES of them. A NaN may be passed over here: its row ends as NaN through the sum of exponentials.
    wide_vectors()
    rows, columns = logits.shape
    lowest = logits.dtype.type(-np.inf)
    top = np.empty(LANES, logits.dtype)
    for r in range(rows):
        top[:] = lowest
        for j in range(0, columns - columns % LANES, LANES):
            part = logits[r, j:j + LANES]
            for i in range(LANES):
                top[i] = part[i] if part[i] > top[i] else top[i]
        largest = lowest
        for i in range(LANES):
            largest = top[i] if top[i] > largest else largest
        for j in range(columns - columns % LANES, columns):
            largest = logits[r, j] if logits[r, j] > largest else largest
        out[r] = largest


@jit(fastmath=SUM_FLAGS)
def _sums(logits, maximum, targets, lo, sum_exp, target_logit):
    wide_vectors()
    zero = logits.dtype.type(0)
    for r in range(logits.shape[0]):
        largest, total = maximum[r], zero
        for j in range(logits.shape[1]):
            total += exp(logits[r, j] - largest)
        sum_exp[r] = total
        column = targets[r] - lo
        here = targets[r] >= 0 and 0 <= column < logits.shape[1]
        target_logit[r] = logits[r, column] if here else zero


# loss_r = log sum_j exp(z_rj) - z_r,target:  d loss_r / d z_rj = softmax_rj - [j = target]

@jit(fastmath=SUM_FLAGS)
def _backward(logits, maximum, sum_exp, targets, lo, scale, dlogits):
    wide_vectors()
    for r in range(logits.shape[0]):
        if targets[r] < 0:
            dlogits[r, :] = 0
            continue
        largest, factor = maximum[r], scale / sum_exp[r]
        for j in range(logits.shape[1]):
            dlogits[r, j] = exp(logits[r, j] - largest) * factor
        column = targets[r] - lo
        if 0 <= column < logits.shape[1]:
            dlogits[r, column] -= scale


@jit(fastmath=SUM_FLAGS)
def _backward_in_place(maximum, sum_exp, targets, lo, scale, logits):
    wide_vectors()
    for r in range(logits.shape[0]):
        if targets[r] < 0:
            logits[r, :] = 0
            continue
        largest, factor = maximum[r], scale / sum_exp[r]
        for j in range(logits.shape[1]):
            logits[r, j] = exp(logits[r, j] - largest) * factor
        column = targets[r] - lo
        if 0 <= column < logits.shape[1]:
            logits[r, column] -= scale


@jit(fastmath=SUM_FLAGS)
def _sum_squares(x, partial):
    for block in range(partial.size):
        piece = x[block * BLOCK:(block + 1) * BLOCK]
        total = 0.0
        for i in range(piece.size):
            value = np.float64(piece[i])
            total += value * value
        partial[block] = total
