"""Predicted timelines: the values of the lecture come out exactly."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipar.parallel.pipeline.schedule import SCHEDULES, build, forward_only, parse_plan
from mpipar.parallel.pipeline.simulate import Costs, bubble_formula, gantt, measured_costs, simulate
from tests.pipeline.plans import chunk_counts


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("ranks, micros, makespan", [
    (4, 8, 22), (8, 32, 78), (4, 4, 14), (4, 2, 10), (1, 5, 10), (8, 1, 16)])
def test_makespan(name, ranks, micros, makespan):
    found = simulate(build(name, ranks, micros))
    assert found.makespan == makespan == 2 * (micros + ranks - 1)
    assert found.busy == (2 * micros,) * ranks
    assert found.bubble == (ranks - 1) / (micros + ranks - 1) == bubble_formula(ranks, micros)
    assert found.bubble_of_ideal == (ranks - 1) / micros == bubble_formula(ranks, micros, of="ideal")
    assert found.utilisation == micros / (micros + ranks - 1)


def test_naive_uses_one_rank_at_a_time():
    found = simulate(build("naive", 4, 8))
    assert found.makespan == 2 * 4 * 8
    assert found.utilisation == 1 / 4


@pytest.mark.parametrize("micros, ranks, ideal, wall", [        # the lecture's program, section 3.3
    (8, 4, 37.5, 27.3), (16, 8, 43.8, 30.4), (64, 16, 23.4, 19.0)])
def test_the_lines_of_the_lecture(micros, ranks, ideal, wall):
    found = simulate(build("gpipe", ranks, micros), Costs(forward=2, backward=2))
    assert found.makespan == {8: 44, 16: 92, 64: 316}[micros]
    assert found.busy[0] == {8: 32, 16: 64, 64: 256}[micros]
    assert round(100 * found.bubble_of_ideal + 1e-9, 1) == ideal
    assert round(100 * found.bubble, 1) == wall


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_question_1_of_the_lecture(name):
    found = simulate(build(name, 4, 8))
    assert (found.bubble_of_ideal, found.bubble, found.utilisation) == (3 / 8, 3 / 11, 8 / 11)
    for ranks, fewest in ((4, 28), (8, 64)):
        assert simulate(build(name, ranks, fewest)).bubble < 0.1
        assert simulate(build(name, ranks, fewest - 1)).bubble >= 0.1


def test_examples_of_section_2_4():
    assert simulate(build("gpipe", 4, 4)).utilisation == 4 / 7
    assert simulate(build("gpipe", 4, 16)).bubble == 3 / 19
    # a row of the drawing: all forwards, a gap, the backwards in reverse
    row = gantt(simulate(build("gpipe", 4, 4)).timelines).splitlines()[0]
    assert row == "rank 0 |F0|F1|F2|F3|  |  |  |  |  |  |B3|B2|B1|B0|"


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 8), st.integers(1, 5), st.integers(2, 4))
def test_interleaved(ranks, groups, chunks):
    """Chunks of 1/v: the bubble is (P-1)/(vM+P-1) where M is a multiple of P."""
    micros = ranks * groups
    found = simulate(build("interleaved", ranks, micros, chunks), Costs(forward=Fraction(1, chunks)))
    assert found.bubble == Fraction(ranks - 1, chunks * micros + ranks - 1)
    assert found.bubble_of_ideal == Fraction(ranks - 1, chunks * micros)
    assert float(found.bubble) == bubble_formula(ranks, micros, chunks)


def test_interleaved_of_the_lecture():
    assert simulate(build("interleaved", 4, 8, 2), Costs(forward=Fraction(1, 2))).bubble == Fraction(3, 19)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 8), st.integers(0, 24))
def test_zero_bubble(ranks, more):
    """With F = I = W the bubble is a third of 1F1B's, with its largest memory."""
    micros, costs = ranks + more, Costs(forward=1, input_grad=1, weight_grad=1)
    found, plain = (simulate(build(name, ranks, micros), costs) for name in ("zero-bubble", "1f1b"))
    assert found.idle * 3 == plain.idle
    assert found.makespan == 3 * micros + ranks - 1
    assert max(found.peak_live) == max(plain.peak_live) == ranks


def test_zb_h1_by_both_definitions():
    """P=4, M=8, F = I = W: a third of 1F1B's bubble relative to ideal compute; as a share of the wall time it is more."""
    found, plain = (simulate(build(name, 4, 8), Costs(Fraction(1), None, Fraction(1), Fraction(1))) for name in ("zero-bubble", "1f1b"))
    assert (found.bubble_of_ideal, plain.bubble_of_ideal) == (Fraction(1, 8), Fraction(3, 8))
    assert (found.bubble, plain.bubble) == (Fraction(1, 9), Fraction(3, 11))
    assert found.bubble / plain.bubble == Fraction(11, 27) and round(11 / 27, 3) == 0.407


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 8), st.integers(0, 24))
def test_zb_h2_has_no_gap(ranks, more):
    """From the first action of a rank to its last it never waits; with one micro-batch less than needed it does."""
    costs, fewest = Costs(forward=1, input_grad=1, weight_grad=1), 2 * ranks - 1
    found = simulate(build("zb-h2", ranks, fewest + more), costs)
    assert found.longest_rank == 3 * (fewest + more)
    assert found.makespan == found.longest_rank + ranks - 1
    assert simulate(build("zero-bubble", ranks, fewest + more), costs).makespan == found.makespan
    if ranks > 2:
        assert simulate(build("zb-h2", ranks, fewest - 1), costs).longest_rank > 3 * (fewest - 1)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 8), st.integers(0, 24))
