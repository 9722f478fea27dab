"""The ranks of a job on named axes.

    mesh = Mesh(dp=2, pp=2, tp=2)      # 8 ranks
    mesh.tp.all_reduce(x)              # among the 2 ranks that share this rank's dp and pp coordinates

`order` names the axes from the slowest to the fastest: with ("dp", "pp", "tp") neighbouring ranks are one
tensor-parallel group, which is where most is sent, and so stay within a node. Every mesh has communicators of
its own, so two meshes never mix their messages. Making one is a collective call.
"""
import contextlib
import itertools
import math
import os

import numpy as np

from mpipar.comm import debug, guard
from mpipar.comm.leftovers import clean_once
from mpipar.comm.record import Recorder

AXES = ("dp", "pp", "tp")
BACK_ENDS = ("auto", "mpi", "shm")
_serials = itertools.count()        # of the meshes of this process


class Mesh:
    """`comm`'s ranks (default: all of the job) as dp x pp x tp; dp=None is what pp and tp leave.

    dp, pp, tp: the groups of this rank along each axis. world: the group of all ranks of the mesh. ends: the first
    and the last stage of this rank's pipeline (for tied weights), a group of one on the stages between. node: the
    ranks on this node; `nodes` is the number of nodes, `ranks_on_node` the number of ranks here. back_end: how ranks
    of one node exchange arrays: "mpi" by messages, "shm" by reading each other's memory (and ZeRO 3 keeps one copy of
    the parameters for a node), "auto" likewise by the array's size, without the one copy.
    rank, size: in the mesh. shape, coordinates: dicts by axis. ValueError, with the valid values, where the sizes do
    not fit the ranks.
    """

    def __init__(self, comm=None, *, dp=None, pp=1, tp=1, order=AXES, back_end="auto"):
        check_order(order)
        check_back_end(back_end)
        if comm is None:
            mpi = guard.start()
            comm = None if mpi is None else mpi.MPI.COMM_WORLD
        shape = fit(1 if comm is None else comm.Get_size(), {"dp": dp, "pp": pp, "tp": tp})
        if comm is not None and comm.Get_size() > 1:
            from mpipar.comm import mpi
            if type(comm) is mpi.MPI.Intracomm:     # another class (the tests') has its own way with failures
                guard.install(_ranks_of_job(comm))
        self._arrange(comm, shape, order, back_end)

    @classmethod
    def serial(cls):
        """The mesh of one rank, without MPI (mpi4py is not imported)."""
        mesh = cls.__new__(cls)
        mesh._arrange(None, dict.fromkeys(AXES, 1), AXES, "auto")
        return mesh

    def _arrange(self, comm, shape, order, back_end):
        self.shape, self.order, self.back_end = shape, tuple(order), back_end
        self.rank, self.size = (0, 1) if comm is None else (comm.Get_rank(), comm.Get_size())
        self.is_root = self.rank == 0
        self._grid = np.arange(self.size).reshape([shape[axis] for axis in self.order])
        place = np.unravel_index(self.rank, self._grid.shape)
        self.coordinates = {axis: int(place[i]) for i, axis in enumerate(self.order)}
        self._node_of, self._members = _nodes_of_ranks(comm), _ranks_of_job(comm)
        self._serial, self._keys = next(_serials), itertools.count()
        self._comm, self._beside = comm, []
        self._debug = None if comm is None else debug.settings()
        nodes = sorted(set(self._node_of))
        self.nodes = len(nodes)
        self.world = self._group(comm, "world", [list(range(self.size))])
        self.dp, self.pp, self.tp = (self._group(comm, axis, self.groups(axis)) for axis in AXES)
        ends = [sorted({stages[0], stages[-1]}) for stages in self.groups("pp")]
        self.ends = self._group(comm, "ends", ends)
        neighbours = [[r for r in range(self.size) if self._node_of[r] == node] for node in nodes]
        self.node = self._group(comm, "node", neighbours)
        self.ranks_on_node = self.node.size
        if self.node.size > 1 and self.node.rank == 0:
            clean_once()

    def __repr__(self):
        sizes = " x ".join(f"{axis}={self.shape[axis]}" for axis in self.order)
        return f"<Mesh {sizes}: rank {self.rank} of {self.size}>"

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None:        # else it would wait for ranks that do not come, and nobody would hear of the error
            self.close()

    def groups(self, axis):
        """The ranks of every group along `axis`, a list of lists."""
        if axis not in self.order:
            raise ValueError(f"axis {axis!r} is unknown: valid are {', '.join(self.order)}")
        rows = np.moveaxis(self._grid, self.order.index(axis), -1).reshape(-1, self.shape[axis])
        return rows.tolist()

    def beside(self, axis, *, patient=False):
        """A second group of the ranks that share this one's group along `axis`, with a communicator of its own: for a
        thread that communicates while another uses the first. A collective call of the whole mesh.

        patient: it sleeps while it waits, and leaves the core to those who compute. ValueError as `check_several_threads`.
        """
        self.check_several_threads()
        group = self._group(self._comm, axis, self.groups(axis))
        if patient and group.comm is not None and type(group.comm) is group.mpi.MPI.Intracomm:
            from mpipar.comm.patient import PatientComm
            group.comm, group.stages = PatientComm(group.comm), False      # who waits for a slot spins
        group.recorder = self.world.recorder
        self._beside.append(group)
        return group

    @property
    def several_threads(self):
        """Whether several threads of a rank may communicate at once (MPI's THREAD_MULTIPLE)."""
        mpi = None if self.world.mpi is None else self.world.mpi.MPI
        return mpi is None or mpi.Query_thread() == mpi.THREAD_MULTIPLE

    def check_several_threads(self):
        """ValueError where MPI was not started so that several threads may communicate at once."""
        if not self.several_threads:
            raise ValueError(
                f"overlap has a thread that communicates beside another: that needs MPI's THREAD_MULTIPLE, and {self.world.mpi.library()} "
                "was started with less (MPI4PY_RC_THREAD_LEVEL or mpi4py.rc.thread_level): take --no-overlap, or set it to multiple"
            )

    def first_on_node(self, function):
        """function() on one rank of each node, then on the others of the node; its result, on every rank.

        For work that the first leaves behind for the others, such as a cache of compiled code.
        """
        result = function() if self.node.rank == 0 else None
        self._wait_for_node()
        return result if self.node.rank == 0 else function()

    def divided_on_node(self, tasks):
        """Each task (a function without arguments) on one rank of each node, then all of them on every rank.

        As `first_on_node`, but the ranks of a node take turns in the list and do their shares at the same time.
        """
        for task in tasks[self.node.rank::self.node.size]:
            task()
        self._wait_for_node()
        for task in tasks:
            task()

    def _wait_for_node(self):
        if self.node.size > 1:
            self.node.barrier_start().wait(pause=0.002)     # asleep, not spinning: the others need the cores

    @contextlib.contextmanager
    def record(self):
        """Record every call of the mesh's groups inside the `with` block; gives the Recorder.

        Inside another `record` block, the outer one has these calls too, after the inner one has ended.
        """
        log, outer = Recorder(), self.world.recorder
        for group in self._all_groups():
            group.recorder = log
        try:
            yield log
        finally:
            for group in self._all_groups():
                group.recorder = outer
            if outer is not None:
                outer.entries.extend(log.entries)

    def close(self):
        """Free the communicators; a collective call. For programs with many meshes: MPI has some 2,000."""
        for group in reversed(self._all_groups()):
            group.close()

    def _all_groups(self):
        return [self.world, self.dp, self.pp, self.tp, self.ends, self.node, *self._beside]

    def _group(self, comm, name, members):
        """This rank's group among `members` (lists of ranks, none twice); of one rank where it is in none."""
        index = next((i for i, ranks in enumerate(members) if self.rank in ranks), None)
        ranks = [self.rank] if index is None else members[index]
        own = None
        if max(len(ranks) for ranks in members) > 1:
            from mpipar.comm import mpi
            own = comm.Split(mpi.MPI.UNDEFINED if index is None else index, self.rank)
            if len(ranks) == 1:
                if own != mpi.MPI.COMM_NULL:
                    own.Free()
                own = None
            elif type(own) is not type(comm):
                own = type(comm)(own)  # a communicator class of its own, as in the tests, stays that class
        members = [self._members[r] for r in ranks]
        key = self._serial << 40 | next(self._keys) << 32 | min(members)
        nodes = sorted({self._node_of[r] for r in ranks})
        make = debug.group_class(self._debug)
        return make(name, own, ranks=ranks, single_node=len(nodes) == 1, members=members, key=key,
                     nodes=[nodes.index(self._node_of[r]) for r in ranks], back_end=self.back_end,
                     speaks=self._node_of[self.rank] == self.rank)


