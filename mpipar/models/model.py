"""What the models share: blocks over stages, the flat buffers, the catalogue of all parameters."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial

import numpy as np

from mpipar.kernels.dtypes import as_dtype, is_bfloat16
from mpipar.kernels.memory import aligned_zeros, keep_freed_memory
from mpipar.kernels.warm import compile_tasks
from mpipar.nn.layer import Layer, SampleKeys, run_or_defer
from mpipar.nn.parameter import FlatBuffers, Parameter, bytes_of_parameter
from mpipar.parallel.pipeline.partition import stage_layers
from mpipar.parallel.pipeline.schedule import looped
from mpipar.parallel.zero import shares

RECOMPUTE = ("none", "attention", "full")


@dataclass(frozen=True)
class MicroBatch:
    """A part of one replica's share of the global batch.

    inputs, targets: arrays whose first dim is the samples (targets None for models without them). keys: names of the
    samples for dropout, None outside training. scale: 1 / weight of the global batch, the factor of the gradient.
    """

    inputs: np.ndarray
    targets: np.ndarray | None
    keys: SampleKeys | None
    scale: float


class Block(Layer):
    """A unit that is never cut by a pipeline stage; its layers are its attributes.

    forward(x, micro) -> (y, saved), backward(saved, dy, micro, later) -> dx, input_shape(micro) -> shape of x. The first
    block of a model gets the micro-batch's inputs as x; the last one returns the sum of the losses as a float and gets
    dy None. recomputes: what of it may be dropped after forward and made again before backward: "full" (all but x, by
    running forward again), "attention" (by the block's own `drop_attention(saved)` and `rebuild_attention(saved)`).
    """

    recomputes: tuple[str, ...] = ()

    def rebuild(self, x, micro: MicroBatch):
        """What forward saved, made again from its input."""
        return self.forward(x, micro)[1]

    def flops(self) -> float:
        """Floating-point operations of the matrix products of forward for one sample, over all tensor-parallel ranks."""
        return 0.0


class Chunk:
    """The consecutive blocks of one pipeline stage.

    recompute: "none", or what its blocks drop in forward and rebuild in backward: the same bits for less memory and more
    work. held_bytes, dropped_bytes: of the activations of one micro-batch, the first of training, counted array by array.
    done: called with each block whose gradients of a micro-batch have been added, deferred ones included; None for nobody.
    """

    def __init__(self, blocks: list[Block], *, first: bool, last: bool, dtype, recompute="none"):
        self.blocks = blocks
        self.first = first
        self.last = last
        self.dtype = dtype
        self.recompute = recompute
        self.held_bytes = self.dropped_bytes = 0
        self.done = None

    def input_shape(self, micro: MicroBatch) -> tuple[int, ...]:
        """The shape of the activations that this stage receives."""
        return self.blocks[0].input_shape(micro)

    def forward(self, x, micro: MicroBatch):
        """Run the blocks in order; x is None on the first stage, y the sum of the losses on the last."""
        if self.first:
            x = micro.inputs
        saved, counts = [], micro.keys is not None and not self.held_bytes
        held = dropped = 0
        for block in self.blocks:
            given = x
            x, kept = block.forward(given, micro)
            whole = count_bytes((given, kept), but=x) if counts else 0
            kept = self._drop(block, given, kept)
            if counts:
                held += count_bytes((given, kept), but=x)
                dropped += whole - count_bytes((given, kept), but=x)
            saved.append(kept)
        if counts:
            self.held_bytes, self.dropped_bytes = held, dropped
        return x, saved

    def _drop(self, block, given, kept):
        """What stays of a block's `kept` until backward."""
        if self.recompute not in block.recomputes:
            return kept
        return given if self.recompute == "full" else block.drop_attention(kept)

    def _rebuild(self, block, kept, micro):
        """The block's `kept` as its forward made it."""
        if self.recompute not in block.recomputes:
            return kept
        return block.rebuild(kept, micro) if self.recompute == "full" else block.rebuild_attention(kept)

    def backward(self, saved: list, dy, micro: MicroBatch, later: list | None = None):
        """Run the blocks backwards, dropping what each has saved as soon as it was used."""
        for block in reversed(self.blocks):
            dy = block.backward(self._rebuild(block, saved.pop(), micro), dy, micro, later)
            if self.done is not None:
                run_or_defer(partial(self.done, block), later)
        return dy


class Model:
    """Blocks spread over the pipeline stages of a mesh.

    blocks: all blocks of the global model in order; `front` and `back` of them (embedding, head) stay with the first
    and last stage and are not counted as layers. virtual_stages: stages on each pipeline rank, which go round, 0, 1, ...
    P - 1, 0, 1, ...; placement: the stages of each rank instead, such as [[0, 3], [1, 2]] (`schedule.placement` of a plan).
    layers_per_stage: how many layers each stage gets, None for even. recompute: see Chunk.
    Every rank declares every block (that costs no memory), so each knows the whole catalogue of parameters.
    """

    def __init__(self, blocks, *, front, back, mesh, dtype, seed, virtual_stages=1, layers_per_stage=None,
                 placement=None, recompute="none"):
        if recompute not in RECOMPUTE:
            raise ValueError(f"recompute={recompute!r} is not valid: one of {', '.join(RECOMPUTE)}")
        self.mesh = mesh
        self.blocks, self.front, self.back = blocks, front, back
        self.dtype = as_dtype(dtype)
        self.seed = seed
        self.recompute = recompute
        self.placement = looped(mesh.pp.size, virtual_stages) if placement is None else placement
        self.home = {stage: rank for rank, own in enumerate(self.placement) for stage in own}
        self.stages = len(self.home)
        if len(self.placement) != mesh.pp.size or sorted(self.home) != list(range(self.stages)):
            raise ValueError(f"placement {self.placement} is not one of pp={mesh.pp.size}: each stage from 0 on one rank")
        spans = stage_layers(len(blocks) - front - back, self.stages, layers_per_stage)
        self.stage_blocks = [blocks[span.start + front : span.stop + front] for span in spans]
        self.stage_blocks[0] = blocks[:front] + self.stage_blocks[0]
        self.stage_blocks[-1] = self.stage_blocks[-1] + blocks[len(blocks) - back :]
        self.owners = self._owners()
        for parameter, ranks in self.owners.items():  # `mesh.ends` sums the gradients of such a parameter
            if len(ranks) > 1 and set(ranks) != {0, mesh.pp.size - 1}:
                raise ValueError(f"{parameter.name} is tied, on pipeline ranks {ranks[0]} and {ranks[1]}: the first and the last "
                                 "stage have to be on one rank or on the first and the last, or the head not tied")
        self.catalogue = list(self.owners)
        names = [p.name for p in self.catalogue]
        assert len(set(names)) == len(names), "two parameters share a name"
        self.parameters = [p for p in self.catalogue if mesh.pp.rank in self.owners[p]]
        self.chunks: dict[int, Chunk] = {}
        self.buffers: FlatBuffers | None = None
        self.zero = None  # how the replicas divide the buffers, where a trainer has them do so
        self.initialised = False

    def _owners(self) -> dict[Parameter, list[int]]:
        owners: dict[Parameter, list[int]] = {}
        for stage, blocks in enumerate(self.stage_blocks):
            for parameter in (p for block in blocks for p in block.parameters()):
                ranks = owners.setdefault(parameter, [])
                if self.rank_of(stage) not in ranks:
                    ranks.append(self.rank_of(stage))
        return owners

    def rank_of(self, stage: int) -> int:
        """The pipeline rank that holds a stage."""
        return self.home[stage]

    def allocate(self, zero: int = 0) -> "Model":
        """Give memory and initial values to the parameters of this rank; called once all sizes are known to fit.

        zero: the stage with which it will be trained. Under 3 the values are left to the trainer, which never makes more
        of them at once than it keeps (memory that was not yet written takes no room).
        """
        self.check_memory(zero)
        keep_freed_memory()
        self.mesh.divided_on_node(compile_tasks(self.dtype))
        # What the replicas exchange whole lies where they can see it; bfloat16 is rounded into messages of its own.
        shared = aligned_zeros if is_bfloat16(self.dtype) else self.mesh.dp.zeros
        self.buffers = FlatBuffers(
            self.parameters, self.dtype,
            zeros_data=shared if zero in (1, 2) else aligned_zeros,
            zeros_grad=shared if zero < 2 else aligned_zeros,
        )
        self.initialised = zero < 3 or self.mesh.dp.size == 1
        for parameter in self.parameters if self.initialised else []:
            parameter.initialise(self.seed)
        for stage, blocks in enumerate(self.stage_blocks):
            if self.rank_of(stage) == self.mesh.pp.rank:
                last = stage == self.stages - 1
                self.chunks[stage] = Chunk(blocks, first=stage == 0, last=last, dtype=self.dtype, recompute=self.recompute)
        return self

    def check_memory(self, zero: int) -> None:
        """Refuse what can't fit: parameters, gradients and two moments of the ranks of this node in its memory."""
        if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
            return
        present = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        held = bytes_of_parameter(self.dtype, *shares(zero, self.mesh.dp.size)) * sum(p.size for p in self.parameters)
        needed = held * self.mesh.ranks_on_node
        if needed > present:
            raise ValueError(
                f"parameters, gradients and moments need {needed / 2**30:.1f} GiB on this node, which has {present / 2**30:.1f}: "
                "take a smaller model, or more nodes and a larger tp, pp or --zero"
            )

    @property
    def tied(self) -> list[Parameter]:
        """Parameters of this rank that another pipeline rank holds too (a tied head), in catalogue order."""
        return [p for p in self.parameters if len(self.owners[p]) > 1]

    def counts_here(self, parameter: Parameter) -> bool:
        """True on the one rank of a replica that counts each element in sums over the global model."""
        return self.mesh.pp.rank == self.owners[parameter][0] and (parameter.sharded or self.mesh.tp.rank == 0)

    @property
    def global_parameters(self) -> int:
        """Number of elements of the global model, each counted once."""
        return sum(p.global_size for p in self.catalogue)

    def describe(self, stage: int) -> str:
        """What a stage holds, in words."""
        return " + ".join(summarise([str(block) for block in self.stage_blocks[stage]]))


def count_bytes(value, *, but=None) -> int:
    """Bytes of memory under all arrays in nested lists and tuples, shared memory counted once, without that of `but`."""
    owners: dict[int, int] = {}

    def visit(part):
        if isinstance(part, np.ndarray):
            while isinstance(part.base, np.ndarray):
                part = part.base
            owners[id(part)] = part.nbytes
        elif isinstance(part, (list, tuple)):
            for item in part:
                visit(item)

    visit(but)
    skipped = set(owners)
    visit(value)
    return sum(size for owner, size in owners.items() if owner not in skipped)


def summarise(names: list[str]) -> list[str]:
    """Runs of equal first words become one: block 0, block 1, block 2 -> blocks 0-2."""
    out: list[str] = []
    run: list[str] = []
    for name in [*names, ""]:
        word = name.split(" ")[0]
        if run and run[0].split(" ")[0] != word:
            first, last = run[0], run[-1]
            out.append(first if first == last else f"{first.split(' ')[0]}s {first.split(' ')[1]}-{last.split(' ')[1]}")
            run = []
        if name:
            run.append(name)
    return out
