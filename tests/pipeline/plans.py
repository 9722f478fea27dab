"""Which numbers of chunks the schedules take, for tests over all of them."""

from mpipar.parallel.pipeline.schedule import ONE_CHUNK, SCHEDULES, SEVERAL_CHUNKS


def chunk_counts(name, most=4):
    """The numbers of chunks, up to `most`, that a schedule takes."""
    if name == "zb-v":
        return [2]
    return [1] if name in ONE_CHUNK else list(range(2 if name in SEVERAL_CHUNKS else 1, most + 1))


PLANS = [(name, chunk_counts(name)[0]) for name in SCHEDULES]
