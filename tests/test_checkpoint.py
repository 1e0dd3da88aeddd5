"""An interrupted run ends like an undisturbed one; whatever befalls it, nothing is lost and it says what happened."""

import copy
import errno
import itertools
import json
import math
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import time
import zipfile
from collections import OrderedDict
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import data
import sample
import train
from conftest import SMALL, assert_same, final_state, make_shards, metrics, run, run_flags, small_config
from spider import errors
from spider.data import loader
from spider.errors import CheckpointError
from spider.model.config import MAX_LOOPS
from spider.training import checkpoint_format, checkpoint_writer, optim, run_directory, run_identity
from spider.training.checkpoint import find_checkpoints, load_checkpoint
from spider.training.checkpoint_writer import CheckpointWriter
from spider.training.progress import RunProgress
from spider.training.metrics import Metrics
from spider_model import Spider

# ---------------------------------------------------------------------------------------------------------------------
# Exact resumption


def assert_same_runs(one, other):
    """Weights, optimizers, expert bias, best loss, position and every line of metrics.jsonl."""
    assert_same(final_state(one), final_state(other))
    assert metrics(one) == metrics(other)


EVERY_KIND = (
    ("--recompute", "core"), ("--random_loops",), ("--grad_accum", "2"),
    ("--precision", "fp32", "--no_gradient_checkpointing"),
    ("--precision", "bf16"), ("--precision", "fp8", "--fp8_experts"),
    ("--optimizer", "adamw"), ("--optimizer", "adamw8bit"), ("--moe_backend", "loop"), ("--engram_reset",),
    ("--dropout", "0.3"), ("--schedule", "wsd", "--target_tokens", "700"), ("--deterministic",))


@pytest.mark.parametrize("flags", EVERY_KIND, ids=" ".join)
def test_interrupted_and_resumed_equals_uninterrupted_bit_for_bit(tmp_path, shards, flags):
    """24 steps of two sequences reach the third epoch of 20; a cut lies in each of the first two."""
    flags = ("--eval_every", "10", *flags)
    whole = run(tmp_path, shards, *flags, steps=24, ckpt="whole")
    for steps in (7, 14, 24):
        parts = run(tmp_path, shards, *flags, steps=steps, ckpt="parts")
    assert final_state(whole)["epoch"] >= 2 and final_state(whole)["step"] == 24
    assert_same_runs(whole, parts)


def test_every_step_can_be_the_one_where_a_run_is_interrupted(tmp_path, shards):
    flags = ("--random_loops", "--grad_accum", "2")
    whole = run(tmp_path, shards, *flags, steps=9, ckpt="whole")
    for steps in range(1, 10):
        parts = run(tmp_path, shards, *flags, steps=steps, ckpt="parts")
    assert_same_runs(whole, parts)


@pytest.fixture
def mixture(tmp_path, shards) -> str:
    """Of which an epoch is about 33 sequences of 32 bytes."""
    other = tmp_path / "other"
    other.mkdir()
    np.random.default_rng(1).choice(np.frombuffer(b"xyz ", np.uint8), 400).astype("<u2").tofile(other / "a.bin")
    return f"{shards}:0.6,{other}:0.4"


def test_a_mixture_goes_on_exactly_in_each_sources_own_epoch(tmp_path, mixture):
    whole = run(tmp_path, mixture, steps=40, ckpt="whole")
    for steps in (11, 23, 40):
        parts = run(tmp_path, mixture, steps=steps, ckpt="parts")
    assert final_state(whole)["epoch"] >= 2
    assert_same_runs(whole, parts)


def test_the_evaluation_at_an_end_that_a_run_went_past_stays_marked_and_counts_for_nothing(tmp_path, shards):
    for steps in (6, 8, 9):               # 8 is a multiple of --eval_every
        directory = run(tmp_path, shards, steps=steps)
        lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if "val_loss" in line] == [n for n in (4, 6, 8, 9) if n <= steps]
        assert [line["step"] for line in lines if line.get("at_end")] == [6] * (steps > 6)
    assert_same_runs(run(tmp_path, shards, steps=9, ckpt="whole"), directory)


def test_tables_of_a_mixture_are_emptied_as_its_second_epoch_begins(tmp_path, mixture, monkeypatch):
    emptied, update = [], train.update
    monkeypatch.setattr(train, "update", lambda *args, empty_tables: (emptied.append(empty_tables), update(
        *args, empty_tables=empty_tables))[1])
    lines = metrics(run(tmp_path, mixture, "--engram_reset", "--eval_every", "0", steps=30))
    epochs = [line["epoch"] for line in lines]
    assert 13 < epochs.index(1) < 23 and epochs == sorted(epochs) and epochs[-1] == 1
    assert [step for step, empties in enumerate(emptied) if empties] == [epochs.index(1)]


def test_evaluating_sampling_and_saving_may_change_between_the_parts_of_a_run(tmp_path, shards):
    whole = run(tmp_path, shards, "--eval_every", "0", steps=12, ckpt="whole")
    for steps, flags in ((3, ("--eval_every", "1")), (7, ("--sample_every", "4", "--ckpt_every", "2")),
                         (12, ("--eval_every", "0"))):
        parts = run(tmp_path, shards, *flags, steps=steps, ckpt="parts")
    for part in ("model_state_dict", "optimizer_state_dict", "bytes_seen", "average_loss"):
        assert_same(final_state(whole)[part], final_state(parts)[part])


@pytest.mark.parametrize("before,after", (((3, 7), (1, 9)), ((2, 11), (4, 13)), ((2, 10), (3, 12))))
def test_tables_are_emptied_once_an_epoch_also_where_the_micro_batch_changes(tmp_path, shards, monkeypatch, before,
                                                                            after):
    """Sequence 20 begins the second epoch; the third lies beyond."""
    emptied, reset = [], optim.RowwiseAdagrad.reset
    monkeypatch.setattr(optim.RowwiseAdagrad, "reset", lambda tables: (emptied.append(1), reset(tables)))
    for micro_batch, steps in (before, after):
        run(tmp_path, shards, "--engram_reset", "--eval_every", "0", "--micro_batch", str(micro_batch), steps=steps)
    assert len(emptied) == 1


def test_a_first_step_of_an_epoch_that_is_dropped_leaves_the_tables_as_they_were(tmp_path, shards, monkeypatch):
    flags, accumulate, steps = ("--engram_reset", "--eval_every", "0"), train.accumulate, itertools.count(1)

    def failing(*args):
        if next(steps) == 11:
            raise MemoryError
        return accumulate(*args)
    monkeypatch.setattr(train, "accumulate", failing)
    assert train.command_line(run_flags(shards, tmp_path / "run", *flags, steps=15)) == 2
    monkeypatch.undo()
    assert_same(final_state(tmp_path / "run"), final_state(run(tmp_path, shards, *flags, steps=10, ckpt="whole")))
    assert_same_runs(run(tmp_path, shards, *flags, steps=15), run(tmp_path, shards, *flags, steps=15, ckpt="whole"))


@pytest.mark.gpu
@pytest.mark.parametrize("flags", ((), ("--precision", "fp8"), ("--moe_backend", "grouped")), ids=" ".join)
def test_deterministic_runs_go_on_exactly_on_a_gpu(tmp_path, shards, flags):
    flags = ("--device", "cuda", "--deterministic", "--dropout", "0.3", *flags)
    whole = run(tmp_path, shards, *flags, steps=20, ckpt="whole")
    for steps in (7, 20):
        parts = run(tmp_path, shards, *flags, steps=steps, ckpt="parts")
    assert_same_runs(whole, parts)


