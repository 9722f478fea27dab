"""Global tensors put together from their parts, and one checksum of them all."""

from __future__ import annotations

import hashlib

import numpy as np

from mpipar.kernels.dtypes import bits, sums_dtype
from mpipar.models.model import Model
from mpipar.nn.parameter import Parameter


def global_tensor(model: Model, parameter: Parameter, array: np.ndarray | None, dtype) -> np.ndarray | None:
    """Put one tensor of the global model together on rank 0; every rank of the first replica calls it.

    array: this rank's part (parameter.data, or anything of its shape), None on ranks that don't hold it; of that dtype.
    Returns the whole tensor on rank 0 of the mesh, None elsewhere.
    """
    mesh, owner = model.mesh, model.owners[parameter][0]
    whole = None
    if mesh.pp.rank == owner:
        whole = array
        if parameter.sharded:
            sizes = [parameter.shape(r)[parameter.shard_dim] for r in range(mesh.tp.size)]
            whole = mesh.tp.gather(array, root=0, axis=parameter.shard_dim, sizes=sizes)
    if owner == 0 or mesh.tp.rank:
        return whole if mesh.is_root else None
    if mesh.pp.rank == owner:
        mesh.pp.send(np.ascontiguousarray(whole), 0)
    if mesh.pp.rank == 0:
        whole = np.empty(parameter.global_shape, dtype)
        mesh.pp.recv(whole, owner)
        return whole
    return None


def whole_tensors(model: Model, parameters: list[Parameter], what: str = "data"):
    """Yield (parameter, whole global tensor) in that order: the tensor on rank 0 of the mesh, None elsewhere; collective.

    what: "data", "master" or "grad" of the parameters. A tensor is valid until the next one is asked for.
    """
    held = [p for p in parameters if model.mesh.pp.rank in model.owners[p]]
    if model.zero is None:
        arrays = ((p, getattr(p, what)) for p in held)
    else:
        arrays = model.zero.whole_tensors(held, what)
    dtype = model.dtype if what == "data" else sums_dtype(model.dtype)
    for parameter in parameters:
        array = next(arrays)[1] if model.mesh.pp.rank in model.owners[parameter] else None
        yield parameter, None if model.mesh.dp.rank else global_tensor(model, parameter, array, dtype)


def parameters_sha256(model: Model) -> str | None:
    """SHA-256 over the bytes of all global tensors in name order, on rank 0 (None elsewhere); collective.

    Equal models give equal sums in any layout.
    """
    digest = hashlib.sha256()
    for _, whole in whole_tensors(model, sorted(model.catalogue, key=lambda p: p.name)):
        if model.mesh.is_root:
            digest.update(bits(np.ascontiguousarray(whole)))
    return digest.hexdigest() if model.mesh.is_root else None


def global_state(model: Model, *, gradients: bool = False) -> dict[str, np.ndarray]:
    """All global tensors (their masters, with bfloat16) or their gradients by name on rank 0, an empty dict elsewhere;
    collective."""
    out: dict[str, np.ndarray] = {}
    for parameter, whole in whole_tensors(model, model.catalogue, "grad" if gradients else "master"):
        if model.mesh.is_root:
            out[parameter.name] = whole.copy()
    return out
