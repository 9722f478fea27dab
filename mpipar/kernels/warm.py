"""Compiling every kernel at once, so that a job does it in one process of a node before the others need the
code."""

import importlib

import numpy as np

MODULES = ("gemm", "gelu", "elementwise", "norm", "attention", "loss", "embedding", "optimizer", "random", "shared")


def compile_all(dtype="float32"):
    """Compiles every kernel for a dtype (float32 or float64), or loads it where the cache has it.

    Each module of MODULES has a function warm(dtype) that calls its kernels on tiny arrays.
    """
    dtype = np.dtype(dtype)
    if dtype.char not in "fd":
        raise ValueError(f"dtype is {dtype}; valid values: float32, float64")
    for name in MODULES:
        importlib.import_module(f".{name}", __package__).warm(dtype)
