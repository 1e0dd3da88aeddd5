"""A run's directory: resumed, started over, gone back in, locked, damaged, and never written through."""

import json
import os
import shutil
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from conftest import assert_same, final_state, metrics, run, run_flags
from runs import assert_same_runs, start, until_said

import train
from spider.training import run_directory


@pytest.mark.parametrize("flags,moment", (
    (("--reset_steps",), None), (("--resume", "spider-step2.pt"), None), (("--reset_steps",), "run_directory.Metrics"),
    (("--resume", "spider-step2.pt"), "run_directory.set_aside")))
def test_a_run_that_starts_over_or_goes_back_resumes_though_it_was_killed_before_it_saved(tmp_path, shards, processes,
                                                                                         flags, moment):
    """The same command without its flag; killed before it wrote a thing, it never was, and the old run resumes."""
    kept = ("--keep_last", "9", "--eval_every", "0")
    for name in ("killed", "whole"):
        directory = run(tmp_path, shards, "--ckpt_every", "2", *kept, steps=6, ckpt=name)
        flags = [str(directory / word) if word.startswith("spider") else word for word in flags]
        if name == "whole" and moment != "run_directory.set_aside":
            run(tmp_path, shards, *kept, *flags, steps=9, ckpt=name)
        elif name == "killed":
            for given in (flags, ()) if moment != "run_directory.set_aside" else (flags,):
                argv = run_flags(shards, directory, *kept, *given, "--ckpt_every", "100000", steps=100_000)
                process = start(processes, tmp_path, argv, slow=moment)
                until_said(tmp_path, "SLEEPS" if moment else "step 8/")
                process.kill()
                process.join()
                (tmp_path / "log").unlink()
        run(tmp_path, shards, *kept, steps=9, ckpt=name)
    assert_same_runs(tmp_path / "killed", tmp_path / "whole")
    old = tmp_path / "killed" / "metrics.before-1.jsonl"
    assert moment == "run_directory.set_aside" or [json.loads(line)["step"] for line in open(old)] == [*range(1, 7)]
    assert not (tmp_path / "killed" / "started-over.json").exists()


def test_a_directory_of_checkpoints_is_none_and_one_in_it_is_asked_for(tmp_path, shards, capsys):
    (tmp_path / "checkpoints").mkdir()
    argv = run_flags(shards, tmp_path / "new", "--resume", str(tmp_path / "checkpoints"), "--reset_steps")
    assert train.command_line(argv) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"--resume: {tmp_path / 'checkpoints'} is not a checkpoint, but a directory" in said
    assert "name a checkpoint in it" in said


def test_a_run_from_a_checkpoint_that_is_gone_or_from_a_damaged_note_of_it_is_refused_with_the_remedy(tmp_path, shards,
                                                                                                     capsys):
    directory = run(tmp_path, shards, steps=2)
    note = directory / "started-over.json"
    for content in ('{"lineage": 1, "origin": "/nowhere/a.pt", "reset_steps": true}', "{}", "[", "null", "\xff",
                    '{"lineage": -1, "origin": "a", "reset_steps": true}',
                    '{"lineage": 1, "origin": "a\\u0000\\ud800", "reset_steps": false}'):
        note.write_text(content, encoding="latin-1")
        assert train.command_line(run_flags(shards, directory)) == 2
        said = capsys.readouterr().err.splitlines()
        assert "started-over.json: " in said[-1] and "delete" in said[-1] and "Traceback" not in "".join(said)
    note.write_text('{"lineage": 0, "origin": "/nowhere/a.pt", "reset_steps": true}')        # has saved since
    run(tmp_path, shards)


def test_too_little_space_for_two_checkpoints_is_refused_at_start(tmp_path, shards, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=200_000))
    assert train.command_line(run_flags(shards, tmp_path / "run")) == 2
    assert "0.0002 GB free, but needs room for 2 checkpoints" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_a_run_that_another_overtakes_between_look_and_lock_is_refused(tmp_path, shards, monkeypatch, capsys):
    build_model = train.build_model

    def overtaken(*given):
        (tmp_path / "run").mkdir()
        others.enter_context(run_directory.locked(tmp_path / "run"))
        return build_model(*given)
    monkeypatch.setattr(train, "build_model", overtaken)
    with ExitStack() as others:
        assert train.command_line(run_flags(shards, tmp_path / "run")) == 2
    assert "another run is using" in capsys.readouterr().err.splitlines()[-1]


