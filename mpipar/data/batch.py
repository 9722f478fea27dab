"""The global batch of one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Batch:
    """What all replicas together train on in one step.

    size: number of samples. weight: number of things the loss is a mean of (valid target tokens, or samples).
    tokens: number of input tokens, 0 for models without tokens. fetch(first, last) -> (inputs, targets) makes the
    rows [first, last) only; targets are int64 with negative values left out of the loss, or None.
    """

    size: int
    weight: float
    tokens: int
    fetch: Callable[[int, int], tuple[np.ndarray, np.ndarray | None]]

    @classmethod
    def of(cls, inputs: np.ndarray, targets: np.ndarray | None = None) -> "Batch":
        """A batch from arrays whose first dim is the samples."""
        if targets is not None and len(targets) != len(inputs):
            raise ValueError(f"{len(inputs)} inputs and {len(targets)} targets: they must be equally many")
        weight = len(inputs) if targets is None else int((targets >= 0).sum())
        tokens = 0 if targets is None else inputs.size

        def fetch(first, last):
            return inputs[first:last], None if targets is None else targets[first:last]

        return cls(len(inputs), weight, tokens, fetch)
