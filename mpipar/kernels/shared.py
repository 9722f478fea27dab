"""Sums over the rows of a block of memory that several processes share, one row each."""
import numpy as np

from .cache import jit
from .threads import parallel_for
from .views import DTYPES, ranges

GRAIN = 65536  # elements of a task
BLOCK = 1024  # elements whose sums stay in the first cache until they are written


def sum_rows(rows, first, last, out, divisor=1):
    """out[i] = sum over k of rows[k, first + i] / divisor, the rows in order. rows: [P, N], C-contiguous, float32
    or float64; out: [last - first], which may be that piece of one of the rows."""
    _check(rows, first, last)
    if out.shape != (last - first,) or out.dtype != rows.dtype:
        raise ValueError(f"sums of {last - first} {rows.dtype} elements do not go into {out.shape} of {out.dtype}")
    parallel_for(_sum_rows, [(rows, first + cut.start, out[cut], rows.dtype.type(divisor))
                             for cut in ranges(last - first, GRAIN)])
    return out


def sum_rows_everywhere(rows, first, last, divisor=1):
    """rows[j, first:last] = sum over k of rows[k, first:last] / divisor, in every row j: the same bits."""
    _check(rows, first, last)
    parallel_for(_sum_rows_everywhere, [(rows, first + cut.start, first + cut.stop, rows.dtype.type(divisor))
                                        for cut in ranges(last - first, GRAIN)])
    return rows


def warm(dtype):
    """Compiles or loads every kernel of this file for a dtype."""
    rows = np.zeros((2, 4), dtype)
    sum_rows(rows, 0, 2, rows[1, 0:2])
    sum_rows_everywhere(rows, 0, 4)


def _check(rows, first, last):
    if rows.ndim != 2 or not rows.flags.carray or rows.dtype not in DTYPES:
        raise ValueError(f"rows of shape {rows.shape} and {rows.dtype}: give [P, N], C-contiguous, float32 or float64")
    if not 0 <= first <= last <= rows.shape[1]:
        raise ValueError(f"elements {first} to {last} of rows of {rows.shape[1]}")


@jit
def _sum_rows(rows, first, out, divisor):
    total = np.empty(BLOCK, rows.dtype)
    for start in range(0, out.size, BLOCK):
        count = min(BLOCK, out.size - start)
        _sum_block(rows, first + start, count, total)
        part = out[start:start + count]  # with `start + i` as the index the loop does not run in vectors
        for i in range(count):
            part[i] = total[i] / divisor


@jit
def _sum_rows_everywhere(rows, first, last, divisor):
    total = np.empty(BLOCK, rows.dtype)
    for start in range(first, last, BLOCK):
        count = min(BLOCK, last - start)
        _sum_block(rows, start, count, total)
        for i in range(count):
            total[i] = total[i] / divisor
        for k in range(rows.shape[0]):
            row = rows[k, start:start + count]
            for i in range(count):
                row[i] = total[i]


@jit(inline=True)
def _sum_block(rows, start, count, total):
    row = rows[0, start:start + count]
    for i in range(count):
        total[i] = row[i]
    for k in range(1, rows.shape[0]):
        row = rows[k, start:start + count]
        for i in range(count):
            total[i] += row[i]
