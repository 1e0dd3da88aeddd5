"""Files: write them atomically, lock them, read lines in bounded memory. Does not import torch."""

import errno
import glob
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from spider.errors import UsageError, print_status

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20
# Limit for a line of JSON or a cell of CSV. Once parsed, it may take 30 times as much memory.
MAX_RECORD_BYTES = 32 * MIB


@contextmanager
def atomic_write(path: Path, mode: str = "w") -> Iterator[IO]:
    """Write a file atomically: yield a temporary file in the same directory, which replaces the old
    file once it is complete and synced.

    After a kill or a power loss, either the old or the new file is there; after an exception, the
    old one. The next write deletes the temporary file of a killed process. Temporary names are
    random: two processes never share one, and nobody can guess one and put a link there."""
    # os.replace would also replace a device such as /dev/null, or the link /dev/stdout
    if path.exists() and (not path.is_file() or path.parent == Path("/dev")):
        raise FileExistsError(errno.EEXIST, "not a regular file: use another name", str(path))
    delete_unfinished(path.parent, glob.escape(path.name))
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            file = open(temporary, mode.replace("w", "x"))
        except OSError as fault:
            fault.filename = str(path)  # the name that the user gave
            raise
        with suppress(OSError):  # some file systems have no locks
            lock_open_file(file.fileno(), waits=True)
        if temporary.exists():
            break
        file.close()  # another writer locked it first, and deleted it as one of a killed process
    with file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    sync(path.parent)


def delete_unfinished(directory: Path, pattern: str):
    """Delete the temporary files that killed processes left for files that match `pattern`. A live
    process holds a lock on its temporary file."""
    digits = "[0-9a-f]" * 8
    for unfinished in directory.glob(f".{pattern}.{digits}.tmp"):
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            with os.fdopen(os.open(unfinished, flags), "rb") as file:
                lock_open_file(file.fileno())
                unfinished.unlink()
        except (BlockingIOError, FileNotFoundError):  # locked, or another process was faster
            pass
        except OSError as fault:  # such as another user's file; it only takes space
            print_status(
                f"{unfinished}: left by a killed process, cannot be deleted: {fault.strerror}"
            )


def lock_open_file(descriptor: int, waits: bool = False):
    """Lock an open file until this process ends or closes it. If another process holds the lock,
    wait or raise BlockingIOError. Raise OSError if the file system has no locks."""
    import fcntl  # not at the top: exports contain this module, and Windows lacks fcntl

    fcntl.flock(descriptor, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)


def sync(path: Path):
    """Flush a file, or the entries of a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(directory: Path, file: Path | None = None):
    """Lock a directory against other processes. Raise UsageError if another process has it.

    The lock is on a file, by default `.lock` in the directory, which is deleted at the end. If the
    process dies, the lock ends too."""
    import filelock  # not at the top: exports contain this module, but lock nothing

    if file is None:
        file = directory / ".lock"
    # A soft lock would outlive a killed process
    lock = filelock.FileLock(file, fallback_to_soft=False)
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        raise UsageError(
            f"{directory}: another command is using it: wait for it, or use another directory "
            f"(if there is none, for example after another machine failed, delete {file})"
        ) from None
    except OSError as fault:
        if fault.filename is not None:  # the file could not be opened
            raise
        print_status(
            f"{directory} cannot be locked ({fault.strerror}): make sure that nothing else uses it"
        )
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink()  # before the release: afterwards it may be another process's lock
        lock.release()


def bounded_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a file, each cut after MAX_RECORD_BYTES + 1 bytes."""
    while line := file.readline(MAX_RECORD_BYTES + 1):
        yield line
        rest = line
        while rest and not rest.endswith(b"\n"):  # skip the rest of a long line
            rest = file.readline(MIB)
