"""The communicator that tests get: its blocking calls wait by polling, and give up when another rank has
failed.

With a plain communicator a rank that fails leaves the others in their Allreduce for ever, or has them
matched with a later one. Each blocking call here is the non-blocking one, followed by Test until it is true
or a peer has failed; then PeerFailed is raised. Communicators made from this one (Dup, Split,
`type(comm)(other)`) poll too."""

import pickle

import numpy as np
from mpi4py import MPI

from tests.harness.agreement import poll


class PeerFailed(RuntimeError):
    """Another rank has failed in the test that is running."""


class Watch:
    """Whom the waits look at. `peers` is set once, by the plugin; `abandoned` keeps the requests that were
    given up, as MPI may still write to their buffers."""

    peers = None
    abandoned = []

    @classmethod
    def wait(cls, test, keep):
        poll(lambda: test() or cls.look(keep))

    @classmethod
    def look(cls, keep):
        failed = cls.peers.failed() if cls.peers else []
        if failed:
            cls.abandoned.append(keep)
            raise PeerFailed(f"rank(s) {failed} failed while rank {cls.peers.rank} was waiting")
        return False


class PollingRequest(MPI.Request):
    """A request whose Wait polls."""

    def Wait(self, status=None):
        Watch.wait(lambda: self.Test(status), self)
        return True

    @classmethod
    def Waitall(cls, requests, statuses=None):
        Watch.wait(lambda: MPI.Request.Testall(requests, statuses), list(requests))
        return True

    def wait(self, status=None):
        found = []
        Watch.wait(lambda: found.append(self.test(status)) or found.pop()[0] or False, self)
        return None


class PollingComm(MPI.Intracomm):
    """An Intracomm whose blocking calls can be interrupted by the failure of another rank."""

    def __repr__(self):
        return f"<communicator of {self.size} ranks>"  # alike on all ranks, so that equal failures read alike

    # Point to point

    def Recv(self, buf, source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG, status=None):
        self._finish(super().Irecv(buf, source, tag), status)

    def Sendrecv(
        self, sendbuf, dest, sendtag=0, recvbuf=None, source=MPI.ANY_SOURCE, recvtag=MPI.ANY_TAG, status=None
    ):
        receive = super().Irecv(recvbuf, source, recvtag)
        self._finish(super().Isend(sendbuf, dest, sendtag))
        self._finish(receive, status)

    def Iprobe(self, source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG, status=None):
        Watch.look(self)  # who probes again and again is waiting
        return super().Iprobe(source, tag, status)

    def Probe(self, source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG, status=None):
        Watch.wait(lambda: self.Iprobe(source, tag, status), self)
        return True

    def send(self, obj, dest, tag=0):
        self.Send(np.frombuffer(pickle.dumps(obj), "u1"), dest, tag)

    def recv(self, buf=None, source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG, status=None):
        status = MPI.Status() if status is None else status
        self.Probe(source, tag, status)
        data = np.empty(status.Get_count(MPI.BYTE), "u1")
        self.Recv(data, status.Get_source(), status.Get_tag(), status)
        return pickle.loads(data.tobytes())

    # Whole objects, all by way of allgather

    def allgather(self, sendobj):
        mine = np.frombuffer(pickle.dumps(sendobj), "u1")
        sizes = np.empty(self.size, "i8")
        self.Allgather(np.array([mine.size], "i8"), sizes)
        everything = np.empty(sizes.sum(), "u1")
        self.Allgatherv(mine, [everything, sizes])
        return [pickle.loads(part.tobytes()) for part in np.split(everything, np.cumsum(sizes)[:-1])]

    def gather(self, sendobj, root=0):
        everything = self.allgather(sendobj)
        return everything if self.rank == root else None

    def bcast(self, obj, root=0):
        return self.allgather(obj if self.rank == root else None)[root]

    def scatter(self, sendobj, root=0):
        return self.bcast(sendobj, root)[self.rank]

    def alltoall(self, sendobj):
        return [row[self.rank] for row in self.allgather(list(sendobj))]

    def allreduce(self, sendobj, op=MPI.SUM):
        first, *rest = self.allgather(sendobj)
        for value in rest:
            first = op(first, value)
        return first

    def reduce(self, sendobj, op=MPI.SUM, root=0):
        result = self.allreduce(sendobj, op)
        return result if self.rank == root else None

    def barrier(self):
        self.Barrier()

    # Communicators made from this one. MPI can't make them without blocking, so all ranks meet first,
    # polling.

    def Dup(self, info=None):
        self.Barrier()
        return type(self)(super().Dup(info))

    def Clone(self):
        return self.Dup()

    def Split(self, color=0, key=0):
        self.Barrier()
        return self._same(super().Split(color, key))

    def Split_type(self, split_type, key=0, info=MPI.INFO_NULL):
        self.Barrier()
        return self._same(super().Split_type(split_type, key, info))

    def Create(self, group):
        self.Barrier()
        return self._same(super().Create(group))

    def _same(self, made):
        return made if made == MPI.COMM_NULL else type(self)(made)

    def _finish(self, request, status=None):
        PollingRequest(request).Wait(status)


def _blocking(name):
    start = getattr(MPI.Intracomm, "I" + name.lower())

    def call(self, *arguments, **options):
        self._finish(start(self, *arguments, **options))

    call.__name__ = name
    call.__doc__ = f"{name}, waiting by polling."
    return call


def _starting(name):
    start = getattr(MPI.Intracomm, name)

    def call(self, *arguments, **options):
        return PollingRequest(start(self, *arguments, **options))

    call.__name__ = name
    call.__doc__ = f"{name}, returning a request whose Wait polls."
    return call


COLLECTIVES = (
    "Barrier Bcast Reduce Allreduce Gather Gatherv Scatter Scatterv Allgather Allgatherv "
    "Alltoall Alltoallv Alltoallw "
    "Reduce_scatter_block Reduce_scatter Scan Exscan"
).split()
for _name in COLLECTIVES + ["Send", "Ssend", "Bsend", "Rsend"]:
    setattr(PollingComm, _name, _blocking(_name))
for _name in COLLECTIVES + ["Send", "Ssend", "Bsend", "Rsend", "Recv"]:
    setattr(PollingComm, "I" + _name.lower(), _starting("I" + _name.lower()))
