"""float32 on AMX, three pieces of bfloat16 a number: as near to the exact product as vector instructions are."""

import numpy as np
import pytest

from mpipar.kernels import gemm_pieces
from mpipar.kernels.gemm import gemm
from mpipar.kernels.memory import aligned_zeros
from mpipar.kernels.pieces import PIECES, PIECES_BYTES, pack_pieces
from tests.helpers.kernels import float32_by, normal, same_bits

pytestmark = pytest.mark.skipif(not gemm_pieces.has_amx(), reason="this CPU has no AMX")

LARGEST = np.float32(2.0**128 * (1 - 2.0**-9) * (1 - 2.0**-23))  # the largest number that has three pieces


def product(kernel, a, b):
    with float32_by(kernel):
        return gemm(a, b, np.empty((a.shape[0], b.shape[1]), np.float32))


def error(out, a, b):
    """Largest error of an element relative to the sum of absolute values that it sums."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    return (np.abs(out - a @ b) / (np.abs(a) @ np.abs(b))).max()


def operands(kind, m, k, n):
    generator = np.random.default_rng(0)
    if kind == "normal":
        return normal(1, m, k, dtype="float32"), normal(2, k, n, dtype="float32")
    if kind == "positive":  # nothing cancels, so a bias of the rounding would add up
        return (generator.random(shape, np.float32) + np.float32(0.5) for shape in ((m, k), (k, n)))
    return (np.ldexp(generator.standard_normal(shape), generator.integers(-20, 20, shape)).astype(np.float32)
            for shape in ((m, k), (k, n)))


@pytest.mark.parametrize("kind", ["normal", "positive", "wide"])
@pytest.mark.parametrize("m, k, n", [(33, 31, 65), (64, 256, 512), (100, 4000, 96), (512, 512, 512)])
def test_error_is_no_larger_than_that_of_vectors(kind, m, k, n):
    a, b = operands(kind, m, k, n)
    own = error(product("pieces", a, b), a, b)
    assert own <= error(product("vector", a, b), a, b)
    # Negative controls: without the third pieces, and without any but the first, the same check fails.
    two = (a.view(np.uint32) & 0xFFFFFF00).view(np.float32)
    one = (a.view(np.uint32) & 0xFFFF0000).view(np.float32)
    assert error(product("pieces", two, b), a, b) > 10 * own and error(product("pieces", one, b), a, b) > 1000 * own


def planes(x, depth):
    """The pieces of lines of x, packed as a block of A: [3, lines, depth], float32."""
    block = aligned_zeros(PIECES_BYTES // 2, np.uint16)
    lines = len(x)
    pack_pieces(True, True, x.ctypes.data, x.strides[0], 4, lines, depth, block.ctypes.data)
    words = block.reshape(PIECES, 32, 16, 2)[:, :lines]
    halves = np.concatenate([words[..., 0], words[..., 1]], axis=-1)[..., :depth]
    return (halves.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("lines, depth", [(32, 32), (5, 32), (32, 7), (17, 23)])
def test_the_pieces_of_a_number_are_all_of_it(lines, depth):
    bits = np.random.default_rng(1).integers(0, 2**32, (lines, depth), np.uint32)
    x = bits.view(np.float32)
    # Numbers whose last piece would be below 2^-126 lose it where they are multiplied, so they are left out.
    x[~(np.abs(x) <= LARGEST) | (np.abs(x) < 2.0**-100)] = 1 + 2.0**-23
    x[0, 0] = -LARGEST
    high, middle, low = planes(x, depth).astype(np.float64)
    assert (high + middle + low == x).all()
    assert (np.abs(middle) <= 2.0**-8 * np.abs(x)).all() and (np.abs(low) <= 2.0**-16 * np.abs(x)).all()


def test_numbers_beyond_the_range_are_seen():
    a, b = normal(1, 40, 50, dtype="float32"), normal(2, 50, 60, dtype="float32")
    right = product("pieces", a, b)
    for bad in (np.nan, -np.nan, np.inf, -np.inf, np.float32(3.4e38), np.array(0x7FFFFFFF, np.uint32).view(np.float32)):
        broken = a.copy()
        broken[7, 13] = bad
        out = product("pieces", broken, b)
        assert not np.isfinite(out[7]).any()
        assert same_bits(np.delete(out, 7, 0), np.delete(right, 7, 0))


def test_numbers_near_zero_count_as_zero_and_harm_nothing():
    a, b = normal(1, 40, 50, dtype="float32"), normal(2, 50, 60, dtype="float32")
    right = product("pieces", a, b)
    tiny = np.where(np.random.default_rng(3).random(a.shape) < 0.5, a, np.float32(3e-42))
    kept = np.where(tiny == a, a, np.float32(0))
    assert same_bits(product("pieces", tiny, b), product("pieces", kept, b))
    small = product("pieces", a * np.float32(2.0**-100), b)
    assert np.abs(small * 2.0**100 - right).max() <= 1e-5  # measured: 2e-6, of products up to 28


def test_exact_where_float32_is_exact():
    a = np.random.default_rng(4).integers(-2000, 2000, (70, 64)).astype(np.float32)
    b = np.random.default_rng(5).integers(-2, 3, (64, 90)).astype(np.float32)
    assert (product("pieces", a, b) == a.astype(np.int64) @ b.astype(np.int64)).all()


def test_only_products_that_gain_are_made_of_pieces():
    assert gemm_pieces.suits(2048, 384, 1536) and gemm_pieces.suits(128, 1024, 1024)
    for shape in ((16, 1024, 4096), (77, 130, 201), (1024, 1024, 3), (4096, 8, 4096), (100, 100, 100), (48, 1024, 1024)):
        assert not gemm_pieces.suits(*shape)
