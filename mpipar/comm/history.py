"""The last operations of this rank, in a file that is there after any end but a good one.

The file is mapped into memory and written as the operations happen, so that nothing has to be done at the end: it
survives a rank, and a job, that is killed. A job that ends well removes it. Each line has a number; the lines are a
ring, so the oldest need not be the first (`sort` puts them in order). Where there is time at the end (an exception, a
mismatch, the watchdog), the file is written anew: in order, with the stacks of all threads.

    12       3.214075 done  world: all_reduce(float64[8], sum) at program.py:12

Columns: number, seconds since the start, done or begun (then it did not end), group, call.
"""
import contextlib
import mmap
import os
import pathlib
import threading
import time

WIDTH = 256             # bytes of a line


class History:
    """The ring. `moved`: when an operation last began or ended (of time.monotonic). `open`: the calls that have begun
    and not ended, by number."""

    def __init__(self, operations):
        self._size, self._count = operations, 0
        self._ring, self._head, self.path = bytearray(_line("") * (operations + 1)), "", None
        self._start, self._lock, self._saved = time.monotonic(), threading.Lock(), False
        self.moved, self.open = self._start, {}

    def keep_in(self, folder, rank, ranks):
        """From now on in a file of that folder; OSError where it can't be written."""
        path = pathlib.Path(folder, f"mpipar-rank{rank}.log").absolute()
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        self._head = f"mpipar rank {rank} of {ranks}, process {os.getpid()}, started {started}"
        self._ring[:WIDTH] = _line(f"{self._head}; lines are a ring, numbered in order")
        with open(path, "wb+") as file:
            file.write(self._ring)
            file.flush()
            self._ring = mmap.mmap(file.fileno(), len(self._ring))
        self.path = path

    def begin(self, call):
        """Note that a call (fingerprint.Call) begins; gives it its number."""
        with self._lock:
            self._count += 1
            call.line = self._count
        self._write(call, "begun")
        self.open[call.line] = call

    def end(self, call):
        """Note that it has ended."""
        call.plan = None
        if self.open.pop(call.line, None) is not None and self._count - call.line < self._size:
            self._write(call, "done")

    def last(self, count=None):
        """The lines of the last operations, the oldest first."""
        lines = bytes(self._ring[WIDTH:]).decode(errors="replace").split("\n")
        lines = sorted((line.rstrip() for line in lines if line.strip()), key=lambda line: int(line.split(None, 1)[0]))
        return lines if count is None else lines[-count:]

    def save(self, stacks):
        """Write the file anew, in order, with the stacks (a text); once. Never fails."""
        with self._lock:
            if self.path is None or self._saved:
                return
            self._saved = True
            with contextlib.suppress(OSError):
                spare = self.path.with_suffix(".tmp")
                spare.write_text("\n".join([self._head, *self.last(), "", stacks.rstrip(), ""]))
                os.replace(spare, self.path)

    def remove(self):
        """The job has ended well: nothing is kept."""
        self._saved = True
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()

    def _write(self, call, what):
        self.moved = time.monotonic()
        place = WIDTH * (1 + (call.line - 1) % self._size)
        text = f"{call.line:>8} {self.moved - self._start:13.6f} {what:<5} {call.group.name}: {call}"
        self._ring[place:place + WIDTH] = _line(text)


def _line(text):
    """The text as a line of the fixed width; what is too long loses its middle."""
    data = text.encode(errors="replace")
    if len(data) >= WIDTH:
        data = data[:WIDTH // 2 - 4] + b" ... " + data[-(WIDTH // 2 - 4):]
    return data.ljust(WIDTH - 1)[:WIDTH - 1] + b"\n"
