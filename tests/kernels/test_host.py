"""The register tile for each kind of machine."""

from dataclasses import replace

import numpy as np
import pytest

from mpipar.kernels.host import host, vector_unit


@pytest.mark.parametrize("machine, features, unit, tile", [
    ("x86_64", {"avx512f", "avx512vl", "avx2", "fma"}, (64, 32), (14, 32)),
    ("x86_64", {"avx2", "fma"}, (32, 16), (6, 16)),
    ("x86_64", {"avx"}, (16, 16), (6, 8)),
    ("aarch64", {"neon"}, (16, 32), (14, 8)),
    ("arm64", {"neon", "sve"}, (16, 32), (14, 8)),
    ("riscv64", set(), (16, 16), (6, 8)),
])
def test_vectors_and_tile(machine, features, unit, tile):
    assert vector_unit(machine, features) == unit
    other = replace(host(), vector_bytes=unit[0], registers=unit[1])
    assert other.register_tile(np.float32) == tile
    assert other.register_tile(np.float64) == (tile[0], tile[1] // 2)


def test_this_machine():
    here = host()
    assert 4 << 10 <= here.l1 <= here.l2 and here.l3 > 0 and here.cores >= 1
    assert here.cpu in here.describe() and "\n" not in here.describe()
