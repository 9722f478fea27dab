"""A tiny model for the executor's tests: stages of linear + tanh, squared error, gradients by hand."""

import numpy as np


class Chunk:
    """Stage of a chain: y = tanh(x @ w + b); the last one returns the loss sum((y - target)^2) / 2.

    micro: (input [B, D], target [B, D]). `in_place` writes dx over dy, as a layer may.
    """

    def __init__(self, stage, stages, width, dtype=np.float64, in_place=False):
        random = np.random.default_rng(stage)
        self.w = random.standard_normal((width, width)).astype(dtype) / np.sqrt(width).astype(dtype)
        self.b = random.standard_normal(width).astype(dtype)
        self.dw = np.zeros_like(self.w)
        self.db = np.zeros_like(self.b)
        self.first, self.last = stage == 0, stage == stages - 1
        self.width, self.dtype, self.in_place = width, np.dtype(dtype), in_place

    def input_shape(self, micro):
        return micro[0].shape

    def forward(self, x, micro):
        assert (x is None) == self.first
        x = micro[0] if self.first else x
        y = np.tanh(x @ self.w + self.b)
        if self.last:
            return float(np.sum((y - micro[1]) ** 2) / 2), (x, y)
        return y, (x, y)

    def backward(self, saved, dy, micro, later=None):
        x, y = saved
        assert (dy is None) == self.last
        dz = (y - micro[1] if self.last else dy) * (1 - y * y)
        if self.in_place and dy is not None:
            dy[...] = dz @ self.w.T
            dx = dy
        else:
            dx = dz @ self.w.T

        def weights():
            self.dw += x.T @ dz
            self.db += dz.sum(0)

        if later is None:
            weights()
        else:
            later.append(weights)
        return dx


def micro_batches(count, width, dtype=np.float64, sizes=None, seed=1):
    """`count` micro-batches of 3 rows each, or of the given sizes."""
    random = np.random.default_rng(seed)
    sizes = sizes or [3] * count
    return [tuple(random.standard_normal((2, size, width)).astype(dtype)) for size in sizes]


def serial(stages, width, micros, dtype=np.float64):
    """Losses and chunks with their gradients, without any pipeline."""
    chunks = [Chunk(stage, stages, width, dtype) for stage in range(stages)]
    losses = []
    for micro in micros:
        x, saved = None, []
        for chunk in chunks:
            x, kept = chunk.forward(x, micro)
            saved.append(kept)
        losses.append(x)
        dy = None
        for chunk in reversed(chunks):
            dy = chunk.backward(saved.pop(), dy, micro)
    return losses, chunks


class Wide:
    """A stage that is cheap for large arrays: y = a * x, loss = sum(y * y) / 2. micro: the input array."""

    def __init__(self, stage, stages, dtype=np.float32):
        self.a, self.da = 1 + 0.25 * stage, 0.0
        self.first, self.last, self.dtype = stage == 0, stage == stages - 1, np.dtype(dtype)

    def input_shape(self, micro):
        return micro.shape

    def forward(self, x, micro):
        x = micro if self.first else x
        y = self.dtype.type(self.a) * x
        return (float(np.vdot(y, y)) / 2 if self.last else y), (x, y)

    def backward(self, saved, dy, micro, later=None):
        x, y = saved
        dy = y if self.last else dy

        def weights():
            self.da += float(np.vdot(dy, x))

        weights() if later is None else later.append(weights)
        return self.dtype.type(self.a) * dy
