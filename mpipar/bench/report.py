"""What the benchmarks share in printing and writing: the conditions, the spread, lists in options."""

import importlib.util
import json
import os
import platform
import statistics

import numpy as np

from ..kernels.host import host
from ..kernels.settings import settings


def conditions(dtype, runs) -> dict:
    """Hardware, versions and settings, the head of a report."""
    return {"hardware": host().describe(), "load_average": os.getloadavg()[0], "numpy": np.__version__,
            "python": platform.python_version(), "dtype": np.dtype(dtype).name, "threads": settings.threads,
            "runs": runs}


def print_conditions(report):
    """The two lines that every table starts with."""
    print(report["hardware"])
    print(f"{report['dtype']}, {report['threads']} thread(s), {report['runs']} rounds, "
          f"load average {report['load_average']:.1f}, NumPy {report['numpy']}", flush=True)


def calls_of(size: int, runs: int) -> int:
    """How often a message of `size` bytes is sent: `runs`, or where that is 0 a number that fits the size."""
    return runs or max(8, min(200, int(2e8 / (size + 1e5))))


def need_torch(against: str):
    """ValueError where PyTorch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise ValueError(f"--against {against} needs PyTorch: pip install torch")


def quartiles(values):
    """(lower quartile, upper quartile); of one value, that value twice."""
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def spread(values) -> str:
    """The middle half of the values."""
    low, high = quartiles(values)
    digits = 1 if high >= 10 else 2
    return f"{low:.{digits}f}..{high:.{digits}f}"


def print_table(columns, rows):
    """columns: (title, format, function of a row) each, the first to the left, the others to the right."""
    lines = [[title for title, _, _ in columns]]
    lines += [[format(value(row), kind) for _, kind, value in columns] for row in rows]
    widths = [max(map(len, cells)) for cells in zip(*lines)]
    for first, *others in lines:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:])]
        print("  ".join([first.ljust(widths[0]), *cells]))


def integers(option, text, highest=None):
    """The positive integers of a list such as 1,2,4. ValueError naming the option for anything else."""
    parts = text.split(",")
    valid = "integers from 1" + (f" to {highest}" if highest else "")
    if not all(part.strip().isdigit() and 1 <= int(part) <= (highest or int(part)) for part in parts):
        raise ValueError(f"{option} is {text!r}; valid values: {valid}, divided by commas")
    return [int(part) for part in parts]


def sizes(option, text, count):
    """`count` positive sizes such as 64x3x3. ValueError naming the option for anything else."""
    parts = text.split("x")
    if len(parts) != count or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"{option} is {text!r}; valid: {count} positive sizes divided by x")
    return tuple(map(int, parts))


def write_json(report, path):
    """The whole report as a JSON file; nothing without a path."""
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
            file.write("\n")
