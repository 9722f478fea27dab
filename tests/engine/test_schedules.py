"""Every schedule, number of micro-batches and of chunks, tied and untied, equals one rank: losses, norms, gradients, weights.

With messages as MPI likes to send them, with synchronous ones (MPIPAR_SYNC_SEND=1), and with these and a random delay of
up to 50 ms before each action; alone, with two replicas and with two tensor-parallel ranks.
"""

import time

import numpy as np
import pytest

from mpipar.commands.verify import BOUNDS, Options, compare, run
from mpipar.comm.mesh import Mesh
from mpipar.parallel.pipeline.schedule import KINDS, SCHEDULES
from tests.pipeline.plans import chunk_counts

CASES = [(name, chunks) for name in SCHEDULES for chunks in chunk_counts(name, most=2)]
MICRO_BATCHES = (1, 2, 3, 4, 8)
LONGEST_DELAY = 0.05  # seconds
SERIAL = {}  # of this process: each serial run is made once


def options_of(micros, tied, steps):
    """8 layers: two stages on each of 4 ranks."""
    return Options(layers=8, dropout=0.0, clip=0.3, micro_batches=micros, tied=tied, steps=steps)


def delayed(trainer):
    """A delay before each action, which depends on the rank and the action alone."""
    reducer, rank = trainer.gradients.reducer, trainer.mesh.rank
    others = reducer.before

    def before(action, last):
        seed = (rank, action.stage, list(KINDS).index(action.kind), action.micro_batch)
        time.sleep(np.random.default_rng(seed).uniform(0, LONGEST_DELAY))
        if others is not None:
            others(action, last)

    reducer.before = before


def check(comm, shape, schedule, chunks, options, damage=None):
    """Compare a layout (dp, tp, pp) with one rank."""
    if options not in SERIAL:
        SERIAL[options] = run(options, Mesh.serial(), "1f1b")
    dp, tp, pp = shape
    with Mesh(comm, dp=dp, tp=tp, pp=pp) as mesh:
        outcome = run(options, mesh, schedule, damage, chunks=chunks)
        if mesh.is_root:
            found = compare(SERIAL[options], outcome)
            wrong = {name: found[name] for name, bound in BOUNDS.items() if not found[name] <= bound}
            assert found["start"] == 0 and not wrong, (shape, schedule, chunks, options, wrong)
        else:  # the loss and the norm are the same on every rank
            assert outcome.losses == pytest.approx(SERIAL[options].losses, rel=1e-9)
            assert outcome.norms == pytest.approx(SERIAL[options].norms, rel=1e-9)


def shapes(ranks):
    """All ranks in one pipeline, and where there are enough of them, also two replicas and two tensor-parallel ranks."""
    alone = [(1, 1, ranks)] if ranks < 8 else []  # P = 1, 2, 4
    return alone + ([(2, 1, ranks // 2), (1, 2, ranks // 2)] if ranks > 1 else [])


@pytest.mark.mpi(np=[2, 4])
@pytest.mark.parametrize("schedule, chunks", CASES)
def test_a_part_of_it(comm, schedule, chunks, monkeypatch):
    """Delays and synchronous messages in one pipeline of all ranks; with 4 ranks also two replicas, untied."""
    monkeypatch.setenv("MPIPAR_SYNC_SEND", "1")
    check(comm, (1, 1, comm.size), schedule, chunks, options_of(3, True, 1), delayed)
    if comm.size == 4:
        check(comm, (2, 1, 2), schedule, chunks, options_of(4, False, 1))


@pytest.mark.slow
@pytest.mark.mpi(np=[1, 2, 4, 8], timeout=1200)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("messages", ["eager", "synchronous", "delayed"])
@pytest.mark.parametrize("schedule, chunks", CASES)
def test_all_of_it(comm, schedule, chunks, messages, tied, monkeypatch):
    monkeypatch.setenv("MPIPAR_SYNC_SEND", "0" if messages == "eager" else "1")
    late = messages == "delayed"
    for micros in MICRO_BATCHES:
        for shape in shapes(comm.size):
            check(comm, shape, schedule, chunks, options_of(micros, tied, 1 if late else 2), delayed if late else None)


@pytest.mark.mpi(np=2)
def test_what_is_left_out_is_noticed(comm):
    """Negative control: a tied embedding whose two copies are not summed."""
    def damage(trainer):
        trainer.gradients.reduce_tied = lambda: None

    options = options_of(2, True, 1)
    with Mesh(comm, pp=2) as mesh:
        outcome = run(options, mesh, "1f1b", damage)
        if mesh.is_root:
            found = compare(run(options, Mesh.serial(), "1f1b"), outcome)
            assert found["gradients"] > 1e-3 and found["norms"] > 1e-6
