"""Which samples a step trains on: a pure function of (seed, step)."""

from __future__ import annotations

import numpy as np


class EpochSampler:
    """Goes through `count` samples in a new random order each epoch, `batch` at a time.

    drop_last: leave out the tail that does not fill a batch; otherwise the last batch of an epoch is smaller.
    ValueError if drop_last leaves nothing.
    """

    def __init__(self, count: int, batch: int, *, seed: int, drop_last: bool = True):
        if batch < 1:
            raise ValueError(f"global batch {batch} is not valid: it must be at least 1")
        if count < (batch if drop_last else 1):
            raise ValueError(f"{count} samples do not fill a global batch of {batch}: it can be at most {count}")
        self.count, self.batch, self.seed = count, batch, seed
        self.steps_per_epoch = count // batch if drop_last else -(-count // batch)
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def position(self, step: int) -> tuple[int, int]:
        """(epoch, first sample of the batch within the epoch's order) of a step; steps count from 1."""
        epoch, number = divmod(step - 1, self.steps_per_epoch)
        return epoch, number * self.batch

    def samples(self, step: int) -> np.ndarray:
        """The samples of a step, int64."""
        epoch, start = self.position(step)
        if epoch != self._epoch:  # kept only to spare work: the order follows from (seed, epoch) alone
            self._epoch, self._order = epoch, epoch_generator(self.seed, epoch).permutation(self.count)
        return self._order[start : start + self.batch]


def epoch_generator(seed: int, epoch: int) -> np.random.Generator:
    """A counter-based generator for one epoch."""
    return np.random.Generator(np.random.Philox(key=[seed % 2**64, epoch]))
