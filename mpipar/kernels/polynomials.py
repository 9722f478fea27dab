"""exp and the normal distribution for kernels: float32 by polynomials that LLVM can vectorise, float64 by
libm.

The library's erf and exp are scalar calls, fifteen times slower than the loop around them. In float32 the
functions below are branch-free: range reduction and a fitted polynomial. float64 is there for proofs, and
takes the library's. Kernels that use them are compiled with `VECTOR_FLAGS`: sums may be contracted into fused
multiply-adds, never re-associated (that would undo the range reduction), and NaN stays NaN.
"""
import functools
import math

import numba
import numpy as np
from numba import types
from numba.extending import overload

# Dictionaries rather than sets: their text, by which compiled code is found again, is the same in every
# process.
VECTOR_FLAGS = {"contract": True, "nsz": True, "arcp": True}
SUM_FLAGS = {"contract": True, "nsz": True, "reassoc": True}


def inlined(function=None, *, fastmath=False):
    """Compiles a helper into its callers before their loops are made vectors; it has no code of its own to
    keep."""
    if function is None:
        return functools.partial(inlined, fastmath=fastmath)
    return numba.njit(forceinline=True, nogil=True, error_model="numpy", fastmath=fastmath)(function)


f32 = np.float32


@inlined(fastmath=VECTOR_FLAGS)
def exp_float32(x):
    """e^x, relative error below 1e-7 between -87.3 and 88.3, flushed to 0 below and held at e^88.3 above."""
    clipped = f32(-87.3) if x < f32(-87.3) else x
    clipped = f32(88.3) if clipped > f32(88.3) else clipped
    # x = k ln 2 + r with |r| <= ln(2) / 2; ln 2 is split so that k * its first part is exact
    k = np.floor(clipped * f32(1.44269504) + f32(0.5))
    r = clipped - k * f32(0.693359375)
    r = r - k * f32(-2.12194440e-4)
    # (e^r - 1 - r) / r^2, fitted on the interval: relative error of e^r 3e-9
    p = f32(0.0013814613)
    p = p * r + f32(0.00836870984)
    p = p * r + f32(0.0416683874)
    p = p * r + f32(0.166665207)
    p = p * r + f32(0.499999935)
    p = p * (r * r) + r + f32(1)
    # 2^k, -126 <= k <= 127, by writing the bits of the exponent
    power = np.int32((np.int32(k) + np.int32(127)) << np.int32(23)).view(np.float32)
    return f32(0) if x < f32(-87.3) else p * power


@inlined(fastmath=VECTOR_FLAGS)
def normal_float32(x):
    """(Phi(x), e^(-x^2/2)), Phi the normal distribution function: absolute error below 2.4e-7."""
    # Phi(-|x|) = e^(-x^2/2) t P(t), t = 1 / (1 + c |x|): the form of Abramowitz and Stegun 7.1.26, with two
    # more terms fitted anew (error 2e-9), so the tail has small relative error too
    density = exp_float32(f32(-0.5) * x * x)
    t = f32(1) / (f32(1) + f32(0.282842712) * abs(x))
    p = f32(0.0367720972)
    p = p * t + f32(-0.194625466)
    p = p * t + f32(0.334961461)
    p = p * t + f32(-0.176772838)
    p = p * t + f32(0.196220879)
    p = p * t + f32(0.0735626642)
    p = p * t + f32(0.117317502)
    p = p * t + f32(0.112563697)
    tail = p * t * density
    return (tail if x < f32(0) else f32(1) - tail), density


@inlined
def _normal_float64(x):
    return 0.5 * math.erfc(x * -0.7071067811865476), math.exp(-0.5 * x * x)


def exp(x):
    """e^x in the precision of x, inside kernels; large results are held at a finite number, as 1 / (1 + e^x)
    needs."""
    return math.exp(min(x, 709.0))


def normal(x):
    """(Phi(x), e^(-x^2/2)) in the precision of x, inside kernels."""
    return _normal_float64.py_func(x)


@overload(exp, jit_options={"forceinline": True})
def _exp(x):
    if x == types.float32:
        return lambda x: exp_float32(x)
    return lambda x: math.exp(709.0 if x > 709.0 else x)


@overload(normal, jit_options={"forceinline": True})
def _normal(x):
    if x == types.float32:
        return lambda x: normal_float32(x)
    return lambda x: _normal_float64(x)
