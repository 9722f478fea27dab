"""The executor on threads: every schedule computes what the serial loop does and keeps what was predicted."""

import gc
import time
import weakref

import numpy as np
import pytest

from mpipar.parallel.pipeline.check import check
from mpipar.parallel.pipeline.messages import with_messages
from mpipar.parallel.pipeline.run import run, run_forward
from mpipar.parallel.pipeline.schedule import SCHEDULES, build, forward_only, parse_plan, placement
from mpipar.parallel.pipeline.threaded import run_threads
from tests.pipeline.model import Chunk, micro_batches, serial
from tests.pipeline.plans import chunk_counts

WIDTH = 6
PLANS = [(name, chunks) for name in SCHEDULES for chunks in chunk_counts(name)[:2]]


def compare(plan, stages, micros, dtype=np.float64, **options):
    """Run a plan on threads, hold it against the serial loop, and return the results."""
    losses, expected = serial(stages, WIDTH, micros, dtype)
    chunks = {stage: Chunk(stage, stages, WIDTH, dtype, **options) for stage in range(stages)}
    results = run_threads(plan, chunks, micros, timeout=20)
    home = next(rank for rank, own in enumerate(placement(plan)) if stages - 1 in own)
    assert results[home].losses == losses
    assert results[home].loss == sum(losses)
    assert all(result.outputs == [] for rank, result in enumerate(results) if rank != home)
    for stage, chunk in chunks.items():
        # Only the order of the sum over micro-batches may differ.
        np.testing.assert_allclose(chunk.dw, expected[stage].dw, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(chunk.db, expected[stage].db, rtol=1e-12, atol=1e-13)
    report = check(plan)
    assert tuple(result.peak_live for result in results) == report.live
    assert sum(result.messages for result in results) == report.messages
    for result, actions in zip(results, plan):
        assert [action for action, _, _ in result.timeline] == actions
        assert all(first[2] <= then[1] for first, then in zip(result.timeline, result.timeline[1:]))
        assert 0 < result.busy_seconds <= result.wall_seconds and 0 <= result.bubble < 1
    return results


@pytest.mark.parametrize("name, chunks", PLANS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("in_place", [False, True])
def test_gradients_equal_the_serial_ones(name, chunks, ranks, in_place):
    for count in (1, 2, 3, 5, 8):
        plan = build(name, ranks, count, chunks)
        compare(plan, ranks * chunks, micro_batches(count, WIDTH), in_place=in_place)


@pytest.mark.parametrize("name, chunks", PLANS)
def test_micro_batches_of_different_and_zero_size(name, chunks):
    compare(build(name, 3, 5, chunks), 3 * chunks, micro_batches(5, WIDTH, sizes=[4, 0, 1, 7, 2]))


def test_a_v_shaped_placement_hands_over_without_messages():
    plan = parse_plan("0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1\n1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1")
    for in_place in (False, True):
        results = compare(plan, 4, micro_batches(2, WIDTH), in_place=in_place)
        assert [result.messages for result in results] == [4, 4]


def test_a_view_that_stays_on_the_rank_is_not_overwritten():
    """Stage 2 writes dx over the array it received, which waits for stage 1 while more gradients arrive."""
    micros = range(6)
    rank_0 = [f"0F{i}" for i in micros] + [f"3F{i} 3B{i}" for i in micros] + [f"0B{i}" for i in micros]
    rank_1 = [f"1F{i} 2F{i}" for i in micros] + [f"2B{i}" for i in micros] + [f"1B{i}" for i in micros]
    compare(parse_plan(" ".join(rank_0) + "\n" + " ".join(rank_1)), 4, micro_batches(6, WIDTH), in_place=True)


def test_messages_out_of_order_find_their_receiver():
    compare(parse_plan("0F0 0F1 0F2 0B2 0B0 0B1\n1F2 1F0 1F1 1B1 1B0 1B2"), 2, micro_batches(3, WIDTH))


def test_a_gradient_that_is_split_unevenly():
    """Some stages split their backward, others do not."""
    plan = parse_plan("0F0 0F1 0B0 0B1\n1F0 1F1 1I0 1I1 1W1 1W0\n2F0 2B0 2F1 2I1 2W1")
    compare(plan, 3, micro_batches(2, WIDTH))


def test_float32_stays_float32():
    micros = micro_batches(3, WIDTH, np.float32)
    losses, _ = serial(2, WIDTH, micros, np.float32)
    seen = []

    class Watching(Chunk):
        def forward(self, x, micro):
            seen.append(None if x is None else x.dtype)
            return super().forward(x, micro)

    chunks = {stage: Watching(stage, 2, WIDTH, np.float32) for stage in range(2)}
    assert run_threads(build("1f1b", 2, 3), chunks, micros)[1].losses == losses
    assert set(seen) == {None, np.dtype(np.float32)}


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b", "zero-bubble", "zb-h2"])
def test_random_delays_change_nothing(name):
    delays = np.random.default_rng(3).uniform(0, 0.004, 1000)
    calls = iter(delays)
    micros = micro_batches(4, WIDTH)
    losses, expected = serial(3, WIDTH, micros)
    chunks = {stage: Chunk(stage, 3, WIDTH) for stage in range(3)}
    results = run_threads(build(name, 3, 4), chunks, micros,
                          before=lambda action, last: time.sleep(next(calls)))
    assert results[2].losses == losses
    np.testing.assert_allclose(chunks[0].dw, expected[0].dw, rtol=1e-12)


def test_hooks_say_which_action_is_the_last_of_its_kind():
    plan = build("zero-bubble", 2, 3)
    programs = with_messages(plan)
    calls = {0: [], 1: []}
    chunks = {stage: Chunk(stage, 2, WIDTH) for stage in range(2)}
    run_threads(plan, chunks, micro_batches(3, WIDTH),
                before=lambda action, last: calls[action.stage].append(("before", action, last)),
                after=lambda action, last: calls[action.stage].append(("after", action, last)))
    for stage, actions in enumerate(plan):
        expected = []
        for action in actions:
            last = action.micro_batch == 2
            expected += [("before", action, last), ("after", action, last)]
        assert calls[stage] == expected
    assert programs[0].actions == plan[0]


def test_the_last_gradient_of_a_stage_that_splits_some_backwards():
    plan, last = parse_plan("0F0 0F1 0I0 0B1 0W0"), []
    run_threads(plan, {0: Chunk(0, 1, WIDTH)}, micro_batches(2, WIDTH),
                after=lambda action, final: last.append(str(action)) if final else None)
    assert last == ["0F1", "0I0", "0W0"]


@pytest.mark.parametrize("name, chunks", PLANS)
def test_live_activations_are_those_predicted(name, chunks):
    """P=4, M=8: counted by weak references to what forward saved, not by what the executor says."""
    plan = build(name, 4, 8, chunks)
    home = {stage: rank for rank, own in enumerate(placement(plan)) for stage in own}
    alive, peak = [[] for _ in plan], [0] * 4

    class Counting(Chunk):
        def forward(self, x, micro):
            y, (x, z) = super().forward(x, micro)
            x = x.copy()        # the weight gradient needs it too, so it lives until W
            mine = alive[home[self.stage]]
            mine.append(weakref.ref(x))
            mine[:] = [kept for kept in mine if kept() is not None]
            peak[home[self.stage]] = max(peak[home[self.stage]], len(mine))
            return y, (x, z)

    own = {stage: Counting(stage, 4 * chunks, WIDTH) for stage in range(4 * chunks)}
    for stage, chunk in own.items():
        chunk.stage = stage
    gc.disable()        # reference counts alone have to free them
    try:
        results = run_threads(plan, own, micro_batches(8, WIDTH))
        assert all(kept() is None for mine in alive for kept in mine)
    finally:
        gc.enable()
    assert tuple(peak) == check(plan).live == tuple(result.peak_live for result in results)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("chunks", [1, 2])
def test_forward_only(ranks, chunks):
    stages, micros = ranks * chunks, micro_batches(4, WIDTH, sizes=[3, 0, 1, 2])
    losses, _ = serial(stages, WIDTH, micros)
    own = {stage: Chunk(stage, stages, WIDTH) for stage in range(stages)}
    results = run_threads(forward_only(ranks, 4, chunks), own, micros)
    assert results[-1].losses == losses
    assert [result.peak_live for result in results] == [0] * ranks


def test_forward_only_returns_the_outputs_of_the_last_stage():
    class Output(Chunk):
        def forward(self, x, micro):
            x = micro[0] if self.first else x
            return np.tanh(x @ self.w + self.b), None

    micros = micro_batches(3, WIDTH)
    chunks = {stage: Output(stage, 2, WIDTH) for stage in range(2)}
    outputs = run_threads(forward_only(2, 3), chunks, micros)[1].outputs
    for (x, _), y in zip(micros, outputs):
        np.testing.assert_array_equal(y, chunks[1].forward(chunks[0].forward(None, (x, x))[0], (x, x))[0])


def test_forward_only_does_not_overwrite_a_view():
    """A stage that returns its input must not have it overwritten before it is sent on, or returned."""
    class Same(Chunk):
        def forward(self, x, micro):
            return (micro[0] if self.first else x), None

    micros = micro_batches(6, WIDTH)
    outputs = run_threads(forward_only(3, 6), {s: Same(s, 3, WIDTH) for s in range(3)}, micros)[2].outputs
    for (x, _), y in zip(micros, outputs):
        np.testing.assert_array_equal(x, y)


def test_one_stage_needs_no_mailbox():
    micros = micro_batches(4, WIDTH)
    losses, expected = serial(1, WIDTH, micros)
    chunk = Chunk(0, 1, WIDTH)
    result = run(with_messages(build("1f1b", 1, 4))[0], {0: chunk}, micros)
    assert result.losses == losses and result.peak_live == 1
    np.testing.assert_array_equal(chunk.dw, expected[0].dw)
    assert run_forward(with_messages(forward_only(1, 4))[0], {0: chunk}, micros).losses == losses


def test_what_does_not_belong_to_the_program_is_refused():
    program = with_messages(build("gpipe", 2, 3))[0]
    chunk = Chunk(0, 2, WIDTH)
    with pytest.raises(ValueError, match="2 micro-batches given; valid for this plan: 3"):
        run(program, {0: chunk}, micro_batches(2, WIDTH))
    with pytest.raises(ValueError, match=r"stages \[1\]; valid for rank 0: \[0\]"):
        run(program, {1: chunk}, micro_batches(3, WIDTH))
    with pytest.raises(ValueError, match="0B2 in a forward-only run"):
        run_forward(program, {0: chunk}, micro_batches(3, WIDTH))


def test_a_failing_stage_ends_all_threads():
    class Failing(Chunk):
        def backward(self, saved, dy, micro, later=None):
            raise ArithmeticError("boom")

    chunks = {0: Chunk(0, 3, WIDTH), 1: Chunk(1, 3, WIDTH), 2: Failing(2, 3, WIDTH)}
    start = time.perf_counter()
    with pytest.raises(ArithmeticError, match="boom"):
        run_threads(build("1f1b", 3, 4), chunks, micro_batches(4, WIDTH))
    assert time.perf_counter() - start < 10


def test_a_plan_that_hangs_ends_with_the_name_of_the_message():
    """Negative control of the check: what it calls a deadlock is one."""
    plan = parse_plan("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")
    with pytest.raises(TimeoutError, match="message (1B0|0F1) from rank"):
        run_threads(plan, {stage: Chunk(stage, 2, WIDTH) for stage in range(2)}, micro_batches(2, WIDTH),
                    timeout=0.5)


def test_a_message_of_another_shape_is_noticed():
    class Wrong(Chunk):
        def input_shape(self, micro):
            return (1, WIDTH)

    chunks = {0: Chunk(0, 2, WIDTH), 1: Wrong(1, 2, WIDTH)}
    with pytest.raises(ValueError, match=r"0F0 from rank 0 is float64\[3, 6\], rank 1 expects float64\[1,"):
        run_threads(build("1f1b", 2, 1), chunks, micro_batches(1, WIDTH))
