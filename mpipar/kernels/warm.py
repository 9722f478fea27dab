"""Compiling every kernel at once, so that a job does it in one process of a node before the others need the
code."""

import importlib

import numpy as np

from . import bfloat16
from .dtypes import as_dtype, is_bfloat16

MODULES = ("gemm", "gelu", "elementwise", "norm", "attention", "loss", "embedding", "optimizer", "random")
OF_BFLOAT16 = ("gemm", "attention", "embedding")  # the others have no code of their own for it


def compile_all(dtype="float32"):
    """Compiles every kernel for a dtype (float32, float64 or bfloat16), or loads it where the cache has it.

    bfloat16 is computed by the kernels of float32, with some of its own around them. Each module of MODULES has a
    function warm(dtype) that calls its kernels on tiny arrays.
    """
    dtype = as_dtype(dtype)
    if is_bfloat16(dtype):
        compile_all(np.float32)
        bfloat16.warm()
    for name in MODULES if not is_bfloat16(dtype) else OF_BFLOAT16:
        importlib.import_module(f".{name}", __package__).warm(dtype)
