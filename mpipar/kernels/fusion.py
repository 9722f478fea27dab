"""Loop fusion (lecture section 2.6, item 3): out = (a + b) * c + d in three loops, and in one.

Each of the three loops reads two elements and writes one for a single operation: intensity 1/3. In one loop
what is between the operations never leaves the registers: three operations for four reads and one write, 3/5.
(Intensities as the lecture counts them, in operations for each element moved.)
"""

import numpy as np

from .cache import jit
from .threads import parallel_for
from .views import ranges, same_dtype, same_shape, source, target
from .wide import wide_vectors

GRAIN = 65536  # elements of a task
# (operations, elements read, elements written) for each element of the result.
COUNTS = {"unfused": (3, 6, 3), "fused": (3, 4, 1)}


def add_mul_add_unfused(a, b, c, d, out, *, work=None):
    """out = (a + b) * c + d in three loops, each over all elements.

    All arrays have one shape and dtype (float32 or float64); out is C-contiguous and may be an operand.
    work: two more arrays like out for what is in between, made anew if not given. ValueError where shapes or
    dtypes do not fit.
    """
    first, second = (np.empty_like(out), np.empty_like(out)) if work is None else work
    a, b, c, d, first, second, out_flat = _flat((a, b, c, d), (first, second, out))
    cuts = ranges(out_flat.size, GRAIN)
    parallel_for(_add, [(a[cut], b[cut], first[cut]) for cut in cuts])
    parallel_for(_multiply, [(first[cut], c[cut], second[cut]) for cut in cuts])
    parallel_for(_add, [(second[cut], d[cut], out_flat[cut]) for cut in cuts])
    return out


def add_mul_add(a, b, c, d, out):
    """out = (a + b) * c + d in one loop, with the bits of the three; no memory is needed in between.

    Arguments and errors as in `add_mul_add_unfused`.
    """
    a, b, c, d, flat = _flat((a, b, c, d), (out,))
    cuts = ranges(flat.size, GRAIN)
    parallel_for(_add_mul_add, [(a[cut], b[cut], c[cut], d[cut], flat[cut]) for cut in cuts])
    return out


def triad(b, c, factor, out):
    """out = b + factor * c: the loop of the STREAM benchmark, which measures memory. Arrays as above."""
    b, c, flat = _flat((b, c), (out,))
    factor = out.dtype.type(factor)
    parallel_for(_triad, [(b[cut], c[cut], factor, flat[cut]) for cut in ranges(flat.size, GRAIN)])
    return out


def intensity(form):
    """Operations for each element moved of "unfused" (1/3) or "fused" (3/5)."""
    operations, reads, writes = COUNTS[form]
    return operations / (reads + writes)


def bytes_moved(form, count, itemsize):
    """Bytes read and written for `count` elements, if nothing stays in a cache from one loop to the next."""
    return (COUNTS[form][1] + COUNTS[form][2]) * count * itemsize


def _flat(operands, results):
    same_dtype(*operands, *results)
    same_shape(*operands, *results)
    return *(source(x) for x in operands), *(target(x) for x in results)


@jit
def _add(a, b, out):
    wide_vectors()
    for i in range(out.size):
        out[i] = a[i] + b[i]


@jit
def _multiply(a, b, out):
    wide_vectors()
    for i in range(out.size):
        out[i] = a[i] * b[i]


@jit
def _add_mul_add(a, b, c, d, out):
    wide_vectors()
    for i in range(out.size):
        out[i] = (a[i] + b[i]) * c[i] + d[i]


@jit
def _triad(b, c, factor, out):
    wide_vectors()
    for i in range(out.size):
        out[i] = b[i] + factor * c[i]
