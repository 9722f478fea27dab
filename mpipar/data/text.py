"""Text as bytes: the built-in one needs no download, any file will do."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def load_text(source: str) -> np.ndarray:
    """The bytes of a text as uint8: "builtin" (the topics of Python's own documentation) or the path of a file.

    ValueError if there is no such file, it can't be read, or it is empty.
    """
    if source == "builtin":
        from pydoc_data import topics

        text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
        return np.frombuffer(text.encode(), np.uint8)
    try:
        tokens = np.fromfile(Path(source), np.uint8)
    except OSError as error:
        raise ValueError(
            f"data {source!r} can't be read ({error.strerror}): give 'builtin', 'random' or the path of a text file"
        ) from None
    if tokens.size == 0:
        raise ValueError(f"data {source!r} is empty")
    return tokens


def split_text(tokens: np.ndarray, held_out: float) -> tuple[np.ndarray, np.ndarray]:
    """(training part, held-out tail): the last `held_out` share of a text is kept for evaluation."""
    if not 0 <= held_out < 1:
        raise ValueError(f"held-out share {held_out} is not valid: it must lie in [0, 1)")
    cut = len(tokens) - int(len(tokens) * held_out)
    return tokens[:cut], tokens[cut:]
