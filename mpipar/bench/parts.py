"""Where the time of a step goes: the kernels are wrapped by clocks while a benchmark runs, and only then.

The code that trains has no clocks of its own; `Parts` replaces the names under which it calls the kernels.
"""

from __future__ import annotations

import importlib
import time

PARTS = {
    "product": {"mpipar.nn.linear": ["gemm"], "mpipar.parallel.tensor": ["gemm"]},
    "attention": {"mpipar.nn.attention": ["attention_forward", "attention_backward"]},
    "element-wise": {
        "mpipar.nn.norm": ["layernorm_again", "layernorm_backward", "layernorm_forward"],
        "mpipar.nn.gelu": ["gelu_again", "gelu_backward", "gelu_forward"],
        "mpipar.nn.dropout": ["dropout"],
        "mpipar.parallel.tensor": [
            "add", "add_bias", "bias_residual", "add_positions", "embedding_forward", "embedding_backward",
            "positions_backward", "gelu_forward", "row_max", "cross_entropy_sums", "cross_entropy_backward",
        ],
        "mpipar.models.gpt": ["add"],
        "mpipar.models.mlp": ["sum_squares"],
        "mpipar.engine.gradients": ["sum_squares"],
    },
    "optimizer": {"mpipar.engine.optimizer": ["adamw", "sgd"]},
}


class Parts:
    """A context in which every kernel call is timed: `seconds` by part, and `flops` of products and attention."""

    def __init__(self):
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.flops = 0
        self._replaced = []

    def __enter__(self):
        for part, modules in PARTS.items():
            for module_name, names in modules.items():
                module = importlib.import_module(module_name)
                for name in names:
                    plain = getattr(module, name)
                    self._replaced.append((module, name, plain))
                    setattr(module, name, self._timed(part, plain))
        return self

    def __exit__(self, *_):
        for module, name, plain in reversed(self._replaced):
            setattr(module, name, plain)
        self._replaced.clear()

    def _timed(self, part, function):
        def clocked(*arguments, **options):
            started = time.perf_counter()
            result = function(*arguments, **options)
            self.seconds[part] += time.perf_counter() - started
            self.flops += flops_of(function.__name__, arguments)
            return result

        return clocked


def flops_of(name: str, arguments) -> int:
    """Floating-point operations of one call: 2 m n k of a product; of causal attention the products of its tiles.

    Forward makes 2 products over half of the T x T pairs, backward 5 (scores again, dP, dV, dQ, dK).
    """
    if name == "gemm":
        a, b = arguments[0], arguments[1]
        return 2 * a.shape[0] * a.shape[1] * b.shape[1]
    if name in ("attention_forward", "attention_backward"):
        batch, tokens, heads, width = arguments[0].shape
        pairs = batch * heads * tokens * (tokens + 1) // 2
        return (2 if name == "attention_forward" else 5) * 2 * pairs * width
    return 0
