"""`python -m torch.distributed.run --nproc-per-node N -m mpipar.bench.peer.collectives`: PyTorch's collectives over gloo.

Times as `mpipar.bench collectives` takes them: all ranks begin together, a call takes what its slowest rank takes.
Prints one JSON line on rank 0.
"""

import argparse
import json
import statistics
import time

import torch
import torch.distributed as dist

from mpipar.bench.report import calls_of


def main():
    parser = argparse.ArgumentParser()
    for name in ("--operations", "--sizes"):
        parser.add_argument(name, required=True)
    parser.add_argument("--runs", type=int, default=0)
    a = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = [measure(name, int(size), a.runs) for name in a.operations.split(",") for size in a.sizes.split(",")]
    if dist.get_rank() == 0:
        print(json.dumps({"version": torch.__version__, "results": results}))
    dist.barrier()  # a rank that closes its connections early ends the others
    dist.destroy_process_group()


def measure(name, size, runs):
    """Times of one operation on arrays of `size` bytes in all."""
    ranks = dist.get_world_size()
    count = max(1, size // (4 * ranks)) * ranks
    x, part, whole = torch.ones(count), torch.ones(count // ranks), torch.empty(count)
    operation = {
        "all_reduce": lambda: dist.all_reduce(x), "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, x),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part), "broadcast": lambda: dist.broadcast(x, 0),
    }[name]
    skip, times = 3, []
    for i in range(-skip, calls_of(size, runs)):
        dist.barrier()
        started = time.perf_counter()
        operation()
        if i >= 0:
            times.append(time.perf_counter() - started)
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return {"operation": name, "bytes": 4 * count, "median_s": statistics.median(slowest.tolist()), "best_s": slowest.min().item()}


if __name__ == "__main__":
    main()
