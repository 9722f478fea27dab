"""ZeRO: the replicas divide what each of them would otherwise hold whole.

Stage 1 divides the optimizer's state, stage 2 the gradients too, stage 3 the parameters too. With n bytes of
parameters (float32 or float64, AdamW), P replicas and M micro-batches, a rank holds between steps and sends in a step
(ring counting)

    stage   parameters + gradients + moments     bytes sent
    0       n + n + 2 n                          2 (P-1)/P n       all-reduce of the gradients
    1       n + n + 2 n / P                      2 (P-1)/P n       reduce-scatter of gradients, all-gather of parameters
    2       n + n / P + 2 n / P                  (M+1) (P-1)/P n   the gradients of each micro-batch go at once
    3       n / P + n / P + 2 n / P              3 M (P-1)/P n     parameters are gathered for forward and for backward

Under stages 2 and 3 a block's whole gradients, and under stage 3 its whole parameters, exist only while the block
computes (the next block's parameters are fetched meanwhile). What several blocks of a stage share, a tied embedding,
stays from its first use to its last. Replicas of one node keep under stage 3 and the back end shm ONE copy of the
parameters for the node: each updates its part there, nothing is gathered, and each sends M (P-1)/P n. Where a
schedule delays weight gradients, micro-batches that overlap are sent as one.

Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020.
"""

from __future__ import annotations

import numpy as np

from mpipar.kernels.bfloat16 import narrow, widen
from mpipar.kernels.dtypes import is_bfloat16
from mpipar.kernels.elementwise import add
from mpipar.kernels.memory import aligned_zeros
from mpipar.nn.layer import Layer
from mpipar.nn.parameter import FlatBuffers, Parameter, split_range

STAGES = (0, 1, 2, 3)


def check_stage(stage: int) -> None:
    """ValueError for a stage that does not exist."""
    if stage not in STAGES:
        raise ValueError(f"zero={stage!r} is not a stage of ZeRO: valid are {', '.join(map(str, STAGES))}")


def shares(stage: int, replicas: int) -> tuple[float, float, float]:
    """Which share of the parameters, the gradients and the optimizer's state a rank holds between steps."""
    return tuple(1 / replicas if stage >= least else 1.0 for least in (3, 2, 1))


def bytes_sent(stage: int, replicas: int, size: int, micro_batches: int) -> float:
    """Bytes that a rank sends over dp in a step for `size` bytes of parameters and as many of gradients (ring
    counting)."""
    passes = {0: 2, 1: 2, 2: micro_batches + 1, 3: 3 * micro_batches}[stage]
    return passes * (replicas - 1) / replicas * size


class Unit:
    """A run of the flat buffers that is gathered and reduced as one. Replica r keeps the r-th of P near-equal parts.

    To an optimizer it is a pair of flat buffers: `data` and `grad` are this replica's part, and `bounds` and `decay`
    its parameters as in FlatBuffers (a parameter may lie wholly in another replica's part: its segment is empty).
    """

    def __init__(self, parameters: list[Parameter], start: int, group):
        ends = np.cumsum([0, *(p.size for p in parameters)])
        self.parameters, self.name = parameters, parameters[0].name if parameters else ""
        self.start, self.stop = start, start + int(ends[-1])
        ranges = [split_range(int(ends[-1]), group.size, rank) for rank in range(group.size)]
        self.sizes = [last - first for first, last in ranges]
        self.part = slice(*ranges[group.rank])
        self.bounds = np.clip(ends, *ranges[group.rank]) - self.part.start
        self.decay = np.array([float(p.decay) for p in parameters])
        self.places = [(slice(int(a), int(b)), p.shape()) for p, a, b in zip(parameters, ends[:-1], ends[1:])]
        self.data = self.grad = self.master = None
        self.whole = {"data": None, "grad": None}   # while a block uses them
        self.pending = None                         # a gather of the parameters on its way
        self.users = 0                              # backward passes that still add to the whole gradient

    @property
    def size(self) -> int:
        """Elements of this replica's part."""
        return self.part.stop - self.part.start

    @property
    def copy(self) -> np.ndarray | None:
        """As FlatBuffers.copy: the rounded parameters beside a master, else None."""
        return None if self.master is self.data else self.data

    def own(self, parameter: Parameter, what: str) -> np.ndarray:
        """This replica's part of "data" or "grad" of a parameter, 1-D, perhaps empty."""
        i = self.parameters.index(parameter)
        return getattr(self, what)[self.bounds[i] : self.bounds[i + 1]]

    def views(self, whole: np.ndarray) -> list[np.ndarray]:
        """A flat array of the whole unit as one array for each parameter."""
        return [whole[place].reshape(shape) for place, shape in self.places]

    def attach(self, what: str, whole: np.ndarray | None) -> None:
        """Let the parameters' "data" or "grad" be views of `whole`, or be nothing."""
        self.whole[what] = whole
        arrays = [None] * len(self.parameters) if whole is None else self.views(whole)
        for parameter, array in zip(self.parameters, arrays):
            setattr(parameter, what, array)


