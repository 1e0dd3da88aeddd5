"""The log of a run: what was chosen, its steps, commands to paste."""

import re
import shlex

import pytest

import data
import train
from conftest import SMALL, settled, world_of
from spider import log
from spider.plan import with_minutes
from spider.run import RunProgress
from train import parse_args

# --------------------------------------------------------------------------------------------------
# What was chosen


@pytest.mark.parametrize(
    "argv, expected",
    (
        (
            "--model small --target_tokens 12e6",
            "--lr 0.00337 follows from 2,930 steps and a width of 256 (docs/results/learning.md)",
        ),
        (
            "--model tiny --target_tokens 4e6 --lr 0.0018",
            "--lr 0.0018: without it, the recipe would take 0.00739",
        ),
    ),
)
def test_the_log_says_what_a_computed_rate_follows_from_and_what_a_given_one_replaces(
    argv, expected
):
    plan = settled(*argv.split())
    lines = log.describe_plan(plan, {}, world_of())
    assert [line for line in lines if line.startswith("--lr")] == [expected]


def test_the_log_leaves_what_minutes_chose_out_of_the_recipes_values():
    by_recipe = settled("--model", "tiny", "--minutes", "5")
    by_minutes = with_minutes(by_recipe, [data.mock_source(0)], 1000.0)
    for plan, shown in ((by_recipe, True), (by_minutes, False)):
        (recipe,) = [s for s in log.describe_plan(plan, {}, world_of()) if "recipe of" in s]
        assert ("--target_tokens" in recipe) == ("--eval_tokens" in recipe) == shown


# --------------------------------------------------------------------------------------------------
# Steps


def test_by_default_a_run_logs_about_a_hundred_lines_and_one_a_minute(
    argv_of, monkeypatch, new_log
):
    def steps_of_run(steps):
        argv = argv_of("--eval_every 0", steps=steps)
        at = argv.index("--log_every")
        del argv[at : at + 2]
        assert train.command_line(argv) == 0
        return [int(step) for step in re.findall(r"step (\d+)/\d+ .*\| loss ", new_log())]

    assert (log.LOG_LINES, log.LOG_SECONDS) == (100, 60)
    monkeypatch.setattr(log, "LOG_LINES", 6)
    assert steps_of_run(6) == [1, 2, 3, 4, 5, 6]
    assert steps_of_run(13) == [7, 9, 12, 13]  # every third
    monkeypatch.setattr(log, "LOG_SECONDS", 0.0)
    assert steps_of_run(15) == [14, 15]


@pytest.mark.parametrize(
    "flags, loops_vary",
    (
        ("--n_loops 1 --random_loops", True),
        (f"--set {SMALL},act=false", False),
    ),
)
def test_log_explains_once_its_columns_and_has_those_that_vary(
    train_small, new_log, flags, loops_vary
):
    train_small("--eval_every 0", flags, steps=2)
    lines = new_log().splitlines()
    (meanings,) = [line for line in lines if "columns of a step" in line]
    assert ("loops (" in meanings) == loops_vary
    assert "balance (" in meanings
    for line in lines:
        if "| loss " in line:
            assert (" loops |" in line) == loops_vary
            assert " balance " in line
            assert line.count(" | ") == meanings.count(" (")


def test_every_line_of_a_run_is_printable_whatever_its_files_are_called(train_small, capsys):
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
def test_a_flag_in_the_log_is_parsed_to_the_same_value(name):
    values = dict(data_dir=name, keep_best=False, engram_reset=False, reset_steps=True)
    words = [log.as_argument(flag, value) for flag, value in values.items()]
    flags = parse_args(shlex.split(" ".join(words)), {}).flags
    assert {flag: getattr(flags, flag) for flag in values} == values


@DIRECTORIES
def test_the_command_of_an_odd_step_shows_its_batch(name):
    plan = settled("--model", "tiny", f"--data_dir={name}", "--seq_len", "32", "--micro_batch", "4")
    line = log.odd_step_line(RunProgress(step=3, bytes_seen=3 * 4 * 32), plan)
    argv = shlex.split(line.partition("its batch: python ")[2])
    args = data.parse_args(argv[1:])
    assert argv[0] == "data.py" and args.directory in (name, f"./{name}")
    assert (args.seq_len, args.first, args.count) == (32, 8, 4)
