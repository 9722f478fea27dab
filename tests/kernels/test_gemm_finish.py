"""GeLU and residual in the last pass of the product: the same as in passes of their own."""

import numpy as np
import pytest

from mpipar.kernels import plain
from mpipar.kernels.dtypes import as_dtype, is_bfloat16, sums_dtype
from mpipar.kernels.gemm import gemm
from mpipar.kernels.settings import settings
from tests.helpers.kernels import DTYPES, KERNELS, assert_close, float32_by, normal, same_bits, threads

# Measured: float32 2e-6 of the largest element, float64 5e-15.
TOLERANCE = {"float32": 1e-5, "float64": 1e-13}
SHAPES = [(5, 7, 9), (1, 3, 1), (64, 256, 512), (100, 1500, 130), (400, 384, 1536), (333, 2100, 517), (3, 0, 4), (0, 3, 4)]


@pytest.fixture(autouse=True, params=KERNELS)
def _settings(request):
    before = settings.gemm
    with float32_by(request.param):
        yield
    settings.gemm = before


def operands(m, k, n, dtype):
    a, b, bias = normal(1, m, k, dtype=dtype), normal(2, k, n, dtype=dtype), normal(3, n, dtype=dtype)
    return a, b, bias, a.astype(np.float64) @ b.astype(np.float64) + bias.astype(np.float64)


@pytest.mark.parametrize("backend", ["ours", "blas"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_against_passes_of_their_own(shape, dtype, backend):
    settings.gemm = "blas" if backend == "blas" else settings.gemm
    m, _, n = shape
    a, b, bias, expected = operands(*shape, dtype)
    scale = max(1.0, np.abs(expected).max(initial=0))
    out = np.full((m, n), np.nan, dtype)
    active = np.full((m, n + 3), np.nan, dtype)[:, 1:n + 1]  # rows apart
    gemm(a, b, out, bias=bias, gelu=active)
    assert_close(out / scale, expected / scale, TOLERANCE[dtype])
    assert_close(active / scale, plain.gelu_forward(expected, np.empty((m, n))) / scale, TOLERANCE[dtype])
    residual = normal(4, m, n, dtype=dtype)
    gemm(a, b, out, bias=bias, residual=residual)
    assert_close(out / scale, (expected + residual) / scale, TOLERANCE[dtype])
    gemm(a, b, out, accumulate=True, residual=residual)
    assert_close(out / scale, (2 * expected + 2 * residual - bias) / scale, TOLERANCE[dtype])


@pytest.mark.parametrize("backend", ["ours", "blas"])
@pytest.mark.parametrize("dtype", (*DTYPES, "bfloat16"))
@pytest.mark.parametrize("shape", [*SHAPES, (130, 1, 65), (130, 129, 33), (200, 2050, 1), (60, 64, 200)])
def test_column_sums(shape, dtype, backend):
    m, k, n = shape
    dtype = as_dtype(dtype)
    if backend == "blas" and is_bfloat16(dtype):
        pytest.skip("NumPy has no such product")
    settings.gemm = "blas" if backend == "blas" else settings.gemm
    a, b, sums = normal(1, m, k, dtype=dtype), normal(2, k, n, dtype=dtype), sums_dtype(dtype)
    expected, totals = a.astype(np.float64) @ b.astype(np.float64), 2 + b.astype(np.float64).sum(axis=0)
    for b in (b, np.ascontiguousarray(b.T).T, np.repeat(b, 2, axis=1)[:, ::2]):
        results = []
        for count in (1, 2, 3):
            with threads(count):
                out, columns = np.ones((m, n), sums), np.full(n, 2, sums)
                gemm(a, b, out, accumulate=True, column_sums=columns)
            assert_close(columns, totals, 1e-6 if sums == np.float32 else 1e-14)
            assert_close(out - 1, expected, 1e-5 if sums == np.float32 else 1e-13)
            results.append((out, columns))
        assert all(same_bits(columns, results[0][1]) for _, columns in results)
        without = np.ones((m, n), sums)
        gemm(a, b, without, accumulate=True)
        assert same_bits(without, results[0][0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_error_of_column_sums_does_not_grow_with_their_length(dtype):
    """0.1 is no number of float32: plain sums of 200,000 of them are off by 1e-3 of their value."""
    tenths = np.full((200_000, 70), 0.1, as_dtype(dtype))
    columns = np.zeros(70, np.float32)
    gemm(np.zeros((60, 200_000), tenths.dtype), tenths, np.zeros((60, 70), np.float32), column_sums=columns)
    exact = 200_000 * float(tenths[0, 0])
    assert np.abs(columns - exact).max() <= 2e-6 * exact
    plain_sum = np.cumsum(tenths[:, 0].astype(np.float32))[-1]
    assert abs(plain_sum - exact) > 1e-4 * exact  # control


def test_column_sums_that_do_not_fit_are_refused():
    a = np.zeros((50, 60), np.float32)
    for wrong in (np.zeros(59, np.float32), np.zeros(60), np.zeros((1, 60), np.float32), np.zeros(120, np.float32)[::2]):
        out = np.ones((50, 60), np.float32)
        with pytest.raises(ValueError, match="column_sums"):
            gemm(a, np.zeros((60, 60), np.float32), out, column_sums=wrong)
        assert (out == 1).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_on_any_number_of_threads(dtype):
    a, b, bias, _ = operands(300, 700, 410, dtype)
    results = []
    for count in (1, 2, 3):
        with threads(count):
            out, active = np.empty((300, 410), dtype), np.empty((300, 410), dtype)
            gemm(a, b, out, bias=bias, gelu=active)
            results.append((out, active))
    for out, active in results[1:]:
        assert same_bits(out, results[0][0]) and same_bits(active, results[0][1])


def test_arrays_that_do_not_fit_are_refused():
    a, b, _, _ = operands(4, 5, 6, np.float64)
    out, other = np.empty((4, 6)), np.empty((4, 6))
    with pytest.raises(ValueError, match="one of them"):
        gemm(a, b, out, residual=other, gelu=other)
    for bad in (np.empty((4, 5)), np.empty((4, 6), np.float32), np.empty((6, 4)).T):
        with pytest.raises(ValueError, match="gelu"):
            gemm(a, b, out, gelu=bad)
