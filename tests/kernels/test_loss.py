"""The pieces of cross-entropy, whole and divided over shards, and the sum of squares."""
import math

import numpy as np
import pytest

from mpipar.kernels import loss, plain
from tests.helpers.finite_difference import check_gradient
from tests.helpers.kernels import DTYPES, assert_close, normal, same_bits, threads

# Measured: float32 4e-7 of the largest sum, 6e-8 in the gradient; float64 4e-16.
TOLERANCE = {"float32": 2e-6, "float64": 1e-14}
both = pytest.mark.parametrize("dtype", DTYPES)
SHAPES = [(0, 5), (1, 1), (3, 2), (5, 65), (17, 256), (40, 1001)]


def sharded(module, logits, targets, cuts, scale, in_place=False):
    """Loss of each row and gradient, made of shards as tensor parallelism makes them."""
    rows, dtype = len(logits), logits.dtype
    shards = [(lo, logits[:, lo:hi].copy()) for lo, hi in zip(cuts[:-1], cuts[1:])]
    maximum = np.full(rows, -np.inf, dtype)
    for _, shard in shards:
        np.maximum(maximum, module.row_max(shard, np.empty(rows, dtype)), out=maximum)
    sums, target_logits = np.zeros(rows, dtype), np.zeros(rows, dtype)
    for lo, shard in shards:
        part, logit = np.full(rows, np.nan, dtype), np.full(rows, np.nan, dtype)
        module.cross_entropy_sums(shard, maximum, targets, lo, part, logit)
        sums += part
        target_logits += logit
    value = np.where(targets < 0, 0, np.log(sums) + maximum - target_logits)
    gradients = []
    for lo, shard in shards:
        out = shard if in_place else np.full_like(shard, np.nan)
        gradients.append(module.cross_entropy_backward(shard, maximum, sums, targets, lo, scale, out))
    return value, np.concatenate(gradients, axis=1)


def operands(rows, columns, dtype):
    targets = np.random.default_rng(2).integers(0, columns, rows)
    targets[::4] = -100
    return 3 * normal(1, rows, columns, dtype=dtype), targets


@both
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_against_plain_in_shards(shape, in_place, dtype):
    logits, targets = operands(*shape, dtype)
    columns = shape[1]
    expected = sharded(plain, logits.astype(np.float64), targets, [0, columns], 0.25)
    for cuts in ([0, columns], [0, columns // 2, columns], [0, 0, columns // 3, columns]):
        value, gradient = sharded(loss, logits, targets, cuts, 0.25, in_place)
        assert_close(value, expected[0], TOLERANCE[dtype])
        assert_close(gradient, expected[1], TOLERANCE[dtype])


@pytest.mark.parametrize("V", [64, 65])
def test_value_of_equal_logits(V):
    value, gradient = sharded(loss, np.zeros((3, V)), np.array([0, V // 2, V - 1]), [0, (V + 1) // 2, V], 1.0)
    np.testing.assert_allclose(value, math.log(V), rtol=1e-15)
    np.testing.assert_allclose(gradient.sum(axis=1), 0, atol=1e-14)


@both
def test_targets_at_the_edges_of_shards(dtype):
    logits, targets = normal(1, 4, 65, dtype=dtype), np.array([0, 32, 33, 64])
    whole = sharded(loss, logits, targets, [0, 65], 1.0)
    halves = sharded(loss, logits, targets, [0, 33, 65], 1.0)
    assert_close(halves[0], whole[0].astype(np.float64), TOLERANCE[dtype])
    assert_close(halves[1], whole[1].astype(np.float64), TOLERANCE[dtype])


@both
def test_large_and_infinite_logits(dtype):
    logits = np.array([[1e4, -1e4, 0] * 8, [5] * 24, [-np.inf] * 23 + [2]], dtype)
    value, gradient = sharded(loss, logits, np.array([0, 1, 23]), [0, 24], 1.0)
    # the float32 sum log 8 + 10^4 - 10^4 above keeps three decimals
    tolerance = 1e-3 if dtype == "float32" else 1e-12
    np.testing.assert_allclose(value, [math.log(8), math.log(24), 0], atol=tolerance)
    assert np.isfinite(gradient).all()


@both
def test_a_nan_reaches_the_loss(dtype):
    logits = normal(1, 3, 300, dtype=dtype)
    logits[1, 217] = np.nan
    value, gradient = sharded(loss, logits, np.array([0, 1, 2]), [0, 300], 1.0)
    np.testing.assert_array_equal(np.isnan(value), [False, True, False])
    assert np.isnan(gradient[1]).any() and np.isfinite(gradient[[0, 2]]).all()


@both
def test_same_bits_on_any_number_of_threads(dtype):
    logits, targets = operands(1000, 257, dtype)
    results = []
    for count in (1, 2, 3):
        with threads(count):
            total = np.float64(loss.sum_squares(logits))
            results.append((*sharded(loss, logits, targets, [0, 100, 257], 0.5), total))
    for result in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(result, results[0]))


def test_plain_backward_against_differences():
    logits, targets = operands(6, 9, "float64")
    _, gradient = sharded(plain, logits, targets, [0, 9], 0.5)

    def value(logits):
        return 0.5 * float(sharded(plain, logits, targets, [0, 9], 0.5)[0].sum())
    check_gradient(value, [logits], [gradient], samples=54)
    for wrong in (2 * gradient, gradient + 0.5 * (np.arange(9) == targets[:, None])):
        with pytest.raises(AssertionError):
            check_gradient(value, [logits], [wrong], samples=54)


@both
@pytest.mark.parametrize("size", [0, 1, 4095, 4097, 200_003])
def test_sum_squares(size, dtype):
    x = normal(1, size, dtype=dtype)
    assert loss.sum_squares(x) == pytest.approx(math.fsum(x.astype(np.float64)**2), rel=1e-14)
    assert plain.sum_squares(x) == pytest.approx(loss.sum_squares(x), rel=1e-13)


def test_sum_squares_does_not_overflow():
    assert loss.sum_squares(np.full(3, 1e30, np.float32)) == pytest.approx(3e60, rel=1e-6)


def test_errors():
    x, row = np.zeros((3, 4)), np.zeros(3)
    with pytest.raises(ValueError, match="each row"):
        loss.row_max(x, np.zeros(4))
    with pytest.raises(ValueError, match="each row"):
        loss.cross_entropy_sums(x, row, np.zeros(4, np.int64), 0, row, row)
