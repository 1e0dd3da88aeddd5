"""Checkpoints in a directory: find them, set them aside, remember which run started over."""

import json
import os
import re
import shutil
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import NamedTuple

from loguru import logger

from spider.errors import CheckpointError
from spider.training.checkpoint import PLAIN, is_count, is_in_parts, load_checkpoint, read_state, remove


class Found(NamedTuple):
    """A checkpoint in a directory; they sort from the oldest to the newest."""
    lineage: int
    step: int
    path: Path
    exploded: bool = False
    val_loss: float | None = None         # nats per byte, where an evaluation followed the checkpoint's step


def lowest(found: list[Found]) -> Found | None:
    """Return the checkpoint of the lowest validation loss, the oldest of several; None where none was evaluated."""
    return min((one for one in found if one.val_loss is not None), key=lambda one: one.val_loss, default=None)


def best_checkpoint(directory: Path) -> Found:
    """Return the checkpoint of the newest run in a directory that has the lowest validation loss (see --keep_best);
    CheckpointError where none was saved after an evaluation."""
    found = find_checkpoints(directory)
    best = lowest([one for one in found if one.lineage == found[-1].lineage])
    if best is None:
        raise CheckpointError(f"{directory}: no checkpoint there was saved after an evaluation: train with --keep_best, "
                              f"or take the newest one")
    return best


def checkpoint_paths(directory: Path) -> list[Path]:
    """What is named like a checkpoint; not copies by hand such as spider-step100-best.pt, nor what was set aside."""
    return [path for path in directory.glob("spider-step*") if re.fullmatch("spider-step[0-9]+([.]pt)?", path.name)]


def find_checkpoints(directory: Path) -> list[Found]:
    """A directory's checkpoints, oldest first, of which the newest is intact; others are named and passed over."""
    found = []
    for path in checkpoint_paths(directory):
        with passed_over():
            state = read_state(path, sealed=False)
            if path.stem != f"spider-step{state['step']}":
                raise CheckpointError(f"{path} is step {state['step']} under another name")
            found.append(Found(state.get("lineage", 0), state["step"], path, state.get("exploded", False),
                               state.get("val_loss")))
    found.sort()
    while found:
        with passed_over():
            load_checkpoint(found[-1].path, mapped=True)
            break
        found.pop()
    return found


@contextmanager
def passed_over():
    """Inside, a checkpoint that cannot be used is a warning."""
    try:
        yield
    except CheckpointError as fault:
        logger.warning(f"passed over: {fault}")


def set_aside(path: Path, lineage: int):
    """Gives a file of an earlier run a name that neither saving nor pruning touches; another takes its place next."""
    for number in count(lineage):
        name = path.with_suffix(f".before-{number}{path.suffix}")
        try:
            link(path, name)              # not renamed: a kill before it is replaced would leave none
        except FileExistsError:
            one, other = (part / PLAIN if is_in_parts(part) else part for part in (name, path))
            if not (one.exists() and one.samefile(other)):
                continue
        except OSError:                   # a file system without links
            os.rename(path, name)
        return


def link(path: Path, name: Path):
    """Gives a checkpoint a second name, in parts each of its files; FileExistsError where it is taken."""
    if path.suffix or path.is_symlink() or not is_in_parts(path):
        os.link(path, name, follow_symlinks=False)
        return
    if os.path.lexists(name):
        raise FileExistsError(name)
    temporary = name.with_name(f".{name.name}.tmp")
    remove(temporary)
    shutil.copytree(path, temporary, copy_function=os.link)
    os.rename(temporary, name)


class StartedOver(NamedTuple):
    """What a run that started over or went back began with; see RunDirectory."""
    lineage: int
    origin: str                           # the checkpoint, an absolute path
    reset_steps: bool


STARTED_OVER = "started-over.json"


def read_started_over(path: Path) -> StartedOver | None:
    """What a file says, None where there is none; CheckpointError where no run wrote it."""
    try:
        begun = StartedOver(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, RecursionError):
        begun = None
    if begun is None or not (is_count(begun.lineage) and type(begun.origin) is str and type(begun.reset_steps) is bool):
        raise CheckpointError(f"{path}: not what a run writes there: delete it to go on from the newest checkpoint")
    return begun


def existing_parent(path: str | Path) -> Path:
    """The nearest directory above a path that exists."""
    return next(p for p in (Path(path).absolute(), *Path(path).absolute().parents) if p.is_dir())
