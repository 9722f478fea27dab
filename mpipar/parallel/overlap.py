"""Gradients are summed over the replicas while the rest of the last backward pass still computes.

Backward completes the gradients of the last block first. The flat gradient buffer is cut into buckets, slices that are
complete one after the other; as soon as one is, a helper thread sums it over the replicas, on a communicator of its own
(nothing moves by itself in MPI, and what moves needs some core's time). Every replica starts the same buckets in the
same order, so no agreement is needed, and each element is summed as without overlap: the same bits.

Source: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, 2020, section 3.2.
"""

from __future__ import annotations

import math
import queue
import threading
import weakref
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from mpipar.comm import launcher
from mpipar.kernels.dtypes import as_dtype, is_bfloat16
from mpipar.kernels.settings import available_cores, settings
from mpipar.kernels.threads import work_alone
from mpipar.parallel.data import sum_gradients

BUCKET_MB = 4.0         # size of a bucket, unless told otherwise
SMALL = 1 << 16         # bytes: what is left over at the end and smaller joins another bucket
COMPRESSED = ("bfloat16",)


@dataclass(frozen=True)
class Room:
    """What overlap can live on, the same on every rank. wire: replicas sit on several nodes, so that some of the time
    of a message is waiting. core: every node has a core beside those of its ranks' threads."""

    wire: bool
    core: bool

    def __str__(self):
        return f"{'a' if self.core else 'no'} free core, " + ("messages between nodes" if self.wire else "all replicas on one node")


def room(mesh) -> Room:
    """What there is on the nodes of a mesh with the threads that its ranks have now; collective."""
    busy = mesh.ranks_on_node * settings.threads
    core = launcher.cores() > busy and available_cores() > settings.threads
    least = mesh.world.all_reduce(np.array([core, mesh.dp.single_node], np.int64), "min")
    return Room(core=bool(least[0]), wire=not least[1])


def check_overlap(overlap: bool | None, bucket_mb: float | None, compress: str | None, *, zero: int, deterministic: bool,
                  dtype, back_end: str) -> None:
    """ValueError, with what would do, for options that don't exist, would do nothing or exclude each other."""
    other = f"zero={zero}" if zero else "deterministic sums" if deterministic else None
    if overlap and other:
        raise ValueError(f"overlap sends all-reduces during backward, and with {other} there are none: leave one of the two out")
    if bucket_mb is not None and not 0 < bucket_mb < math.inf:
        raise ValueError(f"a bucket of {bucket_mb:g} MB is not valid: it must be a number above 0")
    if bucket_mb is not None and (other or overlap is False):
        raise ValueError(f"the size of buckets is that of overlap's messages, and with {other or 'overlap off'} there are none: leave it out")
    if compress is None:
        return
    if compress not in COMPRESSED:
        raise ValueError(f"compress={compress!r} is not valid: one of {', '.join(COMPRESSED)}, or leave it out")
    if deterministic:
        raise ValueError(f"compress={compress} rounds sums that deterministic sums keep exact: leave one of the two out")
    if as_dtype(dtype) != np.float32:
        why = "gradients are sent in 16 bits already" if is_bfloat16(as_dtype(dtype)) else "it would lose most of what float64 is for"
        raise ValueError(f"compress={compress} is for float32, not {as_dtype(dtype).name} ({why}): leave it out")
    if back_end == "shm":
        raise ValueError(f"compress={compress} needs messages, and the back end shm sends none on a node: take auto or mpi")


@dataclass(frozen=True)
class Bucket:
    """Elements start to stop of the flat gradients, complete when `blocks` blocks have done their last backward pass."""

    start: int
    stop: int
    blocks: int


def last_backwards(actions) -> list[int]:
    """The stages of a rank in the order in which their weight gradients are complete (`B` and `W` complete them)."""
    last = {action.stage: place for place, action in enumerate(actions) if action.kind in "BW"}
    return sorted(last, key=last.get)


