"""Pipeline parallelism: schedules as data (`schedule`), the messages they need (`messages`), the proof that a
plan is right (`check`), its predicted timeline (`simulate`), the division of layers (`partition`), and what
executes it (`run` over a `mailbox`, `threaded` without MPI).

Nothing here knows a model, a loss or an optimizer: a stage is any object with `forward` and `backward`.
Nothing here imports mpi4py; a mailbox is given a group. All but `run` and `mailbox` need only the standard
library.
"""
