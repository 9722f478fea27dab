"""`python -m mpipar.bench.material FOLDER STEPS OPTIONS`: what another program needs to train the same model on the same batches.

Writes into FOLDER every parameter's initial value (NAME.npy, the whole tensor), the batches of all steps (inputs.npy
[steps, B, ...], targets.npy where there are targets) and recipe.json: the learning rate of each step, the optimizer's
numbers, and the largest norm.
"""

import json
import sys
from pathlib import Path

import numpy as np

from mpipar.comm.mesh import Mesh
from mpipar.commands.config import parse
from mpipar.commands.train import build_model, sources
from mpipar.engine.learning_rate import Cosine
from mpipar.kernels.dtypes import as_dtype


def write(folder, steps: int, options: list[str]) -> None:
    """Write the files for `steps` steps of a run with these options of mpipar.train, for any layout."""
    folder = Path(folder)
    config = parse(options).resolved(1)
    for parameter in build_model(config, Mesh.serial()).catalogue:
        array = np.empty(parameter.global_shape, as_dtype(config.dtype))
        whole = tuple(slice(0, n) for n in parameter.global_shape)
        parameter.initial.fill(array, whole, parameter.global_shape, config.seed, parameter.name)
        np.save(folder / f"{parameter.name}.npy", array)
    source = sources(config)[0]
    batches = [source.batch(step).fetch(0, config.global_batch) for step in range(1, steps + 1)]
    np.save(folder / "inputs.npy", np.stack([inputs for inputs, _ in batches]))
    if batches[0][1] is not None:
        np.save(folder / "targets.npy", np.stack([targets for _, targets in batches]))
    rate = Cosine(config.lr, config.warmup, config.steps, config.lr_min)
    recipe = {"lr": [rate(step) for step in range(1, steps + 1)], "betas": [config.beta1, config.beta2],
              "weight_decay": config.weight_decay, "clip": config.clip}
    (folder / "recipe.json").write_text(json.dumps(recipe) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
