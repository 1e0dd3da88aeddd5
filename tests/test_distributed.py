"""Several ranks, under gloo on the CPU: the numbers of one, one checkpoint for any number, no hang.

Ranks are forked from a server that has imported everything; the tests named for torchrun go through that.
"""

import errno
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import pytest
import torch

import train
from conftest import ROOT, SMALL, assert_same, final_state, make_shards, metrics, run_flags
from spider import errors
from spider.errors import WorldError
from spider.model import parameters
from spider.training import batches, checkpoint_format, checkpoint_writer, muon, stopping
from spider.training.checkpoint import find_checkpoints
from spider.training.heartbeat import Heartbeat
from spider.training.ranks import World, agree_on_prefix
from train import command_line, parse_args

PARTS = ("--sharded_checkpoints",)
LIMIT = 240                               # seconds in which ranks must have ended, on a busy machine


# ---------------------------------------------------------------------------------------------------------------------
# What happens to a rank at its optimizer step number `step`

def at_step(step, before=None, after=lambda sums: sums):
    accumulate, steps = train.accumulate, iter(range(1 << 30))

    def faulty(model, *rest):
        now = next(steps) == step
        if now and before:
            before(model)
        sums, tokens = accumulate(model, *rest)
        return after(sums) if now else sums, tokens
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
            raise errors.DataError("bad.bin: byte offset 6: id 999 is above 271: damaged, or no shard")
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


def child(rank, ranks, ports, argvs, log, faults):
    os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
                       MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1")
    stream = open(log, "a", buffering=1)
    os.dup2(stream.fileno(), 2)
    sys.stderr = stream
    torch.set_num_threads(1)
    muon.multiplies_bf16 = lambda device: False  # Muon's products too in fp32, where another order of sums shows least
    for fault, victim, step in faults:
        if victim == rank:
            fault(step)
    for i, argv in enumerate(argvs):
        os.environ["MASTER_PORT"] = str(ports[i])
        status = command_line(argv)
    sys.exit(status)


@pytest.fixture(scope="module")
def processes():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["test_distributed", "bitsandbytes"])
    return context


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
        """Exit statuses and what was said; all ranks must have ended within the limit."""
        deadline = time.monotonic() + limit
        for process in self.ranks:
            process.join(max(0, deadline - time.monotonic()))
        hung = [rank for rank, process in enumerate(self.ranks) if process.is_alive()]
        for process in self.ranks:
            process.kill()
        for reserved in self.reserved:
            reserved.close()
        said = self.log.read_text()
        assert not hung, f"ranks {hung} hung\n{said}"
        return [process.exitcode for process in self.ranks], said


def until(condition, seconds=LIMIT):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def steps_done(directory) -> int:
    path = directory / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


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


CASES = {                                 # flags, and those that only ranks get
    "replicated": (("--optimizer", "muon", "--random_loops"), ()),
    "sharded": (("--optimizer", "adamw", "--engram_reset"), ("--shards", "2", "--sample_every", "10")),
}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_go_on_from_one_and_one_from_two_with_the_same_losses(tmp_path, shards, processes, case):
    """Ten steps on one rank, then ten on two, and the other way round, against twenty on one; by --global_batch."""
    flags, of_ranks = CASES[case]
    make_shards(tmp_path / "other")
    flags = (*flags, "--global_batch", "128", "--precision", "fp32", "--data_dir",
             f"{shards}:0.7,{tmp_path / 'other'}:0.3", "--ckpt_every", "10")
    runs_alone(run_flags(shards, tmp_path / "alone", *flags, steps=20))
    for name, first in (("from one", 1), ("from two", 2)):
        for ranks, steps in ((first, 10), (3 - first, 20)):
            argv = run_flags(shards, tmp_path / name, *flags, *of_ranks * (ranks > 1), steps=steps)
            if ranks == 1:
                runs_alone(argv)
            else:
                statuses, said = Job(processes, tmp_path, ranks, argv).end()
                assert statuses == [0, 0], said
                assert said.count(f"step {steps}/{steps}") == 1 and "not the same run" not in said
                assert said.count(f"step {steps} continues") == ("--sample_every" in argv)
        assert_same_losses(tmp_path / "alone", tmp_path / name)
        one, other = (final_state(tmp_path / part) for part in ("alone", name))
        assert one.keys() == other.keys() and one["flags"] == other["flags"]
        assert {k: v.shape for k, v in one["model_state_dict"].items()} == {
            k: v.shape for k, v in other["model_state_dict"].items()}


