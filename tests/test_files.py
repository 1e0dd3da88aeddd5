"""Files are written whole, under their own names and nowhere else."""

import io
import os
import sys
from pathlib import Path

import pytest

from conftest import contents, prepare
from spider import files
from spider.data.inputs import spool
from spider.data.prepare import ShardWriter
from spider.training.metrics import Metrics


def test_a_durable_file_takes_its_name_when_it_is_on_the_disk_and_not_before(tmp_path, monkeypatch):
    path, temporary, done = tmp_path / "a.pt", tmp_path / ".a.pt.tmp", []
    monkeypatch.setattr(os, "fsync", lambda descriptor, real=os.fsync:
                        done.append(os.readlink(f"/dev/fd/{descriptor}")) or real(descriptor))
    monkeypatch.setattr(os, "replace", lambda *names, real=os.replace: done.append("replace") or real(*names))

    def before_rename():
        assert temporary.read_bytes() == b"new" and path.read_bytes() == b"old"
        done.append("before_rename")
    path.write_bytes(b"old")
    with files.durable(path, "wb", before_rename) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["a.pt"]
    assert done == [str(temporary), "before_rename", "replace", str(tmp_path)]


@pytest.mark.parametrize("where", ["writing", "before_rename", "replace"])
def test_a_durable_file_that_fails_leaves_the_old_one_and_nothing_else(tmp_path, monkeypatch, where):
    def fail(*_):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, "replace", fail if where == "replace" else os.replace)
    (tmp_path / "a").write_text("old")
    with pytest.raises(OSError, match="No space left"), \
            files.durable(tmp_path / "a", before_rename=fail if where == "before_rename" else None) as file:
        file.write("new")
        if where == "writing":
            fail()
    assert contents(tmp_path) == {"a": b"old"}


@pytest.mark.parametrize("name", [".", "/", "..", "folder", "pipe", "link"])
def test_a_durable_file_replaces_no_directory_pipe_or_device(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file") as fault, files.durable(Path(name)) as file:
        file.write("new")
    assert fault.value.filename == name and sorted(os.listdir(tmp_path)) == ["folder", "link", "pipe"]
    assert Path("link").is_symlink() and Path("pipe").is_fifo()


def spooled(folder, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"new")))
    spool(folder / ".stdin.txt", None)


def saved_metadata(folder, _):
    with files.durable(folder / "metadata.json") as file:
        file.write("new")


def written_shard(folder, _):
    writer = ShardWriter(folder / "train-00000.bin")
    writer.write(b"new", True, True)
    writer.finish()


def journal(folder, _):
    (folder / "in.txt").write_text("some text")
    assert prepare(folder / "in.txt", "--out", folder) == 0


def logged(folder, _):
    with Metrics(folder / "metrics.jsonl", 5) as lines:
        lines.write(dict(step=6))
        lines.sync()


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to], ids=["symbolic", "hard"])
@pytest.mark.parametrize("write, name", [
    (spooled, ".stdin.txt"), (saved_metadata, ".metadata.json.tmp"), (saved_metadata, "metadata.json"),
    (written_shard, ".train-00000.bin.PID.tmp"), (written_shard, "train-00000.bin"),
    (journal, ".prepare.jsonl.tmp"), (journal, ".metadata.json.tmp"), (journal, "prepare.jsonl"),
    (logged, ".metrics.jsonl.tmp"), (logged, "metrics.jsonl")])
def test_what_a_link_leads_to_is_never_written(tmp_path, monkeypatch, write, name, link):
    victim = tmp_path / "precious"
    victim.write_text('{"step": 1}\n')
    (tmp_path / "o").mkdir()
    link(tmp_path / "o" / name.replace("PID", str(os.getpid())), victim)
    write(tmp_path / "o", monkeypatch)
    assert victim.read_text() == '{"step": 1}\n' and victim.stat().st_nlink == 1
    assert not any(path.is_symlink() for path in (tmp_path / "o").iterdir())


def test_nothing_is_appended_to_what_a_link_leads_to_nor_is_a_pipe_waited_for(tmp_path):
    """Put there between the renaming and the opening."""
    (tmp_path / "precious").write_text("old")
    (tmp_path / "link").symlink_to("precious")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(OSError) as fault:
            files.open_own(tmp_path / name, "a")
        assert fault.value.filename == str(tmp_path / name)
    assert (tmp_path / "precious").read_text() == "old"
