"""Add-mul-add in three loops and in one: the same bits, and the lecture's intensities."""

import numpy as np
import pytest

from mpipar.kernels.fusion import add_mul_add, add_mul_add_unfused, bytes_moved, intensity, triad
from tests.helpers.kernels import DTYPES, normal, same_bits, threads

FORMS = (add_mul_add, add_mul_add_unfused)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0,), (1,), (63,), (5, 7, 3), (70001,)])
@pytest.mark.parametrize("count", [1, 3])
def test_both_forms_have_the_bits_of_numpy(dtype, shape, count):
    a, b, c, d = (normal(seed, *shape, dtype=dtype) for seed in range(4))
    for form in FORMS:
        out = np.full(shape, np.nan, dtype)
        with threads(count):
            assert form(a, b, c, d, out) is out
        assert same_bits(out, (a + b) * c + d)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("which", range(4))
def test_the_result_may_take_an_operands_place(form, which):
    operands = [normal(seed, 1000) for seed in range(4)]
    a, b, c, d = operands
    expected = (a + b) * c + d
    assert same_bits(form(a, b, c, d, operands[which]), expected)


def test_strided_operands():
    a, b, c, d = (normal(seed, 40, 30)[::2].T for seed in range(4))
    for form in FORMS:
        assert same_bits(form(a, b, c, d, np.empty((30, 20))), (a + b) * c + d)


def test_work_is_used():
    a, b, c, d = (normal(seed, 50) for seed in range(4))
    work = np.zeros(50), np.zeros(50)
    add_mul_add_unfused(a, b, c, d, np.empty(50), work=work)
    assert same_bits(work[0], a + b) and same_bits(work[1], (a + b) * c)


def test_another_order_would_be_seen():
    """Negative control: bits tell (a + b) * c + d from a sum that is equal on paper."""
    a, b, c, d = (normal(seed, 1000) for seed in range(4))
    assert not same_bits(add_mul_add(a, b, c, d, np.empty(1000)), a * c + b * c + d)


@pytest.mark.parametrize("dtype", DTYPES)
def test_triad(dtype):
    b, c = normal(0, 12345, dtype=dtype), normal(1, 12345, dtype=dtype)
    assert same_bits(triad(b, c, 3, np.empty_like(b)), b + np.dtype(dtype).type(3) * c)


def test_counts_of_the_lecture():
    assert intensity("unfused") == 1 / 3 and intensity("fused") == 3 / 5
    assert bytes_moved("unfused", 1000, 4) == 36_000 and bytes_moved("fused", 1000, 4) == 20_000


@pytest.mark.parametrize("form", FORMS)
def test_what_does_not_fit_is_refused(form):
    x = np.ones(4)
    with pytest.raises(ValueError, match="differ"):
        form(x, x, x, np.ones(5), np.ones(4))
    with pytest.raises(ValueError, match="float32"):
        form(x, x, x, x.astype("f4"), np.ones(4))
    with pytest.raises(ValueError, match="contiguous"):
        form(x, x, x, x, np.ones(8)[::2])
