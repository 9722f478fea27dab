"""Random numbers that are pure functions of a key and an index (Philox4x32-10), so that no layout changes
them.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Meaning: `plain.py`.
The normal numbers use their own logarithm, sine and cosine, in plain IEEE 754 steps: their bits depend
neither on how a range is cut, nor on vectors, nor on the machine's mathematical library.
"""
import math

import numpy as np

from .blocks import by_blocks, read, write
from .cache import jit
from .dtypes import is_bfloat16
from .polynomials import inlined
from .shapes import check_probability
from .threads import parallel_for
from .views import begin_together, ranges, same_dtype, same_shape, source, target

GRAIN = 16384
WORDS = 1024  # random words that dropout makes at a time; a multiple of 4

u32, u64 = np.uint32, np.uint64
MASK = u64(0xFFFFFFFF)
WORD = u64(32)
MULTIPLIERS = u64(0xD2511F53), u64(0xCD9E8D57)
WEYL = u64(0x9E3779B9), u64(0xBB67AE85)


def philox(counter, key):
    """Philox4x32-10: uint32 [..., 4] random words for counters [..., 4] and keys [..., 2] (broadcast)."""
    shape = np.broadcast_shapes(np.shape(counter)[:-1], np.shape(key)[:-1])
    counters = np.array(np.broadcast_to(counter, (*shape, 4)), u32).reshape(-1, 4)
    keys = np.array(np.broadcast_to(key, (*shape, 2)), u32).reshape(-1, 2)
    _philox_rows(counters, keys)
    return counters.reshape(*shape, 4)


def fill_normal(out, key, start, *, std):
    """out[i] = std * z(key, start + i), z normal. A pure function of its arguments: the range may be cut
    anywhere.

    out: [n], float32 (the float64 value, rounded) or float64; key: an integer below 2^64; start >= 0. Box and
    Muller."""
    same_dtype(out)
    y, key, start = target(out), _word64(key), int(start)
    parallel_for(_fill_normal, [(y[cut], key, start + cut.start, float(std))
                                for cut in ranges(y.size, GRAIN)])
    return out


def dropout(x, out, *, key, step, samples, offset, p):
    """out[b, e] = x[b, e] * keep / (1 - p), keep a pure function of (key, step, samples[b], offset + e).

    The same call on dy is the backward pass. Srivastava et al. 2014. x, out: [B, E], out may be x; samples:
    int64 [B], numbers of the global batch's samples; offset: the place of column 0 in the global row.
    ValueError unless 0 <= p < 1."""
    check_probability(p)
    same_shape(x, out)
    if x.ndim != 2 or np.shape(samples) != x.shape[:1]:
        raise ValueError(f"dropout of {x.shape} with samples {np.shape(samples)}: "
                         "give [B, E] and one sample for each row")
    rows = np.array(samples, np.int64)
    if is_bfloat16(x.dtype):
        by_blocks(dropout, read(x), write(out), key=key, step=step, samples=read(rows), offset=offset, p=p)
        return out
    dtype = same_dtype(x, out)
    a, y = source(x, x.shape[1]), target(out, x.shape[1])
    threshold, factor = u32(min(round(p * 2**32), 2**32 - 1)), dtype.type(1 / (1 - p))
    head = (_word64(key), _word64(step))
    kernel = _dropout_in_place if begin_together(x, out) else _dropout
    parallel_for(kernel, [(*head, rows[b], a[b, cut], y[b, cut], int(offset) + cut.start, threshold, factor)
                          for b in range(x.shape[0]) for cut in ranges(x.shape[1], GRAIN)])
    return out


def warm(dtype):
    """Compiles or loads every kernel of this file for a dtype."""
    x, y = np.ones((1, 4), dtype), np.ones((1, 4), dtype)
    philox(np.zeros(4, u32), np.zeros(2, u32))
    fill_normal(x[0], 0, 0, std=1.0)
    dropout(x, y, key=0, step=0, samples=[0], offset=0, p=0.5)
    dropout(x, x, key=0, step=0, samples=[0], offset=0, p=0.5)


def _word64(value):
    return u64(int(value) & (2**64 - 1))


@inlined
def _philox(c0, c1, c2, c3, k0, k1):
    # 32-bit words in 64-bit variables: the products need them
    for _ in range(10):
        product0, product1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c2 = (product1 >> WORD) ^ c1 ^ k0, (product0 >> WORD) ^ c3 ^ k1
        c1, c3 = product1 & MASK, product0 & MASK
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


@jit
def _philox_rows(counters, keys):
    for i in range(counters.shape[0]):
        c0, c1, c2, c3 = _philox(u64(counters[i, 0]), u64(counters[i, 1]), u64(counters[i, 2]),
                                 u64(counters[i, 3]), u64(keys[i, 0]), u64(keys[i, 1]))
        counters[i, 0], counters[i, 1], counters[i, 2], counters[i, 3] = u32(c0), u32(c1), u32(c2), u32(c3)


