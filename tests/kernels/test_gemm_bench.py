"""`python -m mpipar.bench gemm`: what it prints and writes, and what it refuses. No speed is asserted."""

import json

import pytest
import threadpoolctl

from mpipar.bench.__main__ import main
from mpipar.kernels.settings import settings


@pytest.fixture(autouse=True)
def _threads():
    before = settings.threads
    with threadpoolctl.threadpool_limits(None):
        yield
    settings.threads = before


def test_table_and_file(tmp_path, capsys):
    path = tmp_path / "gemm.json"
    arguments = ["gemm", "--shapes", "8x9x10,3x3x3", "--form", "all", "--runs", "3", "--json", str(path)]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    report = json.loads(path.read_text())
    assert report["hardware"] in shown and report["blas"] in shown and "3 alternated runs" in shown
    assert [result["form"] for result in report["results"]] == ["nn", "nn", "nt", "nt", "tn", "tn", "tt", "tt"]
    for result in report["results"]:
        assert len(result["seconds"]) == 3 and result["ratio_low"] <= result["ratio"] <= result["ratio_high"]
    assert f"geometric mean of the ratios: {report['geometric_mean']:.3f}" in shown


@pytest.mark.parametrize("arguments, words", [
    (["gemm", "--shapes", "3x4"], "valid: positive sizes"),
    (["gemm", "--shapes", "3x0x4"], "valid: positive sizes"),
    (["gemm", "--runs", "0"], "valid values: integers from 1"),
    (["gemm", "--threads", "0"], "valid values: integers from 1"),
    (["gemm", "--form", "xx"], "invalid choice"),
    (["nothing"], "invalid choice"),
    ([], "required"),
])
def test_what_does_not_fit_is_one_line(arguments, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err.splitlines()[-1]
