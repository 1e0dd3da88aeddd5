"""Command lines as users meet them: help, start, bad flags, smoke run, dry run."""

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

import bench
import data
import sample
import train
from conftest import (
    ROOT,
    SMALL,
    STOPPED,
    contents,
    has_fp8,
    last_step,
    metrics,
    prepare,
    refused,
    run_python,
)
from jobs import command
from spider import machine
from spider.data.prepare import ShardWriter
from spider.errors import UsageError
from spider.flags import OTHER_NAMES
from spider.training.checkpoint import find_checkpoints
from test_docs import flags_of

PARSERS = {
    "train.py": train.parse_args,
    "sample.py": sample.parse_args,
    "data.py": data.parse_args,
    "bench.py": bench.measure,
}

# --------------------------------------------------------------------------------------------------
# Startup

# Run train.py as a script. When it imports torch, print the allocator setting and press Ctrl-C.
INTERRUPTED_AT_TORCH = """
import builtins, os, runpy, signal, sys
imported = builtins.__import__
def find(name, *rest):
    if name == "torch":
        print(os.environ.get("PYTORCH_ALLOC_CONF"), flush=True)
        os.kill(os.getpid(), signal.SIGINT)
    return imported(name, *rest)
builtins.__import__ = find
sys.argv = ["train.py"]
runpy.run_path("train.py", run_name="__main__")
"""


def test_installed_project_is_found_next_to_a_folder_called_data(tmp_path):
    """`data` is the default --data_dir. Python imports such a folder as a package unless its path
    has a module of that name."""
    try:
        metadata.distribution("spider-trainer")
    except metadata.PackageNotFoundError:
        pytest.skip("the project is not installed: pip install -e .")
    (tmp_path / "data").mkdir()
    done = run_python("import data; print(data.__file__)", cwd=tmp_path, PYTHONPATH="")
    assert done.stdout.strip() == str(ROOT / "data.py"), done.stderr


@pytest.mark.parametrize(
    "flags, environ, recipe, defaults",
    (
        ("--device cpu", dict(SEQ_LEN="64"), "tiny", ["4096", "computed from the horizon"]),
        ("--model=original", {}, "original", ["2048", "0.0003"]),
    ),
)
def test_help_shows_the_defaults_of_the_recipe(flags, environ, recipe, defaults, capsys):
    with pytest.raises(SystemExit) as ended:
        train.parse_args([*flags.split(), "--help"], environ)
    words = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    assert f"defaults below are those of --model {recipe}." in words
    found = [
        re.search(rf"--{flag} .*?default: (.*?)\)", words)[1]
        for flag in ("seq_len BYTES", "lr RATE")
    ]
    assert found == defaults


def test_allocator_is_set_and_ctrl_c_is_quiet_before_torch_is_imported(monkeypatch):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    done = run_python(INTERRUPTED_AT_TORCH)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")
    assert done.stdout == "expandable_segments:True\n"


@pytest.mark.parametrize("script", PARSERS)
def test_missing_packages_are_one_line_and_status_2(script):
    """-S hides all that was installed."""
    argv = [sys.executable, "-S", script]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, env={})
    (found,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert "has no numpy, torch, loguru, filelock: activate the environment" in found


@pytest.mark.parametrize("script", PARSERS)
def test_old_python_is_refused_by_the_first_import(script):
    old = "import runpy, sys; sys.version_info = (3, 10); runpy.run_path(sys.argv[1])"
    argv = [sys.executable, "-c", old, script]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, env={})
    assert "ImportError: Spider needs Python 3.11 or newer" in done.stderr.splitlines()[-1]
    for path in (script, "spider/__init__.py"):  # what runs before it, in the old syntax
        ast.parse((ROOT / path).read_text(), feature_version=(3, 10))


# --------------------------------------------------------------------------------------------------
# Bad command lines


