"""`python -m mpipar.bench train`: the step of a model in a layout, part by part; and against PyTorch, in turn.

    mpirun -np 2 python -m mpipar.bench train --tp 2 --layers 6 --dim 384 --heads 6 --seq 256 --global-batch 8
    python -m mpipar.bench train --against torch --ranks 2 --pp 2 --layers 6 --dim 384 --heads 6 --seq 256 --global-batch 8
    python -m mpipar.bench train --against one-rank --ranks 2 --dp 2

The options of the model and the layout are those of `mpipar.train`. With --against, both programs are started in turn,
see `against.py`.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path

import numpy as np

from mpipar.bench.against import SKIP, STARTED, alternate, total_steps


def add_arguments(parser):
    parser.add_argument("--measure", type=int, default=20, metavar="STEPS", help="steps that are measured")
    parser.add_argument("--json", metavar="FILE", help="also write everything to FILE")
    parser.add_argument("--against", choices=("torch", "torch-compile", "one-rank"),
                        help="alternate with PyTorch's program of the same layout (gloo, one thread a rank), or with mpipar on one rank")
    parser.add_argument("--ranks", type=int, default=1, help="with --against: ranks of the program (of both, with torch)")
    parser.add_argument("--pairs", type=int, default=5, help="with --against: alternated pairs of runs")


def run(arguments):
    """Measure this layout, or alternate with PyTorch."""
    if arguments.measure < 1 or arguments.pairs < 1 or arguments.ranks < 1:
        raise ValueError("--measure, --pairs and --ranks must be at least 1")
    if arguments.against:
        report = alternate(arguments)
    else:
        report = measure(arguments.rest, arguments.measure)
    if arguments.json and report:
        Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def measure(options: list[str], steps: int) -> dict | None:
    """Time `steps` steps without clocks inside, then as many with them; the report on rank 0, None elsewhere."""
    from mpipar.bench.parts import Parts
    from mpipar.commands.train import set_up
    from mpipar.engine.metrics import peak_rss_bytes
    from mpipar.kernels.host import host
    from mpipar.kernels.settings import settings
    from mpipar.parallel.pipeline.measure import gather

    run = set_up([*options, "--steps", str(total_steps(steps))])
    trainer, mesh = run.trainer, run.mesh
    batches = (run.train.batch(k) for k in range(1, 10**9))
    losses = [trainer.step(next(batches)).loss]
    first_step = since_start()
    runs: list = []
    plain = timed_steps(trainer, mesh, batches, steps, losses=losses, each=lambda: runs.append(trainer.last_run))
    pipelines = [gather(one, mesh.pp) for one in runs] if mesh.pp.size > 1 else []
    waits: list[float] = []
    sums: list[float] = []      # what a step waited for gradients that a helper thread sums meanwhile
    hidden = "dp" if hasattr(trainer.gradients.reducer, "waited") else None

    def note():
        waits.append(waiting(trainer))
        sums.append(getattr(trainer.gradients.reducer, "waited", 0.0))

    with Parts() as parts, mesh.record() as log:
        clocked = timed_steps(trainer, mesh, batches, steps, skip=0, each=note)
    step = statistics.median(plain)
    batch = run.train.batch(1)
    table = {name: seconds / steps for name, seconds in parts.seconds.items()}
    table["messages"] = (sum(e.seconds for e in log.entries if e.group not in ("pp", hidden)) + sum(sums)) / steps
    table["pipeline waiting"] = sum(waits) / steps
    table["other"] = max(sum(clocked) / steps - sum(table.values()), 0.0)
    flops = float(mesh.world.all_reduce(np.array([float(parts.flops)]))[0]) / steps
    memory = peak_rss_bytes(mesh.world)
    if not mesh.is_root:
        return None
    items, unit = (batch.tokens, "tokens") if batch.tokens else (batch.size, "samples")
    report = {
        "hardware": host().describe(), "load_average": os.getloadavg()[0], "options": options, "ranks": mesh.size,
        "shape": mesh.shape, "threads_per_rank": settings.threads, "steps": steps, "step_s": step, "best_step_s": min(plain),
        "spread_s": [min(plain), max(plain)], f"{unit}_per_s": items / step, "gflops": flops / step / 1e9,
        "parts_s": table, "losses": losses, "process_first_step_s": first_step, "peak_rss_bytes": memory,
    }
    print(f"{report['hardware']}, load average {report['load_average']:.1f}")
    print(f"{mesh.size} ranks {mesh.shape}, {settings.threads} threads a rank, {' '.join(options)}")
    print(f"median of {steps} steps {step * 1e3:.1f} ms ({min(plain) * 1e3:.1f} to {max(plain) * 1e3:.1f}), {items / step:,.0f} {unit}/s, "
          f"{flops / step / 1e9:.1f} GFLOP/s in all")
    print(f"first step {first_step:.2f} s after the start, peak memory of a rank {max(memory) / 2**20:.0f} MiB")
    if pipelines:
        report["utilisation"] = utilisation = utilisations(pipelines, trainer.plan)
        print("utilisation of the pipeline {measured:.1%} measured, {simulated:.1%} simulated with the measured costs ({ratio:.3f} of it), "
              "{equal_stages:.1%} for equal stages".format_map(utilisation))
    whole = sum(table.values())
    for name, seconds in table.items():
        print(f"  {name:<18}{seconds * 1e3:9.2f} ms  {seconds / whole:6.1%}")
    return report


def timed_steps(trainer, mesh, batches, steps, *, skip=SKIP, each=None, losses=None) -> list[float]:
    """Seconds of each step after the first `skip`; all ranks begin a step together. losses: a list that gets all steps' losses."""
    times = []
    for number in range(skip + steps):
        batch = next(batches)
        mesh.world.barrier()
        started = time.perf_counter()
        result = trainer.step(batch)
        seconds = time.perf_counter() - started
        if losses is not None:
            losses.append(result.loss)
        if number >= skip:
            times.append(seconds)
            if each:
                each()
    return times


def utilisations(pipelines: list, plan) -> dict:
    """Medians over the steps: utilisation measured, simulated with each step's own costs, their ratio, and for equal stages."""
    found = [measured.utilisations(plan) for measured in pipelines]
    medians = {name: statistics.median(step[name] for step in found) for name in found[0]}
    return {**medians, "ratio": statistics.median(step["measured"] / step["simulated"] for step in found)}


def since_start() -> float:
    """Seconds since this program was started (since the starter's clock if --against started it)."""
    if STARTED in os.environ:
        return time.time() - float(os.environ[STARTED])
    return time.time() - Path("/proc/self").stat().st_ctime  # good to some milliseconds


def waiting(trainer) -> float:
    """Seconds of the last step in which this rank's pipeline waited for messages."""
    return trainer.last_run.wall_seconds - trainer.last_run.busy_seconds
