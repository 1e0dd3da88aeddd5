"""Checkpoints: atomic writes, loading without executing anything, copying into the run by name."""

import copy
import errno
import math
import os
import random
import shutil
import zipfile
from pathlib import Path
from threading import Event, Timer

import pytest
import torch

from conftest import (
    assert_same,
    assert_same_runs,
    contents,
    final_state,
    make_shards,
    refused,
    run,
    run_python,
    saved_steps,
)
from spider.errors import CheckpointError
from spider.files import locked
from spider.machine import start_log
from spider.training import distributed, state
from spider.training.checkpoint import CheckpointWriter, best_checkpoint, load_checkpoint
from spider.training.run import Metrics

NO_EVAL = "--eval_every 0"


def steps_in_names(directory) -> list[int]:
    """Return the steps in a directory's file names; the files may be damaged."""
    return sorted(int(path.stem[11:]) for path in directory.glob("spider-step*.pt"))


# --------------------------------------------------------------------------------------------------
# Damaged files


def test_altered_or_truncated_checkpoint_is_refused_or_equal(train_small):
    path = train_small(NO_EVAL, steps=1) / "spider-step1.pt"
    content = path.read_bytes()
    original = load_checkpoint(path)
    size = len(content)
    bits = [(offset, offset % 8) for offset in random.Random(0).sample(range(size), 60)]
    bits += [(offset, offset % 8) for offset in (*range(8), *range(size - 90, size))]  # headers
    weight_record = content.rindex(b"PK\1\2", 0, content.rindex(b"/data/0"))
    bits += [(weight_record + 38, bit) for bit in range(8)]  # its external attributes
    refusals = 0
    for offset, bit in bits:
        altered = bytearray(content)
        altered[offset] ^= 1 << bit
        path.write_bytes(altered)
        try:
            assert_same(load_checkpoint(path), original)  # a byte of padding, for example
        except CheckpointError:
            refusals += 1
    assert refusals > 80
    for length in (0, 1, 30, size // 2, size - 1):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError):
            load_checkpoint(path)


def test_run_resumes_bitwise_from_the_checkpoint_before_a_damaged_one(train_small, new_log):
    flags = "--ckpt_every 3"
    whole = train_small(flags, ckpt="whole")
    directory = train_small(flags)
    newest = directory / "spider-step6.pt"
    content = bytearray(newest.read_bytes())
    content[5000] ^= 1
    newest.write_bytes(content)
    train_small(flags)
    log = new_log()
    assert f"skipped: {newest}" in log
    assert f"resuming from {directory}/spider-step3.pt" in log
    assert_same_runs(directory, whole)


def test_run_with_only_damaged_checkpoints_is_refused_and_unchanged(train_small, error_of):
    directory = train_small(steps=3)
    good = shutil.copy(directory / "spider-step3.pt", directory / "spider-step3-copy.pt")
    (directory / "spider-step3.pt").write_bytes(b"no checkpoint")
    before = contents(directory)
    os.mkfifo(directory / "spider-step4.pt")
    (directory / "spider-step5.pt").symlink_to("/dev/zero")
    assert "none of the checkpoints" in error_of()
    for name, content in before.items():
        assert (directory / name).read_bytes() == content
    train_small("--resume", good)
    assert saved_steps(directory) == [6]


def test_directory_in_use_is_refused_except_for_dry_runs(tmp_path, train_small, error_of):
    directory = tmp_path / "run"
    directory.mkdir()
    with locked(directory):
        assert "another command is using it" in error_of()
        train_small("--dry_run")


# Load a checkpoint, then load it again under each of two limits and print the errors.
LIMITED = """
import os, pathlib, re, resource, sys
import torch
from spider.training.checkpoint import load_checkpoint
path = pathlib.Path(sys.argv[1])
def load(limit, most):
    free = resource.getrlimit(limit)
    for mapped in (False, True):
        resource.setrlimit(limit, (most, free[1]))
        try:
            load_checkpoint(path, mapped)
        except OSError as fault:
            resource.setrlimit(limit, free)
            print(fault.filename == str(path), fault.strerror)
load_checkpoint(path)
memory = re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1]
load(resource.RLIMIT_AS, 1024 * int(memory) + (32 << 20))
load(resource.RLIMIT_NOFILE, os.dup(0))
"""


def test_lack_of_memory_or_file_handles_is_not_reported_as_damage(tmp_path, saved_by_adamw8bit):
    saved_by_adamw8bit["model_state_dict"]["large"] = torch.zeros(16 << 20)  # 64 MiB
    torch.save(saved_by_adamw8bit, tmp_path / "large.pt")
    del saved_by_adamw8bit["model_state_dict"]["large"]
    done = run_python(LIMITED, tmp_path / "large.pt")
    expected = ["True Cannot allocate memory"] * 2 + ["True Too many open files"] * 2
    assert done.stdout.splitlines() == expected, done.stderr


def test_run_with_an_unreadable_checkpoint_is_refused_and_unchanged(
    train_small, monkeypatch, error_of
):
    """Resuming from the previous checkpoint would lose steps."""
    directory = train_small(f"--ckpt_every 1 {NO_EVAL}", steps=2)
    before = contents(directory)
    load = torch.load

    def load_first(path, **options):
        if path.stem == "spider-step2":
            raise PermissionError(errno.EACCES, "not to be seen", "of another")
        return load(path, **options)

    monkeypatch.setattr(torch, "load", load_first)
    assert f"error: {directory}/spider-step2.pt: Permission denied" in error_of()
    assert contents(directory) == before


# --------------------------------------------------------------------------------------------------
# Crafted files

# Statements that alter a checkpoint of 8-bit AdamW. `values` are the tensors of parameter 0.
CRAFTED = """
    saved["epoch"] = Harmful(directory)
    write_compressed(saved, directory)
    saved["bytes_seen"] = -1
    saved["n_loops"] = 10**9
    saved["metrics"] = {"loss": 10**400}
    saved["flags"]["seq_len"] = "32"
    saved["flags"]["lr"] = math.nan
    saved["cfg"]["hidden_size"] = 1 << 40
    saved["cfg"]["x" * (1 << 21)] = 1
    weights["lm_head.weight"] = torch.zeros(()).expand(1 << 20, 1 << 20)
    for name, weight in weights.items(): weights[name] = weight.bfloat16()  # integers, too
    values["state1"] = values["state1"].to_sparse()
    del values["state1"]
    by_param[0]["step"] = 1 << 31
    by_param[999] = by_param[0]
    for _ in range(60): by_param[0] = dict(a=by_param[0], b=by_param[0])
    for _ in range(60): saved["cfg"] = (saved["cfg"], saved["cfg"])
"""


class Harmful:
    """An object that creates a file when it is unpickled."""

    def __init__(self, directory: Path):
        self.directory = directory

    def __reduce__(self):
        return open, (str(self.directory / "harm"), "w")


def write_compressed(saved: dict, directory: Path):
    """Write a checkpoint as a compressed archive, which could expand to any size."""
    torch.save(saved, directory / "plain.pt")
    with zipfile.ZipFile(directory / "plain.pt") as plain:
        records = {name: plain.read(name) for name in plain.namelist()}
    with zipfile.ZipFile(directory / "crafted.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in records.items():
            archive.writestr(name, content)


@pytest.fixture(scope="module")
def saved_by_adamw8bit(tmp_path_factory) -> dict:
    """Return the checkpoint of a one-step run with 8-bit AdamW."""
    root = tmp_path_factory.mktemp("adamw8bit")
    shards = make_shards(root / "data")
    return final_state(run(root, shards, "--optimizer adamw8bit", NO_EVAL, steps=1))


@pytest.mark.parametrize("statement", CRAFTED.strip().splitlines())
def test_crafted_checkpoint_is_refused_in_one_line(
    tmp_path, saved_by_adamw8bit, error_of, statement
):
    saved = copy.deepcopy(saved_by_adamw8bit)
    by_param = saved["optimizer_state_dict"]["adamw8bit"]["state"]
    names = dict(
        directory=tmp_path,
        saved=saved,
        weights=saved["model_state_dict"],
        by_param=by_param,
        values=by_param[0][state.NESTED],
    )
    exec(statement.strip(), globals() | names)
    crafted = tmp_path / "crafted.pt"
    if not crafted.exists():
        torch.save(saved, crafted)
    line = error_of("--optimizer adamw8bit", NO_EVAL, "--resume", crafted)
    assert len(line) < 500
    assert not (tmp_path / "harm").exists()


def test_checkpoint_with_other_dtypes_and_layouts_resumes_bitwise(tmp_path, train_small):
    """Values are copied into the run's own tensors; the run keeps its own settings. A recorded flag
    may have any value that the command line accepts."""
    flags = f"--optimizer adamw --grad_clip 1e30 {NO_EVAL}"
    directory = train_small(flags, steps=2)
    saved = final_state(directory)
    whole = train_small(flags, steps=3)
    saved["note"] = ["by another program"]
    weights = saved["model_state_dict"]
    weights["lm_head.weight"] = weights["lm_head.weight"].double()
    of_adamw = saved["optimizer_state_dict"]["adamw"]
    of_adamw["param_groups"][0] |= dict(lr=math.nan, betas="x", fused=False)
    for values in of_adamw["state"].values():
        both = torch.stack((values["exp_avg"], values["exp_avg_sq"]), -1).double()
        values["exp_avg"], values["exp_avg_sq"] = both.unbind(-1)  # they share a storage
    other = tmp_path / "other"
    other.mkdir()
    torch.save(saved, other / "spider-step2.pt")
    (other / "metrics.jsonl").write_bytes((directory / "metrics.jsonl").read_bytes())
    assert_same_runs(train_small(flags, steps=3, ckpt="other"), whole)


def test_all_entries_are_loaded_and_n_loops_defaults_to_the_models(tmp_path, saved_by_adamw8bit):
    path = tmp_path / "a.pt"
    torch.save(saved_by_adamw8bit, path)
    saved = load_checkpoint(path)
    assert saved.keys() == saved_by_adamw8bit.keys()
    del saved["n_loops"]
    torch.save(saved, path)
    assert load_checkpoint(path)["n_loops"] == saved["cfg"]["n_loops"]


# --------------------------------------------------------------------------------------------------
# Checkpoints of another model or optimizer


def test_changed_optimizer_is_refused_by_name(train_small, error_of):
    directory = train_small("--optimizer adamw", steps=1)
    before = contents(directory)
    line = error_of("--optimizer muon")
    assert "adamw, engram" in line
    assert "muon, adamw, engram" in line
    assert contents(directory) == before


def test_changed_model_is_refused_with_the_differing_fields(
    tmp_path, shards, train_small, error_of, capsys
):
    origin = train_small(steps=1) / "spider-step1.pt"
    for setting, named in (
        ("hidden_size=64", "hidden_size is 32, not 64"),
        (
            "act_threshold=0.5,boundaries=words,segment_offsets=3",
            "segment_offsets is 1, not 3; act_threshold is 0.99, not 0.5. Leave",
        ),
    ):
        assert named in error_of(f"--set {setting} --resume", origin, ckpt="new")
    argv = f"--data_dir {shards} --ckpt_dir {tmp_path / 'new'} --model small --resume {origin}"
    assert "hidden_size is 32, not 256; " in refused(argv.split(), capsys)


# --------------------------------------------------------------------------------------------------
# Writing


def writer_in(directory) -> CheckpointWriter:
    return CheckpointWriter(directory, keep_last=2, keep_best=False, world=distributed.World({}))


def save(writer, step, **more):
    writer.save(dict(step=step, exploded=False, val_loss=None) | more, lambda: None)


def test_save_copies_the_state_and_waits_only_for_the_previous_write(tmp_path):
    weight = torch.zeros(1000)
    writer = writer_in(tmp_path)
    memory = set()
    for step in (1, 2):
        may_write = Event()
        writer.thread.submit(may_write.wait)
        weight.fill_(step)  # training continues although the previous file is not written yet
        save(writer, step, nested=dict(weight=weight))
        memory.add(writer.host_copy["nested"]["weight"].data_ptr())
        assert steps_in_names(tmp_path) == [*range(1, step)]
        Timer(0.2, may_write.set).start()
    assert writer.holds(2) and not writer.holds(1)
    for step in (1, 2):
        saved = torch.load(tmp_path / f"spider-step{step}.pt")
        assert (saved["nested"]["weight"] == step).all()
    assert len(memory) == 1  # the second copy reuses the memory of the first


def test_save_waits_for_copies_from_the_gpu_before_it_writes(tmp_path, monkeypatch):
    """The copies finish when the host synchronizes."""
    writer = writer_in(tmp_path)

    def synchronize():
        writer.thread.submit(int).result()  # a write already started would end first
        writer.host_copy["weight"].fill_(1)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    save(writer, 1, weight=torch.zeros(3))
    assert writer.holds(1)
    assert torch.load(tmp_path / "spider-step1.pt")["weight"].tolist() == [1, 1, 1]


def test_unfinished_files_of_killed_processes_are_deleted(tmp_path, capsys):
    (tmp_path / ".spider-step7.pt.0123abcd.tmp").touch()
    (tmp_path / ".spider-step6.pt.0123abcd.tmp").mkdir()  # stands for a file that cannot be deleted
    (tmp_path / ".spider-step5.pt.mine.tmp").touch()
    writer_in(tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".spider-step5.pt.mine.tmp", ".spider-step6.pt.0123abcd.tmp"]
    assert capsys.readouterr().err.count("cannot be deleted") == 1


def test_undeletable_checkpoint_is_logged_once_and_saving_continues(tmp_path, capsys):
    start_log()
    writer = writer_in(tmp_path)
    save(writer, 1)
    assert writer.holds(1)
    (tmp_path / "spider-step1.pt").unlink()
    (tmp_path / "spider-step1.pt").mkdir()  # unlink fails on a directory, even for root
    for step in (2, 3, 4, 5):
        save(writer, step)
        assert writer.holds(step)
    assert capsys.readouterr().err.count("cannot be deleted") == 1
    assert steps_in_names(tmp_path) == [1, 4, 5]


def test_keep_last_counts_no_exploded_checkpoints(tmp_path):
    writer = writer_in(tmp_path)
    kept = []
    for step in range(1, 8):
        save(writer, step, exploded=step in (3, 4, 5))
        writer.holds(step)
        kept.append(steps_in_names(tmp_path))
    assert kept == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 2, 4, 5], [2, 5, 6], [6, 7]]


