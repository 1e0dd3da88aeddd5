"""Run training in other processes: forked, on one or several gloo ranks, with injected faults; or
with train.py and torchrun, as users do."""

import itertools
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import train
from conftest import ROOT, do_nothing_slow, metrics
from spider.training import distributed, optim
from train import command_line

LIMIT = 240  # seconds in which processes must end, even on a busy machine
IN_GROUP = "STILL IN ITS GROUP"  # logged if a process group is left open; NCCL would warn at length


# --------------------------------------------------------------------------------------------------
# Faults: (fault, rank, argument) applies a fault in the process of one rank


def at_step(step, before=None, after=None):
    """In a step of this process, call `before` with the model, and apply `after` to the sums."""
    accumulate = train.accumulate
    steps = itertools.count()

    def faulty(model, *rest):
        is_due = next(steps) == step
        if is_due and before:
            before(model)
        sums = accumulate(model, *rest)
        if is_due and after:
            sums = after(sums)
        return sums

    train.accumulate = faulty


def nan(step):
    at_step(step, after=lambda sums: sums | dict(total_loss=sums["total_loss"] * float("nan")))


def out_of_memory(step):
    def fail(*_):
        raise MemoryError("can't allocate memory: you tried to allocate 1 GB")

    at_step(step, before=lambda model: model.core.register_forward_pre_hook(fail))


def signalled(step):
    at_step(step, before=lambda _: os.kill(os.getpid(), signal.SIGTERM))


def sleeps(name):
    """Make a function of train.py take an hour, longer than Job.end waits."""

    def sleep(*_, **__):
        print("SLEEPS", file=sys.stderr, flush=True)
        time.sleep(3600)

    setattr(train, name, sleep)


def file_limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def unread(_):
    """Make stderr a pipe without a reader."""
    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing, 2)


# --------------------------------------------------------------------------------------------------
# Forked processes


def reserve_port() -> socket.socket:
    """Bind a port, without listening, so that no other process gets it."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("", 0))
    return reserved


def rank_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the environment that torchrun gives a rank on this machine."""
    return dict(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )


def work_in_group(rank, ranks, shards, port, work):
    os.environ |= rank_variables(rank, ranks, port)
    world = distributed.World()
    world.join(torch.device("cpu"), shards, LIMIT)
    work(world)
    world.leave()


def run_ranks(processes, work, ranks: int, shards: int) -> list[int]:
    """Run `work(world)` on several ranks; return the exit statuses. `work` must be a module's
    function, so that it can be pickled."""
    with reserve_port() as reserved:
        port = reserved.getsockname()[1]
        forked = [
            processes.Process(target=work_in_group, args=(rank, ranks, shards, port, work))
            for rank in range(ranks)
        ]
        for process in forked:
            process.start()
        for process in forked:
            process.join(LIMIT)
    return [process.exitcode for process in forked]


def run_as_rank(rank, ranks, ports, argvs, faults, directory, environ, log):
    """Run command lines in this process as a rank, each command line with its own port."""
    for name in train.ENVIRONMENT:
        os.environ.pop(name.upper(), None)
    os.environ |= environ
    os.chdir(directory)
    sys.stdout = open(os.devnull, "w")
    sys.stderr = open(log, "a", buffering=1)
    os.dup2(sys.stderr.fileno(), 2)
    do_nothing_slow()
    if ranks > 1:  # Muon's products in fp32 too, where the order of sums matters least
        optim.has_bf16 = lambda device: False
    for fault, victim, argument in faults:
        if victim == rank:
            fault(argument)
    for argv, port in zip(argvs, ports, strict=True):
        os.environ |= rank_variables(rank, ranks, port)
        status = command_line(argv)
    if torch.distributed.is_initialized():
        print(IN_GROUP, file=sys.stderr)
    sys.exit(status)


class Job:
    """Ranks that run one or more command lines in turn."""

    def __init__(self, processes, directory, ranks, *argvs, faults=(), **environ):
        self.reserved = [reserve_port() for _ in argvs]
        self.log = directory / f".job-{time.monotonic_ns()}.log"
        settings = dict(
            ranks=ranks,
            ports=[reserved.getsockname()[1] for reserved in self.reserved],
            argvs=argvs,
            faults=faults,
            directory=directory,
            environ=environ,
            log=self.log,
        )
        self.ranks = [
            processes.Process(target=run_as_rank, args=(rank,), kwargs=settings, daemon=True)
            for rank in range(ranks)
        ]
        for process in self.ranks:
            process.start()

    def log_so_far(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def wait_for(self, words: str):
        until(lambda: words in self.log_so_far())

    def end(self) -> tuple[list[int], str]:
        """Wait for all ranks to end within LIMIT; return exit statuses and the log."""
        deadline = time.monotonic() + LIMIT
        for process in self.ranks:
            process.join(max(0, deadline - time.monotonic()))
        hung = [rank for rank, process in enumerate(self.ranks) if process.is_alive()]
        for process in self.ranks:
            process.kill()
        for reserved in self.reserved:
            reserved.close()
        assert not hung, f"ranks {hung} hung\n{self.log_so_far()}"
        return [process.exitcode for process in self.ranks], self.log_so_far()


def runs_alone(argv):
    """Run a command line on one rank, in this process, with Muon's products in fp32 too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optim, "has_bf16", lambda device: False)
        assert command_line(argv) == 0


# --------------------------------------------------------------------------------------------------
# Programs


def command(*argv, cwd, **environ) -> subprocess.CompletedProcess:
    """Run train.py as a user does."""
    without_flags = {
        name: value for name, value in os.environ.items() if name.lower() not in train.ENVIRONMENT
    }
    return subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *map(str, argv)],
        cwd=cwd,
        env=without_flags | environ,
        text=True,
        errors="replace",
        capture_output=True,
        timeout=600,
    )


def torchrun(argv, *more):
    launch = "-m torch.distributed.run --standalone --nproc_per_node 2".split()
    return subprocess.Popen(
        [sys.executable, *launch, *more, "train.py", *argv],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def workers(directory) -> list[int]:
    """Return the process ids of torchrun's ranks whose command line names a directory, in order of
    their start."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        except OSError:
            continue
        if words[1:3] == ["-u", "train.py"] and str(directory) in words:
            found.append(int(pid))
    return sorted(found)


# --------------------------------------------------------------------------------------------------
# Logs and metrics


def until(condition, seconds=LIMIT, log=str):
    """Wait until a condition holds; after `seconds`, fail with the result of `log`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, log()
        time.sleep(0.01)


def steps_done(directory) -> int:
    path = directory / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def last_lines(log: str) -> list[str]:
    """Return the final lines of all ranks."""
    return [line for line in log.splitlines() if line.startswith("train.py: ")]


COMPARED = "loss total_loss val_loss mean_loops bytes_per_segment boundary_loss core_loss".split()


def assert_same_losses(one, other, steps=20):
    """Check that losses, gradient norms and evaluations of two runs agree to fp32 rounding, as
    amplified over this many steps."""
    one_lines = metrics(one)
    other_lines = metrics(other)
    assert len(one_lines) == len(other_lines) == steps
    for a, b in zip(one_lines, other_lines, strict=True):
        assert a.keys() == b.keys()
        for name in COMPARED:
            expected = pytest.approx(b.get(name, 0), rel=5e-5, abs=1e-7)
            assert a.get(name, 0) == expected, (a["step"], name)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)
        # A near-tie between experts changes these means over micro-batches.
        assert a["aux_loss"] == pytest.approx(b["aux_loss"], rel=0.02)
        assert a["z_loss"] == pytest.approx(b["z_loss"], rel=0.05)
