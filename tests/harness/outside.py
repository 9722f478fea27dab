"""pytest plugin outside mpirun: runs the serial tests in this process, then starts the multi-rank ones.

There is one mpirun for each number of ranks, with all its tests. Rank 0 sends the reports that all ranks
have agreed on, and they are shown here as if the tests had run here, so -v, -q, -x, --lf, --durations and
the like do what they always do. If an mpirun dies, the test it was in fails, and another mpirun goes on
with the next one."""

import pytest

from tests.harness import launch
from tests.harness.child import Child
from tests.harness.marks import ranks_of, timeout_of


@pytest.fixture
def comm():
    pytest.fail("`comm` is for tests of several ranks: mark the test with @pytest.mark.mpi(np=...)")


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session):
    collected = list(session.items)
    if session.config.option.collectonly:
        return (yield)
    session.items = [item for item in collected if ranks_of(item) is None]
    try:
        result = yield  # the serial ones, in this process
    finally:
        session.items = collected
    for ranks in sorted({ranks_of(item) for item in collected} - {None}):
        left = [item for item in collected if ranks_of(item) == ranks]
        while left:
            left = run(session, ranks, left)
    return result


def run(session, ranks, items):
    """Runs `items` in one mpirun; returns those that are left when it died before its end."""
    limit = max(timeout_of(item, launch.seconds("TIMEOUT", 120)) for item in items)
    try:
        child = Child(session.config, ranks, items, limit)
    except OSError as error:
        return give_up(session, items, str(error))
    with child:
        current, done, failed = follow(session, child, {item.nodeid: item for item in items})
        left = [item for item in items if item not in done and item is not current]
        if current is not None:
            fail(session, current, "call", f"in this test, {child.account()}")
            session.config.hook.pytest_runtest_logfinish(nodeid=current.nodeid, location=current.location)
        elif not done:
            return give_up(session, items, child.account())
        elif child.process.returncode != (1 if failed else 0):
            fail(session, done[-1], "teardown", f"after this test, {child.account()}")
        else:
            left = []  # it ended well: what it left out, the count will find
    stop_if_asked(session)
    return left


def follow(session, child, items):
    """Shows what rank 0 reports. Returns the test in which the child ended, if any, the tests that it
    finished, and whether one of them failed. `items` is {node id: item}."""
    hook, current, done, failed = session.config.hook, None, [], False
    for message in child.messages():
        if "start" in message:
            current = items[message["start"]]
            hook.pytest_runtest_logstart(nodeid=current.nodeid, location=current.location)
        elif "report" in message:
            report = hook.pytest_report_from_serializable(config=session.config, data=message["report"])
            if isinstance(report.longrepr, list):  # where and why a test was skipped; JSON has no tuples
                report.longrepr = tuple(report.longrepr)
            failed |= report.failed
            hook.pytest_runtest_logreport(report=report)
        elif "finish" in message:
            hook.pytest_runtest_logfinish(nodeid=current.nodeid, location=current.location)
            done.append(current)
            current = None
            stop_if_asked(session)
    return current, done, failed


def give_up(session, items, why):
    """No test has even started: the rest would fare alike, so all fail, the first with the whole story."""
    for item in items:
        session.config.hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        fail(
            session,
            item,
            "setup",
            why if item is items[0] else f"not started, see {items[0].nodeid}",
            never_ran=True,
        )
        session.config.hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        stop_if_asked(session)
    return []


def fail(session, item, when, text, **more):
    report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, when, **more)
    session.config.hook.pytest_runtest_logreport(report=report)


def stop_if_asked(session):
    """-x and --maxfail, as in pytest's own loop."""
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
