"""The fixture `slurm`: a cluster of three virtual nodes, one for the whole run of the tests."""

import os
import pathlib
import shutil
import subprocess
import tempfile
import time

import pytest

from tests.harness import launch

HERE = pathlib.Path(__file__).parent
TOOLS = ("slurmctld", "slurmd", "munged", "sbatch", "unshare")
FOREIGN = ("SLURM_", "SBATCH_", "SRUN_", "PMI", "OMPI_", "PRTE_", "HYDRA_")
ACTIVE = ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD")


class Slurm:
    """A cluster that is up. Commands run with its configuration, and with this Python's folder first in
    PATH."""

    def __init__(self, folder):
        self.folder = folder
        # Jobs inherit this. A test run that itself sits in a job must not hand that job's variables on.
        self.environment = {
            name: value for name, value in launch.environment().items() if not name.startswith(FOREIGN)
        }
        self.environment.update(SLURM_CONF=f"{folder}/slurm.conf", TMPDIR=f"{folder}/tmp")
        self.control("up")

    def control(self, command, *arguments):
        with open(f"{self.folder}/control.log", "ab+") as log:
            done = subprocess.run(
                ["bash", str(HERE / "cluster.sh"), command, self.folder, *arguments],
                timeout=120,
                env={**os.environ, "OWNER_PID": str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
            if done.returncode:
                log.seek(0)
                raise RuntimeError(log.read().decode(errors="replace")[-4000:])

    def run(self, *command, **environment):
        return subprocess.run(
            [str(word) for word in command],
            env={**self.environment, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            check=True,
            timeout=60,
        ).stdout

    def sbatch(self, *arguments, **environment):
        """Submits a job; returns its number."""
        return self.run("sbatch", "--parsable", *arguments, **environment).strip().split(";")[0]

    def job(self, number):
        """What `scontrol show job` says, as a dictionary of strings."""
        fields = self.run("scontrol", "-o", "show", "job", number).split()
        return dict(field.partition("=")[::2] for field in fields if "=" in field)

    def wait(self, number, until=None, timeout=120):
        """Waits until the job has ended, or until `until(its fields)` is true; returns its fields. (`sbatch
        --wait` looks only every 2 to 10 seconds.) A job that ends before its `until` is an error."""
        end = time.monotonic() + timeout
        while True:
            fields = self.job(number)
            ended = fields["JobState"] not in ACTIVE
            if until(fields) if until else ended:
                return fields
            if ended or time.monotonic() > end:
                output = pathlib.Path(fields.get("StdOut", ""))
                text = output.read_text(errors="replace")[-4000:] if output.is_file() else "none"
                raise AssertionError(
                    f"job {number} is {fields['JobState']}, {fields['Reason']}; output:\n{text}"
                )
            time.sleep(0.1)


@pytest.fixture(scope="session")
def slurm():
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    missing = [tool for tool in TOOLS if not shutil.which(tool, path=path)]
    if missing or os.geteuid():
        why = f"no SLURM here: {'no ' + ', '.join(missing) if missing else 'not root'}"
        if os.environ.get("CI"):
            pytest.fail(why)  # there a missing cluster is an error
        pytest.skip(why)
    folder = tempfile.mkdtemp(prefix="slurm.", dir="/tmp")  # short, for the names of sockets; so not tmp_path
    cluster = None
    try:
        cluster = Slurm(folder)
        yield cluster
    finally:
        subprocess.run(
            ["bash", str(HERE / "cluster.sh"), "down", folder], stdin=subprocess.DEVNULL, timeout=120
        )
        shutil.rmtree(folder, ignore_errors=True)
