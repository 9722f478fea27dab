"""The training step: schedule, gradients, clipping, optimizer."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np

from mpipar.comm import launcher
from mpipar.comm.fault import inject
from mpipar.comm.guard import stop_requested
from mpipar.data.batch import Batch
from mpipar.engine.divided import Optimizer, divide
from mpipar.engine.gradients import Gradients
from mpipar.engine.optimizer import SGD, AdamW
from mpipar.kernels import bfloat16
from mpipar.kernels.dtypes import as_dtype
from mpipar.kernels.gemm_kept import unchanged
from mpipar.models.model import MicroBatch, Model
from mpipar.nn.layer import SampleKeys
from mpipar.nn.parameter import split_range
from mpipar.parallel.deterministic import check_deterministic
from mpipar.parallel.overlap import check_overlap, last_backwards, room
from mpipar.parallel.pipeline.check import check
from mpipar.parallel.pipeline.mailbox import GroupMailbox
from mpipar.parallel.pipeline.messages import with_messages
from mpipar.parallel.pipeline.run import RunResult, run, run_forward
from mpipar.parallel.pipeline.schedule import Plan, build, forwards, placement
from mpipar.parallel.zero import check_stage


@dataclass(frozen=True)
class StepResult:
    """The same on every rank.

    loss: mean over the global batch. grad_norm: of the whole gradient before clipping. lr: learning rate used.
    stop: True if any rank was asked to stop (SIGTERM, SIGUSR1) before this step ended.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    stop: bool


