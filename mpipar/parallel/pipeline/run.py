"""Executes the program of one rank: chunks of the model compute, a mailbox carries what passes between them.

A chunk is the part of the model that one stage holds:

- `chunk.forward(x, micro) -> (y, saved)`: x is None on the first stage; y is an array to be sent on, or on
  the last stage the sum of the losses of the micro-batch, a float.
- `chunk.backward(saved, dy, micro, later=None) -> dx`: dy is None on the last stage, dx is ignored on the
  first. Gradients of weights are added up in the chunk. If `later` is a list, functions without arguments may
  be appended to it instead, which add them when called.
- `chunk.input_shape(micro)` and `chunk.dtype`: of x, for stages after the first.

`micro` is whatever the caller put in the list of micro-batches. Their sizes may differ and may be zero. An
array given to a chunk may be kept in `saved` and overwritten there, and is not the chunk's any longer after
the backward pass of that micro-batch. An array that a chunk returns is not to be changed before the chunk's
backward pass of that micro-batch (y), or before the run ends (dx).
"""

from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from mpipar.parallel.pipeline.messages import Send, message_of, source_of, target_of
from mpipar.parallel.pipeline.schedule import Action


@dataclass
class RunResult:
    """What one rank did.

    outputs: y of the last stage for each micro-batch, in their order (losses in training); empty on ranks
    without the last stage. timeline: (action, start, end) in seconds on this process's `perf_counter`; waiting
    is not in it. communication: ("receive" or "send", action, start, end), the time that the action waited for its
    message, or in which its message was handed over. wall_seconds: of the whole run, waiting included.
    peak_live: largest number of forwards whose backward (all of it, `W` included) had not ended. messages:
    number of messages sent.
    """

    outputs: list = field(default_factory=list)
    timeline: list = field(default_factory=list)
    communication: list = field(default_factory=list)
    wall_seconds: float = 0.0
    peak_live: int = 0
    messages: int = 0

    @property
    def losses(self):
        """The loss sum of each micro-batch, in their order."""
        return self.outputs

    @property
    def loss(self):
        """Sum of the losses, in the order of the micro-batches whatever the schedule; 0.0 where none is."""
        return float(sum(self.outputs, 0.0))

    @property
    def busy_seconds(self):
        """Time spent in actions."""
        return sum(end - start for _, start, end in self.timeline)

    @property
    def bubble(self):
        """Share of the wall time in which this rank did not compute."""
        return 1 - self.busy_seconds / self.wall_seconds if self.wall_seconds else 0.0


def run(program, chunks, micro_batches, mailbox=None, *, before=None, after=None):
    """Execute a `Program` (of `messages.with_messages`) and return its RunResult.

    chunks: the chunk of each stage of this rank, {stage: chunk}. micro_batches: list of M values, one for
    each micro-batch. mailbox: see `mailbox`; not needed where nothing is sent. before, after: called as
    `f(action, last)` around each action, once its input is there; last: it is the last of its stage and kind,
    where `B` and `W` count as one kind, so that after it the gradients of that stage's weights are complete.
    Raises ValueError if chunks or micro-batches do not belong to the program.
    """
    if len(micro_batches) != program.micro_batches:
        raise ValueError(f"{len(micro_batches)} micro-batches given; "
                         f"valid for this plan: {program.micro_batches}")
    if sorted(chunks) != program.own_stages:
        raise ValueError(f"chunks given for stages {sorted(chunks)}; valid for rank {program.rank}: "
                         f"{program.own_stages}")
    return _Execution(program, chunks, micro_batches, mailbox, before, after).run()


def run_forward(program, chunks, micro_batches, mailbox=None, *, before=None, after=None):
    """Execute a program of forwards alone (of `schedule.forward_only`); nothing saved is kept.

    `outputs` of the result holds what the last stage returned, be it losses or arrays. Arguments as in `run`.
    """
    backward = next((action for action in program.actions if action.kind != "F"), None)
    if backward is not None:
        raise ValueError(f"{backward} in a forward-only run; valid: actions of kind F")
    return run(program, chunks, micro_batches, mailbox, before=before, after=after)


