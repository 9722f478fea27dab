"""The tensor-parallel MLP of lecture 2, section 3.1:  mpirun -np 4 python examples/tensor_parallel_mlp.py

Y = GeLU(X A) with the columns of A split over the ranks (nothing is sent), Z = Y B with the rows of B split (one
all-reduce). Prints the best time, the bytes that a rank sends in a ring all-reduce, and the largest error against
one rank that holds everything. Works for 1, 2, 4, 8 ... ranks.
"""

import time

import numpy as np

from mpipar import Mesh
from mpipar.kernels.gelu import gelu_forward
from mpipar.kernels.gemm import gemm
from mpipar.kernels.threads import limit_threads
from mpipar.nn.parameter import split_range

M, K, N, O = 64, 256, 512, 256  # tokens, input width, hidden width, output width
REPEATS = 20


def mlp(x, a, b, group):
    """GeLU(x a) b, summed over the ranks of the group."""
    y = gemm(x, a, np.empty((len(x), a.shape[1]), np.float32))
    gelu_forward(y, y)
    z = gemm(y, b, np.empty((len(x), b.shape[1]), np.float32))
    return group.all_reduce(z)


def main():
    world = Mesh()
    mesh = Mesh(tp=world.size)
    limit_threads(1)
    random = np.random.default_rng(2024)  # the same numbers on every rank
    x, whole_a, whole_b = (random.uniform(-0.5, 0.5, s).astype(np.float32) for s in ((M, K), (K, N), (N, O)))
    first, last = split_range(N, mesh.tp.size, mesh.tp.rank)
    a, b = np.ascontiguousarray(whole_a[:, first:last]), whole_b[first:last]

    mesh.first_on_node(lambda: mlp(x, a, b, Mesh.serial().tp))  # compile once a node
    best = float("inf")
    for _ in range(REPEATS):
        mesh.world.barrier()
        started = time.perf_counter()
        z = mlp(x, a, b, mesh.tp)
        best = min(best, time.perf_counter() - started)
    with mesh.record() as log:
        mlp(x, a, b, mesh.tp)

    if mesh.is_root:
        reference = mlp(x, whole_a, whole_b, Mesh.serial().tp)
        error = float(np.abs(z - reference).max())
        flops = 2 * M * K * N + 2 * M * N * O
        print(f"E={mesh.tp.size} | M={M} K={K} N={N} O={O}")
        print(f"best forward {best * 1e3:.3f} ms, {flops / best / 1e9:.2f} GFLOP/s in all")
        print(f"bytes sent a rank and forward {log.sent() / 1024:.1f} KiB, largest error {error:.3e}")
        assert error < 1e-4, "the ranks together must give what one rank gives"


main()
