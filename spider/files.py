"""Files: written atomically, locked, read in bounded memory. Does not import torch."""

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
# The most bytes of a line of JSON or a cell of CSV, which parsed may take 30 times as much memory
MAX_RECORD_BYTES = 32 * MIB


def bounded_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield each line of a file; of one that is longer than a record may be, the first bytes alone,
    one more than the limit."""
    while line := file.readline(MAX_RECORD_BYTES + 1):
        yield line
        rest = line
        while rest and not rest.endswith(b"\n"):  # skip what is left of a long line
            rest = file.readline(MIB)


@contextmanager
def locked(directory: Path, file: Path | None = None):
    """Lock a directory against other processes, or raise UsageError.

    A file is locked, by default `.lock` in the directory, and deleted in the end. The lock ends
    with the process."""
    import filelock  # not at the top: exports have this module, and lock nothing

    if file is None:
        file = directory / ".lock"
    # A soft lock would outlive a killed process.
    lock = filelock.FileLock(file, fallback_to_soft=False)
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        raise UsageError(
            f"{directory}: another command is using it: wait for it, or use another directory "
            f"(if there is none, as after the failure of another machine, delete {file})"
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
            file.unlink()  # before the release, after which it may be another process's
        lock.release()


def sync(path: Path):
    """Flush a file, or the entries of a directory, to disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


@contextmanager
def atomic_write(path: Path, mode: str = "w") -> Iterator[IO]:
    """Write a file atomically: yield a temporary file beside it, which replaces the old one once it
    is complete and synced.

    A kill or a power loss leaves one of the two, an exception the old one. What a killed process
    left of a file is deleted when it is written again. The temporary name is random: two processes
    do not share it, and nobody can guess it and put a link there."""
    # os.replace would replace a device such as /dev/null, or the link /dev/stdout
    if path.exists() and (not path.is_file() or path.parent == Path("/dev")):
        raise FileExistsError(errno.EEXIST, "not a regular file: use another name", str(path))
    delete_unfinished(path.parent, glob.escape(path.name))
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            file = open(temporary, mode.replace("w", "x"))
        except OSError as fault:
            fault.filename = str(path)  # the name that the user knows
            raise
        with suppress(OSError):  # a file system may have no locks
            hold(file.fileno(), waits=True)
        if temporary.exists():
            break
        file.close()  # another writer held it first, and deleted it as left by a killed process
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


def hold(descriptor: int, waits: bool = False):
    """Lock an open file until its process ends or closes it. If another one holds it, wait or raise
    BlockingIOError. Raise OSError if the file system has no locks."""
    import fcntl  # not at the top: exports have this module, and Windows lacks it

    fcntl.flock(descriptor, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)


def delete_unfinished(directory: Path, pattern: str):
    """Delete the temporary files that killed processes left of `atomic_write` files with such names. A
    process that lives holds its own."""
    digits = "[0-9a-f]" * 8
    for unfinished in directory.glob(f".{pattern}.{digits}.tmp"):
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            with os.fdopen(os.open(unfinished, flags), "rb") as file:
                hold(file.fileno())
                unfinished.unlink()
        except (BlockingIOError, FileNotFoundError):  # it is held, or another process was faster
            pass
        except OSError as fault:  # such as another owner's; it only takes space
            print_status(
                f"{unfinished}, which a killed process left, cannot be deleted: {fault.strerror}"
            )
