"""Packing for the blocked product: operands of any strides become panels that are read in order.

A panel holds `width` lines (rows of A, or columns of B) side by side: for each step of k, `width` consecutive
numbers. One function serves both operands and every transposition, because a line has a step of its own and
k has another. bfloat16 becomes float32 on the way.
"""

from .cache import jit
from .vector import (LINE, address, copy_lanes, copy_vector, lanes, load, number_of, size_of, stand_alone, store,
                     sum_vectors, transpose_lanes)

SUM_STEPS = 64  # steps of k that are summed in the numbers' own type; these sums are added in float64


@jit
def pack_panel(zero, source, line_step, k_step, lines, beyond, k, width, target):
    """target[p, i] = source[i * line_step + p * k_step] for i < lines, p < k; `width` elements a row.

    All arguments but zero, a number of the source's type, are addresses, bytes and counts. lines <= width. beyond: how
    many more lines lie behind these and may be read: whole vectors are then read where the last one is not all wanted.
    Up to a vector beyond the panel is overwritten, so panels are packed in the order of their addresses. Places
    i >= lines hold harmless numbers where width is whole vectors.
    """
    stand_alone(zero)
    size, packed = size_of(zero), size_of(number_of(zero))
    if line_step == size:
        _copy(zero, source, k_step, lines, beyond, k, width, target)
        return
    whole = 0
    if k_step == size and lines > 2:
        whole = k - k % lanes(zero)
        _transpose(zero, source, line_step, lines, whole, width, target)
    for p in range(whole, k):
        for i in range(width):
            value = number_of(zero)
            if i < lines:
                value = load(zero, source + i * line_step + p * k_step)
            store(value, target + (p * width + i) * packed)


@jit
def sum_columns(zero, panels, columns, depth, block, totals):
    """totals[j] += the sum of column j over `depth` steps of k, from packed panels of B, while they are near.

    block: memory for a vector of numbers. totals: [columns], float64: the rounding error does not grow with k.
    """
    stand_alone(zero)
    size, vector = size_of(number_of(zero)), lanes(zero)
    for j in range(0, columns, 2 * vector):
        here = min(2 * vector, columns - j)
        width = vector if here <= vector else 2 * vector
        for p in range(0, depth, SUM_STEPS):
            for v in range(0, here, vector):
                sum_vectors(zero, panels + (p * width + v) * size, width * size, min(SUM_STEPS, depth - p),
                            address(block))
                for i in range(min(vector, here - v)):
                    totals[j + v + i] += block[i]
        panels += width * depth * size


@jit(inline=True)
def _copy(zero, source, k_step, lines, beyond, k, width, target):
    # Lines lie side by side in memory already.
    size, packed, vector = size_of(zero), size_of(number_of(zero)), lanes(zero)
    next_source, next_target = vector * size, vector * packed
    if lines <= vector <= lines + beyond:
        for p in range(k):
            copy_vector(zero, source + p * k_step, target + p * width * packed)
        return
    if vector < lines <= 2 * vector <= lines + beyond:
        for p in range(k):
            here, to = source + p * k_step, target + p * width * packed
            copy_vector(zero, here, to)
            copy_vector(zero, here + next_source, to + next_target)
        return
    for p in range(k):
        for i in range(0, lines, vector):
            copy_lanes(zero, source + i * size, target + i * packed, min(vector, lines - i))
        source += k_step
        target += width * packed


@jit(inline=True)
def _transpose(zero, source, line_step, lines, k, width, target):
    # Each line runs along k. The last lines go first: what they write beyond the row is then overwritten. A whole
    # cache line of each is used at once: where lines are a power of two apart, few stay in the nearest cache.
    size, packed, vector = size_of(zero), size_of(number_of(zero)), lanes(zero)
    last = (lines - 1) // vector * vector
    run = LINE // size
    for p0 in range(0, k, run):
        for i in range(last, -1, -vector):
            for p in range(p0, min(p0 + run, k), vector):
                transpose_lanes(zero, source + i * line_step + p * size, line_step, min(vector, lines - i),
                                target + (p * width + i) * packed, width * packed)
