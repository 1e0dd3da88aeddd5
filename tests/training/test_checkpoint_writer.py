"""Checkpoints are written beside the loop, whole or not at all; a full disk loses none."""

import errno
import time
from pathlib import Path

import pytest
import torch
from conftest import assert_same, final_state, metrics, run, run_flags
from runs import assert_same_runs, start, until

from spider.training import checkpoint_writer
from spider.training.checkpoint_writer import CheckpointWriter


def test_a_checkpoint_waits_for_the_copy_alone_and_holds_the_state_of_its_own_step(tmp_path):
    weight = torch.zeros(1000)
    writer = CheckpointWriter(tmp_path, [], 2)
    release, write = [], checkpoint_writer.write_archive

    def held_up(file, state):
        until(lambda: release)
        write(file, state)
    state = dict(step=1, lineage=0, exploded=False, weight=weight, nested=[dict(t=weight[:3])])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_writer, "write_archive", held_up)
        writer.save(state, lambda: None)
        weight.fill_(7)                                                                 # training continues
        assert not (tmp_path / "spider-step1.pt").exists()
        release.append(True)
        assert writer.wait()
    assert not torch.load(tmp_path / "spider-step1.pt")["weight"].any()
    with pytest.MonkeyPatch.context() as patch:                                         # the next save waits for this
        patch.setattr(checkpoint_writer, "write_archive", lambda *args: (time.sleep(0.3), write(*args)))
        writer.save(state | dict(step=5), lambda: None)
        weight.fill_(9)
        writer.save(state | dict(step=6), lambda: None)
        assert writer.wait()
        assert [torch.load(tmp_path / f"spider-step{n}.pt")["weight"][0].item() for n in (5, 6)] == [7, 9]
        weight.fill_(7)
    memory = writer.copy["weight"].data_ptr()
    writer.save(state | dict(step=8), lambda: None)
    assert writer.wait() and writer.copy["weight"].data_ptr() == memory
    assert torch.load(tmp_path / "spider-step8.pt")["nested"][0]["t"].tolist() == [7, 7, 7]


def test_the_last_checkpoint_that_had_not_exploded_is_never_deleted_for_newer_ones(tmp_path):
    writer = CheckpointWriter(tmp_path, [], 2)
    exploded = (False, False, True, True, True, False, False)
    kept = []
    for step, bad in enumerate(exploded, 1):
        writer.save(dict(step=step, lineage=0, exploded=bad), lambda: None)
        writer.wait()
        kept.append(sorted(int(path.stem[11:]) for path in tmp_path.glob("*.pt")))
    assert kept == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 2, 4, 5], [2, 5, 6], [6, 7]]


def test_a_full_disk_is_one_loud_line_the_older_checkpoints_stay_and_it_is_tried_again(tmp_path, shards, monkeypatch,
                                                                                      capsys):
    directory = run(tmp_path, shards, steps=2)
    before = (directory / "spider-step2.pt").read_bytes()
    write, calls = checkpoint_writer.write_archive, []

    def full(file, state):
        calls.append(state["step"])
        if len(calls) <= 2:
            file.write(b"a part of it")
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, state)
    monkeypatch.setattr(checkpoint_writer, "write_archive", full)
    monkeypatch.setattr(CheckpointWriter, "retry_after", 0.0)
    capsys.readouterr()
    run(tmp_path, shards, "--ckpt_every", "4", "--keep_last", "9", steps=8)
    said = [line for line in capsys.readouterr().err.splitlines() if "CHECKPOINT NOT SAVED" in line]
    assert len(said) == 2 and "No space left on device" in said[0]
    assert calls[0] == 4 < calls[1] <= 8 and len(calls) in (3, 4)
    assert final_state(directory)["step"] == 8 and not list(directory.glob(".*.tmp"))
    assert (directory / "spider-step2.pt").read_bytes() == before
    monkeypatch.undo()
    assert_same(final_state(directory)["model_state_dict"],
                final_state(run(tmp_path, shards, steps=8, ckpt="whole"))["model_state_dict"])


def test_a_disk_that_stays_full_ends_in_status_2_with_the_older_checkpoints_intact(tmp_path, shards, processes):
    """The kernel itself refuses: no file may grow beyond 100 kB; a checkpoint has more."""
    directory = run(tmp_path, shards, steps=2)
    before = (directory / "spider-step2.pt").read_bytes()
    process = start(processes, tmp_path, run_flags(shards, directory, "--ckpt_every", "4", steps=6), file_limit=100_000)
    process.join()
    said = (tmp_path / "log").read_text().splitlines()
    assert process.exitcode == 2 and "older checkpoints are intact" in said[-1]
    assert any("CHECKPOINT NOT SAVED" in line and "File too large" in line for line in said)
    assert [path.read_bytes() for path in directory.glob("*.pt")] == [before] and not list(directory.glob(".*.tmp"))
    assert len(metrics(directory)) == 6
    assert_same_runs(run(tmp_path, shards, steps=6), run(tmp_path, shards, steps=6, ckpt="whole"))


def test_a_checkpoint_that_cannot_be_deleted_is_a_warning(tmp_path, shards, monkeypatch, capsys):
    def refuse(path, missing_ok=False, original=Path.unlink):
        if path.suffix == ".pt":
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        original(path, missing_ok)
    monkeypatch.setattr(Path, "unlink", refuse)
    directory = run(tmp_path, shards, "--ckpt_every", "1", steps=5)
    assert "spider-step1.pt cannot be deleted: Operation not permitted" in capsys.readouterr().err
    assert final_state(directory)["step"] == 5


def test_the_newest_checkpoints_of_a_run_are_kept(tmp_path, shards):
    directory = run(tmp_path, shards, "--ckpt_every", "1", "--keep_last", "3", steps=7)
    assert {path.name for path in directory.glob("*.pt")} == {f"spider-step{n}.pt" for n in (5, 6, 7)}
