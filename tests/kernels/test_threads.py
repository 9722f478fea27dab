"""Sharing tasks among threads: every task once, errors to the caller, no more threads than there are
cores."""

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from mpipar.kernels.settings import Settings, available_cores, settings
from mpipar.kernels.threads import limit_threads, parallel_for


@pytest.fixture(autouse=True)
def _threads():
    before = settings.threads
    yield
    settings.threads = before


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_task_once(threads):
    settings.threads = threads
    seen = np.zeros(100, int)

    def task(i, by):
        seen[i] += by

    parallel_for(task, [(i, 1) for i in range(100)])
    assert (seen == 1).all()
    parallel_for(task, [])
    assert (seen == 1).all()


def test_tasks_run_side_by_side_and_in_the_caller_too():
    settings.threads = 2
    meeting = threading.Barrier(2, timeout=10)
    names = []

    def task():
        meeting.wait()
        names.append(threading.get_ident())

    parallel_for(task, [(), ()])
    assert len(set(names)) == 2 and threading.get_ident() in names


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_reaches_the_caller_and_the_pool_lives_on(threads):
    settings.threads = threads

    def task(i):
        if i == 5:
            raise KeyError("five")

    for _ in range(3):
        with pytest.raises(KeyError, match="five"):
            parallel_for(task, [(i,) for i in range(20)])
    parallel_for(task, [(0,), (1,)])


def test_nested_calls_and_calls_from_several_threads_end():
    settings.threads = 3
    total = []

    def inner(i):
        total.append(i)

    def outer(i):
        parallel_for(inner, [(i,)] * 4)

    tasks = [(i,) for i in range(6)]
    callers = [threading.Thread(target=parallel_for, args=(outer, tasks)) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=30)
        assert not caller.is_alive()
    assert len(total) == 4 * 6 * 4


def test_one_thread_starts_none():
    settings.threads = 1
    before = threading.active_count()
    parallel_for(lambda: None, [()] * 10)
    assert threading.active_count() == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_has_a_pool_of_its_own():
    code = ("import os, sys\n"
            "from mpipar.kernels.settings import settings\n"
            "from mpipar.kernels.threads import parallel_for\n"
            "settings.threads = 2; seen = []; parallel_for(seen.append, [(1,), (2,)])\n"
            "child = os.fork()\n"
            "if child == 0:\n"
            "    parallel_for(seen.append, [(3,), (4,)])\n"
            "    os._exit(0 if sorted(seen) == [1, 2, 3, 4] else 9)\n"
            "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))")
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], timeout=60).returncode == 0


def test_settings_refuse_what_does_not_fit():
    own = Settings()
    for bad in (0, -1, 1.5, "2", True, None):
        with pytest.raises(ValueError, match="valid values: integers from 1"):
            own.threads = bad
    with pytest.raises(ValueError, match="numba, vector, blas"):
        own.gemm = "mkl"
    own.threads, own.gemm = np.int64(3), "blas"
    assert (own.threads, own.gemm) == (3, "blas")


def test_threads_follow_the_affinity_mask():
    assert Settings().threads == available_cores() == len(os.sched_getaffinity(0))
    code = ("import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
            "from mpipar.kernels.settings import settings; print(settings.threads)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "1", done.stderr


def test_limit_threads_holds_for_blas_too():
    import threadpoolctl

    with threadpoolctl.threadpool_limits(None):  # restores the limits afterwards
        limit_threads(1)
        blas = [info["num_threads"] for info in threadpoolctl.threadpool_info() if info["user_api"] == "blas"]
        assert settings.threads == 1 and blas and set(blas) == {1}


def test_waiting_threads_use_no_time():
    settings.threads = 2
    parallel_for(lambda: None, [(), ()])
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1