@pytest.mark.slow
def test_random_combinations_of_flags_and_cuts_go_on_exactly(tmp_path, shards):
    """Twelve draws from every flag that changes the arithmetic, the data or the loop, each cut at three steps."""
    generator = random.Random(0)
    choices = [("--random_loops",), ("--grad_accum", "3"), ("--no_gradient_checkpointing",), ("--engram_reset",),
               ("--schedule", "wsd", "--target_tokens", "900"), ("--seed", "5"), ("--micro_batch", "3"),
               ("--eval_every", "3"), ("--ckpt_every", "7"), ("--sample_every", "5"), ("--moe_backend", "loop"),
               ("--dropout", "0.3")]
    for case in range(12):
        flags = [word for choice in choices if generator.random() < 0.4 for word in choice]
        flags += ["--optimizer", generator.choice(("adamw", "adamw8bit", "muon")),
                  "--precision", generator.choice(("fp32", "bf16", "fp8"))]
        steps = generator.randint(20, 40)
        whole = run(tmp_path, shards, *flags, steps=steps, ckpt=f"whole{case}")
        for cut in sorted(generator.sample(range(1, steps), 3)) + [steps]:
            parts = run(tmp_path, shards, *flags, steps=cut, ckpt=f"parts{case}")
        assert_same_runs(whole, parts)


# ---------------------------------------------------------------------------------------------------------------------
# Kills and signals, in processes of their own


def child(argv, log, slow=None, file_limit=None, patience=train.STEP_PATIENCE, deaf=False):
    """A run in a forked process, stderr in a file; a function named `slow` ("module.name") takes a minute instead."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    torch.set_num_threads(1)
    train.STEP_PATIENCE = patience
    if slow:
        module, name = slow.split(".")

        def sleep(*_):
            print("SLEEPS", file=sys.stderr, flush=True)
            time.sleep(60)
        setattr({"train": train, "loader": loader, "run_directory": run_directory}[module], name, sleep)
    if file_limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    if deaf:                                                     # whoever read stderr is gone
        read, write = os.pipe()
        os.close(read)
        os.dup2(write, 2)
    sys.exit(train.command_line(argv))


@pytest.fixture(scope="session")
def processes():
    """Forks from a server that has imported everything: a run starts within half a second."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["test_checkpoint", "bitsandbytes"])
    return context


def start(processes, tmp_path, argv, **faults):
    process = processes.Process(target=child, args=(argv, str(tmp_path / "log")), kwargs=faults)
    process.start()
    return process


def until(condition, seconds=240):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def until_said(tmp_path, words):
    log = tmp_path / "log"
    until(lambda: log.exists() and words in log.read_text())


@pytest.mark.parametrize("kills", (6, pytest.param(50, marks=pytest.mark.slow)))
def test_a_run_that_is_killed_again_and_again_ends_like_an_undisturbed_one(tmp_path, shards, processes, kills):
    """SIGKILL at random moments, every other one at the next save; the same command each time."""
    directory, inside = tmp_path / "killed", 0
    flags = ("--ckpt_every", "2", "--no_gradient_checkpointing", "--eval_every", "50")

    def saving():
        return any(name.startswith(".spider-step") for name in os.listdir(directory)) if directory.exists() else False
    for kill in range(kills):
        process = start(processes, tmp_path, run_flags(shards, directory, *flags, steps=100_000))
        process.join(random.uniform(0.2, 1.2))
        while kill % 2 and process.is_alive():
            if saving():
                os.kill(process.pid, signal.SIGSTOP)                                         # to be inside it still
                time.sleep(0.01)
                if saving():
                    break
                os.kill(process.pid, signal.SIGCONT)
            time.sleep(0.0005)
        assert process.is_alive()
        process.kill()
        process.join()
        inside += saving()
    steps = max((one.step for one in find_checkpoints(directory)), default=0) + 5
    for name in ("killed", "whole"):
        process = start(processes, tmp_path, run_flags(shards, tmp_path / name, *flags, steps=steps))
        process.join()
        assert process.exitcode == 0
    print(f"{kills} kills, {inside} of them inside a save")
    assert_same_runs(tmp_path / "whole", directory)
    assert not saving() and inside > kills / 4


@pytest.mark.parametrize("flags,moment", (
    (("--reset_steps",), None), (("--resume", "spider-step2.pt"), None), (("--reset_steps",), "run_directory.Metrics"),
    (("--resume", "spider-step2.pt"), "run_directory.set_aside")))
def test_a_run_that_starts_over_or_goes_back_goes_on_though_it_was_killed_before_it_saved(tmp_path, shards, processes,
                                                                                         flags, moment):
    """The same command without its flag; killed before it wrote a thing, it never was, and the old run goes on."""
    kept = ("--keep_last", "9", "--eval_every", "0")
    for name in ("killed", "whole"):
        directory = run(tmp_path, shards, "--ckpt_every", "2", *kept, steps=6, ckpt=name)
        flags = [str(directory / word) if word.startswith("spider") else word for word in flags]
        if name == "whole" and moment != "run_directory.set_aside":
            run(tmp_path, shards, *kept, *flags, steps=9, ckpt=name)
        elif name == "killed":
            for given in (flags, ()) if moment != "run_directory.set_aside" else (flags,):
                argv = run_flags(shards, directory, *kept, *given, "--ckpt_every", "100000", steps=100_000)
                process = start(processes, tmp_path, argv, slow=moment)
                until_said(tmp_path, "SLEEPS" if moment else "step 8/")
                process.kill()
                process.join()
                (tmp_path / "log").unlink()
        run(tmp_path, shards, *kept, steps=9, ckpt=name)
    assert_same_runs(tmp_path / "killed", tmp_path / "whole")
    old = tmp_path / "killed" / "metrics.before-1.jsonl"
    assert moment == "run_directory.set_aside" or [line["step"] for line in map(json.loads, open(old))] == [*range(1, 7)]
    assert not (tmp_path / "killed" / "started-over.json").exists()


def test_a_directory_of_checkpoints_is_none_and_one_in_it_is_asked_for(tmp_path, shards, capsys):
    (tmp_path / "checkpoints").mkdir()
    argv = run_flags(shards, tmp_path / "new", "--resume", str(tmp_path / "checkpoints"), "--reset_steps")
    assert train.command_line(argv) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"--resume: {tmp_path / 'checkpoints'} is not a checkpoint: it is a directory" in said
    assert "name one in it" in said


def test_a_run_from_a_checkpoint_that_is_gone_or_from_a_damaged_note_of_it_is_refused_with_the_remedy(tmp_path, shards,
                                                                                                     capsys):
    directory = run(tmp_path, shards, steps=2)
    note = directory / "started-over.json"
    for content in ('{"lineage": 1, "origin": "/nowhere/a.pt", "reset_steps": true}', "{}", "[", "null", "\xff",
                    '{"lineage": -1, "origin": "a", "reset_steps": true}',
                    '{"lineage": 1, "origin": "a\\u0000\\ud800", "reset_steps": false}'):
        note.write_text(content, encoding="latin-1")
        assert train.command_line(run_flags(shards, directory)) == 2
        said = capsys.readouterr().err.splitlines()
        assert "started-over.json: " in said[-1] and "delete" in said[-1] and "Traceback" not in "".join(said)
    note.write_text('{"lineage": 0, "origin": "/nowhere/a.pt", "reset_steps": true}')        # has saved since
    run(tmp_path, shards)


