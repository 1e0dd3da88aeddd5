"""Read and write files: atomic replacement, no writing through a link, no waiting for a pipe.

naming, open_plain, walk, each_once   read files of others; errors are DataErrors that name the file
is_count                              validate a value that was read
open_own, durable, put_in_place       write files, atomically and durably
locked                                lock a directory against other processes
"""

import errno
import fcntl
import io
import os
import stat
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from spider.console import note
from spider.errors import DataError


@contextmanager
def naming(path):
    """Turn an OSError or MemoryError into a DataError that names the file: the error's own, else `path`."""
    try:
        yield
    except OSError as fault:
        raise DataError(f"{fault.filename or path}: {fault.strerror or fault}") from None
    except MemoryError:
        raise DataError(f"{path}: out of memory: free some, or use fewer processes") from None


# ---------------------------------------------------------------------------------------------------------------------
# Reading files of others


class Counted(io.FileIO):
    """A file that reports the number of bytes of each read to `report`."""

    def __init__(self, path: str | Path, report: Callable):
        def opener(name, flags: int) -> int:
            return os.open(name, flags | os.O_NONBLOCK)  # in case it has become a pipe meanwhile
        super().__init__(path, opener=opener)
        self.report = report

    def readinto(self, buffer) -> int | None:
        count = super().readinto(buffer)
        self.report(count or 0)
        return count


def open_plain(path: str | Path, report: Callable = lambda count: None) -> IO[bytes]:
    """Open a file to read. Raise DataError for a pipe, socket or device, since opening one may block forever."""
    with naming(path):
        mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # which open() refuses
        kind = "pipe" if stat.S_ISFIFO(mode) else "socket" if stat.S_ISSOCK(mode) else "device"
        raise DataError(f"{path} is a {kind}, not a file: delete it, or write its content to a file")
    return io.BufferedReader(Counted(path, report), 1 << 17)


def walk(directory: str, own: str | Path = "") -> tuple[list[str], list[str], list[str]]:
    """List the paths below a directory, following links and leaving out `own`; the hidden ones; the repeated ones.

    Each folder is listed once, so that link loops end; its own path has precedence over links. Names that begin with a
    dot are hidden and skipped. Raise DataError for a folder that cannot be listed.
    """
    def refuse(fault: OSError):
        raise fault
    paths, hidden, again, links, ours = [], [], [], [directory], identity(own)
    seen = {ours}
    with naming(directory):
        for top in links:                                   # grows in the loop
            if top != directory and holds(top):
                again.append(top)
                continue
            for folder, folders, files in os.walk(top, onerror=refuse):
                if (mark := identity(folder)) in seen:
                    again += [folder] * (mark != ours)
                    folders.clear()
                    continue
                seen.add(mark)
                hidden += [os.path.join(folder, name) for name in folders + files if name.startswith(".")]
                folders[:] = sorted(name for name in folders if not name.startswith("."))
                here = [os.path.join(folder, name) for name in folders + files if not name.startswith(".")]
                links += [path for path in here[:len(folders)] if os.path.islink(path)]
                paths += here
    return paths, hidden, again


def identity(path: str | Path) -> tuple[int, int] | str:
    """Return device and inode, which all paths to a file share, or the path if nothing exists there."""
    try:
        status = os.stat(path)
        return status.st_dev, status.st_ino
    except OSError:
        return str(path)


def holds(link: str) -> bool:
    """Return whether a link leads to one of its own parent folders."""
    target = os.path.realpath(link)
    return os.path.commonpath([target, os.path.realpath(os.path.dirname(link))]) == target


def each_once(directory: str, names: Sequence[str], first: Container[str] = ()) -> tuple[list[str], list[str]]:
    """Return one name per file of a directory, and the paths of the other names.

    A name in `first` has precedence, then one that is not a link, then the first in sorted order.
    """
    kept, paths = {}, {name: os.path.join(directory, name) for name in names}
    for name in sorted(names, key=lambda name: (name not in first, os.path.islink(paths[name]))):
        kept.setdefault(identity(paths[name]), name)
    kept = set(kept.values())
    return [name for name in names if name in kept], [paths[name] for name in names if name not in kept]


def note_again(where: str, paths: Sequence[str]):
    """Print the paths that walk and each_once skipped because they are read under another name."""
    if paths:
        note(f"{where}: skipped {', '.join(paths[:3])}" + f" and {len(paths) - 3} more" * (len(paths) > 3)
             + ": link loops, or other names of files that are read")


def is_count(value) -> bool:
    """Return whether a value that was read from a file is an integer from 0 to 2^62."""
    return type(value) is int and 0 <= value < 1 << 62


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def open_own(path: Path, mode: str, buffering: int = -1) -> IO:
    """Open a file to write, never through a link: "w" replaces whatever has that name, "a" refuses a link."""
    if "w" in mode:
        path.unlink(missing_ok=True)
    return open(path, mode.replace("w", "x"), buffering,
                opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666))


@contextmanager
def locked(directory: Path, busy: Exception, warn: Callable = note):
    """Lock a directory against other processes, or raise `busy`; the lock ends with the process."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.exists(directory) or not os.path.samefile(descriptor, directory):
                raise busy                # the last holder has deleted the directory
        except BlockingIOError:
            raise busy from None
        except OSError as fault:          # some network file systems
            warn(f"{directory} cannot be locked ({fault.strerror}): make sure that nothing else uses it")
        yield
    finally:
        os.close(descriptor)


def put_in_place(file: IO, path: Path, before_rename: Callable | None = None):
    """Sync a temporary file and rename it to `path`, so that it survives a kill or power loss, whole or not at all."""
    file.flush()
    os.fsync(file.fileno())
    if before_rename is not None:
        before_rename()
    os.replace(file.name, path)
    sync(path.parent)


def sync(path: Path):
    """Flush a file, or the entries of a directory, to disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def is_replaceable(path: Path) -> bool:
    """Return whether a file may replace `path`: there is a regular file, or nothing."""
    return path.is_file() or not path.exists()


@contextmanager
def durable(path: Path, mode: str = "w", before_rename: Callable | None = None) -> Iterator[IO]:
    """Write a file atomically: once it is complete and synced it replaces the old one; an exception keeps the old one.

    Yields the temporary file, `.NAME.tmp` beside it; `before_rename` is called after the sync.
    """
    if before_rename is None and not is_replaceable(path):  # before_rename may move the old one away
        raise FileExistsError(errno.EEXIST, "not a regular file: use another name", str(path))
    temporary = path.with_name(f".{path.name}.tmp")
    with open_own(temporary, mode) as file:
        try:
            yield file
            put_in_place(file, path, before_rename)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
