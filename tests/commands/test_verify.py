"""`mpipar.verify` agrees, notices every kind of damage, and refuses what it can't compare."""

import json

import pytest

from mpipar.commands.breakage import BREAKS
from tests.helpers.jobs import run_job


def verify(ranks, *arguments):
    return run_job(ranks, ["-m", "mpipar.verify", "--steps", "2", *arguments], timeout=240)


@pytest.mark.smoke
def test_two_ranks_agree(tmp_path):
    file = tmp_path / "report.json"
    job = verify(2, "--json", str(file))
    assert job.returncode == 0, job.output
    runs = json.loads(file.read_text())["runs"]
    assert {(r["dp"], r["tp"], r["pp"]) for r in runs} == {(2, 1, 1), (1, 2, 1), (1, 1, 2)}
    assert all(r["agrees"] for r in runs) and f"{len(runs)} of {len(runs)} runs agree" in job.stdout


@pytest.mark.slow
@pytest.mark.parametrize("damage", BREAKS)
def test_every_damage_is_noticed(damage):
    job = verify(2, "--break", damage)
    assert job.returncode == 1 and "DISAGREES" in job.stdout and "Traceback" not in job.output, job.output


def test_one_damage_is_noticed():
    job = verify(2, "--break", "residual", "--zero", "0,3")
    assert job.returncode == 1 and "0 of " in job.stdout


@pytest.mark.parametrize("ranks,arguments,words", [
    (1, [], "mpirun -np 2"), (2, ["--break", "nothing"], "gradient-sync"), (2, ["--steps", "0"], "--steps 0"),
    (2, ["--dropout", "2"], "[0, 1)"), (2, ["--zero", "4"], "valid are 0,1,2,3"), (2, ["--json", "/no/dir/x"], "no folder"),
])
def test_user_errors(ranks, arguments, words):
    job = verify(ranks, *arguments)
    assert job.returncode == 2 and len(job.output.strip().splitlines()) == 1 and words in job.output, job.output
