"""`python -m mpipar.bench pipeline`: its table, its JSON, what it refuses."""

import json

import pytest

from tests.helpers.jobs import run_job


@pytest.mark.parametrize("ranks, stages", [(1, "2,3"), (4, "2,4")])
def test_measured_beside_formula_and_simulator(ranks, stages, tmp_path):
    file = tmp_path / "bubbles.json"
    job = run_job(ranks, ["-m", "mpipar.bench", "pipeline", "--stages", stages, "--micro-batches", "4", "--stage-delay", "5",
                          "--runs", "1", "--json", file, "--gantt"], timeout=120)
    assert job.returncode == 0, job.output
    report = json.loads(file.read_text())
    assert report["stages_are"] == ("threads" if ranks == 1 else "ranks") and len(report["results"]) == 2 * 8
    for row in report["results"]:
        assert row["simulated"] - 0.02 < row["bubble"] < 0.9
        if row["formula"] is not None:
            assert row["formula"] == pytest.approx(row["simulated"], abs=1e-9)
        assert row["simulated_of_ideal"] == pytest.approx(row["simulated"] / (1 - row["simulated"]))
        assert row["utilisation"] == pytest.approx(1 - row["bubble"]) and 0.5 < row["utilisation_ratio"] < 1.2
        assert (row["of_1f1b"], row["simulated_of_1f1b"]) == (1, 1) or row["schedule"] != "1f1b"
    assert "of 1f1b's" in job.stdout and "rank 0 |" in job.stdout and "formula" in job.stdout


@pytest.mark.parametrize("ranks, arguments, words", [
    (1, ["--schedules", "2f2b"], "valid: naive, gpipe"), (1, ["--stage-delay", "0"], "above 0"),
    (2, ["--stages", "3"], "it can be [1, 2]"), (1, ["--stages", "x"], "--stages"), (1, ["--json", "/none/x"], "no folder"),
])
def test_user_errors(ranks, arguments, words):
    job = run_job(ranks, ["-m", "mpipar.bench", "pipeline", *arguments])
    assert job.returncode == 2 and words in job.output and "Traceback" not in job.output, job.output