def test_metrics_are_synced_before_a_checkpoint_gets_its_name(train_small, monkeypatch):
    """Otherwise a power loss could leave a checkpoint without its lines of metrics.jsonl."""
    events = []

    def record_calls(owner, name, describe):
        real = getattr(owner, name)

        def recorded(*args):
            events.append(describe(*args))
            return real(*args)

        monkeypatch.setattr(owner, name, recorded)

    record_calls(Metrics, "write", lambda *_: "line")
    record_calls(os, "fsync", lambda number: f"synced {Path(f'/dev/fd/{number}').readlink().name}")
    record_calls(os, "replace", lambda _, path: f"named {Path(path).name}")
    directory = train_small(NO_EVAL, steps=2)
    named = events.index("named spider-step2.pt")
    last_line, metrics_synced, file_synced = events[named - 3 : named]
    assert "line" not in events[named:]
    assert last_line == "line"
    assert metrics_synced == "synced metrics.jsonl"
    assert file_synced.startswith("synced .spider-step2.pt.")
    assert events[named + 1] == f"synced {directory.name}"


# --------------------------------------------------------------------------------------------------
# Which are kept, and which is resumed

WITHOUT_BEST = "--eval_every 2 --ckpt_every 3"


def test_keep_best_keeps_the_lowest_validation_loss_and_the_newest(train_small, losses):
    """Steps 4 and 10, the best so far, are no multiples of --ckpt_every. The run knows its best
    checkpoint wherever it was stopped."""
    for steps, best in ((5, 4), (9, 4), (12, 10), (18, 10)):
        directory = train_small(WITHOUT_BEST, "--keep_best", steps=steps)
        assert best_checkpoint(directory).step == best
    assert steps_in_names(directory) == [10, 15, 18]
    assert best_checkpoint(directory).val_loss == 1.0


