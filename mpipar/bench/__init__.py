"""Benchmarks: `python -m mpipar.bench <name>`. What lives here: measuring and printing, with hardware, runs
and spread.

What may not: anything that a training run needs. Each module has `add_arguments(parser)` and
`run(arguments)`.
"""
