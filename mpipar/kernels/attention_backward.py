"""The backward pass of one attention head, over the same tiles as the forward pass."""
import numpy as np

from .attention_tiles import BLOCK, aligned, column_of_tiles, pack_columns, pack_lines, write_transposed
from .cache import jit
from .polynomials import SUM_FLAGS, VECTOR_FLAGS, exp
from .vector import address, lanes, size_of, stand_alone
from .wide import wide_vectors


@jit
def backward_head(q, k, v, out, dout, dq, dk, dv, lse, q_row, k_row, v_row, out_row, dout_row, dq_row, dk_row,
                  dv_row, width, factor):
    """dq, dk, dv of one head; arrays from the head's first number on, tokens `*_row` elements apart; lse:
    [T]."""
    # P = exp(S - lse), O = P V:  dV = P^T dO,  dP = dO V^T,  dS = P (dP - delta), delta = rowsum(dO O)
    # S = Q K^T / sqrt(hd):       dQ = dS K / sqrt(hd),  dK = dS^T Q / sqrt(hd)
    # Tiles are [queries, keys]: P and dS are right operands, where they lie, of dV^T = dO^T P and dK^T = Q^T
    # dS. Only dQ needs dS packed.
    tokens = lse.size
    zero = q.dtype.type(0)
    size, panel = size_of(zero), 2 * lanes(zero)
    step = BLOCK * size
    begin, no = np.int64(0), np.bool_(False)  # not constants: those would be compiled for anew
    wide = -(-width // panel) * panel
    whole = tokens * width + panel
    query_rows, dout_rows = aligned(q, whole), aligned(q, whole)  # lines: tokens, for S and dP
    query_columns, dout_columns = aligned(q, whole), aligned(q, whole)  # lines: hd, for dK^T and dV^T
    keys, values, key_rows = aligned(q, BLOCK * width + panel), aligned(q, BLOCK * width + panel), \
        aligned(q, BLOCK * wide + panel)
    tile_p, tile_ds = aligned(q, BLOCK * BLOCK + panel), aligned(q, BLOCK * BLOCK + panel)
    packed_ds = aligned(q, BLOCK * BLOCK + panel)
    sum_k, sum_v, work = aligned(q, width * BLOCK + panel), aligned(q, width * BLOCK + panel), \
        aligned(q, BLOCK * wide + panel)
    delta = aligned(q, tokens)
    p_at, ds_at = address(tile_p), address(tile_ds)
    for i0 in range(0, tokens, BLOCK):
        n, at = min(BLOCK, tokens - i0), i0 * width * size
        q_at, dout_at = address(q) + i0 * q_row * size, address(dout) + i0 * dout_row * size
        pack_lines(zero, q_at, q_row * size, size, n, width, address(query_rows) + at)
        pack_lines(zero, dout_at, dout_row * size, size, n, width, address(dout_rows) + at)
        pack_lines(zero, q_at, size, q_row * size, width, n, address(query_columns) + at)
        pack_lines(zero, dout_at, size, dout_row * size, width, n, address(dout_columns) + at)
    for i in range(tokens):
        delta[i] = _dot(out[i * out_row:i * out_row + width], dout[i * dout_row:i * dout_row + width])

    for j0 in range(0, tokens, BLOCK):
        n = min(BLOCK, tokens - j0)
        k_at, v_at = address(k) + j0 * k_row * size, address(v) + j0 * v_row * size
        pack_columns(zero, k_at, k_row * size, size, n, width, address(keys))
        pack_columns(zero, v_at, v_row * size, size, n, width, address(values))
        pack_columns(zero, k_at, size, k_row * size, width, n, address(key_rows))
        for i0 in range(j0, tokens, BLOCK):
            rows, at = min(BLOCK, tokens - i0), i0 * width * size
            diagonal, adding = i0 == j0, i0 > j0
            for j in range(0, n, panel):
                columns, first = min(panel, n - j), j if diagonal else 0
                column_of_tiles(zero, address(query_rows) + at, width, rows, first, rows,
                                address(keys) + j * width * size, panel * size,
                                p_at + j * size, step, columns, begin, width, no)
                column_of_tiles(zero, address(dout_rows) + at, width, rows, first, rows,
                                address(values) + j * width * size, panel * size,
                                ds_at + j * size, step, columns, begin, width, no)
            _differentiate_tile(tile_p, tile_ds, rows, n, diagonal, lse[i0:], delta[i0:], factor)
            for j in range(0, n, panel):
                columns, first = min(panel, n - j), j if diagonal else 0
                seen, below = rows - first, first * step + j * size
                column_of_tiles(zero, address(dout_columns) + at, rows, width, begin, width,
                                p_at + below, step, address(sum_v) + j * size, step, columns, first, seen,
                                adding)
                column_of_tiles(zero, address(query_columns) + at, rows, width, begin, width,
                                ds_at + below, step, address(sum_k) + j * size, step, columns, first, seen,
                                adding)
            pack_lines(zero, ds_at, step, size, rows, n, address(packed_ds))
            for d in range(0, width, panel):
                column_of_tiles(zero, address(packed_ds), n, rows, begin, rows,
                                address(key_rows) + d * n * size, panel * size,
                                address(dq) + (i0 * dq_row + d) * size, dq_row * size,
                                min(panel, width - d), begin, n, j0 > 0)
        write_transposed(zero, address(sum_k), step, width, n, work, dk[j0 * dk_row:], dk_row)
        write_transposed(zero, address(sum_v), step, width, n, work, dv[j0 * dv_row:], dv_row)


@jit(fastmath=VECTOR_FLAGS)
def _differentiate_tile(tile_p, tile_ds, rows, keys, diagonal, lse, delta, factor):
    """tile_p: q k -> P; tile_ds: dP -> dS / sqrt(hd); both [rows, keys]."""
    stand_alone(factor)
    wide_vectors()
    # As in the forward pass, a row is longer than what is used of it, so that no loop has a remainder.
    count = BLOCK if keys > BLOCK // 2 else keys
    zero = tile_p.dtype.type(0)
    for i in range(rows):
        seen = i + 1 if diagonal else keys
        p, ds = tile_p[i * BLOCK:i * BLOCK + count], tile_ds[i * BLOCK:i * BLOCK + count]
        shift, mean = lse[i], delta[i]
        for j in range(p.size):
            value = exp(p[j] * factor - shift)
            slope = value * (ds[j] - mean) * factor
            p[j] = value if j < seen else zero
            ds[j] = slope if j < seen else zero


@jit(fastmath=SUM_FLAGS)
def _dot(a, b):
    total = a.dtype.type(0)
    for i in range(a.size):
        total += a[i] * b[i]
    return total
