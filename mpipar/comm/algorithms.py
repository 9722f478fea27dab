"""All-reduce written out over sends and receives: what an MPI library does inside, to read and to measure.

    name                 steps              bytes that the busiest rank sends (S: the array, P: ranks)
    ring                 2 (P-1)            2 (P-1)/P S      P parts go round twice: summed, then handed on
    recursive_doubling   log2 P             S log2 P         partners at distance 1, 2, 4, ... exchange everything
    recursive_halving    2 log2 P           2 (P-1)/P S      halves are summed, then put together again
    tree                 2 ceil(log2 P)     S ceil(log2 P)   sums go to rank 0, the result comes back
    two_calls            -                  2 (P-1)/P S      the group's own reduce_scatter and all_gather

The second and third need P a power of two. Each sums a 1-D array in place on every rank and returns it. Steps are rounds
in which a rank sends once and receives once (tree: one of the two). Sources: lecture 1, sections 1.2 and 1.5; Thakur,
Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
"""

import math

import numpy as np

from mpipar.comm.buffers import split_sizes


def ring(group, x):
    """In round s a rank sends part (rank - s) on to its right; a part has met every rank after P - 1 rounds."""
    parts, P, rank = _parts(x, group.size), group.size, group.rank
    right, left = (rank + 1) % P, (rank - 1) % P
    spare = np.empty_like(parts[0])
    for s in range(P - 1):
        out, into = parts[(rank - s) % P], parts[(rank - s - 1) % P]
        into += _exchange(group, out, right, spare[: into.size], left)
    for s in range(P - 1):
        _exchange(group, parts[(rank + 1 - s) % P], right, parts[(rank - s) % P], left)
    return x


def recursive_doubling(group, x):
    """After round i a rank has the sum over the 2^(i+1) ranks that differ from it in the last i + 1 bits."""
    _check_power_of_two(group)
    spare, distance = np.empty_like(x), 1
    while distance < group.size:
        partner = group.rank ^ distance
        received = _exchange(group, x, partner, spare, partner)
        # The lower rank's sum first: partners then add the same numbers in the same order.
        np.add(x, received, out=x) if group.rank < partner else np.add(received, x, out=x)
        distance *= 2
    return x


def recursive_halving(group, x):
    """The range of parts that a rank sums is halved in each round; the way back doubles what it has."""
    _check_power_of_two(group)
    parts, P, rank = _parts(x, group.size), group.size, group.rank
    starts = np.cumsum([0, *(part.size for part in parts)])
    spare, lo, hi, way = np.empty_like(x), 0, P, []
    while hi - lo > 1:
        middle, distance = (lo + hi) // 2, (hi - lo) // 2
        partner = rank ^ distance
        mine, other = ((lo, middle), (middle, hi)) if rank < middle else ((middle, hi), (lo, middle))
        kept, given = (x[starts[a] : starts[b]] for a, b in (mine, other))
        kept += _exchange(group, given, partner, spare[: kept.size], partner)
        way.append((partner, kept, given))
        lo, hi = mine
    for partner, kept, given in reversed(way):
        _exchange(group, kept, partner, given, partner)
    return x


def tree(group, x):
    """A binomial tree: in round i every rank whose last i + 1 bits are 10..0 gives its sum to the rank without that bit."""
    P, rank, distance = group.size, group.rank, 1
    spare = np.empty_like(x)
    while distance < P and not rank & distance:
        if rank + distance < P:
            x += group.recv(spare, rank + distance)
        distance *= 2
    if rank:
        group.send(x, rank - distance)
        group.recv(x, rank - distance)
    while distance > 1:
        distance //= 2
        if rank + distance < P:
            group.send(x, rank + distance)
    return x


def two_calls(group, x):
    """reduce_scatter, then all_gather, by the group's own back end."""
    sizes = split_sizes(x.size, group.size)
    part = group.reduce_scatter(x, sizes=sizes)
    return group.all_gather(part, sizes=sizes, out=x)


ALGORITHMS = {f.__name__: f for f in (ring, recursive_doubling, recursive_halving, tree, two_calls)}


def predicted(name: str, ranks: int, size: int) -> tuple[int | None, float]:
    """(steps, bytes that the busiest rank sends) of one all-reduce of `size` bytes, as in the table above."""
    if name not in ALGORITHMS:
        raise ValueError(f"algorithm {name!r}; valid values: {', '.join(ALGORITHMS)}")
    rounds = math.ceil(math.log2(ranks)) if ranks > 1 else 0
    whole = 2 * (ranks - 1) / ranks * size
    return {"ring": (2 * (ranks - 1), whole), "recursive_doubling": (rounds, rounds * size),
            "recursive_halving": (2 * rounds, whole), "tree": (2 * rounds, rounds * size), "two_calls": (None, whole)}[name]


def fits(name: str, ranks: int) -> bool:
    """Whether an algorithm works on that many ranks."""
    return name not in ("recursive_doubling", "recursive_halving") or ranks & (ranks - 1) == 0


def _check_power_of_two(group):
    if group.size & (group.size - 1):
        raise ValueError(f"{group.size} ranks: this algorithm needs a power of two; ring, tree and two_calls take any number")


def _parts(x, count):
    """P nearly equal parts of x, the longest first."""
    ends = np.cumsum([0, *split_sizes(x.size, count)])
    return [x[start:stop] for start, stop in zip(ends, ends[1:])]


def _exchange(group, out, to, into, source):
    """Send and receive at the same time: both are started before either is waited for."""
    receiving, sending = group.recv_start(into, source), group.send_start(out, to)
    receiving.wait()
    sending.wait()
    return into
