"""Wrong plans are refused with both actions named; each test here is a negative control of the check."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipar.parallel.pipeline.check import check, check_programs, execution_order, read_plan
from mpipar.parallel.pipeline.messages import Program, Receive, Send, with_messages
from mpipar.parallel.pipeline.schedule import ONE_CHUNK, SCHEDULES, Action, build, forward_only, parse_plan
from tests.pipeline.plans import chunk_counts


@pytest.mark.parametrize("text, message", [
    ("0F0 0B0 0F1\n1F0 1B0 1F1 1B1", "0F1 has no backward: 0B1 is missing"),
    ("0F0 0B0\n1F0 1B0 1F1 1B1", "0F1 is missing, but 1F1 is in the plan"),
    ("0F0 0B0 0B1\n1F0 1B0 1F1 1B1", "0F1 is missing, but 0B1 is in the plan"),
    ("0F0 0B0 0F0\n1F0 1B0", "0F0 runs twice: as action 0 of rank 0 and as action 2 of rank 0"),
    ("0F0 0B0 0F1 0B1\n1F0 1B0 1F1 1B1 1B0", "1B0 runs twice"),
    ("0F0 0B0 0F2 0B2", "0F1 is missing, but 0F0 is in the plan"),
    ("0B0 0F0\n1F0 1B0", "0B0 comes before 0F0 on rank 0"),
    ("0F0 0W0 0I0\n1F0 1B0", "0W0 comes before 0I0 on rank 0"),
    ("0F0 0I0\n1F0 1B0", "0I0 has no other half: 0W0 is missing"),
    ("0F0 0W0\n1F0 1B0", "0W0 has no other half: 0I0 is missing"),
    ("0F0 0B0 0W0\n1F0 1B0", "0B0 and 0W0 are both in the plan"),
    ("0F0 0B0\n2F0 2B0", "1F0 is missing, but 0F0 is in the plan"),
    ("0F0 0B0\n1F0\n1B0", "stage 1 runs on two ranks: 1F0 on rank 1, 1B0 on rank 2"),
    # crossed: rank 0 wants the backward of 0 before it has sent forward 1, rank 1 wants forward 1 first
    ("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1",
     "deadlock: rank 0 waits at 0B0 for 1B0, rank 1 waits at 1F1 for 0F1"),
    ("1F0 0F0 0B0 1B0", "deadlock: rank 0 waits at 1F0 for 0F0, which it runs later"),
    ("0F0 0F1 0I0 0W0 0I1 0W1\n1F0 1I0 1W0 1F1 1I1 1W1\n2F1 2I1 2F0 2I0 2W1 2W0",
     "deadlock: rank 1 waits at 1I0 for 2I0, rank 2 waits at 2F1 for 1F1"),
    ("0F0 0F1 0B0 0B1\n1F1 1F0 1B0 1B1\n2F0 2B0 2F1 2B1", None),
])
def test_a_wrong_plan_names_its_actions(text, message):
    plan = parse_plan(text)
    if message is None:         # in another order than they were sent, but names find them
        check(plan)
        return
    with pytest.raises(ValueError) as caught:
        check(plan)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_circle_of_three_ranks():
    plan = parse_plan("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1\n2F0 2F1 2B0 2B1")
    with pytest.raises(ValueError, match="rank 0 waits at 0B0 for 1B0, rank 1 waits at 1F1 for 0F1"):
        check(plan)
    # All three in one circle: 0 waits for 1, 1 for 2, 2 for 1's forward that waits for 0.
    plan = parse_plan("0F0 0B0 0F1 0B1\n1F0 1B0 1F1 1B1\n2F0 2F1 2B0 2B1")
    with pytest.raises(ValueError, match="rank 1 waits at 1B0 for 2B0, rank 2 waits at 2F1 for 1F1"):
        check(plan)


def test_sizes_that_are_asked_for():
    plan = build("1f1b", 2, 3)
    check(plan, stages=2, micro_batches=3)
    for sizes, message in ((dict(stages=3), "2F0 is missing, but 0F0"),
                           (dict(micro_batches=4), "0F3 is missing, but 0F0"),
                           (dict(stages=1), "1F0 in a plan of 1 stages"),
                           (dict(micro_batches=2), "0F2 in a plan of 2 micro-batches")):
        with pytest.raises(ValueError, match=message):
            check(plan, **sizes)
    with pytest.raises(ValueError, match="no action"):
        check([[], []])


def test_actions_that_are_none():
    for action in (Action(0, "X", 0), Action(-1, "F", 0), Action(0, "F", -2)):
        with pytest.raises(ValueError, match=f"{action} on rank 0; valid: a kind of F B I W, numbers from 0"):
            check([[action]])


def test_forward_only_is_asked_for():
    with pytest.raises(ValueError, match="0F0 has no backward: 0B0 is missing"):
        check(forward_only(2, 3))
    with pytest.raises(ValueError, match="0B0 in a forward-only plan, after 0F0"):
        check(build("naive", 2, 3), forward_only=True)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["naive", "gpipe", *sorted(ONE_CHUNK)]), st.integers(1, 5), st.integers(1, 8),
       st.randoms())
def test_a_plan_with_one_action_less_or_twice_is_refused(name, ranks, micros, dice):
    for change in ("drop", "double"):
        plan = build(name, ranks, micros)
        row = dice.choice(plan)
        position = dice.randrange(len(row))
        action = row[position]
        if change == "drop":
            del row[position]
        else:
            row.insert(dice.randrange(len(row) + 1), action)
        with pytest.raises(ValueError, match=str(action)):
            check(plan, stages=ranks, micro_batches=micros)


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 4), st.integers(1, 4), st.randoms())
def test_a_shuffled_plan_is_refused_or_runs_to_its_end(ranks, micros, dice):
    """The check agrees with a blunt machine that tries ranks in random order."""
    plan = build("1f1b", ranks, micros)
    for actions in plan:
        for _ in range(dice.randrange(3)):
            i = dice.randrange(len(actions) - 1)
            actions[i], actions[i + 1] = actions[i + 1], actions[i]
    done = set()
    position = [0] * ranks
    while True:
        able = []
        for rank, actions in enumerate(plan):
            if position[rank] < len(actions):
                stage, kind, micro = actions[position[rank]]
                needs = [Action(stage, "F", micro)] if kind == "B" else []
                if kind == "F" and stage > 0:
                    needs.append(Action(stage - 1, "F", micro))
                if kind == "B" and stage < ranks - 1:
                    needs.append(Action(stage + 1, "B", micro))
                if done.issuperset(needs):
                    able.append(rank)
        if not able:
            break
        rank = dice.choice(able)
        done.add(plan[rank][position[rank]])
        position[rank] += 1
    if len(done) == 2 * ranks * micros:
        check(plan)
    else:
        with pytest.raises(ValueError):
            check(plan)


def _edit(programs, rank, edit):
    instructions = list(programs[rank].instructions)
    edit(instructions)
    old = programs[rank]
    programs[rank] = Program(rank, old.stages, old.micro_batches, tuple(instructions))
    return programs


@pytest.mark.parametrize("rank, edit, message", [
    (0, lambda i: i.remove(Send(0, "F", 1, 1)), "0F1 on rank 0 to 1F1 on rank 1: sent 0 times, received 1"),
    (1, lambda i: i.remove(Receive(0, "F", 1, 0)), "1F1 on rank 1 waits for 0F1, but no receive is posted"),
    (0, lambda i: i.append(Send(0, "F", 1, 1)), "0F1 on rank 0 to 1F1 on rank 1: sent 2 times, received 1"),
    (0, lambda i: i.insert(0, Send(0, "F", 1, 1)), "rank 0 sends 0F1>1 before 0F1 has run"),
    (1, lambda i: i.append(Receive(0, "F", 9, 0)), "0F9 on rank 0 to 1F9 on rank 1: sent 0 times"),
    (0, lambda i: i.__setitem__(i.index(Send(0, "F", 1, 1)), Send(0, "F", 1, 0)),
     "0F1 on rank 0 to 1F1 on rank 0: sent 1 times, received 0"),
    (1, lambda i: i.append(i.pop(i.index(Receive(0, "F", 1, 0)))), "1F1 on rank 1 waits for 0F1, but no"),
])
def test_wrong_programs(rank, edit, message):
    programs = with_messages(build("1f1b", 2, 3))
    check_programs(programs)
    with pytest.raises(ValueError, match=message):
        check_programs(_edit(programs, rank, edit))


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_the_order_of_execution_respects_the_data(name):
    plan = build(name, 3, 4, chunk_counts(name)[0])
    order = [action for _, action in execution_order(with_messages(plan))]
    assert sorted(order) == sorted(action for actions in plan for action in actions)
    place = {action: index for index, action in enumerate(order)}
    random.Random(0).shuffle(order)
    for action in order:
        if action.kind == "F" and action.stage > 0:
            assert place[action._replace(stage=action.stage - 1)] < place[action]


@pytest.mark.parametrize("data", [
    b"0F0,0F1,0B0,0B1\r\n1F0,1B0,1F1,1B1\r\n", b"\xef\xbb\xbf0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n",
    b"# by hand\n\n0F0, 0F1, 0B0, 0B1,\n1F0 1B0\t1F1 1B1",
], ids=["windows", "marked", "spaced"])
def test_files_as_editors_write_them(data, tmp_path):
    path = tmp_path / "plan.csv"
    path.write_bytes(data)
    assert read_plan(path) == build("1f1b", 2, 2)


@pytest.mark.parametrize("data, message", [
    (b"", "the plan is empty"), (b"\r\n", "the plan is empty"), ("0F0".encode("utf-16"), "is not text in UTF-8"), (b"\x00\x01", "is not an action"),
    (b"0F0;0B0", "'0F0;0B0' is not an action"), (b"0F0 0F0 0B0", "0F0 runs twice: as action 0 of rank 0 and as action 1 of rank 0"),
    (b"0F0 0B0 1F0\n1B0", "stage 1 runs on two ranks: 1F0 on rank 0, 1B0 on rank 1"), (b"0F0 0B0\n2F0 2B0", "1F0 is missing"),
    (b"0F0 0F2 0B0 0B2", "0F1 is missing"), (b"0F0 0I0 0B0 0W0", "0B0 and 0I0 are both in the plan"), (b"0F0 0I0", "0W0 is missing"),
    (b"0F0 0W0 0I0", "0W0 comes before 0I0"), (b"1F0 0F0 0B0 1B0", "rank 0 waits at 1F0 for 0F0, which it runs later"),
    (b"0F0 0B0\n2F0 2B0\n1F0 1B0", None), (b"0F" + b"9" * 30 + b" 0B0", "0F0 is missing"),
])
def test_files_that_are_refused_in_one_line(data, message, tmp_path):
    path = tmp_path / "plan.csv"
    path.write_bytes(data)
    if message is None:
        assert len(read_plan(path)) == 3
        return
    with pytest.raises(ValueError, match=message) as error:
        read_plan(path)
    assert str(path) in str(error.value) and len(str(error.value).splitlines()) == 1
