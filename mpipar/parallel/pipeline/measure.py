"""What the ranks of one pipeline did in one run, brought together on one clock, to be held against a prediction."""

import dataclasses
import statistics
import time
from dataclasses import dataclass

import numpy as np

from mpipar.parallel.pipeline.run import RunResult
from mpipar.parallel.pipeline.schedule import KINDS, Action
from mpipar.parallel.pipeline.simulate import Timelines, gantt, measured_costs, simulate

_WHAT = ("compute", "receive", "send")


@dataclass(frozen=True)
class Measurement(Timelines):
    """One run as it was; seconds, from the start of the first action of any rank.

    communication: for each rank a list of ("receive" or "send", action, start, end), see `run.RunResult`.
    """

    communication: tuple

    def costs(self):
        """The `Costs` that were measured: mean time of each stage and kind, and the median time from the end of
        an action to the start of the one that waited for its message."""
        delays = self.message_delays()
        return dataclasses.replace(measured_costs(self.timelines), alpha=statistics.median(delays) if delays else 0)

    def message_delays(self):
        """For each message that a rank was waiting for: from the end of the action that made it to its arrival."""
        ends = {action: end for timeline in self.timelines for action, _, end in timeline}
        delays = []
        for what, action, start, end in (span for spans in self.communication for span in spans):
            if what == "receive":
                step = -1 if action.kind == "F" else 1
                makers = [Action(action.stage + step, kind, action.micro_batch) for kind in ("F" if step < 0 else "BI")]
                made = next(ends[maker] for maker in makers if maker in ends)
                if made >= start:
                    delays.append(end - made)
        return delays

    def predict(self, plan):
        """The `Prediction` for the plan with the measured costs."""
        return simulate(plan, self.costs())

    def utilisations(self, plan):
        """{"measured", "simulated" with the measured costs, "equal_stages"}: shares of the time in which ranks compute."""
        return {"measured": self.utilisation, "simulated": self.predict(plan).utilisation,
                "equal_stages": float(simulate(plan).utilisation)}

    def lines(self, plan, *, width=120):
        """What people want to see of it, beside the prediction with the measured costs: a list of lines."""
        predicted = self.predict(plan)
        lines = [f"bubble {self.bubble:.1%} of the time measured, {predicted.bubble:.1%} simulated with the measured "
                 f"costs, {simulate(plan).bubble:.1%} for equal stages; makespan {1e3 * self.makespan:.1f} ms measured, "
                 f"{1e3 * predicted.makespan:.1f} ms simulated"]
        for rank, (busy, live) in enumerate(zip(self.busy, self.peak_live)):
            spans = self.communication[rank]
            receive, send = (1e3 * sum(end - start for what, _, start, end in spans if what == which)
                             for which in ("receive", "send"))
            share, expected = _share(busy, self.makespan), _share(predicted.busy[rank], predicted.makespan)
            lines.append(f"  rank {rank}: busy {1e3 * busy:.1f} ms of {1e3 * self.makespan:.1f} ({share:.0%}; simulated "
                         f"{expected:.0%}), waiting for messages {receive:.1f} ms, sending {send:.1f} ms, {live} live "
                         f"(predicted {predicted.peak_live[rank]})")
        for name, timelines in (("predicted", predicted.timelines), ("measured", self.timelines)):
            lines += [name, *gantt(timelines, width=width).splitlines()]
        return lines


def measurement(results, offsets=None):
    """The Measurement of a run whose ranks gave these `RunResult`s; offsets: seconds to add to each one's clock."""
    offsets = offsets or [0.0] * len(results)
    starts = [result.timeline[0][1] + offset for result, offset in zip(results, offsets) if result.timeline]
    zero = min(starts, default=0.0)
    shifts = [offset - zero for offset in offsets]
    timelines = tuple([(action, start + shift, end + shift) for action, start, end in result.timeline]
                      for result, shift in zip(results, shifts))
    communication = tuple([(what, action, start + shift, end + shift)
                           for what, action, start, end in result.communication]
                          for result, shift in zip(results, shifts))
    makespan = max((timeline[-1][2] for timeline in timelines if timeline), default=0.0)
    return Measurement(timelines, makespan, tuple(result.busy_seconds for result in results),
                       tuple(result.peak_live for result in results), communication)


def gather(result, group):
    """The Measurement of a run of the pipeline `group` on its rank 0, None elsewhere; collective.

    result: this rank's RunResult. Ranks of one node share a clock; those of others are compared with rank 0's.
    """
    rows = [(0, *_encode(action), start, end) for action, start, end in result.timeline]
    rows += [(_WHAT.index(what), *_encode(action), start, end) for what, action, start, end in result.communication]
    mine = np.array(rows, np.float64).reshape(-1, 6)
    head = np.array([[len(mine), result.peak_live, _offset(group)]], np.float64)
    heads = group.all_gather(head)
    table = group.gather(mine, sizes=[int(count) for count in heads[:, 0]])
    if group.rank > 0:
        return None
    results = []
    for part, (_, live, _) in zip(np.split(table, np.cumsum(heads[:-1, 0]).astype(int)), heads):
        results.append(_decode(part, int(live)))
    return measurement(results, heads[:, 2].tolist())


def _share(part, whole):
    return part / whole if whole else 0.0


def _encode(action):
    return action.stage, list(KINDS).index(action.kind), action.micro_batch


def _decode(table, live):
    kinds, found = list(KINDS), RunResult(peak_live=live)
    for what, stage, kind, micro, start, end in table.tolist():
        action = Action(int(stage), kinds[int(kind)], int(micro))
        if what == 0:
            found.timeline.append((action, start, end))
        else:
            found.communication.append((_WHAT[int(what)], action, start, end))
    return found


def _offset(group, rounds=20):
    """Seconds to add to this rank's clock to get rank 0's: half of the shortest of some round trips apart."""
    if group.single_node or group.size == 1:
        return 0.0
    ping, pong, best, offset = np.zeros(1), np.zeros(1), np.inf, 0.0
    for other in range(1, group.size):
        for _ in range(rounds):
            if group.rank == 0:
                group.recv(ping, other)
                pong[0] = time.perf_counter()
                group.send(pong, other)
            elif group.rank == other:
                start = time.perf_counter()
                group.send(ping, 0)
                group.recv(pong, 0)
                end = time.perf_counter()
                if end - start < best:
                    best, offset = end - start, float(pong[0]) - (start + end) / 2
    return offset
