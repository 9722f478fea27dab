"""examples/tiled_gemm_cuda.py in Numba's CUDA simulator."""

import pytest

from tests.helpers.jobs import ROOT, run_job

SIMULATOR = {"NUMBA_ENABLE_CUDASIM": "1"}
EXAMPLE = ROOT / "examples" / "tiled_gemm_cuda.py"


@pytest.mark.parametrize("ranks, sizes, shown", [
    (1, [9, 17, 11], "M=9 K=17 N/E=11 (N=11, E=1), grid 2 x 2 = 4 blocks of 8 x 8"),
    (3, [8, 8, 10], "M=8 K=8 N/E=4 (N=10, E=3), grid 1 x 1 = 1 blocks of 8 x 8"),
    (3, [8, 8, 2], "all 3 shards together"),  # the last rank has no column
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
