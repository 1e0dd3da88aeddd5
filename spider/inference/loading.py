"""Load a checkpoint for use: `read_checkpoint`, its path and content; `load_model`, its model; `best_of` a directory.

A directory stands for its newest checkpoint that is intact. Weights stay in the file until a model takes them.
"""

from pathlib import Path

import torch
from loguru import logger
from torch import nn

from spider.errors import UsageError
from spider.model.config import SpiderConfig
from spider.training.checkpoint import (best_checkpoint, check_weights, find_checkpoints, holds_checkpoints,
                                        load_checkpoint, with_whole_tensors)
from spider.training.checkpoint_contents import check_classes
from spider.training.machine import multiplies_bf16


def path_of(name: str, model_class: type[nn.Module]) -> tuple[Path, bool]:
    """Return the path of a checkpoint, or of the newest good one of a directory, which is logged, and whether it was
    found so; UsageError where there is none."""
    path = Path(name)
    if path.exists() and not holds_checkpoints(path):
        return path, False
    found = find_checkpoints(path, model_class)
    if not found:
        raise UsageError(f"{name}: there is no checkpoint there that can be used; name another, or train first")
    logger.info(f"{found[-1].path}: the newest checkpoint in {name}, step {found[-1].step}")
    return found[-1].path, True


def best_of(name: str, model_class: type[nn.Module]) -> str:
    """Return the path of the checkpoint with the lowest validation loss in a directory; UsageError where it is none."""
    if not holds_checkpoints(Path(name)):
        raise UsageError(f"--best: {name} is no directory of checkpoints")
    best = best_checkpoint(Path(name), model_class)
    logger.info(f"{best.path}: the checkpoint of the lowest validation loss there, {best.val_loss:.4f} nats per byte")
    return str(best.path)


def read_checkpoint(name: str, model_class: type[nn.Module]) -> tuple[Path, dict]:
    """Read a checkpoint, or the newest good one of a directory: its path and content, tensors in the file. UsageError,
    CheckpointError where there is none that was made with the model class."""
    path, found = path_of(name, model_class)
    state = load_checkpoint(path, sealed=not found, mapped=True)
    config = SpiderConfig(**state["cfg"])
    with torch.device("meta"):
        check_classes(path, state, model_class(config))
    check_weights(path, state, config, model_class)
    state["model_state_dict"] = with_whole_tensors(state["model_state_dict"])
    return path, state


def trained_loops(state: dict) -> int:
    """Return the loops that the model of a checkpoint's content was trained with."""
    return state.get("n_loops", SpiderConfig(**state["cfg"]).n_loops)


def model_of(state: dict, device: torch.device, dtype: torch.dtype, model_class: type[nn.Module]) -> nn.Module:
    """Build the model of a checkpoint's content in evaluation mode, with products of a type."""
    with torch.device("meta"):
        model = model_class(SpiderConfig(**state["cfg"]))
    model.to_empty(device=device).init_weights()
    model.load_state_dict(state["model_state_dict"])
    model.compute_dtype = dtype
    return model.eval()


def decoder_of(state: dict, device: torch.device, model_class: type[nn.Module]) -> nn.Module:
    """Build the same in the precision that is fast a byte at a time: bf16 on a GPU, fp32 on a CPU, where one row takes
    several times as long in bf16."""
    bf16 = device.type == "cuda" and multiplies_bf16(device)
    return model_of(state, device, torch.bfloat16 if bf16 else torch.float32, model_class)


def load_model(name: str, device: torch.device, model_class: type[nn.Module]) -> tuple[nn.Module, int]:
    """Load the model of a checkpoint to decode with, and the loops that it was trained with."""
    state = read_checkpoint(name, model_class)[1]
    return decoder_of(state, device, model_class), trained_loops(state)
