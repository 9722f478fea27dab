"""What mpipar finds on this machine, and compiling ahead: python -m mpipar.doctor [--warm]   (--help)."""

import sys

from mpipar.comm import guard


def _command():
    from mpipar.commands.doctor import main

    return main(sys.argv[1:])


if __name__ == "__main__":
    guard.main(_command)
