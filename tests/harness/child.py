"""One `mpirun` that runs a list of tests in an inner pytest, and the messages that its rank 0 writes."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time

from tests.harness import launch

SLACK = 60  # seconds of silence, beyond the limit of a test, after which mpirun itself is taken to hang
TAIL = 12_000  # characters of mpirun's output that go into a report


class Child:
    """mpirun with an inner pytest; use it as a context manager, which ends it in any case.

    `limit` is the longest time in seconds that one of the tests may take."""

    def __init__(self, config, ranks, items, limit):
        self.ranks = ranks
        self.limit = limit + SLACK
        self.folder = tempfile.TemporaryDirectory(prefix="mpipar-tests-")
        self.reports = os.path.join(self.folder.name, "reports")
        self.output = os.path.join(self.folder.name, "output")
        self.killed = ""
        arguments = os.path.join(self.folder.name, "tests")
        with open(arguments, "w") as file:
            file.write("\n".join(item.nodeid for item in items))
        # Plugins that cost each rank up to a second to load, left out where no test needs them.
        unused = ["no:typeguard"]
        if not any(draws_examples(item) for item in items):
            unused.append("no:hypothesispytest")
        options = inherited(config) + [word for name in unused for word in ("-p", name)]
        command = [*launch.mpirun(ranks), sys.executable, "-m", "pytest", *options, "@" + arguments]
        environment = launch.environment()
        environment |= {launch.REPORTS: self.reports, launch.OWNER: str(os.getpid())}
        shown = config.option.capture == "no"  # pytest -s: the ranks print to the terminal
        open(self.reports, "w").close()
        with open(self.output, "wb") as out:
            self.process = subprocess.Popen(
                command,
                env=environment,
                cwd=config.rootpath,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                stdout=None if shown else out,
                stderr=None if shown else subprocess.STDOUT,
            )

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.end()
        self.folder.cleanup()

    def messages(self):
        """Yields what rank 0 says, as dictionaries, until mpirun has ended."""
        heard = time.monotonic()
        with open(self.reports) as stream:
            while True:
                over = self.process.poll() is not None  # asked before reading, so that no line is missed
                line = stream.readline()
                while line and not line.endswith("\n") and not over:
                    time.sleep(0.01)  # the rest of the line is on its way
                    line += stream.readline()
                if line.endswith("\n"):
                    heard = time.monotonic()
                    yield json.loads(line)
                elif over:
                    return
                elif time.monotonic() > heard + self.limit:
                    self.killed = f", killed after {self.limit:g} s without a word"
                    self.end()
                else:
                    self.wait(0.05)

    def wait(self, timeout):
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            pass

    def end(self):
        """Ends mpirun if it still runs: TERM first (after KILL Open MPI's ranks would live on), then KILL."""
        for number, patience in ((signal.SIGTERM, 5), (signal.SIGKILL, 5)):
            if self.process.poll() is None:
                os.killpg(self.process.pid, number)
                self.wait(patience)

    def account(self):
        """How mpirun ended, and the end of what it printed."""
        with open(self.output, errors="replace") as file:
            text = file.read().replace("\0", "")  # Open MPI writes a NUL after its banner
        code = self.process.returncode
        return f"mpirun -np {self.ranks} ended with exit code {code}{self.killed}:\n{text[-TAIL:]}"


def draws_examples(item):
    """Whether it is a test of hypothesis's."""
    return getattr(getattr(item, "obj", None), "is_hypothesis_test", False)


def inherited(config):
    """The options of the outer pytest that matter for how a test runs and how its failure is shown."""
    option = config.option
    arguments = [
        "-p",
        "no:cacheprovider",
        "--color=no",
        f"--rootdir={config.rootpath}",
        f"--capture={option.capture}",
        f"--tb={option.tbstyle}",
        *["-v"] * max(0, option.verbose),
    ]
    if config.inipath:
        arguments += ["-c", str(config.inipath)]
    if option.showlocals:
        arguments.append("--showlocals")
    for flag, values in (("-o", option.override_ini), ("-W", option.pythonwarnings), ("-p", option.plugins)):
        for value in values or ():
            arguments += [flag, value]
    return arguments
