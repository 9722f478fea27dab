"""Collectives of arrays that lie anywhere, by way of memory that the ranks of a node share: each rank writes into a row of
its own, says so, and reads the rows of the others.

A row has a head and two slots. The head holds the number of the rank's last turn and, for each slot, a mark that says
what the turn is: all ranks take their turns alike, so a mark that differs is a call that does not match. A turn writes
the slot of its parity. No slot is overwritten while another rank still reads it: turn n + 2 begins after every rank has
come to turn n + 1, and so has left turn n.
"""

import platform

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .cache import compile_only, jit
from .kinds import BROADCAST, MAX, MAX_PARTS, MIN, SUM, SUM_PARTS, TRANSPOSE
from .vector import address, stand_alone

HEAD, SLOT = 128, 32 << 10  # bytes of a row's head and of each of its two slots
MARKS = 64  # bytes from the row's beginning: on another cache line than the number that all ranks look at
ROW = HEAD + 2 * SLOT
START = 1  # an odd state has not been written yet; each piece of the array has two
LOOKS = 1000  # at the others' numbers before the caller is asked to look elsewhere: some 20 microseconds

_PAUSES = platform.machine().lower() in ("x86_64", "amd64", "i686")


@intrinsic
def _seen(context, place):
    """The number at an address; what its writer wrote before it is seen after it."""
    def generate(ctx, builder, signature, arguments):
        return builder.load_atomic(builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()), "acquire", 8)
    return types.int64(types.int64), generate


@intrinsic
def _say(context, place, number):
    """Writes a number to an address; who sees it sees all that was written before."""
    def generate(ctx, builder, signature, arguments):
        builder.store_atomic(arguments[1], builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()), "release", 8)
        return ctx.get_dummy_value()
    return types.void(types.int64, types.int64), generate


@intrinsic
def _pause(context):
    """Leaves a core's other thread more of the core for a moment."""
    def generate(ctx, builder, signature, arguments):
        if _PAUSES:
            pause = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, pause, "llvm.x86.sse2.pause"), [])
        return ctx.get_dummy_value()
    return types.void(), generate


@jit
def exchange(x, out, rows, me, kind, root, state):
    """A part of a collective call: the state to go on with, 0 where the call is done.

    x: this rank's array, out: its result, both 1-D and contiguous. rows: [ranks, ROW bytes], the memory that all share, of
    x's dtype. me: this rank's number. kind: see kinds.py; root: the rank that broadcasts, else 0. state: START, then what came
    back. Where a rank has not come after LOOKS looks it returns, so that the caller can see to other things; -1 - r where
    rank r makes another call. Sums are in the order of the ranks.
    """
    ranks, size = rows.shape[0], x.itemsize
    shared, head, slot = address(rows), HEAD // size, SLOT // size
    stride = rows.strides[0]
    mine = shared + me * stride
    parts = _parts(kind, ranks)
    part, step = x.size // parts, slot // parts
    last = START + 2 * -(-part // step)
    mark = x.size << 24 | root << 8 | kind << 4 | size
    while state < last:
        first = (state - START >> 1) * step
        count = min(step, part - first)
        turn = _seen(mine) + (state & 1)
        place = head + (turn & 1) * slot
        if state & 1:
            if kind < BROADCAST or kind == BROADCAST and me == root:
                for p in range(parts):
                    _copy(x[p * part + first:], rows[me, place + p * step:place + p * step + count])
            _say(mine + MARKS + 8 * (turn & 1), mark)
            _say(mine, turn)
            state += 1
        for r in range(ranks):
            looks = 0
            while _seen(shared + r * stride) < turn:
                looks += 1
                if looks > LOOKS:
                    return state
                _pause()
        for r in range(ranks):
            if _seen(shared + r * stride + MARKS + 8 * (turn & 1)) != mark:
                return -1 - r
        if kind <= MAX_PARTS:
            own = place if kind <= MAX else place + me * step
            result = out[first:first + count]
            _reduce(kind % SUM_PARTS, rows[0, own:own + count], rows[1, own:own + count], result)
            for r in range(2, ranks):
                _reduce(kind % SUM_PARTS, result, rows[r, own:own + count], result)
        elif kind < BROADCAST:
            own = place + me * step if kind == TRANSPOSE else place
            for r in range(ranks):
                _copy(rows[r, own:own + count], out[r * part + first:r * part + first + count])
        elif kind == BROADCAST and me != root:
            _copy(rows[root, place:place + count], out[first:first + count])
        state += 1
    return 0


def warm(dtype):
    """Compiles or loads the kernel of this file for a dtype."""
    dtype = np.dtype(dtype)
    if dtype in _ready:
        return
    element = types.float32 if dtype.itemsize == 4 else types.float64
    line, word = types.Array(element, 1, "C"), types.int64
    compile_only(exchange, line, line, types.Array(element, 2, "C"), *[word] * 4)
    _ready.add(dtype)


@jit(inline=True)
def _parts(kind, ranks):
    # Into how many an array is cut, of which each rank gets one.
    return ranks if SUM_PARTS <= kind <= MAX_PARTS or kind == TRANSPOSE else 1


@jit
def _copy(source, target):
    stand_alone(0)
    for i in range(target.size):
        target[i] = source[i]


@jit
def _reduce(kind, a, b, out):
    # A loop for each kind: with the choice inside, none of them runs in vectors.
    stand_alone(0)
    if kind == SUM:
        for i in range(out.size):
            out[i] = a[i] + b[i]
    elif kind == MIN:
        for i in range(out.size):
            out[i] = b[i] if b[i] < a[i] or b[i] != b[i] else a[i]
    else:
        for i in range(out.size):
            out[i] = b[i] if b[i] > a[i] or b[i] != b[i] else a[i]


_ready = set()
