"""`mpirun -np P python -m mpipar.bench collectives`: every operation of a group over sizes, with fitted latency and bandwidth.

A call's time is that of the slowest rank, all ranks having begun together; `bytes` are those of the whole array (of all
parts together, where ranks have parts). Bandwidth of the lecture (1.5.1, 1.5.2): bytes that all ranks send, divided by
P times the time; bus bandwidth (as nccl-tests count it): the bytes that a ring has to carry over each link, divided by
the time. For the operations that the lecture measures both are the same number. Overhead: what `Group.all_reduce` of 8
bytes takes more than mpi4py's own call, in alternated runs of many calls. The line t = alpha + beta * (bytes over
a link) is fitted to the medians by least squares of the relative errors.
"""

import statistics
import time
from pathlib import Path

import numpy as np

from ..comm.mesh import BACK_ENDS
from ..kernels.settings import settings
from ..kernels.shared import warm
from ..kernels.threads import limit_threads
from . import against_gloo
from .report import calls_of, conditions, integers, print_conditions, print_table, write_json

SIZES = "8,64,512,4096,65536,1048576,16777216,67108864"
SHARES = {  # bytes over a link, as a share of the whole array's bytes, on P ranks
    "all_reduce": lambda P: 2 * (P - 1) / P, "reduce_scatter": lambda P: (P - 1) / P, "all_gather": lambda P: (P - 1) / P,
    "all_to_all": lambda P: (P - 1) / P, "gather": lambda P: (P - 1) / P, "scatter": lambda P: (P - 1) / P,
    "broadcast": lambda P: 1.0, "reduce": lambda P: 1.0, "send": lambda P: 1.0,
}
AXES = ("world", "dp", "pp", "tp")


