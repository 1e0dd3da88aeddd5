"""Checkpoints as files or directories: name, list, delete, set aside and replace them.

A kill at any moment leaves a checkpoint complete, or under a hidden temporary name (`remove_leftovers`).
"""

import ctypes
import os
import re
import shutil
from itertools import count
from pathlib import Path

INDEX = "state.pt"                        # of a sharded checkpoint: its state without tensor data, and where that is


def checkpoint_path(directory: Path, step: int, sharded: bool = False) -> Path:
    """Return the path of a step's checkpoint."""
    return directory / f"spider-step{step}{'' if sharded else '.pt'}"


def is_sharded(path: Path) -> bool:
    """Return whether a path is a sharded checkpoint."""
    return (path / INDEX).is_file()


def checkpoint_paths(directory: Path) -> list[Path]:
    """List the paths named like checkpoints, but not manual copies (spider-step100-best.pt) or set-aside ones."""
    return [path for path in directory.glob("spider-step*") if re.fullmatch("spider-step[0-9]+([.]pt)?", path.name)]


def existing_parent(path: str | Path) -> Path:
    """Return the nearest existing directory of a path or its parents."""
    return next(p for p in (Path(path).absolute(), *Path(path).absolute().parents) if p.is_dir())


def remove(path: Path):
    """Delete a file or directory; a directory is renamed to a temporary name first, in case of a kill."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    temporary = path if path.name.startswith(".") else path.with_name(f".{path.name}.tmp")
    os.rename(path, temporary)
    shutil.rmtree(temporary)


def remove_leftovers(directory: Path):
    """Delete the temporary files of a run that was killed during a save."""
    for leftover in directory.glob(".spider-step*.tmp"):
        remove(leftover)


def set_aside(path: Path, lineage: int):
    """Add a name to a file of an earlier run that saving and pruning ignore; the caller then replaces the old name."""
    for number in count(lineage):
        name = path.with_suffix(f".before-{number}{path.suffix}")
        try:
            link(path, name)              # not renamed, so that a kill always leaves a file under `path`
        except FileExistsError:
            one, other = (file / INDEX if is_sharded(file) else file for file in (name, path))
            if not (one.exists() and one.samefile(other)):
                continue
        except OSError:                   # a file system without hard links
            os.rename(path, name)
        return


def link(path: Path, name: Path):
    """Hard-link a checkpoint, or each file of a sharded one, to `name`; raise FileExistsError if that exists."""
    if path.suffix or path.is_symlink() or not is_sharded(path):
        os.link(path, name, follow_symlinks=False)
        return
    if os.path.lexists(name):
        raise FileExistsError(name)
    temporary = name.with_name(f".{name.name}.tmp")
    remove(temporary)
    shutil.copytree(path, temporary, copy_function=os.link)
    os.rename(temporary, name)


def replace_directory(temporary: Path, path: Path):
    """Rename a directory to `path`, replacing an existing one atomically if the file system supports it."""
    if os.path.lexists(path):
        call = getattr(ctypes.CDLL(None), "renameat2", None)
        here, exchange = -100, 2          # AT_FDCWD, RENAME_EXCHANGE
        old = temporary
        if call is None or call(here, os.fsencode(temporary), here, os.fsencode(path), exchange):
            old = path.with_name(f".{path.name}.old.tmp")
            os.rename(path, old)          # a kill here leaves only earlier checkpoints
            os.rename(temporary, path)
        remove(old)
        return
    os.rename(temporary, path)
