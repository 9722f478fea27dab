"""Start a job of several ranks as a user would, by mpirun, and see how it ends.

    job = run_job(4, ["-m", "mpipar.train", "--steps", "3"], env={"MPIPAR_FAULT": "raise:rank=2,step=3"})
    assert job.returncode == 1 and "[rank 2]" in job.stderr and job.seconds < 10

The mpirun is the one beside the running Python. A job that takes longer than `timeout` is killed, whole, and
its returncode is None. After every job `left_behind` names its processes that are still there: it should be
empty.
"""
import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import uuid

ROOT = pathlib.Path(__file__).resolve().parents[2]
_MARK = "MPIPAR_TEST_JOB"
_OPEN_MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
             "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
# Variables of a job that this process may itself be part of; a job inside it must not see them.
_OF_A_JOB = ("OMPI_COMM_WORLD_", "OMPI_UNIVERSE", "OMPI_FIRST_RANKS", "OMPI_MCA_", "PMIX_", "PRTE_", "PMI_",
             "MPI_LOCAL", "HYDRA_", "HYDI_", "MPIPAR_", "MPIR_", "MPITEST_")


@dataclasses.dataclass
class Job:
    """returncode: None where the time was over. left_behind: command lines of what outlived the job."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    left_behind: list

    @property
    def output(self):
        return self.stdout + self.stderr


def mpirun():
    """The mpirun beside the running Python, else the one on PATH."""
    beside = pathlib.Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else "mpirun"


def environment(extra=None):
    """The environment of a job: this process's without traces of MPI, and what Open MPI needs as root."""
    env = {name: value for name, value in os.environ.items()
           if not name.startswith(_OF_A_JOB) or name == "MPIPAR_CACHE_DIR"}
    path = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    return {**env, **_OPEN_MPI, "PYTHONPATH": path, "PYTHONFAULTHANDLER": "", **(extra or {})}


class Running:
    """A job that runs: `signal` it, then `finish`. `launcher`: another mpirun than the default."""

    def __init__(self, np, arguments, *, env=None, launcher=None, cwd=None):
        self._token = uuid.uuid4().hex
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        command = [launcher or mpirun(), "-np", str(np), sys.executable, *map(str, arguments)]
        self._start = time.monotonic()
        self.process = subprocess.Popen(
            command,
            env=environment({**(env or {}), _MARK: self._token}),
            cwd=cwd or ROOT,
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            start_new_session=True,
        )

    def ranks(self):
        """Process ids of the ranks."""
        return [pid for pid, line in self._processes() if line.startswith(sys.executable)]

    def output(self):
        """What was printed so far."""
        return _text(self._out) + _text(self._err)

    def wait_for(self, text, timeout=20):
        """Until `text` was printed; AssertionError if it is not in time."""
        end = time.monotonic() + timeout
        while text not in self.output():
            in_time = time.monotonic() < end and self.process.poll() is None
            assert in_time, f"{text!r} was not printed:\n{self.output()}"
            time.sleep(0.02)

    def finish(self, timeout=30):
        """Wait for the end, kill what is left, and say how it ended."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        seconds = time.monotonic() - self._start
        left = self._after_a_moment() if code is not None else []
        for pid, _ in self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        job = Job(code, _text(self._out), _text(self._err), seconds, left)
        self._out.close()
        self._err.close()
        return job

    def _after_a_moment(self):
        """The processes that are still there a second after the launcher has ended."""
        end = time.monotonic() + 1
        while self._processes() and time.monotonic() < end:
            time.sleep(0.02)
        return [line for _, line in self._processes()]

    def _processes(self):
        """(pid, command line) of the job's processes, known by the mark in their environment; no zombies."""
        found, mark = [], f"{_MARK}={self._token}".encode()
        for entry in pathlib.Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    line = (
                        (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    )
                    if line:
                        found.append((int(entry.name), line))
        return found


def run_job(np, arguments, *, env=None, timeout=30, launcher=None, cwd=None):
    """`mpirun -np np python *arguments` to its end; a Job."""
    return Running(np, arguments, env=env, launcher=launcher, cwd=cwd).finish(timeout)


def _text(file):
    file.flush()
    return os.pread(file.fileno(), 2**24, 0).replace(b"\0", b"").decode(errors="replace")
