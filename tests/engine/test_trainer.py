"""What a step means: the mean over the global batch, divided once, whatever the micro-batches and ranks."""

import contextlib
import math

import numpy as np
import pytest

from mpipar.comm.mesh import Mesh
from mpipar.data import Arrays, Batch, RandomTokens
from mpipar.engine.checksum import global_state, parameters_sha256
from mpipar.engine.optimizer import SGD, AdamW
from mpipar.engine.trainer import Trainer
from mpipar.kernels.gemm_kept import kept
from mpipar.models.gpt import GPT
from mpipar.parallel.pipeline.schedule import SCHEDULES, SEVERAL_CHUNKS, build, placement

TINY = dict(layers=4, dim=32, heads=4, vocab=64, seq=16, dtype="float64")


def trainer(mesh=None, *, schedule="1f1b", micro_batches=1, optimizer=None, clip=0.0, overlap=False, **changes):
    if mesh is not None and schedule in SCHEDULES:
        plan = build(schedule, mesh.pp.size, micro_batches, 2 if schedule in SEVERAL_CHUNKS else 1)
        changes["placement"] = placement(plan)
    model = GPT(mesh=mesh, **{**TINY, **changes})
    return Trainer(model, optimizer or SGD(lr=0.0), schedule=schedule, micro_batches=micro_batches, clip=clip,
                   overlap=overlap)


def tokens(batch=32, seed=0):
    return RandomTokens(vocab=64, seq=16, global_batch=batch, seed=seed).batch(1)


def losses_of_rows(batch, **options):
    """The loss of each row alone, and a batch in which they differ much."""
    alone = trainer(**options)
    inputs, targets = batch.fetch(0, batch.size)
    return [alone.evaluate([Batch.of(inputs[i : i + 1], targets[i : i + 1])]) for i in range(batch.size)]


def uneven_batch():
    """Row 0 has 3 valid tokens, row 1 has 1."""
    inputs, targets = tokens(2).fetch(0, 2)
    targets[0, 3:] = -1
    targets[1, 1:] = -1
    return Batch.of(inputs, targets)


