"""Schedules as plain lists: their order, their text form, what they refuse."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipar.parallel.pipeline.check import check
from mpipar.parallel.pipeline.messages import with_messages
from mpipar.parallel.pipeline.schedule import (SCHEDULES, Action, build, format_plan, forward_only, forwards,
                                               parse_plan, placement)
from tests.pipeline.plans import chunk_counts


@st.composite
def pipelines(draw):
    """(name, ranks, micro-batches, chunks) of any schedule."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    return name, draw(st.integers(1, 16)), draw(st.integers(1, 64)), draw(st.sampled_from(chunk_counts(name)))


def places(name, ranks, chunks):
    """Where the stages have to be: s and 2P-1-s on rank s for the V, else s, s+P, ..."""
    if name == "zb-v":
        return tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks))
    return tuple(tuple(range(rank, ranks * chunks, ranks)) for rank in range(ranks))


@settings(max_examples=150, deadline=None)
@given(pipelines())
def test_every_schedule_passes_the_check(pipeline):
    name, ranks, micros, chunks = pipeline
    plan = build(name, ranks, micros, chunks)
    report = check(plan, stages=ranks * chunks, micro_batches=micros)
    assert report.placement == places(name, ranks, chunks)
    boundaries = ranks * chunks - 1 - (name == "zb-v")
    assert report.messages == (2 * micros * boundaries if ranks > 1 else 0)
    assert all(1 <= live <= micros * chunks for live in report.live)
    assert parse_plan(format_plan(plan)) == plan
    check(forwards(report.placement, micros), stages=ranks * chunks, micro_batches=micros, forward_only=True)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_grid(name):
    for chunks in chunk_counts(name, most=2):
        for ranks in range(1, 9):
            for micros in (1, 2, 3, 4, 5, 7, 8, 12, 31, 32):
                check(build(name, ranks, micros, chunks), stages=ranks * chunks, micro_batches=micros)


@pytest.mark.parametrize("name, live", [
    ("naive", (1, 1, 1, 1)), ("gpipe", (8, 8, 8, 8)), ("1f1b", (4, 3, 2, 1)), ("zero-bubble", (4, 4, 4, 4)),
    ("eager-1f1b", (7, 5, 3, 1)), ("zb-h2", (7, 7, 7, 7))])
def test_live_activations(name, live):
    assert check(build(name, 4, 8)).live == live


def test_live_activations_of_chunks():
    assert check(build("interleaved", 4, 8, 2)).live == (11, 9, 7, 5)
    for micros in (8, 9, 32):
        assert check(build("zb-v", 4, micros, 2)).live == (8, 8, 8, 8)


@pytest.mark.parametrize("micros", [1, 2, 3, 5, 8, 32])
def test_live_activations_of_1f1b_do_not_grow_with_micro_batches(micros):
    assert check(build("1f1b", 4, micros)).live == tuple(min(micros, 4 - rank) for rank in range(4))


def test_the_order_of_the_small_cases():
    assert format_plan(build("naive", 2, 2)) == "0F0 0B0 0F1 0B1\n1F0 1B0 1F1 1B1"
    assert format_plan(build("gpipe", 2, 2)) == "0F0 0F1 0B1 0B0\n1F0 1F1 1B1 1B0"
    assert format_plan(build("1f1b", 2, 3)) == "0F0 0F1 0B0 0F2 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2"
    assert format_plan(build("interleaved", 2, 2, 2)) == ("0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1\n"
                                                          "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1")
    assert format_plan(build("zero-bubble", 2, 2)) == "0F0 0F1 0I0 0W0 0I1 0W1\n1F0 1I0 1F1 1I1 1W0 1W1"
    assert format_plan(build("eager-1f1b", 2, 3)) == "0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2"
    assert format_plan(build("zb-h2", 2, 3)) == ("0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2\n"
                                                 "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2")
    assert format_plan(build("zb-v", 1, 2, 2)) == "0F0 1F0 1I0 1W0 0F1 0I0 0W0 1F1 1I1 1W1 0I1 0W1"
    assert format_plan(forward_only(2, 2, 2)) == "0F0 0F1 2F0 2F1\n1F0 1F1 3F0 3F1"


