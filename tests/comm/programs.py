"""Small programs for several ranks, for the tests that look at whole jobs: python -m tests.comm.programs NAME
[plain]

Each runs under guard.main, as the commands do, or as a plain script that makes a Mesh (`plain`).
"""
import os
import signal
import sys
import threading
import time

from mpipar.comm import guard


def mesh():
    from mpipar.comm.mesh import Mesh
    with guard.checking():
        made = Mesh()
    return made


def others_wait(fail):
    """Rank 1 of the job fails, the others are in a collective."""
    world = mesh().world
    if world.rank == 1:
        print("before the end of rank 1")
        return fail()
    import numpy as np
    world.all_reduce(np.ones(3))
    return None


def fail_in_a_thread():
    def run():
        raise RuntimeError("boom in a thread")
    threading.Thread(target=run).start()
    time.sleep(60)


def boom():
    raise RuntimeError("boom")


def raise_on_all():
    mesh()
    boom()


def refuse(*ranks):
    rank = mesh().rank
    with guard.checking():
        if rank in ranks:
            raise ValueError(f"tp=3 does not divide\n4 ranks, says {rank}")
    if not ranks:
        with guard.checking():
            open("/nonexistent/file.toml")
    time.sleep(30)


def leave_early(wait):
    """Rank 1 ends without an error, rank 0 waits for it."""
    import numpy as np
    world = mesh().world
    if world.rank == 0:
        wait(world, np.ones(3))


def rank_0_works_on():
    """Nothing is wrong: the others are done, rank 0 has some work left."""
    if mesh().rank == 0:
        time.sleep(3)
        print("rank 0 is done")


def late_partner():
    """Nothing is wrong: rank 1 has done its part of a reduce and left, rank 2 comes late, rank 0 waits."""
    import numpy as np
    world = mesh().world
    if world.rank == 2:
        time.sleep(3)
    if world.reduce(np.ones(1)) is not None:
        print("the sum is there")


def stop():
    """Runs until one rank is asked to stop; all leave together."""
    import numpy as np
    world = mesh().world
    while not world.all_reduce(np.array([guard.stop_requested()]), "max").any():
        if world.rank == 0:
            print("running", flush=True)
        time.sleep(0.05)
    print("stopped together")
    return 77


def stuck():
    world = mesh().world
    if world.rank == 0:
        print("one waits", flush=True)
        world.barrier()
    time.sleep(60)


def shares_memory():
    """Every rank writes to shared memory and sums it."""
    made = mesh()
    x = made.world.zeros(100_000, "f4")
    x[:] = 1
    made.world.all_reduce(x)
    assert (x == made.size).all()


def killed_with_windows():
    """One rank is killed while memory is shared."""
    made = mesh()
    x = made.world.zeros(100_000, "f4")
    made.world.all_reduce(x)
    if made.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def cut():
    """MPIPAR_MAX_COUNT changes no bit."""
    from mpipar.comm.mesh import Mesh
    from tests.comm.operations import different, every_operation
    found = []
    for n in (1001, 2500):
        results = []
        for limit in ("", "1000"):
            os.environ["MPIPAR_MAX_COUNT"] = limit
            with Mesh() as made:
                results.append(every_operation(made.world, n, exact=False))
        found += [(n, name) for name in different(*results)]
    if found:
        raise AssertionError(f"other bits: {found}")
    print("all the same")


PROGRAMS = {
    "raise": lambda: others_wait(boom),
    "exit 3": lambda: others_wait(lambda: sys.exit(3)),
    "exit text": lambda: others_wait(lambda: sys.exit("no more disk")),
    "exit 0": lambda: others_wait(lambda: sys.exit(0)),
    "return 4": lambda: others_wait(lambda: 4),
    "thread": lambda: others_wait(fail_in_a_thread),
    "import": lambda: others_wait(lambda: __import__("no_such_module")),
    "interrupt": lambda: others_wait(lambda: os.kill(os.getpid(), signal.SIGINT)),
    "kill": lambda: others_wait(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "raise on all": raise_on_all,
    "exit 3 on all": lambda: mesh() and sys.exit(3),
    "refuse on all": lambda: refuse(0, 1, 2),
    "refuse a file": refuse,
    "refuse on 1": lambda: refuse(1),
    "refuse on 1 and 2": lambda: refuse(1, 2),
    "leave early, reduce": lambda: leave_early(lambda world, x: world.reduce(x)),
    "leave early, recv": lambda: leave_early(lambda world, x: world.recv(x, 1)),
    "leave early, started": lambda: leave_early(lambda world, x: world.all_gather_start(x).wait()),
    "rank 0 works on": rank_0_works_on,
    "late partner": late_partner,
    "stop": stop,
    "stuck": stuck,
    "cut": cut,
    "shares memory": shares_memory,
    "killed with windows": killed_with_windows,
    "mesh": lambda: print(mesh()),
}

if __name__ == "__main__":
    program = PROGRAMS[sys.argv[1]]
    if sys.argv[2:] == ["plain"]:
        program()
    else:
        guard.main(program)
