"""Both forms of convolution against plain loops and each other, and the bytes they are said to move."""

import numpy as np
import pytest

from mpipar.kernels import convolution
from mpipar.kernels.convolution import (
    METHODS,
    convolution_backward_input,
    convolution_backward_weight,
    convolution_bytes,
    convolution_forward,
    output_shape,
    tile_sizes,
)
from tests.helpers.kernels import DTYPES, assert_close, normal, same_bits, threads

# N, C, H, W, K, R, S, padding
SHAPES = [
    (2, 3, 8, 9, 5, 3, 3, 1),
    (1, 1, 1, 1, 1, 1, 1, 0),
    (3, 2, 5, 7, 4, 1, 1, 0),
    (2, 4, 6, 5, 3, 2, 5, 0),
    (1, 3, 4, 4, 2, 3, 3, 4),  # whole rows and columns of the result see nothing but zeros
    (2, 2, 7, 6, 3, 5, 2, (2, 1)),
    (1, 2, 3, 2, 3, 5, 6, (1, 2)),  # the kernel is larger than the image
]


def plain(x, w, padding):
    """The definition, in loops over the result and the kernel."""
    top, left = padding if isinstance(padding, tuple) else (padding, padding)
    images, channels, height, width = x.shape
    out = np.zeros(output_shape(x.shape, w.shape, padding=padding))
    for n, k, p, q in np.ndindex(out.shape):
        for c, r, s in np.ndindex(w.shape[1:]):
            i, j = p + r - top, q + s - left
            if 0 <= i < height and 0 <= j < width:
                out[n, k, p, q] += float(x[n, c, i, j]) * float(w[k, c, r, s])
    return out


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_plain_loops(shape, dtype, method):
    n, c, h, w, k, r, s, padding = shape
    x, weight = normal(0, n, c, h, w, dtype=dtype), normal(1, k, c, r, s, dtype=dtype)
    expected = plain(x, weight, padding)
    out = np.full(expected.shape, np.nan, dtype)
    assert convolution_forward(x, weight, out, padding=padding, method=method) is out
    assert_close(out, expected, 1e-5 if dtype == "float32" else 1e-13)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache", [1 << 9, 1 << 12, 1 << 16])
