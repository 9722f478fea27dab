"""The watcher: a thread that looks whether this rank waits for one that has left."""
import time

from mpipar.comm.notices import LEFT
from mpipar.comm.waits import waits


def watch(notices, closing, look, patience, end_job, watchdog=None):
    """Look every `look` seconds until `closing` is set; call end_job(code, text) where a wait can never end.

    A collective never ends for want of a rank that has left with fewer calls in that group. A send or receive
    is given up when its partner left and it has not moved for `patience` seconds. watchdog: looks too, if there is one.
    """
    since = {}
    while not closing.wait(look):
        left = {rank: notice for rank, notice in notices.collect().items() if notice.kind == LEFT}
        if watchdog is not None:
            watchdog.step()
        if not left:
            continue
        now = time.monotonic()
        found = waits()
        since = {wait.identity: since.get(wait.identity, now) for wait in found}
        for wait in found:
            plan, group, peer = wait.plan, wait.group, wait.peer
            if peer is None:
                missing = [rank for rank in sorted(left) if left[rank].calls.get(group.key, plan.number) < plan.number]
            else:
                missing = [peer] if peer in left and now - since[wait.identity] > patience else []
            if missing:
                code = left[missing[0]].code
                end_job(
                    code or 1,
                    f"waits in {wait} of group {group.name} for rank {', '.join(map(str, missing))}, "
                    "which left the program early" + (f" with exit code {code}" if code else ""),
                )
