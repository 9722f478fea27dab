"""Data parallelism by hand (lecture 1, section 1.7):  mpirun -np 4 python examples/data_parallel.py

Every rank holds the whole deep MLP and a part of the batch. After backward the gradients are summed over the ranks:
that is the only difference from training alone. The losses of the ranks differ, the gradients and the parameters
are equal, and they are those of one rank that sees the whole batch.
"""

import numpy as np

from mpipar import MLP, AdamW, Mesh, Trainer
from mpipar.data import Batch
from mpipar.nn.parameter import split_range

BATCH, DIM, LAYERS, STEPS = 128, 256, 4, 5


def main():
    mesh = Mesh()  # all ranks on the data-parallel axis
    data = np.random.default_rng(0).standard_normal((BATCH, DIM)).astype(np.float32)
    first, last = split_range(BATCH, mesh.dp.size, mesh.dp.rank)

    model = MLP(layers=LAYERS, dim=DIM, mesh=mesh)
    trainer = Trainer(model, AdamW(lr=1e-3))
    alone = Trainer(MLP(layers=LAYERS, dim=DIM), AdamW(lr=1e-3))  # the whole batch on this rank

    for step in range(STEPS):
        own_loss = alone.evaluate([Batch.of(data[first:last])])  # of this rank's rows, before the step
        result = trainer.step(Batch.of(data))
        reference = alone.step(Batch.of(data))
        losses = mesh.dp.all_gather(np.array([own_loss]))
        difference = float(np.abs(model.buffers.data - alone.model.buffers.data).max())
        if mesh.is_root:
            print(f"step {step}: losses of the ranks {np.round(losses, 5)}, together {result.loss:.6f}, "
                  f"alone {reference.loss:.6f}, parameters differ by at most {difference:.1e}")
        assert abs(result.loss - reference.loss) < 1e-5 * reference.loss and difference < 1e-4


main()
