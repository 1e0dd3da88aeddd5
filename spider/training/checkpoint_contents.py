"""The contents of a checkpoint: `run_state` builds them, `check_state` validates what was read; `check_classes`
compares the classes of the model, so that others do not run on its weights unnoticed.

The keys: `model_state_dict`, `optimizer_state_dict`, `step`, `epoch`, `cfg`, `best_loss` and the other fields of
RunProgress; the run's identity (`recipe`, `flags`); `targets` (training bytes by source); `exploded`; `classes` if the
model has classes of other programs; and `adapted`, the bytes that the model has learned from since training, with
`adaptation`, the moments of that, if `sample.py --save_adapted` wrote it.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from torch import nn

from spider.errors import CheckpointError
from spider.files import is_count
from spider.model.config import MAX_LOOPS, PRESETS, SpiderConfig
from spider.training.progress import RunProgress
from spider.training.run_identity import RunIdentity
from spider.training.sharding import sharding_of

REQUIRED = {"model_state_dict", "optimizer_state_dict", "step", "cfg"}


def run_state(model: nn.Module, optimizers, progress: RunProgress, identity: RunIdentity,
              targets: Sequence[int]) -> dict:
    """Build the state of a checkpoint from tensors and plain values. There is no random state, since all randomness is
    a function of (seed, step). targets: training bytes by source."""
    state = dict(model_state_dict=sharding_of(model).model_state(model), optimizer_state_dict=optimizers.state_dict(),
                 recipe=identity.recipe, cfg=asdict(model.config), flags=dict(identity.flags), targets=list(targets),
                 exploded=progress.exploded, **asdict(progress))
    return state | (dict(classes=classes) if (classes := foreign_classes(model)) else {})


OURS = ("spider", "spider_model", "tile_moe", "torch", "torchao", "builtins")


def foreign_classes(model: nn.Module) -> list[str]:
    """Return the sorted paths of a model's classes that are neither ours nor torch's: ["my_idea.GatedMLA",
    "my_idea.MySpider"]. The main script has the name of its file.

    FSDP and FP8 derive their own classes from a module's class; the base class counts."""
    found = set()
    for module in model.modules():
        foreign = [base for base in type(module).__mro__ if base.__module__.partition(".")[0] not in OURS]
        found.update(class_path(base) for base in foreign[:1])
    return sorted(found)


def check_classes(path: Path, state: Mapping, model: nn.Module):
    """Raise CheckpointError unless a checkpoint's model has the same classes, beside Spider's own."""
    there, here = sorted(state.get("classes", [])), foreign_classes(model)
    if there != here:
        saved, asked = (", ".join(names) or "only Spider's own classes" for names in (there, here))
        raise CheckpointError(f"{path}: its model uses {saved}, but this one uses {asked}: load it with the program "
                              f"that trained it")


def class_path(kind: type) -> str:
    """Return module.Class."""
    module = kind.__module__
    if module == "__main__":
        module = Path(getattr(sys.modules[module], "__file__", None) or module).stem
    return f"{module}.{kind.__qualname__}"


def is_number(value) -> bool:
    """Return whether a value is a finite number of sane size."""
    return type(value) in (int, float) and abs(value) < 1e300


def is_lowest(value) -> bool:
    """Return whether a value is a valid running minimum: a number, or infinity at the start."""
    return is_number(value) or type(value) is float and value == math.inf


def is_flat(value) -> bool:
    """Return whether a value is a dict of plain values by name."""
    return isinstance(value, dict) and all(type(key) is str and type(entry) in (int, float, bool, str, type(None))
                                           for key, entry in value.items())


# Validators of values by key; keys may be missing.
CHECKS = ({name: is_count for name in ("step", "bytes_seen", "skipped", "lineage", "epoch", "unimproved", "adapted")}
          | {name: is_lowest for name in ("best_loss", "lowest_average")}
          | {name: lambda value: value is None or is_number(value) for name in (
              "average_loss", "last_loss", "val_loss")}
          | {name: lambda value: isinstance(value, dict) for name in (
              "model_state_dict", "optimizer_state_dict", "cfg", "adaptation")}
          | dict(n_loops=lambda value: is_count(value) and 1 <= value <= MAX_LOOPS, noise=is_number,
                 best_before_end=lambda value: value is None or is_lowest(value),
                 flags=lambda value: is_flat(value) and all(
                     type(entry) is not float or is_number(entry) for entry in value.values()),
                 owed=lambda value: value is None or is_flat(value) and is_count(value.get("step")) and all(
                     type(entry) in (int, float, bool) for entry in value.values()),
                 exploded=lambda value: type(value) is bool,
                 recipe=lambda value: type(value) is str and value in PRESETS,
                 wandb=lambda value: value is None or is_flat(value) and all(
                     type(value.get(name)) is str for name in ("name", "id")),
                 targets=lambda value: isinstance(value, list) and all(map(is_count, value)),
                 classes=lambda value: isinstance(value, list) and all(type(name) is str for name in value)))


def check_state(path: Path, state, required: set[str] = REQUIRED):
    """Raise CheckpointError unless a state has the required keys and valid plain values."""
    state = state if isinstance(state, dict) else {}
    missing = required - state.keys()
    if missing:
        raise CheckpointError(f"{path} is not a Spider checkpoint: it lacks {', '.join(sorted(missing))}")
    wrong = [name for name, fits in CHECKS.items() if name in state and not fits(state[name])]
    if (state.get("average_loss") is None) != (state.get("last_loss") is None):
        wrong.append("average_loss")
    if not wrong and state.get("owed") and not 0 < state["owed"]["step"] == state["step"]:
        wrong.append("owed")
    if wrong:
        raise CheckpointError(f"{path}: invalid values of {', '.join(wrong[:3])}")
    try:
        SpiderConfig.from_saved(state["cfg"])
    except (TypeError, ValueError) as fault:
        raise CheckpointError(f"{path}: cfg: {fault}") from None
