"""Convolution as a matrix product (lecture section 2.6, item 4), explicit and implicit, and its gradients.

The patch matrix of an image has a row for each (channel, r, s) of the kernel and a column for each place of
the result: X[c R S + r S + s, p Q + q] = x[c, p + r - padding, q + s - padding], zero outside the image. Then
out[K, P Q] = w[K, C R S] @ X.

    im2col    makes X whole in memory, R * S times the size of x, and multiplies once for each image
    implicit  makes a tile of X that stays in cache, multiplies, and makes the next one in its place

Legend: N images, C channels in, K channels out, H x W the image, R x S the kernel, P x Q the result;
P = H + 2 padding - R + 1, Q = W + 2 padding - S + 1 (stride 1).
"""

import threading

import numpy as np

from .cache import jit
from .gemm import gemm
from .host import host
from .threads import parallel_for
from .views import same_dtype, source, target

METHODS = ("implicit", "im2col")
TILE_SHARE = 4  # a tile of X takes this part of the second cache
TILE_DEPTH = 1024  # rows of a tile at most: long enough sums for the product to run at full speed


def convolution_forward(x, w, out, *, padding=0, method="implicit"):
    """out[n, k] = sum over c, r, s of x[n, c, p + r - padding, q + s - padding] * w[k, c, r, s]; returns out.

    x: [N, C, H, W]; w: [K, C, R, S]; out: [N, K, P, Q], C-contiguous, no memory shared with x or w; all
    float32 or all float64. (This is what deep learning calls convolution: the kernel is not turned round.)
    padding >= 0: rows and columns of zeros on each side, a number or a pair (rows, columns). method:
    "implicit" or "im2col"; their results differ by rounding only. The bits do not depend on the number of
    threads. ValueError where shapes, dtypes, padding or method do not fit.
    """
    _check_method(method)
    _check(x, w, out, padding)
    return _convolve(x, w, out, _pair(padding), _im2col if method == "im2col" else _implicit)


# Backward. With y = forward(x, w):
#   dx[n, c, h, v] = sum over k, r, s of dy[n, k, h - r + padding, v - s + padding] * w[k, c, r, s]
#   dw[k, c, r, s] = sum over n, p, q of dy[n, k, p, q] * x[n, c, p + r - padding, q + s - padding]
# dx is the convolution of dy with kernels turned round, w'[c, k, r, s] = w[k, c, R - 1 - r, S - 1 - s], and
# padding' = (R - 1, S - 1) - padding; dw[K, C R S] = sum over n of dy[n][K, P Q] @ X[n].T.


def convolution_backward_input(w, dy, dx, *, padding=0):
    """Writes the gradient dx: [N, C, H, W] of x from w: [K, C, R, S] and dy: [N, K, P, Q]; returns dx.

    padding as in the forward pass; implicit, so no patch matrix of dy is made. dx is C-contiguous and shares
    no memory with the others. ValueError as in `convolution_forward`.
    """
    _check(dx, w, dy, padding)
    top, left = _pair(padding)
    turned = w[:, :, ::-1, ::-1].transpose(1, 0, 2, 3)
    return _convolve(dy, turned, dx, (w.shape[2] - 1 - top, w.shape[3] - 1 - left), _implicit)


def convolution_backward_weight(x, dy, dw, *, padding=0, accumulate=True):
    """Adds the gradient of w to dw: [K, C, R, S] (or writes it there); x: [N, C, H, W], dy: [N, K, P, Q].

    padding as in the forward pass; implicit, tile by tile in one order for any number of threads. dw is
    C-contiguous. Returns dw. ValueError as in `convolution_forward`.
    """
    _check(x, dw, dy, padding)
    gradient = target(dw)
    if not accumulate:
        gradient.fill(0)
    if not dw.size or not dy.size:
        return dw
    kernel, plane = dw.shape[2:], dy.shape[2:]
    x, dy = source(x).reshape(x.shape), source(dy).reshape(*dy.shape[:2], -1)
    gradient = gradient.reshape(len(dw), -1)
    places, parts = _tiles(x, kernel, plane)
    for n, first, last in places:
        for c, end, rows in parts:
            tile = _fill(x[n, c:end], kernel, plane, _pair(padding), first, last)
            gemm(dy[n][:, first * plane[1]:last * plane[1]], tile.T, gradient[:, rows], accumulate=True)
    return dw


def output_shape(x_shape, w_shape, *, padding=0):
    """(N, K, P, Q) of the result. ValueError where x[N, C, H, W], w[K, C, R, S] and padding do not fit."""
    rows, columns = _pair(padding)
    if len(x_shape) != 4 or len(w_shape) != 4 or x_shape[1] != w_shape[1]:
        raise ValueError(f"x {x_shape} and w {w_shape} do not fit; valid: x[N, C, H, W] and w[K, C, R, S]")
    height, width = x_shape[2] + 2 * rows - w_shape[2] + 1, x_shape[3] + 2 * columns - w_shape[3] + 1
    if height < 1 or width < 1 or min(w_shape[2:]) < 1:
        raise ValueError(f"a kernel of {w_shape[2]} x {w_shape[3]} does not fit an image of "
                         f"{x_shape[2]} x {x_shape[3]} with padding {rows}, {columns}; "
                         "valid: 1 x 1 up to the padded image")
    return x_shape[0], w_shape[0], height, width


