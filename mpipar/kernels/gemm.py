"""Matrix product: out (+)= a @ b (+ bias), the arithmetic that everything else waits for.

Follows Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008): both operands are
packed block by block into panels, and a register kernel multiplies panels. `gemm_plain.py` has the steps that
lead here.
"""

import threading

import numpy as np
from numba import types

from .gemm_blocked import GAP, GROUP, blocked_product
from .host import host
from .settings import settings
from .threads import parallel_for
from .vector import TILE_ROWS

THIN_ROWS = 3 * TILE_ROWS  # up to here packing b costs more than it saves
# Rows of b that are followed side by side where b is read in place: from memory no more than the hardware
# follows by itself, from a near cache more, because each block of k reads and writes out once.
FEW_ROWS, MORE_ROWS = 32, 256
SMALL = 1 << 18  # multiplications below which a second thread costs more than it brings


def gemm(a, b, out, *, accumulate=False, bias=None):
    """out[m, n] = a[m, k] @ b[k, n] (+ bias[n]), added to out if `accumulate`; returns out.

    All float32 or all float64. a, b: any strides (transposed and sliced views are read where they lie). out:
    unit stride along its rows, and no memory shared with a or b. Any m, n, k >= 0: with k = 0 the product is
    zeros. The bits of the result do not depend on the number of threads. ValueError where shapes, dtypes or
    strides do not fit.
    """
    if settings.gemm == "blas":
        _check(a, b, out, bias)
        return _blas(a, b, out, accumulate, bias)
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
        return _empty_sum(out, accumulate, bias)
    thin = 0  # depth of blocks along k where b is read in place
    if m <= THIN_ROWS and b.strides[1] == dtype.itemsize:
        thin = FEW_ROWS if k * n > plan.far else MORE_ROWS
    if bias is None:
        bias = plan.no_bias
    if settings.threads == 1 or m * k * n < SMALL:
        plan.run(a, b, out, bias, accumulate, thin)
    else:
        parallel_for(plan.run, _split(a, b, out, bias, accumulate, thin, settings.threads))
    return out


def warm(dtype):
    """Compiles (or loads) everything that `gemm` needs for a dtype."""
    a = np.zeros((1, 1), dtype)
    _plan(np.dtype(dtype)).run(a, a, np.zeros((1, 1), dtype), a[0], False, 0)


class _Plan:
    """Block sizes, compiled code and memory for packed panels (one set for each thread) of one dtype."""

    def __init__(self, dtype):
        self.dtype = dtype
        self.zero = dtype.type(0)
        self.no_bias = np.zeros(0, dtype)
        self.size = dtype.itemsize
        self.panel = host().register_tile(dtype)[1]
        # Long sums, so that C is seldom read and written; panels then stream from the second cache.
        self.group = GROUP * self.panel
        self.deepest = max(128, min(1024, host().l2 // (16 * self.panel * self.size)))
        self.elements_a = host().l2 // 4 // self.size
        self.elements_b = max(host().l2, min(8 << 20, host().l3 // 2)) // self.size
        self.far = host().l2 // 2 // self.size  # elements of b from which on it is not in a near cache
        self.local = threading.local()
        element = types.float32 if dtype.itemsize == 4 else types.float64
        operand = types.Array(element, 2, "A", readonly=True)
        word = types.int64
        blocked_product.disable_compile(False)
        blocked_product.compile((element, operand, operand, types.Array(element, 2, "A"),
                                 types.Array(element, 1, "A", readonly=True), types.boolean, types.boolean)
                                + (word,) * 6)
        blocked_product.disable_compile()  # this form takes every layout; no other is made for C or F order

    def run(self, a, b, out, bias, accumulate, thin):
        """One thread's product. thin depends on the whole product, not on the part of it that comes here."""
        key = (a.shape, b.shape[1], thin)
        blocks = getattr(self.local, "blocks", _NOTHING).get(key)
        if blocks is None:
            blocks = self.prepare(key)
        blocked_product(self.zero, a, b, out, bias, accumulate, thin > 0, *blocks)

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


def _split(a, b, out, bias, accumulate, thin, threads):
    """Tasks for `threads` threads: a grid of blocks of out that repeats as little packing as possible."""
    m, n = out.shape
    grids = [(i, threads // i) for i in range(1, threads + 1) if threads % i == 0 and (i == 1 or not thin)]
    over_m, over_n = min(grids, key=lambda grid: (m / grid[0] + n / grid[1], grid))
    rows = [m * i // over_m for i in range(over_m + 1)]
    columns = [n * i // over_n for i in range(over_n + 1)]
    return [(a[r:r2], b[:, c:c2], out[r:r2, c:c2], bias[c:c2], accumulate, thin)
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


def _check(a, b, out, bias):
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
    if out.size and out.shape[1] > 1 and out.strides[1] != out.itemsize:
        raise ValueError(f"gemm: out has strides {out.strides}; "
                         f"valid: {out.itemsize} (unit stride) along its rows")


_NOTHING = {}
_plans = {}
_making = threading.Lock()
