"""The files of configs/ are understood by train.py, and the scripts of runs/ do what they say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT, SMALL
from test_docs import flags_of
from train import command_line

CONFIGS = sorted((ROOT / "configs").glob("*.toml"))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.stem)
def test_a_dry_run_accepts_every_value_of_a_config(config, tmp_path):
    flags = "--mock_data --device cpu --shards 1 --dry_run"
    argv = ["--config", str(config), *flags.split(), "--set", SMALL, "--ckpt_dir", str(tmp_path)]
    assert command_line(argv) == 0


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.stem)
def test_every_name_in_a_config_is_a_flag(config):
    names = re.findall(r"^(?:# )?(\w+) = ", config.read_text(), re.MULTILINE)
    assert len(names) > 5
    assert {f"--{name}" for name in names} <= flags_of("train")


def run_script(name: str, directory: Path, flags: str = "", status: int = 0) -> str:
    """Run a script of runs/ in this environment, without a network; return its output. The files of
    directory/bin are found before other programs."""
    path = [directory / "bin", Path(sys.executable).parent, os.environ["PATH"]]
    changes = dict(
        SPIDER_DIR=str(directory),
        VIRTUAL_ENV=sys.prefix,
        PATH=os.pathsep.join(map(str, path)),
        https_proxy="http://127.0.0.1:1",  # where nothing listens
    )
    done = subprocess.run(
        ["bash", ROOT / "runs" / name, *flags.split()],
        env=os.environ | changes,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == status, done.stdout
    return done.stdout


def write_program(path: Path, command: str):
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{command}\n")
    path.chmod(0o755)


@pytest.mark.slow
@pytest.mark.parametrize(("text", "prompt"), [("shakespeare", "ROMEO:"), ("pydoc", "The ")])
def test_shakespeare_trains_measures_and_talks_and_a_second_run_keeps_what_is_done(
    text, prompt, tmp_path
):
    """Without a network it learns from the text that it finds, or else from Python's."""
    if text == "shakespeare":
        found = tmp_path / "data" / "shakespeare.txt"  # where the script looks before it downloads
        found.parent.mkdir()
        found.write_bytes((ROOT / "LICENSE").read_bytes())
    flags = "--device cpu --seq_len 256 --target_tokens 512 --eval_tokens 512"
    out = run_script("shakespeare.sh", tmp_path, flags)
    assert ("cannot be downloaded" in out) == (text == "pydoc")
    assert "bits per byte" in out and f"\n{prompt}" in out
    run = tmp_path / "checkpoints" / text
    assert (run / "look.html").exists()
    lines = (run / "metrics.jsonl").read_text()
    run_script("shakespeare.sh", tmp_path, flags)
    assert (run / "metrics.jsonl").read_text() == lines


@pytest.mark.parametrize("answer", ["exit 127", "echo NVIDIA-SMI has failed; exit 9"])
def test_fineweb_without_a_gpu_is_one_line(answer, tmp_path):
    write_program(tmp_path / "bin" / "nvidia-smi", answer)
    out = run_script("fineweb.sh", tmp_path, status=2)
    assert "lists no GPU" in out and out.count("\n") == 1


@pytest.mark.slow
def test_fineweb_prepares_trains_and_exports_with_stand_ins_for_hub_and_gpu(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    pages = (ROOT / "docs" / "guide" / "training.md").read_text().splitlines()
    parquet.write_table(pyarrow.table(dict(text=pages * 5)), tmp_path / "pages.parquet")
    write_program(tmp_path / "bin" / "nvidia-smi", "echo 'GPU 0: a stand-in'")
    # hf download REPOSITORY --repo-type dataset --local-dir DIRECTORY FILES
    write_program(
        tmp_path / "bin" / "hf",
        f'mkdir -p "$6/sample" && cp "{tmp_path}/pages.parquet" "$6/sample"',
    )
    out = run_script(
        "fineweb.sh",
        tmp_path,
        f"--device cpu --set {SMALL} --n_loops 2 --seq_len 64 --global_batch 128 --max_steps 2 "
        f"--target_tokens 512 --eval_tokens 512",
    )
    assert "n_loops=6" in out and "\nThe moon is" in out
    assert (tmp_path / "checkpoints" / "fineweb" / "exported" / "model.safetensors").exists()
