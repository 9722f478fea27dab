"""The harness itself: each test here writes small test files and runs pytest on them in another process."""

import os
import subprocess
import sys
import time

import pytest

from tests.harness import launch
from tests.harness.project import Project
from tests.harness.watchdog import exists

pytestmark = pytest.mark.smoke


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


FAILURES = """
    def test_serial(): assert not launched
    launched = "PMI_SIZE" in os.environ or "OMPI_COMM_WORLD_SIZE" in os.environ

    @pytest.mark.mpi(np=2)
    def test_before(comm): total(comm)

    @pytest.mark.mpi(np=2)
    def test_one_rank_fails(comm):
        print("printed by", comm.rank)
        assert comm.rank == 0, "only rank 1 says this"
        comm.Barrier()

    @pytest.mark.mpi(np=2)
    def test_between(comm): total(comm)

    @pytest.mark.mpi(np=2)
    def test_skips_on_one_rank(comm):
        if comm.rank == 0: pytest.skip("rank 0 alone")

    @pytest.fixture
    def breaks(comm):
        if comm.rank == 1: raise OSError("the fixture broke")
        comm.Barrier()

    @pytest.mark.mpi(np=2)
    def test_broken_fixture(breaks): pass

    @pytest.mark.mpi(np=2)
    def test_broken_teardown(comm, request):
        request.addfinalizer(lambda: 1 // (comm.rank - 1))

    @pytest.mark.mpi(np=2)
    def test_after(comm): total(comm)
"""


def check_failures(outcome):
    assert outcome.code == 1, outcome.output
    expected = dict(
        test_before="PASSED",
        test_one_rank_fails="FAILED",
        test_between="PASSED",
        test_skips_on_one_rank="FAILED",
        test_broken_fixture="ERROR",
        test_broken_teardown="PASSED",
        test_after="PASSED",
    )
    assert outcome.results.items() >= expected.items(), outcome.output
    for text in (
        "only rank 1 says this",
        "printed by 1",
        "the ranks disagree: call ['skipped', 'passed']",
        "the fixture broke",
        "ZeroDivisionError",
        "multi-rank tests: 7 collected, 7 executed",
    ):
        assert text in outcome.output, f"no {text!r} in\n{outcome.output}"
    assert outcome.seconds < 20


def test_failures_from_plain_pytest(project):
    project.write("test_it.py", FAILURES)
    outcome = project.pytest()
    check_failures(outcome)
    assert outcome.results["test_serial"] == "PASSED"
    assert (
        "3 failed, 5 passed" in outcome.output or "2 failed, 5 passed, 2 errors" in outcome.output
    ), outcome.output


def test_failures_under_mpirun(project):
    project.write("test_it.py", FAILURES)
    outcome = project.pytest(ranks=2)
    check_failures(outcome)
    assert "test_serial" not in outcome.results and "1 deselected" in outcome.output
    assert outcome.output.count("::test_before PASSED") == 1  # one report, not one a rank


def test_hangs_and_deaths_end_one_test_only(project):
    project.write(
        "test_it.py",
        """
        @pytest.mark.mpi(np=2, timeout=2)
        def test_hang(comm):
            if comm.rank == 0: MPI.COMM_WORLD.Recv(np.zeros(1), 1)
            comm.Barrier()

        @pytest.mark.mpi(np=2)
        def test_after_hang(comm): total(comm)

        @pytest.mark.mpi(np=2)
        def test_plain_barrier(comm):
            assert comm.rank == 0, "rank 1 fails, the other is where it can't be reached"
            MPI.COMM_WORLD.Barrier()

        @pytest.mark.mpi(np=2)
        def test_killed(comm):
            if comm.rank == 1: os.kill(os.getpid(), signal.SIGKILL)
            comm.Barrier()

        @pytest.mark.mpi(np=2)
        def test_exits(comm):
            if comm.rank == 1: os._exit(0)
            comm.Barrier()

        @pytest.mark.mpi(np=2)
        def test_last(comm): total(comm)
    """,
    )
    outcome = project.pytest()
    assert outcome.code == 1
    assert outcome.results == dict(
        test_hang="FAILED",
        test_after_hang="PASSED",
        test_plain_barrier="FAILED",
        test_killed="FAILED",
        test_exits="FAILED",
        test_last="PASSED",
    ), outcome.output
    for text in (
        "rank 0 of 2: test_it.py::test_hang: over the limit of 2 s",
        "rank 1 of 2: test_it.py::test_hang",
        "in test_hang",
        "the other is where it can't be reached",
        "mpirun -np 2 ended with exit code",
        "multi-rank tests: 6 collected, 6 executed",
    ):
        assert text in outcome.output, f"no {text!r} in\n{outcome.output}"


