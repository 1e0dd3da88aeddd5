"""The command line as users meet it: help, startup, runs, dry run, errors of one line."""

import os
import re
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

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
from spider.training.checkpoint import find_checkpoints

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


# --------------------------------------------------------------------------------------------------
# Runs


def test_run_in_a_thread_warns_that_it_catches_no_signals(train_small, new_log):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(train_small, steps=1).result()
    assert "this run is in a thread: no signal" in new_log()


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
    assert "data: 1,041 ids in data/in, 1,042 to validate" in new_log()


def test_changed_or_different_text_is_refused_with_the_commands_to_use(text, capsys):
    prepare(text, "--out=data/a")
    Path("data/a-new").mkdir()
    shutil.copy2(text, "a.txt")
    os.utime(text, (1, 1))
    capsys.readouterr()
    for name in (text, "a.txt"):
        assert refused(["--text", name], capsys) == (
            f"train.py: error: data/a: has shards already, of in/a.txt as it was then. "
            f"To go on with them: --data_dir data/a --ckpt_dir checkpoints/a instead of --text. "
            f"New ones: python data.py prepare {name} --out data/a-new-new, then "
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
    "data: 1,005,806 ids in mock, 70,053 to validate",
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
    lines = done.stderr.splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in lines), done.stderr
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
