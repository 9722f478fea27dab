"""Sums of activations, biases and residuals, and the gradient of a bias. The meaning of each function is in
`plain.py`."""
import numpy as np

from .blocks import by_blocks, read, whole, write
from .cache import jit
from .dtypes import is_bfloat16
from .polynomials import SUM_FLAGS
from .threads import parallel_for
from .views import begin_together, ranges, same_dtype, same_shape, source, target

GRAIN = 65536  # elements of a task
COLUMNS = 256  # of a task of column_sum
BLOCK_ROWS = 64  # rows that are summed on their own before they join the total


def add_bias(x, bias, out):
    """out[..., n] = x[..., n] + bias[n]; out may be x."""
    if is_bfloat16(x.dtype):
        columns = _check_bias(x, bias)
        by_blocks(add_bias, read(source(x, columns)), whole(bias), write(target(out, columns)))
        return out
    same_dtype(x, bias, out)
    same_shape(x, out)
    columns = _check_bias(x, bias)
    a, c, y = source(x, columns), source(bias), target(out, columns)
    cuts = _row_ranges(a)
    if begin_together(x, out):
        parallel_for(_add_bias_in_place, [(y[cut], c) for cut in cuts])
    else:
        parallel_for(_add_bias, [(a[cut], c, y[cut]) for cut in cuts])
    return out


def add(a, b, out):
    """out = a + b; out may be either."""
    if is_bfloat16(a.dtype):
        same_shape(a, b, out)
        by_blocks(add, read(source(a)), read(source(b)), write(target(out)))
        return out
    same_dtype(a, b, out)
    same_shape(a, b, out)
    y = target(out)
    cuts = ranges(y.size, GRAIN)
    if begin_together(a, out) or begin_together(b, out):
        other = source(b if begin_together(a, out) else a)
        parallel_for(_add_to, [(other[cut], y[cut]) for cut in cuts])
    else:
        x, z = source(a), source(b)
        parallel_for(_add, [(x[cut], z[cut], y[cut]) for cut in cuts])
    return out


def scale(x, factor, out):
    """out = factor * x; out may be x. factor: a number, taken in the dtype of sums over x."""
    same_shape(x, out)
    if is_bfloat16(x.dtype):
        by_blocks(scale, read(source(x)), factor, write(target(out)))
    else:
        np.multiply(x, same_dtype(x, out).type(factor), out=out)
    return out


def bias_residual(x, bias, residual, out):
    """out[..., n] = (x + residual)[..., n] + bias[n], the end of a block; out may be x or residual."""
    if is_bfloat16(x.dtype):
        columns = _check_bias(x, bias)
        by_blocks(bias_residual, read(source(x, columns)), whole(bias), read(source(residual, columns)),
                  write(target(out, columns)))
        return out
    same_dtype(x, bias, residual, out)
    same_shape(x, residual, out)
    columns = _check_bias(x, bias)
    c, y = source(bias), target(out, columns)
    cuts = _row_ranges(y)
    if begin_together(x, out) or begin_together(residual, out):
        other = source(residual if begin_together(x, out) else x, columns)
        parallel_for(_bias_residual_to, [(other[cut], c, y[cut]) for cut in cuts])
    else:
        a, b = source(x, columns), source(residual, columns)
        parallel_for(_bias_residual, [(a[cut], c, b[cut], y[cut]) for cut in cuts])
    return out


def column_sum(dy, out, *, accumulate=True):
    """out[n] (+)= sum over r of dy[r, n]: the gradient of a bias. dy: [R, N], C-contiguous; out: [N],
    float32 where dy is bfloat16.

    Rows are summed in blocks of 64, the blocks' sums in float64: the rounding error does not grow with R."""
    if is_bfloat16(dy.dtype):
        if not accumulate:
            out.fill(0)
        by_blocks(column_sum, read(dy), out, ordered=True)
        return out
    same_dtype(dy, out)
    rows, columns = dy.shape
    if out.shape != (columns,):
        raise ValueError(f"column sums of {dy.shape} go into {(columns,)}, not {out.shape}")
    a, y = source(dy, columns), target(out)
    parallel_for(_column_sum, [(a, y[lo:lo + COLUMNS], lo, accumulate) for lo in range(0, columns, COLUMNS)])
    return out


def warm(dtype):
    """Compiles or loads every kernel of this file for a dtype."""
    x, y, z, bias = (np.zeros((2, 4), dtype) for _ in range(4))
    bias = bias[0]
    for out in (x, z):
        add_bias(x, bias, out)
        add(x, y, out)
        bias_residual(x, bias, y, out)
    column_sum(x, bias)


def _check_bias(x, bias):
    if bias.shape != x.shape[-1:]:
        raise ValueError(f"a bias of {bias.shape} for activations of {x.shape}: give one of {x.shape[-1:]}")
    return bias.size


def _row_ranges(x):
    return ranges(x.shape[0], max(1, GRAIN // max(1, x.shape[1])))


@jit
def _add_bias(x, bias, out):
    for r in range(x.shape[0]):
        for n in range(x.shape[1]):
            out[r, n] = x[r, n] + bias[n]


@jit
def _add_bias_in_place(x, bias):
    for r in range(x.shape[0]):
        for n in range(x.shape[1]):
            x[r, n] += bias[n]


@jit
def _add(a, b, out):
    for i in range(out.size):
        out[i] = a[i] + b[i]


@jit
def _add_to(a, out):
    for i in range(out.size):
        out[i] += a[i]


@jit
def _bias_residual(x, bias, residual, out):
    for r in range(x.shape[0]):
        for n in range(x.shape[1]):
            out[r, n] = (x[r, n] + residual[r, n]) + bias[n]


@jit
def _bias_residual_to(x, bias, out):
    for r in range(x.shape[0]):
        for n in range(x.shape[1]):
            out[r, n] = (x[r, n] + out[r, n]) + bias[n]


@jit(fastmath=SUM_FLAGS)
def _column_sum(dy, out, first, accumulate):
    rows, columns = dy.shape[0], out.size
    total, block = np.zeros(columns), np.zeros(columns, dy.dtype)
    for start in range(0, rows, BLOCK_ROWS):
        block[:] = 0
        for r in range(start, min(start + BLOCK_ROWS, rows)):
            row = dy[r, first:first + columns]
            for n in range(columns):
                block[n] += row[n]
        for n in range(columns):
            total[n] += block[n]
    for n in range(columns):
        out[n] = (out[n] if accumulate else 0.0) + total[n]