def test_waits_end_when_a_peer_fails(project):
    waits = {
        "split": "type(comm)(comm.Split(comm.rank % 2, comm.rank)); "
        "comm = type(comm)(comm.Split(0)); comm.Barrier()",
        "sub": "sub.Barrier()",
        "dup": "comm.Dup()",
        "request": "comm.Irecv(np.zeros(1), 1).Wait()",
        "waitall": "r = comm.Irecv(np.zeros(1), 1); type(r).Waitall([r])",
        "recv": "comm.recv(source=1)",
        "bcast": "comm.bcast(None, root=1)",
        "sendrecv": "comm.Sendrecv(np.zeros(1), 1, 0, np.zeros(1), 1)",
    }
    project.write(
        "test_it.py",
        "".join(f"""
        @pytest.mark.mpi(np=2, timeout=20)
        def test_{name}(comm):
            sub = type(comm)(comm.Split(0, comm.rank))
            if comm.rank == 1: raise ValueError("rank 1 leaves {name}")
            {call}
        """ for name, call in waits.items()),
    )
    outcome = project.pytest(ranks=2)
    assert outcome.code == 1 and outcome.results == {
        f"test_{name}": "FAILED" for name in waits
    }, outcome.output
    for name in waits:
        assert f"rank 1 leaves {name}" in outcome.output
    assert "multi-rank tests: 8 collected, 8 executed" in outcome.output


GREEN = """
    @pytest.mark.mpi(np=[1, 2])
    def test_sizes(comm): total(comm)

    @pytest.mark.mpi(np=2)
    @pytest.mark.parametrize("word", ["one", "two"])
    def test_words(comm, word): total(comm)

    @pytest.mark.mpi(np=2)
    @pytest.mark.skipif(True, reason="says its mark")
    def test_marked_skip(comm): pass

    @pytest.mark.mpi
    @pytest.mark.slow
    def test_slow(comm): total(comm)

    def test_serial(): pass
"""


@pytest.mark.parametrize(
    "options, executed, names",
    [
        ([], "5 collected, 4 executed, 1 skipped by its mark", 6),
        (["--with-mpi"], "5 collected, 4 executed, 1 skipped by its mark", 6),
        (["--slow", "-k", "slow or serial"], "1 collected, 1 executed", 2),
        (["-m", "mpi", "-k", "words"], "2 collected, 2 executed", 2),
        (["test_it.py::test_sizes[np2]"], "1 collected, 1 executed", 1),
        (["test_it.py::test_slow"], "1 collected, 1 executed", 1),
    ],
)
def test_selection(project, options, executed, names):
    project.write("test_it.py", GREEN)
    outcome = project.pytest(*options)
    assert outcome.code == 0 and f"multi-rank tests: {executed}\n" in outcome.output, outcome.output
    assert len(outcome.results) == names, outcome.output


def test_collect_only_runs_nothing(project):
    project.write("test_it.py", GREEN)
    outcome = project.pytest("--collect-only", "-q")
    assert (
        outcome.code == 0
        and "6/7 tests collected (1 deselected)" in outcome.output
        and "multi-rank tests" not in outcome.output
    ), outcome.output


def test_stop_at_the_first_failure_and_run_it_again(project):
    project.write(
        "test_it.py",
        """
        @pytest.mark.mpi(np=2)
        def test_one(comm): total(comm)
        @pytest.mark.mpi(np=2)
        def test_two(comm): assert os.path.exists("mended")
        @pytest.mark.mpi(np=2)
        def test_three(comm): time.sleep(50)
    """,
    )
    outcome = project.pytest("-x")
    assert outcome.code == 1 and outcome.results == dict(test_one="PASSED", test_two="FAILED"), outcome.output
    assert "multi-rank tests: 3 collected, 2 executed" in outcome.output and outcome.seconds < 20
    (project.folder / "mended").touch()
    outcome = project.pytest("--lf")
    assert outcome.code == 0 and outcome.results == dict(test_two="PASSED"), outcome.output


