"""Attention over tiles against the plain form that builds the whole matrix, and that against differences."""
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from mpipar.kernels import attention, plain
from mpipar.kernels.attention_tiles import BLOCK
from tests.helpers.finite_difference import check_gradient
from tests.helpers.kernels import DTYPES, assert_close, normal, same_bits, threads

# Measured, of the largest element: float32 6e-7 forward, 8e-7 backward; float64 2e-15. A wrong factor gives
# over 1e-2.
TOLERANCE = {"float32": 3e-6, "float64": 2e-14}
SHAPES = [(0, 3, 1, 4), (2, 0, 1, 4), (1, 1, 1, 1), (2, 2, 3, 5), (1, 16, 4, 8), (1, BLOCK - 1, 1, 16),
          (2, BLOCK + 1, 2, 17), (1, 2 * BLOCK, 1, 64), (1, 2 * BLOCK + 33, 2, 33), (1, 3 * BLOCK, 1, 130)]
both = pytest.mark.parametrize("dtype", DTYPES)


def packed(seed, B, T, H, width, dtype="float64"):
    """q, k, v as views of one [B, T, 3, H, width] array, as a fused projection gives them."""
    whole = normal(seed, B, T, 3, H, width, dtype=dtype)
    return [whole[:, :, i] for i in range(3)]


def forward(module, q, k, v):
    B, T, H, _ = q.shape
    out, lse = np.full(q.shape, np.nan, q.dtype), np.full((B, H, T), np.nan, q.dtype)
    module.attention_forward(q, k, v, out, lse)
    return out, lse


def backward(module, q, k, v, out, lse, dout):
    gradients = np.full((*q.shape[:2], 3, *q.shape[2:]), np.nan, q.dtype)
    views = [gradients[:, :, i] for i in range(3)]
    module.attention_backward(q, k, v, out, lse, dout, *views)
    return views


def widened(arrays):
    return [array.astype(np.float64) for array in arrays]


def compare(q, k, v, dout, tolerance):
    out, lse = forward(attention, q, k, v)
    expected = forward(plain, *widened((q, k, v)))
    assert_close(out, expected[0], tolerance)
    assert_close(lse, expected[1], tolerance)
    gradients = backward(attention, q, k, v, out, lse, dout)
    right_gradients = backward(plain, *widened((q, k, v)), *expected, dout.astype(np.float64))
    for actual, right in zip(gradients, right_gradients):
        assert_close(actual, right, tolerance)


@both
@pytest.mark.parametrize("shape", SHAPES)
def test_against_plain(shape, dtype):
    compare(*packed(1, *shape, dtype=dtype), normal(2, *shape, dtype=dtype), TOLERANCE[dtype])


@hypothesis_settings(max_examples=30, deadline=None)
@given(st.integers(1, 2), st.integers(1, 150), st.integers(1, 2), st.integers(1, 40),
       st.sampled_from([0.1, 1, 5]))
def test_any_shape_against_plain(B, T, H, width, size):
    q, k, v = (size * x for x in packed(T, B, T, H, width))
    compare(q, k, v, normal(2, B, T, H, width), 1e-12)


@both
def test_layouts_of_operands(dtype):
    q, k, v = packed(1, 2, 70, 3, 16, dtype=dtype)
    expected = forward(attention, q, k, v)
    swapped = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for x in (q, k, v)]
    strided = [np.repeat(x, 2, axis=3)[..., ::2] for x in (q, k, v)]
    fixed = [x.copy() for x in (q, k, v)]
    for x in fixed:
        x.flags.writeable = False
    for operands in (swapped, strided, fixed, [x[:, ::-1][:, ::-1] for x in (q, k, v)]):
        assert all(same_bits(a, b) for a, b in zip(forward(attention, *operands), expected))


