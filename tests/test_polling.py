"""The communicator that tests get: all its calls, on several numbers of ranks."""

import numpy as np
import pytest

pytestmark = pytest.mark.smoke


@pytest.mark.mpi(np=[1, 2, 5])
def test_every_call_of_the_communicator(comm):

    rank, size = comm.rank, comm.size
    out = np.zeros(size)
    comm.Allgather(np.full(1, float(rank)), out)
    assert out.tolist() == list(range(size))
    comm.Reduce(np.ones(size), out, root=0)
    assert rank or (out == size).all()
    piece = np.zeros(1)
    comm.Reduce_scatter_block(np.arange(size, dtype=float), piece)
    assert piece[0] == rank * size
    comm.Alltoall(np.arange(size, dtype=float) + 10 * rank, out)
    assert out.tolist() == [10.0 * other + rank for other in range(size)]
    comm.Sendrecv(np.full(1, float(rank)), (rank + 1) % size, 3, piece, (rank - 1) % size, 3)
    assert piece[0] == (rank - 1) % size
    request = comm.isend({"from": rank}, (rank + 1) % size, tag=4)
    assert comm.recv(source=(rank - 1) % size, tag=4) == {"from": (rank - 1) % size}
    request.wait()
    assert comm.bcast(f"rank {rank}", root=size - 1) == f"rank {size - 1}"
    assert comm.gather(rank, root=0) == (list(range(size)) if rank == 0 else None)
    assert comm.scatter([n * n for n in range(size)] if rank == 0 else None) == rank * rank
    assert comm.alltoall([(rank, other) for other in range(size)]) == [(other, rank) for other in range(size)]
    assert comm.allreduce(rank) == sum(range(size))


@pytest.mark.mpi(np=4)
def test_communicators_made_from_it_poll_too(comm):
    from mpi4py import MPI

    grid = type(comm)(comm.Split(comm.rank // 2, comm.rank))
    for made in (
        grid,
        comm.Dup(),
        grid.Dup(),
        comm.Split_type(MPI.COMM_TYPE_SHARED),
        comm.Create(comm.Get_group()),
    ):
        assert type(made) is type(comm)
        out = np.zeros(1)
        made.Allreduce(np.ones(1), out)
        assert out[0] == made.size
        made.Free()
    assert grid != comm and comm.Split(MPI.UNDEFINED) == MPI.COMM_NULL
