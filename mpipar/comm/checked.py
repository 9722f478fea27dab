"""Groups whose ranks compare what they call before anything is done (MPIPAR_DEBUG=1): MismatchError on every rank
instead of wrong numbers or a job that hangs.

Before a collective operation every rank gets the fingerprints of all (fingerprint.py), and the operation begins once
they fit. A send is announced to its receiver by its fingerprint, and the receiver answers it; so a message that nobody
receives is known too. Fingerprints travel on a communicator of their own, and never block: whoever waits for one
operation moves all others of this process on, so a program that is right without the check ends with it. An operation
that was started and not waited for begins when its fingerprints have come and this rank is next in `wait`, in `test`
or in another call.

Collective operations that block are carried out by the same MPI calls as without the check, so results keep their bits.
"""
import threading
import time
from collections import deque

import numpy as np

from mpipar.comm.collectives import Plan
from mpipar.comm.fingerprint import Call, MismatchError, Record, compare, compare_pair, record
from mpipar.comm.traced import TracedGroup, TracedPending, open_groups, process
from mpipar.comm.waits import WAITING

_OFFER, _ANSWER = 1, 2              # tags: the fingerprint of a send; what the receiver says of it
_LOOKS = 50                         # without sleep, before a wait sleeps between its looks
_SHORTEST, _LONGEST = 2e-5, 1e-3    # seconds of these sleeps
_DRAIN = 1.0                        # seconds in which an answer that was sent arrives

_lock = threading.RLock()           # one thread at a time moves the operations on

def progress():
    """Move all operations of this process on; MismatchError where the ranks do not agree on one of them."""
    if _lock.acquire(blocking=False):
        try:
            for group in list(open_groups.values()):
                if group.inspector is not None:
                    group.inspector.advance()
        finally:
            _lock.release()


def until(done, pending=None, pause=_LONGEST):
    """Wait until done() is true, and move everything on meanwhile. pending: counts the looks, for the watchdog."""
    looks = 0
    while not done():
        progress()
        looks += 1
        if pending is not None:
            pending.looks += 1
        if looks > _LOOKS:
            time.sleep(min(_SHORTEST * 1.2 ** min(looks - _LOOKS, 40), pause))


def unreceived():
    """What was sent by this process and received by nobody, as a text; "" for nothing. When all ranks have come to
    their end."""
    progress()
    return "\n".join(filter(None, map(_unreceived, list(open_groups.values()))))


def _unreceived(group):
    lines = [f"  rank {group.members[group.rank]}: {words}" for words in group.unreceived()]
    return "\n".join([f"group {group.name}: a message was sent and never received:", *lines]) if lines else ""


class CheckedPending(TracedPending):
    """An operation that begins once the ranks agree. ready: they do, and it has begun. looks: of its waits."""

    __slots__ = ("ready", "looks", "table", "check", "blocking", "done", "serial")

    def __init__(self, group, plan, requests=None, entry=None, *, blocking=False):
        super().__init__(group, plan, requests, entry)
        self.ready, self.looks, self.done, self.blocking, self.serial = False, 0, False, blocking, 0
        self.table = self.check = None

    def wait(self, pause=_LONGEST):
        """As of Pending."""
        if not self.done:
            start = time.perf_counter()
            until(lambda: self.ready, self, pause or _LONGEST)
            if self.blocking:
                for name, arguments in self.plan.calls:
                    getattr(self.group.comm, name)(*arguments)
            else:
                until(self._all_done, self, pause or _LONGEST)
            self._finish(start)
        return self.plan.result

    def test(self):
        """As of Pending."""
        if not self.done:
            start = time.perf_counter()
            self.plan.call.tested = time.monotonic()
            self.looks += 1
            progress()
            if self.ready and self._all_done():
                self._finish(start)
            elif self._entry is not None:
                self._entry.seconds += time.perf_counter() - start
        return self.done

    @property
    def arrived(self):
        """Whether the others have done their part: the ranks agree; of a send, the message was received."""
        if self.plan.operation == "send":
            return (self.plan.peer, self.serial) not in self.group.inspector.sent
        return self.ready

    def begin(self):
        """The ranks agree."""
        if not self.blocking:
            comm = self.group.comm
            self._requests = [getattr(comm, "I" + name.lower())(*arguments) for name, arguments in self.plan.calls]
        self.ready = True

    def _all_done(self):
        return all([request.Test() for request in self._requests])      # a list: every request is given its turn

    def _finish(self, start):
        self.done = True
        super()._finish(start)


WAITING.add(CheckedPending.wait.__code__)


