"""GPT: a pre-norm GPT-2 with learned positions, split over tensor-parallel ranks and pipeline stages.

    x = embedding(tokens) + positions
    x = x + projection(attention(norm(x)))        for every block
    x = x + down(gelu(up(norm(x))))
    logits = norm(x) W^T, W the embedding (tied) or a matrix of its own

Source: Radford et al., Language Models are Unsupervised Multitask Learners; the split is Megatron's (Shoeybi et al.).
"""

from __future__ import annotations

import math

import numpy as np

from mpipar.kernels.elementwise import add
from mpipar.models.model import Block, MicroBatch, Model
from mpipar.nn.attention import CausalAttention
from mpipar.nn.dropout import Dropout
from mpipar.nn.gelu import Gelu
from mpipar.nn.initial import Normal
from mpipar.nn.norm import LayerNorm
from mpipar.parallel.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    check_divides,
    sharded,
)


class EmbeddingBlock(Block):
    """Tokens [B, T] -> x [B, T, D], with dropout."""

    def __init__(self, vocab, dim, seq, *, dropout, seed, group):
        self.embedding = VocabParallelEmbedding("embedding", vocab, dim, seq, group=group)
        self.dropout = Dropout("embedding", dropout, seed=seed)

    def __str__(self):
        return "embedding"

    def input_shape(self, micro: MicroBatch):
        return micro.inputs.shape

    def forward(self, x, micro: MicroBatch):
        x, tokens = self.embedding.forward(x)
        x, mask = self.dropout.forward(x, micro.keys)
        return x, (tokens, mask)

    def backward(self, saved, dy, micro: MicroBatch, later=None):
        tokens, mask = saved
        return self.embedding.backward(tokens, self.dropout.backward(mask, dy), later)


