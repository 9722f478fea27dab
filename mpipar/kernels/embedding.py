"""Embedding."""
from .plain import embedding_forward, embedding_backward, add_positions, positions_backward

__all__ = ["embedding_forward", "embedding_backward", "add_positions", "positions_backward"]
