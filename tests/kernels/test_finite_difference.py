"""The checker of gradients must itself be able to fail."""
import numpy as np
import pytest

from tests.helpers.finite_difference import check_gradient
from tests.helpers.kernels import normal


def loss(x, y):
    return float(np.sum(np.sin(x) * y))


def test_right_gradients_pass_and_arrays_are_restored():
    x, y = normal(1, 3, 4), normal(2, 3, 4)
    before = x.copy(), y.copy()
    assert check_gradient(loss, [x, y], [np.cos(x) * y, np.sin(x)]) < 1e-8
    np.testing.assert_array_equal(x, before[0])
    np.testing.assert_array_equal(y, before[1])


def test_arrays_by_name():
    arrays = {"x": normal(1, 5), "y": normal(2, 5)}
    gradients = {"y": np.sin(arrays["x"])}
    assert check_gradient(lambda: loss(**arrays), arrays, gradients) < 1e-8


@pytest.mark.parametrize("wrong", [lambda g: 1.0001 * g, lambda g: -g, lambda g: 0 * g, lambda g: g.T,
                                   lambda g: g + 1e-4])
def test_wrong_gradients_are_named(wrong):
    x, y = normal(1, 4, 4), normal(2, 4, 4)
    with pytest.raises(AssertionError, match="gradient 0"):
        check_gradient(loss, [x, y], [np.ascontiguousarray(wrong(np.cos(x) * y)), np.sin(x)])


def test_one_wrong_element_of_the_largest_size_is_found_with_one_sample():
    x, y = normal(1, 100, 100), normal(2, 100, 100)
    gradient = np.cos(x) * y
    gradient[3, 7] = 50
    with pytest.raises(AssertionError, match=r"\(3, 7\)"):
        check_gradient(loss, [x, y], [gradient, None], samples=1)


def test_what_is_not_finite_fails():
    x, y = normal(1, 4), normal(2, 4)
    with pytest.raises(AssertionError, match="not finite"):
        check_gradient(loss, [x, y], [np.full(4, np.nan), None])


def test_single_precision_is_refused():
    x, y = normal(1, 4).astype(np.float32), normal(2, 4)
    with pytest.raises(AssertionError, match="float64"):
        check_gradient(loss, [x, y], [x, None])
