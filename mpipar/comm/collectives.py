"""Each operation of a group as a plan: which MPI calls on which buffers, and what is left to do after them.

A plan is made once and carried out in two ways: the calls one after the other (`Allreduce`, ...), or all
started (`Iallreduce`, ...) and waited for later. A call of more elements than the MPI library takes is cut
into several. The group of one rank gets a plan without calls.
"""
import math
from functools import partial

import numpy as np

from mpipar.comm import buffers

# Tag of the messages that gather, scatter and all_to_all send themselves where a single MPI call cannot be
# used; the user's tags start at 0 and the standard guarantees tags up to 32767.
INNER_TAG = 32767


class Plan:
    """`calls`: pairs (name of an mpi4py method, its arguments). `result`: what the operation returns, valid
    after the calls and `finish()` (None where nothing is left to do). `pairwise`: the calls have to be in
    flight together. `bytes` and `sent`: see record.py. `peer`: the other rank of a send or receive, None for
    a collective; `number`: which collective call of the group it is, from 1. `shared`: (number of the window, first,
    last element) where the array lies in memory that the ranks share. `call`: a fingerprint.Call, None unless traced."""

    pairwise, peer, number, shared, call = False, None, 0, None, None

    def __init__(self, operation, result, calls=(), finish=None, bytes=0, sent=0):
        self.operation, self.result, self.calls = operation, result, calls
        self.finish, self.bytes, self.sent = finish, bytes, sent


def barrier(group):
    return Plan("barrier", None, [("Barrier", ())] if group.size > 1 else ())


