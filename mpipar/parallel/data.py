"""Data parallelism: every replica has the whole model and its own rows of the batch; gradients are summed.

The loss of every replica is already divided by the number of tokens of the GLOBAL batch, so the sum over the replicas
is the gradient of the mean loss, and nothing is divided here (lecture 1, section 1.7).
"""

from __future__ import annotations

import numpy as np

from mpipar.kernels.bfloat16 import narrow, widen
from mpipar.kernels.dtypes import is_bfloat16

PIECE = 1 << 22  # gradients that are rounded for a message at a time


class GradientReducer:
    """Sums the flat gradients over the replicas: one all-reduce a step, however many micro-batches ran.

    buffers: the model's FlatBuffers. dtype: of the messages, see `sum_gradients`. With overlap, see overlap.py.
    """

    def __init__(self, buffers, group, dtype):
        self.buffers = buffers
        self.group = group
        self.dtype = np.dtype(dtype)

    before = after = None  # nothing to do around the actions of the schedule

    def clear(self) -> None:
        """All gradients zero, before the first micro-batch."""
        self.buffers.begin_gradients()

    def finish(self) -> None:
        """Block until every replica holds the sum."""
        self.buffers.settle_gradients()
        sum_gradients(self.group, self.buffers.grad, self.dtype)


def sum_gradients(group, gradients: np.ndarray, dtype: np.dtype) -> None:
    """The sum over the ranks of a group is written into every rank's gradients (C-contiguous).

    dtype: of the messages. bfloat16: float32 gradients are rounded for the message, summed in float32, and every rank
    gets the same rounded sums.
    """
    if group.size == 1 or not is_bfloat16(dtype):
        group.all_reduce(gradients, name="gradients")
        return
    flat = gradients.reshape(-1)
    message = np.empty(min(flat.size, PIECE), dtype)
    for start in range(0, flat.size, PIECE):
        piece = flat[start : start + PIECE]
        group.all_reduce(narrow(piece, message[: piece.size]))
        widen(message[: piece.size], piece)
