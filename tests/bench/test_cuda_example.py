"""examples/tiled_gemm_cuda.py in Numba's CUDA simulator."""

import pytest

from tests.helpers.jobs import ROOT, run_job

SIMULATOR = {"NUMBA_ENABLE_CUDASIM": "1"}
EXAMPLE = ROOT / "examples" / "tiled_gemm_cuda.py"


@pytest.mark.parametrize("ranks, sizes, shown", [
    (1, [5, 9, 9], "M=5 K=9 N/E=9 (N=9, E=1), grid 2 x 1 = 2 blocks of 8 x 8"),
    (3, [4, 5, 2], "M=4 K=5 N/E=1 (N=2, E=3)"),  # the last rank has no column
])
def test_shards_make_the_product(ranks, sizes, shown):
    job = run_job(ranks, [str(EXAMPLE), *map(str, sizes)], env=SIMULATOR)
    assert job.returncode == 0 and not job.left_behind, job.output
    assert shown in job.stdout and "2.0 FLOP/byte (TILE/4)" in job.stdout
    assert len(job.stdout.splitlines()) == 4


def test_a_wrong_kernel_fails(tmp_path):
    """Negative control: a tile whose last step is left out."""
    wrong = tmp_path / "wrong.py"
    text = EXAMPLE.read_text()
    assert text.count("for k in range(TILE):") == 1
    wrong.write_text(text.replace("for k in range(TILE):", "for k in range(TILE - 1):"))
    job = run_job(1, [str(wrong), "8", "8", "8"], env=SIMULATOR)
    assert job.returncode and "the shards together must be the whole product" in job.output
