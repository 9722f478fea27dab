"""The choices that hold for the whole process: which GEMM, how bfloat16 is multiplied, and how many threads."""

import contextlib
import os

GEMMS = ("numba", "vector", "blas")
BFLOAT16 = ("auto", "amx", "avx512", "convert")


def available_cores() -> int:
    """Cores this process may run on (its affinity mask, not the machine)."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


class Settings:
    """Process-wide state of the kernels; there is one object, `settings`.

    gemm: "numba" (our blocked product, by the CPU's matrix unit where it has one), "vector" (ours, by vector instructions
    everywhere) or "blas" (numpy.matmul). bfloat16: "amx" or "avx512", instructions for it that
    not every CPU has, "convert" (panels of float32), or "auto", the best of them on this CPU. threads: how many Python
    threads `parallel_for` uses. Assigning a value that does not fit raises ValueError.
    """

    def __init__(self):
        self._gemm = "numba"
        self._bfloat16 = "auto"
        self._threads = available_cores()

    @contextlib.contextmanager
    def changed(self, **values):
        """A block in which some of them have other values: `with settings.changed(gemm="vector", threads=1):`."""
        before = {name: getattr(self, name) for name in values}
        try:
            for name, value in values.items():
                setattr(self, name, value)
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)

    @property
    def gemm(self) -> str:
        return self._gemm

    @gemm.setter
    def gemm(self, name: str):
        if name not in GEMMS:
            raise ValueError(f"gemm is {name!r}; valid values: {', '.join(GEMMS)}")
        self._gemm = name

    @property
    def bfloat16(self) -> str:
        return self._bfloat16

    @bfloat16.setter
    def bfloat16(self, name: str):
        if name not in BFLOAT16:
            raise ValueError(f"bfloat16 is {name!r}; valid values: {', '.join(BFLOAT16)}")
        self._bfloat16 = name

    @property
    def threads(self) -> int:
        return self._threads

    @threads.setter
    def threads(self, count: int):
        if isinstance(count, bool) or not hasattr(count, "__index__") or count.__index__() < 1:
            raise ValueError(f"threads is {count!r}; valid values: integers from 1")
        self._threads = count.__index__()


settings = Settings()
