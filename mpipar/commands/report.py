"""What a run tells its user: the plan before it starts, progress while it runs, a summary at the end. Rank 0 only."""

from __future__ import annotations

import math
import sys

import numpy as np

from mpipar.engine.trainer import Trainer
from mpipar.kernels.dtypes import is_bfloat16
from mpipar.kernels.gemm_bfloat16 import unit
from mpipar.kernels.gemm_pieces import has_amx
from mpipar.models.gpt import GPT
from mpipar.models.model import Model
from mpipar.parallel.deterministic import TreeReducer
from mpipar.parallel.overlap import OverlappingReducer


def rank_parameters(model: Model, pp_rank: int, tp_rank: int) -> int:
    """Elements that the ranks at these coordinates hold."""
    return sum(math.prod(p.shape(tp_rank)) for p, owners in model.owners.items() if pp_rank in owners)


def plan_lines(model: Model, *, batch: int, micro_batches: int, schedule: str, threads: int, gemm: str, zero: int = 0,
               trainer: Trainer | None = None) -> list[str]:
    """Who holds what, how much, and which messages a step sends (of a trainer: also how it sends gradients)."""
    mesh = model.mesh
    shape = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in mesh.order)
    item = model.dtype.itemsize
    lines = [
        f"mesh      {count(mesh.size, 'rank')} on {count(mesh.nodes, 'node')}: {shape}, last axis fastest",
        f"compute   {count(threads, 'thread')} a rank, {model.dtype} products by {gemm}{_unit(model.dtype, gemm)}",
        f"batch     {count(batch, 'sample')} on {count(mesh.dp.size, 'replica')}, {count(micro_batches, 'micro-batch')} each"
        + (f", schedule {schedule}" if mesh.pp.size > 1 else ""),
        f"model     {model.global_parameters:,} parameters, {model.global_parameters * item:,} bytes",
    ]
    for stage in range(model.stages):
        pp_rank = model.rank_of(stage)
        for tp_rank in range(mesh.tp.size):
            where = f"stage {stage}" + (f", tp {tp_rank}" if mesh.tp.size > 1 else "")
            ranks = [r for r in range(mesh.size) if coordinates(mesh, r) == (pp_rank, tp_rank)]
            held = rank_parameters(model, pp_rank, tp_rank)
            lines.append(f"  ranks {','.join(map(str, ranks)):<8} {where}: {model.describe(stage)}, {held:,} parameters")
    return lines + message_lines(model, batch=batch, micro_batches=micro_batches, zero=zero, trainer=trainer)


def _unit(dtype, gemm: str) -> str:
    """The matrix unit that makes the large products, in words."""
    if dtype == np.float32 and gemm == "numba" and has_amx():
        return ", large ones on AMX"
    return " on AMX" if is_bfloat16(dtype) and unit() == "amx" else ""


def count(number: int, thing: str) -> str:
    """1 rank, 2 ranks, 2 micro-batches."""
    plural = thing + ("es" if thing.endswith("ch") else "s")
    return f"{number} {thing if number == 1 else plural}"


def coordinates(mesh, rank: int) -> tuple[int, int]:
    """(pp, tp) coordinates of a rank of the mesh."""
    found = {}
    for axis in reversed(mesh.order):
        rank, found[axis] = divmod(rank, mesh.shape[axis])
    return found["pp"], found["tp"]


DP_MESSAGES = (
    "1 all-reduce of the gradients",
    "reduce-scatter of the gradients and all-gather of the parameters (ZeRO 1)",
    "reduce-scatter of the gradients each micro-batch and all-gather of the parameters (ZeRO 2)",
    "all-gather of the parameters, twice, and reduce-scatter of the gradients each micro-batch (ZeRO 3)",
)


def gradient_messages(trainer: Trainer | None, zero: int) -> str:
    """How the replicas' gradients are summed."""
    reducer = trainer and trainer.gradients.reducer
    if isinstance(reducer, OverlappingReducer):
        return f"{count(len(reducer.buckets), 'all-reduce')} of the gradients (rank 0's), during the last backward pass ({trainer.room})"
    if isinstance(reducer, TreeReducer):
        return "all-to-all and all-gather of the gradients (deterministic)"
    return DP_MESSAGES[zero] + (f" after backward (overlap off: {trainer.room})" if trainer and trainer.room else "")


def message_lines(model: Model, *, batch: int, micro_batches: int, zero: int = 0, trainer: Trainer | None = None) -> list[str]:
    """The messages of a step, by axis."""
    mesh, item, lines = model.mesh, model.dtype.itemsize, []
    rows = -(-batch // mesh.dp.size // micro_batches)
    width = model.dim * (model.seq if isinstance(model, GPT) else 1)
    if mesh.tp.size > 1 and isinstance(model, GPT):
        lines.append(f"  tp: 2 all-reduces forward and 2 backward a block and micro-batch, {rows * width * item:,} bytes each")
    elif mesh.tp.size > 1:
        lines.append(f"  tp: 1 all-reduce forward and 1 backward each 2 layers and micro-batch, {rows * width * item:,} bytes each")
    if mesh.pp.size > 1:
        crossings = sum(model.rank_of(stage) != model.rank_of(stage + 1) for stage in range(model.stages - 1))
        lines.append(f"  pp: {2 * micro_batches * crossings} messages a replica and tp rank, up to {rows * width * item:,} bytes each")
    if mesh.dp.size > 1:
        most = max(rank_parameters(model, p, t) for p in range(mesh.pp.size) for t in range(mesh.tp.size))
        sent = getattr(trainer and trainer.gradients.reducer, "dtype", model.dtype).itemsize
        lines.append(f"  dp: {gradient_messages(trainer, zero)}, {most * sent:,} bytes on the fullest rank")
    return ["messages of a step" + (":" if lines else ": none, one rank holds all")] + lines


class Progress:
    """Shows the steps of a run: a live line on a terminal, else plain lines, at most about 20 of them."""

    def __init__(self, steps: int, *, active: bool, unit: str):
        self.steps, self.active, self.unit = steps, active, unit
        self.every = max(1, -(-steps // 20)) if steps > 25 else 1
        self.live = None
        if active and sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            text = "loss {task.fields[loss]:.4f}  norm {task.fields[norm]:.3f}  {task.fields[rate]:,.0f} {task.fields[unit]}/s"
            self.live = Progress(MofNCompleteColumn(), BarColumn(), TextColumn(text), TimeRemainingColumn())
            self.task = self.live.add_task("train", total=steps, loss=math.nan, norm=math.nan, rate=0.0, unit=unit)
            self.live.start()

    def step(self, result, rate: float) -> None:
        """Show one step."""
        shown = result.step % self.every == 0 or result.step in (1, self.steps)
        if self.live:
            self.live.update(self.task, completed=result.step, loss=result.loss, norm=result.grad_norm, rate=rate)
        if self.active and shown:
            self.say(
                f"step {result.step:>5}/{self.steps}  loss {result.loss:.4f}  grad norm {result.grad_norm:.3f}  "
                f"lr {result.lr:.2e}  {rate:,.0f} {self.unit}/s"
            )

    def say(self, text: str) -> None:
        """Print a line, above the live one if there is one."""
        if self.live:
            self.live.console.print(text, markup=False, highlight=False)
        elif self.active:
            print(text, flush=True)

    def close(self) -> None:
        """Stop the live display."""
        if self.live:
            self.live.stop()
