"""Memory: aligned arrays, and what is freed stays with the process, so that each step finds the pages of the one before.

NumPy takes large arrays from malloc, and glibc gives large pieces back to the system at once: the next step's arrays
are then new pages, which the kernel has to clear and map, a tenth of a step's time or more.
"""

import ctypes
import functools
import math
import threading

import numpy as np

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of glibc's mallopt
_LARGEST = 1 << 30  # pieces beyond that still come from the system and go back to it


@functools.lru_cache(maxsize=None)
def keep_freed_memory() -> bool:
    """Tell malloc to keep what is freed; True if it understood (glibc), False elsewhere, where nothing changes.

    The process then holds its peak of memory until it ends.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST)) and bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1))


def aligned_zeros(size: int, dtype, alignment: int = 64) -> np.ndarray:
    """A 1-D array of zeros whose first element lies at a multiple of `alignment` bytes."""
    dtype = np.dtype(dtype)
    raw = np.zeros(size * dtype.itemsize + alignment, np.uint8)
    skip = -raw.ctypes.data % alignment
    return raw[skip : skip + size * dtype.itemsize].view(dtype)


class ThreadMemory:
    """Memory for panels, of each thread its own, by name; it grows and is kept."""

    def __init__(self):
        self._local = threading.local()

    def address(self, name: str, size: int) -> int:
        """Address of at least `size` bytes, the first of a cache line."""
        held = self._local.__dict__
        if name not in held or held[name].nbytes < size:
            held[name] = aligned_zeros(size, np.uint8)
        return held[name].ctypes.data


_HEADER = 64  # no less than what malloc keeps beside each piece


def passing(shape, dtype) -> np.ndarray:
    """An array, contents undefined, that will be freed while others made after it stay: an output that backward makes again.

    Those others then lie in the hole that it leaves, several to a hole, and each needs a header of its own: without room
    for these, the last one does not fit, and a hole of its size is left over for each micro-batch in flight.
    """
    dtype = np.dtype(dtype)
    return np.ndarray(shape, dtype, np.empty(math.prod(shape) * dtype.itemsize + _HEADER, np.uint8))


def passing_like(x: np.ndarray) -> np.ndarray:
    """`passing` with the shape and dtype of x."""
    return passing(x.shape, x.dtype)
