"""Compiling every kernel at once, so that the processes of a node divide the work before they need the code."""

import importlib

import numpy as np

# The longest first: processes that divide the list end together.
MODULES = ("gemm", "attention", "random", "norm", "elementwise", "loss", "gelu", "embedding", "optimizer")


def compile_all(dtype="float32"):
    """Compiles every kernel for a dtype (float32 or float64), or loads it where the cache has it."""
    for compile_some in compile_tasks(dtype):
        compile_some()


def compile_tasks(dtype="float32"):
    """Functions without arguments that together do what `compile_all` does, in any order and in any processes.

    Each module of MODULES has a function warm(dtype) that calls its kernels on tiny arrays. ValueError for another
    dtype.
    """
    dtype = np.dtype(dtype)
    if dtype.char not in "fd":
        raise ValueError(f"dtype is {dtype}; valid values: float32, float64")
    return [lambda name=name: importlib.import_module(f".{name}", __package__).warm(dtype) for name in MODULES]
