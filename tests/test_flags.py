"""Flags of every command line: values, bad values, random command lines."""

import os
import random
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bench
import data
import sample
import train
from bad_data import TEXTS, complaint, snapshot, text
from conftest import ROOT, run_flags
from spider import errors
from spider.data.shards import open_data
from spider.errors import UsageError
from spider.flags import (SYNONYMS, Flag, config_text, integer, nonempty, one_of, parse_flags, path_name, real,
                          run_program, suggest)
from spider.model.config import SpiderConfig
from spider.training import curves
from spider.training.plan import apply_settings
from spider.training.ranks import World
from train import FLAGS, parse_args


GROUPS = {"first": (Flag("name", None, nonempty("a name"), "text"), Flag("config", None, path_name, "file")),
          "second one": (Flag("lr", 3e-4, real(0, 1), "rate", "LR"), Flag("steps", 10, integer(1), "count"),
                         Flag("loud", False, None, "switch"), Flag("mode", "auto", one_of("auto", "on"), "choice"),
                         Flag("flops", None, real(0), "in place of steps"))}


def values_of(*argv, environ=(), **options):
    return parse_flags(GROUPS, [*map(str, argv)], dict(environ), prog="x.py", doc="", **options)


# ---------------------------------------------------------------------------------------------------------------------
# --config


@pytest.fixture
def config(tmp_path):
    def write(text: str | bytes):
        path = tmp_path / "a.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path
    return write


def test_a_flag_beats_the_environment_that_the_file_and_that_the_default(config):
    path = config('name = "b"\n["second one"]\nlr = 0.5\nsteps = 2e2\nloud = true\n')
    found = values_of("--config", path)
    assert (found.name, found.lr, found.steps, found.loud, found.mode) == ("b", 0.5, 200, True, "auto")
    assert found.given == {"config", "name", "lr", "steps", "loud"} and found.environment == []
    found = values_of("--config", path, "--loud", "off", environ=dict(LR="0.25"))
    assert (found.lr, found.loud, found.steps) == (0.25, False, 200) and found.environment == ["LR=0.25"]
    assert values_of("--config", path, "--lr", 1, environ=dict(LR="0.25")).lr == 1


def test_an_alternative_on_the_command_line_replaces_what_the_file_has(config):
    path, both = config('["second one"]\nsteps = 5\n'), [("steps", "flops")]
    assert values_of("--config", path, "--flops", 7, alternatives=both).given == {"config", "flops"}
    assert values_of("--config", path, "--flops", 7).given == {"config", "flops", "steps"}


@pytest.mark.parametrize("text, fault", (
    ("lrr = 1", "unknown flag lrr; did you mean lr?"), ("max_lr = 1", "unknown flag max_lr; did you mean lr?"),
    ("[secondone]\nlr = 1", "unknown section [secondone]; did you mean second one?"), ("[x]", "unknown section [x]"),
    ("[first]\nlr = 1", "lr belongs in section [second one], not [first]"), ("lr = 2", "lr: '2' is not a number of at"),
    ('lr = 1\n["second one"]\nlr = 1', "lr is set twice"), ("lr = [1]", "lr: [1] is not a number or a quoted text"),
    ("lr = nan", "lr: 'nan' is not a number"), ("lr = true", "lr: True is not"), ("steps = 1.5", "a whole number"),
    ('loud = "on"', "loud: 'on' is not true or false"),
    ("loud = 1", "loud: 1 is not true or false"), ("mode = false", "mode: 'off'"),
    ("name = ''", "name: '' is not a name"), ("lr = 2026-01-01", "lr: datetime"), ("lr", "not TOML"),
    (b"\xff", "not TOML"),
    ("a = " + "[" * 5000, "not TOML"), ("lr = 1\nlr = 1", "not TOML"), ('config = "a"', "unknown flag config")))
def test_what_a_file_has_wrong_is_one_line_with_its_name(config, text, fault):
    path = config(text)
    with pytest.raises(UsageError) as raised:
        values_of("--config", path)
    line = str(raised.value)
    assert line.startswith(f"--config: {path}: ") and fault in line and line.isprintable()


@pytest.mark.parametrize("name", ("gone.toml", "", "folder"))
def test_a_file_that_cannot_be_read_is_named(tmp_path, name):
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match="^--config: "):
        values_of("--config", tmp_path / name if name else "")


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), st.floats(0, 1), st.integers(1, 1 << 61),
       st.booleans())
