"""Faults on demand, for tests of what the other ranks do: MPIPAR_FAULT=kind:key=value,...

    MPIPAR_FAULT=raise:rank=2,step=3         rank 2 raises at its step 3
    MPIPAR_FAULT=kill:rank=1,point=data      rank 1 is killed where it makes its first batch

Kinds: raise (an exception), exit (sys.exit, with code=3 unless given), kill (SIGKILL), hang (sleeps for
ever). Keys: rank and step (any, where not given), point (step, unless given), code. The program says at each
of its points where it is, by `inject`.
"""
import functools
import os
import signal
import sys
import time

from mpipar.comm import launcher

KINDS = ("raise", "exit", "kill", "hang")
POINTS = ("import", "data", "step", "save")


class InjectedFault(RuntimeError):
    """What kind `raise` raises."""


@functools.lru_cache(maxsize=8)
def parse(text):
    """(kind, {key: value}) of MPIPAR_FAULT's text; None where it is empty. ValueError, with the valid
    values."""
    if not text:
        return None
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        raise ValueError(f"MPIPAR_FAULT={text!r}: kind {kind!r} is unknown: valid are {', '.join(KINDS)}")
    keys = {"point": "step"}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if key == "point" and value in POINTS:
            keys[key] = value
        elif key in ("rank", "step", "code") and value.isdigit():
            keys[key] = int(value)
        else:
            raise ValueError(
                f"MPIPAR_FAULT={text!r}: {item!r} is not understood: valid are rank=, step= and code= with a "
                f"number, and point= with one of {', '.join(POINTS)}"
            )
    return kind, keys


def check():
    """ValueError where MPIPAR_FAULT is malformed: to be called before the work begins."""
    parse(os.environ.get("MPIPAR_FAULT", ""))


def inject(point="step", *, step=None, rank=None):
    """Fail here if MPIPAR_FAULT says so. rank: of this process, as the launcher gave it where it is not
    given."""
    fault = parse(os.environ.get("MPIPAR_FAULT", ""))
    if fault is None:
        return
    kind, keys = fault
    rank = launcher.rank() if rank is None else rank
    if point != keys["point"] or keys.get("rank", rank) != rank or keys.get("step", step) != step:
        return
    if kind == "raise":
        raise InjectedFault(f"fault injected at {point}" + ("" if step is None else f" {step}"))
    if kind == "exit":
        sys.exit(keys.get("code", 3))
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        time.sleep(3600)
