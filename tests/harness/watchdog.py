"""Ends a job that hangs in a test, and shows where each rank was."""

import faulthandler
import os
import tempfile
import threading
import time

NOISE = ("/_pytest/", "/pluggy/", "/pytest/", "<frozen runpy>", "/tests/harness/inside.py")


class Watchdog(threading.Thread):
    """A thread on every rank. It ends the job when a test takes longer than its limit, or when a peer has
    failed `grace` seconds ago and this rank is still in the test (so it is in a plain MPI call that can't
    be interrupted), or when whoever started this rank is gone. Each rank writes its own stacks to the real
    stderr before."""

    def __init__(self, world, peers, grace, stderr, owner):
        super().__init__(daemon=True)
        self.world, self.peers, self.grace, self.stderr = world, peers, grace, stderr
        self.deadline = None
        self.limit = self.doing = self.note = ""
        self.parent, self.owner = os.getppid(), owner

    def watch(self, doing, limit):
        """From now on this rank does `doing`, and may take `limit` seconds for it."""
        self.doing, self.limit, self.note = doing, limit, ""
        self.deadline = time.monotonic() + limit
        # A C thread, for a hang that holds the interpreter's lock, where no Python thread runs.
        faulthandler.dump_traceback_later(limit + 5, file=self.stderr, exit=True)

    def rest(self):
        """Nothing to watch."""
        self.deadline = None
        faulthandler.cancel_dump_traceback_later()

    def run(self):
        failure = None  # when a peer's failure was first seen
        while True:
            time.sleep(0.2)
            now, deadline = time.monotonic(), self.deadline
            if os.getppid() != self.parent or (self.owner and not exists(self.owner)):
                os._exit(1)
            failed = self.peers.failed() if deadline else []
            failure = (failure or now) if failed else None
            if deadline and now > deadline:
                self.end(f"over the limit of {self.limit:g} s")
            elif failure and now > failure + self.grace:
                self.end(f"rank(s) {failed} failed {self.grace:g} s ago, others are still in the test")

    def end(self, why):
        faulthandler.cancel_dump_traceback_later()
        time.sleep(0.1 * self.peers.rank)  # one rank after the other, for the reader
        head = f"\n===== rank {self.peers.rank} of {self.peers.size}: {self.doing}: {why}"
        text = f"{head}\n{stacks()}\n{self.note}\n"
        os.write(self.stderr, text.encode())
        time.sleep(1 + 0.1 * (self.peers.size - self.peers.rank))
        self.world.Abort(1)
        time.sleep(3)
        os._exit(1)


def exists(process):
    """Whether there is a process of this number."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def stacks():
    """The stacks of all threads but this one, without the frames of pytest."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        threads = file.read().decode(errors="replace").split("\n\n")
    keep = [thread.splitlines() for thread in threads if "watchdog.py" not in thread]
    return "\n\n".join(
        "\n".join(line for line in lines if not any(part in line for part in NOISE)) for lines in keep
    )
