"""A training script of one's own:  mpirun -np 4 python examples/train_script.py   (or python examples/train_script.py)

The same lines run on one rank, in a notebook say, and on many.
"""

import mpipar as mp

mesh = mp.Mesh(tp=2 if mp.Mesh().size % 2 == 0 else 1)  # dp is what tp leaves
model = mp.GPT(layers=2, dim=64, heads=4, vocab=256, seq=64, mesh=mesh)
trainer = mp.Trainer(model, mp.AdamW(lr=3e-3), micro_batches=2, clip=1.0)
for batch in mp.data.text("builtin", seq=64, global_batch=16):
    result = trainer.step(batch)  # loss, grad_norm: the same on every rank
    if mesh.is_root and result.step % 10 == 0:
        print(f"step {result.step}: loss {result.loss:.4f}, gradient norm {result.grad_norm:.3f}")
    if result.step == 50:
        break
assert result.loss < 3.5, "the loss of 50 steps must have fallen from 5.5"
