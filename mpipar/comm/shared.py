"""The back end for the ranks of one node: memory that they share, which collectives work on in place.

    x = group.zeros(n, "float32")     # a row of a window: memory that the group's ranks on this node all see
    group.all_reduce(x)               # each rank sums a piece of all rows: nothing is sent and nothing is copied

The arrays of one `zeros` are the rows of one block. An operation on them is: meet, each rank works on its piece of
all rows, meet again. Where the group spans several nodes, the rows of a node are first summed into its first one, the
first ranks of the nodes exchange those by MPI, and the result is copied back: one exchange for each node, not for
each rank.

Every rank of the group uses its rows alike (the same part of the array of the same `zeros`), as any collective asks
for. Source: the two levels are those of every MPI library's hierarchical collectives.
"""
import math
import os
import sys
import weakref

import numpy as np

from mpipar.comm import buffers
from mpipar.comm.collectives import Plan
from mpipar.kernels.memory import aligned_zeros
from mpipar.kernels.shared import sum_rows, sum_rows_everywhere
from mpipar.kernels.views import DTYPES

ALIGN = 64                      # bytes: rows and pieces of work begin at cache lines
# Bytes of the whole array below which `auto` does not work in place: going through slots, or MPI, is as fast there (two
# ranks of one node).
LEAST = {"all_reduce": 1 << 18, "reduce_scatter": 1 << 18, "all_gather": 1 << 20, "broadcast": 1 << 18}
ALWAYS = dict.fromkeys(LEAST, 1)
_FOLDER = "/dev/shm"


def free_bytes():
    """Room for shared memory on this node; None where nothing is known about it."""
    try:
        status = os.statvfs(_FOLDER)
    except (OSError, AttributeError):
        return None
    return status.f_bavail * status.f_frsize


def has_room(comm, mpi, bytes):
    """(whether every rank's node has room for so much shared memory, whether this one has, its bytes left or None).

    A collective call."""
    room = free_bytes()
    here = room is None or room > bytes + 2**20
    fits = np.array([here], np.uint8)
    comm.Allreduce(mpi.IN_PLACE, fits, mpi.MIN)
    return bool(fits[0]), here, room


def make_window(comm, mpi, length, offset):
    """(window, its address here) of memory that the ranks of a node share: `length` bytes of this rank, which lie `offset`
    bytes from the beginning. A collective call."""
    comm.Barrier()                                  # MPI makes the window without looking out for failures
    memory = mpi.Win.Allocate_shared(length, 1, comm=_plain(comm, mpi))
    memory.Lock_all(mpi.MODE_NOCHECK)
    address = np.frombuffer(memory.Shared_query(0)[0], np.uint8).ctypes.data
    if length:
        own = np.frombuffer(memory.Shared_query(comm.Get_rank())[0], np.uint8).ctypes.data
        assert own == address + offset, "the rows of a window do not follow one another"
    return memory, address


class Window:
    """A block of memory of one node: `rows` [rows, stride], of which this rank's array is row `mine`, `size` elements
    long. number: of the window in its group.

    The array itself is handed out and known here weakly: as long as it or a view of it lives, the memory may not go.
    """

    def __init__(self, number, memory, address, rows, mine, size, stride, dtype, mpi):
        self.number, self.memory = number, memory
        block = mpi.memory.fromaddress(address, rows * stride)
        self.rows = np.frombuffer(block, dtype).reshape(rows, -1)
        self.start, self.stop = address + mine * stride, address + mine * stride + size * dtype.itemsize
        self.array = None
        self._make = lambda: np.frombuffer(mpi.memory.fromaddress(self.start, self.stop - self.start), dtype)

    def hand_out(self):
        """The array, once."""
        array = self._make()
        self.array = weakref.ref(array)
        return array

    def place(self, x):
        """(first, last) element of x within the row, None where x is not a piece of it."""
        start = x.__array_interface__["data"][0]
        inside = self.start <= start <= start + x.nbytes <= self.stop
        if not inside or x.dtype != self.rows.dtype or not x.flags.c_contiguous:
            return None
        first = (start - self.start) // x.itemsize
        return first, first + x.size


