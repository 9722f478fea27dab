"""Splits, parts and chunks, without ranks."""
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipar.comm import buffers


def test_splits_of_cases():
    assert buffers.split_sizes(65, 2) == [33, 32] and buffers.split_sizes(3, 4) == [1, 1, 1, 0]
    with pytest.raises(ValueError, match="parts >= 1"):
        buffers.split_sizes(3, 0)


@given(st.integers(0, 1000), st.integers(1, 40))
def test_sizes_are_near_equal_and_the_longer_come_first(n, parts):
    sizes = buffers.split_sizes(n, parts)
    assert sum(sizes) == n and max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


@given(st.integers(0, 100), st.integers(1, 30))
def test_chunks_cover_the_array_and_keep_the_limit(n, limit):
    x = np.arange(n)
    pieces = list(buffers.chunks(x, limit))
    assert all(0 < piece.size <= limit and np.shares_memory(piece, x) for piece in pieces)
    assert len(pieces) == -(-n // limit) and [v for piece in pieces for v in piece] == list(range(n))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.data())
def test_packed_parts_come_back(shape, data):
    axis = data.draw(st.integers(0, len(shape) - 1))
    sizes = buffers.split_sizes(shape[axis], data.draw(st.integers(1, 5)))
    x = np.asfortranarray(np.random.default_rng(0).standard_normal(shape))
    flat = buffers.pack_parts(x, axis, sizes)
    ends = np.cumsum([0] + buffers.counts(x.shape, axis, sizes))
    for i, part in enumerate(np.split(x, np.cumsum(sizes)[:-1], axis)):
        np.testing.assert_array_equal(flat[ends[i]:ends[i + 1]].reshape(part.shape), part)
    out = np.empty(x.shape[::-1]).T
    buffers.unpack_parts(flat, out, axis, sizes)
    np.testing.assert_array_equal(out, x)
