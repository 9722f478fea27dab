"""The product of few rows where both operands lie along k: B is read in place, vectors run along k.

This is the form of backward's a @ w.T and of logits with tied weights. Packing w would read and write all of it for a
few rows; here only A's rows are laid side by side. A tile of them times GROUP columns of B is kept in registers, a
vector of partial sums for each element; one pass over k reads whole lines of both, and a few shuffles at its end make
one number of each vector. The scheme is that of a dot product, several at a time so that each line that is read serves
several of them.
"""

import functools

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .cache import compile_only, jit, once
from .gemm_finish import NOTHING
from .host import host
from .instructions import Code
from .memory import ThreadMemory
from .vector import LINE, address, copy_lanes, copy_vector, lanes, size_of, stand_alone

GROUP = 4  # columns of a tile: four sums leave as one short vector
ROWS = (host().registers - 1) // (GROUP + 1)  # of a tile: its sums, the rows or the columns, and one vector of the others
MOST_ROWS = 128  # of a product: beyond, packing is small beside the arithmetic (measured)
LEAST_DEPTH = 256  # along k: below, the shuffles are not small beside it
FAR = host().l2 // 2  # bytes of A, which is read again for each GROUP of columns
_LANES = {"f": host().lanes("f"), "d": host().lanes("d")}


def suits(a, b):
    """Whether the product a @ b, without a bias or a last pass, is made here; a, b: 2-D, of one dtype."""
    (m, k), size = a.shape, a.itemsize
    return (m <= MOST_ROWS and k >= LEAST_DEPTH and a.strides[1] == size and b.strides[0] == size
            and m * k * size <= FAR and _LANES[a.dtype.char] >= GROUP)


