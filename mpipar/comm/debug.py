"""What the environment asks for against hangs and mismatches; nothing unless MPIPAR_DEBUG or MPIPAR_TIMEOUT is set.

    MPIPAR_DEBUG=1              the ranks compare what they call before each operation (checked.py)
    MPIPAR_TIMEOUT=60           a job in which an operation waits that long without moving is ended with a report
                                (watchdog.py); 300 where only MPIPAR_DEBUG is set
    MPIPAR_DEBUG_DIR=DIR        where a failed job leaves mpipar-rank0.log, ... (history.py); default: here
    MPIPAR_DEBUG_OPERATIONS=N   how many of its last operations a rank keeps there; default 200

Needs no MPI.
"""
import dataclasses
import math
import os

PATIENT = 300.0         # seconds: compiling all kernels or reading the data takes less
OPERATIONS = 200
_MOST = 1_000_000


@dataclasses.dataclass(frozen=True)
class Settings:
    """check: compare what the ranks call. timeout: seconds that an operation may wait. operations: kept by a rank.
    folder: of the files; None where the user named none."""

    check: bool
    timeout: float
    operations: int
    folder: str | None


def settings(environ=os.environ):
    """The Settings; None where nothing is asked for. ValueError, with the valid values, for a wrong one."""
    check = environ.get("MPIPAR_DEBUG", "")
    if check not in ("", "0", "1"):
        raise ValueError(f"MPIPAR_DEBUG={check!r}: valid are 0 and 1")
    timeout = _number(environ, "MPIPAR_TIMEOUT", float, "a number of seconds above 0, as in 60")
    operations = _number(environ, "MPIPAR_DEBUG_OPERATIONS", int, f"a whole number from 1 to {_MOST}")
    if check != "1" and timeout is None:
        return None
    return Settings(check == "1", timeout or PATIENT, operations or OPERATIONS, environ.get("MPIPAR_DEBUG_DIR") or None)


def _number(environ, name, kind, valid):
    """The number in a variable, None where it is not set."""
    text = environ.get(name, "")
    if not text:
        return None
    try:
        number = kind(text)
    except ValueError:
        number = math.nan
    if not 0 < number < (math.inf if kind is float else _MOST + 1):
        raise ValueError(f"{name}={text!r}: valid is {valid}")
    return number


def group_class(asked):
    """The class of the groups for such Settings (None: plain ones, which trace and check nothing)."""
    if asked is None:
        from mpipar.comm.group import Group
        return Group
    if asked.check:
        from mpipar.comm.checked import CheckedGroup
        return CheckedGroup
    from mpipar.comm.traced import TracedGroup
    return TracedGroup
