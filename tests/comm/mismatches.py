"""Programs in which the ranks do not agree: python -m tests.comm.mismatches NAME, on 2 ranks unless NAMES says more.

Rank 0 does the one thing, the others do the other. After it, all reduce once more: without the check that is where
many of them go wrong.
"""
import os
import signal
import sys
import threading
import time

import numpy as np

from mpipar.comm import guard


def numbers(n, dtype="f8"):
    return np.arange(n, dtype=dtype)


def swapped(w, first):
    x, y = numbers(4), 100 * numbers(4)
    if first:
        w.all_reduce(x, name="layer1.W")
        w.all_reduce(y, name="layer2.W")
    else:
        w.all_reduce(y, name="layer2.W")
        w.all_reduce(x, name="layer1.W")


def ring_of_sends(w, n):
    """Sends too large to be buffered, which nobody receives."""
    w.send(numbers(n), (w.rank + 1) % w.size)


# name: (what rank 0 does, what the others do), with the world's group. Without the check some of these hang, and most
# give wrong numbers without an error.
MISMATCHES = {
    "broadcast and all_reduce": (lambda w: w.broadcast(numbers(4)), lambda w: w.all_reduce(numbers(4))),
    "barrier and all_reduce": (lambda w: w.barrier(), lambda w: w.all_reduce(numbers(4))),
    "4 and 8 numbers": (lambda w: w.all_reduce(numbers(4)), lambda w: w.all_reduce(numbers(8))),
    "1e5 and 2e5 numbers": (lambda w: w.all_reduce(numbers(100_000)), lambda w: w.all_reduce(numbers(200_000))),
    "dtypes, 32 bytes": (lambda w: w.all_reduce(numbers(8, "f4")), lambda w: w.all_reduce(numbers(4))),
    "dtypes, 800 kB": (lambda w: w.all_reduce(numbers(200_000, "f4")), lambda w: w.all_reduce(numbers(100_000))),
    "root broadcasts more": (lambda w: w.broadcast(numbers(8)), lambda w: w.broadcast(numbers(4))),
    "root broadcasts less": (lambda w: w.broadcast(numbers(4)), lambda w: w.broadcast(numbers(8))),
    "another order": (lambda w: swapped(w, True), lambda w: swapped(w, False)),
    "sum and max": (lambda w: w.all_reduce(numbers(4)), lambda w: w.all_reduce(numbers(4), "max")),
    "roots": (lambda w: w.broadcast(numbers(4), 0), lambda w: w.broadcast(numbers(4), 1)),
    "all_gather of 4 and 2": (lambda w: w.all_gather(numbers(4)), lambda w: w.all_gather(numbers(2))),
    "reduce_scatter of 8 and 4": (lambda w: w.reduce_scatter(numbers(8)), lambda w: w.reduce_scatter(numbers(4))),
    "shapes of one size": (lambda w: w.all_reduce(numbers(4)), lambda w: w.all_reduce(numbers(4).reshape(2, 2))),
}
LOCAL = {   # seen by each rank alone: a ValueError, with and without the check
    "out of another length": (lambda w: w.all_gather(numbers(4), out=numbers(7)),) * 2,
}
FURTHER = {
    "waits and started": (lambda w: w.all_reduce(numbers(4)), lambda w: w.all_reduce_start(numbers(4)).wait()),
    "started": (lambda w: w.all_reduce_start(numbers(4)).wait(), lambda w: w.all_reduce_start(numbers(5)).wait()),
    "started, asked by test": (lambda w: until(w.all_gather_start(numbers(4))), lambda w: until(w.barrier_start())),
    "axis": (lambda w: w.all_gather(numbers(4).reshape(2, 2)), lambda w: w.all_gather(numbers(4).reshape(2, 2), 1)),
    "counts of all_to_all_v": (lambda w: w.all_to_all_v(numbers(3), [1, 2], [1, 1]),
                               lambda w: w.all_to_all_v(numbers(3), [1, 2], [1, 2])),
    "scatter of other parts": (lambda w: w.scatter(numbers(8)), lambda w: w.scatter(shape=(3,), dtype="f8")),
    "gather to two roots": (lambda w: w.gather(numbers(8), 0), lambda w: w.gather(numbers(8), 1)),
    "reduce to two roots": (lambda w: w.reduce(numbers(8), 0), lambda w: w.reduce(numbers(8), 1)),
    "bfloat16": (lambda w: w.all_reduce(bfloat16(8)), lambda w: w.all_reduce(bfloat16(9))),
    "part of x as out": (lambda w: in_place(w, True), lambda w: in_place(w, False)),
    "zeros": (lambda w: w.zeros(100, "f4"), lambda w: w.zeros(100, "f8")),
    "shared and private": (lambda w: shares(w, 0, 0), lambda w: shares(w, None, 0)),
    "two shared arrays": (lambda w: shares(w, 0, 0), lambda w: shares(w, 1, 0)),
    "parts of a shared array": (lambda w: shares(w, 0, 0), lambda w: shares(w, 0, 1)),
}
MESSAGES = {
    "message of another length": (lambda w: w.send(numbers(4), 1), lambda w: w.recv(numbers(8), 0)),
    "message of another dtype": (lambda w: w.send(numbers(4), 1), lambda w: w.recv(numbers(8, "f4"), 0)),
    "large message of another length": (lambda w: w.send(numbers(10**6), 1), lambda w: w.recv(numbers(10**6 + 1), 0)),
    "started message of another shape": (lambda w: w.send_start(numbers(4), 1).wait(),
                                         lambda w: w.recv_start(numbers(4).reshape(2, 2), 0).wait()),
    "message of another name": (lambda w: w.send(numbers(4), 1, name="0F1"),
                                lambda w: w.recv(numbers(4), 0, name="0F2")),
}
STUCK = {   # each waits for something else: the watchdog sees it
    "tags": (lambda w: w.send(numbers(10**6), 1, tag=1), lambda w: w.recv(numbers(10**6), 0, tag=2)),
    "tags of small messages": (lambda w: w.send(numbers(4), 1, tag=1), lambda w: w.recv(numbers(4), 0, tag=2)),
    "both receive": (lambda w: w.recv(numbers(4), 1), lambda w: w.recv(numbers(4), 0)),
    "both send": (lambda w: ring_of_sends(w, 10**6),) * 2,
    "recv and all_reduce": (lambda w: w.recv(numbers(4), 1), lambda w: w.all_reduce(numbers(4))),
}


