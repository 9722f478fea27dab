"""The steps of the ladder against NumPy, against each other, and against the blocked product."""

import numpy as np
import pytest

from mpipar.kernels import gemm_plain, gemm_vectorised, warm
from mpipar.kernels.gemm import gemm
from mpipar.kernels.settings import settings

STEPS = {
    "triple_loop": gemm_plain.triple_loop,
    "row_parallel": gemm_plain.row_parallel,
    "tiled": gemm_plain.tiled,
    "tiled 5": lambda a, b, out: gemm_plain.tiled(a, b, out, tile=5),
    "splat_rows": gemm_vectorised.splat_rows,
    "splat_rows 7": lambda a, b, out: gemm_vectorised.splat_rows(a, b, out, tile=7),
    "dot_columns": gemm_vectorised.dot_columns,
    "dot_columns 3": lambda a, b, out: gemm_vectorised.dot_columns(a, b, out, tile=3),
    "register_block": gemm_vectorised.register_block,
    "register_block 20": lambda a, b, out: gemm_vectorised.register_block(a, b, out, tile=20),
    "gemm": gemm,
}


@pytest.mark.parametrize("m, k, n", [(1, 1, 1), (33, 70, 41), (16, 64, 32), (130, 67, 71), (2, 131, 3),
                                     (5, 0, 3), (0, 4, 2), (4, 2, 0), (0, 0, 0)])
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


@pytest.mark.parametrize("name", STEPS)
def test_operands_of_any_strides(name):
    generator = np.random.default_rng(2)
    a, b = generator.standard_normal((70, 37)).T, generator.standard_normal((90, 140))[5:75, ::2]
    large = np.zeros((40, 80))
    STEPS[name](a, b, large[1:38, 3:73])
    np.testing.assert_allclose(large[1:38, 3:73], a @ b, rtol=0, atol=1e-12)
    large[1:38, 3:73] = 0
    assert not large.any()  # nothing around the result was written


def test_a_missing_term_would_be_seen():
    """Negative control: the tolerance of these tests tells one missing term from rounding."""
    generator = np.random.default_rng(0)
    a, b = (generator.standard_normal(shape).astype("f4") for shape in ((33, 70), (70, 41)))
    out = gemm_vectorised.register_block(a[:, :-1], b[:-1], np.empty((33, 41), "f4"))
    assert np.abs(out - a.astype("f8") @ b.astype("f8")).max() > 100 * 1e-5 * 70


def test_steps_are_not_compiled_at_start_up():
    assert not {"gemm_plain", "gemm_vectorised", "fusion", "convolution"} & set(warm.MODULES)


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


@pytest.mark.parametrize("step", [gemm_plain.tiled, gemm_vectorised.splat_rows, gemm_vectorised.dot_columns,
                                  gemm_vectorised.register_block])
def test_a_tile_of_nothing_is_refused(step):
    with pytest.raises(ValueError, match="valid values: integers from 1"):
        step(np.ones((2, 2)), np.ones((2, 2)), np.ones((2, 2)), tile=0)
