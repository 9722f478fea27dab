"""Overlap in whole jobs: what the command prints and writes, how jobs end in which a rank or its helper fails."""

import json

import pytest

from tests.helpers.jobs import run_job

TINY = ["-m", "mpipar.train", "--layers", "4", "--dim", "32", "--heads", "4", "--seq", "16", "--vocab", "64", "--data", "random",
        "--global-batch", "16"]


def program(name, ranks=2, **options):
    job = run_job(ranks, ["-m", "tests.parallel.overlap_programs", name], timeout=60, **options)
    assert job.returncode is not None and not job.left_behind, job.output
    return job


@pytest.mark.parametrize("name, words", [("helper raises", "boom in the helper"), ("raises in backward", "boom in backward")])
def test_a_failure_ends_the_job(name, words):
    job = program(name, ranks=3)
    assert job.returncode == 1 and job.output.count("Traceback") == 1 and job.seconds < 45, job.output
    assert f"[rank 1] RuntimeError: {words}" in job.output


def test_a_rank_that_leaves_early_is_named():
    job = program("leaves early")
    assert job.returncode == 1 and job.seconds < 45, job.output
    assert "waits in all_reduce of group dp for rank 1, which left the program early" in job.output


@pytest.mark.parametrize("fault", ["raise:rank=1,step=2", "kill:rank=1,step=2", "raise:rank=0,step=2"])
def test_a_fault_ends_the_command(fault):
    job = run_job(2, [*TINY, "--steps", "4", "--overlap"], env={"MPIPAR_FAULT": fault}, timeout=60)
    assert job.returncode not in (0, None) and not job.left_behind and job.seconds < 45, job.output


def test_a_helper_without_a_core_sleeps():
    """With as many ranks as cores it may not spin: the threads that compute need them."""
    import os

    ranks = max(2, len(os.sched_getaffinity(0)))
    words = program("waits asleep", ranks=min(ranks, 4), env={"MPIPAR_RANKS_PER_NODE": "1"} if ranks > 4 else {}).stdout.split()
    total = sum(range(1, min(ranks, 4) + 1))
    if words[0] == "PatientComm":
        assert float(words[-1]) < 0.3, words
    else:
        assert ranks > 4
    assert [float(words[2]), float(words[3])] == [total, total]


def test_the_command_says_what_it_does(tmp_path):
    events = {}
    runs = {"off": ["--no-overlap"], "on": ["--overlap", "--bucket-mb", "0.04"], "16 bits": ["--compress", "bfloat16", "--overlap"]}
    for name, flags in runs.items():
        file = tmp_path / "metrics"
        job = run_job(2, [*TINY, "--steps", "2", *flags, "--metrics", str(file)], timeout=60)
        assert job.returncode == 0 and not job.left_behind, job.output
        events[name] = [json.loads(line) for line in file.read_text().splitlines()], job.stdout
    starts, ends = ({name: found[0][which] for name, found in events.items()} for which in (0, -1))
    assert [starts[name]["overlap"] for name in events] == [False, True, True] and starts["on"]["bucket_mb"] == 0.04
    assert starts["16 bits"]["bucket_mb"] == 4 and starts["off"]["bucket_mb"] is None
    assert ends["on"]["parameters_sha256"] == ends["off"]["parameters_sha256"] != ends["16 bits"]["parameters_sha256"]
    assert [ends[name]["bytes_sent"]["dp"] for name in events] == [213_760, 213_760, 106_880]
    assert "dp: 1 all-reduce of the gradients" in events["off"][1] and "106,880 bytes on the fullest rank" in events["16 bits"][1]
    assert "dp: 4 all-reduces of the gradients (rank 0's), during the last backward pass" in events["on"][1]


def test_stages_that_sleep():
    """They tell of no blocks: the buckets go when the stage is done."""
    job = run_job(4, [*TINY, "--steps", "2", "--overlap", "--pp", "2", "--dp", "2", "--schedule", "zero-bubble", "--stage-delay", "1"], timeout=60)
    assert job.returncode == 0 and not job.left_behind, job.output


def test_without_several_threads_it_is_refused():
    one = {"MPI4PY_RC_THREAD_LEVEL": "serialized"}
    job = run_job(2, [*TINY, "--steps", "1", "--overlap"], env=one, timeout=60)
    assert job.returncode == 2 and job.output.count("mpipar: error:") == 1 and "THREAD_MULTIPLE" in job.output, job.output
    assert "Traceback" not in job.output
    assert run_job(2, [*TINY, "--steps", "1"], env={**one, "MPIPAR_RANKS_PER_NODE": "1"}, timeout=60).returncode == 0


def test_deterministic_reaches_the_trainer(tmp_path):
    sums = set()
    for ranks, m in ((1, 4), (2, 2)):
        file = tmp_path / "metrics"
        job = run_job(ranks, [*TINY, "--steps", "3", "--dp", str(ranks), "--micro-batches", str(m), "--deterministic", "--metrics", str(file)],
                      timeout=60)
        assert job.returncode == 0, job.output
        sums.add(json.loads(file.read_text().splitlines()[-1])["parameters_sha256"])
    assert len(sums) == 1