@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGINT))
@pytest.mark.parametrize("slow", (None, "train.evaluate", "train.print_sample"))
def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(tmp_path, shards, processes, number, slow):
    flags = ("--eval_every", "7")
    sampling = ("--sample_every", "7") if slow == "train.print_sample" else ()
    argv = run_flags(shards, tmp_path / "stopped", *flags, *sampling, steps=100_000)
    log = tmp_path / "log"
    process = start(processes, tmp_path, argv, slow=slow)
    until_said(tmp_path, "SLEEPS" if slow else "step 5/")
    asked = time.monotonic()
    os.kill(process.pid, number)
    process.join()
    assert time.monotonic() - asked < 20 and process.exitcode == 128 + number
    said = log.read_text().splitlines()[-1]
    assert said.startswith(f"train.py: {number.name}: stopped after step") and "the same command resumes" in said
    step = final_state(tmp_path / "stopped")["step"]
    assert f"after step {step}," in said and (step == 7 if slow else step >= 5)
    parts = run(tmp_path, shards, *flags, steps=step + 2, ckpt="stopped")
    assert_same_runs(run(tmp_path, shards, *flags, steps=step + 2, ckpt="whole"), parts)


@pytest.mark.parametrize("slow", ("train.check", "train.warm_up", "run_directory.find_checkpoints"))
def test_a_signal_before_the_first_step_leaves_at_once_and_writes_nothing(tmp_path, shards, processes, slow):
    process = start(processes, tmp_path, run_flags(shards, tmp_path / "run", "--precision", "fp8"), slow=slow)
    until_said(tmp_path, "SLEEPS")
    asked = time.monotonic()
    process.terminate()
    process.join()
    assert time.monotonic() - asked < 20 and process.exitcode == 128 + signal.SIGTERM
    assert not list((tmp_path / "run").glob("*.pt")) and "goes on" in (tmp_path / "log").read_text().splitlines()[-1]


def test_a_step_that_takes_too_long_is_dropped_at_a_signal_and_done_again(tmp_path, shards, processes):
    run(tmp_path, shards, steps=3)
    argv = run_flags(shards, tmp_path / "run", steps=8)
    process = start(processes, tmp_path, argv, slow="train.accumulate", patience=1.0)
    until_said(tmp_path, "SLEEPS")
    asked = time.monotonic()
    process.terminate()
    process.join()
    assert time.monotonic() - asked < 20 and process.exitcode == 128 + signal.SIGTERM
    assert_same_runs(run(tmp_path, shards, steps=8), run(tmp_path, shards, steps=8, ckpt="whole"))


def test_a_disk_that_stalls_holds_up_neither_a_signal_nor_the_end_of_the_process(tmp_path, shards, processes):
    flags = ("--eval_every", "0")
    run(tmp_path, shards, *flags, steps=3)
    process = start(processes, tmp_path, run_flags(shards, tmp_path / "run", *flags, steps=8), slow="loader.cut_rows",
                    patience=1.0)
    until_said(tmp_path, "SLEEPS")
    asked = time.monotonic()
    process.terminate()
    process.join()
    assert time.monotonic() - asked < 20 and process.exitcode == 128 + signal.SIGTERM
    assert_same_runs(run(tmp_path, shards, *flags, steps=8), run(tmp_path, shards, *flags, steps=8, ckpt="whole"))


def test_a_signal_saves_also_where_nobody_reads_what_is_said(tmp_path, shards, processes):
    directory = tmp_path / "run"
    process = start(processes, tmp_path, run_flags(shards, directory, steps=100_000), deaf=True)
    until(lambda: (directory / "metrics.jsonl").exists() and len(metrics(directory)) > 5)
    process.terminate()
    process.join()
    assert process.exitcode == 128 + signal.SIGTERM and final_state(directory)["step"] > 5


def test_an_owed_evaluation_writes_its_line_once_however_often_the_run_is_killed_after_it(tmp_path, shards, processes):
    argv = run_flags(shards, tmp_path / "run", steps=9)
    for slow, words in (("train.evaluate", "SLEEPS"), ("train.accumulate", "SLEEPS"), ("train.accumulate", "SLEEPS")):
        process = start(processes, tmp_path, argv, slow=slow)
        until_said(tmp_path, words)
        (tmp_path / "log").unlink()
        (process.terminate if slow == "train.evaluate" else process.kill)()
        process.join()
    assert final_state(tmp_path / "run")["owed"]["step"] == 4
    assert_same_runs(run(tmp_path, shards, steps=9), run(tmp_path, shards, steps=9, ckpt="whole"))


def test_an_evaluation_owed_at_the_end_of_a_run_is_done_and_saved_by_the_next(tmp_path, shards, processes):
    flags = ("--eval_every", "9")
    process = start(processes, tmp_path, run_flags(shards, tmp_path / "run", *flags), slow="train.evaluate")
    until_said(tmp_path, "SLEEPS")
    process.terminate()
    process.join()
    assert final_state(tmp_path / "run")["owed"]["step"] == 6
    assert_same_runs(run(tmp_path, shards, *flags), run(tmp_path, shards, *flags, ckpt="whole"))


def test_a_second_signal_leaves_at_once(tmp_path, shards, processes):
    process = start(processes, tmp_path, run_flags(shards, tmp_path / "run"), slow="train.accumulate")
    until_said(tmp_path, "SLEEPS")
    process.terminate()
    until_said(tmp_path, "once more: at once")
    asked = time.monotonic()
    process.terminate()
    process.join()
    assert time.monotonic() - asked < 20 and process.exitcode == -signal.SIGTERM


@pytest.mark.slow
def test_a_signal_during_compilation_leaves_within_twenty_seconds(tmp_path, shards, processes):
    process = start(processes, tmp_path, run_flags(shards, tmp_path / "run", "--compile", steps=100_000))
    until_said(tmp_path, "bytes a step")
    time.sleep(5)
    asked = time.monotonic()
    process.terminate()
    process.join()
    assert time.monotonic() - asked < 20 and process.exitcode == 128 + signal.SIGTERM


# ---------------------------------------------------------------------------------------------------------------------
# Saving


def test_a_checkpoint_waits_for_the_copy_alone_and_holds_the_state_of_its_own_step(tmp_path):
    weight = torch.zeros(1000)
    writer = CheckpointWriter(tmp_path, [], 2)
    release, write = [], checkpoint_writer.write_archive

    def held_up(file, state):
        until(lambda: release)
        write(file, state)
    state = dict(step=1, lineage=0, exploded=False, weight=weight, nested=[dict(t=weight[:3])])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_writer, "write_archive", held_up)
        writer.save(state, lambda: None)
        weight.fill_(7)                                                                 # training goes on
        assert not (tmp_path / "spider-step1.pt").exists()
        release.append(True)
        assert writer.wait()
    assert not torch.load(tmp_path / "spider-step1.pt")["weight"].any()
    with pytest.MonkeyPatch.context() as patch:                                         # the next save waits for this
        patch.setattr(checkpoint_writer, "write_archive", lambda *args: (time.sleep(0.3), write(*args)))
        writer.save(state | dict(step=5), lambda: None)
        weight.fill_(9)
        writer.save(state | dict(step=6), lambda: None)
        assert writer.wait()
        assert [torch.load(tmp_path / f"spider-step{n}.pt")["weight"][0].item() for n in (5, 6)] == [7, 9]
        weight.fill_(7)
    memory = writer.copy["weight"].data_ptr()
    writer.save(state | dict(step=8), lambda: None)
    assert writer.wait() and writer.copy["weight"].data_ptr() == memory
    assert torch.load(tmp_path / "spider-step8.pt")["nested"][0]["t"].tolist() == [7, 7, 7]


def test_the_last_checkpoint_that_had_not_exploded_is_never_deleted_for_newer_ones(tmp_path):
    writer = CheckpointWriter(tmp_path, [], 2)
    exploded = (False, False, True, True, True, False, False)
    kept = []
    for step, bad in enumerate(exploded, 1):
        writer.save(dict(step=step, lineage=0, exploded=bad), lambda: None)
        writer.wait()
        kept.append(sorted(int(path.stem[11:]) for path in tmp_path.glob("*.pt")))
    assert kept == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 2, 4, 5], [2, 5, 6], [6, 7]]


