"""`python -m mpipar.bench ladder`: its formulas, its output, what it refuses. No speed is asserted."""

import json

import numpy as np
import pytest
import threadpoolctl

from mpipar.bench import ladder, roofline
from mpipar.bench.__main__ import main
from mpipar.bench.report import integers, quartiles, sizes, spread
from mpipar.kernels.settings import settings

SMALL = ["ladder", "--shape", "40x33x48", "--tile", "16", "--triad-mib", "1", "--threads", "1"]


@pytest.fixture(autouse=True)
def _threads(monkeypatch):
    before = settings.threads
    monkeypatch.setattr(ladder, "REPEAT_MOST", 2)
    with threadpoolctl.threadpool_limits(None):
        yield
    settings.threads = before


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_table_and_file(tmp_path, capsys, dtype):
    path = tmp_path / "ladder.json"
    sweep = ["--shards", "1,2,5", "--micro-batches", "40,7"]
    assert main([*SMALL, *sweep, "--runs", "2", "--dtype", dtype, "--json", str(path)]) == 0
    shown, report = capsys.readouterr().out, json.loads(path.read_text())
    assert report["hardware"] in shown and "2 rounds" in shown
    names = [row["name"] for row in report["steps"]]
    assert len(names) == 7 and names[0] == "triple loop" and names[-1] == "packed panels"
    size = np.dtype(dtype).itemsize
    for row in report["steps"]:
        assert row["name"] in shown and len(row["gflops"]) == 2 and min(row["gflops"]) > 0
        assert row["intensity"] * row["bytes"] == pytest.approx(2 * 40 * 33 * 48)
        limit = min(report["peak_gflops"], row["intensity"] * report["bandwidth_gbs"])
        assert row["bound_gflops"] == pytest.approx(limit)
    assert [(row["m"], row["degree"], row["columns"]) for row in report["shards"]] == [
        (40, 1, 48), (40, 2, 24), (40, 5, 10), (7, 1, 48), (7, 2, 24), (7, 5, 10)]
    assert [row["tiles"] for row in report["shards"]] == [9, 6, 3, 3, 2, 1]
    assert report["shards"][0]["efficiency"] == 1  # it is the whole product
    assert report["peak_gflops"] == max(report["peaks_gflops"]) and len(report["peaks_gflops"]) == 4
    assert f"TILE/{size} = {16 / size:.1f} FLOP/byte" in shown
    assert "span 2K = 66 FLOP, parallelism MN = 1920" in shown
    assert 1 << 19 < report["triad_bytes"] <= 1 << 20


def test_the_whole_product_is_measured_where_no_shard_is_it(tmp_path):
    path = tmp_path / "ladder.json"
    assert main([*SMALL, "--runs", "1", "--shards", "2", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["shards"]
    assert [row["m"] for row in rows] == [40, 10, 2, 1]  # M, M/4, M/16, M/64 and at least one
    assert all(row["columns"] == 24 and row["efficiency"] > 0 for row in rows)


def test_a_wrong_step_is_not_measured(monkeypatch):
    """Negative control: a step that leaves out the last row of the result is found before it is timed."""
    function, _ = ladder.STEPS["tiled"]

    def wrong(a, b, out, *, tile):
        out.fill(0)
        function(a[:-1], b, out[:-1], tile=tile)

    monkeypatch.setitem(ladder.STEPS, "tiled", (wrong, True))
    with pytest.raises(AssertionError, match="tiled: differs from the packed product"):
        main([*SMALL, "--runs", "1"])


def test_traffic_of_the_lectures_kernel():
    """Section 3.2: M=1024, K=1024, N=512, TILE=32: 512 blocks of 256 KiB, 8 FLOP/byte, and the result."""
    moved = roofline.product_bytes(1024, 1024, 512, 4, tile=32)
    assert moved == 512 * 256 * 1024 + 4 * 1024 * 512
    assert roofline.tile_intensity(32, 4) == 8  # TILE/4
    assert 2 * 1024 * 1024 * 512 / (moved - 4 * 1024 * 512) == 8
    assert roofline.roofline(8, 19500, 2039) == 8 * 2039  # an A100: memory is the limit, at 84 % of its peak
    assert roofline.roofline(20, 19500, 2039) == 19500


def test_traffic_of_plain_loops():
    """Two reads for each multiplication, and each element of the result once."""
    assert roofline.product_bytes(5, 7, 3, 4, tile=1) == 4 * (2 * 5 * 7 * 3 + 5 * 3)


@pytest.mark.parametrize("m, megabytes, intensity", [(64, 17.6, 61), (8192, 117, 1174)])
def test_intensities_of_section_4_4(m, megabytes, intensity):
    moved = roofline.product_bytes(m, 4096, 2048, 2)
    assert moved / 1e6 == pytest.approx(megabytes, rel=0.01)
    assert 2 * m * 4096 * 2048 / moved == pytest.approx(intensity, rel=0.01)


def test_tiles_against_processors_of_the_lecture():
    """Section 3.2: 512 tiles for 108 processors, then 32 of them with 64 rows, which leaves 70 % idle."""
    whole, small = (ladder.sweep_row(m, 1024, 512, 1, 32, 108, 4) for m in (1024, 64))
    assert (whole["tiles"], whole["waves"]) == (512, 5) and whole["busy"] == 512 / 540
    assert (small["tiles"], small["waves"]) == (32, 1) and small["busy"] == pytest.approx(0.296, abs=1e-3)
    shard = ladder.sweep_row(64, 1024, 2048, 3, 32, 108, 4)
    assert shard["columns"] == 683 and shard["tiles"] == 2 * 22  # the widest of three shards


def test_triad_size_follows_the_caches_and_the_memory(monkeypatch):
    host = roofline.host()
    small = type(host)(**{**vars(host), "l1": 1 << 15, "l2": 1 << 20, "l3": 30 << 20})
    monkeypatch.setattr(roofline, "host", lambda: small)
    monkeypatch.setattr(roofline, "_free_memory", lambda: 8 << 30)
    assert roofline._triad_bytes() == 4 * ((1 << 15) + (1 << 20) + (30 << 20))
    monkeypatch.setattr(roofline, "_free_memory", lambda: 400 << 20)
    assert roofline._triad_bytes() == 100 << 20


def test_helpers_of_the_reports():
    assert quartiles([5.0]) == (5.0, 5.0) and quartiles([1, 2, 3, 4, 5]) == (2, 4)
    assert spread([1.0, 1.0]) == "1.00..1.00" and spread([10.0, 20.0]) == "12.5..17.5"
    assert integers("--x", "1,8") == [1, 8] and sizes("--x", "2x3", 2) == (2, 3)


@pytest.mark.parametrize("arguments, words", [
    (["--shape", "3x4"], "3 positive sizes"),
    (["--shape", "0x4x4"], "3 positive sizes"),
    (["--tile", "0"], "valid values: integers from 1"),
    (["--runs", "0"], "--runs is 0; valid values: integers from 1"),
    (["--cores", "0"], "--cores is 0"),
    (["--triad-mib", "0"], "--triad-mib is 0"),
    (["--shards", "1,x"], "divided by commas"),
    (["--shards", "1,49"], "integers from 1 to 48"),
    (["--micro-batches", "0"], "valid values: integers from 1"),
])
def test_what_does_not_fit_is_one_line(arguments, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*SMALL, *arguments])
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err.splitlines()[-1]
