"""Two hosts: the torchrun and Slurm launches of docs/scaling.md, and a lost host.

A host is a process with its own network, names, mounts and processes; a cable connects two hosts.
All processes on a host end with it. A host ends after LIFETIME even if the tests crash. The
machine's own network is never touched.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from pathlib import Path

import pytest

from conftest import ROOT, assert_same_runs, final_state, make_shards, metrics, run_flags
from jobs import LIMIT, steps_done, until, workers

pytestmark = pytest.mark.slow
LIFETIME = 900  # seconds
ENVIRON = os.environ | dict(
    OMP_NUM_THREADS="1", PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}"
)
NAMESPACES = "unshare --net --uts --mount --pid --fork --kill-child --mount-proc"
NO_HOSTS = subprocess.call(
    f"{NAMESPACES} ip link add eth0 type veth", shell=True, stderr=subprocess.DEVNULL
)

# --------------------------------------------------------------------------------------------------
# Hosts


class Host:
    """A host with one cable and a name."""

    def __init__(self, number: int, directory: Path):
        self.address = f"10.0.0.{number + 1}"
        names = directory / "hosts"
        names.write_text("127.0.0.1 localhost\n10.0.0.1 node0\n10.0.0.2 node1\n")
        script = (
            f"mount --bind {names} /etc/hosts && hostname node{number} && ip link set lo up && "
            f"echo up && exec sleep {LIFETIME}"
        )
        self.holder = subprocess.Popen(
            [*NAMESPACES.split(), "sh", "-c", script], stdout=subprocess.PIPE, text=True
        )
        assert self.holder.stdout.readline() == "up\n"
        pid = self.holder.pid  # unshare's; its child has the namespaces
        self.pid = Path(f"/proc/{pid}/task/{pid}/children").read_text().strip()

    def start(self, command: str, **options) -> subprocess.Popen:
        """Start a command on this host."""
        enter = ["nsenter", "--target", self.pid, "--all", f"--wd={ROOT}"]
        return subprocess.Popen([*enter, *shlex.split(command)], **dict(env=ENVIRON) | options)

    def do(self, command: str):
        """Run a command on this host; it must succeed."""
        assert self.start(command).wait(60) == 0, command

    def die(self):
        """Kill this host and its processes. If the cable is down, the other host hears nothing."""
        self.holder.kill()
        self.holder.wait(60)


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
    if NO_HOSTS:
        pytest.skip("no namespaces with a cable here: root makes them, with unshare and ip")
    hosts = [Host(number, directory) for number in range(2)]
    try:
        plug_in(*hosts)
        yield hosts
    finally:
        for host in hosts:
            host.die()


def prepare(directory: Path) -> Path:
    """Make a working directory with train.py and data."""
    directory.mkdir()
    (directory / "train.py").symlink_to(ROOT / "train.py")
    make_shards(directory / "data")
    return directory


def from_docs(start: str) -> str:
    """Return the indented block of docs/scaling.md whose first line matches."""
    page = (ROOT / "docs" / "scaling.md").read_text()
    return textwrap.dedent(re.search(rf"^    {start}.*\n(    .*\n|\n)+", page, re.MULTILINE)[0])


def flags(steps: int, *more) -> str:
    """Return the flags of a small run."""
    words = "--global_batch 256 --precision fp32 --optimizer adamw"
    return shlex.join(run_flags("data", "checkpoints", words, *more, steps=steps))


# --------------------------------------------------------------------------------------------------
# torchrun

TIMEOUT = 10  # seconds that ranks wait for each other
WITHIN = 120  # seconds after a loss within which ranks must end
LAUNCH = from_docs("export TORCH_DISABLE").rstrip()


def launch(host: Host, directory: Path) -> subprocess.Popen:
    """Start the two-host command of docs/scaling.md on one host, with two devices in place of
    eight. It logs to `log`."""
    more = flags(30, f"--ckpt_every 5 --rank_timeout {TIMEOUT}", "--ckpt_dir", directory / "run")
    command = LAUNCH.replace("--nproc_per_node 8", "--nproc_per_node 2")
    script = f"cd {directory}; {command.replace('--shards 8', '--shards 2')} {more}"
    with open(directory / "log", "a") as log:
        return host.start(f"bash -c {shlex.quote(script)}", stdout=log, stderr=log)


def test_ranks_stop_when_a_host_is_lost_and_resume_on_its_return(tmp_path):
    """With --max-restarts the surviving launch waits for the same command on a new host."""
    run = prepare(tmp_path / "run")
    whole = prepare(tmp_path / "whole")
    log = (run / "log").read_text
    with two_hosts(tmp_path) as hosts:
        for process in [launch(host, whole) for host in hosts]:
            assert process.wait(LIMIT) == 0, (whole / "log").read_text()
        launches = [launch(host, run) for host in hosts]
        until(lambda: steps_done(run / "run") >= 7, log=log)
        hosts[1].do("ip link set eth0 down")
        # without its rendezvous, torchrun itself waits for minutes
        until(lambda: not workers(run / "run"), WITHIN, log=log)
        hosts[1].die()
        hosts[1] = Host(1, tmp_path)
        hosts[0].start("ip link delete eth0").wait(60)  # may be gone already
        plug_in(*hosts)
        launches[1] = launch(hosts[1], run)
        for process in launches:
            assert process.wait(LIMIT) == 0, log()
        assert "resuming from" in log()
    assert_same_runs(run / "run", whole / "run")


# --------------------------------------------------------------------------------------------------
# Slurm

STEPS = 150
ACTIVE = ("PENDING", "RUNNING", "COMPLETING")  # states of an unfinished job
# No munge, accounts or cgroups. A requeued job waits until its credential expires.
CONFIGURATION = """\
ClusterName=spider
SlurmctldHost=node0
SlurmUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=10
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
SchedulerParameters=sched_interval=1
SlurmdParameters=config_overrides
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
GresTypes=gpu
NodeName=node[0-1] CPUs=4 Gres=gpu:2
PartitionName=all Nodes=ALL Default=YES
"""
GPUS = "".join(f"NodeName=node[0-1] Name=gpu File=/dev/{name}\n" for name in ("null", "zero"))


class Slurm:
    """A cluster of two nodes, whose daemons end with the hosts."""

    def __init__(self, hosts: list[Host], directory: Path):
        self.host = hosts[0]
        self.directory = prepare(directory / "run")
        configuration = directory / "slurm.conf"
        configuration.write_text(CONFIGURATION.format(directory=directory))
        (directory / "gres.conf").write_text(GPUS)
        self.environ = ENVIRON | {"SLURM_CONF": str(configuration)}
        self.log = directory / "slurm.log"
        with open(self.log, "w") as log:
            for host, daemon in ((0, "slurmctld"), (0, "slurmd"), (1, "slurmd")):
                hosts[host].start(f"{daemon} -D", env=self.environ, stdout=log, stderr=log)
        nodes = "sinfo --noheader --format='%D %T'"
        until(lambda: self.command(nodes) == "2 idle", 60, log=self.log.read_text)

    def command(self, command: str) -> str:
        """Run a command on the first node; return its output."""
        process = self.host.start(command, env=self.environ, stdout=subprocess.PIPE, text=True)
        return process.communicate(timeout=60)[0].strip()


class BatchJob:
    """The script of docs/scaling.md as a named job. With `by_task`, Slurm's tasks are the ranks."""

    def __init__(self, slurm: Slurm, name: str, by_task: bool = False):
        self.slurm = slurm
        script = slurm.directory / f"{name}.sh"
        script.write_text(batch_script(by_task))
        submit = f"sbatch --parsable --job-name={name} --chdir={slurm.directory} {script}"
        self.id = slurm.command(submit)
        self.run = slurm.directory / "checkpoints" / name
        self.log = slurm.directory / f"{name}-{self.id}.log"

    def state(self) -> str:
        description = self.slurm.command(f"scontrol show job {self.id}")
        return re.search(r"JobState=(\w+)", description)[1]

    def end(self) -> str:
        """Wait until the job ends; return its state."""
        until(lambda: self.state() not in ACTIVE, log=self.log.read_text)
        return self.state()


