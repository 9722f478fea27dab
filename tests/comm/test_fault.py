"""Faults on demand, and what a job with one does."""
import pytest

from mpipar.comm import fault
from tests.helpers.jobs import run_job


@pytest.mark.parametrize(
    "text",
    ["explode", "raise:rank", "raise:rank=two", "raise:rank=-1", "raise:point=lunch", "raise:colour=1"],
)
def test_malformed(monkeypatch, text):
    monkeypatch.setenv("MPIPAR_FAULT", text)
    with pytest.raises(ValueError, match="MPIPAR_FAULT=.*valid are"):
        fault.check()


def test_only_there_and_then(monkeypatch):
    monkeypatch.setenv("MPIPAR_FAULT", "raise:rank=2,step=3")
    fault.check()
    for step, rank in ((3, 1), (2, 2), (4, 2)):
        fault.inject(step=step, rank=rank)
    fault.inject("data", step=3, rank=2)
    with pytest.raises(fault.InjectedFault, match="at step 3"):
        fault.inject(step=3, rank=2)


def test_kinds_and_points(monkeypatch):
    monkeypatch.setenv("MPIPAR_FAULT", "exit:point=data,code=5")
    fault.inject(step=1, rank=0)
    with pytest.raises(SystemExit) as caught:
        fault.inject("data", rank=0)
    assert caught.value.code == 5
    monkeypatch.setenv("MPIPAR_FAULT", "raise:point=import,rank=4")
    for variable in ("PMI_RANK", "OMPI_COMM_WORLD_RANK"):   # before MPI starts the launcher says who we are
        monkeypatch.setenv(variable, "4")
    with pytest.raises(fault.InjectedFault):
        fault.inject("import")


def test_none(monkeypatch):
    monkeypatch.delenv("MPIPAR_FAULT", raising=False)
    fault.check()
    fault.inject(step=1, rank=0)


@pytest.mark.parametrize("kind, code", [("raise", 1), ("exit", 3)])
def test_a_job_with_a_fault(tmp_path, kind, code):
    program = tmp_path / "program.py"
    program.write_text("""if True:
        from mpipar.comm import guard
        def work():
            import numpy as np
            from mpipar.comm import Mesh, fault
            mesh = Mesh()
            for step in range(1, 6):
                fault.inject(step=step, rank=mesh.rank)
                mesh.world.all_reduce(np.ones(10))
                print("step", step, "done")
        guard.main(work)
        """)
    job = run_job(3, [program], env={"MPIPAR_FAULT": f"{kind}:rank=2,step=3"})
    assert job.returncode == code and "rank 2" in job.stderr and job.seconds < 15 and not job.left_behind
    assert "step 2 done" in job.stdout and "step 3 done" not in job.stdout
    assert run_job(3, [program]).returncode == 0


def test_a_malformed_fault_is_refused_before_anything_is_done():
    job = run_job(2, ["-m", "tests.comm.programs", "mesh"], env={"MPIPAR_FAULT": "explode"})
    lines = [line for line in job.output.splitlines() if "mpipar" in line]
    assert job.returncode == 2 and "<Mesh" not in job.output and len(lines) == 1
    assert lines[0].startswith("mpipar: error: MPIPAR_FAULT='explode': kind 'explode' is unknown: valid are raise")
