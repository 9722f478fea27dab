"""examples/threaded_pipeline.py prints the lecture's lines, once, also under mpirun."""

import re

import pytest

from tests.helpers.jobs import run_job


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_lines_of_the_lecture(ranks):
    job = run_job(ranks, ["examples/threaded_pipeline.py"])
    assert job.returncode == 0, job.output
    assert re.findall(r"m=(\d+) p=(\d+)", job.stdout) == [("8", "4"), ("16", "8"), ("64", "16")]
    assert re.findall(r"\(p-1\)/\(m\+p-1\) = (\S+)", job.stdout) == ["27.3%", "30.4%", "19.0%"]
    assert re.findall(r"\(p-1\)/m = (\S+)", job.stdout) == ["37.5%", "43.8%", "23.4%"]
    assert [float(time) for time in re.findall(r"total time .* (\S+) ms predicted", job.stdout)] == [220, 460, 1580]
    measured = [float(share) for share in re.findall(r"whole time +(\S+)% measured", job.stdout)]
    for found, formula in zip(measured, (27.3, 30.4, 19.0)):
        assert formula - 3 < found < formula + 20   # a busy machine makes it longer


def test_another_schedule():
    job = run_job(1, ["examples/threaded_pipeline.py", "4", "2", "5", "zb-v"])
    assert job.returncode == 0 and "m=4 p=2 tf=tb=5ms zb-v" in job.stdout and "rank 1 |" in job.stdout, job.output
