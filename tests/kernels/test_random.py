"""Counter-based random numbers: published vectors, distribution, and independence of how a range is cut."""
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from mpipar.kernels import plain, random
from tests.helpers.kernels import DTYPES, normal, same_bits, threads

both = pytest.mark.parametrize("dtype", DTYPES)
modules = pytest.mark.parametrize("module", [random, plain])

# Known answers for philox4x32 with 10 rounds from the authors' Random123 distribution: counter, key, result.
VECTORS = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0],
     [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
]


@modules
@pytest.mark.parametrize("counter, key, result", VECTORS)
def test_published_vectors(module, counter, key, result):
    words = module.philox(np.array(counter, np.uint32), np.array(key, np.uint32))
    np.testing.assert_array_equal(words, result)


def test_philox_of_many_counters():
    counters = np.random.default_rng(1).integers(0, 2**32, (5, 7, 4), np.uint32)
    key = np.array([3, 2**31 + 1], np.uint32)
    np.testing.assert_array_equal(random.philox(counters, key), plain.philox(counters, key))
    assert random.philox(np.zeros((0, 4), np.uint32), key).shape == (0, 4)


@pytest.mark.parametrize("key, start, n", [(0, 0, 1001), (2**64 - 1, 7, 1000), (5, 2**40 + 1, 64), (5, 3, 1),
                                           (5, 2, 1), (5, 9, 0)])
def test_normal_numbers_against_plain(key, start, n):
    out = random.fill_normal(np.full(n, np.nan), key, start, std=0.5)
    np.testing.assert_allclose(out, plain.fill_normal(np.empty(n), key, start, std=0.5), rtol=0, atol=3e-15)
    single = random.fill_normal(np.empty(n, np.float32), key, start, std=0.5)
    assert same_bits(single, out.astype(np.float32))


@hypothesis_settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**45), st.lists(st.integers(0, 300), max_size=6),
       st.sampled_from(DTYPES))
def test_normal_numbers_do_not_depend_on_the_cuts(key, start, cuts, dtype):
    whole = random.fill_normal(np.empty(300, dtype), key, start, std=0.02)
    parts = np.full(300, np.nan, dtype)
    edges = sorted({0, 300, *cuts})
    for lo, hi in zip(edges[:-1], edges[1:]):
        random.fill_normal(parts[lo:hi], key, start + lo, std=0.02)
    assert same_bits(whole, parts)


def test_distribution():
    x = random.fill_normal(np.empty(1_000_000), 1, 0, std=1.0)
    assert abs(x.mean()) < 4e-3 and abs(x.std() - 1) < 3e-3
    assert abs((x**3).mean()) < 0.02 and abs((x**4).mean() - 3) < 0.05
    assert abs((np.abs(x) < 1).mean() - 0.682689) < 2e-3 and 4.5 < np.abs(x).max() < 6.5
    assert abs(np.mean(x[::2] * x[1::2])) < 6e-3  # the two numbers of a pair
    other = random.fill_normal(np.empty(1_000_000), 2, 0, std=1.0)
    assert abs(np.mean(x * other)) < 4e-3


def test_same_bits_on_any_number_of_threads():
    results = []
    for count in (1, 2, 3):
        with threads(count):
            out = random.fill_normal(np.empty(100_001, np.float32), 5, 3, std=1.0)
            x = np.ones((3, 50_001), np.float32)
            results.append((out, random.dropout(x, np.empty_like(x), **drop())))
    for result in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(result, results[0]))


def drop(**changes):
    return {"key": 77, "step": 5, "samples": np.array([3, 2**40, 7]), "offset": 0, "p": 0.1} | changes


@both
@pytest.mark.parametrize("columns", [0, 1, 5, 1023, 5000])
@pytest.mark.parametrize("offset", [0, 1, 6, 2**33 + 3])
def test_dropout_against_plain(offset, columns, dtype):
    x = normal(1, 3, columns, dtype=dtype)
    expected = plain.dropout(x, np.empty_like(x), **drop(offset=offset))
    assert same_bits(random.dropout(x, np.full_like(x, np.nan), **drop(offset=offset)), expected)
    assert same_bits(random.dropout(x, x, **drop(offset=offset)), expected)


@hypothesis_settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**40), st.lists(st.integers(0, 2100), max_size=4), st.permutations([0, 1, 2]))
def test_masks_do_not_depend_on_the_cuts(offset, cuts, order):
    x, edges = np.ones((3, 2100)), sorted({0, 2100, *cuts})
    whole = random.dropout(x, np.empty_like(x), **drop(offset=offset))
    parts = np.full_like(x, np.nan)
    for row in order:  # a sample at a time, in any order, and a piece of it at a time
        for lo, hi in zip(edges[:-1], edges[1:]):
            piece = np.ones((1, hi - lo))
            options = drop(offset=offset + lo, samples=drop()["samples"][row:row + 1])
            parts[row, lo:hi] = random.dropout(piece, piece, **options)
    assert same_bits(whole, parts)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_dropout_keeps_the_mean(p):
    x = np.ones((3, 200_000))
    out = random.dropout(x, np.empty_like(x), **drop(p=p))
    assert abs((out > 0).mean() - (1 - p)) < 3e-3
    np.testing.assert_allclose(out[out > 0], 1 / (1 - p))


def test_masks_differ_by_key_step_and_sample():
    x = np.ones((3, 20_000))
    first = random.dropout(x, np.empty_like(x), **drop(p=0.5)) > 0
    for changes in ({"key": 78}, {"step": 6}, {"samples": np.array([4, 2**41, 8])}, {"offset": 1},
                    {"key": 77 + 2**32}):
        other = random.dropout(x, np.empty_like(x), **drop(p=0.5, **changes)) > 0
        assert abs((first == other).mean() - 0.5) < 0.02
    assert abs((first[0] == first[1]).mean() - 0.5) < 0.02


@modules
@pytest.mark.parametrize("p", [1.0, -0.1, 2, float("nan")])
def test_probabilities_that_do_not_fit(module, p):
    x = np.ones((3, 4))
    with pytest.raises(ValueError, match="0 <= p < 1"):
        module.dropout(x, x, **drop(p=p))


def test_errors():
    with pytest.raises(ValueError, match="one sample"):
        random.dropout(np.ones((2, 4)), np.ones((2, 4)), **drop())
    with pytest.raises(ValueError, match="int64"):
        random.fill_normal(np.zeros(3, np.int64), 1, 0, std=1)
