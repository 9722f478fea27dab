"""The learning rate: a pure function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Cosine:
    """Linear warm-up to `peak` over `warmup` steps, then half a cosine down to `minimum` at step `total`."""

    peak: float
    warmup: int
    total: int
    minimum: float = 0.0

    def __post_init__(self):
        if self.warmup < 0 or self.total < 0:
            raise ValueError(f"warmup={self.warmup} and steps={self.total} are not valid: both must be at least 0")

    def __call__(self, step: int) -> float:
        """The learning rate of a step; steps count from 1."""
        if step <= self.warmup:
            return self.peak * step / self.warmup
        done = min(1.0, (step - self.warmup) / max(self.total - self.warmup, 1))
        return self.minimum + 0.5 * (self.peak - self.minimum) * (1 + math.cos(math.pi * done))
