"""Every layer's backward against finite differences in float64, in flight twice, deferred, and empty."""

import numpy as np
import pytest

from mpipar.comm.mesh import Mesh
from mpipar.models.gpt import EmbeddingBlock, HeadBlock, TransformerBlock
from mpipar.models.mlp import MeanSquare, MlpLayer
from mpipar.models.model import MicroBatch
from mpipar.nn.attention import CausalAttention
from mpipar.nn.dropout import Dropout
from mpipar.nn.gelu import Gelu
from mpipar.nn.initial import Normal
from mpipar.nn.layer import SampleKeys
from mpipar.nn.linear import Linear
from mpipar.nn.norm import LayerNorm
from mpipar.nn.parameter import FlatBuffers, Parameter
from mpipar.parallel.tensor import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, VocabParallelHead
from tests.helpers.finite_difference import check_gradient

GROUP = Mesh.serial().tp
B, T, D = 3, 5, 8
KEYS = SampleKeys(step=4, samples=np.array([2, 7, 9]))
TARGETS = np.array([[1, 0, -1, 3, 6], [-1, 2, 2, 5, 4], [6, 6, 0, 1, -1]])


class Loss:
    """A head as a layer: its forward's loss as an array of one element."""

    def __init__(self, head):
        self.head = head

    def parameters(self):
        return self.head.parameters()

    def forward(self, x, at=None):
        loss, saved = self.head.forward(x, TARGETS[: len(x)])
        return np.array([loss]), saved

    def backward(self, saved, dy, later=None):
        return self.head.backward(saved, float(dy[0]), later)


class OfBlock:
    """A block of a model as a layer."""

    def __init__(self, block):
        self.block = block

    def parameters(self):
        return self.block.parameters()

    def micro(self, x):
        keys = SampleKeys(KEYS.step, KEYS.samples[: len(x)])
        return MicroBatch(x, TARGETS[: len(x)], keys, 1.0)

    def forward(self, x, at=None):
        y, saved = self.block.forward(x, self.micro(x))
        return (np.array([y]) if isinstance(y, float) else y), (saved, x)

    def backward(self, saved, dy, later=None):
        saved, x = saved
        if dy.shape == (1,):  # a loss: its gradient is the micro-batch's scale
            micro = self.micro(x)
            return self.block.backward(saved, None, MicroBatch(x, micro.targets, micro.keys, float(dy[0])), later)
        return self.block.backward(saved, dy, self.micro(x), later)


def linear(bias=True):
    return Linear(Parameter("w", (D, 6), Normal(1.0)), Parameter("b", (6,), Normal(1.0)) if bias else None)


def head():
    return VocabParallelHead(Parameter("w", (7, D), Normal(1.0)), group=GROUP)


def block(dropout):
    return TransformerBlock(0, D, 2, T, layers=2, dropout=dropout, seed=0, group=GROUP)


LAYERS = {
    "linear": linear,
    "linear without bias": lambda: linear(bias=False),
    "column parallel": lambda: ColumnParallelLinear("c", D, 6, group=GROUP, initial=Normal(1.0)),
    "column parallel, 3 parts": lambda: ColumnParallelLinear("c", D, 6, parts=3, group=GROUP, initial=Normal(1.0)),
    "row parallel": lambda: RowParallelLinear("r", D, 6, group=GROUP, initial=Normal(1.0)),
    "layer norm": lambda: LayerNorm("n", D),
    "gelu": Gelu,
    "gelu, tanh form": lambda: Gelu(form="tanh"),
    "dropout": lambda: Dropout("d", 0.4, seed=1),
    "head and cross-entropy": lambda: Loss(head()),
    "transformer block": lambda: OfBlock(block(0.0)),
    "transformer block with dropout": lambda: OfBlock(block(0.3)),
    "head block": lambda: OfBlock(HeadBlock(Parameter("w", (7, D), Normal(1.0)), D, T, group=GROUP)),
    "mlp layer, even": lambda: OfBlock(MlpLayer(2, D, group=GROUP)),
    "mlp layer, odd": lambda: OfBlock(MlpLayer(1, D, group=GROUP)),
    "mean square": lambda: OfBlock(MeanSquare(D, split=False, group=GROUP)),
}


def build(name, seed=0):
    layer = LAYERS[name]()
    parameters = layer.parameters()
    FlatBuffers(parameters, "float64")
    random = np.random.default_rng(seed)
    for p in parameters:
        p.data[...] = random.standard_normal(p.data.shape)
    return layer, random


def input_of(name, random, batch=B):
    return random.standard_normal((batch, T, D) if "mlp" not in name and name != "mean square" else (batch, D))


