"""The matrix product of bfloat16: operands of 16 bits, sums in float32, results rounded once.

Where the CPU multiplies bfloat16 itself, `gemm_pairs.py` does it. Elsewhere packing turns both operands into panels of
float32, so the register kernel and the order of every sum are those of float32. A result of bfloat16 is made some rows
at a time: their sums lie in float32 in memory of the thread until the last pass over them, which adds or activates and
rounds.
"""

import threading

import numpy as np

from . import gemm_pairs
from .bfloat16 import rounded, widened
from .cache import jit
from .dtypes import bits, is_bfloat16
from .elementwise import column_sum
from .gelu import erf_value
from .gemm_finish import ADD, GELU, NOTHING
from .gemm_kept import kept
from .gemm_plan import SMALL, check_column_sums, flat, plan_of, split
from .host import host
from .pairs import units
from .polynomials import VECTOR_FLAGS
from .settings import settings
from .threads import parallel_for
from .vector import stand_alone
from .wide import wide_vectors

SUMS = 1 << 18  # float32 elements of the sums that are not rounded yet: 1 MiB
LEAST_ROWS = 384  # of them: b is packed again for every such part, which must stay small beside its product


def gemm_bfloat16(a, b, out, accumulate, bias, residual, gelu, column_sums=None):
    """`gemm` for a and b of bfloat16.

    out: bfloat16, with bias, residual and gelu of bfloat16 too, gelu being that of the rounded out; or float32 for sums
    that go on (gradients), with `accumulate` or a bias. ValueError for what does not fit, and where NumPy's BLAS was
    chosen, which has no bfloat16.
    """
    _check(a, b, out, accumulate, bias, residual, gelu)
    m, n = out.shape
    if column_sums is not None:  # in a pass of its own: sums over words of two steps would take as long
        check_column_sums(column_sums, n, np.dtype(np.float32))
        column_sum(np.ascontiguousarray(b), column_sums)
    if not m or not n:
        return out
    operands = bits(a), bits(b), bits(out), _NO_BIAS if bias is None else bits(bias)
    finish = NOTHING, None
    if residual is not None or gelu is not None:
        finish = (ADD, bits(residual)) if gelu is None else (GELU, bits(gelu))
    how = unit()
    run, panels = _on_unit, gemm_pairs.panels
    if how == "convert" or not a.shape[1]:
        how = plan_of(a.dtype)
        run, panels = _whole if out.dtype == np.float32 else _by_parts, how.panels
    packed = panels(operands[1]) if kept.spans and a.shape[1] else 0
    if settings.threads == 1 or m * a.shape[1] * n < SMALL:
        run(how, *operands, accumulate, finish, 0, packed, None)
    else:
        parallel_for(run, [(how, *task) for task in split(*operands, accumulate, finish, 0, settings.threads, packed)])
    return out


def unit():
    """How bfloat16 is multiplied: a unit of this CPU, or "convert". ValueError for a unit that it doesn't have."""
    name = settings.bfloat16
    if name == "auto":
        # AVX512's dot products reach twice the speed of float32 on AMD's CPUs, but half of it on Intel's (measured).
        allowed = (u for u in units() if u != "amx" or settings.gemm != "vector")
        return next((u for u in allowed if u == "amx" or host().is_zen), "convert")
    if name != "convert" and name not in units():
        valid = ", ".join(("auto", *units(), "convert"))
        raise ValueError(f"settings.bfloat16 is {name!r}; valid on this CPU: {valid}")
    return name


def _on_unit(name, a, b, out, bias, accumulate, finish, thin, packed, _):
    gemm_pairs.run(name, a, b, out, bias, accumulate, finish, packed)


def _whole(plan, a, b, out, bias, accumulate, finish, thin, packed, _=None):
    if a.shape[1]:
        plan.run(a, b, out, bias, accumulate, plan.no_finish, thin, packed)
        return
    if not accumulate:
        out[...] = 0
    if bias.size:
        out += (bias.astype(np.uint32) << 16).view(np.float32)


