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


# --------------------------------------------------------------------------------------------------
# The launches of the docs, with two devices for eight


def launch_of_docs(start: str) -> str:
    """The first command of docs/scaling.md that starts like this, with two devices a host, after an
    export above it."""
    page = re.sub(r"\\\n\s*", "", (ROOT / "docs" / "scaling.md").read_text())
    lines = [" ".join(re.split("  #", line)[0].split()) for line in page.splitlines()]
    number = next(
        i for i, line in enumerate(lines) if line.startswith(start) and "train.py" in line
    )
    export = [line for line in lines[number - 1 : number] if line.startswith("export ")]
    return (
        " && ".join((*export, lines[number]))
        .replace("--nproc_per_node 8", "--nproc_per_node 2")
        .replace("--shards 8", "--shards 2")
    )


STEPS = 30


def launch(hosts: list[Host], command: str, directory: Path) -> list[Launch]:
    flags = (
        "--ckpt_every",
        "5",
        "--global_batch",
        "256",
        "--precision",
        "fp32",
        "--optimizer",
        "adamw",
        "--rank_timeout",
        str(TIMEOUT),
    )
    command = " ".join([command, *run_flags("data", "checkpoints", *flags, steps=STEPS)])
    return [Launch(host, command, directory) for host in hosts]


def until(condition, jobs: list[Launch], limit: float = LIMIT):
    """Wait while all jobs run."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline and all(job.process.poll() is None for job in jobs), (
            "\n".join(job.output() for job in jobs)
        )
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
    run, command = (
        prepare(tmp_path / "run"),
        launch_of_docs("torchrun --nnodes 2").replace("--max-restarts 3", ""),
    )
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
        # it may be gone with the other host
        hosts[0].inside("ip", "link", "delete", "eth0").wait(60)
        plug_in(hosts[0], again)
        jobs[1:] = launch([again], command, run)
        for job in jobs:
            status, log = job.end()
            assert status == 0, log
        assert "resuming from" in jobs[0].output()
    assert_same_runs(run / "checkpoints", uninterrupted)
