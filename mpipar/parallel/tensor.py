"""Tensor parallelism: one layer's matrices are split over the ranks of a group.

Two rules of Megatron (Shoeybi et al.; lecture 2, section 2.3) carry everything. A *column-parallel* layer splits its
outputs: every rank has the whole x and makes its own part of y; nothing is sent forward, and backward sums dx over
the ranks (the operator f). A *row-parallel* layer splits its inputs: every rank has its own part of x, the partial
products are summed forward (the operator g), and nothing is sent backward. Column then row, with an element-wise
function between, costs one all-reduce each way.

A group of one rank sends nothing: these layers are then the serial ones.

What every rank holds whole (norms, biases of row-parallel layers, positions) needs no sum of its gradients: it sees the
whole x and, behind f, the whole dy, so every rank computes the same gradient.
"""

from __future__ import annotations

import numpy as np

from mpipar.kernels.dtypes import sums_dtype
from mpipar.kernels.elementwise import add, add_bias, bias_residual
from mpipar.kernels.embedding import add_positions, embedding_backward, embedding_forward, positions_backward
from mpipar.kernels.gelu import gelu_forward
from mpipar.kernels.gemm import gemm
from mpipar.kernels.loss import cross_entropy_backward, cross_entropy_sums, row_max
from mpipar.kernels.memory import passing_like
from mpipar.nn.initial import Constant, Initial, Normal
from mpipar.nn.layer import Layer, run_or_defer
from mpipar.nn.linear import Linear, rows
from mpipar.nn.parameter import Parameter, split_range


def sharded(name: str, shape: tuple[int, ...], initial: Initial, group, dim: int, *, decay: bool = True) -> Parameter:
    """A parameter whose `dim` is split over the ranks of `group`."""
    return Parameter(name, shape, initial, shard_dim=dim, tp_rank=group.rank, tp_size=group.size, decay=decay)


def check_divides(what: str, number: int, group) -> None:
    """Refuse a size that the tensor-parallel ranks can't share evenly, with the sizes of tp that would do."""
    if number % group.size:
        valid = [n for n in range(1, number + 1) if number % n == 0]
        raise ValueError(f"{what}={number} is not divisible by tp={group.size}: tp can be one of {valid}")


