"""Settings of the checks, the history, fingerprints, and who waits for whom: all without MPI."""
import threading

import numpy as np
import pytest

from mpipar.comm import debug, fingerprint, stuck
from mpipar.comm.collectives import Plan
from mpipar.comm.group import Group
from mpipar.comm.history import WIDTH, History


def test_nothing_is_asked_for():
    for environ in ({}, {"MPIPAR_DEBUG": "0"}, {"MPIPAR_DEBUG": ""}, {"MPIPAR_DEBUG_OPERATIONS": "7"}):
        assert debug.settings(environ) is None
    assert debug.group_class(None) is Group


def test_settings():
    found = debug.settings({"MPIPAR_DEBUG": "1"})
    assert (found.check, found.timeout, found.operations, found.folder) == (True, 300.0, 200, None)
    found = debug.settings({"MPIPAR_TIMEOUT": "0.5", "MPIPAR_DEBUG_OPERATIONS": "7", "MPIPAR_DEBUG_DIR": "/somewhere"})
    assert (found.check, found.timeout, found.operations, found.folder) == (False, 0.5, 7, "/somewhere")


@pytest.mark.parametrize("name, value", [
    ("MPIPAR_DEBUG", "2"), ("MPIPAR_DEBUG", "true"), ("MPIPAR_TIMEOUT", "0"), ("MPIPAR_TIMEOUT", "-1"),
    ("MPIPAR_TIMEOUT", "nan"), ("MPIPAR_TIMEOUT", "inf"), ("MPIPAR_TIMEOUT", "a minute"),
    ("MPIPAR_DEBUG_OPERATIONS", "0"), ("MPIPAR_DEBUG_OPERATIONS", "2.5"), ("MPIPAR_DEBUG_OPERATIONS", "1000001")])
def test_wrong_values(name, value):
    with pytest.raises(ValueError, match=f"{name}='{value}': valid (is|are) "):
        debug.settings({name: value})


class Two(Group):
    """A group of two ranks that can't communicate."""

    def __init__(self):
        super().__init__("pair", ranks=(4, 6))
        self.size = 2


def call(operation, plan=None, group=None, **arguments):
    made = fingerprint.Call(operation, arguments, group or Two())
    made.describe(plan or Plan(operation, None))
    return made


def test_a_call_in_words():
    made = call("all_reduce", x=np.ones((2, 3), "f4"), op="max", name="head")
    assert str(made).startswith("all_reduce(float32[2,3], max, name='head') at tests/comm/test_debug.py:")
    made = call("reduce_scatter_start", x=np.ones((2, 6)), axis=-1, op="sum", sizes=[1, 5], name="")
    assert str(made).startswith("reduce_scatter_start(float64[2,6], sum, axis=1, sizes=[1, 5]) at ")
    assert "recv(int64[3], source=1, tag=7)" in str(call("recv", out=np.ones(3, int), source=1, tag=7, name=""))


def fit(one, other):
    group = Two()
    return fingerprint.compare(np.stack([fingerprint.record(made, ranks=2) for made in (one, other)]), group)


def test_what_may_differ():
    x = np.ones((2, 6))
    sizes = [4, 2]
    assert fit(call("barrier", name=""), call("barrier", name="")) is None
    for operation, more in (("all_gather", {}), ("gather", {"root": 1})):
        one, other = (call(operation, x=x[:, :n], axis=axis, sizes=sizes, out=None, name="", **more)
                      for n, axis in ((4, 1), (2, -1)))
        assert fit(one, other) is None
    root = call("scatter", x=x, root=0, axis=1, sizes=sizes, out=None, shape=None, dtype=None, name="")
    other = call("scatter", x=None, root=0, axis=1, sizes=sizes, out=x[:, :2], shape=None, dtype=None, name="")
    assert fit(root, other) is None
    one = call("all_to_all_v", x=x[0], send_counts=[1, 5], receive_counts=[1, 2], name="")
    other = call("all_to_all_v", x=x[0, :4], send_counts=[2, 2], receive_counts=[5, 2], name="")
    assert fit(one, other) is None


def test_what_may_not_differ():
    one = call("all_reduce", x=np.ones(4), op="sum", name="")
    other = call("all_reduce", x=np.ones(4), op="sum", name="b")
    text = fit(one, other)
    assert text.startswith("group pair: the ranks called different operations:\n  rank 4: all_reduce(float64[4], sum)")
    assert "\n  rank 6: all_reduce(float64[4], sum, name='b') at " in text


