"""bfloat16: rounding bit by bit, sums of parts, and every kernel against float32's own, rounded."""
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from mpipar.kernels import attention, elementwise, embedding, gelu, loss, norm, optimizer, plain, random
from mpipar.kernels.bfloat16 import narrow, sum_parts, widen
from mpipar.kernels.blocks import by_blocks, read, write
from mpipar.kernels.dtypes import as_dtype, is_bfloat16, sums_dtype
from tests.helpers.kernels import assert_close, normal, same_bits, threads

HALF = np.dtype(ml_dtypes.bfloat16)
STEP = 2.0**-8  # largest relative error of one rounding


def half(seed, *shape):
    return normal(seed, *shape, dtype=HALF)


def wide(x):
    """A bfloat16 array as float32; any other as a copy."""
    return x.astype(np.float32) if x.dtype == HALF else x.copy()


def every_word():
    return np.arange(2**16, dtype=np.uint32).astype(np.uint16).view(HALF)


def test_names_of_dtypes():
    assert as_dtype("bfloat16") == as_dtype(HALF) == HALF and as_dtype("float32") == np.float32
    assert is_bfloat16(HALF) and not is_bfloat16(np.dtype(np.float16)) and not is_bfloat16(np.dtype("V2"))
    assert sums_dtype(HALF) == np.float32 and sums_dtype(np.float64) == np.float64
    for name in ("float16", "int32", "nonsense"):
        with pytest.raises(ValueError, match="valid values: float32, float64, bfloat16"):
            as_dtype(name)


def test_every_bfloat16_widens_to_its_value_and_back():
    x = every_word()
    y = widen(x, np.empty(x.shape, np.float32))
    assert same_bits(y, plain.widen(x, np.empty_like(y))) and same_bits(y, x.astype(np.float32))
    back, number = narrow(y, np.empty_like(x)), ~np.isnan(y)
    assert (back.view(np.uint16)[number] == x.view(np.uint16)[number]).all() and np.isnan(wide(back)[~number]).all()


def test_rounding_to_nearest_even():
    words = np.random.default_rng(0).integers(0, 2**32, 300_001, dtype=np.uint64).astype(np.uint32)
    middle = (np.arange(2**16, dtype=np.uint32) << 16) + 0x8000  # half-way between two, and its neighbours
    x = np.concatenate([words, middle - 1, middle, middle + 1]).view(np.float32)
    y = narrow(x, np.empty(x.shape, HALF))
    assert same_bits(y, plain.narrow(x, np.empty_like(y)))
    number = ~np.isnan(x)
    with np.errstate(invalid="ignore", over="ignore"):
        assert same_bits(y[number], x.astype(HALF)[number]) and np.isnan(wide(y)[~number]).all()
    cut = (x.view(np.uint32) >> 16).astype(np.uint16).view(HALF)  # control: cutting the lower half off is not rounding
    assert (cut.view(np.uint16) != y.view(np.uint16))[number].mean() > 0.4


def test_sum_of_parts_is_rounded_once_and_in_order():
    parts = half(1, 7, 70_001)
    for factor in (1.0, 1 / 7):
        out = sum_parts(parts, np.empty(parts.shape[1], HALF), factor=factor)
        assert same_bits(out, plain.sum_parts(parts, np.empty_like(out), factor=factor))
    in_halves = parts[0].copy()  # control: a sum that is rounded at each step
    for part in parts[1:]:
        in_halves += part
    exact = parts.astype(np.float64).sum(0)
    once = np.abs(sum_parts(parts, np.empty_like(in_halves)).astype(np.float64) - exact)
    assert (once <= STEP * np.abs(exact) + 1e-5).all() and np.abs(in_halves.astype(np.float64) - exact).max() > 2 * once.max()
    with pytest.raises(ValueError, match="parts"):
        sum_parts(parts, np.empty(3, HALF))


def test_arrays_that_do_not_fit_are_refused():
    x, y = np.zeros((4, 6), np.float32), np.zeros((6, 4), HALF).T
    with pytest.raises(ValueError, match="contiguous"):
        narrow(x, y)
    with pytest.raises(ValueError, match="bfloat16"):
        narrow(x, x)
    with pytest.raises(ValueError, match="float32"):
        widen(y, np.zeros((4, 6)))
    with pytest.raises(ValueError, match="one number of rows"):
        by_blocks(np.copyto, write(np.zeros((4, 2), HALF)), read(np.zeros((5, 2), HALF)))