def test_spikes_and_explosions_are_told_from_noise():
    progress, noise = RunProgress(), np.random.default_rng(0)
    for progress.step in range(200):
        assert not progress.watch(2 + 0.1 * noise.normal()) and not progress.exploded
    assert progress.watch(2.9) and not progress.exploded
    assert progress.watch(5.6) and progress.exploded
    progress.watch(2.0)
    assert not progress.exploded
    progress.skipped = 1
    assert progress.exploded


def test_a_full_disk_is_one_loud_line_the_older_checkpoints_stay_and_it_is_tried_again(tmp_path, shards, monkeypatch,
                                                                                      capsys):
    directory = run(tmp_path, shards, steps=2)
    before = (directory / "spider-step2.pt").read_bytes()
    write, calls = checkpoint_writer.write_archive, []

    def full(file, state):
        calls.append(state["step"])
        if len(calls) <= 2:
            file.write(b"a part of it")
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, state)
    monkeypatch.setattr(checkpoint_writer, "write_archive", full)
    monkeypatch.setattr(CheckpointWriter, "retry_after", 0.0)
    capsys.readouterr()
    run(tmp_path, shards, "--ckpt_every", "4", "--keep_last", "9", steps=8)
    said = [line for line in capsys.readouterr().err.splitlines() if "CHECKPOINT NOT SAVED" in line]
    assert len(said) == 2 and "No space left on device" in said[0]
    assert calls[0] == 4 < calls[1] <= 8 and len(calls) in (3, 4)
    assert final_state(directory)["step"] == 8 and not list(directory.glob(".*.tmp"))
    assert (directory / "spider-step2.pt").read_bytes() == before
    monkeypatch.undo()
    assert_same(final_state(directory)["model_state_dict"],
                final_state(run(tmp_path, shards, steps=8, ckpt="whole"))["model_state_dict"])


def test_a_disk_that_stays_full_ends_in_status_2_with_the_older_checkpoints_intact(tmp_path, shards, processes):
    """The kernel itself refuses: no file may grow beyond 100 kB; a checkpoint has more."""
    directory = run(tmp_path, shards, steps=2)
    before = (directory / "spider-step2.pt").read_bytes()
    process = start(processes, tmp_path, run_flags(shards, directory, "--ckpt_every", "4", steps=6), file_limit=100_000)
    process.join()
    said = (tmp_path / "log").read_text().splitlines()
    assert process.exitcode == 2 and "older checkpoints are as they were" in said[-1]
    assert any("CHECKPOINT NOT SAVED" in line and "File too large" in line for line in said)
    assert [path.read_bytes() for path in directory.glob("*.pt")] == [before] and not list(directory.glob(".*.tmp"))
    assert len(metrics(directory)) == 6
    assert_same_runs(run(tmp_path, shards, steps=6), run(tmp_path, shards, steps=6, ckpt="whole"))


def test_metrics_that_a_full_disk_refuses_are_written_later_in_order(tmp_path, capsys):
    with Metrics(tmp_path / "metrics.jsonl", 0, False) as lines:
        real = lines.file
        for step in range(6):
            lines.file = open("/dev/full", "wb", buffering=0) if step in (1, 2, 3) else real
            lines.write(dict(step=step, loss=math.nan))
        lines.sync()
        lines.file = open("/dev/full", "wb", buffering=0)
        lines.write(dict(step=6))
        with pytest.raises(OSError):                       # and so no checkpoint is newer than the lines before it
            lines.sync()
    assert metrics(tmp_path) == [dict(step=step, loss=None) for step in range(6)]


def test_a_checkpoint_that_cannot_be_deleted_is_a_warning(tmp_path, shards, monkeypatch, capsys):
    def refuse(path, missing_ok=False, original=Path.unlink):
        if path.suffix == ".pt":
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        original(path, missing_ok)
    monkeypatch.setattr(Path, "unlink", refuse)
    directory = run(tmp_path, shards, "--ckpt_every", "1", steps=5)
    assert "spider-step1.pt stays: Operation not permitted" in capsys.readouterr().err
    assert final_state(directory)["step"] == 5


def test_too_little_space_for_two_checkpoints_is_refused_at_start(tmp_path, shards, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=200_000))
    assert train.command_line(run_flags(shards, tmp_path / "run")) == 2
    assert "0.0002 GB free, 2 checkpoints of" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_a_run_that_another_overtakes_between_look_and_lock_is_refused(tmp_path, shards, monkeypatch, capsys):
    build_model = train.build_model

    def overtaken(*given):
        (tmp_path / "run").mkdir()
        others.enter_context(run_directory.locked(tmp_path / "run"))
        return build_model(*given)
    monkeypatch.setattr(train, "build_model", overtaken)
    with ExitStack() as others:
        assert train.command_line(run_flags(shards, tmp_path / "run")) == 2
    assert "another run works in" in capsys.readouterr().err.splitlines()[-1]


def test_what_a_killed_save_left_behind_makes_room_before_room_is_looked_for(tmp_path, shards, monkeypatch):
    directory = run(tmp_path, shards, steps=1)
    leftover = directory / ".spider-step2.pt.tmp"
    leftover.write_bytes(b"half of a checkpoint")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0 if leftover.exists() else 1e12))
    assert final_state(run(tmp_path, shards, steps=2))["step"] == 2


def test_a_resumed_run_keeps_nothing_of_its_checkpoint_mapped(tmp_path, shards, monkeypatch):
    run(tmp_path, shards, steps=1)
    maps, update = [], train.update

    def looking(*args, **options):
        maps.append(Path("/proc/self/maps").read_text())
        return update(*args, **options)
    monkeypatch.setattr(train, "update", looking)
    run(tmp_path, shards, steps=2)
    assert len(maps) == 1 and "train-0.bin" in maps[0] and "spider-step" not in maps[0]


def test_a_micro_batch_that_no_memory_holds_is_refused_at_start(tmp_path, shards, capsys):
    assert train.command_line(run_flags(shards, tmp_path / "run", "--micro_batch", "1e6")) == 2
    assert "--micro_batch: a run takes about" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_two_runs_cannot_work_in_one_directory(tmp_path, shards, processes, capsys):
    process = start(processes, tmp_path, run_flags(shards, tmp_path / "run"), slow="train.accumulate")
    until_said(tmp_path, "SLEEPS")
    assert train.command_line(run_flags(shards, tmp_path / "run")) == 2
    assert "another run works in" in capsys.readouterr().err.splitlines()[-1]
    process.kill()
    process.join()
    run(tmp_path, shards)                                                     # the lock died with its process


# ---------------------------------------------------------------------------------------------------------------------
# Files that were altered, and strangers' files

