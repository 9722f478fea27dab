"""GeLU and its derivative, one pass over memory. The meaning of each function is in `plain.py`."""
import numpy as np

from .blocks import by_blocks, read, update, write
from .cache import jit
from .dtypes import is_bfloat16
from .polynomials import VECTOR_FLAGS, exp, inlined, normal
from .shapes import check_gelu_form
from .threads import parallel_for
from .views import begin_together, ranges, same_dtype, same_shape, source, target
from .wide import wide_vectors

GRAIN = 16384


def gelu_forward(x, out, *, form="erf"):
    """out = x * Phi(x), exact ("erf") or by its tanh approximation ("tanh"). ValueError for another form.

    Hendrycks and Gimpel 2016. x, out: any shape, C-contiguous, float32, float64 or bfloat16; out may be x."""
    check_gelu_form(form)
    if is_bfloat16(x.dtype):
        by_blocks(gelu_forward, read(source(x)), write(target(out)), form=form)
        return out
    same_dtype(x, out)
    same_shape(x, out)
    a, y = source(x), target(out)
    cuts = ranges(a.size, GRAIN)
    if begin_together(x, out):
        parallel_for(_erf_in_place if form == "erf" else _tanh_in_place, [(y[cut],) for cut in cuts])
    else:
        parallel_for(_erf_forward if form == "erf" else _tanh_forward, [(a[cut], y[cut]) for cut in cuts])
    return out


def gelu_backward(x, dy, dx, *, form="erf"):
    """dx = dy * gelu'(x); dx may be dy. Arrays and errors as for `gelu_forward`."""
    check_gelu_form(form)
    if is_bfloat16(x.dtype):
        by_blocks(gelu_backward, read(source(x)), read(source(dy)), write(target(dx)), form=form)
        return dx
    same_dtype(x, dy, dx)
    same_shape(x, dy, dx)
    a, d, y = source(x), source(dy), target(dx)
    cuts = ranges(a.size, GRAIN)
    if begin_together(dy, dx):
        parallel_for(_erf_backward_in_place if form == "erf" else _tanh_backward_in_place,
                     [(a[cut], y[cut]) for cut in cuts])
    else:
        parallel_for(_erf_backward if form == "erf" else _tanh_backward,
                     [(a[cut], d[cut], y[cut]) for cut in cuts])
    return dx


def gelu_again(x, dy, *, form="erf"):
    """Replaces x by GeLU(x) and dy by dy * gelu'(x), in one pass: backward's own, where the output was not kept.

    Arrays and errors as for `gelu_forward`; x and dy are different memory."""
    check_gelu_form(form)
    if is_bfloat16(x.dtype):
        by_blocks(gelu_again, update(target(x)), update(target(dy)), form=form)
        return
    same_dtype(x, dy)
    same_shape(x, dy)
    y, d = target(x), target(dy)
    parallel_for(_erf_again if form == "erf" else _tanh_again, [(y[cut], d[cut]) for cut in ranges(y.size, GRAIN)])


def warm(dtype):
    """Compiles or loads every kernel of this file for a dtype."""
    x, y = np.zeros(4, dtype), np.zeros(4, dtype)
    for form in ("erf", "tanh"):
        gelu_forward(x, y, form=form)
        gelu_forward(x, x, form=form)
        gelu_backward(x, y, y, form=form)
        gelu_backward(x, x.copy(), y, form=form)
        gelu_again(x, y, form=form)


# A loop over two arrays that are one in memory would fail the compiler's overlap test at run time and run as
# scalars; hence a second loop for results written in place.

@inlined(fastmath=VECTOR_FLAGS)
def erf_value(x):
    """GeLU of one number, erf form; for the loops of kernels."""
    cumulative, _ = normal(x)
    return x * cumulative


