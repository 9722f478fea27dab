"""A picture of a run, predicted above measured. Needs matplotlib (`pip install 'mpipar[plot]'`)."""

import importlib.util

COLOURS = {"F": "#4c78a8", "B": "#f2a65a", "I": "#f2a65a", "W": "#72b27a"}
NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
_IDLE = "#eeeeee"


def has_matplotlib():
    """Whether pictures can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def needs_matplotlib():
    """ValueError that says what to install where there is no matplotlib."""
    if not has_matplotlib():
        raise ValueError("a picture needs matplotlib: pip install 'mpipar[plot]'")


def draw(path, predicted, measured, *, title="", scale=1e3, unit="ms"):
    """Write a picture (PNG, PDF or SVG by the name) of two `Timelines` on one time axis, predicted above measured.

    A bar is an action with the number of its micro-batch, where that fits; later chunks of a rank are darker. scale:
    from the unit of the timelines to the unit shown. ImportError where there is no matplotlib.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks, end = len(measured.timelines), scale * max(predicted.makespan, measured.makespan)
    height = 0.42 * ranks + 1.0
    figure = Figure(figsize=(16, 2 * height + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 1, sharex=True)
    width = 16 * 72 * 0.93      # points along the time axis
    for axis, timelines, what in zip(axes, (predicted, measured), ("predicted", "measured")):
        _draw_ranks(axis, timelines.timelines, scale, scale * timelines.makespan, width / end)
        heading = f"{what}: {scale * timelines.makespan:.4g} {unit}, bubble {timelines.bubble:.1%}"
        axis.set_title(heading, loc="left", fontsize=11)
        axis.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
        axis.set_ylim(ranks - 0.5, -0.5)
        axis.set_xlim(0, end)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
    axes[1].set_xlabel(unit)
    kinds = [kind for kind in "FBIW" if any(a.kind == kind for timeline in measured.timelines for a, _, _ in timeline)]
    handles = [Patch(color=COLOURS[kind], label=NAMES[kind]) for kind in kinds] + [Patch(color=_IDLE, label="idle")]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), frameon=False)
    if any(len({action.stage for action, _, _ in timeline}) > 1 for timeline in measured.timelines):
        title += "   (darker: later stage of a rank)"
    figure.suptitle(title, x=0.01, ha="left")
    figure.savefig(path, dpi=120)


def _draw_ranks(axis, timelines, scale, makespan, points):
    """Bars of all ranks; points: length of one unit of time on the axis."""
    for rank, timeline in enumerate(timelines):
        chunks = sorted({action.stage for action, _, _ in timeline})
        axis.barh(rank, makespan, height=0.84, color=_IDLE)
        for action, start, end in timeline:
            left, length = scale * start, scale * (end - start)
            shade = 1 - 0.3 * chunks.index(action.stage) / max(len(chunks) - 1, 1)
            axis.barh(rank, length, left=left, height=0.84, color=_shaded(COLOURS[action.kind], shade),
                      edgecolor="white", linewidth=0.6 if points * length > 6 else 0.2)
            text = str(action.micro_batch)
            size = min(9.0, points * length / (0.75 * len(text)))
            if size >= 4.5:
                axis.text(left + length / 2, rank, text, ha="center", va="center", color="white", fontsize=size)


def _shaded(colour, shade):
    return tuple(shade * int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
