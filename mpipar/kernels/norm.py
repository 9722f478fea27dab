"""Layer normalisation over the last axis. The meaning of each function is in `plain.py`."""
import numpy as np

from .blocks import by_blocks, read, whole, write
from .cache import jit
from .dtypes import is_bfloat16
from .polynomials import SUM_FLAGS, VECTOR_FLAGS, inlined
from .threads import parallel_for
from .views import ranges, same_dtype, same_shape, source, target
from .wide import wide_vectors

BLOCK_ROWS = 32  # rows whose share of dgamma and dbeta is summed on its own, whatever the number of threads


def layernorm_forward(x, gamma, beta, out, mean, rstd, *, eps=1e-5):
    """out[r] = (x[r] - mean[r]) * rstd[r] * gamma + beta, rstd = 1 / sqrt(biased variance + eps).

    Ba, Kiros and Hinton 2016. x, out: [R, D] (out may be x); gamma, beta: [D]; mean, rstd: [R], kept for the
    backward pass (float32 where x is bfloat16). Mean and variance take two passes over a row, which the first
    has brought into the cache."""
    if is_bfloat16(x.dtype):
        by_blocks(layernorm_forward, read(x), whole(gamma), whole(beta), write(out), write(mean), write(rstd), eps=eps)
        return out
    dtype = same_dtype(x, gamma, beta, out, mean, rstd)
    same_shape(x, out)
    same_shape(mean, rstd)
    rows, columns = x.shape
    _check(rows, columns, mean, gamma, beta)
    a, y, m, s = source(x, columns), target(out, columns), target(mean), target(rstd)
    g, b, number = source(gamma), source(beta), dtype.type(eps)
    parallel_for(_forward, [(a[cut], g, b, y[cut], m[cut], s[cut], number)
                            for cut in ranges(rows, BLOCK_ROWS)])
    return out


def layernorm_again(x, gamma, beta, mean, rstd, out):
    """out = what `layernorm_forward` gave, from the row statistics it kept; arrays as there."""
    if is_bfloat16(x.dtype):
        by_blocks(layernorm_again, read(x), whole(gamma), whole(beta), read(mean), read(rstd), write(out))
        return out
    same_dtype(x, gamma, beta, mean, rstd, out)
    same_shape(x, out)
    same_shape(mean, rstd)
    rows, columns = x.shape
    _check(rows, columns, mean, gamma, beta)
    a, y, m, s, g, b = source(x, columns), target(out, columns), source(mean), source(rstd), source(gamma), source(beta)
    parallel_for(_again, [(a[cut], g, b, m[cut], s[cut], y[cut]) for cut in ranges(rows, BLOCK_ROWS)])
    return out


