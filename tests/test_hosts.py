"""Two hosts: the launch of the docs, and a lost host."""

import re
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from conftest import ROOT, assert_same_runs, run_flags
from hosts import Host, Launch, plug_in, prepare, two_hosts
from jobs import LIMIT, steps_done

pytestmark = pytest.mark.slow
TIMEOUT = 10  # seconds that ranks wait for each other
WITHIN = 120  # seconds after a loss in which they must have ended
STEPS = 30


def launch_of_docs() -> str:
    """Return the command of docs/scaling.md for two hosts, with two devices a host for eight, after
    an export above it."""
    page = re.sub(r"\\\n\s*", "", (ROOT / "docs" / "scaling.md").read_text())
    lines = [" ".join(line.split("  #")[0].split()) for line in page.splitlines()]
    starts = [line.startswith("torchrun --nnodes 2") and "train.py" in line for line in lines]
    at = starts.index(True)
    command = lines[at]
    if lines[at - 1].startswith("export "):
        command = f"{lines[at - 1]} && {command}"
    command = command.replace("--nproc_per_node 8", "--nproc_per_node 2")
    return command.replace("--shards 8", "--shards 2")


def launch(hosts: list[Host], command: str, directory: Path) -> list[Launch]:
    flags = run_flags(
        "data",
        "checkpoints",
        f"""
        --ckpt_every 5 --global_batch 256 --precision fp32 --optimizer adamw
        --rank_timeout {TIMEOUT}
        """,
        steps=STEPS,
    )
    return [Launch(host, " ".join([command, *flags]), directory) for host in hosts]


def end_well(jobs: list[Launch]):
    """Wait for the end of jobs, which must succeed."""
    for job in jobs:
        status, log = job.end()
        assert status == 0, log


def until(condition, jobs: list[Launch], limit: float = LIMIT):
    """Wait for a condition while all jobs run."""
    deadline = time.monotonic() + limit
    while not condition():
        running = all(job.process.poll() is None for job in jobs)
        if not running or time.monotonic() > deadline:
            pytest.fail("\n".join(job.output() for job in jobs))
        time.sleep(0.02)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A run of two hosts to its end."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    run = prepare(directory / "run")
    with two_hosts(directory) as hosts:
        end_well(launch(hosts, launch_of_docs(), run))
    return run / "checkpoints"


def test_survivors_of_a_lost_network_end_and_the_same_command_resumes(tmp_path, uninterrupted):
    run = prepare(tmp_path / "run")
    command = launch_of_docs().replace("--max-restarts 3", "")
    with two_hosts(tmp_path) as hosts:
        jobs = launch(hosts, command, run)
        until(lambda: steps_done(run / "checkpoints") >= 7, jobs)
        assert [len(host.ranks()) for host in hosts] == [2, 2]
        hosts[1].do("ip link set eth0 down")
        status, log = jobs[0].end(WITHIN)
        assert status != 0, log
        # Cut off from its rendezvous, torchrun itself waits for minutes; its ranks do not.
        until(lambda: not hosts[1].ranks(), jobs[1:], WITHIN)
        assert steps_done(run / "checkpoints") < STEPS
        hosts[1].stop_all()
        hosts[1].do("ip link set eth0 up")
        end_well(launch(hosts, command, run))
    assert_same_runs(run / "checkpoints", uninterrupted)


def test_host_that_died_is_waited_for_and_all_resume_from_the_checkpoint(tmp_path, uninterrupted):
    """By --max-restarts; nobody tells the launch on the other host."""
    run = prepare(tmp_path / "run")
    command = launch_of_docs()
    with two_hosts(tmp_path) as hosts, ExitStack() as closing:
        jobs = launch(hosts, command, run)
        until(lambda: steps_done(run / "checkpoints") >= 7, jobs)
        hosts[1].do("ip link set eth0 down")
        hosts[1].die()
        until(lambda: not hosts[0].ranks(), jobs[:1], WITHIN)
        again = Host(1, tmp_path / "hosts")
        closing.callback(again.die)
        hosts[0].inside(*"ip link delete eth0".split()).wait(60)  # if the other host left it
        plug_in(hosts[0], again)
        jobs[1:] = launch([again], command, run)
        end_well(jobs)
        assert "resuming from" in jobs[0].output()
    assert_same_runs(run / "checkpoints", uninterrupted)
