"""The forms that do not wait, and the cutting of large calls: the same bits as the plain calls, for every
operation."""
import gc
import time
import weakref

import numpy as np
import pytest

from mpipar.comm import pending as pending_module
from mpipar.comm.mesh import Mesh
from tests.comm.operations import different, every_operation
from tests.helpers.jobs import run_job

SIZES = [0, 1, 999, 1000, 1001, 2500]


@pytest.mark.mpi(np=[1, 2, 3, 4])
@pytest.mark.parametrize("n", SIZES)
def test_cut_into_pieces_or_not(comm, monkeypatch, n):
    with Mesh(comm) as mesh:
        plain = every_operation(mesh.world, n)
        assert not different(plain, every_operation(mesh.world, n, start=True))
    monkeypatch.setenv("MPIPAR_MAX_COUNT", "1000")
    with Mesh(comm) as mesh:
        assert mesh.size == 1 or mesh.world.limit == 1000
        assert not different(plain, every_operation(mesh.world, n))
        assert not different(plain, every_operation(mesh.world, n, start=True))


@pytest.mark.parametrize("ranks", [3, 4])
def test_random_floats_have_the_same_bits_too(ranks):
    """In a job of its own, as the order of the sums is set before MPI starts."""
    job = run_job(ranks, ["-m", "tests.comm.programs", "cut"])
    assert job.returncode == 0 and "all the same" in job.stdout, job.output


@pytest.mark.mpi(np=2)
def test_the_limit_is_kept(comm, monkeypatch):
    """No call of more than MPIPAR_MAX_COUNT elements reaches MPI. Without the limit one does."""
    largest = []

    class Counting(type(comm)):
        def Allreduce(self, send, receive, op):
            largest.append(receive.size)
            super().Allreduce(send, receive, op)

        def Bcast(self, buffer, root=0):
            largest.append(buffer.size)
            super().Bcast(buffer, root)

    for limit, expected in (("", [2500, 5000]), ("1000", [834, 833, 833] + [834, 833, 833] * 2)):
        monkeypatch.setenv("MPIPAR_MAX_COUNT", limit)
        with Mesh(Counting(comm), back_end="mpi") as mesh:
            del largest[:]
            mesh.world.all_reduce(np.zeros(2500))
            if limit:
                mesh.world.all_gather(np.zeros(2500))
            else:
                mesh.world.broadcast(np.zeros(5000))
        assert largest == expected


@pytest.mark.mpi(np=1)
@pytest.mark.parametrize(
    "name, text", [("MPIPAR_MAX_COUNT", "0"), ("MPIPAR_MAX_COUNT", "many"), ("MPIPAR_SYNC_SEND", "yes")]
)
def test_malformed_settings_are_refused(comm, monkeypatch, name, text):
    from mpipar.comm.group import Group
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=f"{name}='{text}'"):
        Group("any", comm)


@pytest.mark.mpi(np=2)
def test_test_does_not_wait(comm):
    with Mesh(comm) as mesh:
        if mesh.rank == 0:
            pending = mesh.world.all_reduce_start(np.ones(4))
            assert not pending.test()
            mesh.world.send(np.zeros(1), 1)
        else:
            mesh.world.recv(np.zeros(1), 0)
            pending = mesh.world.all_reduce_start(np.ones(4))
        while not pending.test():
            time.sleep(0.001)
        assert pending.wait().tolist() == pending.wait().tolist() == [2.0] * 4


@pytest.mark.mpi(np=2)
def test_several_at_once_finish_in_any_order(comm):
    with Mesh(comm) as mesh:
        arrays = [np.full(n, mesh.rank + 1.0) for n in (1, 100_000, 10)]
        started = [mesh.world.all_reduce_start(x, "mean") for x in arrays]
        for pending, x in reversed(list(zip(started, arrays))):
            assert pending.wait() is x and (x == 1.5).all()


@pytest.mark.mpi(np=2)
def test_buffers_of_a_dropped_operation_are_kept(comm):
    """MPI may still write to them, so they are not given back to Python."""
    with Mesh(comm) as mesh:
        gc.collect()
        kept = len(pending_module._abandoned)
        x = np.ones(100_000)
        alive = weakref.ref(x)
        mesh.world.recv_start(x, 1 - mesh.rank)
        del x
        gc.collect()
        assert len(pending_module._abandoned) == kept + 1 and alive() is not None
        mesh.world.send(np.zeros(100_000), 1 - mesh.rank)
        mesh.world.barrier()


@pytest.mark.mpi(np=2)
def test_synchronous_sends_wait_for_their_receive(comm, monkeypatch):
    for setting, waits in (("0", False), ("1", True)):
        monkeypatch.setenv("MPIPAR_SYNC_SEND", setting)
        with Mesh(comm) as mesh:
            if mesh.rank == 0:
                pending = mesh.world.send_start(np.zeros(1), 1)
                time.sleep(0.05)
                assert pending.test() != waits
                mesh.world.barrier()
                pending.wait()
            else:
                mesh.world.barrier()
                mesh.world.recv(np.zeros(1), 0)
