"""The command `mpipar.verify`: does parallel equal serial?

Trains a small GPT in float64 on one rank and in every layout dp x tp x pp of the N ranks under every schedule, and
compares initial weights, losses, gradient norms, the gradients of step 1 and the final weights. Exit code 1 if any
layout disagrees. `--break WHAT` switches one piece off in the parallel runs, which must then be noticed. With
`--dtype bfloat16` the bounds are those of its rounded messages, and what rounding alone makes grow without bound (the
weights of a model that has nothing to learn) is not compared.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Literal

import numpy as np
import tyro

from mpipar.comm import guard
from mpipar.comm.mesh import Mesh
from mpipar.comm.mpi import check_launcher, world_size
from mpipar.commands.breakage import BREAKS
from mpipar.commands.config import flag, one_line_cli
from mpipar.data import RandomTokens
from mpipar.engine.checksum import global_state, parameters_sha256
from mpipar.engine.learning_rate import Cosine
from mpipar.engine.metrics import check_writable
from mpipar.engine.optimizer import AdamW
from mpipar.engine.trainer import Trainer
from mpipar.kernels.settings import settings
from mpipar.kernels.threads import limit_threads
from mpipar.models.gpt import GPT
from mpipar.parallel.pipeline.schedule import SCHEDULES, SEVERAL_CHUNKS, build, placement
from mpipar.parallel.zero import STAGES

BOUNDS = {"first loss": 1e-12, "losses": 1e-9, "norms": 1e-9, "gradients": 1e-10, "weights": 1e-9}

# Measured on 2 and 4 ranks, 20 steps: 5e-6, 5e-4, 1.3e-2 and 3e-3; each way to break it gives 0.08 or more in the second or third.
BFLOAT16_BOUNDS = {"first loss": 1e-4, "first norm": 5e-3, "gradients": 5e-2, "losses": 2e-2}


@dataclass(frozen=True)
class Options:
    """Train gpt-tiny in every layout of the ranks and compare with one rank."""

    steps: int = 20
    """Optimizer steps of each run."""
    global_batch: int = 32
    """Samples of a step."""
    micro_batches: int = 4
    """Micro-batches of each replica."""
    layers: int = 4
    """Transformer blocks."""
    vocab: int = 64
    """Size of the vocabulary."""
    tied: bool = True
    """Use the embedding as the output head."""
    dropout: float = 0.1
    """Dropout probability."""
    clip: float = 1.0
    """Largest norm of the gradient; 0: no clipping."""
    zero: str = "0,1,2,3"
    """Stages of ZeRO to try where there are replicas."""
    dtype: Literal["float64", "bfloat16"] = "float64"
    """float64: layouts differ by rounding alone, so any mistake shows. bfloat16: that its rounded messages change little."""
    comm: Literal["auto", "mpi", "shm"] = "auto"
    """How ranks of one node exchange gradients and parameters."""
    overlap: bool = False
    """Sum the replicas' gradients during backward where that is possible (stage 0 of ZeRO)."""
    break_: Annotated[str | None, tyro.conf.arg(name="break", metavar="WHAT")] = None
    """Switch a piece off in the parallel runs; a wrong name lists the right ones. Exit code 1 says that it was noticed."""
    json: str | None = None
    """Write the comparison to this file."""

    def check(self, ranks: int) -> None:
        """ValueError for numbers that can't be meant."""
        if ranks == 1:
            raise ValueError("one rank has nothing to compare itself with: start with mpirun -np 2, 4 or 8")
        for name in ("steps", "global_batch", "micro_batches", "layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{flag(name)} {getattr(self, name)} is not valid: it must be at least 1")
        if self.vocab < 4:
            raise ValueError(f"--vocab {self.vocab} is not valid: it must be at least 4")
        if not 0 <= self.dropout < 1 or not self.clip >= 0:
            raise ValueError(f"--dropout {self.dropout} --clip {self.clip} is not valid: dropout in [0, 1), clip at least 0")
        self.zero_stages()
        check_writable(self.json)

    def zero_stages(self) -> list[int]:
        """--zero as numbers; ValueError, with the valid ones, if it is not a list of stages."""
        words = self.zero.replace(",", " ").split()
        if not words or not set(words) <= set(map(str, STAGES)):
            raise ValueError(f"--zero {self.zero!r} is not a list of stages of ZeRO: valid are {','.join(map(str, STAGES))} or some of them")
        return [int(word) for word in dict.fromkeys(words)]
    def bounds(self) -> dict[str, float]:
        """The largest relative differences between a layout and one rank."""
        return BOUNDS if self.dtype == "float64" else BFLOAT16_BOUNDS


@dataclass
class Outcome:
    """What a run is judged by, on rank 0."""

    sha_at_start: str | None
    losses: list[float]
    norms: list[float]
    gradients: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]


def run(options: Options, mesh: Mesh, schedule: str, damage=None, *, zero: int = 0, chunks: int | None = None) -> Outcome:
    """Train on a mesh with a stage of ZeRO; `damage` may switch something off in the trainer first.

    chunks: stages on each pipeline rank, by default as few as the schedule takes.
    """
    plan = build(schedule, mesh.pp.size, options.micro_batches, chunks or (2 if schedule in SEVERAL_CHUNKS else 1))
    model = GPT(
        layers=options.layers, dim=32, heads=4, seq=16, vocab=options.vocab, mesh=mesh, tied=options.tied,
        dropout=options.dropout, dtype=options.dtype, placement=placement(plan),
    )
    trainer = Trainer(
        model, AdamW(), schedule=plan, micro_batches=options.micro_batches, clip=options.clip,
        learning_rate=Cosine(1e-2, 4, options.steps), zero=zero, overlap=options.overlap and not zero,
    )
    if damage is not None:
        damage(trainer)
    start = parameters_sha256(model)
    source = RandomTokens(vocab=options.vocab, seq=16, global_batch=options.global_batch)
    results, gradients = [], {}
    for step in range(1, options.steps + 1):
        results.append(trainer.step(source.batch(step)))
        if results[-1].stop:
            raise SystemExit("asked to stop")
        if step == 1:
            gradients = global_state(model, gradients=True)
    return Outcome(start, [r.loss for r in results], [r.grad_norm for r in results], gradients, global_state(model))