@pytest.mark.slow
@pytest.mark.parametrize("ranks, split", ((2, 1), (2, 2), (3, 3), (4, 1), (4, 2), (4, 4)))
@pytest.mark.parametrize("optimizer", ("muon", "adamw", "adamw8bit"))
def test_any_layout_gives_the_losses_of_one_rank_over_twenty_steps(tmp_path, shards, processes, ranks, split,
                                                                   optimizer):
    """Random loops, an epoch every few steps that empties the tables, dropout from the second on, an evaluation smaller
    than ranks x batch. Three or four shards would cut the blocks of 8-bit AdamW here: refused."""
    flags = ("--optimizer", optimizer, "--random_loops", "--engram_reset", "--dropout", "0.2", "--precision", "fp32",
             "--global_batch", "768", "--eval_tokens", "96", "--no_gradient_checkpointing")
    runs_alone(run_flags(shards, tmp_path / "alone", *flags, steps=20))
    argv = run_flags(shards, tmp_path / "ranks", *flags, "--shards", str(split), steps=20)
    statuses, said = Job(processes, tmp_path, ranks, argv).end()
    if optimizer == "adamw8bit" and split > 2:
        assert statuses == [2] * ranks and "8-bit AdamW scales 256 numbers together" in said, said
        return
    assert statuses == [0] * ranks, said
    assert_same_losses(tmp_path / "alone", tmp_path / "ranks")


def test_words_places_and_the_cores_own_loss_are_those_of_one_rank(tmp_path, shards, processes):
    """Few steps: at the start next to nothing is handed back, and normed for the core's own loss its rounding grows."""
    flags = ("--precision", "fp32", "--global_batch", "256",
             "--set", f"{SMALL},boundaries=words,places=3,core_loss_weight=0.2")
    runs_alone(run_flags(shards, tmp_path / "alone", *flags, steps=6))
    statuses, said = Job(processes, tmp_path, 2, run_flags(shards, tmp_path / "ranks", *flags, "--shards", "2",
                                                           steps=6)).end()
    assert statuses == [0] * 2, said
    assert_same_losses(tmp_path / "alone", tmp_path / "ranks", 6)


@pytest.mark.slow
def test_a_batch_without_a_segment_on_one_rank_neither_hangs_nor_changes_losses(tmp_path, processes):
    directory = tmp_path / "data"
    directory.mkdir()
    ids = np.full(4000, 97, "<u2")
    ids[::300] = 32                       # with sequences of 32 bytes, most rows have no segment at all
    ids.tofile(directory / "train.bin")
    flags = ("--set", f"{SMALL},boundaries=whitespace", "--precision", "fp32", "--global_batch", "256")
    runs_alone(run_flags(directory, tmp_path / "alone", *flags, steps=20))
    argv = run_flags(directory, tmp_path / "ranks", *flags, "--shards", "2", steps=20)
    statuses, said = Job(processes, tmp_path, 4, argv).end()
    assert statuses == [0] * 4, said
    assert_same_losses(tmp_path / "alone", tmp_path / "ranks")


@pytest.mark.parametrize("ranks, split, steps", (
    (2, 1, 2), (2, 2, 2), *(pytest.param(4, split, 12, marks=pytest.mark.slow) for split in (2, 4))))
