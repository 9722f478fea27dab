"""The GeLU activation."""

from __future__ import annotations

import numpy as np

from mpipar.kernels.gelu import gelu_again, gelu_backward, gelu_forward
from mpipar.nn.layer import Layer


class Gelu(Layer):
    """y = x Phi(x), Phi the normal distribution function (`form="erf"`) or its tanh approximation (`form="tanh"`).

    Source: Hendrycks and Gimpel, Gaussian Error Linear Units.
    """

    def __init__(self, *, form: str = "erf"):
        if form not in ("erf", "tanh"):
            raise ValueError(f"GeLU form {form!r} does not exist: valid are 'erf' and 'tanh'")
        self.form = form

    def forward(self, x: np.ndarray, at=None):
        """Any shape; saves x."""
        y = np.empty_like(x)
        gelu_forward(x, y, form=self.form)
        return y, x

    def backward(self, saved, dy: np.ndarray, later=None):
        """dx = dy (Phi(x) + x phi(x)), phi the normal density (erf form)."""
        dx = np.empty_like(dy)
        gelu_backward(saved, dy, dx, form=self.form)
        return dx

    def backward_again(self, saved, dy: np.ndarray):
        """(dx, y), y once more, so that it need not be kept until backward: replaces `saved` and `dy` in place."""
        gelu_again(saved, dy, form=self.form)
        return dy, saved