R, D, V = 700, 96, 65  # two blocks of rows and a part
TOKENS = np.random.default_rng(9).integers(0, V, R)
TARGETS = np.where(np.arange(R) % 13 == 0, -1, TOKENS)
SUMS = normal(50, D, dtype="float32")  # what gradients are added to


def row_numbers():
    """Mean and rstd as layer norm keeps them."""
    x = wide(half(1, R, D))
    return x.mean(1), 1 / np.sqrt(x.var(1) + 1e-5)


def cases():
    """(name, module, arguments as functions, which arguments are results, options)."""
    x, y, z, row = half(1, R, D), half(2, R, D), half(3, R, D), half(4, D)
    mean, rstd = row_numbers()
    logits = half(5, R, V)
    top = wide(logits).max(1)
    sums = np.exp(wide(logits) - top[:, None]).sum(1)
    some = np.zeros(R, np.float32)
    cube, table = x.reshape(7, 100, D), half(6, 128, D)
    yield gelu.gelu_forward, [3 * x, z], [1], {}
    yield gelu.gelu_forward, [x, z], [1], {"form": "tanh"}
    yield gelu.gelu_backward, [x, y, z], [2], {}
    yield gelu.gelu_again, [x, y], [0, 1], {}
    yield elementwise.add, [x, y, z], [2], {}
    yield elementwise.add_bias, [x, row, z], [2], {}
    yield elementwise.bias_residual, [x, row, y, z], [3], {}
    yield elementwise.scale, [x, 0.3, z], [2], {}
    yield elementwise.column_sum, [x, SUMS], [1], {}
    yield elementwise.column_sum, [x, SUMS], [1], {"accumulate": False}
    yield norm.layernorm_forward, [x, row, row, z, some, some], [3, 4, 5], {}
    yield norm.layernorm_again, [x, row, row, mean, rstd, z], [5], {}
    yield norm.layernorm_backward, [x, row, mean, rstd, y, z, SUMS, SUMS], [5, 6, 7], {"residual": y}
    yield norm.layernorm_backward, [x, row, mean, rstd, y, z, SUMS, SUMS], [5, 6, 7], {}
    yield loss.row_max, [logits, some], [1], {}
    yield loss.cross_entropy_sums, [logits, top, TARGETS, 0, some, some], [4, 5], {}
    yield loss.cross_entropy_backward, [logits, top, sums, TARGETS, 0, 0.01, logits], [6], {}
    yield embedding.embedding_forward, [TOKENS, half(7, 40, D), 20, z], [3], {}
    yield embedding.embedding_backward, [TOKENS, x, 20, normal(8, 40, D, dtype="float32")], [3], {}
    yield embedding.add_positions, [cube, table], [0], {}
    yield embedding.positions_backward, [cube, normal(8, 128, D, dtype="float32")], [1], {}
    yield random.dropout, [x, z], [1], dict(key=5, step=3, samples=np.arange(R), offset=1, p=0.3)


def called(function, arguments, results, options, convert):
    """The results of a call on copies of the arrays."""
    made = [convert(a) if isinstance(a, np.ndarray) else a for a in arguments]
    function(*made, **{name: convert(a) if isinstance(a, np.ndarray) else a for name, a in options.items()})
    return [made[i] for i in results]


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case[0].__name__)
def test_kernels_compute_in_float32_and_round_once(case):
    function, arguments, results, options = case
    expected = called(*case, wide)
    plainly = called(getattr(plain, function.__name__), *case[1:], wide)
    for count in (1, 3):
        with threads(count):
            found = called(*case, np.copy)
        for number, (y, float32, meaning) in enumerate(zip(found, expected, plainly)):
            if y.dtype == HALF:
                assert same_bits(y, float32.astype(HALF)), (number, count)
                assert_close(wide(y), meaning, 1.1 * STEP)
            else:  # float32 sums, added in blocks
                assert y.dtype == np.float32
                assert_close(y, float32.astype(np.float64), 1e-5)
                assert_close(y, meaning.astype(np.float64), 1e-4)


