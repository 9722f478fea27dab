"""Memory that the ranks of a node share: the results of messages, on one node and on several; and without room."""

import mmap
import os
import time

import numpy as np
import pytest

from mpipar.comm import leftovers, shared
from mpipar.comm.buffers import split_sizes
from mpipar.comm.mesh import Mesh
from tests.helpers.jobs import run_job

RANKS = [1, 2, 3, 4]
NODES = ["", "1", "2", "3"]             # ranks of a node; "" as they are


def values(rank, size, dtype):
    """Integers, so that sums are exact in any order."""
    return np.random.default_rng(rank).integers(0, 50, size).astype(dtype)


def group_of(comm, monkeypatch, nodes, back_end="shm"):
    monkeypatch.setenv("MPIPAR_RANKS_PER_NODE", nodes)
    return Mesh(comm, back_end=back_end)


@pytest.mark.mpi(np=RANKS)
@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_operations_give_what_messages_give(comm, monkeypatch, nodes, dtype):
    with group_of(comm, monkeypatch, nodes) as mesh:
        world, me = mesh.world, comm.rank
        in_window = comm.size > 1 and nodes != "1"
        for size, first, last in ((1, 0, 1), (5, 1, 4), (1000, 0, 1000), (4099, 130, 4001)):
            x = world.zeros(size, dtype)
            everyone = np.stack([values(r, size, dtype) for r in range(comm.size)])
            sizes = split_sizes(last - first, comm.size)[::-1]
            ends = first + np.cumsum([0, *sizes])
            mine = slice(ends[me], ends[me + 1])
            piece = x[first:last]
            assert (world.shared is not None and world.shared.find(piece, "all_reduce") is not None) == in_window
            results = {"sum": everyone.sum(0), "mean": everyone.mean(0, dtype=dtype), "max": everyone.max(0)}
            for op, expected in results.items():
                x[:] = everyone[me]
                assert world.all_reduce(piece, op) is piece
                np.testing.assert_allclose(x[first:last], expected[first:last], rtol=1e-6 if dtype == "f4" else 1e-14)
                assert np.array_equal(x[:first], everyone[me, :first]) and np.array_equal(x[last:], everyone[me, last:])
                x[:] = everyone[me]
                world.reduce_scatter(piece, op=op, sizes=sizes, out=x[mine])
                np.testing.assert_allclose(x[mine], expected[mine], rtol=1e-6 if dtype == "f4" else 1e-14)
                x[:] = everyone[me]
                part = world.reduce_scatter(piece, op=op, sizes=sizes)
                np.testing.assert_allclose(part, expected[mine], rtol=1e-6 if dtype == "f4" else 1e-14)
            total = everyone.sum(0)
            for start in (x[mine], total[mine].copy()):  # from its place, from elsewhere
                x[:] = -1
                start[:] = total[mine]
                assert world.all_gather(start, sizes=sizes, out=piece) is piece
                assert np.array_equal(x[first:last], total[first:last])
            for root in range(comm.size):
                x[:] = everyone[me]
                world.broadcast(piece, root)
                assert np.array_equal(x[first:last], everyone[root, first:last])
            del x, piece, start


@pytest.mark.mpi(np=4)
@pytest.mark.parametrize("nodes", ["", "2"])
def test_all_ranks_hold_the_same_bits_and_the_record_counts_the_same_bytes(comm, monkeypatch, nodes):
    logs = []
    for back_end in ("mpi", "shm"):
        with group_of(comm, monkeypatch, nodes, back_end) as mesh:
            x = mesh.world.zeros(10_000, "f4")
            x[:] = np.random.default_rng(comm.rank).standard_normal(10_000)
            with mesh.record() as log:
                mesh.world.all_reduce(x)
                mesh.world.reduce_scatter(x, out=x[2500 * comm.rank:2500 * (comm.rank + 1)])
                mesh.world.all_gather(x[2500 * comm.rank:2500 * (comm.rank + 1)], out=x)
                mesh.world.broadcast(x, 1)
            copies = mesh.world.all_gather(x.copy()[None])
            assert (copies == copies[0]).all()
            logs.append([(entry.operation, entry.bytes, entry.sent) for entry in log.entries])
    assert logs[0] == logs[1]


@pytest.mark.mpi(np=[2, 4])
@pytest.mark.parametrize("nodes", ["", "2", "3"])
def test_one_copy_for_a_node(comm, monkeypatch, nodes):
    with group_of(comm, monkeypatch, nodes) as mesh:
        world = mesh.world
        copy = world.common(1003, "f8")
        sizes = split_sizes(1000, comm.size)
        first = 3 + sum(sizes[:comm.rank])
        copy[first:first + sizes[comm.rank]] = comm.rank + 1
        world.refresh(copy, [(3, sizes)])
        assert np.array_equal(copy, np.repeat([0, *range(1, comm.size + 1)], [3, *sizes]))
        world.barrier()
        if world.here == 0:                             # it is one: what one writes the others of the node see
            copy[0] = 100 + world.nodes[comm.rank]
        world.barrier()
        assert copy[0] == 100 + world.nodes[comm.rank]
    assert copy[0] >= 100                               # it outlives the mesh


