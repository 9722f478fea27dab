"""A group of ranks and its collective operations on NumPy arrays.

    group.all_reduce(x)                   # in place, and returned
    y = group.all_gather(x, axis=1)       # a new array
    pending = group.all_reduce_start(x)   # ... compute ...
    pending.wait()

All ranks of a group call the same operations in the same order, with arrays of one dtype, and of one shape
unless an operation says otherwise. Arrays may have any strides (a transposed or sliced view too) and any
size, also none. Types: float32, float64, integers, bool, and bfloat16 (ml_dtypes), which is sent as 16 bits,
summed in float32 in the order of the ranks and rounded once. `root`, `to` and `source` count the ranks of the
group from 0. A group of one rank returns the very array it was given and needs no MPI. Within a node float arrays of up to about
1 MiB go through slots of shared memory (staging.py), arrays of `zeros` are worked on where they lie (shared.py), and MPI
carries the rest, and all that is started without waiting; the last bits of a sum may differ between these ways. The back end
mpi leaves everything to MPI. Operations: lecture 1,
sections 1.2 and 1.4; `op` is "sum", "mean" (floats only), "min" or "max". A TypeError or ValueError is raised
before anything is sent where this rank can see that the call is wrong; what only the ranks together can see
(a shape that differs) is checked where MPIPAR_DEBUG=1 says so (checked.py). `name` is for that check alone: it tells
apart what looks alike, such as two gradients of one shape that a rank might sum in the wrong order.
"""
import time

import numpy as np

from mpipar.comm import buffers, collectives, rounded
from mpipar.comm.pending import Pending
from mpipar.kernels.dtypes import is_bfloat16
from mpipar.kernels.kinds import BROADCAST, GATHER, REDUCTIONS, SUM_PARTS, TRANSPOSE
from mpipar.kernels.memory import aligned_zeros

# For every open group, by its key, how many collective calls this rank has made: [number]. The guard tells
# the other ranks, so that one of them can know that it waits for a call that will never be made.
call_counts = {}

# What goes through shared slots, or to MPI as it is, needs no plan, which would take longer than a little message.
_FLOATS = (np.dtype(np.float32), np.dtype(np.float64))
# Bytes of the whole array up to which an operation goes through the slots: there it takes about as long as by MPI, or less (two ranks).
MOST = {"all_reduce": 1 << 20, "reduce_scatter": 1 << 19, "all_gather": 1 << 19, "broadcast": 1 << 18, "all_to_all": 1 << 18}
FEW, LITTLE = 4, 1 << 15    # ranks beyond which each would read too much of the others, but for what goes in one piece