def test_damaged_newer_checkpoint_does_not_count_for_keep_last(train_small):
    """The damage shows only in the tensors. In a new directory nothing is saved yet."""
    flags = f"--ckpt_every 1 {NO_EVAL}"
    directory = train_small(flags, steps=2)
    other = train_small(flags, "--resume", directory / "spider-step1.pt", steps=2, ckpt="other")
    assert steps_in_names(other) == [1, 2]
    content = bytearray((directory / "spider-step2.pt").read_bytes())
    middle = len(content) // 2
    content[middle : middle + 100] = bytes(100)
    (directory / "spider-step2.pt").write_bytes(content)
    assert saved_steps(directory) == [1, 2]
    train_small(flags, "--ckpt_every 3", steps=3)
    assert steps_in_names(directory) == [1, 2, 3]


def test_without_keep_best_the_best_checkpoint_is_among_the_newest(train_small, losses):
    directory = train_small(WITHOUT_BEST, steps=18)
    assert steps_in_names(directory) == [15, 18]
    assert best_checkpoint(directory).step == 18
    without = train_small(NO_EVAL, steps=3, ckpt="without")
    with pytest.raises(CheckpointError, match="no checkpoint in it was saved after an evaluation"):
        best_checkpoint(without)


def test_renamed_checkpoint_is_skipped(train_small, new_log):
    """Otherwise every restart would go back to it."""
    flags = f"--ckpt_every 2 {NO_EVAL}"
    directory = train_small(flags, steps=4)
    for name in ("spider-step9.pt", "spider-step2-mine.pt"):
        shutil.copy(directory / "spider-step2.pt", directory / name)
    assert saved_steps(directory) == [2, 4]
    train_small(flags, steps=5)
    log = new_log()
    assert "spider-step9.pt is renamed: it holds step 2" in log
    assert "spider-step4.pt (step 4)" in log
    assert (directory / "spider-step5.pt").exists()