def cut(buffers, blocks, bucket_bytes: float) -> list[Bucket]:
    """The buckets of flat buffers, in the order in which they are complete.

    blocks: all blocks of the rank in the order of their last backward pass. A bucket is closed when it has reached
    `bucket_bytes`; what is complete and not adjacent waits for its neighbour, at most until the last block.
    """
    complete = {}
    for count, block in enumerate(blocks, 1):
        for parameter in block.parameters():
            complete[parameter] = count                     # the last of its users counts
    item, buckets, waiting = buffers.grad.itemsize, [], []
    for count in range(1, len(blocks) + 1):
        waiting += [(start, stop) for parameter, start, stop in zip(buffers.parameters, buffers.bounds, buffers.bounds[1:])
                    if complete[parameter] == count]
        waiting = joined(waiting)
        ready = [run for run in waiting if (run[1] - run[0]) * item >= bucket_bytes or count == len(blocks)]
        waiting = [run for run in waiting if run not in ready]
        buckets += [Bucket(int(start), int(stop), count) for start, stop in reversed(ready)]
    return without_crumbs(buckets, SMALL // item)


def joined(runs) -> list[tuple[int, int]]:
    """Ranges in order, adjacent ones as one."""
    out = []
    for start, stop in sorted(runs):
        if out and out[-1][1] == start:
            start = out.pop()[0]
        out.append((start, stop))
    return out


def without_crumbs(buckets: list[Bucket], small: int) -> list[Bucket]:
    """Each bucket of the last block that is smaller than `small` joins an adjacent one, which then waits for it."""
    for crumb in [bucket for bucket in buckets if bucket.blocks == buckets[-1].blocks]:
        beside = [bucket for bucket in buckets if bucket.start == crumb.stop or bucket.stop == crumb.start]
        if crumb in buckets and crumb.stop - crumb.start < small and beside:
            other = beside[-1]
            whole = Bucket(min(crumb.start, other.start), max(crumb.stop, other.stop), crumb.blocks)
            buckets = [bucket for bucket in buckets if bucket not in (crumb, other)] + [whole]
    return buckets


class Helper:
    """A thread that does one piece of work after the other. It ends with this object."""

    def __init__(self, name: str):
        self._work, self._ended, self._errors, self._begun = queue.SimpleQueue(), threading.Semaphore(0), [], 0
        threading.Thread(target=_serve, args=(self._work, self._ended, self._errors), name=name, daemon=True).start()
        weakref.finalize(self, self._work.put, None)

    def do(self, function, *arguments) -> None:
        """function(*arguments), after what it was given before; raises what an earlier piece has raised."""
        self._raise()
        self._begun += 1
        self._work.put((function, arguments))

    def wait(self) -> None:
        """Until all is done; raises what a piece of work has raised (what came after it was not begun)."""
        while self._begun:
            self._ended.acquire()
            self._begun -= 1
        self._raise()

    def _raise(self):
        if self._errors:
            raise self._errors[0]


def _serve(work, ended, errors):
    work_alone()                                    # the other threads compute
    while (piece := work.get()) is not None:
        function, arguments = piece
        try:
            if not errors:
                function(*arguments)
        except BaseException as error:              # for the main thread, whose failures end the job
            errors.append(error)
        ended.release()
        del piece, function, arguments


class OverlappingReducer:
    """Sums the flat gradients over the replicas, bucket by bucket, from the last micro-batch's backward pass on.

    model: allocated. stages: its stages on this rank, in the order of `last_backwards`. dtype: of the messages, see
    `sum_gradients`. patient: the helper sleeps while it waits, for want of a core of its own. Collective over the mesh.
    waited: seconds in which the last step had nothing to do but wait for sums.
    """

    def __init__(self, model, stages: list[int], *, dtype, bucket_mb: float | None = None, patient: bool):
        self.buffers, self.gradients, self.dtype = model.buffers, model.buffers.grad, np.dtype(dtype)
        self.group = model.mesh.beside("dp", patient=patient)
        if not is_bfloat16(self.dtype):
            self.group.share(model.mesh.dp, self.gradients)
        self.order = [block for stage in stages for block in reversed(model.stage_blocks[stage])]
        self.ends = dict(zip(stages, np.cumsum([len(model.stage_blocks[stage]) for stage in stages]).tolist()))
        self.bucket_mb = BUCKET_MB if bucket_mb is None else bucket_mb
        self.buckets = cut(model.buffers, self.order, self.bucket_mb * 1e6)
        self.helper = Helper("mpipar-overlap")
        for chunk in model.chunks.values():
            chunk.done = self.block_done
        self.waited, self.last = 0.0, False
        self._begin()

    def _begin(self):
        self.complete, self.started = 0, 0          # blocks, buckets

    def clear(self) -> None:
        """All gradients zero, before the first micro-batch."""
        self._begin()
        self.buffers.begin_gradients()

    def before(self, action, last: bool) -> None:
        """Around every action of the schedule: whether it is the last to add to the gradients of its stage."""
        self.last = last and action.kind in "BW"

    def after(self, action, last: bool) -> None:
        """See `before`. A stage that doesn't tell of its blocks is complete now."""
        if self.last:
            self.advance(self.ends[action.stage])
        self.last = False

    def block_done(self, block) -> None:
        """Called by a stage when a block has added the gradients of one micro-batch, deferred ones included."""
        if self.last:
            assert block is self.order[self.complete], f"{block} was not the next block to be complete"
            self.advance(self.complete + 1)

    def advance(self, complete: int) -> None:
        """So many blocks are complete: start the buckets that lie in them alone."""
        self.complete = complete
        while self.started < len(self.buckets) and self.buckets[self.started].blocks <= complete:
            self.start(self.buckets[self.started])
            self.started += 1

    def start(self, bucket: Bucket) -> None:
        """Let the helper sum a bucket."""
        self.buffers.settle_gradients(bucket.start, bucket.stop)
        self.helper.do(sum_gradients, self.group, self.gradients[bucket.start : bucket.stop], self.dtype)

    def finish(self) -> None:
        """Block until every replica holds all sums."""
        assert self.started == len(self.buckets), "a backward pass is not over"
        began = perf_counter()
        self.helper.wait()
        self.waited = perf_counter() - began
