"""Gradients summed in one fixed order, so that the number of replicas changes no bit.

The G micro-batches of the global batch are the leaves of one binary tree: a node of L leaves has the first ceil(L /
2) of them to its left, the others to its right, and is the sum left + right. With P replicas, a power of two, of M =
G / P micro-batches each, the micro-batches of a replica are all the leaves of one node. So each replica sums its own
subtree, whatever the order in which its schedule makes the gradients, and the upper levels are summed across the
replicas. Every P makes the same additions.
"""

from __future__ import annotations

import numpy as np

from mpipar.kernels.elementwise import add
from mpipar.kernels.memory import aligned_zeros
from mpipar.nn.parameter import FlatBuffers, split_range


def check_deterministic(deterministic: bool, zero: int, replicas: int) -> None:
    """ValueError where deterministic sums don't exist: with ZeRO, or unless the number of replicas is a power of
    two."""
    if deterministic and zero:
        raise ValueError(f"deterministic sums don't exist with zero={zero}: valid is zero=0")
    if deterministic and replicas & (replicas - 1):
        raise ValueError(f"deterministic sums need a power of two of replicas, not dp={replicas}: valid are 1, 2, 4, 8, ...")


def tree(first: int, last: int) -> dict[tuple[int, int], tuple[tuple, tuple]]:
    """{node: (sibling, parent)} of the tree over the leaves first .. last; a node is the range of its leaves."""
    above: dict = {}
    if last - first > 1:
        middle = first + (last - first + 1) // 2
        left, right = (first, middle), (middle, last)
        above = {**tree(*left), **tree(*right), left: (right, (first, last)), right: (left, (first, last))}
    return above


class TreeReducer:
    """Sums the gradients of all micro-batches of all replicas in the order of the tree.

    Each micro-batch accumulates in a buffer of its own; in a schedule whose backward passes come in order, about
    log2(M) + 1 of them are alive. stages: how many stages of the pipeline this rank holds. `before` and `after` go
    around every action of the schedule.
    """

    def __init__(self, buffers: FlatBuffers, group, micro_batches: int, stages: int):
        check_deterministic(True, 0, group.size)
        self.buffers, self.group, self.micro_batches, self.stages = buffers, group, micro_batches, stages
        self.above = tree(0, micro_batches)
        self.spare: list[np.ndarray] = []
        self.clear()

    def clear(self) -> None:
        """Before the first micro-batch of a step."""
        self.running: dict[int, np.ndarray] = {}            # micro-batch -> its gradient so far
        self.left = dict.fromkeys(range(self.micro_batches), self.stages)
        self.done: dict[tuple[int, int], np.ndarray] = {}   # node -> its sum

    def before(self, action, last: bool) -> None:
        """Let the action's gradients go to the buffer of its micro-batch."""
        if action.kind == "F":
            return
        if action.micro_batch not in self.running:
            buffer = self.spare.pop() if self.spare else aligned_zeros(self.buffers.size, self.buffers.grad.dtype)
            buffer[:] = 0
            self.running[action.micro_batch] = buffer
        self._attach(self.running[action.micro_batch])

    def after(self, action, last: bool) -> None:
        """Join what is complete: both halves of a node give the node."""
        if action.kind not in ("B", "W"):
            return
        self.left[action.micro_batch] -= 1
        if self.left[action.micro_batch]:
            return
        node, total = (action.micro_batch, action.micro_batch + 1), self.running.pop(action.micro_batch)
        while node in self.above and self.above[node][0] in self.done:
            sibling, parent = self.above[node]
            other = self.done.pop(sibling)
            left, right = (total, other) if node < sibling else (other, total)
            total = add(left, right, left)
            self.spare.append(right)
            node = parent
        self.done[node] = total

    def finish(self) -> None:
        """Every replica gets the sum over all, in the order of the tree; the parameters' gradients are views of it
        again."""
        total = self.done.pop((0, self.micro_batches))
        assert not self.done and not self.running, "a backward pass is not over"
        group, grad = self.group, self.buffers.grad
        ranges = [split_range(grad.size, group.size, rank) for rank in range(group.size)]
        sizes = [last - first for first, last in ranges]
        mine = sizes[group.rank]
        rows = group.all_to_all_v(total, sizes, [mine] * group.size).reshape(group.size, mine)
        while len(rows) > 1:
            rows = rows[0::2] + rows[1::2]
        part = grad[slice(*ranges[group.rank])]
        part[:] = rows[0]
        group.all_gather(part, sizes=sizes, out=grad)
        self.spare.append(total)
        self._attach(grad)

    def _attach(self, flat: np.ndarray) -> None:
        bounds = self.buffers.bounds
        for parameter, first, last in zip(self.buffers.parameters, bounds[:-1], bounds[1:]):
            parameter.grad = flat[first:last].reshape(parameter.shape())
