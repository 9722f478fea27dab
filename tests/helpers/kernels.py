"""Running a kernel on a number of threads, and comparing it with its plain form."""
import contextlib

import numpy as np

from mpipar.kernels import gemm_pieces
from mpipar.kernels.settings import settings

DTYPES = ("float32", "float64")
KERNELS = ("vector", "pieces") if gemm_pieces.has_amx() else ("vector",)  # of our float32 product on this CPU


@contextlib.contextmanager
def float32_by(kernel):
    """Products of float32 of every shape, also of those that gain nothing, use this one of KERNELS."""
    suits, gemm_pieces.suits = gemm_pieces.suits, lambda m, k, n: kernel == "pieces"
    try:
        with settings.changed(gemm="vector" if kernel == "vector" else "numba"):
            yield
    finally:
        gemm_pieces.suits = suits


@contextlib.contextmanager
def threads(count):
    """Kernels run on `count` threads inside the block."""
    with settings.changed(threads=count):
        yield


def normal(seed, *shape, dtype="float64"):
    """Normal numbers of a fixed seed."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def assert_close(actual, expected, tolerance):
    """Every element within tolerance * max(1, largest expected one in size) of a float64 result."""
    assert actual.shape == expected.shape
    if actual.size == 0:
        return
    assert np.isfinite(actual).all()
    error = np.abs(actual.astype(np.float64) - expected).max()
    bound = tolerance * max(1.0, float(np.abs(expected).max()))
    assert error <= bound, f"largest error {error:.3e}, allowed {bound:.3e}"


def same_bits(a, b):
    """Whether two arrays agree in every bit."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
