"""`python -m mpipar.bench train`: the parts of a step, and how much of a pipeline's time is used."""

import json

import pytest

from tests.helpers.jobs import run_job

TINY = ("--layers", "4", "--dim", "64", "--seq", "32", "--global-batch", "16")


@pytest.mark.parametrize("ranks, options", [(1, ()), (2, ("--pp", "2", "--micro-batches", "8"))])
def test_report(tmp_path, ranks, options):
    file = tmp_path / "report.json"
    job = run_job(ranks, ["-m", "mpipar.bench", "train", "--measure", 3, "--json", file, *TINY, *options], timeout=100)
    assert job.returncode == 0 and not job.left_behind, job.output
    report = json.loads(file.read_text())
    assert len(report["losses"]) == 1 + 3 + 3 and report["losses"][-1] < report["losses"][0]
    assert report["parts_s"]["product"] > 0 and report["step_s"] >= report["best_step_s"] > 0
    if ranks == 1:
        assert "utilisation" not in report
        return
    used = report["utilisation"]
    assert 0 < used["measured"] <= 1 and 0 < used["simulated"] <= 1 and used["equal_stages"] == pytest.approx(8 / 9)
    assert 0.3 < used["ratio"] < 1.3 and "utilisation of the pipeline" in job.stdout
