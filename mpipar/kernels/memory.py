"""Memory: aligned arrays, and what is freed stays with the process, so that each step finds the pages of the one before.

NumPy takes large arrays from malloc, and glibc gives large pieces back to the system at once: the next step's arrays
are then new pages, which the kernel has to clear and map, a tenth of a step's time or more.
"""

import ctypes
import functools

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
