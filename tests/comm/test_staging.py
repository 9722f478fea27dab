"""Collectives through slots of shared memory: the results of messages, at every length of the last piece; and without room."""

import time

import numpy as np
import pytest

from mpipar.comm import shared
from mpipar.comm.mesh import Mesh
from mpipar.kernels import exchange as kernel
from mpipar.kernels import kinds
from mpipar.kernels.memory import aligned_zeros
from tests.helpers.jobs import run_job

RANKS = [2, 3, 4]
OPS = {"sum": np.sum, "min": np.min, "max": np.max}


def everyone(ranks, shape, dtype, seed=0):
    """What each rank puts in: numbers whose sum depends on the order."""
    return np.stack([np.random.default_rng([seed, r]).standard_normal(shape).astype(dtype) for r in range(ranks)])


def in_order(stack, op):
    """The reduction over the first axis, in its order."""
    total = stack[0]
    for x in stack[1:]:
        total = total + x if op == "sum" else OPS[op](np.stack([total, x]), 0)
    return total


def strided(x):
    """The same numbers where every other one in memory is not part of the array."""
    wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


@pytest.fixture
def world(comm, monkeypatch):
    """A group all of whose calls on floats go through the slots."""
    monkeypatch.setattr("mpipar.comm.group.MOST", dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"),
                                                                1 << 40))
    with Mesh(comm) as mesh:
        yield mesh.world