class _Execution:
    def __init__(self, program, chunks, micro_batches, mailbox, before, after):
        self.program = program
        self.chunks = chunks
        self.micro_batches = micro_batches
        self.mailbox = mailbox
        self.before = before
        self.after = after
        self.keep = any(action.kind != "F" for action in program.actions)
        self.last = {self.part(action): action for action in program.actions}
        self.saved = {}      # (stage, micro-batch) -> what forward saved, received x, shape and dtype of y
        self.delayed = {}    # (stage, micro-batch) -> functions left for W, arrays that are free after it
        self.local = {}      # message -> array that goes to another stage of this rank
        self.outgoing = {}   # message -> array that waits for its Send, which follows at once
        self.spent = []      # (received array, message that must be sent before it is used again, or None)
        self.outputs = {}
        self.result = RunResult()

    def run(self):
        begin = perf_counter()
        for instruction in self.program.instructions:
            if isinstance(instruction, Action):
                self.act(instruction)
            elif isinstance(instruction, Send):
                key = instruction[:3]
                start = perf_counter()
                self.mailbox.send(key, instruction.peer, self.outgoing.pop(key))
                self.result.communication.append(("send", self.result.timeline[-1][0], start, perf_counter()))
                self.result.messages += 1
            else:
                self.post(instruction)
        self.release_spent()
        if self.mailbox is not None:
            self.mailbox.finish()
        self.result.wall_seconds = perf_counter() - begin
        self.result.outputs = [self.outputs[micro] for micro in sorted(self.outputs)]
        assert not (self.saved or self.delayed or self.local or self.outgoing), "the plan left work undone"
        return self.result

    @staticmethod
    def part(action):
        """B and W are one part: both complete the gradients of weights."""
        return action.stage, "B" if action.kind == "W" else action.kind

    def post(self, receive):
        stage, direction, micro = key = receive[:3]
        if direction == "F":
            chunk = self.chunks[stage + 1]
            shape, dtype = chunk.input_shape(self.micro_batches[micro]), chunk.dtype
        else:
            _, _, shape, dtype = self.saved[stage - 1, micro]
        self.mailbox.post(key, receive.peer, shape, dtype)

    def act(self, action):
        self.release_spent()
        source = source_of(action, self.program.stages)
        given = received = None
        if source in self.local:
            given = self.local.pop(source)
        elif source is not None:
            start = perf_counter()
            given = received = self.mailbox.take(source)
            self.result.communication.append(("receive", action, start, perf_counter()))
        last = self.last[self.part(action)] is action
        if self.before is not None:
            self.before(action, last)
        start = perf_counter()
        made = self.compute(action, given, received)
        end = perf_counter()
        self.result.timeline.append((action, start, end))
        if self.after is not None:
            self.after(action, last)
        target = target_of(action, self.program.stages)
        if target is not None:
            (self.local if target in self.chunks else self.outgoing)[message_of(action)] = made
        if self.mailbox is not None:
            self.mailbox.progress()

    def compute(self, action, given, received):
        """Run one action on its input; `received` is the input again if it came through the mailbox."""
        stage, kind, micro = action
        if kind == "F":
            return self.forward(action, given, received)
        if kind == "W":
            later, spent = self.delayed.pop((stage, micro))
            for function in later:
                function()
            self.spent += spent
            return None
        saved, x, *_ = self.saved.pop((stage, micro))
        if self.mailbox is not None:
            self.mailbox.settle((stage, "F", micro))    # y was sent long ago: its gradient has come back
        if kind == "B":
            made = self.chunks[stage].backward(saved, given, self.micro_batches[micro])
            self.spent += self.spend(action, made, x, received)
            return made
        later = []
        made = self.chunks[stage].backward(saved, given, self.micro_batches[micro], later)
        self.delayed[stage, micro] = later, self.spend(action, made, x, received)
        return made

    def forward(self, action, x, received):
        stage, _, micro = action
        y, saved = self.chunks[stage].forward(x, self.micro_batches[micro])
        final = stage == self.program.stages - 1
        if final:
            self.outputs[micro] = y
        if not self.keep:
            if not final:       # what the caller gets must not be a view of a buffer that is used again
                self.spent += self.spend(action, y, received)
            return y
        if received is not None and stage + 1 in self.chunks and np.may_share_memory(received, y):
            received = None     # the next stage, on this rank, may need it longer: it is not used again
        self.saved[stage, micro] = (saved, received) + ((None, None) if final else (y.shape, y.dtype))
        self.result.peak_live = max(self.result.peak_live, len(self.saved) + len(self.delayed))
        return y

    def spend(self, action, made, *arrays):
        """Received arrays that are not needed after `action`, for `self.spent`.

        One of which `made` is a view is free only when `made` has been sent, and not at all (it is left to
        the garbage collector) when `made` stays on this rank.
        """
        target = target_of(action, self.program.stages)
        spent = []
        for array in arrays:
            if array is None:
                continue
            if target is None or not np.may_share_memory(array, made):
                spent.append((array, None))
            elif target not in self.chunks:
                spent.append((array, message_of(action)))
        return spent

    def release_spent(self):
        for array, message in self.spent:
            self.mailbox.release(array, message)
        self.spent.clear()
