"""The one place that imports mpi4py. Importing it starts MPI, with the settings of launcher.py.

LauncherError (a ValueError) if the launcher is Open MPI's and the library is not: such a library may end the
process itself when it starts.
"""
import os
import warnings

import mpi4py

from mpipar.comm import launcher


def _load():
    """mpi4py.MPI, started."""
    os.environ.update(launcher.settings())
    mpi4py.rc.initialize, mpi4py.rc.finalize = False, True      # started below, ended at exit
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", RuntimeWarning
        )  # of a suspicious launcher: `check_launcher` says more
        from mpi4py import MPI
        if not MPI.Is_initialized():
            launcher.check_family(_name(MPI.Get_library_version()))
            MPI.Init_thread(getattr(MPI, "THREAD_" + mpi4py.rc.thread_level.upper()))
    return MPI


def _name(text):
    text = text.replace("\x00", "").strip()
    return (
        "MPICH " + text.split()[2] if text.startswith("MPICH Version") else text.split(",")[0].split("\n")[0]
    )


MPI = _load()

OPERATIONS = {"sum": MPI.SUM, "mean": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX}
IN_PLACE = MPI.IN_PLACE


def library():
    """Name and version of the MPI library that Python uses, as in "Open MPI v5.0.11"."""
    return _name(MPI.Get_library_version())


def world_size():
    """Number of ranks of the job."""
    return MPI.COMM_WORLD.Get_size()


def check_launcher():
    """LauncherError (a ValueError) where the launcher belongs to another MPI than mpi4py."""
    launcher.check(library(), world_size())


def max_count(environ=os.environ):
    """Most elements of one MPI call: None where the library takes any number (MPI 4 and later).

    MPIPAR_MAX_COUNT sets it (the same on every rank), for tests of the cutting into chunks.
    """
    text = environ.get("MPIPAR_MAX_COUNT", "")
    if text:
        if not text.isdigit() or int(text) < 1:
            raise ValueError(f"MPIPAR_MAX_COUNT={text!r}: a whole number of elements, 1 or more, is needed")
        return int(text)
    return None if MPI.Get_version() >= (4, 0) else 2**31 - 1


def synchronous_sends(environ=os.environ):
    """True where MPIPAR_SYNC_SEND asks that every send waits for its receive, which shows latent
    deadlocks."""
    text = environ.get("MPIPAR_SYNC_SEND", "")
    if text not in ("", "0", "1"):
        raise ValueError(f"MPIPAR_SYNC_SEND={text!r}: valid are 0 and 1")
    return text == "1"