@inlined(fastmath=VECTOR_FLAGS)
def _erf_slope(x, inverse_root):
    # y = x Phi(x):  y' = Phi(x) + x phi(x),  phi(x) = exp(-x^2 / 2) / sqrt(2 pi)
    cumulative, density = normal(x)
    return cumulative + x * density * inverse_root


@inlined(fastmath=VECTOR_FLAGS)
def _sigmoid_parts(x, c, a, one):
    """(s, 1 - s, u') with s = 1 / (1 + exp(-u)), u = 2 c (x + a x^3): (1 + tanh(u / 2)) / 2, without
    cancellation."""
    square = x * x
    e = exp(-c * x * (one + a * square))
    s = one / (one + e)
    return s, e * s, c * (one + a * (square + square + square))


@inlined(fastmath=VECTOR_FLAGS)
def _tanh_value(x, c, a, one):
    s, _, _ = _sigmoid_parts(x, c, a, one)
    return x * s


@inlined(fastmath=VECTOR_FLAGS)
def _tanh_slope(x, c, a, one):
    # y = x s(u(x)):  y' = s + x s (1 - s) u'
    s, rest, slope = _sigmoid_parts(x, c, a, one)
    return s + x * s * rest * slope


@jit(fastmath=VECTOR_FLAGS)
def _erf_forward(x, out):
    wide_vectors()
    for i in range(x.size):
        out[i] = erf_value(x[i])


@jit(fastmath=VECTOR_FLAGS)
def _erf_in_place(x):
    wide_vectors()
    for i in range(x.size):
        x[i] = erf_value(x[i])


@jit(fastmath=VECTOR_FLAGS)
def _erf_backward(x, dy, dx):
    wide_vectors()
    inverse_root = x.dtype.type(0.3989422804014327)
    for i in range(x.size):
        dx[i] = dy[i] * _erf_slope(x[i], inverse_root)


@jit(fastmath=VECTOR_FLAGS)
def _erf_backward_in_place(x, dy):
    wide_vectors()
    inverse_root = x.dtype.type(0.3989422804014327)
    for i in range(x.size):
        dy[i] *= _erf_slope(x[i], inverse_root)


@jit(fastmath=VECTOR_FLAGS)
def _erf_again(x, dy):
    wide_vectors()
    inverse_root = x.dtype.type(0.3989422804014327)
    for i in range(x.size):
        cumulative, density = normal(x[i])
        dy[i] *= cumulative + x[i] * density * inverse_root
        x[i] *= cumulative


@inlined
def _tanh_constants(x):
    number = x.dtype.type
    return number(1.5957691216057308), number(0.044715), number(1)  # 2 sqrt(2 / pi), a, one


@jit(fastmath=VECTOR_FLAGS)
def _tanh_forward(x, out):
    wide_vectors()
    c, a, one = _tanh_constants(x)
    for i in range(x.size):
        out[i] = _tanh_value(x[i], c, a, one)


@jit(fastmath=VECTOR_FLAGS)
def _tanh_in_place(x):
    wide_vectors()
    c, a, one = _tanh_constants(x)
    for i in range(x.size):
        x[i] = _tanh_value(x[i], c, a, one)


@jit(fastmath=VECTOR_FLAGS)
def _tanh_backward(x, dy, dx):
    wide_vectors()
    c, a, one = _tanh_constants(x)
    for i in range(x.size):
        dx[i] = dy[i] * _tanh_slope(x[i], c, a, one)


@jit(fastmath=VECTOR_FLAGS)
def _tanh_backward_in_place(x, dy):
    wide_vectors()
    c, a, one = _tanh_constants(x)
    for i in range(x.size):
        dy[i] *= _tanh_slope(x[i], c, a, one)


@jit(fastmath=VECTOR_FLAGS)
def _tanh_again(x, dy):
    wide_vectors()
    c, a, one = _tanh_constants(x)
    for i in range(x.size):
        s, rest, slope = _sigmoid_parts(x[i], c, a, one)
        dy[i] *= s + x[i] * s * rest * slope
        x[i] *= s