def compare(serial: Outcome, other: Outcome) -> dict[str, float]:
    """The largest relative difference of each thing; "start" is 0 or 1 (initial weights equal bit for bit)."""
    return {
        "start": float(serial.sha_at_start != other.sha_at_start),
        "first loss": relative(serial.losses[:1], other.losses[:1]),
        "first norm": relative(serial.norms[:1], other.norms[:1]),
        "losses": relative(serial.losses, other.losses),
        "norms": relative(serial.norms, other.norms),
        "gradients": worst(serial.gradients, other.gradients),
        "weights": worst(serial.weights, other.weights),
    }


def relative(a, b) -> float:
    """Largest |a - b| / |a| of two series; infinite if they are not comparable."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if a.shape != b.shape or not np.isfinite(b).all():
        return float("inf")
    return float((np.abs(a - b) / np.abs(a)).max(initial=0.0))


def worst(a: dict, b: dict) -> float:
    """Largest difference of two sets of tensors, relative to the largest element of each tensor."""
    if a.keys() != b.keys():
        return float("inf")
    differences = [np.abs(a[n] - b[n]).max() / max(np.abs(a[n]).max(), 1e-300) for n in a]
    return float("inf") if np.isnan(differences).any() else float(max(differences))


def layouts(ranks: int, options: Options) -> list[tuple[int, int, int]]:
    """All (dp, tp, pp) of the ranks that the model and the batch allow."""
    sizes = [n for n in range(1, ranks + 1) if ranks % n == 0]
    return [
        (dp, tp, ranks // dp // tp)
        for dp in reversed(sizes)
        for tp in sizes
        if ranks % (dp * tp) == 0 and 4 % tp == 0 and ranks // dp // tp <= options.layers
        and options.global_batch % dp == 0 and options.micro_batches <= options.global_batch // dp
    ]


def schedules(pp: int, options: Options) -> list[str]:
    """The schedules that a pipeline of that many ranks allows; without a pipeline they are all the same."""
    if pp == 1:
        return ["1f1b"]
    return [name for name in SCHEDULES if name not in SEVERAL_CHUNKS or options.layers >= 2 * pp]


def verify(options: Options) -> int:
    """Run everything and print the table; the exit code."""
    ranks, damage = world_size(), None
    with guard.checking():
        options.check(ranks)
        if options.break_ is not None:
            if options.break_ not in BREAKS:
                raise ValueError(f"--break {options.break_!r} does not exist: valid are {', '.join(BREAKS)}")
            damage = BREAKS[options.break_]
        whole = Mesh()
        fitting = layouts(ranks, options)
        if not fitting:
            raise ValueError(f"no layout of {ranks} ranks fits the model (4 heads, {options.layers} layers): try 1, 2, 4 or 8 ranks")
    limit_threads(max(1, settings.threads // whole.ranks_on_node))
    serial = run(options, Mesh.serial(), "1f1b")
    rows, failed, bounds = [], 0, options.bounds()
    if whole.is_root:
        print(f"{'layout':<22}{'schedule':<13}{'zero':<6}" + "".join(f"{name:>12}" for name in ["start", *bounds]) + "  verdict")
    for dp, tp, pp in fitting:
        for schedule, zero in product(schedules(pp, options), options.zero_stages() if dp > 1 else [0]):
            mesh = Mesh(dp=dp, tp=tp, pp=pp, back_end=options.comm)
            outcome = run(options, mesh, schedule, damage, zero=zero)
            if mesh.is_root:
                found = compare(serial, outcome)
                agrees = found["start"] == 0 and all(found[name] <= bound for name, bound in bounds.items())
                failed += not agrees
                rows.append({"dp": dp, "tp": tp, "pp": pp, "schedule": schedule, "zero": zero, "agrees": agrees, **found})
                figures = "".join(f"{found[name]:>12.1e}" for name in bounds)
                print(f"dp={dp} tp={tp} pp={pp:<10}{schedule:<13}{zero:<6}{'equal' if found['start'] == 0 else 'DIFFERS':>12}"
                      f"{figures}  {'agrees' if agrees else 'DISAGREES'}", flush=True)
            mesh.close()
    failed = int(whole.world.broadcast(np.array([failed]))[0])
    if whole.is_root:
        print(f"{len(rows) - failed} of {len(rows)} runs agree with one rank (relative differences; bounds: "
              + ", ".join(f"{name} {bound:.0e}" for name, bound in bounds.items()) + ")")
        if options.json:
            with open(options.json, "w", encoding="utf-8") as file:
                json.dump({"ranks": ranks, "steps": options.steps, "dtype": options.dtype, "bounds": bounds, "runs": rows}, file, indent=1)
    return 1 if failed else 0


def main(arguments: list[str]) -> int:
    """The command: see `Options`."""
    with guard.checking():
        check_launcher()
        options = one_line_cli(Options, arguments, prog="python -m mpipar.verify")
    return verify(options)
