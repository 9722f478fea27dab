"""Parameters know their place; initial values do not depend on the layout."""

import numpy as np
import pytest

from mpipar.nn.initial import Constant, Normal, contiguous_runs
from mpipar.nn.parameter import FlatBuffers, Parameter, aligned_zeros, split_range


@pytest.mark.parametrize("length,parts", [(65, 2), (7, 3), (4, 4), (3, 4), (0, 2), (10, 1)])
def test_ranges_cover_everything_once_in_order(length, parts):
    ranges = [split_range(length, parts, i) for i in range(parts)]
    assert [a for a, _ in ranges] == [0] + [b for _, b in ranges[:-1]] and ranges[-1][1] == length
    sizes = [b - a for a, b in ranges]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


def test_65_rows_over_2_are_33_and_32():
    assert [split_range(65, 2, r) for r in (0, 1)] == [(0, 33), (33, 65)]


@pytest.mark.parametrize("shape,dim", [((6, 5), 0), ((6, 5), 1), ((4, 3, 8), 2), ((4, 3, 8), 1), ((3, 8), 1), ((7,), 0)])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_shards_have_the_bits_of_the_whole_tensor(shape, dim, parts):
    def make(rank, size):
        return Parameter("w", shape, Normal(0.5), shard_dim=dim, tp_rank=rank, tp_size=size)

    whole = make(0, 1)
    FlatBuffers([whole], "float32")
    whole.initialise(seed=7)
    for rank in range(parts):
        shard = make(rank, parts)
        FlatBuffers([shard], "float32")
        shard.initialise(seed=7)
        assert (shard.data == whole.data[shard.index()]).all()


def test_values_depend_on_seed_and_name_and_have_the_stated_deviation():
    def values(seed, name, dtype="float64"):
        p = Parameter(name, (200, 100), Normal(0.5))
        FlatBuffers([p], dtype)
        p.initialise(seed)
        return p.data

    a = values(0, "a")
    assert abs(a.std() - 0.5) < 0.01 and abs(a.mean()) < 0.01
    assert (a != values(1, "a")).mean() > 0.99 and (a != values(0, "b")).mean() > 0.99
    assert (values(0, "a", "float32") == a.astype(np.float32)).all()


def test_runs_are_contiguous_in_the_global_tensor():
    shape = (3, 4, 5)
    index = (slice(1, 3), slice(0, 4), slice(2, 4))
    flat = np.arange(60).reshape(shape)
    out = np.zeros((2, 4, 2), np.int64)
    for run, start in contiguous_runs(out, index, shape):
        run[:] = np.arange(start, start + len(run))
    assert (out == flat[index]).all()


def test_flat_buffers_are_views_in_order():
    a, b = Parameter("a", (2, 3), Constant(1.0)), Parameter("b", (4,), Constant(2.0), decay=False)
    flat = FlatBuffers([a, b], "float64")
    for p in (a, b):
        p.initialise(0)
    assert flat.data.tolist() == [1.0] * 6 + [2.0] * 4 and flat.bounds.tolist() == [0, 6, 10]
    assert flat.decay.tolist() == [1.0, 0.0]
    a.grad[1, 2] = 5
    assert flat.grad[5] == 5
    assert aligned_zeros(7, "float32").ctypes.data % 64 == 0


def test_the_first_gradient_of_a_step_overwrites_and_the_others_add():
    first, second, third = (Parameter(name, (2, 3), Constant(0.0)) for name in "abc")
    buffers = FlatBuffers([first, second, third], "float64")
    buffers.grad[:] = np.nan  # of the step before
    buffers.begin_gradients()
    array, adds = first.claim_gradient()
    assert not adds and np.shares_memory(array, buffers.grad)
    array[:] = 1
    array, adds = first.claim_gradient()
    assert adds and (first.grad == 1).all()
    second.grad[0] += 2
    assert second.grad.tolist() == [[2, 2, 2], [0, 0, 0]]
    buffers.settle_gradients(0, 12)
    assert np.isnan(buffers.grad[12:]).all()  # not in that range
    buffers.settle_gradients(11, 13)
    assert buffers.grad.tolist() == [1] * 6 + [2] * 3 + [0] * 9
