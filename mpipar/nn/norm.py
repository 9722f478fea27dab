"""Layer normalisation over the last dim."""

from __future__ import annotations

import numpy as np

from mpipar.kernels.dtypes import sums_dtype
from mpipar.kernels.memory import passing_like
from mpipar.kernels.norm import layernorm_again, layernorm_backward, layernorm_forward
from mpipar.nn.initial import Constant
from mpipar.nn.layer import Layer
from mpipar.nn.linear import rows
from mpipar.nn.parameter import Parameter


class LayerNorm(Layer):
    """y = (x - mean) / sqrt(variance + eps) * gamma + beta over the last dim D of x [..., D]."""

    def __init__(self, name: str, dim: int, *, eps: float = 1e-5):
        self.gamma = Parameter(f"{name}.gamma", (dim,), Constant(1.0), decay=False)
        self.beta = Parameter(f"{name}.beta", (dim,), Constant(0.0), decay=False)
        self.eps = eps

    def forward(self, x: np.ndarray, at=None):
        """x [..., D] -> y [..., D]; saves x and the row statistics."""
        y = passing_like(x)
        count = x.size // x.shape[-1]
        mean, rstd = np.empty((2, count), sums_dtype(x.dtype))
        layernorm_forward(rows(x), self.gamma.data, self.beta.data, rows(y), mean, rstd, eps=self.eps)
        return y, (x, mean, rstd)

    def again(self, saved):
        """y once more from what forward saved, so that it need not be kept until backward."""
        x, mean, rstd = saved
        y = passing_like(x)
        layernorm_again(rows(x), self.gamma.data, self.beta.data, mean, rstd, rows(y))
        return y

    def backward(self, saved, dy: np.ndarray, later=None, *, residual: np.ndarray | None = None):
        """With n = (x - mean) rstd and g = dy gamma:  dx = rstd (g - mean(g) - n mean(g n)) (+ residual).

        dgamma += sum over rows of dy n,  dbeta += sum over rows of dy. `residual` [..., D] is the gradient that came
        round the layer; adding it here spares a pass over memory.
        """
        x, mean, rstd = saved
        dx = np.empty_like(x)
        layernorm_backward(
            rows(x), self.gamma.data, mean, rstd, rows(dy), rows(dx), self.gamma.grad, self.beta.grad,
            residual=None if residual is None else rows(residual),
        )
        return dx
