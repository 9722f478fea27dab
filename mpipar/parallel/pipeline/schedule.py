"""Pipeline schedules as data: who runs what, in which order.

A plan is a list with one entry a rank; the entry is the list of `Action`s of that rank, in order. `0F3` reads
"stage 0, forward, micro-batch 3". With `chunks` (v) stages on each of P ranks there are P*v stages in all,
numbered in the order in which a micro-batch travels through them; stage s sits on rank s % P ("looped"
placement). A plan may place its stages otherwise, as zb-v does: the placement is read off the plan itself
(`placement`).
Printing a plan needs no MPI:

    >>> print(format_plan(one_f_one_b(2, 3)))
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2

Sources: lecture 2 (model and pipeline parallelism), section 2.4; GPipe (Huang et al., 2019); 1F1B and its
interleaved form (Narayanan et al., 2021); zero bubble (Qi et al., 2023).
"""

import operator
import re
from typing import NamedTuple

KINDS = {"F": "forward", "B": "backward", "I": "backward, input gradient", "W": "backward, weight gradient"}


class Action(NamedTuple):
    """One piece of computation: `stage` (0 .. P*v-1), `kind` (a key of KINDS), `micro_batch` (0 .. M-1).

    `B` is the whole backward; `I` and `W` are its two halves: `I` produces the gradient that the previous
    stage waits for, `W` the gradients of the weights, for which nobody waits.
    """

    stage: int
    kind: str
    micro_batch: int

    def __str__(self):
        return f"{self.stage}{self.kind}{self.micro_batch}"


Plan = list[list[Action]]


def naive(stages, micro_batches, chunks=1):
    """Each micro-batch goes forward and back through all stages before the next: one rank works at a time."""
    ranks, count, chunks = _sizes(stages, micro_batches, chunks)
    plan = []
    for rank in range(ranks):
        own = range(rank, ranks * chunks, ranks)
        actions = []
        for micro in range(count):
            actions += [Action(stage, "F", micro) for stage in own]
            actions += [Action(stage, "B", micro) for stage in reversed(own)]
        plan.append(actions)
    return plan


def gpipe(stages, micro_batches, chunks=1):
    """All forwards, then all backwards, the last micro-batch first; M are live on every rank."""
    ranks, count, chunks = _sizes(stages, micro_batches, chunks)
    plan = []
    for rank in range(ranks):
        own = range(rank, ranks * chunks, ranks)
        forward = [Action(stage, "F", micro) for stage in own for micro in range(count)]
        backward = [Action(stage, "B", micro) for stage in reversed(own) for micro in reversed(range(count))]
        plan.append(forward + backward)
    return plan


def one_f_one_b(stages, micro_batches, chunks=1):
    """Fill, then forward and backward in turn: GPipe's time, but only min(M, P-s) live on rank s."""
    return _in_turn("1f1b", stages, micro_batches, chunks, lambda ranks, rank: ranks - 1 - rank)


def eager_one_f_one_b(stages, micro_batches, chunks=1):
    """1F1B that fills twice as far ahead, so that slow messages pass while there is other work.

    Rank s keeps min(M, 2(P-1-s)+1) live instead of min(M, P-s) (Zhuang et al., 2023).
    """
    return _in_turn("eager-1f1b", stages, micro_batches, chunks, lambda ranks, rank: 2 * (ranks - 1 - rank))


