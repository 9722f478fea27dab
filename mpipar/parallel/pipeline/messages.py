"""The pass that turns a plan into the program of each rank: actions with the sends and receives between them.

What the three kinds of instruction mean to whoever executes them:

- `Receive` posts a receive and never blocks;
- an `Action` waits until its input has arrived, then computes;
- `Send` starts a send and never blocks. It may complete no earlier than its receive is posted (a synchronous
  send); all sends are waited for at the end of the program.

So a program can only hang where the actions themselves wait for each other in a circle, and `check` looks for
that. The receive of the next action is posted before the current one computes, so that its message need not
wait for the computation to end. Stages on one rank hand their arrays over without a message.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mpipar.parallel.pipeline.schedule import Action, placement


class Send(NamedTuple):
    """Start sending what `stage` produced for `micro_batch` to rank `peer`.

    direction "F": an activation, for stage + 1; direction "B": a gradient, for stage - 1.
    """

    stage: int
    direction: str
    micro_batch: int
    peer: int

    def __str__(self):
        return f"{self.stage}{self.direction}{self.micro_batch}>{self.peer}"


class Receive(NamedTuple):
    """Post the receive of what `stage` (on rank `peer`) produces for `micro_batch`; fields as in `Send`.

    A send and its receive agree in stage, direction and micro-batch: these name the message.
    """

    stage: int
    direction: str
    micro_batch: int
    peer: int

    def __str__(self):
        return f"{self.stage}{self.direction}{self.micro_batch}<{self.peer}"


@dataclass(frozen=True)
class Program:
    """What one rank executes: `instructions` in order, and the sizes of the whole pipeline."""

    rank: int
    stages: int
    micro_batches: int
    instructions: tuple

    @cached_property
    def actions(self):
        """The actions alone, in order."""
        return [instruction for instruction in self.instructions if isinstance(instruction, Action)]

    @cached_property
    def own_stages(self):
        """The stages of this rank, ascending."""
        return sorted({action.stage for action in self.actions})

    def __str__(self):
        return " ".join(map(str, self.instructions))


def with_messages(plan):
    """The `Program` of each rank of a plan; the plan should have passed `check`.

    Raises ValueError if two ranks run one stage or a stage runs nowhere.
    """
    home = {stage: rank for rank, stages in enumerate(placement(plan)) for stage in stages}
    count = max(home, default=-1) + 1
    absent = sorted(set(range(count)) - set(home))
    if absent:
        raise ValueError(f"stage {absent[0]} runs on no rank, but {count - 1} is a stage; "
                         f"valid: every stage from 0 to {count - 1}")
    micro_batches = max((action.micro_batch for actions in plan for action in actions), default=-1) + 1
    return [Program(rank, count, micro_batches, tuple(_instructions(rank, actions, home)))
            for rank, actions in enumerate(plan)]


def source_of(action, stages):
    """The name (see `message_of`) of the message that `action` waits for from another stage, or None."""
    if action.kind == "F" and action.stage > 0:
        return action.stage - 1, "F", action.micro_batch
    if action.kind in "BI" and action.stage < stages - 1:
        return action.stage + 1, "B", action.micro_batch
    return None


def target_of(action, stages):
    """The stage that waits for what `action` produces, or None."""
    if action.kind == "F" and action.stage < stages - 1:
        return action.stage + 1
    if action.kind in "BI" and action.stage > 0:
        return action.stage - 1
    return None


def message_of(action):
    """(stage, direction, micro-batch): names the message with what `action` (F, B or I) produces."""
    return action.stage, "F" if action.kind == "F" else "B", action.micro_batch


def _instructions(rank, actions, home):
    stages = len(home)
    for position, action in enumerate(actions):
        if position == 0:
            yield from _receive(rank, action, home)
        following = actions[position + 1] if position + 1 < len(actions) else None
        # A gradient has the shape of the stage's output, which is known once the forward has run: if the
        # backward of the same micro-batch is next, its receive comes after the forward, still before the send
        late = (following is not None and action.kind == "F"
                and (following.stage, following.micro_batch) == (action.stage, action.micro_batch))
        if following is not None and not late:
            yield from _receive(rank, following, home)
        yield action
        if late:
            yield from _receive(rank, following, home)
        target = target_of(action, stages)
        if target is not None and home[target] != rank:
            yield Send(*message_of(action), home[target])


def _receive(rank, action, home):
    source = source_of(action, len(home))
    if source is not None and home[source[0]] != rank:
        yield Receive(*source, home[source[0]])
