"""Proves before anything runs that a plan is right; a wrong one raises ValueError that names the two actions.

Right means: every stage runs each micro-batch forward once and backward once (`B`, or `I` and later `W`), in
an order that the data allow; every send has its receive; and no rank waits for ever, even when a send only
completes once its receive is posted. The last is decided by executing the programs without computing:
receives and sends never block, an action blocks until its input has been sent (see `messages`). That machine
is monotone: what could run stays able to run, so if one order of the ranks reaches the end, every order does.
"""

from collections import Counter
from dataclasses import dataclass

from mpipar.parallel.pipeline.messages import Receive, Send, message_of, source_of, target_of, with_messages
from mpipar.parallel.pipeline.schedule import KINDS, Action, parse_plan, placement


@dataclass(frozen=True)
class Report:
    """What `check` found out about a plan that is right.

    live: for each rank the peak number of saved forwards, each counted from `F` until its `B` or `W` has run.
    messages: number of messages of one run; 2*M*(P*v-1) if no two neighbouring stages share a rank.
    """

    stages: int
    micro_batches: int
    placement: tuple
    live: tuple
    messages: int


def check(plan, *, stages=None, micro_batches=None, forward_only=False):
    """Check a plan and return its Report.

    stages (P*v) and micro_batches: how many there have to be; by default as many as the plan shows.
    forward_only: the plan has no backward. Raises ValueError naming the actions (and ranks) that do not fit
    together.
    """
    _check_complete(plan, stages, micro_batches, forward_only)
    return check_programs(with_messages(plan))


