"""Two hosts, each in namespaces of its own with a cable between them.

A host is a process with its own network, names, mounts and processes. All that runs there ends with
it. It ends by itself after LIFETIME, whatever happens to the tests. The machine's own network is
never touched.
"""

import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from conftest import ROOT, make_shards
from jobs import LIMIT

LIFETIME = 900  # seconds after which a host ends by itself


class Host:
    """A host with one cable and a name."""

    def __init__(self, number: int, names: Path):
        self.name = f"node{number}"
        self.address = f"10.0.0.{number + 1}"
        self.logs = names.parent
        script = (
            f"mount --bind {names} /etc/hosts && hostname {self.name} && ip link set lo up && "
            f"echo up && exec sleep {LIFETIME}"
        )
        own = "--net --uts --mount --pid --fork --kill-child --mount-proc"
        self.holder = subprocess.Popen(
            ["unshare", *own.split(), "sh", "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if self.holder.stdout.readline() != "up\n":
            self.die()
            pytest.skip(f"no namespaces here: {self.holder.stderr.read().strip()}")
        pid = self.holder.pid  # unshare's; the namespaces are those of its child
        self.pid = Path(f"/proc/{pid}/task/{pid}/children").read_text().strip()

    def inside(self, *command, **options) -> subprocess.Popen:
        """Start a command on this host."""
        enter = ["nsenter", "--target", self.pid, "--all", f"--wd={ROOT}"]
        return subprocess.Popen([*enter, *command], **options)

    def do(self, command: str):
        """Run a command on this host; it must succeed."""
        assert self.inside(*command.split()).wait(60) == 0, command

    def ranks(self, word: str = "train.py") -> list[int]:
        """Return the processes of train.py here that have a word in their command line, by their
        numbers outside."""
        here = os.readlink(f"/proc/{self.pid}/ns/pid")
        pids = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                is_rank = words[1:3] == ["-u", "train.py"] and word in words
                if is_rank and os.readlink(f"/proc/{pid}/ns/pid") == here:
                    pids.append(int(pid))
        return pids

    def stop_all(self):
        """Kill what runs on it, but not the host."""
        self.inside("sh", "-c", "kill -9 -1").wait(60)

    def die(self):
        """End it with all that runs on it. If the cable is down, the other host hears nothing."""
        self.holder.kill()
        self.holder.wait(60)


class Launch:
    """A command at work on a host."""

    def __init__(self, host: Host, command: str, directory: Path):
        self.log = host.logs / f"{host.name}-{time.monotonic_ns()}.log"
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        with open(self.log, "w") as log:
            self.process = host.inside(
                *("bash", "-c", f"cd {directory} && {command}"),
                stdout=log,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PATH": path},
            )

    def end(self, limit: float = LIMIT) -> tuple[int, str]:
        """Wait for its end; return its status and output."""
        try:
            status = self.process.wait(limit)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{self.log.name} did not end in {limit} s\n{self.output()}")
        return status, self.output()

    def output(self) -> str:
        return self.log.read_text()


def plug_in(one: Host, other: Host):
    """Put a cable between two hosts."""
    cable = f"ip link add eth0 netns {one.pid} type veth peer name eth0 netns {other.pid}"
    subprocess.run(cable.split(), check=True)
    for host in (one, other):
        host.do(f"ip address add {host.address}/24 dev eth0")
        host.do("ip link set eth0 up")


@contextmanager
def two_hosts(directory: Path):
    """Start two hosts with a cable between them, or skip the test."""
    missing = [name for name in ("unshare", "nsenter", "ip", "mount") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"no namespaces here: {', '.join(missing) or 'only root makes them'}")
    names = directory / "hosts"
    names.write_text("127.0.0.1 localhost\n10.0.0.1 node0\n10.0.0.2 node1\n")
    with ExitStack() as closing:
        hosts = []
        for number in range(2):
            hosts.append(Host(number, names))
            closing.callback(hosts[-1].die)
        try:
            plug_in(*hosts)
        except subprocess.CalledProcessError:
            pytest.skip("no cable between namespaces here: ip link add ... type veth")
        yield hosts


def prepare(directory: Path) -> Path:
    """A directory to start in, with train.py and data."""
    directory.mkdir()
    (directory / "train.py").symlink_to(ROOT / "train.py")
    make_shards(directory / "data")
    return directory