def layernorm_backward(x, gamma, mean, rstd, dy, dx, dgamma, dbeta, *, residual=None):
    """dx = gradient through the norm (+ residual [R, D]); dgamma and dbeta [D] are added to. dx may be dy or
    residual; with bfloat16, mean, rstd, dgamma and dbeta are float32.

    The residual is the gradient that went round the norm: its sum with dx needs no pass of its own."""
    if is_bfloat16(x.dtype):
        by_blocks(layernorm_backward, read(x), whole(gamma), read(mean), read(rstd), read(dy), write(dx), dgamma, dbeta,
                  residual=None if residual is None else read(residual), ordered=True)
        return dx
    same_dtype(x, gamma, mean, rstd, dy, dx, dgamma, dbeta)
    same_shape(x, dy, dx)
    same_shape(mean, rstd)
    rows, columns = x.shape
    _check(rows, columns, mean, gamma, dgamma, dbeta)
    a, d, y = source(x, columns), source(dy, columns), target(dx, columns)
    other, add = y, False
    if residual is not None:
        same_dtype(x, residual)
        same_shape(x, residual)
        other, add = source(residual, columns), True
    g, m, s = source(gamma), source(mean), source(rstd)
    blocks = -(-rows // BLOCK_ROWS)
    partial = np.empty((2 * blocks, columns), x.dtype)
    tasks = []
    for cut in ranges(rows, BLOCK_ROWS):
        part = partial[2 * (cut.start // BLOCK_ROWS):2 * -(-cut.stop // BLOCK_ROWS)]
        tasks.append((a[cut], g, m[cut], s[cut], d[cut], y[cut], other[cut], add, part))
    parallel_for(_backward, tasks)
    _join(partial, target(dgamma), target(dbeta))
    return dx


def warm(dtype):
    """Compiles or loads every kernel of this file for a dtype."""
    x, y = np.zeros((2, 4), dtype), np.zeros((2, 4), dtype)
    row, column = np.ones(4, dtype), np.zeros(2, dtype)
    layernorm_forward(x, row, row, y, column, column.copy())
    layernorm_again(x, row, row, column, column, y)
    layernorm_backward(x, row, column, column, y, y, row, row)


def _check(rows, columns, per_row, *per_column):
    if per_row.shape != (rows,) or any(array.shape != (columns,) for array in per_column):
        raise ValueError(f"layer norm of {(rows, columns)}: "
                         f"give mean and rstd of {(rows,)}, gamma and beta of {(columns,)}")


# The compiler decides by the addresses of arrays whether a loop that writes may run as vectors. Written in one loop with
# a sum, that would choose the order of the sum by where memory happens to lie, so sums have loops of their own.

@inlined(fastmath=SUM_FLAGS)
def _sum(row):
    total = row.dtype.type(0)
    for d in range(row.size):
        total += row[d]
    return total


@inlined(fastmath=SUM_FLAGS)
def _sum_of_squares(row, average):
    total = row.dtype.type(0)
    for d in range(row.size):
        value = row[d] - average
        total += value * value
    return total


@inlined(fastmath=SUM_FLAGS)
def _sums_of_slopes(row, slopes, gamma, average, scale):
    total, weighted = row.dtype.type(0), row.dtype.type(0)
    for d in range(row.size):
        g = slopes[d] * gamma[d]
        total += g
        weighted += g * ((row[d] - average) * scale)
    return total, weighted


@jit(fastmath=VECTOR_FLAGS)
def _forward(x, gamma, beta, out, mean, rstd, eps):
    wide_vectors()
    rows, columns = x.shape
    number = x.dtype.type
    if columns == 0:
        return
    share = number(1) / number(columns)
    for r in range(rows):
        average = _sum(x[r]) * share
        scale = number(1) / np.sqrt(_sum_of_squares(x[r], average) * share + eps)
        for d in range(columns):
            out[r, d] = (x[r, d] - average) * scale * gamma[d] + beta[d]
        mean[r] = average
        rstd[r] = scale


@jit(fastmath=VECTOR_FLAGS)
def _again(x, gamma, beta, mean, rstd, out):
    wide_vectors()
    rows, columns = x.shape
    for r in range(rows):
        average, scale = mean[r], rstd[r]
        for d in range(columns):
            out[r, d] = (x[r, d] - average) * scale * gamma[d] + beta[d]


@jit(fastmath=VECTOR_FLAGS)
def _backward(x, gamma, mean, rstd, dy, dx, residual, add, partial):
    # xhat = (x - mean) rstd, g = gamma dy:  dx = rstd (g - mean_D(g) - xhat mean_D(g xhat))
    # dgamma += sum_r dy xhat,  dbeta += sum_r dy
    wide_vectors()
    rows, columns = x.shape
    number = x.dtype.type
    if columns == 0:
        return
    share = number(1) / number(columns)
    row = np.empty(columns, x.dtype)
    sum_gamma, sum_beta = np.empty(columns, x.dtype), np.empty(columns, x.dtype)
    for block in range(partial.shape[0] // 2):
        sum_gamma[:] = 0
        sum_beta[:] = 0
        for r in range(block * BLOCK_ROWS, min((block + 1) * BLOCK_ROWS, rows)):
            average, scale = mean[r], rstd[r]
            g_total, gx_total = _sums_of_slopes(x[r], dy[r], gamma, average, scale)
            g_mean, gx_mean = g_total * share, gx_total * share
            for d in range(columns):
                sum_gamma[d] += dy[r, d] * ((x[r, d] - average) * scale)
                sum_beta[d] += dy[r, d]
            for d in range(columns):
                xhat = (x[r, d] - average) * scale
                row[d] = scale * (dy[r, d] * gamma[d] - g_mean - xhat * gx_mean)
            if add:
                for d in range(columns):
                    row[d] += residual[r, d]
            for d in range(columns):  # only now: dx may be dy or residual
                dx[r, d] = row[d]
        for d in range(columns):
            partial[2 * block, d] = sum_gamma[d]
            partial[2 * block + 1, d] = sum_beta[d]


@jit
def _join(partial, dgamma, dbeta):
    gammas, betas = np.zeros(dgamma.size), np.zeros(dgamma.size)  # float64: no error grows with the rows
    for block in range(partial.shape[0] // 2):
        for d in range(dgamma.size):
            gammas[d] += partial[2 * block, d]
            betas[d] += partial[2 * block + 1, d]
    for d in range(dgamma.size):
        dgamma[d] += gammas[d]
        dbeta[d] += betas[d]