@pytest.mark.parametrize("name", LAYERS)
def test_backward_is_the_derivative(name):
    layer, random = build(name)
    x = input_of(name, random)
    y, saved = layer.forward(x, KEYS)
    weights = random.standard_normal(y.shape)
    dx = layer.backward(saved, weights.copy())
    arrays = [x] + [p.data for p in layer.parameters()]
    gradients = [dx] + [p.grad for p in layer.parameters()]
    check_gradient(lambda *_: float((layer.forward(x, KEYS)[0] * weights).sum()), arrays, gradients)
    with pytest.raises(AssertionError):  # the check would notice a wrong factor
        check_gradient(lambda *_: float((layer.forward(x, KEYS)[0] * weights).sum()), arrays, [dx * 1.01] + gradients[1:])


@pytest.mark.parametrize("name", LAYERS)
def test_two_micro_batches_in_flight_and_deferred_weight_gradients(name):
    layer, random = build(name)
    xs = [input_of(name, random) for _ in range(2)]
    saved = [layer.forward(x, KEYS) for x in xs]
    dys = [random.standard_normal(y.shape) for y, _ in saved]
    dxs = [layer.backward(s, dy.copy()) for (_, s), dy in zip(saved, dys)]
    whole = [p.grad.copy() for p in layer.parameters()]
    for p in layer.parameters():
        p.grad[:] = 0
    later = []
    saved = [layer.forward(x, KEYS) for x in xs]
    for i in (1, 0):
        deferred = layer.backward(saved[i][1], dys[i].copy(), later)
        assert np.array_equal(deferred, dxs[i])
    for work in later:
        work()
    for p, expected in zip(layer.parameters(), whole):
        np.testing.assert_allclose(p.grad, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [n for n in LAYERS if n != "dropout"])
def test_no_samples_give_no_gradient(name):
    layer, random = build(name)
    x = input_of(name, random, batch=0)
    y, saved = layer.forward(x)
    dx = layer.backward(saved, np.ones_like(y))
    assert dx.shape == x.shape and all((p.grad == 0).all() for p in layer.parameters())
    assert y.shape != (1,) or y[0] == 0.0


@pytest.mark.parametrize("make", [
    lambda: VocabParallelEmbedding("e", 7, D, T + 1, group=GROUP),
    lambda: OfBlock(EmbeddingBlock(7, D, T + 1, dropout=0.2, seed=0, group=GROUP)),
])
def test_embedding(make):
    layer = make()
    FlatBuffers(layer.parameters(), "float64")
    random = np.random.default_rng(0)
    for p in layer.parameters():
        p.data[...] = random.standard_normal(p.data.shape)
    tokens = random.integers(7, size=(B, T))
    y, saved = layer.forward(tokens, KEYS)
    weights = random.standard_normal(y.shape)
    layer.backward(saved, weights)
    check_gradient(lambda *_: float((layer.forward(tokens, KEYS)[0] * weights).sum()),
                   [p.data for p in layer.parameters()], [p.grad for p in layer.parameters()])


def test_dropout_masks_follow_the_samples_and_not_their_order():
    layer = Dropout("d", 0.5, seed=3)
    x = np.ones((4, 6, 5))
    keys = SampleKeys(2, np.array([3, 1, 8, 0]))
    whole, _ = layer.forward(x, keys)
    for i, sample in enumerate(keys.samples):
        alone, _ = layer.forward(x[:1], SampleKeys(2, np.array([sample])))
        assert (alone[0] == whole[i]).all()
    assert (layer.forward(x, SampleKeys(3, keys.samples))[0] != whole).any()  # another step
    assert (Dropout("e", 0.5, seed=3).forward(x, keys)[0] != whole).any()  # another layer
    assert (Dropout("d", 0.5, seed=4).forward(x, keys)[0] != whole).any()  # another seed
    assert set(np.unique(whole)) == {0.0, 2.0}
    assert layer.forward(x)[0] is x and Dropout("d", 0.0, seed=0).forward(x, keys)[0] is x
    with pytest.raises(ValueError, match=r"\[0, 1\)"):
        Dropout("d", 1.0, seed=0)


def test_attention_looks_back_only():
    layer = CausalAttention(2)
    qkv = np.random.default_rng(0).standard_normal((1, 6, 24))
    before, _ = layer.forward(qkv)
    qkv[0, 4] += 1
    after, _ = layer.forward(qkv)
    assert np.array_equal(before[0, :4], after[0, :4]) and (before[0, 4:] != after[0, 4:]).any()
