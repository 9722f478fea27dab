"""Reductions of bfloat16: moved in 16 bits, summed in float32 in the order of the ranks, rounded once."""
import ml_dtypes
import numpy as np
import pytest

from mpipar.comm import rounded
from mpipar.comm.mesh import Mesh
from mpipar.nn.parameter import split_range
from mpipar.parallel.data import PIECE, sum_gradients

HALF = np.dtype(ml_dtypes.bfloat16)
RANKS = [1, 2, 3, 4]


@pytest.fixture
def world(comm):
    with Mesh(comm) as mesh:
        yield mesh.world


def input_of(rank, shape):
    return np.random.default_rng(rank).standard_normal(shape).astype(HALF)


def expected(world, shape, op="sum"):
    """What every rank must get, bit by bit."""
    parts = [input_of(rank, shape).astype(np.float32) for rank in range(world.size)]
    if op in ("min", "max"):
        return getattr(np, op)(parts, axis=0).astype(HALF)
    total = np.zeros(shape, np.float32)
    for part in parts:
        total += part
    return (total * np.float32(1 / world.size) if op == "mean" else total).astype(HALF)


def same(x, y):
    assert x.dtype == y.dtype == HALF and x.shape == y.shape
    np.testing.assert_array_equal(x.view(np.uint16), y.view(np.uint16))


@pytest.mark.mpi(np=RANKS)
@pytest.mark.parametrize("shape", [(5, 7), (1,), (0,), (3, 1001), ()])
@pytest.mark.parametrize("op", ["sum", "mean", "min", "max"])
def test_all_reduce_and_reduce(world, shape, op):
    want = expected(world, shape, op)
    x = input_of(world.rank, shape)
    assert world.all_reduce(x, op) is x
    same(x, want)
    y = input_of(world.rank, shape)
    pending = world.all_reduce_start(y, op)
    assert pending.wait() is y
    same(y, want)
    for root in range(world.size):
        result = world.reduce(input_of(world.rank, shape), root, op)
        assert (result is None) == (world.rank != root)
        if result is not None:
            same(result, want)


@pytest.mark.mpi(np=RANKS)
def test_views_and_parts(world):
    for make in (lambda: np.zeros((7, 4), HALF).T, lambda: np.zeros((4, 14), HALF)[:, ::2], lambda: np.zeros((7, 4), HALF)[::-1].T):
        for start in (False, True):
            x = make()
            x[...] = input_of(world.rank, (4, 7))
            (world.all_reduce_start(x).wait() if start else world.all_reduce(x))
            same(x, expected(world, (4, 7)))
    sizes = [b - a for a, b in (split_range(7, world.size, r) for r in range(world.size))]
    first, last = split_range(7, world.size, world.rank)
    for start in (False, True):
        x = input_of(world.rank, (4, 7))
        part = (world.reduce_scatter_start(x, axis=1, sizes=sizes).wait() if start
                else world.reduce_scatter(x, axis=1, sizes=sizes))
        same(np.ascontiguousarray(part), np.ascontiguousarray(expected(world, (4, 7))[:, first:last]))
        same(x, input_of(world.rank, (4, 7)))
    out = np.zeros((3, 2), HALF)
    assert world.reduce_scatter(input_of(world.rank, (3 * world.size, 2)), out=out) is out
    same(out, np.ascontiguousarray(expected(world, (3 * world.size, 2))[3 * world.rank:3 * world.rank + 3]))


@pytest.mark.mpi(np=[2, 3])
def test_moves_and_messages(world):
    gathered = world.all_gather(input_of(world.rank, (2, 3)), axis=1)
    same(np.ascontiguousarray(gathered), np.concatenate([input_of(r, (2, 3)) for r in range(world.size)], axis=1))
    same(world.broadcast(input_of(world.rank, (5,)), 1), input_of(1, (5,)))
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    sent = world.send_start(input_of(world.rank, (4,)), after)
    same(world.recv(np.empty(4, HALF), before), input_of(before, (4,)))
    sent.wait()


@pytest.mark.mpi(np=[2, 4])
@pytest.mark.parametrize("limit", [1, 5, 64])
def test_calls_of_few_elements(world, limit, monkeypatch):
    monkeypatch.setattr(world, "limit", limit)
    x = input_of(world.rank, (37,))
    same(world.all_reduce(x), expected(world, (37,)))
    same(world.all_reduce_start(input_of(world.rank, (37,))).wait(), expected(world, (37,)))
    result = world.reduce(input_of(world.rank, (37,)), 1)
    if world.rank == 1:
        same(result, expected(world, (37,)))
    part = world.reduce_scatter(input_of(world.rank, (4 * world.size,)))
    same(part, expected(world, (4 * world.size,))[4 * world.rank:4 * world.rank + 4])


@pytest.mark.mpi(np=2)
def test_in_pieces(world, monkeypatch):
    monkeypatch.setattr(rounded, "STAGED", 1000)
    same(world.all_reduce(input_of(world.rank, (4501,))), expected(world, (4501,)))


@pytest.mark.mpi(np=[3, 4])
def test_control_a_sum_rounded_at_each_step_differs(world):
    x = input_of(world.rank, (2000,))
    world.all_reduce(x)
    stepwise = input_of(0, (2000,))
    for rank in range(1, world.size):
        stepwise += input_of(rank, (2000,))
    assert (stepwise.view(np.uint16) != x.view(np.uint16)).mean() > 0.1
    exact = sum(input_of(rank, (2000,)).astype(np.float64) for rank in range(world.size))
    error, other = np.abs(x.astype(np.float64) - exact), np.abs(stepwise.astype(np.float64) - exact)
    assert (error <= 2.0**-8 * np.abs(exact) + 1e-6).all() and other.mean() > 1.3 * error.mean()


@pytest.mark.mpi(np=[1, 2, 4])
def test_gradients_go_as_16_bits_and_return_as_float32(comm):
    def gradients(rank):
        return np.random.default_rng(rank).standard_normal(1234).astype(np.float32)

    with Mesh(comm) as mesh:
        sent = {}
        for dtype in (np.dtype(np.float32), HALF):
            x = gradients(mesh.rank)
            with mesh.record() as log:
                sum_gradients(mesh.world, x, dtype)
            sent[dtype] = log.sent()
            exact = sum(gradients(rank).astype(np.float64) for rank in range(mesh.size))
            assert x.dtype == np.float32
            # Each part is rounded for its message and the sum once more: 2^-8 of each number's size at most.
            sizes = sum(np.abs(gradients(rank)) for rank in range(mesh.size)) + np.abs(exact)
            bound = 2.0**-8 * sizes + 1e-6 if dtype == HALF and mesh.size > 1 else 1e-5
            assert (np.abs(x - exact) <= bound).all()
            assert (mesh.world.all_gather(x[None]) == x).all()  # the same bits on every rank
        assert sent[HALF] * 2 == sent[np.dtype(np.float32)]
        assert PIECE > 1234
        if mesh.size > 1:  # control: a sum of float32 is not what a bfloat16 can hold
            y = gradients(mesh.rank)
            sum_gradients(mesh.world, y, np.dtype(np.float32))
            assert (x != y).mean() > 0.9
