"""Pipeline parallelism: schedules as data (`schedule`), the messages they need (`messages`), the proof that a
plan is right (`check`), its predicted timeline (`simulate`), the division of layers (`partition`), what executes it
(`run` over a `mailbox`, `threaded` without MPI, `sleeping` stages instead of computing ones), and what was measured
(`measure`, `trace`, `picture`).

Nothing here knows a model, a loss or an optimizer: a stage is any object with `forward` and `backward`.
Nothing here imports mpi4py; a mailbox is given a group. `schedule`, `messages`, `check`, `simulate` and `partition`
need only the standard library; `picture` needs matplotlib, when it draws.
"""
