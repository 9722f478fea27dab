"""Loads the harness: the half that starts mpirun, or the half of a rank under it."""

from tests.harness.launch import under_mpirun

pytest_plugins = [
    "tests.harness.marks",
    "tests.harness.inside" if under_mpirun() else "tests.harness.outside",
]
