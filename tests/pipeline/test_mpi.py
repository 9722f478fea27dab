"""The executor over MPI: every schedule, small and large activations, with and without synchronous sends."""

import time

import numpy as np
import pytest

from mpipar.comm import Mesh
from mpipar.parallel.pipeline.check import check
from mpipar.parallel.pipeline.mailbox import GroupMailbox
from mpipar.parallel.pipeline.messages import with_messages
from mpipar.parallel.pipeline.run import run, run_forward
from mpipar.parallel.pipeline.schedule import build, forward_only, parse_plan
from tests.pipeline.model import Chunk, Wide, micro_batches, serial
from tests.pipeline.plans import PLANS

WIDTH = 6


@pytest.fixture(params=["0", "1"], ids=["eager", "synchronous"])
def group(request, comm, monkeypatch):
    """The pipeline group of a mesh of all ranks."""
    monkeypatch.setenv("MPIPAR_SYNC_SEND", request.param)
    mesh = Mesh(comm, pp=comm.Get_size())
    assert mesh.pp.synchronous == (request.param == "1")
    yield mesh.pp
    mesh.close()


def execute(plan, group, make, micros, mailbox=None, **hooks):
    """Run this rank's part of a plan; its result and its chunks."""
    program = with_messages(plan)[group.rank]
    chunks = {stage: make(stage, program.stages) for stage in program.own_stages}
    mailbox = mailbox or GroupMailbox(group, program.stages)
    return run(program, chunks, micros, mailbox, **hooks), chunks


def home_of_the_loss(plan):
    """The rank with the last stage."""
    return max((action.stage, rank) for rank, actions in enumerate(plan) for action in actions)[1]


@pytest.mark.mpi(np=[2, 4])
@pytest.mark.parametrize("name, chunks", PLANS)
def test_small_activations(group, name, chunks):
    for count in range(1, 9):
        plan = build(name, group.size, count, chunks)
        micros = micro_batches(count, WIDTH, sizes=[(3, 0, 5)[micro % 3] for micro in range(count)])
        losses, expected = serial(group.size * chunks, WIDTH, micros)
        result, own = execute(plan, group, lambda stage, stages: Chunk(stage, stages, WIDTH), micros)
        assert result.losses == (losses if group.rank == home_of_the_loss(plan) else [])
        for stage, chunk in own.items():
            np.testing.assert_allclose(chunk.dw, expected[stage].dw, rtol=1e-12, atol=1e-13)
        assert result.peak_live == check(plan).live[group.rank]


@pytest.mark.mpi(np=[2, 4])
@pytest.mark.parametrize("name, chunks", PLANS)
def test_activations_of_4_mib(group, name, chunks):
    stages, count = group.size * chunks, 3
    random = np.random.default_rng(0)
    micros = [random.standard_normal((1024, 1024), np.float32) for _ in range(count)]
    assert micros[0].nbytes == 4 << 20
    losses, expected = [], [Wide(stage, stages) for stage in range(stages)]
    for micro in micros:
        x, saved, dy = None, [], None
        for chunk in expected:
            x, kept = chunk.forward(x, micro)
            saved.append(kept)
        losses.append(x)
        for chunk in reversed(expected):
            dy = chunk.backward(saved.pop(), dy, micro)
    plan = build(name, group.size, count, chunks)
    result, own = execute(plan, group, Wide, micros)
    assert result.losses == (losses if group.rank == home_of_the_loss(plan) else [])      # the same bits
    for stage, chunk in own.items():
        assert chunk.da == pytest.approx(expected[stage].da, rel=1e-12)


@pytest.mark.mpi(np=[2, 4])
@pytest.mark.parametrize("name, chunks", PLANS)
def test_random_delays(group, name, chunks):
    random = np.random.default_rng(group.rank)
    micros = micro_batches(4, WIDTH)
    losses, expected = serial(group.size * chunks, WIDTH, micros)
    plan = build(name, group.size, 4, chunks)
    result, own = execute(plan, group, lambda *stage: Chunk(*stage, WIDTH), micros,
                          before=lambda action, last: time.sleep(random.uniform(0, 0.005)))
    assert result.losses == (losses if group.rank == home_of_the_loss(plan) else [])
    for stage, chunk in own.items():
        np.testing.assert_allclose(chunk.dw, expected[stage].dw, rtol=1e-12, atol=1e-13)


@pytest.mark.mpi(np=2)
def test_messages_out_of_order_find_their_receiver(group):
    plan = parse_plan("0F0 0F1 0F2 0B2 0B0 0B1\n1F2 1F0 1F1 1B1 1B0 1B2")
    micros = micro_batches(3, WIDTH)
    losses, expected = serial(2, WIDTH, micros)
    result, own = execute(plan, group, lambda *stage: Chunk(*stage, WIDTH), micros)
    assert result.losses == (losses if group.rank else [])
    np.testing.assert_allclose(own[group.rank].dw, expected[group.rank].dw, rtol=1e-12)


@pytest.mark.mpi(np=2)
def test_one_mailbox_serves_many_steps_with_the_same_buffers(group):
    plan, micros = build("1f1b", 2, 6), micro_batches(6, WIDTH)
    mailbox = GroupMailbox(group, 2)
    made = []

    class Watched(Chunk):
        def forward(self, x, micro):
            made.append(x)
            return super().forward(x, micro)

    losses = [execute(plan, group, lambda *stage: Watched(*stage, WIDTH), micros, mailbox)[0].losses
              for _ in range(4)]
    assert all(found == losses[0] for found in losses)
    if group.rank == 1:
        assert len({id(x) for x in made}) == 2 and len(made) == 24      # one computes, one is being filled


@pytest.mark.mpi(np=[2, 4])
def test_forward_only(group):
    micros = micro_batches(5, WIDTH)
    losses, _ = serial(group.size, WIDTH, micros)
    program = with_messages(forward_only(group.size, 5))[group.rank]
    chunks = {group.rank: Chunk(group.rank, group.size, WIDTH)}
    result = run_forward(program, chunks, micros, GroupMailbox(group, group.size))
    assert result.outputs == (losses if group.rank == group.size - 1 else [])


@pytest.mark.mpi(np=[2, 4])
def test_the_messages_of_a_step_are_recorded(comm):
    """2*M*(P*v-1) messages in all, each as large as an activation."""
    with Mesh(comm, pp=comm.Get_size()) as mesh:
        group = mesh.pp
        for name, chunks in PLANS:
            plan, micros = build(name, group.size, 4, chunks), micro_batches(4, WIDTH)
            with mesh.record() as log:
                result, _ = execute(plan, group, lambda *stage: Chunk(*stage, WIDTH), micros)
            counts = mesh.world.all_reduce(np.array([result.messages, log.sent()]))
            boundaries = group.size * chunks - 1 - (name == "zb-v")     # the V turns round within a rank
            messages = 2 * 4 * boundaries
            assert counts.tolist() == [messages, messages * micros[0][0].nbytes]
