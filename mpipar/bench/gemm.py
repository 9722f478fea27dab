"""`python -m mpipar.bench gemm`: our product and another one, alternated in one run.

The other: NumPy's BLAS; PyTorch's product (MKL, where the package is built with it); our own product by vector
instructions, or on one thread; for the product with bias and GeLU, BLAS followed by our GeLU kernel; for bfloat16, our own product of float32.
"""

import json
import os
import platform
import statistics
import time

import numpy as np
import threadpoolctl

from ..kernels import gemm_pieces
from ..kernels.dtypes import as_dtype, is_bfloat16, sums_dtype
from ..kernels.elementwise import add_bias
from ..kernels.gelu import gelu_forward
from ..kernels.gemm import gemm, uses_pieces
from ..kernels.gemm_bfloat16 import unit
from ..kernels.host import host
from ..kernels.settings import settings
from ..kernels.threads import limit_threads
from .report import need_torch
from .roofline import Peak, PeakOfPieces

SHAPES = "64x256x512,128x1024x1024,512x512x2048,1024x1024x1024,2048x2048x2048"
MORE_SHAPES = SHAPES + ",16x1024x4096,32x384x1536,2048x384x1536,2048x1536x384,77x130x201"
FORMS = ("nn", "nt", "tn", "tt")
TOLERANCE = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 2e-3}  # of the largest sum of absolute values
AGAINST = {
    "blas": "NumPy's BLAS",
    "vector": "ours by vector instructions",
    "torch": "torch.mm",
    "one-thread": "ours on one thread",
    "float32": "ours of float32 (with --dtype bfloat16)",
    "gelu": "BLAS, then bias + GeLU; ours does both in the product",
}
REPEAT_FLOPS, REPEAT_MOST = 2e8, 500  # a measurement repeats a small product so far
REPEAT_THREADS = 2e10  # with several threads: a core that slept beside one thread takes milliseconds to wake


