"""All operations of a group on one kind of input, for tests that compare two ways of carrying them out."""
import numpy as np

from mpipar.comm.buffers import split_sizes


def every_operation(group, n, *, start=False, exact=True):
    """{name: result} of all operations on arrays of n elements; start: by way of the forms that do not wait;
    exact: on multiples of 1/8, whose sums are the same in any order, else on random floats."""
    def call(name, *arguments, **options):
        if start:
            return getattr(group, name + "_start")(*arguments, **options).wait()
        return getattr(group, name)(*arguments, **options)

    def draw(*shape):
        x = np.random.default_rng([group.rank, n]).standard_normal(shape).astype("f4")
        return np.round(8 * x) / 8 + 0.0 if exact else x           # + 0.0: no negative zeros

    sizes, ranks, me = split_sizes(n, group.size), group.size, group.rank
    root = me == 0
    results = {}
    for op in ("sum", "mean", "min", "max"):
        results["all_reduce", op] = call("all_reduce", draw(n), op)
        results["reduce", op] = call("reduce", draw(n), ranks - 1, op)
        results["reduce_scatter", op] = call("reduce_scatter", draw(n * ranks), 0, op)
        results["reduce_scatter sizes", op] = call("reduce_scatter", draw(2, n), 1, op, sizes)
    results["broadcast"] = call("broadcast", draw(n), ranks - 1)
    results["all_gather"] = call("all_gather", draw(n))
    results["all_gather sizes"] = call("all_gather", draw(2, sizes[me]), 1, sizes)
    results["gather"] = call("gather", draw(n), ranks - 1)
    results["gather sizes"] = call("gather", draw(2, sizes[me]), 0, 1, sizes)
    results["scatter"] = call("scatter", draw(n * ranks) if root else None, shape=(n,), dtype="f4")
    results["scatter sizes"] = call(
        "scatter", draw(2, n) if root else None, 0, 1, sizes, shape=(2, sizes[me]), dtype="f4"
    )
    results["all_to_all"] = call("all_to_all", draw(n * ranks))
    results["all_to_all columns"] = call("all_to_all", draw(2, n * ranks), 1)
    rows = np.random.default_rng(n).multinomial(n, np.ones(ranks) / ranks, ranks)
    results["all_to_all_v"] = call("all_to_all_v", draw(n, 2), rows[me], rows[:, me])
    if ranks > 1:
        out, there = np.empty((n, 2), "f4").T, (me + 1) % ranks
        sent = group.send_start(draw(2, n), there)
        results["recv"] = call("recv", out, (me - 1) % ranks)
        sent.wait()
    return results


def different(one, two):
    """Names of the results that are not the same bits."""
    assert one.keys() == two.keys()
    return [
        name
        for name in one
        if (one[name] is None) != (two[name] is None)
        or one[name] is not None
        and (one[name].shape != two[name].shape or one[name].tobytes() != two[name].tobytes())
    ]
