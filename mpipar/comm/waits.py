"""What the threads of this process wait for, read from their stacks, so that a rank pays nothing for it.

A wait is a thread inside a call of a Group or inside `wait` of a Pending. Where calls are noted (traced.py), also an
operation of which a program has asked lately, by `test`, whether it has ended, while no other operation moved; and the
making and closing of meshes and of shared memory.
"""
import dataclasses
import pathlib
import sys
import threading
import time
import traceback

from mpipar.comm.collectives import Plan
from mpipar.comm.fingerprint import site
from mpipar.comm.group import Group
from mpipar.comm.pending import Pending

WAITING = {Group._run.__code__, Group._run_staged.__code__, Group._run_direct.__code__, Pending.wait.__code__}  # checked.py adds its own
_MAKING = {str(pathlib.Path(__file__).with_name(name)) for name in ("mesh.py", "group.py", "shared.py", "staging.py", "checked.py")}
_ELSEWHERE = Group("none")
_LATELY = 1.0           # seconds since the last `test`
_FRAMES = 25            # of a stack, the innermost


@dataclasses.dataclass
class Wait:
    """identity: the same as long as it is the same wait. main: of the main thread. pending: what is waited for, if any.
    """

    identity: tuple
    group: Group
    plan: object
    main: bool
    pending: object = None

    @property
    def peer(self):
        """The other rank of a send or receive, as a rank of the job; None for a collective operation."""
        return None if self.plan.peer is None else self.group.members[self.plan.peer]

    def __str__(self):
        return f"{self.plan.call or self.plan.operation}"


def waits(history=None):
    """The waits of all threads but this one."""
    me, main = threading.get_ident(), threading.main_thread().ident
    found = []
    for thread, frame in sys._current_frames().items():
        inner = frame
        while thread != me and frame is not None:
            if frame.f_code in WAITING:
                values = frame.f_locals
                owner = values["self"]
                if "plan" in values:
                    group, plan = owner, values["plan"]
                elif isinstance(owner, Group):
                    group, plan = owner, Plan(values["operation"], None)
                    plan.number = owner._calls[0]
                else:
                    group, plan = owner.group, owner.plan
                place = id(frame), group.key, plan.operation, plan.number, plan.peer
                identity = (thread, *place) if plan.call is None else (thread, plan.call.line)
                found.append(Wait(identity, group, plan, thread == main, None if owner is group else owner))
                break
            frame = frame.f_back
        if frame is None and history is not None and thread != me and inner.f_code.co_filename in _MAKING:
            plan = Plan(f"{inner.f_code.co_name} at {site(inner)}", None)
            found.append(Wait((thread, id(inner), inner.f_lasti), _ELSEWHERE, plan, False))
    if history is not None and not found:
        now = time.monotonic()
        found = [Wait((call.line, history.moved), call.group, call.plan, False)
                 for call in list(history.open.values()) if now - call.tested < _LATELY]
    return found


def stacks():
    """The stacks of all threads but this one and those of `threading` that are idle, as a text."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    me, main = threading.get_ident(), threading.main_thread().ident
    lines = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        if ident == me or names.get(ident, "").startswith("mpipar-guard"):
            continue
        lines.append(f"stack of {names.get(ident, ident)}:")
        frames = [entry for entry in traceback.extract_stack(frame) if not entry.filename.startswith("<frozen")]
        lines += "".join(traceback.format_list(frames[-_FRAMES:])).rstrip().split("\n")
    return "\n".join(lines)