def test_on_the_same_layout_a_stopped_run_goes_on_bit_for_bit(tmp_path, shards, processes, ranks, split, steps):
    flags = ("--micro_batch", "1", "--shards", str(split), "--optimizer", "muon", "--ckpt_every", "3", "--random_loops",
             "--eval_every", "4" if steps > 2 else "0")
    argvs = [run_flags(shards, tmp_path / name, *flags, steps=end)
             for name, end in (("whole", steps), ("parts", steps // 2), ("parts", steps))]
    statuses, said = Job(processes, tmp_path, ranks, *argvs).end()
    assert statuses == [0] * ranks and said.count("resumes from") == 1, said
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "parts")
    assert_same(final_state(tmp_path / "whole"), final_state(tmp_path / "parts"))


@pytest.mark.parametrize("precision", ("bf16", pytest.param("fp8", marks=pytest.mark.slow)))
def test_weights_gathered_in_bf16_give_the_bits_of_those_gathered_in_fp32(tmp_path, shards, processes, precision):
    """With one micro-step, where they are gathered twice, and in evaluations; both ranks are told not to in one run."""
    flags = ("--precision", precision, "--shards", "2", "--micro_batch", "1", "--eval_every", "2")
    for name, faults in (("halved", ()), ("whole", ((whole_width, 0, 0), (whole_width, 1, 0)))):
        statuses, said = Job(processes, tmp_path, 2, run_flags(shards, tmp_path / name, *flags, steps=3),
                             faults=faults).end()
        assert statuses == [0, 0], said
    assert metrics(tmp_path / "halved") == metrics(tmp_path / "whole")
    assert_same(final_state(tmp_path / "halved"), final_state(tmp_path / "whole"))


def test_nan_on_one_rank_skips_the_step_on_all(tmp_path, shards, processes):
    argv = run_flags(shards, tmp_path / "run", "--shards", "2", steps=4)
    statuses, said = Job(processes, tmp_path, 2, argv, faults=[(nan, 1, 2)]).end()
    assert statuses == [0, 0], said
    assert [line["skipped"] for line in metrics(tmp_path / "run")] == [False, False, True, False]
    assert said.count("step 3 skipped") == 1


def last_lines(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("train.py:")]


@pytest.mark.slow
def test_bad_data_seen_by_one_rank_is_said_once_and_all_that_was_done_is_saved(tmp_path, shards, processes):
    argv = run_flags(shards, tmp_path / "run", steps=100)
    statuses, said = Job(processes, tmp_path, 2, argv, faults=[(bad_data, 1, 3)]).end()
    assert statuses == [2, 2], said
    assert last_lines(said) == ["train.py: error: bad.bin: byte offset 6: id 999 is above 271: damaged, or no shard"]
    assert final_state(tmp_path / "run")["step"] == 3 and "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize("victim, flags, saved", (
    (0, (), 3), (1, ("--grad_accum", "3"), 3), (0, ("--shards", "2"), 2), (1, ("--shards", "2"), 2)))
def test_want_of_memory_on_one_rank_ends_all_with_its_line(tmp_path, shards, processes, victim, flags, saved):
    """The first rank saves what was done, where it has all of it."""
    argv = run_flags(shards, tmp_path / "run", "--ckpt_every", "2", *flags, steps=100)
    statuses, said = Job(processes, tmp_path, 2, argv, faults=[(memory, victim, 3)]).end()
    assert statuses == [2, 2], said
    assert len(last_lines(said)) == 1 and "out of memory" in said and "Traceback" not in said
    assert final_state(tmp_path / "run")["step"] == saved


@pytest.mark.slow
def test_replicas_of_a_rank_that_was_killed_in_a_pass_save_every_step_that_was_done(tmp_path, shards, processes):
    """They name it, too, one of them seconds after the first rank, in which the store is."""
    argv = run_flags(shards, tmp_path / "run", "--ckpt_every", "2", steps=100)
    statuses, said = Job(processes, tmp_path, 3, argv, faults=[(die, 1, 3), (slow_to_name, 2, 3)]).end()
    assert statuses == [2, -signal.SIGKILL, 2] and all("lost rank 1" in line for line in last_lines(said)), said
    assert final_state(tmp_path / "run")["step"] == len(metrics(tmp_path / "run")) == 3


@pytest.mark.slow
@pytest.mark.parametrize("victim", (0, 1))
def test_a_mistake_in_the_code_of_one_rank_is_said_in_full_once(tmp_path, shards, processes, victim):
    argv = run_flags(shards, tmp_path / "run", steps=100)
    statuses, said = Job(processes, tmp_path, 2, argv, faults=[(mistake, victim, 3)]).end()
    assert statuses[victim] == 1 and statuses[1 - victim] == 2 and not last_lines(said), said
    assert said.count("Traceback") == said.count("ValueError: a mistake in the code") == 1


@pytest.mark.slow
@pytest.mark.parametrize("victim", (0, 1))
def test_a_signal_to_one_rank_before_the_first_step_ends_all(tmp_path, shards, processes, victim):
    argv = run_flags(shards, tmp_path / "run", steps=100)
    statuses, said = Job(processes, tmp_path, 2, argv, faults=[(stop_early, victim, 0)]).end()
    assert statuses[victim] == 143 and 0 not in statuses and "Traceback" not in said, said
    (line,) = last_lines(said)
    assert "SIGTERM: stopped before the first step" in line