@pytest.mark.parametrize(
    "command, remedy",
    (
        ("train.py --seq-len 64", "unknown flag --seq-len: use --seq_len"),
        ("train.py --learnin_rate 1", "the nearest is --lr"),
        ("train.py --training.steps 9", "unknown flag --training.steps: use --target_tokens"),
        ("train.py --zzz 1 --depth=4", "unknown flag --zzz; unknown flag --depth: use --model"),
        ("train.py config/train_shakespeare_char.py --device=cpu", "with --config"),
        ("train.py --no_keep_best", "use --keep_best=False"),
        (
            "train.py input.txt",
            "word input.txt: give a text with --text, shards with --data_dir",
        ),
        ("bench.py --model huge", "see python bench.py --help"),
        ("train.py --target_tokens 1M", "'1M' is not a whole number that is at least 1 (give 1e6"),
        ("train.py --target_flops 1.5k", "give 1e6 for 1M"),
        ("train.py --lr nan", "at most 1,000; see"),
        ("train.py --keep_best=1", "--keep_best: '1' is neither True nor False"),
        ("train.py --lr=--", "--lr: -- is not a value"),
        ("train.py --sample_prompt -x", "(write --NAME=VALUE if the value begins with -)"),
        ("data.py prepare a --output b", "use --out; see python data.py prepare --help"),
        ("bench.py --onlly=machine", "the nearest is --only"),
    ),
)
def test_a_bad_command_line_names_what_to_give(command, remedy):
    script, *words = command.split()
    with pytest.raises(UsageError) as raised:
        PARSERS[script](words)
    assert remedy in str(raised.value)


def test_names_of_other_projects_mean_flags_that_exist():
    others = tomllib.loads(OTHER_NAMES.read_text())
    flags = {script: flags_of(script.removesuffix(".py")) for script in PARSERS}
    flags["data.py"] = flags_of("data", "prepare")
    for script, table in others.items():
        for remedy, names in table.items():
            meant = next((other for other in PARSERS if other in remedy), script)
            assert set(re.findall(r"--\w+", remedy)) <= flags[meant]
            assert not flags[script] & {f"--{name}" for name in names.split()}


def test_flags_in_a_list_may_be_numbers():
    assert sample.parse_args(["--seed", 3]).seed == 3


# --------------------------------------------------------------------------------------------------
# Runs


def test_run_in_a_thread_warns_that_it_catches_no_signals(train_small, new_log):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(train_small, steps=1).result()
    assert "this run is in a thread: signals" in new_log()


TEXT = f"""
    --text in/a.txt --seq_len 32 --micro_batch 2 --max_steps 1 --eval_every 0 --device cpu
    --set {SMALL}
"""


@pytest.fixture
def text(in_tmp_path) -> Path:
    """Write a text to train on; return its path."""
    path = Path("in/a.txt")
    path.parent.mkdir()
    path.write_text("a text of some words\n" * 99)
    return path


def test_text_is_prepared_once_and_its_run_resumes(text, monkeypatch):
    for steps in (1, 2):
        assert train.command_line([*TEXT.split(), f"--max_steps={steps}"]) == 0
        assert last_step(Path("checkpoints/a")) == steps
        monkeypatch.setattr(ShardWriter, "write", None)


def test_text_already_prepared_with_other_flags_is_used(text, new_log):
    (text.parent / "b.md").write_text("not read")
    prepare("in", "--val_fraction=0.5", "--ext=.txt", "--out=data/in")
    assert train.command_line([*TEXT.split(), "--text=in"]) == 0
    assert "data: 1,041 ids in data/in, 1,042 for validation" in new_log()


def test_changed_or_different_text_is_refused_with_the_commands_to_use(text, capsys):
    prepare(text, "--out=data/a")
    Path("data/a-new").mkdir()
    shutil.copy2(text, "a.txt")
    os.utime(text, (1, 1))
    capsys.readouterr()
    for name in (text, "a.txt"):
        assert refused(["--text", name], capsys) == (
            f"train.py: error: data/a: already has shards of in/a.txt as it was then. "
            f"To keep using them: --data_dir data/a --ckpt_dir checkpoints/a instead of --text. "
            f"To make new ones: python data.py prepare {name} --out data/a-new-new, then "
            f"--data_dir data/a-new-new --ckpt_dir checkpoints/a-new-new instead of --text"
        )


def test_signal_while_preparing_a_text_stops_and_leaves_no_files(text, monkeypatch):
    """The signal arrives after the shards got their final names."""

    def sync(path):
        if path == Path("data/a"):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("spider.data.prepare.sync", sync)
    assert train.command_line(TEXT.split()) == STOPPED
    assert contents(Path("data/a")) == {}


def test_only_one_rank_prepares_a_text(text, run_on, tmp_path):
    run_on(2, TEXT.split())
    assert last_step(tmp_path / "checkpoints/a") == 1


