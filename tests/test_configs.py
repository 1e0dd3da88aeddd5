"""train.py accepts the files of configs/, and the scripts of runs/ do what they promise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import train
from conftest import ROOT, SMALL
from jobs import until
from test_command_line import PARSERS
from test_docs import flags_of
from train import command_line

CONFIGS = sorted((ROOT / "configs").glob("*.toml"))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.stem)
def test_dry_run_accepts_every_config(config, tmp_path):
    flags = "--mock_data --device cpu --shards 1 --dry_run"
    argv = ["--config", str(config), *flags.split(), "--set", SMALL, "--ckpt_dir", str(tmp_path)]
    assert command_line(argv) == 0


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.stem)
def test_every_name_in_a_config_is_a_flag(config):
    names = re.findall(r"^(?:# )?(\w+) = ", config.read_text(), re.MULTILINE)
    assert len(names) > 5
    assert {f"--{name}" for name in names} <= flags_of("train")


def start_script(name: str, directory: Path, flags: str) -> subprocess.Popen:
    """Start a script of runs/ in this environment, without a network. Programs in directory/bin
    come first on the PATH."""
    path = [directory / "bin", Path(sys.executable).parent, os.environ["PATH"]]
    changes = dict(
        SPIDER_DIR=str(directory),
        VIRTUAL_ENV=sys.prefix,
        PATH=os.pathsep.join(map(str, path)),
        https_proxy="http://127.0.0.1:1",  # where nothing listens
    )
    return subprocess.Popen(
        ["bash", ROOT / "runs" / name, *flags.split()],
        env=os.environ | changes,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_script(name: str, directory: Path, flags: str = "", status: int = 0) -> tuple[str, str]:
    """Run a script of runs/; return its stdout and stderr."""
    script = start_script(name, directory, flags)
    out, err = script.communicate(timeout=600)
    assert script.returncode == status, err
    return out, err


def write_program(path: Path, command: str):
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{command}\n")
    path.chmod(0o755)


@pytest.mark.slow
@pytest.mark.parametrize(("text", "prompt"), [("shakespeare", "ROMEO:"), ("python-docs", "The ")])
def test_shakespeare_trains_evaluates_and_samples_and_a_rerun_adds_nothing(text, prompt, tmp_path):
    """Without a network it trains on the text it finds, else on Python's documentation."""
    if text == "shakespeare":
        found = tmp_path / "data" / "shakespeare.txt"  # where the script looks before it downloads
        found.parent.mkdir()
        found.write_bytes((ROOT / "LICENSE").read_bytes())
    flags = "--device cpu --seq_len 256 --target_tokens 512 --eval_tokens 512"
    out, _ = run_script("shakespeare.sh", tmp_path, flags)
    assert ("cannot be downloaded" in out) == (text == "python-docs")
    assert "bits per byte" in out and f"\n{prompt}" in out
    run = tmp_path / "checkpoints" / text
    assert (run / "look.html").exists()
    lines = (run / "metrics.jsonl").read_text()
    run_script("shakespeare.sh", tmp_path, flags)
    assert (run / "metrics.jsonl").read_text() == lines


def test_fineweb_without_a_gpu_ends_with_one_line(tmp_path):
    write_program(tmp_path / "bin" / "nvidia-smi", "echo NVIDIA-SMI has failed; exit 9")
    out, err = run_script("fineweb.sh", tmp_path, status=2)
    assert out == "" and "lists no GPU" in err and err.count("\n") == 1


@pytest.mark.slow
def test_fineweb_prepares_trains_and_exports_with_a_stand_in_hub_and_gpu(tmp_path):
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
    out, _ = run_script(
        "fineweb.sh",
        tmp_path,
        f"--device cpu --set {SMALL} --n_loops 2 --seq_len 64 --global_batch 128 --max_steps 2 "
        f"--target_tokens 512 --eval_tokens 512",
    )
    assert re.search("data/fineweb +6 ", out) and "\nThe moon is" in out
    assert (tmp_path / "checkpoints" / "fineweb" / "exported" / "model.safetensors").exists()


# --------------------------------------------------------------------------------------------------
# runs/first_gpu.sh, with a stand-in for Python: the GPU works as long as the file `gpu` exists