def add_arguments(parser):
    """The options of `mpipar.bench gemm`."""
    parser.add_argument("--shapes", default=SHAPES, metavar="MxKxN,...",
                        help="out[M, N] = a[M, K] @ b[K, N]; 'more' for ten shapes (default: %(default)s)")
    parser.add_argument("--form", choices=FORMS + ("all",), default="nn",
                        help="of a and of b, n: row-major, t: a transposed view (default: %(default)s)")
    parser.add_argument("--against", choices=tuple(AGAINST), default="blas",
                        help="; ".join(f"{name}: {text}" for name, text in AGAINST.items()) + " (default: %(default)s)")
    parser.add_argument("--dtype", choices=tuple(TOLERANCE), default="float32")
    parser.add_argument("--threads", type=int, default=1, help="for both products (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=15,
                        help="alternated pairs of measurements for each shape (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="also write everything to FILE")


def run(arguments):
    """Prints a table. ratio: ours over the other (speeds), median of the pairs; spread: their middle half."""
    if arguments.runs < 1:
        raise ValueError(f"--runs is {arguments.runs}; valid values: integers from 1")
    if arguments.against == "torch":
        need_torch("torch")
    if arguments.against == "one-thread" and arguments.threads < 2:
        raise ValueError(f"--against one-thread with --threads {arguments.threads}; valid values: integers from 2")
    if (arguments.dtype == "bfloat16") != (arguments.against == "float32"):
        raise ValueError(f"--dtype {arguments.dtype} --against {arguments.against}; valid: bfloat16 against float32, other types "
                         "against the others")
    shapes = _shapes(arguments.shapes)
    limit_threads(arguments.threads)
    dtype = as_dtype(arguments.dtype)
    peaks = {False: Peak(sums_dtype(dtype))}
    if dtype == np.float32 and gemm_pieces.has_amx():
        peaks[True] = PeakOfPieces()
    report = {"hardware": host().describe(), "load_average": os.getloadavg()[0], "numpy": np.__version__,
              "python": platform.python_version(), "blas": _blas_name(), "against": arguments.against, "dtype": dtype.name,
              "threads": settings.threads, "runs": arguments.runs, "results": []}
    print(report["hardware"])
    print(f"against {AGAINST[arguments.against]}; {report['blas']}, NumPy {report['numpy']}, {dtype.name}, {settings.threads} thread(s), "
          f"{arguments.runs} alternated runs a shape, load average {report['load_average']:.1f}")
    if is_bfloat16(dtype):
        report["bfloat16"] = unit()
        print(f"bfloat16 by {report['bfloat16']}; peak: of float32")
    print(f"{'m x k x n':>18} form     ours    other    peak GFLOP/s   ratio        spread")
    for form in FORMS if arguments.form == "all" else (arguments.form,):
        for shape in shapes:
            result = _compare(*shape, form, dtype, arguments, peaks)
            report["results"].append(result)
            print(f"{' x '.join(map(str, shape)):>18}  {form}  {result['ours_gflops']:8.1f} "
                  f"{result['other_gflops']:8.1f} {result['peak_gflops']:7.1f}         "
                  f"{result['ratio']:7.3f}  {result['ratio_low']:.3f}..{result['ratio_high']:.3f}",
                  flush=True)
    report["peak_gflops"] = max(result["peak_gflops"] for result in report["results"])
    report["geometric_mean"] = statistics.geometric_mean(result["ratio"] for result in report["results"])
    print("GFLOP/s of the best run. peak: the register kernel alone, on panels in the nearest cache, "
          f"{report['peak_gflops']:.1f} at most (all threads together).")
    if True in peaks:
        print("peaks far above the others are those of AMX, which makes a float32 of three pieces (kernels/pieces.py).")
    print(f"geometric mean of the ratios: {report['geometric_mean']:.3f}")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
            file.write("\n")


def _compare(m, k, n, form, dtype, arguments, peaks):
    peak = peaks[uses_pieces(dtype, m, k, n)]
    generator = np.random.default_rng(0)
    a = generator.standard_normal((m, k) if form[0] == "n" else (k, m)).astype(dtype)
    b = generator.standard_normal((k, n) if form[1] == "n" else (n, k)).astype(dtype)
    a, b = (a if form[0] == "n" else a.T), (b if form[1] == "n" else b.T)
    products, results = _products(arguments.against, a, b)
    for product in products:
        product()
    a, b, *results = (np.asarray(x, sums_dtype(dtype)) for x in (a, b, *results))
    scale = max(np.max(np.abs(a) @ np.abs(b)), 1e-300)
    error = float(np.max(np.abs(results[0] - results[1])) / scale)
    if not error <= TOLERANCE[dtype.name]:
        raise AssertionError(f"{m} x {k} x {n} {form}: the products differ by {error:.1e} of their scale")
    runs = arguments.runs
    flops = 2 * m * k * n
    repeats = max(1, min(REPEAT_MOST, int((REPEAT_FLOPS if settings.threads == 1 else REPEAT_THREADS) / flops)))
    seconds, highest = [], 0.0
    for i in range(runs):
        pair = [0.0, 0.0]
        for which in (0, 1) if i % 2 == 0 else (1, 0):  # whoever goes second finds warmer caches
            start = time.perf_counter()
            for _ in range(repeats):
                products[which]()
            pair[which] = (time.perf_counter() - start) / repeats
        seconds.append(pair)
        highest = max(highest, peak.measure())
    ratios = sorted(other / own for own, other in seconds)
    best = [min(pair[which] for pair in seconds) for which in (0, 1)]
    return {"m": m, "k": k, "n": n, "form": form, "ours_gflops": flops / best[0] / 1e9,
            "other_gflops": flops / best[1] / 1e9, "peak_gflops": highest * settings.threads,
            "ratio": statistics.median(ratios), "ratio_low": ratios[len(ratios) // 4],
            "ratio_high": ratios[3 * len(ratios) // 4], "error": error, "seconds": seconds}


def _products(against, a, b):
    """(ours, the other) as functions without arguments, and the arrays they write to."""
    ours, theirs = (np.empty((a.shape[0], b.shape[1]), a.dtype) for _ in range(2))

    def plain():
        gemm(a, b, ours)

    if against == "torch":
        import torch

        torch.set_num_threads(settings.threads)
        x, y, out = (torch.from_numpy(array) for array in (a, b, theirs))
        return (plain, lambda: torch.mm(x, y, out=out)), (ours, theirs)
    if against == "float32":
        wide_a, wide_b, theirs = (x.astype(np.float32) for x in (a, b, theirs))
        return (plain, lambda: gemm(wide_a, wide_b, theirs)), (ours, theirs)
    if against == "vector":
        def by_vectors():
            settings.gemm = "vector"
            gemm(a, b, theirs)
            settings.gemm = "numba"
        return (plain, by_vectors), (ours, theirs)
    if against == "one-thread":
        def alone():
            with settings.changed(threads=1):
                gemm(a, b, theirs)
        return (plain, alone), (ours, theirs)
    if against == "gelu":
        bias = np.linspace(-1, 1, b.shape[1], dtype=a.dtype)
        before, before_blas = np.empty_like(ours), np.empty_like(ours)

        def apart():
            np.matmul(a, b, out=before_blas)
            add_bias(before_blas, bias, before_blas)
            gelu_forward(before_blas, theirs)
        return (lambda: gemm(a, b, before, bias=bias, gelu=ours), apart), (ours, theirs)
    return (plain, lambda: np.matmul(a, b, out=theirs)), (ours, theirs)


def _shapes(text):
    shapes = []
    for part in text.replace("more", MORE_SHAPES).split(","):
        sizes = part.split("x")
        if len(sizes) != 3 or not all(size.isdigit() and int(size) > 0 for size in sizes):
            raise ValueError(f"--shapes has {part!r}; valid: positive sizes such as 64x256x512, or 'more'")
        shapes.append(tuple(map(int, sizes)))
    return list(dict.fromkeys(shapes))


def _blas_name():
    found = [f"{info['internal_api']} {info['version']} ({info.get('architecture', 'unknown kernels')})"
             for info in threadpoolctl.threadpool_info()
             if info["user_api"] == "blas" and "numpy" in info["filepath"].lower()]
    return ", ".join(found) or "unknown BLAS"
