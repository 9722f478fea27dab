"""mpipar: distributed training for people without GPUs. MPI carries the messages, Numba compiles the arithmetic.

Importing this package starts neither: names are looked up when they are first used.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOMES = {
    "AdamW": "mpipar.engine.optimizer",
    "Cosine": "mpipar.engine.learning_rate",
    "GPT": "mpipar.models.gpt",
    "Group": "mpipar.comm.group",
    "MLP": "mpipar.models.mlp",
    "Mesh": "mpipar.comm.mesh",
    "SGD": "mpipar.engine.optimizer",
    "Trainer": "mpipar.engine.trainer",
    "data": "mpipar.data",
    "generate": "mpipar.engine.generate",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name):
    if name not in _HOMES:
        raise AttributeError(f"module 'mpipar' has no attribute {name!r}")
    home = import_module(_HOMES[name])
    return getattr(home, name, home)


def __dir__():
    return sorted(__all__)
