"""What every layer promises, and the key under which a layer draws random numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpipar.nn.parameter import Parameter


@dataclass(frozen=True)
class SampleKeys:
    """Names the samples of a micro-batch, so that random masks do not depend on the layout.

    step: the training step. samples: int64 [B], each sample's row in the global batch.
    """

    step: int
    samples: np.ndarray


class Layer:
    """A differentiable function with parameters.

    `y, saved = forward(x, at)` computes; `saved` is everything that backward needs, so any number of micro-batches can
    be in flight. `dx = backward(saved, dy, later)` returns the gradient of x and ADDS the gradients of the parameters
    to their `grad`. `at` (SampleKeys) is None outside training: layers that draw random numbers are then the identity.
    If `later` is a list, weight gradients are not computed now: functions that do so are appended to it (what
    zero-bubble schedules need), and `dy` must then stay as it is until they have run.
    """

    def parameters(self) -> list[Parameter]:
        """The parameters of this layer and of the layers inside it, each once, in order of use."""
        found: list[Parameter] = []
        for value in vars(self).values():
            if isinstance(value, Parameter):
                found.append(value)
            elif isinstance(value, Layer):
                found.extend(value.parameters())
            elif isinstance(value, (list, tuple)):
                for layer in value:
                    if isinstance(layer, Layer):
                        found.extend(layer.parameters())
        return list(dict.fromkeys(found))


def run_or_defer(work, later: list | None) -> None:
    """Compute a weight gradient now, or leave it to whoever empties `later`."""
    if later is None:
        work()
    else:
        later.append(work)