def test_long_words_keep_the_place():
    made = call("all_gather", x=np.ones(1), axis=0, sizes=list(range(1000)), out=None, name="")
    words = fingerprint.Record(fingerprint.record(made, ranks=2)).words
    assert len(words) <= fingerprint.WORDS and " ... " in words and "tests/comm/test_debug.py:" in words[-60:]


def test_history_is_a_ring_in_a_file(tmp_path):
    history = History(4)
    history.keep_in(tmp_path, 3, 8)
    path = tmp_path / "mpipar-rank3.log"
    for n in range(10):
        made = call("all_reduce", x=np.ones(n), op="sum", name="x" * 40 * n)
        history.begin(made)
        if n != 9:
            history.end(made)
    text = path.read_text()
    lines = text.splitlines()
    assert len(text) == 5 * WIDTH and lines[0].startswith("mpipar rank 3 of 8, process ")
    assert sorted(int(line.split()[0]) for line in lines[1:]) == [7, 8, 9, 10]
    assert [line.split()[2] for line in history.last()] == ["done"] * 3 + ["begun"]
    assert all("tests/comm/test_debug.py:" in line for line in history.last(2))
    history.save("stack of somebody")
    history.save("a second time changes nothing")
    saved = path.read_text().splitlines()
    assert [line.split()[0] for line in saved[1:5]] == ["7", "8", "9", "10"] and saved[-1] == "stack of somebody"
    history.remove()
    assert not path.exists()


def test_history_of_several_threads():
    history = History(1000)
    made = [call("all_reduce", x=np.ones(1), op="sum", name="") for _ in range(800)]
    threads = [threading.Thread(target=lambda part=made[n::4]: [history.begin(m) or history.end(m) for m in part])
               for n in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert [int(line.split()[0]) for line in history.last()] == list(range(1, 801)) and not history.open


def state(*waits, looks=0, calls=None, over=False):
    """Of a rank: waits are (members, number) of a collective of the group with that key, or a peer."""
    made = []
    for token, wait in enumerate(waits):
        common = {"words": "w", "group": "g", "looks": looks, "seconds": 1.0, "main": True, "arrived": False,
                  "token": token}
        if isinstance(wait, int):
            made.append({**common, "peer": wait, "members": [], "key": 0, "number": 0})
        else:
            members, key, number = wait
            made.append({**common, "peer": None, "members": members, "key": key, "number": number})
    return {"waits": made, "calls": calls or {}, "last": [], "stacks": "", "unreceived": [], "over": over}


def test_a_ring_of_waits_is_a_deadlock():
    states = {0: state(1), 1: state(2), 2: state(0), 3: state()}
    assert stuck.deadlocked(states) == {0: [0], 1: [0], 2: [0]}
    later = {rank: state(*[wait["peer"] for wait in one["waits"]], looks=5) for rank, one in states.items()}
    assert stuck.same(states, later) and not stuck.same(states, states)       # they have to have looked in between


def test_who_waits_for_a_rank_that_computes_is_not_dead():
    assert not stuck.deadlocked({0: state(1), 1: state(2), 2: state()})
    assert not stuck.deadlocked({0: state(1), 1: state(2)})                     # rank 2 has not answered
    assert not stuck.deadlocked({})


def test_collectives_wait_for_those_who_have_called_less():
    one, other = ([0, 1], 7, 3), ([0, 1], 8, 5)
    states = {0: state(one, calls={"7": 3, "8": 4}), 1: state(other, calls={"7": 2, "8": 5})}
    assert set(stuck.deadlocked(states)) == {0, 1}
    states[1]["calls"]["7"] = 3                         # rank 1 has come, its message is on its way
    assert not stuck.deadlocked(states)
    states = {0: state(one, calls={"7": 3}), 1: state(one, calls={"7": 3})}
    assert not stuck.deadlocked(states)


def test_every_thread_of_a_rank_has_to_be_stuck():
    assert not stuck.deadlocked({0: state(1, 2), 1: state(0), 2: state()})
    assert set(stuck.deadlocked({0: state(1, 2), 1: state(0), 2: state(0)})) == {0, 1, 2}
    computes = {0: state(1), 1: state(0)}
    computes[0]["waits"][0]["main"] = False
    assert not stuck.deadlocked(computes)


def test_report():
    text = stuck.report("title", {0: state(1), 2: state(over=True)}, range(3))
    assert text.splitlines()[:4] == ["title", "  rank 0 waits 1.0 s in w, for rank 1",
                                     "  rank 1 did not answer: it is stopped, or in compiled code that does not let "
                                     "Python run",
                                     "  rank 2 has come to its end"]
