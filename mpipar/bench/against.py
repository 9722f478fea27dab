"""`python -m mpipar.bench train --against ...`: two programs of the same model in turn, A B A B, and the ratio pair by pair.

torch: PyTorch's program (`bench/peer`) in the same layout: the same initial values, batches, learning rates and clipping,
float32 or float64, eager, gloo, one thread a rank. one-rank: mpipar on one rank with the same global batch, cut into as
many micro-batches as one replica cuts its share. That both compute the same is seen by their losses, which are printed;
a first loss that differs by more than a thousandth ends the comparison.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mpipar.bench.report import need_torch
from mpipar.comm import launcher
from mpipar.commands.config import Config, as_flag, flag, parse
from mpipar.parallel.pipeline.partition import split_layers

STARTED = "MPIPAR_BENCH_STARTED"
SKIP = 3  # first steps that are left out
PEER_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-v")
PEER_LAYOUTS = ("one rank; --dp N with --zero 0 or 3; --tp N; --pp N with --schedule "
                f"{', '.join(PEER_SCHEDULES[:-1])} or {PEER_SCHEDULES[-1]}; not several of dp, tp and pp at once")


def total_steps(measured: int) -> int:
    """The steps that `bench train --measure` makes in all: a first one, then twice so many, once with clocks inside."""
    return 1 + 2 * (SKIP + measured)


def alternate(arguments) -> dict:
    """Start both programs in turn, compare pair by pair, print, and return the report."""
    refuse_mpirun()
    config = parse(arguments.rest).resolved(arguments.ranks)
    if config.dp * config.tp * config.pp != arguments.ranks:
        raise ValueError(f"dp={config.dp} x tp={config.tp} x pp={config.pp} are {config.dp * config.tp * config.pp} ranks: "
                         f"--ranks {arguments.ranks} is not")
    config.check()
    if config.stage_delay is not None:
        raise ValueError("--against compares programs that compute: leave --stage-delay out")
    with tempfile.TemporaryDirectory() as folder:
        if arguments.against == "one-rank":
            if arguments.ranks < 2:
                raise ValueError("--against one-rank compares several ranks with one: --ranks must be at least 2")
            other, name = one_rank_runner(arguments, config), "mpipar on one rank"
        else:
            other, name = torch_runner(arguments, config, folder), "PyTorch"
        ours, theirs = [], []
        for number in range(arguments.pairs):
            ours.append(start_mpipar(arguments.rest, arguments.ranks, arguments.measure))
            theirs.append(other())
            pair = [1e3 * side[-1]["step_s"] for side in (ours, theirs)]
            print(f"pair {number + 1}: mpipar {pair[0]:.1f} ms a step, {name} {pair[1]:.1f} ms", flush=True)
            if number == 0:
                losses = same_losses(ours[0]["losses"], theirs[0]["losses"], name)
    return summary(arguments, ours, theirs, losses, name)


def refuse_mpirun():
    """ValueError where this program was started on several ranks."""
    if launcher.started()[0] > 1:
        raise ValueError("--against starts the programs itself: leave mpirun out, and give --ranks")


def same_losses(ours: list, theirs: list, name: str) -> dict:
    """The losses of the first and the last step that both made, printed; RuntimeError if the first ones differ."""
    last = min(len(ours), len(theirs)) - 1
    found = {"steps": last + 1, "first": [ours[0], theirs[0]], "last": [ours[last], theirs[last]],
             "largest_difference": max(abs(a - b) / abs(a) for a, b in zip(ours, theirs))}
    print(f"losses of mpipar and {name}: step 1 {ours[0]:.6g} and {theirs[0]:.6g}, step {last + 1} {ours[last]:.6g} and "
          f"{theirs[last]:.6g}, largest relative difference {found['largest_difference']:.1e}", flush=True)
    if not abs(ours[0] - theirs[0]) <= 1e-3 * abs(ours[0]):
        raise RuntimeError(f"the losses of step 1 are {ours[0]} and {theirs[0]}: the two programs do not compute the same")
    return found


def summary(arguments, ours, theirs, losses, name) -> dict:
    """The report of all pairs, its result printed."""
    ratios = sorted(b["step_s"] / a["step_s"] for a, b in zip(ours, theirs))
    memory = statistics.median(max(a["peak_rss_bytes"]) / max(b["peak_rss_bytes"]) for a, b in zip(ours, theirs))
    first = statistics.median(a["process_first_step_s"] / b["process_first_step_s"] for a, b in zip(ours, theirs))
    report = {
        "hardware": ours[0]["hardware"], "load_average": os.getloadavg()[0], "options": arguments.rest, "ranks": arguments.ranks,
        "against": arguments.against, "pairs": arguments.pairs, "speed_ratio": statistics.median(ratios),
        "speed_ratio_range": [ratios[0], ratios[-1]], "memory_ratio": memory, "first_step_ratio": first, "losses": losses,
        "ours": ours, "theirs": theirs,
    }
    if "version" in theirs[0]:
        report["pytorch"] = theirs[0]["version"]
        name = f"{arguments.against} {report['pytorch']}"
    scaling = f", {report['speed_ratio'] / arguments.ranks:.0%} of {arguments.ranks}" if arguments.against == "one-rank" else ""
    print(f"{report['hardware']}, load average {report['load_average']:.1f}\n{arguments.ranks} ranks, one thread each, against {name}, "
          f"{arguments.pairs} alternated pairs: mpipar is {report['speed_ratio']:.2f} times as fast "
          f"({ratios[0]:.2f} to {ratios[-1]:.2f}){scaling}, needs {memory:.2f} of the memory, and {first:.2f} of the time from "
          "start to first step")
    return report


def start_mpipar(options: list[str], ranks: int, measure: int) -> dict:
    """The report of one run of `bench train` in processes of its own, one thread a rank."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        command = [sys.executable, "-m", "mpipar.bench", "train", "--measure", str(measure), "--json", str(file), *options,
                   "--threads", "1"]
        if ranks > 1:
            command = [launcher.mpirun(), "-np", str(ranks), *command]
        finish(command)
        return json.loads(file.read_text(encoding="utf-8"))


