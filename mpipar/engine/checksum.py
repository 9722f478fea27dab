"""Global tensors put together from their parts, and one checksum of them all."""

from __future__ import annotations

import hashlib

import numpy as np

from mpipar.kernels.dtypes import bits
from mpipar.models.model import Model
from mpipar.nn.parameter import Parameter


def global_tensor(model: Model, parameter: Parameter, array: np.ndarray | None, dtype=None) -> np.ndarray | None:
    """Put one tensor of the global model together on rank 0; every rank of the first replica calls it.

    array: this rank's part (parameter.data, or anything of its shape), None on ranks that don't hold it. dtype: of the
    array, where it is not the model's.
    Returns the whole tensor on rank 0 of the mesh, None elsewhere.
    """
    mesh, owner = model.mesh, model.owners[parameter][0]
    dtype = model.dtype if dtype is None else dtype
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


def parameters_sha256(model: Model) -> str | None:
    """SHA-256 over the bytes of all global tensors in name order, on rank 0 (None elsewhere); collective.

    Equal models give equal sums in any layout.
    """
    if model.mesh.dp.rank:
        return None
    digest = hashlib.sha256()
    for parameter in sorted(model.catalogue, key=lambda p: p.name):
        whole = global_tensor(model, parameter, parameter.data)
        if model.mesh.is_root:
            digest.update(bits(np.ascontiguousarray(whole)))
    return digest.hexdigest() if model.mesh.is_root else None


def global_state(model: Model, *, gradients: bool = False) -> dict[str, np.ndarray]:
    """All global tensors (their masters, with bfloat16) or their gradients by name on rank 0, an empty dict elsewhere;
    collective."""
    out: dict[str, np.ndarray] = {}
    if model.mesh.dp.rank:
        return out
    for parameter in model.catalogue:
        part = parameter.grad if gradients else parameter.master
        whole = global_tensor(model, parameter, part, model.buffers.master.dtype)
        if model.mesh.is_root:
            out[parameter.name] = whole.copy()
    return out
