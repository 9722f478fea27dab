"""Nobody waits for a rank that will not come.

Under plain MPI a job in which one rank fails hangs: the others stay in their collective for ever. `main` runs
a command so that an exception, a `sys.exit`, a failing thread or an interrupt on one rank ends the whole job
at once, with one traceback that names the rank. A script that makes a Mesh under mpirun gets the same by
`install`, except that the code of its sys.exit cannot be seen. A rank that leaves early without an error is
noticed by those who wait for it in a collective (or in a send or receive) of a Group; they end the job and
say for whom they waited.

SIGTERM and SIGUSR1 ask a command to stop (`stop_requested`); SIGUSR2 prints the stacks of all threads of a
rank.
"""
import atexit
import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback

from mpipar.comm import debug, fault, launcher

GRACE = 2.0             # seconds in which the ranks are expected to leave together
_ABORT = 3.0            # seconds after which a rank ends itself if MPI's Abort has not
_LOOK = 0.5             # seconds between two looks of the watcher
_PATIENCE = 5.0         # seconds after which a message of a rank that has left is not on its way any more


class _Guard:
    """The state of this process: there is one job."""

    def __init__(self):
        self.notices = None             # once it is installed in a job of several ranks
        self.members = set()            # the ranks that are known to be guarded
        self.left = False
        self.stop = threading.Event()
        self.closing = threading.Event()
        self.watcher = None
        self.history, self.watchdog = None, None        # where MPIPAR_DEBUG or MPIPAR_TIMEOUT asks for them
        self.lock = threading.Lock()


_guard = _Guard()


def main(function, *arguments):
    """Run function(*arguments) as the whole program: ends the process with its exit code, and never returns.

    The code is the function's result (None: 0) or that of sys.exit. A code other than 0 on some ranks only
    ends the whole job with it. Call it before anything else is imported, and import inside the function, so
    that a failing import is caught too.
    """
    try:
        with checking():
            install(signals=True)
            debug.settings()
            fault.check()
        code = function(*arguments)
    except SystemExit as exit_:
        code = exit_.code
        if not isinstance(code, (int, type(None))):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        _report(error.with_traceback(error.__traceback__.tb_next))         # without this frame
    code = int(code or 0)
    _leave(code)
    sys.exit(code)


