"""Three ways to compute a block of the tiled product with vectors (lecture section 2.6, item 2).

    splat_rows         (i) an element of A, copied to all lanes, times a vector of B
    dot_columns        (ii) the block of B transposed, then vector dot products along k
    register_block     (iii) V x V elements of C in V registers of V lanes while k runs

All are `gemm_plain.tiled` with another way to do one block, take the same `tile` and raise the same
ValueError. The interface is that of `gemm_plain.py`: out[m, n] = a[m, k] @ b[k, n], float32 or float64, any
sizes, any strides.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .cache import jit
from .gemm_plain import check_tile
from .instructions import LANES
from .vector import address, lanes, size_of
from .wide import wide_vectors

DOT = {"contract", "reassoc"}  # lets LLVM keep a dot product as one sum in each lane
FUSE = {"contract"}  # multiply and add in one instruction


def splat_rows(a, b, out, *, tile=64):
    """Variant (i): out[i, j..] += a[i, p] * b[p, j..]; lanes are columns, each a[i, p] is copied to all.

    Every multiplication also loads and stores its vector of out, which is what holds it back.
    """
    check_tile(tile)
    out.fill(0)
    _splat_rows(a, b, out, tile)
    return out


def dot_columns(a, b, out, *, tile=64):
    """Variant (ii): a block of b is transposed, so that both operands of a dot product run along k.

    Sums stay in registers, but the lanes have to be added up for every element of out and block of k.
    """
    check_tile(tile)
    out.fill(0)
    columns, row = np.empty((min(tile, b.shape[1]), tile), b.dtype), np.empty(tile, a.dtype)
    _dot_columns(a, b, out, columns, row, tile)
    return out


def register_block(a, b, out, *, tile=64):
    """Variant (iii): V x V sums, one register of V lanes for each row, stay in registers while k runs.

    A step of k loads V elements of a and one vector of b for V * V multiplications. Both operands are first
    copied to panels where these lie side by side; tile is rounded up to a multiple of V.
    """
    check_tile(tile)
    out.fill(0)
    m, k = a.shape
    width = LANES[8 * out.itemsize]
    tile = -(-tile // width) * width
    panels_of_a = np.empty((min(tile, m + width) // width, k, width), out.dtype)
    panel_of_b = np.empty((min(tile, k), width), out.dtype)
    edge = np.empty((width, width), out.dtype)
    _register_blocks(out.dtype.type(0), a, b, out, panels_of_a, panel_of_b, edge, tile)
    return out


@jit(fastmath=FUSE)
def _splat_rows(a, b, out, tile):
    wide_vectors()
    m, k = a.shape
    n = b.shape[1]
    for i0 in range(0, m, tile):
        for j0 in range(0, n, tile):
            for p0 in range(0, k, tile):
                for i in range(i0, min(i0 + tile, m)):
                    row = out[i, j0:j0 + tile]
                    for p in range(p0, min(p0 + tile, k)):
                        element, line = a[i, p], b[p, j0:j0 + tile]
                        for j in range(row.size):
                            row[j] += element * line[j]


@jit(fastmath=DOT)
def _dot_columns(a, b, out, columns, row, tile):
    wide_vectors()
    m, k = a.shape
    n = b.shape[1]
    for j0 in range(0, n, tile):
        for p0 in range(0, k, tile):
            block = b[p0:p0 + tile, j0:j0 + tile]
            depth = block.shape[0]
            for p in range(depth):
                for j in range(block.shape[1]):
                    columns[j, p] = block[p, j]
            for i in range(m):
                for p in range(depth):
                    row[p] = a[i, p0 + p]
                for j in range(block.shape[1]):
                    column = columns[j]
                    total = out.dtype.type(0)
                    for p in range(depth):
                        total += row[p] * column[p]
                    out[i, j0 + j] += total


@jit
def _register_blocks(zero, a, b, out, panels_of_a, panel_of_b, edge, tile):
    m, k = a.shape
    n = b.shape[1]
    size, width = size_of(zero), lanes(zero)
    for i0 in range(0, m, tile):
        rows = min(tile, m - i0)
        for i in range(0, rows, width):
            _pack_columns(a[i0 + i:min(i0 + i + width, m)].T, panels_of_a[i // width])
        for j0 in range(0, n, tile):
            for p0 in range(0, k, tile):
                depth = min(tile, k - p0)
                for j in range(j0, min(j0 + tile, n), width):
                    columns = min(width, n - j)
                    _pack_columns(b[p0:p0 + depth, j:j + columns], panel_of_b)
                    for i in range(0, rows, width):
                        block = out[i0 + i:min(i0 + i + width, m), j:j + columns]
                        panel = panels_of_a[i // width]
                        if block.shape[0] == width and columns == width and block.strides[1] == size:
                            _square(zero, address(panel) + p0 * width * size, address(panel_of_b), depth,
                                    address(block), block.strides[0])
                            continue
                        edge[:] = zero  # a whole block elsewhere, of which a part is wanted
                        _square(zero, address(panel) + p0 * width * size, address(panel_of_b), depth,
                                address(edge), width * size)
                        for r in range(block.shape[0]):
                            for c in range(columns):
                                block[r, c] += edge[r, c]


@jit
def _pack_columns(source, panel):
    # panel[p, c] = source[p, c], zeros beyond the last column
    for p in range(source.shape[0]):
        for c in range(source.shape[1]):
            panel[p, c] = source[p, c]
        for c in range(source.shape[1], panel.shape[1]):
            panel[p, c] = 0


@intrinsic
def _square(context, zero, a, b, k, c, c_step):
    """c[V, V] += a[k, V].T @ b[k, V]: one sum of V lanes for each row of c, all in registers while k runs.

    k >= 1. a, b, c are addresses; the rows of c lie `c_step` bytes apart.
    """
    def generate(ctx, builder, signature, arguments):
        _, a, b, k, c, c_step = arguments
        width, size = LANES[zero.bitwidth], zero.bitwidth // 8
        element, word = ctx.get_value_type(zero), ir.IntType(64)
        vector = ir.VectorType(element, width)

        def place(start, number, step):
            return builder.add(start, builder.mul(word(number), step))

        def read(kind, where):
            value = builder.load(builder.inttoptr(where, kind.as_pointer()))
            value.align = size
            return value

        def splat(value):
            one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.IntType(32)(0))
            all_first = ir.Constant(ir.VectorType(ir.IntType(32), width), [0] * width)
            return builder.shuffle_vector(one, one, all_first)

        rows = [place(c, i, c_step) for i in range(width)]
        first = [read(vector, row) for row in rows]
        before = builder.block
        loop, after = builder.append_basic_block("k"), builder.append_basic_block("store")
        builder.branch(loop)

        builder.position_at_end(loop)
        step = builder.phi(word)
        sums = [builder.phi(vector) for _ in rows]
        line = builder.mul(step, word(width * size))
        at_a, of_b = builder.add(a, line), read(vector, builder.add(b, line))
        new = []
        for i in range(width):
            of_a = splat(read(element, builder.add(at_a, word(i * size))))
            product = builder.fmul(of_a, of_b, flags=("contract",))
            new.append(builder.fadd(sums[i], product, flags=("contract",)))
        next_step = builder.add(step, word(1))
        for node, start, value in zip([step, *sums], [word(0), *first], [next_step, *new]):
            node.add_incoming(start, before)
            node.add_incoming(value, loop)
        builder.cbranch(builder.icmp_signed("<", next_step, k), loop, after)

        builder.position_at_end(after)
        for row, value in zip(rows, new):
            builder.store(value, builder.inttoptr(row, vector.as_pointer())).align = size
        return ctx.get_dummy_value()
    word = types.int64
    return types.void(zero, word, word, word, word, word), generate
