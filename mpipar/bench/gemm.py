"""`python -m mpipar.bench gemm`: our product and NumPy's BLAS, alternated in one run, one shape after another."""

import json
import math
import os
import platform
import statistics
import time

import numpy as np

from ..kernels.cache import jit
from ..kernels.gemm import gemm
from ..kernels.host import host
from ..kernels.settings import available_cores, settings
from ..kernels.threads import limit_threads
from ..kernels.vector import TILE_ROWS, address, tile

SHAPES = "64x256x512,128x1024x1024,512x512x2048,1024x1024x1024,2048x2048x2048"
MORE_SHAPES = "16x1024x4096,32x384x1536,2048x384x1536,2048x1536x384,77x130x201"
FORMS = ("nn", "nt", "tn", "tt")
TOLERANCE = {"float32": 1e-5, "float64": 1e-12}  # of the largest sum of absolute values


def add_arguments(parser):
    parser.add_argument("--shapes", default=SHAPES, metavar="MxKxN,...",
                        help=f"out[M, N] = a[M, K] @ b[K, N]; 'more' adds {MORE_SHAPES} (default: %(default)s)")
    parser.add_argument("--form", choices=FORMS + ("all",), default="nn", help="n: row-major, t: transposed view, for a and b")
    parser.add_argument("--dtype", choices=tuple(TOLERANCE), default="float32")
    parser.add_argument("--threads", type=int, default=1, help="for both (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=15, help="alternated pairs of measurements a shape (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="also write everything to FILE")


def run(arguments):
    """Prints the table; the ratio is ours over BLAS, its spread over the pairs of one run."""
    if arguments.runs < 1:
        raise ValueError(f"--runs is {arguments.runs}; valid values: integers from 1")
    shapes = _shapes(arguments.shapes)
    limit_threads(arguments.threads)
    dtype = np.dtype(arguments.dtype)
    report = {"hardware": host().describe(), "numpy": np.__version__, "python": platform.python_version(), "blas": _blas_name(),
              "dtype": dtype.name, "threads": settings.threads, "runs": arguments.runs, "peak_gflops": _peak(dtype)}
    print(f"{report['hardware']}\nNumPy {report['numpy']}, {report['blas']}, {dtype.name}, {settings.threads} thread(s) of "
          f"{available_cores()} cores, {arguments.runs} alternated runs a shape, load average {os.getloadavg()[0]:.1f}")
    print(f"register kernel on panels in the nearest cache: {report['peak_gflops']:.1f} GFLOP/s a thread")
    print(f"{'m x k x n':>16} form {'ours':>8} {'BLAS':>8} GFLOP/s (best)  {'ratio (median)':>14}  {'spread':>13} {'of peak':>8}")
    report["results"] = results = []
    for form in FORMS if arguments.form == "all" else (arguments.form,):
        for m, k, n in shapes:
            result = _compare(m, k, n, form, dtype, arguments.runs)
            result["of_peak"] = result["ours_gflops"] / (report["peak_gflops"] * settings.threads)
            results.append(result)
            print(f"{f'{m} x {k} x {n}':>16}  {form}  {result['ours_gflops']:8.1f} {result['blas_gflops']:8.1f}"
                  f"{'':17}{result['ratio']:14.3f}  {result['ratio_low']:.3f}..{result['ratio_high']:.3f} {result['of_peak']:8.2f}",
                  flush=True)
    report["geometric_mean"] = statistics.geometric_mean(result["ratio"] for result in results)
    report["geometric_mean_of_best"] = statistics.geometric_mean(r["ours_gflops"] / r["blas_gflops"] for r in results)
    print(f"geometric mean of ours / BLAS: {report['geometric_mean']:.3f} (medians), "
          f"{report['geometric_mean_of_best']:.3f} (best runs)")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
            file.write("\n")


def _compare(m, k, n, form, dtype, runs):
    generator = np.random.default_rng(0)
    a = generator.standard_normal((m, k) if form[0] == "n" else (k, m)).astype(dtype)
    b = generator.standard_normal((k, n) if form[1] == "n" else (n, k)).astype(dtype)
    a, b = (a if form[0] == "n" else a.T), (b if form[1] == "n" else b.T)
    ours, theirs = np.empty((m, n), dtype), np.empty((m, n), dtype)
    gemm(a, b, ours)
    np.matmul(a, b, out=theirs)
    scale = float(np.max(np.abs(a) @ np.abs(b), initial=0))
    error = float(np.max(np.abs(ours - theirs), initial=0)) / max(scale, 1e-300)
    if error > TOLERANCE[dtype.name]:
        raise AssertionError(f"{m} x {k} x {n} {form}: the two products differ by {error:.1e} of their scale")
    flops = 2 * m * k * n
    repeats = max(1, int(2e8 / max(flops, 1)))
    seconds = []
    for i in range(runs):
        pair = [0.0, 0.0]
        for which in (0, 1) if i % 2 == 0 else (1, 0):  # whoever goes second finds warmer caches
            start = time.perf_counter()
            for _ in range(repeats):
                gemm(a, b, ours) if which == 0 else np.matmul(a, b, out=theirs)
            pair[which] = (time.perf_counter() - start) / repeats
        seconds.append(pair)
    ratios = sorted(pair[1] / pair[0] for pair in seconds)
    best = [min(pair[which] for pair in seconds) for which in (0, 1)]
    return {"m": m, "k": k, "n": n, "form": form, "ours_gflops": flops / best[0] / 1e9, "blas_gflops": flops / best[1] / 1e9,
            "ratio": statistics.median(ratios), "ratio_low": ratios[len(ratios) // 4], "ratio_high": ratios[3 * len(ratios) // 4],
            "seconds": seconds, "error": error}


def _peak(dtype):
    """GFLOP/s of the register kernel alone, on one panel of A and of B that fit the nearest cache; best of ten."""
    rows, columns = host().register_tile(dtype)
    k = max(16, host().l1 // 2 // ((rows + columns) * dtype.itemsize))
    a, b, c = np.zeros(k * rows, dtype), np.zeros(k * columns, dtype), np.zeros((rows, columns), dtype)
    times = 1000
    best = math.inf
    for _ in range(11):
        start = time.perf_counter()
        _repeat_tile(dtype.type(0), a, b, c, k, 0, False, times)
        best = min(best, time.perf_counter() - start)
    return 2 * rows * columns * k * times / best / 1e9


@jit
def _repeat_tile(zero, a, b, c, k, start, accumulate, times):
    for _ in range(times):
        tile(zero, address(a), address(b), c.strides[0], address(c), c.strides[0], k, TILE_ROWS, c.shape[1], start, accumulate)


def _shapes(text):
    parts = [part for word in text.split(",") for part in ((SHAPES + "," + MORE_SHAPES).split(",") if word == "more" else [word])]
    shapes = []
    for part in parts:
        sizes = part.split("x")
        if len(sizes) != 3 or not all(size.isdigit() and int(size) > 0 for size in sizes):
            raise ValueError(f"--shapes has {part!r}; valid: three positive sizes such as 64x256x512, or 'more'")
        shapes.append(tuple(map(int, sizes)))
    return list(dict.fromkeys(shapes))


def _blas_name():
    import threadpoolctl

    found = [f"{info.get('internal_api')} {info.get('version')} ({info.get('architecture')})"
             for info in threadpoolctl.threadpool_info() if info.get("user_api") == "blas"]
    return ", ".join(found) or "unknown BLAS"
