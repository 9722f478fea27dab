"""The training step and what belongs to it: optimizer, learning rate, gradient norm, evaluation, checksums, metrics.

What lives here puts a model, a schedule and a mesh together and runs them. Parsing of arguments and printing belong
to the commands above; how work is divided belongs to `parallel/` below.
"""
