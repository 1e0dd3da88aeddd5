"""Read and write files: atomic replacement, no writing through a link, no waiting for a pipe.

naming, open_plain, walk, each_once   reading what others made; its faults are DataErrors that name the file
is_count                              a test of a value that was read
open_own, durable, put_in_place       writing, atomically and durably
locked                                one process at a time in a directory
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
    """Turn an operating system's error into a DataError that names the file, `path` where the error knows none; and a
    MemoryError into one that names `path`."""
    try:
        yield
    except OSError as fault:
        raise DataError(f"{fault.filename or path}: {fault.strerror or fault}") from None
    except MemoryError:
        raise DataError(f"{path}: out of memory: free some, or let fewer processes work at once") from None


# ---------------------------------------------------------------------------------------------------------------------
# Reading what others made


class Counted(io.FileIO):
    """A file that calls `report` with the number of bytes of each read."""

    def __init__(self, path: str | Path, report: Callable):
        def opener(name, flags: int) -> int:
            return os.open(name, flags | os.O_NONBLOCK)  # should it become a pipe meanwhile
        super().__init__(path, opener=opener)
        self.report = report

    def readinto(self, buffer) -> int | None:
        count = super().readinto(buffer)
        self.report(count or 0)
        return count


def open_plain(path: str | Path, report: Callable = lambda count: None) -> IO[bytes]:
    """Open a file to read; DataError at a pipe, a socket or a device, which may block for ever at opening alone."""
    with naming(path):
        mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # which open() refuses
        kind = "pipe" if stat.S_ISFIFO(mode) else "socket" if stat.S_ISSOCK(mode) else "device"
        raise DataError(f"{path}: a {kind}, no file: delete it, or put what comes out of it into a file")
    return io.BufferedReader(Counted(path, report), 1 << 17)


def walk(directory: str, own: str | Path = "") -> tuple[list[str], list[str], list[str]]:
    """List the paths in and below a directory, links followed, `own` left out; those hidden; those seen already.

    A folder is listed once, at its own path before links to it, so that loops end. Names that begin with a dot are
    hidden and skipped. DataError at a folder that cannot be listed.
    """
    def refuse(fault: OSError):
        raise fault
    paths, hidden, again, links, ours = [], [], [], [directory], identity(own)
    seen = {ours}
    with naming(directory):
        for top in links:                                   # which grows
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
    """Return device and inode, the same for every path to a file; the path where there is nothing."""
    try:
        status = os.stat(path)
        return status.st_dev, status.st_ino
    except OSError:
        return str(path)


def holds(link: str) -> bool:
    """Tell whether a link leads to a folder that the link is in, at whatever depth."""
    target = os.path.realpath(link)
    return os.path.commonpath([target, os.path.realpath(os.path.dirname(link))]) == target


def each_once(directory: str, names: Sequence[str], first: Container[str] = ()) -> tuple[list[str], list[str]]:
    """Return the names in a directory, one for each file, and the paths of the other names.

    Of several names the one kept is in `first`, else no link, else the first in their order.
    """
    kept, paths = {}, {name: os.path.join(directory, name) for name in names}
    for name in sorted(names, key=lambda name: (name not in first, os.path.islink(paths[name]))):
        kept.setdefault(identity(paths[name]), name)
    kept = set(kept.values())
    return [name for name in names if name in kept], [paths[name] for name in names if name not in kept]


def note_again(where: str, paths: Sequence[str]):
    """Note the paths that walk and each_once skipped since they are read under another name."""
    if paths:
        note(f"{where}: skipped {', '.join(paths[:3])}" + f" and {len(paths) - 3} more" * (len(paths) > 3)
             + ": link loops, or other names of what is read anyway")


def is_count(value) -> bool:
    """Tell whether a value that was read from a file is a whole number from 0 on that int64 holds."""
    return type(value) is int and 0 <= value < 1 << 62


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def open_own(path: Path, mode: str, buffering: int = -1) -> IO:
    """Open a file to write, never through a link: "w" replaces whatever has the name, "a" refuses a link."""
    if "w" in mode:
        path.unlink(missing_ok=True)
    return open(path, mode.replace("w", "x"), buffering,
                opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666))


@contextmanager
def locked(directory: Path, busy: Exception, warn: Callable = note):
    """Lock a directory against other processes, or raise `busy`; the lock dies with the process."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.exists(directory) or not os.path.samefile(descriptor, directory):
                raise busy                # its last holder has deleted the directory
        except BlockingIOError:
            raise busy from None
        except OSError as fault:          # some network file systems
            warn(f"{directory} cannot be locked ({fault.strerror}): see that nothing else works in it")
        yield
    finally:
        os.close(descriptor)


def put_in_place(file: IO, path: Path, before_rename: Callable | None = None):
    """Give a written temporary file its name; from then on no kill or power cut loses it or leaves half of it."""
    file.flush()
    os.fsync(file.fileno())
    if before_rename is not None:
        before_rename()
    os.replace(file.name, path)
    sync(path.parent)


def sync(path: Path):
    """Flush a file, or a directory's names, to the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def is_replaceable(path: Path) -> bool:
    """Tell whether a file may take a name: it is not that of a directory, a pipe or a device."""
    return path.is_file() or not path.exists()


@contextmanager
def durable(path: Path, mode: str = "w", before_rename: Callable | None = None) -> Iterator[IO]:
    """Write a file that replaces the one of its name once it is whole and on the disk; an exception leaves that alone.

    Yields the open temporary file, `.NAME.tmp` beside it; `before_rename` is called when that one is on the disk.
    """
    if before_rename is None and not is_replaceable(path):  # it may make room
        raise FileExistsError(errno.EEXIST, "no regular file: name another", str(path))
    temporary = path.with_name(f".{path.name}.tmp")
    with open_own(temporary, mode) as file:
        try:
            yield file
            put_in_place(file, path, before_rename)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
