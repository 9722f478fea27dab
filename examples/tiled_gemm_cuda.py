"""The CUDA product of lecture 2, section 3.2:  mpirun -np 4 python examples/tiled_gemm_cuda.py [M] [K] [N]

Rank e has the columns W_e of W and computes Y_e = X W_e: each block of threads makes one TILE x TILE block of
Y_e from tiles of X and W_e that it keeps in shared memory. Runs on a GPU where there is one, else in Numba's
CUDA simulator (every CUDA thread is a Python thread: right but slow, so everything is small). Prints what the
lecture's program prints, and the largest difference from mpipar's own product.
NUMBA_ENABLE_CUDASIM=1 chooses the simulator where there is a GPU.
"""

import ctypes
import os
import sys
import time


def has_gpu():
    """Whether the CUDA driver is here and finds a device."""
    for library in ("libcuda.so.1", "nvcuda.dll"):
        try:
            driver, count = ctypes.CDLL(library), ctypes.c_int()
        except OSError:
            continue
        return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
    return False


SIMULATOR = "NUMBA_ENABLE_CUDASIM"  # numba reads it once, when it is imported
GPU = os.environ.get(SIMULATOR, "0") == "0" and has_gpu()
if not GPU:
    os.environ[SIMULATOR] = "1"
from numba import cuda, float32  # noqa: E402

os.environ.pop(SIMULATOR, None)  # mpipar keeps its kernels for each setting of Numba: not for this one

import numpy as np  # noqa: E402

from mpipar import Mesh  # noqa: E402
from mpipar.kernels.gemm import gemm  # noqa: E402
from mpipar.nn.parameter import split_range  # noqa: E402

TILE = 32 if GPU else 8
PADDED = TILE + 1  # of a row in shared memory: a column of a tile then lies in different banks
M, K, N = (1024, 1024, 2048) if GPU else (16, 24, 64)  # tokens, input width, output width of the whole layer
RUNS = 20 if GPU else 1


@cuda.jit
def gemm_tiled(x, w, y):
    """y[M, N/E] = x[M, K] w[K, N/E]; one thread for each element of y."""
    tile_x = cuda.shared.array((TILE, PADDED), float32)
    tile_w = cuda.shared.array((TILE, PADDED), float32)
    i, j = cuda.threadIdx.y, cuda.threadIdx.x
    row, column = cuda.blockIdx.y * TILE + i, cuda.blockIdx.x * TILE + j
    total = float32(0)
    for k0 in range(0, x.shape[1], TILE):
        # Each thread brings one element of both tiles; zeros beyond the edges.
        tile_x[i, j] = x[row, k0 + j] if row < x.shape[0] and k0 + j < x.shape[1] else float32(0)
        tile_w[i, j] = w[k0 + i, column] if k0 + i < w.shape[0] and column < w.shape[1] else float32(0)
        cuda.syncthreads()  # the tiles are complete
        for k in range(TILE):
            total += tile_x[i, k] * tile_w[k, j]
        cuda.syncthreads()  # no thread needs them any more
    if row < y.shape[0] and column < y.shape[1]:
        y[row, column] = total


def shard(x, w):
    """x @ w by the kernel; returns it with the seconds of a run and the grid."""
    y = np.full((x.shape[0], w.shape[1]), np.nan, np.float32)
    grid = -(-w.shape[1] // TILE), -(-x.shape[0] // TILE)
    if not y.size:
        return y, 0.0, grid  # fewer columns than ranks
    on_device = cuda.to_device(x), cuda.to_device(w), cuda.to_device(y)
    if GPU:
        gemm_tiled[grid, (TILE, TILE)](*on_device)  # compiles
        cuda.synchronize()
    started = time.perf_counter()
    for _ in range(RUNS):
        gemm_tiled[grid, (TILE, TILE)](*on_device)
    cuda.synchronize()
    seconds = (time.perf_counter() - started) / RUNS
    return on_device[2].copy_to_host(), seconds, grid


def main():
    m, k, n = [int(size) for size in sys.argv[1:4]] + [M, K, N][len(sys.argv[1:4]):]
    world = Mesh()
    mesh = Mesh(tp=world.size)
    first, last = split_range(n, mesh.tp.size, mesh.tp.rank)
    x = np.sin(0.001 * np.arange(m * k)).astype(np.float32).reshape(m, k)
    whole_w = np.cos(0.002 * np.arange(k * n)).astype(np.float32).reshape(k, n)
    w = np.ascontiguousarray(whole_w[:, first:last])  # W_e

    y, seconds, grid = shard(x, w)
    ends = [split_range(n, mesh.tp.size, rank)[1] for rank in range(mesh.tp.size)]
    widths = [last - first for first, last in zip([0, *ends], ends)]
    whole_y = mesh.tp.all_gather(y, axis=1, sizes=widths)
    reference = mesh.first_on_node(lambda: gemm(x, whole_w, np.empty((m, n), np.float32)))
    error = float(np.abs(whole_y - reference).max())

    if mesh.is_root:
        blocks, cores = grid[0] * grid[1], cuda.get_current_device().MULTIPROCESSOR_COUNT if GPU else None
        traffic, flops = 2 * TILE * k * 4, 2 * TILE * TILE * k  # of one block: a strip of X and one of W_e
        print(f"shard: M={m} K={k} N/E={w.shape[1]} (N={n}, E={mesh.tp.size}), "
              f"grid {grid[0]} x {grid[1]} = {blocks} blocks of {TILE} x {TILE} threads, "
              + (f"{cores} SMs" if GPU else "CUDA simulator"))
        speed = 2 * m * k * w.shape[1] / max(seconds, 1e-9) / 1e9
        print(f"time {seconds * 1e3:.3f} ms, {speed:.4g} GFLOP/s on rank 0"
              + ("" if GPU else " (the simulator's, not a processor's)"))
        print(f"a block reads {traffic / 1024:.1f} KiB and does {flops / 1e3:.1f} kFLOP: "
              f"{flops / traffic:.1f} FLOP/byte (TILE/4), whatever M, K and N are")
        print(f"largest difference from mpipar's product, all {mesh.tp.size} shards together: {error:.3e}")
    assert error < 1e-6 * k, "the shards together must be the whole product"


main()