def test_control_a_kernel_in_16_bits_would_be_noticed():
    x = half(1, R, D)
    ours = elementwise.column_sum(x, np.zeros(D, np.float32))
    in_halves = np.zeros(D, HALF)
    for row in x:
        in_halves += row
    with pytest.raises(AssertionError):
        assert_close(wide(in_halves), ours.astype(np.float64), 1e-5)


def test_the_sum_of_squares():
    x = half(1, 300, 501)
    assert loss.sum_squares(x) == pytest.approx(plain.sum_squares(wide(x)), rel=1e-12)


@pytest.mark.parametrize("shape", [(2, 70, 3, 8), (1, 1, 1, 4), (2, 0, 3, 8), (1, 130, 2, 33)])
def test_attention(shape):
    B, T, H, width = shape
    qkv, dout = half(1, B, T, 3, H, width), half(2, *shape)
    q, k, v = (qkv[:, :, i] for i in range(3))
    out, lse = np.zeros(shape, HALF), np.zeros((B, H, T), np.float32)
    dqkv = np.zeros_like(qkv)
    attention.attention_forward(q, k, v, out, lse)
    attention.attention_backward(q, k, v, out, lse, dout, *(dqkv[:, :, i] for i in range(3)))
    out32, lse32, dqkv32 = np.zeros(shape, np.float32), np.zeros_like(lse), np.zeros(qkv.shape, np.float32)
    attention.attention_forward(wide(q), wide(k), wide(v), out32, lse32)
    assert same_bits(out, out32.astype(HALF)) and same_bits(lse, lse32)
    attention.attention_backward(wide(q), wide(k), wide(v), wide(out), lse32, wide(dout),
                                 *(dqkv32[:, :, i] for i in range(3)))
    assert same_bits(dqkv, dqkv32.astype(HALF))
    if T:
        with pytest.raises(ValueError, match="lse"):
            attention.attention_forward(q, k, v, out, lse.astype(HALF))


@pytest.mark.parametrize("count", [1, 2])
def test_optimizers_change_the_master_and_round_its_copy(count):
    size = 150_001
    p, g = normal(1, size, dtype="float32"), normal(2, size, dtype="float32")
    bounds, decay = [0, 1000, size - 5], [0.1, 0.0]
    for update, moments in ((optimizer.adamw, 2), (optimizer.sgd, 0)):
        options = dict(lr=1e-3, **(dict(beta1=0.9, beta2=0.99, eps=1e-8, step=1) if moments else {}))
        alone, master, copy = p.copy(), p.copy(), np.zeros(size, HALF)
        update(alone, g, *np.zeros((moments, size), np.float32), bounds, decay, **options)
        with threads(count):
            update(master, g, *np.zeros((moments, size), np.float32), bounds, decay, **options, copy=copy)
        assert same_bits(master, alone) and same_bits(copy, alone.astype(HALF))


def test_small_steps_are_not_lost():
    p, g, copy = np.ones(4, np.float32), np.ones(4, np.float32), np.ones(4, HALF)
    for _ in range(100):
        optimizer.sgd(p, g, [0, 4], [0.0], lr=1e-4, copy=copy)
    assert wide(copy) == pytest.approx(0.99, rel=STEP)
    lost = np.ones(4, HALF)  # control: without a master every step is rounded away
    for _ in range(100):
        lost -= np.full(4, 1e-4, HALF)
    assert (lost == 1).all()


def test_no_float32_copy_of_a_whole_array():
    x, out = half(1, 2000, 1000), np.empty((2000, 1000), HALF)  # 8 MB in float32
    row, statistics = half(2, 1000), np.empty((2, 2000), np.float32)

    def peak(work):
        work()
        tracemalloc.start()
        work()
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    with threads(1):
        assert peak(lambda: gelu.gelu_forward(x, out)) < 1e6
        assert peak(lambda: norm.layernorm_forward(x, row, row, out, *statistics)) < 1e6
        assert peak(lambda: narrow(wide(x), out)) > 8e6  # control: this does make one
