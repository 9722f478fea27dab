"""`python -m mpipar.bench attention`: causal attention forward and backward; with --against torch, in turn with
`scaled_dot_product_attention`.

FLOPs are counted as for the triangle of the T x T matrix that is needed: 2 products forward, 5 backward, each of
T^2 D / 2 multiplications and additions a head.
"""

import statistics
import time
import tracemalloc

import numpy as np

from ..kernels.attention import attention_backward, attention_forward
from ..kernels.threads import limit_threads
from .report import conditions, integers, need_torch, print_conditions, print_table, spread, write_json

PRODUCTS = {"forward": 2, "backward": 5}


def add_arguments(parser):
    """The options of `mpipar.bench attention`."""
    parser.add_argument("--seq", default="256,1024,2048,4096", metavar="T,...", help="tokens (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="sequences (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--width", type=int, default=64, help="of a head (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=int, default=9, help="rounds, alternated (default: %(default)s)")
    parser.add_argument("--against", choices=("torch",), help="also measure PyTorch's")
    parser.add_argument("--json", metavar="FILE", help="also write everything to FILE")


def run(arguments):
    """Prints a table: milliseconds forward and backward, GFLOP/s, the most memory taken beside the results, ratio."""
    for name in ("batch", "heads", "width", "runs"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name} is {getattr(arguments, name)}; valid values: integers from 1")
    tokens = integers("--seq", arguments.seq)
    if arguments.against:
        need_torch("torch")
    limit_threads(arguments.threads)
    report = conditions(np.float32, arguments.runs)
    report.update(batch=arguments.batch, heads=arguments.heads, width=arguments.width, results=[])
    print_conditions(report)
    for T in tokens:
        report["results"].append(_measure(arguments, T))
    columns = [("T", "d", lambda r: r["tokens"]),
               ("forward ms", ".1f", lambda r: 1e3 * statistics.median(r["ours"]["forward"])),
               ("backward ms", ".1f", lambda r: 1e3 * statistics.median(r["ours"]["backward"])),
               ("GFLOP/s", ".1f", lambda r: r["gflops"]),
               ("extra KiB", ".0f", lambda r: r["extra_bytes"] / 1024),
               ("T x T would be", ".0f", lambda r: 4 * r["tokens"] ** 2 / 1024)]
    if arguments.against:
        columns += [("PyTorch ms", ".1f", lambda r: 1e3 * statistics.median(r["theirs"]["both"])),
                    ("ratio", ".2f", lambda r: statistics.median(r["ratios"])),
                    ("spread", "", lambda r: spread(r["ratios"]))]
    print_table(columns, report["results"])
    write_json(report, arguments.json)


def _measure(arguments, T):
    shape = arguments.batch, T, 3, arguments.heads, arguments.width
    generator = np.random.default_rng(0)
    qkv = generator.standard_normal(shape, np.float32)
    dout = generator.standard_normal((*shape[:2], *shape[3:]), np.float32)
    out, dqkv = np.empty_like(dout), np.empty_like(qkv)
    lse = np.empty((arguments.batch, arguments.heads, T), np.float32)
    q, k, v = (qkv[:, :, i] for i in range(3))
    gradients = [dqkv[:, :, i] for i in range(3)]
    ours = {"forward": lambda: attention_forward(q, k, v, out, lse),
            "backward": lambda: attention_backward(q, k, v, out, lse, dout, *gradients)}
    theirs = _torch(qkv, dout) if arguments.against else {}
    result = {"tokens": T, "ours": {name: [] for name in ours}, "theirs": {name: [] for name in theirs}}
    for number in range(arguments.runs + 1):
        for functions, seconds in ((ours, result["ours"]), (theirs, result["theirs"])):
            for name, function in functions.items():
                start = time.perf_counter()
                function()
                if number:  # the first round compiles, or finds pages
                    seconds[name].append(time.perf_counter() - start)
    both = [sum(pair) for pair in zip(*result["ours"].values())]
    flops = sum(PRODUCTS.values()) * arguments.batch * arguments.heads * T * T * arguments.width
    result["gflops"] = flops / statistics.median(both) / 1e9
    result["extra_bytes"] = _extra_bytes(ours)
    if theirs:
        result["theirs"]["both"] = [sum(pair) for pair in zip(*result["theirs"].values())]
        result["ratios"] = [b / a for a, b in zip(both, result["theirs"]["both"])]
    return result


def _extra_bytes(functions):
    # Arrays that compiled code makes are not seen by tracemalloc: those are O(T D), by the kernel's own sizes.
    tracemalloc.start()
    for function in functions.values():
        function()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def _torch(qkv, dout):
    import torch
    import torch.nn.functional as F

    from ..kernels.settings import settings

    torch.set_num_threads(settings.threads)
    parts = [part.detach().requires_grad_() for part in torch.from_numpy(qkv).permute(2, 0, 3, 1, 4)]
    slope, kept = torch.from_numpy(dout).transpose(1, 2), {}

    def forward():
        kept["out"] = F.scaled_dot_product_attention(*parts, is_causal=True)

    return {"forward": forward, "backward": lambda: torch.autograd.grad(kept["out"], parts, slope)}
