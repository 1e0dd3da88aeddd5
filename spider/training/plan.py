"""The plan of a run: every decision about it, made once by `train.settle` and carried as frozen dataclasses.

Fields have the names of the flags that set them (`python train.py --help` explains these); `auto`, recipe and
checkpoint are resolved. This module does not import torch.
"""

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from spider.errors import UsageError
from spider.flags import decimal, value_text
from spider.model.config import SpiderConfig

OPTIMIZERS = ("adamw", "adamw8bit", "muon")


@dataclass(frozen=True)
class BatchShape:
    """The shape of an optimizer step: on each rank `grad_accum` micro-batches of `micro_batch` x `seq_len` bytes."""
    seq_len: int
    micro_batch: int
    grad_accum: int = 1
    ranks: int = 1

    @property
    def sequences(self) -> int:
        """Sequences per optimizer step, on all ranks together."""
        return self.micro_batch * self.grad_accum * self.ranks

    @property
    def bytes(self) -> int:
        """Bytes per optimizer step, on all ranks together."""
        return self.sequences * self.seq_len


@dataclass(frozen=True)
class Schedule:
    """The schedule of a run: learning rate, dropout, loops; the horizon that they are functions of."""
    target_tokens: int
    max_steps: int
    schedule: str
    lr: float
    warmup_steps: int
    wsd_decay_fraction: float
    min_lr_fraction: float
    n_loops: int
    random_loops: bool
    dropout: float
    engram_reset: bool
    seed: int


@dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer of the dense weights, and the settings of all optimizers: `lr` is for all but the Engram tables,
    `grad_clip` the largest gradient norm (0: no clipping)."""
    optimizer: str = "muon"
    lr: float = 3e-4
    engram_lr: float = 0.25
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    momentum: float = 0.95
    grad_clip: float = 1.0
    max_skipped: int = 10


@dataclass(frozen=True)
class MachinePlan:
    """The use of the hardware: precision, routing backend, compilation, activation checkpointing, shards."""
    precision: str = "fp32"
    fp8_experts: bool = False
    moe_backend: str = "grouped"
    compile: bool = False
    recompute: str = "nothing"
    shards: int = 1


@dataclass(frozen=True)
class OutputPlan:
    """Inputs and outputs of a run: the checkpoint to resume from, checkpoints, evaluations, samples, trackers."""
    ckpt_dir: str
    ckpt_every: int
    keep_last: int
    keep_best: bool
    sharded_checkpoints: bool
    resume: str | None
    reset_steps: bool
    eval_every: int
    eval_tokens: int
    patience: int
    log_every: int
    sample_every: int
    sample_prompt: str | None
    run: str | None
    profile: bool

    @property
    def resume_hint(self) -> str:
        """The hint that names the command to resume the run."""
        origin = [f"--{name}" for name in ("resume", "reset_steps") if getattr(self, name)]
        return "the same command" + f" without {' and '.join(origin)}" * bool(origin) + " resumes"

    def pauses(self, step: int, last_step: int) -> int:
        """Count the evaluations and samples from a step (included) to the end."""
        return sum(last_step // every - (step - 1) // every + (last_step % every > 0)
                   for every in (self.eval_every, self.sample_every) if every)


@dataclass(frozen=True)
class Plan:
    """A run as `train.settle` decided it. `flags` has the value of every flag, `remarks` the lines that explain it."""
    recipe: str                           # the source of defaults
    config: SpiderConfig
    data_dir: str
    mock_data: bool
    batch: BatchShape
    schedule: Schedule
    optimizer: OptimizerSettings
    machine: MachinePlan
    output: OutputPlan
    flags: Mapping[str, object]
    remarks: tuple[str, ...] = ()
    segment_lengths: Mapping[str, float] = field(default_factory=dict)  # bytes per segment of each source, measured
    bytes_per_segment: float = 1.0        # of all sources together, expected
    memory: Mapping[str, float] = field(default_factory=dict)           # bytes of a rank by purpose
    checkpoint_size: float = 0.0          # bytes

    @property
    def n_loops(self) -> int:
        return self.schedule.n_loops

    @property
    def horizon(self) -> int:
        """Optimizer steps from the start to --target_tokens."""
        return math.ceil(self.schedule.target_tokens / self.batch.bytes)


def pick(group: type, values: Mapping[str, object], **others):
    """Make a group of a plan from the values of flags by name; `others` replace them."""
    return group(**{f.name: others[f.name] if f.name in others else values[f.name] for f in fields(group)})


def describe(plan: Plan, asked: Mapping[str, object], parameters: int, hardware: str, ranks: str) -> list[str]:
    """Return a line for each choice, marked if `auto` made it. asked: the values of the flags before resolution."""
    preset = replace(SpiderConfig.preset(plan.recipe), n_loops=plan.config.n_loops)
    name = plan.recipe if plan.config == preset else f"{plan.recipe}, changed"
    loops = f"{plan.n_loops} loop{'s' * (plan.n_loops != 1)}"
    lines = {"model": f"model {name}, {parameters / 1e6:.1f}M parameters, {loops}",
             "device": f"device {hardware}", "precision": f"precision {plan.machine.precision}",
             "moe_backend": f"expert backend {plan.machine.moe_backend}",
             "optimizer": f"optimizer {plan.optimizer.optimizer}", "recompute": f"recompute {plan.machine.recompute}"}
    return [line + " (auto)" * (asked[flag] == "auto") for flag, line in lines.items()] + [ranks] * bool(ranks)


def explain(plan: Plan, recipe: Mapping[str, object], given: Collection[str], environment: Sequence[str],
            why: Sequence[str]) -> list[str]:
    """Return lines with the reasons of `auto` and the values taken from the recipe and the environment."""
    taken = [f"--{name} {value_text(plan.flags[name])}" for name, value in recipe.items() if name not in given
             and (callable(value) or value == plan.flags[name])]  # else the checkpoint or the horizon set it
    nothing = "all values overridden" if recipe else "the defaults of --help"
    return ([f"chosen by auto: {'; '.join(why)}"] * bool(why)
            + [f"recipe of {plan.recipe}: {' '.join(taken) or nothing}"]
            + [f"from the environment: {' '.join(environment)}"] * bool(environment))


def apply_settings(config: SpiderConfig, text: str | None) -> SpiderConfig:
    """Return a config with the changes of --set (NAME=VALUE,...); raise UsageError for a bad name or value."""
    changed = {f.name: getattr(config, f.name) for f in fields(config)}
    for setting in text.split(",") if text else ():
        name, _, value = setting.partition("=")
        if name == "n_loops":
            raise UsageError("--set: use --n_loops to set n_loops")
        if name not in changed:
            raise UsageError(f"--set: {name!r} is not a field of SpiderConfig")
        kind = type(changed[name])
        try:
            if kind is bool:
                changed[name] = {"true": True, "false": False}[value.lower()]
            elif kind is tuple:
                changed[name] = tuple(int(decimal(number)) for number in value.split("+") if number)
            else:
                changed[name] = value if kind is str else kind(decimal(value))
        except (ValueError, KeyError):
            wanted = {bool: "true or false", tuple: "whole numbers joined by +"}.get(kind, kind.__name__)
            raise UsageError(f"--set: {name} takes {wanted}, not {value!r}") from None
    try:
        return SpiderConfig(**changed)
    except ValueError as fault:
        raise UsageError(f"--set: {fault}") from None


def step_seed(seed: int, step: int, purpose: str) -> int:
    """Derive a seed below 2^62 for one purpose in one step."""
    digest = hashlib.blake2b(f"{purpose}:{seed}:{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2
