"""Predicts the timeline of a plan for given costs: makespan, bubble, utilisation, critical path, a picture.

Each rank runs its actions in order; an action starts when its rank is free and its input has arrived; a
message of n bytes arrives alpha + beta*n after the end of the action that made it and keeps nobody busy.
Times are in any unit, and are only added and compared: integers and fractions give exact results.

The bubble has two definitions (lecture 2, sections 2.4 and 4.3), idle time over ideal compute and idle time
over wall time; for P equal stages and M micro-batches they are (P-1)/M and (P-1)/(M+P-1).
"""

from dataclasses import dataclass

from mpipar.parallel.pipeline.check import check, execution_order, live_activations
from mpipar.parallel.pipeline.messages import message_of, source_of, with_messages


@dataclass(frozen=True)
class Costs:
    """Times of the actions of one stage and one micro-batch, and of messages.

    forward, backward, input_grad, weight_grad: one number, or a list with one number a stage. backward may be
    left out if the halves are given (it is their sum); without any of them it is as long as forward, and the
    halves are half of it each. alpha: time a message; beta: time a byte; message_bytes: one number, or a list
    with one for each boundary between stage s and s+1.
    """

    forward: object = 1
    backward: object = None
    input_grad: object = None
    weight_grad: object = None
    alpha: float = 0
    beta: float = 0
    message_bytes: object = 0

    def of(self, action):
        """Duration of an action."""
        stage, kind, _ = action
        if kind == "F":
            return _at(self.forward, stage)
        whole, ours, other = self.backward, self.input_grad, self.weight_grad
        if whole is None and (ours is None) != (other is None):
            raise ValueError("input_grad without weight_grad (or the reverse); "
                             "valid: both, or backward with either")
        if kind == "B":
            if whole is not None:
                return _at(whole, stage)
            return _at(self.forward, stage) if ours is None else _at(ours, stage) + _at(other, stage)
        if kind == "W":
            ours, other = other, ours
        if ours is not None:
            return _at(ours, stage)
        total = _at(self.forward if whole is None else whole, stage)
        return total / 2 if other is None else total - _at(other, stage)

    def message(self, boundary):
        """Time of a message between stage `boundary` and the next."""
        return self.alpha + self.beta * _at(self.message_bytes, boundary)


@dataclass(frozen=True)
class Timelines:
    """What all ranks do in one run, predicted or measured.

    timelines: for each rank a list of (action, start, end), from time 0. makespan: end of the last action.
    busy: for each rank the sum of its actions. peak_live: for each rank, see `check.live_activations`.
    """

    timelines: tuple
    makespan: object
    busy: tuple
    peak_live: tuple

    @property
    def idle(self):
        """Time that all ranks together do not compute."""
        return len(self.busy) * self.makespan - sum(self.busy)

    @property
    def longest_rank(self):
        """The longest time that one rank takes from the start of its first action to the end of its last."""
        return max(timeline[-1][2] - timeline[0][1] for timeline in self.timelines if timeline)

    @property
    def bubble(self):
        """Idle time as a share of the wall time of all ranks: (P-1)/(M+P-1) for equal stages."""
        return _ratio(self.idle, len(self.busy) * self.makespan)

    @property
    def bubble_of_ideal(self):
        """Idle time relative to the ideal compute time: (P-1)/M for equal stages."""
        return _ratio(self.idle, sum(self.busy))

    @property
    def utilisation(self):
        """Share of the wall time in which ranks compute, 1 - bubble."""
        return _ratio(sum(self.busy), len(self.busy) * self.makespan)


@dataclass(frozen=True)
class Prediction(Timelines):
    """The timeline of a plan. critical_path: actions, each of which had to wait for the one before it, the last
    being the end of the run."""

    critical_path: tuple


