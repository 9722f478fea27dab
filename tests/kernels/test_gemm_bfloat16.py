"""The product of bfloat16 against float32's, bit by bit, and against NumPy."""
import ctypes
import itertools
import mmap
import sys
import tracemalloc
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from mpipar.kernels import gemm_bfloat16, gemm_pairs
from mpipar.kernels.gelu import gelu_forward
from mpipar.kernels.gemm import THIN_ROWS, gemm, warm
from mpipar.kernels.gemm_bfloat16 import unit
from mpipar.kernels.host import host
from mpipar.kernels.pairs import units
from mpipar.kernels.settings import settings
from tests.helpers.kernels import assert_close, float32_by, normal, same_bits, threads

HALF = np.dtype(ml_dtypes.bfloat16)
SHAPES = [(1, 1, 1), (5, 7, 9), (64, 256, 512), (100, 1500, 130), (400, 384, 1536), (1000, 129, 33), (17, 300, 1),
          (1, 40, 70), (37, 2100, 517)]
# Measured for the shapes above with normal operands: 2.3e-6 of the largest element (as float32's own product).
TOLERANCE = 1e-5


@pytest.fixture(params=("amx", "avx512", "convert"), autouse=True)
def way(request):
    """Every test runs with each way of this CPU to multiply bfloat16."""
    if request.param != "convert" and request.param not in units():
        pytest.skip(f"this CPU has no {request.param} for bfloat16")
    settings.bfloat16 = request.param
    yield request.param
    settings.bfloat16 = "auto"


def half(seed, *shape):
    return normal(seed, *shape, dtype=HALF)


def layouts(x):
    """The same matrix with unit stride along either side, and as a part of a larger one."""
    around = np.zeros((x.shape[0] + 2, x.shape[1] + 3), HALF)
    around[1:-1, 2:-1] = x
    return x, np.ascontiguousarray(x.T).T, around[1:-1, 2:-1]


@pytest.mark.parametrize("shape", SHAPES)
def test_sums_are_those_of_float32(shape, way):
    m, k, n = shape
    a, b, bias = half(1, m, k), half(2, k, n), half(3, n)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    for left, right in itertools.product(layouts(a), layouts(b)):
        sums = np.full((m, n), np.nan, np.float32)
        assert gemm(left, right, sums) is sums
        assert_close(sums, exact, TOLERANCE)
        gemm(left, right, sums, accumulate=True, bias=bias)
        assert_close(sums, 2 * exact + bias.astype(np.float64), TOLERANCE)
        out = gemm(left, right, np.zeros((m, n), HALF), bias=bias)
        sums = gemm(left, right, sums, bias=bias)
        assert same_bits(out, sums.astype(HALF))
    if way == "convert" and m > THIN_ROWS:  # float32 reads b in place where m is small, in other blocks of k
        with float32_by("vector"):
            float32 = gemm(a.astype(np.float32), b.astype(np.float32), np.empty((m, n), np.float32))
        assert same_bits(gemm(a, b, np.empty((m, n), np.float32)), float32)


@pytest.mark.parametrize("shape", [(5, 7, 9), (500, 384, 1536), (333, 2100, 517), (400, 20, 700)])
def test_last_pass(shape):
    m, k, n = shape
    a, b, bias, residual = half(1, m, k), half(2, k, n), half(3, n), half(4, m, n)
    sums = gemm(a, b, np.empty((m, n), np.float32), bias=bias)
    out, active = np.zeros((m, n), HALF), np.zeros((m, n + 3), HALF)[:, 1:n + 1]  # rows apart
    gemm(a, b, out, bias=bias, gelu=active)
    assert same_bits(out, sums.astype(HALF)) and same_bits(active, gelu_forward(out, np.empty_like(out)))
    gemm(a, b, out, bias=bias, residual=residual)
    assert same_bits(out, (sums + residual.astype(np.float32)).astype(HALF))
    twice = (sums.astype(HALF).astype(np.float32) + residual.astype(np.float32)).astype(HALF)
    assert not same_bits(out, twice)  # control: rounded before the residual is added


def test_same_bits_on_any_number_of_threads():
    a, b = half(1, 900, 700), half(2, 700, 410)
    results = []
    for count in (1, 2, 3):
        with threads(count):
            results.append((gemm(a, b, np.empty((900, 410), HALF)), gemm(a, b, np.empty((900, 410), np.float32))))
    for pair in results[1:]:
        assert same_bits(pair[0], results[0][0]) and same_bits(pair[1], results[0][1])


def test_empty_sums():
    a, b, bias = np.zeros((3, 0), HALF), np.zeros((0, 4), HALF), half(1, 4)
    assert (gemm(a, b, np.ones((3, 4), HALF)) == 0).all()
    assert (gemm(a, b, np.ones((3, 4), HALF), bias=bias) == bias).all()
    assert (gemm(a, b, np.ones((3, 4), np.float32), accumulate=True) == 1).all()
    assert gemm(np.zeros((0, 3), HALF), np.zeros((3, 4), HALF), np.zeros((0, 4), HALF)).size == 0


