"""Jobs of several ranks under gloo on the CPU, faults that befall them, and what tests read of them.

Ranks are forked from a server that has imported everything; `torchrun` starts them as a user does.
"""

import errno
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

import train
from conftest import ROOT, do_nothing_slow, metrics
from spider.errors import DataError
from spider.model import parameters
from spider.training import batches, checkpoint_format, checkpoint_writer, muon
from spider.training.heartbeat import Heartbeat
from train import command_line

SHARDED = ("--sharded_checkpoints",)
LIMIT = 240                               # seconds in which ranks must have ended, on a busy machine


# ---------------------------------------------------------------------------------------------------------------------
# Faults of a rank, at its optimizer step number `step`

def at_step(step, before=None, after=lambda sums: sums):
    accumulate, steps = train.accumulate, iter(range(1 << 30))

    def faulty(model, *rest):
        now = next(steps) == step
        if now and before:
            before(model)
        sums, counts = accumulate(model, *rest)
        return after(sums) if now else sums, counts
    train.accumulate = faulty


def nan(step):
    at_step(step, after=lambda sums: {name: number * float("nan") for name, number in sums.items()})


def memory(step):
    def fail(*_):
        raise MemoryError("can't allocate memory: you tried to allocate 1 GB")
    at_step(step, before=lambda model: model.core.register_forward_pre_hook(fail))


def die(step):
    at_step(step, before=lambda model: model.core.register_forward_pre_hook(
        lambda *_: os.kill(os.getpid(), signal.SIGKILL)))


def drift(step):
    at_step(step, before=lambda model: model.engram_input.table.weight.data.add_(0.5))


def bad_data(step):
    fetch = batches.Feed._fetch

    def faulty(self, number, first):
        if number == step:
            raise DataError("bad.bin: byte offset 6: id 999 is above 271: damaged, or not a shard")
        return fetch(self, number, first)
    batches.Feed._fetch = faulty


def full_disk(step):
    write = checkpoint_writer.write_archive

    def faulty(file, state):
        if state["step"] <= step:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, state)
    checkpoint_writer.write_archive, checkpoint_writer.CheckpointWriter.retry_after = faulty, 0.0


def slow_disk(seconds):
    """Each file of a checkpoint takes so long."""
    opened = checkpoint_format.HashingFile.__init__

    def slow(self, file):
        time.sleep(seconds)
        opened(self, file)
    checkpoint_format.HashingFile.__init__ = slow


def late(step):
    time.sleep(step)


def whole_width(step):
    parameters.halved_weights = lambda model: []


def mistake(step):
    def fail(*_):
        raise ValueError("a mistake in the code")
    at_step(step, before=fail)


def slow_to_name(seconds):
    name = Heartbeat._name_lost_ranks

    def slow(self):
        time.sleep(seconds)
        return name(self)
    Heartbeat._name_lost_ranks = slow


def stop_early(step):
    """A signal before the first step, when weights are drawn."""
    build_model = train.build_model

    def signalled(*given):
        os.kill(os.getpid(), signal.SIGTERM)
        return build_model(*given)
    train.build_model = signalled


# ---------------------------------------------------------------------------------------------------------------------
# Jobs

def child(rank, ranks, ports, argvs, log, faults):
    os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
                       MASTER_ADDR="127.0.0.1")
    stream = open(log, "a", buffering=1)
    os.dup2(stream.fileno(), 2)
    sys.stderr = stream
    do_nothing_slow()
    muon.multiplies_bf16 = lambda device: False  # Muon's products too in fp32, where another order of sums shows least
    for fault, victim, step in faults:
        if victim == rank:
            fault(step)
    for i, argv in enumerate(argvs):
        os.environ["MASTER_PORT"] = str(ports[i])
        status = command_line(argv)
    sys.exit(status)


class Job:
    """Ranks at work on a command line, or several in turn; `faults`: (what, to which rank, at which step) each."""

    def __init__(self, processes, tmp_path, ranks, *argvs, faults=()):
        self.reserved = [socket.socket() for _ in argvs]  # bound and not listening: nobody else is given their ports
        for reserved in self.reserved:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind(("", 0))
        ports = [reserved.getsockname()[1] for reserved in self.reserved]
        self.log = tmp_path / f"log-{time.monotonic_ns()}"
        settings = ranks, ports, argvs, str(self.log), faults
        self.ranks = [processes.Process(target=child, args=(rank, *settings), daemon=True) for rank in range(ranks)]
        for process in self.ranks:
            process.start()

    def end(self, limit=LIMIT) -> tuple[list[int], str]:
        """Return exit statuses and the log; all ranks must have ended within the limit."""
        deadline = time.monotonic() + limit
        for process in self.ranks:
            process.join(max(0, deadline - time.monotonic()))
        hung = [rank for rank, process in enumerate(self.ranks) if process.is_alive()]
        for process in self.ranks:
            process.kill()
        for reserved in self.reserved:
            reserved.close()
        log = self.log.read_text()
        assert not hung, f"ranks {hung} hung\n{log}"
        return [process.exitcode for process in self.ranks], log


def torchrun(argv, *more):
    return subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
                             *more, "train.py", *argv], cwd=ROOT, stderr=subprocess.PIPE, text=True,
                            start_new_session=True)


def workers(directory) -> list[int]:
    """Processes of train.py whose command line names a directory, in the order of their start."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline") as file:
                words = file.read().split("\0")
        except OSError:
            continue
        if str(directory) in words and "train.py" in words and "torch.distributed.run" not in words:
            found.append(int(pid))
    return sorted(found)


# ---------------------------------------------------------------------------------------------------------------------
# What is read of them

def until(condition, seconds=LIMIT):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def steps_done(directory) -> int:
    path = directory / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def last_lines(log: str) -> list[str]:
    return [line for line in log.splitlines() if line.startswith("train.py:")]


def runs_alone(argv):
    """The same on one rank, in this process, with Muon's products in fp32 too."""
    multiplies = muon.multiplies_bf16
    muon.multiplies_bf16 = lambda device: False
    try:
        assert command_line(argv) == 0
    finally:
        muon.multiplies_bf16 = multiplies


def assert_same_losses(one, other, steps=20):
    """Losses, norms and evaluations of two runs agree to fp32 rounding, amplified by so many steps."""
    one, other = metrics(one), metrics(other)
    assert len(one) == len(other) == steps
    for a, b in zip(one, other):
        assert a.keys() == b.keys()
        for name in ("loss", "total_loss", "val_loss", "mean_loops", "bytes_per_segment", "boundary_loss",
                     "core_loss"):
            assert a.get(name, 0) == pytest.approx(b.get(name, 0), rel=5e-5, abs=1e-7), (a["step"], name)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)
        # Of these a token whose choice of expert is a near-tie moves one; they are means over micro-batches.
        assert a["aux_loss"] == pytest.approx(b["aux_loss"], rel=0.02)
        assert a["z_loss"] == pytest.approx(b["z_loss"], rel=0.05)