@contextlib.contextmanager
def checking():
    """For the checks before anything is allocated or written: a ValueError or OSError is the user's mistake.

    It ends the job with exit code 2 and one line, without a traceback: rank 0's, or if rank 0 sees nothing
    wrong, the line of the lowest rank that does.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        if isinstance(error, OSError) and error.strerror:
            text = f"{error.strerror}: {error.filename}" if error.filename is not None else error.strerror
        else:
            text = str(error) or type(error).__name__
        _refuse(" ".join(text.split()), everywhere=isinstance(error, launcher.LauncherError))


def stop_requested():
    """True once this rank was asked to stop (SIGTERM, SIGUSR1). The ranks have to agree: all-reduce it."""
    return _guard.stop.is_set()


def install(members=None, *, signals=False):
    """Guard this process against failures of this rank and of the others; a second call adds to the first.

    members: the ranks (of the whole job) that are guarded too; default: all. signals: SIGTERM and SIGUSR1 set
    the flag of `stop_requested`. ValueError if the launcher belongs to another MPI. No communication.
    """
    if signals:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda *_: _guard.stop.set())
    if signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
        faulthandler.enable(_stderr())
        faulthandler.register(signal.SIGUSR2, _stderr(), all_threads=True)
    mpi = start()
    if mpi is None:
        return                          # one rank, without MPI: Python's own ways are enough
    world = mpi.MPI.COMM_WORLD
    if world.Get_size() == 1:
        return
    _guard.members.update(range(world.Get_size()) if members is None else members)
    if _guard.notices is not None:
        return
    from mpipar.comm.notices import Notices
    _guard.notices = Notices(world, mpi.MPI)
    sys.excepthook = lambda kind, error, trace: _report(error.with_traceback(trace))
    threading.excepthook = lambda failure: _report(failure.exc_value)
    atexit.register(_leave, 0)
    asked, multiple = debug.settings(), mpi.MPI.Query_thread() == mpi.MPI.THREAD_MULTIPLE
    if asked is not None:
        if not multiple:
            raise ValueError("MPIPAR_TIMEOUT and MPIPAR_DEBUG need MPI's thread level multiple (mpi4py.rc)")
        _debug(asked)
    if multiple:
        from mpipar.comm import watch
        look, patience = _LOOK, _PATIENCE
        if asked is not None:
            from mpipar.comm.watchdog import LOOK
            look, patience = LOOK, 1.0 if asked.check else _PATIENCE
        arguments = _guard.notices, _guard.closing, look, patience, end_job, _guard.watchdog
        _guard.watcher = threading.Thread(target=watch.watch, name="mpipar-guard", daemon=True, args=arguments)
        _guard.watcher.start()


def _debug(asked):
    """The history of this rank and the watchdog."""
    from mpipar.comm.traced import keep_history
    from mpipar.comm.watchdog import Watchdog
    _guard.history, notices = keep_history(asked.operations), _guard.notices
    try:
        _guard.history.keep_in(asked.folder or os.curdir, notices.rank, notices.size)
    except OSError as error:
        if asked.folder is not None:
            raise ValueError(f"MPIPAR_DEBUG_DIR={asked.folder!r} can't be written to ({error.strerror})") from None
        if notices.rank == 0:
            _print(f"mpipar: warning: no file of the last operations can be kept here ({error.strerror}): "
                   "MPIPAR_DEBUG_DIR=DIR says where\n")
    _guard.watchdog = Watchdog(notices, asked, _guard.history, end_job)


def start():
    """The module comm.mpi, with MPI started; None where mpi4py is not installed and there is one rank.

    LauncherError (a ValueError) if the launcher belongs to another MPI. Uncaught, it is one line and exit
    code 2.
    """
    try:
        try:
            from mpipar.comm import mpi
        except ImportError as error:
            launcher.check(f"missing ({error})", 1)
            return None
        mpi.check_launcher()
    except launcher.LauncherError:
        sys.excepthook = lambda kind, error, trace: _report(error.with_traceback(trace))
        raise
    return mpi


def end_job(code, text):
    """Print the text with this rank's name and end the whole job with exit code `code`. From any thread."""
    notices = _guard.notices
    try:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        if notices is None:
            sys.stderr.write(text.rstrip() + "\n")
        else:
            if not _guard.lock.acquire(blocking=False):
                time.sleep(3600)        # another thread of this rank is at it
            if _guard.history is not None:
                text = text.rstrip() + _keep_history(text)
            _only_the_lowest(code)
            sys.stderr.write("".join(f"[rank {notices.rank}] {line}\n" for line in text.splitlines()))
        sys.stderr.flush()
    finally:
        _abort(code)


def _keep_history(text):
    """The file of the last operations gets its final form; what to say of it."""
    from mpipar.comm.waits import stacks
    _guard.history.save(f"{text.rstrip()}\n{stacks()}")
    path = _guard.history.path
    return "" if path is None else f"\nthe last operations of each rank: {path.with_name('mpipar-rank*.log')}"


def _only_the_lowest(code):
    """Where several ranks fail together the lowest one speaks; the others wait for their end."""
    from mpipar.comm.notices import FAILED
    notices = _guard.notices
    with contextlib.suppress(Exception):            # whatever is wrong with MPI, the job has to end
        notices.send(FAILED, code)
        for _ in range(20):
            time.sleep(0.01)
            failed = [rank for rank, notice in notices.collect().items() if notice.kind == FAILED]
            if any(rank < notices.rank for rank in failed):
                time.sleep(3)
                break


