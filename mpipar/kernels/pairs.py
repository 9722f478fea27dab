"""Register kernels of CPUs that multiply bfloat16 themselves: two neighbours along k in one word of 32 bits.

Two units have such instructions, and both take the same panels: Intel's AMX, registers of 16 lines of 64 bytes and
blocks of 16 x 32 times 32 x 16 in one instruction (Intel, "Architecture Instruction Set Extensions Programming
Reference", chapter 3), and AVX512-BF16, 16 words a vector. Both multiply without rounding and sum in float32.

Panels are cut into blocks of BLOCK along k, zeros where k ends. A block of a panel of A: [32 lines][16 words], one of
B: [16 words][32 columns], word p holding k = 2p in its lower half and 2p + 1 in its upper. As in `vector.py` all is
addresses (integers), steps in bytes and counts, unchecked.
"""

import ctypes
import functools
import platform
import sys

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .cache import jit
from .host import host
from .instructions import Code
from .vector import stand_alone

BLOCK = 32  # lines of a panel, columns of a panel, and steps of k of a block
BLOCK_BYTES = BLOCK * BLOCK * 2
SIDE = 16  # words that are packed at a time, in both directions
AMX, AVX512 = 1, 2  # the units, as compiled code tells them apart
GROUP_ROWS = 8  # of the tile that AVX512 keeps in registers, 2 vectors wide: 16 sums hide the latency of an addition


@functools.lru_cache(maxsize=None)
def units() -> tuple[str, ...]:
    """Which units this process can use, the fastest first."""
    features = host().features
    if not {"avx512f", "avx512bw", "avx512vl"} <= features:
        return ()
    found = ("amx",) if {"amx-tile", "amx-bf16"} <= features and _allowed() else ()
    return found + (("avx512",) if "avx512bf16" in features else ())


def _allowed():
    """Asks Linux for the use of AMX's registers, which processes don't have from the start; threads made later and
    earlier have it then too."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None, use_errno=True).syscall(arch_prctl, request_permission, tile_data) == 0


def knows_amx():
    """Whether code for this CPU can contain AMX's instructions: elsewhere LLVM ends the process at the first one."""
    return "amx-bf16" in host().features


def tile_shapes():
    """The 64 bytes that `begin` reads: eight registers of 16 lines of 64 bytes."""
    return bytes([1] + [0] * 15 + [64, 0] * 8 + [0] * 16 + [16] * 8 + [0] * 8)


@intrinsic
def begin(context, unit, shapes):
    """To be called by each thread before `square`; shapes: address of `tile_shapes()`."""
    def generate(ctx, builder, signature, arguments):
        code = Pairs(builder)
        if knows_amx():
            with builder.if_then(builder.icmp_signed("==", arguments[0], code.integer(AMX))):
                code.call("llvm.x86.ldtilecfg", [code.pointer(arguments[1], ir.IntType(8))])
        return ctx.get_dummy_value()
    return types.void(types.int64, types.int64), generate


@intrinsic
def end(context, unit):
    """To be called after the last `square`: registers in use make each switch of threads longer."""
    def generate(ctx, builder, signature, arguments):
        code = Pairs(builder)
        if knows_amx():
            with builder.if_then(builder.icmp_signed("==", arguments[0], code.integer(AMX))):
                code.call("llvm.x86.tilerelease", [])
        return ctx.get_dummy_value()
    return types.void(types.int64), generate


@jit
def square(unit, a, b, blocks, c, c_step):
    """c[32, 32] = a panel of A times one of B, `blocks` (>= 1) blocks long. c: float32, rows c_step bytes apart.

    Each element is summed in the order of k, whatever its place.
    """
    stand_alone(unit)
    _square(unit, a, b, blocks, c, c_step)


@jit
def pack_block(zero, is_a, along_k, source, line_step, k_step, lines, depth, target):
    """Packs a block of `lines` (1 to 32) lines (rows of A, columns of B) and `depth` (1 to 32) steps of k.

    is_a: as a block of A. along_k: whether k_step is 2, an element; else line_step is. Lines beyond are undefined,
    steps of k beyond are zeros. zero: an int64, any.
    """
    stand_alone(zero)
    for half in range(0, lines, SIDE):
        here = min(SIDE, lines - half)
        at = source + half * line_step
        to = target + half * (2 * BLOCK if is_a else 4)
        if is_a:
            if along_k:
                _lines_to_lines(at, line_step, here, depth, to)
            else:
                _steps_to_lines(at, k_step, here, depth, to)
        elif along_k:
            _lines_to_steps(at, line_step, here, depth, to)
        else:
            _steps_to_steps(at, k_step, here, depth, to)


