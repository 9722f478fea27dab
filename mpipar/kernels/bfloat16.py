"""bfloat16 to float32 and back, and the sum of several ranks' numbers. The meaning of each function is in `plain.py`.

A float32 is rounded to the nearest bfloat16, ties to the even one; NaN stays NaN, and what is too large becomes inf.
"""
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .cache import jit
from .dtypes import is_bfloat16
from .threads import parallel_for
from .views import ranges, same_shape

GRAIN = 65536  # elements of a task
BLOCK = 1024  # elements whose sums over the ranks are kept side by side


def widen(x, out):
    """out = x. x: bfloat16, any strides; out: float32, C-contiguous, of x's shape."""
    a, y = _flat(x, np.uint16, "x"), _flat(out, np.float32, "out", written=True)
    same_shape(x, out)
    parallel_for(_widen, [(a[cut], y[cut]) for cut in ranges(y.size, GRAIN)])
    return out


def narrow(x, out):
    """out = x, rounded. x: float32, any strides; out: bfloat16, C-contiguous, of x's shape."""
    a, y = _flat(x, np.float32, "x"), _flat(out, np.uint16, "out", written=True)
    same_shape(x, out)
    parallel_for(_narrow, [(a[cut], y[cut]) for cut in ranges(y.size, GRAIN)])
    return out


def sum_parts(parts, out, *, factor=1.0):
    """out[n] = factor * (parts[0, n] + parts[1, n] + ...), summed in float32 in this order, then rounded once.

    parts: bfloat16 [P, N], C-contiguous; out: bfloat16 [N], which may lie in other memory only."""
    if parts.ndim != 2 or out.shape != parts.shape[1:]:
        raise ValueError(f"the sum of parts {parts.shape} does not fit {out.shape}")
    a, y = _flat(parts, np.uint16, "parts").reshape(parts.shape), _flat(out, np.uint16, "out", written=True)
    parallel_for(_sum_parts, [(a, cut.start, y[cut], np.float32(factor)) for cut in ranges(y.size, GRAIN)])
    return out


def warm():
    """Compiles or loads every kernel of this file."""
    numbers, halves = np.zeros(2, np.float32), np.zeros(2, np.uint16)
    _widen(halves, numbers)
    _narrow(numbers, halves)
    _sum_parts(halves[None], 0, halves.copy(), np.float32(1))


def _flat(x, kind, name, *, written=False):
    if not (is_bfloat16(x.dtype) if kind is np.uint16 else x.dtype == kind):
        raise ValueError(f"{name} is {x.dtype}; valid: {'bfloat16' if kind is np.uint16 else 'float32'}")
    if not x.flags.carray:
        if written:
            raise ValueError(f"the result array of shape {x.shape} is not C-contiguous and writable")
        x = np.array(x, order="C")
    return x.reshape(-1).view(kind)


@intrinsic
def widened(context, half):
    """The float32 of a bfloat16's bits; for the loops of kernels."""
    def generate(ctx, builder, signature, arguments):
        word = builder.zext(arguments[0], ir.IntType(32))
        return builder.bitcast(builder.shl(word, ir.Constant(ir.IntType(32), 16)), ir.FloatType())
    return types.float32(types.uint16), generate


@intrinsic
def rounded(context, number):
    """The bits of the bfloat16 nearest to a float32; for the loops of kernels."""
    def generate(ctx, builder, signature, arguments):
        def word(value):
            return ir.Constant(ir.IntType(32), value)
        # Half of the last place that stays, less one if that place is even, carries into it just when it must.
        whole = builder.bitcast(arguments[0], ir.IntType(32))
        upper = builder.lshr(whole, word(16))
        half = builder.add(word(0x7FFF), builder.and_(upper, word(1)))
        nearest = builder.lshr(builder.add(whole, half), word(16))
        size = builder.and_(whole, word(0x7FFFFFFF))
        is_nan = builder.icmp_unsigned(">", size, word(0x7F800000))
        quiet = builder.or_(upper, word(0x40))
        return builder.trunc(builder.select(is_nan, quiet, nearest), ir.IntType(16))
    return types.uint16(types.float32), generate


@jit
def _widen(x, out):
    for i in range(out.size):
        out[i] = widened(x[i])


@jit
def _narrow(x, out):
    for i in range(out.size):
        out[i] = rounded(x[i])


@jit
def _sum_parts(parts, first, out, factor):
    total = np.empty(BLOCK, np.float32)
    for start in range(0, out.size, BLOCK):
        count = min(BLOCK, out.size - start)
        total[:] = 0
        for p in range(parts.shape[0]):
            row = parts[p, first + start:first + start + count]
            for i in range(row.size):
                total[i] += widened(row[i])
        y = out[start:start + count]
        for i in range(y.size):
            y[i] = rounded(total[i] * factor)
