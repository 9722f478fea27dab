"""A pipeline with micro-batches (lecture 1, section 1.9; lecture 2, section 2.4):  mpirun -np 4 python examples/pipeline.py

The layers of a GPT are spread over the ranks. For each schedule: its plan, the predicted share of idle time, what
was measured, and the loss, which no schedule changes.
"""

import numpy as np

from mpipar import GPT, SGD, Mesh, Trainer
from mpipar.data import text
from mpipar.engine.bubble import BubbleMeter, predicted_bubble
from mpipar.parallel.pipeline.schedule import SCHEDULES, SEVERAL_CHUNKS, build, format_plan, placement

MICRO_BATCHES, STEPS = 8, 4


def main():
    mesh = Mesh(pp=Mesh().size)
    source = text(seq=64, global_batch=16)
    losses = {}
    for name in SCHEDULES:
        plan = build(name, mesh.pp.size, MICRO_BATCHES, 2 if name in SEVERAL_CHUNKS else 1)
        model = GPT(layers=2 * mesh.pp.size, dim=64, heads=4, seq=64, mesh=mesh, placement=placement(plan))
        trainer = Trainer(model, SGD(lr=0.1), schedule=plan, micro_batches=MICRO_BATCHES)
        meter = BubbleMeter()
        for step in range(1, STEPS + 1):
            losses[name] = trainer.step(source.batch(step)).loss
            meter.add(trainer)
        measured = meter.measured(mesh.pp)
        if mesh.is_root:
            print(f"{name}: idle {predicted_bubble(trainer.plan):.0%} predicted, {measured:.0%} measured on this machine, "
                  f"loss {losses[name]:.6f}\n{format_plan(trainer.plan)}\n")
    if mesh.is_root:
        assert np.ptp(list(losses.values())) < 1e-4, "a schedule must not change the loss"


main()