@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The state of a checkpoint after one step."""
    directory = tmp_path_factory.mktemp("trained")
    return final_state(run(directory, make_shards(directory / "data"), steps=1))


def test_a_single_altered_byte_anywhere_in_a_checkpoint_is_noticed(tmp_path, shards):
    path = run(tmp_path, shards, steps=1) / "spider-step1.pt"
    content = bytearray(path.read_bytes())
    checkpoint_format.check_seal(path)
    places = {*random.Random(0).sample(range(len(content)), 300), *range(64), *range(len(content) - 200, len(content))}
    for place in places:
        flip = 1 << place % 8
        content[place] ^= flip
        path.write_bytes(content)
        content[place] ^= flip
        with pytest.raises(ValueError, match="checksum"):
            checkpoint_format.check_seal(path)
    for length in (0, 1, 30, len(content) // 2, len(content) - 1, len(content) - 79):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError):
            checkpoint_format.check_seal(path)


def test_an_altered_newest_checkpoint_is_passed_over_and_the_run_still_ends_exactly(tmp_path, shards, capsys):
    directory = run(tmp_path, shards, "--ckpt_every", "3", steps=6)
    for damage in (lambda c: c[:len(c) // 2], lambda c: c[:5000] + bytes([c[5000] ^ 1]) + c[5001:], lambda c: b""):
        newest = directory / "spider-step6.pt"
        newest.write_bytes(damage(newest.read_bytes()))
        run(tmp_path, shards, "--ckpt_every", "3", steps=6)
        said = capsys.readouterr().err
        assert "skipped" in said and "spider-step6.pt" in said and f"resumes from {directory}/spider-step3" in said
        assert_same(final_state(directory), final_state(run(tmp_path, shards, steps=6, ckpt="whole")))


def test_a_directory_of_damaged_checkpoints_alone_is_refused_and_left_as_it_is(tmp_path, shards, capsys):
    directory = run(tmp_path, shards, steps=3)
    (directory / "spider-step3.pt").write_bytes(b"no checkpoint")
    before = {path: path.read_bytes() for path in directory.iterdir()}
    assert train.command_line(run_flags(shards, directory)) == 2
    assert "none of the checkpoints" in capsys.readouterr().err.splitlines()[-1]
    assert {path: path.read_bytes() for path in directory.iterdir()} == before


def test_a_checkpoint_from_another_directory_displaces_nothing(tmp_path, shards):
    one, other = (run(tmp_path, shards, "--seed", seed, steps=4, ckpt=seed) for seed in "12")
    old = (one / "spider-step4.pt").read_bytes()
    run(tmp_path, shards, "--resume", str(other / "spider-step4.pt"), "--ckpt_every", "1", steps=8, ckpt="1")
    assert (one / "spider-step4.pt").read_bytes() == old and len(list(one.glob("metrics*"))) == 2


def test_metrics_of_earlier_runs_stay_however_often_one_starts_over(tmp_path, shards):
    directory = run(tmp_path, shards, steps=3)
    for _ in range(2):                                            # killed before its first checkpoint
        run(tmp_path, shards, "--reset_steps", steps=2)
        (directory / "spider-step2.pt").unlink()
    kept = sorted(len(path.read_text().splitlines()) for path in directory.glob("metrics*.jsonl"))
    assert kept == [2, 2, 3]


def optimizer_states(state, optimizer, key) -> list[dict]:
    """The dicts in a checkpoint that hold a key of an optimizer's state."""
    return [part for one in state["optimizer_state_dict"][optimizer]["state"].values()
            for part in (one, *one.values()) if isinstance(part, dict) and key in part]


OPTIMIZERS = (("adamw", "exp_avg_sq"), ("adamw8bit", "state1"), ("muon", "momentum_buffer"))


@pytest.fixture(scope="module")
def trained_by(tmp_path_factory):
    """States of checkpoints after one step, by optimizer."""
    root = tmp_path_factory.mktemp("trained_by")
    shards = make_shards(root / "data")
    return {name: final_state(run(root, shards, "--optimizer", name, steps=1, ckpt=name)) for name, _ in OPTIMIZERS}


@pytest.mark.parametrize("optimizer,key", OPTIMIZERS)
def test_optimizer_state_of_another_size_is_refused_before_a_kernel_reads_it(tmp_path, trained_by, shards, capsys,
                                                                             optimizer, key):
    state = copy.deepcopy(trained_by[optimizer])
    held = optimizer_states(state, optimizer, key)[0]
    whole = held[key]
    for change in (lambda t: t.flatten()[:2].clone(), lambda t: t[..., None]):
        held[key] = change(whole)
        torch.save(state, tmp_path / "other.pt")
        argv = run_flags(shards, tmp_path / "new", "--optimizer", optimizer, "--resume", str(tmp_path / "other.pt"))
        assert train.command_line(argv) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert "does not fit this model" in said and key in said


class Rebuilt:
    """Saved as what torch makes of a tensor's storage by any offset, shape and stride."""
    def __init__(self, tensor, offset, shape, stride):
        self.parts = tensor._typed_storage(), offset, tuple(shape), tuple(stride), False, OrderedDict()

    def __reduce__(self):
        return torch._utils._rebuild_tensor_v2, self.parts


HOSTILE = dict(
    stride_0=lambda t: Rebuilt(t.flatten()[:1].clone(), 0, (*t.shape, 2), (0,) * t.ndim + (0,)),
    transposed=lambda t: torch.stack([torch.stack((t, t), -1)] * 2, -1).mT,
    in_a_larger_storage=lambda t: torch.stack((t, t))[0],
    behind_an_offset=lambda t: torch.stack((t, t))[1],
    sparse=lambda t: t.to_sparse(), parameter=lambda t: torch.nn.Parameter(t.float()), meta=lambda t: t.to("meta"),
    long=lambda t: t.long(), bool=lambda t: t.bool(), complex=lambda t: t.to(torch.complex64),
    list=lambda t: [1.0], fraction=lambda t: 1.5, below_0=lambda t: -1, huge=lambda t: 1 << 64, text=lambda t: "3",
    nothing=lambda t: None)
OTHER_PRECISION = dict(double=lambda t: t.double(), half=lambda t: t.half())


@pytest.mark.parametrize("optimizer,key", (*OPTIMIZERS, ("engram", "sum"), ("adamw", "step"), ("adamw8bit", "state2"),
                                           ("adamw8bit", "step"), ("adamw8bit", "absmax1")))
def test_optimizer_state_that_is_no_plain_tensor_of_its_type_is_refused_by_name(tmp_path, trained_by, optimizer, key):
    """Fused kernels write where such a tensor has no memory."""
    state = copy.deepcopy(trained_by[optimizer if optimizer in trained_by else "muon"])
    for held in optimizer_states(state, optimizer, key)[:2]:              # 8 bits, and what is too small for them
        whole = held[key]
        for name, hostile in (HOSTILE | OTHER_PRECISION).items():
            held[key] = hostile(torch.as_tensor(whole, dtype=getattr(whole, "dtype", torch.float32)))
            torch.save(state, tmp_path / "foreign.pt")
            with pytest.raises(CheckpointError) as fault:
                load_checkpoint(tmp_path / "foreign.pt", Spider)
            said = str(fault.value).partition(": ")[2]
            assert said.startswith(f"optimizer_state_dict.{optimizer}.state.") and f"{key}: " in said or (
                said.startswith("it names ")), (name, said)
        held[key] = whole
    torch.save(state, tmp_path / "foreign.pt")
    load_checkpoint(tmp_path / "foreign.pt", Spider)


@pytest.mark.parametrize("name", ("lm_head.weight", "engram_input.table.multiplier"))
def test_weights_that_are_no_plain_tensors_are_refused_by_name(tmp_path, trained, name):
    for hostile, change in HOSTILE.items():
        weights = dict(trained["model_state_dict"])
        weights[name] = change(weights[name])
        if hostile == "long" and name.endswith("multiplier"):
            continue
        torch.save(trained | dict(model_state_dict=weights), tmp_path / "foreign.pt")
        with pytest.raises(CheckpointError, match=rf"{name}|it names "):
            load_checkpoint(tmp_path / "foreign.pt", Spider)


def test_tensors_that_share_memory_are_refused(tmp_path, trained):
    weights, states = trained["model_state_dict"], trained["optimizer_state_dict"]["adamw"]["state"]
    for one, key, other in ((states[0], "exp_avg_sq", states[0]["exp_avg"]), (weights, "core.dt", weights["core.B"]),
                            (states[0], "step", states[1]["step"]), (states[0], "exp_avg", weights["null_segment"])):
        whole, one[key] = one[key], other
        torch.save(trained, tmp_path / "foreign.pt")
        one[key] = whole
        with pytest.raises(CheckpointError, match=r"_state_dict\.\S+: shares its storage"):
            load_checkpoint(tmp_path / "foreign.pt", Spider)


