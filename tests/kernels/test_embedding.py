"""Embedding rows over shards of the vocabulary, and positions."""
import numpy as np
import pytest

from mpipar.kernels import embedding, plain
from tests.helpers.finite_difference import check_gradient
from tests.helpers.kernels import DTYPES, assert_close, normal, same_bits, threads

TOLERANCE = {"float32": 1e-6, "float64": 1e-14}
both = pytest.mark.parametrize("dtype", DTYPES)
modules = pytest.mark.parametrize("module", [embedding, plain])


def tokens_of(rows, V):
    return np.random.default_rng(3).integers(0, V, rows)


@both
@modules
@pytest.mark.parametrize("cuts", [[0, 65], [0, 33, 65], [0, 0, 10, 65]])
@pytest.mark.parametrize("rows, D", [(0, 5), (1, 1), (50, 7), (700, 130)])
def test_rows_and_gradients_over_shards(module, rows, D, cuts, dtype):
    tokens, weight, dy = tokens_of(rows, 65), normal(1, 65, D, dtype=dtype), normal(2, rows, D, dtype=dtype)
    total, gradients = np.zeros((rows, D), dtype), []
    for lo, hi in zip(cuts[:-1], cuts[1:]):
        out = np.full((rows, D), np.nan, dtype)
        assert module.embedding_forward(tokens, weight[lo:hi], lo, out) is out
        total += out
        gradients.append(module.embedding_backward(tokens, dy, lo, np.ones((hi - lo, D), dtype)))
    assert same_bits(total, weight[tokens])
    expected = np.ones((65, D))
    np.add.at(expected, tokens, dy.astype(np.float64))
    assert_close(np.concatenate(gradients), expected, TOLERANCE[dtype])


@modules
def test_tokens_of_no_shard_are_left_out(module):
    tokens = np.array([-1, 5, 0, 99])
    out = module.embedding_forward(tokens, np.ones((3, 2)), 4, np.full((4, 2), np.nan))
    np.testing.assert_array_equal(out[:, 0], [0, 1, 0, 0])
    gradient = module.embedding_backward(tokens, np.ones((4, 2)), 4, np.zeros((3, 2)))
    np.testing.assert_array_equal(gradient[:, 1], [0, 1, 0])


@both
@modules
@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (1, 1, 1), (3, 5, 7), (4, 70, 130)])
def test_positions(module, shape, dtype):
    x, table = normal(1, *shape, dtype=dtype), normal(2, shape[1] + 3, shape[2], dtype=dtype)
    y = x.copy()
    assert module.add_positions(y, table) is y
    assert same_bits(y, x + table[:shape[1]])
    gradient = module.positions_backward(x, np.ones_like(table))
    expected = np.ones(table.shape)
    expected[:shape[1]] += x.astype(np.float64).sum(axis=0)
    assert_close(gradient, expected, TOLERANCE[dtype])


@both
def test_same_bits_on_any_number_of_threads(dtype):
    tokens = tokens_of(2000, 30)
    weight, dy = normal(1, 30, 301, dtype=dtype), normal(2, 2000, 301, dtype=dtype)
    results = []
    for count in (1, 2, 3):
        with threads(count):
            x = dy.reshape(4, 500, 301).copy()
            results.append((embedding.embedding_forward(tokens, weight, 0, np.empty_like(dy)),
                            embedding.embedding_backward(tokens, dy, 0, weight.copy()),
                            embedding.positions_backward(x, np.ones((600, 301), dtype)),
                            embedding.add_positions(x, dy[:500])))
    for result in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(result, results[0]))


def test_plain_backward_against_differences():
    tokens, weight, table = tokens_of(6, 4), normal(1, 4, 3), normal(2, 5, 3)
    factor = normal(3, 2, 3, 3)

    def loss(weight, table):
        x = plain.embedding_forward(tokens, weight, 0, np.empty((6, 3))).reshape(2, 3, 3)
        return float(np.sum(factor * np.sin(plain.add_positions(x, table))))
    dx = factor * np.cos(plain.add_positions(weight[tokens].reshape(2, 3, 3), table))
    gradients = [plain.embedding_backward(tokens, dx.reshape(6, 3), 0, np.zeros_like(weight)),
                 plain.positions_backward(dx, np.zeros_like(table))]
    check_gradient(loss, [weight, table], gradients)
    for wrong in ([2 * gradients[0], gradients[1]], [gradients[0], gradients[1] / 2]):
        with pytest.raises(AssertionError):
            check_gradient(loss, [weight, table], wrong)


def test_errors():
    with pytest.raises(ValueError, match="give rows of"):
        embedding.embedding_forward(np.zeros(3, np.int64), np.zeros((4, 2)), 0, np.zeros((3, 3)))
    with pytest.raises(ValueError, match="positions"):
        embedding.add_positions(np.zeros((1, 5, 2)), np.zeros((4, 2)))
