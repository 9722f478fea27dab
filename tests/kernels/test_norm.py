"""Layer normalisation against its plain form, and that against differences."""
import numpy as np
import pytest

from mpipar.kernels import norm, plain
from tests.helpers.finite_difference import check_gradient
from tests.helpers.kernels import DTYPES, assert_close, normal, same_bits, threads

# Measured: float32 1.0e-6 forward, 6e-7 (dx) and 2e-7 of the largest (dgamma, dbeta); float64 3e-15.
TOLERANCE = {"float32": 3e-6, "float64": 2e-14}
SHAPES = [(0, 5), (1, 1), (3, 7), (32, 16), (33, 130), (200, 384)]
both = pytest.mark.parametrize("dtype", DTYPES)


def operands(rows, columns, dtype):
    x = 2 * normal(1, rows, columns, dtype=dtype) + 1
    return x, 1 + normal(2, columns, dtype=dtype) / 2, normal(3, columns, dtype=dtype)


def forward(module, x, gamma, beta):
    out, mean, rstd = np.full_like(x, np.nan), np.empty(len(x), x.dtype), np.empty(len(x), x.dtype)
    module.layernorm_forward(x, gamma, beta, out, mean, rstd, eps=1e-5)
    return out, mean, rstd


def backward(module, x, gamma, mean, rstd, dy, residual):
    dx, dgamma, dbeta = np.full_like(x, np.nan), np.ones_like(gamma), np.ones_like(gamma)
    module.layernorm_backward(x, gamma, mean, rstd, dy, dx, dgamma, dbeta, residual=residual)
    return dx, dgamma, dbeta


def widened(arrays):
    return [None if array is None else array.astype(np.float64) for array in arrays]


@both
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_against_plain(shape, with_residual, dtype):
    x, gamma, beta = operands(*shape, dtype)
    results, expected = forward(norm, x, gamma, beta), forward(plain, *widened((x, gamma, beta)))
    for actual, right in zip(results, expected):
        assert_close(actual, right, TOLERANCE[dtype])
    dy = normal(4, *shape, dtype=dtype)
    residual = normal(5, *shape, dtype=dtype) if with_residual else None
    arrays = (x, gamma, *results[1:], dy, residual)
    tolerance = TOLERANCE[dtype] * max(1.0, results[2].max(initial=0))  # of one column: rstd is 316
    for actual, right in zip(backward(norm, *arrays), backward(plain, *widened(arrays))):
        assert_close(actual, right, tolerance)


@both
def test_results_over_operands(dtype):
    x, gamma, beta = operands(40, 33, dtype)
    out, mean, rstd = forward(norm, x, gamma, beta)
    over = x.copy()
    norm.layernorm_forward(over, gamma, beta, over, mean, rstd, eps=1e-5)
    assert_close(over, out.astype(np.float64), TOLERANCE[dtype])
    dy, residual = normal(4, 40, 33, dtype=dtype), normal(5, 40, 33, dtype=dtype)
    expected = backward(norm, x, gamma, mean, rstd, dy, residual)
    for over_dy in (True, False):
        a, b, dgamma, dbeta = dy.copy(), residual.copy(), np.ones_like(gamma), np.ones_like(gamma)
        dx = a if over_dy else b
        norm.layernorm_backward(x, gamma, mean, rstd, a, dx, dgamma, dbeta, residual=b)
        assert_close(dx, expected[0].astype(np.float64), TOLERANCE[dtype])
        assert_close(dgamma, expected[1].astype(np.float64), TOLERANCE[dtype])
        assert_close(dbeta, expected[2].astype(np.float64), TOLERANCE[dtype])


@both
def test_same_bits_on_any_number_of_threads(dtype):
    x, gamma, beta = operands(1000, 65, dtype)
    dy, results = normal(4, 1000, 65, dtype=dtype), []
    for count in (1, 2, 3):
        with threads(count):
            out, mean, rstd = forward(norm, x, gamma, beta)
            results.append((out, mean, rstd, *backward(norm, x, gamma, mean, rstd, dy, dy)))
    for result in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(result, results[0]))


def test_a_large_mean_does_not_spoil_the_variance():
    x = (1000 + normal(1, 4, 256)).astype(np.float32)
    out, _, _ = forward(norm, x, np.ones(256, np.float32), np.zeros(256, np.float32))
    expected, _, _ = forward(plain, x.astype(np.float64), np.ones(256), np.zeros(256))
    assert np.abs(out - expected).max() < 2e-4  # a one-pass variance would be wrong by 0.05


def test_plain_backward_against_differences():
    x, gamma, beta = operands(5, 7, "float64")
    weight, skip = normal(4, 5, 7), normal(5, 5, 7)
    _, mean, rstd = forward(plain, x, gamma, beta)
    dx, dgamma, dbeta = backward(plain, x, gamma, mean, rstd, weight, skip)

    def loss(x, gamma, beta):  # the residual is the gradient of a path round the norm
        return float(np.sum(weight * forward(plain, x, gamma, beta)[0]) + np.sum(skip * x))
    gradients = [dx, dgamma - 1, dbeta - 1]
    check_gradient(loss, [x, gamma, beta], gradients, samples=35)
    for wrong in ([dx - skip, *gradients[1:]], [dx, dgamma, dbeta - 1], [dx, dgamma - 1, 2 * dbeta]):
        with pytest.raises(AssertionError):
            check_gradient(loss, [x, gamma, beta], wrong, samples=35)


def test_errors():
    x, row, column = np.zeros((3, 4)), np.zeros(4), np.zeros(3)
    with pytest.raises(ValueError, match="gamma and beta"):
        norm.layernorm_forward(x, column, row, x.copy(), column, column)
    with pytest.raises(ValueError, match="mean and rstd"):
        norm.layernorm_forward(x, row, row, x.copy(), row, row)


@both
@pytest.mark.parametrize("shape", SHAPES)
def test_output_again_from_the_row_statistics(shape, dtype):
    x, gamma, beta = operands(*shape, dtype)
    out, mean, rstd = forward(norm, x, gamma, beta)
    again = norm.layernorm_again(x, gamma, beta, mean, rstd, np.full_like(x, np.nan))
    tolerance = TOLERANCE[dtype] * max(1.0, rstd.max(initial=0))
    assert_close(again, out.astype(np.float64), tolerance)
    assert_close(again, plain.layernorm_again(*widened((x, gamma, beta, mean, rstd)), np.empty(shape)), tolerance)