def test_what_takes_more_memory_or_time_than_its_file_has_bytes_is_refused(tmp_path, trained):
    class Zeros:
        def __reduce__(self):
            return bytearray, (1 << 40,)
    deep = wide = ()
    for _ in range(60):
        deep = [deep, deep]                                               # 2 ** 60 values in 60 lists
    for _ in range(10):
        wide = [wide] * 100
    path, endless = tmp_path / "foreign.pt", []
    endless.append(endless)
    for extra, said in ((Zeros(), "it names "), (deep, "more than 16 inside"), (wide, "more than 262,144 values"),
                        (endless, "inside one another"), ("x" * 70_000, "extra: not a str"), (10 ** 400, "not a int"),
                        ({(1, 2): 3}, "extra: not a dict"), ({1, 2}, "it names"), (b"x", "it names")):
        torch.save(trained | dict(extra=extra), path)
        with pytest.raises(CheckpointError, match=said):
            load_checkpoint(path, Spider)
    torch.save(trained, path)
    with zipfile.ZipFile(path) as archive:
        records = [(record, archive.read(record)) for record in archive.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for record, content in records:
            archive.writestr(record.filename, content)
    with pytest.raises(CheckpointError, match="records are compressed"):
        load_checkpoint(path, Spider)
    with zipfile.ZipFile(path, "w") as archive:
        for record, content in records:
            archive.writestr(record.filename, content)
        largest = max(archive.filelist, key=lambda record: record.file_size)
        for number in range(9):                                           # names of the same bytes
            archive.filelist.append(copy.copy(largest))
            archive.filelist[-1].filename = f"archive/data/{1000 + number}"
    with pytest.raises(CheckpointError, match="lie over one another"):
        load_checkpoint(path, Spider)


@pytest.mark.parametrize("make", (os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)),
                         ids=("pipe", "directory", "device"))
def test_what_is_no_file_is_named_and_never_opened(tmp_path, shards, capsys, make):
    directory = run(tmp_path, shards, "--ckpt_every", "1", steps=2)
    odd = directory / "spider-step3.pt"
    make(odd)
    run(tmp_path, shards, steps=3)
    assert f"skipped: {odd} is not a checkpoint that can be read safely: it is no reg" in capsys.readouterr().err
    assert odd.is_file() and final_state(directory)["step"] == 3          # and what was there is set aside
    [aside] = directory.glob("spider-step3.before-*.pt")
    assert train.command_line(run_flags(shards, tmp_path / "new", "--resume", str(aside))) == 2
    assert f"{aside} is not a checkpoint" in capsys.readouterr().err.splitlines()[-1]
    (directory / "metrics.jsonl").unlink()
    make(directory / "metrics.jsonl")
    assert train.command_line(run_flags(shards, directory, steps=4)) == 2
    assert "metrics.jsonl is no regular file: move it away" in capsys.readouterr().err.splitlines()[-1]


def test_what_leads_outside_is_never_written_through(tmp_path, shards):
    directory, outside = run(tmp_path, shards, "--ckpt_every", "1", steps=1), tmp_path / "outside"
    outside.write_text('{"step": 1}\n')
    (directory / "metrics.jsonl").unlink()
    for name in ("metrics.jsonl", "spider-step2.pt", "spider-step3.pt"):
        (directory / name).symlink_to(outside if name < "spider-step3" else tmp_path / "gone")
    run(tmp_path, shards, "--ckpt_every", "1", "--keep_last", "9", steps=3)
    assert outside.read_text() == '{"step": 1}\n' and not (tmp_path / "gone").exists()
    assert [line["step"] for line in metrics(directory)] == [1, 2, 3] and final_state(directory)["step"] == 3
    assert len([path for path in directory.iterdir() if path.is_symlink()]) == 2          # set aside as they were


def test_every_line_of_a_run_is_printable_whatever_its_files_are_called(tmp_path, shards, capsys):
    name = "a\x1b[2J\r\n99:99:99 forged \u202e\udcff"
    run(tmp_path, shards, "--dry_run", ckpt=name)
    directory = run(tmp_path, shards, "--sample_every", "9", ckpt=name, steps=2)
    (directory / "spider-step2.pt").write_bytes(b"no checkpoint")
    assert train.command_line(run_flags(shards, directory)) == 2
    assert train.command_line(run_flags(tmp_path / name / name, directory, "--dry_run")) == 2
    said = [line for part in capsys.readouterr() for line in part.split("\n")]
    assert sum("99:99:99 forged" in line for line in said) > 4 and not any(line[:8] == "99:99:99" for line in said)
    assert [line for line in said if not line.isprintable()] == []


@pytest.mark.parametrize("change", (
    dict(step="3"), dict(step=-1), dict(step=10 ** 60), dict(n_loops=0), dict(owed=5),
    dict(owed=dict(step=1, loss="x")), dict(owed=dict(loss=1.0)), dict(owed=dict(step=2)), dict(owed=dict(step=True)),
    dict(owed=dict(step=1, loss=10 ** 400)), dict(n_loops=4097), dict(flags=dict(seed=10 ** 400)),
    dict(average_loss=1.0, last_loss=None), dict(flags=dict(lr=torch.ones(2))),
    dict(average_loss=math.inf, last_loss=1.0), dict(last_loss=math.inf, average_loss=1.0), dict(noise=math.inf),
    dict(flags=dict(lr=math.inf)), dict(flags=dict(lr=math.nan)), dict(lowest_average=-math.inf),
    dict(targets=[torch.ones(2)]), dict(best_loss=math.nan), dict(exploded="no"), dict(optimizer_state_dict=[]),
    dict(lineage=None)), ids=lambda change: next(iter(change)))
def test_plain_values_that_no_run_writes_are_refused_by_name(tmp_path, trained, shards, change, capsys):
    torch.save(trained | change, tmp_path / "foreign.pt")
    assert train.command_line(run_flags(shards, tmp_path / "new", "--resume", str(tmp_path / "foreign.pt"))) == 2
    said = capsys.readouterr().err.splitlines()
    assert next(iter(change)) in said[-1] and "Traceback" not in "".join(said) and not (tmp_path / "new").exists()


@pytest.mark.parametrize("damage", (
    lambda w: w.to("meta"), lambda w: w.to_sparse(), lambda w: w.int(), lambda w: w[:1], lambda w: None))
def test_weights_that_are_no_weights_are_refused(tmp_path, trained, shards, damage, capsys):
    weights = dict(trained["model_state_dict"])
    weights["lm_head.weight"] = damage(weights["lm_head.weight"])
    torch.save(trained | dict(model_state_dict=weights), tmp_path / "foreign.pt")
    assert train.command_line(run_flags(shards, tmp_path / "new", "--resume", str(tmp_path / "foreign.pt"))) == 2
    assert "foreign.pt" in capsys.readouterr().err.splitlines()[-1]


def test_another_vocabulary_is_refused(tmp_path, shards, capsys):
    argv = run_flags(shards, tmp_path / "run", "--set", SMALL + ",vocab_size=300", steps=1)
    assert train.command_line(argv) == 0
    plain = [word for word in run_flags(shards, tmp_path / "run", steps=2) if word not in ("--set", SMALL)]
    assert train.command_line(plain) == 2
    assert "another vocabulary: 300 ids, here are 272" in capsys.readouterr().err.splitlines()[-1]
    assert train.command_line(argv) == 0


@pytest.mark.parametrize("value", (math.nan, math.inf))
def test_ruined_weights_are_said_not_sampled(tmp_path, shards, capsys, value):
    directory = run(tmp_path, shards, steps=2)
    state = final_state(directory)
    state["model_state_dict"]["lm_head.weight"][0, 0] = value
    torch.save(state, tmp_path / "ruined.pt")
    flags = ("--resume", str(tmp_path / "ruined.pt"), "--sample_every", "1")
    assert train.command_line(run_flags(shards, tmp_path / "new", *flags, steps=4)) == 0
    assert "its weights are ruined" in capsys.readouterr().err
    assert sample.main([str(tmp_path / "ruined.pt")]) == 2
    assert "its weights are ruined" in capsys.readouterr().err


