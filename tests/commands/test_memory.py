"""Peak memory of the processes: 1F1B's does not depend on the micro-batches, GPipe's grows as its live activations say."""

import json

import numpy as np
import pytest

from mpipar.kernels.memory import passing, passing_like
from mpipar.parallel.pipeline.check import check
from mpipar.parallel.pipeline.schedule import build
from tests.helpers.jobs import run_job

MODEL = ("--dp", "1", "--dim", "128", "--seq", "256", "--threads", "1", "--steps", "2", "--eval-steps", "0", "--generate", "0", "--quiet")


def measure(tmp_path, ranks, schedule, micros):
    """The end of a run's metrics, whose micro-batches have 4 rows each."""
    file = tmp_path / f"{schedule}-{micros}.jsonl"
    job = run_job(ranks, ["-m", "mpipar.train", "--pp", ranks, "--layers", 2 * ranks, "--schedule", schedule, "--micro-batches", micros,
                          "--global-batch", 4 * micros, "--metrics", file, *MODEL], timeout=100)
    assert job.returncode == 0 and not job.left_behind, job.output
    return json.loads(file.read_text().splitlines()[-1])


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_peak_memory_is_that_of_the_live_activations(tmp_path, ranks):
    measure(tmp_path, ranks, "gpipe", 1)  # kernels that are not compiled yet would count
    peak = {(name, micros): measure(tmp_path, ranks, name, micros) for name in ("1f1b", "gpipe") for micros in (8, 32)}
    for rank in range(ranks):
        few, many = (peak["1f1b", micros]["peak_rss_bytes"][rank] for micros in (8, 32))
        assert many <= 1.05 * few
        few, many = (peak["gpipe", micros]["peak_rss_bytes"][rank] for micros in (8, 32))
        held = peak["gpipe", 8]["activation_bytes"]["held"][rank]
        live = [check(build("gpipe", ranks, micros)).live[rank] for micros in (8, 32)]
        assert many - few == pytest.approx((live[1] - live[0]) * held, rel=0.1)
        assert held > 4 << 20  # else the noise of a process's memory would be in the tenth


def test_a_passing_array_is_like_another():
    for shape, dtype in (((3, 5), np.float32), ((), np.float64), ((0, 4), np.uint16)):
        array = passing(shape, dtype)
        assert array.shape == shape and array.dtype == dtype and array.flags.c_contiguous and array.flags.writeable
        assert array.base.nbytes == array.nbytes + 64
    assert passing_like(np.ones((2, 2), np.int64).T).dtype == np.int64
