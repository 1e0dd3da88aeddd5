"""The decisions about a run before it starts, as values.

`CommandLine` holds the flags of a command, `Recipe` the defaults of a model. resolve.py combines
them into a `Plan`."""

import math
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from spider.config import SpiderConfig
from spider.data.stream import StepLayout
from spider_model import Spider

if TYPE_CHECKING:
    from train import Flags


class CommandLine(NamedTuple):
    """The flags of a run before anything is resolved."""

    flags: "Flags"
    given: frozenset[str]  # names of the flags that were set anywhere
    inherited: dict[str, dict[str, Any]]  # flags from the environment and --config, by source


Rule = Callable[["Flags", SpiderConfig], float]


class Recipe(NamedTuple):
    """The defaults of a model that differ from the defaults of Flags."""

    values: dict[str, Any]
    rules: dict[str, Rule]  # computed from the horizon and the model, once both are known


@dataclass(frozen=True)
class Plan:
    """A run, completely resolved."""

    flags: "Flags"  # with the resolved value of every flag
    given: Set[str]  # names of the flags that were set anywhere, or chosen by --minutes
    recipe: str  # name of the model whose defaults were used
    defaults: Recipe
    config: SpiderConfig
    model_class: type[Spider]
    # On the meta device, without storage, until train.build_model materializes it
    model: Spider = field(compare=False, repr=False)
    ranks: int = 1
    checkpoint_size: float = 0.0  # bytes
    memory: dict[str, float] = field(default_factory=dict)  # bytes per rank, by purpose

    @property
    def layout(self) -> StepLayout:
        """How the sequences of a step are spread over ranks and micro-steps."""
        return StepLayout(self.flags.micro_batch, self.flags.grad_accum, self.ranks)

    @property
    def step_bytes(self) -> int:
        """Bytes per optimizer step, on all ranks together."""
        return self.layout.sequences * self.flags.seq_len

    @property
    def horizon(self) -> int:
        """Optimizer steps from the start to --target_tokens."""
        return math.ceil(self.flags.target_tokens / self.step_bytes)