def test_a_checkpoint_that_another_program_saved_is_read_with_a_warning(tmp_path, shards, capsys):
    directory = run(tmp_path, shards, steps=2)
    torch.save(final_state(directory), tmp_path / "copy.pt")
    run(tmp_path, shards, "--resume", str(tmp_path / "copy.pt"), steps=3, ckpt="other")
    assert "no checksum" in capsys.readouterr().err


def test_checkpoints_hold_what_the_contract_names_and_only_plain_values(tmp_path, shards):
    state = final_state(run(tmp_path, shards))
    assert {"model_state_dict", "optimizer_state_dict", "step", "epoch", "cfg", "best_loss"} <= state.keys()
    assert state["step"] == 6 and state["cfg"]["hidden_size"] == 32 and math.isfinite(state["best_loss"])


def test_the_newest_checkpoints_of_a_run_are_kept(tmp_path, shards):
    directory = run(tmp_path, shards, "--ckpt_every", "1", "--keep_last", "3", steps=7)
    assert {path.name for path in directory.glob("*.pt")} == {f"spider-step{n}.pt" for n in (5, 6, 7)}


def test_reset_steps_takes_the_weights_alone_and_later_runs_go_on_from_the_reset(tmp_path, shards):
    directory = run(tmp_path, shards, steps=6)
    reset = run(tmp_path, shards, "--resume", str(directory / "spider-step6.pt"), "--reset_steps", steps=2)
    state = torch.load(reset / "spider-step2.pt", weights_only=True)
    assert state["step"] == 2 and state["bytes_seen"] == 2 * 2 * 32
    assert [line["step"] for line in metrics(reset)] == [1, 2]
    on = run(tmp_path, shards, steps=3)                    # goes on from step 2 of the reset run, not from step 6
    assert (on / "spider-step3.pt").exists() and (on / "spider-step6.pt").exists()


def test_a_checkpoint_that_would_execute_something_is_refused_and_nothing_runs(tmp_path, shards, capsys):
    class Harmful:
        def __reduce__(self):
            return open, (str(tmp_path / "harm"), "w")
    torch.save({"step": Harmful()}, tmp_path / "foreign.pt")
    assert train.command_line(["--resume", str(tmp_path / "foreign.pt"), "--data_dir", str(shards)]) == 2
    assert not (tmp_path / "harm").exists() and "it names io.open, which no" in capsys.readouterr().err


def test_a_run_that_starts_over_or_goes_back_leaves_the_files_of_the_one_before(tmp_path, shards):
    directory = run(tmp_path, shards, "--ckpt_every", "2", "--keep_last", "3", steps=6)
    old = {path: path.read_bytes() for path in (directory / f"spider-step{n}.pt" for n in (2, 4, 6))}
    by_hand = directory / "spider-step2-best.pt"
    by_hand.write_bytes(old[directory / "spider-step2.pt"])
    for flags in (("--reset_steps",), ()):                                                   # over, then back to step 2
        run(tmp_path, shards, "--ckpt_every", "1", "--resume", str(by_hand), *flags, steps=4)
    assert sum(path.read_bytes() in old.values() for path in directory.glob("*.pt")) == 4
    assert [line["step"] for line in metrics(directory)] == [3, 4] and len(list(directory.glob("metrics*"))) == 3
    on = run(tmp_path, shards, "--ckpt_every", "1", steps=5)                                 # goes on from the last run
    assert final_state(on)["step"] == 5 and final_state(on)["lineage"] == 2


def test_a_larger_batch_goes_on_to_the_same_number_of_bytes_and_says_what_changed(tmp_path, shards, capsys):
    run(tmp_path, shards, "--target_tokens", "640", steps=5)
    directory = run(tmp_path, shards, "--target_tokens", "640", "--micro_batch", "4", steps=0)
    state = final_state(directory)
    assert state["bytes_seen"] == 5 * 64 + 3 * 128 and state["step"] == 8
    assert "--micro_batch was 2, is 4" in capsys.readouterr().err


