"""The collective operations of lecture 1 (section 1.2) with its numbers, each before and after.

    mpirun -np 4 python examples/collectives.py

With 4 ranks these are the lecture's own numbers; any other number of ranks gives the like.
"""
import numpy as np

from mpipar.comm import Mesh

world = Mesh().world
rank, P = world.rank, world.size
row = np.arange(P, dtype=np.float64)            # 0, 1, ..., P-1: the lecture's tensor


def show(title, before, after, expected):
    """Check this rank's result; rank 0 prints what every rank had and has."""
    if expected is None:
        assert after is None, f"{title} on rank {rank}: {after}, nothing was expected"
    else:
        np.testing.assert_array_equal(after, expected, f"{title} on rank {rank}")
    befores, afters = collect(before), collect(after)
    if rank == 0:
        print(f"\n{title}")
        for r in range(P):
            print(f"  rank {r}: {text(befores[r]):>18}  ->  {text(afters[r])}")


def collect(array):
    """Every rank's array, on rank 0. None is sent as no elements."""
    array = np.zeros(0) if array is None else array
    sizes = world.all_gather(np.array([array.size]))
    together = world.gather(array, sizes=sizes)
    return None if together is None else np.split(together, np.cumsum(sizes)[:-1])


def text(array):
    return "[" + " ".join(f"{x:g}" for x in array) + "]" if array.size else "-"


mine = row[rank:rank + 1]                       # rank r has [r]
x = row.copy() if rank == 0 else np.zeros(P)
before = x.copy()
show("broadcast: rank 0's array to all", before, world.broadcast(x), row)

x = row if rank == 0 else None
show("scatter: rank 0's array in pieces", x, world.scatter(x, shape=(1,), dtype=row.dtype), mine)
show("gather: the reverse", mine, world.gather(mine), row if rank == 0 else None)
show("reduce: the sum, on rank 0", mine, world.reduce(mine), [P * (P - 1) / 2] if rank == 0 else None)
show("all-gather: gather, on every rank", mine, world.all_gather(mine), row)

x = row + rank                                  # rank r has r, r+1, ...
total = P * row + P * (P - 1) / 2               # 6 10 14 18 for 4 ranks
show("reduce-scatter: the sum, in pieces", x, world.reduce_scatter(x), total[rank:rank + 1])
show("all-reduce: the sum, on every rank", x, world.all_reduce(x.copy()), total)
show("all-gather(reduce-scatter) = all-reduce", x, world.all_gather(world.reduce_scatter(x)), total)

x = row + P * rank                              # rank r has r*P, r*P+1, ...
show("all-to-all: piece i to rank i", x, world.all_to_all(x), P * row + rank)

if rank == 0:
    print(f"\nall values are right on {P} rank{'s' * (P > 1)}")