def test_nothing_beside_the_result_is_written():
    B, T, H, width = 2, 67, 2, 5
    q, k, v = packed(1, B, T, H, width, dtype="float32")
    frame = np.full((B, T + 2, H + 2, width + 3), 7, np.float32)
    out, lse = frame[:, 1:-1, 1:-1, 1:-2], np.empty((B, H, T), np.float32)
    attention.attention_forward(q, k, v, out, lse)
    grads = [frame.copy() for _ in range(3)]
    attention.attention_backward(q, k, v, out, lse, v, *(x[:, 1:-1, 1:-1, 1:-2] for x in grads))
    for array in (frame, *grads):
        array[:, 1:-1, 1:-1, 1:-2] = 7
        assert (array == 7).all()


def test_large_scores():
    q, k, v = packed(1, 1, 100, 1, 16, dtype="float32")
    # scores of 10^4: each is rounded by 6e-4
    compare(30 * q, 30 * k, v, normal(2, 1, 100, 1, 16, dtype="float32"), 2e-3)
    out, lse = forward(attention, 100 * q, 100 * k, v)
    assert np.isfinite(out).all() and np.isfinite(lse).all()


def test_future_tokens_have_no_influence():
    q, k, v = packed(1, 1, 150, 2, 16, dtype="float32")
    out, lse = forward(attention, q, k, v)
    k[:, 90:], v[:, 90:], q[:, 90:] = 1e6, np.nan, -3
    changed, changed_lse = forward(attention, q, k, v)
    assert same_bits(changed[:, :64], out[:, :64]) and same_bits(changed_lse[:, :, :90], lse[:, :, :90])
    assert not np.isfinite(changed[:, 90:]).any()


@both
def test_same_bits_on_any_number_of_threads(dtype):
    q, k, v = packed(1, 2, 130, 3, 16, dtype=dtype)
    dout, results = normal(2, 2, 130, 3, 16, dtype=dtype), []
    for count in (1, 2, 3):
        with threads(count):
            out, lse = forward(attention, q, k, v)
            results.append((out, lse, *backward(attention, q, k, v, out, lse, dout)))
    for result in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(result, results[0]))


def test_plain_backward_against_differences():
    q, k, v = (x.copy() for x in packed(1, 2, 5, 2, 3))
    weight = normal(2, 2, 5, 2, 3)
    gradients = backward(plain, q, k, v, *forward(plain, q, k, v), weight)

    def loss(q, k, v):
        return float(np.sum(weight * forward(plain, q, k, v)[0]))
    check_gradient(loss, [q, k, v], gradients, samples=30)
    for i, factor in ((0, np.sqrt(3)), (1, 1 / np.sqrt(3)), (2, -1)):
        wrong = [x * (factor if j == i else 1) for j, x in enumerate(gradients)]
        with pytest.raises(AssertionError, match=f"gradient {i}"):
            check_gradient(loss, [q, k, v], wrong, samples=30)


def test_memory_is_linear_in_the_tokens():
    T, width = 4096, 16
    q, k, v = packed(1, 1, T, 1, width, dtype="float32")
    out, lse = forward(attention, q[:, :8], k[:, :8], v[:, :8])
    out, lse = np.empty(q.shape, np.float32), np.empty((1, 1, T), np.float32)
    tracemalloc.start()
    with threads(1):
        attention.attention_forward(q, k, v, out, lse)
        attention.attention_backward(q, k, v, out, lse, v, *(np.empty_like(out) for _ in range(3)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < T * T  # a quarter of one float32 matrix


def test_errors():
    x, lse = np.zeros((1, 4, 2, 3)), np.zeros((1, 2, 4))
    with pytest.raises(ValueError, match="lse"):
        attention.attention_forward(x, x, x, x.copy(), np.zeros((1, 4, 2)))
    with pytest.raises(ValueError, match="differ"):
        attention.attention_forward(x, x[:, :3], x, x.copy(), lse)
    with pytest.raises(ValueError, match="unit stride"):
        attention.attention_forward(x, x, x, np.zeros((1, 4, 2, 6))[..., ::2], lse)
    with pytest.raises(ValueError, match="float32"):
        attention.attention_forward(x, x, x, x.astype(np.float32), lse)
