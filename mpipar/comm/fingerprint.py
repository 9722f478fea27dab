"""What a rank calls, in words and as a fingerprint that the ranks of a group can compare.

A fingerprint is a record of fixed size: a hash of everything that has to be the same on all ranks (operation, dtype,
shape, axis, reduction, root, sizes, name, and how it is carried out), then the call in words with its place in the
program. What may differ is left out: a rank's own part of an uneven gather, or the counts of all_to_all_v, which follow
the words so that every pair of ranks can be checked. Needs no MPI.
"""
import hashlib
import os
import sys

import numpy as np

from mpipar.comm import buffers

WORDS = 480             # bytes of the words of a record
RECORD = 32 + WORDS     # hash 16, serial 8, tag 8, words
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_HOME = os.path.dirname(os.path.dirname(_HERE[:-1])) + os.sep
_BY_OTHERS = ("gather", "scatter", "send", "recv")      # whose MPI calls differ among the ranks


class MismatchError(RuntimeError):
    """The ranks of a group called different operations, or the same one with arguments that do not fit."""


class Call:
    """One call of an operation of a group. str(call): in words, with the file and line that called.

    operation: "all_reduce", "all_reduce_start", ... line: its number in the history. tested: when a program last asked
    whether it has ended (of time.monotonic). plan: until it ends.
    """

    def __init__(self, operation, arguments, group):
        self.operation, self.group, self.line, self.tested = operation, group, 0, 0.0
        self.site, self._arguments, self._words = site(), arguments, ""
        self.key, self.counts, self.plan = (), None, None

    def __str__(self):
        return f"{self.operation}({self._words}) at {self.site}"

    def describe(self, plan):
        """Take from the arguments and the plan what is needed; the arrays are let go."""
        arguments, self._arguments, self.plan = self._arguments, None, plan
        base = self.operation.removesuffix("_start")
        key, words, self.counts = _details(base, arguments, self.group)
        if name := arguments.get("name", ""):
            words.append(f"name={name!r}")
        way = "rounds"
        if isinstance(plan.calls, (list, tuple)):
            way = sorted({method for method, _ in plan.calls})
        if plan.shared is not None:
            way = f"in shared memory {plan.shared[0]}[{plan.shared[1]}:{plan.shared[2]}]"
            words.append(way)
        elif base == "reduce_scatter" and "Reduce_scatter" in way:
            words.append("by Reduce_scatter")           # MPI's, which the form with equal parts does not match
        self.key = (base if base in ("send", "recv") else self.operation, *key, name, way * (base not in _BY_OTHERS))
        self._words = ", ".join(words)


def site(frame=None):
    """file:line of the first caller (of a frame) outside of this folder; the file as seen from the working directory or
    from the folder that holds mpipar."""
    frame = sys._getframe(1) if frame is None else frame
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    path = os.path.abspath(frame.f_code.co_filename)
    for folder in (os.getcwd() + os.sep, _HOME):
        path = path.removeprefix(folder)
    return f"{path}:{frame.f_lineno}"


