"""The linear layer of one rank."""

from __future__ import annotations

import numpy as np

from mpipar.kernels.elementwise import column_sum
from mpipar.kernels.gemm import gemm
from mpipar.nn.layer import Layer, run_or_defer
from mpipar.nn.parameter import Parameter


class Linear(Layer):
    """y = x W + b with W [in, out] and b [out], for x [..., in].

    W may be declared with more dims (W [in, 3, out/3] for a fused projection): its last dims are read as one.
    `input_gradient=False` for a first layer, whose dx nobody needs: backward then returns None.
    """

    def __init__(self, weight: Parameter, bias: Parameter | None = None, *, input_gradient: bool = True):
        self.weight = weight
        self.bias = bias
        self.input_gradient = input_gradient

    def forward(self, x: np.ndarray, at=None):
        """x [..., in] -> y [..., out]; saves x."""
        weight = matrix(self.weight.data)
        y = np.empty((*x.shape[:-1], weight.shape[1]), x.dtype)
        bias = None if self.bias is None else self.bias.data.reshape(-1)
        gemm(rows(x), weight, rows(y), bias=bias)
        return y, x

    def backward(self, saved, dy: np.ndarray, later=None):
        """dx = dy W^T,  dW += x^T dy,  db += sum over rows of dy."""
        x = saved

        def weight_gradient():
            gemm(rows(x).T, rows(dy), matrix(self.weight.grad), accumulate=True)
            if self.bias is not None:
                column_sum(rows(dy), self.bias.grad.reshape(-1))

        run_or_defer(weight_gradient, later)
        if not self.input_gradient:
            return None
        dx = np.empty_like(x)
        gemm(rows(dy), matrix(self.weight.data).T, rows(dx))
        return dx


def rows(x: np.ndarray) -> np.ndarray:
    """x [..., n] as a matrix [rows, n], without a copy."""
    return x.reshape(-1, x.shape[-1]) if x.size else np.empty((0, x.shape[-1]), x.dtype)


def matrix(weight: np.ndarray) -> np.ndarray:
    """A weight [in, ...] as a matrix [in, out], without a copy."""
    return weight.reshape(weight.shape[0], -1)
