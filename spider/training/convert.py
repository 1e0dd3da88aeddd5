"""Write a checkpoint outside of a run: `convert` it between its two forms, one file and a sharded directory, or `save`
a state that something else made of it."""

import os
from pathlib import Path

from torch import Tensor
from torch.utils._pytree import tree_map_only

from spider.errors import CheckpointError
from spider.training.checkpoint_loading import load_checkpoint, with_whole_tensors
from spider.training.checkpoint_writer import write_durably
from spider.training.ranks import World
from spider.training.state_tensors import chunk_to_write


def convert(source: Path, target: Path) -> int:
    """Write a checkpoint as one file if `target` ends in .pt, else as a sharded directory; return its step.

    Needs a single process, and memory for at most one whole state. Raise CheckpointError if there is no checkpoint, or
    `target` exists."""
    check_target(target)
    state = load_checkpoint(source, mapped=True)
    if "optimizer_state_dict" not in state:
        raise CheckpointError(f"{source} has no optimizer state, so use it directly: train.py --resume --reset_steps")
    save(target, state)
    return state["step"]


def check_target(target: Path):
    """Raise CheckpointError if `target` exists, or its directory does not or cannot be written to."""
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists: use another name")
    if not target.parent.is_dir():
        raise CheckpointError(f"{target}: No such file or directory: create its directory first")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise CheckpointError(f"{target}: Permission denied")


def save(target: Path, state: dict):
    """Write a state as one file if `target` ends in .pt, else as a sharded directory; raise CheckpointError if it
    cannot be written."""
    check_target(target)
    state, world = with_whole_tensors(state), World({}) if target.suffix != ".pt" else None
    if world is not None:
        state = tree_map_only(Tensor, lambda tensor: chunk_to_write(tensor, 0, 1), state)
    try:
        write_durably(target, state, lambda: None, world)
    except OSError as fault:
        raise CheckpointError(f"{target}: {fault.strerror or fault}") from None
