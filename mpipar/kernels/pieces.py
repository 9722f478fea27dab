"""Register kernel of float32 on AMX: each number as three of bfloat16, six of their nine products.

x = h + m + l exactly, h being x rounded to the 8 bits of bfloat16, m what is left, rounded so, and l the rest: |m| <=
2^-8 |x|, |l| <= 2^-17 |x|. Of the product of two numbers the terms m l, l m and l l are left out, together 2^-24 of it at
most, as much as one rounding of float32, and 2^-27.4 as a root of mean squares, of either sign. AMX multiplies the pieces
without rounding and sums in float32, so the result is as near to the exact one as that of vector instructions (tested).
Source: Henry, Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision
Computations" (2019).

Not so outside the usual range: from 2^128 (1 - 2^-9) on, and at infinity, a number gives NaN; what is below 2^-126, a
piece, a product or a sum, counts as zero.

Panels are cut into blocks of BLOCK along k, zeros where k ends; a block is three planes (h, m, l), each of two tiles of
1 KiB, 16 lines of 16 words. A word holds the steps p and p + 16 of the block, so that nothing is shuffled where lines
lie along k already: of A, lines are rows and words run along k; of B, lines are p and words run along the columns.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .cache import jit
from .pairs import BLOCK, SIDE, Pairs, knows_amx
from .vector import stand_alone

TILE_BYTES = 64 * SIDE
PLANE_BYTES = 2 * TILE_BYTES
PIECES = 3
PIECES_BYTES = PIECES * PLANE_BYTES  # of a block
# Cache lines that are asked for with each block: of what the caller names, and of c; and how many bytes ahead packing
# asks. (Measured. Without asking for the next block too, the kernel falls to a third where another thread runs on the
# same core, for the registers of AMX are then few and each load is waited for.)
AHEAD, C_LINES, ASK = 12, 4, 512
# Which planes of A and B are multiplied one after the other: only one of the two changes, so few tiles are read, and
# the small products are summed first.
ORDER = (2, 0), (1, 0), (1, 1), (0, 1), (0, 0), (0, 2)


@jit
def square_of_pieces(a, b, blocks, start, c, c_step, rows, columns, soon, soon_step, ahead, ahead_step):
    """c[rows, columns] = start + a panel of A times one of B, `blocks` (>= 1) blocks long; `pairs.begin` before it.

    rows, columns: 1 to 32; whole halves of 16 are written. c: float32, rows c_step bytes apart. start: address of a row
    that each row begins with, or 0 for zeros. soon: what will be written next, rows soon_step bytes apart, is asked for;
    and with each block AHEAD cache lines from `ahead` on, ahead_step bytes further each time. Each element is summed in
    the order of k, whatever its place.
    """
    stand_alone(blocks)
    _square(a, b, blocks, start, c, c_step, rows, columns, soon, soon_step, ahead, ahead_step)


@jit
def pack_pieces(is_a, along_k, source, line_step, k_step, lines, depth, target):
    """Packs a block of `lines` (1 to 32) lines (rows of A, columns of B) and `depth` (1 to 32) steps of k.

    is_a: as a block of A. along_k: whether k_step is 4, an element; else line_step is. Lines beyond are undefined,
    steps of k beyond are zeros.
    """
    stand_alone(lines)
    for half in range(0, lines, SIDE):
        here = min(SIDE, lines - half)
        at = source + half * line_step
        to = target + half * (TILE_BYTES // SIDE)
        if is_a:
            if along_k:
                _lines_of_a(at, line_step, here, depth, to)
            else:
                _steps_of_a(at, k_step, here, depth, to)
        elif along_k:
            _lines_of_b(at, line_step, here, depth, to)
        else:
            _steps_of_b(at, k_step, here, depth, to)


@jit
def pack_and_sum(source, k_step, columns, depth, target, totals):
    """`pack_pieces` of a block of B whose columns lie side by side, which also adds their sums to totals (address of 32
    float64)."""
    stand_alone(depth)
    for half in range(0, columns, SIDE):
        to = target + half * (TILE_BYTES // SIDE)
        _sums_of_b(source + half * 4, k_step, min(SIDE, columns - half), depth, to, totals + half * 8)


@jit
def move_block(source, source_step, target, target_step, rows, columns, adds):
    """Copies up to 32 columns of some rows, which lie so many bytes apart, or adds them to what is there."""
    stand_alone(rows)
    if adds:
        _add_block(source, source_step, target, target_step, rows, columns)
    else:
        _copy_block(source, source_step, target, target_step, rows, columns)


def _packer(lines_along_k, transposes, sums=False):
    """A function that packs 16 lines."""
    def generate(ctx, builder, signature, arguments):
        code = Pieces(builder)
        source, step, lines, depth, target, *totals = arguments
        reader = code.lines_along_k if lines_along_k else code.lines_side_by_side
        whole = builder.and_(builder.icmp_signed("==", lines, code.integer(SIDE)),
                             builder.icmp_signed("==", depth, code.integer(BLOCK)))

        def pack_with(read):
            """read(i): a vector of the lower halves of words, and one of the upper halves."""
            if transposes:
                first, second = (code.transpose(list(half)) for half in zip(*[read(i) for i in range(SIDE)]))
            total = None
            for i in range(SIDE):  # one after the other: more vectors than there are registers would have to be kept
                pair = (first[i], second[i]) if transposes else read(i)
                for plane, word in enumerate(code.words_of(*pair)):
                    code.store_words(word, builder.add(target, code.integer(plane * PLANE_BYTES + i * 64)))
                if sums:
                    both = builder.fadd(*pair)
                    total = both if total is None else builder.fadd(total, both)
            if sums:
                code.add_sum(total, *totals)

        with builder.if_else(whole) as (then, otherwise):  # masks would double the time
            with then:
                pack_with(reader(source, step))
            with otherwise:
                pack_with(reader(source, step, lines, depth))
        return ctx.get_dummy_value()

    i64 = types.int64
    if sums:
        @intrinsic
        def pack(context, source, step, lines, depth, target, totals):
            return types.void(i64, i64, i64, i64, i64, i64), generate
    else:
        @intrinsic
        def pack(context, source, step, lines, depth, target):
            return types.void(i64, i64, i64, i64, i64), generate
    return pack


_lines_of_a, _steps_of_a = _packer(True, False), _packer(False, True)
_lines_of_b, _steps_of_b = _packer(True, True), _packer(False, False)
_sums_of_b = _packer(False, False, sums=True)


def _mover(adds):
    @intrinsic
    def move(context, source, source_step, target, target_step, rows, columns):
        def generate(ctx, builder, signature, arguments):
            code = Pieces(builder)
            source, source_step, target, target_step, rows, columns = arguments
            masks = [code.mask(builder.sub(columns, code.integer(SIDE * j))) for j in range(2)]
            with cgutils.for_range(builder, rows, intp=ir.IntType(64)) as loop:
                for j, mask in enumerate(masks):
                    numbers = code.masked_load(code.place(source, loop.index, source_step, 64 * j), mask)
                    place = code.place(target, loop.index, target_step, 64 * j)
                    if adds:
                        numbers = builder.fadd(code.masked_load(place, mask), numbers)
                    code.masked_store(numbers, place, mask)
            return ctx.get_dummy_value()
        i64 = types.int64
        return types.void(*[i64] * 6), generate
    return move


_copy_block, _add_block = _mover(False), _mover(True)


@intrinsic
def _square(context, a, b, blocks, start, c, c_step, rows, columns, soon, soon_step, ahead, ahead_step):
    def generate(ctx, builder, signature, arguments):
        code = Pieces(builder)
        *operands, rows, columns, soon, soon_step, ahead, ahead_step = arguments
        if not knows_amx():
            return ctx.get_dummy_value()  # never chosen there
        tall, wide = (builder.icmp_signed(">", x, code.integer(SIDE)) for x in (rows, columns))
        for high, broad in ((2, 2), (2, 1), (1, 2), (1, 1)):
            fits = builder.and_(tall if high == 2 else builder.not_(tall), wide if broad == 2 else builder.not_(wide))
            with builder.if_then(fits):
                code.square(high, broad, *operands, soon, soon_step, ahead, ahead_step)
        return ctx.get_dummy_value()
    i64 = types.int64
    return types.void(*[i64] * 12), generate


class Pieces(Pairs):
    """Emits the instructions above."""

    def square(self, high, broad, a, b, blocks, start, c, c_step, *asked):
        """Of `high` x `broad` tiles. Registers 0 to 3 hold c, 4 and 5 tiles of A, 6 and 7 of B."""
        builder = self.builder
        tiles = [(i, j) for i in range(high) for j in range(broad)]

        def each(name, base, step):
            for i, j in tiles:
                down = builder.mul(step, self.integer(SIDE * i))
                self.tile(name, 2 * i + j, builder.add(builder.add(base, down), self.integer(64 * j)), step)

        with builder.if_else(builder.icmp_signed("==", start, self.integer(0))) as (then, otherwise):
            with then:
                for i, j in tiles:
                    self.call("llvm.x86.tilezero", [self.number(2 * i + j)])
            with otherwise:
                each("tileloadd64", start, self.integer(0))
        with cgutils.for_range(builder, blocks, intp=ir.IntType(64)) as loop:
            at = builder.mul(loop.index, self.integer(PIECES_BYTES))
            at_a, at_b = builder.add(a, at), builder.add(b, at)
            self._multiply(high, broad, at_a, at_b, self._lines_to_ask_for(high, broad, at_a, at_b, loop.index, *asked))
        each("tilestored64", c, c_step)

    def _lines_to_ask_for(self, high, broad, a, b, number, soon, soon_step, ahead, ahead_step):
        """With block `number`, as arguments of `prefetch`."""
        builder = self.builder
        lines = [(self.place(ahead, number, ahead_step, 64 * line), 2, False) for line in range(AHEAD)]
        row = builder.mul(number, self.integer(C_LINES // 2))
        for line in range(C_LINES):
            here = builder.and_(builder.add(row, self.integer(line // 2)), self.integer(BLOCK - 1))
            lines.append((self.place(soon, here, soon_step, 64 * (line % 2)), 3, True))
        for base, halves in ((b, broad), (a, high)):
            for at in range(0, PIECES_BYTES, 64):
                if at % PLANE_BYTES < halves * TILE_BYTES:
                    lines.append((builder.add(base, self.integer(PIECES_BYTES + at)), 3, False))
        return lines

    def _multiply(self, high, broad, a, b, lines):
        """Adds a block: each tile is read just before it is used, and those that stay are used first. Between products
        it asks for `lines`."""
        def read(register, base, plane, half):
            where = self.builder.add(base, self.integer(plane * PLANE_BYTES + half * TILE_BYTES))
            self.tile("tileloadd64", register + half, where, self.integer(64))

        each = -(-len(lines) // (len(ORDER) * high * broad))
        last = None, None
        for plane_a, plane_b in ORDER:
            new_a, new_b = plane_a != last[0], plane_b != last[1]
            pairs = [(i, j) for i in range(high) for j in range(broad)]
            if not new_a:
                pairs.sort(key=lambda pair: pair[1])
            seen_a, seen_b = set(), set()
            for i, j in pairs:
                if new_a and i not in seen_a:
                    read(4, a, plane_a, i)
                if new_b and j not in seen_b:
                    read(6, b, plane_b, j)
                seen_a.add(i)
                seen_b.add(j)
                self.call("llvm.x86.tdpbf16ps", [self.number(2 * i + j), self.number(4 + i), self.number(6 + j)])
                for line in lines[:each]:
                    self.prefetch(*line)
                lines = lines[each:]
            last = plane_a, plane_b

    def words_of(self, first, second):
        """Of two vectors the words of the three planes: pieces of the first in the lower halves."""
        shift = ir.Constant(self.words, [16] * SIDE)
        return [self.builder.or_(self.builder.lshr(low, shift), self.builder.and_(high, self._upper()))
                for low, high in zip(self._pieces(first), self._pieces(second))]

    def _pieces(self, x):
        """h, m and l as words, of which the upper halves count; rounded to nearest, halves away from zero."""
        builder = self.builder

        def rounded(value):
            words = builder.add(builder.bitcast(value, self.words), ir.Constant(self.words, [0x8000] * SIDE))
            return builder.and_(words, self._upper())

        high = rounded(x)
        left = builder.fsub(x, builder.bitcast(high, self.vector))
        middle = rounded(left)
        low = builder.fsub(left, builder.bitcast(middle, self.vector))
        return high, middle, builder.bitcast(low, self.words)

    def _upper(self):
        return ir.Constant(self.words, [0xFFFF0000] * SIDE)

    def lines_along_k(self, source, step, lines=None, depth=None):
        """A function that reads line i of 16: its first 16 steps of k, and the 16 others. lines, depth: there are fewer;
        the last line is then read again, and zeros where k ends."""
        builder = self.builder
        if lines is not None:
            masks = self.mask(depth), self.mask(builder.sub(depth, self.integer(SIDE)))
            last = builder.sub(lines, self.integer(1))

        def read(i):
            line = self.integer(i) if lines is None else self.minimum(self.integer(i), last)
            places = [self.place(source, line, step, 64 * half) for half in range(2)]
            if lines is not None:
                return [self.masked_load(*both) for both in zip(places, masks)]
            for place in places:
                self.prefetch(builder.add(place, self.integer(ASK)))
            return [self.load(place) for place in places]

        return read

    def lines_side_by_side(self, source, step, lines=None, depth=None):
        """A function that reads steps i and i + 16 of k of 16 lines. lines, depth: as above, zeros for lines beyond."""
        builder = self.builder
        if lines is not None:
            on, last = self.mask(lines), builder.sub(depth, self.integer(1))

        def read_step(k):
            if lines is None:
                return self.load(self.place(source, self.integer(k), step))
            inside = builder.icmp_signed("<", self.integer(k), depth)
            mask = builder.select(inside, on, ir.Constant(self.flags, None))
            return self.masked_load(self.place(source, self.minimum(self.integer(k), last), step), mask)

        return lambda i: [read_step(i), read_step(i + SIDE)]

    def add_sum(self, vector, totals):
        """Adds a vector to 16 float64 at an address."""
        builder = self.builder
        doubles = ir.VectorType(ir.DoubleType(), SIDE)
        place = self.pointer(totals, doubles)
        before = builder.load(place)
        before.align = 8
        builder.store(builder.fadd(before, builder.fpext(vector, doubles)), place).align = 8

    def place(self, source, line, step, further=0):
        return self.builder.add(self.builder.add(source, self.builder.mul(line, step)), self.integer(further))