@pytest.mark.slow
def test_replicas_that_drift_apart_are_an_error_that_names_the_tensor(tmp_path, shards, processes):
    argv = run_flags(shards, tmp_path / "run", "--engram_reset", "off", "--eval_every", "0", steps=200)
    statuses, said = Job(processes, tmp_path, 2, argv, faults=[(drift, 1, 1)]).end()
    assert statuses == [2, 2], said
    (line,) = set(last_lines(said))       # of both, should the store go with rank 0, its host, before the other asks
    assert "engram_input.table.weight is no longer the same on all ranks" in line


@pytest.mark.slow
def test_a_full_disk_on_rank_0_stops_nobody_and_is_tried_again(tmp_path, shards, processes):
    argv = run_flags(shards, tmp_path / "run", "--ckpt_every", "3", steps=8)
    statuses, said = Job(processes, tmp_path, 2, argv, faults=[(full_disk, 0, 3)]).end()
    assert statuses == [0, 0], said
    assert said.count("CHECKPOINT NOT SAVED") >= 1 and final_state(tmp_path / "run")["step"] == 8


@pytest.mark.parametrize("form, victim, steps", (
    ((), 0, 2), (PARTS, 1, 1), pytest.param(PARTS, 0, 2, marks=pytest.mark.slow)), ids=("file", "part", "parts"))
def test_a_write_may_take_longer_than_ranks_wait_for_a_lost_one(tmp_path, shards, processes, form, victim, steps):
    """In the middle, where the next save waits for it, and at the end."""
    argv = run_flags(shards, tmp_path / "run", *form, "--rank_timeout", "3", "--ckpt_every", "1", "--eval_every", "0",
                     steps=steps)
    statuses, said = Job(processes, tmp_path, 2, argv, faults=[(slow_disk, victim, 4.5)]).end()
    assert statuses == [0, 0], said
    assert [one.step for one in find_checkpoints(tmp_path / "run")] == [*range(1, steps + 1)]


@pytest.mark.slow
@pytest.mark.parametrize("number", (signal.SIGKILL, signal.SIGSTOP))
@pytest.mark.parametrize("form, victim, seconds", (((), 0, 300), ((), 1, 30), (PARTS, 0, 300), (PARTS, 1, 300)),
                         ids=("writer", "other", "first part", "other part"))
def test_a_rank_that_is_lost_while_another_waits_for_a_write_is_named(tmp_path, shards, processes, form, victim,
                                                                      seconds, number):
    """In time, but for a first rank that is left: it writes its file to the end."""
    argv = run_flags(shards, tmp_path / "run", *form, "--rank_timeout", "5", "--eval_every", "0", steps=2)
    job = Job(processes, tmp_path, 2, argv, faults=[(slow_disk, 0, seconds)])
    until(lambda: any(tmp_path.glob("run/.spider-step2*")))
    os.kill(job.ranks[victim].pid, number)
    job.ranks[1 - victim].join(120)
    assert job.ranks[1 - victim].exitcode == 2
    job.ranks[victim].kill()
    _, said = job.end()
    (line,) = last_lines(said)
    assert f"lost rank {victim}" in line, said
    assert bool(find_checkpoints(tmp_path / "run")) == (seconds == 30)


@pytest.mark.slow
def test_a_disk_that_stays_full_ends_all_with_a_line_that_says_what_is_left(tmp_path, shards, processes):
    argv = run_flags(shards, tmp_path / "run", "--ckpt_every", "3", steps=8)
    statuses, said = Job(processes, tmp_path, 2, argv, faults=[(full_disk, 0, 100)]).end()
    assert statuses == [2, 2] and not list((tmp_path / "run").glob("*.pt")), said
    (line,) = set(last_lines(said))       # of both, as above
    assert "step 8 could not be saved" in line and "make room" in line


@pytest.mark.slow
def test_ranks_wait_for_one_that_starts_late(tmp_path, shards, processes):
    argv = run_flags(shards, tmp_path / "run", "--rank_timeout", "15", steps=2)
    statuses, said = Job(processes, tmp_path, 2, argv, faults=[(late, 1, 20)]).end()
    assert statuses == [0, 0], said


