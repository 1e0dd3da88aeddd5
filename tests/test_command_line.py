"""The command line as users meet it: help, start, smoke run, dry run, one clear line and status
2."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib import metadata

import numpy as np
import pytest

import train
from conftest import ROOT, SMALL, contents, has_fp8, metrics, refused, run, run_flags
from jobs import command, forked
from spider import machine
from spider.checkpoint import find_checkpoints

# --------------------------------------------------------------------------------------------------
# The start

NO_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("torch", "numpy", "loguru"):
            raise SystemExit(f"imports {name}")
sys.meta_path.insert(0, Refuse())
sys.argv = ["train.py", *sys.argv[1:]]
import runpy
runpy.run_path("train.py", run_name="__main__")
"""


def test_an_installation_is_found_from_a_directory_that_holds_a_folder_called_data(tmp_path):
    """The default --data_dir: Python takes such a folder for a package if nothing on its path has
    the name."""
    try:
        metadata.distribution("spider-trainer")
    except metadata.PackageNotFoundError:
        pytest.skip("the project is not installed: pip install -e .")
    (tmp_path / "data").mkdir()
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", "import data; print(data.__file__)"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environ,
    )
    assert done.stdout.strip() == str(ROOT / "data.py"), done.stderr


@pytest.mark.parametrize(
    "argv, status, said",
    (
        (("--help",), 0, "{auto,1b,base,original,small,tiny}"),
        (("--learning_rate", "1"), 2, "--learning_rate"),
        (("--seq_len", "1"), 2, "--seq_len: '1' is not a whole number from 2"),
        (("--config", "none.toml"), 2, "--config: none.toml: No such file or directory"),
        (("--max_steps", "1"), 1, "imports"),
    ),
)
def test_help_and_mistyped_flags_are_answered_without_importing_torch(argv, status, said):
    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH, *argv],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == status and said in done.stdout + done.stderr
    if status == 2:
        assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("train.py: error: ")
    if status == 1:  # of a good command the first line comes before
        assert done.stderr.splitlines() == ["train.py: starting", "imports numpy"]
    if status == 0:
        for choices in (
            "{auto,adamw,adamw8bit,muon}",
            "{cosine,wsd}",
            "{auto,fp8,bf16,fp32}",
            "{auto,on,off}",
            "{auto,loop,grouped,triton,tile}",
            "{auto,nothing,core,all}",
        ):
            assert choices in done.stdout


def test_ctrl_c_during_the_start_ends_it_without_a_traceback(tmp_path):
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), "--mock_data"],
        cwd=tmp_path,
        text=True,
        stderr=subprocess.PIPE,
    )
    first = process.stderr.readline()  # at once; the imports come now
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=120)[1]
    assert first == "train.py: starting\n" and rest in (
        "",
        "SIGINT: stopping; repeat to quit at once\n",
    )
    assert process.returncode == -signal.SIGINT


