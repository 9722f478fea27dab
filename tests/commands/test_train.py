"""`mpipar.train` as a user runs it: what it prints and writes, and how it fails."""

import json
import os
import re
import signal
import time

import pytest

from mpipar.kernels.gemm_pieces import has_amx
from tests.helpers.jobs import Running, run_job

TINY = ["--layers", "4", "--dim", "32", "--heads", "4", "--seq", "16", "--vocab", "64", "--data", "random", "--dtype", "float64",
        "--global-batch", "32", "--dropout", "0"]


def train(ranks, *arguments, **options):
    return run_job(ranks, ["-m", "mpipar.train", *TINY, *map(str, arguments)], **{"timeout": 120, **options})


def events(path, kind):
    return [e for e in map(json.loads, path.read_text().splitlines()) if e["event"] == kind]


def test_metrics_file_and_plan(tmp_path):
    file = tmp_path / "metrics"
    job = train(4, "--tp", 2, "--pp", 2, "--steps", 6, "--micro-batches", 4, "--metrics", file)
    assert job.returncode == 0 and not job.left_behind, job.output
    start, steps, end = events(file, "start")[0], events(file, "step"), events(file, "end")[0]
    assert (start["dp"], start["tp"], start["pp"], start["ranks"], start["nodes"]) == (1, 2, 2, 4, 1)
    assert start["layers"] == 4 and start["threads_per_rank"] == 1 and "numpy" in start["versions"]
    assert [s["step"] for s in steps] == list(range(1, 7))
    assert {"loss", "grad_norm", "lr", "step_time_s", "tokens_per_s"} <= steps[0].keys()
    assert all(abs(s["tokens_per_s"] * s["step_time_s"] - 512) < 1e-6 for s in steps)  # global, whatever tp and pp
    assert end["steps"] == 6 and end["parameters"] == 53_440 and len(end["parameters_sha256"]) == 64
    assert len(end["peak_rss_bytes"]) == 4 and end["warmup_steps_excluded"] == 3
    assert end["bytes_sent"]["dp"] == 0 and end["bytes_sent"]["pp"] == 4 * 8 * 16 * 32 * 8  # M messages of this rank
    assert 0 < end["bubble"]["measured"] < 1 and end["bubble"]["predicted"] == pytest.approx(1 / 5)
    for words in ("tp: 2 all-reduces forward and 2 backward", "pp: 8 messages", "embedding + blocks 0-1", "blocks 2-3 + head"):
        assert words in job.stdout


def test_one_checksum_at_step_0_for_every_layout(tmp_path):
    sums = set()
    for ranks, arguments in ((1, []), (2, ["--tp", 2]), (2, ["--pp", 2]), (4, ["--tp", 4]), (4, ["--tp", 2, "--pp", 2])):
        file = tmp_path / "metrics"
        job = train(ranks, *arguments, "--steps", 0, "--metrics", file)
        assert job.returncode == 0, job.output
        sums.add(events(file, "end")[0]["parameters_sha256"])
    assert len(sums) == 1


def test_eight_ranks_print_each_step_once():
    job = train(8, "--steps", 10, "--tp", 2, "--pp", 2)
    assert job.returncode == 0, job.output
    assert sum(line.startswith("step ") for line in job.stdout.splitlines()) == 10


def test_quiet_prints_nothing():
    job = train(2, "--steps", 2, "--quiet")
    assert job.returncode == 0 and job.output == ""


def test_mlp_on_text_falls(tmp_path):
    file = tmp_path / "metrics"
    job = run_job(2, ["-m", "mpipar.train", "--model", "mlp", "--dim", "64", "--layers", "3", "--tp", "2", "--steps", "30",
                      "--lr", "1e-2", "--warmup", "2", "--metrics", str(file)], timeout=120)
    assert job.returncode == 0, job.output
    steps = events(file, "step")
    assert steps[-1]["loss"] < 0.5 * steps[0]["loss"] and "samples_per_s" in steps[0]
    assert events(file, "end")[0]["eval_loss"] < 0.5 * steps[0]["loss"]


@pytest.mark.smoke
def test_text_is_learned_and_generated(tmp_path):
    file = tmp_path / "metrics"
    job = run_job(2, ["-m", "mpipar.train", "--layers", "2", "--dim", "64", "--seq", "32", "--steps", "40", "--pp", "2",
                      "--lr", "3e-3", "--eval-every", "20", "--generate", "20", "--metrics", str(file)], timeout=120)
    assert job.returncode == 0, job.output
    steps, evaluations = events(file, "step"), events(file, "eval")
    assert steps[-1]["loss"] < steps[0]["loss"] - 1.5
    assert [e["step"] for e in evaluations] == [20, 40] and evaluations[1]["loss"] < evaluations[0]["loss"]
    assert "generated text" in job.stdout


