"""The lecture's deep MLP: X <- GeLU(X W) for every layer, loss = mean of the squares of the last X.

Source: lecture 1, section 1.6. Under tensor parallelism the layers alternate between column- and row-parallel, so
one all-reduce serves two layers.
"""

from __future__ import annotations

import math

import numpy as np

from mpipar.kernels.elementwise import scale
from mpipar.kernels.loss import sum_squares
from mpipar.models.model import Block, MicroBatch, Model
from mpipar.nn.gelu import Gelu
from mpipar.nn.initial import Normal
from mpipar.parallel.tensor import ColumnParallelLinear, RowParallelLinear, check_divides


class MlpLayer(Block):
    """x -> GeLU(x W). Even layers are column-parallel (x whole, y split), odd ones row-parallel (x split, y whole)."""

    recomputes = ("full",)

    def __init__(self, number, dim, *, group):
        self.number, self.dim = number, dim
        initial, name = Normal(1 / math.sqrt(dim)), f"layer{number}"
        if number % 2 == 0:
            self.linear = ColumnParallelLinear(
                name, dim, dim, group=group, initial=initial, bias=False, needs_input_gradient=number > 0
            )
            self.width = dim
        else:
            self.linear = RowParallelLinear(name, dim, dim, group=group, initial=initial, bias=False)
            self.width = dim // group.size
        self.gelu = Gelu()

    def __str__(self):
        return f"layer {self.number}"

    def input_shape(self, micro: MicroBatch):
        return (len(micro.inputs), self.width)

    def flops(self):
        return 2.0 * self.dim**2

    def forward(self, x, micro: MicroBatch):
        h, y = self.linear.forward_gelu(x)
        return y, (x, h)

    def backward(self, saved, dy, micro: MicroBatch, later=None):
        x, h = saved
        return self.linear.backward(x, self.gelu.backward(h, dy), later)


class MeanSquare(Block):
    """The sum over the samples of the mean square of a row; x may be split over the tensor-parallel ranks."""

    def __init__(self, dim, *, split, group):
        self.dim = dim
        self.split = split
        self.group = group

    def __str__(self):
        return "loss"

    def input_shape(self, micro: MicroBatch):
        return (len(micro.inputs), self.dim // self.group.size if self.split else self.dim)

    def forward(self, x, micro: MicroBatch):
        """loss = sum x^2 / D"""
        loss = sum_squares(x) / self.dim
        if self.split:
            loss = float(self.group.all_reduce(np.array([loss]))[0])
        return loss, x

    def backward(self, saved, dy, micro: MicroBatch, later=None):
        """dx = 2 x / D * scale"""
        return scale(saved, 2 * micro.scale / self.dim, np.empty_like(saved))


class MLP(Model):
    """The deep MLP spread over `mesh`; without a mesh, all of it on this rank. See GPT for the parameters."""

    def __init__(self, *, layers=4, dim=1024, mesh=None, dtype="float32", seed=0, virtual_stages=1,
                 layers_per_stage=None, placement=None,
                 recompute="none", allocate=True):
        if mesh is None:
            from mpipar.comm.mesh import Mesh

            mesh = Mesh.serial()
        if min(layers, dim) < 1:
            raise ValueError("layers and dim must be at least 1")
        check_divides("dim", dim, mesh.tp)
        self.layers, self.dim = layers, dim
        blocks = [MlpLayer(i, dim, group=mesh.tp) for i in range(layers)]
        blocks.append(MeanSquare(dim, split=layers % 2 == 1 and mesh.tp.size > 1, group=mesh.tp))
        super().__init__(blocks, front=0, back=1, mesh=mesh, dtype=dtype, seed=seed,
                         virtual_stages=virtual_stages, layers_per_stage=layers_per_stage, placement=placement,
                         recompute=recompute)
        if allocate:
            self.allocate()
