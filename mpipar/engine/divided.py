"""The optimizer of a rank: one state over the flat buffers, or under ZeRO one over this replica's part of each unit."""

from __future__ import annotations

from mpipar.engine.optimizer import SGD, AdamW
from mpipar.models.model import Model
from mpipar.parallel.zero import Zero


def divide(model: Model, stage: int, dtype=None) -> None:
    """Let the replicas divide the model's buffers (ZeRO of that stage); nothing for stage 0 or one replica.

    dtype: of the messages with gradients, see Zero.
    """
    if stage == 0 or model.mesh.dp.size == 1:
        return
    blocks = {number: chunk.blocks for number, chunk in model.chunks.items()}
    seed = None if model.initialised else model.seed
    model.zero = Zero(stage, model.buffers, blocks, model.tied, model.mesh.dp, seed=seed, dtype=dtype)
    for chunk in model.chunks.values():
        chunk.blocks = model.zero.wrap(chunk.blocks)


class Optimizer:
    """Updates what this rank holds of the model, and gives the other replicas what they don't update themselves."""

    def __init__(self, options: AdamW | SGD, model: Model):
        self.model = model
        self.parts = [model.buffers] if model.zero is None else model.zero.units
        self.states = [options.start(part) for part in self.parts]

    def update(self, *, lr: float, step: int, grad_scale: float = 1.0) -> None:
        """See AdamWState.update; collective over the replicas under ZeRO."""
        for state in self.states:
            state.update(lr=lr, step=step, grad_scale=grad_scale)
        if self.model.zero is not None:
            self.model.zero.publish()

    def held_bytes(self) -> dict[str, int]:
        """Bytes that this rank holds between steps: of parameters, gradients and the optimizer's state, masters included.

        Of parameters that the ranks of a node hold in common, its share of them.
        """
        zero, buffers = self.model.zero, self.model.buffers
        held = {}
        for name, what in (("parameters", "data"), ("gradients", "grad")):
            whole = getattr(buffers, what)
            held[name] = whole.nbytes if whole is not None else sum(getattr(unit, what).nbytes for unit in zero.units)
        if zero is not None and zero.common is not None:
            group = zero.group
            held["parameters"] //= group.nodes.count(group.nodes[group.rank])
        masters = sum(part.master.nbytes for part in self.parts if part.copy is not None)
        return {**held, "optimizer": masters + sum(state.nbytes for state in self.states)}
