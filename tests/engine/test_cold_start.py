"""4 ranks that start with an empty cache of compiled code: each kernel is compiled once, and never again."""

import pytest

from tests.helpers.jobs import run_job


def start(cache):
    job = run_job(4, ["-m", "tests.engine.cold_start"], env={"MPIPAR_CACHE_DIR": str(cache)}, timeout=120)
    assert job.returncode == 0 and not job.left_behind, job.output
    return job.stdout.strip()


@pytest.mark.parametrize("times", [1, pytest.param(30, marks=pytest.mark.slow)])
def test_each_kernel_is_compiled_once_by_one_rank(tmp_path, times):
    expected = None
    for number in range(times):
        first = start(tmp_path / str(number))
        expected = expected or first
        assert first == expected and first.endswith(", 0, 0, 0]") and not first.startswith("compiled [0,")
    assert start(tmp_path / "0") == "compiled [0, 0, 0, 0]"
