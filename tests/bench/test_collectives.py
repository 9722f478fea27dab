"""`mpipar.bench collectives`: its table, file, fitted lines, and what it refuses. No speed is asserted."""

import json

import numpy as np
import pytest

from mpipar.bench.__main__ import main
from mpipar.bench.against_gloo import OPERATIONS
from mpipar.bench.collectives import SHARES, fit
from tests.helpers.jobs import run_job

SMALL = ["--sizes", "8,4096", "--runs", "4"]


def test_fit_finds_a_line_and_its_error():
    sizes = np.array([8, 1e3, 1e6])
    found = fit(sizes, 3e-6 + sizes * 2e-10)
    assert found["alpha_s"] == pytest.approx(3e-6) and found["beta_s_per_byte"] == pytest.approx(2e-10)
    assert found["largest_error"] < 1e-9
    falling = fit([1, 2, 3], [3.0, 2.0, 1.0])
    assert falling["beta_s_per_byte"] == 0 and falling["largest_error"] > 0.3


def test_table_file_and_ladder(tmp_path):
    path = tmp_path / "collectives.json"
    job = run_job(2, ["-m", "mpipar.bench", "collectives", *SMALL, "--ladder", "--json", str(path)], timeout=120)
    assert job.returncode == 0, job.output
    report = json.loads(path.read_text())
    assert report["ranks"] == 2 and len(report["results"]) == 2 * len(SHARES) == 2 * len(report["lines"])
    for row in report["results"]:
        assert row["operation"] in job.stdout and 0 < row["best_s"] <= row["median_s"]
        assert row["bus_gbs"] == pytest.approx(row["link_bytes"] / row["median_s"] / 1e9)
        if "lecture_gbs" in row:  # 1.5.1: 2 S (P - 1) / (P t); 1.5.2: S (P - 1) / (P t)
            factor = 2 if row["operation"] == "all_reduce" else 1
            assert row["lecture_gbs"] == pytest.approx(factor * row["bytes"] / (2 * row["median_s"]) / 1e9)
    assert {row["algorithm"] for row in report["ladder"]} > {"MPI", "ring", "tree"}


@pytest.mark.parametrize("extra, word", [(["--operations", "gossip"], "all_reduce"), (["--sizes", "0"], "--sizes"),
                                         ([], "mpirun -np 2"), (["--runs", "-1"], "--runs"),
                                         (["--against", "torch", "--operations", "send"], "reduce_scatter"),
                                         (["--against", "torch", "--ranks", "1"], "at least 2 ranks"),
                                         (["--against", "torch", "--pairs", "0"], "1 pair")])
def test_refusals(capsys, extra, word):
    with pytest.raises(SystemExit) as end:
        main(["collectives", *extra])
    assert end.value.code == 2 and word in capsys.readouterr().err


@pytest.mark.torch
def test_beside_gloo(tmp_path, capsys):
    path = tmp_path / "gloo.json"
    main(["collectives", "--against", "torch", "--pairs", "2", *SMALL, "--json", str(path)])
    report, printed = json.loads(path.read_text()), capsys.readouterr().out
    rows = report["results"]
    assert [(row["operation"], row["bytes"]) for row in rows] == [(name, size) for name in OPERATIONS for size in (8, 4096)]
    assert all(row["ratio_range"][0] <= row["ratio"] <= row["ratio_range"][1] and row["operation"] in printed for row in rows)


@pytest.mark.torch
def test_under_mpirun_nothing_is_started():
    job = run_job(2, ["-m", "mpipar.bench", "collectives", "--against", "torch"])
    assert job.returncode == 2 and "leave mpirun out" in job.output and "Traceback" not in job.output
