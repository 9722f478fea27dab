"""Layers of one rank, with forward and backward written by hand, and the parameters they own.

What lives here knows nothing of other ranks: a layer gets arrays, returns arrays and says what it saves for its
backward pass (`y, saved = layer.forward(x)`, `dx = layer.backward(saved, dy)`). Messages, process groups and anything
that divides a layer among ranks live in `parallel/`; the loops over numbers live in `kernels/`.
"""