class Spare:
    """Arrays that are allocated once, by zeros(size, dtype), and used again, by length."""

    def __init__(self, dtype, zeros):
        self.dtype, self.zeros, self.free = dtype, zeros, {}

    def take(self, size: int) -> np.ndarray:
        """A flat array, contents undefined."""
        free = self.free.get(size)
        return free.pop() if free else self.zeros(size, self.dtype)

    def give(self, array: np.ndarray) -> None:
        """The array may be taken again."""
        self.free.setdefault(array.size, []).append(array)


class Zero:
    """The parameters, gradients and optimizer states of one rank, divided over the replicas of `group`.

    buffers: the rank's flat buffers, of whose memory only what the stage keeps whole is kept. chunks: for each stage
    of this rank its blocks, in order. tied: parameters that another pipeline rank holds too. seed: None where the
    buffers hold the values already, else the seed to draw them with. dtype: of the messages with gradients, bfloat16 or
    the parameters' own.
    """

    before = after = None  # nothing to do around the actions of the schedule: the blocks do it

    def __init__(self, stage: int, buffers: FlatBuffers, chunks: dict[int, list[Layer]], tied, group, *, seed=None, dtype=None):
        check_stage(stage)
        self.stage, self.buffers, self.group = stage, buffers, group
        self.units = self._cut(chunks, set(tied))
        self.unit_of = {p: unit for unit in self.units for p in unit.parameters}
        self.rounds = buffers.copy is not None      # bfloat16: gradients are sent as such, masters are part of the state
        self.spare = {
            "data": Spare(buffers.data.dtype, aligned_zeros),
            "grad": Spare(buffers.grad.dtype, aligned_zeros if self.rounds else group.zeros),
            "master": Spare(buffers.master.dtype, aligned_zeros),
        }
        self.messages = None                        # arrays in which gradients are rounded for a message
        if self.rounds:
            self.messages = self.spare["data"]
        elif dtype is not None and is_bfloat16(dtype):
            self.messages = Spare(dtype, aligned_zeros)
        self.common = group.common(buffers.size, buffers.data.dtype) if stage == 3 and not self.rounds else None
        if self.common is not None:
            self._share()
        self.gathers = stage == 3 and self.common is None   # whether whole parameters come and go
        if self.rounds:
            self._divide("master", whole=False)
        self._divide("data", whole=not self.gathers)
        self._divide("grad", whole=stage < 2)
        if not self.rounds:
            self._let_masters_be_data()
        if seed is not None:
            self.initialise(seed)

    def _cut(self, chunks, tied) -> list[Unit]:
        """Neighbours that the same blocks use form a unit (stage 1: all); a tied parameter is one, alike at both
        ends."""
        users: dict[Parameter, list] = {p: [] for p in self.buffers.parameters}
        if self.stage > 1:
            for stage, blocks in chunks.items():
                for number, block in enumerate(blocks):
                    for parameter in block.parameters():
                        users[parameter].append((stage, number))
        units, run, start = [], [], 0
        for parameter in [*self.buffers.parameters, None]:
            if run and (parameter is None or {parameter, run[-1]} & tied or users[parameter] != users[run[-1]]):
                units.append(Unit(run, start, self.group))
                run, start = [], units[-1].stop
            run.append(parameter)
        return units

    def _share(self) -> None:
        """The node's one copy takes the place of this rank's parameters."""
        if self.group.here == 0:
            self.common[:] = self.buffers.data
        self.buffers.data = self.common
        for unit in self.units:
            unit.attach("data", self.common[unit.start : unit.stop])
        self.publish()

    def _divide(self, what: str, *, whole: bool) -> None:
        """Keep this replica's part alone, or mark it in the whole buffer."""
        flat = getattr(self.buffers, what)
        for unit in self.units:
            part = flat[unit.start : unit.stop][unit.part]
            if not whole:
                kept = aligned_zeros(unit.size, flat.dtype)
                kept[:] = part
                unit.attach(what, None)
                part = kept
            setattr(unit, what, part)
        if not whole:
            setattr(self.buffers, what, None)

    def _let_masters_be_data(self) -> None:
        for holder in (self.buffers, *self.units, *self.buffers.parameters):
            holder.master = holder.data

    def _reduce(self, unit: Unit, whole: np.ndarray) -> np.ndarray:
        """This replica's part of the sum over the replicas of a unit's whole gradients, written where it lies in them."""
        part = whole[unit.part]
        if self.messages is None:
            return self.group.reduce_scatter(whole, sizes=unit.sizes, out=part, name=unit.name)
        message = narrow(whole, self.messages.take(whole.size))
        widen(self.group.reduce_scatter(message, sizes=unit.sizes, out=message[unit.part], name=unit.name), part)
        self.messages.give(message)
        return part

    def initialise(self, seed: int) -> None:
        """The initial values of the whole model: the same bits as without ZeRO, and never more than a unit at once."""
        for unit in self.units:
            size = unit.stop - unit.start
            whole = {"data": self.spare["data"].take(size) if self.gathers else self.buffers.data[unit.start : unit.stop]}
            if self.rounds:
                whole["master"] = self.spare["master"].take(size)
            for what, array in whole.items():
                unit.attach(what, array)
            for parameter in unit.parameters:
                parameter.master = parameter.master if self.rounds else parameter.data
                if self.common is None or self.group.here == 0:
                    parameter.initialise(seed)
            if self.rounds:
                self._keep(unit, "master", whole["master"])
            if self.gathers:
                self._keep(unit, "data", whole["data"])
        if not self.rounds:
            self._let_masters_be_data()
        if self.common is not None:
            self.group.barrier()

    def _keep(self, unit: Unit, what: str, whole: np.ndarray) -> None:
        getattr(unit, what)[:] = whole[unit.part]
        unit.attach(what, None)
        self.spare[what].give(whole)

    def clear(self) -> None:
        """All gradients zero, before the first micro-batch."""
        if self.stage == 1:
            self.buffers.begin_gradients()
        else:
            for unit in self.units:
                unit.grad[:] = 0

    def finish(self) -> None:
        """After the last backward pass: every replica holds the sum of its part of the gradients."""
        if self.stage == 1:
            self.buffers.settle_gradients()
            for unit in self.units:
                self._reduce(unit, self.buffers.grad[unit.start : unit.stop])
        assert all(unit.users == 0 for unit in self.units), "a backward pass is not over"

    def publish(self) -> None:
        """After the optimizer: every replica gets the parts that the others have updated.

        The optimizer may write into a common copy because no rank computes any longer: all have met to sum the norm.
        """
        if self.common is not None:
            self.group.refresh(self.common, [(unit.start, unit.sizes) for unit in self.units])
        elif self.stage < 3:
            for unit in self.units:
                out = self.buffers.data[unit.start : unit.stop]
                self.group.all_gather(unit.data, sizes=unit.sizes, out=out, name=unit.name)

    # While blocks compute (stages 2 and 3)

    def fetch(self, unit: Unit) -> None:
        """The unit's whole parameters are there."""
        if self.gathers and unit.whole["data"] is None:
            self.prefetch(unit)
            unit.attach("data", unit.pending.wait())
            unit.pending = None

    def prefetch(self, unit: Unit) -> None:
        """The unit's whole parameters are on their way."""
        if self.gathers and unit.whole["data"] is None and unit.pending is None:
            out = self.spare["data"].take(unit.stop - unit.start)
            unit.pending = self.group.all_gather_start(unit.data, sizes=unit.sizes, out=out, name=unit.name)

    def free(self, unit: Unit) -> None:
        """The unit's whole parameters are needed no longer."""
        if self.gathers:
            self.spare["data"].give(unit.whole["data"])
            unit.attach("data", None)

    def open(self, unit: Unit) -> None:
        """One more backward pass is about to add to the unit's whole gradient, which counts as zeros at first."""
        if unit.users == 0:
            unit.attach("grad", self.spare["grad"].take(unit.stop - unit.start))
            for parameter in unit.parameters:
                parameter.fresh = True
        unit.users += 1

    def close(self, unit: Unit) -> None:
        """One backward pass is done with the unit's gradient; after the last one it is summed and this part kept."""
        unit.users -= 1
        if unit.users == 0:
            whole = unit.whole["grad"]
            for parameter in unit.parameters:
                parameter.settle_gradient()
            add(unit.grad, self._reduce(unit, whole), unit.grad)
            unit.attach("grad", None)
            self.spare["grad"].give(whole)

    def wrap(self, blocks: list[Layer]) -> list[Layer]:
        """The blocks of one stage, with what has to happen around each."""
        if self.stage < 2:
            return blocks
        units = [list(dict.fromkeys(self.unit_of[p] for p in block.parameters())) for block in blocks]
        wrapped = []
        for number, block in enumerate(blocks):
            before = {unit for others in units[:number] for unit in others}
            after = {unit for others in units[number + 1 :] for unit in others}
            ahead, behind = units[number + 1 : number + 2], units[max(number - 1, 0) : number]
            wrapped.append(DividedBlock(block, self, units[number], before, after, sum(ahead, []), sum(behind, [])))
        return wrapped

    # The whole tensors again, and how much is held

    def whole_tensors(self, parameters: list[Parameter], what: str):
        """Yield (parameter, whole "data", "master" or "grad") for each; collective over the replicas, valid until the next."""
        held, unit = [], None
        for parameter in parameters:
            if not self.gathers and (what == "data" or what == "master" and not self.rounds):
                yield parameter, parameter.data
                continue
            if self.unit_of[parameter] is not unit:
                unit = self.unit_of[parameter]
                held = unit.views(self.group.all_gather(getattr(unit, what), sizes=unit.sizes, name=unit.name))
            yield parameter, held[unit.parameters.index(parameter)]