def test_a_run_that_leaves_tests_out_fails(project):
    """The negative control of the count: all that ran has passed, and yet the run must not be green."""
    project.write(
        "test_it.py",
        """
        @pytest.mark.mpi(np=2)
        def test_runs(comm): total(comm)
        @pytest.mark.mpi(np=2)
        def test_lost(comm): total(comm)
        @pytest.mark.mpi(np=2)
        def test_skips(comm): pytest.skip("decided on the way")
    """,
    )
    with open(project.folder / "conftest.py", "a") as file:
        file.write(
            "\ndef pytest_collection_modifyitems(items):\n    if under_mpirun():\n"
            "        items[:] = [item for item in items if item.name != 'test_lost']\n"
        )
    outcome = project.pytest()
    assert (
        outcome.code == 1 and "multi-rank tests: 3 collected, 1 executed\n" in outcome.output
    ), outcome.output
    for why in ("it was never started", "Skipped: decided on the way"):
        assert (
            f"this multi-rank test did not run, so the run is not green: {why}" in outcome.output
        ), outcome.output
    assert "1 passed, 1 skipped, 2 errors" in outcome.output
    assert project.pytest(ranks=2).code == 1


def test_forgotten_ranks_and_marks(project):
    project.write(
        "test_it.py",
        """
        def test_unmarked(comm): pass
    """,
    )
    outcome = project.pytest()
    assert outcome.code == 1 and "@pytest.mark.mpi(np=...)" in outcome.output
    assert project.pytest(ranks=2).code == 5  # nothing to run on two ranks is no success either
    project.write(
        "test_it.py",
        """
        @pytest.mark.mpi(ranks=2)
        def test_wrong_mark(comm): pass
    """,
    )
    outcome = project.pytest()
    assert outcome.code == 4 and "write @pytest.mark.mpi(np=2)" in outcome.output, outcome.output


def test_ranks_that_collect_different_tests(project):
    project.write(
        "test_it.py",
        """
        if MPI.COMM_WORLD.size == 2 and MPI.COMM_WORLD.rank == 1: raise ImportError("not on this rank")
        @pytest.mark.mpi(np=2)
        def test_it(comm): pass
        @pytest.mark.mpi(np=2)
        def test_too(comm): pass
    """,
    )
    outcome = project.pytest()
    assert outcome.code == 1 and "the ranks collected different tests" in outcome.output, outcome.output
    assert "not on this rank" in outcome.output and "not started, see test_it.py::test_it" in outcome.output
    assert "multi-rank tests: 2 collected, 0 executed" in outcome.output and outcome.seconds < 20


def test_no_rank_outlives_the_pytest_that_started_it(project):
    project.write(
        "test_it.py",
        """
        @pytest.mark.mpi(np=2)
        def test_long(comm):
            open(f"rank-{os.getpid()}", "w").close()
            time.sleep(100)
        """,
    )
    outer = subprocess.Popen(**project.command([]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        ranks = wait_for(lambda: len(found := list(project.folder.glob("rank-*"))) == 2 and found)
    finally:
        outer.kill()
        outer.wait()
    wait_for(lambda: not any(exists(int(path.name.removeprefix("rank-"))) for path in ranks))


def wait_for(condition, timeout=60):
    """Waits until `condition()` is true, and returns what it gave."""
    end = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < end, "in vain"
        time.sleep(0.1)
    return value


def test_mpirun_beside_python_is_found_without_path(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "/nowhere")
    python = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(FileNotFoundError, match="install mpipar"):
        launch.mpirun(2)
    (tmp_path / "mpirun").write_text("")
    os.chmod(tmp_path / "mpirun", 0o755)
    assert launch.mpirun(3) == [str(tmp_path / "mpirun"), "-np", "3"]
    assert launch.environment()["PATH"].split(os.pathsep)[0] == str(tmp_path)
