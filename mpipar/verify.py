"""Check that parallel equals serial: mpirun -np N python -m mpipar.verify [OPTIONS]   (--help lists them)."""

import sys

from mpipar.comm import guard


def _command():
    from mpipar.commands.verify import main  # inside the guard: a failing import on one rank ends the job

    return main(sys.argv[1:])


if __name__ == "__main__":
    guard.main(_command)
