"""A pipeline of threads of this process, whose mailboxes wait on a condition variable. No MPI.

The teaching model of lecture 2, section 3.3, with the schedules, programs and executor of the real engine.
"""

import threading

from mpipar.parallel.pipeline.mailbox import Exchange
from mpipar.parallel.pipeline.messages import with_messages
from mpipar.parallel.pipeline.run import run


def run_threads(plan, chunks, micro_batches, *, timeout=60.0, before=None, after=None):
    """Execute a whole plan, one thread a rank; returns the RunResult of each rank.

    chunks: {stage: chunk} for all stages. timeout: seconds a thread waits for one message. The rest as in
    `run.run`. The first exception of any thread is raised here, after all threads have ended.
    """
    programs = with_messages(plan)
    exchange = Exchange(len(programs), timeout)
    results = [None] * len(programs)
    errors = []

    def work(rank):
        own = {stage: chunks[stage] for stage in programs[rank].own_stages}
        try:
            results[rank] = run(programs[rank], own, micro_batches, exchange.mailboxes[rank],
                                before=before, after=after)
        except BaseException as error:
            errors.append(error)
            exchange.fail(error)

    threads = [threading.Thread(target=work, args=(rank,), name=f"rank {rank}")
               for rank in range(len(programs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