def test_what_does_not_fit_is_refused():
    warm(HALF)
    a, b, out, sums = half(1, 4, 5), half(2, 5, 6), np.zeros((4, 6), HALF), np.zeros((4, 6), np.float32)
    for arguments, options, text in [
        ((a, b.astype(np.float32), out), {}, "b is float32"), ((a, b, np.zeros((4, 6))), {}, "out is float64"),
        ((a, b, out), {"accumulate": True}, "float32 out"), ((a, b, sums), {"residual": out}, "bfloat16 out"),
        ((a, b, out), {"bias": np.zeros(6, np.float32)}, "bias is float32"), ((a, b.T, out), {}, "do not fit"),
        ((a, b, np.zeros((6, 4), HALF).T), {}, "unit stride"), ((a, b, out), {"gelu": out, "residual": out}, "one of them"),
        ((a, b, out), {"bias": np.zeros(5, HALF)}, "bias has shape"),
    ]:
        with pytest.raises(ValueError, match=text):
            gemm(*arguments, **options)
    settings.gemm = "blas"
    try:
        with pytest.raises(ValueError, match="BLAS has no bfloat16"):
            gemm(a, b, out)
    finally:
        settings.gemm = "numba"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs mprotect of the C library")
def test_operands_at_the_end_of_memory():
    """Packing may read whole vectors where they lie in one page, never over the end of the array's last page."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    start = np.frombuffer(memory, np.uint8).ctypes.data
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert protect(start + page, page, 0) == 0  # whoever reads the second page ends the process
    try:
        for lines in range(1, 19):
            count = 3 * lines
            a = np.frombuffer(memory, HALF, count, page - 2 * count).reshape(3, lines)
            a[...] = half(lines, 3, lines)
            b = half(1, 3, 5)
            expected = a.T.astype(np.float64) @ b.astype(np.float64)
            assert_close(gemm(a.T, b, np.empty((lines, 5), np.float32)), expected, TOLERANCE)
            assert_close(gemm(b.T, a, np.empty((5, lines), np.float32)), expected.T, TOLERANCE)
    finally:
        assert protect(start + page, page, mmap.PROT_READ | mmap.PROT_WRITE) == 0


def test_no_float32_copy_of_an_operand_or_a_result(way):
    a, b, out = half(1, 6000, 64), half(2, 64, 256), np.empty((6000, 256), HALF)
    gemm_bfloat16._local.__dict__.clear()
    gemm_pairs._memory._local.__dict__.clear()
    with threads(1):
        gemm(a, b, np.empty((6000, 256), np.float32))  # makes the panels
        tracemalloc.start()
        gemm(a, b, out)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    if way != "convert":  # sums of 32 x 32, in compiled code
        assert most < 1 << 16
        return
    assert 4 * min(gemm_bfloat16.SUMS, out.size) <= most < 2 * out.size  # the sums of a part: 1 MiB; all of out: 6 MB


def test_units_add_in_the_order_of_k(way):
    """What cancels only in float32, and only if nothing is rounded to 16 bits in between."""
    a = np.array([[1, 2.0**-20, -1, 0, 0, 2.0**-10]], HALF)
    b = np.ones((6, 1), HALF)
    result = float(gemm(a, b, np.empty((1, 1), np.float32))[0, 0])
    assert abs(result - (2.0**-20 + 2.0**-10)) <= 2.0**-24
    b[1] = np.nan
    assert np.isnan(gemm(a, b, np.empty((1, 1), HALF)).astype(np.float32)).all()
    b[1] = np.inf
    assert np.isinf(gemm(a, b, np.empty((1, 1), HALF)).astype(np.float32)).all()


def test_edges_touch_nothing_around_them(way):
    for m, n in ((1, 1), (33, 31), (40, 65)):
        for dtype in (HALF, np.dtype(np.float32)):
            around, beside = np.full((m + 2, n + 5), 7, dtype), np.full((m + 2, n + 5), 7, dtype)
            out, other = around[1:-1, 2:n + 2], beside[1:-1, 3:n + 3]
            gemm(half(1, m, 50), half(2, 50, n), out, **({"gelu": other} if dtype == HALF else {}))
            for whole, part in ((around, out), (beside, other)):
                inside = part.size if dtype == HALF or part is out else 0
                assert (whole == 7).sum() == whole.size - inside + (part == 7).sum() * (inside > 0)


def test_a_unit_that_is_missing_is_refused(monkeypatch, way):
    monkeypatch.setattr(gemm_bfloat16, "units", lambda: ())
    a = half(1, 2, 2)
    if way == "convert":
        gemm(a, a, np.empty((2, 2), HALF))
    else:
        with pytest.raises(ValueError, match="valid on this CPU: auto, convert"):
            gemm(a, a, np.empty((2, 2), HALF))
    settings.bfloat16 = "auto"
    gemm(a, a, np.empty((2, 2), HALF))
    with pytest.raises(ValueError, match="valid values: auto, amx, avx512, convert"):
        settings.bfloat16 = "tpu"


def test_the_unit_of_choice(monkeypatch, way):
    """AVX512's instruction is twice as fast as converting on AMD's CPUs, half as fast on Intel's."""
    for cpu, found, expected in (("emeraldrapids", ("amx", "avx512"), "amx"), ("cooperlake", ("avx512",), "convert"),
                                 ("znver4", ("avx512",), "avx512"), ("znver3", (), "convert")):
        monkeypatch.setattr(gemm_bfloat16, "units", lambda: found)
        monkeypatch.setattr(gemm_bfloat16, "host", lambda: replace(host(), cpu=cpu))
        settings.bfloat16 = "auto"
        assert gemm_bfloat16.unit() == expected


def test_without_the_matrix_unit(way):
    """gemm = "vector" keeps float32 and bfloat16 from it, where nothing else was chosen."""
    settings.bfloat16 = "auto"
    with settings.changed(gemm="vector"):
        assert unit() != "amx"
    if "amx" in units():
        assert unit() == "amx"  # the control