class Trainer:
    """Trains a model on a mesh.

    optimizer: AdamW or SGD. schedule: a name in `schedule.SCHEDULES`, or a plan, for whose stages the model has to be
    placed (`GPT(..., placement=placement(plan))`). micro_batches: into how many parts each replica cuts its rows, as even
    as possible. clip: largest norm of the gradient, 0 for no limit. learning_rate: a function of the step (from 1),
    default the optimizer's own lr. zero: what the replicas divide, see parallel/zero.py. deterministic: dp = 1, 2, 4, ...
    with the same number of micro-batches over all replicas give the same bits (the sums are made in one order, see
    parallel/deterministic.py; slower, and not together with ZeRO). overlap: the replicas' gradients are summed while the
    last backward pass computes, in buckets of about bucket_mb million bytes (see parallel/overlap.py); None: where the
    replicas sit on several nodes, or a core is free. compress: "bfloat16" rounds float32 gradients for these messages.
    ValueError for a schedule or a stage of ZeRO that doesn't exist, sizes below 1, deterministic with another dp, or
    options that exclude each other.
    """

    def __init__(self, model: Model, optimizer: AdamW | SGD | None = None, *, mesh=None, schedule="1f1b",
                 micro_batches=1, clip=0.0, learning_rate=None, zero=0, deterministic=False, overlap=None,
                 bucket_mb=None, compress=None):
        optimizer = AdamW() if optimizer is None else optimizer
        mesh = model.mesh if mesh is None else mesh
        if mesh is not model.mesh:
            raise ValueError("the trainer's mesh is not the model's: build both with the same one")
        self.model, self.mesh = model, mesh
        self.micro_batches, self.clip = micro_batches, clip
        self.learning_rate = learning_rate or (lambda step: optimizer.lr)
        self.plan = self._plan(schedule)
        self.program = with_messages(self.plan)[mesh.pp.rank]
        self.forward_program = with_messages(forwards(model.placement, micro_batches))[mesh.pp.rank]
        self.mailbox = GroupMailbox(mesh.pp, model.stages, patient=launcher.crowded())
        check_stage(zero)
        check_deterministic(deterministic, zero, mesh.dp.size)
        check_overlap(overlap, bucket_mb, compress, zero=zero, deterministic=deterministic, dtype=model.dtype,
                      back_end=mesh.back_end)
        self.deterministic = deterministic
        messages = model.dtype if compress is None else as_dtype(compress)
        if compress is not None:
            mesh.divided_on_node([bfloat16.warm])
        divide(model, zero, messages)
        self.optimizer = Optimizer(optimizer, model)
        self.room = None  # for overlap, where it was looked at
        self.gradients = Gradients(
            model, micro_batches=micro_batches, deterministic=deterministic, dtype=messages,
            overlap=None if zero or deterministic else self._overlap(overlap, bucket_mb),
        )
        self.steps_done = 0
        self.last_run: RunResult | None = None

    def _overlap(self, asked: bool | None, bucket_mb: float | None) -> dict | None:
        """What OverlappingReducer needs to know, None for no overlap; collective."""
        if self.mesh.dp.size == 1 or asked is False or asked is None and not self.mesh.several_threads:
            return None
        self.room = room(self.mesh)
        if asked is None and not (self.room.wire or self.room.core):
            return None
        return dict(stages=last_backwards(self.plan[self.mesh.pp.rank]), bucket_mb=bucket_mb, patient=not self.room.core)

    def _plan(self, schedule: str | Plan) -> Plan:
        """The plan of a schedule, proved right for this model."""
        ranks, stages = self.mesh.pp.size, self.model.stages
        plan = schedule
        if isinstance(schedule, str):
            plan = build(schedule, ranks, self.micro_batches, -(-stages // ranks))
        if placement(plan) != self.model.placement:
            raise ValueError(f"the schedule has its stages on the ranks as {placement(plan)}, the model as {self.model.placement}: "
                             "build the model with the placement of the schedule")
        check(plan, stages=stages, micro_batches=self.micro_batches)
        return plan

    def step(self, batch: Batch) -> StepResult:
        """One step on a global batch; every rank passes the same one."""
        step = self.steps_done + 1
        inject("step", step=step, rank=self.mesh.rank)
        self.gradients.clear()
        micros = self.split(batch, step)
        reducer = self.gradients.reducer
        with self._weights_stay():
            self.last_run = run(self.program, self.model.chunks, micros, self.mailbox, before=reducer.before, after=reducer.after)
        self.gradients.reduce()
        loss, squares, stop = self._sum_over_ranks(self.last_run.losses, self.gradients.squares())
        norm = math.sqrt(squares)
        lr = self.learning_rate(step)
        self.optimizer.update(lr=lr, step=step, grad_scale=self.clip_factor(norm))
        self.steps_done = step
        return StepResult(step, loss / batch.weight, norm, lr, stop > 0)

    def evaluate(self, batches) -> float:
        """The mean loss over some global batches, without dropout and without a change of the model."""
        loss = weight = 0.0
        for batch in batches:
            with self._weights_stay():
                done = run_forward(self.forward_program, self.model.chunks, self.split(batch, None), self.mailbox)
            loss += self._sum_over_ranks(done.losses, 0.0)[0]
            weight += batch.weight
        return loss / weight if weight else math.nan

    def split(self, batch: Batch, step: int | None) -> list[MicroBatch]:
        """This replica's rows of a global batch, cut into micro-batches; step None means evaluation (no dropout)."""
        scale = 1.0 / batch.weight if batch.weight else 0.0
        micros = []
        for number in range(self.micro_batches):
            first, last = self._rows(batch.size, number)
            inputs, targets = batch.fetch(first, last)
            keys = None if step is None else SampleKeys(step, np.arange(first, last))
            micros.append(MicroBatch(inputs, targets, keys, scale))
        return micros

    def _rows(self, size: int, number: int) -> tuple[int, int]:
        """The rows of a global batch that are micro-batch `number` of this replica."""
        dp, count = self.mesh.dp, self.micro_batches
        if self.deterministic:  # the cut must not depend on the replicas
            return split_range(size, dp.size * count, dp.rank * count + number)
        first, last = split_range(size, dp.size, dp.rank)
        a, b = split_range(last - first, count, number)
        return first + a, first + b

    def _weights_stay(self):
        """While several micro-batches run, products keep what they pack of the weights. Not under ZeRO 3: a block's
        weights are gathered for each use, or are one copy for a node, which panels of each rank would outweigh."""
        divided = self.model.zero is not None and self.model.zero.stage == 3
        return nullcontext() if divided or self.micro_batches == 1 else unchanged(self.model.buffers.data)

    def clip_factor(self, norm: float) -> float:
        """What every gradient is multiplied by, so that the norm is at most `clip`."""
        return self.clip / norm if self.clip and norm > self.clip else 1.0

    def _sum_over_ranks(self, losses: list[float], squares: float) -> tuple[float, float, float]:
        """One small all-reduce: losses are counted on tensor-parallel rank 0 of the last stage, squares as given."""
        if self.deterministic:
            return self._exact_sums(losses, squares)
        loss = math.fsum(losses) if self.mesh.tp.rank == 0 else 0.0
        totals = self.mesh.world.all_reduce(np.array([loss, squares, float(stop_requested())]))
        return float(totals[0]), float(totals[1]), float(totals[2])

    def _exact_sums(self, losses: list[float], squares: float) -> tuple[float, float, float]:
        """The same from all losses of all ranks by `fsum`, whose result doesn't depend on order or number."""
        mine = np.zeros(self.micro_batches + 2)
        if self.mesh.tp.rank == 0:
            mine[: len(losses)] = losses
        mine[-2:] = squares, stop_requested()
        rows = self.mesh.world.all_gather(mine[None])
        return math.fsum(rows[:, :-2].flat), math.fsum(rows[:, -2]), math.fsum(rows[:, -1])