def test_interleaved_with_a_short_last_group_is_the_longer_plan_without_what_is_missing():
    longer, plan = build("interleaved", 4, 8, 2), build("interleaved", 4, 5, 2)
    assert plan == [[action for action in actions if action.micro_batch < 5] for actions in longer]


def test_forward_only_passes_the_check():
    for ranks in (1, 2, 4):
        for chunks in (1, 2):
            plan = forward_only(ranks, 3, chunks)
            report = check(plan, stages=ranks * chunks, micro_batches=3, forward_only=True)
            assert report.live == (0,) * ranks
            assert report.messages == (3 * (ranks * chunks - 1) if ranks > 1 else 0)


def test_text_takes_commas_comments_and_empty_lines():
    plan = parse_plan("# two stages\n0F0, 0B0\n\n1F0,1B0  # the last one\n")
    assert plan == [[Action(0, "F", 0), Action(0, "B", 0)], [Action(1, "F", 0), Action(1, "B", 0)]]


@pytest.mark.parametrize("text, part", [
    ("0F0 0X0", "line 1: '0X0'"), ("0F0\n1F", "line 2: '1F'"), ("-1F0", "'-1F0'"), ("0f0", "'0f0'"),
    ("", "empty")])
def test_text_that_is_not_a_plan(text, part):
    with pytest.raises(ValueError, match=part):
        parse_plan(text)


@pytest.mark.parametrize("arguments, part", [
    (("2f2b", 2, 2), "valid: naive, gpipe, 1f1b"), (("naive", 0, 2), "stages=0"),
    (("gpipe", 2, 0), "micro_batches=0"), (("gpipe", 2, 1.5), "micro_batches=1.5"),
    (("naive", 2, 2, 0), "chunks=0"), (("naive", True, 2), "stages=True"),
    (("1f1b", 2, 2, 2), "valid: chunks=1"), (("zero-bubble", 2, 2, 2), "valid: chunks=1"),
    (("interleaved", 2, 2, 1), "valid: chunks of at least 2"), (("zb-v", 2, 2, 1), "valid: chunks=2"),
    (("zb-v", 2, 2, 3), "valid: chunks=2"), (("zb-h2", 2, 2, 2), "valid: chunks=1")])
def test_wrong_sizes_are_refused(arguments, part):
    with pytest.raises(ValueError, match=part):
        build(*arguments)


def test_placement_is_read_off_the_plan():
    assert placement(parse_plan("0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0")) == [[0, 3], [1, 2]]
    with pytest.raises(ValueError, match="stage 0 runs on two ranks: 0F0 on rank 0, 0B0 on rank 1"):
        placement(parse_plan("0F0\n0B0"))


def test_neighbouring_stages_on_one_rank_need_no_message():
    programs = with_messages(parse_plan("0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0"))
    assert str(programs[1]) == "0F0<0 1F0 2F0 3B0<0 2F0>0 2B0 1B0 1B0>0"


def test_a_receive_is_posted_before_the_action_ahead_of_it():
    programs = with_messages(build("1f1b", 2, 3))
    assert str(programs[0]) == "0F0 0F0>1 1B0<1 0F1 0F1>1 0B0 1B1<1 0F2 0F2>1 1B2<1 0B1 0B2"
    assert str(programs[1]) == "0F0<0 1F0 0F1<0 1B0 1B0>0 1F1 0F2<0 1B1 1B1>0 1F2 1B2 1B2>0"


def test_planning_needs_neither_mpi4py_nor_numba_nor_numpy():
    code = ("import sys\nsys.modules.update(dict.fromkeys(['mpi4py', 'numba', 'numpy']))\n"
            "from mpipar.parallel.pipeline import check, messages, partition, schedule, simulate\n"
            "print(simulate.simulate(schedule.one_f_one_b(4, 8)).makespan)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "22\n", done.stderr
