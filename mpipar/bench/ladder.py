"""`python -m mpipar.bench ladder`: the steps from three plain loops to the packed product, each beside its
roofline (lecture section 2.6), and what is lost when a layer is cut into narrow shards or small micro-batches
(the second program of the lecture, section 3.2)."""

import functools
import time

import numpy as np

from ..kernels import gemm_plain, gemm_vectorised
from ..kernels.gemm import gemm
from ..kernels.host import host
from ..kernels.settings import settings
from ..kernels.threads import limit_threads
from .gemm import TOLERANCE
from .report import conditions, integers, print_conditions, print_table, sizes, spread, write_json
from .roofline import Bandwidth, Peak, product_bytes, roofline, tile_intensity

# name: (function, does it take a tile). A loop that takes none uses nothing twice: its tile is 1.
STEPS = {
    "triple loop": (gemm_plain.triple_loop, False),
    "row-parallel": (gemm_plain.row_parallel, False),
    "tiled": (gemm_plain.tiled, True),
    "(i) splat": (gemm_vectorised.splat_rows, True),
    "(ii) transpose, dot": (gemm_vectorised.dot_columns, True),
    "(iii) register block": (gemm_vectorised.register_block, True),
}
PACKED = "packed panels"
SWEEP_ROUNDS = 4  # of the sweep in each round of the ladder, whose plain loops take long
REPEAT_FLOPS, REPEAT_MOST = 2e8, 2000  # a measurement repeats a small product so far


