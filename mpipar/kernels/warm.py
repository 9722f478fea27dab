"""Compiling every kernel at once, so that the processes of a node divide the work before they need the code."""

import importlib

import numpy as np

from . import bfloat16
from .dtypes import as_dtype, is_bfloat16

# The longest first: processes that divide the list end together.
MODULES = ("gemm", "attention", "random", "norm", "elementwise", "loss", "gelu", "embedding", "optimizer", "shared", "exchange")
OF_BFLOAT16 = ("gemm", "attention", "embedding")  # the others have no code of their own for it


def compile_all(dtype="float32"):
    """Compiles every kernel for a dtype (float32, float64 or bfloat16), or loads it where the cache has it."""
    for compile_some in compile_tasks(dtype):
        compile_some()


def compile_tasks(dtype="float32"):
    """Functions without arguments that together do what `compile_all` does, in any order and in any processes.

    Each module of MODULES has a function warm(dtype) that calls its kernels on tiny arrays. bfloat16 is computed by the
    kernels of float32, with some of its own around them. ValueError for another dtype.
    """
    dtype = as_dtype(dtype)
    if is_bfloat16(dtype):
        return [*compile_tasks(np.float32), bfloat16.warm, *(_task(name, dtype) for name in OF_BFLOAT16)]
    return [_task(name, dtype) for name in MODULES]


def _task(name, dtype):
    return lambda: importlib.import_module(f".{name}", __package__).warm(dtype)
