"""Matrix product: out (+)= a @ b (+ bias) (+ residual), the arithmetic that everything else waits for.

Follows Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008): both operands are
packed block by block into panels, and a register kernel multiplies panels. `gemm_plain.py` has the steps that
lead here.
"""

import threading

import numpy as np
from numba import types

from .gelu import gelu_forward
from .gemm_blocked import GAP, GROUP, blocked_product
from .gemm_finish import ADD, GELU, NOTHING
from .host import host
from .settings import settings
from .threads import parallel_for
from .vector import TILE_ROWS

THIN_ROWS = 3 * TILE_ROWS  # up to here packing b costs more than it saves
# Rows of b that are followed side by side where b is read in place: from memory no more than the hardware
# follows by itself, from a near cache more, because each block of k reads and writes out once.
FEW_ROWS, MORE_ROWS = 32, 256
SMALL = 1 << 25  # multiplications below which a second thread costs more than it brings (measured: 0.6 at half, 1.2 above)


def gemm(a, b, out, *, accumulate=False, bias=None, residual=None, gelu=None):
    """out[m, n] = a[m, k] @ b[k, n] (+ bias[n]) (+ residual[m, n]), added to out if `accumulate`; returns out.

    gelu: an array [m, n] that receives GeLU(out), erf form, while out is still in the cache; not together with
    residual. Both: unit stride along their rows, no memory shared with out.
    All float32 or all float64. a, b: any strides (transposed and sliced views are read where they lie). out:
    unit stride along its rows, and no memory shared with a or b. Any m, n, k >= 0: with k = 0 the product is
    zeros. The bits of the result do not depend on the number of threads. ValueError where shapes, dtypes or
    strides do not fit.
    """
    if settings.gemm == "blas":
        _check(a, b, out, bias, residual, gelu)
        return _finished(_blas(a, b, out, accumulate, bias), residual, gelu)
    dtype = out.dtype
    plan = _plans.get(dtype.char)
    if plan is None or a.ndim != 2 or b.ndim != 2 or a.dtype != dtype or b.dtype != dtype or bias is not None:
        _check(a, b, out, bias)
        plan = _plan(dtype)
    m, k = a.shape
    n = b.shape[1]
    if out.shape != (m, n) or b.shape[0] != k or out.strides[1] != dtype.itemsize:
        _check(a, b, out, bias)
    if not m or not n or not k:
        return _finished(_empty_sum(out, accumulate, bias), residual, gelu)
    finish = plan.no_finish
    if gelu is not None or residual is not None:
        _check(a, b, out, bias, residual, gelu)
        finish = (ADD, residual) if gelu is None else (GELU, gelu)
    thin = 0  # depth of blocks along k where b is read in place
    if m <= THIN_ROWS and b.strides[1] == dtype.itemsize:
        thin = FEW_ROWS if k * n > plan.far else MORE_ROWS
    if bias is None:
        bias = plan.no_bias
    if settings.threads == 1 or m * k * n < SMALL:
        plan.run(a, b, out, bias, accumulate, finish, thin)
    else:
        parallel_for(plan.run, _split(a, b, out, bias, accumulate, finish, thin, settings.threads))
    return out


def warm(dtype):
    """Compiles (or loads) everything that `gemm` needs for a dtype."""
    a = np.zeros((1, 1), dtype)
    plan = _plan(np.dtype(dtype))
    plan.run(a, a, np.zeros((1, 1), dtype), a[0], False, plan.no_finish, 0)


