"""Run by a job: says how many ranks there are and which of them share a node, and ends as mpipar.train
does, with an "end" line in the file after --metrics. `--until-stopped` makes it wait for SIGUSR1,
`--end-silently` leaves the line out."""

import json
import os
import signal
import socket
import sys
import time

from mpi4py import MPI

world = MPI.COMM_WORLD
stopped = []
signal.signal(signal.SIGUSR1, lambda *_: stopped.append(1))
node = world.Split_type(MPI.COMM_TYPE_SHARED)
places = world.gather((socket.gethostname(), node.size, os.environ.get("OMP_NUM_THREADS")))
if world.rank == 0:
    print("places:", json.dumps(places), flush=True)
while "--until-stopped" in sys.argv and not world.allreduce(len(stopped), op=MPI.MAX):
    time.sleep(0.1)
if world.rank == 0:
    print("stopped by a signal" if stopped else "at the end", flush=True)
    if "--end-silently" not in sys.argv:
        with open(sys.argv[sys.argv.index("--metrics") + 1], "a") as file:
            file.write(json.dumps({"event": "end"}) + "\n")