def batch_script(by_task: bool) -> str:
    """Return the batch script of docs/scaling.md for a small model, with one CPU per node in place
    of eight GPUs."""
    script = from_docs("#!/bin/bash")
    if by_task:
        before, _, rest = script.partition("\nsrun ")
        _, _, after = rest.partition("&\n")
        script = "\n".join([before, from_docs("export .*MASTER_ADDR"), after])
    for size, small in (
        ("--gpus-per-node=8", "--gpus-per-node=1"),
        ("--cpus-per-task=64", "--cpus-per-task=1"),
        ("--shards 8", "--shards 1"),
        ("train.py", f"train.py {flags(STEPS)}"),
    ):
        assert script.count(size) == 1
        script = script.replace(size, small)
    return script


@pytest.mark.skipif(not shutil.which("slurmctld"), reason="no Slurm (Debian, Ubuntu: slurm-wlm)")
def test_slurm_job_at_its_time_limit_is_requeued_and_resumes_bitwise(
    tmp_path,
):
    """The uninterrupted job uses Slurm's tasks as ranks, without torchrun."""
    with two_hosts(tmp_path) as hosts:
        slurm = Slurm(hosts, tmp_path)
        limited = BatchJob(slurm, "limited")
        other = BatchJob(slurm, "other", by_task=True)
        until(lambda: steps_done(limited.run) >= 7, log=limited.log.read_text)
        slurm.command(f"scancel --batch --signal=USR1 {limited.id}")
        until(lambda: limited.state() == "PENDING", log=limited.log.read_text)
        assert 7 <= final_state(limited.run)["step"] == len(metrics(limited.run)) < STEPS
        assert "SIGTERM: stopped after step" in limited.log.read_text()
        for job in (other, limited):
            assert job.end() == "COMPLETED", job.log.read_text()
            assert ", ranks: 2" in job.log.read_text()
    assert_same_runs(limited.run, other.run)
    assert "resuming from" in limited.log.read_text()
