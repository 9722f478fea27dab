"""What register kernels are written with: vector instructions of LLVM, emitted one by one."""

from llvmlite import ir
from numba import types
from numba.core import cgutils

from .host import host

LANES = {32: host().vector_bytes // 4, 64: host().vector_bytes // 8}  # of a vector, by the bits of a number
PAGE = 4096  # bytes: the smallest page of memory of any system


def number_type(element):
    """The type that elements are computed in."""
    return types.float32 if element == types.uint16 else element


class Code:
    """Emits vector instructions for one element type at the builder's present place. Addresses are 64-bit
    integers."""

    def __init__(self, builder, element):
        self.builder = builder
        self.bits = number_type(element).bitwidth
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

    def prefetch(self, where, nearness=3, writes=False):
        """nearness: 3 for the nearest cache, 2 for the next. writes: the line will be written."""
        kind, level, data = (ir.Constant(ir.IntType(32), value) for value in (int(writes), nearness, 1))
        self._call("llvm.prefetch.p0", ir.VoidType(), [self.pointer(where, ir.IntType(8)), kind, level, data])

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