def convolution_bytes(x_shape, w_shape, itemsize, *, padding=0, method="implicit"):
    """(bytes moved between memory and caches, bytes of memory for patches) of one `convolution_forward`.

    Both read x and w and write out. im2col also writes the patch matrix and reads it again. implicit reads
    the rows of x that two neighbouring tiles share twice; its tiles stay in cache.
    """
    _check_method(method)
    images, channels_out, height, width = output_shape(x_shape, w_shape, padding=padding)
    _, channels, _, columns = x_shape
    kernel = w_shape[2:]
    depth, plane = channels * kernel[0] * kernel[1], height * width
    moved = channels_out * depth + images * channels_out * plane
    if method == "im2col":
        patches = images * depth * plane
        return itemsize * (moved + images * channels * x_shape[2] * columns + 2 * patches), itemsize * patches
    step, rows = tile_sizes(channels, kernel, (height, width), itemsize)
    top = _pair(padding)[0]
    read = sum(max(0, min(x_shape[2], min(p + rows, height) + kernel[0] - 1 - top) - max(0, p - top))
               for p in range(0, height, rows))
    tile = step * kernel[0] * kernel[1] * rows * width
    return itemsize * (moved + images * channels * columns * read), itemsize * tile


def tile_sizes(channels, kernel, plane, itemsize):
    """(channels, rows of the result) of a tile of the patch matrix, so that it fits its share of the cache.

    A tile has whole rows of the result; one row and one channel at least.
    """
    area, (height, width) = kernel[0] * kernel[1], plane
    depth = max(1, min(channels, TILE_DEPTH // area))
    elements = host().l2 // TILE_SHARE // itemsize
    rows = max(1, min(height, elements // (depth * area * width)))
    return max(1, min(depth, elements // (area * rows * width))), rows


def _convolve(x, w, out, padding, method):
    flat = target(out)
    if not out.size:
        return out
    if not w.shape[1]:
        flat.fill(0)
        return out
    x, weights = source(x).reshape(x.shape), source(w).reshape(w.shape[0], -1)
    method(x, weights, flat.reshape(*out.shape[:2], -1), w.shape[2:], out.shape[2:], padding)
    return out


def _im2col(x, weights, result, kernel, plane, padding):
    patches = np.empty((len(x), weights.shape[1], result.shape[2]), x.dtype)
    parallel_for(_patches, [(image, part, *kernel, *padding, 0, *plane) for image, part in zip(x, patches)])
    parallel_for(gemm, [(weights, part, out) for part, out in zip(patches, result)])


def _implicit(x, weights, result, kernel, plane, padding):
    places, parts = _tiles(x, kernel, plane)

    def multiply(n, first, last):
        out = result[n][:, first * plane[1]:last * plane[1]]
        for c, end, rows in parts:
            tile = _fill(x[n, c:end], kernel, plane, padding, first, last)
            gemm(weights[:, rows], tile, out, accumulate=c > 0)

    parallel_for(multiply, places)


def _tiles(x, kernel, plane):
    """All (image, first, last row of the result), and all (first, last channel, their rows of X)."""
    (images, channels), area = x.shape[:2], kernel[0] * kernel[1]
    step, rows = tile_sizes(channels, kernel, plane, x.itemsize)
    places = [(n, p, min(p + rows, plane[0])) for n in range(images) for p in range(0, plane[0], rows)]
    ends = [(c, min(c + step, channels)) for c in range(0, channels, step)]
    return places, [(c, end, slice(c * area, end * area)) for c, end in ends]


def _fill(x, kernel, plane, padding, first, last):
    """A tile of X in this thread's memory: channels x[C, H, W], rows first .. last of the result."""
    tile = _scratch.array(x.dtype, len(x) * kernel[0] * kernel[1], (last - first) * plane[1])
    _patches(x, tile, *kernel, *padding, first, last, plane[1])
    return tile


class _Scratch(threading.local):
    """Memory of each thread for one tile, kept from call to call."""

    def __init__(self):
        self.memory = {}

    def array(self, dtype, rows, columns):
        held = self.memory.get(dtype)
        if held is None or held.size < rows * columns:
            held = self.memory[dtype] = np.empty(rows * columns, dtype)
        return held[:rows * columns].reshape(rows, columns)


_scratch = _Scratch()


@jit
def _patches(x, patches, r_size, s_size, top, left, first, last, width):
    """Rows first .. last of the result: patches[(c, r, s), (p, q)] for the channels of x[C, H, W]."""
    channels, height, columns = x.shape
    for c in range(channels):
        for r in range(r_size):
            for s in range(s_size):
                target = patches[(c * r_size + r) * s_size + s]
                start = min(width, max(0, left - s))  # start .. stop: columns that see the image
                stop = max(start, min(width, columns + left - s))
                for p in range(first, last):
                    line = target[(p - first) * width:(p - first + 1) * width]
                    h = p + r - top
                    if h < 0 or h >= height:
                        line[:] = 0
                        continue
                    line[:start] = 0
                    seen = x[c, h, start + s - left:stop + s - left]
                    for q in range(stop - start):
                        line[start + q] = seen[q]
                    line[stop:] = 0


def _check_method(method):
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; valid values: {', '.join(METHODS)}")


def _check(x, w, out, padding):
    same_dtype(x, w, out)
    expected = output_shape(x.shape, w.shape, padding=padding)
    if out.shape != expected:
        raise ValueError(f"the convolution of {x.shape} with {w.shape} has the shape {expected}, "
                         f"not {out.shape}")


def _pair(padding):
    pair = tuple(padding) if isinstance(padding, (tuple, list)) else (padding, padding)
    if len(pair) != 2 or not all(isinstance(size, (int, np.integer)) and size >= 0 for size in pair):
        raise ValueError(f"padding is {padding!r}; valid: a number >= 0 or a pair of them")
    return pair
