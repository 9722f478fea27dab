"""`python -m mpipar.doctor`: what a run will find here (cores, memory, MPI, compiled kernels), and compiling ahead."""

import argparse
import concurrent.futures
import importlib.metadata
import multiprocessing
import os
import platform
import shutil
import time
from pathlib import Path

from mpipar.comm import launcher
from mpipar.kernels import cache
from mpipar.kernels.host import host
from mpipar.kernels.settings import available_cores
from mpipar.kernels.warm import compile_tasks

DTYPES = ("float32", "float64", "bfloat16")
PACKAGES = ("mpipar", "numpy", "numba", "llvmlite", "mpi4py", "mpich", "openmpi")
SMALL_SHARED_MEMORY = 64 << 20  # bytes: containers often have as little


def main(arguments: list[str]) -> int:
    """Print what there is, compile where asked. Exit code 0, or 1 where something will keep a run from working."""
    parser = argparse.ArgumentParser(prog="python -m mpipar.doctor", description=__doc__.split(": ", 1)[1])
    parser.add_argument("--warm", action="store_true", help="compile every kernel now, on all cores")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="with --warm; may be repeated (default: float32)")
    asked = parser.parse_args(arguments)
    if asked.dtype and not asked.warm:
        parser.error("--dtype belongs to --warm")
    troubles = [trouble for check in (_show_machine, _show_packages, _show_mpi, _show_cache) if (trouble := check())]
    if asked.warm:
        for dtype in asked.dtype or ("float32",):
            seconds, compiled = compile_ahead(dtype)
            print(f"compiled      {compiled} kernels for {dtype} in {seconds:.1f} s")
    for trouble in troubles:
        print(f"trouble       {trouble}")
    return 1 if troubles else 0


def compile_ahead(dtype: str) -> tuple[float, int]:
    """(seconds, number of kernels compiled): processes on all cores divide the kernels; what is there is only loaded."""
    start = time.perf_counter()
    parts = len(compile_tasks(dtype))
    with concurrent.futures.ProcessPoolExecutor(min(available_cores(), parts), multiprocessing.get_context("spawn")) as pool:
        compiled = sum(pool.map(_compile, range(parts), [dtype] * parts))
    return time.perf_counter() - start, compiled


def _compile(number, dtype):
    before = cache.compiled_count()
    compile_tasks(dtype)[number]()
    return cache.compiled_count() - before


def _show_machine():
    print(f"processor     {host().describe()}")
    print(f"cores         {available_cores()} for this process (its affinity mask)")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    shared = Path("/dev/shm")
    free = shutil.disk_usage(shared).free if shared.is_dir() else 0
    print(f"memory        {memory / 2**30:.1f} GiB, {free / 2**20:.0f} MiB free for memory that ranks share (/dev/shm)")
    if shared.is_dir() and free < SMALL_SHARED_MEMORY:
        return f"/dev/shm has {free >> 20} MiB free: MPI libraries put their messages there (a container: --shm-size=1g)"


def _show_packages():
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    print(f"packages      Python {platform.python_version()}, " + ", ".join(f"{name} {version}" for name, version in found.items()))


def _show_mpi():
    try:
        from mpipar.comm.mpi import library
    except ImportError as error:
        print("MPI           none")
        return f"mpi4py or its MPI library cannot be loaded ({error}): pip install 'mpipar[mpich]'"
    print(f"MPI           {library()}")
    print(f"launcher      {launcher.mpirun()}")


def _show_cache():
    directory = cache.cache_directory()
    if directory is None:
        print("kernels       cannot be kept")
        return "no directory for compiled kernels can be written: each start compiles anew (set MPIPAR_CACHE_DIR)"
    files = list(directory.glob("*.bin"))
    size = sum(file.stat().st_size for file in files)
    print(f"kernels       {len(files)} compiled, {size / 2**20:.1f} MiB, in {directory}")
