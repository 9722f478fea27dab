"""Kernels written as instructions, for other processors than this one: what LLVM cannot select ends the process."""

import os
import platform
import subprocess
import sys

import pytest

from mpipar.kernels.host import host

BASE = "sse2 sse3 ssse3 sse4.1 sse4.2 popcnt avx avx2 fma f16c bmi bmi2".split()
AVX512 = BASE + "avx512f avx512bw avx512cd avx512dq avx512vl".split()
PROCESSORS = {  # LLVM's name and features, and the units for bfloat16 that follow
    "oldest": ("x86-64", ["sse", "sse2", "cx8", "fxsr", "mmx"], ()),
    "znver3": ("znver3", BASE, ()),
    "skylake": ("skylake-avx512", AVX512, ()),
    "znver4": ("znver4", AVX512 + ["avx512bf16"], ("avx512",)),
    "sapphirerapids": ("sapphirerapids", AVX512 + ["avx512bf16", "amx-tile", "amx-bf16", "amx-int8"], ("amx", "avx512")),
}
PLACE = """
import llvmlite.binding as llvm
llvm.get_host_cpu_name = lambda: {name!r}
llvm.get_host_cpu_features = lambda: dict.fromkeys({features!r}, True)
import numpy as np
from mpipar.kernels import host as place
place.vector_unit = lambda *_, known=place.vector_unit: {unit!r} or known(*_)
from mpipar.kernels import gemm_along, gemm_pairs, gemm_pieces, gemm_plan, pairs
pairs._allowed = lambda: True
assert pairs.units() == {units!r}, pairs.units()
"""
COMPILE = """
gemm_plan.plan_of(np.dtype(np.float32))
gemm_along._COMPILE["f"]()
if pairs.units():
    gemm_pairs._compile()
if "amx" in pairs.units():
    gemm_pieces._compile()
"""
UNKNOWN = """
pairs.knows_amx = lambda: True
gemm_pairs._compile()
"""


def compile_for(processor, code, tmp_path, unit=None):
    """A process that runs `code` as on another processor. unit: bytes of a vector and number of them, if not its own."""
    name, features, units = PROCESSORS[processor]
    environment = os.environ | {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": ",".join("+" + f for f in features),
                                "MPIPAR_CACHE_DIR": str(tmp_path)}
    return subprocess.run([sys.executable, "-c", PLACE.format(name=name, features=features, units=units, unit=unit) + code],
                          env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("processor", PROCESSORS)
def test_products_compile(processor, tmp_path):
    done = compile_for(processor, COMPILE, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


def test_an_instruction_that_the_processor_lacks(tmp_path):
    done = compile_for("znver4", UNKNOWN, tmp_path)
    assert done.returncode < 0 and "Cannot select: intrinsic %llvm.x86.t" in done.stderr


COMPUTE = """
from mpipar.kernels import plain
from mpipar.kernels.attention import attention_backward, attention_forward
from mpipar.kernels.gemm import gemm
from mpipar.kernels.host import host
from mpipar.kernels.settings import settings
settings.threads = 1
assert (host().vector_bytes, host().registers) == {vectors}
random = np.random.default_rng(0)
for dtype, tolerance in ((np.float32, 1e-6), (np.float64, 2e-15))[:{count}]:
    for m, k, n in ((1, 300, 5), (7, 300, 33), (70, 41, 65), (150, 90, 70)):
        a, b = random.standard_normal((m, k)).astype(dtype), random.standard_normal((k, n)).astype(dtype)
        right = a.astype(float) @ b.astype(float)
        size = np.abs(a.astype(float)) @ np.abs(b.astype(float))
        for x in (a, np.asfortranarray(a)):
            for y in (b, np.asfortranarray(b)):
                out = gemm(x, y, np.full((m, n), np.nan, dtype))
                assert (np.abs(out.astype(float) - right) <= tolerance * size).all(), (dtype, m, k, n)
    q, k, v, dout = random.standard_normal((4, 2, 70, 3, 16)).astype(dtype)
    out, dq, dk, dv = np.empty((4, *q.shape), dtype)
    lse = np.empty((2, 3, 70), dtype)
    attention_forward(q, k, v, out, lse)
    attention_backward(q, k, v, out, lse, dout, dq, dk, dv)
    expected = np.empty((4, *q.shape), dtype)
    plain.attention_forward(q, k, v, expected[0], lse)
    plain.attention_backward(q, k, v, expected[0], lse, dout, *expected[1:])
    for found, expected in zip((out, dq, dk, dv), expected):
        assert np.abs(found - expected).max() <= 4 * tolerance, dtype
"""
SLOW = ("znver3", (16, 32), 2), ("oldest", (16, 16), 2), ("znver3", (32, 16), 2), ("skylake", (64, 32), 2)


@pytest.mark.parametrize("processor, vectors, count", (
    ("znver3", (16, 32), 1),  # the registers of an ARM core; float32 alone
    *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
))
def test_code_for_other_processors_computes(processor, vectors, count, tmp_path):
    """Narrower vectors, more or fewer registers, in instructions that this one has too."""
    _, features, _ = PROCESSORS[processor]
    if platform.machine() != "x86_64" or not set(features) <= host().features:
        pytest.skip("this processor lacks its instructions")
    done = compile_for(processor, COMPUTE.format(vectors=vectors, count=count), tmp_path, vectors)
    assert done.returncode == 0, done.stderr[-2000:]
