"""`python -m mpipar.bench.peer`, or under `python -m torch.distributed.run --nproc-per-node N -m mpipar.bench.peer`.

Written as PyTorch's documentation has it (fused AdamW, scaled_dot_product_attention, no_sync for all micro-batches but
the last). Prints one JSON line on rank 0. --material: a folder that `mpipar.bench.material` wrote: initial values,
batches, learning rates; without it both are random.
"""

import argparse
import json
import os
import resource
import statistics
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from mpipar.bench.peer.layouts import Pipeline, Whole


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=("gpt", "mlp"), default="gpt")
    for name, value in dict(layers=4, dim=128, heads=4, seq=128, vocab=256, steps=20, skip=3).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--layout", choices=("dp", "fsdp", "tp", "pp"), default="dp")
    parser.add_argument("--schedule", choices=("gpipe", "1f1b", "interleaved", "zb-v"), default="1f1b")
    parser.add_argument("--stage-layers", help="layers of each stage, such as 3,3")
    parser.add_argument("--untied", action="store_true")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--material", metavar="FOLDER")
    parser.add_argument("--compile", action="store_true")
    return parser.parse_args()


class Material:
    """Batches (inputs and targets, whole) and the recipe of the optimizer."""

    def __init__(self, a):
        self.recipe = {"betas": (0.9, 0.999), "weight_decay": 0.01, "clip": 1.0, "lr": None}
        if a.material:
            folder = Path(a.material)
            self.recipe = json.loads((folder / "recipe.json").read_text())
            self.inputs = np.load(folder / "inputs.npy", mmap_mode="r")
            self.targets = np.load(folder / "targets.npy", mmap_mode="r") if a.model == "gpt" else None
        elif a.model == "gpt":
            tokens = np.random.default_rng(0).integers(a.vocab, size=(1, a.global_batch, a.seq + 1))
            self.inputs, self.targets = tokens[..., :-1], tokens[..., 1:]
        else:
            self.inputs = np.random.default_rng(0).standard_normal((1, a.global_batch, a.dim)).astype(a.dtype)
            self.targets = None

    def batch(self, step, rows):
        """(inputs, targets or None) of a step, the rows of this rank."""
        return [None if whole is None else torch.from_numpy(np.array(rows.of(whole[step % len(whole)], 0)))
                for whole in (self.inputs, self.targets)]

    def lr(self, step):
        """The learning rate of a step, counted from 0."""
        return self.recipe["lr"][step] if self.recipe["lr"] else 1e-3


def main():
    a = arguments()
    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, a.dtype))
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    material = Material(a)
    recipe = material.recipe
    work = (Pipeline if a.layout == "pp" else Whole)(a, rank, world)
    groups = [{"params": [p for p in work.parameters if (p.ndim > 1) == matrices],
               "weight_decay": recipe["weight_decay"] * matrices} for matrices in (True, False)]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], betas=recipe["betas"], fused=True)
    times, losses, first = [], [], None
    for step in range(1 + a.skip + a.steps):
        if world > 1:
            dist.barrier()
        started = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = material.lr(step)
        optimizer.zero_grad(set_to_none=True)
        losses.append(work.step(*material.batch(step, work.rows)))
        if recipe["clip"]:
            work.clip(recipe["clip"])
        optimizer.step()
        if first is None:
            first = time.time() - float(os.environ.get("MPIPAR_BENCH_STARTED", time.time()))
        if step > a.skip:
            times.append(time.perf_counter() - started)
    peak = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]
    if world > 1:
        everyone = [None] * world
        dist.all_gather_object(everyone, (peak[0], losses))
        peak = [p for p, _ in everyone]
        sums = np.sum([mine for _, mine in everyone], 0)
        losses = (sums / (1 if a.layout == "pp" else world)).tolist()
    if rank == 0:
        print(json.dumps({"version": torch.__version__, "step_s": statistics.median(times), "best_step_s": min(times), "losses": losses,
                          "process_first_step_s": first, "peak_rss_bytes": peak}))
    if world > 1:
        dist.barrier()  # a rank that closes its connections early ends the others
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
