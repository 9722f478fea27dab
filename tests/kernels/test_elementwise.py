"""Sums of activations, biases and residuals against NumPy in float64."""
import numpy as np
import pytest

from mpipar.kernels import elementwise
from tests.helpers.kernels import DTYPES, assert_close, normal, same_bits, threads

TOLERANCE = {"float32": 3e-7, "float64": 1e-15}
SHAPES = [(0, 5), (3, 0), (1, 1), (3, 7), (2, 5, 33), (700, 130)]
both = pytest.mark.parametrize("dtype", DTYPES)


def operands(shape, dtype):
    return normal(1, *shape, dtype=dtype), normal(2, shape[-1], dtype=dtype), normal(3, *shape, dtype=dtype)


@both
@pytest.mark.parametrize("shape", SHAPES)
def test_sums(shape, dtype):
    x, bias, residual = operands(shape, dtype)
    wide = [array.astype(np.float64) for array in (x, bias, residual)]
    out = np.full_like(x, np.nan)
    assert_close(elementwise.add_bias(x, bias, out), wide[0] + wide[1], TOLERANCE[dtype])
    assert_close(elementwise.add(x, residual, out), wide[0] + wide[2], TOLERANCE[dtype])
    assert_close(elementwise.bias_residual(x, bias, residual, out), sum(wide), TOLERANCE[dtype])


@both
def test_results_over_operands(dtype):
    x, bias, residual = operands((9, 37), dtype)
    expected = elementwise.add_bias(x, bias, np.empty_like(x))
    y = x.copy()
    assert same_bits(elementwise.add_bias(y, bias, y), expected)
    expected = elementwise.add(x, residual, np.empty_like(x))
    for first in (True, False):
        a, b = x.copy(), residual.copy()
        assert same_bits(elementwise.add(a, b, a if first else b), expected)
    expected = elementwise.bias_residual(x, bias, residual, np.empty_like(x))
    for first in (True, False):
        a, b = x.copy(), residual.copy()
        assert same_bits(elementwise.bias_residual(a, bias, b, a if first else b), expected)


@both
@pytest.mark.parametrize("shape", [(0, 5), (4, 0), (1, 1), (63, 3), (64, 257), (1000, 300)])
def test_column_sum(shape, dtype):
    dy, start = normal(1, *shape, dtype=dtype), normal(2, shape[1], dtype=dtype)
    wide = dy.astype(np.float64).sum(axis=0)
    tolerance = 4e-7 if dtype == "float32" else 1e-14
    assert_close(elementwise.column_sum(dy, start.copy(), accumulate=False), wide, tolerance)
    assert_close(elementwise.column_sum(dy, start.copy()), start + wide, tolerance)


def test_column_sum_of_many_rows_stays_accurate():
    dy = np.full((200_000, 3), 0.1, np.float32)
    exact = 200_000 * np.float64(np.float32(0.1))
    error = elementwise.column_sum(dy, np.zeros(3, np.float32))[0] / exact - 1
    assert abs(error) < 1e-5  # one running sum would be wrong by 2e-3


@both
def test_same_bits_on_any_number_of_threads(dtype):
    x, bias, residual = operands((1501, 301), dtype)
    results = []
    for count in (1, 2, 3):
        with threads(count):
            results.append((elementwise.add_bias(x, bias, np.empty_like(x)),
                            elementwise.bias_residual(x, bias, residual, np.empty_like(x)),
                            elementwise.add(x, residual, np.empty_like(x)),
                            elementwise.column_sum(x, bias.copy())))
    for result in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(result, results[0]))


def test_errors():
    x = np.zeros((3, 4))
    with pytest.raises(ValueError, match=r"\(4,\)"):
        elementwise.add_bias(x, np.zeros(3), x)
    with pytest.raises(ValueError, match=r"\(4,\)"):
        elementwise.column_sum(x, np.zeros(3))
    with pytest.raises(ValueError, match="contiguous"):
        elementwise.add(x[:, ::2], x[:, 1::2], x[:, ::2])
    with pytest.raises(ValueError, match="int64"):
        elementwise.add(np.zeros(3, np.int64), np.zeros(3, np.int64), np.zeros(3, np.int64))
