"""Text from a trained GPT, token by token, in any layout."""

from __future__ import annotations

import numpy as np

from mpipar.models.gpt import GPT
from mpipar.models.model import MicroBatch
from mpipar.nn.parameter import split_range
from mpipar.parallel.pipeline.mailbox import GroupMailbox
from mpipar.parallel.pipeline.messages import with_messages
from mpipar.parallel.pipeline.run import run_forward
from mpipar.parallel.pipeline.schedule import forwards


def generate(model: GPT, prompt: np.ndarray, count: int, *, temperature: float = 0.8, seed: int = 0) -> np.ndarray:
    """Continue `prompt` (int64 [n], n >= 1) by `count` tokens; every rank of a replica calls it and gets the result.

    Each token is drawn from softmax(logits / temperature), temperature 0 takes the most likely one. The model sees
    the last `seq` tokens. ValueError if the prompt is empty or the temperature negative.
    """
    if len(prompt) < 1:
        raise ValueError("the prompt is empty: give at least one token")
    if temperature < 0:
        raise ValueError(f"temperature {temperature} is not valid: it must be at least 0")
    mesh = model.mesh
    program = with_messages(forwards(model.placement, 1))[mesh.pp.rank]
    mailbox = GroupMailbox(mesh.pp, model.stages)
    random = np.random.default_rng(seed)
    tokens = np.concatenate([np.asarray(prompt, np.int64), np.zeros(count, np.int64)])
    for end in range(len(prompt), len(tokens)):
        context = tokens[max(0, end - model.seq) : end]
        done = run_forward(program, model.chunks, [MicroBatch(context[None], None, None, 0.0)], mailbox)
        if done.outputs:
            tokens[end] = draw(whole_row(model, done.outputs[0]), temperature, random)
        mesh.pp.broadcast(tokens[end : end + 1], root=model.rank_of(model.stages - 1))
    return tokens


def whole_row(model: GPT, logits: np.ndarray) -> np.ndarray:
    """The logits [1, V / P] of every tensor-parallel rank side by side, [V]."""
    parts = model.mesh.tp.size
    sizes = [b - a for a, b in (split_range(model.vocab, parts, r) for r in range(parts))]
    return model.mesh.tp.all_gather(logits, axis=1, sizes=sizes)[0]


def draw(logits: np.ndarray, temperature: float, random: np.random.Generator) -> int:
    """One token from softmax(logits / temperature)."""
    logits = logits.astype(np.float64)
    if temperature == 0:
        return int(logits.argmax())
    if not np.isfinite(logits).all():
        raise ValueError("the model's logits are not finite: it has diverged, and no text can be drawn from it")
    scaled = logits / temperature
    weights = np.exp(scaled - scaled.max())
    return int(random.choice(len(logits), p=weights / weights.sum()))