@pytest.mark.parametrize(
    "environ, wanted",
    (
        ({}, "expandable_segments:True None"),
        (dict(PYTORCH_ALLOC_CONF="max_split_size_mb:64"), "max_split_size_mb:64 None"),
        (dict(PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:64"), "None max_split_size_mb:64"),
    ),
)
def test_expandable_segments_are_set_before_torch_is_imported_unless_the_user_chose(
    environ, wanted
):
    """When its import begins, the allocator's variables are these."""
    probe = NO_TORCH.replace(
        'raise SystemExit(f"imports {name}")',
        """
            import os
            print(os.environ.get("PYTORCH_ALLOC_CONF"), os.environ.get("PYTORCH_CUDA_ALLOC_CONF"))
            os._exit(0)""",
    ).replace('"numpy", "loguru"', '"torch"')
    plain = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    done = subprocess.run(
        [sys.executable, "-u", "-c", probe, "--mock_data"],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=120,
        env=plain | environ,
    )
    assert done.stdout.strip() == wanted, done.stderr


# --------------------------------------------------------------------------------------------------
# Runs


def test_the_smoke_run_learns_and_leaves_a_checkpoint_and_metrics(tmp_path, processes):
    argv = (
        "--mock_data",
        "--max_steps",
        "20",
        "--seq_len",
        "128",
        "--micro_batch",
        "2",
        "--eval_tokens",
        "4096",
    )
    done = command(*argv, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [
        json.loads(line)
        for line in (tmp_path / "checkpoints/mock/metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines] == list(range(1, 21))
    parts = ("aux_loss", "z_loss", "ponder_loss", "core_loss", "surprise_loss")
    for key in (
        "loss",
        "grad_norm",
        "lr",
        "tok_per_sec",
        "bytes_per_segment",
        "mean_loops",
        "time",
        "bytes_seen",
        "epoch",
        "memory",
        "bf16_mfu",
        *parts,
    ):
        assert all(isinstance(line[key], (int, float)) for line in lines), key
    for line in lines:
        assert line["total_loss"] == pytest.approx(
            line["loss"] + sum(line.get(part, 0) for part in (*parts, "boundary_loss")), rel=1e-5
        )
        assert (
            line["bytes_seen"] == line["step"] * 256
            and 0 < line["bf16_mfu"] < 1
            and 0.1 < line["memory"] < 10
        )
    assert (
        sorted(line["time"] for line in lines) == [line["time"] for line in lines]
        and lines[0]["time"] > 1.7e9
    )
    assert "val_bpb" in lines[-1] and lines[-1]["loss"] < lines[0]["loss"] - 0.5
    assert (tmp_path / "checkpoints/mock/spider-step20.pt").exists() and not find_checkpoints(
        tmp_path / "checkpoints"
    )
    for said in (
        "model tiny",
        "precision",
        "expert backend grouped",
        "optimizer muon",
        "step 20/20",
        "bytes/s",
        "bytes/segment",
        "loops",
        "balance",
        "GB",
        "ETA",
    ):
        assert said in done.stderr, said
    status, _, log = forked(processes, tmp_path, *argv)
    assert status == 0 and "step 20)" in log and "| loss" not in log  # nothing was left to do


@pytest.mark.slow
def test_libraries_are_quiet_and_variables_are_named(tmp_path):
    done = command(
        "--mock_data",
        "--max_steps",
        "1",
        "--micro_batch",
        "2",
        "--eval_every",
        "0",
        "--precision",
        "fp8",
        "--optimizer",
        "adamw8bit",
        "--set",
        SMALL,
        cwd=tmp_path,
        SEQ_LEN="64",
        N_LOOPS="1",
    )
    assert done.returncode == 0, done.stderr
    first, *lines = done.stderr.splitlines()
    assert first == "train.py: starting" and all(
        re.match(r"\d\d:\d\d:\d\d ", line) for line in lines
    ), done.stderr
    assert "environment or --config: --seq_len 64 --n_loops 1" in done.stderr


@pytest.mark.gpu
def test_the_originals_fp8_commands_train_on_a_gpu(tmp_path):
    if not has_fp8():
        pytest.skip("this GPU has no FP8")
    base = (
        "--mock_data",
        "--model",
        "tiny",
        "--max_steps",
        "8",
        "--seq_len",
        "256",
        "--micro_batch",
        "8",
        "--eval_every",
        "0",
    )
    experts = [("--fp8_experts",)] if has_fp8(experts=True) else []
    for flags in ((), ("--grad_accum", "4", "--n_loops", "6"), ("--compile",), *experts):
        directory = tmp_path / "-".join(("run", *flags))
        done = command(*base, "--precision", "fp8", *flags, "--ckpt_dir", directory, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert metrics(directory)[-1]["loss"] < metrics(directory)[0]["loss"]


@pytest.mark.slow
def test_compiled_layers_train_like_the_others(tmp_path):
    base = (
        "--mock_data",
        "--max_steps",
        "3",
        "--seq_len",
        "64",
        "--micro_batch",
        "2",
        "--eval_every",
        "0",
        "--n_loops",
        "2",
        "--precision",
        "fp32",
    )
    losses = []
    for flags in ((), ("--compile",)):
        done = command(*base, *flags, "--ckpt_dir", f"run{len(flags)}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        losses.append([line["loss"] for line in metrics(tmp_path / f"run{len(flags)}")])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-3)


def test_what_this_machine_cannot_do_is_an_error_that_names_the_remedy(tmp_path, capsys):
    base = ["--mock_data", "--model", "tiny", "--ckpt_dir", tmp_path / "run"]
    assert "--moe_backend grouped" in refused([*base, "--moe_backend", "tile"], capsys)
    if not train.torch.cuda.is_available():
        assert "--device cpu" in refused([*base, "--device", "cuda"], capsys)
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        assert str(tmp_path / "file") in refused(["--mock_data", "--ckpt_dir", path], capsys)


# --------------------------------------------------------------------------------------------------
# The dry run


def test_the_dry_run_of_the_1b_model_is_quick_small_and_complete(tmp_path):
    """Its own peak counts: the process that starts it has more in memory than it may take."""
    probe = (
        "import sys, train; from spider import machine; status = train.command_line(sys.argv[1:]);"
        "print('PEAK', machine.peak_memory(train.torch.device('cpu'))); sys.exit(status)"
    )
    ballast = np.ones(125_000_000)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            probe,
            *"--model=1b --dry_run --mock_data --device=cpu".split(),
            "--precision=fp8",
        ],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=600,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert machine.peak_memory(train.torch.device("cpu")) > ballast.nbytes / 1e9
    *lines, run_line, verdict, _ = done.stdout.splitlines()  # the last is PEAK's
    assert done.returncode == verdict.startswith("verdict: NOT ENOUGH") and verdict.startswith(
        "verdict: "
    ), done.stderr
    assert (
        run_line.startswith("run: ")
        and ", at least " in run_line
        and "no step was timed" in run_line
    )
    for said in (
        "hidden_size = 2048",
        "routed experts",
        "Engram tables",
        "active per byte",
        "FLOPs per byte",
        "memory: about",
        "free for 3 checkpoints of 7.3",
        "FP8 converts",
    ):
        assert said in done.stdout, said
    assert float(done.stdout.split("PEAK")[1]) < 0.8
    assert not list(tmp_path.iterdir())


def test_a_dry_run_finds_what_a_run_would_find_and_writes_nothing(tmp_path, shards, capsys):
    directory = run(tmp_path, shards, steps=3)
    before = contents(directory)
    for flags, said in (
        (("--set", "hidden_size=64"), "hidden_size is 32, not 64"),
        (("--reset_steps",), "--ckpt_dir"),
        (("--data_dir", "gone"), "gone"),
    ):
        assert said in refused(run_flags(shards, directory, "--dry_run", *flags), capsys)
    for where in (directory, tmp_path / "new"):
        assert train.command_line(run_flags(shards, where, "--dry_run")) == 0
    assert contents(directory) == before and not (tmp_path / "new").exists()
