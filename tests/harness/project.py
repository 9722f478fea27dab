"""A folder of small test files on which pytest runs in another process, for the tests of the harness itself."""

import pathlib
import re
import subprocess
import sys
import textwrap
import time

from tests.harness import launch

ROOT = pathlib.Path(__file__).parents[2]
HEAD = """
    import os, signal, time
    import numpy as np
    import pytest
    from mpi4py import MPI

    def total(comm):
        out = np.zeros(4)
        comm.Allreduce(np.full(4, comm.rank + 1.0), out)
        assert (out == comm.size * (comm.size + 1) / 2).all()
"""


class Outcome:
    """What a run of pytest left: `code`, `output`, `seconds`, and `results` {test name: word}."""

    def __init__(self, done, seconds):
        self.code, self.output, self.seconds = done.returncode, done.stdout, seconds
        found = re.findall(r"::(\S+) (PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)\b", self.output)
        self.results = dict(reversed(found))  # the first word of each


class Project:
    """A folder with test files that uses this harness."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "setup.cfg").write_text(
            f"[tool:pytest]\npythonpath = {ROOT}\naddopts = --import-mode=importlib --strict-markers\n"
            "markers =\n    mpi\n    slow\n    torch\n"
        )
        (folder / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())

    def write(self, name, text, head=HEAD):
        (self.folder / name).write_text(textwrap.dedent(head) + textwrap.dedent(text))

    def command(self, arguments, ranks=None, **environment):
        """What subprocess needs to run pytest here, under mpirun if `ranks` is given."""
        command = [sys.executable, "-m", "pytest", "-v", "-p", "pytest_mpi", *arguments]
        if ranks:
            command = launch.mpirun(ranks) + command
        env = {**launch.environment(), "MPIPAR_TEST_GRACE": "1", "NO_COLOR": "1", "COLUMNS": "200"}
        env |= {
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            **environment,
        }  # the other plugins take a second to load
        return dict(args=command, cwd=self.folder, env=env, stdin=subprocess.DEVNULL)

    def pytest(self, *arguments, ranks=None, **environment):
        start = time.monotonic()
        done = subprocess.run(
            **self.command(arguments, ranks, **environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=200,
        )
        return Outcome(done, time.monotonic() - start)