def test_what_a_killed_save_left_behind_makes_room_before_room_is_looked_for(tmp_path, shards, monkeypatch):
    directory = run(tmp_path, shards, steps=1)
    leftover = directory / ".spider-step2.pt.tmp"
    leftover.write_bytes(b"half of a checkpoint")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0 if leftover.exists() else 1e12))
    assert final_state(run(tmp_path, shards, steps=2))["step"] == 2


def test_two_runs_cannot_work_in_one_directory(tmp_path, shards, processes, capsys):
    process = start(processes, tmp_path, run_flags(shards, tmp_path / "run"), slow="train.accumulate")
    until_said(tmp_path, "SLEEPS")
    assert train.command_line(run_flags(shards, tmp_path / "run")) == 2
    assert "another run is using" in capsys.readouterr().err.splitlines()[-1]
    process.kill()
    process.join()
    run(tmp_path, shards)                                                     # the lock died with its process


def test_an_altered_newest_checkpoint_is_skipped_and_the_run_still_ends_exactly(tmp_path, shards, capsys):
    directory = run(tmp_path, shards, "--ckpt_every", "3", steps=6)
    undamaged = final_state(directory)
    for damage in (lambda c: c[:len(c) // 2], lambda c: c[:5000] + bytes([c[5000] ^ 1]) + c[5001:], lambda c: b""):
        newest = directory / "spider-step6.pt"
        newest.write_bytes(damage(newest.read_bytes()))
        run(tmp_path, shards, "--ckpt_every", "3", steps=6)
        said = capsys.readouterr().err
        assert "skipped" in said and "spider-step6.pt" in said and f"resuming from {directory}/spider-step3" in said
        assert_same(final_state(directory), undamaged)


def test_a_directory_of_damaged_checkpoints_alone_is_refused_and_left_as_it_is(tmp_path, shards, capsys):
    directory = run(tmp_path, shards, steps=3)
    (directory / "spider-step3.pt").write_bytes(b"no checkpoint")
    before = {path: path.read_bytes() for path in directory.iterdir()}
    assert train.command_line(run_flags(shards, directory)) == 2
    assert "none of the checkpoints" in capsys.readouterr().err.splitlines()[-1]
    assert {path: path.read_bytes() for path in directory.iterdir()} == before


def test_a_checkpoint_from_another_directory_displaces_nothing(tmp_path, shards):
    one, other = (run(tmp_path, shards, "--seed", seed, steps=4, ckpt=seed) for seed in "12")
    old = (one / "spider-step4.pt").read_bytes()
    run(tmp_path, shards, "--resume", str(other / "spider-step4.pt"), "--ckpt_every", "1", steps=8, ckpt="1")
    assert (one / "spider-step4.pt").read_bytes() == old and len(list(one.glob("metrics*"))) == 2


def test_metrics_of_earlier_runs_stay_however_often_one_starts_over(tmp_path, shards):
    directory = run(tmp_path, shards, steps=3)
    for _ in range(2):                                            # killed before its first checkpoint
        run(tmp_path, shards, "--reset_steps", steps=2)
        (directory / "spider-step2.pt").unlink()
    kept = sorted(len(path.read_text().splitlines()) for path in directory.glob("metrics*.jsonl"))
    assert kept == [2, 2, 3]


@pytest.mark.parametrize("make", (os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)),
                         ids=("pipe", "directory", "device"))
def test_what_is_no_file_is_named_and_never_opened(tmp_path, shards, capsys, make):
    directory = run(tmp_path, shards, "--ckpt_every", "1", steps=2)
    odd = directory / "spider-step3.pt"
    make(odd)
    run(tmp_path, shards, steps=3)
    assert f"skipped: {odd} is not a checkpoint that can be read safely: it is not a reg" in capsys.readouterr().err
    assert odd.is_file() and final_state(directory)["step"] == 3          # and what was there is set aside
    [aside] = directory.glob("spider-step3.before-*.pt")
    assert train.command_line(run_flags(shards, tmp_path / "new", "--resume", str(aside))) == 2
    assert f"{aside} is not a checkpoint" in capsys.readouterr().err.splitlines()[-1]
    (directory / "metrics.jsonl").unlink()
    make(directory / "metrics.jsonl")
    assert train.command_line(run_flags(shards, directory, steps=4)) == 2
    assert "metrics.jsonl is not a regular file: move it away" in capsys.readouterr().err.splitlines()[-1]


def test_what_leads_outside_is_never_written_through(tmp_path, shards):
    directory, outside = run(tmp_path, shards, "--ckpt_every", "1", steps=1), tmp_path / "outside"
    outside.write_text('{"step": 1}\n')
    (directory / "metrics.jsonl").unlink()
    for name in ("metrics.jsonl", "spider-step2.pt", "spider-step3.pt"):
        (directory / name).symlink_to(outside if name < "spider-step3" else tmp_path / "gone")
    run(tmp_path, shards, "--ckpt_every", "1", "--keep_last", "9", steps=3)
    assert outside.read_text() == '{"step": 1}\n' and not (tmp_path / "gone").exists()
    assert [line["step"] for line in metrics(directory)] == [1, 2, 3] and final_state(directory)["step"] == 3
    assert len([path for path in directory.iterdir() if path.is_symlink()]) == 2          # set aside as they were


def test_every_line_of_a_run_is_printable_whatever_its_files_are_called(tmp_path, shards, capsys):
    name = "a\x1b[2J\r\n99:99:99 forged \u202e\udcff"
    run(tmp_path, shards, "--dry_run", ckpt=name)
    directory = run(tmp_path, shards, "--sample_every", "9", ckpt=name, steps=2)
    (directory / "spider-step2.pt").write_bytes(b"no checkpoint")
    assert train.command_line(run_flags(shards, directory)) == 2
    assert train.command_line(run_flags(tmp_path / name / name, directory, "--dry_run")) == 2
    said = [line for part in capsys.readouterr() for line in part.split("\n")]
    assert sum("99:99:99 forged" in line for line in said) > 4 and not any(line[:8] == "99:99:99" for line in said)
    assert [line for line in said if not line.isprintable()] == []


def test_reset_steps_loads_only_the_weights_and_later_runs_resume_from_the_reset(tmp_path, shards):
    directory = run(tmp_path, shards, steps=6)
    reset = run(tmp_path, shards, "--resume", str(directory / "spider-step6.pt"), "--reset_steps", steps=2)
    state = torch.load(reset / "spider-step2.pt", weights_only=True)
    assert state["step"] == 2 and state["bytes_seen"] == 2 * 2 * 32
    assert [line["step"] for line in metrics(reset)] == [1, 2]
    on = run(tmp_path, shards, steps=3)                    # goes on from step 2 of the reset run, not from step 6
    assert (on / "spider-step3.pt").exists() and (on / "spider-step6.pt").exists()


def test_a_run_that_starts_over_or_goes_back_leaves_the_files_of_the_one_before(tmp_path, shards):
    directory = run(tmp_path, shards, "--ckpt_every", "2", "--keep_last", "3", steps=6)
    old = {path: path.read_bytes() for path in (directory / f"spider-step{n}.pt" for n in (2, 4, 6))}
    by_hand = directory / "spider-step2-best.pt"
    by_hand.write_bytes(old[directory / "spider-step2.pt"])
    for flags in (("--reset_steps",), ()):                                                   # over, then back to step 2
        run(tmp_path, shards, "--ckpt_every", "1", "--resume", str(by_hand), *flags, steps=4)
    assert sum(path.read_bytes() in old.values() for path in directory.glob("*.pt")) == 4
    assert [line["step"] for line in metrics(directory)] == [3, 4] and len(list(directory.glob("metrics*"))) == 3
    on = run(tmp_path, shards, "--ckpt_every", "1", steps=5)                                 # goes on from the last run
    assert final_state(on)["step"] == 5 and final_state(on)["lineage"] == 2
