"""A pipeline of threads (lecture 2, section 3.3):  python examples/threaded_pipeline.py [M] [P] [MS] [SCHEDULE]

P stages are P threads with mailboxes that wait on condition variables; a stage sleeps MS milliseconds for a forward and
as long for a backward. The schedule, the program with its sends and receives, the executor and the mailbox's interface
are those of the engine that runs over MPI: only the mailbox is another. Without M and P: the lecture's three lines.
"""

import sys

from mpipar.comm import launcher
from mpipar.parallel.pipeline.measure import measurement
from mpipar.parallel.pipeline.schedule import SEVERAL_CHUNKS, build
from mpipar.parallel.pipeline.simulate import bubble_formula, gantt, simulate
from mpipar.parallel.pipeline.sleeping import SleepingStage, stage_costs
from mpipar.parallel.pipeline.threaded import run_threads


def main(micro_batches=None, stages=None, milliseconds=10.0, schedule="gpipe"):
    cases = [(8, 4), (16, 8), (64, 16)] if micro_batches is None else [(int(micro_batches), int(stages or 4))]
    for m, p in cases:
        run_case(m, p, float(milliseconds), schedule)


def run_case(m, p, milliseconds, schedule):
    """Run m micro-batches through p threads and print what was measured beside both formulas."""
    chunks = 2 if schedule in SEVERAL_CHUNKS else 1
    plan = build(schedule, p, m, chunks)
    costs, last = stage_costs(milliseconds / 1e3, chunks), p * chunks - 1
    sleeping = {stage: SleepingStage(stage, costs, last=stage == last) for stage in range(p * chunks)}
    measured = measurement(run_threads(plan, sleeping, range(m)))
    predicted = simulate(plan, stage_costs(milliseconds, chunks))
    print(f"m={m} p={p} tf=tb={milliseconds:g}ms {schedule}")
    print(f"  total time       {1e3 * measured.makespan:8.1f} ms measured, {predicted.makespan:8.1f} ms predicted")
    print(f"  busy, one stage  {1e3 * max(measured.busy):8.1f} ms measured, {max(predicted.busy):8.1f} ms predicted")
    print(f"  bubble, of the whole time   {measured.bubble:6.1%} measured, {predicted.bubble:6.1%} predicted, "
          f"(p-1)/(m+p-1) = {bubble_formula(p, m):.1%}")
    print(f"  bubble, of ideal compute    {measured.bubble_of_ideal:6.1%} measured, "
          f"{predicted.bubble_of_ideal:6.1%} predicted, (p-1)/m = {bubble_formula(p, m, of='ideal'):.1%}")
    print(f"  utilisation                 {measured.utilisation:6.1%} measured, {predicted.utilisation:6.1%} predicted")
    if len(plan) <= 4:
        print(gantt(measured.timelines))


if launcher.rank() == 0:  # under mpirun one process is enough: the stages are its threads
    main(*sys.argv[1:])