@inlined
def _minus_log(u):
    """-ln u for a normal number 0 < u <= 1."""
    # u = 2^k m with m in [sqrt(1/2), sqrt(2));  ln m = 2 artanh s = 2 (s + s^3 / 3 + ...),  s = (m - 1) / (m
    # + 1) < 0.172
    bits = np.float64(u).view(np.int64)
    k = (bits >> np.int64(52)) - np.int64(1023)
    m = np.int64((bits & np.int64(0xFFFFFFFFFFFFF)) | np.int64(0x3FF0000000000000)).view(np.float64)
    large = m > 1.4142135623730951
    m = 0.5 * m if large else m
    k = k + 1 if large else k
    s = (m - 1.0) / (m + 1.0)
    t = s * s
    p = 1 / 21
    p = p * t + 1 / 19
    p = p * t + 1 / 17
    p = p * t + 1 / 15
    p = p * t + 1 / 13
    p = p * t + 1 / 11
    p = p * t + 1 / 9
    p = p * t + 1 / 7
    p = p * t + 1 / 5
    p = p * t + 1 / 3
    return np.float64(-k) * 0.6931471805599453 - 2.0 * (s + s * t * p)


@inlined
def _turn(u):
    """(cos 2 pi u, sin 2 pi u) for 0 <= u < 1."""
    # u = q / 4 + t, |t| <= 1/8 (exact), x = 2 pi t: Taylor series on |x| <= pi / 4, then q quarter turns
    q = np.int64(4.0 * u + 0.5)
    x = 6.283185307179586 * (u - 0.25 * np.float64(q))
    t = x * x
    s = -1 / 1307674368000
    s = s * t + 1 / 6227020800
    s = s * t - 1 / 39916800
    s = s * t + 1 / 362880
    s = s * t - 1 / 5040
    s = s * t + 1 / 120
    s = s * t - 1 / 6
    s = x + x * t * s
    c = 1 / 20922789888000
    c = c * t - 1 / 87178291200
    c = c * t + 1 / 479001600
    c = c * t - 1 / 3628800
    c = c * t + 1 / 40320
    c = c * t - 1 / 720
    c = c * t + 1 / 24
    c = c * t - 0.5
    c = 1.0 + t * c
    odd = (q & 1) == 1
    cosine, sine = (s if odd else c), (c if odd else s)
    cosine = -cosine if q == 1 or q == 2 else cosine
    sine = -sine if q == 2 or q == 3 else sine
    return cosine, sine


@inlined
def _normal_pair(j, k0, k1):
    j = u64(j)
    c0, c1, c2, c3 = _philox(j & MASK, j >> WORD, u64(0), u64(0), k0, k1)
    u = (np.float64(np.int64(((c0 << WORD) | c1) >> u64(11))) + 0.5) * 2.0**-53
    v = np.float64(np.int64(((c2 << WORD) | c3) >> u64(11))) * 2.0**-53
    radius = math.sqrt(2.0 * _minus_log(u))
    cosine, sine = _turn(v)
    return radius * cosine, radius * sine


@jit
def _fill_normal(out, key, start, std):
    k0, k1 = key & MASK, key >> WORD
    skip = start & 1
    if skip and out.size:
        out[0] = std * _normal_pair(start >> 1, k0, k1)[1]
    first = (start + skip) >> 1
    pairs = (out.size - skip) // 2 if out.size else 0
    body = out[skip:skip + 2 * pairs]
    for j in range(pairs):
        z0, z1 = _normal_pair(first + j, k0, k1)
        body[2 * j] = std * z0
        body[2 * j + 1] = std * z1
    if out.size and skip + 2 * pairs < out.size:
        out[out.size - 1] = std * _normal_pair(first + pairs, k0, k1)[0]


@jit
def _fill_words(words, block, k0, k1):
    for j in range(words.size // 4):
        at = u64(block + j)
        c0, c1, c2, c3 = _philox(at & MASK, at >> WORD, u64(1), u64(0), k0, k1)
        words[4 * j], words[4 * j + 1] = u32(c0), u32(c1)
        words[4 * j + 2], words[4 * j + 3] = u32(c2), u32(c3)


@inlined
def _row_key(key, step, sample):
    sample = u64(sample)
    k0, k1, _, _ = _philox(step & MASK, step >> WORD, sample & MASK, sample >> WORD, key & MASK, key >> WORD)
    return k0, k1


@jit
def _dropout(key, step, sample, x, out, offset, threshold, factor):
    k0, k1 = _row_key(key, step, sample)
    words = np.empty(WORDS, u32)
    zero = x.dtype.type(0)
    done = 0
    while done < x.size:
        skip = (offset + done) & 3
        count = min(WORDS - skip, x.size - done)
        used = words[:(skip + count + 3) // 4 * 4]
        _fill_words(used, (offset + done) >> 2, k0, k1)
        a, y, w = x[done:done + count], out[done:done + count], words[skip:skip + count]
        for i in range(count):
            y[i] = a[i] * factor if w[i] >= threshold else zero
        done += count


@jit
def _dropout_in_place(key, step, sample, x, out, offset, threshold, factor):
    k0, k1 = _row_key(key, step, sample)
    words = np.empty(WORDS, u32)
    zero = x.dtype.type(0)
    done = 0
    while done < out.size:
        skip = (offset + done) & 3
        count = min(WORDS - skip, out.size - done)
        used = words[:(skip + count + 3) // 4 * 4]
        _fill_words(used, (offset + done) >> 2, k0, k1)
        y, w = out[done:done + count], words[skip:skip + count]
        for i in range(y.size):
            y[i] = y[i] * factor if w[i] >= threshold else zero
        done += count
