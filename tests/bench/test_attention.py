"""`python -m mpipar.bench attention`: its table and file, and what it refuses. No speed is asserted."""

import json

import pytest

from mpipar.bench.__main__ import main
from mpipar.kernels.settings import settings

SMALL = ["attention", "--heads", "2", "--width", "8", "--runs", "2"]


@pytest.fixture(autouse=True)
def _threads():
    before = settings.threads
    yield
    settings.threads = before


def test_table_and_file(tmp_path, capsys):
    path = tmp_path / "attention.json"
    assert main([*SMALL, "--seq", "16,512", "--json", str(path)]) == 0
    shown, report = capsys.readouterr().out, json.loads(path.read_text())
    assert report["hardware"] in shown and [row["tokens"] for row in report["results"]] == [16, 512]
    for row in report["results"]:
        assert len(row["ours"]["forward"]) == len(row["ours"]["backward"]) == 2
        seconds = sorted(map(sum, zip(*row["ours"].values())))
        low, high = (7 * 2 * row["tokens"] ** 2 * 8 / second / 1e9 for second in reversed(seconds))
        assert low <= row["gflops"] <= high
    assert report["results"][1]["extra_bytes"] < 512 * 512 * 4 / 2  # no T x T array


@pytest.mark.parametrize("extra, word", [(["--runs", "0"], "--runs"), (["--seq", "0"], "--seq"), (["--seq", "a"], "--seq")])
def test_refusals(capsys, extra, word):
    with pytest.raises(SystemExit) as end:
        main([*SMALL, *extra])
    assert end.value.code == 2 and word in capsys.readouterr().err


@pytest.mark.torch
def test_against_torch(tmp_path, capsys):
    pytest.importorskip("torch")
    assert main([*SMALL, "--seq", "16", "--against", "torch"]) == 0
    assert "PyTorch ms" in capsys.readouterr().out
