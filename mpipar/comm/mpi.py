"""The one place that imports mpi4py.

Some settings of the MPI libraries are read when MPI starts, so they are made here, just before the import, and only
where the user has not made them. The launcher is compared with the library here too: `mpirun` of one MPI starts
programs of another as so many separate worlds of one rank, and nothing else would notice.
"""
import os
import re
import sys


def _number(environ, name):
    """The (largest) integer in an environment variable, 0 where there is none; SLURM writes "4(x3),2"."""
    return max((int(n) for n in re.findall(r"\d+", re.sub(r"\(x\d+\)", "", environ.get(name, "")))), default=0)


def ranks_on_node(environ=os.environ):
    """How many ranks the launcher started on this node; 1 where no launcher says so."""
    for name in ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE"):
        if _number(environ, name):
            return _number(environ, name)
    return 1


def _cores(environ):
    # Under srun each rank may be bound to cores of its own, so its affinity mask says nothing about the node.
    if "MPI_LOCALNRANKS" not in environ and _number(environ, "SLURM_CPUS_ON_NODE"):
        return _number(environ, "SLURM_CPUS_ON_NODE")
    if "OMPI_COMM_WORLD_LOCAL_SIZE" in environ:                          # Open MPI may have bound this rank already
        return os.cpu_count() or 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def settings(environ=os.environ):
    """The environment variables that suit this job, as a dict; those the user set himself are left out."""
    wanted = {}
    if ranks_on_node(environ) > _cores(environ):
        # Waiting ranks spin. With more ranks than cores they would take the time of those that compute.
        wanted["MPIR_CVAR_ENABLE_HEAVY_YIELD"] = "1"
        wanted["OMPI_MCA_mpi_yield_when_idle"] = "1"
    if environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1") == environ.get("OMPI_COMM_WORLD_SIZE", "1"):
        # On one node Open MPI needs no network; looking for one takes it over a second.
        wanted.update(OMPI_MCA_pml="ob1", OMPI_MCA_btl="self,sm", OMPI_MCA_osc="^ucx")
    return {name: value for name, value in wanted.items() if name not in environ}


os.environ.update(settings())

from mpi4py import MPI  # noqa: E402  (the settings above have to come first)

OPERATIONS = {"sum": MPI.SUM, "mean": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX}
IN_PLACE = MPI.IN_PLACE


def library():
    """Name and version of the MPI library that Python uses, as in "Open MPI v5.0.11"."""
    text = MPI.Get_library_version().replace("\x00", "").strip()
    if text.startswith("MPICH"):
        return "MPICH " + text.split()[2]
    return text.split(",")[0].split("\n")[0]


def max_count(environ=os.environ):
    """Most elements of one MPI call: None where the library takes any number (MPI 4 and later).

    MPIPAR_MAX_COUNT sets it (the same on every rank), for tests of the cutting into chunks.
    """
    text = environ.get("MPIPAR_MAX_COUNT", "")
    if text:
        if not text.isdigit() or int(text) < 1:
            raise ValueError(f"MPIPAR_MAX_COUNT={text!r}: a whole number of elements, 1 or more, is needed")
        return int(text)
    return None if MPI.Get_version() >= (4, 0) else 2**31 - 1


def synchronous_sends(environ=os.environ):
    """True where MPIPAR_SYNC_SEND asks that every send waits for its receive, which shows latent deadlocks."""
    text = environ.get("MPIPAR_SYNC_SEND", "")
    if text not in ("", "0", "1"):
        raise ValueError(f"MPIPAR_SYNC_SEND={text!r}: valid are 0 and 1")
    return text == "1"


def check_launcher(environ=os.environ, size=None):
    """ValueError where the launcher started more ranks than the MPI library sees (it belongs to another MPI)."""
    size = MPI.COMM_WORLD.Get_size() if size is None else size
    # SLURM's own numbers count only where srun started the ranks itself: under mpirun they describe the launcher's
    # helpers, and in a login shell of an allocation there is no step.
    launchers = (("OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun"), ("PMI_SIZE", "a PMI launcher (MPICH's mpirun, or srun)"),
                 ("MPI_LOCALNRANKS", "MPICH's mpirun"), ("SLURM_STEP_NUM_TASKS", "srun"))
    for name, launcher in launchers:
        ranks = _number(environ, name)
        if ranks:
            break
    else:
        return
    if ranks > size:
        raise LauncherError(
            f"the job was started by {launcher} ({name}={ranks}), but Python's MPI is {library()} and sees {size} "
            f"rank{'s' if size > 1 else ''}: start it with the mpirun of that library, {mpirun()}")


def mpirun():
    """The mpirun beside the running Python where there is one, else the plain name."""
    path = os.path.join(os.path.dirname(sys.executable), "mpirun")
    return path if os.path.exists(path) else "mpirun"


class LauncherError(ValueError):
    """The launcher belongs to another MPI than mpi4py."""
