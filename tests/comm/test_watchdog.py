"""MPIPAR_TIMEOUT: a job that does not move is ended with what every rank did last; the files that a failure leaves."""
import os
import re
import signal

import pytest

from tests.comm.test_mismatch import HERE, ROOM, run
from tests.helpers.jobs import Running, run_job

SECONDS = "1.5"


def expires(name, *, folder, debug="0", answer=0.0):
    """The job ends once the time is over and the ranks have answered, not before."""
    job = run(name, folder=folder, debug=debug, MPIPAR_TIMEOUT=SECONDS)
    assert job.returncode == 1 and not job.left_behind, job.output
    assert float(SECONDS) < job.lasted < float(SECONDS) + answer + ROOM
    assert job.files == ["mpipar-rank0.log", "mpipar-rank1.log"]
    assert f"an operation has not moved for {SECONDS} s (MPIPAR_TIMEOUT):" in job.stderr
    return job


@pytest.mark.parametrize("debug", "01")
def test_a_rank_that_never_comes(tmp_path, debug):
    job = expires("one sleeps", folder=tmp_path, debug=debug)
    line = rf"rank 0 waits [\d.]+ s in all_reduce\(float64\[4\], sum\) at {HERE}, group world, call 1, for rank 1"
    assert re.search(line, job.stderr)
    assert "rank 1 waits for no operation" in job.stderr and "in one_sleeps" in job.stderr      # its stack
    assert "rank 1, last operations:" in job.stderr and "rank 1, stack of MainThread:" in job.stderr


@pytest.mark.parametrize("debug", "01")
def test_a_loop_that_asks_for_ever(tmp_path, debug):
    job = expires("test loop", folder=tmp_path, debug=debug)
    assert re.search(rf"rank 0 waits [\d.]+ s in recv_start\(float64\[4\], source=1, tag=0\) at {HERE}", job.stderr)


def test_a_mesh_that_only_one_rank_makes(tmp_path):
    job = expires("second mesh", folder=tmp_path)
    assert re.search(rf"rank 0 waits [\d.]+ s in \w+ at {HERE}", job.stderr) and "in second_mesh" in job.stderr


def test_a_rank_that_is_stopped(tmp_path):
    job = expires("stopped", folder=tmp_path, answer=2.0)
    assert "rank 1 did not answer: it is stopped" in job.stderr


def test_a_mismatch_that_hangs_without_the_check(tmp_path):
    job = expires("recv and all_reduce", folder=tmp_path)
    assert re.search(r"rank 0 waits .* in recv.*for rank 1", job.stderr)
    assert re.search(r"rank 1 waits .* in all_reduce.*for rank 0", job.stderr)


@pytest.mark.parametrize("debug", "01")
@pytest.mark.parametrize("name, code", [("killed", None), ("raises", 1)])
def test_any_failure_leaves_the_last_operations(tmp_path, name, code, debug):
    """Also that of a rank that is killed at once, and of those that the launcher then kills."""
    job = run(name, folder=tmp_path, debug=debug, MPIPAR_TIMEOUT="60", MPIPAR_DEBUG_OPERATIONS="5")
    assert job.returncode == code if code else job.returncode not in (0, None)
    assert job.files == ["mpipar-rank0.log", "mpipar-rank1.log"]
    for rank in range(2):
        text = (tmp_path / f"mpipar-rank{rank}.log").read_text()
        lines = sorted(line.split() for line in text.splitlines() if re.match(r" *\d+ +[\d.]+ (done|begun)", line))
        numbers = [int(line[0]) for line in lines]
        assert len(lines) == 5 and numbers == list(range(numbers[0], numbers[0] + 5)), text
        assert f"mpipar rank {rank} of 2" in text
        assert numbers[-1] == 8 or name == "killed" or rank == 1    # the others may be killed before the last begins
        assert re.search(rf"6 +[\d.]+ done  world: all_reduce\(float64\[5\], sum\) at {HERE}", text)
        if name == "raises":
            assert ("RuntimeError: boom" if rank else "stack of MainThread:") in text
    if name == "raises":
        assert f"[rank 1] the last operations of each rank: {tmp_path}/mpipar-rank*.log" in job.stderr


