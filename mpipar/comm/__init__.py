"""How ranks talk: the mesh, its groups and their collectives, the record of what was sent, the guard that
ends a job when one rank fails. This is the only folder that imports mpi4py, and it does so when the first
mesh of more than one rank is made, not when it is imported. What is sent, and when, is decided above (nn/,
parallel/): nothing here knows of layers, gradients or batches.
"""
import importlib

_HOMES = {
    "Mesh": "mesh",
    "Group": "group",
    "Pending": "pending",
    "Recorder": "record",
    "MismatchError": "fingerprint",
    "guard": None,
    "fault": None,
}

__all__ = sorted(_HOMES)


def __getattr__(name):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]
    module = importlib.import_module(f"{__name__}.{home or name}")
    return getattr(module, name) if home else module
