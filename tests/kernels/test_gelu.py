"""GeLU in both forms against the plain form, and that against differences."""
import numpy as np
import pytest

from mpipar.kernels import gelu, plain
from mpipar.kernels.polynomials import exp_float32, normal_float32
from tests.helpers.finite_difference import check_gradient
from tests.helpers.kernels import DTYPES, assert_close, normal, same_bits, threads

# Measured with 10^6 elements: float32 4e-7 forward and 5e-7 backward (of x up to 9), float64 2e-15.
TOLERANCE = {"float32": 1e-6, "float64": 1e-14}
SHAPES = [(0,), (1,), (7,), (3, 5), (2, 3, 65), (16384 + 33,), (4, 16384)]
forms = pytest.mark.parametrize("form", ["erf", "tanh"])


@forms
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_against_plain(shape, dtype, form):
    x, dy = 3 * normal(1, *shape, dtype=dtype), normal(2, *shape, dtype=dtype)
    out, dx = np.full_like(x, np.nan), np.full_like(x, np.nan)
    assert gelu.gelu_forward(x, out, form=form) is out
    assert gelu.gelu_backward(x, dy, dx, form=form) is dx
    wide = x.astype(np.float64)
    assert_close(out, plain.gelu_forward(wide, np.empty_like(wide), form=form), TOLERANCE[dtype])
    expected = plain.gelu_backward(wide, dy.astype(np.float64), np.empty_like(wide), form=form)
    assert_close(dx, expected, TOLERANCE[dtype])


@forms
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place(dtype, form):
    x, dy = normal(1, 1000, dtype=dtype), normal(2, 1000, dtype=dtype)
    out, dx = gelu.gelu_forward(x, x.copy(), form=form), gelu.gelu_backward(x, dy, dy.copy(), form=form)
    assert_close(gelu.gelu_backward(x, dy, dy, form=form), dx.astype(np.float64), TOLERANCE[dtype])
    assert_close(gelu.gelu_forward(x, x, form=form), out.astype(np.float64), TOLERANCE[dtype])


@forms
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_on_any_number_of_threads(dtype, form):
    x, dy = normal(1, 100_001, dtype=dtype), normal(2, 100_001, dtype=dtype)
    results = []
    for count in (1, 2, 3):
        with threads(count):
            results.append((gelu.gelu_forward(x, np.empty_like(x), form=form),
                            gelu.gelu_backward(x, dy, np.empty_like(x), form=form)))
    for out, dx in results[1:]:
        assert same_bits(out, results[0][0]) and same_bits(dx, results[0][1])


@forms
def test_plain_backward_against_differences(form):
    x, weight = 2 * normal(1, 50), normal(2, 50)
    gradient = plain.gelu_backward(x, weight, np.empty_like(x), form=form)

    def loss(x):
        return float(weight @ plain.gelu_forward(x, np.empty_like(x), form=form))
    check_gradient(loss, [x], [gradient], samples=50)
    with pytest.raises(AssertionError):
        check_gradient(loss, [x], [1.001 * gradient], samples=50)


@forms
@pytest.mark.parametrize("dtype", DTYPES)
def test_extremes(dtype, form):
    x = np.array([-1e4, -50, -13, 0, 13, 50, 1e4] * 10, dtype)
    one = np.ones_like(x)
    np.testing.assert_array_equal(gelu.gelu_forward(x, np.empty_like(x), form=form)[4:7], x[4:7])
    assert np.abs(gelu.gelu_forward(x, np.empty_like(x), form=form)[:3]).max() < 1e-30
    slope = gelu.gelu_backward(x, one, np.empty_like(x), form=form)
    np.testing.assert_allclose(slope[:7], [0, 0, 0, 0.5, 1, 1, 1], atol=1e-26)
    x[:] = np.nan
    assert np.isnan(gelu.gelu_forward(x, np.empty_like(x), form=form)).all()


def test_errors():
    x = np.zeros(4)
    with pytest.raises(ValueError, match="erf, tanh"):
        gelu.gelu_forward(x, x, form="relu")
    with pytest.raises(ValueError, match="float32"):
        gelu.gelu_forward(x, x.astype(np.float32))
    with pytest.raises(ValueError, match="differ"):
        gelu.gelu_forward(x, np.zeros(5))
    with pytest.raises(ValueError, match="contiguous"):
        gelu.gelu_forward(x, np.zeros(8)[::2])


def test_sources_of_any_layout():
    x = normal(1, 6, 8)
    expected = gelu.gelu_forward(x, np.empty_like(x))
    fixed = x.copy()
    fixed.flags.writeable = False
    assert same_bits(gelu.gelu_forward(fixed, np.empty_like(x)), expected)
    turned = np.asfortranarray(x)
    assert same_bits(gelu.gelu_forward(turned, np.empty((6, 8))), expected)


def test_polynomials():
    special = pytest.importorskip("scipy.special")
    x = np.linspace(-87, 88, 100_001).astype(np.float32)
    y = np.array([exp_float32(v) for v in x[::37]])
    assert np.abs(y / np.exp(x[::37].astype(np.float64)) - 1).max() < 1.5e-7
    assert exp_float32(np.float32(-np.inf)) == 0 and exp_float32(np.float32(-100)) == 0
    assert np.isnan(exp_float32(np.float32(np.nan))) and exp_float32(np.float32(0)) == 1
    x = np.linspace(-9, 9, 5001).astype(np.float32)
    cumulative = np.array([normal_float32(v)[0] for v in x])
    exact = special.ndtr(x.astype(np.float64))
    assert np.abs(cumulative - exact).max() < 3e-7
    assert np.abs(cumulative / exact - 1)[x > -6].max() < 1e-5  # the tail too


@forms
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 65, 40_001])
def test_value_and_slope_again(dtype, form, size):
    x, dy = 3 * normal(1, size, dtype=dtype), normal(2, size, dtype=dtype)
    value = gelu.gelu_forward(x, np.empty_like(x), form=form).astype(np.float64)
    slope = gelu.gelu_backward(x, dy, np.empty_like(x), form=form).astype(np.float64)
    wide = x.astype(np.float64), dy.astype(np.float64)
    plain.gelu_again(*wide, form=form)
    gelu.gelu_again(x, dy, form=form)
    for actual, *expected in ((x, value, wide[0]), (dy, slope, wide[1])):
        for right in expected:
            assert_close(actual, right, TOLERANCE[dtype])
