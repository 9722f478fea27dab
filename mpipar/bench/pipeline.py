"""`python -m mpipar.bench pipeline`: the bubble of every schedule, measured, beside the formula and the simulator.

    mpirun -np 8 python -m mpipar.bench pipeline --stages 4,8 --micro-batches 2,8,32     # a rank is a stage
    python -m mpipar.bench pipeline --stages 4,8,16                                      # a thread is a stage

The stages sleep instead of computing (lecture 2, section 3.3), so that many of them run on few cores. All else is real:
schedules, messages, mailboxes. With fewer stages than ranks several equal pipelines run side by side, and the first is
measured.

A bubble has two definitions (lecture 2, sections 2.4 and 4.3), and both are printed: idle time as a share of the wall time
("bubble"), and relative to the ideal compute time ("of ideal"). Ratios of bubbles differ between the two: with F = I = W
(--backward 2), P=4 and M=8 ZB-H1 idles for a third as long as 1F1B, so has 1/3 of its bubble by the second definition, the
published one, but 11/27 = 0.407 by the first, because its wall time is shorter too. "of 1f1b's" compares idle times.
"""

from __future__ import annotations

import statistics

import numpy as np

from mpipar.bench.report import conditions, integers, print_conditions, print_table, write_json
from mpipar.comm.mesh import Mesh
from mpipar.engine.metrics import check_writable
from mpipar.parallel.pipeline.mailbox import GroupMailbox
from mpipar.parallel.pipeline.measure import gather, measurement
from mpipar.parallel.pipeline.messages import with_messages
from mpipar.parallel.pipeline.picture import needs_matplotlib
from mpipar.parallel.pipeline.run import run as run_program
from mpipar.parallel.pipeline.schedule import SCHEDULES, SEVERAL_CHUNKS, build
from mpipar.parallel.pipeline.simulate import bubble_formula, gantt, simulate
from mpipar.parallel.pipeline.sleeping import SleepingStage, stage_costs
from mpipar.parallel.pipeline.threaded import run_threads


def add_arguments(parser):
    parser.add_argument("--schedules", default=",".join(SCHEDULES), help="names divided by commas [default: all]")
    parser.add_argument("--stages", help="ranks of a pipeline [default: all that mpirun started, else 4]")
    parser.add_argument("--micro-batches", default="2,8", help="[default: 2,8]")
    parser.add_argument("--virtual-stages", type=int, default=2, help="chunks a rank of interleaved [default: 2]")
    parser.add_argument("--stage-delay", type=float, default=20.0, metavar="MS",
                        help="milliseconds that the forward of a rank lasts [default: 20]")
    parser.add_argument("--backward", type=float, default=1.0, metavar="RATIO",
                        help="how much longer a backward lasts; 2 makes F = I = W [default: 1]")
    parser.add_argument("--runs", type=int, default=3, help="[default: 3]")
    parser.add_argument("--gantt", action="store_true", help="show each measured timeline")
    parser.add_argument("--json", metavar="FILE", help="also write everything to FILE")
    parser.add_argument("--plot", metavar="FILE", help="draw bubble against micro-batches; needs mpipar[plot]")


def run(arguments):
    """Measure every schedule at every number of stages and micro-batches, and print the table."""
    names = check_arguments(arguments)
    world = Mesh()
    counts = integers("--stages", arguments.stages or str(world.size if world.size > 1 else 4))
    if world.size > 1 and any(world.size % stages for stages in counts):
        valid = [n for n in range(1, world.size + 1) if world.size % n == 0]
        raise ValueError(f"--stages {arguments.stages}: with {world.size} ranks it can be {valid}")
    report = {**conditions(np.float32, arguments.runs), "stages_are": "ranks" if world.size > 1 else "threads",
              "stage_delay_s": arguments.stage_delay / 1e3, "backward": arguments.backward, "results": []}
    if world.is_root:
        print_conditions(report)
    for stages in counts:
        mesh = Mesh(pp=stages) if world.size > 1 else world
        for micros in integers("--micro-batches", arguments.micro_batches):
            for name in names:
                row = measure(name, stages, micros, arguments, mesh)
                if world.is_root:
                    report["results"].append(row)
                    print(f"{name}, {stages} stages, {micros} micro-batches: bubble {row['bubble']:.3f}", flush=True)
                    if arguments.gantt:
                        print(row.pop("gantt"))
    if not world.is_root:
        return
    against_1f1b(report["results"])
    print_table([
        ("schedule", "", lambda row: row["schedule"]), ("stages", "d", lambda row: row["stages"]),
        ("micro-batches", "d", lambda row: row["micro_batches"]), ("bubble", ".3f", lambda row: row["bubble"]),
        ("least..most", "", lambda row: "{:.3f}..{:.3f}".format(min(row["bubbles"]), max(row["bubbles"]))),
        ("formula", "", lambda row: optional(row["formula"])),
        ("simulated", ".3f", lambda row: row["simulated"]), ("of ideal", ".3f", lambda row: row["bubble_of_ideal"]),
        ("simulated", ".3f", lambda row: row["simulated_of_ideal"]), ("of 1f1b's", "", lambda row: optional(row["of_1f1b"])),
        ("simulated", "", lambda row: optional(row["simulated_of_1f1b"])), ("used/simulated", ".3f", lambda row: row["utilisation_ratio"]),
        ("makespan ms", ".1f", lambda row: 1e3 * row["makespan_s"]),
        ("live", "", lambda row: "+".join(map(str, row["live"]))),
    ], report["results"])
    write_json(report, arguments.json)
    if arguments.plot:
        plot(report["results"], arguments.plot)


