"""Optimizers over the flat buffers: what to do is a small frozen value, the state belongs to a run.

Decoupled weight decay applies where the parameter says so (matrices and embeddings).
"""

from __future__ import annotations

from dataclasses import dataclass

from mpipar.kernels.memory import aligned_zeros
from mpipar.kernels.optimizer import adamw, sgd
from mpipar.nn.parameter import FlatBuffers


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay. Source: Loshchilov and Hutter; the numbers are those of PyTorch's AdamW.

    m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2
    p = p - lr decay p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    weight_decay: float = 0.1

    def start(self, buffers: FlatBuffers) -> "AdamWState":
        """The state (two moments, zeros) for one rank's parameters."""
        return AdamWState(self, buffers)


class AdamWState:
    """The moments of AdamW for one rank's flat buffers."""

    def __init__(self, options: AdamW, buffers: FlatBuffers):
        self.options = options
        self.buffers = buffers
        self.first = aligned_zeros(buffers.size, buffers.master.dtype)
        self.second = aligned_zeros(buffers.size, buffers.master.dtype)
        self.decay = buffers.decay * options.weight_decay

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return self.first.nbytes + self.second.nbytes

    def update(self, *, lr: float, step: int, grad_scale: float = 1.0) -> None:
        """One fused pass; `grad_scale` multiplies every gradient (clipping); `step` counts from 1."""
        b, o = self.buffers, self.options
        adamw(
            b.master, b.grad, self.first, self.second, b.bounds, self.decay,
            lr=lr, beta1=o.betas[0], beta2=o.betas[1], eps=o.eps, step=step, grad_scale=grad_scale, copy=b.copy,
        )


@dataclass(frozen=True)
class SGD:
    """p = p - lr (g + decay p)"""

    lr: float = 1e-2
    weight_decay: float = 0.0

    def start(self, buffers: FlatBuffers) -> "SGDState":
        """The (empty) state for one rank's parameters."""
        return SGDState(self, buffers)


class SGDState:
    """SGD keeps nothing between steps."""

    nbytes = 0

    def __init__(self, options: SGD, buffers: FlatBuffers):
        self.buffers = buffers
        self.decay = buffers.decay * options.weight_decay

    def update(self, *, lr: float, step: int, grad_scale: float = 1.0) -> None:
        """One pass; see AdamWState.update."""
        b = self.buffers
        sgd(b.master, b.grad, b.bounds, self.decay, lr=lr, grad_scale=grad_scale, copy=b.copy)
