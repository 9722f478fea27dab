"""The bits of a result do not depend on where its operands or the kernel's own memory lie.

A compiled loop that sums and writes would: the compiler lets it run as vectors, and so in another order, only where the
written memory is not too near behind what is read.
"""

import ast
import ctypes
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mpipar.kernels import norm
from mpipar.kernels.cache import jit
from mpipar.kernels.host import host
from mpipar.kernels.polynomials import SUM_FLAGS
from mpipar.kernels.wide import wide_vectors
from tests.helpers.kernels import DTYPES, normal

ROWS = 32
ELSEWHERE = 400  # so many holes of a size, which loading the kernels left, are filled first
pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="knows how glibc's malloc gives memory again")


@jit(fastmath=SUM_FLAGS)
def sums_and_writes(x, gamma, beta, out, rstd, eps):
    """The norm with a loop that sums and writes to memory of its own."""
    wide_vectors()
    rows, columns = x.shape
    number = x.dtype.type
    share = number(1) / number(columns)
    row = np.empty(columns, x.dtype)
    for r in range(rows):
        total = number(0)
        for d in range(columns):
            total += x[r, d]
        average = total * share
        squares = number(0)
        for d in range(columns):
            row[d] = x[r, d] - average
            squares += row[d] * row[d]
        scale = number(1) / np.sqrt(squares * share + eps)
        for d in range(columns):
            out[r, d] = row[d] * scale * gamma[d] + beta[d]
        rstd[r] = scale


def control(x, out):
    rows, columns = x.shape
    sums_and_writes(x, *affine(x), out, np.empty(rows, x.dtype), x.dtype.type(1e-5))


def affine(x):
    return np.ones(x.shape[1], x.dtype), np.zeros(x.shape[1], x.dtype)


def forward(x, out):
    rows, columns = x.shape
    norm._forward(x, *affine(x), out, *np.empty((2, rows), x.dtype), x.dtype.type(1e-5))


def backward(x, out):
    rows, columns = x.shape
    statistics, partial = np.full((2, rows), 0.5, x.dtype), np.empty((2 * -(-rows // norm.BLOCK_ROWS), columns), x.dtype)
    norm._backward(x, affine(x)[0], *statistics, x, out, x, False, partial)
    out[0] += partial.sum(axis=0)


def kinds_of_bits(kernel, dtype):
    """For each length of a row how many different results there are when a hole of some size lies behind x."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    for columns in (16, 24, 32, 64):
        values = normal(1, ROWS, columns, dtype=dtype)
        out, found = np.empty_like(values), set()
        kernel(values, out)  # compiled, and Python's own memory is at hand
        used = [libc.malloc(values.nbytes) for _ in range(ELSEWHERE)]
        for size in range(24, 800, 8):
            used += [libc.malloc(size) for _ in range(ELSEWHERE)]
            place, holes = libc.malloc(values.nbytes), [libc.malloc(size) for _ in range(4)]
            used.append(place)
            x = np.frombuffer((ctypes.c_char * values.nbytes).from_address(place), dtype).reshape(values.shape)
            x[...] = values
            for hole in reversed(holes):  # the one behind x is the first to be given again
                libc.free(hole)
            kernel(x, out)
            found.add(out.tobytes())
        for place in used:
            libc.free(place)
        yield columns, len(found)


def in_a_process_of_its_own(kernel, dtype):
    """`kinds_of_bits` as a dictionary; where malloc takes memory depends on all that a process has done before."""
    program = (f"from {__name__} import *\n"
               f"print(dict(kinds_of_bits({kernel.__name__}, {dtype!r})))")
    done = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", [forward, backward])
def test_norm(kernel, dtype):
    assert in_a_process_of_its_own(kernel, dtype) == {16: 1, 24: 1, 32: 1, 64: 1}


@pytest.mark.skipif(host().vector_bytes < 64, reason="seen with vectors of 64 bytes only")
def test_the_control():
    for _ in range(5):  # addresses are chosen at random
        if any(count > 1 for dtype in DTYPES for count in in_a_process_of_its_own(control, dtype).values()):
            return
    raise AssertionError("the test does not see what it should")
