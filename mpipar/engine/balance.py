"""Which layers each pipeline stage gets when they do not all cost the same: by counted FLOPs, or by measured times."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from mpipar.engine.trainer import Trainer
from mpipar.models.model import Model
from mpipar.parallel.pipeline.partition import even_costs, split_layers
from mpipar.parallel.pipeline.run import run
from mpipar.parallel.pipeline.schedule import Plan
from mpipar.parallel.pipeline.simulate import Costs, simulate


@dataclass(frozen=True)
class Balance:
    """layers_per_stage: the division. by: "flops" or "measured". gain: the simulated time of a step with as many layers
    on each stage, over that with this division."""

    layers_per_stage: list[int]
    by: str
    gain: float

    def __str__(self):
        counts = "+".join(map(str, self.layers_per_stage))
        return f"by {self.by}: layers {counts}, predicted {self.gain:.3f} times as fast as an even division"


def by_flops(model: Model, plan: Plan) -> Balance:
    """The division by the counted products of all blocks, embedding and head included; backward costs twice forward."""
    flops = np.array([[block.flops(), 2 * block.flops()] for block in model.blocks], float)
    return divide(model, plan, flops, "flops")


def by_measurement(trainer: Trainer, batch, *, runs=2) -> Balance:
    """The division by the shortest time that each block took for a micro-batch in some warm-up passes; collective.

    The weights stay as they are, the gradients do not.
    """
    model = trainer.model
    clocks = {number: _Clock(block) for number, block in enumerate(model.blocks)
              if any(block in chunk.blocks for chunk in model.chunks.values())}
    micros = trainer.split(batch, 1)
    for _ in range(runs):
        run(trainer.program, model.chunks, micros, trainer.mailbox)
    seconds = np.zeros((len(model.blocks), 2))
    for number, clock in clocks.items():
        seconds[number] = clock.stop()
    return divide(model, trainer.plan, model.mesh.world.all_reduce(seconds, "max"), "measured")


def divide(model: Model, plan: Plan, costs: np.ndarray, by: str) -> Balance:
    """The best division for the costs [blocks, 2] of forward and backward of all blocks."""
    whole = costs.sum(1)
    layers = whole[model.front : len(whole) - model.back]
    counts = even_costs(layers, model.stages, whole[: model.front].sum(), whole[len(whole) - model.back :].sum())
    even = split_layers(len(layers), model.stages)
    plain, better = (makespan(model, plan, costs, split) for split in (even, counts))
    if plain <= better:  # the schedule may like the even division better, though its fullest stage is not the least
        counts, better = even, plain
    return Balance(counts, by, plain / better if better else 1.0)


def makespan(model: Model, plan: Plan, costs: np.ndarray, counts: list[int]) -> float:
    """The simulated time of a step with so many layers on each stage."""
    ends = model.front + np.cumsum(counts)
    ends[-1] = len(costs)
    forward, backward = (np.add.reduceat(costs[:, i], [0, *ends[:-1]]).tolist() for i in (0, 1))
    return simulate(plan, Costs(forward, backward)).makespan


class _Clock:
    """Times a block's calls, from outside, until it is stopped."""

    def __init__(self, block):
        self.block, self.shortest = block, [np.inf, np.inf]
        block.forward, block.backward = self._timed(0, block.forward), self._timed(1, block.backward)

    def _timed(self, which, function):
        def clocked(*arguments):
            start = time.perf_counter()
            result = function(*arguments)
            self.shortest[which] = min(self.shortest[which], time.perf_counter() - start)
            return result

        return clocked

    def stop(self) -> list[float]:
        """The shortest forward and the shortest backward; the block is as before."""
        del self.block.forward, self.block.backward
        return self.shortest
