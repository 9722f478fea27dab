"""Sources of batches: each `batch(step)` is a pure function of (seed, step)."""

from __future__ import annotations

import numpy as np

from mpipar.data.batch import Batch
from mpipar.data.sampler import EpochSampler, epoch_generator


class Source:
    """Anything with `batch(step)`; steps count from 1. Iterating gives the batches in order, for ever."""

    global_batch: int

    def __iter__(self):
        step = 0
        while True:
            step += 1
            yield self.batch(step)


class TextWindows(Source):
    """Windows of `seq` tokens of a text, the targets being the same windows one token later.

    An epoch cuts the text into windows that do not overlap, beginning at a random offset, and takes them in random
    order: each is used once an epoch, and the next epoch cuts elsewhere. drop_last: see EpochSampler.
    """

    def __init__(self, tokens: np.ndarray, *, seq: int, global_batch: int, seed: int = 0, drop_last: bool = True):
        if len(tokens) < 2 * seq:
            raise ValueError(f"seq={seq} is too long for a text of {len(tokens)} tokens: at most {len(tokens) // 2}")
        self.tokens, self.seq, self.global_batch, self.seed = tokens, seq, global_batch, seed
        self.sampler = EpochSampler((len(tokens) - seq) // seq, global_batch, seed=seed, drop_last=drop_last)

    def batch(self, step: int) -> Batch:
        """The batch of a step: inputs and targets int64 [B, seq]."""
        epoch, _ = self.sampler.position(step)
        offset = int(epoch_generator(self.seed + 1, epoch).integers(self.seq))
        starts = self.sampler.samples(step) * self.seq + offset

        def fetch(first, last):
            windows = self.tokens[starts[first:last, None] + np.arange(self.seq + 1)].astype(np.int64)
            return np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:])

        return Batch(len(starts), len(starts) * self.seq, len(starts) * self.seq, fetch)


class TextVectors(Source):
    """Rows of `dim` consecutive bytes of a text as numbers in [-1, 1), for models without tokens."""

    def __init__(self, tokens: np.ndarray, *, dim: int, global_batch: int, dtype="float32", seed: int = 0,
                 drop_last: bool = True):
        if len(tokens) < dim:
            raise ValueError(f"dim={dim} is too long for a text of {len(tokens)} bytes: at most {len(tokens)}")
        self.tokens, self.dim, self.global_batch, self.dtype = tokens, dim, global_batch, np.dtype(dtype)
        self.sampler = EpochSampler(len(tokens) // dim, global_batch, seed=seed, drop_last=drop_last)

    def batch(self, step: int) -> Batch:
        """The batch of a step: inputs [B, dim], no targets."""
        samples = self.sampler.samples(step)

        def fetch(first, last):
            rows = self.tokens[samples[first:last, None] * self.dim + np.arange(self.dim)]
            return ((rows.astype(np.float64) - 128) / 128).astype(self.dtype), None

        return Batch(len(samples), len(samples), 0, fetch)


class RandomTokens(Source):
    """Uniform random tokens; sample i of step s is the same in every layout."""

    def __init__(self, *, vocab: int, seq: int, global_batch: int, seed: int = 0):
        self.vocab, self.seq, self.global_batch, self.seed = vocab, seq, global_batch, seed

    def batch(self, step: int) -> Batch:
        """The batch of a step: inputs and targets int64 [B, seq]."""

        def fetch(first, last):
            rows = [sample_generator(self.seed, step, i).integers(self.vocab, size=self.seq + 1) for i in range(first, last)]
            rows = np.array(rows, np.int64).reshape(last - first, self.seq + 1)
            return np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])

        count = self.global_batch
        return Batch(count, count * self.seq, count * self.seq, fetch)


class RandomVectors(Source):
    """Standard normal rows, the lecture's own data (lecture 1, section 1.7.1)."""

    def __init__(self, *, dim: int, global_batch: int, dtype="float32", seed: int = 0):
        self.dim, self.global_batch, self.dtype, self.seed = dim, global_batch, np.dtype(dtype), seed

    def batch(self, step: int) -> Batch:
        """The batch of a step: inputs [B, dim], no targets."""

        def fetch(first, last):
            rows = [sample_generator(self.seed, step, i).standard_normal(self.dim) for i in range(first, last)]
            return np.array(rows, self.dtype).reshape(last - first, self.dim), None

        return Batch(self.global_batch, self.global_batch, 0, fetch)


class Arrays(Source):
    """Samples held in memory, in a new random order each epoch.

    inputs: first dim the samples. targets: as many, int64, negative values left out of the loss; None for models
    without. drop_last: see EpochSampler.
    """

    def __init__(self, inputs, targets=None, *, global_batch: int, seed: int = 0, drop_last: bool = True):
        self.inputs, self.targets, self.global_batch = inputs, targets, global_batch
        self.sampler = EpochSampler(len(inputs), global_batch, seed=seed, drop_last=drop_last)

    def batch(self, step: int) -> Batch:
        """The batch of a step."""
        samples = self.sampler.samples(step)
        return Batch.of(self.inputs[samples], None if self.targets is None else self.targets[samples])


def sample_generator(seed: int, step: int, sample: int) -> np.random.Generator:
    """A counter-based generator for one sample of one step."""
    return np.random.Generator(np.random.Philox(key=seed % 2**64, counter=[0, 0, sample, step]))
