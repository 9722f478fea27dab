"""`python -m mpipar.bench fusion`: what it prints and writes, and what it refuses. No speed is asserted."""

import json

import numpy as np
import pytest
import threadpoolctl

from mpipar.bench import fusion
from mpipar.bench.__main__ import main
from mpipar.kernels.settings import settings

SMALL = ["fusion", "--elements", "1000,30", "--image", "2x3x8x9", "--kernel", "4x3x3", "--runs", "2",
         "--threads", "1"]


@pytest.fixture(autouse=True)
def _threads(monkeypatch):
    before = settings.threads
    monkeypatch.setattr(fusion, "REPEAT_BYTES", 1 << 16)
    with threadpoolctl.threadpool_limits(None):
        yield
    settings.threads = before


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_tables_and_file(tmp_path, capsys, dtype):
    path = tmp_path / "fusion.json"
    assert main([*SMALL, "--dtype", dtype, "--json", str(path)]) == 0
    shown, report = capsys.readouterr().out, json.loads(path.read_text())
    size = np.dtype(dtype).itemsize
    for words in (report["hardware"], "by the bytes 1.80", "0.333", "0.600"):
        assert words in shown
    assert [pair["elements"] for pair in report["loops"]] == [1000, 30]
    first = report["loops"][0]["forms"]
    assert first["unfused"]["bytes"] == 9000 * size and first["fused"]["bytes"] == 5000 * size
    forms = report["convolution"]["forms"]
    assert list(forms) == ["im2col", "implicit"]
    assert forms["im2col"]["patch_bytes"] == size * 2 * 27 * 72
    assert forms["implicit"]["patch_bytes"] == size * 27 * 72
    assert forms["im2col"]["flops"] == 2 * 2 * 4 * 72 * 27
    for form in (*first.values(), *forms.values()):
        assert len(form["seconds"]) == 2 and min(form["seconds"]) > 0


def test_wrong_results_are_not_measured(monkeypatch):
    """Negative controls: a fused loop without its last addition, a convolution with too little padding."""
    monkeypatch.setattr(fusion, "add_mul_add", lambda a, b, c, d, out: np.multiply(a + b, c, out=out))
    with pytest.raises(AssertionError, match="fused loop"):
        main(SMALL)
    monkeypatch.undo()
    right = fusion.convolution_forward
    monkeypatch.setattr(fusion, "convolution_forward", lambda x, w, out, *, padding, method: right(
        x if method == "im2col" else np.roll(x, 1, axis=2), w, out, padding=padding, method=method))
    with pytest.raises(AssertionError, match="convolutions differ"):
        main(SMALL)


@pytest.mark.parametrize("arguments, words", [
    (["--elements", "0"], "valid values: integers from 1"),
    (["--image", "2x3x4"], "4 positive sizes"),
    (["--kernel", "4x3"], "3 positive sizes"),
    (["--kernel", "4x30x3"], "does not fit an image"),
    (["--padding", "-1"], "a number >= 0"),
    (["--runs", "0"], "valid values: integers from 1"),
])
def test_what_does_not_fit_is_one_line(arguments, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*SMALL, *arguments])
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err.splitlines()[-1]
