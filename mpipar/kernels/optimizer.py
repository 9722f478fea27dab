"""Optimizers."""
from .plain import adamw, sgd

__all__ = ["adamw", "sgd"]