@pytest.mark.mpi(np=2)
def test_no_room_is_said_once_and_messages_are_used(comm, monkeypatch, capfd):
    monkeypatch.setattr(shared, "free_bytes", lambda: 2**20 if comm.rank == 1 else 2**40)    # one is enough
    with group_of(comm, monkeypatch, "") as mesh:
        for _ in range(3):
            x = mesh.world.zeros(1000, "f8")
            x[:] = comm.rank + 1
            mesh.world.all_reduce(x)
            assert (x == 3).all() and mesh.world.shared.find(x, "all_reduce") is None
        assert mesh.world.common(1000, "f8") is None
    assert capfd.readouterr().err.count("warning: /dev/shm") == 0    # the rank that saw it is not its node's first
    monkeypatch.setattr(shared, "free_bytes", lambda: 0)
    with group_of(comm, monkeypatch, "") as mesh:
        mesh.world.zeros(1000, "f8"), mesh.world.zeros(1000, "f8")
    assert capfd.readouterr().err.count("warning: /dev/shm") == (comm.rank == 0)


@pytest.mark.mpi(np=2)
def test_auto_leaves_small_arrays_to_messages(comm, monkeypatch):
    with group_of(comm, monkeypatch, "", "auto") as mesh:
        x, memory = mesh.world.zeros(2 << 20, "f4"), mesh.world.shared
        for operation, least in shared.LEAST.items():
            assert memory.find(x[:least // 4], operation) is not None and memory.find(x[:least // 4 - 1], operation) is None
        planned, part = [], np.zeros(1 << 20, "f4")
        monkeypatch.setattr(mesh.world, "_run", lambda plan: planned.append(plan.operation))
        calls = {"all_reduce": lambda n: mesh.world.all_reduce(x[:n]), "broadcast": lambda n: mesh.world.broadcast(x[:n]),
                 "reduce_scatter": lambda n: mesh.world.reduce_scatter(x[:n], out=part[:n // 2]),
                 "all_gather": lambda n: mesh.world.all_gather(part[:n // 2], out=x[:n])}
        for operation, least in shared.LEAST.items():  # a call that MPI carries out has no plan
            calls[operation](least // 4 - 2)
            calls[operation](least // 4)
            assert planned == [operation]
            planned.clear()
    with group_of(comm, monkeypatch, "", "mpi") as mesh:
        mesh.world.zeros(2 << 20, "f4")
        assert mesh.world.shared is None and mesh.world.common(10, "f4") is None
    with pytest.raises(ValueError, match="valid are auto, mpi, shm"):
        Mesh(comm, back_end="tcp")


@pytest.mark.mpi(np=2)
def test_memory_goes_when_nothing_needs_it(comm, monkeypatch):
    with group_of(comm, monkeypatch, "") as mesh:
        x, y = mesh.world.zeros(5000, "f8"), mesh.world.zeros(5000, "f8")[7:]
        memory = mesh.world.shared
        y[0] = 5
        del x
    assert len(memory.windows) == 1 and y[0] == 5        # y's is in use by a view
    assert not np.zeros(3).any()


def test_leftovers_are_told_apart(tmp_path):
    names = ["mpich_shm_a", "mpich_shm_used", "mpich_shm_open", "mpich_shm_young", "other"]
    for name in names:
        (tmp_path / name).write_bytes(b"x" * 5000)
        if "young" not in name:
            os.utime(tmp_path / name, (0, 0))
    with open(tmp_path / "mpich_shm_open", "rb"), open(tmp_path / "mpich_shm_used", "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
        file.close()
        assert leftovers.clean(tmp_path, youngest=60) == ["mpich_shm_a"]
        mapped.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(names[1:])


def test_the_next_start_removes_what_a_killed_job_left():
    folder = leftovers.FOLDER
    before = set(os.listdir(folder))
    job = run_job(2, ["-m", "tests.comm.programs", "killed with windows"])
    assert job.returncode != 0, job.output
    left = set(os.listdir(folder)) - before
    time.sleep(leftovers.YOUNGEST + 0.1)
    assert run_job(2, ["-m", "tests.comm.programs", "shares memory"]).returncode == 0
    assert not left & set(leftovers.clean(youngest=0)), "they were still there, and nobody's"
