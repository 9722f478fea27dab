"""From the arrays that callers have to the few forms that kernels are compiled for.

Numba compiles a function anew for every dtype, number of axes, memory layout and for read-only arrays. All
kernels therefore take one-dimensional or two-dimensional writable C arrays, and these helpers make the views.
Kernels do not check indices, so the shapes are checked here or beside the call.
"""
import numpy as np

from .dtypes import is_bfloat16
from .settings import settings

DTYPES = (np.dtype(np.float32), np.dtype(np.float64))


def same_dtype(*arrays, bfloat16=False):
    """The dtype of all arrays. ValueError if they differ or are neither float32 nor float64 (nor `bfloat16`)."""
    dtype = arrays[0].dtype
    for array in arrays:
        if array.dtype != dtype:
            raise ValueError(f"arrays of {dtype} and {array.dtype} in one call: give all of one dtype")
    if dtype not in DTYPES and not (bfloat16 and is_bfloat16(dtype)):
        raise ValueError(f"arrays of {dtype}: give float32 or float64")
    return dtype


def same_shape(*arrays):
    """ValueError unless all arrays have one shape."""
    for array in arrays[1:]:
        if array.shape != arrays[0].shape:
            raise ValueError(f"shapes {arrays[0].shape} and {array.shape} differ")


def source(x, columns=None):
    """x for reading, flat or as [rows, columns]. A copy only if x is not C-contiguous or read-only."""
    if not x.flags.carray:
        x = np.array(x, order="C")
    return x.reshape(-1) if columns is None else x.reshape(_rows(x, columns), columns)


def target(x, columns=None):
    """x for writing, flat or as [rows, columns]; ValueError if that is no view of it."""
    if not x.flags.carray:
        raise ValueError(f"the result array of shape {x.shape} is not C-contiguous and writable")
    return x.reshape(-1) if columns is None else x.reshape(_rows(x, columns), columns)


def _rows(x, columns):
    # reshape(-1, 0) is ambiguous
    return x.size // columns if columns else int(np.prod(x.shape[:-1]))


def begin_together(a, b):
    """Whether two contiguous arrays of one shape are the same memory (the only overlap that is allowed)."""
    return a is b or a.__array_interface__["data"][0] == b.__array_interface__["data"][0]


def ranges(count, grain):
    """Slices that cover 0 .. count, cut at multiples of grain; one for few, else two for each thread.

    A range that starts at a multiple of 64 is divided into vectors as the uncut one would be, so element-wise
    kernels give the same bits however many ranges there are."""
    if count <= 0:
        return []
    pieces = 1 if settings.threads == 1 else min(2 * settings.threads, -(-count // grain))
    step = -(-count // (pieces * grain)) * grain
    return [slice(lo, min(lo + step, count)) for lo in range(0, count, step)]
