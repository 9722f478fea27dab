"""Logits, loss and every gradient of the GPT equal PyTorch's on the same weights."""

import numpy as np
import pytest

from mpipar.data import Batch
from mpipar.engine.optimizer import SGD
from mpipar.engine.trainer import Trainer
from mpipar.models.gpt import GPT
from mpipar.models.model import MicroBatch

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def torch_logits(w, tokens, heads, layers):
    """The same GPT over torch tensors `w` by name; an independent statement of the model."""
    F = torch.nn.functional
    x = w["embedding.weight"][tokens] + w["embedding.positions"][: tokens.shape[1]]
    b, t, d = x.shape
    for i in range(layers):
        name = f"block{i}."
        n = F.layer_norm(x, (d,), w[name + "norm1.gamma"], w[name + "norm1.beta"])
        qkv = n @ w[name + "qkv.weight"].reshape(d, 3 * d) + w[name + "qkv.bias"].reshape(-1)
        q, k, v = (p.reshape(b, t, heads, d // heads).transpose(1, 2) for p in qkv.split(d, dim=2))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + a @ w[name + "projection.weight"] + w[name + "projection.bias"]
        n = F.layer_norm(x, (d,), w[name + "norm2.gamma"], w[name + "norm2.beta"])
        h = F.gelu(n @ w[name + "up.weight"] + w[name + "up.bias"])
        x = x + h @ w[name + "down.weight"] + w[name + "down.bias"]
    x = F.layer_norm(x, (d,), w["head.norm.gamma"], w["head.norm.beta"])
    return x @ w.get("head.weight", w["embedding.weight"]).T


@pytest.mark.parametrize("dtype,bound", [("float32", 1e-5), ("float64", 1e-10)])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_loss_and_gradients_equal_pytorch(dtype, bound, tied):
    model = GPT(layers=3, dim=48, heads=3, vocab=65, seq=40, tied=tied, dtype=dtype)
    random = np.random.default_rng(0)
    for p in model.parameters:  # weights large enough that every part matters
        p.data[...] = random.standard_normal(p.data.shape) * (0.3 if p.decay else 0.5)
    tokens = random.integers(65, size=(4, 34))
    inputs, targets = tokens[:, :-1], tokens[:, 1:].copy()
    targets[1, 5:] = -1  # left out of the loss
    w = {p.name: torch.tensor(p.data.copy(), requires_grad=True) for p in model.parameters}
    reference = torch_logits(w, torch.tensor(inputs), 3, 3)
    loss = torch.nn.functional.cross_entropy(reference.flatten(0, 1), torch.tensor(targets).flatten(), ignore_index=-1)
    loss.backward()

    chunk = model.chunks[0]
    x = inputs
    for block in chunk.blocks[:-1]:
        x, _ = block.forward(x, MicroBatch(inputs, targets, None, 0.0))
    head = chunk.blocks[-1]
    logits = head.head.logits(head.norm.forward(x)[0]).reshape(4, 33, 65)
    trainer = Trainer(model, SGD(lr=0.0), micro_batches=3)
    result = trainer.step(Batch.of(inputs, targets))

    def close(a, b):
        return np.abs(a - b).max() <= bound * np.abs(b).max()

    assert close(logits, reference.detach().numpy())
    assert abs(result.loss - loss.item()) <= bound * abs(loss.item())
    for p in model.parameters:
        assert close(p.grad, w[p.name].grad.numpy()), p.name
    assert not close(p.grad * 1.001, w[p.name].grad.numpy())  # the comparison would notice a wrong factor
