"""Register kernels, written as LLVM vector instructions because Numba's own vectoriser keeps no tile of C in
registers.

Everything here works on addresses (`address(array)`), byte strides and counts, inside compiled code; nothing
is checked. The first argument `zero` is a number of the element type: it selects float32 or float64, and in
what reads operands also uint16, the bits of bfloat16, which become float32 (`number_of`). The caller keeps the
arrays alive.

Packed panels, the layout that `tile` reads: of A, `rows` consecutive elements for each step of k; of B, one
or two whole vectors for each step of k. Source of the scheme: Goto and van de Geijn, "Anatomy of
High-Performance Matrix Multiplication".
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .cache import jit
from .host import host

HOST = host()
TILE_ROWS = HOST.tile_rows
TILE_VECTORS = HOST.tile_vectors
LINE = 64  # bytes of a cache line
PAGE = 4096  # bytes: the smallest page of memory of any system
DISTANCE = 16  # steps of k between asking for a line of a panel and using it
LANES = {32: HOST.vector_bytes // 4, 64: HOST.vector_bytes // 8}


@jit
def tile(zero, a, b, b_step, c, c_step, k, rows, columns, start, accumulate):
    """c[rows, columns] = start[columns] + a[k, rows].T @ b[k, columns], added to c if `accumulate`.

    a: packed panel [k, rows], 1 <= rows <= TILE_ROWS. b: k rows `b_step` bytes apart (a packed panel, or a
    matrix in place), each read in whole vectors: V elements where columns <= V, else 2 V (V the lanes of a
    vector). c: rows `c_step` bytes apart, unit stride along a row; nothing outside [rows, columns] is
    touched. start: address of as many elements as are read of a row of b, or 0 for zeros. Each element of c
    is summed in the order of k, whatever its place in the tile. Pass variables, not constants: Numba compiles
    the kernel anew for a constant argument.
    """
    stand_alone(zero)
    _tile(zero, a, b, b_step, c, c_step, k, rows, columns, start, accumulate)


@jit
def tile_ahead(zero, a, b, b_step, c, c_step, k, rows, columns, start, accumulate, ahead, ahead_step):
    """`tile` that also asks for k cache lines, `ahead_step` bytes apart from `ahead`, which a later tile will
    need."""
    stand_alone(zero)
    _tile_ahead(zero, a, b, b_step, c, c_step, k, rows, columns, start, accumulate, ahead, ahead_step)


@intrinsic
def stand_alone(context, zero):
    """Keeps LLVM from copying the enclosing function into its callers: the large ones take seconds to
    compile."""
    def generate(ctx, builder, signature, arguments):
        builder.function.attributes.add("noinline")
        return ctx.get_dummy_value()
    return types.void(zero), generate


@intrinsic
def address(context, array):
    """Address of an array's first element, as an integer."""
    def generate(ctx, builder, signature, arguments):
        struct = ctx.make_array(signature.args[0])(ctx, builder, arguments[0])
        return builder.ptrtoint(struct.data, ir.IntType(64))
    return types.int64(array), generate


@intrinsic
def lanes(context, zero):
    """Elements of zero's type in one vector register (a constant of the compiled code)."""
    def generate(ctx, builder, signature, arguments):
        return ir.Constant(ir.IntType(64), LANES[_number(zero).bitwidth])
    return types.int64(zero), generate