class Group:
    """Ranks that communicate. Made by `Mesh`; `Group()` alone is a group of one.

    name: of the axis, for messages and records. rank, size: of this rank in the group and of the group.
    ranks: where the members stand in the mesh. single_node: whether all of them share a node. nodes: the node of each
    member, numbered from 0. back_end: see `Mesh`.
    """

    pending_class = Pending
    direct = True           # calls may be carried out without a plan; False where every call has to be noted

    def __init__(self, name="alone", comm=None, *, ranks=(0,), single_node=True, members=None, key=0, nodes=(0,),
                 back_end="auto", speaks=False):
        self.name, self.ranks, self.single_node = name, tuple(ranks), single_node
        # members: the ranks as those of the whole job. key: one number for this group on all its ranks.
        self.members, self.key = self.ranks if members is None else tuple(members), key
        self.comm, self.rank, self.size = comm, 0, 1
        self.recorder, self.shared = None, None
        # Slots of shared memory, made at the first call that they are for; `stages`: whether there are any, or may be.
        self.staging, self.stages = None, single_node and comm is not None and back_end != "mpi"
        self.nodes, self.back_end, self._speaks = tuple(nodes), back_end, speaks
        self.mpi, self.limit, self.synchronous, self._calls = None, None, False, [0]
        if comm is not None:
            from mpipar.comm import mpi
            self.mpi, self.rank, self.size = mpi, comm.Get_rank(), comm.Get_size()
            self.limit, self.synchronous = mpi.max_count(), mpi.synchronous_sends()
            call_counts[key] = self._calls

    def __repr__(self):
        return f"<Group {self.name}: rank {self.rank} of {self.size}>"

    def zeros(self, size, dtype):
        """A 1-D array of zeros for this rank, on which collectives work in place where they can. A collective call.

        Where ranks of the group share a node it lies in memory that they share (back ends auto and shm):
        `all_reduce`, `reduce_scatter`, `all_gather` and `broadcast` of it or of a slice of it (the same on all ranks)
        then read the others' arrays directly. The memory lives as long as the array or a view of it; not beyond MPI.
        """
        memory = self._memory()
        return aligned_zeros(size, dtype) if memory is None else memory.zeros(size, dtype)

    def common(self, size, dtype):
        """A 1-D array of zeros that all ranks of the group on one node see, one for each node; None where that can't
        be, or isn't asked for by the back end shm.

        A collective call. Who writes what, and when, the callers agree on; `refresh` makes writes known.
        """
        memory = self._memory() if self.back_end == "shm" else None
        return None if memory is None else memory.common(size, dtype)

    def refresh(self, array, cuts):
        """After each rank has written its parts of a `common` array: all ranks see them, on all nodes.

        cuts: pairs (first element of a run, sizes of all ranks' parts of it, in the order of the ranks).
        """
        return self._run(self.shared.refresh(array, cuts))

    def share(self, other, array):
        """Let pieces of `array`, made by `zeros` of another group of the same ranks, be reduced here as all of it is there.

        By whichever way: in memory that they share (where all of it may go through slots: both add in the order of the
        ranks), or by messages; so cutting it changes no bit. A collective call.
        """
        held = other.shared is not None and other.shared.holds(array)
        if held and (not other.shared.leaves("all_reduce", array.nbytes) or other._is_staged("all_reduce", array, array)):
            from mpipar.comm.shared import ALWAYS, SharedMemory
            self.shared = SharedMemory(self, self.nodes, least=ALWAYS, speaks=False, windows=other.shared.windows)
        else:
            self.stages, other.stages = False, other.stages and held

    @property
    def here(self):
        """This rank's number among the group's ranks of its node."""
        return self.nodes[:self.rank].count(self.nodes[self.rank])

    def _memory(self):
        """The SharedMemory of the group, None where its ranks share no node or may not share memory."""
        if self.shared is None and self.back_end != "mpi" and len(set(self.nodes)) < self.size:
            from mpipar.comm.shared import ALWAYS, LEAST, SharedMemory
            least = LEAST if self.back_end == "auto" else ALWAYS
            self.shared = SharedMemory(self, self.nodes, least=least, speaks=self._speaks)
        return self.shared

    def slots(self):
        """The Staging of the group, made by the first call, a collective one; None where its ranks have none."""
        if self.stages and self.staging is None:
            from mpipar.comm.staging import Staging
            self.staging = Staging.of(self)
            self.stages = self.staging is not None
        return self.staging if self.stages else None

    def barrier(self, name=""):
        """Returns when all ranks of the group have called it."""
        return self._run(collectives.barrier(self))

    def broadcast(self, x, root=0, name=""):
        """Root's x is written into every rank's x. Returns x."""
        if (isinstance(root, (int, np.integer)) and 0 <= root < self.size and self._is_staged("broadcast", x, x)
                and self._run_staged("broadcast", BROADCAST, x, x, int(root)) is not None):
            return x
        if self._is_direct("broadcast", x, x) and type(root) is int and 0 <= root < self.size:
            self._run_direct("broadcast", self.comm.Bcast, x, root)
            return x
        plan = None if self.shared is None else self.shared.broadcast(x, root)
        return self._run(collectives.broadcast(self, x, root) if plan is None else plan)

    def reduce(self, x, root=0, op="sum", name=""):
        """The sum (mean, ...) over the ranks, a new array at the root; None elsewhere. x is left as it is."""
        return self._run(_reductions(x).reduce(self, x, root, op))

    def all_reduce(self, x, op="sum", name=""):
        """The sum (mean, ...) over the ranks is written into every rank's x. Returns x."""
        if op in REDUCTIONS and self._is_staged("all_reduce", x, x) and self._run_staged("all_reduce", REDUCTIONS[op], x, x) is not None:
            return x
        if self._is_direct("all_reduce", x, x) and op in REDUCTIONS:
            self._run_direct("all_reduce", self.comm.Allreduce, self.mpi.IN_PLACE, x, self.mpi.OPERATIONS[op])
            return x
        plan = None if self.shared is None else self.shared.all_reduce(x, op)
        return self._run(_reductions(x).all_reduce(self, x, op) if plan is None else plan)

    def all_gather(self, x, axis=0, sizes=None, out=None, name=""):
        """All ranks' parts, joined along `axis` in the order of the ranks, on every rank.

        The parts have one shape, or lengths `sizes` (one a rank, the same list everywhere) along the axis.
        Into `out` where it is given, else a new array. x may be this rank's part of `out`.
        """
        if (self._is_staged("all_gather", x, out, self.size) and x.ndim and axis in (0, -x.ndim)
                and (sizes is None or self._is_even(sizes, x.shape[0]))):
            result = self._run_staged("all_gather", GATHER, x, out, shape=(x.shape[0] * self.size, *x.shape[1:]))
            if result is not None:
                return result
        if sizes is None and axis == 0 and self._is_direct("all_gather", x, out) and _divides(x, out, self.size):
            self._run_direct("all_gather", self.comm.Allgather, x, out)
            return out
        plan = None if self.shared is None else self.shared.all_gather(x, axis, sizes, out)
        return self._run(collectives.all_gather(self, x, axis, sizes, out) if plan is None else plan)

    def reduce_scatter(self, x, axis=0, op="sum", sizes=None, out=None, name=""):
        """The sum (mean, ...) of x over the ranks, cut along `axis`: rank i returns part i.

        x is left as it is. The parts are equal (ValueError if the length does not divide), or as `sizes` says.
        `out` may be this rank's part of x: the other parts of x are then undefined afterwards.
        """
        if (op in REDUCTIONS and self._is_staged("reduce_scatter", x, out) and x.ndim and axis in (0, -x.ndim)
                and x.shape[0] % self.size == 0 and (sizes is None or self._is_even(sizes, x.shape[0] // self.size))):
            result = self._run_staged("reduce_scatter", SUM_PARTS + REDUCTIONS[op], x, out, shape=(x.shape[0] // self.size, *x.shape[1:]))
            if result is not None:
                return result
        if (sizes is None and axis == 0 and op in REDUCTIONS and self._is_direct("reduce_scatter", x, out)
                and _divides(out, x, self.size)):
            self._run_direct("reduce_scatter", self.comm.Reduce_scatter_block, x, out, self.mpi.OPERATIONS[op])
            return out
        plan = None if self.shared is None else self.shared.reduce_scatter(x, axis, op, sizes, out)
        return self._run(_reductions(x).reduce_scatter(self, x, axis, op, sizes, out) if plan is None else plan)

    def gather(self, x, root=0, axis=0, sizes=None, name=""):
        """All ranks' parts joined along `axis`, a new array at the root; None elsewhere. See all_gather."""
        return self._run(collectives.gather(self, x, root, axis, sizes))

    def scatter(self, x=None, root=0, axis=0, sizes=None, *, out=None, shape=None, dtype=None, name=""):
        """Root's x, cut along `axis`: rank i returns part i.

        The root gives x. The others give `out` (written and returned), or `shape` and `dtype` of their part.
        The parts are equal, or have lengths `sizes` (the same list on every rank).
        """
        return self._run(collectives.scatter(self, x, root, axis, sizes, out, shape, dtype))

    def all_to_all(self, x, axis=0, name=""):
        """x is cut into equal parts along `axis`; part i goes to rank i. Returns the received parts, joined
        along `axis` in the order of the ranks they come from, as a new array of x's shape."""
        if self._is_staged("all_to_all", x, None) and x.ndim and axis in (0, -x.ndim) and x.shape[0] % self.size == 0:
            result = self._run_staged("all_to_all", TRANSPOSE, x, None, shape=x.shape)
            if result is not None:
                return result
        if axis == 0 and self._is_direct("all_to_all", x, x) and x.ndim and x.shape[0] % self.size == 0:
            out = np.empty_like(x)
            self._run_direct("all_to_all", self.comm.Alltoall, x, out)
            return out
        return self._run(collectives.all_to_all(self, x, axis))

    def all_to_all_v(self, x, send_counts, receive_counts, name=""):
        """all_to_all with parts that differ: the first send_counts[0] rows (of axis 0) go to rank 0, and so
        on; receive_counts[i] rows come from rank i. Returns a new array of sum(receive_counts) rows."""
        return self._run(collectives.all_to_all_v(self, x, send_counts, receive_counts))

    def send(self, x, to, tag=0, name=""):
        """Send x; may return before it is received (MPIPAR_SYNC_SEND=1: never). Tags: 0 to 32766."""
        return self._run(collectives.send(self, x, to, tag))

    def recv(self, out, source, tag=0, name=""):
        """Receive into `out`, which has the shape and dtype that were sent. Returns out."""
        return self._run(collectives.recv(self, out, source, tag))

    # The same without waiting: each returns a Pending whose wait() returns what the call above returns.

    def barrier_start(self, name=""):
        return self._start(collectives.barrier(self))

    def broadcast_start(self, x, root=0, name=""):
        return self._start(collectives.broadcast(self, x, root))

    def reduce_start(self, x, root=0, op="sum", name=""):
        return self._start(_reductions(x).reduce(self, x, root, op))

    def all_reduce_start(self, x, op="sum", name=""):
        if _reductions(x) is rounded:
            return self._start(rounded.all_reduce(self, x, op, at_once=True))
        return self._start(collectives.all_reduce(self, x, op))

    def all_gather_start(self, x, axis=0, sizes=None, out=None, name=""):
        return self._start(collectives.all_gather(self, x, axis, sizes, out))

    def reduce_scatter_start(self, x, axis=0, op="sum", sizes=None, out=None, name=""):
        return self._start(_reductions(x).reduce_scatter(self, x, axis, op, sizes, out))

    def gather_start(self, x, root=0, axis=0, sizes=None, name=""):
        return self._start(collectives.gather(self, x, root, axis, sizes))

    def scatter_start(self, x=None, root=0, axis=0, sizes=None, *, out=None, shape=None, dtype=None, name=""):
        return self._start(collectives.scatter(self, x, root, axis, sizes, out, shape, dtype))

    def all_to_all_start(self, x, axis=0, name=""):
        return self._start(collectives.all_to_all(self, x, axis))

    def all_to_all_v_start(self, x, send_counts, receive_counts, name=""):
        return self._start(collectives.all_to_all_v(self, x, send_counts, receive_counts))

    def send_start(self, x, to, tag=0, name=""):
        return self._start(collectives.send(self, x, to, tag))

    def recv_start(self, out, source, tag=0, name=""):
        return self._start(collectives.recv(self, out, source, tag))

    def close(self):
        """Free the communicator (all ranks of the group together)."""
        if self.comm is not None:
            if self.shared is not None:
                self.shared.close()
                self.shared = None
            if self.staging is not None:
                self.staging.close()
                self.staging, self.stages = None, False
            self.comm.Free()
            self.comm = None
            call_counts.pop(self.key, None)

    def _is_staged(self, operation, x, out, parts=1):
        """Whether an operation goes through shared slots. All ranks say the same: it depends on what they have in common.

        x: this rank's array, one of so many parts of the whole. out: the result, may be None.
        """
        if not self.stages or not isinstance(x, np.ndarray) or x.dtype not in _FLOATS or not x.size:
            return False
        nbytes = x.nbytes * parts
        if nbytes > MOST[operation] or self.size > FEW and nbytes > LITTLE:
            return False
        if self.shared is None or self.shared.leaves(operation, nbytes):
            return True
        return self.shared.find(x if out is None or operation == "reduce_scatter" else out, operation) is None

    def _run_staged(self, operation, kind, x, out, root=0, *, shape=None):
        """Carry out an operation through shared slots and return its result, which is `out`, or new and of `shape`.

        None where there is no room for slots: another way is taken from then on. (waits.py finds its name on the stack.)
        """
        plain = x.flags.carray and type(x) is np.ndarray
        writes = kind != BROADCAST or self.rank != root
        if shape is None and plain:
            result = source = target = out
        elif shape is None:
            result = buffers.check_out(out, x.shape, x.dtype) if writes else out
            source = target = np.array(x, order="C")
        else:
            if type(out) is np.ndarray and out.shape == shape and out.dtype is x.dtype and out.flags.carray:
                result = target = out
            else:
                result = buffers.check_out(out, shape, x.dtype)
                target = result if result.flags.carray and type(result) is np.ndarray else np.empty(shape, x.dtype)
            source = x if plain else np.array(x, order="C")
            if plain and max(x.nbytes, target.nbytes) > LITTLE and self._overlap(x, target):
                source = x.copy()       # its pieces may not be overwritten before they were read
        self._calls[0] += 1
        staging = self.staging or self.slots()
        if staging is None:
            self._calls[0] -= 1
            return None
        if self.direct and self.recorder is None:
            staging.run(kind, source, target, root)
        else:
            self._calls[0] -= 1
            nbytes = max(x.nbytes, target.nbytes)
            self._run(collectives.Plan(operation, result, (), lambda: staging.run(kind, source, target, root), nbytes,
                                       staging.sent(operation, nbytes, root)))
        if target is not result and writes:
            np.copyto(result, target)
        return result

    def _is_even(self, sizes, length):
        """Whether `sizes` gives all parts this length."""
        return len(sizes) == self.size and all(size == length for size in sizes)

    def _overlap(self, x, out):
        """Whether x and out share memory, other than the smaller one being this rank's part of the larger one."""
        if not np.may_share_memory(x, out):
            return False
        small, large = sorted((x, out), key=lambda array: array.nbytes)
        first = [array.__array_interface__["data"][0] for array in (small, large)]
        return first[0] != first[1] + self.rank * small.nbytes

    def _is_direct(self, operation, x, out):
        """Whether MPI carries out an operation from x into `out`, both as they are in memory."""
        return (self.direct and type(x) is np.ndarray and type(out) is np.ndarray and x.dtype in _FLOATS
                and out.flags.carray and x.size > 0 and self.size > 1 and self.recorder is None
                and (x is out or x.dtype is out.dtype and x.flags.c_contiguous)
                and (self.limit is None or x.size <= self.limit >= out.size)
                and (self.shared is None or self.shared.leaves(operation, max(x.nbytes, out.nbytes))))

    def _run_direct(self, operation, call, *arguments):
        """Carry out an operation that needs no plan. (waits.py finds its name on the stack.)"""
        self._calls[0] += 1
        call(*arguments)

    def _run(self, plan):
        """Carry out a plan and return its result."""
        if plan.pairwise:
            return self._start(plan).wait()
        if plan.peer is None:
            self._calls[0] = plan.number = self._calls[0] + 1
        recorder = self.recorder
        start = time.perf_counter() if recorder is not None else 0.0
        comm = self.comm
        for name, arguments in plan.calls:
            getattr(comm, name)(*arguments)
        if plan.finish is not None:
            plan.finish()
        if recorder is not None and self.size > 1:
            recorder.add(plan, self, start)
        return plan.result

    def _start(self, plan):
        """Start all calls of a plan; a Pending."""
        if plan.peer is None:
            self._calls[0] = plan.number = self._calls[0] + 1
        recorder = self.recorder
        start = time.perf_counter() if recorder is not None else 0.0
        comm = self.comm
        requests = [getattr(comm, "I" + name.lower())(*arguments) for name, arguments in plan.calls]
        entry = recorder.add(plan, self, start) if recorder is not None and self.size > 1 else None
        return self.pending_class(self, plan, requests, entry)


def _divides(part, whole, ranks):
    """Whether `part` has the shape of one of equal parts of `whole` and lies apart from it."""
    return (part.ndim == whole.ndim > 0 and part.shape[0] * ranks == whole.shape[0] and part.shape[1:] == whole.shape[1:]
            and not np.may_share_memory(part, whole))


def _reductions(x):
    """The module with the reductions for x: bfloat16 has its own."""
    return rounded if isinstance(x, np.ndarray) and is_bfloat16(x.dtype) else collectives
