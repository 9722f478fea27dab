"""slurm/train.sbatch on a real SLURM of three virtual nodes."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.harness import launch

pytestmark = [pytest.mark.slurm]
ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "slurm" / "train.sbatch"
WHERE = ROOT / "tests" / "slurm" / "where.py"
SIX = ("--nodes=3", "--ntasks-per-node=2")


def library():
    """The MPI library that this Python uses. Asked in another process: this one stays without MPI."""
    ask = "from mpi4py import MPI; print(MPI.Get_library_version())"
    return subprocess.run(
        [sys.executable, "-c", ask], env=launch.environment(), stdout=subprocess.PIPE, text=True, check=True
    ).stdout


@pytest.fixture(scope="module")
def mpich():
    return "MPICH" in library()


@pytest.fixture(params=["mpirun", "srun --mpi=pmi2"])
def launcher(request, mpich):
    if "pmi2" in request.param and not mpich:
        pytest.skip("Open MPI does not speak PMI-2")
    return request.param


def submit(slurm, folder, *arguments, options=SIX, launcher="mpirun", program=WHERE, **environment):
    return slurm.sbatch(
        *options,
        f"--output={folder}/out",
        f"--chdir={folder}",
        SCRIPT,
        *arguments,
        LAUNCH=launcher,
        PYTHON=sys.executable,
        PYTHONPATH=str(ROOT),
        PROGRAM=str(program),
        **environment,
    )


def output(folder):
    path = folder / "out"
    return path.read_text(errors="replace") if path.exists() else ""


def test_six_ranks_on_three_nodes(slurm, tmp_path, launcher):
    job = submit(slurm, tmp_path, options=(*SIX, "--cpus-per-task=2"), launcher=launcher)
    state, text = slurm.wait(job), output(tmp_path)
    assert state["JobState"] == "COMPLETED", text
    assert "train.sbatch: 6 ranks on n1 (2), n2 (2), n3 (2)" in text
    places = json.loads(
        next(line for line in text.splitlines() if line.startswith("places:")).removeprefix("places:")
    )
    assert places == [[node, 2, "2"] for node in ("n1", "n1", "n2", "n2", "n3", "n3")]


def test_worlds_of_one_rank_are_refused(slurm, tmp_path):
    job = submit(slurm, tmp_path, launcher="srun --mpi=none")
    state, text = slurm.wait(job), output(tmp_path)
    assert state["JobState"] == "FAILED" and state["ExitCode"] == "2:0", text
    assert "a world of 1 rank(s) instead of 6" in text and "places:" not in text


def test_a_signal_reaches_all_ranks(slurm, tmp_path, launcher):
    job = submit(slurm, tmp_path, "--until-stopped", launcher=launcher)
    slurm.wait(job, until=lambda state: "places:" in output(tmp_path))
    slurm.run("scancel", "--batch", "--signal=USR1", job)  # what happens a minute before the time limit
    state, text = slurm.wait(job), output(tmp_path)
    assert state["JobState"] == "COMPLETED" and "stopped by a signal" in text, text


def test_exit_code_zero_alone_is_no_success(slurm, tmp_path):
    job = submit(slurm, tmp_path, "--end-silently")
    state, text = slurm.wait(job), output(tmp_path)
    assert state["JobState"] == "FAILED" and state["ExitCode"] == "1:0", text
    assert "the run stopped before its end" in text


@pytest.mark.slow
def test_loss_of_a_node_fails_the_job(slurm, tmp_path):
    job = submit(slurm, tmp_path, "--until-stopped", options=(*SIX, "--no-requeue"))
    slurm.wait(job, until=lambda state: "places:" in output(tmp_path))
    slurm.control("crash", "n3")
    try:
        assert slurm.wait(job)["JobState"] in ("FAILED", "NODE_FAIL"), output(tmp_path)
    finally:
        slurm.control("revive", "n3")


TRAIN = (
    "--model gpt --layers 2 --dim 32 --heads 2 --seq 16 --vocab 64 --data random --dtype float64 "
    "--steps 3 --global-batch 12 --tp 2"
).split()


def losses(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line["loss"] for line in lines if line["event"] == "step"]


def test_the_job_computes_what_mpirun_does(slurm, tmp_path, launcher):
    here, there = tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    environment = {**launch.environment(), "PYTHONPATH": str(ROOT)}
    command = [*launch.mpirun(6), sys.executable, "-m", "mpipar.train", *TRAIN, "--threads", "1"]
    subprocess.run([*command, "--metrics", str(here)], cwd=tmp_path, env=environment, check=True, timeout=300)
    job = submit(slurm, tmp_path, *TRAIN, "--metrics", there, launcher=launcher, program="-m mpipar.train")
    state = slurm.wait(job, timeout=300)
    assert state["JobState"] == "COMPLETED", output(tmp_path)
    assert len(losses(here)) == 3 and losses(there) == pytest.approx(losses(here), rel=1e-12)


def test_the_script_is_plain_bash():
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    assert os.access(ROOT / "tests" / "slurm" / "cluster.sh", os.R_OK)
