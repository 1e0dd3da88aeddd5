"""The log of a run: choices, steps, commands to paste."""

import shlex
from dataclasses import replace
from types import SimpleNamespace

import pytest

import data
from conftest import resolved
from spider import machine
from spider.training import log
from spider.training.run import RunProgress, StepEvents
from train import parse_args

# --------------------------------------------------------------------------------------------------
# Choices


def test_dry_run_omits_overridden_recipe_flags():
    plan = resolved("--model", "base", "--lr", "1", "--n_loops", "2", "--warmup_steps", "9")
    assert log.describe_recipe(plan) == ["recipe of base: --global_batch 131072 --engram_reset"]


# --------------------------------------------------------------------------------------------------
# Steps


@pytest.mark.parametrize(
    "log_every, step, seconds, has_line",
    (
        (None, 1, 0, True),  # first step
        (None, 110, 9.9, False),  # the last line was for step 100 of 1,000
        (None, 110, 10, True),
        (None, 109, 500, False),
        (None, 109, 600, True),
        (None, 1000, 0, True),  # last step
        (7, 105, 0, True),
        (7, 110, 600, False),
    ),
)
def test_log_lines_are_ten_seconds_and_a_hundredth_of_the_run_apart(
    log_every, step, seconds, has_line
):
    plan = resolved("--model", "tiny")
    plan = replace(plan, flags=replace(plan.flags, log_every=log_every))
    lines = log.StepLog(plan, RunProgress(), 1000)
    lines.logged_step = 100
    assert lines.is_due(step, lines.logged + seconds) == has_line


def test_line_of_a_long_run_fits_80_columns(monkeypatch, new_log):
    metrics = dict(loss=1.23456, tok_per_sec=1_234_567.0)
    progress = RunProgress(step=1_234_566)
    lines = log.StepLog(resolved("--model", "1b"), progress, 2_345_678)
    progress.step += 1
    progress.epoch = 12
    progress.metrics = metrics
    lines.began = 0.0
    monkeypatch.setattr(log, "time", SimpleNamespace(perf_counter=lambda: 0.9))
    machine.start_log()
    lines.log(StepEvents(begins_epoch=True, cleared=True))
    step, epoch = new_log().splitlines()
    assert max(len(step), len(epoch)) <= 80
    words = "step 1234567/2345678  bpb 1.781  loss 1.235  1,234.6 kB/s  ETA 11 days"
    assert step.partition(" ")[2] == words


def test_log_is_printable_for_any_file_name(train_small, capsys):
    name = "a\x1b[2J\r\n99:99:99 forged \u202e\udcff"
    directory = train_small("--sample_every 9", ckpt=name, steps=2)
    train_small("--dry_run", ckpt=name)
    (directory / "spider-step2.pt").write_bytes(b"no checkpoint")
    train_small(ckpt=name, status=2)
    lines = "\n".join(capsys.readouterr()).split("\n")
    assert sum("99:99:99 forged" in line for line in lines) > 3
    assert any("next: python sample.py '" in line for line in lines)
    assert not any(line.startswith("99:99:99") or not line.isprintable() for line in lines)


# --------------------------------------------------------------------------------------------------
# Commands in the log can be pasted

DIRECTORIES = pytest.mark.parametrize("name", ("my dir; touch X", "--lr", "a'b"))


@DIRECTORIES
def test_flags_in_the_log_parse_to_the_same_values(name):
    values = dict(data_dir=name, keep_best=False, engram_reset=False, reset_steps=True)
    words = [log.as_argument(flag, value) for flag, value in values.items()]
    flags = parse_args(shlex.split(" ".join(words)), {}).flags
    assert {flag: getattr(flags, flag) for flag in values} == values


@DIRECTORIES
def test_command_logged_for_an_odd_step_shows_its_batch(name):
    plan = resolved(
        "--model", "tiny", f"--data_dir={name}", "--seq_len", "32", "--micro_batch", "4"
    )
    line = log.describe_odd_step(RunProgress(step=3, bytes_seen=3 * 4 * 32), plan)
    argv = shlex.split(line.partition("its batch: python ")[2])
    args = data.parse_args(argv[1:])
    assert argv[0] == "data.py" and args.directory in (name, f"./{name}")
    assert (args.seq_len, args.first, args.count) == (32, 8, 4)
