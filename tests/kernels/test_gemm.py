"""The blocked product against NumPy in float64: every stride, edge, epilogue and number of threads."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from mpipar.kernels import gemm as product
from mpipar.kernels.gemm import gemm, warm
from mpipar.kernels.settings import settings
from mpipar.kernels.vector import TILE_ROWS
from tests.helpers.kernels import KERNELS, float32_by

# Of sum |a| |b| an element: rounding of a sum of k terms stays far below, one wrong term far above (negative
# control below).
TOLERANCE = {"float32": 2e-6, "float64": 1e-12 / 100}
FORMS = ("rows", "columns", "sliced", "reversed", "blocks")


@pytest.fixture(autouse=True, params=KERNELS)
def _settings(request):
    before = settings.gemm, settings.threads, product.SMALL
    settings.threads = 1
    product.SMALL = 1 << 10  # so that small products are divided among threads too
    with float32_by(request.param):
        yield
    settings.gemm, settings.threads, product.SMALL = before


def matrix(generator, m, n, dtype, form):
    """Random [m, n] in one of several memory layouts."""
    if form == "columns":
        return generator.standard_normal((n, m)).astype(dtype).T
    if form == "sliced":
        return generator.standard_normal((2 * m, 3 * n)).astype(dtype)[::2, 1::3]
    if form == "reversed":
        return generator.standard_normal((m, n)).astype(dtype)[::-1, ::-1]
    if form == "blocks":  # one head of [rows, heads, width]
        return generator.standard_normal((m, 3, n)).astype(dtype)[:, 1]
    return generator.standard_normal((m, n)).astype(dtype)


def assert_product(a, b, out, before=None, bias=None):
    """out is a @ b (+ before) (+ bias) to rounding."""
    dtype = out.dtype.name
    wide = [np.asarray(x, np.longdouble if dtype == "float64" else np.float64) for x in (a, b)]
    expected, scale = wide[0] @ wide[1], np.abs(wide[0]) @ np.abs(wide[1])
    for extra in (before, bias):
        if extra is not None:
            expected, scale = expected + extra, scale + np.abs(extra)
    wrong = np.abs(out - expected) > TOLERANCE[dtype] * scale + 1e-300
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size} elements differ, first {np.argwhere(wrong)[0]}"


def run_and_check(m, k, n, dtype, form_a="rows", form_b="rows", accumulate=False, with_bias=False, seed=0):
    generator = np.random.default_rng(seed)
    a, b = matrix(generator, m, k, dtype, form_a), matrix(generator, k, n, dtype, form_b)
    bias = generator.standard_normal(n).astype(dtype) if with_bias else None
    # A frame around out, to see writes beyond it.
    memory = generator.standard_normal((m + 2, n + 5)).astype(dtype)
    frame, out = memory.copy(), memory[1:m + 1, 2:n + 2]
    before = out.copy() if accumulate else None
    assert gemm(a, b, out, accumulate=accumulate, bias=bias) is out
    assert_product(a, b, out, before, bias)
    frame[1:m + 1, 2:n + 2] = out
    np.testing.assert_array_equal(memory, frame)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("form_a", FORMS)
@pytest.mark.parametrize("form_b", FORMS)
def test_every_layout(form_a, form_b, dtype):
    for m, k, n in [(61, 131, 77), (16, 32, 64), (3, 700, 18)]:
        run_and_check(m, k, n, dtype, form_a, form_b)
        run_and_check(m, k, n, dtype, form_a, form_b, accumulate=True, with_bias=True)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_edge(dtype):
    lanes = 64 // np.dtype(dtype).itemsize
    for m in range(1, 2 * TILE_ROWS + 2):
        run_and_check(m, 9, 2 * lanes + 3, dtype, accumulate=bool(m % 2), with_bias=True)
    for n in range(1, 4 * lanes + 2):
        run_and_check(5, 17, n, dtype, "columns" if n % 2 else "rows", "columns" if n % 3 else "rows")
    for k in range(1, 40):
        run_and_check(TILE_ROWS + 1, k, lanes + 1, dtype, "rows", "columns", with_bias=True)


@pytest.mark.parametrize("m", [1, 2, TILE_ROWS, TILE_ROWS + 1, 3 * TILE_ROWS, 3 * TILE_ROWS + 1])
@pytest.mark.parametrize("form_b", FORMS)
def test_few_rows(m, form_b):
    """Nothing beyond b is read: it ends where its memory ends."""
    for k, n in [(300, 32), (513, 45), (40, 7), (1, 130)]:
        run_and_check(m, k, n, "float32", "columns", form_b, with_bias=True)
        run_and_check(m, k, n, "float64", "rows", form_b, accumulate=True)


@pytest.mark.parametrize("m, k, n", [(64, 256, 512), (1100, 1500, 90), (40, 2300, 1100), (2050, 30, 33)])
def test_several_blocks(m, k, n):
    run_and_check(m, k, n, "float32", with_bias=True)
    run_and_check(m, k, n, "float32", "columns", "columns", accumulate=True)


@hypothesis_settings(max_examples=60, deadline=None)
@given(m=st.integers(0, 50), k=st.integers(0, 70), n=st.integers(0, 80), seed=st.integers(0, 9),
       dtype=st.sampled_from(["float32", "float64"]), form_a=st.sampled_from(FORMS),
       form_b=st.sampled_from(FORMS), accumulate=st.booleans(), with_bias=st.booleans(),
       threads=st.integers(1, 3))
def test_any_product(m, k, n, dtype, form_a, form_b, accumulate, with_bias, threads, seed):
    settings.threads = threads
    run_and_check(m, k, n, dtype, form_a, form_b, accumulate, with_bias, seed)


@pytest.mark.parametrize("way", ["ours", "blas"])
def test_nothing_to_sum(way):
    settings.gemm = "blas" if way == "blas" else settings.gemm
    bias = np.arange(3, dtype="f4")
    out = np.full((2, 3), 7, "f4")
    gemm(np.zeros((2, 0), "f4"), np.zeros((0, 3), "f4"), out, accumulate=True)
    assert (out == 7).all()
    gemm(np.zeros((2, 0), "f4"), np.zeros((0, 3), "f4"), out, accumulate=True, bias=bias)
    assert (out == 7 + bias).all()
    gemm(np.zeros((2, 0), "f4"), np.zeros((0, 3), "f4"), out, bias=bias)
    assert (out == bias).all()
    gemm(np.zeros((2, 0), "f4"), np.zeros((0, 3), "f4"), out)
    assert (out == 0).all()
    for m, n in [(0, 3), (2, 0), (0, 0)]:
        empty = np.zeros((m, n), "f4")
        assert gemm(np.ones((m, 4), "f4"), np.ones((4, n), "f4"), empty) is empty


def test_out_is_not_read_without_accumulate():
    out = np.full((20, 40), np.nan, "f4")
    gemm(np.ones((20, 600), "f4"), np.ones((600, 40), "f4"), out)
    assert (out == 600).all()


def test_not_a_number_stays_in_its_row_and_column():
    a, b = np.ones((30, 40), "f4"), np.ones((40, 50), "f4")
    a[3, 7] = np.nan
    b[5, 11] = np.inf
    out = gemm(a, b, np.empty((30, 50), "f4"))
    bad = ~np.isfinite(out)
    expected = np.zeros_like(bad)
    expected[3], expected[:, 11] = True, True
    np.testing.assert_array_equal(bad, expected)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_threads_do_not_change_a_bit(dtype):
    generator = np.random.default_rng(1)
    for m, k, n in [(300, 700, 130), (40, 1100, 600), (601, 64, 67), (3, 900, 400), (50, 600, 150)]:
        form = "rows" if m < 100 else "columns"  # rows and few of them: b is read in place
        a, b = matrix(generator, m, k, dtype, form), matrix(generator, k, n, dtype, form)
        results = []
        for threads in (1, 2, 3, 4):
            settings.threads = threads
            results.append(gemm(a, b, np.empty((m, n), dtype), bias=b[0].copy()).tobytes())
        assert len(set(results)) == 1


def test_blas_and_ours_agree():
    generator = np.random.default_rng(2)
    a, b = matrix(generator, 90, 50, "float64", "columns"), matrix(generator, 50, 70, "float64", "sliced")
    bias, start = generator.standard_normal(70), generator.standard_normal((90, 70))
    for accumulate in (False, True):
        ours = gemm(a, b, start.copy(), accumulate=accumulate, bias=bias)
        before, settings.gemm = settings.gemm, "blas"
        theirs = gemm(a, b, start.copy(), accumulate=accumulate, bias=bias)
        np.testing.assert_allclose(theirs, ours, rtol=1e-12, atol=1e-12)
        settings.gemm = before


def test_read_only_and_broadcast_operands():
    a = np.broadcast_to(np.float32(2), (30, 40))  # strides of zero
    b = np.ones((40, 20), "f4")
    b.flags.writeable = False
    assert (gemm(a, b, np.empty((30, 20), "f4")) == 80).all()
    bias = np.arange(40, dtype="f4")[::-2]
    assert (gemm(a, b, np.empty((30, 20), "f4"), bias=bias) == 80 + bias).all()


def test_no_memory_is_taken_by_a_second_call():
    a, b, out = np.ones((200, 700), "f4"), np.ones((700, 300), "f4"), np.empty((200, 300), "f4")
    gemm(a, b, out)
    tracemalloc.start()
    try:
        gemm(a, b, out, accumulate=True)
        assert tracemalloc.get_traced_memory()[1] < 20_000  # Python objects only; a panel would be 100 kB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("way", ["ours", "blas"])
def test_what_does_not_fit_is_refused(way):
    settings.gemm = "blas" if way == "blas" else settings.gemm
    f = np.float32
    a, b, out = np.ones((3, 4), f), np.ones((4, 5), f), np.ones((3, 5), f)
    cases = [((a, b.T, out), {}), ((a, b, out.T), {}), ((a, b, out[:2]), {}), ((a, b[:3], out), {}),
             ((a.astype("f8"), b, out), {}), ((a, b.astype("f8"), out), {}), ((a, b, out.astype("f8")), {}),
             ((a.astype("i4"), b.astype("i4"), out.astype("i4")), {}), ((a[0], b, out), {}),
             ((a, b, out), {"bias": np.ones(4, f)}), ((a, b, out), {"bias": np.ones(5)}),
             ((a, b, out), {"bias": np.ones((1, 5), f)}), ((a, b, np.ones((5, 3), f).T), {})]
    for arguments, options in cases:
        with pytest.raises(ValueError, match="^gemm: "):
            gemm(*arguments, **options)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_negative_control_the_check_sees_one_wrong_term(dtype):
    generator = np.random.default_rng(3)
    a, b = matrix(generator, 33, 65, dtype, "rows"), matrix(generator, 65, 34, dtype, "rows")
    out = gemm(a, b, np.empty((33, 34), dtype))
    assert_product(a, b, out)
    damaged = a.copy()
    damaged[32, 64] *= 1.001  # the last step of k, in one row
    gemm(damaged, b, out)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_product(a, b, out)
    gemm(a[:, :64], b[:64], out)  # a step of k forgotten
    with pytest.raises(AssertionError, match="elements differ"):
        assert_product(a, b, out)


def test_warm_compiles_all_there_is():
    from mpipar.kernels.cache import compiled_count

    warm("float32")
    before = compiled_count()
    run_and_check(20, 30, 40, "float32", "columns", "blocks", True, True)
    assert compiled_count() == before
