"""Throughput and the metrics file."""

import json

import pytest

from mpipar.engine.metrics import MetricsFile, Throughput, check_writable


def test_throughput_is_the_median_after_the_warm_up_steps():
    meter = Throughput(512, skip=3)
    for seconds in [10.0] * 3 + [1.0] * 7:
        meter.add(seconds)
    assert meter.median_rate() == 512.0 and meter.excluded == 3


def test_short_runs_still_have_a_median():
    meter = Throughput(10)
    assert meter.median_rate() == 0.0
    meter.add(2.0)
    assert meter.median_rate() == 5.0 and meter.excluded == 0


def test_floats_keep_their_precision(tmp_path):
    path = tmp_path / "metrics"
    file = MetricsFile(str(path), active=True)
    file.write("step", loss=1 / 3)
    file.close()
    assert json.loads(path.read_text()) == {"event": "step", "loss": 1 / 3}
    MetricsFile(str(path), active=False).write("step", loss=2.0)
    assert json.loads(path.read_text())["loss"] == 1 / 3
    for bad in (tmp_path / "no" / "file", tmp_path):
        with pytest.raises(ValueError, match="can't be written"):
            check_writable(str(bad))
    check_writable(str(path)), check_writable(str(tmp_path / "new")), check_writable(None)
    assert not (tmp_path / "new").exists()