def test_a_line_of_metrics_that_a_kill_cut_short_is_dropped(tmp_path, shards):
    directory = run(tmp_path, shards, steps=2)
    with open(directory / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "lo')
    run(tmp_path, shards, steps=4)
    assert [line["step"] for line in metrics(directory)] == [1, 2, 3, 4]


def test_what_is_no_finite_number_in_metrics_is_null_again_when_a_run_goes_on(tmp_path, shards):
    """Where an earlier version, or somebody else, wrote it: lines are JSON for any reader."""
    directory, foreign = run(tmp_path, shards, steps=2), []
    for line in (directory / "metrics.jsonl").read_text().splitlines():
        foreign.append(line.replace('"step": 1,', '"step": 1, "a": NaN, "b": Infinity, "c": -Infinity, "d": 1e999,'))
    foreign += ['{"step": Infinity}', '{"step": -1}', '{"step": 1.0}']
    (directory / "metrics.jsonl").write_text("\n".join(foreign))
    run(tmp_path, shards, steps=3)
    lines = metrics(directory)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [lines[0].get(name, 0) for name in "abcd"] == [None] * 4 and lines[0]["loss"] > 1
    assert not any(word in (directory / "metrics.jsonl").read_text() for word in ("NaN", "Infinity"))


def test_the_most_loops_that_a_flag_takes_are_read_back(tmp_path, trained, capsys):
    for n_loops, fits in ((MAX_LOOPS, True), (MAX_LOOPS + 1, False)):
        torch.save(trained | dict(n_loops=n_loops), tmp_path / "spider-step1.pt")
        assert bool(find_checkpoints(tmp_path)) == fits
        argv = ["--n_loops", str(n_loops)]
        for parse in (train.parse_args, sample.parse_args):
            if fits:
                assert parse(argv).n_loops in (n_loops, [n_loops])
            else:
                with pytest.raises(errors.UsageError, match="at most 4096"):
                    parse(argv)


def test_loops_of_a_run_stay_its_own_when_it_goes_on_and_others_are_named(tmp_path, shards, capsys):
    directory = run(tmp_path, shards, "--n_loops", "3", steps=1)
    flags = ["--data_dir", str(shards), "--seq_len", "32", "--micro_batch", "2", "--ckpt_dir", str(directory),
             "--eval_every", "0", "--device", "cpu"]
    assert train.command_line([*flags, "--max_steps", "2", "--n_loops", "5"]) == 0
    assert "--n_loops was 3, is 5" in capsys.readouterr().err
    assert train.command_line([*flags, "--max_steps", "3"]) == 0
    assert "--n_loops" not in capsys.readouterr().err
    state = final_state(directory)
    assert state["step"] == 3 and state["n_loops"] == 5 and state["cfg"]["n_loops"] == 3


@pytest.mark.parametrize("change,complaint", (
    (dict(cfg={"dim": 3}), "unexpected keyword"), (dict(cfg=None), "cfg"),
    (dict(cfg={"engram_byte_rows": 10 ** 18}), "cfg.engram_byte_rows"), (dict(cfg={"act": 1}), "cfg.act"),
    (dict(cfg={"engram_orders": [3, "4"]}), "cfg.engram_orders"), (dict(cfg={"n_heads": 2.0}), "cfg.n_heads"),
    (dict(model_state_dict={}), "more layers than there are weights")))
def test_a_checkpoint_of_another_program_is_refused_with_the_difference(tmp_path, shards, change, complaint, capsys):
    directory = run(tmp_path, shards, steps=1)
    foreign = tmp_path / "foreign.pt"
    torch.save(final_state(directory) | change, foreign)
    assert train.command_line(["--resume", str(foreign), "--data_dir", str(shards)]) == 2
    assert complaint in capsys.readouterr().err.splitlines()[-1]


def test_another_model_than_the_checkpoints_is_refused_with_the_difference(tmp_path, shards, capsys):
    directory = run(tmp_path, shards, steps=1)
    argv = ["--data_dir", str(shards), "--ckpt_dir", str(directory), "--set", SMALL + ",hidden_size=64"]
    assert train.command_line(argv) == 2
    assert "hidden_size 32 there, 64 asked for" in capsys.readouterr().err


@pytest.mark.parametrize("flags,said", ((("--reset_steps",), "changed by --set:"), ((), "not the same run any more:")))
def test_what_has_no_shape_changes_with_a_line_and_stays_changed(tmp_path, shards, flags, said, capsys):
    """--set changes the checkpoint's model, so that nothing else of it need be given again."""
    origin = run(tmp_path, shards, steps=1) / "spider-step1.pt"
    setting, changed = ("--set", "core_loss_weight=0.5,act_threshold=0.9"), dict(core_loss_weight=0.5, act_threshold=0.9)
    directory = run(tmp_path, shards, "--resume", str(origin), *flags, *setting, steps=2, ckpt="on")
    line, = [line for line in capsys.readouterr().err.splitlines() if said in line]
    assert line.endswith(f"{said} act_threshold was 0.99, is 0.9; core_loss_weight was 0.0, is 0.5")
    assert final_state(directory)["cfg"] == final_state(tmp_path / "run")["cfg"] | changed
    assert metrics(directory)[-1]["core_loss"] > 0
    argv = run_flags(shards, directory, *setting, steps=4)
    for again in (argv[:-2], argv):                        # without any --set, and by the same
        at = again.index("--set")
        assert train.command_line(again[:at] + again[at + 2:]) == 0
    assert "act_threshold" not in capsys.readouterr().err
    assert final_state(directory)["step"] == 4 and final_state(directory)["cfg"]["core_loss_weight"] == 0.5


@pytest.mark.parametrize("flags", ((), ("--reset_steps",)))
def test_what_has_a_shape_is_refused_by_name_with_a_remedy_that_helps(tmp_path, shards, flags, capsys):
    """Fields that could change go unnamed; cuts that are no longer learned would leave weights over."""
    origin = run(tmp_path, shards, steps=1) / "spider-step1.pt"
    for setting, named in (("ponder_weight=0,act_threshold=0.5,rope_theta=10,places=3", "places 1 there, 3"),
                           ("boundaries=words", "boundaries learned there, words"),
                           ("act=false", "act True there, False")):
        argv = run_flags(shards, tmp_path / "new", "--resume", str(origin), *flags, "--set", setting)
        assert train.command_line(argv) == 2 and not (tmp_path / "new").exists()
        assert capsys.readouterr().err.splitlines()[-1] == (
            f"train.py: error: {origin} holds another model ({named} asked for), and its weights keep their shapes: "
            f"leave that out of --model and --set, or train anew, without --resume, in a --ckpt_dir of its own")


def test_a_config_of_before_a_field_came_is_one_with_its_default():
    asked = small_config()
    saved = asdict(asked)
    for name in ("places", "core_loss_weight", "engram_match_words"):
        saved.pop(name)
    run_identity.check_same_model(Path("old.pt"), saved, asked, Spider)
    with pytest.raises(CheckpointError, match="places 1 there, 8 asked for"):
        run_identity.check_same_model(Path("old.pt"), saved, replace(asked, places=8), Spider)


def test_another_optimizer_than_the_checkpoints_is_refused_by_name(tmp_path, shards, capsys):
    directory = run(tmp_path, shards, "--optimizer", "adamw", steps=1)
    before = {path: path.read_bytes() for path in directory.iterdir()}
    assert train.command_line(run_flags(shards, directory, "--optimizer", "muon")) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "adamw, engram" in said and "muon, adamw, engram" in said and "--optimizer" in said
    assert {path: path.read_bytes() for path in directory.iterdir()} == before


def test_hyperparameters_come_from_this_runs_flags_not_from_the_checkpoint(tmp_path, shards, capsys):
    directory = run(tmp_path, shards, "--optimizer", "adamw", steps=1)
    run(tmp_path, shards, "--optimizer", "adamw", "--weight_decay", "0.3", "--beta1", "0.8", steps=2)
    group = final_state(directory)["optimizer_state_dict"]["adamw"]["param_groups"][0]
    assert group["weight_decay"] == 0.3 and group["betas"] == (0.8, 0.95)
    assert "--weight_decay was 0.1, is 0.3" in capsys.readouterr().err


def test_dropout_of_a_run_from_before_there_was_any_is_named(tmp_path, shards, capsys):
    path = find_checkpoints(run(tmp_path, shards, "--dropout", "0", steps=1))[0].path
    state = torch.load(path)
    assert state["flags"].pop("dropout") == 0
    torch.save(state, path)
    run(tmp_path, shards, "--dropout", "0", steps=2)
    assert "not the same run" not in capsys.readouterr().err
    torch.save(state, path)
    run(tmp_path, shards, "--resume", str(path), steps=3)
    assert "--dropout was 0.0, is 0.5" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# What goes wrong inside the loop


def test_a_spike_is_logged_with_the_command_that_shows_its_batch(tmp_path, shards, monkeypatch, capsys):
    update, steps = train.update, itertools.count(1)

    def spiked(*args, **options):
        numbers = update(*args, **options)
        return numbers | dict(loss=numbers["loss"] + 5.0 * (next(steps) == 30))
    monkeypatch.setattr(train, "update", spiked)
    run(tmp_path, shards, "--seed", "3", steps=32)
    said, = [line for line in capsys.readouterr().err.splitlines() if "is a spike" in line]
    command = said[said.index("data.py show"):].split()[1:]
    assert "step 30 " in said and command[2:] == "--seq_len 32 --seed 3 --first 58 --count 2".split()
    assert data.main(command) == 0 and len(capsys.readouterr().out.splitlines()) >= 2


def test_want_of_memory_in_an_evaluation_loses_no_step_either(tmp_path, shards, monkeypatch, capsys):
    def failing(*args):
        raise MemoryError("Unable to allocate 14.9 GiB")
    monkeypatch.setattr(train, "evaluate", failing)
    assert train.command_line(run_flags(shards, tmp_path / "run")) == 2
    assert "14.9 GiB were asked for" in capsys.readouterr().err.splitlines()[-1]
    assert final_state(tmp_path / "run")["owed"]["step"] == 4
    monkeypatch.undo()
    assert_same_runs(run(tmp_path, shards), run(tmp_path, shards, ckpt="whole"))


@pytest.mark.parametrize("fault,said", (
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has"), "2.50 GiB were asked for"),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to "
                  "allocate 80000000000 bytes. Error code 12"), "80000000000 bytes were asked for"),
    (MemoryError("Unable to allocate 14.9 GiB for an array"), "14.9 GiB were asked for"),
    (errors.DataError("a.bin: changed during the run"), "a.bin: changed")))
def test_want_of_memory_and_bad_data_end_a_run_with_advice_and_lose_no_step(tmp_path, shards, monkeypatch, capsys,
                                                                           fault, said):
    accumulate, steps = train.accumulate, itertools.count(1)

    def failing(*args):
        if next(steps) == 4:
            raise fault
        return accumulate(*args)
    monkeypatch.setattr(train, "accumulate", failing)
    assert train.command_line(run_flags(shards, tmp_path / "run", "--ckpt_every", "100")) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("train.py: error: ") and said in line
    assert isinstance(fault, errors.DataError) or "--micro_batch (now 2)" in line
    assert final_state(tmp_path / "run")["step"] == 3
    monkeypatch.undo()
    assert_same_runs(run(tmp_path, shards), run(tmp_path, shards, ckpt="whole"))
