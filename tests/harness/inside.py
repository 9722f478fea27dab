"""pytest plugin on every rank under mpirun.

The ranks run the same tests and agree on the outcome of every phase (setup, call, teardown): failed on one
is failed on all, skipped on some is failed. Rank 0 alone prints, and shows the tracebacks of the others as
sections of its report. Of the tests only those run that ask for exactly this number of ranks; all others
count as deselected."""

import hashlib
import json
import os
import sys
import traceback

import pytest

from mpipar.comm import launcher
from tests.harness import launch

os.environ.update(launcher.settings())  # as mpipar itself does it, and it has to be before MPI starts

from mpi4py import MPI  # noqa: E402

from tests.harness.agreement import Agreement, Peers  # noqa: E402
from tests.harness.marks import deselect, ranks_of, timeout_of  # noqa: E402
from tests.harness.polling import PeerFailed, PollingComm, Watch  # noqa: E402
from tests.harness.watchdog import Watchdog  # noqa: E402

LONGEST = 30_000  # characters of one rank's account of a failure


class Rank:
    """This process's part in the job."""

    def __init__(self):
        self.world = MPI.COMM_WORLD
        self.rank, self.size = self.world.rank, self.world.size
        self.agreement = Agreement(self.world)
        self.peers = Watch.peers = Peers(self.world)
        # Not yet captured: the plugin is loaded with the first conftest.py, the descriptor is the
        # terminal's or mpirun's.
        owner = int(os.environ.get(launch.OWNER, 0))
        self.watchdog = Watchdog(self.world, self.peers, launch.seconds("GRACE", 5), os.dup(2), owner)
        self.timeout = launch.seconds("TIMEOUT", 120)
        self.comm = None
        self.broken = []  # what could not be collected

    def give_up(self, text):
        """Ends the job: what goes on is outside any test."""
        os.write(self.watchdog.stderr, f"[rank {self.rank} of {self.size}] {text}\n".encode())
        self.world.Abort(1)


RANK = Rank()


@pytest.fixture
def comm():
    """A communicator of exactly the ranks that the test asks for, new for each test, whose waits end when a
    peer fails."""
    return RANK.comm


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    # pytest-mpi would skip all tests marked mpi without its option; set after it has been configured, it
    # applies its other marks (mpi_skip, mpi_xfail) and prints nothing.
    config.option.with_mpi = True
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        with capture.global_and_fixture_disabled():
            RANK.watchdog.stderr = os.dup(2)
    if RANK.rank:
        config.pluginmanager.getplugin("terminalreporter")._tw._file = open(os.devnull, "w")
    elif launch.REPORTS in os.environ:
        config.pluginmanager.register(Sender(config, os.environ[launch.REPORTS]))
    if config.pluginmanager.hasplugin("hypothesispytest"):
        same_examples()
    RANK.watchdog.watch("the collection of tests", RANK.timeout)
    RANK.watchdog.start()


def same_examples():
    """All ranks have to draw the same examples from hypothesis, and none may go on to shrink one while the
    others wait."""
    from hypothesis import HealthCheck, Phase, settings

    settings.register_profile(
        "mpi",
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=(HealthCheck.function_scoped_fixture, HealthCheck.too_slow),
    )
    settings.load_profile("mpi")


class Sender:
    """Writes what happens as lines of JSON, for the pytest outside."""

    def __init__(self, config, path):
        self.config = config
        self.file = open(path, "a", buffering=1)

    def say(self, **message):
        self.file.write(json.dumps(message, default=str) + "\n")

    def pytest_runtest_logstart(self, nodeid):
        self.say(start=nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report):
        self.say(report=self.config.hook.pytest_report_to_serializable(config=self.config, report=report))

    def pytest_runtest_logfinish(self, nodeid):
        self.say(finish=nodeid)


def pytest_collection_modifyitems(config, items):
    deselect(config, items, lambda item: ranks_of(item) == RANK.size)


def pytest_collectreport(report):
    if report.failed:
        RANK.broken.append(f"{report.nodeid}:\n{report.longreprtext}")


