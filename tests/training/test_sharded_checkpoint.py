"""Sharded checkpoints: what is true of a checkpoint in one file is true of them, and each form becomes the other."""

import errno
import json
import os
import pickle
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from unittest.mock import ANY

import pytest
import torch
from training.jobs import SHARDED, Job, assert_same_losses, runs_alone, steps_done, until

import sample
import train
from conftest import assert_same, make_shards, metrics, run, run_flags
from spider.errors import CheckpointError
from spider.inference.loading import model_of, read_checkpoint
from spider.training import (checkpoint_files, checkpoint_format, checkpoint_writer, sharded_checkpoint,
                             sharded_reading, state_tensors)
from spider.training.checkpoint_format import walk, write_archive
from spider.training.checkpoint_loading import find_checkpoints, load_checkpoint
from spider.training.ranks import World
from spider.training.state_tensors import Chunk, ShardedRows, chunk_to_write
from spider_model import Spider

# As sharded_checkpoint.py has it outside pytest.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def newest(directory):
    return load_checkpoint(find_checkpoints(directory)[-1].path)


def names(directory) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name.startswith((".", "spider")))


# ---------------------------------------------------------------------------------------------------------------------
# The same state, the same run

@pytest.mark.parametrize("optimizer", ("muon", pytest.param("adamw8bit", marks=pytest.mark.slow)))
def test_a_run_may_change_between_both_forms_and_ends_like_an_undisturbed_one(tmp_path, shards, optimizer, capsys):
    flags = ("--optimizer", optimizer, "--engram_reset")
    whole = run(tmp_path, shards, *flags, steps=7, ckpt="whole")
    for steps, form in ((2, SHARDED), (4, ()), (7, SHARDED)):
        parts = run(tmp_path, shards, *flags, *form, steps=steps, ckpt="parts")
    assert names(parts) == ["spider-step4.pt", "spider-step7"]    # --keep_last 2, and no other
    assert_same(newest(whole), newest(parts))
    assert metrics(whole) == metrics(parts)
    for source, target in ((parts / "spider-step7", tmp_path / "one.pt"), (tmp_path / "one.pt", tmp_path / "many")):
        assert sample.main([str(source), "--convert", str(target)]) == 0
        assert_same(load_checkpoint(target), newest(whole))
    path, state = read_checkpoint(str(parts), Spider)
    assert path == parts / "spider-step7" and read_checkpoint(str(path), Spider)[0] == path
    assert sample.main([str(path), "--show", "abc def", "--n_loops", "1"]) == 0 and (parts / "look.html").is_file()
    assert_same(dict(model_of(state, torch.device("cpu"), torch.float32, Spider).state_dict()),
                newest(whole)["model_state_dict"])


def test_what_other_programs_read_of_it_is_the_same(tmp_path, shards):
    directory = run(tmp_path, shards, *SHARDED, steps=2)
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    dcp_to_torch_save(directory / "spider-step2", tmp_path / "theirs.pt")
    theirs = torch.load(tmp_path / "theirs.pt", weights_only=True)
    assert_same(theirs["model_state_dict"], newest(directory)["model_state_dict"])


def test_two_ranks_then_one_then_two_have_the_losses_of_one_that_writes_files(tmp_path, shards,
                                                                              processes):
    """And each rank takes memory for its own part of a sharded one."""
    flags = ("--precision", "fp32", "--global_batch", "128", "--ckpt_every", "2")
    runs_alone(run_flags(shards, tmp_path / "alone", *flags, steps=8))
    for ranks, steps in ((2, 4), (1, 6), (2, 8)):
        argv = run_flags(shards, tmp_path / "parts", *flags, *SHARDED, *("--shards", "2") * (ranks > 1), steps=steps)
        if ranks == 1:
            runs_alone(argv)
            continue
        statuses, log = Job(processes, tmp_path, ranks, argv, faults=[(counts_memory, ANY, 0)]).end()
        assert statuses == [0, 0] and log.count("saved ") == 1 + (steps == 4) and "settings differ" not in log, log
        if steps == 4:
            whole, first, other = memory_taken(tmp_path / "parts", log)
            assert first + other == whole and other > 0.4 * whole
    assert names(tmp_path / "parts") == ["spider-step6", "spider-step8"]
    assert sorted(os.listdir(tmp_path / "parts" / "spider-step8")) == [
        ".metadata", "__0_0.distcp", "__1_0.distcp", "state.pt"]
    assert_same_losses(tmp_path / "alone", tmp_path / "parts", steps=8)


