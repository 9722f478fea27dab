"""What was measured, beside what was predicted: sleeping stages, the trace, the lines and the picture."""

import json
import time

import numpy as np
import pytest

from mpipar.comm import Mesh
from mpipar.parallel.pipeline.check import check
from mpipar.parallel.pipeline.mailbox import GroupMailbox
from mpipar.parallel.pipeline.measure import Measurement, gather, measurement
from mpipar.parallel.pipeline.messages import with_messages
from mpipar.parallel.pipeline.run import run
from mpipar.parallel.pipeline.schedule import build, parse_plan
from mpipar.parallel.pipeline.simulate import simulate
from mpipar.parallel.pipeline.sleeping import SleepingStage, stage_costs
from mpipar.parallel.pipeline.threaded import run_threads
from mpipar.parallel.pipeline.trace import chrome_trace, write_trace
from tests.pipeline.plans import PLANS

DELAY, TRIES = 0.02, 6


def sleeping(plan, delay=DELAY, backward=1.0):
    """The costs of a plan's sleeping stages, and the stages."""
    stages = 1 + max(action.stage for actions in plan for action in actions)
    costs = stage_costs(delay, stages // len(plan), backward)
    return costs, {stage: SleepingStage(stage, costs, last=stage == stages - 1) for stage in range(stages)}


def on_threads(name, chunks, ranks, micros, delay=DELAY, backward=1.0):
    """(plan, its costs, the Measurement of a run whose stages are threads)."""
    plan = build(name, ranks, micros, chunks)
    costs, stages = sleeping(plan, delay, backward)
    return plan, costs, measurement(run_threads(plan, stages, range(micros)))


def best_of(runs, expected):
    """The bubble nearest to what is expected: a busy machine makes single runs longer, never shorter."""
    nearest = 1.0
    for _ in range(TRIES):
        nearest = min(nearest, runs().bubble, key=lambda bubble: abs(bubble - expected))
        if abs(nearest - expected) <= 0.03:
            break
    return nearest


@pytest.mark.parametrize("name, chunks", PLANS)
@pytest.mark.parametrize("micros", [2, 8])
def test_the_measured_bubble_is_the_predicted_one(name, chunks, micros):
    plan = build(name, 4, micros, chunks)
    expected = simulate(plan, sleeping(plan)[0]).bubble
    found = best_of(lambda: on_threads(name, chunks, 4, micros)[2], expected)
    assert found == pytest.approx(expected, abs=0.03)


@pytest.mark.mpi(np=4)
def test_the_measured_bubble_of_ranks(comm):
    with Mesh(comm, pp=4) as mesh:
        for name, chunks in (("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1)):
            plan = build(name, 4, 8, chunks)
            costs, stages = sleeping(plan, DELAY * chunks)
            program = with_messages(plan)[mesh.pp.rank]
            own = {stage: stages[stage] for stage in program.own_stages}
            mailbox = GroupMailbox(mesh.pp, program.stages, patient=True)
            found = []
            for _ in range(TRIES):
                mesh.world.barrier()
                found.append(gather(run(program, own, range(8), mailbox), mesh.pp))
            if mesh.is_root:
                expected = simulate(plan, costs).bubble
                assert min(abs(m.bubble - expected) for m in found) <= 0.03, [m.bubble for m in found]
                assert found[0].peak_live == check(plan).live
                assert [[action for action, _, _ in timeline] for timeline in found[0].timelines] == plan
            else:
                assert found == [None] * TRIES


def test_zb_h1_idles_for_a_third_of_1f1b_on_threads():
    """P=4, M=8, F = I = W. Relative to ideal compute, as published: 1/3. Of the wall time it would be 11/27, over 0.40."""
    ratios = []
    for _ in range(TRIES):
        found, plain = (on_threads(name, 1, 4, 8, backward=2.0)[2] for name in ("zero-bubble", "1f1b"))
        ratios.append(found.bubble_of_ideal / plain.bubble_of_ideal)
        assert max(found.peak_live) == max(plain.peak_live) == 4
        if ratios[-1] <= 0.40:
            break
    assert ratios[-1] <= 0.40, ratios


@pytest.mark.mpi(np=4)
def test_zb_h1_idles_for_a_third_of_1f1b_on_ranks(comm):
    ratios, longer = [], 2 * DELAY
    with Mesh(comm, pp=4) as mesh:
        for _ in range(TRIES):
            bubbles = {}
            for name in ("zero-bubble", "1f1b"):
                plan = build(name, 4, 8)
                _, stages = sleeping(plan, longer, 2.0)
                own = {stage: stages[stage] for stage in with_messages(plan)[mesh.pp.rank].own_stages}
                mesh.world.barrier()
                found = gather(run(with_messages(plan)[mesh.pp.rank], own, range(8), GroupMailbox(mesh.pp, 4, patient=True)), mesh.pp)
                bubbles[name] = found.bubble_of_ideal if found else 0.0
            if mesh.is_root:
                ratios.append(bubbles["zero-bubble"] / bubbles["1f1b"])
            if mesh.world.broadcast(np.array([bool(ratios) and ratios[-1] <= 0.40]))[0]:
                break
    assert not mesh.is_root or ratios[-1] <= 0.40, ratios


def test_utilisation_is_near_the_simulated_one():
    """M=8 on two stages: at least 0.9 of what the simulator makes of the measured costs, and of equal stages."""
    for _ in range(TRIES):
        plan, _, found = on_threads("1f1b", 1, 2, 8)
        used = found.utilisations(plan)
        if used["measured"] >= 0.9 * used["equal_stages"]:
            break
    assert used["measured"] == found.utilisation and used["equal_stages"] == pytest.approx(8 / 9)
    assert used["measured"] >= 0.9 * used["simulated"] and used["simulated"] <= used["equal_stages"] + 0.02


def test_a_slow_stage_is_noticed():
    """Negative control: the costs that are measured are not those of equal stages."""
    plan = build("1f1b", 3, 6)
    _, stages = sleeping(plan, 0.005)
    stages[1] = SleepingStage(1, stage_costs(0.02))
    found = measurement(run_threads(plan, stages, range(6)))
    costs = found.costs()
    assert costs.forward[1] > 2 * costs.forward[0] and costs.backward[1] > 2 * costs.backward[2]
    assert abs(found.bubble - simulate(plan).bubble) > 0.1
    assert found.bubble == pytest.approx(found.predict(plan).bubble, abs=0.1)


def test_zero_bubble_halves_sleep_separately():
    found = on_threads("zero-bubble", 1, 2, 3, 0.01, backward=2.0)[2]
    costs = found.costs()
    for times in (costs.forward, costs.input_grad, costs.weight_grad):
        assert all(0.01 <= time < 0.03 for time in times)


def test_the_time_of_messages_is_measured():
    """One message a tenth of a second late: known by the end of the action that made it."""
    plan = parse_plan("0F0 0B0\n1F0 1B0")
    _, stages = sleeping(plan, 0.05)
    results = run_threads(plan, stages, range(1), after=lambda action, last: time.sleep(0.1 * (str(action) == "0F0")))
    delays = sorted(measurement(results).message_delays())
    assert len(delays) == 2 and delays[0] < 0.1 <= delays[1]


@pytest.mark.parametrize("name, chunks", PLANS)
def test_the_trace_is_complete(name, chunks, tmp_path):
    micros = 4
    _, _, found = on_threads(name, chunks, 3, micros, 0.002)
    path = tmp_path / "trace.json"
    write_trace(path, found)
    events = json.loads(path.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    compute = [event for event in spans if event["cat"] == "compute"]
    split = any(event["args"]["kind"].endswith("weight gradient") for event in compute)
    for stage in range(3 * chunks):
        assert sum(event["args"]["stage"] == stage for event in compute) == (3 if split else 2) * micros
    for rank in range(3):
        mine = sorted((e for e in spans if e["tid"] == rank and e["cat"] in ("compute", "idle")), key=lambda e: e["ts"])
        assert sum(event["dur"] for event in mine) == pytest.approx(1e6 * found.makespan, rel=1e-6)
        for first, then in zip(mine, mine[1:]):
            assert first["ts"] + first["dur"] == pytest.approx(then["ts"], abs=0.01)
        inside = [e for e in spans if e["tid"] == rank and e["cat"] in ("receive", "send")]
        assert inside
        for event in inside:    # lies within one idle event
            start, end = event["ts"] + 0.01, event["ts"] + event["dur"] - 0.01
            assert any(idle["ts"] <= start and end <= idle["ts"] + idle["dur"] for idle in mine if idle["cat"] == "idle")
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {"rank 0", "rank 1", "rank 2"}


def test_clocks_are_put_together():
    results = run_threads(build("1f1b", 2, 2), sleeping(build("1f1b", 2, 2), 0.002)[1], range(2))
    plain = measurement(results)
    for result in results[1:]:      # rank 1's clock is 5 s behind
        result.timeline = [(action, start - 5, end - 5) for action, start, end in result.timeline]
        result.communication = [(what, action, start - 5, end - 5) for what, action, start, end in result.communication]
    assert measurement(results, [0.0, 5.0]).makespan == pytest.approx(plain.makespan)
    assert measurement(results).makespan > 4
    assert plain.timelines[0][0][1] == 0


def test_lines_for_people():
    plan, _, found = on_threads("1f1b", 1, 2, 3, 0.002)
    lines = found.lines(plan, width=80)
    assert lines[0].startswith("bubble ") and "25.0% for equal stages" in lines[0]
    assert lines[1].startswith("  rank 0: busy ") and "2 live (predicted 2)" in lines[1]
    assert lines[3] == "predicted" and lines[6] == "measured" and len(lines) == 9


def test_a_measurement_of_nothing():
    empty = measurement(run_threads(parse_plan("0F0 0B0"), sleeping(parse_plan("0F0 0B0"), 0.001)[1], range(1)))
    assert isinstance(empty, Measurement) and empty.bubble < 0.5 and empty.message_delays() == []
    assert chrome_trace(empty)["traceEvents"]


def test_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    from mpipar.parallel.pipeline.picture import draw

    plan, _, found = on_threads("zb-v", 2, 2, 4, 0.002)
    draw(tmp_path / "run.png", found.predict(plan), found, title="zb-v")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