class TransformerBlock(Block):
    """x [B, T, D] -> x + attention(norm(x)), then + mlp(norm(x)); two all-reduces over tp each way."""

    recomputes = ("attention", "full")

    def __init__(self, number, dim, heads, seq, *, layers, dropout, seed, group):
        name = f"block{number}"
        self.number, self.dim, self.seq = number, dim, seq
        wide, residual = Normal(0.02), Normal(0.02 / math.sqrt(2 * layers))
        self.norm1 = LayerNorm(f"{name}.norm1", dim)
        self.qkv = ColumnParallelLinear(f"{name}.qkv", dim, 3 * dim, parts=3, group=group, initial=wide)
        self.attention = CausalAttention(heads // group.size)
        self.projection = RowParallelLinear(f"{name}.projection", dim, dim, group=group, initial=residual)
        self.dropout1 = Dropout(f"{name}.attention", dropout, seed=seed)
        self.norm2 = LayerNorm(f"{name}.norm2", dim)
        self.up = ColumnParallelLinear(f"{name}.up", dim, 4 * dim, group=group, initial=wide)
        self.gelu = Gelu()
        self.down = RowParallelLinear(f"{name}.down", 4 * dim, dim, group=group, initial=residual)
        self.dropout2 = Dropout(f"{name}.mlp", dropout, seed=seed)

    def __str__(self):
        return f"block {self.number}"

    def input_shape(self, micro: MicroBatch):
        return (*micro.inputs.shape, self.dim)

    def flops(self):
        """2 T 12 D^2 of the four products, and 2 T^2 D of attention, which leaves half of the pairs out."""
        return 24.0 * self.seq * self.dim**2 + 2.0 * self.seq**2 * self.dim

    def forward(self, x, micro: MicroBatch):
        """Keeps neither the outputs of the norms nor GeLU's: backward makes them again from what lies before them."""
        n1, norm1 = self.norm1.forward(x)
        qkv, _ = self.qkv.forward(n1)
        heads, attention = self.attention.forward(qkv)
        x, (heads, mask1) = self._add_branch(self.projection, self.dropout1, heads, x, micro)
        n2, norm2 = self.norm2.forward(x)
        hidden, active = self.up.forward_gelu(n2)
        del n2
        x, (_, mask2) = self._add_branch(self.down, self.dropout2, active, x, micro)
        return x, [norm1, attention, heads, mask1, norm2, hidden, mask2]

    def backward(self, saved, dy, micro: MicroBatch, later=None):
        """Each residual sends its gradient both round the branch and through it; the norm adds the two."""
        norm1, attention, heads, mask1, norm2, hidden, mask2 = saved
        saved.clear()
        g = self.dropout2.backward(mask2, dy)
        d, active = self.gelu.backward_again(hidden, self.down.input_gradient(g))
        self.down.weight_gradient(active, g, later)
        del hidden, active  # each array goes as soon as it was used
        self.up.weight_gradient(self.norm2.again(norm2), d, later)
        dy = self.norm2.backward(norm2, self.up.input_gradient(d), later, residual=dy)
        del d, g, norm2
        g = self.dropout1.backward(mask1, dy)
        self.projection.weight_gradient(heads, g, later)
        d = self.attention.backward(attention, self.projection.input_gradient(g), later)
        del attention, heads
        self.qkv.weight_gradient(self.norm1.again(norm1), d, later)
        return self.norm1.backward(norm1, self.qkv.input_gradient(d), later, residual=dy)

    def drop_attention(self, saved):
        """Without queries, keys, values and the output of attention: 4 of the 10 D that a token keeps."""
        norm1, _, _, *rest = saved
        return [norm1, None, None, *rest]

    def rebuild_attention(self, saved):
        """Makes again what `drop_attention` left out, from what lies before it."""
        norm1, _, _, *rest = saved
        qkv, _ = self.qkv.forward(self.norm1.again(norm1))
        heads, attention = self.attention.forward(qkv)
        return [norm1, attention, heads, *rest]

    def _add_branch(self, linear, dropout, h, x, micro):
        """x + dropout(linear(h)); without dropout the bias and the residual are added in one pass."""
        if dropout.p == 0 or micro.keys is None:
            y, saved = linear.forward(h, residual=x)
            return y, (saved, None)
        y, saved = linear.forward(h)
        y, mask = dropout.forward(y, micro.keys)
        return add(y, x, y), (saved, mask)


class HeadBlock(Block):
    """x [B, T, D] -> the sum of the cross-entropies of the targets [B, T]."""

    def __init__(self, weight, dim, seq, *, group):
        self.norm = LayerNorm("head.norm", dim)
        self.head = VocabParallelHead(weight, group=group)
        self.dim, self.seq = dim, seq

    def __str__(self):
        return "head"

    def input_shape(self, micro: MicroBatch):
        return (*micro.inputs.shape, self.dim)

    def flops(self):
        return 2.0 * self.seq * self.dim * self.head.weight.global_shape[0]

    def forward(self, x, micro: MicroBatch):
        """The sum of the losses; without targets the logits of this rank's columns of the last token, [B, V / P]."""
        n, norm = self.norm.forward(x)
        if micro.targets is None:
            return self.head.logits(np.ascontiguousarray(n[:, -1:])), None
        loss, head = self.head.forward(n, micro.targets)
        return loss, (norm, head)

    def backward(self, saved, dy, micro: MicroBatch, later=None):
        norm, head = saved
        return self.norm.backward(norm, self.head.backward(head, micro.scale, later), later)


class GPT(Model):
    """A GPT spread over `mesh`; without a mesh, all of it on this rank.

    layers, dim, heads, seq (longest sequence), vocab: sizes of the global model. tied: the output head is the
    embedding. dtype: "float32", "float64" or "bfloat16". seed: of initial values and dropout. virtual_stages, layers_per_stage,
    placement, recompute: see Model.
    allocate=False: only declared, memory comes by `allocate()`.
    ValueError, before any array is made, if heads don't divide dim or tp doesn't divide heads.
    """

    def __init__(self, *, layers=4, dim=128, heads=4, vocab=256, seq=128, mesh=None, tied=True, dropout=0.0,
                 dtype="float32", seed=0, virtual_stages=1, layers_per_stage=None, placement=None,
                 recompute="none", allocate=True):
        if mesh is None:
            from mpipar.comm.mesh import Mesh

            mesh = Mesh.serial()
        if min(layers, dim, heads, vocab, seq) < 1:
            raise ValueError("layers, dim, heads, vocab and seq must be at least 1")
        if dim % heads:
            valid = [n for n in range(1, dim + 1) if dim % n == 0]
            raise ValueError(f"heads={heads} does not divide dim={dim}: heads can be one of {valid}")
        check_divides("heads", heads, mesh.tp)
        self.layers, self.dim, self.heads, self.vocab, self.seq = layers, dim, heads, vocab, seq
        self.is_tied, self.dropout = tied, dropout
        group = mesh.tp
        front = EmbeddingBlock(vocab, dim, seq, dropout=dropout, seed=seed, group=group)
        middle = [
            TransformerBlock(i, dim, heads, seq, layers=layers, dropout=dropout, seed=seed, group=group)
            for i in range(layers)
        ]
        own = sharded("head.weight", (vocab, dim), Normal(0.02), group, 0)
        back = HeadBlock(front.embedding.weight if tied else own, dim, seq, group=group)
        super().__init__([front, *middle, back], front=1, back=1, mesh=mesh, dtype=dtype, seed=seed,
                         virtual_stages=virtual_stages, layers_per_stage=layers_per_stage, placement=placement,
                         recompute=recompute)
        if allocate:
            self.allocate()
