"""`python -m mpipar.bench start`: seconds of a whole run of one step, from the start of the processes to their end.

PyTorch's program does two steps of the same tiny model, which take milliseconds. Cold: with an empty store of compiled
kernels, each run in a folder of its own. Warm: again, with the store that the cold run left. How many kernels the ranks
compiled together is counted; the warm start must compile none.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .against import torch_command
from .report import conditions, need_torch, print_conditions, spread, write_json

MODEL = ("--layers", "2", "--dim", "64", "--heads", "4", "--seq", "32", "--global-batch", "8")


def add_arguments(parser):
    """The options of `mpipar.bench start`."""
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--runs", type=int, default=3, help="cold and warm starts, in turn (default: %(default)s)")
    parser.add_argument("--against", choices=("torch",), help="also start PyTorch's program of the same model")
    parser.add_argument("--json", metavar="FILE", help="also write everything to FILE")


def run(arguments):
    """Prints the median and spread of the cold and the warm starts. RuntimeError if a warm one compiles."""
    if arguments.ranks < 1 or arguments.runs < 1:
        raise ValueError("--ranks and --runs must be at least 1")
    if arguments.against:
        need_torch("torch")
    report = conditions("float32", arguments.runs)
    report.update(ranks=arguments.ranks, options=MODEL, cold=[], warm=[], kernels=[], torch=[])
    print_conditions(report)
    for _ in range(arguments.runs):
        with tempfile.TemporaryDirectory() as store:
            for kind in ("cold", "warm"):
                report[kind].append(_start_mpipar(arguments.ranks, store))
                compiled = len(list(Path(store).rglob("*.bin")))
                if kind == "warm" and compiled != report["kernels"][-1]:
                    raise RuntimeError(f"the warm start compiled {compiled - report['kernels'][-1]} kernels")
                if kind == "cold":
                    report["kernels"].append(compiled)
        if arguments.against:
            report["torch"].append(_start_torch(arguments.ranks))
    for kind in ("cold", "warm", "torch"):
        if report[kind]:
            name = "PyTorch" if kind == "torch" else f"mpipar, {kind}"
            print(f"{name:<14}{statistics.median(report[kind]):7.2f} s on {arguments.ranks} ranks  ({spread(report[kind])})")
    print(f"{report['kernels'][-1]} kernels (functions and signatures) in the store after a cold start")
    write_json(report, arguments.json)


def _start_mpipar(ranks, store):
    command = [sys.executable, "-m", "mpipar.train", *MODEL, "--steps", "1", "--quiet"]
    if ranks > 1:
        from mpipar.comm.launcher import mpirun

        command = [mpirun(), "-np", str(ranks), *command]
    return _seconds(command, MPIPAR_CACHE_DIR=store)


def _start_torch(ranks):
    return _seconds(torch_command(ranks, "--model", "gpt", "--steps", "1", "--skip", "0", *MODEL), OMP_NUM_THREADS="1")


def _seconds(command, **environment):
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    seconds = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return seconds