def add_arguments(parser):
    """The options of `mpipar.bench ladder`."""
    parser.add_argument("--shape", default="1024x1024x512", metavar="MxKxN",
                        help="the whole product of the layer, [M, K] x [K, N] (default: %(default)s)")
    parser.add_argument("--tile", type=int, default=128,
                        help="rows and columns of a block (default: %(default)s)")
    parser.add_argument("--shards", default="1,2,4,8", metavar="E,...",
                        help="tensor-parallel degrees: a rank has N/E columns (default: %(default)s)")
    parser.add_argument("--micro-batches", metavar="M,...",
                        help="rows of the sweep (default: M, M/4, M/16, M/64)")
    parser.add_argument("--cores", type=int, default=host().cores,
                        help="that share the tiles; 108 is the lecture's A100 (default: %(default)s)")
    parser.add_argument("--triad-mib", type=int, metavar="MIB",
                        help="for the bandwidth (default: 4 times the caches, at most 1/4 of free memory)")
    parser.add_argument("--dtype", choices=tuple(TOLERANCE), default="float32")
    parser.add_argument("--threads", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--runs", type=int, default=5, help="rounds through all of it (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="also write everything to FILE")


def run(arguments):
    """Prints the limits, the ladder and the sweep. Speeds are those of the best round (whatever else runs on
    the machine only slows a round down), beside the quartiles of all."""
    for option in ("runs", "cores", "triad_mib"):
        if (value := getattr(arguments, option)) is not None and value < 1:
            raise ValueError(f"--{option.replace('_', '-')} is {value}; valid values: integers from 1")
    gemm_plain.check_tile(arguments.tile)
    m, k, n = sizes("--shape", arguments.shape, 3)
    shards = integers("--shards", arguments.shards, highest=n)
    batches = ([max(1, m >> shift) for shift in (0, 2, 4, 6)] if arguments.micro_batches is None
               else integers("--micro-batches", arguments.micro_batches))
    limit_threads(arguments.threads)
    dtype = np.dtype(arguments.dtype)
    report = conditions(dtype, arguments.runs)
    print_conditions(report)
    limits = Limits(dtype, arguments.triad_mib and arguments.triad_mib << 20)
    tile, cores, runs = arguments.tile, arguments.cores, arguments.runs
    with settings.changed(gemm="vector"):  # as all steps that lead there
        report |= {"m": m, "k": k, "n": n, "tile": tile, "cores": cores,
                   "steps": climb(m, k, n, tile, dtype, runs, limits),
                   "shards": sweep(m, k, n, shards, batches, tile, cores, dtype, runs, limits)}
    report |= {"peak_gflops": limits.peak_gflops, "bandwidth_gbs": limits.bandwidth_gbs,
               "balance": limits.balance, "triad_bytes": limits.bandwidth.bytes,
               "peaks_gflops": limits.peaks, "bandwidths_gbs": limits.bandwidths}
    limits.bound(report["steps"])
    limits.bound(report["shards"])
    _print_limits(report, limits)
    _print_steps(report)
    _print_tile(report, dtype)
    _print_shards(report)
    write_json(report, arguments.json)


class Limits:
    """Peak and bandwidth, measured again in each round beside what is compared with them."""

    def __init__(self, dtype, triad_bytes=None):
        self.peak, self.bandwidth = Peak(dtype), Bandwidth(dtype, triad_bytes)
        self.peaks, self.bandwidths = [], []

    def measure(self):
        """One measurement of both; GFLOP/s and GB/s of all threads together."""
        self.peaks.append(self.peak.measure() * settings.threads)
        self.bandwidths.append(self.bandwidth.measure())

    @property
    def peak_gflops(self):
        return max(self.peaks)

    @property
    def bandwidth_gbs(self):
        return max(self.bandwidths)

    @property
    def balance(self):
        """FLOP/byte from which arithmetic is the limit, not memory."""
        return self.peak_gflops / self.bandwidth_gbs

    def bound(self, rows):
        """Adds the roofline bound to rows that have an `intensity`."""
        for row in rows:
            row["bound_gflops"] = roofline(row["intensity"], self.peak_gflops, self.bandwidth_gbs)


def climb(m, k, n, tile, dtype, runs, limits):
    """A row for each step of the ladder; every step is checked against the packed product."""
    a, b = _operands(m, k, n, dtype)
    out = np.empty((m, n), dtype)
    right, scale = gemm(a, b, np.empty((m, n), dtype)), max(float((np.abs(a) @ np.abs(b)).max()), 1e-300)
    calls, rows = [], []
    for name, (function, takes_tile) in {**STEPS, PACKED: (gemm, False)}.items():
        calls.append(functools.partial(function, a, b, out, **({"tile": tile} if takes_tile else {})))
        out.fill(np.nan)
        calls[-1]()
        error = float(np.abs(out - right).max()) / scale
        if not error <= TOLERANCE[dtype.name]:
            raise AssertionError(f"{name}: differs from the packed product by {error:.1e} of its scale")
        block = None if name == PACKED else tile if takes_tile else 1
        moved = product_bytes(m, k, n, dtype.itemsize, block)
        rows.append({"name": name, "error": error, "bytes": moved, "intensity": 2 * m * k * n / moved,
                     "gflops": []})
    for _ in range(runs):
        limits.measure()
        for row, call in zip(rows, calls):
            row["gflops"].append(_speed(call, 2 * m * k * n))
    return rows


def sweep(m, k, n, shards, batches, tile, cores, dtype, runs, limits):
    """A row for each M in `batches` and degree E in `shards`: the packed product [M, K] x [K, N/E].

    `efficiency` is its best speed over that of the whole product [m, k] x [k, n], from the same rounds.
    """
    a, b = _operands(max(m, *batches), k, n, dtype)
    rows = [sweep_row(batch, k, n, degree, tile, cores, dtype.itemsize)
            for batch in batches for degree in shards]
    whole = {"m": m, "columns": n, "gflops": []}
    whole = next((row for row in rows if (row["m"], row["columns"]) == (m, n)), whole)
    for turn in range(runs * SWEEP_ROUNDS):
        if turn % SWEEP_ROUNDS == 0:
            limits.measure()
        for row in rows if whole in rows else [whole, *rows]:
            # A rank keeps its columns in an array of its own. All measurements take equally long, so that
            # whatever else runs on the machine disturbs none more than others.
            part = np.ascontiguousarray(b[:, :row["columns"]])
            row["gflops"].append(_multiply(a[:row["m"]], part, max(REPEAT_FLOPS, 2 * m * k * n)))
    for row in rows:
        row["efficiency"] = max(row["gflops"]) / max(whole["gflops"])
    return rows


def sweep_row(m, k, n, degree, tile, cores, itemsize):
    """What the sizes alone say about the widest shard of N columns over `degree` ranks (section 3.2)."""
    columns = -(-n // degree)
    tiles = -(-m // tile) * -(-columns // tile)
    waves = -(-tiles // cores)
    moved = product_bytes(m, k, columns, itemsize)
    return {"m": m, "degree": degree, "columns": columns, "tiles": tiles, "waves": waves,
            "busy": tiles / (waves * cores), "bytes": moved, "intensity": 2 * m * k * columns / moved,
            "gflops": []}


def _operands(m, k, n, dtype):
    generator = np.random.default_rng(0)
    return generator.standard_normal((m, k)).astype(dtype), generator.standard_normal((k, n)).astype(dtype)


def _multiply(a, b, repeat_flops):
    out = np.empty((a.shape[0], b.shape[1]), a.dtype)
    gemm(a, b, out)
    return _speed(lambda: gemm(a, b, out), 2 * a.shape[0] * a.shape[1] * b.shape[1], repeat_flops)


def _speed(function, flops, repeat_flops=REPEAT_FLOPS):
    repeats = max(1, min(REPEAT_MOST, int(repeat_flops / flops)))
    start = time.perf_counter()
    for _ in range(repeats):
        function()
    return flops * repeats / (time.perf_counter() - start) / 1e9


def _print_limits(report, limits):
    print(f"peak {report['peak_gflops']:.1f} GFLOP/s ({spread(limits.peaks)}; register kernel alone), "
          f"memory {report['bandwidth_gbs']:.1f} GB/s ({spread(limits.bandwidths)}; triad over "
          f"{report['triad_bytes'] >> 20} MiB)")
    print(f"balance: from {report['balance']:.1f} FLOP/byte on, arithmetic is the limit")


def _print_steps(report):
    print(f"\n{report['m']} x {report['k']} x {report['n']}, tile {report['tile']}")
    print_table([
        ("step", "", lambda row: row["name"]),
        ("GFLOP/s", ".2f", lambda row: max(row["gflops"])),
        ("quartiles", "", lambda row: spread(row["gflops"])),
        ("of peak", ".1%", lambda row: max(row["gflops"]) / report["peak_gflops"]),
        ("FLOP/byte", ".2f", lambda row: row["intensity"]),
        ("bound", ".1f", lambda row: row["bound_gflops"]),
        ("limit", "", lambda row: "memory" if row["intensity"] < report["balance"] else "arithmetic"),
    ], report["steps"])
    print("FLOP/byte: if one block of each matrix stays near (plain loops: none does; packed: each matrix\n"
          "moves once). bound: min(peak, FLOP/byte x memory); what fits a cache can exceed that of memory.")


def _print_tile(report, dtype):
    m, k, n, tile, size = report["m"], report["k"], report["n"], report["tile"], dtype.itemsize
    intensity = tile_intensity(tile, size)
    side = "below" if intensity < report["balance"] else "above"
    print(f"\none tile: reads 2 TILE K = {2 * tile * k * size / 1024:.0f} KiB, does 2 TILE^2 K = "
          f"{2 * tile * tile * k / 1e6:.2f} MFLOP: "
          f"TILE/{size} = {intensity:.1f} FLOP/byte, {side} the balance")
    print(f"whole: work 2MKN = {2 * m * k * n / 1e9:.3f} GFLOP, span 2K = {2 * k} FLOP, "
          f"parallelism MN = {m * n}")


def _print_shards(report):
    k, cores = report["k"], report["cores"]
    print(f"\nshards [M, {k}] x [{k}, N/E] by the packed product; "
          f"tiles of {report['tile']} over {cores} cores")
    print_table([
        ("M", "", lambda row: row["m"]),
        ("E", "", lambda row: row["degree"]),
        ("N/E", "", lambda row: row["columns"]),
        ("tiles", "", lambda row: row["tiles"]),
        ("a core", ".2f", lambda row: row["tiles"] / cores),
        ("waves", "", lambda row: row["waves"]),
        ("busy", ".0%", lambda row: row["busy"]),
        ("FLOP/byte", ".1f", lambda row: row["intensity"]),
        ("bound", ".1f", lambda row: row["bound_gflops"]),
        ("GFLOP/s", ".1f", lambda row: max(row["gflops"])),
        ("quartiles", "", lambda row: spread(row["gflops"])),
        ("lost", ".1%", lambda row: 1 - row["efficiency"]),
    ], report["shards"])
    print("busy: share of the cores with a tile to do, over all waves. lost: of the speed of the whole\n"
          "product (negative: faster). FLOP/byte: each matrix moves once.")
