"""The watcher: a thread that looks whether this rank waits for one that has left."""
import sys
import threading
import time

from mpipar.comm.group import Group
from mpipar.comm.notices import LEFT
from mpipar.comm.pending import Pending

_WAITING = {Group._run.__code__: Group, Pending.wait.__code__: Pending}


def watch(notices, closing, look, patience, end_job):
    """Look every `look` seconds until `closing` is set; call end_job(code, text) where a wait can never end.

    A collective never ends for want of a rank that has left with fewer calls in that group. A send or receive
    is given up when its partner left and it has not moved for `patience` seconds.
    """
    since = {}
    while not closing.wait(look):
        left = {rank: notice for rank, notice in notices.collect().items() if notice.kind == LEFT}
        if not left:
            continue
        now = time.monotonic()
        waits = list(_waits())
        since = {wait: since.get(wait, now) for wait in waits}
        for wait in waits:
            _, group, operation, number, peer = wait
            if peer is None:
                missing = [rank for rank in sorted(left) if left[rank].calls.get(group.key, number) < number]
            else:
                missing = [peer] if peer in left and now - since[wait] > patience else []
            if missing:
                code = left[missing[0]].code
                end_job(
                    code or 1,
                    f"waits in {operation} of group {group.name} for rank {', '.join(map(str, missing))}, "
                    "which left the program early" + (f" with exit code {code}" if code else ""),
                )


def _waits():
    """What the threads of this process are waiting for: (thread and frame, group, operation, number of call,
    peer)."""
    me = threading.get_ident()
    for thread, frame in sys._current_frames().items():
        while thread != me and frame is not None:
            if frame.f_code in _WAITING:
                values = frame.f_locals
                owner = values["self"]
                group, plan = (
                    (owner, values["plan"]) if isinstance(owner, Group) else (owner.group, owner.plan)
                )
                peer = None if plan.peer is None else group.members[plan.peer]
                yield (thread, id(frame)), group, plan.operation, plan.number, peer
                break
            frame = frame.f_back
