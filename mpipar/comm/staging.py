"""Collectives of arrays in private memory, by way of memory that the ranks of a node share: faster than messages, most of
all where arrays are little.

    group.all_reduce(x)     # x lies anywhere: it goes through the ranks' slots, piece by piece

The work is `kernels/exchange.py`; here are the memory and the wait. A rank that waits for another looks at its number for
some microseconds and then calls MPI once, because MPI moves the messages that were started before only while it is called.
"""
import os

import numpy as np

from mpipar.comm import launcher
from mpipar.comm.shared import has_room, make_window
from mpipar.kernels import exchange as kernel
from mpipar.kernels import kinds

_NAMES = {kinds.GATHER: "all_gather", kinds.BROADCAST: "broadcast", kinds.TRANSPOSE: "all_to_all", kinds.MEET: "an operation in shared memory",
          **{kind: f"all_reduce ({op})" for op, kind in kinds.REDUCTIONS.items()},
          **{kinds.SUM_PARTS + kind: f"reduce_scatter ({op})" for op, kind in kinds.REDUCTIONS.items()}}


class Staging:
    """The slots of a group whose ranks all share a node. Made by `Staging.of`, a collective call."""

    @classmethod
    def of(cls, group):
        """The group's slots; None, on all its ranks, where there is no room for them."""
        fits, *_ = has_room(group.comm, group.mpi.MPI, group.size * kernel.ROW)
        return cls(group) if fits else None

    def __init__(self, group):
        self.comm, self.name, self.rank, self.size = group.comm, group.name, group.rank, group.size
        self.yields = launcher.crowded()      # a rank for which others wait may need this core
        self.window, address = make_window(self.comm, group.mpi.MPI, kernel.ROW, self.rank * kernel.ROW)
        block = group.mpi.MPI.memory.fromaddress(address, self.size * kernel.ROW)
        self.memory, self.rows = np.frombuffer(block, np.uint8).reshape(self.size, kernel.ROW), {}
        self.memory[self.rank] = 0
        self.nothing = np.zeros(1, np.float32)
        self.window.Sync()
        self.comm.Barrier()
        self.window.Sync()

    def rows_of(self, dtype):
        """The slots as numbers of a dtype."""
        if dtype not in self.rows:
            kernel.warm(dtype)
            self.rows[dtype] = self.memory.view(dtype)
        return self.rows[dtype]

    def run(self, kind, x, out, root=0):
        """The call `kind` of `kernels/exchange.py` from x into out, both of any shape and contiguous."""
        rows = self.rows.get(x.dtype)
        if rows is None:
            rows = self.rows_of(x.dtype)
        if x.ndim != 1 or out.ndim != 1:
            x, out = x.reshape(-1), out.reshape(-1)
        state = kernel.exchange(x, out, rows, self.rank, kind, root, kernel.START)
        while state:
            if state < 0:
                self.complain(-1 - state)
            self.comm.Iprobe()
            if self.yields:
                os.sched_yield()
            state = kernel.exchange(x, out, rows, self.rank, kind, root, state)

    def meet(self):
        """Returns when all ranks have come here; each then sees what the others wrote before."""
        self.run(kinds.MEET, self.nothing, self.nothing)

    def sent(self, operation, nbytes, root):
        """Bytes that this rank sends as they are counted, see record.py."""
        if operation == "broadcast":
            return 0 if self.rank == (root - 1) % self.size else nbytes
        return (2 if operation == "all_reduce" else 1) * nbytes * (self.size - 1) // self.size

    def complain(self, rank):
        """RuntimeError: another rank makes another call in the same turn."""
        heads = self.memory[:, :kernel.HEAD].view(np.int64)
        mark = kernel.MARKS // 8 + int(heads[self.rank, 0]) % 2
        mine, theirs = (_call(int(heads[r, mark])) for r in (self.rank, rank))
        raise RuntimeError(f"group {self.name}: rank {self.rank} calls {mine}, and rank {rank} calls {theirs}; MPIPAR_DEBUG=1 says where")

    def close(self):
        """Free the memory; a collective call."""
        self.memory = self.rows = None
        self.window.Unlock_all()
        self.window.Free()


def _call(mark):
    size, root, kind, itemsize = mark >> 24, mark >> 8 & 0xFFFF, mark >> 4 & 15, mark & 15
    if kind == kinds.MEET:
        return _NAMES[kind]
    root = f" from rank {root}" if kind == kinds.BROADCAST else ""
    return f"{_NAMES[kind]} of {size} float{8 * itemsize}{root}"
