"""The batch script of docs/scaling.md under Slurm, on two hosts: its time limit, scancel, two jobs
at once."""

import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import ROOT, assert_same_runs, final_state, metrics, run_flags
from hosts import Host, prepare, two_hosts
from jobs import LIMIT, steps_done, until

pytestmark = pytest.mark.slow
STEPS = 60
ACTIVE = ("PENDING", "RUNNING", "COMPLETING")  # states of a job that has not ended
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol")
# Without munge, accounts and cgroups. A requeued job waits as long as a credential holds.
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


class Slurm:
    """A cluster of two nodes. Its daemons end with the hosts."""

    def __init__(self, hosts: list[Host], directory: Path):
        self.hosts = hosts
        self.directory = prepare(directory / "run")
        configuration = directory / "slurm.conf"
        configuration.write_text(CONFIGURATION.format(directory=directory))
        (directory / "gres.conf").write_text(
            f"NodeName=node[0-1] Name=gpu File={directory}/gpu[0-1]\n"
        )
        for number in range(2):  # devices like /dev/null stand for GPUs
            os.mknod(directory / f"gpu{number}", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environ = os.environ | {"SLURM_CONF": str(configuration), "PATH": path}
        self.log = directory / "slurm.log"
        with open(self.log, "w") as log:
            for host, daemon in (
                (hosts[0], "slurmctld"),
                (hosts[0], "slurmd"),
                (hosts[1], "slurmd"),
            ):
                host.inside(daemon, "-D", env=self.environ, stdout=log, stderr=log)

    def command(self, command: str) -> str:
        """Run a command on the first node; return what it prints, nothing if it fails."""
        process = self.hosts[0].inside(
            *shlex.split(command), env=self.environ, stdout=subprocess.PIPE, text=True
        )
        output, _ = process.communicate(timeout=60)
        return "" if process.returncode else output

    def wait_until_up(self):
        def is_up() -> bool:
            return self.command("sinfo --noheader --format='%D %T'").split() == ["2", "idle"]

        try:
            until(is_up, 60)
        except AssertionError:
            pytest.fail(f"Slurm did not start\n{self.log.read_text()}")


class BatchJob:
    """The script of docs/scaling.md, submitted under a name. With `by_task`, tasks are ranks."""

    def __init__(self, slurm: Slurm, name: str, by_task: bool = False):
        self.slurm = slurm
        self.submitted = time.monotonic()
        script = slurm.directory / f"{name}.sh"
        script.write_text(script_of_docs(by_task))
        submit = f"sbatch --parsable --job-name={name} --chdir={slurm.directory} {script}"
        self.id = slurm.command(submit).strip()
        assert self.id, slurm.log.read_text()
        self.checkpoints = Path("checkpoints") / name
        self.log = slurm.directory / f"{name}-{self.id}.log"
        self.frozen: list[int] = []

    @property
    def run(self) -> Path:
        return self.slurm.directory / self.checkpoints

    def state(self) -> str:
        description = self.slurm.command(f"scontrol show job {self.id}")
        return re.search(r"JobState=(\w+)", description)[1]

    def until(self, condition: Callable[[str], bool]) -> str:
        """Wait for a condition of its state; return the state."""
        deadline = time.monotonic() + LIMIT
        while not condition(state := self.state()):
            if time.monotonic() > deadline:
                log = self.log.read_text() if self.log.exists() else ""
                pytest.fail(f"{self.log.name} is {state}\n{log}")
            time.sleep(0.1)
        return state

    def until_steps(self, count: int):
        self.until(lambda state: steps_done(self.run) >= count or state not in ACTIVE)
        assert count <= steps_done(self.run) < STEPS, self.log.read_text()

    def end(self) -> str:
        return self.until(lambda state: state not in ACTIVE)

    def freeze(self):
        """Stop the processes of its ranks after a few steps."""
        self.until_steps(7)
        for host in self.slurm.hosts:
            self.frozen += host.ranks(str(self.checkpoints))
        for pid in self.frozen:
            os.kill(pid, signal.SIGSTOP)
        assert len(self.frozen) == 2, self.log.read_text()

    def thaw(self):
        for pid in self.frozen:
            os.kill(pid, signal.SIGCONT)

    def set_limit(self, minutes: int):
        self.slurm.command(f"scontrol update JobId={self.id} TimeLimit={minutes}")


def indented(start: str, page: str) -> str:
    """Return the indented lines of a page that begin with one that matches."""
    return textwrap.dedent(re.search(rf"^    {start}.*\n(    .*\n|\n)+", page, re.MULTILINE)[0])


def script_of_docs(by_task: bool) -> str:
    """Return the batch script of docs/scaling.md, with a small model on one CPU a node for eight
    GPUs."""
    page = (ROOT / "docs" / "scaling.md").read_text()
    script = indented("#!/bin/bash", page)
    if by_task:
        before, _, rest = script.partition("\nsrun ")
        _, _, after = rest.partition("&\n")
        script = "\n".join([before, indented("export .*MASTER_ADDR", page), after])
    flags = run_flags(
        "data",
        "checkpoints",
        "--ckpt_every 1000 --global_batch 128 --precision fp32 --optimizer adamw",
        steps=STEPS,
    )
    for size, small in (
        ("--gpus-per-node=8", "--gpus-per-node=1"),
        ("--cpus-per-task=64", "--cpus-per-task=1"),
        ("--shards 8", "--shards 1"),
        ("train.py", f"train.py {' '.join(flags)}"),
    ):
        assert script.count(size) == 1
        script = script.replace(size, small)
    return script


def is_pending(number: int, pid: int) -> bool:
    """Return whether a signal was sent to a process that has not taken it yet."""
    status = Path(f"/proc/{pid}/status").read_text()
    pending = int(re.search(r"^ShdPnd:\s*(\w+)", status, re.MULTILINE)[1], 16)
    return bool(pending >> (number - 1) & 1)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"no Slurm here: {', '.join(missing)} (Debian and Ubuntu: slurm-wlm)")
    directory = tmp_path_factory.mktemp("slurm")
    with two_hosts(directory) as hosts:
        slurm = Slurm(hosts, directory)
        slurm.wait_until_up()
        yield slurm


