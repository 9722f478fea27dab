"""A measured run as a trace in Chrome's format, which ui.perfetto.dev opens."""

import json

from mpipar.parallel.pipeline.schedule import KINDS

_SECOND = 1e6       # the format counts microseconds


def chrome_trace(measured, *, title="pipeline"):
    """The trace of a `Measurement` as a dict that `json.dump` writes; a thread is a rank.

    Events of the category "compute" are the actions (`0F3`). Between them, from 0 to the makespan, lie events of
    the category "idle"; what a rank did there, waiting for a message or handing one over, lies inside these as
    "receive" and "send". So compute and idle of each rank add up to the makespan.
    """
    events = [{"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": title}}]
    for rank, (timeline, spans) in enumerate(zip(measured.timelines, measured.communication)):
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}})
        free = 0.0
        for action, start, end in timeline:
            if start > free:
                events.append(_event("idle", "idle", rank, free, start))
            arguments = {"stage": action.stage, "micro_batch": action.micro_batch, "kind": KINDS[action.kind]}
            events.append(_event(str(action), "compute", rank, start, end, arguments))
            free = end
        if measured.makespan > free:
            events.append(_event("idle", "idle", rank, free, measured.makespan))
        for what, action, start, end in spans:
            start, end = max(start, 0.0), min(end, measured.makespan)       # idle is counted from 0 to the makespan
            if end > start:
                events.append(_event(f"{what} {action}", what, rank, start, end))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(path, measured, **options):
    """`chrome_trace` into a file."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(chrome_trace(measured, **options), file)
        file.write("\n")


def _event(name, category, rank, start, end, arguments=None):
    event = {"ph": "X", "name": name, "cat": category, "pid": 0, "tid": rank,
             "ts": _SECOND * start, "dur": _SECOND * (end - start)}
    return event if arguments is None else {**event, "args": arguments}
