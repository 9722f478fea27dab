"""Panels of matrices that don't change: the same bits, packed once, forgotten when the promise ends."""

import contextlib

import numpy as np
import pytest

from mpipar.kernels.dtypes import as_dtype
from mpipar.kernels.gemm import THIN_ROWS, gemm
from mpipar.kernels.gemm_kept import kept, unchanged
from mpipar.kernels.pairs import units
from mpipar.kernels.settings import settings
from tests.helpers.kernels import KERNELS, float32_by, normal, same_bits, threads

WAYS = (*(f"float32 by {kernel}" for kernel in KERNELS), "float64", *(f"bfloat16 by {unit}" for unit in (*units(), "convert")))


@pytest.fixture(params=WAYS, autouse=True)
def dtype(request):
    name, _, unit = request.param.partition(" by ")
    settings.bfloat16 = unit if name == "bfloat16" else "auto"
    with float32_by(unit) if name == "float32" else contextlib.nullcontext():
        yield as_dtype(name)
    settings.bfloat16 = "auto"


def product(a, b, **options):
    return gemm(a, b, np.empty((a.shape[0], b.shape[1]), a.dtype), **options)


@pytest.mark.parametrize("k, n", [(1, 1), (70, 33), (384, 1536), (1500, 201), (2100, 40)])
def test_same_bits_as_without(dtype, k, n):
    weights = normal(1, k * n, dtype=dtype)
    for b in (weights.reshape(k, n), weights.reshape(n, k).T, weights.reshape(k, n)[:, n // 3:]):
        bias = normal(2, b.shape[1], dtype=dtype)
        for rows in (3, 61, 500):
            a = normal(rows, rows, k, dtype=dtype)
            expected, active = np.empty((2, rows, b.shape[1]), dtype)
            gemm(a, b, expected, bias=bias, gelu=active)
            for count in (1, 2, 3):
                with threads(count), unchanged(weights):
                    for _ in range(2):
                        out, other = np.empty((2, rows, b.shape[1]), dtype)
                        gemm(a, b, out, bias=bias, gelu=other)
                        assert same_bits(out, expected) and same_bits(other, active)


def test_packed_once_and_forgotten(dtype):
    weights = normal(1, 60, 90, dtype=dtype)
    a, across = normal(2, 3 * THIN_ROWS, 60, dtype=dtype), normal(3, 3 * THIN_ROWS, 90, dtype=dtype)
    old = product(a, weights)
    for _ in range(2):
        made = kept.made
        with unchanged(weights):
            for _ in range(3):
                assert same_bits(product(a, weights), old)
            assert kept.made == made + 1
            product(across, weights.T)
            product(across, weights.T)
            assert kept.made == made + 2
            product(a, weights.copy())  # not the same memory
            assert kept.made == made + 2
            keep = weights.copy()
            weights[:] = 0  # the negative control: who breaks the promise gets the old product
            assert same_bits(product(a, weights), old)
        assert not product(a, weights).any()
        with unchanged(weights):
            assert not product(a, weights).any()
        weights[:] = keep
        assert same_bits(product(a, weights), old)


def test_memory_that_is_not_used_again_is_given_back(dtype):
    first, second = normal(1, 60, 90, dtype=dtype), normal(2, 60, 90, dtype=dtype)
    a = normal(3, 3 * THIN_ROWS, 60, dtype=dtype)
    for weights in (first, second):
        with unchanged(first, second):
            product(a, weights)
    assert [key[0] for key in kept.entries] == [second.ctypes.data]
    with unchanged():
        pass
    assert not kept.entries and not kept.spans


def test_an_exception_ends_the_promise(dtype):
    with pytest.raises(RuntimeError), unchanged(normal(1, 4, 4, dtype=dtype)):
        raise RuntimeError
    assert not kept.spans
