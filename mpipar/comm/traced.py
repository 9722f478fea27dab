"""Groups whose calls are noted: what is called, from where, with what. What MPIPAR_TIMEOUT and MPIPAR_DEBUG put in the
place of plain groups, which pay nothing for it.
"""
import functools
import inspect
import threading
import time

from mpipar.comm.fingerprint import Call
from mpipar.comm.group import Group
from mpipar.comm.history import History
from mpipar.comm.pending import Pending

_COLLECTIVES = ("barrier", "broadcast", "reduce", "all_reduce", "all_gather", "reduce_scatter", "gather", "scatter",
                "all_to_all", "all_to_all_v")
OPERATIONS = [*(name + end for name in (*_COLLECTIVES, "send", "recv") for end in ("", "_start")), "refresh"]

open_groups = {}                        # of this process, by key
_current = threading.local()            # .call: the Call that this thread is about to make a plan for


class _Process:
    """The state of this process."""

    def __init__(self):
        self.history = History(1)


process = _Process()


def keep_history(operations):
    """The History of this process, a new one of that many operations."""
    process.history = History(operations)
    return process.history


class TracedPending(Pending):
    """Its end, and a program that asks for it, are noted."""

    __slots__ = ()

    def test(self):
        """As of Pending."""
        if self.plan.call is not None:          # in a group of one rank nothing is noted
            self.plan.call.tested = time.monotonic()
        return super().test()

    def _finish(self, start):
        super()._finish(start)
        if self.plan.call is not None:
            process.history.end(self.plan.call)


class TracedGroup(Group):
    """A Group whose calls are noted in the history."""

    pending_class = TracedPending
    direct = False          # every call has a plan, which is noted

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        if self.size > 1:
            open_groups[self.key] = self
            self.slots()        # now, as the first call that needs them may not be the same on all ranks

    def close(self):
        super().close()
        open_groups.pop(self.key, None)

    def unreceived(self):
        """Sends of this rank that, as far as it knows, nobody has received, in words; a plain group knows nothing."""
        return []

    def note(self, plan):
        """The Call that led to a plan, noted as begun."""
        if plan.call is None:
            plan.call = _current.call
            plan.call.describe(plan)
            process.history.begin(plan.call)
        return plan.call

    def _run(self, plan):
        if self.size == 1:
            return super()._run(plan)
        call = self.note(plan)
        result = super()._run(plan)
        process.history.end(call)
        return result

    def _start(self, plan):
        if self.size > 1:
            self.note(plan)
        return super()._start(plan)


def _noted(name):
    plain = getattr(Group, name)
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def method(self, *arguments, **options):
        if self.size > 1:
            bound = signature.bind(self, *arguments, **options)
            bound.apply_defaults()
            _current.call = Call(name, bound.arguments, self)
        return plain(self, *arguments, **options)

    return method


for _name in OPERATIONS:
    setattr(TracedGroup, _name, _noted(_name))
