"""An operation that was started and not yet finished."""
import time

# Operations dropped without a wait: their buffers must outlive the messages, or MPI writes into freed memory.
_abandoned = []

_SHORTEST_PAUSE = 2e-5  # seconds


class Pending:
    """What `..._start` returns. The arrays of the call may be neither written nor read before it is finished.

    `wait()` returns what the blocking form returns. `test()` says whether it is finished and never blocks.
    MPI moves most messages only inside MPI calls, so a pending operation progresses in `wait`, in `test`, and
    in other calls.
    """

    __slots__ = ("_requests", "plan", "_entry", "group", "__weakref__")

    def __init__(self, group, plan, requests, entry=None):
        self.group, self.plan, self._requests, self._entry = group, plan, requests, entry

    def wait(self, pause=0.0):
        """Block until it is finished; the result. A second call returns the same result.

        pause: seconds of sleep between two looks, at most, which leaves the core to other ranks; 0: as MPI waits, which
        spins.
        """
        if pause:
            sleep = min(pause, _SHORTEST_PAUSE)
            while not self.test():
                time.sleep(sleep)
                sleep = min(1.5 * sleep, pause)
        if self._requests is not None:
            start = time.perf_counter() if self._entry is not None else 0.0
            if self._requests:
                # Of the requests' own class: that of the tests' communicator looks out for failed peers.
                type(self._requests[0]).Waitall(self._requests)
            self._finish(start)
        return self.plan.result

    def test(self):
        """True when it is finished (`wait` then returns at once)."""
        if self._requests is None:
            return True
        start = time.perf_counter() if self._entry is not None else 0.0
        if all([request.Test() for request in self._requests]):     # a list: every request is given its turn
            self._finish(start)
        elif self._entry is not None:
            self._entry.seconds += time.perf_counter() - start
        return self._requests is None

    def _finish(self, start):
        self._requests = None
        if self.plan.finish is not None:
            self.plan.finish()
        if self._entry is not None:
            self._entry.seconds += time.perf_counter() - start

    def __del__(self):
        if getattr(self, "_requests", None):
            _abandoned.append((self._requests, self.plan))
