"""Layer normalisation."""
from .plain import layernorm_forward, layernorm_backward

__all__ = ["layernorm_forward", "layernorm_backward"]
