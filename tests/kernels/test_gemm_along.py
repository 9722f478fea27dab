"""The product whose vectors run along k, against float64: edges of its tiles, bits, memory, and where it is chosen."""

import ctypes
import mmap

import numpy as np
import pytest

from mpipar.kernels import gemm as product
from mpipar.kernels import gemm_along
from mpipar.kernels.gemm import gemm
from mpipar.kernels.gemm_along import GROUP, LEAST_DEPTH, MOST_ROWS, ROWS
from mpipar.kernels.host import host
from tests.helpers.kernels import DTYPES, float32_by, normal, same_bits, threads

pytestmark = pytest.mark.skipif(host().lanes("d") < GROUP, reason="vectors are shorter than four numbers")
TOLERANCE = {"float32": 2e-6, "float64": 1e-14}


@pytest.fixture(autouse=True)
def _vectors(monkeypatch):
    monkeypatch.setattr(gemm_along, "FAR", 1 << 20)  # whatever the second cache of this machine
    with float32_by("vector"), threads(1):
        yield


@pytest.fixture
def calls(monkeypatch):
    """How often gemm chose it."""
    made, run = [], gemm_along.run
    monkeypatch.setattr(gemm_along, "run", lambda *operands: (made.append(1), run(*operands)))
    return made


def is_right(a, b, out, before=0.0):
    wide_a, wide_b = a.astype(np.longdouble), b.astype(np.longdouble)
    scale = np.abs(wide_a) @ np.abs(wide_b) + np.abs(before)
    return bool((np.abs(out - (wide_a @ wide_b + before)) <= TOLERANCE[out.dtype.name] * scale + 1e-300).all())


def operands(m, k, n, dtype):
    return normal(1, m, k, dtype=dtype), normal(2, n, k, dtype=dtype).T


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", (LEAST_DEPTH, LEAST_DEPTH + 1, LEAST_DEPTH + 37))
@pytest.mark.parametrize("n", (1, 3, 4, 6, 41))
def test_every_edge(dtype, k, n, calls):
    for m in (*range(1, ROWS + 2), 2 * ROWS - 1, MOST_ROWS):
        a, b = operands(m, k, n, dtype)
        out = np.full((m, n), np.nan, dtype)
        gemm(a, b, out)
        assert is_right(a, b, out)
        gemm(a, b, out, accumulate=True)
        assert is_right(a, b, out, (a.astype(np.longdouble) @ b.astype(np.longdouble)))
    assert len(calls) == 2 * (ROWS + 3)
    out[-1, -1] += np.abs(a[-1]) @ np.abs(b[:, -1]) * 10 * np.asarray(TOLERANCE[out.dtype.name], dtype)
    assert not is_right(a, b, out, (a.astype(np.longdouble) @ b.astype(np.longdouble)))  # the control


def test_parts_of_larger_arrays(calls):
    """Lines that are not side by side, and nothing written outside."""
    whole_a, whole_b = normal(1, 9, 700, dtype=np.float32), normal(2, 30, 900, dtype=np.float32)
    whole = np.full((9, 64), 7, np.float32)
    a, b, out = whole_a[1:8, 3:303], whole_b[2:25:2, 5:305].T, whole[1:8, 2:14]
    gemm(a, b, out)
    assert calls and is_right(a, b, out)
    out[...] = 7
    assert (whole == 7).all()


def test_bits_depend_on_k_alone(calls):
    """The rows of a larger product are those of smaller ones, whatever the number of threads."""
    a, b = operands(MOST_ROWS, 1000, 90, np.float32)
    whole = gemm(a, b, np.empty((MOST_ROWS, 90), np.float32))
    for row in (0, ROWS, MOST_ROWS - 1):
        one = gemm(a[row:row + 1], b[:, 7:], np.empty((1, 83), np.float32))
        assert same_bits(one, whole[row:row + 1, 7:])
    small, product.SMALL = product.SMALL, 1
    try:
        with threads(2):
            assert same_bits(gemm(a, b, np.empty_like(whole)), whole)
    finally:
        product.SMALL = small
    assert len(calls) > 4


def test_infinities_and_nan_stay_in_their_rows_and_columns(calls):
    a, b = operands(ROWS + 1, LEAST_DEPTH + 3, 6, np.float32)
    a[0, -1], b[-1, 5] = np.nan, np.inf
    out = gemm(a, b, np.empty((ROWS + 1, 6), np.float32))
    assert calls and np.isnan(out[0]).all() and np.isinf(out[1:, 5]).all() and np.isfinite(out[1:, :5]).all()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mprotect"), reason="needs mprotect")
def test_nothing_is_read_beyond_the_operands():
    """Both end where memory ends that may be read."""
    m, k, n = ROWS + 1, LEAST_DEPTH + 5, 7
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    held = []

    def at_the_end(values):
        size = -(-values.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, size + mmap.PAGESIZE)
        start = np.frombuffer(memory, np.uint8).ctypes.data
        assert protect(start + size, mmap.PAGESIZE, 0) == 0
        held.append(memory)
        placed = np.frombuffer(memory, values.dtype, values.size, size - values.nbytes).reshape(values.shape)
        placed[...] = values
        return placed

    a, b = operands(m, k, n, np.float32)
    a, b = at_the_end(a), at_the_end(np.ascontiguousarray(b.T)).T
    out = at_the_end(np.zeros((m, n), np.float32))
    gemm(a, b, out)
    assert is_right(a, b, out)


def test_where_it_is_chosen(calls, monkeypatch):
    """Few rows that stay in a near cache, both operands along k, nothing else to do."""
    a, b = operands(4, LEAST_DEPTH, 8, np.float32)
    out = np.empty((4, 8), np.float32)
    gemm(a, b, out, bias=np.zeros(8, np.float32))
    gemm(a, b, out, residual=np.zeros((4, 8), np.float32))
    gemm(a, np.ascontiguousarray(b), out)
    gemm(np.asfortranarray(a), b, out)
    gemm(*operands(4, LEAST_DEPTH - 1, 8, np.float32), out)
    gemm(*operands(MOST_ROWS + 1, LEAST_DEPTH, 8, np.float32), np.empty((MOST_ROWS + 1, 8), np.float32))
    with monkeypatch.context() as small:
        small.setattr(gemm_along, "FAR", a.nbytes - 1)
        gemm(a, b, out)
    assert not calls
    sums = np.zeros(8, np.float32)
    gemm(a, b, out, column_sums=sums)
    assert calls and np.allclose(sums, b.sum(0), atol=1e-4)
