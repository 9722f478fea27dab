"""Matrix product: out (+)= a @ b (+ bias) (+ residual), the arithmetic that everything else waits for.

Follows Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008): both operands are
packed block by block into panels, and a register kernel multiplies panels. `gemm_plain.py` has the steps that
lead here. Large products of float32 use AMX where the CPU has it (`gemm_pieces.py`), others vectors; for few rows
times a transposed matrix that one is read in place (`gemm_along.py`).
"""

import numpy as np

from . import gemm_along, gemm_pieces
from .dtypes import is_bfloat16
from .elementwise import column_sum
from .gelu import gelu_forward
from .gemm_bfloat16 import gemm_bfloat16
from .gemm_finish import ADD, GELU
from .gemm_kept import kept
from .gemm_plan import SMALL, check_column_sums, plan_of, plans, split
from .host import host
from .settings import settings
from .threads import parallel_for
from .vector import TILE_ROWS

# Up to here packing b costs more than it saves.
THIN_ROWS = (16 if host().streams_from_l2 else 5) * TILE_ROWS
# Narrow vectors read b in more tiles, which costs where few of its lines stay in the nearest cache: from the second one,
# and where its rows are whole pages apart, which share sets of the cache. They do better to pack sooner there.
SOON_ROWS = THIN_ROWS if host().prefetches else 2 * TILE_ROWS
# Up to here, too, where column sums then need a pass of their own. Beyond it the two ways have to give the same bits.
SUMS_ROWS = 5 * TILE_ROWS
FAR_ROWS = 16 if host().streams_from_l2 else THIN_ROWS  # up to here a product waits for a b that is in no near cache
PAGE = 4096
# Rows of b that are followed side by side where b is read in place: from memory no more than the hardware follows by
# itself, from a near cache more (up to `deepest` of the plan), because each block of k reads and writes out once.
FEW_ROWS, MORE_ROWS = (24, 1024) if host().streams_from_l2 else (32, 256) if host().prefetches else (128, 256)


def gemm(a, b, out, *, accumulate=False, bias=None, residual=None, gelu=None, column_sums=None):
    """out[m, n] = a[m, k] @ b[k, n] (+ bias[n]) (+ residual[m, n]), added to out if `accumulate`; returns out.

    gelu: an array [m, n] that receives GeLU(out), erf form, while out is still in the cache; not together with
    residual. Both: unit stride along their rows, no memory shared with out. column_sums: [n], contiguous, out's dtype
    (float32 for bfloat16), gets the sums of b's columns added: where b is what comes back and out a weight's gradient,
    the gradient of the bias.
    All float32 or all float64; or a and b bfloat16 (see `gemm_bfloat16.py`). a, b: any strides (transposed and
    sliced views are read where they lie). out: unit stride along its rows, and no memory shared with a or b. Any
    m, n, k >= 0: with k = 0 the product is zeros. The bits of the result do not depend on the number of threads.
    Numbers from 3.396e38 on and infinities may give NaN for either, see `pieces.py`.
    ValueError where shapes, dtypes or strides do not fit.
    """
    if is_bfloat16(a.dtype):
        return gemm_bfloat16(a, b, out, accumulate, bias, residual, gelu, column_sums)
    if settings.gemm == "blas":
        _check(a, b, out, bias, residual, gelu)
        if column_sums is not None:
            column_sum(np.ascontiguousarray(b), column_sums)
        return _finished(_blas(a, b, out, accumulate, bias), residual, gelu)
    dtype = out.dtype
    plan = plans.get(dtype.char)
    if plan is None or a.ndim != 2 or b.ndim != 2 or a.dtype != dtype or b.dtype != dtype or bias is not None:
        _check(a, b, out, bias)
        plan = plan_of(dtype)
    m, k = a.shape
    n = b.shape[1]
    if out.shape != (m, n) or b.shape[0] != k or out.strides[1] != dtype.itemsize:
        _check(a, b, out, bias)
    if not m or not n or not k:
        if column_sums is not None:
            column_sum(np.ascontiguousarray(b), column_sums)
        return _finished(_empty_sum(out, accumulate, bias), residual, gelu)
    finish = plan.no_finish
    if gelu is not None or residual is not None:
        _check(a, b, out, bias, residual, gelu)
        finish = (ADD, residual) if gelu is None else (GELU, gelu)
    bias = plan.no_bias if bias is None else bias
    thin, side_by_side = 0, b.strides[1] == dtype.itemsize
    if uses_pieces(dtype, m, k, n):
        plan = gemm_pieces
    elif bias is plan.no_bias and finish is plan.no_finish and gemm_along.suits(a, b):
        plan = gemm_along
    elif side_by_side and m <= (THIN_ROWS if column_sums is None else SUMS_ROWS):  # b is read in place, in blocks so deep along k
        is_far = k * n > plan.far
        if m <= SOON_ROWS or is_far and b.strides[0] % PAGE:
            thin = FEW_ROWS if is_far and m <= FAR_ROWS else min(MORE_ROWS, plan.deepest)
    packed = plan.panels(b) if kept.spans and not thin else 0
    if column_sums is not None:
        check_column_sums(column_sums, n, dtype)
        if thin or packed or plan is gemm_along or plan is gemm_pieces and not side_by_side:  # b isn't packed here, or across
            column_sum(np.ascontiguousarray(b), column_sums)
            column_sums = None
    if settings.threads == 1 or m * k * n < SMALL:
        plan.run(a, b, out, bias, accumulate, finish, thin, packed, column_sums)
    else:
        parallel_for(plan.run, split(a, b, out, bias, accumulate, finish, thin, settings.threads, packed,
                                     column_sums))
    return out


