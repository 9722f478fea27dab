"""Bits that do not depend on the number of replicas."""

import numpy as np
import pytest

from mpipar.comm.mesh import Mesh
from mpipar.data import RandomTokens
from mpipar.engine.checksum import parameters_sha256
from mpipar.engine.optimizer import AdamW
from mpipar.engine.trainer import Trainer
from mpipar.models.gpt import GPT
from mpipar.parallel.deterministic import tree

GLOBAL = 8          # micro-batches of all replicas


def bits(comm, shape, steps, *, deterministic=True, schedule="1f1b", micro_batches=GLOBAL, batch=18):
    """(losses and norms of all steps, checksum) on the first ranks of `comm` that `shape` needs; None on the others."""
    dp, pp = shape
    part = comm.Split(comm.rank // (dp * pp), comm.rank) if comm.size > 1 else None
    if comm.rank >= dp * pp:
        return None
    with Mesh(part, dp=dp, pp=pp) as mesh:
        model = GPT(layers=2, dim=16, heads=2, vocab=32, seq=8, mesh=mesh, dropout=0.1)
        t = Trainer(model, AdamW(lr=1e-2), micro_batches=micro_batches // dp, clip=0.5, schedule=schedule,
                    deterministic=deterministic)
        source = RandomTokens(vocab=32, seq=8, global_batch=batch)
        results = [t.step(source.batch(k)) for k in range(1, steps + 1)]
        return [r.loss for r in results], [r.grad_norm for r in results], parameters_sha256(model)


@pytest.mark.mpi(np=4)
def test_dp_1_2_4_give_the_same_bits_for_50_steps(comm):
    """18 samples in 8 micro-batches, so of 3 and 2; with clipping, dropout and AdamW."""
    one, two, four = (bits(comm, (dp, 1), 50) for dp in (1, 2, 4))
    if comm.rank == 0:
        assert len(one[0]) == 50 and one == two == four


@pytest.mark.mpi(np=4)
def test_without_it_the_bits_differ(comm):
    one, four = (bits(comm, (dp, 1), 10, deterministic=False, batch=16) for dp in (1, 4))
    if comm.rank == 0:
        assert one[0] != four[0] and one[0] == pytest.approx(four[0], rel=1e-4)


@pytest.mark.mpi(np=4)
@pytest.mark.parametrize("schedule", ["gpipe", "zero-bubble"])
def test_in_a_pipeline(comm, schedule):
    """Gradients that appear in another order, or in two halves, are summed in the same one; 12 = 2 x 6, 6 = 3 + 3."""
    one, two = (bits(comm, (dp, 2), 4, schedule=schedule, micro_batches=12) for dp in (1, 2))
    if comm.rank == 0:
        assert one == two


@pytest.mark.mpi(np=4)
def test_bytes_sent_are_those_of_an_all_reduce(comm):
    with Mesh(comm) as mesh:
        t = Trainer(GPT(layers=4, dim=32, heads=4, vocab=64, seq=16, mesh=mesh), micro_batches=2, deterministic=True)
        with mesh.record() as log:
            t.step(RandomTokens(vocab=64, seq=16, global_batch=16).batch(1))
        assert log.sent("group")["dp"] == 320_640


@pytest.mark.parametrize("leaves", [1, 2, 3, 7, 12])
def test_the_tree(leaves):
    """Every node but the root has a sibling and a parent that together are one range; leaves are the micro-batches."""
    above = tree(0, leaves)
    assert len(above) == 2 * leaves - 2 and {(i, i + 1) for i in range(leaves)} <= above.keys() | {(0, 1)}
    for node, (sibling, parent) in above.items():
        assert sorted([node, sibling])[0][0] == parent[0] and sorted([node, sibling])[1][1] == parent[1]
        assert above[sibling] == (node, parent)


@pytest.mark.mpi(np=3)
def test_three_replicas_are_refused(comm):
    with Mesh(comm) as mesh:
        with pytest.raises(ValueError, match="power of two"):
            Trainer(GPT(layers=1, dim=8, heads=1, vocab=8, seq=4, mesh=mesh), deterministic=True)


def test_zero_is_refused():
    with pytest.raises(ValueError, match="valid is zero=0"):
        Trainer(GPT(layers=1, dim=8, heads=1, vocab=8, seq=4), deterministic=True, zero=1)
    assert np.isfinite(Trainer(GPT(layers=1, dim=8, heads=1, vocab=8, seq=4), deterministic=True).step(
        RandomTokens(vocab=8, seq=4, global_batch=2).batch(1)).loss)
