"""Dropout whose masks do not depend on the layout."""

from __future__ import annotations

import numpy as np

from mpipar.kernels.random import dropout
from mpipar.nn.initial import random_key
from mpipar.nn.layer import Layer, SampleKeys


class Dropout(Layer):
    """y = x keep / (1 - p), keep drawn for each element from (seed, name, step, sample of the global batch, element).

    The mask is never stored: backward draws it again. With p = 0 or outside training (`at` None) it is the identity.
    """

    def __init__(self, name: str, p: float, *, seed: int):
        if not 0 <= p < 1:
            raise ValueError(f"dropout {p} is not valid: it must lie in [0, 1)")
        self.p = p
        self.key = random_key(seed, name, "dropout")

    def forward(self, x: np.ndarray, at: SampleKeys | None = None):
        """x [B, ...] -> y of the same shape; saves only `at`."""
        if self.p == 0 or at is None:
            return x, None
        return self._apply(x, at), at

    def backward(self, saved, dy: np.ndarray, later=None):
        """dx = dy keep / (1 - p), with the mask of forward."""
        return dy if saved is None else self._apply(dy, saved)

    def _apply(self, x, at):
        out = np.empty_like(x)
        shape = (len(at.samples), x.size // max(len(at.samples), 1))
        dropout(x.reshape(shape), out.reshape(shape), key=self.key, step=at.step, samples=at.samples, offset=0, p=self.p)
        return out
