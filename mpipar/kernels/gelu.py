"""GeLU."""
from .plain import gelu_forward, gelu_backward

__all__ = ["gelu_forward", "gelu_backward"]