def uses_pieces(dtype, m, k, n):
    """Whether a product of this shape is made by `gemm_pieces.py`."""
    return dtype.char == "f" and settings.gemm == "numba" and gemm_pieces.suits(m, k, n)


def warm(dtype):
    """Compiles (or loads) everything that `gemm` needs for a dtype."""
    dtype = np.dtype(dtype)
    if is_bfloat16(dtype):
        a, sums = np.ones((1, 1), dtype), np.zeros((1, 1), np.float32)
        gemm(a, a, sums)
        gemm(a, a, np.zeros((1, 1), dtype), bias=a[0])
        return
    a, plan = np.zeros((1, 1), dtype), plan_of(dtype)
    plan.run(a, a, np.zeros((1, 1), dtype), a[0], False, plan.no_finish, 0)
    gemm_along.warm(dtype)
    if dtype.char == "f" and gemm_pieces.has_amx():
        gemm_pieces.run(a, a, np.zeros((1, 1), dtype), a[0], False, plan.no_finish)


def _empty_sum(out, accumulate, bias):
    if not accumulate:
        out.fill(0)
    if bias is not None:
        out += bias
    return out


def _blas(a, b, out, accumulate, bias):
    if accumulate:
        out += a @ b
    else:
        np.matmul(a, b, out=out)
    if bias is not None:
        out += bias
    return out


def _finished(out, residual, gelu):
    """What the blocked product does on the way, in passes of their own."""
    if residual is not None:
        out += residual
    if gelu is not None:
        gelu[...] = gelu_forward(np.ascontiguousarray(out), np.empty(out.shape, out.dtype))
    return out


def _check(a, b, out, bias, residual=None, gelu=None):
    if out.dtype.char not in "fd":
        raise ValueError(f"gemm: dtype is {out.dtype}; valid values: float32, float64")
    arrays = {"a": a, "b": b, "out": out} | ({} if bias is None else {"bias": bias})
    for name, x in arrays.items():
        if x.dtype != out.dtype:
            raise ValueError(f"gemm: {name} is {x.dtype} and out is {out.dtype}; valid: one dtype for all")
        if x.ndim != (1 if name == "bias" else 2):
            raise ValueError(f"gemm: {name} has {x.ndim} dimensions; valid: 2 for a, b and out, 1 for bias")
    if a.shape[1] != b.shape[0] or out.shape != (a.shape[0], b.shape[1]):
        raise ValueError(f"gemm: shapes {a.shape} @ {b.shape} -> {out.shape} do not fit; "
                         "valid: (m, k) @ (k, n) -> (m, n)")
    if bias is not None and bias.shape != (out.shape[1],):
        raise ValueError(f"gemm: bias has shape {bias.shape}; valid: ({out.shape[1]},)")
    if residual is not None and gelu is not None:
        raise ValueError("gemm: residual and gelu together; valid: one of them")
    for name, x in (("residual", residual), ("gelu", gelu)):
        if x is not None and (x.dtype != out.dtype or x.shape != out.shape
                              or x.size and (x.strides[1] != x.itemsize or not x.flags.writeable)):
            raise ValueError(f"gemm: {name} is {x.dtype} {x.shape} with strides {x.strides}; valid: writable, of out's "
                             f"shape {out.shape} and dtype, unit stride along its rows")
    if out.size and out.shape[1] > 1 and out.strides[1] != out.itemsize:
        raise ValueError(f"gemm: out has strides {out.strides}; "
                         f"valid: {out.itemsize} (unit stride) along its rows")

