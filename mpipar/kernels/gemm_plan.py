"""What the matrix product keeps for each type of operands: block sizes, compiled code, memory of each thread."""

import threading

import numpy as np
from numba import types

from .cache import compile_only
from .dtypes import is_bfloat16
from .gemm_blocked import GAP, GROUP, blocked_product, pack_whole
from .gemm_finish import NOTHING
from .gemm_kept import kept
from .host import host
from .vector import TILE_ROWS

# Multiplications below which a second thread costs more than it brings (measured: 0.6 at half, 1.2 above).
SMALL = 1 << 25
TASK, MOST_TASKS = 1 << 27, 4  # multiplications of a task where a thread has several, and how many


class Plan:
    """Block sizes, compiled code and memory for packed panels (one set for each thread) of operands of one dtype.

    Operands of bfloat16 come as uint16; their panels, sums and results are float32.
    """

    def __init__(self, dtype):
        is_narrow = is_bfloat16(dtype)
        self.dtype = dtype = np.dtype(np.float32) if is_narrow else dtype
        self.zero = dtype.type(0)
        self.no_bias = np.zeros(0, np.uint16 if is_narrow else dtype)
        self.no_other = np.zeros(0, dtype)
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
        stored = types.uint16 if is_narrow else element
        operand = types.Array(stored, 2, "A", readonly=True)
        word = types.int64
        line = types.Array(element, 1, "C")
        compile_only(pack_whole, stored, operand, word, word)
        compile_only(blocked_product, element, operand, operand, types.Array(element, 2, "A"),
                     types.Array(stored, 1, "A", readonly=True), types.boolean, word, line, word, line, word,
                     types.boolean, word, line, *[word] * 6)

    def run(self, a, b, out, bias, accumulate, finish, thin, packed=0, column_sums=None):
        """One thread's product. thin depends on the whole product, not on the part of it that comes here. packed: of b,
        see `panels`. column_sums: see `blocked_product`."""
        if column_sums is None:
            column_sums = self.no_other
        key = (a.shape, b.shape[1], thin, packed > 0)
        blocks = getattr(self.local, "blocks", _NONE).get(key)
        if blocks is None:
            blocks = self.prepare(key)
        what, other = finish
        if what == NOTHING:
            flats = self.no_other, 0, self.no_other, 0
        else:
            flats = flat(out), out.strides[0] // self.size, flat(other), other.strides[0] // self.size
        blocked_product(self.zero, a, b, out, bias, accumulate, what, *flats, thin > 0, packed, column_sums,
                        *blocks)

    def prepare(self, key):
        """Block sizes and this thread's memory for one shape; both are kept."""
        (m, k), n, thin, is_packed = key
        kc = self.depth(k, thin)
        mc = m if thin else max(TILE_ROWS, self.elements_a // kc)
        mc = -(-m // -(-m // mc))
        nc = n if is_packed else max(self.group, self.elements_b // kc // self.group * self.group)
        held = 0 if is_packed else self.group if mc >= m else min(nc, n + self.group)
        gaps = (mc // TILE_ROWS + 2) * GAP // self.size
        own = self.local
        if not hasattr(own, "blocks") or len(own.blocks) > 1000:
            own.blocks = {}
        addresses = self.memory((k if thin else kc) * mc + gaps, kc * held, n + self.group)
        own.blocks[key] = (kc, mc, nc, *addresses)
        return own.blocks[key]

    def depth(self, k, thin=0):
        """Block size along k."""
        return -(-k // -(-k // (thin or self.deepest)))

    def panels(self, b):
        """Address of all panels of b, if it is one that doesn't change for now; else 0."""
        k, n = b.shape
        size = k * -(-n // self.panel) * self.panel + 2 * self.group  # packing writes up to a vector beyond
        return kept.panels(b, size, self.dtype, self.pack)

    def pack(self, b, target):
        pack_whole(b.dtype.type(0), b, self.depth(b.shape[0]), target)

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


def plan_of(dtype):
    """The plan of a dtype, made when first asked for."""
    with _making:
        plan = plans.get(dtype.char)
        if plan is None:
            plan = plans[dtype.char] = Plan(dtype)
    return plan


def flat(x):
    """The memory of a 2-D array of unit stride along its rows, gaps between the rows included, as one line."""
    if x.flags.c_contiguous:
        return x.reshape(-1)
    length = (x.shape[0] - 1) * (x.strides[0] // x.itemsize) + x.shape[1]
    return np.lib.stride_tricks.as_strided(x, (length,), (x.itemsize,))


def dense(x):
    """x with unit stride along a side: as it is, or a copy."""
    return x if x.itemsize in x.strides or x.size == 0 else np.ascontiguousarray(x)


def split(a, b, out, bias, accumulate, finish, thin, threads, packed=0, column_sums=None):
    """Tasks for `threads` threads: a grid of blocks of out that repeats as little packing as possible. With b packed
    already, rows only. Large products make several tasks a thread, so that a slower core has fewer of them."""
    m, n = out.shape
    parts = threads * max(1, min(MOST_TASKS, m * a.shape[1] * n // (threads * TASK)))
    grids = [(i, parts // i) for i in range(1, parts + 1) if parts % i == 0 and (i == 1 or not thin)]
    over_m, over_n = (parts, 1) if packed else min(grids, key=lambda grid: (m / grid[0] + n / grid[1], grid))
    rows, columns = _cuts(m, over_m), _cuts(n, over_n)
    what, other = finish
    return [(a[r:r2], b[:, c:c2], out[r:r2, c:c2], bias[c:c2], accumulate,
             (what, None if other is None else other[r:r2, c:c2]), thin, packed,
             None if column_sums is None or r else column_sums[c:c2])
            for r, r2 in zip(rows, rows[1:]) for c, c2 in zip(columns, columns[1:]) if r < r2 and c < c2]


def _cuts(length, parts):
    """Where to cut a length into nearly equal parts; long ones at multiples of 32, for whole panels."""
    grain = 32 if length >= 128 * parts else 1
    return [length * i // parts // grain * grain for i in range(parts)] + [length]


def check_column_sums(column_sums, n, dtype):
    """ValueError if it is not [n], contiguous, of the type of the sums."""
    if column_sums.shape != (n,) or column_sums.dtype != dtype or not column_sums.flags.carray:
        raise ValueError(f"gemm: column_sums is {column_sums.dtype} {column_sums.shape}; valid: {dtype} ({n},), "
                         "contiguous and writable")


plans = {}  # by the letter of the dtype
_NONE = {}
_making = threading.Lock()