METRICS = """
    loss grad_norm lr tok_per_sec bytes_per_segment mean_loops time bytes_seen epoch memory bf16_mfu
    aux_loss z_loss ponder_loss core_loss surprise_loss
""".split()
LOGGED = (
    "model tiny, 93.9M parameters, loops: 1; cpu, ",
    "data: 1,005,806 ids in mock, 70,053 for validation",
    "steps: 20 of 256 bytes, micro-batch 2, saved in checkpoints/mock",
    "compile off, grouped experts, muon, recompute nothing",
    "checkpoint: checkpoints/mock/spider-step20.pt, 394 MB",
    "step 20 continues '",
    "next: python sample.py checkpoints/mock",
)


def test_smoke_run_learns_and_saves_a_checkpoint_and_metrics(tmp_path):
    argv = "--mock_data --max_steps 20 --seq_len 128 --micro_batch 2 --eval_tokens 4096".split()
    done = command(*argv, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [words for words in LOGGED if words not in done.stderr] == []
    assert re.search(r"step 20/20 .* ETA 0:00:00", done.stderr)
    assert max(map(len, done.stderr.splitlines())) <= 80
    directory = tmp_path / "checkpoints" / "mock"
    assert (directory / "spider-step20.pt").exists()
    assert not find_checkpoints(tmp_path / "checkpoints")

    lines = metrics(directory, clock=True)
    assert [line["step"] for line in lines] == list(range(1, 21))
    for line in lines:
        assert all(isinstance(line[name], (int, float)) for name in METRICS)
        assert line["bytes_seen"] == line["step"] * 256
        assert 0 < line["bf16_mfu"] < 1 and 0.1 < line["memory"] < 10
    assert "val_bpb" in lines[-1]
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5


@pytest.mark.slow
def test_libraries_are_quiet_and_environment_variables_are_logged(tmp_path):
    flags = f"""
        --mock_data --max_steps 1 --micro_batch 2 --eval_every 0 --precision fp8
        --optimizer adamw8bit --set {SMALL}
    """
    done = command(*flags.split(), cwd=tmp_path, SEQ_LEN="64", N_LOOPS="1")
    assert done.returncode == 0, done.stderr
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in done.stderr.splitlines()), done.stderr
    assert " environment: --n_loops 1 --seq_len 64" in done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("flags", ("", "--grad_accum 4 --n_loops 6", "--compile", "--fp8_experts"))
def test_original_fp8_commands_train_on_a_gpu(tmp_path, flags):
    if not has_fp8(experts="experts" in flags):
        pytest.skip("this GPU has no FP8")
    flags += """
        --mock_data --model tiny --max_steps 8 --seq_len 256 --micro_batch 8 --eval_every 0
        --precision fp8 --ckpt_dir run
    """
    done = command(*flags.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, *_, last = metrics(tmp_path / "run")
    assert last["loss"] < first["loss"]


# --------------------------------------------------------------------------------------------------
# The dry run

PRINTED = (
    "hidden_size = 2048",
    "ckpt_dir = 'checkpoints",
    "active per byte",
    "FLOPs per byte",
    "memory: about",
    "free for 3 checkpoints of 7.3",
    "FP8 converts",
)


def test_dry_run_of_1b_prints_the_estimate_in_little_memory(tmp_path):
    """The peak must not include the parent process, which holds more than the limit."""
    code = (
        "import sys, train; from spider import machine; status = train.command_line(sys.argv[1:]);"
        "print(machine.peak_memory(train.torch.device('cpu'))); sys.exit(status)"
    )
    ballast = np.ones(125_000_000)
    flags = "--model=1b --dry_run --mock_data --device=cpu --precision=fp8"
    done = run_python(code, *flags.split(), cwd=tmp_path)
    assert machine.peak_memory(train.torch.device("cpu")) > ballast.nbytes / 1e9
    *_, verdict, peak = done.stdout.splitlines()
    assert verdict.startswith("verdict: "), done.stderr
    assert done.returncode == verdict.startswith("verdict: NOT ENOUGH")
    assert [words for words in PRINTED if words not in done.stdout] == []
    assert float(peak) < 0.8
    assert not list(tmp_path.iterdir())


def test_dry_run_finds_the_errors_of_a_run_and_changes_no_run(trained, train_small, error_of):
    before = contents(trained)
    flags = ("--dry_run --ckpt_dir", trained)
    assert "hidden_size is 32, not 64" in error_of(*flags, "--set hidden_size=64")
    train_small(*flags)
    assert contents(trained) == before
