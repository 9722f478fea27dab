"""`python -m mpipar.bench start`: a cold and a warm start in turn, and the kernels they left."""

import json

import pytest

from mpipar.bench.__main__ import main


@pytest.mark.slow
def test_cold_then_warm(tmp_path, capsys):
    path = tmp_path / "start.json"
    assert main(["start", "--ranks", "2", "--runs", "1", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["cold"][0] > report["warm"][0] > 0 and report["kernels"][0] > 20
    assert "mpipar, warm" in capsys.readouterr().out


def test_refusal(capsys):
    with pytest.raises(SystemExit) as end:
        main(["start", "--ranks", "0"])
    assert end.value.code == 2 and "--ranks" in capsys.readouterr().err
