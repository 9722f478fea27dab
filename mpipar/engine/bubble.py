"""The pipeline's bubble: measured from the time each rank computed, beside the prediction for equal stages."""

from __future__ import annotations

import numpy as np

from mpipar.engine.trainer import Trainer
from mpipar.parallel.pipeline.simulate import simulate


def predicted_bubble(plan) -> float:
    """The share of the whole time in which a stage is idle if every forward and every backward takes equally long."""
    return simulate(plan).bubble


class BubbleMeter:
    """Adds up, step by step, how long this rank computed and how long its pipeline took."""

    def __init__(self):
        self.busy = 0.0
        self.wall = 0.0

    def add(self, trainer: Trainer) -> None:
        """Note the last step of a trainer."""
        self.busy += trainer.last_run.busy_seconds
        self.wall += trainer.last_run.wall_seconds

    def measured(self, group) -> float:
        """1 - (mean busy time of the stages) / (longest time of the pipeline); collective over `group` (pp)."""
        busy, wall = np.array([self.busy]), np.array([self.wall])
        group.all_reduce(busy, "mean")
        group.all_reduce(wall, "max")
        return float(1 - busy[0] / wall[0]) if wall[0] else 0.0
