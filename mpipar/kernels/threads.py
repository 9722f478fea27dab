"""Running kernels on several threads of one rank.

Kernels release the GIL, so plain Python threads run them side by side. Work is cut into tasks before it comes
here; which thread takes which task changes nothing in the result, so the bits are the same for any number of
threads.
"""

import os
import queue
import threading

from .settings import settings


def parallel_for(function, tasks):
    """Calls function(*task) for each task of the list `tasks`, on `settings.threads` threads, and waits for
    all of them.

    The caller's thread works too. One thread (or one task) is a plain loop. A call from inside a task is a
    plain loop as well. The first exception raised by a task is raised here, after the running ones have
    ended; tasks not begun are dropped.
    """
    helpers = min(settings.threads, len(tasks)) - 1
    if helpers < 1 or getattr(_inside, "task", False):
        for task in tasks:
            function(*task)
        return
    _pool.run(_Job(function, tasks, helpers), helpers)


def limit_threads(count: int):
    """Sets `settings.threads` and the threads of every loaded BLAS to `count`, so that together they never
    exceed it."""
    settings.threads = count
    import threadpoolctl  # here, because looking through all loaded libraries takes some milliseconds

    threadpoolctl.threadpool_limits(limits=settings.threads, user_api="blas")


def work_alone():
    """From now on the kernels that the calling thread calls run on it alone, as inside a task."""
    _inside.task = True


_inside = threading.local()


class _Job:
    def __init__(self, function, tasks, helpers):
        self.function = function
        self.tasks = iter(tasks)
        self.lock = threading.Lock()
        self.error = None
        self.finished = threading.Semaphore(0)

    def next_task(self):
        with self.lock:
            return None if self.error is not None else next(self.tasks, None)

    def work(self):
        outer = getattr(_inside, "task", False)
        _inside.task = True
        try:
            while (task := self.next_task()) is not None:
                self.function(*task)
        except BaseException as error:  # handed to the caller, whatever it is
            with self.lock:
                self.error = self.error or error
        finally:
            _inside.task = outer


class _Pool:
    """Daemon threads that live as long as the process and are made when first needed."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.jobs = queue.SimpleQueue()
        self.size = 0
        self.lock = threading.Lock()

    def run(self, job, helpers):
        with self.lock:
            while self.size < helpers:
                threading.Thread(target=self._serve, args=(self.jobs,), daemon=True).start()
                self.size += 1
        for _ in range(helpers):
            self.jobs.put(job)
        job.work()
        for _ in range(helpers):
            job.finished.acquire()
        if job.error is not None:
            raise job.error

    @staticmethod
    def _serve(jobs):
        while True:
            job = jobs.get()
            job.work()
            job.finished.release()
            del job  # no reference to the caller's arrays while waiting


_pool = _Pool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.reset)  # threads do not survive a fork