def _abort(code):
    """End all ranks of the job, or this process alone where MPI is not running."""
    try:
        if _guard.notices is not None:
            from mpipar.comm import mpi
            if not mpi.MPI.Is_finalized():
                time.sleep(0.2)                     # the launcher forwards what was printed
                # Abort may wait for another thread that is inside MPI, with the interpreter's lock in its hands.
                faulthandler.dump_traceback_later(_ABORT, exit=True, file=open(os.devnull, "w"))
                mpi.MPI.COMM_WORLD.Abort(code)
    finally:
        os._exit(code)


def _report(error):
    if isinstance(error, SystemExit):               # of a thread: ends the thread, as in Python
        return
    if isinstance(error, launcher.LauncherError):
        _refuse(str(error), everywhere=True)
    if isinstance(error, KeyboardInterrupt):
        end_job(130, "KeyboardInterrupt")
    told = traceback.TracebackException(type(error), error, error.__traceback__)
    if type(error).__module__ == "mpipar.comm.fingerprint":         # of a mismatch: where the program called
        outside = [frame for frame in told.stack if not frame.filename.startswith(os.path.dirname(__file__))]
        told.stack = traceback.StackSummary.from_list(outside)
    end_job(1, "".join(told.format()))


def _refuse(text, *, everywhere):
    """One line for the user, exit code 2 on every rank. everywhere: each sees it by itself, without MPI."""
    if _guard.notices is None and launcher.started()[0] > 1 and not everywhere:
        install()
    notices, line = _guard.notices, f"mpipar: error: {text}\n"
    if notices is None:
        if launcher.rank() == 0 or not everywhere:
            _print(line)
        sys.exit(2)
    from mpipar.comm.notices import REFUSED
    if notices.rank == 0:
        _print(line)
    _guard.left = True
    notices.send(REFUSED, 2)
    together = notices.wait(_guard.members, GRACE)
    refused = [rank for rank, notice in notices.received.items() if notice.kind == REFUSED]
    lower = any(rank < notices.rank for rank in refused)
    if notices.rank > 0 and not lower:
        _print(line)
    if _guard.history is not None:
        _guard.history.remove()
    if together:
        _close()
        sys.exit(2)
    if lower:
        time.sleep(3)                               # the lowest ends the job
    _abort(2)


def _leave(code):
    """This rank is at its end: tell the others, and wait for them as MPI_Finalize would, but asleep."""
    notices = _guard.notices
    if notices is None or _guard.left:
        return
    from mpipar.comm.notices import LEFT
    _guard.left = True
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    notices.send(LEFT, code)
    if _guard.watchdog is not None:
        _guard.watchdog.over = True
    if not notices.wait(_guard.members, GRACE if code else None):
        end_job(code, f"exit code {code}")
    if _guard.history is not None:
        _end_history(code)
    _close()


def _end_history(code):
    """All ranks have come to their end, or one has failed: the file of the last operations goes only if all is well.
    """
    from mpipar.comm.notices import DONE, FAILED
    notices = _guard.notices
    if code == 0 and "mpipar.comm.checked" in sys.modules:
        _check_messages()
    if code == 0:
        notices.send(DONE, 0)
        notices.wait(_guard.members, GRACE, (DONE, FAILED))
    if code or any(notice.kind == FAILED or notice.code for notice in notices.received.values()):
        _guard.watchdog.save()
        if any(notice.kind == FAILED for notice in notices.received.values()):
            time.sleep(3)               # that rank ends the job
    else:
        _guard.history.remove()


def _check_messages():
    """Where the ranks check their calls: what was sent was received."""
    from mpipar.comm import checked
    end, text = time.monotonic() + 0.5, checked.unreceived()
    while text and time.monotonic() < end:      # an answer may be on its way
        time.sleep(0.01)
        text = checked.unreceived()
    if text:
        end_job(1, text)


def _close():
    """No MPI call of ours may come after MPI_Finalize."""
    _guard.closing.set()
    if _guard.watcher is not None:
        _guard.watcher.join()


def _print(text):
    sys.stderr.write(text)
    sys.stderr.flush()


def _stderr():
    """Standard error as a file that has a descriptor (under pytest and in notebooks sys.stderr has none)."""
    return sys.__stderr__ if sys.__stderr__ is not None else 2