def interleaved(stages, micro_batches, chunks=2):
    """1F1B over v chunks a rank: groups of P micro-batches pass chunk after chunk; filling takes 1/v as long.

    The bubble is (P-1)/(vM+P-1) of the wall time if M is a multiple of P; 2(P-1-r) + (v-1)P + 1 chunks are
    live on rank r (Narayanan et al., 2021). Where vM+P-1 < vP no plan reaches it: one micro-batch's own
    way through 2vP actions takes longer. Any M works: it is the plan of the next multiple of P without the
    micro-batches that there are not. Taking micro-batches away cannot make a plan hang, as they wait only for
    themselves and for their turn.
    """
    ranks, count, chunks = _sizes(stages, micro_batches, chunks)
    if chunks < 2:
        raise ValueError(f"schedule interleaved has several chunks a rank, not {chunks}; "
                         "valid: chunks of at least 2")
    full = -(-count // ranks) * ranks
    forward = [(chunk, micro) for group in range(0, full, ranks)
               for chunk in range(chunks) for micro in range(group, group + ranks)]
    backward = [(chunks - 1 - chunk, micro) for chunk, micro in forward]
    plan = []
    for rank in range(ranks):
        ahead = min(len(forward), 2 * (ranks - 1 - rank) + (chunks - 1) * ranks)
        slots = [("F", *slot) for slot in forward[:ahead]]
        for position, slot in enumerate(backward):
            if position + ahead < len(forward):
                slots.append(("F", *forward[position + ahead]))
            slots.append(("B", *slot))
        plan.append([Action(chunk * ranks + rank, kind, micro)
                     for kind, chunk, micro in slots if micro < count])
    return plan


def zero_bubble(stages, micro_batches, chunks=1):
    """ZB-H1: 1F1B with a split backward; weight gradients (`W`), for which nobody waits, fill the bubble.

    Rank s runs the W of a micro-batch s turns after its I. With F = I = W the bubble is a third of 1F1B's if
    M >= P, and at most P micro-batches are live, as on the first rank of 1F1B (Qi et al., 2023).
    """
    return _in_turn("zero-bubble", stages, micro_batches, chunks,
                    lambda ranks, rank: ranks - 1 - rank, lambda ranks, rank: rank)


def zero_bubble_2(stages, micro_batches, chunks=1):
    """ZB-H2: fills twice as far ahead as ZB-H1, so that no rank idles between its first and its last action.

    That holds for F = I = W and M >= 2P-1, with 2P-1 micro-batches live. Rank s then works from s to s+3M: the
    step takes as long as ZB-H1's if all ranks wait for each other after it, as they do for the gradient's norm,
    and is shorter only where each rank goes on to the next step by itself (Qi et al., 2023).
    """
    return _in_turn("zb-h2", stages, micro_batches, chunks,
                    lambda ranks, rank: 2 * (ranks - 1 - rank), lambda ranks, rank: 2 * rank)


def zero_bubble_v(stages, micro_batches, chunks=2):
    """ZB-V: a split backward over two chunks a rank that form a V: rank s has the stages s and 2P-1-s.

    The last stage sits on the first rank, so backward begins there at once. With F = I = W (of a chunk) and
    M >= 2P rank s works without a gap from s to s+6M: half of ZB-H1's bubble. 2P chunks are live on every rank,
    the memory of 1F1B's first (Qi et al., 2023). With less than 2P micro-batches it is the plan for 2P without
    the micro-batches that there are not (see `interleaved`).
    """
    ranks, count, chunks = _sizes(stages, micro_batches, chunks)
    if chunks != 2:
        raise ValueError(f"schedule zb-v has two chunks a rank, not {chunks}; valid: chunks=2")
    full = max(count, 2 * ranks)
    plan = []
    for rank in range(ranks):
        out, back = ([(stage, kind) for kind in "FIW"] for stage in (rank, 2 * ranks - 1 - rank))
        ahead = 2 * ranks - rank - 1            # forwards on the way out before the first backward of that stage
        turns = out[:1] * (2 * (ranks - rank) - 1) + [back[0], out[0]] * rank + back * (ranks - rank)
        turns += (out + back) * (full - ahead) + (out[1:] + back) * (ahead - ranks)
        turns += [out[1], back[1]] * rank + out[1:] * (ranks - rank) + [back[2]] * rank + [out[2]] * rank
        plan.append(_numbered(turns, count))
    return plan


def forward_only(stages, micro_batches, chunks=1):
    """Forwards alone, for evaluation and generation; a micro-batch is sent on as soon as it is done."""
    ranks, count, chunks = _sizes(stages, micro_batches, chunks)
    return forwards(looped(ranks, chunks), count)


def forwards(placed, micro_batches):
    """`forward_only` for stages placed in any way; placed: the stages of each rank, see `placement`."""
    return [[Action(stage, "F", micro) for stage in sorted(own) for micro in range(micro_batches)]
            for own in placed]


SCHEDULES = {"naive": naive, "gpipe": gpipe, "1f1b": one_f_one_b, "eager-1f1b": eager_one_f_one_b,
             "interleaved": interleaved, "zero-bubble": zero_bubble, "zb-h2": zero_bubble_2,
             "zb-v": zero_bubble_v}
SEVERAL_CHUNKS = {"interleaved", "zb-v"}        # two a rank, if nothing else is said
ONE_CHUNK = {"1f1b", "eager-1f1b", "zero-bubble", "zb-h2"}


def build(name, stages, micro_batches, chunks=1):
    """The plan of the schedule `name` (a key of SCHEDULES) for `stages` ranks; else ValueError."""
    if name not in SCHEDULES:
        raise ValueError(f"unknown schedule {name!r}; valid: {', '.join(SCHEDULES)}")
    return SCHEDULES[name](stages, micro_batches, chunks)


def looped(ranks, chunks=1):
    """The placement of all schedules but zb-v: stage s on rank s % P."""
    return [list(range(rank, ranks * chunks, ranks)) for rank in range(ranks)]


def placement(plan):
    """The stages of each rank, ascending, read off the plan; ValueError if two ranks run one stage."""
    home = {}
    for rank, actions in enumerate(plan):
        for action in actions:
            other, first = home.setdefault(action.stage, (rank, action))
            if other != rank:
                raise ValueError(f"stage {action.stage} runs on two ranks: {first} on rank {other}, "
                                 f"{action} on rank {rank}")
    return [sorted(stage for stage, (where, _) in home.items() if where == rank) for rank in range(len(plan))]


def format_plan(plan):
    """Text of a plan: one line a rank, actions separated by blanks."""
    return "\n".join(" ".join(map(str, actions)) for actions in plan)


def parse_plan(text):
    """Read `format_plan`'s text; commas count as blanks, `#` starts a comment, empty lines are skipped.

    Raises ValueError with the line and the word that is not an action.
    """
    plan = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#")[0].replace(",", " ").split()
        if words:
            plan.append([_parse_action(word, number) for word in words])
    if not plan:
        raise ValueError("the plan is empty; it needs one line a rank, such as: 0F0 0B0")
    return plan


def _parse_action(word, line):
    match = re.fullmatch(r"(\d+)([FBIW])(\d+)", word, re.ASCII)
    if match is None:
        raise ValueError(f"line {line}: {word!r} is not an action; valid: stage, one of {' '.join(KINDS)}, "
                         "micro-batch, such as 0F3")
    return Action(int(match[1]), match[2], int(match[3]))


def _in_turn(name, stages, micro_batches, chunks, ahead, delay=None):
    """The schedules of one chunk that fill and then alternate forward and backward.

    ahead(P, s): forwards of rank s before its first turn. A turn is F and B, or F, I, W where `delay` is given:
    the W is that of the micro-batch delay(P, s) turns before.
    """
    ranks, count, chunks = _sizes(stages, micro_batches, chunks)
    if chunks != 1:
        raise ValueError(f"schedule {name} has one chunk a rank, not {chunks}; valid: chunks=1")
    plan = []
    for rank in range(ranks):
        filled = min(count, ahead(ranks, rank))
        turns = ["F"] * filled
        for micro in range(count):
            turns += ["F"] * (micro + filled < count)
            if delay is None:
                turns.append("B")
            else:
                turns += ["I", "W"] if micro >= delay(ranks, rank) else ["I"]
        if delay is not None:
            turns += ["W"] * min(count, delay(ranks, rank))
        plan.append(_numbered([(rank, kind) for kind in turns], count))
    return plan


def _numbered(turns, count):
    """The actions of (stage, kind) pairs, the n-th of equal ones for micro-batch n, without those past `count`."""
    seen, actions = {}, []
    for stage, kind in turns:
        micro = seen[stage, kind] = seen.get((stage, kind), -1) + 1
        if micro < count:
            actions.append(Action(stage, kind, micro))
    return actions


def _sizes(stages, micro_batches, chunks):
    sizes = {"stages": stages, "micro_batches": micro_batches, "chunks": chunks}
    for name, value in sizes.items():
        try:
            fits = not isinstance(value, bool) and operator.index(value) >= 1
        except TypeError:
            fits = False
        if not fits:
            raise ValueError(f"{name}={value!r}; valid: an integer of at least 1")
    return tuple(map(operator.index, sizes.values()))