def run(a, b, out, bias, accumulate, finish, thin=0, packed=0, column_sums=None):
    """One thread's product, see `gemm`: out (+)= a @ b, for operands that `suits` accepts; no bias, `finish` NOTHING."""
    assert bias.size == 0 and finish[0] == NOTHING and column_sums is None
    _COMPILE[out.dtype.char]()
    (m, k), step = a.shape, host().vector_bytes
    work = _memory.address("a", m * -(-k * a.itemsize // step) * step)
    along_product(out.dtype.type(0), a, b, out, accumulate, work)


def panels(b):
    """0: nothing of b is packed."""
    return 0


def warm(dtype):
    """Compiles (or loads) the code for a dtype, where `suits` can be true."""
    if _LANES[dtype.char] >= GROUP:
        _COMPILE[dtype.char]()


@jit
def along_product(zero, a, b, out, accumulate, work):
    """out (+)= a @ b. a: unit stride along its rows, b: along its columns, out: along its rows; all of zero's type.
    work: address of memory for a with its rows made whole vectors. The order of each sum depends on k only."""
    m, k = a.shape
    n, size = b.shape[1], size_of(zero)
    steps = -(-k // lanes(zero))
    step = lanes(zero) * size
    for i in range(0, m, ROWS):
        rows = min(ROWS, m - i)
        for r in range(rows):
            source = address(a) + (i + r) * a.strides[0]
            target = work + (i * steps + r) * step
            for _ in range(k // lanes(zero)):
                copy_vector(zero, source, target)
                source += step
                target += rows * step
            if k % lanes(zero) != 0:
                copy_lanes(zero, source, target, k % lanes(zero))
    for j in range(0, n, GROUP):
        columns = min(GROUP, n - j)
        at_b = address(b) + j * b.strides[1]
        number, left = 0, n - j - GROUP
        for i in range(0, m, ROWS):
            rows = min(ROWS, m - i)
            ahead = at_b  # a column that comes next, asked for by each tile of the present ones
            if number < GROUP and number < left:
                ahead = at_b + (GROUP + number) * b.strides[1]
            along_tile(zero, work + i * steps * step, at_b, b.strides[1], k,
                       address(out) + i * out.strides[0] + j * size, out.strides[0], rows, columns, accumulate, ahead)
            number += 1


@jit
def along_tile(zero, a, b, b_column, k, c, c_row, rows, columns, accumulate, ahead):
    """c[rows, columns] = a[rows, k] @ b[columns, k].T, added to c if `accumulate`; rows <= ROWS, columns <= GROUP.

    a: address of a panel, for each vector of k one of each row, zeros where k ends. b: address of the first column, unit
    stride along k; one later lies b_column bytes further on. ahead: address from where k numbers are asked for.
    """
    stand_alone(zero)
    _along_tile(zero, a, b, b_column, k, c, c_row, rows, columns, accumulate, ahead)


@intrinsic
def _along_tile(context, zero, a, b, b_column, k, c, c_row, rows, columns, accumulate, ahead):
    """The body of `along_tile`: one loop over k for each number of rows, chosen by a switch."""
    def generate(ctx, builder, signature, arguments):
        code = Along(builder, signature.args[0])
        _, a, b, b_column, k, c, c_row, rows, columns, accumulate, ahead = arguments
        done = builder.append_basic_block("along_done")
        switch = builder.switch(rows, done)
        for count in range(1, ROWS + 1):
            block = builder.append_basic_block(f"along_{count}")
            switch.add_case(code.integer(count), block)
            builder.position_at_end(block)
            code.tile(count, a, b, b_column, k, c, c_row, columns, accumulate, ahead)
            builder.branch(done)
        builder.position_at_end(done)
        return ctx.get_dummy_value()
    i64 = types.int64
    return types.void(zero, i64, i64, i64, i64, i64, i64, i64, i64, types.boolean, i64), generate


class Along(Code):
    """Emits the tile."""

    def tile(self, rows, a, b, b_column, k, c, c_row, columns, accumulate, ahead):
        """See `along_tile`; a column beyond the last is the last one again, and is not written."""
        builder, step = self.builder, self.width * self.size
        last = builder.sub(columns, self.integer(1))
        lines_b = [builder.add(b, builder.mul(self.minimum(self.integer(j), last), b_column)) for j in range(GROUP)]
        whole = builder.mul(builder.sdiv(k, self.integer(self.width)), self.integer(step))  # bytes of whole vectors
        before = builder.block
        loop, rest, end = (builder.append_basic_block(name) for name in ("along_k", "along_rest", "along_end"))
        nothing = ir.Constant(self.vector, None)
        builder.cbranch(builder.icmp_signed(">", whole, self.integer(0)), loop, rest)

        builder.position_at_end(loop)
        at, at_a = self.phi(self.integer(0), before), self.phi(a, before)
        sums = [[self.phi(nothing, before) for _ in range(GROUP)] for _ in range(rows)]
        for line in range(0, step, LINE):
            self.prefetch(builder.add(builder.add(ahead, at), self.integer(line)), nearness=2)
        new = self.products(sums, at_a, [functools.partial(self.load, builder.add(line, at)) for line in lines_b])
        following = builder.add(at, self.integer(step))
        at.add_incoming(following, loop)
        next_a = builder.add(at_a, self.integer(rows * step))
        at_a.add_incoming(next_a, loop)
        for old, values in zip(sums, new):
            for node, value in zip(old, values):
                node.add_incoming(value, loop)
        builder.cbranch(builder.icmp_signed("<", following, whole), loop, rest)

        builder.position_at_end(rest)
        sums = self.either(nothing, before, new, loop)
        rest_a = self.phi(a, before)
        rest_a.add_incoming(next_a, loop)
        left = builder.sub(k, builder.mul(builder.sdiv(k, self.integer(self.width)), self.integer(self.width)))
        tail = builder.append_basic_block("along_tail")
        builder.cbranch(builder.icmp_signed(">", left, self.integer(0)), tail, end)
        builder.position_at_end(tail)
        mask = self.mask(left)
        ends = [functools.partial(self.masked_load, builder.add(line, whole), mask) for line in lines_b]
        final = self.products(sums, rest_a, ends)
        builder.branch(end)
        builder.position_at_end(end)
        for i in range(rows):
            vectors = []
            for j in range(GROUP):
                node = self.phi(sums[i][j], rest)
                node.add_incoming(final[i][j], tail)
                vectors.append(node)
            sums[i] = vectors
        self.write([self.four_sums(vectors) for vectors in sums], c, c_row, columns, accumulate)

    def products(self, sums, at_a, columns):
        """The sums after one more vector of each line: of A's panel at `at_a`, and the given ones of B.

        columns: functions that load. Which operand has more vectors is loaded one at a time: registers are few.
        """
        rows = [functools.partial(self.load, self.builder.add(at_a, self.integer(i * self.width * self.size))) for i in range(len(sums))]
        new = [list(row) for row in sums]
        if len(rows) < GROUP:
            rows = [read() for read in rows]
            for j, read in enumerate(columns):
                column = read()
                for i, vector in enumerate(rows):
                    new[i][j] = self.fma(vector, column, sums[i][j])
            return new
        columns = [read() for read in columns]
        for i, read in enumerate(rows):
            vector = read()
            for j, column in enumerate(columns):
                new[i][j] = self.fma(vector, column, sums[i][j])
        return new

    def either(self, nothing, before, new, loop):
        """The sums after the loop, or zeros where it did not run."""
        nodes = []
        for row in new:
            nodes.append([self.phi(nothing, before) for _ in row])
            for node, value in zip(nodes[-1], row):
                node.add_incoming(value, loop)
        return nodes

    def four_sums(self, vectors):
        """A short vector with the sum of each of four vectors."""
        builder, width = self.builder, self.width
        pairs = []
        for x, y in (vectors[:2], vectors[2:]):  # x y x y | x y x y | ...
            low = [first for block in range(0, width, 4) for lane in (0, 1) for first in (block + lane, width + block + lane)]
            high = [lane + 2 for lane in low]
            pairs.append(builder.fadd(self._shuffle(x, y, low), self._shuffle(x, y, high)))
        low = [lane for block in range(0, width, 4) for lane in (block, block + 1, width + block, width + block + 1)]
        high = [lane + 2 for lane in low]
        total = builder.fadd(self._shuffle(*pairs, low), self._shuffle(*pairs, high))  # w x y z | w x y z | ...
        while width > 4:
            half = width // 2
            total = builder.fadd(self.part(total, 0, half), self.part(total, half, half))
            width = half
        return total

    def part(self, vector, start, count):
        """`count` lanes of a vector, from `start` on."""
        order = ir.Constant(ir.VectorType(ir.IntType(32), count), list(range(start, start + count)))
        return self.builder.shuffle_vector(vector, vector, order)

    def write(self, results, c, c_row, columns, accumulate):
        """Adds the results to C, or writes them: short vectors, or numbers one by one where C ends."""
        builder = self.builder
        short = ir.VectorType(self.element, GROUP)
        whole, edge, end = (builder.append_basic_block(name) for name in ("along_whole", "along_edge", "along_written"))
        adds = self.flag(accumulate)
        builder.cbranch(builder.icmp_signed("==", columns, self.integer(GROUP)), whole, edge)
        builder.position_at_end(whole)
        places = [builder.add(c, builder.mul(self.integer(i), c_row)) for i in range(len(results))]
        self.put(results, [self.pointer(place, short) for place in places], adds)
        builder.branch(end)
        builder.position_at_end(edge)
        for j in range(GROUP - 1):
            here, following = builder.append_basic_block("along_column"), builder.append_basic_block("along_next")
            builder.cbranch(builder.icmp_signed(">", columns, self.integer(j)), here, following)
            builder.position_at_end(here)
            numbers = [builder.extract_element(result, ir.Constant(ir.IntType(32), j)) for result in results]
            places = [builder.add(c, builder.add(builder.mul(self.integer(i), c_row), self.integer(j * self.size)))
                      for i in range(len(results))]
            self.put(numbers, [self.pointer(place, self.element) for place in places], adds)
            builder.branch(following)
            builder.position_at_end(following)
        builder.branch(end)
        builder.position_at_end(end)

    def put(self, values, pointers, adds):
        """values, added to what is there if `adds`, go to their pointers."""
        builder = self.builder
        add, set_, end = (builder.append_basic_block(name) for name in ("along_add", "along_set", "along_put"))
        builder.cbranch(adds, add, set_)
        for block in (add, set_):
            builder.position_at_end(block)
            for value, pointer in zip(values, pointers):
                if block is add:
                    old = builder.load(pointer)
                    old.align = self.size
                    value = builder.fadd(old, value)
                builder.store(value, pointer).align = self.size
            builder.branch(end)
        builder.position_at_end(end)


def _compiler(element):
    @once
    def compile_it():
        operand = types.Array(element, 2, "A", readonly=True)
        compile_only(along_product, element, operand, operand, types.Array(element, 2, "A"), types.boolean, types.int64)
    return compile_it


_memory = ThreadMemory()
_COMPILE = {"f": _compiler(types.float32), "d": _compiler(types.float64)}
