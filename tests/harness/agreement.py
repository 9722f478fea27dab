"""What the ranks of one mpirun tell one another while they run tests: who has failed just now, and what
each one saw.

Both avoid blocking MPI calls, in which a rank could neither notice a failure elsewhere nor be asked for its
stack."""

import mmap
import os
import pickle
import tempfile
import time

import numpy as np

FIRST = 1024  # bytes; what does not fit goes into a second message


def poll(test):
    """Calls `test` until it is true: eagerly at first, then asleep in between, as there may be more ranks
    than cores."""
    turns = 0
    while not test():
        turns += 1
        time.sleep(0 if turns < 300 else 3e-4)


class Agreement:
    """`exchange(value)` returns the values of all ranks, in the order of the ranks."""

    def __init__(self, world):
        self.comm = world.Dup()

    def exchange(self, value):
        text = np.frombuffer(pickle.dumps(value), "u1")
        first, length = np.zeros(FIRST, "u1"), 8
        first[:length] = np.frombuffer(np.int64(text.size).tobytes(), "u1")
        first[length : length + text.size] = text[: FIRST - length]
        heads = self.gather(first)
        sizes = heads[:, :length].copy().view("i8")[:, 0]
        parts = heads[:, length:]
        if sizes.max() > FIRST - length:  # the same decision on every rank
            whole = np.zeros(sizes.max(), "u1")
            whole[: text.size] = text
            parts = self.gather(whole)
        return [pickle.loads(part[:size].tobytes()) for part, size in zip(parts, sizes)]

    def gather(self, mine):
        out = np.empty((self.comm.size, mine.size), "u1")
        request = self.comm.Iallgather(mine, out)
        poll(request.Test)
        return out


class Peers:
    """A few bytes that all ranks map into memory: the phase (a number that counts setups, calls and
    teardowns) in which each rank has failed. Reading it costs nothing, so every wait of a test can look."""

    def __init__(self, world):
        self.rank, self.size = world.rank, world.size
        name = None
        if world.rank == 0:
            handle, name = tempfile.mkstemp(prefix="mpipar-tests-peers-")
            os.ftruncate(handle, 8 * world.size)
            os.close(handle)
        name = world.bcast(name)
        with open(name, "r+b") as file:
            self.flags = np.frombuffer(mmap.mmap(file.fileno(), 8 * world.size), "i8")
        world.Barrier()
        if world.rank == 0:
            os.unlink(name)
        self.phase = 1

    def fail(self):
        """Says that this rank has failed in the phase that is running."""
        self.flags[self.rank] = self.phase

    def failed(self):
        """The ranks that have failed in the phase that is running."""
        return np.flatnonzero(self.flags == self.phase).tolist()
