"""A job whose ranks compile (or load) some kernels as training does; prints how many each rank compiled."""

import numpy as np

from mpipar.comm.mesh import Mesh
from mpipar.kernels import elementwise, gelu, optimizer
from mpipar.kernels.cache import compiled_count

mesh = Mesh()
mesh.divided_on_node([lambda kernels=kernels: kernels.warm("float32") for kernels in (optimizer, elementwise, gelu)])
counts = mesh.world.all_gather(np.array([compiled_count()]))
if mesh.is_root:
    print(*counts.tolist())
