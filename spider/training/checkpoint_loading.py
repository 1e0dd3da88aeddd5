"""Find and load checkpoints of any form: one file, a sharded directory, or an export.

`find_checkpoints` and `best_checkpoint` search a directory. `load_checkpoint` reads one; `check_weights` compares it
with the model's class; `with_whole_tensors` reads the tensors of a sharded one. See checkpoint_format.py for safe
reading, checkpoint_contents.py for the contents, checkpoint_writer.py for writing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from loguru import logger
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from spider.errors import CheckpointError
from spider.model.config import SpiderConfig
from spider.training.checkpoint_contents import REQUIRED, check_state
from spider.training.checkpoint_files import checkpoint_paths, is_sharded
from spider.training.checkpoint_format import check_regular, check_seal, read_archive, reading
from spider.training.export_reading import is_export, read_export
from spider.training.retention import SavedCheckpoint, lowest_loss
from spider.training.sharded_reading import read_sharded
from spider.training.state_tensors import RemoteTensor, copy_to_host


def read_state(path: Path, sealed: bool) -> dict:
    """Read a run's checkpoint, a file or sharded directory, with tensors mapped. This executes nothing, and needs no
    more memory than the file's size. Raise CheckpointError for anything that a run does not write and, if `sealed`, for
    a checksum that does not match."""
    with reading(path):
        if is_sharded(path):
            state = read_sharded(path, sealed)
        else:
            check_regular(path)
            if sealed:
                check_seal(path)
            state = read_archive(path, path.stat().st_size)
    check_state(path, state)
    return state


def load_checkpoint(path: Path, model_class: type[nn.Module] | None = None, sealed: bool = True,
                    mapped: bool = False) -> dict:
    """Read a checkpoint or an export, which has only weights; this executes nothing.

    model_class: check that its weights fit this class with the checkpoint's `cfg`. sealed: verify the checksum. mapped:
    leave the tensors in the file, those of a sharded checkpoint as RemoteTensors. Raise CheckpointError if anything is
    wrong.
    """
    if is_export(path):
        check_state(path, state := read_export(path), REQUIRED - {"optimizer_state_dict", "step"})
    else:
        state = read_state(path, sealed)
    with reading(path):
        state["model_state_dict"] = dict(state["model_state_dict"])
        config = SpiderConfig.from_saved(state["cfg"])
        if config.n_prelude_layers + config.n_recurrent_layers + config.n_coda_layers > len(state["model_state_dict"]):
            raise ValueError("cfg has more layers than weights")
    if model_class is not None:
        check_weights(path, state, config, model_class)
    return state if mapped else copy_to_host(state)


def check_weights(path: Path, state: dict, config: SpiderConfig, model_class: type[nn.Module]):
    """Raise CheckpointError unless weights have the names and shapes of a model with this config; floating-point dtypes
    may differ."""
    def kind(tensor: Tensor | RemoteTensor) -> tuple:
        return tuple(tensor.shape), tensor.dtype.is_floating_point
    weights, classes = state["model_state_dict"], state.get("classes")
    with reading(path):
        with torch.device("meta"):
            expected = {name: kind(tensor) for name, tensor in model_class(config).state_dict().items()}
        found = {name: kind(tensor) for name, tensor in weights.items() if isinstance(tensor, (Tensor, RemoteTensor))}
        odd = sorted(str(name) for name in expected.keys() | weights.keys() if expected.get(name) != found.get(name))
    if odd:
        older = not classes and not any(name in weights for name in odd)
        raise CheckpointError(f"{path}: weights do not match its cfg: {', '.join(odd[:3])}{', ...' * (len(odd) > 3)}"
                              + " (missing, as in models of an earlier version)" * older
                              + (f" (its model uses {', '.join(classes)})" if classes else ""))


def with_whole_tensors(state):
    """Read all RemoteTensors of a nested state; others stay unchanged."""
    return tree_map_only(RemoteTensor, lambda value: value.rows(), state)


def holds_checkpoints(path: Path) -> bool:
    """Return whether a path is a directory that may contain checkpoints, and not a sharded checkpoint or export."""
    return path.is_dir() and not is_sharded(path) and not is_export(path)


def find_checkpoints(directory: Path, model_class: type[nn.Module] | None = None) -> list[SavedCheckpoint]:
    """List a directory's checkpoints, oldest first. The newest one is intact and fits `model_class`; unusable ones are
    skipped with a warning."""
    saved = []
    for path in checkpoint_paths(directory):
        with skipped_if_unusable():
            state = read_state(path, sealed=False)
            if path.stem != f"spider-step{state['step']}":
                raise CheckpointError(f"{path} is renamed: it holds step {state['step']}")
            saved.append(SavedCheckpoint(state.get("lineage", 0), state["step"], path, state.get("exploded", False),
                                         state.get("val_loss")))
    saved.sort(key=lambda one: one[:3])
    while saved:
        with skipped_if_unusable():
            load_checkpoint(saved[-1].path, model_class, mapped=True)
            break
        saved.pop()
    return saved


def best_checkpoint(directory: Path, model_class: type[nn.Module] | None = None) -> SavedCheckpoint:
    """Return the checkpoint with the lowest validation loss of the newest run in a directory (see --keep_best). Raise
    CheckpointError if none was saved after an evaluation."""
    saved = find_checkpoints(directory, model_class)
    best = lowest_loss([one for one in saved if one.lineage == saved[-1].lineage])
    if best is None:
        raise CheckpointError(f"{directory}: no checkpoint in it was saved after an evaluation: train with "
                              f"--keep_best, or use the newest one")
    return best


@contextmanager
def skipped_if_unusable() -> Iterator[None]:
    """Turn a CheckpointError into a warning."""
    try:
        yield
    except CheckpointError as fault:
        logger.warning(f"skipped: {fault}")
