"""Load a checkpoint for inference: `read_checkpoint` returns its path and content, `load_model` its model, `best_of`
the best one of a directory.

A directory stands for its newest intact checkpoint. Weights stay in the file until a model loads them.
"""

from pathlib import Path

import torch
from loguru import logger
from torch import nn

from spider.errors import UsageError
from spider.model.config import SpiderConfig
from spider.training.checkpoint_contents import check_classes
from spider.training.checkpoint_loading import (best_checkpoint, check_weights, find_checkpoints, holds_checkpoints,
                                        load_checkpoint, with_whole_tensors)
from spider.training.machine import multiplies_bf16


def path_of(name: str, model_class: type[nn.Module]) -> tuple[Path, bool]:
    """Return the path of a checkpoint, or of the newest good one of a directory, and whether it was searched like this.
    Raise UsageError if there is none."""
    path = Path(name)
    if path.exists() and not holds_checkpoints(path):
        return path, False
    found = find_checkpoints(path, model_class)
    if not found:
        raise UsageError(f"{name}: there is no usable checkpoint: name another, or train first")
    logger.info(f"{found[-1].path}: the newest checkpoint in {name}, step {found[-1].step}")
    return found[-1].path, True


def best_of(name: str, model_class: type[nn.Module]) -> str:
    """Return the path of the checkpoint with the lowest validation loss in a directory; raise UsageError for anything
    but a directory of checkpoints."""
    if not holds_checkpoints(Path(name)):
        raise UsageError(f"--best: {name} is not a directory of checkpoints")
    best = best_checkpoint(Path(name), model_class)
    logger.info(f"{best.path}: the checkpoint with the lowest validation loss, {best.val_loss:.4f} nats per byte")
    return str(best.path)


def read_checkpoint(name: str, model_class: type[nn.Module]) -> tuple[Path, dict]:
    """Return the path and content of a checkpoint, or of the newest good one of a directory, with tensors mapped from
    the file. Raise UsageError or CheckpointError if there is none for the model class."""
    path, found = path_of(name, model_class)
    state = load_checkpoint(path, sealed=not found, mapped=True)
    config = SpiderConfig.from_saved(state["cfg"])
    with torch.device("meta"):
        check_classes(path, state, model_class(config))
    check_weights(path, state, config, model_class)
    state["model_state_dict"] = with_whole_tensors(state["model_state_dict"])
    if state.get("adapted"):
        logger.info(f"{path}: adapted to {state['adapted']:,} bytes since training")
    return path, state


def trained_loops(state: dict) -> int:
    """Return the number of loops in training, from a checkpoint's content."""
    return state.get("n_loops", SpiderConfig.from_saved(state["cfg"]).n_loops)


def model_of(state: dict, device: torch.device, dtype: torch.dtype, model_class: type[nn.Module]) -> nn.Module:
    """Build the model of a checkpoint's content in evaluation mode, with products in a dtype."""
    with torch.device("meta"):
        model = model_class(SpiderConfig.from_saved(state["cfg"]))
    model.to_empty(device=device).init_weights()
    model.load_state_dict(state["model_state_dict"])
    model.compute_dtype = dtype
    return model.eval()


def decoder_of(state: dict, device: torch.device, model_class: type[nn.Module]) -> nn.Module:
    """Build the model in the precision that decodes fastest: bf16 on a GPU, fp32 on a CPU, where bf16 takes several
    times as long for a single row."""
    bf16 = device.type == "cuda" and multiplies_bf16(device)
    return model_of(state, device, torch.bfloat16 if bf16 else torch.float32, model_class)


def load_model(name: str, device: torch.device, model_class: type[nn.Module]) -> tuple[nn.Module, int]:
    """Load the model of a checkpoint for decoding; return it and its number of loops in training."""
    state = read_checkpoint(name, model_class)[1]
    return decoder_of(state, device, model_class), trained_loops(state)
