"""Where batches come from: text as bytes, random numbers, arrays. No MPI and no kernels.

A source answers `batch(step)` with the GLOBAL batch of that step, a pure function of (seed, step): the same samples
whatever the layout. Each replica then takes its rows; nothing that is not asked for is made. Iterating a source gives
batch(1), batch(2), ... for ever.
"""

from mpipar.data.batch import Batch
from mpipar.data.sources import Arrays, RandomTokens, RandomVectors, TextVectors, TextWindows
from mpipar.data.text import load_text, split_text

__all__ = ["Arrays", "Batch", "RandomTokens", "RandomVectors", "TextVectors", "TextWindows", "load_text", "split_text", "text"]


def text(source: str = "builtin", *, seq: int, global_batch: int, seed: int = 0, held_out: float = 0.0) -> TextWindows:
    """Windows of `seq` + 1 bytes of a text: "builtin" or the path of a file. See TextWindows."""
    tokens, _ = split_text(load_text(source), held_out)
    return TextWindows(tokens, seq=seq, global_batch=global_batch, seed=seed)
