"""MPIPAR_DEBUG=1: ranks that do not agree end with both calls named, within seconds, instead of hanging or going wrong.

Each test starts a job of its own by mpirun: see mismatches.py. More kinds are in test_checked.py.
"""
import re
import time

import pytest

from tests.comm.mismatches import LOCAL, MESSAGES, MISMATCHES, STUCK
from tests.helpers.jobs import run_job

PROMISED = 5.0          # seconds
ROOM = 5.0              # more, for a machine that is busy with other things
HERE = r"tests/comm/mismatches\.py:\d+"


def run(name, *sizes, ranks=2, folder, debug="1", **variables):
    env = {"MPIPAR_DEBUG": debug, "MPIPAR_DEBUG_DIR": str(folder), **variables}
    job = run_job(ranks, ["-u", "-m", "tests.comm.mismatches", name, *sizes], env=env)
    job.files = sorted(path.name for path in folder.iterdir())
    begun = re.search(r"begins at ([\d.]+)", job.stdout)
    job.lasted = time.time() - float(begun[1]) if begun else None
    return job


def fails(name, *sizes, ranks=2, folder, **variables):
    """The job fails in time, and leaves a file of every rank and nothing else."""
    job = run(name, *sizes, ranks=ranks, folder=folder, **variables)
    assert job.returncode not in (0, None), job.output
    assert not job.left_behind and job.lasted < PROMISED + ROOM, f"{job.lasted} s\n{job.output}"
    assert job.files == [f"mpipar-rank{rank}.log" for rank in range(ranks)]
    return job


def test_14_kinds_are_tested():
    assert len(MISMATCHES) == 14


@pytest.mark.parametrize("name", [*MISMATCHES, *MESSAGES])
def test_a_mismatch_names_both_calls_on_all_ranks(tmp_path, name):
    job = fails(name, folder=tmp_path)
    assert job.returncode == 1
    assert job.stderr.count("MismatchError: group world: ") == 1             # one rank speaks
    both = re.search(rf"rank 0: (\w+)\(.*\) at {HERE}\n.*  rank 1: (\w+)\(.*\) at {HERE}\n", job.stderr)
    assert both, job.stderr
    assert "mpipar/comm/" not in job.stderr.replace("mpipar.comm", "")       # the traceback shows the program
    for rank in range(2):
        kept = (tmp_path / f"mpipar-rank{rank}.log").read_text()
        assert "begun world: " in kept and "stack of MainThread" in kept or "Traceback" in kept
    if name not in MESSAGES:                                                # a send may be over before its receive
        for rank in range(2):
            assert both[0].split("\n")[0] in (tmp_path / f"mpipar-rank{rank}.log").read_text()


@pytest.mark.parametrize("name", ["barrier and all_reduce", "message of another length", "recv and all_reduce"])
@pytest.mark.smoke
def test_some_with_every_mpi(tmp_path, name):
    job = fails(name, folder=tmp_path)
    assert len(re.findall(rf" at {HERE}", job.stderr)) >= 2


def test_the_case_of_a_barrier(tmp_path):
    """Rank 0 calls all_reduce of 8 numbers, rank 1 a barrier."""
    program = tmp_path / "program.py"
    program.write_text("import numpy as np\nfrom mpipar.comm import Mesh\nworld = Mesh().world\n"
                       "if world.rank == 0:\n    world.all_reduce(np.ones(8))\nelse:\n    world.barrier()\n")
    job = run_job(2, [program], env={"MPIPAR_DEBUG": "1"}, cwd=tmp_path)
    assert job.returncode == 1 and job.seconds < PROMISED + ROOM
    assert "rank 0: all_reduce(float64[8], sum) at program.py:5" in job.stderr
    assert "rank 1: barrier() at program.py:7" in job.stderr
    assert f"the last operations of each rank: {tmp_path}/mpipar-rank*.log" in job.stderr


