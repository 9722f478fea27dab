"""A communicator whose blocking collectives sleep while they wait.

MPI's own waits spin: a thread that communicates beside one that computes would take half of its core. Here each call
is the non-blocking one, and the thread looks every fifth of a millisecond whether it has ended. MPI moves most
messages only while it is looked at, so this costs a little of the speed of large messages in fast networks, and the
latency of small ones. The sums are the same bits.
"""
import time

from mpipar.comm.mpi import MPI

PAUSE = 2e-4            # seconds between two looks
COLLECTIVES = (
    "Barrier", "Bcast", "Reduce", "Allreduce", "Gather", "Gatherv", "Scatter", "Scatterv", "Allgather", "Allgatherv",
    "Alltoall", "Alltoallv", "Reduce_scatter_block", "Reduce_scatter",
)


class PatientComm(MPI.Intracomm):
    """`PatientComm(comm)` is the communicator `comm` with patient collectives; other calls are as they were."""


def _patient(name):
    start = getattr(MPI.Intracomm, "I" + name.lower())

    def call(self, *arguments):
        request = start(self, *arguments)
        while not request.Test():
            time.sleep(PAUSE)

    call.__name__, call.__doc__ = name, f"{name}, asleep between looks."
    return call


for _name in COLLECTIVES:
    setattr(PatientComm, _name, _patient(_name))
