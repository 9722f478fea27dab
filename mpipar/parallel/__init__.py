"""How the work of one model is divided over ranks: tensor, data and pipeline parallelism.

Here live the rules of division and the code that carries them out with the groups of `mpipar.comm` and the
layers of `mpipar.nn`. No model, no optimizer step, no file format, no command line, and no import of mpi4py
or Numba: those belong to other floors.
"""
