"""What the launcher's environment variables say, and launchers that belong to another MPI."""
import os
import pathlib
import subprocess
import sys

import pytest

from mpipar.comm import launcher
from tests.helpers.jobs import ROOT, environment, run_job

HYDRA = {"PMI_SIZE": "6", "PMI_RANK": "4", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "0"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "6",
    "OMPI_COMM_WORLD_RANK": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
    "PMIX_RANK": "4",
}
SRUN = {
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_PROCID": "4",
    "SLURM_STEP_TASKS_PER_NODE": "4(x1),2",
    "SLURM_NTASKS": "6",
    "SLURM_CPUS_ON_NODE": "8",
}
PROXIES = {
    "SLURM_STEP_NUM_TASKS": "9",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "9",
    "SLURM_STEP_TASKS_PER_NODE": "1(x9)",
}


@pytest.mark.parametrize(
    "environ, ranks, rank, here",
    [
        ({}, 1, 0, 1),
        (HYDRA, 6, 4, 2),
        (OPEN_MPI, 6, 4, 3),
        (SRUN, 6, 4, 4),
        ({**PROXIES, **HYDRA}, 6, 4, 2),
        ({**PROXIES, **OPEN_MPI}, 6, 4, 3),  # an mpirun within SLURM
        ({"SLURM_NTASKS": "6", "SLURM_JOB_ID": "7"}, 1, 0, 1),  # a login shell of an allocation
    ],
)
def test_what_the_launcher_says(environ, ranks, rank, here):
    assert launcher.started(environ)[0] == ranks
    assert launcher.rank(environ) == rank and launcher.ranks_on_node(environ) == here


@pytest.mark.parametrize("environ", [HYDRA, OPEN_MPI, SRUN, {"MPI_LOCALNRANKS": "2"}])
def test_more_ranks_than_the_library_sees(environ):
    with pytest.raises(
        ValueError,
        match=r"started [26] ranks \(\w+=[26]\), but Python's MPI is Wonder MPI 1, which sees only",
    ):
        launcher.check("Wonder MPI 1", 1, environ)
    launcher.check("Wonder MPI 1", 6, environ)


@pytest.mark.parametrize(
    "environ", [{}, {"SLURM_NTASKS": "6"}, {"SLURM_STEP_NUM_TASKS": "1"}, {**PROXIES, "PMI_SIZE": "1"}]
)
def test_no_false_alarm(environ):
    launcher.check("Wonder MPI 1", 1, environ)
    launcher.check_family("Wonder MPI 1", environ)


def test_open_mpis_launcher_with_another_library():
    launcher.check_family("Open MPI v5", OPEN_MPI)
    launcher.check_family("MPICH 5", HYDRA)
    with pytest.raises(ValueError, match="Open MPI's mpirun started 6 ranks .* MPICH 5, which cannot join"):
        launcher.check_family("MPICH 5", OPEN_MPI)


def test_waiting_ranks_yield_where_cores_are_short_only(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    for ranks, short in ((4, False), (5, True)):
        for environ in ({"MPI_LOCALNRANKS": str(ranks)}, {"OMPI_COMM_WORLD_LOCAL_SIZE": str(ranks)},
                        {"SLURM_STEP_TASKS_PER_NODE": f"{ranks}(x2)", "SLURM_CPUS_ON_NODE": "4"}):
            wanted = launcher.settings(environ)
            assert (
                ("MPIR_CVAR_ENABLE_HEAVY_YIELD" in wanted)
                == ("OMPI_MCA_mpi_yield_when_idle" in wanted)
                == short
            )


def test_what_the_user_set_stays():
    mine = {"MPI_LOCALNRANKS": "1000", "MPIR_CVAR_ENABLE_HEAVY_YIELD": "0", "OMPI_MCA_btl": "self,tcp"}
    assert not set(mine) & set(launcher.settings(mine))
    assert launcher.settings({})["OMPI_MCA_btl"] == "self,sm"
    assert "OMPI_MCA_btl" not in launcher.settings(
        {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    )


def test_a_launcher_that_starts_so_many_worlds_of_one(tmp_path):
    """As with srun without a PMI: each process has the launcher's variables and is alone."""
    script = tmp_path / "script.py"
    script.write_text("from mpipar.comm.mesh import Mesh\nMesh()\nprint('went on')\n")
    for arguments in (["-m", "tests.comm.programs", "mesh"], [script]):
        outputs = []
        for rank in range(3):
            env = environment(
                {"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": str(rank), "SLURM_STEP_TASKS_PER_NODE": "3"}
            )
            done = subprocess.run(
                [sys.executable, *arguments], env=env, cwd=ROOT, capture_output=True, text=True
            )
            assert done.returncode == 2 and done.stdout == ""
            outputs.append(done.stderr)
        assert outputs[0].startswith(
            "mpipar: error: srun started 3 ranks (SLURM_STEP_NUM_TASKS=3), but Python's MPI is "
        )
        assert outputs[0].count("\n") == 1 and outputs[1:] == ["", ""]


def test_the_mpirun_of_another_mpi():
    """MPIPAR_TEST_OTHER_MPIRUN: the mpirun of an MPI that is not the one of this Python."""
    other = os.environ.get("MPIPAR_TEST_OTHER_MPIRUN")
    if not other or not pathlib.Path(other).exists():
        pytest.skip("MPIPAR_TEST_OTHER_MPIRUN does not name one")
    job = run_job(3, ["-m", "tests.comm.programs", "mesh"], launcher=other)
    lines = [line for line in job.output.splitlines() if "mpipar" in line]
    assert job.returncode == 2 and len(lines) == 1 and not job.left_behind
    assert "Open MPI" in lines[0] and "MPICH" in lines[0] and "<Mesh" not in job.stdout
