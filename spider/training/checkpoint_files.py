"""Checkpoints as files: what they are called, delete one, set one aside, replace one, whichever form it has.

A kill at any moment leaves a checkpoint whole, or under a hidden temporary name (`remove_leftovers`).
"""

import ctypes
import os
import re
import shutil
from itertools import count
from pathlib import Path

INDEX = "state.pt"                        # of a sharded checkpoint: its state with empty tensors, where their rows are


def checkpoint_path(directory: Path, step: int, sharded: bool = False) -> Path:
    """Return the path of the checkpoint of a step."""
    return directory / f"spider-step{step}{'' if sharded else '.pt'}"


def is_sharded(path: Path) -> bool:
    """Tell whether a path is that of a sharded checkpoint."""
    return (path / INDEX).is_file()


def checkpoint_paths(directory: Path) -> list[Path]:
    """List what is named like a checkpoint: neither copies by hand such as spider-step100-best.pt nor what was set
    aside."""
    return [path for path in directory.glob("spider-step*") if re.fullmatch("spider-step[0-9]+([.]pt)?", path.name)]


def existing_parent(path: str | Path) -> Path:
    """Return the nearest directory above a path that exists."""
    return next(p for p in (Path(path).absolute(), *Path(path).absolute().parents) if p.is_dir())


def remove(path: Path):
    """Delete a file, or a directory, which a kill in the midst of it leaves under the name of a temporary one."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    temporary = path if path.name.startswith(".") else path.with_name(f".{path.name}.tmp")
    os.rename(path, temporary)
    shutil.rmtree(temporary)


def remove_leftovers(directory: Path):
    """Delete what a run left behind that was killed while it saved."""
    for leftover in directory.glob(".spider-step*.tmp"):
        remove(leftover)


def set_aside(path: Path, lineage: int):
    """Give a file of an earlier run a name that neither saving nor pruning touches; another takes its name next."""
    for number in count(lineage):
        name = path.with_suffix(f".before-{number}{path.suffix}")
        try:
            link(path, name)              # not renamed: a kill before it is replaced would leave none
        except FileExistsError:
            one, other = (file / INDEX if is_sharded(file) else file for file in (name, path))
            if not (one.exists() and one.samefile(other)):
                continue
        except OSError:                   # a file system without links
            os.rename(path, name)
        return


def link(path: Path, name: Path):
    """Give a checkpoint a second name, of a sharded one each file; FileExistsError where it is taken."""
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
    """Give a directory its name; one that has it is replaced in one step, where the file system can do that."""
    if os.path.lexists(path):
        call = getattr(ctypes.CDLL(None), "renameat2", None)
        here, exchange = -100, 2          # AT_FDCWD, RENAME_EXCHANGE
        old = temporary
        if call is None or call(here, os.fsencode(temporary), here, os.fsencode(path), exchange):
            old = path.with_name(f".{path.name}.old.tmp")
            os.rename(path, old)          # a kill here leaves the checkpoints before it
            os.rename(temporary, path)
        remove(old)
        return
    os.rename(temporary, path)
