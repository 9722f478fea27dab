"""Overlap: the bits of a run without it, as many messages as buckets, and nothing summed before it is complete."""

import dataclasses
import gc
import threading
import time

import numpy as np
import pytest

from mpipar.commands.breakage import BREAKS
from mpipar.commands.verify import BOUNDS, Options, compare, run
from mpipar.comm.mesh import Mesh
from mpipar.data import RandomTokens, RandomVectors
from mpipar.engine.checksum import parameters_sha256
from mpipar.engine.optimizer import AdamW
from mpipar.engine.trainer import Trainer
from mpipar.models.gpt import GPT
from mpipar.models.mlp import MLP
from mpipar.parallel import overlap
from mpipar.parallel.data import GradientReducer, sum_gradients
from mpipar.parallel.overlap import Bucket, Helper, OverlappingReducer, cut, joined, last_backwards, room, without_crumbs
from mpipar.parallel.pipeline.schedule import SCHEDULES, SEVERAL_CHUNKS, build, placement

TINY = dict(layers=4, dim=32, heads=4, vocab=64, seq=16)
SIZES = (1e-5, 0.06, 1e3)               # MB: a bucket for each block; for every two; one larger than the model


def trainer(mesh, overlapped, *, schedule="1f1b", micro_batches=1, **options):
    sizes = {**TINY, **{name: options.pop(name) for name in ("tied", "layers", "dtype", "dropout", "recompute") if name in options}}
    plan = build(schedule, mesh.pp.size, micro_batches, 2 if schedule in SEVERAL_CHUNKS else 1)
    model = GPT(mesh=mesh, placement=placement(plan), **sizes)
    return Trainer(model, AdamW(lr=1e-2), schedule=plan, micro_batches=micro_batches, clip=0.5, overlap=overlapped, **options)


def bits(comm, overlapped, *, back_end="auto", steps=3, change=None, shape=None, **options):
    """(losses, norms, checksum) of some steps, on every rank; the checksum on rank 0 alone."""
    with Mesh(comm, back_end=back_end, **(shape or {})) as mesh:
        t = trainer(mesh, overlapped, **options)
        assert isinstance(t.gradients.reducer, OverlappingReducer if overlapped else GradientReducer)
        if change:
            change(t.gradients.reducer)
        source = RandomTokens(vocab=64, seq=16, global_batch=16)
        results = [t.step(source.batch(k)) for k in range(1, steps + 1)]
        return [r.loss for r in results], [r.grad_norm for r in results], parameters_sha256(t.model)


# Buckets

@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", [1, 60_000, 1e9])
def test_buckets_are_the_whole_buffer_and_complete_when_they_say(monkeypatch, tied, size):
    monkeypatch.setattr(overlap, "SMALL", 0)
    model = GPT(tied=tied, **TINY)
    blocks = model.blocks[::-1]
    buckets = cut(model.buffers, blocks, size)
    assert joined([(b.start, b.stop) for b in buckets]) == [(0, model.buffers.size)]
    assert sum(b.stop - b.start for b in buckets) == model.buffers.size
    assert [b.blocks for b in buckets] == sorted(b.blocks for b in buckets)
    for bucket in buckets:
        for parameter, start in zip(model.buffers.parameters, model.buffers.bounds):
            users = [count for count, block in enumerate(blocks, 1) if parameter in block.parameters()]
            if bucket.start <= start < bucket.stop:
                assert max(users) <= bucket.blocks
    assert len(buckets) == {1: 6, 60_000: 3 + (not tied) - (not tied), 1e9: 1}[size]


def test_a_tied_embedding_alone_at_the_other_end_waits_for_its_neighbour(monkeypatch):
    """As on the last rank of a pipeline, whose buffer begins with the embedding and ends with the head's norm."""
    monkeypatch.setattr(overlap, "SMALL", 0)
    model = GPT(**TINY)
    blocks = [model.blocks[-1], model.blocks[4], model.blocks[3]]
    own = dict.fromkeys(p for block in [blocks[0], *blocks[:0:-1]] for p in block.parameters())
    ordered = sorted(own, key=model.parameters.index)
    buffers = type(model.buffers)(ordered, "float32")
    assert ordered[0].name == "embedding.weight" and ordered[-1].name.startswith("head.norm")
    first, second = cut(buffers, blocks, 50_000)
    assert (first.stop, first.blocks, second) == (buffers.size, 2, Bucket(0, first.start, 3))
    assert [b.blocks for b in cut(buffers, blocks, 5_000)] == [1, 2, 3]


