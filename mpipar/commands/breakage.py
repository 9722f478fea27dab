"""Ways to break parallel training on purpose, for `mpipar.verify --break`: each must be noticed.

A damage is a function that changes one trainer from outside; the code that trains has no switch for it.
"""

from __future__ import annotations

import copy
import dataclasses

from mpipar.comm.mesh import Mesh
from mpipar.engine.trainer import Trainer
from mpipar.models.gpt import TransformerBlock


def blocks_of(trainer: Trainer) -> list[TransformerBlock]:
    """The transformer blocks of this rank."""
    blocks = [getattr(b, "block", b) for chunk in trainer.model.chunks.values() for b in chunk.blocks]
    return [b for b in blocks if isinstance(b, TransformerBlock)]


def gradient_sync(trainer):
    """The replicas don't sum their gradients; under ZeRO each keeps its part of its own."""
    if trainer.model.zero is None:
        reducer = trainer.gradients.reducer
        reducer.group = copy.copy(reducer.group)
        reducer.group.all_reduce = lambda x, **_: x
    else:
        deaf_group(trainer).reduce_scatter = lambda x, sizes, out, **_: out


def deaf_group(trainer):
    """A copy of the replicas' group for ZeRO alone, to be damaged."""
    zero = trainer.model.zero
    zero.group = copy.copy(zero.group)
    return zero.group


def zero_gather(trainer):
    """Under ZeRO no replica is told what the others have updated."""
    zero = trainer.model.zero
    if zero is None:
        return
    if zero.stage < 3:
        zero.publish = lambda: None
        return
    known = {}

    def stale(unit):
        if id(unit) not in known:
            known[id(unit)] = trainer.mesh.dp.all_gather(unit.data, sizes=unit.sizes)
        unit.attach("data", known[id(unit)])

    zero.fetch, zero.prefetch, zero.free = stale, lambda unit: None, lambda unit: None


def tied_sync(trainer):
    """The two ends of the pipeline don't sum the gradients of the tied embedding."""
    trainer.gradients.reduce_tied = lambda: None


def residual(trainer):
    """One norm's backward forgets the gradient that goes round the branch."""
    norm = blocks_of(trainer)[0].norm2
    whole = norm.backward
    norm.backward = lambda saved, dy, later=None, residual=None: whole(saved, dy, later)


def column_sum(trainer):
    """One column-parallel layer doesn't sum dx over the tensor-parallel ranks (no f)."""
    blocks_of(trainer)[0].qkv.group = Mesh.serial().tp


def row_sum(trainer):
    """One row-parallel layer doesn't sum its partial products (no g)."""
    blocks_of(trainer)[0].projection.group = Mesh.serial().tp


def norm_twice(trainer):
    """The gradient norm counts what several ranks hold once for each of them."""
    trainer.gradients.counted = list(trainer.model.parameters)


def local_mean(trainer):
    """Each replica divides by its own tokens, as if the sum over replicas were a mean."""
    def scaled(micro):
        return dataclasses.replace(micro, scale=micro.scale * trainer.mesh.dp.size * trainer.micro_batches)

    split = trainer.split
    trainer.split = lambda batch, step: [scaled(micro) for micro in split(batch, step)]


def same_data(trainer):
    """Every replica trains on the rows of the first one, and every micro-batch is the first."""
    split = trainer.split
    trainer.split = lambda batch, step: split(batch, step)[:1] * trainer.micro_batches


def initial_seed(trainer):
    """Each rank draws its initial values with a seed of its own."""
    seed = trainer.model.seed + 1 + trainer.mesh.rank
    if trainer.model.zero is not None:
        trainer.model.zero.initialise(seed)
        return
    for parameter in trainer.model.parameters:
        parameter.initialise(seed)


def positions(trainer):
    """The gradient of the positions is dropped."""
    reduce = trainer.gradients.reduce

    def forget():
        reduce()
        for parameter in trainer.model.parameters:
            if parameter.name == "embedding.positions":
                trainer.gradients.own(parameter)[:] = 0

    trainer.gradients.reduce = forget


BREAKS = {
    "gradient-sync": gradient_sync,
    "zero-gather": zero_gather,
    "tied-sync": tied_sync,
    "residual": residual,
    "column-sum": column_sum,
    "row-sum": row_sum,
    "norm-twice": norm_twice,
    "local-mean": local_mean,
    "same-data": same_data,
    "initial-seed": initial_seed,
    "positions": positions,
}
