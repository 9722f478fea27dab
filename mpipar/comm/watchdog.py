"""The watchdog: ends a job that does not move, and says why (MPIPAR_TIMEOUT, MPIPAR_DEBUG).

Each rank's guard thread looks what the threads of its process wait for. Where a wait is older than the timeout it asks
all ranks for their state, which their guard threads answer also while the rank is stuck in MPI, and ends the job with
a report of all. With MPIPAR_DEBUG it asks earlier: ranks that wait for one another, in different groups or with a send
that does not fit the receive, can never go on, whatever the timeout is (stuck.py). Two rounds of answers have to agree.
"""
import json
import time

from mpipar.comm import stuck
from mpipar.comm.group import call_counts
from mpipar.comm.notices import FAILED, REFUSED
from mpipar.comm.traced import open_groups
from mpipar.comm.waits import stacks, waits

LOOK = 0.1              # seconds between two looks
_SUSPICIOUS = 0.8       # seconds of a wait after which the ranks are asked whether they wait for one another
_ANSWER = 2.0           # seconds in which a rank answers
_SOON, _LATER = 0.3, 1.0    # seconds between two rounds, the first and at most
_LINES = 8              # last operations of a rank in the report


class Watchdog:
    """Of one process. notices: see notices.py. asked: debug.Settings. history: of this process. end_job: of the guard.
    `step` is called every LOOK seconds by one thread."""

    def __init__(self, notices, asked, history, end_job):
        self._notices, self._asked, self._history, self._end_job = notices, asked, history, end_job
        self._since, self._serial, self._answered = {}, 0, {}
        self._open, self._before = None, None       # (deadline, serial) of a round; the states of the last one
        self._next, self._pause = 0.0, _SOON
        self.over = False                           # this rank has come to its end

    def step(self):
        """Look, ask, answer; ends the job where it is stuck."""
        now, found = time.monotonic(), [] if self.over else waits(self._history)
        self._since = {wait.identity: self._since.get(wait.identity, now) for wait in found}
        oldest = max((now - since for since in self._since.values()), default=0.0)
        self._answer(found, now)
        kinds = {notice.kind for notice in self._notices.received.values()}
        if REFUSED in kinds:                        # a mistake of the user's
            self._history.remove()
        elif FAILED in kinds:
            self.save()
        expired = oldest > self._asked.timeout
        if self._open is not None:
            deadline, serial = self._open
            states = {rank: state for rank, (number, state) in self._notices.states.items() if number == serial}
            if len(states) < self._notices.size - 1 and now < deadline:
                return
            self._open = None
            states[self._notices.rank] = self._state(found, now)
            self._judge(states, expired)
            self._next, self._pause = now + self._pause, min(2 * self._pause, _LATER)
        elif expired or self._asked.check and oldest > _SUSPICIOUS and now >= self._next and not self._lower_asks(now):
            self._serial += 1
            self._open = now + _ANSWER, self._serial
            self._notices.ask(self._serial)
        elif oldest <= _SUSPICIOUS:
            self._before, self._pause = None, _SOON

    def save(self):
        """The file of the last operations gets its final form."""
        self._history.save(stacks())

    def _judge(self, states, expired):
        """End the job where the states say that it is stuck."""
        ranks = range(self._notices.size)
        if expired:
            seconds = f"{self._asked.timeout:g} s"
            self._end_job(1, stuck.report(f"an operation has not moved for {seconds} (MPIPAR_TIMEOUT):", states, ranks))
        if self._asked.check and self._before is not None and stuck.same(self._before, states):
            self._end_job(1, stuck.report("the ranks wait for one another and will for ever:", states, ranks))
        self._before = states

    def _answer(self, found, now):
        """Tell this rank's state to those who have asked since the last time."""
        text = None
        for rank, (serial, _) in list(self._notices.asked.items()):
            if self._answered.get(rank) != serial:
                self._answered[rank] = serial
                text = text or json.dumps(self._state(found, now))
                self._notices.tell(rank, serial, text)

    def _lower_asks(self, now):
        """Whether a lower rank is at it: one asks for all."""
        return any(rank < self._notices.rank and now - when < 2 * _LATER
                   for rank, (_, when) in self._notices.asked.items())

    def _state(self, found, now):
        told = []
        for wait in found:
            plan, pending, seconds = wait.plan, wait.pending, now - self._since.get(wait.identity, now)
            told.append({
                "words": str(wait), "group": wait.group.name, "key": wait.group.key, "number": plan.number,
                "peer": wait.peer, "members": wait.group.members, "main": wait.main, "seconds": seconds,
                "arrived": getattr(pending, "arrived", False), "looks": getattr(pending, "looks", 0),
                "token": plan.call.line if plan.call is not None else 0})
        calls = {str(key): count for key, (count,) in list(call_counts.items())}
        unreceived = [words for group in list(open_groups.values()) for words in group.unreceived()]
        return {"waits": told, "calls": calls, "last": self._history.last(_LINES), "unreceived": unreceived[:_LINES],
                "stacks": stacks(), "over": self.over}
