"""Find and load a trained model.

    read_checkpoint, find_best   read a checkpoint, an export, or the newest or best of a run
    model_of, decoder_of         build the model of a checkpoint

`saved` is the content of a checkpoint, as load_checkpoint returns it.
"""

import math
from pathlib import Path

import torch
from loguru import logger

from spider.config import SpiderConfig
from spider.errors import UsageError
from spider.flags import quoted
from spider.machine import has_bf16
from spider.training.checkpoint import (
    best_checkpoint,
    check_weights,
    checkpoint_paths,
    find_checkpoints,
    good_checkpoints,
    is_export,
    load_checkpoint,
    lowest_loss,
)
from spider.training.state import materialize, on_meta
from spider_model import Spider
from tile_moe import resolve_backend

RUNS = "checkpoints"  # where train.py keeps runs by default


def read_checkpoint(name: str, model_class: type[Spider]) -> tuple[Path, dict]:
    """Return the path and content of a checkpoint or export, or of the newest good checkpoint of a
    run (see find_run). Raise UsageError or CheckpointError if there is none for the model class."""
    path = Path(name or RUNS)
    if path.is_file() and path.suffix != ".pt" and is_text(path):
        raise UsageError(
            f"{name} is not a checkpoint but a text: to train on it, python train.py --text "
            f"{quoted(name)}"
        )
    if path.is_file() or is_export(path):
        saved = load_checkpoint(path)
    else:
        run, called = find_run(name)
        newest = next(good_checkpoints(run), None)
        if newest is None:
            raise UsageError(f"{run}: contains no usable checkpoint: name another run")
        path, saved = newest
        logger.info(f"{path}, step {saved['step']}: the newest checkpoint of {called}")
        mention_best(run, saved)
    model = on_meta(model_class, SpiderConfig.from_saved(saved["cfg"]))
    check_weights(path, saved, model)
    return path, saved


def is_text(path: Path) -> bool:
    """Return whether a file begins like a text: with bytes, none of them NUL."""
    with open(path, "rb") as file:
        beginning = file.read(1024)
    return b"\0" not in beginning and len(beginning) > 0


def find_run(name: str) -> tuple[Path, str]:
    """Return the directory of a run, and its description for the log.

    The run is the named directory if it has checkpoints, else the newest run below it; for "", the
    newest run in or below RUNS. The newest run is the run whose newest checkpoint changed last.
    Raise UsageError if there is no run."""
    directory = Path(name or RUNS)
    if name and checkpoint_paths(directory):
        return directory, name
    found = {path.parent for path in directory.rglob("spider-step*.pt")}
    newest = {run: paths[-1] for run in found if (paths := checkpoint_paths(run))}
    if not newest:
        raise UsageError(
            f"{directory}: no such directory, or no checkpoint in it: name another, or train "
            f"first: python train.py --text FILE"
        )
    run = max(newest, key=lambda run: newest[run].lstat().st_mtime)  # even of a dead link
    return run, f"the newest run (of {len(newest)} in {directory})"


def mention_best(directory: Path, newest: dict):
    """If another checkpoint of a directory has a lower validation loss than the newest checkpoint,
    whose content is given, log its name."""
    if newest.get("best_loss", math.inf) in (newest.get("val_loss"), math.inf):
        return  # the newest is the best, or none was evaluated: open no other file
    best = lowest_loss(find_checkpoints(directory))
    if best is not None and best.step != newest["step"]:
        logger.info(
            f"{best.path.name} has the lowest validation loss, {best.val_bpb:.4f} bits per byte: "
            f"to use it, add --best"
        )


def find_best(name: str) -> str:
    """Return the path of a run's checkpoint with the lowest validation loss (see find_run)."""
    run, called = find_run(name)
    best = best_checkpoint(run)
    logger.info(
        f"{best.path}: the lowest validation loss of {called}, {best.val_bpb:.4f} bits per byte"
    )
    return str(best.path)


def model_of(
    saved: dict, device: torch.device, dtype: torch.dtype, model_class: type[Spider]
) -> Spider:
    """Build the model of a checkpoint in evaluation mode, with products in `dtype`."""
    model = on_meta(model_class, SpiderConfig.from_saved(saved["cfg"]))
    materialize(model, device, saved["model_state_dict"])
    model.compute_dtype = dtype
    # As for compiled layers, without TileKernels: compiling them takes longer than most samples.
    backend, remark = resolve_backend("auto", device, model.config, dtype, compiled=True)
    model.set_backend(backend)
    if remark:
        logger.info(remark)
    return model.eval()


def decoder_of(saved: dict, device: torch.device, model_class: type[Spider]) -> Spider:
    """Build the model of a checkpoint in the precision that decodes fastest: bf16 on a GPU, fp32 on
    a CPU, where a single row takes several times as long in bf16."""
    dtype = torch.float32
    if device.type == "cuda" and has_bf16(device):
        dtype = torch.bfloat16
    return model_of(saved, device, dtype, model_class)
