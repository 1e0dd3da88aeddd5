"""The identity of a run (`RunIdentity`): the settings that a resumed run should not change.

`differences` lists the changes of its config; `check_same_model` refuses those that change the shape of a weight.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch import nn

from spider.errors import CheckpointError
from spider.model.config import SpiderConfig

# Flags whose change is logged when a run resumes.
IDENTITY = ("seed", "data_dir", "mock_data", "seq_len", "micro_batch", "global_batch", "lr", "schedule", "warmup_steps",
            "target_tokens", "random_loops", "engram_reset", "engram_lr", "weight_decay", "dropout", "beta1",
            "beta2", "momentum", "grad_clip", "min_lr_fraction", "wsd_decay_fraction", "eval_tokens", "optimizer")


@dataclass(frozen=True)
class RunIdentity:
    """The recipe of a run and its flags in IDENTITY, as recorded in checkpoints."""
    recipe: str
    flags: Mapping[str, object]

    @classmethod
    def of(cls, recipe: str, flags: Mapping[str, object]) -> "RunIdentity":
        """Make it from the values of all flags by name."""
        return cls(recipe, {name: flags[name] for name in IDENTITY})

    def changes_since(self, state: Mapping, n_loops: int) -> list[str]:
        """List the flags that differ from a checkpoint's, including --n_loops."""
        before = dict(n_loops=state.get("n_loops", n_loops), dropout=0.0) | state.get("flags", {})  # dropout came later
        now = dict(n_loops=n_loops) | self.flags
        return [f"--{name} was {before[name]}, is {now[name]}" for name in sorted(before.keys() & now)
                if before[name] != now[name]]


def differences(saved: dict, config: SpiderConfig) -> dict[str, tuple]:
    """Return the fields in which a config differs from a checkpoint's, with both values; n_loops, a flag, is left
    out."""
    there = SpiderConfig.from_saved(saved)             # newer fields have their defaults
    return {f.name: (getattr(there, f.name), getattr(config, f.name)) for f in fields(config)
            if f.name != "n_loops" and getattr(there, f.name) != getattr(config, f.name)}


def shapes(config: SpiderConfig, model_class: type[nn.Module]) -> dict[str, tuple]:
    """Return the shapes of a model's parameters and buffers by name."""
    with torch.device("meta"):
        model = model_class(config)
    return {name: tuple(x.shape) for held in (model.named_parameters(), model.named_buffers()) for name, x in held}


def check_same_model(path: Path, saved: dict, asked: SpiderConfig, model_class: type[nn.Module]):
    """Raise CheckpointError, with the fields, if a config's weights differ in name or shape from a checkpoint's.
    Other fields, and n_loops, may differ."""
    there, changes = SpiderConfig.from_saved(saved), differences(saved, asked)
    if not changes or shapes(replace(asked, n_loops=there.n_loops), model_class) == shapes(there, model_class):
        return

    def reshapes(name: str) -> bool:
        try:
            return shapes(replace(there, **{name: getattr(asked, name)}), model_class) != shapes(there, model_class)
        except ValueError:                # invalid without another field's change
            return True
    differing = [f"{name} is {before}, not {now}" for name, (before, now) in changes.items() if reshapes(name)]
    raise CheckpointError(f"{path} holds another model: {'; '.join(differing[:3])}. Leave that out of --model and "
                          f"--set, or train a new model, without --resume, in another --ckpt_dir")