@pytest.mark.slow
@pytest.mark.parametrize("number", (signal.SIGKILL, signal.SIGSTOP))
@pytest.mark.parametrize("victim", (0, 1))
def test_the_others_name_a_rank_that_was_killed_or_stands_still(tmp_path, shards, processes, number, victim):
    argv = run_flags(shards, tmp_path / "run", "--rank_timeout", "20", "--ckpt_every", "2", steps=100_000)
    job = Job(processes, tmp_path, 2, argv)
    until(lambda: steps_done(tmp_path / "run") > 4)  # the save of step 4 has waited for that of step 2
    os.kill(job.ranks[victim].pid, number)
    job.ranks[1 - victim].join(LIMIT / 2)
    assert job.ranks[1 - victim].exitcode == 2
    job.ranks[victim].kill()
    statuses, said = job.end()
    (line,) = last_lines(said)
    assert re.search(f"lost rank {victim} \\(.*process {job.ranks[victim].pid}\\)|lost rank 0 or its host", line), said
    assert final_state(tmp_path / "run")["step"] >= 2


@pytest.mark.slow
def test_a_second_job_in_the_same_directory_is_refused_once(tmp_path, shards, processes):
    argv = run_flags(shards, tmp_path / "run", "--ckpt_every", "2", steps=100_000)
    first = Job(processes, tmp_path, 2, argv)
    until(lambda: steps_done(tmp_path / "run") > 1)
    statuses, said = Job(processes, tmp_path, 2, argv).end()
    assert statuses == [2, 2] and len(set(last_lines(said))) == 1 and "another run works in" in said, said
    os.kill(first.ranks[1].pid, signal.SIGTERM)
    statuses, said = first.end()
    assert statuses == [143, 143] and len(last_lines(said)) == 1, said


def test_a_signal_that_came_before_an_evaluation_ends_it_in_its_body_and_not_before():
    with stopping.StopSignals() as stop:
        run = stopping.Stopping(stop, None, 0, 10, 1)
        os.kill(os.getpid(), signal.SIGTERM)
        with run.pause(1):
            time.sleep(10)
            pytest.fail("the evaluation was not cut short")
        assert run.drops()


# ---------------------------------------------------------------------------------------------------------------------
# By torchrun

def torchrun(argv, *more):
    return subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
                             *more, "train.py", *argv], cwd=ROOT, stderr=subprocess.PIPE, text=True,
                            start_new_session=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


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


@pytest.mark.slow
@pytest.mark.parametrize("number, whom", (
    (signal.SIGTERM, "one"), (signal.SIGTERM, "all"), (signal.SIGTERM, "torchrun"), (signal.SIGINT, "all"),
    (signal.SIGINT, "torchrun")))
def test_a_signal_to_one_all_or_torchrun_saves_every_step_that_was_done(tmp_path, shards, number, whom):
    directory = tmp_path / "run"
    job = torchrun(run_flags(shards, directory, "--eval_every", "0", steps=100_000))
    until(lambda: steps_done(directory) > 2)
    pids = workers(directory)
    assert len(pids) == 2
    for pid in {"one": pids[1:], "all": [*pids, job.pid], "torchrun": [job.pid]}[whom]:
        os.kill(pid, number)
    _, said = job.communicate(timeout=LIMIT)
    assert len(last_lines(said)) == 1 and f"{number.name}: stopped after step" in said, said
    assert final_state(directory)["step"] == len(metrics(directory)) and "lost rank" not in said
    until(lambda: not workers(directory), 60)


@pytest.mark.slow
def test_torchrun_starts_again_from_the_checkpoint_when_a_rank_was_killed(tmp_path, shards):
    directory = tmp_path / "run"
    job = torchrun(run_flags(shards, directory, "--ckpt_every", "5", "--shards", "2", steps=400), "--max-restarts", "1")
    until(lambda: (directory / "spider-step5.pt").exists())
    os.kill(workers(directory)[1], signal.SIGKILL)
    _, said = job.communicate(timeout=LIMIT)
    assert job.returncode == 0, said
    assert "resumes from" in said and [line["step"] for line in metrics(directory)] == list(range(1, 401))