@pytest.mark.mpi(np=RANKS)
@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("rest", [-1, 0, 1])
@pytest.mark.parametrize("pieces", [0, 1, 3])
def test_every_operation(world, dtype, rest, pieces):
    """In place and not, from arrays that are strided or may not be written; the bits of a sum in the order of the ranks."""
    P, me = world.size, world.rank
    rows = max(P, pieces * (kernel.SLOT // np.dtype(dtype).itemsize // 2 // P * P) + rest * P)
    stack = everyone(P, (rows, 2), dtype)
    fixed = stack[me].copy()
    fixed.flags.writeable = False
    mine = slice(rows // P * me, rows // P * (me + 1))
    for op in OPS:
        total = in_order(stack, op)
        for x in (stack[me].copy(), strided(stack[me]), np.asfortranarray(stack[me])):
            assert world.all_reduce(x, op) is x
            np.testing.assert_array_equal(x, total)
        for x in (stack[me], strided(stack[me]), fixed):
            np.testing.assert_array_equal(world.reduce_scatter(x, op=op), total[mine])
            out = strided(np.zeros_like(total[mine]))
            assert world.reduce_scatter(x, op=op, out=out) is out
            np.testing.assert_array_equal(out, total[mine])
        x = stack[me].copy()                                    # its own part
        np.testing.assert_array_equal(world.reduce_scatter(x, op=op, out=x[mine]), total[mine])
    for x in (stack[me], strided(stack[me]), fixed):
        np.testing.assert_array_equal(world.all_gather(x), stack.reshape(-1, 2))
        np.testing.assert_array_equal(world.all_to_all(x), stack[:, mine].reshape(-1, 2))
    whole = np.zeros((rows, 2), dtype)
    whole[mine] = stack[0][mine]
    np.testing.assert_array_equal(world.all_gather(whole[mine], out=whole), stack[0])
    for root in range(P):
        for x in (stack[me].copy(), strided(stack[me])):
            assert world.broadcast(x, root) is x
            np.testing.assert_array_equal(x, stack[root])
    assert world.staging is not None


class Marked(np.ndarray):
    """An array of a class of its own, as np.load(mmap_mode=...) gives one."""


@pytest.mark.mpi(np=2)
def test_ranks_may_say_the_same_in_other_words(world):
    """An array of a subclass, one that may not be written, the number of an axis or of a rank, sizes that are equal."""
    mine, ones = world.rank == 0, np.ones(4)
    x = ones.copy().view(Marked) if mine else np.zeros(4)
    assert (world.broadcast(x) == 1).all() and (world.all_reduce(x) == 2).all()
    x = np.full(4, 1.0 + world.rank)
    x.flags.writeable = not mine
    assert (world.broadcast(x, np.int64(0) if mine else 0) == 1).all()
    assert (world.all_gather(ones, axis=-1 if mine else 0) == 1).all()
    assert (world.all_gather(ones, sizes=[4, 4] if mine else None) == 1).all()
    assert (world.reduce_scatter(ones, sizes=[2, 2] if mine else None, axis=0 if mine else -1) == 2).all()
    assert (world.all_to_all(ones, axis=-1 if mine else 0) == 1).all()


@pytest.mark.mpi(np=2)
@pytest.mark.parametrize("size", [10, 12_000, 16_000, 40_000])
def test_a_result_that_overlaps(world, size):
    """Also elsewhere than at this rank's part, in pieces or at once."""
    memory = np.zeros(2 * size, np.float32)
    x = memory[:size]
    x[:] = np.arange(size) + world.rank
    expected = (2 * np.arange(size) + 1.0)[size // 2 * world.rank:][:size // 2]
    np.testing.assert_array_equal(world.reduce_scatter(x, out=memory[3:3 + size // 2]), expected)
    memory[:size] = np.arange(size) + world.rank
    np.testing.assert_array_equal(world.all_gather(memory[:size // 2], out=memory[3:3 + size // 2 * 2]),
                                  np.concatenate([np.arange(size // 2) + r for r in range(2)]))


@pytest.mark.mpi(np=2)
def test_a_result_that_may_not_be_written_is_refused(world):
    fixed = np.zeros(8)
    fixed.flags.writeable = False
    for call in (lambda: world.all_gather(np.zeros(4), out=fixed), lambda: world.reduce_scatter(np.zeros(16), out=fixed),
                 lambda: world.all_reduce(fixed), lambda: world.broadcast(fixed, 1 - world.rank)):
        with pytest.raises(ValueError, match="read-only"):
            call()
    assert world.staging is None                # nothing was made


@pytest.mark.mpi(np=3)
def test_what_is_not_a_number_stays_so(world):
    for place in range(3):
        x = np.array([np.nan if world.rank == place else 1.0, float(world.rank)])
        for op in ("sum", "min", "max"):
            assert np.isnan(world.all_reduce(x.copy(), op)[0])


@pytest.mark.mpi(np=RANKS)
def test_many_calls_of_ranks_out_of_step(world):
    """Calls of every kind and size follow each other while now one, now another rank is late."""
    P, me, plan = world.size, world.rank, np.random.default_rng(7)
    for call in range(400):
        rows, kind, late, root = P * int(plan.integers(1, 4000)), plan.integers(5), plan.integers(4 * P), int(plan.integers(P))
        stack = np.arange(P)[:, None] * 3.0 + np.arange(rows) + call
        x, mine = stack[me].copy(), slice(rows // P * me, rows // P * (me + 1))
        if late == me:
            time.sleep(1e-3)
        if kind == 0:
            found, expected = world.all_reduce(x), stack.sum(0)
        elif kind == 1:
            found, expected = world.reduce_scatter(x), stack.sum(0)[mine]
        elif kind == 2:
            found, expected = world.all_gather(x), stack.reshape(-1)
        elif kind == 3:
            found, expected = world.broadcast(x, root), stack[root]
        else:
            found, expected = world.all_to_all(x), stack[:, mine].reshape(-1)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.mpi(np=2)
def test_a_message_that_was_started_before_moves_on(world):
    """Rank 1 comes only after it has received all of a long message, which rank 0 has to go on sending while it waits."""
    long = np.arange(4_000_000.0)
    if world.rank == 0:
        pending = world.send_start(long, 1)
    else:
        assert (world.recv(np.empty_like(long), 0) == long).all()
    assert world.all_reduce(np.ones(3)).tolist() == [2, 2, 2]
    if world.rank == 0:
        pending.wait()


@pytest.mark.mpi(np=[2, 3])
def test_without_room_there_are_messages(comm, monkeypatch):
    monkeypatch.setattr(shared, "free_bytes", lambda: 0 if comm.rank == 1 else None)
    with Mesh(comm) as mesh:
        world = mesh.world
        x = np.arange(6.0) + comm.rank
        total = comm.size * np.arange(6.0) + sum(range(comm.size))
        for _ in range(2):
            assert (world.all_reduce(x.copy()) == total).all()
            assert world.staging is None and not world.stages
        assert (world.broadcast(x.copy(), 1) == np.arange(6.0) + 1).all() and len(world.all_gather(x)) == 6 * comm.size
        assert len(world.reduce_scatter(x)) == 6 // comm.size and len(world.all_to_all(x)) == 6


@pytest.mark.mpi(np=4)
def test_who_uses_slots(comm, monkeypatch):
    """Groups within a node, of floats; neither another type nor a group of several nodes, nor the back end mpi."""
    for nodes, back_end, expected in (("", "auto", True), ("", "shm", True), ("", "mpi", False), ("2", "auto", False)):
        monkeypatch.setenv("MPIPAR_RANKS_PER_NODE", nodes)
        with Mesh(comm, tp=2, back_end=back_end) as mesh:
            mesh.world.all_reduce(np.ones(3, "i4"))
            assert mesh.world.staging is None
            mesh.world.all_reduce(np.ones(3))
            mesh.tp.all_reduce(np.ones(3))
            assert (mesh.world.staging is not None) == expected and mesh.dp.staging is None
            assert (mesh.tp.staging is not None) == (back_end != "mpi")


@pytest.mark.mpi(np=2)
def test_a_record_counts_what_messages_would_send(comm):
    found = []
    for back_end in ("mpi", "auto"):
        with Mesh(comm, back_end=back_end) as mesh, mesh.record() as log:
            x, world = np.ones((4, 3)), mesh.world
            world.all_reduce(x), world.reduce_scatter(x), world.all_gather(x), world.broadcast(x, 1), world.all_to_all(x)
        found.append([(entry.operation, entry.bytes, entry.sent) for entry in log.entries])
    assert found[0] == found[1] and len(found[0]) == 5


PIECES = """
import sys
import numpy as np
from mpipar.comm import shared
from mpipar.comm.mesh import Mesh

if sys.argv[1] == "no room":
    shared.free_bytes = lambda: 2**20 + int(sys.argv[2])
mesh, differ = Mesh(), []
for size in (1000, 20_000, 60_000, 200_000):
    for patient in (False, True):
        whole = mesh.dp.zeros(size, "f4")
        beside = mesh.beside("dp", patient=patient)
        if sys.argv[1] != "control":
            beside.share(mesh.dp, whole)
        whole[:] = np.random.default_rng(mesh.rank).standard_normal(size)
        start = whole.copy()
        total = mesh.dp.all_reduce(whole).copy()
        whole[:] = start
        for piece in np.array_split(whole, 4):
            beside.all_reduce(piece)
        differ.append(int(np.sum(whole != total)))
print(differ if mesh.is_root else "", flush=True)
"""


@pytest.mark.parametrize("ranks, room", [
    (4, [""]), (6, [""]), (4, ["no room", "0"]), (4, ["no room", str(9 * kernel.ROW)]), (4, ["control"])])
def test_pieces_are_summed_as_the_whole(ranks, room):
    """The same bits, by whichever way; the second group may belong to a thread that sleeps while it waits. Control: a group
    that does not know."""
    job = run_job(ranks, ["-c", PIECES, *room], timeout=60)
    assert job.returncode == 0, job.output
    differ = [int(number) for number in job.stdout.strip().strip("[]").split(",")]
    assert len(differ) == 8 and any(differ) == (room == ["control"]), differ


def test_who_sums_in_shared_memory_is_not_taken_for_another():
    program = ("import numpy as np\nfrom mpipar.comm.mesh import Mesh\nworld = Mesh().world\nx = world.zeros(1 << 17, 'f4')\n"
               "world.all_reduce(np.ones(1 << 17, 'f4') if world.rank == 0 else x)\n")
    job = run_job(2, ["-c", program], timeout=30)
    assert job.returncode == 1 and "an operation in shared memory" in job.stderr and "all_reduce (sum) of 131072 float32" in job.stderr


def test_a_rank_alone_sees_that_nobody_else_came():
    """The kernel comes back with where to go on, and says who makes another call."""
    kernel.warm(np.float32)
    memory = aligned_zeros(2 * kernel.ROW, np.uint8).reshape(2, -1)
    rows, x, out = memory.view("f4"), np.arange(5, dtype="f4"), np.zeros(5, "f4")
    state = kernel.exchange(x, out, rows, 0, kinds.SUM, 0, kernel.START)
    assert state == kernel.START + 1 and (out == 0).all()
    assert kernel.exchange(x, out, rows, 0, kinds.SUM, 0, state) == state
    assert kernel.exchange(x, out, rows, 1, kinds.MAX, 0, kernel.START) == -1          # rank 0 makes another
    assert kernel.exchange(x, out, rows, 0, kinds.SUM, 0, state) == -2                 # and for rank 0, rank 1 does
    memory[...] = 0
    state = kernel.exchange(x, out, rows, 0, kinds.SUM, 0, kernel.START)
    assert kernel.exchange(2 * x, out, rows, 1, kinds.SUM, 0, kernel.START) == 0 and (out == 3 * x).all()
    out[...] = 0
    assert kernel.exchange(x, out, rows, 0, kinds.SUM, 0, state) == 0 and (out == 3 * x).all()


@pytest.mark.parametrize("size", [3, 1_000_000])
@pytest.mark.parametrize("end, said", [("os.kill(os.getpid(), 9)", ""), ("raise OSError('no disk')", "OSError: no disk")])
def test_a_rank_that_fails_leaves_nobody_waiting(end, said, size):
    """Neither in slots nor where rows of a window are summed, nor itself where the mesh is closed."""
    program = ("import os, numpy as np\nfrom mpipar.comm.mesh import Mesh\n"
               f"with Mesh() as mesh:\n    world = mesh.world\n    x = world.zeros({size}, 'f4')\n    world.all_reduce(x)\n"
               f"    if world.rank == 1: {end}\n    world.all_reduce(x)\n")
    job = run_job(3, ["-c", program], timeout=30)
    assert job.returncode not in (0, None) and job.seconds < 15 and said in job.stderr, job.output
