"""How the tests call mpirun, and how a process knows that mpirun started it. Imports no MPI."""

import os
import shutil
import sys

# Set in every rank by Open MPI, MPICH and Intel MPI (PMI), and by launchers that speak PMIx.
RANK_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "MPI_LOCALNRANKS")

# The file into which rank 0 writes its reports, when the outer pytest has started this mpirun.
REPORTS = "MPIPAR_TEST_REPORTS"

# The process number of that outer pytest, so that the ranks end when it is gone.
OWNER = "MPIPAR_TEST_OWNER"


def under_mpirun():
    """Whether this process is a rank of an MPI job."""
    return any(name in os.environ for name in RANK_VARIABLES)


def seconds(name, default):
    """A time limit: the environment variable MPIPAR_TEST_<name>, or `default` seconds."""
    return float(os.environ.get(f"MPIPAR_TEST_{name}", default))


def mpirun(ranks):
    """The command that starts `ranks` ranks: the mpirun beside this Python if there is one (a wheel's),
    else that of PATH."""
    beside = os.path.join(os.path.dirname(sys.executable), "mpirun")
    found = beside if os.access(beside, os.X_OK) else shutil.which("mpirun")
    if found is None:
        raise FileNotFoundError(
            f"no mpirun beside {sys.executable} and none on PATH; install mpipar[mpich] or mpipar[openmpi]"
        )
    return [found, "-np", str(ranks)]


def environment():
    """The whole environment for mpirun. It has to be handed over in full: an MPI that a serial test has
    initialised in this process leaves variables in C's environment, which a child would inherit."""
    env = {
        # Open MPI refuses root, and more ranks than cores.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        # One node: without these Open MPI spends over a second on looking for networks.
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "^ofi",
        "OMPI_MCA_mtl": "^ofi",
        "OMPI_MCA_osc": "^ucx",
        # Sets are ordered alike on all ranks, and prints are not lost when a rank dies.
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        **os.environ,
    }
    env["PATH"] = os.path.dirname(sys.executable) + os.pathsep + env.get("PATH", os.defpath)
    for name in ("PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST"):  # the outer pytest's, not the child's
        env.pop(name, None)
    return env
