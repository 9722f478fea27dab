"""Causal attention."""
from .plain import attention_forward, attention_backward

__all__ = ["attention_forward", "attention_backward"]
