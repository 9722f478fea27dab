"""The record of what was sent, by ring counting, against the formulas of the lectures."""
import numpy as np
import pytest

from mpipar.comm.mesh import Mesh
from mpipar.comm.record import Recorder


@pytest.mark.mpi(np=[2, 3, 4])
def test_bytes_of_every_operation(comm):
    ranks, n = comm.size, 12
    x, bytes_ = np.zeros(n, "f4"), 4 * n
    whole = ranks * bytes_
    with Mesh(comm) as mesh:
        world, me = mesh.world, comm.rank
        root, last = me == 0, me == ranks - 1
        with mesh.record() as log:
            world.barrier()
            world.all_reduce(x)
            world.all_gather(x)
            world.reduce_scatter(np.zeros((ranks, n), "f4"))
            world.all_to_all(np.zeros((ranks, n), "f4"))
            world.all_to_all_v(np.zeros((ranks, n), "f4"), [1] * ranks, [1] * ranks)
            world.broadcast(x)
            world.reduce(x)
            world.gather(x)
            world.scatter(np.zeros((ranks, n), "f4") if root else None, shape=(1, n), dtype="f4")
            pending = world.send_start(x, (me + 1) % ranks)
            world.recv(x, (me - 1) % ranks)
            pending.wait()
        share = bytes_ * (ranks - 1)
        assert [(entry.operation, entry.bytes, entry.sent) for entry in log.entries] == [
            ("barrier", 0, 0),
            ("all_reduce", bytes_, 2 * share // ranks),
            ("all_gather", whole, share),
            ("reduce_scatter", whole, share),
            ("all_to_all", whole, share),
            ("all_to_all_v", whole, share),
            ("broadcast", bytes_, 0 if last else bytes_),
            ("reduce", bytes_, 0 if root else bytes_),
            ("gather", bytes_, 0 if root else bytes_),
            ("scatter", whole if root else bytes_, share if root else 0),
            ("send", bytes_, bytes_),
            ("recv", bytes_, 0),
        ]
        assert all(entry.seconds > 0 and entry.group == "world" for entry in log.entries)


@pytest.mark.mpi(np=4)
def test_sums_by_group_and_operation(comm):
    with Mesh(comm, tp=2) as mesh:
        mesh.tp.all_reduce(np.zeros(100))                   # off: not recorded
        with mesh.record() as log:
            mesh.tp.all_reduce(np.zeros(100))
            mesh.tp.all_reduce_start(np.zeros(100)).wait()
            mesh.dp.reduce_scatter(np.zeros(100))
            mesh.pp.all_reduce(np.zeros(100))               # a group of one sends nothing
            with mesh.record() as inner:
                mesh.dp.all_gather(np.zeros(50))
        mesh.dp.all_reduce(np.zeros(100))
        assert log.sent("group") == {"tp": 1600, "dp": 800} and log.sent() == 2400
        assert log.sent("operation") == {"all_reduce": 1600, "reduce_scatter": 400, "all_gather": 400}
        assert log.calls("group") == {"tp": 2, "dp": 2} and log.calls() == 4 and inner.calls() == 1
        assert set(log.seconds("group")) == {"tp", "dp"} and log.seconds() > 0
        with pytest.raises(ValueError, match="valid are"):
            log.sent("colour")


def test_an_empty_record():
    assert Recorder().sent() == 0 and Recorder().sent("group") == {}


@pytest.mark.mpi(np=4)
def test_data_parallel_bytes_of_the_small_gpt(comm):
    """53,440 float32 parameters, dp=4: 320,640 bytes a rank and step, as one all-reduce or as its halves."""
    with Mesh(comm) as mesh:
        gradients = np.zeros(53_440, "f4")
        with mesh.record() as log:
            mesh.dp.all_reduce(gradients)
        assert log.sent() == 320_640
        with mesh.record() as log:
            mesh.dp.all_gather(mesh.dp.reduce_scatter(gradients))
        assert log.sent() == 320_640
