"""What the launcher (mpirun, srun) says about this process in environment variables. Needs no MPI."""
import os
import re
import sys

# SLURM's own numbers count only where srun started the ranks itself: under mpirun they describe the
# launcher's helpers, and the login shell of an allocation has no step at all. So they come last, and
# SLURM_NTASKS never.
_SIZES = (("OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun"), ("PMI_SIZE", "MPICH's mpirun (or srun with PMI)"),
          ("MPI_LOCALNRANKS", "MPICH's mpirun"), ("SLURM_STEP_NUM_TASKS", "srun"))
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MPI_LOCALRANKID", "SLURM_PROCID")
_RANKS_ON_NODE = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE")


class LauncherError(ValueError):
    """The launcher belongs to another MPI than mpi4py, or mpi4py is missing."""


def _number(environ, name):
    """The (largest) integer in a variable, or None; SLURM writes "4(x3),2" for several nodes."""
    found = re.findall(r"\d+", re.sub(r"\(x\d+\)", "", environ.get(name, "")))
    return max(map(int, found)) if found else None


def started(environ=os.environ):
    """(ranks, variable, launcher): how many ranks were started, and who says so; (1, "", "") if none does."""
    for name, launcher in _SIZES:
        if _number(environ, name):
            return _number(environ, name), name, launcher
    return 1, "", ""


def rank(environ=os.environ):
    """The rank that the launcher gave this process, 0 without one."""
    return next((_number(environ, name) for name in _RANKS if _number(environ, name) is not None), 0)


def ranks_on_node(environ=os.environ):
    """How many ranks the launcher started on this node, 1 without one."""
    return next((_number(environ, name) for name in _RANKS_ON_NODE if _number(environ, name)), 1)


def check(library, size, environ=os.environ):
    """LauncherError where the launcher started more ranks than the MPI library (its name) sees.

    The launcher of one MPI starts programs of another as so many separate worlds of one rank; nothing else
    notices.
    """
    if started(environ)[0] > size:
        _refuse(library, "sees only this one" if size == 1 else f"sees {size} of them", environ)


def check_family(library, environ=os.environ):
    """The same before MPI is started, for Open MPI's mpirun with another library (given by name)."""
    if started(environ)[1] == "OMPI_COMM_WORLD_SIZE" and not library.startswith("Open MPI"):
        _refuse(library, "cannot join them", environ)


def _refuse(library, problem, environ):
    ranks, name, launcher = started(environ)
    raise LauncherError(
        f"{launcher} started {ranks} rank{'s' * (ranks > 1)} ({name}={ranks}), but Python's MPI is "
        f"{library}, which {problem}: use that library's own launcher, {mpirun()}"
    )


def mpirun():
    """The mpirun beside the running Python where there is one, else the plain name."""
    path = os.path.join(os.path.dirname(sys.executable), "mpirun")
    return path if os.path.exists(path) else "mpirun"


def settings(environ=os.environ):
    """Variables for this job that the MPI libraries read when they start; not those that are set already."""
    wanted = {}
    if crowded(environ):
        # Waiting ranks spin. With more ranks than cores they would take the time of those that compute.
        wanted["MPIR_CVAR_ENABLE_HEAVY_YIELD"] = "1"
        wanted["OMPI_MCA_mpi_yield_when_idle"] = "1"
    if environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1") == environ.get("OMPI_COMM_WORLD_SIZE", "1"):
        # On one node Open MPI needs no network, and looking for one takes it over a second.
        wanted.update(OMPI_MCA_pml="ob1", OMPI_MCA_btl="self,sm", OMPI_MCA_osc="^ucx")
    # In the libraries' usual choice the order in which the ranks are added depends on the size of the
    # message, and in a ring on the place in it, so the last bits of a sum depend on how an array is cut into
    # messages. Recursive halving adds in one order everywhere, and sends no more than a ring.
    wanted.update(MPIR_CVAR_REDUCE_INTRA_ALGORITHM="reduce_scatter_gather",
                  OMPI_MCA_coll_tuned_use_dynamic_rules="1", OMPI_MCA_coll_tuned_allreduce_algorithm="6",
                  OMPI_MCA_coll_tuned_reduce_algorithm="7", OMPI_MCA_coll_tuned_reduce_scatter_algorithm="2",
                  OMPI_MCA_coll_tuned_reduce_scatter_block_algorithm="3")
    return {name: value for name, value in wanted.items() if name not in environ}


def crowded(environ=os.environ):
    """Whether more ranks were started on this node than there are cores for them."""
    return ranks_on_node(environ) > cores(environ)


def cores(environ=os.environ):
    """Cores of this node that the ranks share."""
    if "MPI_LOCALNRANKS" not in environ:  # MPICH's mpirun binds nothing; the others may have bound this rank
        return _number(environ, "SLURM_CPUS_ON_NODE") or os.cpu_count() or 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
