"""A parameter knows its place in the global model; all parameters of a rank live in one flat buffer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from mpipar.kernels.bfloat16 import narrow
from mpipar.kernels.dtypes import as_dtype, is_bfloat16, sums_dtype
from mpipar.kernels.memory import aligned_zeros
from mpipar.nn.initial import Initial


def split_range(length: int, parts: int, index: int) -> tuple[int, int]:
    """The half-open range of `length` elements that part `index` of `parts` holds.

    The first `length % parts` parts hold one element more: 65 over 2 gives (0, 33) and (33, 65).
    """
    small, larger = divmod(length, parts)
    start = index * small + min(index, larger)
    return start, start + small + (index < larger)


@dataclass(eq=False)
class Parameter:
    """One tensor of the model, declared without memory; `FlatBuffers` gives it `data`, `grad` and `master`.

    name: unique in the global model, the same in every layout.
    global_shape: the shape of the whole tensor.
    initial: how the values are drawn, a pure function of (seed, name, global index).
    shard_dim: the dim that is split over the tensor-parallel ranks, None if every tp rank holds the whole tensor.
    tp_rank, tp_size: which part of `shard_dim` this rank holds.
    decay: whether weight decay applies (weight matrices and embeddings, not biases and norms).
    data: the values that layers compute with. master: the values that the optimizer changes, the same memory as data
    but for bfloat16: then float32, of which data is the rounded copy. grad: of master's dtype. fresh: nothing was added
    to the gradient yet and its memory holds old numbers; who reads `grad` gets zeros.
    """

    name: str
    global_shape: tuple[int, ...]
    initial: Initial
    shard_dim: int | None = None
    tp_rank: int = 0
    tp_size: int = 1
    decay: bool = True
    data: np.ndarray | None = field(default=None, repr=False)
    master: np.ndarray | None = field(default=None, repr=False)
    fresh: bool = field(default=False, repr=False)
    _grad: np.ndarray | None = field(default=None, repr=False)

    @property
    def grad(self) -> np.ndarray | None:
        """The gradient: what was added since the step began."""
        self.settle_gradient()
        return self._grad

    @grad.setter
    def grad(self, array: np.ndarray | None):
        self._grad, self.fresh = array, False

    def settle_gradient(self) -> None:
        """Zeros, if nothing was added."""
        if self.fresh:
            self._grad[...] = 0
            self.fresh = False

    def claim_gradient(self) -> tuple[np.ndarray, bool]:
        """(array, whether to add to it): the first product of a step writes the whole array, so nobody has to clear it."""
        adds, self.fresh = not self.fresh, False
        return self._grad, adds

    @property
    def sharded(self) -> bool:
        """True if the tensor-parallel ranks hold different parts of the tensor."""
        return self.shard_dim is not None and self.tp_size > 1

    def index(self, tp_rank: int | None = None) -> tuple[slice, ...]:
        """The slice of the global tensor held by `tp_rank` (default: this rank)."""
        whole = [slice(0, n) for n in self.global_shape]
        if self.shard_dim is not None:
            rank = self.tp_rank if tp_rank is None else tp_rank
            whole[self.shard_dim] = slice(*split_range(self.global_shape[self.shard_dim], self.tp_size, rank))
        return tuple(whole)

    def shape(self, tp_rank: int | None = None) -> tuple[int, ...]:
        """The shape of the part held by `tp_rank` (default: this rank)."""
        return tuple(s.stop - s.start for s in self.index(tp_rank))

    @property
    def size(self) -> int:
        """Number of elements that this rank holds."""
        return math.prod(self.shape())

    @property
    def global_size(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.global_shape)

    def initialise(self, seed: int) -> None:
        """Write the initial values of this rank's part into `master` and `data`: the same bits in every layout."""
        assert self.data is not None, f"{self.name} has no memory yet"
        self.initial.fill(self.master, self.index(), self.global_shape, seed, self.name)
        if self.master is not self.data:
            narrow(self.master, self.data)


class FlatBuffers:
    """All parameters of a rank in one flat array, all gradients in another.

    With bfloat16, `data` has 16 bits a number, and `master` (else the same array as `data`) and `grad` are float32: what
    a step adds to a weight is mostly smaller than the last place of a bfloat16, and so is what a micro-batch adds to a
    gradient, so both would be lost in sums of 16 bits. A bucket is a slice of `grad`, an optimizer pass is one loop over
    `master` and `grad`. The arrays start at a 64-byte boundary. `bounds` (int64, n + 1) are the starts of the
    parameters, `decay` (n) is 1 where weight decay applies and 0 elsewhere. zeros_data, zeros_grad: (size, dtype) -> where
    the two arrays lie, private memory if not given.
    """

    def __init__(self, parameters: list[Parameter], dtype, *, zeros_data=aligned_zeros, zeros_grad=aligned_zeros):
        self.parameters = list(parameters)
        self.dtype = as_dtype(dtype)
        self.bounds = np.zeros(len(self.parameters) + 1, np.int64)
        self.bounds[1:] = np.cumsum([p.size for p in self.parameters])
        self.decay = np.array([float(p.decay) for p in self.parameters])
        self.data = zeros_data(self.size, self.dtype)
        self.grad = zeros_grad(self.size, sums_dtype(self.dtype))
        self.master = aligned_zeros(self.size, self.grad.dtype) if is_bfloat16(self.dtype) else self.data
        for parameter, start, stop in zip(self.parameters, self.bounds[:-1], self.bounds[1:]):
            parameter.data = self.data[start:stop].reshape(parameter.shape())
            parameter.grad = self.grad[start:stop].reshape(parameter.shape())
            parameter.master = parameter.data
            if self.master is not self.data:
                parameter.master = self.master[start:stop].reshape(parameter.shape())

    def begin_gradients(self) -> None:
        """A step begins: all gradients count as zero."""
        for parameter in self.parameters:
            parameter.fresh = True

    def settle_gradients(self, start: int = 0, stop: int | None = None) -> None:
        """Zeros where nothing was added, in all parameters that have elements in this range of `grad`: before `grad` is
        read as a whole."""
        stop = self.size if stop is None else stop
        for parameter, first, last in zip(self.parameters, self.bounds, self.bounds[1:]):
            if first < stop and last > start:
                parameter.settle_gradient()

    @property
    def size(self) -> int:
        """Number of elements of all parameters of this rank."""
        return int(self.bounds[-1])

    @property
    def copy(self) -> np.ndarray | None:
        """The rounded copy that an optimizer writes beside `master`: `data` with bfloat16, else None."""
        return None if self.master is self.data else self.data


def bytes_of_parameter(dtype, parameters=1.0, gradients=1.0, moments=1.0) -> float:
    """Bytes that training keeps for each parameter: value, gradient and two moments, and the master of a bfloat16.

    parameters, gradients, moments: the shares of them that a rank keeps (the master is one of the moments' kind).
    """
    dtype, sums = as_dtype(dtype), sums_dtype(as_dtype(dtype))
    return dtype.itemsize * parameters + sums.itemsize * (gradients + (3 if sums != dtype else 2) * moments)
