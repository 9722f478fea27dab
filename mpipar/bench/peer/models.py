"""The two models in PyTorch, written as its documentation has them, with tensor parallelism by two autograd functions.

Each parameter carries `place` = (mpipar's name of it, a function from mpipar's whole array to this rank's part in
PyTorch's layout) and `whole`: all tensor-parallel ranks hold the same.
"""

from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Copy(torch.autograd.Function):
    """x -> x; backward sums over the ranks (Megatron's f)."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        dy = dy.contiguous()
        dist.all_reduce(dy)
        return dy


class Sum(torch.autograd.Function):
    """x -> its sum over the ranks, in place; backward passes the gradient on (Megatron's g)."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, dy):
        return dy


class SplitCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of logits [N, V / P] whose columns are split, from the column `first`, and targets [N]."""

    @staticmethod
    def forward(ctx, z, targets, first):
        largest = z.max(1).values
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        z = z - largest[:, None]
        here = (targets >= first) & (targets < first + z.shape[1])
        column = torch.where(here, targets - first, 0)
        of_target = torch.where(here, z.gather(1, column[:, None])[:, 0], 0)
        share = z.exp_()
        sums = torch.stack([share.sum(1), of_target])
        dist.all_reduce(sums)
        share /= sums[0][:, None]
        ctx.save_for_backward(share, column, here)
        return (sums[0].log() - sums[1]).mean()

    @staticmethod
    def backward(ctx, scale):
        share, column, here = ctx.saved_tensors
        share.scatter_add_(1, column[:, None], -here.to(share.dtype)[:, None])
        return share.mul_(scale / len(share)), None, None


class Shard:
    """Which part of a split array this rank holds."""

    def __init__(self, rank=0, size=1):
        self.rank, self.size = rank, size

    def of(self, array, axis):
        """This rank's part of an array, the first parts one longer where it does not divide."""
        return np.array_split(array, self.size, axis)[self.rank]

    def start(self, length):
        """The first index of this rank's part."""
        return self.rank * (length // self.size) + min(self.rank, length % self.size)

    def length(self, length):
        """How much of a length this rank holds."""
        return length // self.size + (self.rank < length % self.size)


class Column(nn.Linear):
    """y = x W^T + b, this rank's outputs; x whole."""

    def __init__(self, name, inputs, outputs, shard, bias=True):
        super().__init__(inputs, outputs // shard.size, bias=bias)
        self.split = shard.size > 1
        put(self.weight, f"{name}.weight", lambda a: shard.of(a, -1).reshape(inputs, -1).T, whole=False)
        if bias:
            put(self.bias, f"{name}.bias", lambda a: shard.of(a, -1).reshape(-1), whole=False)

    def forward(self, x):
        return super().forward(Copy.apply(x) if self.split else x)


class Row(nn.Linear):
    """y = sum over the ranks of x W^T, + b; x this rank's part."""

    def __init__(self, name, inputs, outputs, shard, bias=True):
        super().__init__(inputs // shard.size, outputs, bias=bias)
        self.split = shard.size > 1
        put(self.weight, f"{name}.weight", lambda a: shard.of(a, 0).T, whole=False)
        if bias:
            put(self.bias, f"{name}.bias")

    def forward(self, x):
        if not self.split:
            return super().forward(x)
        y = Sum.apply(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


class Embedding(nn.Module):
    """Tokens [B, T] -> [B, T, D]: learned embedding (its rows split) and positions."""

    def __init__(self, a, shard):
        super().__init__()
        rows = shard.length(a.vocab)
        self.tokens, self.positions = nn.Embedding(rows, a.dim), nn.Embedding(a.seq, a.dim)
        self.first, self.rows, self.split = shard.start(a.vocab), rows, shard.size > 1
        put(self.tokens.weight, "embedding.weight", lambda x: shard.of(x, 0), whole=False)
        put(self.positions.weight, "embedding.positions")

    def forward(self, tokens):
        if self.split:
            index = tokens - self.first
            elsewhere = (index < 0) | (index >= self.rows)
            x = self.tokens(index.masked_fill(elsewhere, 0)).masked_fill(elsewhere[..., None], 0)
            x = Sum.apply(x)
        else:
            x = self.tokens(tokens)
        return x + self.positions.weight[: tokens.shape[1]]


class GPTBlock(nn.Module):
    """x + attention(norm(x)), then + mlp(norm(x))."""

    def __init__(self, number, a, shard):
        super().__init__()
        name, self.heads, self.width = f"block{number}", a.heads // shard.size, a.dim // a.heads
        self.norm1, self.norm2 = norm(f"{name}.norm1", a.dim), norm(f"{name}.norm2", a.dim)
        self.qkv = Column(f"{name}.qkv", a.dim, 3 * a.dim, shard)
        self.projection = Row(f"{name}.projection", a.dim, a.dim, shard)
        self.up, self.down = Column(f"{name}.up", a.dim, 4 * a.dim, shard), Row(f"{name}.down", 4 * a.dim, a.dim, shard)

    def forward(self, x):
        batch, tokens, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, self.width)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(y.transpose(1, 2).reshape(batch, tokens, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Head(nn.Module):
    """x [B, T, D] -> this rank's logits [B, T, V / P]; weight: the embedding's, or one of its own (`untied`)."""

    def __init__(self, a, shard, weight=None, name="embedding.weight"):
        super().__init__()
        self.norm, self.split = norm("head.norm", a.dim), shard.size > 1
        if weight is None:
            weight = nn.Parameter(torch.empty(shard.length(a.vocab), a.dim))
            nn.init.normal_(weight, std=0.02)
            put(weight, name, lambda x: shard.of(x, 0), whole=False)
        self.weight = weight

    def forward(self, x):
        x = self.norm(x)
        return F.linear(Copy.apply(x) if self.split else x, self.weight)


class MLPLayer(nn.Module):
    """x -> GeLU(x W); even layers split their outputs, odd ones their inputs."""

    def __init__(self, number, a, shard):
        super().__init__()
        self.linear = (Row if number % 2 else Column)(f"layer{number}", a.dim, a.dim, shard, bias=False)

    def forward(self, x):
        return F.gelu(self.linear(x))


def build(a, shard, separate_head=False):
    """(blocks of the model in order, loss function of (output, targets)).

    separate_head: a tied head has a weight of its own all the same (a pipeline's last stage).
    """
    if a.model == "mlp":
        split = a.layers % 2 == 1 and shard.size > 1

        def mean_square(out, _):
            if split:
                return Sum.apply(out.square().sum()) / (len(out) * a.dim)
            return out.square().mean()

        return [MLPLayer(i, a, shard) for i in range(a.layers)], mean_square
    first = Embedding(a, shard)
    blocks = [GPTBlock(i, a, shard) for i in range(a.layers)]
    if a.untied:
        head = Head(a, shard, name="head.weight")
    else:
        head = Head(a, shard, None if separate_head else first.tokens.weight)
    start = shard.start(a.vocab)

    def cross_entropy(out, targets):
        out, targets = out.flatten(0, 1), targets.flatten()
        return SplitCrossEntropy.apply(out, targets, start) if shard.size > 1 else F.cross_entropy(out, targets)

    return [first, *blocks, head], cross_entropy


def norm(name, dim):
    """A layer norm whose parameters know their names."""
    layer = nn.LayerNorm(dim)
    put(layer.weight, f"{name}.gamma")
    put(layer.bias, f"{name}.beta")
    return layer


def put(parameter, name, cut=lambda array: array, *, whole=True):
    """Note what a parameter is of mpipar's model."""
    parameter.place, parameter.whole = (name, cut), whole


def load(modules, folder):
    """The initial values of all parameters from the files NAME.npy, if there is a folder."""
    for parameter in (p for module in modules for p in module.parameters() if folder):
        name, cut = parameter.place
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(cut(np.load(Path(folder) / f"{name}.npy", mmap_mode="r")))))