PYTHON = """
[ "$1" = -c ] && exec cat "$SPIDER_DIR/gpu"
echo "$*" >> "$SPIDER_DIR/commands"
[ -e "$SPIDER_DIR/repaired" ] && exit 0
case "$*" in
    *test_tile_moe.py) sleep 0.3; kill -ALRM $PPID; exec sleep 60 ;;  # as timeout does, later
    train.py*"--precision fp8"*) echo "error: a reason"; exit 3 ;;
    *test_train.py) grep "^eager  *passed" "$SPIDER_DIR/results/summary.txt"; exit ;;
    *test_command_line.py) rm "$SPIDER_DIR/gpu"; exit 1 ;;
    train.py*) for last; do :; done; mkdir -p "$last"; touch "$last/a.pt" "$last/metrics.jsonl" ;;
esac
"""
ALL = """
    values eager compiled fp8 step_bf16 step_fp8 step_eager machine backends
    test_tile_moe test_grouped_triton test_tile_kernels test_compile memcheck
    checkpoint step_2048_bf16 step_2048_fp8 short_documents
    test_train test_command_line test_resumption
""".split()


def rows_of(directory: Path) -> dict[str, str]:
    """Return the rows of the table of results, by name."""
    table = (directory / "results" / "summary.txt").read_text().split("\n\n")[1]
    return {line[:20].rstrip(): line[21:].rstrip() for line in table.splitlines()}


def check_command(line: str):
    """Check that the script of a command accepts its flags."""
    script, *flags = line.split()
    if script == "bench.py":
        assert flags[:2] in (["--only", "machine"], ["--only", "step"])
        train.parse_args(flags[2:])
    elif script in PARSERS:
        PARSERS[script](flags)
    else:
        assert line.startswith("-m pytest -q -m gpu -rs tests/")


def test_first_gpu_continues_past_failures_and_a_rerun_does_the_rest(tmp_path):
    write_program(tmp_path / "bin" / "python", PYTHON)
    write_program(tmp_path / "bin" / "compute-sanitizer", 'shift 3; exec "$@"')
    (tmp_path / "gpu").write_text("not installed: tile_kernels\nTrue\n")
    out, _ = run_script("first_gpu.sh", tmp_path, f"{tmp_path}/results", status=1)
    assert out.startswith("not installed: tile_kernels\n")
    rows = rows_of(tmp_path)
    assert list(rows) == ALL
    assert rows["test_tile_moe"].startswith("FAILED (124)")
    assert rows["fp8"] == "FAILED (3)    error: a reason"
    assert rows["test_command_line"].startswith("FAILED (1)")
    assert rows["test_resumption"] == "not run"
    assert sum(row.startswith("passed") for row in rows.values()) == len(ALL) - 3 - 1
    assert out.endswith(f"tar czf first-gpu.tgz -C '{tmp_path}/results' .\n")
    assert [path.name for path in (tmp_path / "results/compiled").iterdir()] == ["metrics.jsonl"]
    first = (tmp_path / "commands").read_text().splitlines()

    (tmp_path / "gpu").write_text("True\n")
    (tmp_path / "repaired").touch()
    run_script("first_gpu.sh", tmp_path, f"{tmp_path}/results")
    assert all(row.startswith("passed") for row in rows_of(tmp_path).values())
    commands = (tmp_path / "commands").read_text().splitlines()
    assert len(commands) - len(first) == 3 + 1  # failed, not run
    for line in commands:
        check_command(line)


def test_first_gpu_runs_every_file_with_gpu_tests_and_docs_explain_it():
    marked = {
        path.stem
        for path in ROOT.glob("tests/**/test_*.py")
        if re.search(r"^@pytest.mark.gpu$", path.read_text(), re.MULTILINE)
    }
    assert {name for name in ALL if name.startswith("test_")} == marked
    page = (ROOT / "docs/results/performance.md").read_text()
    assert [name for name in ALL if f"`{name}`" not in page] == []


@pytest.mark.parametrize(
    "results, fragment", (("results", "nvidia-smi): cat: "), ("bin", "name a new directory"))
)
def test_first_gpu_without_a_gpu_or_a_new_directory_ends_with_one_line(results, fragment, tmp_path):
    write_program(tmp_path / "bin" / "python", PYTHON)
    out, err = run_script("first_gpu.sh", tmp_path, f"{tmp_path}/{results}", status=2)
    assert out == "" and err.count("\n") == 1 and fragment in err
    assert os.listdir(tmp_path) == ["bin"]


def test_signal_to_first_gpu_stops_the_running_command(tmp_path):
    # the trap starts no process, because `timeout` sends the signal twice
    waits = """trap ': > "$SPIDER_DIR/ended"; exit' TERM
touch "$SPIDER_DIR/started"
while :; do sleep 0.1; done"""
    write_program(tmp_path / "bin" / "python", f'[ "$1" = -c ] && exec echo True\n{waits}')
    script = start_script("first_gpu.sh", tmp_path, f"{tmp_path}/results")
    until((tmp_path / "started").exists, 20)
    script.terminate()
    script.communicate(timeout=20)
    assert script.returncode == 130
    assert (tmp_path / "ended").exists()