def pytest_collection_finish(session):
    digest = hashlib.sha1("\n".join(item.nodeid for item in session.items).encode()).hexdigest()
    seen = RANK.agreement.exchange((digest, len(session.items), RANK.broken))
    RANK.watchdog.rest()
    if len({(digest, number, bool(broken)) for digest, number, broken in seen}) > 1:
        text = "the ranks collected different tests"
        for rank, (_, number, broken) in enumerate(seen):
            text += f"\nrank {rank}: {number} tests" + "".join(f"\n{account}" for account in broken)
        pytest.exit(text, returncode=3)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    if item.config.option.collectonly:
        return (yield)
    RANK.watchdog.watch(item.nodeid, timeout_of(item, RANK.timeout))
    RANK.comm = PollingComm(RANK.agreement.comm.Dup())
    before = len(Watch.abandoned)
    try:
        return (yield)
    finally:
        # A request that was given up keeps its communicator, on all ranks.
        if not any(RANK.agreement.exchange(len(Watch.abandoned) > before)):
            RANK.comm.Free()
        RANK.watchdog.rest()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    report = yield
    # Interrupted by a peer's failure: a consequence, not a cause.
    victim = report.failed and call.excinfo is not None and call.excinfo.errisinstance(PeerFailed)
    if report.failed:
        RANK.watchdog.note = report.longreprtext[-LONGEST:]
        RANK.peers.fail()
    told = account(report) if report.failed and not victim else ""
    seen = RANK.agreement.exchange((item.nodeid, report.outcome, told))
    RANK.peers.phase += 1
    RANK.watchdog.note = ""
    settle(report, call.when, victim, seen)
    return report


def account(report):
    """A rank's failure as the others show it: the traceback and what it had printed."""
    printed = "".join(f"\n--- {title}\n{content}" for title, content in report.sections)
    return (report.longreprtext + printed)[-LONGEST:]


def essence(told):
    """The line of a traceback that says what went wrong."""
    return next((line[1:].strip() for line in told.splitlines() if line.startswith("E ")), "failed")


def settle(report, when, victim, seen):
    """Makes `report` what all ranks say together: `seen` has (node id, outcome, account of an own failure)
    of each rank."""
    outcomes = [outcome for _, outcome, _ in seen]
    tests = sorted({nodeid for nodeid, *_ in seen})
    if len(tests) > 1:
        report.outcome, report.longrepr = "failed", f"the ranks are in different tests: {tests}"
    elif "failed" in outcomes:
        causes = [rank for rank, (*_, told) in enumerate(seen) if told] or [
            rank for rank, outcome in enumerate(outcomes) if outcome == "failed"
        ]
        if RANK.rank not in causes:
            state = "interrupted" if victim else outcomes[RANK.rank]
            report.longrepr = (
                f"rank(s) {causes} of {len(seen)}: {essence(seen[causes[0]][2])} "
                f"({when} {state} on rank {RANK.rank})"
            )
            report.outcome = "failed"
        others = {}  # {account: the ranks that give it}
        for rank in causes:
            if rank != RANK.rank:
                others.setdefault(seen[rank][2], []).append(str(rank))
        report.sections += [
            (f"rank {', '.join(ranks)} of {len(seen)}, {when}", told) for told, ranks in others.items()
        ]
    elif len(set(outcomes)) > 1:
        report.outcome, report.longrepr = "failed", f"the ranks disagree: {when} {outcomes}"
    if report.failed and hasattr(report, "wasxfail"):
        del report.wasxfail


def pytest_internalerror(excrepr):
    RANK.give_up(str(excrepr))


def pytest_keyboard_interrupt(excinfo):
    if not isinstance(excinfo.value, pytest.exit.Exception) or RANK.watchdog.deadline is not None:
        RANK.give_up("".join(traceback.format_exception(excinfo.value)))


@pytest.hookimpl(trylast=True)
def pytest_unconfigure():
    sys.stdout.flush()
    RANK.watchdog.watch("the end of the session", 20)
    RANK.agreement.exchange(None)  # no exit code ends the job before rank 0 has printed
    RANK.watchdog.rest()