@pytest.mark.mpi(np=[1, 2, 4])
def test_the_mean_is_over_tokens_not_over_micro_batches_or_ranks(comm):
    batch = uneven_batch()
    a, b = losses_of_rows(batch)
    expected = (3 * a + b) / 4
    for dp, pp, m in {(1, 1, 2), (1, comm.size, 2), (min(comm.size, 2), comm.size // min(comm.size, 2), 1)}:
        mesh = Mesh(comm, dp=dp, pp=pp, tp=comm.size // dp // pp)
        assert trainer(mesh, micro_batches=m).step(batch).loss == pytest.approx(expected, rel=1e-12)
    assert abs((a + b) / 2 - expected) > 1e-4  # the mean of means would have been noticed


@pytest.mark.mpi(np=[1, 2])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ratio_of_gradient_norms_is_1_for_any_cutting(comm, schedule):
    mesh = Mesh(comm, pp=comm.size)
    four, sixteen = (trainer(mesh, schedule=schedule, micro_batches=m).step(tokens()) for m in (4, 16))
    one = trainer().step(tokens())
    assert four.grad_norm / sixteen.grad_norm == pytest.approx(1, rel=1e-12)
    assert four.grad_norm / one.grad_norm == pytest.approx(1, rel=1e-12)


@pytest.mark.mpi(np=[1, 2])
@pytest.mark.parametrize("m", [1, 2, 4, 8])
def test_only_micro_batch_0_has_weight(comm, m):
    inputs, targets = tokens(8).fetch(0, 8)
    rows = 8 // m
    masked = targets.copy()
    masked[rows:] = -1
    mesh = Mesh(comm, pp=comm.size)
    alone = trainer()
    alone.step(Batch.of(inputs[:rows], targets[:rows]))  # divides by the tokens of these rows, which are all that count
    expected = global_state(alone.model, gradients=True)
    for schedule in SCHEDULES:
        parallel = trainer(mesh, schedule=schedule, micro_batches=m)
        parallel.step(Batch.of(inputs, masked))
        found = global_state(parallel.model, gradients=True)
        for name, gradient in found.items():
            np.testing.assert_allclose(gradient, expected[name], rtol=0, atol=1e-12 * np.abs(expected[name]).max())


@pytest.mark.mpi(np=[1, 2, 4])
def test_norm_of_ones_counts_each_element_once(comm):
    n = comm.size
    layouts = [(1, n, 1), (1, 1, n), (n, 1, 1)] + ([(1, 2, 2), (2, 2, 1), (2, 1, 2)] if n == 4 else [])
    for tied, expected in ((True, math.sqrt(53440)), (False, math.sqrt(55488))):
        assert expected == pytest.approx(231.170932 if tied else 235.558910, abs=1e-6)
        for dp, tp, pp in layouts:
            mesh = Mesh(comm, dp=dp, tp=tp, pp=pp)
            t = trainer(mesh, tied=tied)
            t.model.buffers.grad[:] = 1
            squares = mesh.world.all_reduce(np.array([t.gradients.squares()]))[0]
            assert math.sqrt(squares) == pytest.approx(expected, rel=1e-12), (dp, tp, pp)


@pytest.mark.mpi(np=[2, 4])
def test_tied_copies_stay_bitwise_equal(comm):
    mesh = Mesh(comm, pp=comm.size)
    t, alone = (trainer(m, micro_batches=4, optimizer=AdamW(lr=1e-2)) for m in (mesh, None))
    source = RandomTokens(vocab=64, seq=16, global_batch=32)
    for step in range(1, 11):
        assert t.step(source.batch(step)).loss == pytest.approx(alone.step(source.batch(step)).loss, rel=1e-9)
    if t.model.tied:
        copies = mesh.ends.all_gather(t.model.tied[0].data[None])
        assert np.array_equal(copies[0], copies[1])
    assert bool(t.model.tied) == (mesh.pp.rank in (0, comm.size - 1))


@pytest.mark.mpi(np=2)
def test_vocabulary_of_65_over_2_ranks(comm):
    inputs = np.array([[3, 64, 32, 33]])
    batch = Batch.of(inputs, np.array([[0, 32, 33, 64]]))
    split, alone = (trainer(m, vocab=65, seq=4) for m in (Mesh(comm, tp=2), None))
    assert split.step(batch).loss == pytest.approx(alone.step(batch).loss, rel=1e-13)
    found = global_state(split.model, gradients=True)
    for name, expected in global_state(alone.model, gradients=True).items():
        if split.mesh.is_root:
            np.testing.assert_allclose(found[name], expected, rtol=0, atol=1e-14)


@pytest.mark.mpi(np=4)
@pytest.mark.parametrize("m", [1, 2, 3, 5])
def test_few_and_odd_micro_batches(comm, m):
    mesh = Mesh(comm, pp=4)
    t, alone = trainer(mesh, micro_batches=m), trainer()
    assert t.step(tokens(15)).loss == pytest.approx(alone.step(tokens(15)).loss, rel=1e-12)
    assert t.last_run.peak_live == min(m, 4 - mesh.pp.rank)


@pytest.mark.mpi(np=2)
def test_sgd_takes_the_sum_of_the_replicas(comm):
    """w = 1 and local gradients 1 and 3, of which the division by the global batch makes 0.5 and 1.5: 0.8 on both."""
    mesh = Mesh(comm)
    t = trainer(mesh, optimizer=SGD(lr=0.1))
    t.model.buffers.data[:] = 1
    t.model.buffers.grad[:] = (0.5, 1.5)[mesh.rank]
    t.gradients.reduce()
    t.optimizer.update(lr=0.1, step=1)
    assert np.allclose(t.model.buffers.data, 0.8, atol=1e-15)


@pytest.mark.mpi(np=4)
@pytest.mark.parametrize("m", [1, 8])
def test_bytes_of_data_parallelism_do_not_depend_on_the_micro_batches(comm, m):
    mesh = Mesh(comm)
    t = trainer(mesh, micro_batches=m, dtype="float32")
    with mesh.record() as log:
        t.step(tokens())
    assert log.sent(by="group")["dp"] == 320_640 == 2 * 3 / 4 * 4 * 53_440
    assert [e.group for e in log.entries].count("dp") == 1  # one bucket


@pytest.mark.mpi(np=4)
def test_messages_of_tensor_and_pipeline_parallelism(comm):
    """2 all-reduces forward and 2 backward a layer and micro-batch; 2 M (P - 1) pipeline messages."""
    m, mesh = 4, Mesh(comm, tp=2, pp=2)
    t = trainer(mesh, micro_batches=m)
    with mesh.record() as log:
        t.step(tokens())
    sizes = [e.bytes for e in log.entries if e.group == "tp" and e.operation == "all_reduce"]
    whole = 8 * 16 * 32 * 8  # micro-batch x T x D x 8 bytes
    # 2 layers a stage; one more on the first stage for the embedding, on the last for dx of the head
    assert sizes.count(whole) == m * 2 * 4 + m
    sent = [e for e in log.entries if e.group == "pp" and e.operation.startswith("send")]
    assert len(sent) == m  # this rank's share of 2 M (P - 1)


@pytest.mark.mpi(np=3)
def test_a_last_batch_of_one_sample_over_three_ranks(comm):
    data = RandomTokens(vocab=64, seq=16, global_batch=145).batch(1).fetch(0, 145)
    source = Arrays(*data, global_batch=48, drop_last=False)
    t, alone = trainer(Mesh(comm), micro_batches=2), trainer()
    for step in range(1, 5):
        batch = source.batch(step)
        assert t.step(batch).loss == pytest.approx(alone.step(batch).loss, rel=1e-12)
    assert batch.size == 1 and alone.evaluate([batch]) == pytest.approx(t.evaluate([batch]), rel=1e-12)


@pytest.mark.mpi(np=[1, 2, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble", "zb-v"])
def test_nothing_of_the_last_step_is_left_in_the_gradients(comm, schedule):
    """No one clears them: the first to come overwrites. So numbers that would spoil everything are put there."""
    hashes, pp = [], 1 if comm.size == 2 and schedule != "zb-v" else min(comm.size, 2)
    for spoil, overlap in ((False, False), (True, False), (True, True)):
        mesh = Mesh(comm, dp=comm.size // pp, pp=pp)
        t = trainer(mesh, schedule=schedule, micro_batches=2, optimizer=AdamW(lr=1e-2), overlap=overlap)
        for step in range(3):
            if spoil:
                t.model.buffers.grad[:] = np.nan
            t.step(tokens(seed=step))
        hashes.append(parameters_sha256(t.model))
        assert np.isfinite(t.model.buffers.grad).all()
    assert len(set(hashes)) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_packed_once_a_step(monkeypatch, dtype):
    """Once for forward and once for backward, however many micro-batches; the bits are those without."""
    options = dict(dtype=dtype, optimizer=AdamW(lr=1e-2), dim=64)
    one, three = trainer(micro_batches=1, **options), trainer(micro_batches=3, **options)
    made = kept.made
    one.step(tokens())
    assert kept.made == made
    for step in range(1, 4):
        three.step(tokens(seed=step))
        assert made < kept.made <= made + step * 2 * (4 * 4 + 1)  # four layers of four matrices, and the head
    packed, again = kept.made - made, trainer(micro_batches=3, **options)
    monkeypatch.setattr("mpipar.engine.trainer.unchanged", lambda *arrays: contextlib.nullcontext())
    for step in range(1, 4):
        again.step(tokens(seed=step))
    assert packed % 3 == 0 and kept.made - made == packed
    assert parameters_sha256(again.model) == parameters_sha256(three.model)


def test_clipping_makes_the_norm_the_limit():
    t = trainer(clip=0.1, optimizer=SGD(lr=1.0))
    before = t.model.buffers.data.copy()
    norm = t.step(tokens()).grad_norm
    moved = np.linalg.norm(t.model.buffers.data - before)
    assert norm > 0.1 and moved == pytest.approx(0.1, rel=1e-9)
    assert t.clip_factor(0.05) == 1.0 and trainer(clip=0.0).clip_factor(1e9) == 1.0


def test_checksum_tells_models_apart():
    a, b, c = trainer().model, trainer().model, trainer(seed=1).model
    assert parameters_sha256(a) == parameters_sha256(b) != parameters_sha256(c)
    b.buffers.data[17] = np.nextafter(b.buffers.data[17], 2)
    assert parameters_sha256(a) != parameters_sha256(b)


@pytest.mark.mpi(np=4)
def test_same_layout_twice_gives_the_same_bits(comm):
    runs = []
    for _ in range(2):
        mesh = Mesh(comm, tp=2, pp=2)
        t = trainer(mesh, micro_batches=2, optimizer=AdamW(), dtype="float32", dropout=0.1)
        losses = [t.step(tokens(seed=s)).loss for s in range(3)]
        runs.append((losses, t.model.buffers.data.copy()))
    assert runs[0][0] == runs[1][0] and np.array_equal(runs[0][1], runs[1][1])


@pytest.mark.parametrize("options,words", [
    (dict(schedule="zigzag"), "valid: naive"), (dict(micro_batches=0), "at least 1"),
])
def test_unknown_choices_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        trainer(**options)