class SharedMemory:
    """The windows of one group and the operations on them. Made by `Group`, a collective call.

    nodes: for each rank of the group the number of its node, from 0. least: for each operation the bytes below which an
    array is left to slots or MPI. speaks: this rank says it where there is no room for shared memory. windows: of another group of
    the same ranks, on whose arrays this one works too (and which frees them).
    """

    def __init__(self, group, nodes, *, least, speaks, windows=None):
        self.group, self.nodes, self.least, self.speaks = group, nodes, least, speaks
        comm, mine, mpi = group.comm, nodes[group.rank], group.mpi.MPI
        self.here = [rank for rank, node in enumerate(nodes) if node == mine]
        self.row = self.here.index(group.rank)
        self.several = len(set(nodes)) > 1
        self.node, self.leaders = _like(comm, comm.Split(mine, group.rank), mpi.COMM_NULL), None
        if self.several:
            self.leaders = _like(comm, comm.Split(mpi.UNDEFINED if self.row else 0, mine), mpi.COMM_NULL)
        self.windows, self.borrowed, self.full = [] if windows is None else windows, windows is not None, False

    def zeros(self, size, dtype):
        """This rank's array; private memory, with one warning, where a node has no room."""
        window = self._window(size, np.dtype(dtype), len(self.here))
        return aligned_zeros(size, dtype) if window is None else window.hand_out()

    def common(self, size, dtype):
        """One array for all ranks of the node; None where there is no room."""
        window = self._window(size, np.dtype(dtype), 1)
        return None if window is None else window.hand_out()

    def _window(self, size, dtype, rows):
        """A new window of zeros, or None. Every rank of the group decides alike."""
        mpi = self.group.mpi.MPI
        if size == 0 or dtype not in DTYPES:
            return None
        stride = -(-size * dtype.itemsize // ALIGN) * ALIGN
        fits, here, room = has_room(self.group.comm, mpi, rows * stride)
        if not fits:
            if not here and self.speaks and not self.full:
                needed = f"{_FOLDER} has {room >> 20} MiB left, and {rows * stride >> 20} are needed"
                print(f"mpipar: warning: {needed}: ranks of this node use messages instead of shared memory "
                      "(a container may get more by --shm-size)", file=sys.stderr, flush=True)
            self.full = True
            return None
        length = stride if rows > 1 or self.row == 0 else 0
        mine = self.row if rows > 1 else 0
        memory, address = make_window(self.node, mpi, length, mine * stride)
        window = Window(len(self.windows), memory, address, rows, mine, size, stride, dtype, mpi)
        if length:
            window.rows[mine] = 0                       # by its owner: the memory lies near the rank that uses it most
        self._meet(memory)
        self.windows.append(window)
        return window

    def leaves(self, operation, size):
        """Whether an operation on so many bytes is left to slots or MPI wherever they lie."""
        return size < self.least.get(operation, math.inf)

    def holds(self, x):
        """Whether an array is a piece of this rank's row of a window."""
        return self._place(x) is not None

    def find(self, x, operation):
        """(window, first, last) of an array that is a piece of this rank's row and large enough, else None."""
        return None if not isinstance(x, np.ndarray) or self.leaves(operation, x.nbytes) else self._place(x)

    def _place(self, x):
        if not isinstance(x, np.ndarray) or x.size == 0:
            return None
        for window in self.windows:
            place = window.place(x)
            if place is not None and len(window.rows) == len(self.here):
                return window, *place
        return None

    # Operations: each returns a Plan, or None where the arrays are not in a window

    def all_reduce(self, x, op):
        """In place on the rows."""
        found = self.find(x, "all_reduce") if op in ("sum", "mean") else None
        if found is None:
            return None
        window, first, last = found
        divisor = self.group.size if op == "mean" else 1

        def work():
            rows, (a, b) = window.rows, self._piece(first, last)
            self._meet(window.memory)
            if not self.several:
                sum_rows_everywhere(rows, a, b, divisor)
            else:
                sum_rows(rows, a, b, rows[0, a:b], divisor)
                self._exchange(window, first, last)
                self._copy_from_leader(rows, first, last)
            self._meet(window.memory)

        ranks = self.group.size
        return _plan("all_reduce", x, work, x.nbytes, 2 * x.nbytes * (ranks - 1) // ranks, found)

    def reduce_scatter(self, x, axis, op, sizes, out):
        """From the rows into `out`, which may be this rank's part of its row."""
        found = self.find(x, "reduce_scatter") if op in ("sum", "mean") and x.ndim == 1 and axis in (0, -1) else None
        if found is None:
            return None
        group = self.group
        sizes = buffers.check_sizes(sizes, x.size, group.size, "axis 0")
        out = buffers.check_out(out, (sizes[group.rank],), x.dtype)
        if not out.flags.c_contiguous:
            return None
        window, first, last = found
        divisor = group.size if op == "mean" else 1
        a, b = (first + end for end in buffers.offsets(sizes)[group.rank:group.rank + 2])

        def work():
            rows = window.rows
            self._meet(window.memory)
            if not self.several:
                sum_rows(rows, a, b, out, divisor)
            else:
                lower, upper = self._piece(first, last)
                sum_rows(rows, lower, upper, rows[0, lower:upper], divisor)
                self._exchange(window, first, last)
                np.copyto(out, rows[0, a:b])
            self._meet(window.memory)

        return _plan("reduce_scatter", out, work, x.nbytes, x.nbytes * (group.size - 1) // group.size, found)

    def all_gather(self, x, axis, sizes, out):
        """Into the rows, where x is this rank's part of its own."""
        if out is None or x.ndim != 1 or out.ndim != 1 or axis not in (0, -1):
            return None
        found = self.find(out, "all_gather")
        if found is None:
            return None
        group, (window, first, last) = self.group, found
        sizes = [x.size] * group.size if sizes is None else sizes
        sizes = buffers.check_sizes(sizes, out.size, group.size, "the gathered axis")
        ends = [first + end for end in buffers.offsets(sizes)]
        mine = slice(ends[group.rank], ends[group.rank + 1])
        if sizes[group.rank] != x.size or x.dtype != out.dtype:
            return None
        inside = buffers.begin_together(x, out[mine.start - first:mine.stop - first])

        def work():
            rows = window.rows
            if not inside:
                rows[self.row, mine] = x
            self._meet(window.memory)
            if self.several:                            # another's row: not before its owner has come
                rows[0, mine] = rows[self.row, mine]
                self._meet(window.memory)
            if not self.several:
                for rank, row in zip(self.here, range(len(rows))):
                    if row != self.row:
                        rows[self.row, ends[rank]:ends[rank + 1]] = rows[row, ends[rank]:ends[rank + 1]]
            else:
                self._exchange_parts(window, ends)
                self._copy_from_leader(rows, first, last)
            self._meet(window.memory)

        sent = out.nbytes * (group.size - 1) // group.size
        return _plan("all_gather", out, work, out.nbytes, sent, found)

    def broadcast(self, x, root):
        """From root's row into the others."""
        found = self.find(x, "broadcast")
        if found is None or not 0 <= root < self.group.size:
            return None
        group, (window, first, last) = self.group, found

        def work():
            rows, me = window.rows, self.group.rank
            self._meet(window.memory)
            if self.several:
                if me == root:                          # another's row: not before its owner has come
                    rows[0, first:last] = rows[self.row, first:last]
                self._meet(window.memory)
                if self.leaders:
                    self.leaders.Bcast(rows[0, first:last], self.nodes[root])
                self._meet(window.memory)
                self._copy_from_leader(rows, first, last)
            elif me != root:
                rows[self.row, first:last] = rows[self.here.index(root), first:last]
            self._meet(window.memory)

        sent = 0 if group.rank == (root - 1) % group.size else x.nbytes
        return _plan("broadcast", x, work, x.nbytes, sent, found)

    def refresh(self, common, cuts):
        """After each rank has written its parts of a common array: every node has them all, and every rank sees them.

        cuts: (first element, sizes of the ranks' parts) of each run that is divided.
        """
        def work():
            window = next(window for window in self.windows if window.place(common) == (0, common.size))
            self._meet(window.memory)
            if self.several:
                for first, sizes in cuts:
                    self._exchange_parts(window, [first + end for end in buffers.offsets(sizes)], meet=False)
                self._meet(window.memory)

        nodes = max(self.nodes) + 1
        sent = common.nbytes * (nodes - 1) // nodes if self.leaders else 0
        return Plan("refresh", None, (), work, common.nbytes, sent)

    def close(self):
        """Free the windows that no rank of the node uses any longer (the others live until the process ends)."""
        if self.borrowed:
            self.windows = []
        mpi = self.group.mpi.MPI
        used = np.array([window.array() is not None for window in self.windows], np.uint8)
        self.node.Allreduce(mpi.IN_PLACE, used, mpi.MAX)
        for window, needed in zip(self.windows, used):
            if not needed:
                window.rows = None
                window.memory.Unlock_all()
                window.memory.Free()
        self.windows = [window for window, needed in zip(self.windows, used) if needed]
        if not self.windows:
            self.node.Free()
        if self.leaders:
            self.leaders.Free()

    # Steps of the operations

    def _meet(self, memory):
        """Every rank of the node has come here, and sees what the others have written."""
        staging = None if self.several else self.group.slots()
        if staging is not None:
            staging.meet()
            return
        memory.Sync()
        self.node.Barrier()
        memory.Sync()

    def _piece(self, first, last):
        """The elements of first .. last that this rank of the node works on; cut at multiples of 16, if there are
        that many."""
        parts, length = len(self.here), last - first
        cuts = [first + min(length, -(-length * k // parts // 16) * 16) for k in (self.row, self.row + 1)]
        return cuts[0], last if self.row == parts - 1 else cuts[1]

    def _exchange(self, window, first, last):
        """The nodes add the sums in their first rows."""
        self._meet(window.memory)
        if self.leaders:
            mpi = self.group.mpi.MPI
            for part in buffers.chunks(window.rows[0, first:last], self.group.limit):
                self.leaders.Allreduce(mpi.IN_PLACE, part, mpi.SUM)
        self._meet(window.memory)

    def _exchange_parts(self, window, ends, *, meet=True):
        """Every node's first row gets the parts of the ranks of other nodes."""
        if self.leaders:
            for rank, node in enumerate(self.nodes):
                for part in buffers.chunks(window.rows[0, ends[rank]:ends[rank + 1]], self.group.limit):
                    self.leaders.Bcast(part, node)
        if meet:
            self._meet(window.memory)

    def _copy_from_leader(self, rows, first, last):
        if self.row:
            rows[self.row, first:last] = rows[0, first:last]


def _plan(operation, result, work, bytes, sent, found):
    """The plan of an operation on what `find` has found."""
    plan = Plan(operation, result, (), work, bytes, sent)
    plan.shared = found[0].number, *found[1:]
    return plan


def _like(comm, made, null):
    """A communicator of comm's class (the tests' has its own way with failures); None for no communicator."""
    if made == null:
        return None
    return made if type(made) is type(comm) else type(comm)(made)


def _plain(comm, mpi):
    """The communicator as MPI's own class."""
    return comm if type(comm) is mpi.Intracomm else mpi.Intracomm(comm)