def until(pending):
    while not pending.test():
        time.sleep(1e-3)


def bfloat16(n):
    import ml_dtypes
    return np.ones(n, ml_dtypes.bfloat16)


def in_place(w, inside):
    x = numbers(8)
    part = x[4 * w.rank:4 * w.rank + 4] if inside else numbers(4)
    w.reduce_scatter(x, out=part)


def shares(w, which, offset):
    """all_reduce of one of two shared arrays, or of a private one."""
    arrays = [w.zeros(400_000, "f4") for _ in range(2)]
    x = numbers(400_000, "f4") if which is None else arrays[which]
    w.all_reduce(x[offset:offset + 200_000])


def two_groups(made, first=(0, 3)):
    """On 4 ranks: those of `first` reduce over tp and then over dp, the others the other way round."""
    groups = (made.tp, made.dp) if made.rank in first else (made.dp, made.tp)
    for group in groups:
        group.all_reduce(numbers(4))


def pipeline(made):
    """On 2 ranks: the mailbox of one stage expects another shape."""
    from mpipar.parallel.pipeline.mailbox import GroupMailbox
    mailbox = GroupMailbox(made.pp, 2, patient=True)
    if made.pp.rank == 0:
        mailbox.send((0, "F", 3), 1, numbers(6).reshape(2, 3))
        mailbox.finish()
    else:
        mailbox.post((0, "F", 3), 0, (3, 2), "f8")
        mailbox.take((0, "F", 3))


def one_sleeps(made):
    """Rank 1 never comes."""
    if made.rank == 1:
        time.sleep(3600)
    made.world.all_reduce(numbers(4))