def _array(x):
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def _details(base, a, group):
    """(what has to be equal, the words, counts of all_to_all_v or None) for a call with the arguments `a`."""
    x, axis, sizes, counts = a.get("x"), a.get("axis", 0), a.get("sizes"), None
    key, words = [], []
    if base == "recv":
        x = a["out"]
    if base == "scatter" and x is not None:             # the root knows the whole: its part, as for the others
        axis %= x.ndim
        sizes = buffers.check_sizes(sizes, x.shape[axis], group.size, "axis")
        shape, dtype = buffers.with_length(x.shape, axis, sizes[group.rank]), x.dtype
    elif base == "scatter":
        out = a["out"]
        shape = tuple(out.shape if a["shape"] is None else a["shape"])
        dtype = np.dtype(out.dtype if a["dtype"] is None else a["dtype"])
    elif x is not None:
        shape, dtype = x.shape, x.dtype
        words.append(_array(x))
    if base == "scatter":
        words.append(f"{dtype}[{','.join(map(str, shape))}]")
    if base in ("gather", "all_gather", "scatter"):
        axis %= len(shape)
        sizes = [int(n) for n in sizes] if sizes is not None else [shape[axis]] * group.size
        key = [dtype, shape[:axis] + shape[axis + 1:], axis, sizes]
    elif base == "reduce_scatter":
        axis %= x.ndim
        key = [dtype, shape, axis, buffers.check_sizes(sizes, shape[axis], group.size, "axis")]
    elif base == "all_to_all_v":
        key, counts = [dtype, shape[1:]], [[int(n) for n in a[name]] for name in ("send_counts", "receive_counts")]
        words += [f"sends {counts[0]}", f"receives {counts[1]}"]
    elif base == "refresh":
        key = [a["array"].size, str(a["array"].dtype), str(a["cuts"])]
        words.append(_array(a["array"]))
    elif base in ("zeros", "common", "share"):
        key = [int(a["size"]), np.dtype(a["dtype"])]
        words.append(f"{key[1]}[{key[0]}]")
    elif x is not None:
        key = [dtype, shape, axis % x.ndim if base == "all_to_all" else 0]
    if "op" in a:
        key.append(a["op"])
        words.append(a["op"])
    if "axis" in a and (axis or len(key[1]) > 1):
        words.append(f"axis={axis}")
    if a.get("sizes") is not None:
        words.append(f"sizes={list(map(int, a['sizes']))}")
    if "root" in a:
        key.append(a["root"])
        words.append(f"root={a['root']}")
    words += [f"{name}={a[name]}" for name in ("to", "source", "tag") if name in a]
    return [str(part) for part in key], words, counts


class Record:
    """A fingerprint that was received."""

    def __init__(self, data, source=None):
        self.source, self.digest = source, data[:16].tobytes()
        self.serial, self.tag = data[16:32].view(np.int64).tolist()
        self.words = data[32:RECORD].tobytes().rstrip(b"\0").decode(errors="replace")
        self.counts = data[RECORD:].view(np.int64).tolist()


def record(call, *, serial=0, tag=0, ranks=0):
    """The bytes of a call's fingerprint. ranks: of the group, for a collective operation."""
    data = np.zeros(RECORD + 16 * ranks, np.uint8)
    key = call.key[1:] if call.operation.startswith(("send", "recv")) else call.key
    data[:16] = np.frombuffer(hashlib.blake2b(repr(key).encode(), digest_size=16).digest(), np.uint8)
    data[16:32].view(np.int64)[:] = serial, tag
    words = str(call).encode(errors="replace")
    if len(words) > WORDS:
        words = words[:WORDS // 2 - 4] + b" ... " + words[1 - WORDS // 2 :]
    data[32:32 + len(words)] = np.frombuffer(words, np.uint8)
    if call.counts is not None:
        data[RECORD:].view(np.int64)[:] = sum(call.counts, [])
    return data


def compare(table, group):
    """What is wrong with the records of all ranks (table: one row a rank), as a text; None where all fit."""
    if (table[:, :16] == table[0, :16]).all():
        if not table[:, RECORD:].any():
            return None
        counts = table[:, RECORD:].copy().view(np.int64).reshape(len(table), 2, -1)
        wrong = np.argwhere(counts[:, 0] != counts[:, 1].T)
        if not len(wrong):
            return None
        one, other = wrong[0]
        what = f"rank {group.members[one]} sends {counts[one, 0, other]} rows to rank {group.members[other]}, which " \
               f"expects {counts[other, 1, one]}"
    else:
        what = "the ranks called different operations"
    words = [Record(row).words for row in table]
    ranks = {}
    for member, text in zip(group.members, words):
        ranks.setdefault(text, []).append(member)
    return "\n".join([f"group {group.name}: {what}:", *(f"  {_names(who)}: {text}" for text, who in ranks.items())])


def compare_pair(offer, call, group, me):
    """The same for a message: the record of its send, and the call that receives it, on rank `me` of the group."""
    if offer.digest == record(call)[:16].tobytes():
        return None
    return "\n".join([f"group {group.name}: a message is not what its receiver expects:",
                      f"  rank {group.members[offer.source]}: {offer.words}", f"  rank {group.members[me]}: {call}"])


def _names(ranks):
    """"rank 3" or "ranks 0-2, 5"."""
    runs = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
