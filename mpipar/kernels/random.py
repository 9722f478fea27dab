"""Counter-based random numbers."""
from .plain import philox, fill_normal, dropout

__all__ = ["philox", "fill_normal", "dropout"]
