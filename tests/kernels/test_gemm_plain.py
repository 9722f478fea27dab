"""The steps of the ladder against NumPy, against each other, and against the blocked product."""

import numpy as np
import pytest

from mpipar.kernels import gemm_plain
from mpipar.kernels.gemm import gemm
from mpipar.kernels.settings import settings

STEPS = {
    "triple_loop": gemm_plain.triple_loop,
    "row_parallel": gemm_plain.row_parallel,
    "tiled": gemm_plain.tiled,
    "tiled 5": lambda a, b, out: gemm_plain.tiled(a, b, out, tile=5),
    "splat_rows": gemm_plain.splat_rows,
    "dot_columns": gemm_plain.dot_columns,
    "dot_columns 3": lambda a, b, out: gemm_plain.dot_columns(a, b, out, tile=3),
    "register_block": gemm_plain.register_block,
    "gemm": gemm,
}


@pytest.mark.parametrize("m, k, n", [(1, 1, 1), (33, 70, 41), (16, 64, 32), (5, 0, 3), (0, 4, 2)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_all_steps_agree(m, k, n, dtype):
    generator = np.random.default_rng(0)
    a, b = generator.standard_normal((m, k)).astype(dtype), generator.standard_normal((k, n)).astype(dtype)
    expected = a.astype("f8") @ b.astype("f8")
    tolerance = 1e-5 if dtype == "float32" else 1e-12
    for name, step in STEPS.items():
        out = np.full((m, n), np.nan, dtype)
        assert step(a, b, out) is out
        np.testing.assert_allclose(out, expected, rtol=0, atol=tolerance * max(1, k), err_msg=name)


def test_row_parallel_has_the_bits_of_the_triple_loop():
    generator = np.random.default_rng(1)
    a, b = generator.standard_normal((37, 50)), generator.standard_normal((50, 21))
    expected = gemm_plain.triple_loop(a, b, np.empty((37, 21)))
    before = settings.threads
    try:
        for settings.threads in (1, 2, 5, 64):
            np.testing.assert_array_equal(gemm_plain.row_parallel(a, b, np.empty((37, 21))), expected)
    finally:
        settings.threads = before


@pytest.mark.parametrize("step", [gemm_plain.tiled, gemm_plain.dot_columns])
def test_a_tile_of_nothing_is_refused(step):
    with pytest.raises(ValueError, match="valid values: integers from 1"):
        step(np.ones((2, 2)), np.ones((2, 2)), np.ones((2, 2)), tile=0)
