"""Training in bfloat16: layouts against one rank, its loss against float32's, what is stored in 16 bits and what is not."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

import mpipar as mp
from mpipar.comm.mesh import Mesh
from mpipar.commands.breakage import BREAKS
from mpipar.commands.verify import BFLOAT16_BOUNDS, Options, compare, run
from mpipar.data import RandomTokens, RandomVectors
from mpipar.engine.checksum import global_state, parameters_sha256
from mpipar.nn.parameter import bytes_of_parameter

HALF = np.dtype(ml_dtypes.bfloat16)
LAYOUTS = {2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)], 4: [(4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 2, 1), (2, 1, 2), (1, 2, 2)]}
OPTIONS = Options(steps=4, dropout=0.1, micro_batches=2, vocab=65, dtype="bfloat16")
SERIAL = {}  # of this process


def serial(options):
    if options not in SERIAL:
        SERIAL[options] = run(options, Mesh.serial(), "1f1b")
    return SERIAL[options]


@pytest.mark.mpi(np=[2, 4])
def test_every_layout_is_near_one_rank(comm):
    for tied in (True, False):
        options = dataclasses.replace(OPTIONS, tied=tied)
        for dp, tp, pp in LAYOUTS[comm.size]:
            mesh = Mesh(comm, dp=dp, tp=tp, pp=pp)
            outcome = run(options, mesh, "1f1b")
            if mesh.is_root:
                found = compare(serial(options), outcome)
                assert found["start"] == 0
                for name, bound in BFLOAT16_BOUNDS.items():
                    assert found[name] <= bound, ((dp, tp, pp), name, found[name])
            mesh.close()


@pytest.mark.mpi(np=2)
@pytest.mark.parametrize("damage, shape", [("gradient-sync", (2, 1, 1)), ("tied-sync", (1, 1, 2)), ("residual", (1, 2, 1)),
                                           ("column-sum", (1, 2, 1)), ("row-sum", (1, 2, 1)), ("norm-twice", (1, 1, 2)),
                                           ("positions", (2, 1, 1)), ("initial-seed", (2, 1, 1))])
def test_control_a_broken_layout_is_noticed(comm, damage, shape):
    dp, tp, pp = shape
    options = dataclasses.replace(OPTIONS, steps=2)
    with Mesh(comm, dp=dp, tp=tp, pp=pp) as mesh:
        outcome = run(options, mesh, "1f1b", BREAKS[damage])
        if mesh.is_root:
            found = compare(serial(options), outcome)
            assert found["start"] or any(found[name] > bound for name, bound in BFLOAT16_BOUNDS.items()), found


def gpt(dtype, mesh=None, **sizes):
    return mp.GPT(**{**dict(layers=2, dim=32, heads=4, vocab=65, seq=16, mesh=mesh, dtype=dtype), **sizes})


def tokens(batch=8):
    return RandomTokens(vocab=65, seq=16, global_batch=batch)


@pytest.mark.mpi(np=[1, 2, 4])
def test_same_run_twice_has_the_same_bits_and_replicas_stay_equal(comm):
    results = []
    for _ in range(2):
        with Mesh(comm, dp=comm.size) as mesh:
            model = gpt("bfloat16", mesh)
            trainer = mp.Trainer(model, mp.AdamW(lr=1e-2), micro_batches=2)
            losses = [trainer.step(tokens().batch(step)).loss for step in (1, 2, 3)]
            assert (mesh.world.all_gather(model.buffers.master[None]) == model.buffers.master).all()
            rounded = model.buffers.master.astype(HALF)
            assert (rounded.view(np.uint16) == model.buffers.data.view(np.uint16)).all()
            results.append((losses, model.buffers.master.copy()))
    assert results[0][0] == results[1][0] and (results[0][1] == results[1][1]).all()


def test_initial_values_are_those_of_float32_rounded():
    half, whole = gpt("bfloat16"), gpt("float32")
    assert (half.buffers.master == whole.buffers.data).all() and half.buffers.data.dtype == HALF
    assert (half.buffers.data.view(np.uint16) == whole.buffers.data.astype(HALF).view(np.uint16)).all()
    assert parameters_sha256(half) == parameters_sha256(gpt("bfloat16")) != parameters_sha256(whole)
    assert global_state(half)["block0.up.weight"].dtype == np.float32


def test_what_is_stored_in_16_bits():
    model = gpt("bfloat16")
    buffers, parameter = model.buffers, model.parameters[0]
    assert buffers.data.dtype == parameter.data.dtype == HALF and buffers.copy is buffers.data
    assert buffers.grad.dtype == buffers.master.dtype == parameter.grad.dtype == np.float32
    assert bytes_of_parameter("bfloat16") == 2 + 4 * 4 and bytes_of_parameter("float32") == 4 * 4
    float32 = gpt("float32").buffers
    assert float32.master is float32.data and float32.copy is None

    def saved_bytes(dtype):
        model = gpt(dtype)
        trainer = mp.Trainer(model, mp.SGD())
        _, saved = model.chunks[0].forward(None, trainer.split(tokens().batch(1), 1)[0])
        return sum(x.nbytes for x in arrays(saved) if x.dtype.kind not in "iu")

    assert saved_bytes("bfloat16") < 0.56 * saved_bytes("float32")  # half, and the statistics of rows in float32


def arrays(value):
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from arrays(part)


@pytest.mark.mpi(np=2)
def test_messages_have_half_the_bytes(comm):
    for shape in ((2, 1, 1), (1, 2, 1), (1, 1, 2)):
        sent = {}
        for dtype in ("float32", "bfloat16"):
            with Mesh(comm, dp=shape[0], tp=shape[1], pp=shape[2]) as mesh:
                trainer = mp.Trainer(gpt(dtype, mesh, dim=64), mp.SGD(), micro_batches=2)
                with mesh.record() as log:
                    trainer.step(tokens().batch(1))
                sent[dtype] = log.sent()
        # Beside activations and gradients there are a few numbers of each row, and of the step, in full size.
        assert 0.5 <= sent["bfloat16"] / sent["float32"] < 0.53, (shape, sent)


def test_loss_stays_near_that_of_float32():
    """A small GPT on text. Measured: 0.04 % over the last 20 of 60 steps; 1.3 % at worst in one step, where float32 too
    moves by 1.1 % if only its weights are rounded."""
    losses = {}
    for dtype in ("float32", "bfloat16"):
        trainer = mp.Trainer(gpt(dtype, vocab=256, dim=64, seq=32), mp.AdamW(), clip=1.0,
                             learning_rate=lambda step: 3e-3 * min(1, step / 20))
        source = mp.data.text("builtin", seq=32, global_batch=8)
        losses[dtype] = np.array([trainer.step(source.batch(step)).loss for step in range(1, 61)])
    assert losses["float32"][-1] < 0.6 * losses["float32"][0]
    last, whole = (losses[dtype][-20:].mean() for dtype in ("bfloat16", "float32"))
    assert last == pytest.approx(whole, rel=0.005) and last != whole


def test_evaluation_generation_and_the_mlp():
    model = gpt("bfloat16", vocab=256)
    text = mp.generate(model, np.array([1, 2, 3]), 5, seed=1)
    assert len(text) == 8 and (mp.generate(model, np.array([1, 2, 3]), 5, seed=1) == text).all()
    assert (mp.generate(model, np.array([1]), 3, temperature=0) < 256).all()
    trainer = mp.Trainer(gpt("bfloat16"), mp.SGD())
    assert trainer.evaluate([tokens().batch(1)]) == pytest.approx(np.log(65), rel=0.02)
    losses = {}
    for dtype in ("float32", HALF):
        trainer = mp.Trainer(mp.MLP(layers=3, dim=64, dtype=dtype), mp.AdamW(lr=1e-3))
        source = RandomVectors(dim=64, global_batch=16, dtype=dtype)
        losses[str(np.dtype(dtype))] = [trainer.step(source.batch(step)).loss for step in range(1, 6)]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.02)
