"""Causal multi-head attention over queries, keys and values that were projected before."""

from __future__ import annotations

import numpy as np

from mpipar.kernels.attention import attention_backward, attention_forward
from mpipar.kernels.dtypes import sums_dtype
from mpipar.nn.layer import Layer


class CausalAttention(Layer):
    """Each head: out = softmax(q k^T / sqrt(d), keys after the query left out) v, with d the width of a head.

    Works on the heads that this rank holds. The T x T matrix is never written: forward saves the logarithm of each
    row's sum of exponentials, backward computes the probabilities again, tile by tile.
    Source: Dao et al., FlashAttention; lecture 2, section 2.3 and 2.6(3).
    """

    def __init__(self, heads: int):
        self.heads = heads

    def forward(self, qkv: np.ndarray, at=None):
        """qkv [B, T, 3 D], the last dim ordered (q | k | v) and each of these by head -> out [B, T, D]."""
        batch, tokens, width = qkv.shape
        q, k, v = self._split(qkv)
        out = np.empty((batch, tokens, width // 3), qkv.dtype)
        lse = np.empty((batch, self.heads, tokens), sums_dtype(qkv.dtype))
        attention_forward(q, k, v, self._heads(out), lse)
        return out, (qkv, out, lse)

    def backward(self, saved, dy: np.ndarray, later=None):
        """With P the probabilities, S the scores and row sums r = sum(dout * out):

        dv = P^T dout,  dS = P * (dout v^T - r),  dq = dS k / sqrt(d),  dk = dS^T q / sqrt(d).
        """
        qkv, out, lse = saved
        dqkv = np.empty_like(qkv)
        attention_backward(*self._split(qkv), self._heads(out), lse, self._heads(dy), *self._split(dqkv))
        return dqkv

    def _heads(self, x):
        return x.reshape(*x.shape[:2], self.heads, x.shape[2] // self.heads)

    def _split(self, qkv):
        batch, tokens, width = qkv.shape
        parts = qkv.reshape(batch, tokens, 3, self.heads, width // 3 // self.heads)
        return parts[:, :, 0], parts[:, :, 1], parts[:, :, 2]
