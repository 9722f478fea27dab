"""Kernels written as instructions compile for every kind of processor: what LLVM cannot select ends the process."""

import os
import subprocess
import sys

import pytest

BASE = "sse2 sse3 ssse3 sse4.1 sse4.2 popcnt avx avx2 fma f16c bmi bmi2".split()
AVX512 = BASE + "avx512f avx512bw avx512cd avx512dq avx512vl".split()
PROCESSORS = {  # LLVM's name and features, and the units for bfloat16 that follow
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
from mpipar.kernels import gemm_pairs, gemm_pieces, gemm_plan, pairs
pairs._allowed = lambda: True
assert pairs.units() == {units!r}, pairs.units()
"""
COMPILE = """
gemm_plan.plan_of(np.dtype(np.float32))
if pairs.units():
    gemm_pairs._compile()
if "amx" in pairs.units():
    gemm_pieces._compile()
"""
UNKNOWN = """
pairs._knows_amx = lambda: True
gemm_pairs._compile()
"""


def compile_for(processor, code, tmp_path):
    name, features, units = PROCESSORS[processor]
    environment = os.environ | {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": ",".join("+" + f for f in features),
                                "MPIPAR_CACHE_DIR": str(tmp_path)}
    return subprocess.run([sys.executable, "-c", PLACE.format(name=name, features=features, units=units) + code],
                          env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("processor", PROCESSORS)
def test_products_compile(processor, tmp_path):
    done = compile_for(processor, COMPILE, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


def test_an_instruction_that_the_processor_lacks(tmp_path):
    done = compile_for("znver4", UNKNOWN, tmp_path)
    assert done.returncode < 0 and "Cannot select: intrinsic %llvm.x86.t" in done.stderr
