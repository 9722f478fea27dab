"""The PyTorch program that `mpipar.bench train --against torch` measures: the same models and layouts, one thread a rank, gloo.

What may not live here: anything that needs another module of mpipar; it has to run as PyTorch's own programs do.
"""