@pytest.mark.slow
def test_what_ranks_send_is_what_the_formula_says(tmp_path):
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
                           "bench.py", "--only", "traffic", "--model", "tiny", "--device", "cpu", "--set", SMALL,
                           "--seq_len", "32", "--micro_batch", "2", "--out", str(tmp_path)], cwd=ROOT, timeout=LIMIT,
                          capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "bench-cpu.json").read_text())["traffic, counted"]
    assert [(row["shards"], row["micro-steps"], row["precision"]) for row in rows] == [
        (1, 1, "fp32"), (1, 3, "fp32"), (2, 1, "fp32"), (2, 1, "bf16"), (2, 3, "fp32"), (2, 3, "bf16")]
    for row in rows:
        assert row["MB sent"] == pytest.approx(row["by the formula"], rel=0.01), row
    assert rows[3]["MB sent"] < rows[2]["MB sent"] and rows[5]["MB sent"] < rows[4]["MB sent"]


# ---------------------------------------------------------------------------------------------------------------------
# Without other ranks

@pytest.mark.parametrize("ranks, flags, wanted", (
    (2, ("--global_batch", "4096"), 16), (1, ("--global_batch", "4096"), 32), (3, ("--grad_accum", "5"), 5),
    (2, ("--global_batch", "4096", "--grad_accum", "16"), 16)))
def test_the_batch_of_all_ranks_settles_the_micro_steps_or_the_other_way_round(ranks, flags, wanted):
    args = parse_args(["--micro_batch", "4", "--seq_len", "32", *flags])
    batch = train.resolve_batch(vars(args), args.given, ranks)
    assert batch.grad_accum == wanted and batch.bytes == wanted * ranks * 128


@pytest.mark.parametrize("ranks, flags, words", (
    (3, ("--global_batch", "4096"), "not a multiple of the 384"),
    (2, ("--global_batch", "4096", "--grad_accum", "4"), "--grad_accum: 4 makes 1,024 bytes a step on 2 ranks")))
def test_a_batch_that_cannot_be_or_contradicts_is_one_line(ranks, flags, words):
    with pytest.raises(errors.UsageError, match=words):
        args = parse_args(["--micro_batch", "4", "--seq_len", "32", *flags])
        train.resolve_batch(vars(args), args.given, ranks)


@pytest.mark.parametrize("environ, shards, words", (
    (dict(RANK="0", WORLD_SIZE="4", LOCAL_RANK="0", LOCAL_WORLD_SIZE="4", MASTER_ADDR="here", MASTER_PORT="1"), 3,
     "--shards 3: does not divide 4 ranks"), ({}, 2, "--shards 2: does not divide 1 rank:"),
    (dict(RANK="x"), 1, "RANK='x': start by torchrun"), (dict(WORLD_SIZE="8"), 1, "WORLD_SIZE=8, but RANK is not set")))
def test_ranks_that_cannot_be_arranged_are_refused_in_one_line(environ, shards, words):
    with pytest.raises(WorldError, match=words):
        World(environ).join(torch.device("cpu"), shards, 1.0)


def test_ranks_that_meet_again_take_no_call_from_before_for_their_own():
    """Over a store that outlived two meetings, one of which nobody but rank 0 came to."""
    store, names = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60)), []
    store.set("spider/call", "early")
    store.set("spider/early/1", "one")
    store.set("spider/early/answers", "one two")
    for _ in range(2):
        with ThreadPoolExecutor(3) as pool:
            later = [pool.submit(agree_on_prefix, store.clone(), rank, 3, 60.0) for rank in (1, 2)]
            time.sleep(0.3)               # in which they answer the call from before
            (name,) = {agree_on_prefix(store, 0, 3, 60.0), *(one.result() for one in later)}
        names.append(name)
    assert names[0] != names[1] and "early" not in names[0]
    with pytest.raises(RuntimeError, match="rank 0 does not answer"):
        agree_on_prefix(store, 1, 3, 0.3)


def test_one_process_has_no_process_group_and_does_not_ask_anybody():
    world = World({})
    with world:
        world.join(torch.device("cpu"), 1, 1.0)
        assert not torch.distributed.is_initialized() and world.heartbeat is None
        world.own_targets = lambda: (5, None)
        assert world.on_rank0(lambda: 7) == 7 and world.targets_of_step() == 5
        assert [*world.distribute(range(0, 6, 2))] == [(0, 1), (2, 1), (4, 1)]
        world.own_votes["retry"] = lambda: True
        assert world.any_voted("retry") and world.should_print("a line", shared=False)
    assert json.dumps(world.votes) == "{}"
