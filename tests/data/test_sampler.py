"""A batch is a pure function of (seed, step): the same samples in every layout, each once an epoch."""

import numpy as np
import pytest

from mpipar.data import Arrays, Batch, RandomTokens, RandomVectors, TextVectors, TextWindows, load_text, split_text, text
from mpipar.data.sampler import EpochSampler
from mpipar.nn.parameter import split_range


def replica_samples(sampler, step, dp):
    samples = sampler.samples(step)
    return [samples[slice(*split_range(len(samples), dp, r))] for r in range(dp)]


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_batch_is_the_same_set_for_every_dp_and_shares_do_not_overlap(dp):
    sampler = EpochSampler(160, 16, seed=3)
    for step in (1, 7, 11):
        shares = replica_samples(sampler, step, dp)
        together = np.concatenate(shares)
        assert sorted(together) == sorted(EpochSampler(160, 16, seed=3).samples(step))
        assert len(set(together.tolist())) == 16


def test_each_sample_once_an_epoch_and_another_order_in_the_next():
    sampler = EpochSampler(160, 16, seed=3)
    epochs = [np.concatenate([sampler.samples(s) for s in range(1 + 10 * e, 11 + 10 * e)]) for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(160))
    assert (epochs[0] != epochs[1]).any()


def test_tail_dropped_gives_3_steps_and_kept_4():
    # 145 samples, dp=3, 16 a rank
    assert EpochSampler(145, 48, seed=0, drop_last=True).steps_per_epoch == 3
    keeping = EpochSampler(145, 48, seed=0, drop_last=False)
    assert keeping.steps_per_epoch == 4
    assert [len(keeping.samples(s)) for s in range(1, 6)] == [48, 48, 48, 1, 48]


def test_order_of_asking_does_not_matter():
    a, b = EpochSampler(50, 5, seed=1), EpochSampler(50, 5, seed=1)
    late = a.samples(25)
    assert (late == [b.samples(s) for s in (3, 14, 25)][-1]).all()


@pytest.mark.parametrize("count,batch", [(3, 4), (0, 1), (5, 0)])
def test_batches_that_can_not_be_filled_are_refused(count, batch):
    with pytest.raises(ValueError, match="at most|at least"):
        EpochSampler(count, batch, seed=0)


def test_windows_have_targets_one_later_and_do_not_overlap():
    tokens = np.arange(1000) % 251
    source = TextWindows(tokens.astype(np.uint8), seq=16, global_batch=8, seed=5)
    seen = []
    for step in range(1, source.sampler.steps_per_epoch + 1):
        inputs, targets = source.batch(step).fetch(0, 8)
        assert inputs.dtype == targets.dtype == np.int64 and inputs.shape == (8, 16)
        assert (inputs[:, 1:] == targets[:, :-1]).all()
        seen += inputs[:, 0].tolist()
    assert len(seen) == len(set(seen))  # first tokens of windows that don't overlap, within one period


def test_fetching_rows_one_by_one_gives_the_batch():
    for source in (
        RandomTokens(vocab=50, seq=8, global_batch=6),
        RandomVectors(dim=8, global_batch=6),
        text(seq=8, global_batch=6),
        TextVectors(load_text("builtin"), dim=8, global_batch=6),
        Arrays(np.arange(40.0).reshape(10, 4), np.arange(10), global_batch=6),
    ):
        batch = source.batch(3)
        whole = batch.fetch(0, 6)
        for i in range(6):
            row = batch.fetch(i, i + 1)
            assert (row[0][0] == whole[0][i]).all()
            assert row[1] is None or (row[1][0] == whole[1][i]).all()
        assert len(batch.fetch(2, 2)[0]) == 0


def test_random_data_differ_by_seed_step_and_sample():
    rows = {
        tuple(RandomTokens(vocab=1000, seq=8, global_batch=2, seed=seed).batch(step).fetch(i, i + 1)[0][0])
        for seed in (0, 1) for step in (1, 2) for i in (0, 1)
    }
    assert len(rows) == 8


def test_weight_counts_valid_targets_only():
    assert Batch.of(np.zeros((2, 2), np.int64), np.array([[1, -1], [-1, -1]])).weight == 1
    with pytest.raises(ValueError, match="equally many"):
        Batch.of(np.zeros((2, 2)), np.zeros((3, 2)))


def test_held_out_tail_is_not_trained_on():
    tokens = load_text("builtin")
    head, tail = split_text(tokens, 0.1)
    assert len(head) + len(tail) == len(tokens) and len(tail) == len(tokens) // 10
    assert (np.concatenate([head, tail]) == tokens).all()


def test_files_that_can_not_be_read_are_user_errors(tmp_path):
    with pytest.raises(ValueError, match="can't be read"):
        load_text(str(tmp_path / "none.txt"))
    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(ValueError, match="empty"):
        load_text(str(tmp_path / "empty.txt"))
    with pytest.raises(ValueError, match="too long"):
        TextWindows(np.zeros(10, np.uint8), seq=8, global_batch=1)
