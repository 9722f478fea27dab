"""mpipar: distributed training for people without GPUs (MPI, NumPy, Numba)."""
