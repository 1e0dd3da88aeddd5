"""Kills, signals, want of memory: a run loses nothing, and says what happened."""

import itertools
import os
import random
import signal
import time

import pytest
import torch
from conftest import final_state, make_shards, metrics, run, run_flags
from runs import assert_same_runs, start, until, until_said

import train
from spider import errors
from spider.training.checkpoint_loading import find_checkpoints


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


@pytest.mark.parametrize("slow, number", (
    (None, signal.SIGTERM), ("train.evaluate", signal.SIGINT), ("train.print_sample", signal.SIGTERM),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (None, signal.SIGINT), ("train.evaluate", signal.SIGTERM), ("train.print_sample", signal.SIGINT)))))
def test_a_signal_finishes_the_step_saves_and_says_how_to_resume(tmp_path, shards, processes, slow, number):
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
    assert not list((tmp_path / "run").glob("*.pt")) and "resumes" in (tmp_path / "log").read_text().splitlines()[-1]


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


def test_a_signal_saves_also_where_nobody_reads_the_log(tmp_path, shards, processes):
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
    until_said(tmp_path, "repeat to quit at once")
    asked = time.monotonic()
    process.terminate()
    process.join()
    assert time.monotonic() - asked < 20 and process.exitcode == -signal.SIGTERM


@pytest.mark.slow
def test_a_signal_during_compilation_leaves_within_twenty_seconds(tmp_path, shards, processes):
    process = start(processes, tmp_path, run_flags(shards, tmp_path / "run", "--compile", steps=100_000))
    until_said(tmp_path, "GFLOP per byte")
    time.sleep(5)
    asked = time.monotonic()
    process.terminate()
    process.join()
    assert time.monotonic() - asked < 20 and process.exitcode == 128 + signal.SIGTERM


def test_a_micro_batch_that_no_memory_holds_is_refused_at_start(tmp_path, shards, capsys):
    assert train.command_line(run_flags(shards, tmp_path / "run", "--micro_batch", "1e6")) == 2
    assert "--micro_batch: the run needs about" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The directory of a run of six steps, beside its data."""
    root = tmp_path_factory.mktemp("undisturbed")
    return run(root, make_shards(root / "data"))


def test_want_of_memory_in_an_evaluation_loses_no_step_either(tmp_path, undisturbed, monkeypatch, capsys):
    shards = undisturbed.parent / "data"

    def failing(*args):
        raise MemoryError("Unable to allocate 14.9 GiB")
    monkeypatch.setattr(train, "evaluate", failing)
    assert train.command_line(run_flags(shards, tmp_path / "run")) == 2
    assert "(14.9 GiB requested)" in capsys.readouterr().err.splitlines()[-1]
    assert final_state(tmp_path / "run")["owed"]["step"] == 4
    monkeypatch.undo()
    assert_same_runs(run(tmp_path, shards), undisturbed)


@pytest.mark.parametrize("fault,said", (
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has"), "(2.50 GiB requested)"),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to "
                  "allocate 80000000000 bytes. Error code 12"), "(80000000000 bytes requested)"),
    (MemoryError("Unable to allocate 14.9 GiB for an array"), "(14.9 GiB requested)"),
    (errors.DataError("a.bin: changed during the run"), "a.bin: changed")))
def test_want_of_memory_and_bad_data_end_a_run_with_advice_and_lose_no_step(tmp_path, undisturbed, monkeypatch,
                                                                           capsys, fault, said):
    shards, accumulate, steps = undisturbed.parent / "data", train.accumulate, itertools.count(1)

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
    assert_same_runs(run(tmp_path, shards), undisturbed)