@intrinsic
def size_of(context, zero):
    """Bytes of one element of zero's type (a constant of the compiled code)."""
    def generate(ctx, builder, signature, arguments):
        return ir.Constant(ir.IntType(64), zero.bitwidth // 8)
    return types.int64(zero), generate


def _number(element):
    """The type that elements are computed in."""
    return types.float32 if element == types.uint16 else element


@intrinsic
def number_of(context, zero):
    """Zero of the type that elements of zero's type are computed in."""
    def generate(ctx, builder, signature, arguments):
        return ir.Constant(ir.FloatType() if _number(zero).bitwidth == 32 else ir.DoubleType(), 0.0)
    return _number(zero)(zero), generate


@intrinsic
def load(context, zero, where):
    """The number at an address."""
    def generate(ctx, builder, signature, arguments):
        return Code(builder, zero).load_element(arguments[1])
    return _number(zero)(zero, types.int64), generate


@intrinsic
def store(context, value, where):
    """Writes an element (its type is that of the value) to an address."""
    def generate(ctx, builder, signature, arguments):
        code = Code(builder, value)
        builder.store(arguments[0], code.pointer(arguments[1], code.element))
        return ctx.get_dummy_value()
    return types.void(value, types.int64), generate


@intrinsic
def copy_lanes(context, zero, source, target, count):
    """Copies `count` (at most a vector) elements from address to address; a whole vector of numbers is written at
    the target."""
    def generate(ctx, builder, signature, arguments):
        code = Code(builder, zero)
        _, source, target, count = arguments
        code.store(code.masked_source(source, code.mask(count)), target)
        return ctx.get_dummy_value()
    return types.void(zero, types.int64, types.int64, types.int64), generate


@intrinsic
def copy_vector(context, zero, source, target):
    """Copies a whole vector from address to address, as numbers."""
    def generate(ctx, builder, signature, arguments):
        code = Code(builder, zero)
        code.store(code.source(arguments[1]), arguments[2])
        return ctx.get_dummy_value()
    return types.void(zero, types.int64, types.int64), generate


@intrinsic
def transpose_lanes(context, zero, source, source_step, lines, target, target_step):
    """Reads V vectors, `source_step` bytes apart, and writes their transpose, vectors `target_step` bytes
    apart.

    Only the first `lines` (>= 1) source vectors are read; the others repeat the last of them.
    """
    def generate(ctx, builder, signature, arguments):
        code = Code(builder, zero)
        _, source, source_step, lines, target, target_step = arguments
        last = builder.sub(lines, code.integer(1))
        vectors = []
        for i in range(code.width):
            line = code.minimum(code.integer(i), last)
            vectors.append(code.source(builder.add(source, builder.mul(line, source_step))))
        for i, vector in enumerate(code.transpose(vectors)):
            code.store(vector, builder.add(target, builder.mul(code.integer(i), target_step)))
        return ctx.get_dummy_value()
    i64 = types.int64
    return types.void(zero, i64, i64, i64, i64, i64), generate


@intrinsic
def _tile(context, zero, a, b, b_step, c, c_step, k, rows, columns, start, accumulate):
    """The body of `tile`."""
    i64 = types.int64
    return types.void(zero, i64, i64, i64, i64, i64, i64, i64, i64, i64, types.boolean), _generate_tiles


@intrinsic
def _tile_ahead(context, zero, a, b, b_step, c, c_step, k, rows, columns, start, accumulate, ahead, ahead_step):
    """The body of `tile_ahead`."""
    i64 = types.int64
    return types.void(zero, i64, i64, i64, i64, i64, i64, i64, i64, i64, types.boolean, i64, i64), _generate_tiles


def _generate_tiles(ctx, builder, signature, arguments):
    # One loop over k for each number of rows and vectors, chosen by a switch.
    code = Code(builder, signature.args[0])
    _, a, b, b_step, c, c_step, k, rows, columns, start, accumulate, *ahead = arguments
    done = builder.append_basic_block("tile_done")
    wide = builder.icmp_signed(">", columns, code.integer(code.width))
    choice = builder.add(rows, builder.select(wide, code.integer(TILE_ROWS), code.integer(0)))
    switch = builder.switch(choice, done)
    for vectors in range(1, TILE_VECTORS + 1):
        for row_count in range(1, TILE_ROWS + 1):
            block = builder.append_basic_block(f"tile_{row_count}x{vectors}")
            switch.add_case(code.integer(row_count + (vectors - 1) * TILE_ROWS), block)
            builder.position_at_end(block)
            _tile_of(code, row_count, vectors, a, b, b_step, c, c_step, k, columns, start, accumulate, *ahead)
            builder.branch(done)
    builder.position_at_end(done)
    return ctx.get_dummy_value()


def _tile_of(code, rows, vectors, a, b, b_step, c, c_step, k, columns, start, accumulate, ahead=None, ahead_step=None):
    """Emits one tile: [rows x vectors] accumulators live in registers over the loop, then go to C."""
    builder, width, size = code.builder, code.width, code.size
    for i in range(rows):  # C is far away: ask now, use it k steps later
        row = builder.add(c, builder.mul(code.integer(i), c_step))
        for j in range(0, vectors * width * size, 64):
            code.prefetch(builder.add(row, code.integer(j)))
    first = code.load_or_zeros(start, vectors)
    before = builder.block
    loop = builder.append_basic_block("k")
    after = builder.append_basic_block("store")
    distant = builder.mul(b_step, code.integer(DISTANCE))
    builder.cbranch(builder.icmp_signed(">", k, code.integer(0)), loop, after)

    builder.position_at_end(loop)
    step = code.phi(code.integer(0), before)
    at_a, at_b = code.phi(a, before), code.phi(b, before)
    at_ahead = None if ahead is None else code.phi(ahead, before)
    sums = [[code.phi(first[j], before) for j in range(vectors)] for _ in range(rows)]
    columns_of_b = [code.load(builder.add(at_b, code.integer(j * width * size))) for j in range(vectors)]
    if HOST.prefetches:
        for j in range(0, vectors * width * size, 64):
            code.prefetch(builder.add(at_b, builder.add(distant, code.integer(j))))
        code.prefetch(builder.add(at_a, code.integer(DISTANCE * rows * size)))
    if ahead is not None:
        code.prefetch(at_ahead, nearness=2)
        at_ahead.add_incoming(builder.add(at_ahead, ahead_step), loop)
    new = []
    for i in range(rows):
        element = code.splat(code.load_element(builder.add(at_a, code.integer(i * size))))
        new.append([code.fma(element, columns_of_b[j], sums[i][j]) for j in range(vectors)])
    next_step = builder.add(step, code.integer(1))
    step.add_incoming(next_step, loop)
    at_a.add_incoming(builder.add(at_a, code.integer(rows * size)), loop)
    at_b.add_incoming(builder.add(at_b, b_step), loop)
    for i in range(rows):
        for j in range(vectors):
            sums[i][j].add_incoming(new[i][j], loop)
    builder.cbranch(builder.icmp_signed("<", next_step, k), loop, after)

    builder.position_at_end(after)
    results = []
    for i in range(rows):
        results.append([])
        for j in range(vectors):
            result = code.phi(first[j], before)
            result.add_incoming(new[i][j], loop)
            results[i].append(result)
    _write_tile(code, results, c, c_step, columns, accumulate)


def _write_tile(code, results, c, c_step, columns, accumulate):
    """Adds the results to C, or writes them: whole vectors, but for the last column of vectors where C ends in it.

    Masked stores take some CPUs ten times as long as whole ones (AVX2 of AMD), so whole tiles have none.
    """
    builder, width = code.builder, code.width
    vectors = len(results[0])
    last = builder.sub(columns, code.integer((vectors - 1) * width))
    edge, whole, add, put, end = (builder.append_basic_block(name)
                                  for name in ("edge", "whole", "add", "put", "tile_end"))

    def each(write):
        for i, row in enumerate(results):
            start = builder.add(c, builder.mul(code.integer(i), c_step))
            for j, result in enumerate(row):
                write(builder.add(start, code.integer(j * width * code.size)), result, j)
        builder.branch(end)

    def write_edge(where, result, j):
        # One masked load serves both the edge and a C that is not read at all: lanes that are off touch no memory.
        on = mask if j == vectors - 1 else code.full_mask()
        old = code.masked_load(where, builder.and_(on, code.all_lanes(accumulate)))
        code.masked_store(builder.fadd(old, result), where, on)

    builder.cbranch(builder.icmp_signed("==", last, code.integer(width)), whole, edge)
    builder.position_at_end(edge)
    mask = code.mask(last)
    each(write_edge)
    builder.position_at_end(whole)
    builder.cbranch(code.flag(accumulate), add, put)
    builder.position_at_end(add)
    each(lambda where, result, j: code.store(builder.fadd(code.load(where), result), where))
    builder.position_at_end(put)
    each(lambda where, result, j: code.store(result, where))
    builder.position_at_end(end)


class Code:
    """Emits vector instructions for one element type at the builder's present place. Addresses are 64-bit
    integers."""

    def __init__(self, builder, element):
        self.builder = builder
        self.bits = _number(element).bitwidth
        self.size = self.bits // 8  # of a number, as it lies in panels
        self.width = LANES[self.bits]
        self.element = ir.FloatType() if self.bits == 32 else ir.DoubleType()
        self.vector = ir.VectorType(self.element, self.width)
        self.flags = ir.VectorType(ir.IntType(1), self.width)
        self.suffix = f"v{self.width}f{self.bits}"
        self.is_narrow = element == types.uint16  # operands are bfloat16

    def integer(self, value):
        return ir.Constant(ir.IntType(64), value)

    def minimum(self, x, y):
        return self.builder.select(self.builder.icmp_signed("<", x, y), x, y)

    def phi(self, value, block):
        node = self.builder.phi(value.type)
        node.add_incoming(value, block)
        return node

    def pointer(self, where, kind):
        return self.builder.inttoptr(where, kind.as_pointer())

    def load(self, where):
        vector = self.builder.load(self.pointer(where, self.vector))
        vector.align = self.size
        return vector

    def store(self, vector, where):
        self.builder.store(vector, self.pointer(where, self.vector)).align = self.size

    def load_element(self, where):
        if self.is_narrow:
            return self._widened(self.builder.load(self.pointer(where, ir.IntType(16))), ir.IntType(32), self.element)
        return self.builder.load(self.pointer(where, self.element))

    def source(self, where):
        """A vector of an operand, as numbers."""
        if not self.is_narrow:
            return self.load(where)
        halves = self.builder.load(self.pointer(where, ir.VectorType(ir.IntType(16), self.width)))
        halves.align = 2
        return self._widened(halves, ir.VectorType(ir.IntType(32), self.width), self.vector)

    def masked_source(self, where, mask):
        """The same; lanes that are off read nothing."""
        if not self.is_narrow:
            return self.masked_load(where, mask)
        builder, kind = self.builder, ir.VectorType(ir.IntType(16), self.width)
        pointer, none = self.pointer(where, kind), ir.Constant(kind, None)
        # Only AVX-512 has masked loads of halves; elsewhere they become a branch for each lane. So all lanes are read
        # where they lie in one page of memory, which can't fault, and those that are off are dropped.
        near, far, end = (builder.append_basic_block(name) for name in ("in_page", "over_page", "read"))
        place = builder.and_(where, self.integer(PAGE - 1))
        builder.cbranch(builder.icmp_signed("<=", place, self.integer(PAGE - 2 * self.width)), near, far)
        builder.position_at_end(near)
        every = builder.load(pointer)
        every.align = 2
        kept = builder.select(mask, every, none)
        builder.branch(end)
        builder.position_at_end(far)
        masked = self._call(f"llvm.masked.load.v{self.width}i16.p0", kind,
                            [pointer, ir.Constant(ir.IntType(32), 2), mask, none])
        builder.branch(end)
        builder.position_at_end(end)
        halves = self.phi(kept, near)
        halves.add_incoming(masked, far)
        return self._widened(halves, ir.VectorType(ir.IntType(32), self.width), self.vector)

    def _widened(self, halves, words, numbers):
        shift = ir.Constant(words, 16 if isinstance(words, ir.IntType) else [16] * self.width)
        return self.builder.bitcast(self.builder.shl(self.builder.zext(halves, words), shift), numbers)

    def load_or_zeros(self, where, count):
        """`count` vectors from an address on; zeros if it is 0. A branch: to hide the fault of a masked load from
        nowhere, CPUs take hundreds of cycles."""
        builder, before = self.builder, self.builder.block
        there, end = builder.append_basic_block("there"), builder.append_basic_block("loaded")
        builder.cbranch(builder.icmp_signed("==", where, self.integer(0)), end, there)
        builder.position_at_end(there)
        loaded = [self.load(builder.add(where, self.integer(i * self.width * self.size))) for i in range(count)]
        builder.branch(end)
        builder.position_at_end(end)
        values = [self.phi(ir.Constant(self.vector, None), before) for _ in range(count)]
        for value, vector in zip(values, loaded):
            value.add_incoming(vector, there)
        return values

    def splat(self, value):
        kind = ir.VectorType(value.type, self.width)
        first = ir.Constant(ir.IntType(32), 0)
        one = self.builder.insert_element(ir.Constant(kind, ir.Undefined), value, first)
        return self._shuffle(one, one, [0] * self.width)

    def all_lanes(self, flag):
        return self.splat(self.flag(flag))

    def flag(self, value):
        """A Boolean of Numba (a byte) as a condition of LLVM."""
        return self.builder.trunc(value, ir.IntType(1)) if value.type.width > 1 else value

    def full_mask(self):
        return ir.Constant(self.flags, [1] * self.width)

    def mask(self, count):
        """Lanes 0 .. count - 1."""
        kind = ir.VectorType(ir.IntType(64), self.width)
        return self.builder.icmp_signed("<", ir.Constant(kind, list(range(self.width))), self.splat(count))

    def fma(self, x, y, z):
        return self._call(f"llvm.fma.{self.suffix}", self.vector, [x, y, z])

    def masked_load(self, where, mask):
        pointer = self.pointer(where, self.vector)
        align = ir.Constant(ir.IntType(32), self.size)
        return self._call(f"llvm.masked.load.{self.suffix}.p0", self.vector,
                          [pointer, align, mask, ir.Constant(self.vector, None)])

    def masked_store(self, vector, where, mask):
        pointer = self.pointer(where, self.vector)
        align = ir.Constant(ir.IntType(32), self.size)
        self._call(f"llvm.masked.store.{self.suffix}.p0", ir.VoidType(), [vector, pointer, align, mask])

    def prefetch(self, where, nearness=3):
        """nearness: 3 for the nearest cache, 2 for the next."""
        read, level, data = (ir.Constant(ir.IntType(32), value) for value in (0, nearness, 1))
        self._call("llvm.prefetch.p0", ir.VoidType(), [self.pointer(where, ir.IntType(8)), read, level, data])

    def transpose(self, vectors):
        """Transposes width x width elements: log2(width) rounds that exchange blocks of half the size
        each."""
        width, half = self.width, self.width // 2
        while half >= 1:
            low = [lane if not lane & half else width + lane - half for lane in range(width)]
            high = [lane + half if not lane & half else width + lane for lane in range(width)]
            new = list(vectors)
            for i in range(width):
                if not i & half:
                    new[i] = self._shuffle(vectors[i], vectors[i + half], low)
                    new[i + half] = self._shuffle(vectors[i], vectors[i + half], high)
            vectors, half = new, half // 2
        return vectors

    def _shuffle(self, x, y, order):
        kind = ir.VectorType(ir.IntType(32), self.width)
        return self.builder.shuffle_vector(x, y, ir.Constant(kind, order))

    def _call(self, name, result, arguments):
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), arguments)