def test_zb_v_has_half_the_bubble_of_zb_h1(ranks, more):
    """With chunks of half a stage, and in 1F1B's memory: 2P chunks."""
    micros, half = 2 * ranks + more, Fraction(1, 2)
    found = simulate(build("zb-v", ranks, micros, 2), Costs(forward=half, input_grad=half, weight_grad=half))
    assert found.longest_rank == 3 * micros
    assert found.makespan == 3 * micros + half * (ranks - 1)
    assert found.peak_live == (2 * ranks,) * ranks


def test_eager_1f1b_hides_slow_messages():
    """Messages as long as a forward: 1F1B waits for them in every turn, eager 1F1B only while it fills and drains."""
    costs = Costs(forward=1, backward=1, alpha=1)
    eager, plain = (simulate(build(name, 4, 16), costs).makespan for name in ("eager-1f1b", "1f1b"))
    assert eager == 2 * (16 + 3) + 2 * 3 and plain > eager + 10


@pytest.mark.parametrize("micros", range(1, 9))
def test_zero_bubble_is_never_slower(micros):
    costs = Costs(forward=1, input_grad=1, weight_grad=1)
    found, plain = (simulate(build(name, 8, micros), costs) for name in ("zero-bubble", "1f1b"))
    assert found.makespan < plain.makespan


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 6), st.integers(1, 12), st.randoms())
def test_a_timeline_keeps_what_it_promises(name, ranks, micros, dice):
    chunks = chunk_counts(name)[0]
    stages = ranks * chunks
    forward, backward = ([dice.randint(1, 9) for _ in range(stages)] for _ in "FB")
    costs = Costs(forward=forward, backward=backward, weight_grad=[time // 2 for time in backward],
                  alpha=dice.randint(0, 3), beta=1, message_bytes=[dice.randint(0, 2) for _ in range(stages)])
    plan = build(name, ranks, micros, chunks)
    found, home = simulate(plan, costs), {action.stage: rank for rank, own in enumerate(plan) for action in own}
    ends = {action: end for timeline in found.timelines for action, _, end in timeline}
    starts = {action: start for timeline in found.timelines for action, start, _ in timeline}
    for timeline in found.timelines:
        assert all(first[2] <= then[1] for first, then in zip(timeline, timeline[1:]))
    for action in starts:
        assert ends[action] - starts[action] == costs.of(action)
        if action.kind == "F" and action.stage > 0:
            message = costs.message(action.stage - 1) if home[action.stage] != home[action.stage - 1] else 0
            assert starts[action] >= ends[action._replace(stage=action.stage - 1)] + message
    assert found.busy == tuple(micros * sum(forward[s] + backward[s] for s in range(stages) if home[s] == rank)
                               for rank in range(ranks))
    assert found.makespan == max(ends.values())
    # The critical path is the whole run: its actions and the messages between them, without a gap.
    path = found.critical_path
    waits = sum(costs.message(min(a.stage, b.stage)) for a, b in zip(path, path[1:])
                if home[a.stage] != home[b.stage])
    assert starts[path[0]] == 0
    assert sum(map(costs.of, path)) + waits == found.makespan


def test_messages_take_alpha_and_beta():
    costs = Costs(forward=1, backward=2, alpha=0.25, beta=0.5, message_bytes=[1, 2])
    found = simulate(build("naive", 3, 1), costs)
    assert found.makespan == 3 * 3 + 2 * (0.25 + 0.5) + 2 * (0.25 + 1.0)
    assert simulate(forward_only(3, 1), costs).makespan == 3 + 0.75 + 1.25


def test_costs_of_the_halves():
    plan = parse_plan("0F0 0I0 0W0")
    assert simulate(plan).makespan == 2
    assert simulate(plan, Costs(1, 3, input_grad=1)).timelines[0][2][1:] == (2, 4)
    assert simulate(plan, Costs(1, 3, weight_grad=1)).timelines[0][2][1:] == (3, 4)
    with pytest.raises(ValueError, match="valid: both"):
        simulate(plan, Costs(1, input_grad=1))
    with pytest.raises(ValueError, match="valid: wall, ideal"):
        bubble_formula(4, 8, of="time")


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_measured_costs_of_a_prediction_predict_it_again(name):
    plan = build(name, 3, 4, chunk_counts(name)[0])
    costs = Costs(forward=[1, 2, 3, 1, 2, 3], input_grad=[2, 2, 1, 2, 2, 1], weight_grad=[1, 0, 1, 1, 0, 1])
    found = simulate(plan, costs)
    again = simulate(plan, measured_costs(found.timelines))
    assert (again.makespan, again.busy) == (found.makespan, found.busy)
    assert again.critical_path == found.critical_path
    assert measured_costs([[]]).forward == 0


def test_the_slowest_stage_sets_the_pace():
    found = simulate(build("1f1b", 4, 16), Costs(forward=[1, 2, 1, 1]))
    assert found.makespan >= 16 * 4
    assert sum(action.stage == 1 for action in found.critical_path) >= 31


def test_gantt():
    picture = gantt(simulate(build("1f1b", 2, 2), Costs(1, 2)).timelines)
    assert picture == "rank 0 |F0|F1|  |  |B0   |  |B1   |\nrank 1 |  |F0|B0   |F1|B1   |  |  |"
    picture = gantt(simulate(build("interleaved", 2, 2, 2)).timelines)
    assert picture.splitlines()[0] == "rank 0 |0F0|0F1|2F0|2F1|   |2B0|   |2B1|0B0|0B1|"
    narrow = gantt(simulate(build("1f1b", 8, 32)).timelines, width=60)
    assert {len(line) for line in narrow.splitlines()} == {60}
    assert set(narrow.splitlines()[0][8:-1]) == set("FB.")
    assert gantt([[], []]) == ""
