"""How jobs end when one rank fails: soon, with one traceback that names the rank, and nobody is left behind.

Each test starts a job of its own by mpirun.
"""
import os
import re
import signal
import subprocess
import sys

import pytest

from mpipar.comm import guard
from tests.helpers.jobs import ROOT, Running, run_job

RANKS = 3


def run(name, *, ranks=RANKS, plain=False, **options):
    job = run_job(ranks, ["-m", "tests.comm.programs", name] + ["plain"] * plain, **options)
    assert job.returncode is not None, f"{name} hung:\n{job.output}"
    assert not job.left_behind, f"{name} left {job.left_behind}"
    # 10 seconds are promised; the rest is room for a machine that is busy with other things.
    assert job.seconds < 15, f"{name} took {job.seconds} s"
    return job


def words_of_ranks(job):
    """The lines that our guard printed, not the launcher."""
    return [line for line in job.output.splitlines() if line.startswith("[rank ")]


@pytest.mark.parametrize("name, last, plain", [
    ("raise", "RuntimeError: boom", False), ("thread", "RuntimeError: boom in a thread", False),
    ("import", "ModuleNotFoundError: No module named 'no_such_module'", False),
    ("raise", "RuntimeError: boom", True), ("thread", "RuntimeError: boom in a thread", True)])
def test_an_exception_on_one_rank(name, last, plain):
    job = run(name, plain=plain)
    assert job.returncode == 1
    lines = words_of_ranks(job)
    assert lines[0] == "[rank 1] Traceback (most recent call last):" and lines[-1] == f"[rank 1] {last}"
    assert job.output.count("Traceback") == 1 and all(line.startswith("[rank 1]") for line in lines)
    assert "before the end of rank 1" in job.stdout              # what was printed before is not lost


def test_all_ranks_raise_and_one_speaks():
    job = run("raise on all")
    assert (
        job.returncode == 1
        and job.output.count("Traceback") == 1
        and job.output.count("RuntimeError: boom") == 1
    )


@pytest.mark.parametrize("name, code", [("exit 3", 3), ("exit text", 1), ("return 4", 4), ("interrupt", 130)])
def test_the_exit_code_of_one_rank_is_that_of_the_job(name, code):
    job = run(name)
    assert job.returncode == code
    assert any("rank 1" in line for line in words_of_ranks(job)) and "Traceback" not in job.output


def test_a_script_that_one_rank_leaves():
    """The code of sys.exit cannot be seen in a script; that one left can."""
    job = run("exit 3", plain=True)
    assert job.returncode == 1
    assert any(
        "waits in all_reduce of group world for rank 1, which left" in line for line in words_of_ranks(job)
    )


@pytest.mark.parametrize(
    "name, operation",
    [
        ("exit 0", "all_reduce"),
        ("leave early, reduce", "reduce"),
        ("leave early, recv", "recv"),
        ("leave early, started", "all_gather"),
    ],
)
def test_a_rank_that_leaves_early_without_an_error(name, operation):
    job = run(name)
    assert job.returncode == 1
    pattern = (
        rf"\[rank \d\] waits in {operation} of group world for rank [12](, 2)?, which left the program early"
    )
    assert any(re.match(pattern, line) for line in words_of_ranks(job))


@pytest.mark.parametrize(
    "name, text", [("rank 0 works on", "rank 0 is done"), ("late partner", "the sum is there")]
)
def test_ranks_that_end_at_different_times_are_no_failure(name, text):
    """Negative control: a rank that is done earlier than the others does not end the job."""
    job = run(name)
    assert job.returncode == 0 and text in job.stdout and not words_of_ranks(job)


def test_a_rank_that_is_killed():
    assert run("kill").returncode != 0


def test_all_ranks_exit_with_one_code():
    job = run("exit 3 on all")
    assert job.returncode == 3 and not words_of_ranks(job) and "Abort" not in job.output


@pytest.mark.parametrize(
    "name, line, plain",
    [
        ("refuse on all", "tp=3 does not divide 4 ranks, says 0", False),
        ("refuse on all", "tp=3 does not divide 4 ranks, says 0", True),
        ("refuse a file", "No such file or directory: /nonexistent/file.toml", False),
        ("refuse on 1", "tp=3 does not divide 4 ranks, says 1", False),
        ("refuse on 1", "tp=3 does not divide 4 ranks, says 1", True),
        ("refuse on 1 and 2", "tp=3 does not divide 4 ranks, says 1", False),
    ],
)
def test_a_mistake_of_the_user_is_one_line(name, line, plain):
    job = run(name, plain=plain)
    assert job.returncode == 2
    assert [text for text in job.output.splitlines() if "mpipar" in text] == [f"mpipar: error: {line}"]
    assert "Traceback" not in job.output and not words_of_ranks(job)
    if "all" in name or "file" in name:         # all ranks ended by themselves
        assert "MPI_Abort" not in job.output and "MPI_ABORT" not in job.output


def test_one_rank_alone_behaves_as_python_does(tmp_path):
    job = run("raise on all", ranks=1)
    assert (
        job.returncode == 1
        and job.stderr.startswith("Traceback")
        and job.stderr.rstrip().endswith("RuntimeError: boom")
    )
    done = subprocess.run(
        [sys.executable, "-m", "tests.comm.programs", "refuse on all"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stderr == "mpipar: error: tp=3 does not divide 4 ranks, says 0\n"


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_to_one_rank_stops_all_together(number):
    job = Running(RANKS, ["-m", "tests.comm.programs", "stop"])
    job.wait_for("running")
    os.kill(job.ranks()[0], number)
    job = job.finish()
    assert job.returncode == 77 and job.stdout.count("stopped together") == RANKS and not job.left_behind


def test_usr2_prints_the_stacks_of_a_rank_that_is_stuck():
    job = Running(2, ["-m", "tests.comm.programs", "stuck"])
    job.wait_for("one waits")
    for rank in job.ranks():
        os.kill(rank, signal.SIGUSR2)
    job.wait_for("in barrier")
    os.kill(job.process.pid, signal.SIGTERM)
    job.finish(3)


def test_an_interrupt_of_the_launcher_ends_the_job():
    job = Running(RANKS, ["-m", "tests.comm.programs", "stop"])
    job.wait_for("running")
    os.kill(job.process.pid, signal.SIGINT)
    job = job.finish(15)
    assert job.returncode not in (0, None) and not job.left_behind


def test_without_the_guard_the_job_hangs(tmp_path):
    """Negative control: what all this is for."""
    path = tmp_path / "plain.py"
    path.write_text(
        "from mpi4py import MPI\nw = MPI.COMM_WORLD\n"
        "if w.rank == 1: raise RuntimeError('boom')\nw.Barrier()\n"
    )
    job = run_job(2, [path], timeout=5)
    assert job.returncode is None and "boom" in job.output


def test_checking_passes_what_is_not_the_users_mistake():
    with pytest.raises(KeyError):
        with guard.checking():
            raise KeyError("a defect")
    assert not guard.stop_requested()