def _by_parts(plan, a, b, out, bias, accumulate, finish, thin, packed, _):
    m, n = out.shape
    height = min(m, max(LEAST_ROWS, SUMS // n))
    sums = _memory(height * n).reshape(height, n)
    what, other = finish
    for r in range(0, m, height):
        here = slice(r, min(r + height, m))
        part = sums[:here.stop - r]
        _whole(plan, a[here], b, part, bias, False, plan.no_finish, thin, packed)
        target, beside = flat(out[here]), out[here] if other is None else other[here]
        _finish(what, part.reshape(-1), n, target, out.strides[0] // 2, flat(beside), beside.strides[0] // 2)


@jit(fastmath=VECTOR_FLAGS)
def _finish(what, sums, columns, out, out_row, other, other_row):
    """NOTHING: out = sums, GELU: then other = GeLU(out), ADD: out = sums + other; sums: [rows * columns]; the others
    flat memory, a row later lies out_row and other_row elements further on."""
    stand_alone(out_row)
    wide_vectors()
    for i in range(sums.size // columns):
        x = sums[i * columns:(i + 1) * columns]
        y, z = out[i * out_row:i * out_row + columns], other[i * other_row:i * other_row + columns]
        if what == GELU:
            for j in range(x.size):
                half = rounded(x[j])
                y[j] = half
                z[j] = rounded(erf_value(widened(half)))
        elif what == ADD:
            for j in range(x.size):
                y[j] = rounded(x[j] + widened(z[j]))
        else:
            for j in range(x.size):
                y[j] = rounded(x[j])


def _memory(size):
    if getattr(_local, "sums", _NONE).size < size:
        _local.sums = np.empty(size, np.float32)
    return _local.sums[:size]


def _check(a, b, out, accumulate, bias, residual, gelu):
    if settings.gemm == "blas":
        raise ValueError("gemm: NumPy's BLAS has no bfloat16; valid: settings.gemm = 'numba'")
    named = {"b": b, "bias": bias, "residual": residual, "gelu": gelu}
    for name, x in named.items():
        if x is not None and not is_bfloat16(x.dtype):
            raise ValueError(f"gemm: a is bfloat16 and {name} is {x.dtype}; valid: bfloat16")
    if not is_bfloat16(out.dtype) and out.dtype != np.float32:
        raise ValueError(f"gemm: a and b are bfloat16 and out is {out.dtype}; valid: bfloat16, float32")
    if is_bfloat16(out.dtype) and accumulate:
        raise ValueError("gemm: sums are kept in float32; valid: accumulate with a float32 out")
    if out.dtype == np.float32 and (residual is not None or gelu is not None):
        raise ValueError("gemm: residual and gelu need a bfloat16 out where a and b are bfloat16")
    if residual is not None and gelu is not None:
        raise ValueError("gemm: residual and gelu together; valid: one of them")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0] or out.shape != (a.shape[0], b.shape[1]):
        raise ValueError(f"gemm: shapes {a.shape} @ {b.shape} -> {out.shape} do not fit; "
                         "valid: (m, k) @ (k, n) -> (m, n)")
    if bias is not None and bias.shape != (out.shape[1],):
        raise ValueError(f"gemm: bias has shape {bias.shape}; valid: ({out.shape[1]},)")
    for name, x in (("out", out), ("residual", residual), ("gelu", gelu)):
        if x is not None and (x.shape != out.shape or not x.flags.writeable
                              or x.size and x.shape[1] > 1 and x.strides[1] != x.itemsize):
            raise ValueError(f"gemm: {name} is {x.dtype} {x.shape} with strides {x.strides}; valid: writable, of out's "
                             f"shape {out.shape}, unit stride along its rows")


_local = threading.local()
_NONE, _NO_BIAS = np.empty(0, np.float32), np.empty(0, np.uint16)
