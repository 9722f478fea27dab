"""Two nodes on one machine, joined by a slow wire: network namespaces, a veth pair whose ends are limited by tc.

    with Wire(folder, "1gbit") as wire:
        done = wire.mpirun(["-m", "mpipar.bench", "overlap"])     # one rank on each node, each with a core of its own

Needs root, iproute2, taskset, MPICH's mpirun (hydra) and two cores; `missing()` says what is not there.
"""

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
import time

from tests.helpers.jobs import environment, mpirun

ADDRESSES = ("10.77.0.1", "10.77.0.2")
TOOLS = ("ip", "tc", "taskset")
MESSAGES = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "wire"}   # both ranks see the same memory, and may not use it

LAUNCH = """#!/bin/bash
# What mpirun calls instead of ssh: launch [-x] HOST COMMAND...
while [[ $1 == -* ]]; do shift; done
[ "$1" = {host} ] || {{ echo "unknown host $1" >&2; exit 1; }}
shift
exec {enter} bash -c "$*"
"""


def path():
    """PATH with the folders of a system administrator's tools."""
    return os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"


def missing():
    """Why there can be no such wire here; "" where there can."""
    if not sys.platform.startswith("linux") or os.geteuid():
        return "not root on Linux"
    absent = [tool for tool in TOOLS if not shutil.which(tool, path=path())]
    if absent:
        return f"no {', '.join(absent)}"
    if len(os.sched_getaffinity(0)) < 2:
        return "one core: two nodes need one each"
    about = subprocess.run([mpirun(), "--version"], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return "" if "HYDRA" in about.stdout else "mpirun is not MPICH's"


class NoWire(RuntimeError):
    """The system would not make it (a container without the right to, a kernel without tbf)."""


class Wire:
    """rate: of each direction, as tc writes it."""

    def __init__(self, folder, rate):
        self.folder, self.rate = pathlib.Path(folder), rate
        self.names = [f"mpipar-{os.getpid()}-{number}" for number in (0, 1)]
        self.cores = sorted(os.sched_getaffinity(0))[:2]

    def __enter__(self):
        first, second = self.names
        try:
            for name in self.names:
                self._call("ip", "netns", "add", name)
            self._call("ip", "link", "add", "wire", "netns", first, "type", "veth", "peer", "name", "wire", "netns", second)
            for name, address in zip(self.names, ADDRESSES):
                self._call("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "wire")
                for device in ("lo", "wire"):
                    self._call("ip", "-n", name, "link", "set", device, "up")
                self._call("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "wire", "root", "tbf",
                           "rate", self.rate, "burst", "256kb", "latency", "50ms")
            self._wait_until_up()
        except BaseException:
            self.__exit__()
            raise
        script = self.folder / "launch"
        script.write_text(LAUNCH.format(host=ADDRESSES[1], enter=" ".join(self._enter(1))))
        script.chmod(0o755)
        return self

    def __exit__(self, *_):
        for name in self.names:                                 # the pair goes with its ends
            subprocess.run(["ip", "netns", "del", name], env={**os.environ, "PATH": path()}, stderr=subprocess.DEVNULL, check=False)

    def mpirun(self, arguments, *, timeout):
        """`python *arguments` as one rank on each node; the finished process, its output in `stdout`."""
        command = [*self._enter(0), mpirun(), "-launcher", "ssh", "-launcher-exec", str(self.folder / "launch"), "-iface", "wire",
                   "-hosts", ",".join(ADDRESSES), "-ppn", "1", "-np", "2", sys.executable, *map(str, arguments)]
        process = subprocess.Popen(command, env={**environment(MESSAGES), "PATH": path()}, stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            text, _ = process.communicate(timeout=timeout)
        finally:
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)
                process.kill()
        return subprocess.CompletedProcess(command, process.returncode, text)

    def _wait_until_up(self):
        """The kernel takes a moment to see that both ends are there; a library would not find the device before."""
        end = time.monotonic() + 10
        while not all("state UP" in self._call("ip", "-n", name, "link", "show", "wire") for name in self.names):
            if time.monotonic() > end:
                raise NoWire("the wire did not come up in 10 s")
            time.sleep(0.05)

    def _enter(self, number):
        """The beginning of a command that shall run on a node, on the core that belongs to it."""
        return ["ip", "netns", "exec", self.names[number], "taskset", "-c", str(self.cores[number])]

    def _call(self, *command):
        done = subprocess.run(command, env={**os.environ, "PATH": path()}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              check=False)
        if done.returncode:
            raise NoWire(f"{' '.join(command)}: {done.stdout.strip()}")
        return done.stdout
