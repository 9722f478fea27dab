"""Loads the harness: one half outside mpirun (it starts the multi-rank tests), another on every rank under it."""
from tests.harness.launch import under_mpirun

pytest_plugins = ["tests.harness.marks", "tests.harness.inside" if under_mpirun() else "tests.harness.outside"]
