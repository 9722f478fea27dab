"""Gradients after the backward passes: summed over replicas and tied copies, measured, each element counted once."""

from __future__ import annotations

import math

from mpipar.kernels.loss import sum_squares
from mpipar.models.model import Model
from mpipar.parallel.data import GradientReducer, sum_gradients


class Gradients:
    """The gradient buffer of one rank between backward and the optimizer."""

    def __init__(self, model: Model):
        self.model = model
        self.reducer = GradientReducer(model.buffers.grad, model.mesh.dp, model.dtype)
        self.counted = [p for p in model.parameters if model.counts_here(p)] if model.mesh.dp.rank == 0 else []

    def clear(self) -> None:
        """All gradients zero, before the first micro-batch."""
        self.model.buffers.grad[:] = 0

    def reduce(self) -> None:
        """Sum over the replicas, then over the pipeline stages that share a tied parameter."""
        self.reducer.finish()
        self.reduce_tied()

    def reduce_tied(self) -> None:
        """Both ends of the pipeline add their parts of a tied parameter's gradient, so both copies stay equal."""
        for parameter in self.model.tied:
            sum_gradients(self.model.mesh.ends, parameter.grad, self.model.dtype)

    def squares(self) -> float:
        """This rank's share of the squared global norm: the sum over all ranks counts each element exactly once."""
        return math.fsum(sum_squares(p.grad) for p in self.counted)
