"""Convert a checkpoint between its two forms, one file and a sharded directory (`sample.py SRC --convert DST`)."""

import os
from pathlib import Path

from torch import Tensor
from torch.utils._pytree import tree_map_only

from spider.errors import CheckpointError
from spider.training.checkpoint import load_checkpoint, with_whole_tensors
from spider.training.checkpoint_writer import write_durably
from spider.training.ranks import World
from spider.training.state_tensors import chunk_to_write


def convert(source: Path, target: Path) -> int:
    """Write a checkpoint again: as one file where the name ends in .pt, else as a sharded directory. Returns its step.

    It needs no other process, and of memory at most a whole state. CheckpointError where there is none, or something at
    `target` already."""
    if os.path.lexists(target):
        raise CheckpointError(f"{target} is there already: name another")
    state, world = load_checkpoint(source, mapped=True), World({}) if target.suffix != ".pt" else None
    if "optimizer_state_dict" not in state:
        raise CheckpointError(f"{source} has weights alone: train.py --resume --reset_steps takes it as it is")
    state = with_whole_tensors(state)
    if world is not None:
        state = tree_map_only(Tensor, lambda tensor: chunk_to_write(tensor, 0, 1), state)
    try:
        write_durably(target, state, lambda: None, world)
    except OSError as fault:
        raise CheckpointError(f"{target}: {fault.strerror or fault}") from None
    return state["step"]