def test_no_file_after_a_good_end_or_a_stop(tmp_path):
    env = {"MPIPAR_TIMEOUT": "60", "MPIPAR_DEBUG_DIR": str(tmp_path)}
    job = Running(2, ["-m", "tests.comm.programs", "stop"], env=env)
    job.wait_for("running")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mpipar-rank0.log", "mpipar-rank1.log"]
    os.kill(job.ranks()[0], signal.SIGUSR1)
    assert job.finish().returncode == 77
    assert run_job(2, ["-m", "tests.comm.programs", "mesh"], env=env).returncode == 0
    assert run_job(2, ["-m", "tests.comm.programs", "mesh", "plain"], env=env).returncode == 0
    assert run_job(3, ["-m", "tests.comm.programs", "refuse on 1"], env=env).returncode == 2
    assert not (tmp_path / "mpipar-rank2.log").exists()


def test_ranks_that_left_early(tmp_path):
    """The guard's own diagnosis names the call, and the files of all ranks stay."""
    env = {"MPIPAR_DEBUG": "1", "MPIPAR_DEBUG_DIR": str(tmp_path)}
    job = run_job(3, ["-m", "tests.comm.programs", "leave early, recv"], env=env)
    assert job.returncode == 1 and job.seconds < 5 + ROOM
    line = r"waits in recv\(float64\[3\], source=1, tag=0\) at tests/comm/programs.py:\d+ of group world for rank 1"
    assert re.search(line, job.stderr)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("variable, value, text", [
    ("MPIPAR_TIMEOUT", "-3", "valid is a number of seconds above 0"), ("MPIPAR_DEBUG", "yes", "valid are 0 and 1"),
    ("MPIPAR_DEBUG_DIR", "/nonexistent", "can't be written to (No such file or directory)")])
@pytest.mark.parametrize("ranks", [1, 3])
def test_mistakes(variable, value, text, ranks):
    env = {"MPIPAR_DEBUG": "1", variable: value}
    job = run_job(ranks, ["-m", "tests.comm.programs", "mesh"], env=env)
    if variable == "MPIPAR_DEBUG_DIR" and ranks == 1:           # one rank has nothing to write
        assert job.returncode == 0
        return
    assert job.returncode == 2
    lines = [line for line in job.output.splitlines() if "mpipar" in line]
    assert len(lines) == 1 and lines[0].startswith(f"mpipar: error: {variable}={value!r}") and text in lines[0]


TRAIN = ["-m", "mpipar.train", "--layers", 4, "--dim", 16, "--heads", 4, "--seq", 8, "--vocab", 64, "--data", "random",
         "--steps", 3, "--global-batch", 16, "--quiet"]


@pytest.mark.parametrize("layout", [
    ["--dp", 1, "--tp", 2, "--pp", 2, "--micro-batches", 4], ["--dp", 2, "--tp", 2, "--zero", 3, "--comm", "shm"],
    ["--dp", 2, "--pp", 2, "--micro-batches", 4, "--schedule", "zb-v", "--comm", "shm"], ["--dp", 4, "--overlap"]])
def test_training_gives_the_same_bits(tmp_path, layout):
    ends = []
    for debug in "01":
        metrics = tmp_path / f"{debug}.jsonl"
        env = {"MPIPAR_DEBUG": debug, "MPIPAR_DEBUG_DIR": str(tmp_path)}
        job = run_job(4, [*TRAIN, *layout, "--metrics", metrics], timeout=120, env=env)
        assert job.returncode == 0, job.output
        text = metrics.read_text()
        steps = re.findall(r'"loss": [^,]+, "grad_norm": [^,]+', text)
        ends.append(steps + re.findall(r'"parameters_sha256": "\w+"', text))
    assert ends[0] == ends[1] and len(ends[0]) == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.jsonl", "1.jsonl"]
