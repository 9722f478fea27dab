"""Mailboxes: what the executor of a pipeline sends and receives through.

A message is named by (stage that produced it, direction "F" or "B", micro-batch), so messages may arrive in
any order. Both mailboxes have the same methods:

- `post(key, source, shape, dtype)`: be ready to receive; returns at once.
- `take(key)` -> the array, once it has arrived. It belongs to the mailbox: `release` it after its last use.
- `send(key, to, array)`: start sending; returns at once. The array must not be changed before the send is
  done.
- `settle(key)`: wait until that send is done, and forget its array. `progress()`: forget the sends that are
  done.
- `release(array, after=None)`: the array may be used for another receive (`after`: once that send is done).
- `finish()`: wait for all sends.

`GroupMailbox` speaks over a `Group` of `mpipar.comm`; `ThreadMailbox` joins threads of one process, without
MPI.
"""

import threading

import numpy as np

_TAGS = 32000
_LONGEST_PAUSE = 2e-4       # seconds between two looks of a patient mailbox


class Buffers:
    """Receive buffers that are allocated once and used again, by shape and dtype."""

    def __init__(self):
        self._free = {}

    def take(self, shape, dtype):
        """An array of that shape and dtype, contents undefined."""
        free = self._free.get((tuple(shape), np.dtype(dtype)))
        return free.pop() if free else np.empty(shape, dtype)

    def release(self, array):
        """Keep the array for a later `take`."""
        self._free.setdefault((array.shape, array.dtype), []).append(array)


class Mailbox:
    """What both mailboxes share: buffers that are used again, and the sends that are not done yet, by key."""

    def __init__(self):
        self._buffers = Buffers()
        self._receives = {}
        self._sends = {}
        self._held = {}

    def settle(self, key):
        if key in self._sends:
            self._wait_for_send(self._sends[key], key)
            self._forget(key)

    def progress(self):
        for key in [key for key, send in self._sends.items() if self._is_done(send)]:
            self._forget(key)

    def release(self, array, after=None):
        if after in self._sends:
            self._held.setdefault(after, []).append(array)
        else:
            self._buffers.release(array)

    def finish(self):
        for key in list(self._sends):
            self.settle(key)

    def _forget(self, key):
        del self._sends[key]
        for array in self._held.pop(key, ()):
            self._buffers.release(array)


class GroupMailbox(Mailbox):
    """Posted receives and non-blocking sends over a group (rank numbers are the group's).

    group: has `send_start(x, to, tag)` and `recv_start(out, source, tag)`, which return a pending operation
    with `wait()` and `test()`. stages: number of stages in all, for the tags. patient: wait asleep, looking
    for the message now and then, which leaves the core to the other ranks; else as MPI does, which spins. A
    mailbox may serve any number of runs.
    """

    def __init__(self, group, stages, *, patient=False):
        super().__init__()
        self._group = group
        self._stages = stages
        self._patient = patient

    def post(self, key, source, shape, dtype):
        array = self._buffers.take(shape, dtype)
        self._receives[key] = array, self._group.recv_start(array, source, self._tag(key), _text(key))

    def take(self, key):
        array, pending = self._receives.pop(key)
        self._wait(pending)
        return array

    def send(self, key, to, array):
        array = np.ascontiguousarray(array)
        self._sends[key] = array, self._group.send_start(array, to, self._tag(key), _text(key))

    def _wait_for_send(self, send, key):
        self._wait(send[1])

    @staticmethod
    def _is_done(send):
        return send[1].test()

    def _wait(self, pending):
        pending.wait(_LONGEST_PAUSE if self._patient else 0.0)

    def _tag(self, key):
        stage, direction, micro_batch = key
        # MPI promises tags up to 32767. Messages of one tag keep their order, so a tag may come again for a
        # micro-batch so far behind that it is not sent before the first one is received.
        micro_batch %= max(1, _TAGS // (2 * self._stages))
        return (micro_batch * self._stages + stage) * 2 + (direction == "B")


class Exchange:
    """Where the threads of one pipeline meet: one `ThreadMailbox` a rank.

    timeout: seconds after which waiting is given up with TimeoutError (a wrong plan must not hang a program).
    """

    def __init__(self, ranks, timeout=60.0):
        self.timeout = timeout
        self.lock = threading.RLock()
        self.failure = None
        self.offers = {}
        self.mailboxes = [ThreadMailbox(self, rank) for rank in range(ranks)]

    def fail(self, error):
        """Wake every waiting thread with a RuntimeError; called by the thread that failed."""
        with self.lock:
            self.failure = self.failure or error
            for mailbox in self.mailboxes:
                mailbox.changed.notify()

    def wait(self, mailbox, ready, what):
        """Wait, holding the lock, until ready() is true."""
        if not mailbox.changed.wait_for(lambda: self.failure or ready(), self.timeout):
            raise TimeoutError(f"waited {self.timeout} s for {what}")
        if self.failure and not ready():
            raise RuntimeError(f"gave up waiting for {what}: another rank failed") from self.failure


class ThreadMailbox(Mailbox):
    """The mailbox of one thread of an `Exchange`.

    Every send is synchronous: it is done when the receiver has taken the message, which copies the array, so
    that two ranks share no memory.
    """

    def __init__(self, exchange, rank):
        super().__init__()
        self._exchange = exchange
        self._rank = rank
        self.changed = threading.Condition(exchange.lock)      # something happened to a message of this rank

    def post(self, key, source, shape, dtype):
        self._receives[key] = self._buffers.take(shape, dtype), source

    def take(self, key):
        array, source = self._receives.pop(key)
        name = (source, self._rank, key)
        offers = self._exchange.offers
        with self.changed:
            self._exchange.wait(self, lambda: name in offers, f"message {_text(key)} from rank {source}")
            sent = offers[name]
        if sent.shape != array.shape or sent.dtype != array.dtype:
            raise ValueError(f"message {_text(key)} from rank {source} is {sent.dtype}{list(sent.shape)}, "
                             f"rank {self._rank} expects {array.dtype}{list(array.shape)}")
        array[...] = sent
        with self.changed:
            del offers[name]
            self._exchange.mailboxes[source].changed.notify()
        return array

    def send(self, key, to, array):
        name = (self._rank, to, key)
        self._sends[key] = name
        exchange = self._exchange
        with self.changed:
            exchange.wait(self, lambda: name not in exchange.offers, f"rank {to} to take the last {_text(key)}")
            exchange.offers[name] = array
            exchange.mailboxes[to].changed.notify()

    def _wait_for_send(self, name, key):
        with self.changed:
            self._exchange.wait(self, lambda: self._is_done(name), f"rank {name[1]} to take {_text(key)}")

    def _is_done(self, name):
        return name not in self._exchange.offers


def _text(key):
    return "{}{}{}".format(*key)
