"""Two hosts, each in namespaces of its own with a cable between them: the launch of the docs, and a lost host.

A host is a process with its own network, names, mounts and processes. All that runs there ends with it, and it ends by
itself after LIFETIME, whatever happens to the tests; the machine's own network is never touched.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from conftest import ROOT, assert_same_runs, make_shards, run_flags
from jobs import LIMIT, steps_done

pytestmark = pytest.mark.slow
LIFETIME = 900                            # seconds after which a host ends by itself
TIMEOUT = 10                              # seconds that ranks wait for each other
WITHIN = 120                              # seconds after a loss in which they must have ended


class Host:
    """A host with one cable and a name."""

    def __init__(self, number: int, names: Path):
        self.name, self.address, self.logs = f"node{number}", f"10.0.0.{number + 1}", names.parent
        script = (f"mount --bind {names} /etc/hosts && hostname {self.name} && ip link set lo up && echo up && "
                  f"exec sleep {LIFETIME}")
        self.holder = subprocess.Popen(["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child",
                                        "--mount-proc", "sh", "-c", script], stdout=subprocess.PIPE,
                                       stderr=subprocess.PIPE, text=True)
        if self.holder.stdout.readline() != "up\n":
            self.die()
            pytest.skip(f"no namespaces here: {self.holder.stderr.read().strip()}")
        pid = self.holder.pid             # of unshare; the namespaces are those of its child
        self.pid = Path(f"/proc/{pid}/task/{pid}/children").read_text().strip()

    def inside(self, *command, **more) -> subprocess.Popen:
        return subprocess.Popen(["nsenter", "--target", self.pid, "--all", f"--wd={ROOT}", *command], **more)

    def do(self, *command):
        assert self.inside(*command).wait(60) == 0, command

    def ranks(self) -> list[int]:
        """Processes of train.py that run here, as the machine outside counts them."""
        here, found = os.readlink(f"/proc/{self.pid}/ns/pid"), []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                if words[1:3] == ["-u", "train.py"] and os.readlink(f"/proc/{pid}/ns/pid") == here:
                    found.append(int(pid))
        return found

    def stop_all(self):
        """Kill what runs on it, but not the host."""
        self.inside("sh", "-c", "kill -9 -1").wait(60)

    def die(self):
        """End it with all that runs on it; without a word to the other host, if the cable is down."""
        self.holder.kill()
        self.holder.wait(60)


class Launch:
    """A command at work on a host."""

    def __init__(self, host: Host, command: str, directory: Path):
        self.log = host.logs / f"{host.name}-{time.monotonic_ns()}.log"
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        with open(self.log, "w") as log:
            self.process = host.inside("bash", "-c", f"cd {directory} && {command}", stdout=log, stderr=log,
                                       env=os.environ | {"OMP_NUM_THREADS": "1", "PATH": path})

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
    subprocess.run(["ip", "link", "add", "eth0", "netns", one.pid, "type", "veth", "peer", "name", "eth0", "netns",
                    other.pid], check=True)
    for host in (one, other):
        host.do("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
        host.do("ip", "link", "set", "eth0", "up")


@contextmanager
def two_hosts(directory: Path):
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


# ---------------------------------------------------------------------------------------------------------------------
# The launches of the docs, with two devices for eight


def launch_of_docs(start: str) -> str:
    """The first command of docs/scaling.md that starts like this, with two devices a host, after an export above it."""
    page = re.sub(r"\\\n\s*", "", (ROOT / "docs" / "scaling.md").read_text())
    lines = [" ".join(re.split("  #", line)[0].split()) for line in page.splitlines()]
    number = next(i for i, line in enumerate(lines) if line.startswith(start) and "train.py" in line)
    export = [line for line in lines[number - 1:number] if line.startswith("export ")]
    return " && ".join((*export, lines[number])).replace("--nproc_per_node 8", "--nproc_per_node 2").replace(
        "--shards 8", "--shards 2")


STEPS = 30


def prepare(directory: Path) -> Path:
    """A directory to start in, with train.py and data."""
    directory.mkdir()
    (directory / "train.py").symlink_to(ROOT / "train.py")
    make_shards(directory / "data")
    return directory


def launch(hosts: list[Host], command: str, directory: Path) -> list[Launch]:
    flags = ("--ckpt_every", "5", "--global_batch", "256", "--precision", "fp32", "--optimizer", "adamw",
             "--rank_timeout", str(TIMEOUT))
    command = " ".join([command, *run_flags("data", "checkpoints", *flags, steps=STEPS)])
    return [Launch(host, command, directory) for host in hosts]


def until(condition, jobs: list[Launch], limit: float = LIMIT):
    """Wait while all jobs run."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline and all(job.process.poll() is None for job in jobs), "\n".join(
            job.output() for job in jobs)
        time.sleep(0.02)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A run of two hosts to its end."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    run = prepare(directory / "run")
    with two_hosts(directory) as hosts:
        for one in launch(hosts, launch_of_docs("torchrun --nnodes 2"), run):
            status, log = one.end()
            assert status == 0, log
    return run / "checkpoints"


def test_survivors_of_a_lost_network_end_and_the_same_command_resumes(tmp_path, uninterrupted):
    run, command = prepare(tmp_path / "run"), launch_of_docs("torchrun --nnodes 2").replace("--max-restarts 3", "")
    with two_hosts(tmp_path) as hosts:
        jobs = launch(hosts, command, run)
        until(lambda: steps_done(run / "checkpoints") >= 7, jobs)
        assert [len(host.ranks()) for host in hosts] == [2, 2]
        hosts[1].do("ip", "link", "set", "eth0", "down")
        status, log = jobs[0].end(WITHIN)
        assert status != 0, log
        # Cut off from its rendezvous, torchrun itself waits for minutes; its ranks do not.
        until(lambda: not hosts[1].ranks(), jobs[1:], WITHIN)
        assert steps_done(run / "checkpoints") < STEPS
        hosts[1].stop_all()
        hosts[1].do("ip", "link", "set", "eth0", "up")
        for job in launch(hosts, command, run):
            status, log = job.end()
            assert status == 0, log
    assert_same_runs(run / "checkpoints", uninterrupted)


def test_a_host_that_died_is_waited_for_and_all_resume_from_the_checkpoint(tmp_path, uninterrupted):
    """By --max-restarts, without a word to the launch on the other host."""
    run, command = prepare(tmp_path / "run"), launch_of_docs("torchrun --nnodes 2")
    with two_hosts(tmp_path) as hosts, ExitStack() as closing:
        jobs = launch(hosts, command, run)
        until(lambda: steps_done(run / "checkpoints") >= 7, jobs)
        hosts[1].do("ip", "link", "set", "eth0", "down")
        hosts[1].die()
        until(lambda: not hosts[0].ranks(), jobs[:1], WITHIN)
        again = Host(1, tmp_path / "hosts")
        closing.callback(again.die)
        hosts[0].inside("ip", "link", "delete", "eth0").wait(60)  # it may be gone with the other host
        plug_in(hosts[0], again)
        jobs[1:] = launch([again], command, run)
        for job in jobs:
            status, log = job.end()
            assert status == 0, log
        assert "resuming from" in jobs[0].output()
    assert_same_runs(run / "checkpoints", uninterrupted)
