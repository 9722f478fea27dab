"""Optimizers over flat arrays, one pass over memory. The meaning of each function is in `plain.py`.

No fast-math flags: every operation is rounded as IEEE 754 says, so an element's bits do not depend on where
its array is cut (into shards, threads or vectors), and equal those of the plain form.
"""
import math

import numpy as np

from .bfloat16 import narrow
from .cache import jit
from .threads import parallel_for
from .views import ranges, same_dtype, same_shape, source, target

GRAIN = 65536


def adamw(p, g, m, v, bounds, decay, *, lr, beta1, beta2, eps, step, grad_scale=1.0, copy=None):
    """One step of AdamW (Loshchilov and Hutter 2019, in the form of torch.optim.AdamW), in place on p, m and
    v.

    p, g, m, v: flat arrays of one length. Segment i = [bounds[i], bounds[i + 1]) has weight decay decay[i];
    elements outside all segments stay as they are. step counts from 1. g is read as g * grad_scale
    (clipping). copy: bfloat16, receives p (float32) rounded, part by part while it is in the cache."""
    number = same_dtype(p, g, m, v).type
    same_shape(p, g, m, v)
    if step < 1:
        raise ValueError(f"step is {step!r}; valid values: integers from 1")
    edges, rates = _segments(p, bounds, decay)
    keep = (1 - lr * rates).astype(p.dtype)
    a, b, c, d = target(p), source(g), target(m), target(v)
    constants = tuple(number(value) for value in (
        grad_scale, beta1, 1 - beta1, beta2, 1 - beta2, math.sqrt(1 - beta2**step), eps,
        lr / (1 - beta1**step)))
    _update(_adamw, [(a[cut], b[cut], c[cut], d[cut], edges, keep, cut.start, *constants)
                     for cut in _cuts(a, copy)], copy)


def sgd(p, g, bounds, decay, *, lr, grad_scale=1.0, copy=None):
    """p -= lr * (g * grad_scale + decay * p), in place; the segments and `copy` as for `adamw`."""
    number = same_dtype(p, g).type
    same_shape(p, g)
    edges, rates = _segments(p, bounds, decay)
    a, b, rates = target(p), source(g), rates.astype(p.dtype)
    _update(_sgd, [(a[cut], b[cut], edges, rates, cut.start, number(lr), number(grad_scale))
                   for cut in _cuts(a, copy)], copy)


def warm(dtype):
    """Compiles or loads every kernel of this file for a dtype."""
    p, g, m, v = (np.zeros(4, dtype) for _ in range(4))
    adamw(p, g, m, v, [0, 4], [0.0], lr=1e-3, beta1=0.9, beta2=0.99, eps=1e-8, step=1)
    sgd(p, g, [0, 4], [0.0], lr=1e-3)


def _cuts(p, copy):
    if copy is None:
        return ranges(p.size, GRAIN)
    same_shape(p, copy)
    return [slice(lo, min(lo + GRAIN, p.size)) for lo in range(0, p.size, GRAIN)]


def _update(kernel, tasks, copy):
    if copy is None:
        parallel_for(kernel, tasks)
        return

    def update_and_round(number, task):
        kernel(*task)
        narrow(task[0], copy[number * GRAIN:number * GRAIN + task[0].size])

    parallel_for(update_and_round, list(enumerate(tasks)))


def _segments(p, bounds, decay):
    edges, rates = np.array(bounds, np.int64), np.array(decay, np.float64)
    if len(edges) != len(rates) + 1 or edges[0] < 0 or edges[-1] > p.size or np.any(np.diff(edges) < 0):
        raise ValueError(f"{len(edges)} bounds for {len(rates)} segments of {p.size} elements: "
                         "give one more bound than segments, rising within the array")
    return edges, rates


@jit
def _adamw(p, g, m, v, edges, keep, start, grad_scale, beta1, rest1, beta2, rest2, root2, eps, rate):
    # m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2,  mhat = m / (1 - beta1^step), vhat likewise
    # p = p (1 - lr decay) - lr mhat / (sqrt(vhat) + eps)
    for segment in range(keep.size):
        lo, hi = max(edges[segment] - start, 0), min(edges[segment + 1] - start, p.size)
        if lo >= hi:
            continue
        ps, gs, ms, vs, kept = p[lo:hi], g[lo:hi], m[lo:hi], v[lo:hi], keep[segment]
        for i in range(ps.size):
            gradient = gs[i] * grad_scale
            first = beta1 * ms[i] + rest1 * gradient
            second = beta2 * vs[i] + rest2 * gradient * gradient
            ms[i] = first
            vs[i] = second
            ps[i] = ps[i] * kept - rate * (first / (np.sqrt(second) / root2 + eps))


@jit
def _sgd(p, g, edges, decay, start, lr, grad_scale):
    for segment in range(decay.size):
        lo, hi = max(edges[segment] - start, 0), min(edges[segment + 1] - start, p.size)
        if lo >= hi:
            continue
        ps, gs, rate = p[lo:hi], g[lo:hi], decay[segment]
        for i in range(ps.size):
            ps[i] -= lr * (gs[i] * grad_scale + rate * ps[i])
