"""`python -m mpipar.bench overlap`: its arithmetic, what it refuses to claim, and how much is hidden on a wire of 1 Gbit/s."""

import json
import os

import pytest

from mpipar.bench.overlap import share
from mpipar.parallel.overlap import Room
from tests.helpers.jobs import run_job
from tests.helpers.wire import TOOLS, NoWire, Wire, missing

SMALL = ["--layers", "2", "--dim", "32", "--heads", "4", "--seq", "16", "--global-batch", "8"]
GPT = ["--layers", "6", "--dim", "384", "--heads", "6", "--seq", "256", "--global-batch", "16"]  # 8 for each of two replicas
ROOM, NO_ROOM = Room(wire=True, core=False), Room(wire=False, core=False)


def test_the_share():
    times = {"messages": [0.5, 0.4], "compute": [1.0, 1.3], "both": [1.2, 1.4]}
    found = share(times, ROOM)
    assert found["hidden"] == pytest.approx(0.5)                # 1.0 + 0.4 - 1.2 of 0.4
    assert found["hidden_range"] == pytest.approx([0.6, 0.75])
    assert share(times, NO_ROOM) == {"hidden": None, "hidden_range": None}


def test_without_a_core_and_a_wire_nothing_is_claimed(tmp_path):
    file = tmp_path / "overlap.json"
    ranks = max(2, len(os.sched_getaffinity(0)))                # every core computes
    job = run_job(2, ["-m", "mpipar.bench", "overlap", *SMALL, "--threads", str(ranks), "--rounds", "2", "--json", file], timeout=120)
    assert job.returncode == 0 and not job.left_behind, job.output
    report = json.loads(file.read_text())
    assert report["hidden"] is None and not report["wire"] and not report["free_core"] and sum(report["bucket_bytes"]) > 0
    assert "no overlap to speak of" in job.stdout and "hidden:" not in job.stdout
    assert {len(each) for each in report["seconds"].values()} == {2}


def test_a_wire_is_said(tmp_path):
    """Ranks that count as nodes of their own, without compute or wire to speak of: the report, not its numbers."""
    job = run_job(2, ["-m", "mpipar.bench", "overlap", *SMALL, "--rounds", "2"], env={"MPIPAR_RANKS_PER_NODE": "1"}, timeout=120)
    assert job.returncode == 0 and "hidden:" in job.stdout and "a wire between replicas" in job.stdout, job.output


@pytest.mark.parametrize("ranks, arguments, words", [
    (1, [], "dp=1 has no gradients to sum"), (2, ["--tp", "2"], "dp=1"), (2, ["--no-overlap"], "nothing to measure"),
    (2, ["--rounds", "0"], "integers from 1"), (2, ["--zero", "1"], "with zero=1"), (2, ["--json", "/none/x"], "no folder"),
])
def test_user_errors(ranks, arguments, words):
    job = run_job(ranks, ["-m", "mpipar.bench", "overlap", *arguments])
    assert job.returncode == 2 and words in job.output and "Traceback" not in job.output, job.output


@pytest.fixture
def wire(tmp_path):
    """Two nodes of one core each, joined by 1 Gbit/s in each direction."""
    why = missing()
    if any(tool in why for tool in TOOLS) and os.environ.get("CI"):
        pytest.fail(why)                                        # there it was to be installed
    if why:
        pytest.skip(f"no network of two nodes here: {why}")
    try:
        with Wire(tmp_path, "1gbit") as made:
            yield made
    except NoWire as error:
        pytest.skip(f"no network of two nodes here: {error}")


def test_most_of_the_messages_is_hidden_on_a_wire_of_1_gbit(wire, tmp_path):
    """The 6-layer GPT of 43 MB. Each node has one core, so what the messages cost of it is not hidden.

    With half the batch, where a core has AMX, a step computes no longer than the wire is busy, and the messages begin when
    the forward pass and a block of the backward pass are over: by those times no more than some 57 % can be hidden, and 47 to
    49 % were.

    The control: steps that compute first and then send hide next to nothing by the same count. Three attempts, for a
    machine that has other things to do.
    """
    file = tmp_path / "overlap.json"
    for _ in range(3):
        done = wire.mpirun(["-m", "mpipar.bench", "overlap", *GPT, "--threads", "1", "--rounds", "4", "--json", file], timeout=500)
        assert done.returncode == 0, done.stdout
        report = json.loads(file.read_text())
        seconds = report["seconds"]
        assert report["nodes"] == 2 and report["wire"] and not report["free_core"], done.stdout
        on_the_wire = 8 * sum(report["bucket_bytes"]) / 1e9         # seconds: each of two ranks sends all of it once
        assert min(seconds["messages"]) > 0.9 * on_the_wire, done.stdout
        control = share({**seconds, "both": seconds["one after the other"]}, ROOM)["hidden"]
        if report["hidden"] >= 0.6 and control < 0.3:
            break
    assert report["hidden"] >= 0.6 and control < 0.3, (control, done.stdout)
