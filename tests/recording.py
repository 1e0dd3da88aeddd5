"""Record a run of train.py from outside, with torch's hooks and without patching any function: each
pass of the model, the optimizers' inputs and changes, the files."""

from collections import defaultdict
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from conftest import lookups_of, metrics
from spider.training.checkpoint import checkpoint_path
from spider_model import Spider
from train import command_line


class Call(NamedTuple):
    """A call of a module: its first input and first output."""

    x: Tensor
    y: Tensor


@dataclass
class Pass:
    """A forward pass of the model."""

    given: dict = field(default_factory=dict)  # arguments by name
    # Calls by module name, including calls recomputed in the backward pass.
    called: dict[str, list[Call]] = field(default_factory=lambda: defaultdict(list))
    segments: int = 0


@dataclass
class Update:
    """An optimizer step: its passes and, by parameter name, weights and gradients before the step,
    weights and optimizer state after it."""

    passes: list[Pass] = field(default_factory=list)
    before: dict[str, Tensor] = field(default_factory=dict)
    gradient: dict[str, Tensor] = field(default_factory=dict)
    # For Engram tables: the rows [n] that were looked up and their gradients [n, dim].
    lookups: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def change(self, name: str) -> Tensor:
        """Return the change of a parameter, in float64."""
        return self.after[name].double() - self.before[name].double()


@dataclass
class Recording:
    """A finished run."""

    directory: Path
    updates: list[Update]  # steps that changed weights

    @property
    def first(self) -> Update:
        return self.updates[0]

    @property
    def lines(self) -> list[dict]:
        """Return the lines of metrics.jsonl."""
        return metrics(self.directory, clock=True)

    def column(self, name: str) -> list:
        """Return a number from every line of metrics.jsonl that has the number."""
        return [line[name] for line in self.lines if name in line]

    def checkpoint(self, step: int) -> Path:
        return checkpoint_path(self.directory, step)

    def saved(self, step: int) -> dict:
        """Return the state in a step's checkpoint."""
        return torch.load(self.checkpoint(step), weights_only=True)


class Recorder:
    """Watch all models and optimizers of this process inside a `with` block."""

    def __enter__(self):
        self.updates = []
        self.modules = {}  # names of the last model's modules
        self.parameters = {}  # names of its parameters
        self.handles = [
            register_module_forward_pre_hook(self._before_module),
            register_module_forward_hook(self._after_module, with_kwargs=True),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        return self

    def __exit__(self, *_):
        for handle in self.handles:
            handle.remove()

    def _before_module(self, module, _):
        if not isinstance(module, Spider):
            return
        self.modules = {submodule: name for name, submodule in module.named_modules()}
        self.parameters = {p: name for name, p in module.named_parameters()}
        self.current = Pass()
        if not module.training:
            return
        if not self.updates or self.updates[-1].after:
            self.updates.append(Update())
        self.updates[-1].passes.append(self.current)

    def _after_module(self, module, inputs, options, output):
        if isinstance(module, Spider):
            arguments = signature(Spider.forward).bind(module, *inputs, **options)
            self.current.given = arguments.arguments
            self.current.segments = int(output.segments)
        elif module.training and module in self.modules and isinstance(inputs[0], Tensor):
            y = output[0] if isinstance(output, tuple) else output
            self.current.called[self.modules[module]].append(Call(inputs[0].detach(), y.detach()))

    def _before_step(self, optimizer, *_):
        update = self.updates[-1]
        for p in parameters_of(optimizer):
            name = self.parameters[p]
            update.before[name] = p.detach().clone()
            if p.grad is not None:
                update.gradient[name] = p.grad.clone()
        for p, table in getattr(optimizer, "tables", {}).items():
            update.lookups[self.parameters[p]] = lookups_of(table)

    def _after_step(self, optimizer, *_):
        update = self.updates[-1]
        for p in parameters_of(optimizer):
            name = self.parameters[p]
            update.after[name] = p.detach().clone()
            update.state[name] = {
                key: value.clone()
                for key, value in optimizer.state[p].items()
                if isinstance(value, Tensor)
            }


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def recorded(directory: Path, argv: list[str]) -> Recording:
    """Run train.py with these arguments and record it. `directory` must be the --ckpt_dir."""
    with Recorder() as recorder:
        assert command_line(argv) == 0
    return Recording(directory, recorder.updates)