def one_rank_runner(arguments, config: Config):
    """A function that runs mpipar on one rank with the same work."""
    options = one_rank(config)
    return lambda: start_mpipar(options, 1, arguments.measure)


def one_rank(config: Config) -> list[str]:
    """The flags of the same model, data and optimizer on one rank."""
    alone = dataclasses.replace(config, dp=1, tp=1, pp=1, zero=0, schedule="1f1b", virtual_stages=None, layers_per_stage=None,
                                balance="layers", comm="auto", overlap=None, bucket_mb=None, compress=None, deterministic=False, config=None,
                                metrics=None, trace=None)
    default = Config()
    return [as_flag(field.name, getattr(alone, field.name)) for field in dataclasses.fields(Config)
            if getattr(alone, field.name) != getattr(default, field.name)]


def torch_runner(arguments, config: Config, folder: str):
    """A function that runs PyTorch's program of the same layout; writes its material into `folder` first."""
    options = torch_options(config)
    if arguments.against == "torch-compile" and "dp" not in options:
        raise ValueError("--against torch-compile compiles data parallelism alone: take --against torch for tp, pp and --zero 3")
    need_torch(arguments.against)
    steps = 1 + SKIP + arguments.measure
    alone = [*one_rank(config), "--steps", str(total_steps(arguments.measure))]
    finish([sys.executable, "-m", "mpipar.bench.material", folder, str(steps), *alone])
    command = torch_command(arguments.ranks, *options, "--steps", str(arguments.measure), "--skip", str(SKIP), "--material", folder)
    if arguments.against == "torch-compile":
        command.append("--compile")
    return lambda: json.loads(finish(command, OMP_NUM_THREADS="1").strip().splitlines()[-1])


def torch_options(config: Config) -> list[str]:
    """The options of PyTorch's program for a resolved configuration; ValueError where it has no such layout or option."""
    several = [axis for axis in ("dp", "tp", "pp") if getattr(config, axis) > 1]
    layout = several[0] if several else "dp"
    if len(several) > 1 or config.zero in (1, 2) or (config.zero == 3 and several != ["dp"]):
        raise ValueError(f"PyTorch's program has no layout {' x '.join(f'{a}={getattr(config, a)}' for a in several) or 'of one rank'}"
                         f"{f' with --zero {config.zero}' if config.zero else ''}: valid are {PEER_LAYOUTS}")
    if layout == "pp" and config.schedule not in PEER_SCHEDULES:
        raise ValueError(f"PyTorch's program has no --schedule {config.schedule}: valid are {', '.join(PEER_SCHEDULES)}")
    for name, valid in (("dropout", [0.0]), ("recompute", ["none"]), ("optimizer", ["adamw"]), ("dtype", ["float32", "float64"]),
                        ("balance", ["layers"])):
        if getattr(config, name) not in valid:
            raise ValueError(f"PyTorch's program has no {flag(name)} {getattr(config, name)}: valid is {' or '.join(map(str, valid))}")
    for name in ("deterministic", "compress"):
        if getattr(config, name):
            raise ValueError(f"PyTorch's program has no {flag(name)}: leave it out")
    rows = config.global_batch // config.dp
    if rows % config.micro_batches:
        valid = [n for n in range(1, rows + 1) if rows % n == 0]
        raise ValueError(f"PyTorch's program cuts the {rows} rows of a replica evenly: --micro-batches can be one of {valid}")
    options = ["--model", config.model, "--dtype", config.dtype, "--layout", "fsdp" if config.zero == 3 else layout]
    for name in ("layers", "dim", "heads", "seq", "vocab", "global_batch", "micro_batches"):
        options += ["--" + name.replace("_", "-"), str(getattr(config, name))]
    if not config.tied:
        options.append("--untied")
    if layout == "pp":
        stages = config.pp * config.virtual_stages
        counts = split_layers(config.layers, stages, config.stage_layers())
        options += ["--schedule", config.schedule, "--stage-layers", ",".join(map(str, counts))]
    return options


def torch_command(ranks: int, *options: str, module: str = "mpipar.bench.peer") -> list[str]:
    """The command that starts a program of PyTorch's on so many ranks."""
    many = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return [sys.executable, *many, "-m", module, *options]


def finish(command: list[str], **environment: str) -> str:
    """The standard output of a command, started with the clock for its first step; RuntimeError, with its messages, if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, STARTED: repr(time.time()), **environment})
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-6000:]}")
    return done.stdout
