"""AdamW and SGD: bits equal to the plain form, values of the published update."""
import numpy as np
import pytest

from mpipar.kernels import optimizer, plain
from tests.helpers.kernels import DTYPES, normal, same_bits, threads

OPTIONS = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
both = pytest.mark.parametrize("dtype", DTYPES)
modules = pytest.mark.parametrize("module", [optimizer, plain])


def arrays(size, dtype):
    return [normal(1, size, dtype=dtype), normal(2, size, dtype=dtype), normal(3, size, dtype=dtype) / 10,
            normal(4, size, dtype=dtype)**2]


@both
@pytest.mark.parametrize("size, bounds, decay", [
    (0, [0, 0], [0.1]), (1, [0, 1], [0.0]), (5, [0], []), (1000, [0, 3, 3, 700, 1000], [0.1, 9.0, 0.0, 0.5]),
    (200_003, [7, 65_536, 199_999], [0.1, 0.0])])
def test_bits_of_the_plain_form(size, bounds, decay, dtype):
    ours, theirs = arrays(size, dtype), arrays(size, dtype)
    for step in (1, 2, 1000):
        optimizer.adamw(*ours, bounds, decay, step=step, grad_scale=0.7, **OPTIONS)
        plain.adamw(*theirs, bounds, decay, step=step, grad_scale=0.7, **OPTIONS)
        assert all(same_bits(a, b) for a, b in zip(ours, theirs))
    optimizer.sgd(*ours[:2], bounds, decay, lr=0.1, grad_scale=0.7)
    plain.sgd(*theirs[:2], bounds, decay, lr=0.1, grad_scale=0.7)
    assert same_bits(ours[0], theirs[0])
    start = arrays(size, dtype)[0]  # elements outside of all segments
    outside = np.r_[0:bounds[0], bounds[-1]:size]
    np.testing.assert_array_equal(ours[0][outside], start[outside])


@modules
def test_published_update_in_float64(module):
    # Loshchilov and Hutter 2019, algorithm 2, with the learning rate multiplying the decay as in
    # torch.optim.AdamW
    p, g, m, v = arrays(50, "float64")
    q, first, second = p.copy(), m.copy(), v.copy()
    for step in range(1, 6):
        gradient = g * step * 0.5
        q *= 1 - OPTIONS["lr"] * 0.1
        first = 0.9 * first + 0.1 * gradient
        second = 0.99 * second + 0.01 * gradient**2
        q -= OPTIONS["lr"] * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.99**step)) + 1e-8)
        module.adamw(p, g * step, m, v, [0, 50], [0.1], step=step, grad_scale=0.5, **OPTIONS)
    np.testing.assert_allclose(p, q, rtol=1e-13)
    np.testing.assert_allclose(m, first, rtol=1e-13)
    np.testing.assert_allclose(v, second, rtol=1e-13)


@modules
def test_first_step_moves_by_the_learning_rate(module):
    p, g, m, v = np.ones(3), np.array([1e-3, -5.0, 0.0]), np.zeros(3), np.zeros(3)
    module.adamw(p, g, m, v, [0, 3], [0.0], step=1, **OPTIONS)
    np.testing.assert_allclose(p, [1 - 3e-3, 1 + 3e-3, 1], rtol=1e-6)


@modules
def test_sgd(module):
    p = np.array([1.0, 1.0])
    module.sgd(p, np.array([2.0, 2.0]), [0, 1, 2], [0.0, 1.0], lr=0.1)
    np.testing.assert_allclose(p, [0.8, 0.7])


@both
def test_bits_do_not_depend_on_how_the_arrays_are_cut(dtype):
    whole, parts = arrays(10_007, dtype), arrays(10_007, dtype)
    optimizer.adamw(*whole, [0, 10_007], [0.1], step=3, **OPTIONS)
    cuts = [0, 1, 14, 3333, 3335, 9000, 10_007]
    for lo, hi in zip(cuts[:-1], cuts[1:]):
        optimizer.adamw(*(array[lo:hi] for array in parts), [0, hi - lo], [0.1], step=3, **OPTIONS)
    assert all(same_bits(a, b) for a, b in zip(whole, parts))


@both
def test_same_bits_on_any_number_of_threads(dtype):
    results = []
    for count in (1, 2, 3):
        with threads(count):
            state = arrays(300_001, dtype)
            optimizer.adamw(*state, [0, 77, 200_000, 300_001], [0.1, 0, 0.2], step=3, **OPTIONS)
            optimizer.sgd(*state[:2], [0, 77, 300_001], [0.1, 0], lr=0.1)
            results.append(state)
    for result in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(result, results[0]))


def test_errors():
    p = np.zeros(4)
    with pytest.raises(ValueError, match="step"):
        optimizer.adamw(p, p, p, p, [0, 4], [0.0], step=0, **OPTIONS)
    for bounds, decay in (([0, 5], [0.0]), ([0, 4], [0.0, 0.0]), ([0, 3, 2], [0, 0]), ([-1, 4], [0])):
        with pytest.raises(ValueError, match="bounds"):
            optimizer.adamw(p, p, p, p, bounds, decay, step=1, **OPTIONS)