def never_received(made):
    """A message small enough to be buffered, which nobody receives."""
    if made.rank == 0:
        made.world.send(numbers(2), 1)
    made.world.barrier()


def slow(made):
    """Nothing is wrong: rank 1 works for longer than the watchdog needs to see that ranks wait for one another."""
    if made.rank == 1:
        time.sleep(4)
    made.world.all_reduce(numbers(4))
    if made.rank == 0:
        made.world.send(numbers(4), 1)
    else:
        made.world.recv(numbers(4), 0)
    print("all is well")


def exchange(made):
    """Nothing is wrong: what is started may wait for what others start later, and ends in another order."""
    world, x, y = made.world, numbers(300_000), numbers(300_000)
    there, back = (made.rank + 1) % made.size, (made.rank - 1) % made.size
    for _ in range(20):
        first = world.all_reduce_start(x)
        receiving, second = world.recv_start(y, back, 5), made.tp.all_gather_start(numbers(3))
        if made.rank % 2:
            first.wait()
        world.send(numbers(300_000), there, 5)
        receiving.wait()
        first.wait()
        second.wait()
    print("all is well")


def groups_in_turn(made):
    """Nothing is wrong: one rank has another order, but nobody waits for ever."""
    two_groups(made, (0,))
    print("all is well")


def second_mesh(made):
    """Rank 1 makes no second mesh."""
    from mpipar.comm.mesh import Mesh
    if made.rank == 1:
        time.sleep(3600)
    Mesh()


def test_loop(made):
    """Rank 0 asks for ever whether a message has come."""
    if made.rank == 1:
        time.sleep(3600)
    until(made.world.recv_start(numbers(4), 1))


def stopped(made):
    """The process of rank 1 is stopped."""
    if made.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    made.world.all_reduce(numbers(4))


def killed(made):
    """Rank 1 is killed after some operations."""
    for step in range(7):
        made.world.all_reduce(numbers(step))
    if made.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    made.world.barrier()


def raises(made):
    """Rank 1 fails after some operations."""
    for step in range(7):
        made.world.all_reduce(numbers(step))
    if made.rank == 1:
        raise RuntimeError("boom")
    made.world.barrier()


def cuts(made):
    """The mean of 2,500 numbers, a bfloat16 sum, and messages between all: in pieces under MPIPAR_MAX_COUNT."""
    made.world.all_reduce(numbers(2500), "mean")
    made.world.all_reduce(bfloat16(2500))
    made.world.all_to_all(numbers(2500 * made.size))
    made.world.gather(numbers(2500), 0)
    print("all is well")


def helper(made):
    """A thread beside the main one sums other arrays on the two ranks, while both main threads wait in a message."""
    beside = made.beside("dp")
    thread = threading.Thread(target=beside.all_reduce, args=(numbers(4 + made.rank),))
    thread.start()
    if made.rank == 0:
        made.world.recv(numbers(4), 1)
    thread.join()


WHOLE = {"helper": helper, "two groups": two_groups, "groups in turn": groups_in_turn, "second mesh": second_mesh, "test loop": test_loop,
         "stopped": stopped, "killed": killed, "raises": raises, "cuts": cuts, "mailbox": pipeline,
         "one sleeps": one_sleeps, "never received": never_received,
         "slow": slow, "exchange": exchange}


def main(name, **options):
    from mpipar.comm.mesh import Mesh
    with guard.checking():
        made = Mesh(**options)
    print(f"begins at {time.time()}", flush=True)
    if name in WHOLE:
        WHOLE[name](made)
    else:
        pairs = {**MISMATCHES, **LOCAL, **FURTHER, **MESSAGES, **STUCK}[name]
        pairs[min(made.rank, 1)](made.world)
        print(f"rank {made.rank} goes on")
        made.world.all_reduce(numbers(2))


if __name__ == "__main__":
    guard.main(lambda: main(sys.argv[1], **{name: int(size) if size.isdigit() else size for name, size in (a.split("=") for a in sys.argv[2:])}))
