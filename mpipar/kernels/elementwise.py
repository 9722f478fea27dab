"""Element-wise sums and their gradients."""
from .plain import add_bias, add, bias_residual, column_sum, scale

__all__ = ["add_bias", "add", "bias_residual", "column_sum", "scale"]
