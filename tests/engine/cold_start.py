"""A job that compiles (or loads) some kernels as training does, one rank of the node first; prints who compiled how many."""

import numpy as np

from mpipar.comm.mesh import Mesh
from mpipar.kernels import optimizer
from mpipar.kernels.cache import compiled_count

mesh = Mesh()
mesh.first_on_node(lambda: optimizer.warm("float32"))
counts = mesh.world.all_gather(np.array([compiled_count()]))
if mesh.is_root:
    print("compiled", counts.tolist())
