"""What this machine's core looks like: vectors, registers, caches, and the register tile that follows from
them."""

import functools
import platform
from dataclasses import dataclass
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np

from .settings import available_cores

CACHE_FALLBACK = {1: 32 << 10, 2: 512 << 10, 3: 4 << 20}


@dataclass(frozen=True)
class Host:
    """cpu, features: LLVM's names. vector_bytes: width of one register. registers: how many there are.
    l1, l2, l3: bytes of data cache that one core reaches. cores: in the affinity mask."""

    cpu: str
    features: frozenset
    vector_bytes: int
    registers: int
    l1: int
    l2: int
    l3: int
    cores: int

    def lanes(self, dtype) -> int:
        """Elements of `dtype` in one register."""
        return self.vector_bytes // np.dtype(dtype).itemsize

    def register_tile(self, dtype) -> tuple[int, int]:
        """(rows, columns) of the block of C that the register kernel keeps in registers.

        Two vectors wide, and as many rows as leave room for the two vectors of B and one broadcast element of
        A.
        """
        return self.tile_rows, self.tile_vectors * self.lanes(dtype)

    @property
    def tile_vectors(self) -> int:
        return 2

    @property
    def tile_rows(self) -> int:
        return (self.registers - self.tile_vectors - 1) // self.tile_vectors

    @property
    def prefetches(self) -> bool:
        """Whether the register kernel asks for cache lines itself.

        Panels of 512-bit vectors outrun the hardware's own prefetcher. With narrower ones a step of k loads 8
        times for 12 multiplications; each request more then costs what it brings (Zen 3: a fifth of the peak).
        """
        return self.vector_bytes >= 64

    @property
    def is_zen(self) -> bool:
        """Whether it is one of AMD's processors since Zen."""
        return self.cpu.startswith("znver")

    @property
    def streams_from_l2(self) -> bool:
        """Whether the register kernel runs as fast on what lies in the second cache, however deep the panel (Zen 4)."""
        return self.is_zen and self.vector_bytes >= 64

    def describe(self) -> str:
        """One line for the head of a benchmark."""
        return (f"{_model_name()} ({self.cpu}), {8 * self.vector_bytes}-bit vectors, "
                f"L1 {self.l1 >> 10} KiB, L2 {self.l2 >> 10} KiB, L3 {self.l3 >> 20} MiB, {self.cores} cores")


@functools.lru_cache(maxsize=None)
def host() -> Host:
    """The machine this process runs on; looked up once."""
    features = frozenset(name for name, on in llvm.get_host_cpu_features().items() if on)
    vector_bytes, registers = vector_unit(platform.machine().lower(), features)
    l1, l2, l3 = (_cache_bytes(level) for level in (1, 2, 3))
    return Host(llvm.get_host_cpu_name(), features, vector_bytes, registers, l1, l2, l3, available_cores())


def vector_unit(machine: str, features) -> tuple[int, int]:
    """(bytes of a vector register, number of them) for a machine name and LLVM's feature names."""
    if machine in ("x86_64", "amd64", "i686"):
        if "avx512f" in features and "avx512vl" in features:
            return 64, 32
        if "avx2" in features and "fma" in features:
            return 32, 16
        return 16, 16
    if machine in ("aarch64", "arm64"):  # NEON, also where there is SVE: its registers are as wide or wider
        return 16, 32
    return 16, 16


def _cache_bytes(level: int) -> int:
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            kind = (index / "type").read_text().strip()
            if int((index / "level").read_text()) != level or kind == "Instruction":
                continue
            text = (index / "size").read_text().strip()
            factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
            size = int(text.rstrip("KMG")) * factor
        except (OSError, ValueError):
            continue
        if size > 0:
            return size
    return CACHE_FALLBACK[level]


def _model_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