def add_arguments(parser):
    """The options of `mpipar.bench collectives`."""
    parser.add_argument("--sizes", default=SIZES, metavar="BYTES,...", help="(default: %(default)s)")
    parser.add_argument("--operations", default=",".join(SHARES), metavar="NAME,...", help="(default: all)")
    parser.add_argument("--axis", choices=AXES, default="world", help="the group that is measured (default: %(default)s)")
    for axis in AXES[1:]:
        parser.add_argument(f"--{axis}", type=int, default=None if axis == "dp" else 1, help="size of that axis of the mesh")
    parser.add_argument("--comm", choices=BACK_ENDS, default="auto",
                        help="how ranks of one node exchange arrays of `Group.zeros` (default: %(default)s)")
    parser.add_argument("--ladder", action="store_true", help="also all-reduces written over send and receive")
    parser.add_argument("--runs", type=int, default=0, help="calls of each size (default: 8 to 200, fewer of large ones)")
    parser.add_argument("--against", choices=("torch",), help="without mpirun: in turn with PyTorch's operations over gloo")
    parser.add_argument("--ranks", type=int, default=2, help="with --against (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=3, help="with --against: of runs (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="also write everything to FILE")
    parser.add_argument("--plot", metavar="FILE", help="a picture of times and bandwidths (needs matplotlib)")


def run(arguments):
    """Prints a table on rank 0: every operation and size, raw MPI beside it; then the fitted lines."""
    from mpipar.comm.mesh import Mesh

    sizes = integers("--sizes", arguments.sizes)
    names = [name.strip() for name in arguments.operations.split(",")]
    if unknown := [name for name in names if name not in SHARES]:
        raise ValueError(f"--operations has {unknown[0]!r}; valid values: {', '.join(SHARES)}")
    if arguments.runs < 0:
        raise ValueError(f"--runs is {arguments.runs}; valid values: integers from 1, or 0 for a number that fits the size")
    if arguments.against:
        names = [name for name in names if name in against_gloo.OPERATIONS] if names == list(SHARES) else names
        report = against_gloo.alternate(names, sizes, arguments)
        show_pairs(report)
        write_json(report, arguments.json)
        return
    mesh = Mesh(dp=arguments.dp, pp=arguments.pp, tp=arguments.tp, back_end=arguments.comm)
    group = getattr(mesh, arguments.axis)
    if group.size < 2:
        raise ValueError(f"the group {arguments.axis} has one rank: start several, mpirun -np 2 python -m mpipar.bench collectives")
    report = conditions(np.float32, arguments.runs)
    limit_threads(max(1, settings.threads // mesh.ranks_on_node))
    mesh.first_on_node(lambda: warm(np.float32))
    space = [group.zeros(max(max(sizes) // 4, group.size), np.float32) for _ in range(2)]
    report.update(axis=arguments.axis, comm=arguments.comm, ranks=group.size, mesh=mesh.shape, results=[], lines=[], ladder=[])
    for name in names:
        rows = [measure(mesh.world, group, name, size, arguments.runs, space) for size in sizes]
        report["results"] += rows
        report["lines"].append({"operation": name, **fit([row["link_bytes"] for row in rows], [row["median_s"] for row in rows])})
    report["overhead"] = overhead(group)
    if arguments.ladder:
        report["ladder"] = [row for size in sizes for row in climb(mesh.world, group, size, arguments.runs)]
    if mesh.is_root:
        show(report)
        write_json(report, arguments.json)
        if arguments.plot:
            plot(report, Path(arguments.plot))
    mesh.close()


def measure(world, group, name, size, runs, space) -> dict:
    """Times of one operation of one size; the same on every rank. space: two arrays of `group.zeros` to work in."""
    operation, raw, whole = prepare(group, name, size, space)
    ways = 2 if name == "send" else 1
    times = [seconds / ways for seconds in clock(world, operation, whole, runs)]
    link = SHARES[name](group.size) * whole
    row = {"operation": name, "bytes": whole, "link_bytes": link, "runs": len(times), "median_s": statistics.median(times),
           "best_s": min(times)}
    row["bus_gbs"] = link / row["median_s"] / 1e9
    if name in ("all_reduce", "reduce_scatter"):
        sent = whole * (group.size - 1) * (2 if name == "all_reduce" else 1)
        row["lecture_gbs"] = sent / (group.size * row["median_s"]) / 1e9
    if raw is not None:
        row["raw_median_s"] = statistics.median(clock(world, raw, whole, runs))
    return row


def prepare(group, name, size, space):
    """(the group's call, the same call of mpi4py or None, bytes of the whole array).

    The group works in `space`, which the ranks of a node may share; mpi4py in private memory.
    """
    P, comm = group.size, group.comm
    count = max(1, size // (4 * P)) * P
    x, part, whole = np.ones(count, np.float32), np.ones(count // P, np.float32), np.empty(count, np.float32)
    y, gathered = (array[:count] for array in space)
    if name == "send":  # there and back between the first and the last rank
        ends = 0, P - 1

        def there_and_back():
            if group.rank in ends:
                first, second = (group.send, group.recv) if group.rank == 0 else (group.recv, group.send)
                first(x, ends[1] - group.rank)
                second(x, ends[1] - group.rank)
        return there_and_back, None, 4 * count
    calls = {
        "all_reduce": (lambda: group.all_reduce(y), lambda: comm.Allreduce(group.mpi.IN_PLACE, x)),
        "reduce_scatter": (lambda: group.reduce_scatter(y, out=part), lambda: comm.Reduce_scatter_block(x, part)),
        "all_gather": (lambda: group.all_gather(part, out=gathered), lambda: comm.Allgather(part, whole)),
        "all_to_all": (lambda: group.all_to_all(x), lambda: comm.Alltoall(x, whole)),
        "broadcast": (lambda: group.broadcast(y), lambda: comm.Bcast(x)),
        "reduce": (lambda: group.reduce(x), None),
        "gather": (lambda: group.gather(part), None),
        "scatter": (lambda: group.scatter(x if group.rank == 0 else None, out=part), None),
    }
    return *calls[name], 4 * count


def clock(world, operation, size, runs) -> list[float]:
    """Seconds of each call on the slowest rank, the first calls left out; ranks begin each call together."""
    skip = 3
    count = calls_of(size, runs)
    times = np.empty(count)
    for i in range(-skip, count):
        world.barrier()
        start = time.perf_counter()
        operation()
        if i >= 0:
            times[i] = time.perf_counter() - start
    return world.all_reduce(times, op="max").tolist()


def overhead(group, calls=200, rounds=31) -> dict:
    """Seconds of an all-reduce of 8 bytes on this rank: mpi4py's call, the group's, and the difference of the medians.

    Alternated: `rounds` times `calls` calls of each; the fastest half of the rounds counts, as the ranks may share cores.
    """
    x, comm, in_place = np.ones(1), group.comm, group.mpi.IN_PLACE
    ways = {"raw_s": lambda: comm.Allreduce(in_place, x), "group_s": lambda: group.all_reduce(x, "max")}
    times = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, call in ways.items():
            x[0] = 0.0
            group.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            times[name].append((time.perf_counter() - start) / calls)
    found = {name: statistics.median(sorted(seconds[1:])[: rounds // 2 + 1]) for name, seconds in times.items()}
    return {**found, "overhead_s": found["group_s"] - found["raw_s"]}


def climb(world, group, size, runs) -> list[dict]:
    """The all-reduces of `comm/algorithms.py`: checked against the group's own, counted, timed beside it."""
    from mpipar.comm.algorithms import ALGORITHMS, fits, predicted

    count = max(group.size, size // 4)
    start = np.arange(count, dtype=np.float32) % 7 + group.rank
    expected = group.all_reduce(start.copy())
    rows = [{"algorithm": "MPI", "bytes": 4 * count,
             "median_s": statistics.median(clock(world, lambda: group.all_reduce(start), 4 * count, runs))}]
    for name, function in ALGORITHMS.items():
        if not fits(name, group.size):
            continue
        x = np.arange(count, dtype=np.float32) % 7 + group.rank
        found = function(group, x)
        if not np.array_equal(found, expected):  # small integers: every order of addition gives the same
            raise AssertionError(f"{name} on {group.size} ranks: the sum is wrong")
        steps, sent = predicted(name, group.size, 4 * count)
        times = clock(world, lambda: function(group, x), 4 * count, runs)
        rows.append({"algorithm": name, "bytes": 4 * count, "steps": steps, "sent": sent, "median_s": statistics.median(times)})
    return rows


def fit(sizes, seconds) -> dict:
    """alpha (s) and beta (s a byte), neither negative, of t = alpha + beta * size; error: the largest relative one.

    Least squares of relative errors: (1/t) (alpha + beta n) = 1.
    """
    n, t = np.asarray(sizes, float), np.asarray(seconds, float)
    rows = np.stack([1 / t, n / t], axis=1)
    alpha, beta = np.linalg.lstsq(rows, np.ones(len(t)), rcond=None)[0] if len(t) > 1 else (t[0], 0.0)
    if alpha < 0:
        alpha, beta = 0.0, float(np.sum(n / t) / np.sum((n / t) ** 2))
    elif beta < 0:
        alpha, beta = float(np.sum(1 / t) / np.sum(1 / t**2)), 0.0
    error = float(np.max(np.abs((alpha + beta * n) / t - 1)))
    return {"alpha_s": float(alpha), "beta_s_per_byte": float(beta), "largest_error": error}


def show(report):
    """The tables."""
    print_conditions(report)
    print(f"group {report['axis']} of the mesh {report['mesh']}: {report['ranks']} ranks, back end {report['comm']}; "
          "median of the slowest rank")
    dash = float("nan")
    print_table([("operation", "", lambda r: r["operation"]), ("bytes", ",d", lambda r: r["bytes"]),
                 ("median us", ".1f", lambda r: 1e6 * r["median_s"]), ("best us", ".1f", lambda r: 1e6 * r["best_s"]),
                 ("raw MPI us", ".1f", lambda r: 1e6 * r.get("raw_median_s", dash)),
                 ("bus GB/s", ".3f", lambda r: r["bus_gbs"]), ("lecture GB/s", ".3f", lambda r: r.get("lecture_gbs", dash))],
                report["results"])
    print("\nt = alpha + bytes over a link / bandwidth")
    print_table([("operation", "", lambda r: r["operation"]), ("alpha us", ".2f", lambda r: 1e6 * r["alpha_s"]),
                 ("GB/s", ".2f", lambda r: 1e-9 / r["beta_s_per_byte"] if r["beta_s_per_byte"] else float("inf")),
                 ("largest error", ".0%", lambda r: r["largest_error"])], report["lines"])
    overhead = report["overhead"]
    print("\nall-reduce of 8 bytes, many in a row: mpi4py {raw_s:.2f} us, Group {group_s:.2f} us, overhead {overhead_s:.2f} us".format(
        **{name: 1e6 * seconds for name, seconds in overhead.items()}))
    if report["ladder"]:
        print("\nall-reduces over send and receive")
        print_table([("algorithm", "", lambda r: r["algorithm"]), ("bytes", ",d", lambda r: r["bytes"]),
                     ("steps", "", lambda r: str(r.get("steps") or "-")), ("sent", ",.0f", lambda r: r.get("sent", dash)),
                     ("median us", ".1f", lambda r: 1e6 * r["median_s"])], report["ladder"])


def show_pairs(report):
    """The table of `--against`."""
    print(f"{report['hardware']}, load average {report['load_average']:.1f}\n{report['ranks']} ranks, back end {report['comm']}, against "
          f"torch {report['pytorch']} over gloo, {report['pairs']} alternated pairs; medians of the slowest rank")
    print_table([("operation", "", lambda r: r["operation"]), ("bytes", ",d", lambda r: r["bytes"]),
                 ("ours us", ".1f", lambda r: 1e6 * r["ours_s"]), ("gloo us", ".1f", lambda r: 1e6 * r["theirs_s"]),
                 ("times as fast", ".1f", lambda r: r["ratio"]),
                 ("spread", "", lambda r: "{:.1f}..{:.1f}".format(*r["ratio_range"]))], report["results"])


def plot(report, path):
    """Times with the fitted lines, and bus bandwidths, over the bytes."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'mpipar[plot]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (times, rates) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for number, line in enumerate(report["lines"]):
        rows = [row for row in report["results"] if row["operation"] == line["operation"]]
        size, color = [row["bytes"] for row in rows], f"C{number}"
        times.loglog(size, [1e6 * row["median_s"] for row in rows], "o", color=color, label=line["operation"])
        fitted = [1e6 * (line["alpha_s"] + line["beta_s_per_byte"] * row["link_bytes"]) for row in rows]
        times.loglog(size, fitted, "-", color=color, alpha=0.5)
        rates.semilogx(size, [row["bus_gbs"] for row in rows], "o-", color=color)
    times.set(xlabel="bytes", ylabel="microseconds (points: median, lines: alpha + beta n)")
    rates.set(xlabel="bytes", ylabel="bus bandwidth, GB/s")
    times.legend(fontsize=8)
    figure.suptitle(f"{report['ranks']} ranks, group {report['axis']}; {report['hardware']}", fontsize=9)
    figure.savefig(path, dpi=120)
    plt.close(figure)
