"""Data parallelism: every replica has the whole model and its own rows of the batch; gradients are summed.

The loss of every replica is already divided by the number of tokens of the GLOBAL batch, so the sum over the replicas
is the gradient of the mean loss, and nothing is divided here (lecture 1, section 1.7).
"""

from __future__ import annotations

import numpy as np


class GradientReducer:
    """Sums the flat gradient buffer over the replicas: one all-reduce a step, however many micro-batches ran."""

    def __init__(self, gradients: np.ndarray, group):
        self.gradients = gradients
        self.group = group

    before = after = None  # nothing to do around the actions of the schedule

    def clear(self) -> None:
        """All gradients zero, before the first micro-batch."""
        self.gradients[:] = 0

    def finish(self) -> None:
        """Block until every replica holds the sum."""
        self.group.all_reduce(self.gradients)
