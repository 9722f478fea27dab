"""The PyTorch program that `mpipar.bench train --against torch` measures: the same models, one thread a rank, gloo.

Run alone by `python torch_peer.py --model gpt`, or under `python -m torch.distributed.run --nproc-per-node N`. It is
written as PyTorch's documentation has it (fused AdamW, scaled_dot_product_attention). Prints one JSON line on rank 0.
"""

import argparse
import json
import os
import resource
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class GPTBlock(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.projection = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        batch, tokens, dim = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(y.transpose(1, 2).reshape(batch, tokens, dim))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(a.vocab, a.dim), nn.Embedding(a.seq, a.dim)
        self.blocks = nn.Sequential(*(GPTBlock(a.dim, a.heads) for _ in range(a.layers)))
        self.norm = nn.LayerNorm(a.dim)

    def forward(self, x):
        h = self.tokens(x) + self.positions.weight[: x.shape[1]]
        return F.linear(self.norm(self.blocks(h)), self.tokens.weight)  # the head is the embedding


class MLP(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a.dim, a.dim, bias=False) for _ in range(a.layers))

    def forward(self, x):
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=("gpt", "mlp"), default="gpt")
    for name, value in dict(layers=4, dim=128, heads=4, seq=128, vocab=256, steps=20, skip=3).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--compile", action="store_true")
    return parser.parse_args()


def main():
    a = arguments()
    torch.set_num_threads(1)
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    rows = a.global_batch // world
    if a.model == "gpt":
        model, data = GPT(a), torch.randint(a.vocab, (rows, a.seq + 1))
        x, y = data[:, :-1].contiguous(), data[:, 1:].contiguous()
    else:
        model, x, y = MLP(a), torch.randn(rows, a.dim), None
    if world > 1:
        model = nn.parallel.DistributedDataParallel(model)
    if a.compile:
        model = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def loss_of(out):
        return out.square().mean() if y is None else F.cross_entropy(out.flatten(0, 1), y.flatten())

    times, first = [], None
    for step in range(1 + a.skip + a.steps):
        if world > 1:
            dist.barrier()
        started = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model(x))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        value = loss.item()
        if first is None:
            first = time.time() - float(os.environ.get("MPIPAR_BENCH_STARTED", time.time()))
        if step > a.skip:
            times.append(time.perf_counter() - started)
    peak = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]
    if world > 1:
        everyone = [None] * world
        dist.all_gather_object(everyone, peak[0])
        peak = everyone
    if rank == 0:
        print(json.dumps({"version": torch.__version__, "step_s": statistics.median(times), "best_step_s": min(times), "loss": value,
                          "process_first_step_s": first, "peak_rss_bytes": peak}))
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
