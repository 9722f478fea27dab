"""Reductions of bfloat16: messages of 16 bits, sums in float32, in the order of the ranks.

MPI has no arithmetic for bfloat16, and a sum made pairwise on the way would be rounded at each step. So the numbers are
moved as they are to the rank that sums them, in float32 by a kernel, and the result is rounded once. Each element is
summed on one rank, or on all in the same order: every rank gets the same bits. Functions and plans are as in `collectives.py`.
"""
from functools import partial

import numpy as np

from mpipar.comm import buffers, collectives

STAGED = 1 << 20  # elements that are under way at a time in `all_reduce`: they need a second array of 2 MiB


def all_reduce(group, x, op, at_once=False):
    """A reduce-scatter and an all-gather. at_once: one all-gather, and each rank sums everything; it sends P / 2 times as
    much, but nothing has to be done between its calls, so they can be started and left."""
    buffers.check_array(x, writable=True)
    buffers.check_operation(x, op)
    if group.size == 1:
        return collectives.Plan("all_reduce", x)
    message = buffers.packed(x)
    flat = message.reshape(-1)
    copy = None if message is x else partial(np.copyto, x, message)
    if at_once:
        gathered = collectives.all_gather(group, flat[None], 0, None, None)

        def finish():
            if gathered.finish is not None:
                gathered.finish()
            combine(gathered.result, flat, op)
            if copy is not None:
                copy()

        plan = collectives.Plan("all_reduce", x, gathered.calls, finish, x.nbytes, x.nbytes * (group.size - 1))
    else:
        sent = 2 * x.nbytes * (group.size - 1) // group.size
        plan = collectives.Plan("all_reduce", x, _in_two_rounds(group, flat, op), copy, x.nbytes, sent)
    return plan


def _in_two_rounds(group, flat, op):
    """The calls one by one; the second round of each piece begins when this rank's share of it is summed."""
    limit = STAGED if group.limit is None else min(STAGED, max(1, group.limit - group.size))
    for piece in buffers.chunks(flat, limit):
        lengths = buffers.split_sizes(piece.size, group.size)
        places, mine = buffers.offsets(lengths), lengths[group.rank]
        parts = np.empty((group.size, mine), flat.dtype)
        words = buffers.wire(piece)
        yield "Alltoallv", ([words, lengths], [buffers.wire(parts), [mine] * group.size])
        combine(parts, piece[places[group.rank]:places[group.rank + 1]], op)
        yield "Allgatherv", (group.mpi.IN_PLACE, [words, lengths])


def reduce(group, x, root, op):
    """A gather; the root sums."""
    buffers.check_array(x)
    buffers.check_operation(x, op)
    collectives.check_rank(group, root, "root")
    if group.size == 1:
        return collectives.Plan("reduce", x)
    gathered = collectives.gather(group, x.reshape((1,) + x.shape), root, 0, None)
    if group.rank != root:
        return collectives.Plan("reduce", None, gathered.calls, None, x.nbytes, gathered.sent)
    out = np.empty(x.shape, x.dtype)

    def finish():
        if gathered.finish is not None:
            gathered.finish()
        combine(gathered.result.reshape(group.size, -1), out.reshape(-1), op)

    return collectives.Plan("reduce", out, gathered.calls, finish, x.nbytes, 0)


def reduce_scatter(group, x, axis, op, sizes, out):
    """An all-to-all; each rank sums its part."""
    buffers.check_array(x)
    buffers.check_operation(x, op)
    axis = buffers.check_axis(x, axis)
    sizes = buffers.check_sizes(sizes, x.shape[axis], group.size, f"axis {axis}")
    if group.size == 1:
        return collectives.alone("reduce_scatter", x, out)
    out = buffers.check_out(out, buffers.with_length(x.shape, axis, sizes[group.rank]), x.dtype)
    flat = buffers.pack_parts(x, axis, sizes)
    moved = collectives.all_to_all_v(group, flat, buffers.counts(x.shape, axis, sizes), [out.size] * group.size)

    def finish():
        result = np.empty(out.size, x.dtype)
        combine(moved.result.reshape(group.size, out.size), result, op)
        out[...] = result.reshape(out.shape)

    sent = x.nbytes * (group.size - 1) // group.size
    plan = collectives.Plan("reduce_scatter", out, moved.calls, finish, x.nbytes, sent)
    plan.pairwise = moved.pairwise
    return plan


def combine(parts, out, op):
    """out[n] = the sum (mean, min, max) of parts[p, n] over p; bfloat16."""
    if op in ("sum", "mean"):
        from mpipar.kernels.bfloat16 import sum_parts  # here, because it loads Numba

        sum_parts(parts, out, factor=1 / len(parts) if op == "mean" else 1.0)
    else:
        (np.minimum if op == "min" else np.maximum).reduce(parts, axis=0, out=out)
