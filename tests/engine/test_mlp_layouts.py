"""The deep MLP in every layout equals one rank, for even and odd numbers of layers."""

import numpy as np
import pytest

from mpipar.comm.mesh import Mesh
from mpipar.data import RandomVectors
from mpipar.engine.checksum import global_state
from mpipar.engine.optimizer import AdamW
from mpipar.engine.trainer import Trainer
from mpipar.models.mlp import MLP

LAYOUTS = {2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)], 4: [(1, 4, 1), (1, 1, 4), (2, 2, 1), (2, 1, 2), (1, 2, 2)]}


def train(mesh, layers):
    trainer = Trainer(MLP(layers=layers, dim=16, dtype="float64", mesh=mesh), AdamW(lr=1e-2), micro_batches=3, clip=0.1)
    source = RandomVectors(dim=16, global_batch=12, dtype="float64")
    results = [trainer.step(source.batch(step)) for step in range(1, 4)]
    return [(r.loss, r.grad_norm) for r in results], global_state(trainer.model)


@pytest.mark.mpi(np=[2, 4])
@pytest.mark.parametrize("layers", [4, 5])
def test_every_layout_equals_one_rank(comm, layers):
    expected, weights = train(None, layers)
    for dp, tp, pp in LAYOUTS[comm.size]:
        mesh = Mesh(comm, dp=dp, tp=tp, pp=pp)
        found, parallel = train(mesh, layers)
        np.testing.assert_allclose(found, expected, rtol=1e-11)
        for name, value in parallel.items():
            np.testing.assert_allclose(value, weights[name], rtol=0, atol=1e-10)
