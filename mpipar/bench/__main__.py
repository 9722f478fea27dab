"""`python -m mpipar.bench <name>`: finds the benchmark of that name and runs it."""

import argparse
import contextlib
import importlib
import os
import sys

from mpipar.comm import guard, launcher

BENCHMARKS = {
    "gemm": "our matrix product against NumPy's BLAS, PyTorch's, or itself on one thread, in one run",
    "attention": "causal attention, forward and backward, and against PyTorch's",
    "collectives": "every operation of a group over sizes, with fitted latency and bandwidth (under mpirun)",
    "start": "seconds of a run of one step from mpirun to its end, with and without compiled kernels",
    "ladder": "the product from plain loops to packed panels, with its roofline; the cost of narrow shards",
    "fusion": "three loops against one, and convolution with and without its patch matrix",
    "pipeline": "the bubble of every schedule, measured beside formula and simulator, with stages that sleep",
    "overlap": "how much of the gradients' messages is hidden behind backward (takes the options of mpipar.train too)",
    "train": "the step of a model in a layout, part by part, and against PyTorch or one rank (takes the options of mpipar.train too)",
}


def main(arguments=None) -> int:
    """Exit code: 0, or 2 (from argparse) where an argument does not fit."""
    parser = argparse.ArgumentParser(prog="python -m mpipar.bench", description="Measures parts of mpipar.")
    commands = parser.add_subparsers(dest="name", required=True, metavar="{" + ",".join(BENCHMARKS) + "}")
    arguments = sys.argv[1:] if arguments is None else arguments
    for name, text in BENCHMARKS.items():
        command = commands.add_parser(name, help=text, description=text)
        if name in arguments:
            module = importlib.import_module(f".{name}", __package__)
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    with contextlib.ExitStack() as silent:
        if launcher.rank() != 0:  # one rank says what is wrong
            nowhere = silent.enter_context(open(os.devnull, "w"))
            silent.enter_context(contextlib.redirect_stdout(nowhere))
            silent.enter_context(contextlib.redirect_stderr(nowhere))
        parsed, parsed.rest = parser.parse_known_args(arguments)
        if parsed.rest and parsed.name not in ("train", "overlap"):
            parser.error(f"unrecognized arguments: {' '.join(parsed.rest)}")
    try:
        parsed.run(parsed)
    except ValueError as error:
        with guard.checking():  # one line and exit code 2, whichever ranks noticed
            raise error
    return 0


if __name__ == "__main__":
    guard.main(main)