@pytest.mark.parametrize("name", STUCK)
def test_ranks_that_wait_for_one_another(tmp_path, name):
    job = fails(name, folder=tmp_path)
    assert "the ranks wait for one another and will for ever:" in job.stderr
    for rank in range(2):
        line = rf"\]   rank {rank} waits [\d.]+ s in .* at {HERE}.* for rank {1 - rank}"
        assert re.search(line, job.stderr), job.stderr
        assert f"rank {rank}, last operations:" in job.stderr and f"rank {rank}, stack of MainThread:" in job.stderr
    if name == "tags of small messages":
        line = rf"rank 0 has sent send\(float64\[4\], to=1, tag=1\) at {HERE}; not received by rank 1"
        assert re.search(line, job.stderr)


def test_ranks_of_several_groups_wait_for_one_another(tmp_path):
    job = fails("two groups", "tp=2", ranks=4, folder=tmp_path)
    for rank, other, axis in ((0, 1, "tp"), (1, 3, "dp"), (3, 2, "tp"), (2, 0, "dp")):
        line = rf"rank {rank} waits .* in all_reduce\(.* at {HERE}, group {axis}, call 1, for rank {other}"
        assert re.search(line, job.stderr), job.stderr


def test_the_mailbox_of_a_pipeline(tmp_path):
    job = fails("mailbox", "pp=2", folder=tmp_path)
    for words in ("rank 0: send_start(float64[2,3], to=1", "rank 1: recv_start(float64[3,2], source=0"):
        assert f"{words}, tag=12, name='0F3') at mpipar/parallel/pipeline/mailbox.py:" in job.stderr


def test_a_thread_beside_the_main_one(tmp_path):
    job = fails("helper", folder=tmp_path)
    assert re.search(r"group dp: the ranks called .*\n.*rank 0: all_reduce\(float64\[4\], sum\) at ", job.stderr)
    assert "rank 1: all_reduce(float64[5], sum) at " in job.stderr


def test_a_message_that_nobody_receives(tmp_path):
    job = fails("never received", folder=tmp_path)
    assert "group world: a message was sent and never received:" in job.stderr
    assert re.search(rf"rank 0: send\(float64\[2\], to=1, tag=0\) at {HERE}; not received by rank 1", job.stderr)


@pytest.mark.parametrize("name", LOCAL)
def test_what_a_rank_sees_alone_needs_no_check(tmp_path, name):
    for debug in "01":
        job = run(name, folder=tmp_path, debug=debug)
        assert job.returncode == 1 and "ValueError: out has shape (7,)" in job.stderr


@pytest.mark.parametrize("name, ranks, sizes, variables", [
    ("slow", 2, (), {}), ("exchange", 3, (), {}), ("exchange", 4, ("tp=2",), {"MPIPAR_SYNC_SEND": "1"}),
    ("groups in turn", 4, ("tp=2",), {}), ("cuts", 3, (), {}), ("cuts", 3, (), {"MPIPAR_MAX_COUNT": "1000"})])
def test_what_is_right_goes_on(tmp_path, name, ranks, sizes, variables):
    """Negative control: no false alarm, and no file is left."""
    job = run(name, *sizes, ranks=ranks, folder=tmp_path, **variables)
    assert job.returncode == 0 and job.stdout.count("all is well") == ranks, job.output
    assert job.files == [] and job.stderr == ""


@pytest.mark.parametrize("name", ["sum and max", "another order", "roots"])
def test_without_the_check_nobody_notices(tmp_path, name):
    """Negative control: the same programs end without an error, and nothing is written."""
    job = run(name, "back_end=mpi", folder=tmp_path, debug="0")
    assert job.returncode == 0 and job.files == []


@pytest.mark.parametrize("name, calls", [
    ("sum and max", "rank [01] calls all_reduce .(sum|max). of [0-9]+ float64, and rank [01] calls all_reduce .(sum|max). of"),
    ("roots", "rank [01] calls broadcast of [0-9]+ float64 from rank [01], and rank [01] calls broadcast")])
def test_slots_notice_it_without_the_check(tmp_path, name, calls):
    job = run(name, folder=tmp_path, debug="0")
    assert job.returncode == 1 and re.search(rf"RuntimeError: group world: {calls}.*; MPIPAR_DEBUG=1 says where", job.stderr), job.output
