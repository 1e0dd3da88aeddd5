"""Runs in processes of their own: forked, on one rank or several under gloo, with faults; by
torchrun, as users do."""

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
from spider.training import optim
from spider.training.distributed import World
from train import command_line

LIMIT = 240  # seconds in which processes must have ended, on a busy machine
IN_GROUP = "STILL IN ITS GROUP"  # a line in the log, of which NCCL would make several


# --------------------------------------------------------------------------------------------------
# Faults, each applied in one process: (fault, rank, argument)


def at_step(step, before=None, after=None):
    """In a step of this process, call `before` with the model, and change its sums by `after`."""
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
    """Have a function of train.py take an hour, longer than Job.end waits."""

    def sleep(*_, **__):
        print("SLEEPS", file=sys.stderr, flush=True)
        time.sleep(3600)

    setattr(train, name, sleep)


def file_limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def unread(_):
    """Leave stderr without a reader."""
    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing, 2)


# --------------------------------------------------------------------------------------------------
# Forked processes


def reserve_port() -> socket.socket:
    """Bind a port, so that nobody else gets it; nobody listens on it."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("", 0))
    return reserved


def rank_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return torchrun's variables for a rank of this machine."""
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
    world = World()
    world.join(torch.device("cpu"), shards, LIMIT)
    work(world)
    world.leave()


def run_ranks(processes, work, ranks: int, shards: int) -> list[int]:
    """Run `work`, a function of a module, of a World on several ranks; return the exit statuses."""
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
    """Run command lines in this process, as a rank.

    ports: one for each command line. faults: (fault, rank, argument)."""
    for name in train.ENVIRONMENT:
        os.environ.pop(name.upper(), None)
    os.environ |= environ
    os.chdir(directory)
    sys.stdout = open(os.devnull, "w")
    sys.stderr = open(log, "a", buffering=1)
    os.dup2(sys.stderr.fileno(), 2)
    do_nothing_slow()
    if ranks > 1:  # Muon's products too in fp32, where another order of sums shows least
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
    """Ranks that run a command line, or several in turn."""

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
        """Return exit statuses and the log; all ranks must have ended within LIMIT."""
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
    """The same on one rank, in this process, with Muon's products in fp32 too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optim, "has_bf16", lambda device: False)
        assert command_line(argv) == 0


# --------------------------------------------------------------------------------------------------
# Programs of their own


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
    """Return the ranks of torchrun whose command line names a directory, in the order of their
    start."""
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
# What they logged


def until(condition, seconds=LIMIT, log=str):
    """Wait until a condition holds; fail with what `log` returns."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, log()
        time.sleep(0.01)


def steps_done(directory) -> int:
    path = directory / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def last_lines(log: str) -> list[str]:
    """Return the lines with which the ranks ended."""
    return [line for line in log.splitlines() if line.startswith("train.py: ")]


SAME = "loss total_loss val_loss mean_loops bytes_per_segment boundary_loss core_loss".split()


def assert_same_losses(one, other, steps=20):
    """Losses, norms and evaluations of two runs agree to fp32 rounding, amplified by so many
    steps."""
    one_lines = metrics(one)
    other_lines = metrics(other)
    assert len(one_lines) == len(other_lines) == steps
    for a, b in zip(one_lines, other_lines, strict=True):
        assert a.keys() == b.keys()
        for name in SAME:
            expected = pytest.approx(b.get(name, 0), rel=5e-5, abs=1e-7)
            assert a.get(name, 0) == expected, (a["step"], name)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)
        # A near-tie in the choice of an expert moves these; they are means over micro-batches.
        assert a["aux_loss"] == pytest.approx(b["aux_loss"], rel=0.02)
        assert a["z_loss"] == pytest.approx(b["z_loss"], rel=0.05)
