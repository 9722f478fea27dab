"""The metrics file: one JSON object a line, written by rank 0; and the numbers at the end of a run."""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys

import numpy as np


def check_writable(path: str | None) -> None:
    """ValueError if a file of that name could not be written; writes nothing."""
    if path is None:
        return
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise ValueError(f"{path!r} can't be written: there is no folder {folder!r}")
    if os.path.isdir(path):
        raise ValueError(f"{path!r} can't be written: it is a folder")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise ValueError(f"{path!r} can't be written")


def check_folder(option: str, path: str | None) -> None:
    """ValueError if files could not be written into a folder of that name, which need not be there yet; writes nothing."""
    if path is None:
        return
    if os.path.exists(path) and not os.path.isdir(path):
        raise ValueError(f"{option} {path!r} is not a folder")
    parent = path if os.path.isdir(path) else os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(parent) or not os.access(parent, os.W_OK):
        raise ValueError(f"{option} {path!r} can't be written: there is no folder {parent!r} that may be written to")


class MetricsFile:
    """Writes one JSON object a line; without a path, or on other ranks than 0, nothing."""

    def __init__(self, path: str | None, *, active: bool):
        self.file = open(path, "w", encoding="utf-8") if path and active else None

    def write(self, event: str, **values) -> None:
        """Append one event; floats keep their full precision."""
        if self.file:
            self.file.write(json.dumps({"event": event, **values}) + "\n")
            self.file.flush()

    def close(self) -> None:
        """Close the file."""
        if self.file:
            self.file.close()


class Throughput:
    """Step times of a run, the first `skip` left out of the summary (or fewer, if the run is that short).

    The rate is global: the items of the whole batch over the time of the step, whatever the layout.
    """

    def __init__(self, items_per_step: int, *, skip: int = 3):
        self.items = items_per_step
        self.skip = skip
        self.times: list[float] = []

    def add(self, seconds: float) -> float:
        """Note a step; returns its items per second."""
        self.times.append(seconds)
        return self.items / seconds

    @property
    def excluded(self) -> int:
        """How many steps the summary leaves out."""
        return min(self.skip, max(len(self.times) - 1, 0))

    def median_time(self) -> float:
        """Median seconds of a step, 0 if there was none."""
        return statistics.median(self.times[self.excluded :]) if self.times else 0.0

    def median_rate(self) -> float:
        """Items per second at the median step time."""
        return self.items / self.median_time() if self.times else 0.0


def peak_rss_bytes(group) -> list[int]:
    """The peak resident memory of every rank of a group, in bytes; collective."""
    unit = 1 if sys.platform == "darwin" else 1024
    mine = np.array([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit], np.int64)
    return [int(n) for n in group.all_gather(mine)]
