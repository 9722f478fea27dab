"""Sizes of the GPT, counted by the catalogue; values from arithmetic."""

import math

import numpy as np
import pytest

from mpipar.data import Batch, RandomTokens
from mpipar.engine.optimizer import SGD
from mpipar.engine.trainer import Trainer
from mpipar.models.gpt import GPT
from mpipar.models.mlp import MLP


def tiny(**changes):
    return GPT(**{**dict(layers=4, dim=32, heads=4, vocab=64, seq=16, dtype="float64"), **changes})


def test_number_of_parameters():
    assert tiny().global_parameters == 53_440
    assert tiny(tied=False).global_parameters == 55_488
    block = [p for p in tiny().catalogue if p.name.startswith("block0.")]
    assert sum(p.global_size for p in block) == 12_704


def test_elements_held_whole_by_every_tp_rank():
    assert sum(p.global_size for p in tiny().catalogue if p.shard_dim is None) == 1_344


@pytest.mark.parametrize("vocab,expected", [(64, 4.158883), (65, 4.174387)])
def test_zeroed_head_gives_ln_v(vocab, expected):
    model = tiny(vocab=vocab, tied=False)
    next(p for p in model.parameters if p.name == "head.weight").data[:] = 0
    loss = Trainer(model, SGD(lr=0)).step(RandomTokens(vocab=vocab, seq=16, global_batch=4).batch(1)).loss
    assert loss == pytest.approx(math.log(vocab), rel=1e-12) and loss == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("changes,words", [
    (dict(heads=5), r"heads can be one of \[1, 2, 4, 8, 16, 32\]"), (dict(layers=0), "at least 1"),
    (dict(dropout=1.0), "dropout"), (dict(layers_per_stage=[3]), "4"),
])
def test_sizes_that_do_not_fit_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        tiny(**changes)


def test_mlp_is_the_lectures():
    """X <- GeLU(X W), loss the mean of squares, against NumPy written out."""
    from mpipar.kernels.plain import gelu_forward

    model = MLP(layers=3, dim=16, dtype="float64")
    x = np.random.default_rng(0).standard_normal((8, 16))
    result = Trainer(model, SGD(lr=0), micro_batches=2).step(Batch.of(x))
    for p in model.parameters:
        x = gelu_forward(x @ p.data, np.empty_like(x))
        x = np.asarray(x)
    assert result.loss == pytest.approx((x**2).mean(), rel=1e-12)
    assert MLP(layers=3, dim=16).global_parameters == 3 * 256


@pytest.mark.parametrize("change,words", [
    (lambda x, y: (x + 60, y), "valid are 0 to 63"), (lambda x, y: (x - 70, y), "valid are 0 to 63"),
    (lambda x, y: (x.astype(np.float64), y), "integers"), (lambda x, y: (x, y + 64), "valid are up to 63"),
])
def test_tokens_outside_the_vocabulary_are_refused(change, words):
    inputs, targets = RandomTokens(vocab=64, seq=16, global_batch=4).batch(1).fetch(0, 4)
    with pytest.raises(ValueError, match=words):
        Trainer(tiny(), SGD(lr=0)).step(Batch.of(*change(inputs, targets)))


def test_a_declared_model_knows_its_sizes_without_memory():
    model = tiny(allocate=False)
    assert model.global_parameters == 53_440 and model.buffers is None and model.parameters[0].data is None
    assert model.allocate().buffers.size == 53_440
