"""`python -m mpipar.bench collectives --against torch`: the same operations by PyTorch over gloo, program by program in turn."""

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from mpipar.bench.against import finish, refuse_mpirun, torch_command
from mpipar.bench.report import need_torch
from mpipar.comm import launcher

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")


def alternate(names: list[str], sizes: list[int], arguments) -> dict:
    """Start both programs `arguments.pairs` times in turn; the report, with the median of each pair's ratio of times."""
    refuse_mpirun()
    if unknown := [name for name in names if name not in OPERATIONS]:
        raise ValueError(f"--against torch has no {unknown[0]}: valid --operations are {','.join(OPERATIONS)}")
    if arguments.ranks < 2 or arguments.pairs < 1:
        raise ValueError(f"--ranks {arguments.ranks} --pairs {arguments.pairs}; valid: at least 2 ranks and 1 pair")
    need_torch(arguments.against)
    options = ["--operations", ",".join(names), "--sizes", ",".join(map(str, sizes)), "--runs", str(arguments.runs)]
    ours, theirs = [], []
    for _ in range(arguments.pairs):
        ours.append(_ours(arguments.ranks, [*options, "--comm", arguments.comm]))
        theirs.append(json.loads(finish(torch_command(arguments.ranks, *options, module="mpipar.bench.peer.collectives"),
                                        OMP_NUM_THREADS="1").strip().splitlines()[-1]))
    rows = []
    for runs in zip(*(report["results"] for report in (*ours, *theirs))):
        own, other = ([run["median_s"] for run in part] for part in (runs[:len(ours)], runs[len(ours):]))
        ratios = sorted(b / a for a, b in zip(own, other))
        rows.append({"operation": runs[0]["operation"], "bytes": runs[0]["bytes"], "ours_s": statistics.median(own),
                     "theirs_s": statistics.median(other), "ratio": statistics.median(ratios), "ratio_range": [ratios[0], ratios[-1]]})
    return {"hardware": ours[0]["hardware"], "load_average": os.getloadavg()[0], "pytorch": theirs[0]["version"],
            "ranks": arguments.ranks, "comm": arguments.comm, "pairs": arguments.pairs, "results": rows}


def _ours(ranks: int, options: list[str]) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        finish([launcher.mpirun(), "-np", str(ranks), sys.executable, "-m", "mpipar.bench", "collectives", *options, "--json", str(file)])
        return json.loads(file.read_text(encoding="utf-8"))
