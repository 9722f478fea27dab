"""Gradients after the backward passes: summed over replicas and tied copies, measured, each element counted once."""

from __future__ import annotations

import math

import numpy as np

from mpipar.kernels.loss import sum_squares
from mpipar.models.model import Model
from mpipar.nn.parameter import Parameter
from mpipar.parallel.data import GradientReducer, sum_gradients
from mpipar.parallel.deterministic import TreeReducer
from mpipar.parallel.overlap import OverlappingReducer


class Gradients:
    """The gradients of one rank between backward and the optimizer: whole, or this replica's part under ZeRO.

    dtype: of the messages between replicas, the model's if not given. overlap: they are sent during the last backward pass,
    see OverlappingReducer; its other arguments.
    """

    def __init__(self, model: Model, *, micro_batches: int = 1, deterministic: bool = False, dtype=None, overlap: dict | None = None):
        self.model = model
        dtype = model.dtype if dtype is None else dtype
        if model.zero is not None:
            self.reducer = model.zero
        elif deterministic:
            self.reducer = TreeReducer(model.buffers, model.mesh.dp, micro_batches, len(model.chunks))
        elif overlap is not None:
            self.reducer = OverlappingReducer(model, dtype=dtype, **overlap)
        else:
            self.reducer = GradientReducer(model.buffers, model.mesh.dp, dtype)
        self.counted = [p for p in model.parameters if model.counts_here(p)]
        if model.zero is None:  # the replicas hold the same: each measures a part of it, where the order of sums is free
            self.counted = _share(self.counted, 1 if deterministic else model.mesh.dp.size, model.mesh.dp.rank)

    def clear(self) -> None:
        """All gradients zero, before the first micro-batch."""
        self.reducer.clear()

    def reduce(self) -> None:
        """Sum over the replicas, then over the pipeline stages that share a tied parameter."""
        self.reducer.finish()
        self.reduce_tied()

    def reduce_tied(self) -> None:
        """Both ends of the pipeline add their parts of a tied parameter's gradient, so both copies stay equal."""
        for parameter in self.model.tied:
            sum_gradients(self.model.mesh.ends, self.own(parameter), self.model.dtype)

    def own(self, parameter: Parameter) -> np.ndarray:
        """What this rank holds of a parameter's gradient."""
        zero = self.model.zero
        return parameter.grad if zero is None else zero.unit_of[parameter].own(parameter, "grad")

    def squares(self) -> float:
        """This rank's share of the squared global norm: the sum over all ranks counts each element exactly once."""
        return math.fsum(sum_squares(self.own(p)) for p in self.counted)


def _share(parameters: list[Parameter], replicas: int, replica: int) -> list[Parameter]:
    """Those of one replica, where so many divide the parameters by size; none for a replica beyond them."""
    share, sizes = [], [0] * replicas
    for parameter in sorted(parameters, key=lambda p: -p.grad.size):
        least = sizes.index(min(sizes))
        sizes[least] += parameter.grad.size
        if least == replica:
            share.append(parameter)
    return share
