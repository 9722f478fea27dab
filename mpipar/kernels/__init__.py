"""The arithmetic of one rank, compiled by Numba: plain functions on NumPy arrays.

What lives here: kernels, where their compiled code is kept, and the threads that run them. What may not:
layers, parameters, messages, files of any model, and any import of another mpipar folder. This is the only
folder that imports Numba.
"""