class DividedBlock(Layer):
    """A block whose whole parameters (stage 3) and gradients are there only while it computes.

    before, after: units that earlier, later blocks of the stage use. ahead, behind: units of the next block in
    forward, in backward. The blocks of a stage run from the first to the last, or back, without another stage
    between.
    """

    def __init__(self, block, zero: Zero, units, before, after, ahead, behind):
        self.block, self.zero, self.units = block, zero, units
        self.before, self.after, self.ahead, self.behind = before, after, ahead, behind

    @property
    def recomputes(self):
        """As of the block."""
        return self.block.recomputes

    def drop_attention(self, saved):
        """As of the block; it takes no parameters."""
        return self.block.drop_attention(saved)

    def rebuild_attention(self, saved):
        """As of the block. The parameters stay: backward, which is next, uses them too."""
        self._fetch(self.behind)
        return self.block.rebuild_attention(saved)

    def rebuild(self, x, micro):
        """As of the block; the parameters stay."""
        self._fetch(self.behind)
        return self.block.rebuild(x, micro)

    def __str__(self):
        return str(self.block)

    def input_shape(self, micro):
        """As of the block."""
        return self.block.input_shape(micro)

    def parameters(self):
        """As of the block."""
        return self.block.parameters()

    def forward(self, x, micro):
        """As of the block."""
        self._fetch(self.ahead)
        made = self.block.forward(x, micro)
        self._free(self.after)
        return made

    def backward(self, saved, dy, micro, later=None):
        """As of the block. A unit's gradient lives from its first use in this pass to its last, deferred work
        included."""
        zero = self.zero
        self._fetch(self.behind)
        for unit in self.units:
            zero.open(unit)
            if unit not in self.after:      # the pass begins with it: held until the pass ends with it
                zero.open(unit)
        deferred = None if later is None else []
        dx = self.block.backward(saved, dy, micro, deferred)
        if deferred:
            later.append(lambda: self._finish(deferred))
        else:
            self._finish([])
        for unit in self.units:
            if unit not in self.before:
                zero.close(unit)
        self._free(self.before)
        return dx

    def _finish(self, deferred):
        for function in deferred:
            function()
        deferred.clear()
        for unit in self.units:
            self.zero.close(unit)

    def _fetch(self, others):
        for unit in self.units:
            self.zero.fetch(unit)
        for unit in others:
            self.zero.prefetch(unit)

    def _free(self, still_needed):
        for unit in self.units:
            if unit not in still_needed:
                self.zero.free(unit)