def test_job_at_its_time_limit_is_saved_requeued_and_ends_like_another_on_the_same_nodes(slurm):
    """Ranks are frozen until Slurm sends its signal, which takes up to half a minute; so both runs
    are short."""
    limited = BatchJob(slurm, "limited")
    limited.freeze()
    other = BatchJob(slurm, "other")
    other.freeze()
    limited.set_limit(minutes=3 + int(time.monotonic() - limited.submitted) // 60)
    limited.until(lambda _: all(is_pending(signal.SIGTERM, pid) for pid in limited.frozen))
    limited.thaw()
    limited.until(lambda state: state == "PENDING")
    assert final_state(limited.run)["step"] == len(metrics(limited.run)) < STEPS
    limited.set_limit(minutes=60)
    other.thaw()  # its torchrun must not depend on that of the job that ended
    for job in (other, limited):
        assert job.end() == "COMPLETED", job.log.read_text()
    assert_same_runs(limited.run, other.run)
    log = limited.log.read_text()
    assert log.index("SIGTERM: stopped after step") < log.index("resuming from")


def test_scancel_saves_and_ends_the_job_for_good(slurm):
    job = BatchJob(slurm, "cancelled")
    job.until_steps(7)
    slurm.command(f"scancel {job.id}")
    assert job.end() == "CANCELLED"
    assert 7 <= final_state(job.run)["step"] == len(metrics(job.run)) < STEPS


def test_tasks_of_one_gpu_each_are_ranks_without_torchrun(slurm):
    job = BatchJob(slurm, "by-task", by_task=True)
    assert job.end() == "COMPLETED", job.log.read_text()
    assert len(metrics(job.run)) == STEPS
    assert "2 ranks: 2 replicas of 1 shards" in job.log.read_text()