@intrinsic
def ask(context, where, step, count):
    """Asks for `count` cache lines, `step` bytes apart, which will be packed soon."""
    def generate(ctx, builder, signature, arguments):
        code = Pairs(builder)
        where, step, count = arguments
        with cgutils.for_range(builder, count, intp=ir.IntType(64)) as loop:
            code.prefetch(builder.add(where, builder.mul(loop.index, step)), nearness=2)
        return ctx.get_dummy_value()
    return types.void(types.int64, types.int64, types.int64), generate


def _rounder(has_other):
    """A function that rounds a line of BLOCK sums: sums = sums + starts (+ other), rounded, and out = the first
    `columns` of them. sums, starts: float32. other, out: bfloat16, only `columns` of them are touched."""
    @intrinsic
    def round_line(context, sums, starts, other, out, columns):
        def generate(ctx, builder, signature, arguments):
            code = Pairs(builder)
            sums, starts, other, out, columns = arguments

            def each(mask):
                for j in range(BLOCK // SIDE):
                    near, far = code.integer(4 * SIDE * j), code.integer(2 * SIDE * j)
                    place, on = builder.add(sums, near), mask(j)
                    x = builder.fadd(code.load(place), code.load(builder.add(starts, near)))
                    if has_other:
                        x = builder.fadd(x, code.widened(code.load_halves(builder.add(other, far), on)))
                    halves = code.rounded(x)
                    code.store(code.widened(halves), place)
                    code.store_halves(halves, builder.add(out, far), on)

            with builder.if_else(builder.icmp_signed("==", columns, code.integer(BLOCK))) as (then, otherwise):
                with then:
                    each(lambda j: None)
                with otherwise:
                    each(lambda j: code.first(builder.sub(columns, code.integer(SIDE * j)), SIDE))
            return ctx.get_dummy_value()
        i64 = types.int64
        return types.void(i64, i64, i64, i64, i64), generate
    return round_line


round_line, round_line_with = _rounder(False), _rounder(True)


def _packer(read_lines, write_lines):
    """A function that packs 16 lines, read and written line by line or (two at a time) step by step."""
    @intrinsic
    def pack(context, source, step, lines, depth, target):
        def generate(ctx, builder, signature, arguments):
            code = Pairs(builder)
            source, step, lines, depth, target = arguments
            read = code.read_lines if read_lines else code.read_steps
            whole = builder.and_(builder.icmp_signed("==", lines, code.integer(SIDE)),
                                 builder.icmp_signed("==", depth, code.integer(2 * SIDE)))

            def write(words):
                for i, word in enumerate(code.transpose(words) if read_lines != write_lines else words):
                    code.store_words(word, builder.add(target, code.integer(i * (64 if write_lines else 128))))

            with builder.if_else(whole) as (then, otherwise):  # masks would double the time
                with then:
                    write(read(source, step))
                with otherwise:
                    write(read(source, step, lines, depth))
            return ctx.get_dummy_value()
        i64 = types.int64
        return types.void(i64, i64, i64, i64, i64), generate
    return pack


_lines_to_lines, _steps_to_lines = _packer(True, True), _packer(False, True)
_lines_to_steps, _steps_to_steps = _packer(True, False), _packer(False, False)


@intrinsic
def _square(context, unit, a, b, blocks, c, c_step):
    def generate(ctx, builder, signature, arguments):
        code = Pairs(builder)
        unit, *operands = arguments
        with builder.if_else(builder.icmp_signed("==", unit, code.integer(AMX))) as (then, otherwise):
            with then:
                _amx_square(code, *operands)
            with otherwise:
                _avx512_square(code, *operands)
        return ctx.get_dummy_value()
    i64 = types.int64
    return types.void(i64, i64, i64, i64, i64, i64), generate


def _amx_square(code, a, b, blocks, c, c_step):
    """Registers 0 to 3 hold c, 4 and 5 the upper and lower half of a block of A, 6 and 7 the two of B."""
    if not knows_amx():
        return  # never chosen there
    builder = code.builder
    for i in range(4):
        code.call("llvm.x86.tilezero", [code.number(i)])
    with cgutils.for_range(builder, blocks, intp=ir.IntType(64)) as loop:
        at = builder.mul(loop.index, code.integer(BLOCK_BYTES))
        at_a, at_b = builder.add(a, at), builder.add(b, at)
        for i in range(2):
            code.tile("tileloadd64", 4 + i, builder.add(at_a, code.integer(i * BLOCK_BYTES // 2)), code.integer(64))
            code.tile("tileloadd64", 6 + i, builder.add(at_b, code.integer(i * 64)), code.integer(128))
        lines = [builder.add(base, code.integer(BLOCK_BYTES + line)) for base in (at_a, at_b)
                 for line in range(0, BLOCK_BYTES, 64)]  # of the next block: its loads are then short
        for i in range(2):
            for j in range(2):
                code.call("llvm.x86.tdpbf16ps", [code.number(2 * i + j), code.number(4 + i), code.number(6 + j)])
                for line in lines[16 * (2 * i + j):][:16]:
                    code.prefetch(line)
    for i in range(2):
        for j in range(2):
            place = builder.add(builder.add(c, builder.mul(c_step, code.integer(SIDE * i))), code.integer(64 * j))
            code.tile("tilestored64", 2 * i + j, place, c_step)


def _avx512_square(code, a, b, blocks, c, c_step):
    if "avx512bf16" not in host().features:
        return
    builder = code.builder
    steps = builder.mul(blocks, code.integer(SIDE))
    for row in range(0, BLOCK, GROUP_ROWS):
        before = builder.block
        loop, after = builder.append_basic_block("words"), builder.append_basic_block("sums")
        start_a = builder.add(a, code.integer(row * 64))
        builder.branch(loop)
        builder.position_at_end(loop)
        step, at_a, at_b = (code.phi(x, before) for x in (code.integer(0), start_a, b))
        sums = [[code.phi(ir.Constant(code.vector, None), before) for _ in range(2)] for _ in range(GROUP_ROWS)]
        columns = [code.load_words(builder.add(at_b, code.integer(64 * j))) for j in range(2)]
        new = []
        for i in range(GROUP_ROWS):
            word = builder.load(code.pointer(builder.add(at_a, code.integer(64 * i)), ir.IntType(32)))
            new.append([code.dot(sums[i][j], code.splat(word), columns[j]) for j in range(2)])
        following = builder.add(step, code.integer(1))
        ends_block = builder.icmp_signed("==", builder.and_(following, code.integer(SIDE - 1)), code.integer(0))
        stride = builder.select(ends_block, code.integer(BLOCK_BYTES - 4 * (SIDE - 1)), code.integer(4))
        step.add_incoming(following, loop)
        at_a.add_incoming(builder.add(at_a, stride), loop)
        at_b.add_incoming(builder.add(at_b, code.integer(128)), loop)
        for i in range(GROUP_ROWS):
            for j in range(2):
                sums[i][j].add_incoming(new[i][j], loop)
        builder.cbranch(builder.icmp_signed("<", following, steps), loop, after)
        builder.position_at_end(after)
        for i in range(GROUP_ROWS):
            place = builder.add(c, builder.mul(c_step, code.integer(row + i)))
            for j in range(2):
                code.store(new[i][j], builder.add(place, code.integer(64 * j)))


class _BFloat(ir.Type):
    """LLVM's 16-bit type, which llvmlite has no class for."""

    def __str__(self):
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, _BFloat)

    def __hash__(self):
        return hash(_BFloat)


class Pairs(Code):
    """Emits the instructions above; a vector is 16 float32 or 16 words."""

    def __init__(self, builder):
        super().__init__(builder, types.float32)
        self.words = ir.VectorType(ir.IntType(32), SIDE)
        self.halves = ir.VectorType(ir.IntType(16), SIDE)

    def number(self, value):
        return ir.Constant(ir.IntType(8), value)

    def tile(self, name, register, where, step):
        self.call(f"llvm.x86.{name}", [self.number(register), self.pointer(where, ir.IntType(8)), step])

    def call(self, name, arguments):
        return self._call(name, ir.VoidType(), arguments)

    def load_words(self, where):
        words = self.builder.load(self.pointer(where, self.words))
        words.align = 4
        return words

    def store_words(self, words, where):
        self.builder.store(words, self.pointer(where, self.words)).align = 4

    def dot(self, sums, x, y):
        """sums + the two products of each word of x and y."""
        kind = ir.VectorType(_BFloat(), 2 * SIDE) if llvm.llvm_version_info[0] >= 16 else self.words
        return self._call("llvm.x86.avx512bf16.dpbf16ps.512", self.vector,
                          [sums, self.builder.bitcast(x, kind), self.builder.bitcast(y, kind)])

    def read_lines(self, source, step, lines=None, depth=None):
        """16 lines of 32 halves that lie side by side, as words. lines, depth: there are fewer of the one or the other;
        the last line is then read again, and zeros where k ends."""
        builder = self.builder
        halves = ir.VectorType(ir.IntType(16), 2 * SIDE)
        if lines is None:
            return [self.load_words(builder.add(source, builder.mul(self.integer(i), step))) for i in range(SIDE)]
        on, last = self.first(depth, 2 * SIDE), builder.sub(lines, self.integer(1))
        found = []
        for i in range(SIDE):
            where = builder.add(source, builder.mul(self.minimum(self.integer(i), last), step))
            found.append(builder.bitcast(self.load_halves(where, on, halves), self.words))
        return found

    def read_steps(self, source, step, lines=None, depth=None):
        """32 steps of k of 16 lines that lie side by side, two in a vector of words. lines, depth: as above."""
        builder = self.builder
        shift = ir.Constant(self.words, [16] * SIDE)
        if lines is not None:
            on, off = self.first(lines, SIDE), ir.Constant(ir.VectorType(ir.IntType(1), SIDE), None)
            last = builder.sub(depth, self.integer(1))

        def read(k):
            if lines is None:
                halves = self.load_halves(builder.add(source, builder.mul(self.integer(k), step)))
            else:
                where = builder.add(source, builder.mul(self.minimum(self.integer(k), last), step))
                inside = builder.icmp_signed("<", self.integer(k), depth)
                halves = self.load_halves(where, builder.select(inside, on, off))
            return builder.zext(halves, self.words)

        return [builder.or_(read(2 * i), builder.shl(read(2 * i + 1), shift)) for i in range(SIDE)]

    def first(self, count, width):
        """Lanes 0 .. count - 1 of `width`; none for a count below 0."""
        kind = ir.VectorType(ir.IntType(16), width)
        one = self._splat_halves(self.builder.trunc(count, ir.IntType(16)), kind)
        return self.builder.icmp_signed("<", ir.Constant(kind, list(range(width))), one)

    def load_halves(self, where, mask=None, kind=None):
        """A vector of halves (16, or of `kind`); zeros in lanes that are off."""
        kind = kind or self.halves
        if mask is None:
            halves = self.builder.load(self.pointer(where, kind))
            halves.align = 2
            return halves
        return self._call(f"llvm.masked.load.v{kind.count}i16.p0", kind,
                          [self.pointer(where, kind), ir.Constant(ir.IntType(32), 2), mask, ir.Constant(kind, None)])

    def store_halves(self, halves, where, mask=None):
        if mask is None:
            self.builder.store(halves, self.pointer(where, self.halves)).align = 2
            return
        self._call(f"llvm.masked.store.v{SIDE}i16.p0", ir.VoidType(),
                   [halves, self.pointer(where, self.halves), ir.Constant(ir.IntType(32), 2), mask])

    def widened(self, halves):
        return self._widened(halves, self.words, self.vector)

    def rounded(self, numbers):
        """As `bfloat16.rounded`, lane by lane."""
        builder = self.builder

        def word(value):
            return ir.Constant(self.words, [value] * SIDE)

        whole = builder.bitcast(numbers, self.words)
        upper = builder.lshr(whole, word(16))
        nearest = builder.lshr(builder.add(builder.add(whole, word(0x7FFF)), builder.and_(upper, word(1))), word(16))
        is_nan = builder.fcmp_unordered("uno", numbers, numbers)
        return builder.trunc(builder.select(is_nan, builder.or_(upper, word(0x40)), nearest), self.halves)

    def _splat_halves(self, value, kind):
        builder = self.builder
        one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
        order = ir.Constant(ir.VectorType(ir.IntType(32), kind.count), None)
        return builder.shuffle_vector(one, one, order)
