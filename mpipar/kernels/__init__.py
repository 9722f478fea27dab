"""The arithmetic of one rank. The only folder that imports Numba; nothing here knows of MPI, layers or models."""
