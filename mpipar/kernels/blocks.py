"""Kernels of float32 over arrays of bfloat16: block by block a part is widened, computed and rounded.

So every kernel computes and sums in float32, and no float32 copy of a whole array ever exists: a block lies in memory
of the thread that works on it, and is used again for the next one.
"""

import threading
from dataclasses import dataclass

import numpy as np

from .bfloat16 import narrow, widen
from .dtypes import is_bfloat16
from .threads import parallel_for

ELEMENTS = 65536  # of the largest array of a block: some 256 KiB in float32, which a second-level cache holds


@dataclass(frozen=True)
class Rows:
    """An array of which a kernel gets some rows (of axis 0) at a time: of a bfloat16 array as float32, of any other as
    they are."""

    array: np.ndarray
    reads: bool
    writes: bool


def read(x):
    """Rows that the kernel reads."""
    return Rows(x, True, False)


def write(x):
    """Rows that the kernel writes; bfloat16 must be C-contiguous."""
    return Rows(x, False, True)


def update(x):
    """Rows that the kernel reads and writes."""
    return Rows(x, True, True)


def whole(x):
    """A small array, such as a bias, that the kernel reads whole with every block: float32."""
    return widen(x, np.empty(x.shape, np.float32)) if is_bfloat16(x.dtype) else x


def by_blocks(function, *arguments, ordered=False, **options):
    """function(*arguments, **options), called for each block of the rows of those arguments that are `Rows`.

    Blocks do not depend on the number of threads, which share them, unless `ordered`: then one comes after the other,
    as a function needs that adds to an array of the caller. ValueError if the rows are not equally many.
    """
    rows = [x.array for x in (*arguments, *options.values()) if isinstance(x, Rows)]
    count = len(rows[0])
    if any(len(x) != count for x in rows):
        raise ValueError(f"arrays of {', '.join(str(x.shape) for x in rows)}: give one number of rows to all")
    longest = max((x.size // count for x in rows), default=1) if count else 1
    step = max(1, ELEMENTS // max(longest, 1))
    tasks = [(function, arguments, options, slice(lo, min(lo + step, count))) for lo in range(0, count, step)]
    if ordered:
        for task in tasks:
            _run(*task)
    else:
        parallel_for(_run, tasks)


def _run(function, arguments, options, cut):
    used, results = [], []

    def part(x):
        if not isinstance(x, Rows):
            return x
        here = x.array[cut]
        if not is_bfloat16(here.dtype):
            return here
        used.append(_memory(len(used), here.size).reshape(here.shape))
        if x.reads:
            widen(here, used[-1])
        if x.writes:
            results.append((used[-1], here))
        return used[-1]

    function(*[part(x) for x in arguments], **{name: part(x) for name, x in options.items()})
    for block, here in results:
        narrow(block, here)


def _memory(number, size):
    """The first `size` elements of this thread's block of that number."""
    blocks = _local.__dict__.setdefault("blocks", [])
    while len(blocks) <= number:
        blocks.append(np.empty(ELEMENTS, np.float32))
    if blocks[number].size < size:
        blocks[number] = np.empty(size, np.float32)
    return blocks[number][:size]


_local = threading.local()