def check_back_end(name):
    """ValueError for a back end that does not exist."""
    if name not in BACK_ENDS:
        raise ValueError(f"comm={name!r} is not a back end: valid are {', '.join(BACK_ENDS)}")


def check_order(order):
    """ValueError unless `order` names every axis once."""
    if sorted(order) != sorted(AXES):
        raise ValueError(
            f"order={','.join(order)} is not an order of the axes: it names each of {', '.join(AXES)} once, "
            f"slowest first, as in {','.join(AXES)}"
        )


def fit(ranks, sizes):
    """The sizes with the one that is None filled in; ValueError where their product is not `ranks`."""
    for axis, size in sizes.items():
        whole = isinstance(size, (int, np.integer)) and not isinstance(size, bool)
        if size is not None and not (whole and size >= 1):
            raise ValueError(f"{axis}={size} is no size of an axis: a whole number, 1 or more, is needed")
    given = {axis: int(size) for axis, size in sizes.items() if size is not None}
    filled = [axis for axis in sizes if axis not in given]
    product = math.prod(given.values())
    if not filled and product != ranks:
        text, values = "*".join(sizes), "*".join(map(str, sizes.values()))
        raise ValueError(
            f"{text} = {values} = {product}, but there are {ranks} ranks: the product has to be {ranks}"
        )
    for axis, size in given.items():
        rest = math.prod(n for other, n in given.items() if other != axis)
        if ranks % size:
            raise ValueError(
                f"{axis}={size} does not divide {ranks} rank{'s' * (ranks > 1)}: "
                f"{axis} can be {_list(_divisors(ranks))}"
            )
        if ranks % (rest * size) and ranks % rest == 0:
            raise ValueError(f"{axis}={size} does not fit {ranks} ranks beside "
                             f"{' and '.join(f'{a}={n}' for a, n in given.items() if a != axis and n > 1)}: "
                             f"{axis} can be {_list(_divisors(ranks // rest))}")
    return {axis: given.get(axis, ranks // product) for axis in sizes}


def _divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


def _list(numbers):
    numbers = [str(n) for n in numbers]
    return numbers[0] if len(numbers) == 1 else f"{', '.join(numbers[:-1])} or {numbers[-1]}"


def _ranks_of_job(comm):
    """The ranks of `comm` as ranks of COMM_WORLD."""
    if comm is None:
        return [0]
    from mpipar.comm import mpi
    mine, world = comm.Get_group(), mpi.MPI.COMM_WORLD.Get_group()
    ranks = mpi.MPI.Group.Translate_ranks(mine, None, world)
    mine.Free()
    world.Free()
    return list(ranks)


def _nodes_of_ranks(comm):
    """For each rank the lowest rank that shares its node.

    MPIPAR_RANKS_PER_NODE=k makes k neighbouring ranks count as one node, for tests on one machine.
    """
    if comm is None:
        return [0]
    size, text = comm.Get_size(), os.environ.get("MPIPAR_RANKS_PER_NODE", "")
    if text:
        if not text.isdigit() or int(text) < 1:
            raise ValueError(f"MPIPAR_RANKS_PER_NODE={text!r}: a whole number, 1 or more, is needed")
        return [r - r % int(text) for r in range(size)]
    if size == 1:
        return [0]
    from mpipar.comm import mpi
    shared = comm.Split_type(mpi.MPI.COMM_TYPE_SHARED)
    lowest = np.array([comm.Get_rank()])
    shared.Allreduce(mpi.IN_PLACE, lowest, mpi.MPI.MIN)
    shared.Free()
    lowest_of_all = np.empty(size, lowest.dtype)
    comm.Allgather(lowest, lowest_of_all)
    return lowest_of_all.tolist()