def all_reduce(group, x, op):
    buffers.check_array(x, writable=True)
    buffers.check_operation(x, op)
    ranks = group.size
    if ranks == 1:
        return Plan("all_reduce", x)
    mpi = group.mpi
    operation, in_place = mpi.OPERATIONS[op], mpi.IN_PLACE
    if x.dtype.kind in "fiu" and x.flags.c_contiguous and 0 < x.size and (group.limit is None or x.size <= group.limit):
        message, calls = x, [("Allreduce", (in_place, x, operation))]   # as below, in a third of the time
    else:
        message = buffers.packed(x)
        calls = [
            ("Allreduce", (in_place, part, operation))
            for part in buffers.chunks(buffers.wire(message), group.limit)
        ]
    finish = None
    if op == "mean":
        finish = partial(np.divide, message, ranks, out=x)
    elif message is not x:
        finish = partial(np.copyto, x, message)
    return Plan("all_reduce", x, calls, finish, x.nbytes, 2 * x.nbytes * (ranks - 1) // ranks)


def reduce(group, x, root, op):
    buffers.check_array(x)
    buffers.check_operation(x, op)
    check_rank(group, root, "root")
    if group.size == 1:
        return Plan("reduce", x)
    sent = buffers.packed(x)
    at_root = group.rank == root
    received = np.empty(x.shape, x.dtype) if at_root else None
    parts = buffers.chunks(buffers.wire(sent), group.limit)
    targets = buffers.chunks(buffers.wire(received), group.limit) if at_root else [None] * len(parts)
    calls = [
        ("Reduce", (part, target, group.mpi.OPERATIONS[op], root)) for part, target in zip(parts, targets)
    ]
    finish = partial(np.divide, received, group.size, out=received) if op == "mean" and at_root else None
    return Plan("reduce", received, calls, finish, x.nbytes, 0 if at_root else x.nbytes)


def broadcast(group, x, root):
    at_root = group.rank == root
    buffers.check_array(x, writable=not at_root)
    check_rank(group, root, "root")
    if group.size == 1:
        return Plan("broadcast", x)
    message = buffers.packed(x) if at_root else x if x.flags.c_contiguous else np.empty(x.shape, x.dtype)
    if at_root and not message.flags.writeable:         # mpi4py asks for a writable buffer at the root too
        message = message.copy()
    calls = [("Bcast", (part, root)) for part in buffers.chunks(buffers.wire(message), group.limit)]
    finish = partial(np.copyto, x, message) if not at_root and message is not x else None
    last = (root - 1) % group.size
    return Plan("broadcast", x, calls, finish, x.nbytes, 0 if group.rank == last else x.nbytes)


def all_gather(group, x, axis, sizes, out):
    buffers.check_array(x)
    axis = buffers.check_axis(x, axis)
    sizes = _sizes_of_parts(group, x.shape[axis], sizes, group.rank)
    shape = buffers.with_length(x.shape, axis, sum(sizes))
    if group.size == 1:
        return alone("all_gather", x, out)
    out = buffers.check_out(out, shape, x.dtype)
    direct = out.flags.c_contiguous and buffers.parts_in_order(shape, axis)
    received = out.reshape(-1) if direct else np.empty(out.size, x.dtype)
    message, target = buffers.wire(buffers.packed(x)), buffers.wire(received)
    lengths = buffers.counts(shape, axis, sizes)
    places = buffers.offsets(lengths)
    if buffers.begin_together(message, target[places[group.rank]:places[group.rank + 1]]):
        message = group.mpi.IN_PLACE                    # this rank's part stands in `out` already
    if out.size == 0:
        calls = ()
    elif group.limit is not None and out.size > group.limit:
        # One broadcast per rank, in chunks: no displacement then exceeds what the library can count.
        if message is not group.mpi.IN_PLACE:
            target[places[group.rank]:places[group.rank + 1]] = message.reshape(-1)
        calls = [("Bcast", (part, root)) for root in range(group.size)
                 for part in buffers.chunks(target[places[root]:places[root + 1]], group.limit)]
    elif min(sizes) == max(sizes):
        calls = [("Allgather", (message, target))]
    else:
        calls = [("Allgatherv", (message, [target, lengths]))]
    finish = None if direct else partial(buffers.unpack_parts, received, out, axis, sizes)
    sent = out.nbytes * (group.size - 1) // group.size
    return Plan("all_gather", out, calls, finish, out.nbytes, sent)


def reduce_scatter(group, x, axis, op, sizes, out):
    buffers.check_array(x)
    buffers.check_operation(x, op)
    axis = buffers.check_axis(x, axis)
    sizes = buffers.check_sizes(sizes, x.shape[axis], group.size, f"axis {axis}")
    if group.size == 1:
        return alone("reduce_scatter", x, out)
    rank, ranks = group.rank, group.size
    out = buffers.check_out(out, buffers.with_length(x.shape, axis, sizes[rank]), x.dtype)
    message = buffers.wire(buffers.pack_parts(x, axis, sizes))
    received = out if out.flags.c_contiguous else np.empty(out.shape, out.dtype)
    lengths = buffers.counts(x.shape, axis, sizes)
    # In place, below, it is Reduce_scatter for all ranks, also for one whose x has to be packed.
    even = min(sizes) == max(sizes) and not np.may_share_memory(x, out)
    operation = group.mpi.OPERATIONS[op]
    small = group.limit is None or x.size <= group.limit
    places = buffers.offsets(lengths)
    if small and x.size and buffers.begin_together(received, message[places[rank]:places[rank + 1]]):
        return _reduce_scatter_in_place(group, x, out, message, lengths, places, op)

    def call(part, target, lengths):
        if even:
            return "Reduce_scatter_block", (part, target, operation)
        return "Reduce_scatter", (part, target, lengths, operation)

    if x.size == 0:
        calls = ()
    elif small:
        calls = [call(message, buffers.wire(received), lengths)]
    else:
        calls = _reduce_scatter_rounds(
            message, buffers.wire(received).reshape(-1), lengths, group.limit, call
        )
    finish = None
    if op == "mean":
        finish = partial(np.divide, received, ranks, out=out)
    elif received is not out:
        finish = partial(np.copyto, out, received)
    return Plan("reduce_scatter", out, calls, finish, x.nbytes, x.nbytes * (ranks - 1) // ranks)


def _reduce_scatter_in_place(group, x, out, message, lengths, places, op):
    """`out` is this rank's part of x: MPI leaves the result at the beginning of x, from where it is moved there.

    The other parts of x are undefined afterwards.
    """
    mpi, rank = group.mpi, group.rank
    arguments = mpi.IN_PLACE, message, lengths, mpi.OPERATIONS[op]
    result = message[:lengths[rank]].reshape(out.shape)
    finish = None
    if op == "mean":
        finish = partial(np.divide, result, group.size, out=out)
    elif places[rank]:
        finish = partial(np.copyto, out, result)
    sent = x.nbytes * (group.size - 1) // group.size
    return Plan("reduce_scatter", out, [("Reduce_scatter", arguments)], finish, x.nbytes, sent)


def _reduce_scatter_rounds(message, target, lengths, limit, call):
    """Round k reduces elements k*c to (k+1)*c of every rank's part: each receives straight into its own."""
    step = max(1, limit // len(lengths))
    places, mine, calls = buffers.offsets(lengths), 0, []
    for start in range(0, max(lengths), step):
        pieces = [message[place + min(start, length):place + min(start + step, length)]
                  for place, length in zip(places, lengths)]
        width = min(step, max(target.size - start, 0))
        calls.append(
            call(np.concatenate(pieces), target[mine : mine + width], [piece.size for piece in pieces])
        )
        mine += width
    return calls


def gather(group, x, root, axis, sizes):
    buffers.check_array(x)
    axis = buffers.check_axis(x, axis)
    check_rank(group, root, "root")
    sizes = _sizes_of_parts(group, x.shape[axis], sizes, group.rank)
    if group.size == 1:
        return Plan("gather", x)
    at_root = group.rank == root
    shape = buffers.with_length(x.shape, axis, sum(sizes))
    whole, lengths = math.prod(shape), buffers.counts(shape, axis, sizes)
    out = np.empty(shape, x.dtype) if at_root else None
    direct = buffers.parts_in_order(shape, axis)
    received = None if not at_root else out.reshape(-1) if direct else np.empty(whole, x.dtype)
    message, target = buffers.wire(buffers.packed(x)), buffers.wire(received) if at_root else None
    if whole == 0:
        calls = ()
    elif group.limit is not None and whole > group.limit:
        if at_root:
            places = buffers.offsets(lengths)
            target[places[root]:places[root + 1]] = message.reshape(-1)
            calls = [("Recv", (part, source, INNER_TAG)) for source in range(group.size) if source != root
                     for part in buffers.chunks(target[places[source]:places[source + 1]], group.limit)]
        else:
            calls = [("Send", (part, root, INNER_TAG)) for part in buffers.chunks(message, group.limit)]
    else:
        calls = [("Gatherv", (message, [target, lengths] if at_root else None, root))]
    unpack = at_root and not direct
    finish = partial(buffers.unpack_parts, received, out, axis, sizes) if unpack else None
    return Plan("gather", out, calls, finish, x.nbytes, 0 if at_root else x.nbytes)


def scatter(group, x, root, axis, sizes, out, shape, dtype):
    check_rank(group, root, "root")
    at_root = group.rank == root
    if at_root:
        buffers.check_array(x)
        axis = buffers.check_axis(x, axis)
        sizes = buffers.check_sizes(sizes, x.shape[axis], group.size, f"axis {axis}")
        mine = buffers.with_length(x.shape, axis, sizes[root])
        if group.size == 1:
            return alone("scatter", x, out)
        out = buffers.check_out(out, mine, x.dtype)
        whole, lengths = x.size, buffers.counts(x.shape, axis, sizes)
        message = buffers.wire(buffers.pack_parts(x, axis, sizes))
    else:
        if out is None and (shape is None or dtype is None):
            raise ValueError(
                "scatter: a rank that is not the root gives `out`, or `shape` and `dtype` of its part"
            )
        out = buffers.check_out(
            out, out.shape if shape is None else shape, out.dtype if dtype is None else dtype
        )
        buffers.check_array(out)
        axis = buffers.check_axis(out, axis)
        sizes = _sizes_of_parts(group, out.shape[axis], sizes, group.rank)
        whole, message = math.prod(buffers.with_length(out.shape, axis, sum(sizes))), None
    received = out if out.flags.c_contiguous else np.empty(out.shape, out.dtype)
    target = buffers.wire(received)
    if whole == 0:
        calls = ()
    elif group.limit is not None and whole > group.limit:
        calls = []
        if at_root:
            places = buffers.offsets(lengths)
            target.reshape(-1)[...] = message[places[root]:places[root + 1]]
            calls = [("Send", (part, to, INNER_TAG)) for to in range(group.size) if to != root
                     for part in buffers.chunks(message[places[to]:places[to + 1]], group.limit)]
        else:
            calls = [("Recv", (part, root, INNER_TAG)) for part in buffers.chunks(target, group.limit)]
    else:
        calls = [("Scatterv", ([message, lengths] if at_root else None, target, root))]
    finish = partial(np.copyto, out, received) if received is not out else None
    return Plan("scatter", out, calls, finish, x.nbytes if at_root else out.nbytes,
                x.nbytes - out.nbytes if at_root else 0)


def all_to_all(group, x, axis):
    buffers.check_array(x)
    axis = buffers.check_axis(x, axis)
    sizes = buffers.check_sizes(None, x.shape[axis], group.size, f"axis {axis}")
    if group.size == 1:
        return Plan("all_to_all", x)
    message = buffers.pack_parts(x, axis, sizes)
    out = np.empty(x.shape, x.dtype)
    direct = buffers.parts_in_order(x.shape, axis)
    received = out.reshape(-1) if direct else np.empty(out.size, out.dtype)
    lengths = buffers.counts(x.shape, axis, sizes)
    pairwise = group.limit is not None and x.size > group.limit
    if x.size == 0:
        calls = ()
    elif pairwise:
        calls = _pairs(group, buffers.wire(message), lengths, buffers.wire(received), lengths)
    else:
        calls = [("Alltoall", (buffers.wire(message), buffers.wire(received)))]
    finish = None if direct else partial(buffers.unpack_parts, received, out, axis, sizes)
    plan = Plan("all_to_all", out, calls, finish, x.nbytes, x.nbytes * (group.size - 1) // group.size)
    plan.pairwise = pairwise
    return plan


def all_to_all_v(group, x, send_counts, receive_counts):
    buffers.check_array(x)
    buffers.check_axis(x, 0)
    send_counts = buffers.check_sizes(send_counts, x.shape[0], group.size, "axis 0")
    receive_counts = buffers.check_sizes(receive_counts, sum(receive_counts), group.size, "the received rows")
    if send_counts[group.rank] != receive_counts[group.rank]:
        raise ValueError(f"rank {group.rank} sends itself {send_counts[group.rank]} rows and expects "
                         f"{receive_counts[group.rank]}")
    if group.size == 1:
        return Plan("all_to_all_v", x)
    row = math.prod(x.shape[1:])
    out = np.empty((sum(receive_counts),) + x.shape[1:], x.dtype)
    message, received = buffers.wire(buffers.packed(x)).reshape(-1), buffers.wire(out).reshape(-1)
    sends, receives = [n * row for n in send_counts], [n * row for n in receive_counts]
    # No rank knows how much the others send, so where the library has a limit all of them go pair by pair.
    pairwise = group.limit is not None
    if row == 0:
        calls = ()
    elif pairwise:
        calls = _pairs(group, message, sends, received, receives)
    else:
        calls = [("Alltoallv", ([message, sends], [received, receives]))]
    leaving = (x.shape[0] - send_counts[group.rank]) * row * x.itemsize
    plan = Plan("all_to_all_v", out, calls, None, x.nbytes, leaving)
    plan.pairwise = pairwise
    return plan


def _pairs(group, message, sends, received, receives):
    """An all-to-all as messages between pairs, in chunks; a rank's part for itself is copied at once."""
    me, ranks, limit = group.rank, group.size, group.limit
    outgoing, incoming = buffers.offsets(sends), buffers.offsets(receives)
    received[incoming[me]:incoming[me + 1]] = message[outgoing[me]:outgoing[me + 1]]
    calls = []
    for shift in range(1, ranks):
        source, to = (me - shift) % ranks, (me + shift) % ranks
        calls += [("Recv", (part, source, INNER_TAG))
                  for part in buffers.chunks(received[incoming[source]:incoming[source + 1]], limit)]
        calls += [("Send", (part, to, INNER_TAG))
                  for part in buffers.chunks(message[outgoing[to]:outgoing[to + 1]], limit)]
    return calls


def send(group, x, to, tag):
    buffers.check_array(x)
    check_peer(group, to, tag, "to")
    name = "Ssend" if group.synchronous else "Send"
    parts = buffers.chunks(buffers.wire(buffers.packed(x)), group.limit) or (np.empty(0, np.uint8),)
    plan = Plan("send", None, [(name, (part, to, tag)) for part in parts], None, x.nbytes, x.nbytes)
    plan.peer = to
    return plan


def recv(group, out, source, tag):
    buffers.check_array(out, writable=True)
    check_peer(group, source, tag, "source")
    received = out if out.flags.c_contiguous else np.empty(out.shape, out.dtype)
    parts = buffers.chunks(buffers.wire(received), group.limit) or (np.empty(0, np.uint8),)
    finish = partial(np.copyto, out, received) if received is not out else None
    plan = Plan("recv", out, [("Recv", (part, source, tag)) for part in parts], finish, out.nbytes)
    plan.peer = source
    return plan


def check_rank(group, rank, what):
    """ValueError where `rank` is not a rank of the group."""
    if not 0 <= rank < group.size:
        raise ValueError(
            f"{what}={rank} is not a rank of group {group.name}: valid are 0 to {group.size - 1}"
        )


def check_peer(group, rank, tag, what):
    """ValueError where `rank` is not another rank of the group, or the tag is out of range."""
    check_rank(group, rank, what)
    if rank == group.rank:
        raise ValueError(f"{what}={rank} is this rank itself, in group {group.name} of {group.size}")
    if not 0 <= tag < INNER_TAG:
        raise ValueError(f"tag={tag} is out of range: valid are 0 to {INNER_TAG - 1}")


def _sizes_of_parts(group, length, sizes, rank):
    """Lengths of all ranks' parts, where this rank's is `length`: equal unless `sizes` says otherwise."""
    if sizes is None:
        return [length] * group.size
    sizes = buffers.check_sizes(sizes, sum(sizes), group.size, "the gathered axis")
    if sizes[rank] != length:
        raise ValueError(
            f"sizes={sizes} give rank {rank} a part of length {sizes[rank]}, but its part has {length}"
        )
    return sizes


def alone(operation, x, out):
    """The plan of a group of one rank: x itself, or a copy of it in `out`."""
    if out is None:
        return Plan(operation, x)
    buffers.check_out(out, x.shape, x.dtype)[...] = x
    return Plan(operation, out)
