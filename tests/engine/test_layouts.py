"""Parallel equals serial: the same bits at the start, the same losses, norms, gradients and weights in every layout."""

import dataclasses

import pytest

from mpipar.comm.mesh import Mesh
from mpipar.commands.verify import BOUNDS, Options, compare, run
from mpipar.parallel.pipeline.schedule import SCHEDULES, SEVERAL_CHUNKS

LAYOUTS = {1: [(1, 1, 1)], 2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)],
           4: [(4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 2, 1), (2, 1, 2), (1, 2, 2)], 8: [(2, 2, 2), (1, 4, 2)]}
BASE = Options(dropout=0.0, micro_batches=1, clip=0.0)
VARIANTS = {
    "plain": {},
    "untied": {"tied": False},
    "V=65": {"vocab": 65},
    "dropout": {"dropout": 0.1, "micro_batches": 3},
    "M=8": {"micro_batches": 8},
    "M=3, clipped, untied": {"micro_batches": 3, "clip": 0.3, "tied": False},
}
SERIAL = {}  # of this process: the serial run of each variant is computed once


def serial(variant, steps):
    if (variant, steps) not in SERIAL:
        SERIAL[variant, steps] = run(options_of(variant, steps), Mesh.serial(), "1f1b")
    return SERIAL[variant, steps]


def options_of(variant, steps):
    return dataclasses.replace(BASE, steps=steps, **VARIANTS[variant])


def check(comm, variant, shape, schedule, steps):
    dp, tp, pp = shape
    mesh = Mesh(comm, dp=dp, tp=tp, pp=pp)
    outcome = run(options_of(variant, steps), mesh, schedule)
    reference = serial(variant, steps)
    if mesh.is_root:
        found = compare(reference, outcome)
        assert found["start"] == 0
        for name, bound in BOUNDS.items():
            assert found[name] <= bound, (shape, schedule, name, found[name])
    else:  # the loss and the norm are the same on every rank
        assert outcome.losses == pytest.approx(reference.losses, rel=1e-9)
        assert outcome.norms == pytest.approx(reference.norms, rel=1e-9)
    mesh.close()


@pytest.mark.mpi(np=[1, 2, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_layout_equals_one_rank(comm, variant):
    for shape in LAYOUTS[comm.size]:
        check(comm, variant, shape, "1f1b", steps=3)


@pytest.mark.mpi(np=8)
def test_eight_ranks_equal_one(comm):
    for shape in LAYOUTS[8]:
        check(comm, "V=65", shape, "1f1b", steps=2)


@pytest.mark.slow
@pytest.mark.mpi(np=[1, 2, 4, 8])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_layout_equals_one_rank_for_20_steps(comm, variant):
    for shape in LAYOUTS[comm.size]:
        check(comm, variant, shape, "1f1b", steps=20)


@pytest.mark.mpi(np=[2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_equals_one_rank(comm, schedule, monkeypatch):
    monkeypatch.setenv("MPIPAR_SYNC_SEND", "1")
    for variant in ("plain", "untied", "dropout"):
        pp = 2 if schedule in SEVERAL_CHUNKS else comm.size  # 4 layers make 2 stages on each of 2 ranks
        check(comm, variant, (comm.size // pp, 1, pp), schedule, steps=2)


@pytest.mark.mpi(np=2)
def test_another_order_of_the_axes(comm):
    for order in (("tp", "dp", "pp"), ("pp", "tp", "dp")):
        mesh = Mesh(comm, dp=1, tp=2, pp=1, order=order)
        outcome = run(options_of("plain", 2), mesh, "1f1b")
        if mesh.is_root:
            assert compare(serial("plain", 2), outcome)["weights"] < 1e-9
