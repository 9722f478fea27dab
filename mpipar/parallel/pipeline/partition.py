"""The division of a model's layers over pipeline stages, by count or by cost."""

from itertools import accumulate


def split_layers(layers, stages, explicit=None):
    """How many layers each stage gets: as even as possible, the first stages taking one more (7 over 2: 4+3).

    explicit: a list of one count a stage that is taken instead. Raises ValueError, with the valid values, if
    a stage would be left without a layer or `explicit` does not add up.
    """
    if stages < 1:
        raise ValueError(f"{stages} stages; valid: at least 1")
    if layers < stages:
        raise ValueError(f"{layers} layers do not fill {stages} pipeline stages; "
                         f"valid: at least one layer a stage")
    if explicit is None:
        share, rest = divmod(layers, stages)
        return [share + (stage < rest) for stage in range(stages)]
    counts = list(explicit)
    fit = all(isinstance(count, int) and count >= 1 for count in counts)
    if not fit or len(counts) != stages or sum(counts) != layers:
        raise ValueError(f"layers per stage {_text(counts)}; valid: {stages} counts of at least 1 that "
                         f"add up to {layers}, such as {_text(split_layers(layers, stages))}")
    return counts


def even_costs(costs, stages, front=0.0, back=0.0):
    """How many layers each stage gets so that the most expensive stage costs least, and the others are as even as
    that allows.

    costs: of each layer. front, back: what the first and the last stage have to carry besides. ValueError if a stage
    would be left without a layer.
    """
    split_layers(len(costs), stages)                # refuses what does not fit
    until = [0.0, *accumulate(costs)]
    # best[n]: (dearest stage, sum of squares, counts) of the first n layers on the stages so far
    best = {0: (0.0, 0.0, [])}
    for stage in range(stages):
        extra = front * (stage == 0) + back * (stage == stages - 1)
        longer = {}
        for end in range(stage + 1, len(costs) - (stages - 1 - stage) + 1):
            options = []
            for start, (dearest, squares, counts) in best.items():
                if start < end:
                    cost = until[end] - until[start] + extra
                    options.append((max(dearest, cost), squares + cost * cost, [*counts, end - start]))
            longer[end] = min(options)
        best = longer
    return best[len(costs)][2]


def stage_layers(layers, stages, explicit=None):
    """The layers of each stage as ranges, in order, every layer once; arguments as in `split_layers`."""
    counts = split_layers(layers, stages, explicit)
    ends = list(accumulate(counts))
    return [range(end - count, end) for end, count in zip(ends, counts)]


def _text(counts):
    return "+".join(map(str, counts))
