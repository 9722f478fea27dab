"""Programs of several ranks in which something fails beside the helper thread; `python -m tests.parallel.overlap_programs NAME`."""

import resource
import sys
import time

from mpipar.comm import guard


def training(**options):
    """A trainer with overlap and a function that makes a batch."""
    import mpipar as mp
    from mpipar.data import RandomTokens

    mesh = mp.Mesh()
    model = mp.GPT(layers=4, dim=32, heads=4, vocab=64, seq=16, mesh=mesh)
    return mesh, mp.Trainer(model, micro_batches=2, overlap=True, bucket_mb=0.01, **options), RandomTokens(vocab=64, seq=16, global_batch=16).batch


def helper_raises():
    """The helper of rank 1 fails in step 2."""
    from mpipar.parallel import overlap

    mesh, trainer, batch = training()
    trainer.step(batch(1))
    if mesh.rank == 1:
        def fail(*_):
            raise RuntimeError("boom in the helper")

        overlap.sum_gradients = fail
    trainer.step(batch(2))


def raises_in_backward():
    """Rank 1 fails in the middle of a backward pass, when the others' helpers wait for it in an all-reduce."""
    mesh, trainer, batch = training()
    trainer.step(batch(1))
    if mesh.rank == 1:
        def fail(*_):
            time.sleep(0.5)
            raise RuntimeError("boom in backward")

        trainer.model.blocks[2].backward = fail
    trainer.step(batch(2))


def leaves_early():
    """Rank 1 leaves without an error."""
    mesh, trainer, batch = training()
    trainer.step(batch(1))
    if mesh.rank != 1:
        trainer.step(batch(2))


def waits_asleep():
    """Prints the share of a core that a rank uses whose helper waits for a rank that is late, and that the sums are right."""
    import numpy as np

    mesh, trainer, _ = training()
    group = trainer.gradients.reducer.group
    x = np.full(100_000, mesh.rank + 1.0, np.float32)
    mesh.world.barrier()
    time.sleep(2.0 * (mesh.rank == 1))
    before, begun = resource.getrusage(resource.RUSAGE_THREAD).ru_utime, time.perf_counter()
    group.all_reduce(x)
    used = resource.getrusage(resource.RUSAGE_THREAD).ru_utime - before
    if mesh.rank == 0:
        print(f"{type(group.comm).__name__} sum {x.min():g} {x.max():g} share {used / (time.perf_counter() - begun):.3f}")


if __name__ == "__main__":
    guard.main({"helper raises": helper_raises, "raises in backward": raises_in_backward, "leaves early": leaves_early,
                "waits asleep": waits_asleep}[sys.argv[1]])