class _Plan:
    """Block sizes, compiled code and memory for packed panels (one set for each thread) of one dtype."""

    def __init__(self, dtype):
        self.dtype = dtype
        self.zero = dtype.type(0)
        self.no_bias = np.zeros(0, dtype)
        self.no_finish = NOTHING, None
        self.size = dtype.itemsize
        self.panel = host().register_tile(dtype)[1]
        # Long sums, so that C is seldom read and written; panels then stream from the second cache.
        self.group = GROUP * self.panel
        self.deepest = max(128, min(1024, host().l2 // (16 * self.panel * self.size)))
        self.elements_a = min(host().l2 // 2, max(host().l2 // 4, 256 << 10)) // self.size
        self.elements_b = max(host().l2, min(8 << 20, host().l3 // 2)) // self.size
        self.far = 2 * host().l2 // self.size  # elements of b beyond which it is in no near cache
        self.local = threading.local()
        element = types.float32 if dtype.itemsize == 4 else types.float64
        operand = types.Array(element, 2, "A", readonly=True)
        word = types.int64
        blocked_product.disable_compile(False)
        blocked_product.compile((element, operand, operand, types.Array(element, 2, "A"),
                                 types.Array(element, 1, "A", readonly=True), types.boolean)
                                + (word, types.Array(element, 1, "C"), word) + (types.Array(element, 1, "C"), word)
                                + (types.boolean,) + (word,) * 6)
        blocked_product.disable_compile()  # this form takes every layout; no other is made for C or F order

    def run(self, a, b, out, bias, accumulate, finish, thin):
        """One thread's product. thin depends on the whole product, not on the part of it that comes here."""
        key = (a.shape, b.shape[1], thin)
        blocks = getattr(self.local, "blocks", _NOTHING).get(key)
        if blocks is None:
            blocks = self.prepare(key)
        what, other = finish
        if what == NOTHING:
            flats = self.no_bias, 0, self.no_bias, 0
        else:
            flats = _flat(out), out.strides[0] // self.size, _flat(other), other.strides[0] // self.size
        blocked_product(self.zero, a, b, out, bias, accumulate, what, *flats, thin > 0, *blocks)

    def prepare(self, key):
        """Block sizes and this thread's memory for one shape; both are kept."""
        (m, k), n, thin = key
        kc = -(-k // -(-k // (thin or self.deepest)))
        mc = max(TILE_ROWS, self.elements_a // kc)
        mc = -(-m // -(-m // mc))
        nc = max(self.group, self.elements_b // kc // self.group * self.group)
        kept = self.group if mc >= m else min(nc, n + self.group)
        gaps = (mc // TILE_ROWS + 2) * GAP // self.size
        own = self.local
        if not hasattr(own, "blocks") or len(own.blocks) > 1000:
            own.blocks = {}
        addresses = self.memory((k if thin else kc) * mc + gaps, kc * kept, n + self.group)
        own.blocks[key] = (kc, mc, nc, *addresses)
        return own.blocks[key]

    def memory(self, *elements):
        """Addresses of this thread's panels of A, panels of B and bias; replaced when too small."""
        own = self.local
        if not hasattr(own, "sizes"):
            own.sizes, own.arrays, own.addresses = [-1] * 3, [None] * 3, [0] * 3
        for i, need in enumerate(elements):
            if need > own.sizes[i]:
                own.blocks = {}  # they hold the old address
                own.arrays[i] = None
                own.arrays[i] = np.empty(need + 2 * self.group + 64, self.dtype)
                own.sizes[i] = need
                own.addresses[i] = -(-own.arrays[i].ctypes.data // 64) * 64
        return own.addresses


def _plan(dtype):
    with _making:
        plan = _plans.get(dtype.char)
        if plan is None:
            plan = _plans[dtype.char] = _Plan(dtype)
    return plan


def _flat(x):
    """The memory of a 2-D array of unit stride along its rows, gaps between the rows included, as one line."""
    if x.flags.c_contiguous:
        return x.reshape(-1)
    length = (x.shape[0] - 1) * (x.strides[0] // x.itemsize) + x.shape[1]
    return np.lib.stride_tricks.as_strided(x, (length,), (x.itemsize,))


def _split(a, b, out, bias, accumulate, finish, thin, threads):
    """Tasks for `threads` threads: a grid of blocks of out that repeats as little packing as possible."""
    m, n = out.shape
    grids = [(i, threads // i) for i in range(1, threads + 1) if threads % i == 0 and (i == 1 or not thin)]
    over_m, over_n = min(grids, key=lambda grid: (m / grid[0] + n / grid[1], grid))
    rows = [m * i // over_m for i in range(over_m + 1)]
    columns = [n * i // over_n for i in range(over_n + 1)]
    what, other = finish
    return [(a[r:r2], b[:, c:c2], out[r:r2, c:c2], bias[c:c2], accumulate,
             (what, None if other is None else other[r:r2, c:c2]), thin)
            for r, r2 in zip(rows, rows[1:]) for c, c2 in zip(columns, columns[1:]) if r < r2 and c < c2]


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


_NOTHING = {}
_plans = {}
_making = threading.Lock()