def test_products_by_blas_give_the_same_loss(tmp_path):
    losses = []
    for gemm in ("numba", "blas"):
        file = tmp_path / gemm
        assert train(1, "--steps", 2, "--gemm", gemm, "--metrics", file).returncode == 0
        losses.append(events(file, "step")[-1]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_products_by_vectors_give_the_same_loss(tmp_path):
    losses = []
    for gemm in ("numba", "vector"):
        file = tmp_path / gemm
        job = run_job(1, ["-m", "mpipar.train", "--layers", "1", "--dim", "128", "--steps", "3", "--gemm", gemm, "--metrics", str(file)],
                      timeout=120)
        assert job.returncode == 0 and ("AMX" in job.stdout) == (gemm == "numba" and has_amx()), job.output
        losses.append([step["loss"] for step in events(file, "step")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert (losses[0] == losses[1]) != has_amx()  # the control: these products are large enough


@pytest.mark.parametrize("ranks,arguments,words", [
    (3, ["--tp", "3"], "tp can be one of [1, 2, 4]"),
    (3, ["--dp", "3"], "dp can be one of [1, 2, 4, 8, 16, 32]"),
    (4, ["--dp", "3", "--tp", "1"], "4"),
    (4, ["--tp", "3"], "tp"),
    (8, ["--pp", "8"], "4"),
    (2, ["--checkpoint", "1"], "--checkpoint does not exist yet"),
    (2, ["--zero", "4"], "--zero"),
    (2, ["--layer", "1"], "--layers"),
    (2, ["--metrics", "/none/file"], "no folder"),
    (2, ["--data", "/none.txt"], "can't be read"),
    (2, ["--micro-batches", "17"], "at most 16"),
    (2, ["--pp", "2", "--layers-per-stage", "3,2"], "4"),
    (2, ["--order", "dp,tp"], "order"),
])
def test_user_errors_are_one_line_and_code_2(ranks, arguments, words, tmp_path):
    job = train(ranks, "--metrics", tmp_path / "metrics", *arguments)
    lines = [line for line in job.output.splitlines() if line.strip()]
    assert job.returncode == 2 and not job.left_behind, job.output
    assert len(lines) == 1 and words in lines[0], job.output
    assert not (tmp_path / "metrics").exists()
    assert job.seconds < 15  # 2 s where as many cores are free as ranks; the ranks start one after the other on 2 cores


@pytest.mark.smoke
@pytest.mark.parametrize("fault,rank", [
    ("raise:rank=2,step=3", 2), ("raise:rank=1,point=data,step=2", 1), ("raise:rank=3,point=import", 3), ("exit:rank=0,step=2", 0),
])
def test_a_failing_rank_ends_the_job(fault, rank):
    job = train(4, "--steps", 50, env={"MPIPAR_FAULT": fault})
    assert job.returncode not in (0, None) and not job.left_behind
    assert f"[rank {rank}]" in job.stderr or "exit" in fault
    assert job.output.count("Traceback (most recent call last)") == ("raise" in fault)


def test_asked_to_stop_all_ranks_leave_together(tmp_path):
    file = tmp_path / "metrics"
    job = Running(2, ["-m", "mpipar.train", *TINY, "--steps", "100000", "--metrics", str(file)])
    for _ in range(600):
        if file.exists() and len(events(file, "step")) > 3:
            break
        time.sleep(0.1)
    os.kill(job.ranks()[1], signal.SIGTERM)  # one rank is asked, all leave
    done = job.finish(timeout=30)
    assert done.returncode == 0 and "asked to stop" in done.stdout and not done.left_behind, done.output
    assert events(file, "end")[0]["steps"] == events(file, "step")[-1]["step"]


def test_threads_are_the_cores_over_the_ranks(tmp_path):
    cores = len(os.sched_getaffinity(0))
    for ranks in (1, 2):
        file = tmp_path / f"metrics{ranks}"
        assert train(ranks, "--steps", 1, "--metrics", file).returncode == 0
        assert events(file, "start")[0]["threads_per_rank"] == max(1, cores // ranks)
    assert train(1, "--steps", 1, "--threads", 3, "--metrics", file).returncode == 0
    assert events(file, "start")[0]["threads_per_rank"] == 3


def test_layers_spread_over_the_stages():
    job = train(2, "--pp", 2, "--layers", 7, "--steps", 1)
    assert "blocks 0-3" in job.stdout and "blocks 4-6" in job.stdout
    job = train(2, "--pp", 2, "--layers", 7, "--layers-per-stage", "2,5", "--steps", 1)
    assert "blocks 0-1" in job.stdout and "blocks 2-6" in job.stdout


@pytest.mark.parametrize("ranks,arguments,words", [
    (1, ["--tp", "2"], "use mpirun -np 2"),
    (1, ["--lr", "nan"], "--lr nan"),
    (1, ["--beta2", "1"], "[0, 1)"),
    (1, ["--dim", "1048576"], "GiB"),
    (1, ["--virtual-stages", "2"], "--schedule interleaved"),
    (2, ["--pp", "2", "--schedule", "interleaved", "--layers", "3"], "at least 4 layers"),
    (1, ["--model", "mlp", "--layers", "2", "--heads", "2"], "--heads is an option of --model gpt"),
    (1, ["--eval-every", "5"], "--data random has none"),
    (1, ["--model", "mlp", "--recompute", "attention"], "--recompute attention is an option of --model gpt"),
    (1, ["--balance", "flops", "--layers-per-stage", "4"], "leave one out"),
    (1, ["--stage-delay", "0"], "--stage-delay 0.0 is not valid"),
    (1, ["--trace", "/none/dir"], "can't be written"),
    (1, ["--schedule", "2f2b"], "one of naive, gpipe, 1f1b"),
    (2, ["--pp", "2", "--schedule", "zb-v", "--virtual-stages", "3", "--layers", "6"], "valid: chunks=2"),
])
def test_more_user_errors(ranks, arguments, words, tmp_path):
    # No kernel is compiled yet: a refusal comes before that is announced.
    job = run_job(ranks, ["-m", "mpipar.train", "--data", "random", *arguments], env={"MPIPAR_CACHE_DIR": str(tmp_path)})
    assert job.returncode == 2 and len(job.output.strip().splitlines()) == 1 and words in job.output, job.output


def test_a_schedule_written_by_hand(tmp_path):
    """Trains as the named schedule does: the V with its micro-batches in another order."""
    file, metrics = tmp_path / "plan.csv", tmp_path / "metrics"
    file.write_text("# a V of two ranks\n0F0,0F1,3F0,3B0,3F1,3B1,0B0,0B1\n1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1\n")
    losses = []
    for schedule in (file, "1f1b"):
        job = train(2, "--pp", 2, "--steps", 2, "--schedule", schedule, "--metrics", metrics)
        assert job.returncode == 0, job.output
        losses.append([e["loss"] for e in events(metrics, "step")])
        if schedule == file:
            assert events(metrics, "start")[0]["micro_batches"] == 2 and "pp: 8 messages" in job.stdout
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


@pytest.mark.parametrize("text,words", [
    ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", "deadlock: rank 0 waits at 0B0 for 1B0, rank 1 waits at 1F1 for 0F1"),
    ("0F0,0B0,0F1\n1F0,1B0,1F1,1B1", "0F1 has no backward: 0B1 is missing"),
    ("0F0,0B0\n1B0,1F0", "1B0 comes before 1F0 on rank 1"),
    ("0F0,0B0\n1F0,1X0", "line 2: '1X0' is not an action"),
    ("0F0,0B0", "it needs --pp 1, not 2"),
    (None, "can't be read"),
])
def test_a_wrong_schedule_is_refused_before_any_rank_computes(text, words, tmp_path):
    file = tmp_path / "plan.csv"
    if text is not None:
        file.write_text(text)
    job = train(2, "--pp", 2, "--steps", 2, "--schedule", file)
    assert job.returncode == 2 and len(job.output.strip().splitlines()) == 1 and words in job.output, job.output


def test_sleeping_stages_and_the_trace_of_the_last_step(tmp_path):
    job = train(2, "--pp", 2, "--steps", 2, "--micro-batches", 4, "--stage-delay", 10, "--trace", tmp_path / "trace",
                "--metrics", tmp_path / "metrics")
    assert job.returncode == 0, job.output
    assert "nothing is computed" in job.stdout and "rank 1 |" in job.stdout and "2 live (predicted 2)" in job.stdout
    trace = json.loads((tmp_path / "trace" / "pipeline.json").read_text())["traceEvents"]
    assert sum(event.get("cat") == "compute" for event in trace) == 2 * 2 * 4
    bubble = events(tmp_path / "metrics", "end")[0]["bubble"]
    assert bubble["predicted"] == pytest.approx(1 / 5) and 0.15 < bubble["last_step_measured"] < 0.9
    job = train(4, "--pp", 2, "--dp", 2, "--tp", 1, "--steps", 1, "--trace", tmp_path / "trace")
    assert {path.name for path in (tmp_path / "trace").glob("*.json")} == {
        "pipeline.json", "pipeline-dp0.json", "pipeline-dp1.json"}


def test_recomputed_activations_are_counted_and_change_nothing(tmp_path):
    ends = []
    for recompute in ("none", "attention", "full"):
        job = train(2, "--pp", 2, "--steps", 2, "--recompute", recompute, "--metrics", tmp_path / recompute)
        assert job.returncode == 0 and ("dropped and made again" in job.stdout) == (recompute != "none"), job.output
        ends.append(events(tmp_path / recompute, "end")[0])
    assert len({end["parameters_sha256"] for end in ends}) == 1
    whole, *others = (end["activation_bytes"] for end in ends)
    assert whole["dropped"] == [0, 0] and whole["held"][0] > 0
    for less in others:
        assert [h + d for h, d in zip(less["held"], less["dropped"])] == whole["held"] and min(less["dropped"]) > 0


@pytest.mark.parametrize("by", ["flops", "measured"])
def test_layers_are_divided_by_what_they_cost(by):
    """A head that is dearer than all layers: the last stage gets few of them."""
    arguments = ["--pp", "2", "--layers", "6", "--dim", "32", "--heads", "4", "--seq", "16", "--vocab", "16384", "--data", "random",
                 "--steps", "2", "--global-batch", "8", "--balance", by]
    job = run_job(2, ["-m", "mpipar.train", *arguments], timeout=120)
    assert job.returncode == 0, job.output
    first = int(re.search(rf"by {by}: layers (\d)\+\d, predicted ", job.stdout)[1])
    assert first == 5 if by == "flops" else first >= 4  # times vary on a busy machine
    assert f"embedding + blocks 0-{first - 1}" in job.stdout
    assert float(job.stdout.split("predicted ")[1].split()[0]) > 1.02


def test_what_is_not_a_metrics_file_is_not_replaced(tmp_path):
    text = tmp_path / "corpus.txt"
    text.write_text("to be or not to be " * 1000)
    job = run_job(1, ["-m", "mpipar.train", "--data", text, "--metrics", text, "--seq", "16", "--steps", "1"])
    assert job.returncode == 2 and "not a metrics file" in job.output and text.stat().st_size == 19_000
    file = tmp_path / "metrics"
    for _ in range(2):  # an older metrics file is replaced
        assert train(1, "--steps", 1, "--metrics", file).returncode == 0
        assert len(events(file, "step")) == 1


def test_defaults_fit_any_number_of_ranks_and_either_model(tmp_path):
    file = tmp_path / "metrics"
    small = ["--steps", "1", "--layers", "1", "--eval-steps", "1", "--metrics", file]
    for ranks, arguments, expected in (
        (3, ["--dim", "32", "--generate", "0"], (3, 1, 18)), (4, ["--dim", "32", "--dp", "4", "--generate", "0"], (4, 1, 16)),
        (2, ["--model", "mlp", "--dp", "1"], (1, 2, 128)),
    ):
        job = run_job(ranks, ["-m", "mpipar.train", *small, *arguments], timeout=120)
        assert job.returncode == 0, job.output
        start = events(file, "start")[0]
        assert (start["dp"], start["tp"], start["global_batch"]) == expected
        assert events(file, "end")[0]["eval_loss"] > 0


def test_a_run_that_diverges_says_so():
    job = train(2, "--steps", 50, "--lr", "1e300", "--warmup", 0, "--clip", 0)
    assert job.returncode == 1 and "training has diverged" in job.stderr and "Traceback" not in job.output, job.output


@pytest.mark.parametrize("command", ["train", "verify"])
def test_help_is_printed_once(command):
    job = run_job(2, ["-m", f"mpipar.{command}", "--help"])
    assert job.returncode == 0 and job.stdout.count("usage:") == 1