def test_crumbs_join_a_neighbour():
    whole = [Bucket(100, 200, 1), Bucket(10, 100, 2), Bucket(0, 10, 3)]
    assert without_crumbs(whole, 10) == whole
    assert without_crumbs(whole, 11) == [Bucket(100, 200, 1), Bucket(0, 100, 3)]
    assert without_crumbs([Bucket(0, 5, 1)], 11) == [Bucket(0, 5, 1)]


def test_stages_are_complete_in_the_order_of_their_last_weight_gradients():
    assert last_backwards(build("1f1b", 2, 4, 1)[1]) == [1]
    assert last_backwards(build("interleaved", 2, 4, 2)[0]) == [2, 0]
    for name in ("zb-v", "gpipe"):
        actions = build(name, 2, 4, 2)[0]
        last = {stage: max(i for i, a in enumerate(actions) if a.stage == stage and a.kind in "BW") for stage in {a.stage for a in actions}}
        assert last_backwards(actions) == sorted(last, key=last.get)


# The helper

def test_the_helper_works_in_order_and_hands_failures_back():
    helper, seen = Helper("test-helper"), []
    for number in range(50):
        helper.do(seen.append, number)
    helper.wait()
    assert seen == list(range(50))
    helper.do(lambda: 1 / 0)
    helper.do(seen.append, "not any more")
    with pytest.raises(ZeroDivisionError):
        helper.wait()
    with pytest.raises(ZeroDivisionError):
        helper.do(seen.append, 1)
    assert seen == list(range(50))


def test_the_helper_ends_with_its_owner():
    helper = Helper("test-helper-that-ends")
    del helper
    gc.collect()
    end = time.monotonic() + 5
    while any(thread.name == "test-helper-that-ends" for thread in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.01)


# The same bits