class CheckedGroup(TracedGroup):
    """A Group whose ranks compare their calls."""

    inspector = None

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        if self.size > 1:
            self.inspector = Inspector(self)

    def unreceived(self):
        """Sends of this rank that nobody has received, in words."""
        return [] if self.inspector is None else list(self.inspector.sent.values())

    def zeros(self, size, dtype):
        if self.size > 1:
            self._agree("zeros", size=size, dtype=dtype)
        return super().zeros(size, dtype)

    def common(self, size, dtype):
        if self.size > 1:
            self._agree("common", size=size, dtype=dtype)
        return super().common(size, dtype)

    def share(self, other, array):
        if self.size > 1:
            self._agree("share", size=array.size, dtype=array.dtype)
        super().share(other, array)

    def close(self):
        if self.inspector is not None:
            self._agree("close")
            inspector, end = self.inspector, time.monotonic() + _DRAIN
            until(lambda: not inspector.sent or time.monotonic() > end)
            if text := _unreceived(self):
                raise MismatchError(text)
            self.inspector = None
            inspector.close()
        super().close()

    def _run(self, plan):
        if self.size == 1:
            return super()._run(plan)
        self.note(plan)
        recorder = self.recorder
        start = time.perf_counter() if recorder is not None else 0.0
        result = self._inspect(plan, blocking=not plan.pairwise and plan.peer is None).wait()
        if recorder is not None:
            recorder.add(plan, self, start)
        return result

    def _start(self, plan):
        if self.size == 1:
            return super()._start(plan)
        self.note(plan)
        start = time.perf_counter()
        pending = self._inspect(plan)
        if self.recorder is not None:
            pending._entry = self.recorder.add(plan, self, start)
        return pending

    def _agree(self, operation, **arguments):
        """Check that all ranks do this, which is not among the operations that are recorded."""
        plan = Plan(operation, None)
        plan.call = Call(operation, arguments, self)
        plan.call.describe(plan)
        process.history.begin(plan.call)
        self._inspect(plan, blocking=True).wait()

    def _inspect(self, plan, blocking=False):
        if plan.peer is None:
            self._calls[0] = plan.number = self._calls[0] + 1
        pending = CheckedPending(self, plan, blocking=blocking)
        with _lock:
            self.inspector.add(pending)
        progress()
        return pending


class Inspector:
    """The fingerprints of one group that are on their way. sent: the words of the sends that are not answered, by
    (rank, serial). problem: the first mismatch; every thread of the process that waits for anything gets to know it.
    Its methods are called by one thread at a time."""

    def __init__(self, group):
        self.group, self._MPI = group, group.mpi.MPI
        self._comm = group.comm.Dup()
        self._queue, self._receives, self._offers = deque(), [], []
        self.sent, self._serial, self._leaving, self.problem = {}, 0, [], None

    def add(self, pending):
        """Send the fingerprint of an operation, or be ready for the one that it needs."""
        plan = pending.plan
        if plan.operation == "send":
            self._serial += 1
            pending.serial = self._serial
            self.sent[plan.peer, self._serial] = f"{plan.call}; not received by rank {self.group.members[plan.peer]}"
            self._send(record(plan.call, serial=self._serial, tag=_tag(plan)), plan.peer, _OFFER)
            pending.begin()
        elif plan.operation == "recv":
            self._receives.append(pending)
        else:
            mine = record(plan.call, ranks=self.group.size)
            pending.table = np.empty((self.group.size, mine.size), np.uint8)
            pending.check = self._comm.Iallgather(mine, pending.table), mine
            self._queue.append(pending)

    def advance(self):
        """Take in what has arrived, and begin what may begin, in the order of the calls. MismatchError."""
        if self.problem is None:
            try:
                self._advance()
            except MismatchError as error:
                self.problem = str(error)
        if self.problem is not None:
            raise MismatchError(self.problem)

    def _advance(self):
        self._answers()
        while self._queue and self._queue[0].check[0].Test():
            pending = self._queue.popleft()
            if problem := compare(pending.table, self.group):
                raise MismatchError(problem)
            pending.table = pending.check = None
            pending.begin()
        self._messages()
        self._leaving = [(request, data) for request, data in self._leaving if not request.Test()]

    def close(self):
        """Free the communicator; all ranks of the group together."""
        self._comm.Free()

    def _messages(self):
        """Announced sends meet the receives that wait for them, in the order of both."""
        for data, source in self._arrived(_OFFER):
            self._offers.append(Record(data, source))
        for pending in list(self._receives) if self._offers else ():
            plan = pending.plan
            offer = next((o for o in self._offers if (o.source, o.tag) == (plan.peer, _tag(plan))), None)
            if offer is None:
                continue
            self._offers.remove(offer)
            self._receives.remove(pending)
            problem = compare_pair(offer, plan.call, self.group, self.group.rank)
            words = np.frombuffer((problem or "").encode(errors="replace"), np.uint8)
            answer = np.concatenate([np.array([offer.serial], np.int64).view(np.uint8), words])
            self._send(answer, offer.source, _ANSWER)
            if problem:
                raise MismatchError(problem)
            pending.begin()

    def _answers(self):
        for data, source in self._arrived(_ANSWER):
            if data.size > 8:
                raise MismatchError(data[8:].tobytes().decode(errors="replace"))
            self.sent.pop((source, int(data[:8].view(np.int64)[0])), None)

    def _arrived(self, tag):
        """(bytes, rank) of each message of that tag."""
        status = self._MPI.Status()
        while self._comm.Iprobe(self._MPI.ANY_SOURCE, tag, status):
            data = np.empty(status.Get_count(self._MPI.BYTE), np.uint8)
            source = status.Get_source()
            self._comm.Recv(data, source, tag)
            yield data, source

    def _send(self, data, to, tag):
        self._leaving.append((self._comm.Isend(data, to, tag), data))


def _tag(plan):
    """The tag of a send or receive."""
    return plan.calls[0][1][2]

