"""The linear layer of one rank."""

from __future__ import annotations

import numpy as np

from mpipar.kernels.gemm import gemm
from mpipar.kernels.memory import passing_like
from mpipar.nn.layer import Layer, run_or_defer
from mpipar.nn.parameter import Parameter


class Linear(Layer):
    """y = x W + b with W [in, out] and b [out], for x [..., in].

    W may be declared with more dims (W [in, 3, out/3] for a fused projection): its last dims are read as one.
    `needs_input_gradient=False` for a first layer, whose dx nobody needs: backward then returns None.
    The two halves of backward can be called on their own, where x is made again between them.
    """

    def __init__(self, weight: Parameter, bias: Parameter | None = None, *, needs_input_gradient: bool = True):
        self.weight = weight
        self.bias = bias
        self.needs_input_gradient = needs_input_gradient

    def forward(self, x: np.ndarray, at=None):
        """x [..., in] -> y [..., out]; saves x."""
        weight = matrix(self.weight.data)
        y = np.empty((*x.shape[:-1], weight.shape[1]), x.dtype)
        bias = None if self.bias is None else self.bias.data.reshape(-1)
        gemm(rows(x), weight, rows(y), bias=bias)
        return y, x

    def forward_gelu(self, x: np.ndarray):
        """(y, GeLU(y)): the activation is applied while y is still in the cache."""
        weight = matrix(self.weight.data)
        y = np.empty((*x.shape[:-1], weight.shape[1]), x.dtype)
        active = passing_like(y)
        bias = None if self.bias is None else self.bias.data.reshape(-1)
        gemm(rows(x), weight, rows(y), bias=bias, gelu=rows(active))
        return y, active

    def backward(self, saved, dy: np.ndarray, later=None):
        """dx = dy W^T,  dW += x^T dy,  db += sum over rows of dy."""
        self.weight_gradient(saved, dy, later)
        return self.input_gradient(dy)

    def input_gradient(self, dy: np.ndarray):
        """dx = dy W^T, or None if nobody needs it."""
        if not self.needs_input_gradient:
            return None
        weight = matrix(self.weight.data)
        dx = np.empty((*dy.shape[:-1], weight.shape[0]), dy.dtype)
        gemm(rows(dy), weight.T, rows(dx))
        return dx

    def weight_gradient(self, x: np.ndarray, dy: np.ndarray, later: list | None = None):
        """dW += x^T dy,  db += sum over rows of dy; left to `later` if that is a list."""
        def work():
            sums = None if self.bias is None else self.bias.grad.reshape(-1)
            gradient, adds = self.weight.claim_gradient()
            gemm(rows(x).T, rows(dy), matrix(gradient), accumulate=adds, column_sums=sums)

        run_or_defer(work, later)


def rows(x: np.ndarray) -> np.ndarray:
    """x [..., n] as a matrix [rows, n], without a copy."""
    return x.reshape(-1, x.shape[-1]) if x.size else np.empty((0, x.shape[-1]), x.dtype)


def matrix(weight: np.ndarray) -> np.ndarray:
    """A weight [in, ...] as a matrix [in, out], without a copy."""
    return weight.reshape(weight.shape[0], -1)
