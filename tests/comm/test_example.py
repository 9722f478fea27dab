"""examples/collectives.py prints the lecture's numbers, in order, for any number of ranks."""
import subprocess
import sys

import pytest

from tests.helpers.jobs import ROOT, environment, run_job


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_collectives(ranks):
    job = run_job(ranks, ["examples/collectives.py"])
    assert job.returncode == 0, job.output
    assert job.stdout.rstrip().endswith(f"all values are right on {ranks} rank{'s' * (ranks > 1)}")
    names = [
        "broadcast",
        "scatter",
        "gather",
        "reduce",
        "all-gather",
        "reduce-scatter",
        "all-reduce",
        "all-gather(",
        "all-to-all",
    ]
    places = [job.stdout.index(f"\n{name}") for name in names]
    assert places == sorted(places)
    if ranks == 4:
        for line in ("rank 3:          [3 4 5 6]  ->  [6 10 14 18]", "rank 2:          [2 3 4 5]  ->  [14]",
                     "rank 1:          [4 5 6 7]  ->  [1 5 9 13]", "rank 1:                  -  ->  [1]"):
            assert line in job.stdout


def test_without_a_launcher():
    done = subprocess.run(
        [sys.executable, "examples/collectives.py"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "all values are right on 1 rank\n" in done.stdout
