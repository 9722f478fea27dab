"""The two choices that hold for the whole process: which GEMM, and how many threads."""

import os

GEMMS = ("numba", "blas")


def available_cores() -> int:
    """Cores this process may run on (its affinity mask, not the machine)."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


class Settings:
    """Process-wide state of the kernels; there is one object, `settings`.

    gemm: "numba" (our blocked product) or "blas" (numpy.matmul). threads: how many Python threads
    `parallel_for` uses. Assigning a value that does not fit raises ValueError.
    """

    def __init__(self):
        self._gemm = "numba"
        self._threads = available_cores()

    @property
    def gemm(self) -> str:
        return self._gemm

    @gemm.setter
    def gemm(self, name: str):
        if name not in GEMMS:
            raise ValueError(f"gemm is {name!r}; valid values: {', '.join(GEMMS)}")
        self._gemm = name

    @property
    def threads(self) -> int:
        return self._threads

    @threads.setter
    def threads(self, count: int):
        if isinstance(count, bool) or not hasattr(count, "__index__") or count.__index__() < 1:
            raise ValueError(f"threads is {count!r}; valid values: integers from 1")
        self._threads = count.__index__()


settings = Settings()
