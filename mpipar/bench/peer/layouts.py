"""How the ranks of the PyTorch program share the work: `step(x, y)` makes the gradients and returns this rank's loss.

`parameters`: of this rank. `clip(limit)`: scales the gradients to a global norm of at most `limit`.
"""

import contextlib

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from mpipar.bench.peer.models import Shard, build, load


class Whole:
    """Every rank runs the whole model: one rank, DistributedDataParallel, FSDP2 or tensor parallelism."""

    def __init__(self, a, rank, world):
        self.layout, self.micro_batches = a.layout, a.micro_batches
        self.shard = Shard(rank, world) if a.layout == "tp" else Shard()
        self.rows = Shard() if a.layout == "tp" else Shard(rank, world)
        blocks, self.loss = build(a, self.shard)
        load(blocks, a.material)
        self.model = nn.Sequential(*blocks)
        self.synced = self.model
        if world > 1 and a.layout == "dp":
            self.model = self.synced = nn.parallel.DistributedDataParallel(self.model)
        elif a.layout == "fsdp":
            shard_fully(blocks if a.model == "mlp" else blocks[1:-1], self.model, world)
        self.parameters = list(self.model.parameters())
        if a.compile:
            self.model = torch.compile(self.model)

    def step(self, x, y):
        parts = self.micro_batches
        pieces = zip(x.chunk(parts), [None] * parts if y is None else y.chunk(parts))
        total = 0.0
        for number, (inputs, targets) in enumerate(pieces):
            later = number < parts - 1 and isinstance(self.synced, nn.parallel.DistributedDataParallel)
            with self.synced.no_sync() if later else contextlib.nullcontext():
                loss = self.loss(self.model(inputs), targets) / parts
                loss.backward()
            total += loss.item()
        return total

    def clip(self, limit):
        if self.shard.size == 1:
            clip_grad_norm_(self.parameters, limit)
        else:
            clip_over_ranks(self.parameters, [p for p in self.parameters if not p.whole or self.shard.rank == 0], limit)


class Pipeline:
    """Stages by torch.distributed.pipelining; a tied head is a second copy whose gradient is summed with the embedding's."""

    def __init__(self, a, rank, world):
        from torch.distributed import pipelining

        kinds = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B,
                 "interleaved": pipelining.ScheduleInterleaved1F1B, "zb-v": pipelining.ScheduleZBVZeroBubble}
        counts = [int(n) for n in a.stage_layers.split(",")]
        blocks, loss = build(a, Shard(), separate_head=True)
        bounds = np.cumsum([0, *counts]) + (a.model == "gpt")  # of the stages, in blocks
        bounds[0], bounds[-1] = 0, len(blocks)
        chunks = len(counts) // world
        own = [rank, 2 * world - 1 - rank] if a.schedule == "zb-v" else range(rank, world * chunks, world)
        parts = [nn.Sequential(*blocks[bounds[s] : bounds[s + 1]]) for s in own]
        load(parts, a.material)
        self.rows, self.parameters = Shard(), [p for part in parts for p in part.parameters()]
        self.first, self.last = 0 in own, len(counts) - 1 in own
        stages = [pipelining.PipelineStage(part, s, len(counts), torch.device("cpu")) for s, part in zip(own, parts)]
        self.schedule = kinds[a.schedule](stages if chunks > 1 else stages[0], a.micro_batches, loss_fn=loss)
        self.embedding = self.head = self.ends = None
        if a.model == "gpt" and not a.untied:
            self.embedding = blocks[0].tokens.weight if self.first else None
            self.head = blocks[-1].weight if self.last else None
            if a.schedule != "zb-v":
                self.ends = dist.new_group([0, world - 1])  # a call that all ranks have to make

    def step(self, x, y):
        losses = []
        inputs = (x,) if self.first else ()
        targets = dict(target=x if y is None else y, losses=losses) if self.last else {}
        self.schedule.step(*inputs, **targets, return_outputs=False)
        if self.embedding is not None and self.head is not None:
            self.embedding.grad += self.head.grad
            self.head.grad.copy_(self.embedding.grad)
        elif self.embedding is not None or self.head is not None:
            dist.all_reduce((self.head if self.embedding is None else self.embedding).grad, group=self.ends)
        return torch.stack(losses).mean().item() if losses else 0.0

    def clip(self, limit):
        clip_over_ranks(self.parameters, [p for p in self.parameters if p is not self.head], limit)


def shard_fully(blocks, model, world):
    """FSDP2 over all ranks, block by block."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world,))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def clip_over_ranks(parameters, counted, limit):
    """clip_grad_norm_ where the ranks hold different parameters; counted: those that count on this rank."""
    squares = get_total_norm([p.grad for p in counted]).square() if counted else torch.zeros(())
    dist.all_reduce(squares)
    clip_grads_with_norm_(parameters, limit, squares.sqrt())