@pytest.mark.mpi(np=[2, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_the_bits_of_a_run_without_overlap(comm, monkeypatch, tied):
    monkeypatch.setattr(overlap, "SMALL", 1000)
    for shape in [dict(dp=comm.size)] + ([dict(dp=2, pp=2), dict(dp=2, tp=2)] if comm.size == 4 else []):
        for m in (1, 4):
            plain = bits(comm, False, shape=shape, micro_batches=m, tied=tied)
            for size in SIZES:
                assert bits(comm, True, shape=shape, micro_batches=m, tied=tied, bucket_mb=size) == plain, (shape, m, size)


@pytest.mark.mpi(np=4)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule(comm, monkeypatch, schedule):
    monkeypatch.setattr(overlap, "SMALL", 1000)
    for tied in (True, False):
        if schedule == "zb-v" or tied or schedule == "interleaved":
            for m in (1, 4):
                options = dict(shape=dict(dp=2, pp=2), schedule=schedule, micro_batches=m, tied=tied, steps=2)
                assert bits(comm, True, bucket_mb=1e-5, **options) == bits(comm, False, **options), (tied, m)


@pytest.mark.mpi(np=4)
@pytest.mark.parametrize("back_end", ["mpi", "shm", "auto"])
@pytest.mark.parametrize("ranks_of_a_node", ["", "2", "3"])
def test_every_back_end(comm, monkeypatch, back_end, ranks_of_a_node):
    monkeypatch.setenv("MPIPAR_RANKS_PER_NODE", ranks_of_a_node)
    monkeypatch.setattr(overlap, "SMALL", 1000)
    plain = bits(comm, False, back_end=back_end)
    for size in SIZES[:2]:
        assert bits(comm, True, back_end=back_end, bucket_mb=size) == plain


@pytest.mark.mpi(np=4)
def test_dropout_recomputing_types_and_the_mlp(comm):
    for options in (dict(dropout=0.1), dict(recompute="full"), dict(dtype="bfloat16"), dict(dtype="float64")):
        assert bits(comm, True, bucket_mb=0.01, **options) == bits(comm, False, **options)
    sums = []
    for overlapped in (True, False):
        with Mesh(comm, dp=2, tp=2) as mesh:
            t = Trainer(MLP(layers=4, dim=64, mesh=mesh), micro_batches=2, overlap=overlapped)
            for k in (1, 2):
                t.step(RandomVectors(dim=64, global_batch=8, dtype="float32").batch(k))
            sums.append(parameters_sha256(t.model))
    assert sums[0] == sums[1]


@pytest.mark.mpi(np=4)
def test_equals_one_rank(comm):
    options = Options(steps=2, global_batch=16, micro_batches=4, clip=0.5)
    for shape, schedule in ((dict(dp=4), "1f1b"), (dict(dp=2, pp=2), "zb-v"), (dict(dp=2, tp=2), "gpipe")):
        with Mesh(comm, **shape) as mesh:
            outcome = run(dataclasses.replace(options, overlap=True), mesh, schedule)
            if mesh.is_root:
                found = compare(run(options, Mesh.serial(), "1f1b"), outcome)
                assert found["start"] == 0 and all(found[name] <= bound for name, bound in BOUNDS.items()), (shape, found)


@pytest.mark.mpi(np=2)
def test_a_forgotten_sum_is_noticed(comm):
    with Mesh(comm) as mesh:
        outcome = run(Options(steps=2, overlap=True), mesh, "1f1b", BREAKS["gradient-sync"])
        if mesh.is_root:
            assert compare(run(Options(steps=2), Mesh.serial(), "1f1b"), outcome)["weights"] > 1e-3


# Nothing too early, nothing twice

def at_once(reducer):
    """Each bucket is summed when it is started, while nothing else computes: what is wrong is then wrong every time."""
    reducer.start = lambda bucket: sum_gradients(reducer.group, reducer.gradients[bucket.start : bucket.stop], reducer.dtype)


def a_block_too_early(reducer):
    at_once(reducer)
    reducer.buckets = [Bucket(b.start, b.stop, max(b.blocks - 1, 1)) for b in reducer.buckets]


def after_the_first_micro_batch(reducer):
    at_once(reducer)
    reducer.before = lambda action, last: setattr(reducer, "last", action.kind in "BW" and reducer.complete == 0)


@pytest.mark.mpi(np=2)
@pytest.mark.parametrize("schedule, shape", [("1f1b", dict(dp=2)), ("gpipe", dict(dp=2)), ("zero-bubble", dict(dp=2))])
def test_control_a_bucket_that_is_started_too_early_is_noticed(comm, schedule, shape):
    options = dict(shape=shape, schedule=schedule, micro_batches=4, layers=4)
    plain = bits(comm, False, **options)
    assert bits(comm, True, bucket_mb=0.01, change=at_once, **options) == plain
    assert bits(comm, True, bucket_mb=0.01, change=a_block_too_early, **options) != plain
    assert bits(comm, True, bucket_mb=0.01, change=after_the_first_micro_batch, **options) != plain


@pytest.mark.mpi(np=4)
def test_one_sum_a_step_whatever_the_micro_batches(comm):
    for compress, share in ((None, 1), ("bfloat16", 0.5)):
        for m in (1, 4):
            with Mesh(comm) as mesh:
                t = trainer(mesh, True, micro_batches=m, bucket_mb=0.04, compress=compress)
                buckets = t.gradients.reducer.buckets
                with mesh.record() as log:
                    t.step(RandomTokens(vocab=64, seq=16, global_batch=16).batch(1))
                assert log.calls("group")["dp"] == len(buckets) == 4
                assert log.sent("group")["dp"] == 320_640 * share       # CASES: 2 (P-1)/P of the gradients


@pytest.mark.mpi(np=2)
def test_the_first_bucket_is_on_its_way_before_backward_has_ended(comm):
    with Mesh(comm) as mesh:
        t = trainer(mesh, True, micro_batches=2, bucket_mb=0.01)
        reducer, blocks, begun = t.gradients.reducer, t.model.blocks, []
        start, backward = reducer.start, blocks[0].backward
        reducer.start = lambda bucket: (begun.append(("bucket", bucket.blocks)), start(bucket))
        blocks[0].backward = lambda *arguments: (begun.append("first block"), backward(*arguments))[1]
        t.step(RandomTokens(vocab=64, seq=16, global_batch=16).batch(1))
        last = len(begun) - 1 - begun[::-1].index("first block")
        assert begun.count("first block") == 2 and begun[0] == "first block"
        assert [entry[1] for entry in begun[1:last]] == [2, 3, 4] and [entry[1] for entry in begun[last + 1 :]] == [6]


# Compression

@pytest.mark.mpi(np=4)
def test_compressed_gradients(comm):
    """Near the exact ones, the same bits on every replica, and with overlap those without it."""
    for shape in (dict(dp=4), dict(dp=2, pp=2), dict(dp=2, tp=2)):
        exact = bits(comm, False, shape=shape, micro_batches=2)
        halves = bits(comm, False, shape=shape, micro_batches=2, compress="bfloat16")
        assert bits(comm, True, shape=shape, micro_batches=2, compress="bfloat16", bucket_mb=0.01) == halves
        assert (comm.rank or halves[2] != exact[2]) and halves[0] == pytest.approx(exact[0], rel=2e-4) and halves[0][0] == exact[0][0]
        with Mesh(comm, **shape) as mesh:
            t = trainer(mesh, True, compress="bfloat16")
            t.step(RandomTokens(vocab=64, seq=16, global_batch=16).batch(1))
            data = t.model.buffers.data
            assert data.dtype == np.float32 and (mesh.dp.all_gather(data[None]).view("u4") == data.view("u4")).all()


@pytest.mark.mpi(np=2)
def test_the_loss_with_compression_stays_near_the_loss_without(comm):
    import mpipar as mp

    curves = []
    for compress in (None, "bfloat16"):
        with Mesh(comm) as mesh:
            model = GPT(layers=2, dim=64, heads=4, vocab=256, seq=32, mesh=mesh)
            t = Trainer(model, AdamW(lr=3e-3), clip=1.0, compress=compress, learning_rate=lambda step: 3e-3 * min(1, step / 20))
            source = mp.data.text("builtin", seq=32, global_batch=8)
            curves.append(np.array([t.step(source.batch(k)).loss for k in range(1, 61)]))
    assert curves[0][-1] < 0.6 * curves[0][0]
    assert curves[1][-20:].mean() == pytest.approx(curves[0][-20:].mean(), rel=0.005) and (curves[0] != curves[1]).any()


# Choices

@pytest.mark.mpi(np=2)
def test_the_default_is_where_it_can_hide_something(comm, monkeypatch):
    def chosen():
        with Mesh(comm) as mesh:
            t = trainer(mesh, None)
            return isinstance(t.gradients.reducer, OverlappingReducer), t.room.core, t.room.wire, room(mesh) == t.room

    monkeypatch.setattr(overlap, "available_cores", lambda: 4)
    monkeypatch.setattr(overlap.launcher, "cores", lambda *_: 4)
    monkeypatch.setattr(overlap, "settings", type("Settings", (), {"threads": 2}))
    assert chosen() == (False, False, False, True)              # 2 ranks of 2 threads on 4 cores
    overlap.settings.threads = 1
    assert chosen() == (True, True, False, True)
    if comm.rank == 1:                                          # one rank that is bound to one core
        monkeypatch.setattr(overlap, "available_cores", lambda: 1)
    assert chosen() == (False, False, False, True)
    monkeypatch.setenv("MPIPAR_RANKS_PER_NODE", "1")
    assert chosen() == (True, False, True, True)


@pytest.mark.parametrize("options, words", [
    (dict(overlap=True, zero=1), "with zero=1 there are none"), (dict(overlap=True, deterministic=True), "deterministic sums"),
    (dict(overlap=False, bucket_mb=1.0), "overlap off"), (dict(bucket_mb=0.0), "above 0"), (dict(bucket_mb=float("nan")), "above 0"),
    (dict(compress="float16"), "one of bfloat16"), (dict(bucket_mb=1.0, zero=2), "zero=2"),
    (dict(compress="bfloat16", dtype="float64"), "not float64"), (dict(compress="bfloat16", dtype="bfloat16"), "16 bits already"),
    (dict(compress="bfloat16", deterministic=True), "deterministic sums"),
])
def test_what_does_not_fit_is_refused(options, words):
    model = GPT(layers=1, dim=8, heads=1, vocab=8, seq=4, dtype=options.pop("dtype", "float32"))
    with pytest.raises(ValueError, match=words):
        Trainer(model, **options)


@pytest.mark.mpi(np=2)
def test_shared_memory_has_no_messages_to_compress(comm):
    with Mesh(comm, back_end="shm") as mesh:
        with pytest.raises(ValueError, match="take auto or mpi"):
            Trainer(GPT(mesh=mesh, **TINY), compress="bfloat16")


@pytest.mark.mpi(np=2)
def test_a_failure_of_the_helper_is_raised_by_the_step(comm, monkeypatch):
    def fail(*_):
        raise RuntimeError("no sum today")

    monkeypatch.setattr(overlap, "sum_gradients", fail)
    with Mesh(comm) as mesh:
        with pytest.raises(RuntimeError, match="no sum today"):
            trainer(mesh, True).step(RandomTokens(vocab=64, seq=16, global_batch=16).batch(1))
