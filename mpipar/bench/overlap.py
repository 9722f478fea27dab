"""`mpirun -np P python -m mpipar.bench overlap`: how much of the time of the gradients' messages is hidden behind backward.

    mpirun -np 2 python -m mpipar.bench overlap --layers 6 --dim 384 --heads 6 --seq 256 --global-batch 8

The options of the model and the layout are those of `mpipar.train`. Three times are measured in turn, of the slowest
rank: the messages alone, bucket after bucket while nothing computes; the computing alone, a whole step without them;
both, a step with overlap. Hidden is what the messages did not add: (compute + messages - both) / messages. A step without
overlap stands beside it. The share is that of the shortest times, which other programs on the machine disturb least; the
single rounds' shares are its range. Where there is neither a free core nor a wire, nothing is claimed: the messages are then work
for the cores that compute.
"""

from __future__ import annotations

import copy
import os
import statistics
import time

import numpy as np

from mpipar.bench.report import quartiles, write_json

SKIP = 2  # first rounds that are left out


def add_arguments(parser):
    """The options of `mpipar.bench overlap` beside those of `mpipar.train`."""
    parser.add_argument("--rounds", type=int, default=9, help="rounds that are measured (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="also write everything to FILE")


def run(arguments):
    """Measure, print on rank 0."""
    from mpipar.commands.config import parse
    from mpipar.commands.train import set_up
    from mpipar.comm import guard
    from mpipar.comm.mpi import world_size
    from mpipar.engine.metrics import check_writable
    from mpipar.kernels.host import host
    from mpipar.kernels.settings import settings

    with guard.checking():
        check_writable(arguments.json)
        if arguments.rounds < 1:
            raise ValueError(f"--rounds is {arguments.rounds}; valid values: integers from 1")
        config = parse(arguments.rest).resolved(world_size())
        if config.overlap is False:
            raise ValueError("--no-overlap leaves nothing to measure: a step without overlap is measured beside it")
        if config.dp == 1:
            raise ValueError("dp=1 has no gradients to sum: start several replicas, mpirun -np 2 python -m mpipar.bench overlap")
    started = set_up([*arguments.rest, "--overlap"])
    trainer, mesh = started.trainer, started.mesh
    trainer.learning_rate = lambda step: 0.0    # replicas whose gradients are not summed stay equal
    times = measure(trainer, started.train.batch(1), arguments.rounds)
    if not mesh.is_root:
        return
    room, reducer = trainer.room, trainer.gradients.reducer
    sizes = [(bucket.stop - bucket.start) * reducer.dtype.itemsize for bucket in reducer.buckets]
    report = {
        "hardware": host().describe(), "load_average": os.getloadavg()[0], "options": arguments.rest, "ranks": mesh.size,
        "nodes": mesh.nodes, "shape": mesh.shape, "threads_per_rank": settings.threads, "rounds": arguments.rounds,
        "free_core": room.core, "wire": room.wire, "bucket_bytes": sizes, "seconds": times,
        "median_s": {name: statistics.median(each) for name, each in times.items()}, **share(times, room),
    }
    show(report)
    write_json(report, arguments.json)


def share(times: dict, room) -> dict:
    """{"hidden": the share of the shortest times, "hidden_range": of the rounds}; None where nothing can be hidden."""
    if not (room.core or room.wire):
        return {"hidden": None, "hidden_range": None}
    series = [times[name] for name in ("messages", "compute", "both")]
    best, *shares = [(compute + messages - both) / messages for messages, compute, both in [map(min, series), *zip(*series)]]
    return {"hidden": best, "hidden_range": [min(shares), max(shares)]}


def measure(trainer, batch, rounds: int) -> dict[str, list[float]]:
    """Seconds of messages, compute, both and a step without overlap, of every round, the slowest rank's; collective."""
    mesh, reducer = trainer.mesh, trainer.gradients.reducer
    group, start, finish = reducer.group, reducer.start, reducer.finish
    deaf = copy.copy(group)
    deaf.all_reduce = lambda x, **_: x

    def messages():
        for bucket in reducer.buckets:
            start(bucket)
        reducer.helper.wait()

    def step(before_backward_ends: bool, speaks: bool = True):
        reducer.group = group if speaks else deaf
        reducer.start = start if before_backward_ends else lambda bucket: None
        reducer.finish = finish if before_backward_ends else lambda: (messages(), finish())
        trainer.step(batch)
        reducer.group, reducer.start, reducer.finish = group, start, finish

    ways = {
        "messages": messages, "compute": lambda: step(True, speaks=False), "both": lambda: step(True),
        "one after the other": lambda: step(False),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(SKIP + rounds):
        for name, work in ways.items():
            reducer.gradients[:] = 0            # sums of sums would grow beyond all bounds
            mesh.world.barrier()
            began = time.perf_counter()
            work()
            seconds = float(mesh.world.all_reduce(np.array([time.perf_counter() - began]), "max")[0])
            if number >= SKIP:
                times[name].append(seconds)
    return times


def show(report):
    """The table, and what it says."""
    room = f"{'a' if report['free_core'] else 'no'} free core, {'a' if report['wire'] else 'no'} wire between replicas"
    sizes = report["bucket_bytes"]
    print(f"{report['hardware']}, load average {report['load_average']:.1f}")
    print(f"{report['ranks']} ranks {report['shape']} on {report['nodes']} nodes, {report['threads_per_rank']} threads a rank, "
          f"{' '.join(report['options'])}")
    print(f"{len(sizes)} buckets on rank 0, {min(sizes) / 1e6:.2f} to {max(sizes) / 1e6:.2f} MB, {sum(sizes) / 1e6:.2f} MB in all; {room}")
    for name, label in (("messages", "messages alone"), ("compute", "compute alone"), ("both", "both, overlapped"),
                        ("one after the other", "one after the other")):
        each = report["seconds"][name]
        low, high = quartiles(each)
        print(f"  {label:<22}{min(each) * 1e3:9.1f} ms  median {report['median_s'][name] * 1e3:.1f}, {low * 1e3:.1f}..{high * 1e3:.1f}")
    if report["hidden"] is None:
        print("no overlap to speak of: every core computes, and messages inside a node are work for the same cores; "
              "start fewer ranks or threads than cores, or ranks on several nodes")
        return
    low, high = report["hidden_range"]
    print(f"hidden: {report['hidden']:.0%} of the messages' time, by the shortest times ({low:.0%} to {high:.0%} in single rounds)")
    if not report["free_core"]:
        print("no free core: what the messages cost in processor time can't be hidden, only the waiting for the wire")
    elif not report["wire"]:
        print("no wire: the messages are copies and sums in memory, done by a free core")