def read_plan(path):
    """The plan in a text file (see `schedule.parse_plan`), proved right by `check`.

    ValueError, one line that names the file, if it can't be read or is wrong.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:  # some editors begin a file with a mark of its encoding
            plan = parse_plan(file.read())
        check(plan)
    except UnicodeDecodeError:
        raise ValueError(f"schedule {path!r} is not text in UTF-8") from None
    except OSError as error:
        raise ValueError(f"schedule {path!r} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"schedule {path!r}: {error}") from None
    return plan


def check_programs(programs):
    """Check the programs of all ranks (order on each rank, messages, no deadlock) and return the Report."""
    for program in programs:
        _check_order(program)
    _check_matching(programs)
    execution_order(programs)
    plan = [program.actions for program in programs]
    sends = [isinstance(instruction, Send) for program in programs for instruction in program.instructions]
    return Report(programs[0].stages, programs[0].micro_batches, tuple(map(tuple, placement(plan))),
                  tuple(map(live_activations, plan)), sum(sends))


def live_activations(actions):
    """Peak number of forwards on one rank whose `B` (or `W`) has not run; 0 without any backward."""
    if all(action.kind == "F" for action in actions):
        return 0
    live = peak = 0
    for action in actions:
        live += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
        peak = max(peak, live)
    return peak


def execution_order(programs):
    """One order in which all actions can run: a list of (rank, action). Raises ValueError on a deadlock."""
    order, sent, waiting = [], set(), {}
    position = [0] * len(programs)
    ready = list(range(len(programs) - 1, -1, -1))
    while ready:
        rank = ready.pop()
        program = programs[rank]
        while position[rank] < len(program.instructions):
            instruction = program.instructions[position[rank]]
            woken = None
            if isinstance(instruction, Action):
                source = source_of(instruction, program.stages)
                if source is not None and source not in sent:
                    waiting[source] = rank, instruction
                    break
                order.append((rank, instruction))
                if target_of(instruction, program.stages) in program.own_stages:
                    sent.add(message_of(instruction))
            elif isinstance(instruction, Send):
                sent.add(instruction[:3])
                woken = waiting.pop(instruction[:3], None)
            position[rank] += 1
            if woken is not None:
                ready.append(woken[0])
    if waiting:
        raise ValueError(_deadlock(programs, waiting))
    return order


def _check_complete(plan, stages, micro_batches, forward_only):
    """Each action exactly once, none missing."""
    where = {}
    for rank, actions in enumerate(plan):
        for position, action in enumerate(actions):
            if action.kind not in KINDS or min(action.stage, action.micro_batch) < 0:
                kinds = " ".join(KINDS)
                raise ValueError(f"{action} on rank {rank}; valid: a kind of {kinds}, numbers from 0")
            other = where.setdefault(action, (rank, position))
            if other != (rank, position):
                raise ValueError(f"{action} runs twice: as action {other[1]} of rank {other[0]} "
                                 f"and as action {position} of rank {rank} (counted from 0)")
    if not where:
        raise ValueError("the plan has no action")
    placement(plan)
    count = max(action.stage for action in where) + 1
    micros = max(action.micro_batch for action in where) + 1
    for name, found, wanted in (("stages", count, stages), ("micro-batches", micros, micro_batches)):
        if wanted is not None and found > wanted:
            extra = next(action for action in where
                         if (action.stage if name == "stages" else action.micro_batch) >= wanted)
            raise ValueError(f"{extra} in a plan of {wanted} {name}; valid {name}: 0 to {wanted - 1}")
    backward = next((action for action in where if action.kind != "F"), None)
    if forward_only and backward is not None:
        forward = backward._replace(kind="F")
        raise ValueError(f"{backward} in a forward-only plan, after {forward}; valid: kind F")
    for stage in range(stages or count):
        for micro in range(micro_batches or micros):
            _check_cell(where, stage, micro, forward_only)


def _check_cell(where, stage, micro, forward_only):
    """One stage and one micro-batch: F, and B or both I and W."""
    kinds = {kind: Action(stage, kind, micro) for kind in "FBIW"}
    found = {kind for kind, action in kinds.items() if action in where}
    if "F" not in found:
        other = next((kinds[kind] for kind in "BIW" if kind in found), None)
        if other is None:
            other = next((action for action in where if action.micro_batch == micro), next(iter(where)))
        raise ValueError(f"{kinds['F']} is missing, but {other} is in the plan")
    if forward_only:
        return
    if "B" in found and found & {"I", "W"}:
        raise ValueError(f"{kinds['B']} and {kinds[min(found & {'I', 'W'})]} are both in the plan: "
                         "a backward is whole (B) or split (I and W)")
    if not found & {"B", "I", "W"}:
        raise ValueError(f"{kinds['F']} has no backward: {kinds['B']} is missing")
    for kind, half in (("I", "W"), ("W", "I")):
        if kind in found and half not in found:
            raise ValueError(f"{kinds[kind]} has no other half: {kinds[half]} is missing")


def _check_order(program):
    """On one rank: forward before backward, I before W, a receive before its use, a send after its action."""
    done, posted = set(), set()
    previous = {"F": "", "B": "F", "I": "F", "W": "I"}
    for instruction in program.instructions:
        if isinstance(instruction, Receive):
            posted.add(instruction[:3])
            continue
        if isinstance(instruction, Send):
            if not any(action in done for action in _producers(instruction)):
                raise ValueError(f"rank {program.rank} sends {instruction} before "
                                 f"{' or '.join(map(str, _producers(instruction)))} has run")
            continue
        for kind in previous[instruction.kind]:
            earlier = instruction._replace(kind=kind)
            if earlier not in done:
                raise ValueError(f"{instruction} comes before {earlier} on rank {program.rank}")
        source = source_of(instruction, program.stages)
        if source is not None and source not in posted and source[0] not in program.own_stages:
            raise ValueError(f"{instruction} on rank {program.rank} waits for {_producers(source)[0]}, "
                             "but no receive is posted before it")
        done.add(instruction)


def _check_matching(programs):
    """Each message is sent once and received once, by two ranks that name each other; none is left over."""
    home = {action: program.rank for program in programs for action in program.actions}
    sends, receives = Counter(), Counter()
    for program in programs:
        for instruction in program.instructions:
            if isinstance(instruction, Send):
                sends[instruction[:3], program.rank, instruction.peer] += 1
            elif isinstance(instruction, Receive):
                receives[instruction[:3], instruction.peer, program.rank] += 1
    for name in [*sends, *receives]:
        if sends[name] != 1 or receives[name] != 1:
            message, source, target = name
            producer = next((action for action in _producers(message) if action in home), Action(*message))
            consumer = Action(message[0] + (1 if message[1] == "F" else -1), message[1], message[2])
            raise ValueError(f"the message from {producer} on rank {source} to {consumer} on rank {target}: "
                             f"sent {sends[name]} times, received {receives[name]} times; valid: once each")


def _producers(message):
    """The actions that may produce a message."""
    stage, direction, micro = message[:3]
    return [Action(stage, kind, micro) for kind in ("F" if direction == "F" else "BI")]


def _deadlock(programs, waiting):
    """The text for a deadlock: the ranks that wait for each other in a circle."""
    home = {action: program.rank for program in programs for action in program.actions}
    blocked = {rank: (action, message) for message, (rank, action) in waiting.items()}
    rank, seen = next(iter(blocked)), []
    while rank in blocked and rank not in seen:
        seen.append(rank)
        producer = next((action for action in _producers(blocked[rank][1]) if action in home), None)
        rank = home.get(producer)
    circle = seen[seen.index(rank):] if rank in seen else seen
    parts = []
    for rank in circle:
        action, message = blocked[rank]
        producer = next((a for a in _producers(message) if a in home), Action(*message))
        parts.append(f"rank {rank} waits at {action} for {producer}")
    return "deadlock: " + ", ".join(parts) + (", which it runs later" if len(parts) == 1 else "")
