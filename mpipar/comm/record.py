"""What was sent: a record of every call of a mesh's groups, off unless asked for.

Bytes are counted as a ring would send them, whatever the MPI library does inside (or the ranks in the memory that
they share), so that they can be compared with the formulas of the lectures. n is the bytes of the whole array, P the
ranks of the group, `sent` what one rank sends:

    all_reduce      2 (P-1)/P n     a reduce-scatter and an all-gather; n: the array
    reduce_scatter    (P-1)/P n     n: the array that is reduced (P parts)
    all_gather        (P-1)/P n     n: the gathered array
    all_to_all        (P-1)/P n     n: the array that is divided; all_to_all_v: the rows that leave this rank
    broadcast                 n     passed along the ring from the root; the rank before it sends nothing
    reduce                    n     passed along the ring to the root, which sends nothing
    scatter           (P-1)/P n     sent by the root alone; with uneven parts, all parts but its own
    gather                    n     n: this rank's part; the root sends nothing
    send                      n     the array; recv and barrier send nothing
    refresh           (N-1)/N n     n: an array that each of N nodes holds once; sent by the first rank of a node
"""

import dataclasses
import time


@dataclasses.dataclass
class Entry:
    """One call. `bytes`: of the whole array as in the table above; `sent`: by this rank; `seconds`: spent by
    this rank inside the call (of a started one: inside `start`, `test` and `wait` together)."""

    operation: str
    group: str
    bytes: int
    sent: int
    seconds: float


class Recorder:
    """The entries of one rank, in the order of the calls: `log.entries`. Made by `Mesh.record`."""

    def __init__(self):
        self.entries = []

    def add(self, plan, group, start):
        """Append the entry of a call that began at `start` (of time.perf_counter) and return it."""
        entry = Entry(plan.operation, group.name, plan.bytes, plan.sent, time.perf_counter() - start)
        self.entries.append(entry)
        return entry

    def sent(self, by=None):
        """Bytes this rank sent: the sum, or a dict of sums by "group" or by "operation"."""
        return self._total("sent", by)

    def seconds(self, by=None):
        """Seconds this rank spent in the calls: the sum, or a dict of sums by "group" or by "operation"."""
        return self._total("seconds", by)

    def calls(self, by=None):
        """Number of calls: in all, or a dict by "group" or by "operation"."""
        return self._total(None, by)

    def _total(self, what, by):
        if by not in (None, "group", "operation"):
            raise ValueError(f"by={by!r} is unknown: valid are None, 'group' and 'operation'")
        sums = {}
        for entry in self.entries:
            key = getattr(entry, by) if by else None
            sums[key] = sums.get(key, 0) + (getattr(entry, what) if what else 1)
        return sums if by else sums.get(None, 0)
