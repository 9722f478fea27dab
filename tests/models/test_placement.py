"""Stages on ranks in another order than round and round."""

import pytest

from mpipar import GPT, Mesh, Trainer
from mpipar.data import RandomTokens
from mpipar.parallel.pipeline.schedule import build, parse_plan, placement

TINY = dict(layers=6, dim=16, heads=2, vocab=16, seq=8, dtype="float64")


def losses(mesh, plan, tied=True):
    """Two steps under a plan."""
    micros = 1 + max(action.micro_batch for actions in plan for action in actions)
    model = GPT(**TINY, mesh=mesh, tied=tied, placement=placement(plan))
    trainer = Trainer(model, schedule=plan, micro_batches=micros)
    return [trainer.step(RandomTokens(vocab=16, seq=8, global_batch=6).batch(step)).loss for step in (1, 2)]


@pytest.mark.mpi(np=3)
def test_the_first_stage_may_be_on_any_rank(comm):
    expected = losses(Mesh.serial(), build("1f1b", 1, 2))
    backwards = parse_plan("2F0 2B0 2F1 2B1\n1F0 1F1 1B0 1B1\n0F0 0F1 0B0 0B1")
    middle = parse_plan("1F0 1F1 1B0 1B1\n0F0 0F1 0B0 0B1\n2F0 2B0 2F1 2B1")
    with Mesh(comm, pp=3) as mesh:
        assert losses(mesh, backwards) == pytest.approx(expected, rel=1e-12)
        with pytest.raises(ValueError, match="tied, on pipeline ranks 1 and 2"):
            losses(mesh, middle)
        untied = losses(Mesh.serial(), build("1f1b", 1, 2), tied=False)
        assert losses(mesh, middle, tied=False) == pytest.approx(untied, rel=1e-12)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="is not one of pp=1"):
        GPT(**TINY, mesh=Mesh.serial(), placement=[[0, 2]], allocate=False)
    with pytest.raises(ValueError, match=r"ranks as \[\[0, 1\]\], the model as \[\[0\]\]"):
        Trainer(GPT(**TINY), schedule=build("zb-v", 1, 2, 2), micro_batches=2)
