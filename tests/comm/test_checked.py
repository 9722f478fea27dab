"""Groups that compare their calls: the same results as without, no message more when it is off, further mismatches."""
import re

import ml_dtypes
import numpy as np
import pytest

from mpipar.comm import Mesh, MismatchError
from mpipar.comm.checked import CheckedGroup
from mpipar.comm.group import Group
from mpipar.comm.traced import OPERATIONS, TracedGroup, open_groups
from tests.comm.mismatches import FURTHER
from tests.comm.operations import different, every_operation
from tests.harness.polling import PollingComm


@pytest.fixture
def checking(monkeypatch):
    """The groups that a test makes are checked."""
    monkeypatch.setenv("MPIPAR_DEBUG", "1")
    yield
    open_groups.clear()                                 # those of a mismatch can't be closed


@pytest.mark.mpi(np=[1, 2, 3])
@pytest.mark.parametrize("start", [False, True])
@pytest.mark.parametrize("n", [0, 7, 1000])
@pytest.mark.smoke
def test_every_operation_gives_the_same_bits(comm, monkeypatch, start, n):
    with Mesh(comm) as mesh:
        expected = every_operation(mesh.world, n, start=start, exact=False)
    for name in ("MPIPAR_TIMEOUT", "MPIPAR_DEBUG"):
        monkeypatch.setenv(name, "1")
        with Mesh(comm) as mesh:
            assert type(mesh.world) is (CheckedGroup if name == "MPIPAR_DEBUG" else TracedGroup)
            assert not different(expected, every_operation(mesh.world, n, start=start, exact=False))
    assert not open_groups


@pytest.mark.mpi(np=4)
@pytest.mark.parametrize("back_end, nodes", [("shm", "4"), ("shm", "2"), ("mpi", "4")])
def test_shared_memory(comm, checking, monkeypatch, back_end, nodes):
    monkeypatch.setenv("MPIPAR_RANKS_PER_NODE", nodes)
    with Mesh(comm, back_end=back_end) as mesh:
        world, n = mesh.world, 40_000
        x, y = world.zeros(n, "f4"), world.zeros(n, "f8")
        x[:], y[:] = mesh.rank, 1
        assert (world.all_reduce(x) == 6).all() and (world.all_reduce(y, "mean") == 1).all()
        part = x[mesh.rank * n // 4:(mesh.rank + 1) * n // 4]
        part[:] = mesh.rank
        assert (world.all_gather(part, out=x) == np.repeat(np.arange(4), n // 4)).all()
        assert (world.reduce_scatter(x, out=part) == 4 * mesh.rank).all()
        assert (world.broadcast(y, 3) == 1).all()
        common = world.common(n, "f4")
        if common is not None:
            common[mesh.rank * n // 4:(mesh.rank + 1) * n // 4] = mesh.rank
            world.refresh(common, [(0, [n // 4] * 4)])
            assert (common == np.repeat(np.arange(4), n // 4)).all()


class Counting(PollingComm):
    """Names of the MPI calls that are made on it."""

    calls = []

    def __getattribute__(self, name):
        if name[0].isupper() and name not in ("Get_rank", "Get_size"):
            Counting.calls.append(name)
        return super().__getattribute__(name)


@pytest.mark.mpi(np=2)
def test_no_message_more_when_it_is_off(comm, monkeypatch):
    found = []
    for debug in "01":
        monkeypatch.setenv("MPIPAR_DEBUG", debug)
        with Mesh(Counting(comm), back_end="mpi") as mesh:
            assert type(mesh.world) is (Group, CheckedGroup)[int(debug)]
            Counting.calls = []
            mesh.world.all_reduce(np.ones(8))
            found.append(Counting.calls)
            Counting.calls = []
            if mesh.rank == 0:
                mesh.world.send(np.ones(2), 1)
            else:
                mesh.world.recv(np.ones(2), 0)
            found.append(Counting.calls)
            Counting.calls = []
    assert found[0] == ["Allreduce"] and found[1] == [("Send", "Recv")[mesh.rank]]
    assert "Iallgather" in found[2] and "Allreduce" in found[2]         # negative control: the check is seen
    assert ("Isend", "Irecv")[mesh.rank] in found[3]


@pytest.mark.mpi(np=2)
@pytest.mark.parametrize("name", FURTHER)
def test_further_mismatches(comm, checking, name):
    mesh = Mesh(comm, back_end="mpi" if name == "part of x as out" else "auto")     # through slots that makes no difference
    with pytest.raises(MismatchError) as caught:
        FURTHER[name][mesh.rank](mesh.world)
    here = r"tests/comm/mismatches\.py:\d+"
    assert re.search(rf"group world: .*\n  rank 0: .* at {here}\n  rank 1: .* at {here}$", str(caught.value))


@pytest.mark.mpi(np=3)
def test_the_message_names_who_agrees(comm, checking):
    mesh = Mesh(comm)
    with pytest.raises(MismatchError, match="rank 1: barrier") as caught:
        mesh.world.barrier() if mesh.rank == 1 else mesh.world.all_gather(np.ones((2, 3)), 1, name="batch")
    assert "ranks 0, 2: all_gather(float64[2,3], axis=1, name='batch') at " in str(caught.value)


@pytest.mark.mpi(np=2)
def test_close_tells_of_a_message_that_was_not_received(comm, checking):
    mesh = Mesh(comm, back_end="mpi")       # to free shared memory, rank 1 would have to wait for rank 0
    if mesh.rank == 0:
        mesh.world.send(np.ones(3), 1, tag=4)
        with pytest.raises(MismatchError, match=r"send\(float64\[3\], to=1, tag=4\) at .*; not received by rank 1"):
            mesh.close()
    else:
        mesh.close()


@pytest.mark.mpi(np=2)
def test_the_record_is_that_of_a_plain_group(comm, monkeypatch):
    found = []
    for debug in "01":
        monkeypatch.setenv("MPIPAR_DEBUG", debug)
        with Mesh(comm) as mesh, mesh.record() as log:
            every_operation(mesh.world, 12)
            every_operation(mesh.world, 12, start=True)
            mesh.world.all_reduce(np.ones(4, ml_dtypes.bfloat16))
        found.append([(entry.operation, entry.bytes, entry.sent) for entry in log.entries])
        assert all(entry.seconds > 0 for entry in log.entries)
    assert found[0] == found[1]


def test_every_operation_is_traced():
    public = {name for name, value in vars(Group).items() if callable(value) and not name.startswith("_")}
    assert public - set(OPERATIONS) == {"zeros", "common", "share", "slots", "close", "pending_class"}
    assert all(getattr(TracedGroup, name) is not getattr(Group, name) for name in OPERATIONS)