@settings(max_examples=200, deadline=None)
def test_a_file_that_was_written_reads_back_to_the_bit(name, lr, steps, loud):
    wanted = dict(name=name, lr=lr, steps=steps, loud=loud, mode="on", flops=None)
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_text(config_text(GROUPS, wanted), encoding="utf-8")
        found = values_of("--config", file.name)
    assert {key: getattr(found, key) for key in wanted} == wanted and found.given == {*wanted, "config"} - {"flops"}


def test_the_file_that_a_dry_run_prints_settles_to_the_same_plan(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = ["--mock_data", "--model", "tiny", "--target_flops", "1e12", "--set", "lora_rank=0", "--dry_run", "config"]
    assert train.command_line([*argv, "--seed", "5", "--global_batch", "16384"]) == 0
    first = capsys.readouterr().out
    Path("run.toml").write_text(first)
    assert train.command_line(["--config", "run.toml", "--dry_run", "config"]) == 0
    assert capsys.readouterr().out == first and sorted(os.listdir()) == ["run.toml"]
    assert 'set = "lora_rank=0"' in first and "grad_accum = 4" in first and "seed = 5" in first
    assert train.command_line(["--config", "run.toml", "--global_batch", "8192", "--dry_run", "config"]) == 0
    assert "grad_accum = 2" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------------------
# Help and suggestions


def test_help_is_answered_before_torch_is_imported(tmp_path):
    done = subprocess.run([sys.executable, "-X", "importtime", ROOT / "train.py", "--help"], cwd=tmp_path, text=True,
                          capture_output=True, timeout=60)
    assert done.returncode == 0 and "| torch" not in done.stderr and "numpy" not in done.stderr
    headings = [line[:-1] for line in done.stdout.splitlines() if line.endswith(":") and line[0].isalpha()]
    assert headings == ["options", *train.GROUPS] and " X " not in done.stdout


@pytest.mark.parametrize("word, meant", (
    ("--learning_rate", "--lr"), ("--max-steps", "--max_steps"), ("--batch_size", "--micro_batch"),
    ("--Seq_Len", "--seq_len"), ("--seq", "--seq_len"), ("--warmup=5", "--warmup_steps"), ("--block_size", "--seq_len"),
    ("--output_dir", "--ckpt_dir"),
    ("--optimzer", "--optimizer"), ("--save_every", "--ckpt_every"), ("--gradient_checkpointing", "--recompute")))
def test_a_flag_that_is_spelled_or_called_otherwise_is_suggested(word, meant):
    with pytest.raises(UsageError, match=f"arguments: {word}.*; did you mean {meant}\\? See train.py --help$"):
        parse_args([word, "5"], environ={})


def test_nothing_is_suggested_for_what_resembles_nothing():
    with pytest.raises(UsageError, match="^unrecognized arguments: --zzz; see train.py --help$"):
        parse_args(["--zzz"], environ={})


def test_every_synonym_leads_to_one_flag():
    words = [word for name, words in SYNONYMS.items() if name != "out" for word in words.split()]
    flags = {flag.name for flag in FLAGS}
    assert not {*words} & flags, "a flag's own name"
    for name, words in SYNONYMS.items():
        for word in words.split() if name in flags else ():
            assert name in suggest(f"--{word}", [f"--{flag}" for flag in flags]), (word, name)


# ---------------------------------------------------------------------------------------------------------------------
# The frame of a program


@pytest.mark.parametrize("fault, status, line", (
    (UsageError("no\nsuch"), 2, "error: no\\nsuch"), (errors.DataError("a: bad"), 2, "error: a: bad"),
    (FileNotFoundError(2, "No such file", "x"), 2, "error: x: No such file"), (KeyboardInterrupt(), 130, "stopped"),
    (FloatingPointError("inf"), 2, "error: inf")))
def test_an_expected_error_is_one_line_and_a_status(capsys, fault, status, line):
    def fail():
        raise fault
    assert status == run_program(fail, "x.py", interrupted="stopped")
    assert capsys.readouterr() == ("", f"x.py: {line}\n")


def test_an_error_that_nobody_expects_keeps_its_traceback():
    def fail():
        raise RuntimeError("a defect")
    with pytest.raises(RuntimeError, match="a defect"):
        run_program(fail, "x.py")
    assert run_program(lambda: None, "x.py") == 0 and run_program(lambda: 3, "x.py") == 3


# ---------------------------------------------------------------------------------------------------------------------
# Bad values, thousands of them


def test_any_value_of_any_flag_or_variable_of_training_is_taken_or_named():
    rng, taken, refused = random.Random(7), 0, 0
    for flag in FLAGS:
        texts = [*TEXTS, *(text(rng, 12) for _ in range(30)), repr(rng.uniform(-9, 9)), "5", "0.5"]
        for value in texts if flag.parse not in (None, str) else ():
            for source in (f"--{flag.name}", flag.env):
                if source is None or source == flag.env and not value:
                    continue                                  # an empty variable is one that is not set
                argv, environ = ([f"{source}={value}"], {}) if source != flag.env else ([], {source: value})
                try:
                    got = getattr(parse_args(argv, environ=environ), flag.name)
                    taken += 1
                    assert got == value or isinstance(got, int) or np.isfinite(got), (argv, environ, got)
                except UsageError as fault:
                    refused += 1
                    line = str(fault)
                    assert f"{source}: " in line and line.isprintable(), line
                    assert "literal" not in line and "integer string" not in line, line    # Python's words, not ours
    assert taken > 100 and refused > 2000


@pytest.mark.parametrize("text", ("1_0", "1_0.5", "1e1_0", "\u0661\u0660", "\uff11\uff10", " 10", "10 ", "10\n", "nan",
                                  "inf", "infinity", "0x10", "1e", ".", "", "1" * 5000))
def test_a_number_is_written_in_plain_decimals_wherever_one_is_taken(tmp_path, monkeypatch, capsys, text):
    monkeypatch.chdir(tmp_path)
    for flag in FLAGS:
        if flag.parse is not None and not hasattr(flag.parse, "choices") and type(flag.default) in (int, float):
            with pytest.raises(UsageError, match=f"^--{flag.name}: "):
                parse_args([f"--{flag.name}={text}"], environ={})
    for name in ("hidden_size", "rope_theta", *["engram_orders"] * bool(text)):    # it may be left empty
        with pytest.raises(UsageError, match=f"^--set: {name} "):
            apply_settings(SpiderConfig.preset("tiny"), f"{name}={text}")
    for name in ("n_loops", "bytes", "temperature", "top_k", "top_p", "samples", "seed"):
        with pytest.raises(UsageError, match=f"--{name}: "):
            sample.parse_args([f"--{name}={text}"])
    with pytest.raises(UsageError, match="--minutes: "):
        bench.parse_args([f"--minutes={text}"])
    for name in ("RANK", "WORLD_SIZE"):
        assert not text or World({name: text}).bad_environ
    (tmp_path / "web").mkdir()
    (tmp_path / "a.txt").write_text("some text")
    with pytest.raises(errors.DataError, match="neither a directory nor a mixture"):
        open_data(f"web:{text}")
    for flag in ("--val_fraction", "--unit_mb"):
        assert flag in complaint(capsys, "prepare", "a.txt", "--out", "o", f"{flag}={text}")
    for flag in ("--seq_len", "--seed", "--first", "--count"):
        assert flag in complaint(capsys, "show", "web", f"{flag}={text}")


@pytest.mark.parametrize("name, text, value", (("target_tokens", "10e9", 10 ** 10), ("seq_len", "+64.", 64),
                                               ("seed", "4611686018427387903", (1 << 62) - 1), ("lr", "1E-3", 1e-3),
                                               ("lr", ".5", 0.5), ("max_steps", "1e3", 1000)))
def test_a_whole_number_may_be_written_with_an_exponent(name, text, value):
    assert getattr(parse_args([f"--{name}={text}"], environ={}), name) == value


EXTREMES = ["1.7e308", "1e300", "1e39", "1e18", str((1 << 62) - 1), "1e6", "1000", "1", "1e-46", "1e-308", "5e-324",
            "-0.0"]


LONG = {"seq_len", "micro_batch", "grad_accum", "global_batch", "max_steps", "n_loops"}  # they make a run long or large


def is_numeric(flag) -> bool:
    return flag.parse is not None and not hasattr(flag.parse, "choices") and type(flag.default) is not str and (
        flag.default is not None or flag.name.startswith(("target_", "global_")))


@pytest.mark.parametrize("optimizer", ("muon", "adamw"))
@pytest.mark.parametrize("name", [
    flag.name if flag.name in ("lr", "weight_decay") else pytest.param(flag.name, marks=pytest.mark.slow)
    for flag in FLAGS if is_numeric(flag) and flag.name not in LONG])
def test_any_number_that_a_flag_takes_gives_a_run_or_one_line(tmp_path, shards, capsys, name, optimizer):
    taken, parse = [], next(flag.parse for flag in FLAGS if flag.name == name)
    for text in EXTREMES:
        with suppress(ValueError):
            taken.append((parse(text), text))
    for _, text in (min(taken), max(taken)):
        argv = run_flags(shards, tmp_path / text, "--optimizer", optimizer, f"--{name}={text}", steps=3)
        status, said = train.command_line(argv), capsys.readouterr().err.splitlines()
        assert status == 0 or status == 2 and f"train.py: error: --{name}" in said[-1], (text, said[-1])


@pytest.mark.parametrize("name", ("lr", "weight_decay", "engram_lr", "rank_timeout"))
@pytest.mark.parametrize("text", ("1.7e308", "1e300", "1e39"))
def test_a_number_that_overflows_where_it_is_used_is_refused(name, text):
    with pytest.raises(UsageError, match=f"^--{name}: '{text}' is not a number .* and at most 1"):
        parse_args([f"--{name}={text}"], environ={})


def test_a_batch_of_more_micro_steps_than_memory_holds_is_refused(capsys):
    assert train.command_line(["--mock_data", "--dry_run", "--model", "tiny", "--global_batch", "4096e12"]) == 2
    assert "--global_batch: 4,096,000,000,000,000 bytes are 1,000,000,000,000 micro-steps" in capsys.readouterr().err


def command_line(program: str, *argv) -> int:
    """The exit status of one of the project's command lines."""
    main = dict(train=train.command_line, sample=sample.main, data=data.main, curves=curves.main, bench=bench.main)
    return main[program]([*map(str, argv)])


@pytest.mark.parametrize("argv, named", (
    (("train", "--mock_data", "--dry_run", "--ckpt_dir", ""), "--ckpt_dir: '' is not a path"),
    (("train", "--dry_run", "--data_dir", ""), "--data_dir: '' is not a path"),
    (("train", "--mock_data", "--dry_run", "--resume", ""), "--resume: '' is not a path"),
    (("train", "--mock_data", "--dry_run", "--run", ""), "--run: '' is not a name"),
    (("sample", "", "--prompt", "a"), "checkpoint: '' is not a path"),
    (("sample", "--eval", ""), "--eval: '' is not a path"),
    (("sample", "--eval", "a.txt", "--json", ""), "--json: '' is not a path"),
    (("sample", "--show", "a", "--html", ""), "--html: '' is not a path"),
    (("sample", "--export", ""), "--export: '' is not a path"),
    (("data", "prepare", "", "--out", "o"), "INPUT: '' is not a path"),
    (("data", "prepare", "a.txt", "--out", ""), "--out: '' is not a path"),
    (("data", "verify", ""), "DIR: '' is not a path"), (("data", "show", ""), "SPEC: '' is not a path"),
    (("curves", "", "a=a"), "spider.training.curves OUT.png LABEL=DIR"), (("curves", "o.png", "a="), "LABEL=DIR"),
    (("curves", "o.png", "a=.", "a=.."), "unique LABELs"),
    (("bench", "--only", "segments", "--device", "cpu", "--out", ""), "--out: '' is not a path"),
    (("bench", "--only", "segments", "--device", "cpu", "--data_dir", ""), "--data_dir: '' is not a path"),
    (("bench", "--only", "segments", "--device", "cpu", "--seq_len", ""), "--seq_len: '' is not"),
    (("sample", "x", "--convert", ""), "--convert: '' is not a path")), ids=lambda value: " ".join(value)[:60])
def test_a_path_that_is_empty_is_named_by_its_flag_and_nothing_is_written(tmp_path, monkeypatch, capsys, argv, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some text")
    assert command_line(*argv) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and err.startswith(f"{argv[0]}.py: error: ") and named in err, err
    assert snapshot(tmp_path) == {tmp_path / "a.txt": b"some text"}


@pytest.mark.parametrize("below", ("", "below", "below/it"))
@pytest.mark.parametrize("flags", ((), ("--dry_run",), ("--resume", "none.pt")))
def test_a_file_instead_of_the_checkpoint_directory_is_named_with_its_flag(tmp_path, capsys, below, flags):
    (tmp_path / "file").write_text("mine")
    assert train.command_line(["--mock_data", "--ckpt_dir", str(tmp_path / "file" / below), *flags]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"train.py: error: --ckpt_dir: {tmp_path / 'file'} is a file, not a directory: use another name")
    assert snapshot(tmp_path) == {tmp_path / "file": b"mine"}


def test_random_command_lines_of_training_are_taken_or_refused_in_a_line():
    rng, words = random.Random(8), [f"--{flag.name}" for flag in FLAGS] + ["--no", "-x", "--", "5"] + TEXTS
    for _ in range(1000):
        argv = [rng.choice((rng.choice(words), rng.choice(words) + "=" + rng.choice(TEXTS), text(rng, 6)))
                for _ in range(rng.randrange(1, 4))]
        try:
            if not any(word.startswith(("-h", "--h")) for word in argv):
                parse_args(argv, environ={})
        except UsageError as fault:
            assert str(fault).isprintable(), (argv, str(fault))