@pytest.mark.slow
@pytest.mark.parametrize("ranks, split", ((2, 1), (3, 3), (4, 2)))
def test_sharded_a_state_is_that_of_the_file_to_the_bit(tmp_path, shards, processes, ranks, split):
    for name, form in (("file", ()), ("parts", SHARDED)):
        for steps in (3, 6):
            argv = run_flags(shards, tmp_path / name, *form, "--global_batch", "768", "--shards", str(split),
                             steps=steps)
            statuses, log = Job(processes, tmp_path, ranks, argv).end()
            assert statuses == [0] * ranks, log
    assert_same(newest(tmp_path / "file"), newest(tmp_path / "parts"))
    assert metrics(tmp_path / "file") == metrics(tmp_path / "parts")


@pytest.mark.parametrize("ranks, split", ((1, 1), (4, 1), (4, 2), (4, 4)))
@pytest.mark.parametrize("shape", ((), (0, 3), (3,), (7, 2), (40, 3)))
def test_the_chunks_that_ranks_write_of_a_tensor_are_all_of_it_once(monkeypatch, ranks, split, shape):
    monkeypatch.setattr(state_tensors, "SMALL_CHUNK", 64)
    value = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    for sharded_rows in (False, True) if ranks > 1 and shape else (False,):
        found = []
        for rank in range(ranks):
            shard = rank % split
            size = -(-max(1, value.numel() and len(value)) // split) if shape else 0
            bounds = [min(i * size, len(value)) for i in range(split + 1)] if shape else []
            rows = ShardedRows(value[bounds[shard]:bounds[shard + 1]], bounds, rank, ranks) if sharded_rows else value
            chunk = chunk_to_write(rows, rank, ranks)
            assert chunk.shape == shape and chunk.dtype == value.dtype
            found += [(chunk.first, chunk.local)] if chunk.local is not None else []
        parts = [part for _, part in sorted(found, key=lambda one: one[0])]
        assert torch.equal(torch.cat(parts) if shape else parts[0], value)
        assert value.nbytes <= 64 * split or not sharded_rows or len(parts) == ranks


# ---------------------------------------------------------------------------------------------------------------------
# Memory

def counts_memory(_):
    """Says, at each save, how many bytes its copies take that were not there before; what the thread takes that may
    still write the checkpoint before (gloo's messages) is not of them."""
    save, empty, taken, loop = checkpoint_writer.CheckpointWriter.save, torch.empty, [], threading.get_ident()

    def counted(*shape, **settings):
        out = empty(*shape, **settings)
        if threading.get_ident() == loop:
            taken.append(out.nbytes)
        return out

    def counting(self, *given):
        taken.clear()
        torch.empty = counted
        try:
            save(self, *given)
        finally:
            torch.empty = empty
        print(f"TAKEN {self.world.rank} {sum(taken)}", file=sys.stderr)
    checkpoint_writer.CheckpointWriter.save = counting


def memory_taken(directory, log) -> tuple[int, int, int]:
    """Bytes of the newest state, and of the copies of each rank at the first of two saves; none at the second."""
    whole = sum(value.nbytes for _, value, _ in walk(newest(directory)) if torch.is_tensor(value))
    (first, again), (other, other_again) = (
        [int(line.split()[2]) for line in log.splitlines() if line.startswith(f"TAKEN {rank}")] for rank in (0, 1))
    assert again == other_again == 0
    return whole, first, other


def test_for_one_file_the_first_rank_takes_memory_for_one_state_and_the_others_none(tmp_path, shards,
                                                                                    processes):
    argv = run_flags(shards, tmp_path / "run", "--ckpt_every", "1", "--shards", "2", steps=2)
    statuses, log = Job(processes, tmp_path, 2, argv, faults=[(counts_memory, ANY, 0)]).end()
    assert statuses == [0, 0], log
    whole, first, other = memory_taken(tmp_path / "run", log)
    assert (first, other) == (whole, 0)


# ---------------------------------------------------------------------------------------------------------------------
# Whole or not there

def killed(argv, log, module, name):
    """A run that sleeps where a function is to be called, once there is a checkpoint."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    function = getattr(globals()[module], name)

    def sleeps(*given):
        if find_checkpoints(Path(argv[argv.index("--ckpt_dir") + 1])):
            os.write(2, b"SLEEPS\n")
            time.sleep(60)
        return function(*given)
    setattr(globals()[module], name, sleeps)
    train.command_line(argv)


def test_a_kill_in_the_midst_leaves_the_checkpoint_before_it(tmp_path, shards, processes):
    """When ranks have written, and before the name is given, each at the save of step 2."""
    flags = (*SHARDED, "--ckpt_every", "1", "--eval_every", "0")
    argv, directory = run_flags(shards, tmp_path / "killed", *flags, steps=3), tmp_path / "killed"
    for moment in ("sharded_checkpoint.write_archive", "sharded_checkpoint.replace_directory"):
        process = processes.Process(target=killed, args=(argv, str(tmp_path / moment), *moment.split(".")))
        process.start()
        until(lambda: (tmp_path / moment).exists() and "SLEEPS" in (tmp_path / moment).read_text())
        process.kill()
        process.join()
        assert names(directory) == [".spider-step2.tmp", "spider-step1"]
    assert_same(newest(run(tmp_path, shards, *flags, steps=3, ckpt="killed")),
                newest(run(tmp_path, shards, *flags, steps=3, ckpt="whole")))
    assert names(directory) == ["spider-step2", "spider-step3"] and metrics(directory) == metrics(tmp_path / "whole")


def full_disk(writes):
    """The first so many writes fail."""
    write, left = checkpoint_format.HashingFile.write, iter(range(writes))

    def faulty(self, part):
        if next(left, None) is not None:
            self.fault = OSError(errno.ENOSPC, "No space left on device")
            raise self.fault
        return write(self, part)
    checkpoint_format.HashingFile.write, checkpoint_writer.CheckpointWriter.retry_after = faulty, 0.0


def slow_to_remove(seconds):
    """Delay each removal by so many seconds."""
    def later(self, *args, original=Path.unlink, **kwargs):
        if self.name.startswith(".spider-step"):
            time.sleep(seconds)
        return original(self, *args, **kwargs)
    Path.unlink = later


def test_a_rank_that_is_ahead_does_not_make_what_the_first_one_removes(tmp_path, shards, processes):
    argv = run_flags(shards, tmp_path / "run", *SHARDED, "--ckpt_every", "1", "--shards", "2", steps=2)
    statuses, log = Job(processes, tmp_path, 2, argv, faults=[(slow_to_remove, 0, 0.5)]).end()
    assert statuses == [0, 0] and "NOT SAVED" not in log, log
    assert names(tmp_path / "run") == ["spider-step1", "spider-step2"]


def test_a_full_disk_on_one_rank_leaves_nothing_and_is_tried_again_by_all(tmp_path, shards, processes):
    argv = run_flags(shards, tmp_path / "run", *SHARDED, "--ckpt_every", "1", "--shards", "2", steps=3)
    statuses, log = Job(processes, tmp_path, 2, argv, faults=[(full_disk, 1, 1)]).end()
    assert statuses == [0, 0], log
    lines = [line for line in log.splitlines() if "NOT SAVED" in line]
    assert len(lines) == 1 and "Traceback" not in log, log
    assert "spider-step1: rank 1: No space left on device" in lines[0]
    assert names(tmp_path / "run") == ["spider-step2", "spider-step3"]


@pytest.mark.slow
@pytest.mark.parametrize("number", (signal.SIGKILL, signal.SIGSTOP))
@pytest.mark.parametrize("victim", (0, 1))
def test_a_rank_lost_during_a_save_ends_the_others_and_the_same_command_resumes(
        tmp_path, shards, processes, number, victim):
    def argv(steps):
        return run_flags(shards, tmp_path / "run", *SHARDED, "--ckpt_every", "1", "--shards", "2", "--eval_every", "0",
                         "--rank_timeout", "20", steps=steps)
    job = Job(processes, tmp_path, 2, argv(100_000))
    until(lambda: steps_done(tmp_path / "run") > 3)
    until(lambda: any(name.endswith(".tmp") for name in names(tmp_path / "run")))
    os.kill(job.ranks[victim].pid, number)
    job.ranks[1 - victim].join(120)
    assert job.ranks[1 - victim].exitcode == 2
    job.ranks[victim].kill()
    _, log = job.end()
    assert f"lost rank {victim}" in log, log
    step = newest(tmp_path / "run")["step"]
    statuses, log = Job(processes, tmp_path, 2, argv(step + 2)).end()
    assert statuses == [0, 0] and newest(tmp_path / "run")["step"] == step + 2, log
    assert [line["step"] for line in metrics(tmp_path / "run")] == [*range(1, step + 3)]


def test_a_file_that_another_rank_wrote_elsewhere_is_missed(tmp_path, monkeypatch):
    write = sharded_checkpoint.Writer.write_data

    def elsewhere(self, *given):
        out = write(self, *given)
        (self.path / "__0_0.distcp").unlink()
        return out
    monkeypatch.setattr(sharded_checkpoint.Writer, "write_data", elsewhere)
    state = dict(weight=Chunk(torch.ones(3), 0, (3,), torch.float32))
    with pytest.raises(OSError, match="on a disk that all ranks share"):
        sharded_checkpoint.save(tmp_path / "parts", state, lambda: None, World({}))
    assert not os.listdir(tmp_path)


def test_one_of_an_earlier_run_is_set_aside_whole_and_one_of_the_same_step_replaced(tmp_path, shards, monkeypatch):
    run(tmp_path, shards, *SHARDED, "--ckpt_every", "2", steps=4)
    before = newest(tmp_path / "run")
    run(tmp_path, shards, *SHARDED, "--ckpt_every", "2", "--reset_steps", "--eval_every", "0", steps=4)
    directory = tmp_path / "run"
    assert [name for name in names(directory) if "before" in name] == ["spider-step2.before-1", "spider-step4.before-1"]
    assert_same(load_checkpoint(directory / "spider-step4.before-1"), before)
    for exchanges in (True, False):       # a file system that cannot do it in one step
        if not exchanges:
            monkeypatch.setattr(checkpoint_files.ctypes, "CDLL", lambda *_: None)
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / "file").touch()
        shutil.copytree(directory / "spider-step4", tmp_path / "old")
        checkpoint_files.replace_directory(tmp_path / "new", tmp_path / "old")
        assert os.listdir(tmp_path / "old") == ["file"]
        assert not [name for name in os.listdir(tmp_path) if name in ("new", ".old.tmp", ".old.old.tmp", ".new.tmp")]
        shutil.rmtree(tmp_path / "old")


# ---------------------------------------------------------------------------------------------------------------------
# Damaged, or made to do harm

@pytest.fixture(scope="module")
def written(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("written")
    return run(tmp_path, make_shards(tmp_path / "data"), *SHARDED, "--ckpt_every", "1", "--eval_every", "0", steps=2)


@pytest.fixture
def directory(written, tmp_path):
    return shutil.copytree(written, tmp_path / "run")


@pytest.mark.parametrize("name", ("state.pt", "__0_0.distcp", ".metadata"))
def test_damage_to_any_one_file_is_noticed_and_the_one_before_taken(directory, name, capsys):
    path = directory / "spider-step2" / name
    content = path.read_bytes()
    for damaged in (content[:-1], b"", content[:999] + bytes([content[999] ^ 1]) + content[1000:], None):
        path.unlink(missing_ok=True)
        if damaged is not None:
            path.write_bytes(damaged)
        with pytest.raises(CheckpointError):
            load_checkpoint(directory / "spider-step2")
        assert [one.step for one in find_checkpoints(directory)] == [1]
    capsys.readouterr()                   # of what was skipped, the log says so
    assert sample.main([str(directory / "spider-step2"), "--convert", str(directory / "new.pt")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1 and not (directory / "new.pt").exists()


class Harm:
    """Leave a file when unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def forge(path, change):
    """Rewrites a state.pt with what `change` makes of it, and every checksum right."""
    state = torch.load(path / "state.pt", weights_only=True)
    change(state)
    state["files"] = {name: sharded_reading.sha256_of(path / name) if (path / name).is_file() else sha256
                      for name, sha256 in state["files"].items()}
    with open(path / "state.pt", "wb") as file:
        write_archive(file, state)


def test_nothing_that_a_checkpoint_pickles_is_ever_run(directory, tmp_path):
    path, ran = directory / "spider-step2", tmp_path / "ran"
    before = load_checkpoint(path)
    (path / ".metadata").write_bytes(pickle.dumps(Harm(ran)))
    with pytest.raises(CheckpointError, match=".metadata is truncated or altered"):
        load_checkpoint(path)
    forge(path, lambda state: None)                              # nobody here unpickles it, whatever it holds
    assert_same(load_checkpoint(path), before)
    assert sample.main([str(path), "--convert", str(tmp_path / "one.pt")]) == 0 and not ran.exists()

    name = "model_state_dict.embed_tokens"
    with open(path / "__0_0.distcp", "ab") as file:
        start = file.tell()
        torch.save(Harm(ran), file)
        length = file.tell() - start

    def leads_there(state):
        piece = state["parts"][name]["pieces"][0]
        piece[1], piece[2] = start, length
    with open(path / "__0_0.distcp", "ab") as file:              # as long as the tensor would be
        padding = before["model_state_dict"]["embed_tokens"].nbytes
        file.write(bytes(padding))
        length += padding
    forge(path, leads_there)
    with pytest.raises(CheckpointError):
        load_checkpoint(path)
    torch.save(Harm(ran), path / "state.pt")
    with pytest.raises(CheckpointError, match="which no Spider checkpoint does"):
        load_checkpoint(path)
    assert not ran.exists()


FORGED = {
    "files": lambda state: state["files"].update({"../../evil": "0" * 64}),
    "missing": lambda state: state["files"].update({"__7_0.distcp": "0" * 64}),
    "rows": lambda state: state["parts"]["model_state_dict.embed_tokens"]["pieces"][0, 4].sub_(1),
    "offset": lambda state: state["parts"]["model_state_dict.embed_tokens"]["pieces"][0, 1].sub_(1 << 40),
    "length": lambda state: state["parts"]["model_state_dict.embed_tokens"]["pieces"][0, 2].add_(1 << 40),
    "file": lambda state: state["parts"]["model_state_dict.embed_tokens"]["pieces"][0, 0].sub_(9),
    "shape": lambda state: state["parts"]["model_state_dict.embed_tokens"].update(shape=[1 << 40, 1 << 40]),
    "empty shape": lambda state: state["parts"]["model_state_dict.embed_tokens"].update(shape=[0, 1 << 62, 1 << 62]),
    "no shape": lambda state: state["parts"]["model_state_dict.embed_tokens"].update(shape=None),
    "another": lambda state: state["parts"].update({"model_state_dict.embed_tokens": state["parts"][
        "model_state_dict.engram_input.table.weight"]}),
    "lacks one": lambda state: state["parts"].pop("model_state_dict.embed_tokens"),
    "no table": lambda state: state.pop("parts"),
    "lies over": lambda state: [entry["pieces"][0].copy_(torch.tensor(
        [1, 0, 1 << 16, 0, entry["pieces"][0, 4].item()])) for entry in state["parts"].values()],
}


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_table_of_pieces_is_refused_in_a_line(directory, case):
    forge(directory / "spider-step2", FORGED[case])
    with pytest.raises(CheckpointError) as refused:
        load_checkpoint(directory / "spider-step2")
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400
    assert [one.step for one in find_checkpoints(directory)] == [1]


def test_a_conversion_that_cannot_be_is_one_line(directory, tmp_path, capsys):
    (tmp_path / "there").mkdir()
    os.mkfifo(tmp_path / "pipe.pt")
    for source, target, words in ((directory / "spider-step2", tmp_path / "there", "exists: use another name"),
                                  (tmp_path / "pipe.pt", tmp_path / "new", "is not a regular file"),
                                  (tmp_path / "nowhere.pt", tmp_path / "new", "there is no usable checkpoint"),
                                  (directory / "spider-step2", tmp_path / "no" / "new.pt", "No such file")):
        assert sample.main([str(source), "--convert", str(target)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("sample.py: error: ") and words in line
    assert sample.main([str(directory), "--convert", str(tmp_path / "newest.pt")]) == 0
    assert json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 2