class ColumnParallelLinear(Linear):
    """y = x W + b with the columns of W and b split over the group: x whole, y this rank's columns.

    W [in, out], or [in, parts, out / parts] for `parts` projections side by side of which each is split (q, k, v).
    """

    def __init__(self, name, inputs, outputs, *, group, initial, parts=1, bias=True,
                 needs_input_gradient=True):
        check_divides(f"{name}: outputs", outputs // parts, group)
        shape = (inputs, outputs) if parts == 1 else (inputs, parts, outputs // parts)
        weight = sharded(f"{name}.weight", shape, initial, group, len(shape) - 1)
        offset = sharded(f"{name}.bias", shape[1:], Constant(0.0), group, len(shape) - 2, decay=False) if bias else None
        super().__init__(weight, offset, needs_input_gradient=needs_input_gradient)
        self.group = group

    def input_gradient(self, dy):
        """dx = sum over the ranks of dy W^T (the operator f); weight and bias gradients stay local."""
        dx = super().input_gradient(dy)
        return dx if dx is None else self.group.all_reduce(dx, name=self.weight.name)


class RowParallelLinear(Linear):
    """y = sum over the ranks of x W, + b (+ residual), with the rows of W split over the group.

    x is this rank's columns [..., in / P], y is whole; b is held whole by every rank and added once, after the sum.
    """

    def __init__(self, name, inputs, outputs, *, group, initial, bias=True):
        check_divides(f"{name}: inputs", inputs, group)
        weight = sharded(f"{name}.weight", (inputs, outputs), initial, group, 0)
        super().__init__(weight, Parameter(f"{name}.bias", (outputs,), Constant(0.0), decay=False) if bias else None)
        self.group = group

    def forward(self, x, at=None, *, residual=None):
        """x [..., in / P], residual [..., out] or None -> y [..., out]; saves x."""
        y = np.empty((*x.shape[:-1], self.weight.data.shape[1]), x.dtype)
        bias = None if self.bias is None else self.bias.data
        around = None if residual is None else rows(residual)
        if self.group.size == 1:  # nothing to wait for between the product and what is added to it
            gemm(rows(x), self.weight.data, rows(y), bias=bias, residual=around)
            return y, x
        gemm(rows(x), self.weight.data, rows(y))
        self.group.all_reduce(y, name=self.weight.name)  # the operator g
        if bias is not None and around is not None:
            bias_residual(rows(y), bias, around, rows(y))
        elif bias is not None:
            add_bias(rows(y), bias, rows(y))
        elif around is not None:
            add(rows(y), around, rows(y))
        return y, x

    def forward_gelu(self, x):
        """(y, GeLU(y)); GeLU comes after the sum over the ranks: GeLU(a) + GeLU(b) is not GeLU(a + b)."""
        if self.group.size == 1:
            return super().forward_gelu(x)
        y, _ = self.forward(x)
        return y, gelu_forward(y, passing_like(y))

    # Backward is Linear's: dx = dy W^T are this rank's columns, and nothing is sent.


class VocabParallelEmbedding(Layer):
    """Token embedding with the vocabulary split over the group, plus learned positions that every rank holds.

    Each rank looks up the tokens of its own rows, the others stay zero, and the sum over the ranks is the lookup.
    Any vocabulary size: the first V % P ranks hold one row more.
    """

    def __init__(self, name: str, vocab: int, dim: int, positions: int, *, group, std: float = 0.02):
        if vocab < group.size:
            raise ValueError(f"vocab={vocab} is smaller than tp={group.size}: tp can be at most {vocab}")
        self.weight = sharded(f"{name}.weight", (vocab, dim), Normal(std), group, 0)
        self.positions = Parameter(f"{name}.positions", (positions, dim), Normal(std))
        self.first = split_range(vocab, group.size, group.rank)[0]
        self.group = group

    def forward(self, tokens, at=None):
        """tokens int64 [B, T] -> x [B, T, D]; saves the tokens. ValueError for a token that is not in the vocabulary."""
        vocab = self.weight.global_shape[0]
        if tokens.dtype.kind not in "iu":
            raise ValueError(f"tokens are {tokens.dtype}: they must be integers from 0 to {vocab - 1}")
        if tokens.size and not (0 <= tokens.min() and tokens.max() < vocab):
            raise ValueError(f"tokens reach from {tokens.min()} to {tokens.max()}: valid are 0 to {vocab - 1}")
        x = np.empty((*tokens.shape, self.weight.data.shape[1]), self.weight.data.dtype)
        embedding_forward(tokens.reshape(-1), self.weight.data, self.first, rows(x))
        self.group.all_reduce(x, name=self.weight.name)
        add_positions(x, self.positions.data)
        return x, tokens

    def backward(self, saved, dy, later=None):
        """dweight[token] += dy of that place (own rows only),  dpositions[t] += sum over the batch of dy[:, t]."""
        tokens = saved
        embedding_backward(tokens.reshape(-1), rows(dy), self.first, self.weight.grad)
        positions_backward(dy, self.positions.grad)
        return None


class VocabParallelHead(Layer):
    """The output head and its cross-entropy, with the vocabulary split over the group.

    logits = x W^T for W [V, D], which may be the embedding's own weight (a tied head). The whole row of logits is
    never gathered: the ranks exchange each row's maximum, then its sum of exponentials and the target's logit.
    """

    def __init__(self, weight: Parameter, *, group):
        self.weight = weight
        self.first = split_range(weight.global_shape[0], group.size, group.rank)[0]
        self.group = group

    def logits(self, x):
        """x [B, T, D] -> this rank's columns of the logits, [B T, V / P]."""
        out = np.empty((x.size // x.shape[-1], self.weight.data.shape[0]), x.dtype)
        return gemm(rows(x), self.weight.data.T, out)

    def forward(self, x, targets):
        """x [B, T, D], targets int64 [B, T] (negative: left out) -> (sum of the losses as a float, saved).

        loss of a row = log(sum_j exp(z_j - max)) + max - z_target.
        """
        targets = targets.reshape(-1)
        if targets.max(initial=0) >= self.weight.global_shape[0]:
            raise ValueError(f"targets reach {targets.max()}: valid are up to {self.weight.global_shape[0] - 1}, negative: left out")
        logits = self.logits(x)
        maximum = np.empty(len(targets), sums_dtype(x.dtype))
        row_max(logits, maximum)
        self.group.all_reduce(maximum, "max", name="logits' maximum")
        sums = np.empty((2, len(targets)), maximum.dtype)  # sum of exponentials; logit of the target
        cross_entropy_sums(logits, maximum, targets, self.first, sums[0], sums[1])
        self.group.all_reduce(sums, name="logits' sums")
        valid = targets >= 0
        losses = np.log(sums[0][valid].astype(np.float64)) + (maximum - sums[1])[valid]
        return float(losses.sum()), (x, logits, maximum, sums[0], targets)

    def backward(self, saved, scale, later=None):
        """dz = (softmax(z) - onehot(target)) scale, 0 in rows left out;  dx = sum over ranks of dz W;  dW += dz^T x.

        `scale` is 1 / (number of tokens of the global batch): the one place where the mean is taken. dz replaces the
        saved logits, so backward can run once.
        """
        x, logits, maximum, sum_exp, targets = saved
        cross_entropy_backward(logits, maximum, sum_exp, targets, self.first, scale, logits)

        def weight_gradient():
            gradient, adds = self.weight.claim_gradient()
            gemm(logits.T, rows(x), gradient, accumulate=adds)

        run_or_defer(weight_gradient, later)
        dx = np.empty_like(x)
        gemm(logits, self.weight.data, rows(dx))
        return self.group.all_reduce(dx, name=self.weight.name)
