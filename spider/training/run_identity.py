"""The identity of a run: what makes it the same run when it resumes (`RunIdentity`), and what of its model may change.

`differences` names what a resumed run changed of its config; `check_same_model` refuses what its weights cannot follow.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch import nn

from spider.errors import CheckpointError
from spider.model.config import SpiderConfig

# Other values of these flags resume from the same weights, but as another run.
IDENTITY = ("seed", "data_dir", "mock_data", "seq_len", "micro_batch", "global_batch", "lr", "schedule", "warmup_steps",
            "target_tokens", "random_loops", "engram_reset", "engram_lr", "weight_decay", "dropout", "beta1",
            "beta2", "momentum", "grad_clip", "min_lr_fraction", "wsd_decay_fraction", "eval_tokens", "optimizer")


@dataclass(frozen=True)
class RunIdentity:
    """The recipe of a run and its values of the flags in IDENTITY, as its checkpoints record them."""
    recipe: str
    flags: Mapping[str, object]

    @classmethod
    def of(cls, recipe: str, flags: Mapping[str, object]) -> "RunIdentity":
        """Make it from the values of all flags by name."""
        return cls(recipe, {name: flags[name] for name in IDENTITY})

    def changes_since(self, state: Mapping, n_loops: int) -> list[str]:
        """Name the flags whose value a checkpoint's run had otherwise, --n_loops with them."""
        before = dict(n_loops=state.get("n_loops", n_loops), dropout=0.0) | state.get("flags", {})  # dropout came later
        now = dict(n_loops=n_loops) | self.flags
        return [f"--{name} was {before[name]}, is {now[name]}" for name in sorted(before.keys() & now)
                if before[name] != now[name]]


def differences(saved: dict, config: SpiderConfig) -> dict[str, tuple]:
    """Return the fields in which a config differs from a checkpoint's, with both values; loops have a flag."""
    there = SpiderConfig(**saved)             # fields that came since then have their defaults
    return {f.name: (getattr(there, f.name), getattr(config, f.name)) for f in fields(config)
            if f.name != "n_loops" and getattr(there, f.name) != getattr(config, f.name)}


def shapes(config: SpiderConfig, model_class: type[nn.Module]) -> dict[str, tuple]:
    """Return the shapes by name of all that a model holds."""
    with torch.device("meta"):
        model = model_class(config)
    return {name: tuple(x.shape) for held in (model.named_parameters(), model.named_buffers()) for name, x in held}


def check_same_model(path: Path, saved: dict, asked: SpiderConfig, model_class: type[nn.Module]):
    """Raise CheckpointError, which names the fields, where the weights of a config have other shapes, or names, than a
    checkpoint's; fields that change none, and loops, may differ."""
    there, changes = SpiderConfig(**saved), differences(saved, asked)
    if not changes or shapes(replace(asked, n_loops=there.n_loops), model_class) == shapes(there, model_class):
        return

    def reshapes(name: str) -> bool:
        try:
            return shapes(replace(there, **{name: getattr(asked, name)}), model_class) != shapes(there, model_class)
        except ValueError:                # it goes with another field's change alone
            return True
    differing = [f"{name} {before} there, {now} asked for" for name, (before, now) in changes.items() if reshapes(name)]
    raise CheckpointError(f"{path} holds another model ({'; '.join(differing[:3])}), and its weights keep their "
                          f"shapes: leave that out of --model and --set, or train anew, without --resume, in a "
                          f"--ckpt_dir of its own")
