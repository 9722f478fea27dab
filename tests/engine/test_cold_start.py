"""Ranks that start with an empty cache of compiled code: they share the work, and no kernel is compiled twice."""

import pytest

from tests.helpers.jobs import run_job


def start(ranks, cache):
    job = run_job(ranks, ["-m", "tests.engine.cold_start"], env={"MPIPAR_CACHE_DIR": str(cache)}, timeout=120)
    assert job.returncode == 0 and not job.left_behind, job.output
    return [int(word) for word in job.stdout.split()]


@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_each_kernel_is_compiled_by_one_rank(tmp_path, times):
    (alone,) = start(1, tmp_path / "alone")
    for number in range(times):
        counts = start(4, tmp_path / str(number))
        assert sum(counts) == alone and sum(count > 0 for count in counts) >= 2, counts
        assert start(4, tmp_path / str(number)) == [0, 0, 0, 0]
        assert not list((tmp_path / str(number)).rglob("*.lock"))


def test_ranks_that_do_not_wait_compile_twice(tmp_path):
    """Negative control: without the locks and the division, the sum is larger."""
    job = run_job(2, ["-c", "from mpi4py import MPI; from mpipar.kernels import cache, gelu; cache.fcntl = None; "
                      "MPI.COMM_WORLD.barrier(); gelu.warm('float32'); "
                      "print(cache.compiled_count())"], env={"MPIPAR_CACHE_DIR": str(tmp_path)}, timeout=120)
    counts = [int(word) for word in job.stdout.split()]
    assert job.returncode == 0 and sum(counts) > max(counts), job.output
