"""spider/files.py: files that are complete or absent, locks."""

import errno
import fcntl
import os
import threading
from pathlib import Path

import pytest

from conftest import contents
from spider import files
from spider.errors import UsageError
from spider.files import atomic_write, locked
from test_errors import raises


@pytest.mark.parametrize("where", ("writing", "replace"))
def test_failed_atomic_write_leaves_only_the_old_file(tmp_path, monkeypatch, where):
    fail = raises(OSError(28, "No space left on device"))
    (tmp_path / "a").write_text("old")
    if where == "replace":
        monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left"), atomic_write(tmp_path / "a") as file:
        file.write("new")
        if where == "writing":
            fail()
    assert contents(tmp_path) == {"a": b"old"}


@pytest.mark.parametrize("name", ("folder", "pipe", "link", "/dev/stdout"))
def test_atomic_write_does_not_replace_directories_pipes_or_devices(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    with (
        pytest.raises(OSError, match="not a regular file") as fault,
        atomic_write(Path(name)) as file,
    ):
        file.write("new")
    assert fault.value.filename == name
    assert sorted(os.listdir(tmp_path)) == ["folder", "link", "pipe"]


def test_atomic_write_does_not_follow_links(tmp_path):
    """Each temporary file has a new name."""
    path = tmp_path / "a"
    victim = tmp_path / "victim"
    victim.write_text("old")
    for content in "ab":
        with atomic_write(path) as file:
            file.write(content)
        Path(file.name).symlink_to(victim)
    assert path.stat().st_mode == victim.stat().st_mode  # as of any new file
    assert path.read_text() == "b" and not path.is_symlink()
    assert victim.read_text() == "old"


def test_second_writer_does_not_disturb_the_first(tmp_path, monkeypatch):
    """It takes the first one's temporary file, not yet locked, for that of a killed process, locks
    it and deletes it."""
    lock_open_file = files.lock_open_file
    deletions = []

    def lock_second(descriptor, **options):
        monkeypatch.undo()
        (unfinished,) = tmp_path.iterdir()
        file = unfinished.open("rb")
        lock_open_file(file.fileno())

        def delete():
            unfinished.unlink()
            file.close()

        deletions.append(threading.Timer(0.1, delete))
        deletions[0].start()
        lock_open_file(descriptor, **options)

    monkeypatch.setattr(files, "lock_open_file", lock_second)
    with atomic_write(tmp_path / "a") as file:
        deletions[0].join()
        file.write("new")
    assert contents(tmp_path) == {"a": b"new"}


# --------------------------------------------------------------------------------------------------
# Locks


def test_lock_excludes_others_until_its_file_is_deleted(tmp_path, monkeypatch):
    refused = pytest.raises(UsageError, match=f"^{tmp_path}: another command is using it")

    def unlink(path, unlink=Path.unlink):
        with refused, locked(tmp_path):
            pass
        unlink(path)

    monkeypatch.setattr(Path, "unlink", unlink)
    for _ in range(2):
        with locked(tmp_path):
            assert all(name.startswith(".") for name in os.listdir(tmp_path))
            with locked(tmp_path, tmp_path / ".another"):
                pass
        assert os.listdir(tmp_path) == []


def test_file_system_without_locks_is_reported_and_leaves_no_lock_file(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(fcntl, "flock", raises(OSError(errno.ENOSYS, "Function not implemented")))
    with locked(tmp_path):
        assert "cannot be locked" in capsys.readouterr().err
        (tmp_path / ".lock").write_bytes(b"")  # as that of a killed process
    with locked(tmp_path):
        pass
    assert os.listdir(tmp_path) == []
