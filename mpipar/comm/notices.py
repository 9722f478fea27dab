"""Short messages between the ranks of the job about leaving it, outside of every group.

They are what lets a rank that is stuck in a collective learn that another will never come. A notice is an
array of int64: kind, exit code, then for every group of the sender its key and how many collective calls it
has made there. DONE: the sender has come to its end and found nothing wrong. ASK is of the watchdog, its code is the
number of the question; the answers are texts.
"""
import json
import threading
import time

import numpy as np

from mpipar.comm.group import call_counts

LEFT, REFUSED, FAILED, ASK, DONE = 0, 1, 2, 3, 4
_TAG, _TOLD = 32767, 32766
_MOST = 1000  # groups told of in one notice, the latest; without the others only the diagnosis is weaker


class Notice:
    """What one rank has said: `kind`, `code`, and `calls`, the number of collective calls by group key."""

    def __init__(self, numbers):
        self.kind, self.code = int(numbers[0]), int(numbers[1])
        self.calls = dict(zip(numbers[2::2].tolist(), numbers[3::2].tolist()))


class Notices:
    """`received`: the latest Notice of each rank that has sent one. Safe to use from several threads.

    asked: by rank, the number of its latest question and when it came. states: by rank, the number of a question and
    what the rank has told.
    """

    def __init__(self, world, mpi):
        self._world, self._MPI = world, mpi
        self.rank, self.size = world.Get_rank(), world.Get_size()
        self.received, self.asked, self.states = {}, {}, {}
        self._lock, self._sent = threading.Lock(), []

    def send(self, kind, code):
        """Tell every other rank of the job."""
        numbers = [kind, code]
        for key, (calls,) in list(call_counts.items())[-_MOST:]:
            numbers += [key, calls]
        message = np.array(numbers, np.int64)
        with self._lock:
            for rank in range(self.size):
                if rank != self.rank:
                    self._sent.append((self._world.Isend(message, rank, _TAG), message))

    def ask(self, number):
        """Ask every other rank for its state."""
        self.send(ASK, number)

    def tell(self, rank, number, text):
        """Answer question `number` of a rank with a text (JSON)."""
        words = np.frombuffer(text.encode(errors="replace"), np.uint8)
        message = np.concatenate([np.array([number], np.int64).view(np.uint8), words])
        with self._lock:
            self._sent.append((self._world.Isend(message, rank, _TOLD), message))

    def collect(self):
        """Take in what has arrived; returns `received`."""
        with self._lock:
            status = self._MPI.Status()
            while self._world.Iprobe(self._MPI.ANY_SOURCE, _TAG, status):
                numbers = np.empty(status.Get_count(self._MPI.INT64_T), np.int64)
                source = status.Get_source()
                self._world.Recv(numbers, source, _TAG)
                notice = Notice(numbers)
                if notice.kind == ASK:
                    self.asked[source] = notice.code, time.monotonic()
                else:
                    self.received[source] = notice
            while self._world.Iprobe(self._MPI.ANY_SOURCE, _TOLD, status):
                message, source = np.empty(status.Get_count(self._MPI.BYTE), np.uint8), status.Get_source()
                self._world.Recv(message, source, _TOLD)
                self.states[source] = int(message[:8].view(np.int64)[0]), json.loads(message[8:].tobytes())
            self._sent = [sent for sent in self._sent if not sent[0].Test()]
        return self.received

    def wait(self, ranks, seconds=None, kinds=None):
        """Asleep until all `ranks` have sent a notice (True) or the time is over (False).

        kinds: the last notice of each has to be one of these.
        """
        end, pause = time.monotonic() + seconds if seconds is not None else None, 0.001
        others = set(ranks) - {self.rank}
        while not others <= {rank for rank, notice in self.collect().items() if kinds is None or notice.kind in kinds}:
            if end is not None and time.monotonic() > end:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return True