def test_tiles_of_every_size_agree(monkeypatch, dtype, cache):
    """Small tiles: several blocks of rows, and several of channels, for each image."""
    host = convolution.host()
    monkeypatch.setattr(convolution, "host", lambda: type(host)(**{**vars(host), "l2": cache}))
    x, w = normal(2, 2, 11, 13, 10, dtype=dtype), normal(3, 6, 11, 3, 3, dtype=dtype)
    both = [convolution_forward(x, w, np.empty((2, 6, 13, 10), dtype), padding=1, method=m) for m in METHODS]
    assert_close(both[0], both[1].astype("f8"), 1e-5 if dtype == "float32" else 1e-13)
    step, rows = tile_sizes(11, (3, 3), (13, 10), x.itemsize)
    assert (step, rows) != (11, 13) or cache == 1 << 16
    tile = step * 9 * rows * 10 * x.itemsize
    assert tile <= max(cache // 4, 9 * 10 * x.itemsize)  # one channel and one row at least


@pytest.mark.parametrize("method", METHODS)
def test_bits_do_not_depend_on_threads(method):
    x, w = normal(4, 5, 3, 9, 8, dtype="float32"), normal(5, 4, 3, 3, 3, dtype="float32")
    results = []
    for count in (1, 2, 3):
        with threads(count):
            results.append(convolution_forward(x, w, np.empty((5, 4, 9, 8), "f4"), padding=1, method=method))
    assert same_bits(results[0], results[1]) and same_bits(results[0], results[2])


def test_bits_of_gradients_do_not_depend_on_threads():
    x, w = normal(4, 3, 20, 30, 31, dtype="float32"), normal(5, 24, 20, 3, 3, dtype="float32")
    dy = normal(6, 3, 24, 30, 31, dtype="float32")
    results = []
    for count in (1, 2, 3):
        with threads(count):
            results.append((convolution_backward_input(w, dy, np.empty_like(x), padding=1),
                            convolution_backward_weight(x, dy, np.zeros_like(w), padding=1)))
    for dx, dw in results[1:]:
        assert same_bits(dx, results[0][0]) and same_bits(dw, results[0][1])


def plain_gradients(x, w, dy, padding):
    """dx and dw, in the same loops as `plain`."""
    top, left = padding if isinstance(padding, tuple) else (padding, padding)
    dx, dw = np.zeros(x.shape), np.zeros(w.shape)
    for n, k, p, q in np.ndindex(dy.shape):
        for c, r, s in np.ndindex(w.shape[1:]):
            i, j = p + r - top, q + s - left
            if 0 <= i < x.shape[2] and 0 <= j < x.shape[3]:
                dx[n, c, i, j] += float(dy[n, k, p, q]) * float(w[k, c, r, s])
                dw[k, c, r, s] += float(dy[n, k, p, q]) * float(x[n, c, i, j])
    return dx, dw


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache", [None, 1 << 9])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients(monkeypatch, shape, cache, dtype):
    if cache:
        small = type(convolution.host())(**{**vars(convolution.host()), "l2": cache})
        monkeypatch.setattr(convolution, "host", lambda: small)
    n, c, h, w, k, r, s, padding = shape
    x, weight = normal(0, n, c, h, w, dtype=dtype), normal(1, k, c, r, s, dtype=dtype)
    dy = normal(2, *output_shape(x.shape, weight.shape, padding=padding), dtype=dtype)
    expected_dx, expected_dw = plain_gradients(x, weight, dy, padding)
    dx, before = np.full(x.shape, np.nan, dtype), normal(3, *weight.shape, dtype=dtype)
    dw = before.copy()
    tolerance = 1e-5 if dtype == "float32" else 1e-13
    assert convolution_backward_input(weight, dy, dx, padding=padding) is dx
    assert_close(dx, expected_dx, tolerance)
    assert convolution_backward_weight(x, dy, dw, padding=padding) is dw
    assert_close(dw, before + expected_dw, tolerance)
    convolution_backward_weight(x, dy, dw, padding=padding, accumulate=False)
    assert_close(dw, expected_dw, tolerance)
    with pytest.raises(AssertionError, match="largest error"):  # negative control: one number is another
        dw[-1, -1, -1, -1] += 1e-3
        assert_close(dw, expected_dw, tolerance)


def test_finite_differences():
    x, w, dy = normal(0, 2, 3, 6, 5), normal(1, 4, 3, 3, 2), normal(2, 2, 4, 6, 6)
    dx = convolution_backward_input(w, dy, np.empty_like(x), padding=1)
    dw = convolution_backward_weight(x, dy, np.zeros_like(w), padding=1)

    def loss(x, w):
        return float((convolution_forward(x, w, np.empty_like(dy), padding=1) * dy).sum())

    for array, gradient in ((x, dx), (w, dw)):
        direction = normal(3, *array.shape)
        step = 1e-6 * direction
        up, down = (loss(*(a + sign * step if a is array else a for a in (x, w))) for sign in (1, -1))
        assert (up - down) / 2e-6 == pytest.approx(float((gradient * direction).sum()), rel=1e-7)


def test_gradients_of_nothing():
    for images, channels, channels_out in ((0, 2, 3), (2, 2, 0), (1, 0, 3)):
        x, w = np.ones((images, channels, 4, 4)), np.ones((channels_out, channels, 3, 3))
        dy = np.ones((images, channels_out, 2, 2))
        assert not convolution_backward_input(w, dy, np.full(x.shape, np.nan)).any() or not x.size
        assert np.array_equal(convolution_backward_weight(x, dy, w.copy()), w)
        assert not convolution_backward_weight(x, dy, w.copy(), accumulate=False).any()


def test_gradients_of_other_shapes_are_refused():
    x, w, dy = np.ones((1, 2, 5, 5)), np.ones((3, 2, 3, 3)), np.ones((1, 3, 4, 3))
    with pytest.raises(ValueError, match="has the shape"):
        convolution_backward_input(w, dy, np.empty_like(x))
    with pytest.raises(ValueError, match="has the shape"):
        convolution_backward_weight(x, dy, np.empty_like(w))


@pytest.mark.parametrize("method", METHODS)
def test_operands_may_be_views(method):
    x, w = normal(6, 2, 6, 5, 3).transpose(0, 3, 1, 2), normal(7, 3, 3, 4, 6)[::-1, :, ::2, ::2]
    w.flags.writeable = False
    out = convolution_forward(x, w, np.empty((2, 3, 5, 3)), method=method)
    assert_close(out, plain(x, w, 0), 1e-13)


@pytest.mark.parametrize("method", METHODS)
def test_nothing(method):
    for images, channels, channels_out in ((0, 2, 3), (2, 2, 0), (1, 0, 3)):
        x, w = np.ones((images, channels, 4, 4)), np.ones((channels_out, channels, 3, 3))
        out = np.full((images, channels_out, 2, 2), np.nan)
        assert not convolution_forward(x, w, out, method=method).any()


@pytest.mark.parametrize("method", METHODS)
def test_a_turned_kernel_or_a_shifted_image_would_be_seen(method):
    """Negative control: the comparison tells convolution from what is nearly it."""
    x, w = normal(8, 1, 2, 6, 6), normal(9, 2, 2, 3, 3)
    out = convolution_forward(x, w, np.empty((1, 2, 6, 6)), padding=1, method=method)
    for wrong in (plain(x, w[:, :, ::-1, ::-1], 1), plain(np.roll(x, 1, axis=3), w, 1)):
        with pytest.raises(AssertionError, match="largest error"):
            assert_close(out, wrong, 1e-13)


def test_bytes_of_the_lecture():
    """im2col moves R * S times the image twice over (section 2.6, item 4), implicit what has to be moved."""
    x, w, size = (4, 16, 64, 64), (8, 16, 3, 3), 4
    need = size * (4 * 16 * 64 * 64 + 8 * 16 * 9 + 4 * 8 * 64 * 64)
    explicit, patches = convolution_bytes(x, w, size, padding=1, method="im2col")
    assert patches == 9 * size * 4 * 16 * 64 * 64 and explicit == need + 2 * patches
    implicit, tile = convolution_bytes(x, w, size, padding=1)
    step, rows = tile_sizes(16, (3, 3), (64, 64), size)
    assert tile == size * step * 9 * rows * 64
    seams = -(-64 // rows) - 1
    assert implicit == need + size * 4 * 16 * 64 * 2 * seams  # each seam reads R - 1 rows again


@pytest.mark.parametrize("method", METHODS)
def test_memory_for_patches_is_what_the_count_says(monkeypatch, method):
    """The arrays that are really made, against `convolution_bytes`."""
    made = []
    empty = np.empty
    x, w, out = normal(10, 2, 3, 20, 20), normal(11, 4, 3, 3, 3), np.zeros((2, 4, 18, 18))
    monkeypatch.setattr(convolution, "_scratch", convolution._Scratch())
    with threads(1):
        convolution_forward(x, w, out, method=method)  # the product has its own memory from here on
        monkeypatch.setattr(convolution, "_scratch", convolution._Scratch())
        with monkeypatch.context() as patch:
            patch.setattr(np, "empty", lambda *a, **k: made.append(empty(*a, **k)) or made[-1])
            convolution_forward(x, w, out, method=method)
    assert sum(array.nbytes for array in made) == convolution_bytes(x.shape, w.shape, 8, method=method)[1]


@pytest.mark.parametrize("change, words", [
    (dict(method="fft"), "valid values: implicit, im2col"),
    (dict(padding=-1), "a number >= 0"),
    (dict(padding=(1, 2, 3)), "a number >= 0"),
    (dict(padding=2.5), "a number >= 0"),
    (dict(padding=1), "has the shape"),
    (dict(x=np.ones((1, 3, 5, 5))), "do not fit"),
    (dict(w=np.ones((3, 2, 6, 3))), "does not fit an image"),
    (dict(x=np.ones((1, 2, 5, 5), "f4")), "float32"),
    (dict(out=np.ones((1, 3, 3, 6))[..., ::2]), "not C-contiguous"),
])
def test_what_does_not_fit_is_refused(change, words):
    given = {"x": np.ones((1, 2, 5, 5)), "w": np.ones((3, 2, 3, 3)), "out": np.ones((1, 3, 3, 3)), **change}
    with pytest.raises(ValueError, match=words):
        convolution_forward(given.pop("x"), given.pop("w"), given.pop("out"), **given)
