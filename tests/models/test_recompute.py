"""Activations that are dropped and made again: the same bits, and as many bytes less as were counted."""

import dataclasses

import numpy as np
import pytest

from mpipar import GPT, MLP, AdamW, Mesh, Trainer
from mpipar.data import RandomTokens, RandomVectors
from mpipar.engine.checksum import parameters_sha256
from mpipar.models.model import Chunk, count_bytes
from mpipar.parallel.pipeline.schedule import SEVERAL_CHUNKS, build, placement

B, T, D, H, LAYERS = 2, 8, 16, 2, 4
BLOCK = (10 * D + 4 + H) * B * T * 8      # float64: x, qkv, out, x of the second norm, hidden (4D); statistics, lse


def train(recompute, *, mesh=None, schedule="1f1b", micros=2, steps=3, dropout=0.1, zero=0):
    """(losses, checksum, chunks) of some steps of a tiny GPT."""
    mesh = mesh or Mesh.serial()
    plan = build(schedule, mesh.pp.size, micros, 2 if schedule in SEVERAL_CHUNKS else 1)
    model = GPT(layers=LAYERS, dim=D, heads=H, vocab=16, seq=T, mesh=mesh, dropout=dropout, dtype="float64",
                placement=placement(plan), recompute=recompute)
    trainer = Trainer(model, AdamW(lr=1e-2), schedule=plan, micro_batches=micros, clip=1.0, zero=zero)
    source = RandomTokens(vocab=16, seq=T, global_batch=micros * B * mesh.dp.size)
    losses = [trainer.step(source.batch(step)).loss for step in range(1, steps + 1)]
    return losses, parameters_sha256(model), model.chunks


@pytest.mark.parametrize("recompute", ["attention", "full"])
def test_the_same_bits_and_the_counted_bytes(recompute):
    losses, digest, chunks = train("none")
    assert chunks[0].dropped_bytes == 0
    whole = chunks[0].held_bytes
    found = train(recompute)
    assert found[:2] == (losses, digest)
    dropped = LAYERS * {"attention": (4 * D + H), "full": (9 * D + 4 + H)}[recompute] * B * T * 8
    assert found[2][0].dropped_bytes == dropped
    assert found[2][0].held_bytes == whole - dropped
    assert whole > LAYERS * BLOCK


@pytest.mark.mpi(np=[2, 4])
def test_the_same_bits_in_pipelines_and_with_tensor_parallelism(comm):
    shapes = [dict(pp=2, tp=comm.size // 2), dict(pp=1, tp=2)]
    for shape, schedule in zip(shapes, ("zero-bubble", "gpipe")):
        with Mesh(comm, **shape) as mesh:
            plain = train("none", mesh=mesh, schedule=schedule, steps=2)[:2]
            for recompute in ("attention", "full"):
                assert train(recompute, mesh=mesh, schedule=schedule, steps=2)[:2] == plain


@pytest.mark.mpi(np=2)
def test_the_same_bits_and_messages_with_divided_parameters(comm):
    """Under ZeRO 3 the parameters that are gathered to make activations again serve backward too."""
    with Mesh(comm) as mesh:
        for zero in (2, 3):
            with mesh.record() as log:
                plain = train("none", mesh=mesh, zero=zero)[:2]
            for recompute in ("attention", "full"):
                with mesh.record() as again:
                    assert train(recompute, mesh=mesh, zero=zero)[:2] == plain
                assert again.sent("group")["dp"] == log.sent("group")["dp"]


def test_mlp():
    sums, bytes_held = set(), []
    for recompute in ("none", "full"):
        model = MLP(layers=3, dim=D, dtype="float64", recompute=recompute)
        trainer = Trainer(model, AdamW(lr=1e-2), micro_batches=2)
        source = RandomVectors(dim=D, global_batch=8, dtype="float64")
        losses = tuple(trainer.step(source.batch(step)).loss for step in (1, 2))
        sums.add((losses, parameters_sha256(model)))
        bytes_held.append((model.chunks[0].held_bytes, model.chunks[0].dropped_bytes))
    assert len(sums) == 1
    activation = 4 * D * 8      # of a micro-batch of 4 rows
    room = 3 * 64               # beside the 3 outputs of GeLU, see kernels.memory.passing
    assert bytes_held == [(7 * activation + room, 0), (4 * activation + room, 3 * activation)]   # x and h of 3 layers, x of the loss


def test_what_is_rebuilt_wrongly_is_noticed(monkeypatch):
    """Negative control: the second forward runs without dropout."""
    losses, digest, _ = train("full")
    rebuild = Chunk._rebuild
    monkeypatch.setattr(Chunk, "_rebuild", lambda self, block, kept, micro: rebuild(
        self, block, kept, dataclasses.replace(micro, keys=None)))
    assert train("full")[:2] != (losses, digest)


def test_bytes_are_counted_once():
    x = np.zeros((4, 6))
    assert count_bytes([x, x.T, (x[1:], [x])]) == x.nbytes
    assert count_bytes([x, np.zeros(3)], but=x[2:]) == 24
    assert count_bytes([None, 1.5]) == 0
    with pytest.raises(ValueError, match="none, attention, full"):
        GPT(layers=1, dim=8, heads=1, seq=4, recompute="some", allocate=False)
