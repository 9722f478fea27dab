"""Initial values: a pure function of (seed, name of the parameter, index in the global tensor).

A rank that holds a slice of a tensor draws exactly the values that the whole tensor would have there, so every
layout starts with the same bits.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np

from mpipar.kernels.random import fill_normal


def random_key(*parts) -> np.uint64:
    """A 64-bit key for the counter-based generator, from anything printable, e.g. (seed, name)."""
    text = ":".join(str(part) for part in parts)
    return np.uint64(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little"))


class Initial:
    """How a parameter's values are drawn."""

    def fill(self, out: np.ndarray, index: tuple[slice, ...], global_shape: tuple[int, ...], seed: int, name: str):
        """Write the values of the slice `index` of a tensor of `global_shape` into `out`."""
        raise TypeError(f"{type(self).__name__} does not say how to fill an array")


@dataclass(frozen=True)
class Constant(Initial):
    """Every element is `value`."""

    value: float

    def fill(self, out, index, global_shape, seed, name):
        out[...] = self.value


@dataclass(frozen=True)
class Normal(Initial):
    """Normal with mean 0 and standard deviation `std`."""

    std: float

    def fill(self, out, index, global_shape, seed, name):
        key = random_key(seed, name)
        for run, start in contiguous_runs(out, index, global_shape):
            fill_normal(run, key, start, std=self.std)


def contiguous_runs(out: np.ndarray, index: tuple[slice, ...], global_shape: tuple[int, ...]):
    """Cut `out`, the slice `index` of a C-ordered tensor, into runs that are contiguous in the whole tensor too.

    Yields (1-D view of out, index of its first element in the flattened global tensor). Dims that are whole from
    some point on merge into one run.
    """
    if out.size == 0:
        return
    inner = len(global_shape)
    while inner > 0 and index[inner - 1] == slice(0, global_shape[inner - 1]):
        inner -= 1
    inner = max(inner - 1, 0)  # the last sliced dim is contiguous with all that follows it
    strides = [math.prod(global_shape[d + 1 :]) for d in range(len(global_shape))]
    rows = out.reshape(*out.shape[:inner], -1)
    offset = index[inner].start * strides[inner] if global_shape else 0
    for position in np.ndindex(*rows.shape[:-1]):
        start = offset + sum((index[d].start + position[d]) * strides[d] for d in range(inner))
        yield rows[position], start
