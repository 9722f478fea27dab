"""`python -m mpipar.bench gemm`: the products it compares are the same product; what it refuses."""

import json

import numpy as np
import pytest
import threadpoolctl

from mpipar.bench import gemm
from mpipar.bench.__main__ import main
from mpipar.kernels.gemm_bfloat16 import unit
from mpipar.kernels.settings import settings

SMALL = ["gemm", "--shapes", "16x24x40", "--runs", "2"]


@pytest.fixture(autouse=True)
def _threads(monkeypatch):
    before = settings.threads
    monkeypatch.setattr(gemm, "REPEAT_MOST", 2)
    with threadpoolctl.threadpool_limits(None):
        yield
    settings.threads = before


@pytest.mark.parametrize("against", ["blas", "one-thread", "gelu"])
def test_table_and_file(tmp_path, capsys, against):
    path = tmp_path / "gemm.json"
    assert main([*SMALL, "--against", against, "--threads", "2", "--form", "all", "--json", str(path)]) == 0
    shown, report = capsys.readouterr().out, json.loads(path.read_text())
    assert gemm.AGAINST[against] in shown and len(report["results"]) == 4
    for row in report["results"]:
        assert row["error"] <= 1e-5 and len(row["seconds"]) == 2 and row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
    assert settings.threads == 2


def test_bfloat16_against_float32(capsys):
    assert main([*SMALL, "--dtype", "bfloat16", "--against", "float32"]) == 0
    assert f"bfloat16 by {unit()}" in capsys.readouterr().out
    for wrong in (["--dtype", "bfloat16"], ["--against", "float32"]):
        with pytest.raises(SystemExit) as end:
            main([*SMALL, *wrong])
        assert end.value.code == 2 and "bfloat16 against float32" in capsys.readouterr().err


def test_a_wrong_product_is_no_result(monkeypatch):
    """Negative control: products that differ end the benchmark."""
    monkeypatch.setattr(gemm, "gemm", lambda a, b, out: np.matmul(a, b, out=out).__iadd__(1.0))
    with pytest.raises(AssertionError, match="differ"):
        main(SMALL)


def test_one_thread_against_itself_is_refused(capsys):
    with pytest.raises(SystemExit) as end:
        main([*SMALL, "--against", "one-thread"])
    assert end.value.code == 2 and "--threads" in capsys.readouterr().err
