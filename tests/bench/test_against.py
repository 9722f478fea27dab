"""`python -m mpipar.bench train --against ...`: both programs compute the same, and what has no peer is refused."""

import json
import subprocess
import sys

import numpy as np
import pytest

from mpipar.bench.__main__ import main
from mpipar.bench.against import one_rank, same_losses
from mpipar.commands.config import parse
from tests.helpers.jobs import ROOT, environment, run_job

GPT = ("--layers", "4", "--dim", "32", "--seq", "16", "--global-batch", "8")
MLP = ("--model", "mlp", "--layers", "4", "--dim", "32", "--global-batch", "16")


def compare(tmp_path, against, ranks, *options):
    """The report of one pair of short runs."""
    file = tmp_path / "report.json"
    command = ["-m", "mpipar.bench", "train", "--against", against, "--ranks", ranks, "--measure", 2, "--pairs", 1, "--json", file, *options]
    job = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=110, env=environment(), cwd=ROOT)
    assert job.returncode == 0, job.stdout + job.stderr
    assert "largest relative difference" in job.stdout
    return json.loads(file.read_text())


def test_one_rank_does_the_same_work(tmp_path):
    report = compare(tmp_path, "one-rank", 2, *GPT, "--pp", "2", "--schedule", "interleaved")
    assert report["losses"]["largest_difference"] < 1e-6 and report["losses"]["steps"] == 6
    assert report["theirs"][0]["ranks"] == 1 and report["theirs"][0]["threads_per_rank"] == 1
    ratio = report["theirs"][0]["step_s"] / report["ours"][0]["step_s"]
    assert report["speed_ratio"] == pytest.approx(ratio) and "options" in report


def test_the_flags_of_one_rank():
    config = parse([*GPT, "--pp", "2", "--schedule", "zb-v", "--layers-per-stage", "1,1,1,1", "--vocab", "99", "--no-tied",
                    "--bucket-mb", "2", "--overlap"])
    alone = parse(one_rank(config.resolved(2))).resolved(1)
    assert (alone.dp, alone.tp, alone.pp, alone.zero, alone.schedule, alone.layers_per_stage) == (1, 1, 1, 0, "1f1b", None)
    assert (alone.vocab, alone.tied, alone.global_batch, alone.micro_batches, alone.layers) == (99, False, 8, 4, 4)
    assert alone.overlap is None and alone.bucket_mb is None
    alone.check()


LAYOUTS = [
    (GPT, 1, ()), (GPT, 2, ("--dp", "2", "--micro-batches", "2")), (GPT, 2, ("--dp", "2", "--zero", "3")),
    (GPT, 2, ("--tp", "2", "--vocab", "259", "--no-tied")), (GPT, 2, ("--tp", "2", "--dtype", "float64")), (GPT, 2, ("--pp", "2")),
    (GPT, 2, ("--pp", "2", "--schedule", "gpipe", "--layers-per-stage", "3,1")), (GPT, 2, ("--pp", "2", "--schedule", "interleaved")),
    (GPT, 2, ("--pp", "2", "--schedule", "zb-v")), (MLP, 2, ("--tp", "2")), (MLP, 2, ("--tp", "2", "--layers", "3")),
    (MLP, 2, ("--pp", "2", "--micro-batches", "8")), (MLP, 2, ("--dp", "2", "--zero", "3")), (GPT, 4, ("--pp", "4", "--micro-batches", "8")),
]


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("model, ranks, options", LAYOUTS)
def test_pytorch_computes_the_same(tmp_path, model, ranks, options):
    """Same initial values, batches, learning rates, clipping and decay: the same losses up to rounding, step by step."""
    report = compare(tmp_path, "torch", ranks, *model, *options)
    assert report["losses"]["largest_difference"] < (1e-10 if "float64" in options else 2e-6)
    assert report["losses"]["first"][0] != pytest.approx(report["losses"]["last"][0], rel=1e-4)  # it trains
    assert len(report["theirs"][0]["peak_rss_bytes"]) == ranks


def test_another_computation_is_noticed(capsys):
    """Negative control."""
    assert same_losses([2.0, 1.0, 0.5], [2.0, 1.0], "X")["last"] == [1.0, 1.0]
    assert "losses of mpipar and X" in capsys.readouterr().out
    for other in (2.01, np.nan):
        with pytest.raises(RuntimeError, match="do not compute the same"):
            same_losses([2.0, 1.0], [other, 1.0], "X")


@pytest.mark.parametrize("against, ranks, options, words", [
    ("torch", 4, ("--dp", "2", "--tp", "2"), ["no layout dp=2 x tp=2", "--dp N with --zero 0 or 3"]),
    ("torch", 2, ("--zero", "1"), ["dp=2 with --zero 1", "--dp N with --zero 0 or 3"]),
    ("torch", 2, ("--pp", "2", "--schedule", "zero-bubble"), ["no --schedule zero-bubble", "gpipe, 1f1b, interleaved, zb-v"]),
    ("torch", 2, ("--pp", "2", "--micro-batches", "3"), ["can be one of [1, 2, 4, 8]"]),
    ("torch", 2, ("--dropout", "0.1"), ["no --dropout 0.1"]),
    ("torch", 2, ("--dtype", "bfloat16"), ["float32 or float64"]),
    ("torch", 2, ("--optimizer", "sgd"), ["valid is adamw"]),
    ("torch", 2, ("--compress", "bfloat16"), ["no --compress"]),
    ("torch", 2, ("--pp", "4"), ["are 4 ranks: --ranks 2 is not"]),
    ("torch-compile", 2, ("--tp", "2"), ["data parallelism alone"]),
    ("one-rank", 1, (), ["at least 2"]),
    ("one-rank", 2, ("--pp", "2", "--stage-delay", "5"), ["leave --stage-delay out"]),
])
def test_what_has_no_peer_is_refused(capsys, against, ranks, options, words):
    with pytest.raises(SystemExit) as end:
        main(["train", "--against", against, "--ranks", str(ranks), *GPT, *options])
    error = capsys.readouterr().err
    assert end.value.code == 2 and len(error.splitlines()) == 1 and all(word in error for word in words), error


def test_under_mpirun_it_is_refused():
    job = run_job(2, ["-m", "mpipar.bench", "train", "--against", "one-rank", "--ranks", "2", *GPT])
    assert job.returncode == 2 and job.output.count("leave mpirun out") == 1, job.output
