"""Marks (`mpi`, `slow`, `torch`) and the count of multi-rank tests, on both sides of mpirun.

The run fails when a multi-rank test that was selected did not execute: "green because nothing ran" cannot
happen. A test may be skipped only by a mark that stands on it (`skip`, `skipif`, `torch`), where a reader
sees it, and such skips are counted in the last line: `multi-rank tests: 57 collected, 56 executed, 1
skipped by its mark`."""

import importlib.util

import pytest

SIZE = "mpi_np"  # the hidden parameter of a test with several sizes
FROM_PYTEST_MPI = "need --with-mpi option to run"  # pytest-mpi's reason for skipping; the harness replaces it


def ranks_of(item):
    """How many ranks the test needs; None for a test of one process."""
    mark = item.get_closest_marker("mpi")
    if mark is None:
        return None
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return parameters.get(SIZE, sizes_of(mark)[0])


def sizes_of(mark):
    """The numbers of ranks that a mark asks for, as a list. `min_size` is pytest-mpi's word for it."""
    unknown = set(mark.kwargs) - {"np", "min_size", "timeout"}
    sizes = mark.kwargs.get("np", mark.kwargs.get("min_size", 2))
    sizes = list(sizes) if isinstance(sizes, (list, tuple)) else [sizes]
    if mark.args or unknown or not sizes or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise pytest.UsageError(
            f"{mark}: write @pytest.mark.mpi(np=2) or np=[1, 2, 4], and timeout=SECONDS if need be"
        )
    return sizes


def timeout_of(item, default):
    """Seconds that the test may take."""
    mark = item.get_closest_marker("mpi")
    return float(mark.kwargs.get("timeout", default)) if mark else default


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")


def pytest_generate_tests(metafunc):
    mark = metafunc.definition.get_closest_marker("mpi")
    if mark is not None and isinstance(mark.kwargs.get("np"), (list, tuple)):
        metafunc.fixturenames.append(SIZE)
        metafunc.parametrize(SIZE, sizes_of(mark), ids="np{}".format)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.get_closest_marker("mpi"):
            sizes_of(item.get_closest_marker("mpi"))
    named = any("::" in argument for argument in config.args)
    if not (config.option.slow or named):
        deselect(config, items, lambda item: item.get_closest_marker("slow") is None)
    if importlib.util.find_spec("torch") is None:
        for item in items:
            if item.get_closest_marker("torch"):
                item.add_marker(pytest.mark.skip(reason="PyTorch is not installed"))


def deselect(config, items, keep):
    """Leaves out of `items` (in place) what `keep` says no to, and has pytest count it as deselected."""
    dropped = [item for item in items if not keep(item)]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if keep(item)]


class Count:
    """Follows every selected multi-rank test: not run, executed, or skipped with its reason. A report that
    has `never_ran` only says that a test could not be run."""

    def __init__(self):
        self.items = {}
        self.executed = set()
        self.skipped = {}  # {node id: reason}
        self.told = set()  # reported as failed because they did not run

    def select(self, items):
        self.items = {item.nodeid: item for item in items if ranks_of(item)}

    def add(self, report):
        if report.nodeid not in self.items:
            return
        if getattr(report, "never_ran", False):
            self.told.add(report.nodeid)
        elif report.skipped and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.skipped[report.nodeid] = reason
        elif report.when == "call" or report.failed:
            self.executed.add(report.nodeid)

    def allowed_skips(self):
        """Skips that a mark on the test announces."""
        return {
            nodeid
            for nodeid in self.skipped
            if nodeid not in self.executed
            and any(
                mark.kwargs.get("reason") != FROM_PYTEST_MPI
                for name in ("skip", "skipif", "mpi_skip", "mpi_break", "torch")
                for mark in self.items[nodeid].iter_markers(name)
            )
        }

    def missing(self):
        """{node id: why} of the tests that should have run and did not."""
        left = self.items.keys() - self.executed - self.allowed_skips() - self.told
        return {
            nodeid: self.skipped.get(nodeid, "it was never started")
            for nodeid in self.items
            if nodeid in left
        }

    def line(self):
        skips = len(self.allowed_skips())
        return f"multi-rank tests: {len(self.items)} collected, {len(self.executed)} executed" + (
            f", {skips} skipped by {'its mark' if skips == 1 else 'their marks'}" if skips else ""
        )


COUNT = pytest.StashKey[Count]()


def pytest_configure(config):
    config.stash[COUNT] = Count()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session):
    session.config.stash[COUNT].select(session.items)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session, exitstatus):
    count, config = session.config.stash[COUNT], session.config
    stopped = (
        session.shouldfail
        or session.shouldstop
        or exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    )
    if config.option.collectonly or stopped:
        return  # the exit status tells already
    for nodeid, why in count.missing().items():
        item = count.items[nodeid]
        text = f"this multi-rank test did not run, so the run is not green: {why}"
        report = pytest.TestReport(nodeid, item.location, {}, "failed", text, "teardown", never_ran=True)
        config.hook.pytest_runtest_logreport(report=report)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


class Follow:
    """Kept apart from the module, as it needs the configuration that pytest's report hook does not pass."""

    def __init__(self, config):
        self.count = config.stash[COUNT]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report):
        self.count.add(report)


@pytest.hookimpl
def pytest_sessionstart(session):
    session.config.pluginmanager.register(Follow(session.config), "mpipar-count")


def pytest_terminal_summary(terminalreporter, config):
    if config.stash[COUNT].items and not config.option.collectonly:
        terminalreporter.write_line(config.stash[COUNT].line())
