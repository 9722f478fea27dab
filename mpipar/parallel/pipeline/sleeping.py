"""Stages that sleep instead of computing: the pipeline of lecture 2, section 3.3, on any number of cores."""

import time

import numpy as np

from mpipar.parallel.pipeline.simulate import Costs


class SleepingStage:
    """A chunk (see `run`) whose forward and backward last a given time; its arrays are zeros, its loss is 0.

    costs: `simulate.Costs` in seconds. input_shape, output_shape: functions of a micro-batch, or shapes.
    last: it is the last stage. dtype: of its arrays.
    """

    def __init__(self, stage, costs, *, input_shape=(1,), output_shape=(1,), last=False, dtype=np.float32):
        self._seconds = {kind: float(costs.of((stage, kind, 0))) for kind in "FBIW"}
        self._shapes = input_shape, output_shape
        self.last, self.dtype = last, np.dtype(dtype)

    def input_shape(self, micro):
        return self._shape(0, micro)

    def forward(self, x, micro):
        time.sleep(self._seconds["F"])
        return (0.0 if self.last else np.zeros(self._shape(1, micro), self.dtype)), None

    def backward(self, saved, dy, micro, later=None):
        if later is not None:
            later.append(lambda: time.sleep(self._seconds["W"]))
        time.sleep(self._seconds["B" if later is None else "I"])
        return np.zeros(self._shape(0, micro), self.dtype)

    def _shape(self, which, micro):
        shape = self._shapes[which]
        return shape(micro) if callable(shape) else shape


def stage_costs(delay, chunks=1, backward=1.0):
    """Costs of stages that take `delay` seconds forward and `backward` times as long back, over all chunks of a
    rank; the two halves of backward take equally long."""
    return Costs(forward=delay / chunks, backward=backward * delay / chunks)


def sleeping_chunks(stage_blocks, placement, rank, delay, dtype):
    """The sleeping stages of a rank, {stage: chunk}, with the messages that its real ones would send.

    stage_blocks: for each stage its blocks, whose first says by `input_shape(micro)` what it receives. placement: the
    stages of each rank. delay: seconds of a rank's forward, over all its stages, and of its backward.
    """
    stages, chunks = len(stage_blocks), {}
    costs = stage_costs(delay, len(placement[rank]))
    for stage in placement[rank]:
        last = stage == stages - 1
        chunks[stage] = SleepingStage(stage, costs, last=last, dtype=dtype,
                                      input_shape=stage_blocks[stage][0].input_shape,
                                      output_shape=(1,) if last else stage_blocks[stage + 1][0].input_shape)
    return chunks
