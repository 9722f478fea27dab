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
from numba.extending import intrinsic

from .cache import jit
from .host import host
from .instructions import LANES, Code, number_type

HOST = host()
TILE_ROWS = HOST.tile_rows
TILE_VECTORS = HOST.tile_vectors
LINE = 64  # bytes of a cache line
DISTANCE = 16  # steps of k between asking for a line of a panel and using it


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
        return ir.Constant(ir.IntType(64), LANES[number_type(zero).bitwidth])
    return types.int64(zero), generate


@intrinsic
def size_of(context, zero):
    """Bytes of one element of zero's type (a constant of the compiled code)."""
    def generate(ctx, builder, signature, arguments):
        return ir.Constant(ir.IntType(64), zero.bitwidth // 8)
    return types.int64(zero), generate


@intrinsic
def number_of(context, zero):
    """Zero of the type that elements of zero's type are computed in."""
    def generate(ctx, builder, signature, arguments):
        return ir.Constant(ir.FloatType() if number_type(zero).bitwidth == 32 else ir.DoubleType(), 0.0)
    return number_type(zero)(zero), generate


@intrinsic
def load(context, zero, where):
    """The number at an address."""
    def generate(ctx, builder, signature, arguments):
        return Code(builder, zero).load_element(arguments[1])
    return number_type(zero)(zero, types.int64), generate


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
def sum_vectors(context, zero, source, step, count, target):
    """The sum of `count` (>= 1) vectors of numbers, `step` bytes apart, goes to the vector at `target`.

    Four sums run side by side, or each addition would wait for the one before.
    """
    def generate(ctx, builder, signature, arguments):
        code = Code(builder, zero)
        _, source, step, count, target = arguments
        chains, nothing = 4, ir.Constant(code.vector, None)
        before, loop, after = builder.block, builder.append_basic_block("four"), builder.append_basic_block("sum")
        builder.branch(loop)
        builder.position_at_end(loop)
        i, at = code.phi(code.integer(0), before), code.phi(source, before)
        sums = [code.phi(nothing, before) for _ in range(chains)]
        new = []
        for chain, old in enumerate(sums):  # beyond the last vector it is read again and not added
            number = builder.add(i, code.integer(chain))
            inside = builder.icmp_signed("<", number, count)
            far = builder.mul(step, code.integer(chain))
            vector = code.load(builder.add(at, builder.select(inside, far, code.integer(0))))
            new.append(builder.select(inside, builder.fadd(old, vector), old))
        following = builder.add(i, code.integer(chains))
        i.add_incoming(following, loop)
        at.add_incoming(builder.add(at, builder.mul(step, code.integer(chains))), loop)
        for old, value in zip(sums, new):
            old.add_incoming(value, loop)
        builder.cbranch(builder.icmp_signed("<", following, count), loop, after)
        builder.position_at_end(after)
        code.store(builder.fadd(builder.fadd(new[0], new[1]), builder.fadd(new[2], new[3])), target)
        return ctx.get_dummy_value()
    i64 = types.int64
    return types.void(zero, i64, i64, i64, i64), generate


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