def simulate(plan, costs=Costs()):
    """The Prediction for a plan; ValueError if the plan is wrong (see `check`)."""
    check(plan, forward_only=all(action.kind == "F" for actions in plan for action in actions))
    programs = with_messages(plan)
    stages = programs[0].stages
    timelines = [[] for _ in plan]
    arrival = {}                                        # message -> (time, rank, the action that made it)
    came_from = {}                                      # action -> the action it had to wait for
    for rank, action in execution_order(programs):
        previous = timelines[rank][-1] if timelines[rank] else None
        start, cause = (previous[2], previous[0]) if previous else (0, None)
        source = source_of(action, stages)
        if source is not None:
            time, home, maker = arrival[source]
            if home != rank:
                time += costs.message(min(source[0], action.stage))
            if cause is None or time > start:
                start, cause = max(start, time), maker
        end = start + costs.of(action)
        timelines[rank].append((action, start, end))
        came_from[action] = cause
        if action.kind != "W":
            arrival[message_of(action)] = end, rank, action
    makespan, last = max((timeline[-1][2], timeline[-1][0]) for timeline in timelines if timeline)
    path = [last]
    while came_from[path[-1]] is not None:
        path.append(came_from[path[-1]])
    return Prediction(tuple(timelines), makespan,
                      tuple(sum(end - start for _, start, end in timeline) for timeline in timelines),
                      tuple(live_activations(actions) for actions in plan), tuple(reversed(path)))


def measured_costs(timelines):
    """Costs from what was measured: for each stage the mean time of each kind; messages free.

    timelines: of all ranks, lists of (action, start, end), such as `RunResult.timeline` of each.
    """
    times = {}
    for action, start, end in (span for timeline in timelines for span in timeline):
        times.setdefault(action.kind, {}).setdefault(action.stage, []).append(end - start)
    stages = 1 + max((stage for by_stage in times.values() for stage in by_stage), default=-1)
    means = {}
    for kind, by_stage in times.items():
        found = [by_stage.get(stage, ()) for stage in range(stages)]
        means[kind] = [_ratio(sum(durations), len(durations)) for durations in found]
    return Costs(means.get("F", 0), means.get("B"), means.get("I"), means.get("W"))


def bubble_formula(ranks, micro_batches, chunks=1, *, of="wall"):
    """The lecture's bubble for equal stages: of="wall" (P-1)/(vM+P-1), of="ideal" (P-1)/(vM)."""
    if of not in ("wall", "ideal"):
        raise ValueError(f"of={of!r}; valid: wall, ideal")
    work = chunks * micro_batches
    return (ranks - 1) / (work + ranks - 1 if of == "wall" else work)


def gantt(timelines, *, width=120):
    """A text picture of timelines (of a Prediction, or measured ones on one clock), one line a rank.

    Each action is a cell with its name if that fits into `width` characters; else each column is a slice of
    time with the kind of the action that runs in it. Idle time is blank or a dot.
    """
    spans = [span for timeline in timelines for span in timeline]
    if not spans:
        return ""
    begin, end = min(span[1] for span in spans), max(span[2] for span in spans)
    heads = [f"rank {rank}" for rank in range(len(timelines))]
    margin = max(map(len, heads)) + 2
    several = any(len({action.stage for action, _, _ in timeline}) > 1 for timeline in timelines)
    name = str if several else (lambda action: f"{action.kind}{action.micro_batch}")
    cell = max(len(name(action)) for action, _, _ in spans) + 1
    unit = min((stop - start for _, start, stop in spans if stop > start), default=1)
    columns = round((end - begin) / unit)
    lines = []
    for head, timeline in zip(heads, timelines):
        if columns * cell + margin + 1 <= width:
            row = [" " * (cell - 1)] * columns
            text = list("|".join(row) + "|")
            for action, start, stop in timeline:
                left, right = (round((time - begin) / unit) * cell for time in (start, stop))
                if right > left:
                    text[left:right - 1] = name(action).ljust(right - left - 1)
        else:
            room = width - margin - 1
            text = ["."] * room + ["|"]
            for action, start, stop in timeline:
                left, right = (round((time - begin) / (end - begin) * room) for time in (start, stop))
                text[left:right] = action.kind * (right - left)
        lines.append(f"{head} |".rjust(margin) + "".join(text))
    return "\n".join(lines)


def _at(value, index):
    return value[index] if isinstance(value, (list, tuple)) else value


def _ratio(part, whole):
    return part / whole if whole else 0.0