def check_arguments(arguments) -> list[str]:
    """The names of the schedules; ValueError for what can't be meant."""
    names = arguments.schedules.split(",")
    for name in names:
        if name not in SCHEDULES:
            raise ValueError(f"--schedules {name!r} does not exist; valid: {', '.join(SCHEDULES)}")
    if min(arguments.stage_delay, arguments.backward) <= 0 or arguments.runs < 1 or arguments.virtual_stages < 2:
        raise ValueError("--stage-delay and --backward must be above 0, --runs at least 1, --virtual-stages at least 2")
    check_writable(arguments.json)
    check_writable(arguments.plot)
    if arguments.plot:
        needs_matplotlib()
    return names


def measure(name, stages, micros, arguments, mesh) -> dict | None:
    """One row of the table, on the mesh's first rank; without other ranks the stages are threads."""
    chunks = (2 if name == "zb-v" else arguments.virtual_stages) if name in SEVERAL_CHUNKS else 1
    plan = build(name, stages, micros, chunks)
    costs, last = stage_costs(arguments.stage_delay / 1e3, chunks, arguments.backward), stages * chunks - 1
    sleeping = {stage: SleepingStage(stage, costs, last=stage == last) for stage in range(last + 1)}
    found = []
    for _ in range(arguments.runs):
        if mesh.size == 1:
            found.append(measurement(run_threads(plan, sleeping, range(micros))))
            continue
        program = with_messages(plan)[mesh.pp.rank]
        own = {stage: sleeping[stage] for stage in program.own_stages}
        mailbox = GroupMailbox(mesh.pp, program.stages, patient=True)
        mesh.world.barrier_start().wait(pause=1e-3)
        found.append(gather(run_program(program, own, range(micros), mailbox), mesh.pp))
    if found[0] is None:
        return None
    found.sort(key=lambda measured: measured.bubble)
    middle = found[len(found) // 2]
    predicted, used = simulate(plan, costs), [measured.utilisations(plan) for measured in found]
    row = {"schedule": name, "stages": stages, "micro_batches": micros, "chunks": chunks,
           "backward": arguments.backward,
           "bubble": statistics.median(measured.bubble for measured in found), "bubbles": [m.bubble for m in found],
           "formula": formula(name, stages, micros, chunks), "simulated": float(predicted.bubble),
           "bubble_of_ideal": statistics.median(measured.bubble_of_ideal for measured in found),
           "simulated_of_ideal": float(predicted.bubble_of_ideal),
           "utilisation": statistics.median(one["measured"] for one in used),
           "utilisation_simulated": statistics.median(one["simulated"] for one in used),  # with the measured costs
           "utilisation_ratio": statistics.median(one["measured"] / one["simulated"] for one in used),
           "makespan_s": middle.makespan, "live": middle.peak_live}
    return {**row, "gantt": gantt(middle.timelines)} if arguments.gantt else row


def against_1f1b(rows) -> None:
    """Add to each row its bubble over 1F1B's, both relative to ideal compute, measured and simulated; None without 1F1B."""
    plain = {(row["stages"], row["micro_batches"]): row for row in rows if row["schedule"] == "1f1b"}
    for row in rows:
        other = plain.get((row["stages"], row["micro_batches"]))
        for name, which in (("of_1f1b", "bubble_of_ideal"), ("simulated_of_1f1b", "simulated_of_ideal")):
            row[name] = row[which] / other[which] if other and other[which] else None


def optional(number) -> str:
    """A number of the table, empty where there is none."""
    return "" if number is None else f"{number:.3f}"


def simulated(row, micros) -> float:
    """The simulated bubble of a row's schedule for another number of micro-batches."""
    plan = build(row["schedule"], row["stages"], micros, row["chunks"])
    return float(simulate(plan, stage_costs(1.0, row["chunks"], row["backward"])).bubble)


def formula(name, stages, micros, chunks) -> float | None:
    """The closed form of the bubble as a share of the whole time, if there is one for any costs of equal stages."""
    if name == "naive":
        return 1 - 1 / stages
    if name in ("gpipe", "1f1b", "eager-1f1b") or name == "interleaved" and micros % stages == 0:
        return bubble_formula(stages, micros, chunks)
    return None


def plot(rows, path):
    """Bubble against micro-batches, a panel for each number of stages: points measured, lines simulated, the formula."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    counts = sorted({row["stages"] for row in rows})
    figure = Figure(figsize=(6.5 * len(counts), 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(counts), sharey=True, squeeze=False)[0]
    names = list(dict.fromkeys(row["schedule"] for row in rows))
    for axis, stages in zip(axes, counts):
        for number, name in enumerate(names):
            mine = [row for row in rows if (row["stages"], row["schedule"]) == (stages, name)]
            mine.sort(key=lambda row: row["micro_batches"])
            micros = [row["micro_batches"] for row in mine]
            between = sorted({round(m) for m in np.geomspace(micros[0], micros[-1], 16)})
            axis.plot(between, [simulated(mine[0], m) for m in between], color=f"C{number}", linewidth=1)
            axis.plot(micros, [row["bubble"] for row in mine], "o", color=f"C{number}", label=name, alpha=0.8)
        every = range(min(row["micro_batches"] for row in rows), max(row["micro_batches"] for row in rows) + 1)
        axis.plot(every, [bubble_formula(stages, m) for m in every], "k--", linewidth=1, label="(P-1)/(M+P-1)")
        axis.set(title=f"P = {stages} stages", xlabel="micro-batches M", ylim=(0, 1))
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted({row["micro_batches"] for row in rows}), sorted({row["micro_batches"] for row in rows}))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("bubble: idle share of the whole time")
    axes[-1].legend(title="points measured, lines simulated", frameon=False)
    figure.savefig(path, dpi=120)
