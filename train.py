"""Train Spider, a byte-level Recurrent-Depth Transformer, from memory-mapped byte shards.

    python train.py --mock_data --max_steps 20 --seq_len 128 --micro_batch 2      # smoke run
    python train.py --data_dir data                            # `1b` on a GPU, `tiny` on a CPU
    torchrun --standalone --nproc_per_node 8 train.py --data_dir data --shards 8  # several GPUs

The same command again resumes from the newest checkpoint in --ckpt_dir. All randomness is a
function of (--seed, step), so an interrupted run ends like an uninterrupted one. --model chooses a
recipe, which sets the defaults of other flags (RECIPES in train.py); the log shows them.
"""

# From top to bottom: flags -> Plan, in stages that take values and return values -> the schedule ->
# the model -> one optimizer step -> evaluation -> the dry run -> resuming -> the run -> the log ->
# main. Not in the docstring, which is part of --help.

import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from spider import common
from spider.common import LARGEST, UsageError, flag, flag_specs, integer, path_name, quoted, real
from spider.config import BACKENDS, MAX_LOOPS, OPTIMIZERS, PRESETS, RECOMPUTE, SpiderConfig

# --------------------------------------------------------------------------------------------------
# Flags

COUNT = integer(1)
STEPS = integer(0)
RATE = real(0, 1000)
FRACTION = real(0, 1)
BETA = real(0, 0.99999)


@dataclass(frozen=True)
class Flags:
    """The flags of train.py, with the defaults of `original`; RECIPES has those of other models.

    The parser, the environment, the --config file and what a checkpoint records follow from these
    fields. In a Plan every field has its resolved value."""

    model: str = flag(
        "auto",
        "auto: the checkpoint's, or 1b on a GPU, or tiny",
        heading="basics",
        choices=("auto", *PRESETS),
    )
    data_dir: str = flag(
        "data",
        ".bin shards, or a mixture web:0.7,code:0.3",
        environment=True,
        recorded=True,
        type=path_name,
        metavar="DIR",
    )
    mock_data: bool = flag(
        False,
        "train on synthetic, learnable bytes instead of --data_dir",
        recorded=True,
        reads=True,
        evaluates=True,
    )
    ckpt_dir: str = flag(
        "checkpoints",
        "directory for checkpoints and metrics.jsonl; --mock_data adds mock/ to the default",
        type=path_name,
        metavar="DIR",
    )
    target_tokens: int = flag(
        10_000_000_000,
        "bytes to train on: the horizon",
        environment=True,
        recorded=True,
        type=COUNT,
        metavar="BYTES",
    )
    minutes: float | None = flag(
        None,
        "choose --target_tokens for about this many minutes, by timing a few steps; works with one "
        "process",
        recorded=True,
        type=real(0, 1e9, above=True),
        metavar="N",
    )
    max_steps: int = flag(
        0,
        "stop after this many optimizer steps; 0: run to --target_tokens. Steps beyond that use "
        "the minimum learning rate",
        type=STEPS,
        metavar="STEPS",
    )
    resume: str | None = flag(
        None,
        "checkpoint to start from, or a run's directory, of which the newest is taken; the run "
        "continues in --ckpt_dir, and if that holds a run already, that one is resumed instead",
        type=path_name,
        metavar="CHECKPOINT",
    )
    reset_steps: bool = flag(False, "with --resume: load only the weights, and begin at step 0")
    dry_run: bool = flag(False, "print settings, memory, disk and time of the run, and stop")
    config: str | None = flag(
        None,
        "TOML file of flag values; flags and environment variables override it",
        type=path_name,
        metavar="FILE",
    )

    set: str | None = flag(
        None,
        "fields of SpiderConfig to change: lora_rank=0,engram_match_words=1+2",
        heading="model",
        metavar="NAME=VALUE,...",
    )
    n_loops: int = flag(
        6,
        "loops of the recurrent core",
        environment=True,
        type=integer(1, MAX_LOOPS),
        metavar="N",
    )
    random_loops: bool = flag(
        False, "draw the loops of each step: Poisson with mean --n_loops", recorded=True
    )

    seq_len: int = flag(
        2048,
        "bytes per sequence",
        heading="batch",
        environment=True,
        recorded=True,
        reads=True,
        evaluates=True,
        type=integer(2, 1 << 24),
        metavar="BYTES",
    )
    micro_batch: int = flag(
        64,
        "sequences per device and micro-step; if --global_batch alone sets the bytes of a step: "
        "chosen, the largest that fits",
        environment=True,
        recorded=True,
        type=COUNT,
        metavar="N",
    )
    grad_accum: int = flag(
        1, "micro-steps per optimizer step", environment=True, type=COUNT, metavar="N"
    )
    global_batch: int | None = flag(
        None,
        "bytes per step over all ranks, instead of --grad_accum",
        recorded=True,
        type=COUNT,
        metavar="BYTES",
    )
    seed: int = flag(
        0,
        "seed of weights, data order, noise, loop counts",
        recorded=True,
        reads=True,
        type=STEPS,
        metavar="N",
    )

    target_flops: float | None = flag(
        None,
        "training FLOPs, instead of --target_tokens",
        heading="horizon",
        type=real(0, above=True),
        metavar="FLOPS",
    )
    target_param_data_ratio: float | None = flag(
        None,
        "training bytes per parameter (without Engram tables), instead of --target_tokens",
        type=real(0, above=True),
        metavar="RATIO",
    )

    optimizer: str = flag(
        "auto",
        "auto: muon for matrices, AdamW for others",
        heading="optimizer",
        recorded=True,
        choices=("auto", *OPTIMIZERS),
    )
    lr: float = flag(
        3e-4,
        "peak learning rate (Muon's updates are scaled to AdamW's size); recipes of other models "
        "than original compute it from horizon and width, and halve it for AdamW",
        environment=True,
        recorded=True,
        type=real(0, 1000, above=True),
        metavar="RATE",
    )
    engram_lr: float = flag(
        0.25,
        "learning rate of the Engram tables (Adagrad): a row's first step has this size",
        recorded=True,
        type=RATE,
        metavar="RATE",
    )
    engram_reset: bool = flag(
        False,
        "clear the Engram tables at the start of each further epoch, since they memorize the text",
        recorded=True,
        alias=("no-engram_reset", False, "do not clear them"),
    )
    schedule: str = flag(
        "cosine",
        "how the learning rate decays: a cosine, or constant and then linear (wsd)",
        recorded=True,
        choices=("cosine", "wsd"),
    )
    warmup_steps: int = flag(
        10,
        "optimizer steps of linear warm-up; recipes of other models than original compute them",
        recorded=True,
        type=STEPS,
        metavar="STEPS",
    )
    wsd_decay_fraction: float = flag(
        0.2,
        "last fraction of the horizon, in which wsd decays",
        recorded=True,
        type=FRACTION,
        metavar="FRACTION",
    )
    min_lr_fraction: float = flag(
        0.1,
        "learning rate at the horizon, as a fraction of the peak",
        recorded=True,
        type=FRACTION,
        metavar="FRACTION",
    )
    weight_decay: float = flag(
        0.1,
        "weight decay of matrices; vectors and hashed Engram tables have none",
        recorded=True,
        type=RATE,
        metavar="RATE",
    )
    dropout: float = flag(
        0.0,
        "dropout at the core's input and output (bytes: a fifth); grows from 0 in the first epoch "
        "to RATE in the eleventh",
        recorded=True,
        type=real(0, 0.9),
        metavar="RATE",
    )
    beta1: float = flag(0.9, "beta1 of AdamW", recorded=True, type=BETA, metavar="BETA")
    beta2: float = flag(0.95, "beta2 of AdamW", recorded=True, type=BETA, metavar="BETA")
    momentum: float = flag(0.95, "momentum of Muon", recorded=True, type=BETA, metavar="BETA")
    grad_clip: float = flag(
        1.0,
        "largest norm of the gradient, not counting the hashed Engram tables; 0: off",
        recorded=True,
        type=real(0),
        metavar="NORM",
    )
    max_skipped: int = flag(
        10,
        "stop after this many steps in a row with a non-finite loss or gradient",
        type=COUNT,
        metavar="STEPS",
    )

    device: str = flag(
        "auto", "auto: cuda if available", heading="machine", choices=("auto", "cpu", "cuda")
    )
    precision: str = flag(
        "auto",
        "auto: bf16 where supported; fp32 without TF32: for comparisons, slow on a GPU",
        choices=("auto", "fp8", "bf16", "fp32"),
    )
    fp8_experts: bool = flag(
        False, "with fp8: convert the routed experts too, with row-wise scales"
    )
    moe_backend: str = flag(
        "auto",
        "auto: tile or grouped, or triton where torch's grouped product is a loop; loop: the "
        "reference",
        choices=("auto", *BACKENDS),
    )
    compile: str = flag(
        "auto",
        "torch.compile the layers; auto: on a GPU where it works",
        nargs="?",
        const="on",
        choices=("auto", "on", "off"),
    )
    recompute: str = flag(
        "auto",
        "activation checkpointing; auto: as few layers as let a step fit into memory",
        alias=("no_gradient_checkpointing", "nothing", "same as --recompute nothing"),
        choices=("auto", *RECOMPUTE),
    )
    shards: int = flag(
        1,
        "shard weights, gradients and optimizer state over this many ranks; groups of ranks are "
        "replicas",
        type=COUNT,
        metavar="RANKS",
    )
    rank_timeout: float = flag(
        900.0,
        "seconds that ranks wait for one another",
        type=real(0, 1e6, above=True),
        metavar="SECONDS",
    )
    deterministic: bool = flag(
        False, "on a GPU: use deterministic kernels, some of which are slower"
    )

    ckpt_every: int = flag(
        50,
        "optimizer steps between checkpoints",
        heading="checkpoints",
        environment=True,
        type=COUNT,
        metavar="STEPS",
    )
    keep_last: int = flag(2, "newest checkpoints to keep", type=integer(2), metavar="N")
    keep_best: bool = flag(
        False,
        "save at each new lowest validation loss, and keep that checkpoint too; sample.py DIR "
        "--best loads it",
    )

    eval_every: int = flag(
        250,
        "optimizer steps between evaluations; one more at the end; 0: none",
        heading="evaluation",
        type=STEPS,
        metavar="STEPS",
    )
    eval_tokens: int = flag(
        1_048_576,
        "held-out bytes per evaluation",
        recorded=True,
        evaluates=True,
        type=COUNT,
        metavar="BYTES",
    )
    patience: int = flag(
        0,
        "end the run after this many evaluations in a row without a lower loss; 0: never",
        type=STEPS,
        metavar="N",
    )
    sample_every: int = flag(
        0, "steps between logged samples; 0: none", type=STEPS, metavar="STEPS"
    )
    sample_prompt: str | None = flag(
        None, "prompt of the samples; default: held-out text, if the run evaluates", metavar="TEXT"
    )

    log_every: int | None = flag(
        None,
        "optimizer steps between lines of the log; default: about a hundred lines a run, and one a "
        "minute",
        heading="logs",
        type=COUNT,
        metavar="STEPS",
    )
    run: str | None = flag(
        None, "log to wandb under this name (WANDB_MODE=offline works)", metavar="NAME"
    )
    profile: bool = flag(False, "write a profiler trace of steps 3 to 5 to --ckpt_dir")


SPECS = flag_specs(Flags)
ENVIRONMENT = [name for name, spec in SPECS.items() if spec.environment]
RECORDED = [name for name, spec in SPECS.items() if spec.recorded]

# Mutually exclusive: one that is set with more precedence drops the others.
HORIZONS = ("target_tokens", "minutes", "target_flops", "target_param_data_ratio")
ALTERNATIVES = (HORIZONS, ("grad_accum", "global_batch"), ("data_dir", "mock_data"))


class CommandLine(NamedTuple):
    """The flags of a run before anything is resolved."""

    flags: Flags
    given: frozenset[str]  # names of the flags that were set anywhere
    inherited: dict[str, Any]  # those that the environment or --config set


def flag_parser() -> common.Parser:
    """Make the parser of the command line from Flags."""
    parser = common.Parser(
        prog="train.py", description=__doc__, usage="python train.py [--FLAG VALUE ...]"
    )
    common.add_flags(parser, Flags)
    return parser


def parse_args(
    argv: list[str] | None = None, environ: Mapping[str, str] = os.environ
) -> CommandLine:
    """Parse the command line, the environment and the --config file, in this order of precedence.

    Raise UsageError for a bad value, or for flags that contradict one another."""
    parser = flag_parser()
    words = common.words_of(argv)
    if HELP & {*words}:
        print_help([word for word in words if word not in HELP], environ)
    of_argv = parser.given(words)
    of_environ: dict[str, Any] = {}
    for name in ENVIRONMENT:
        variable = environ.get(name.upper())
        if name not in of_argv and variable:
            of_environ |= parser.value(name, variable, f"{name.upper()}={variable}")
    of_file = common.read_toml(parser, of_argv["config"]) if "config" in of_argv else {}
    given = merged(of_file, merged(of_environ, of_argv))
    horizons = [name for name in HORIZONS if name in given]
    if len(horizons) > 1:
        raise UsageError(f"--{horizons[1]}: --{horizons[0]} already sets the horizon: give one")

    flags = Flags(**given)
    if "ckpt_dir" not in given:
        flags = replace(flags, ckpt_dir=default_ckpt_dir(flags))
    inherited = {name: value for name, value in given.items() if name not in of_argv}
    return CommandLine(flags, frozenset(given), inherited)


def merged(weaker: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Merge the flags of a weaker source into those given by stronger ones.

    A weaker value is dropped if the flag itself, or one of its ALTERNATIVES, is given."""
    chosen = {name for name, value in given.items() if value is not False}
    dropped = {name for names in ALTERNATIVES if chosen & {*names} for name in names}
    kept = {name: value for name, value in weaker.items() if name not in dropped}
    return kept | given


def default_ckpt_dir(flags: Flags) -> str:
    """Return the default of --ckpt_dir: runs on mock data, and those that start from another run's
    weights, have their own."""
    directory = flags.ckpt_dir
    if flags.mock_data:
        directory = os.path.join(directory, "mock")
    if flags.reset_steps and flags.resume:
        directory = os.path.join(directory, f"from-{Path(flags.resume).stem}")
    return directory


HELP = {"-h", "--help"}


def print_help(words: list[str], environ: Mapping[str, str]):
    """Print the flags, with the defaults of the recipe that a command line would take, and exit.

    The recipe of a new run: torch, to look at the GPU or into a checkpoint, takes seconds."""
    flags = Flags()
    with suppress(UsageError):
        flags = parse_args(words, environ).flags
    recipe = flags.model
    if recipe == "auto":
        has_gpu = flags.device != "cpu" and shutil.which("nvidia-smi")
        recipe = "1b" if has_gpu else "tiny"
    parser = flag_parser()
    parser.description = f"{__doc__}\nThe defaults below are those of --model {recipe}."
    if "global_batch" in RECIPES[recipe].values:
        parser.set_defaults(micro_batch="chosen", grad_accum="chosen")
    parser.set_defaults(**RECIPES[recipe].values)
    parser.set_defaults(**dict.fromkeys(RECIPES[recipe].rules, "computed from the horizon"))
    parser.print_help()
    parser.exit()


# --------------------------------------------------------------------------------------------------
# Recipes: defaults of flags by model

Rule = Callable[[Flags, SpiderConfig], float]


class Recipe(NamedTuple):
    """The defaults of a model, where they differ from those of Flags."""

    values: dict[str, Any]
    rules: dict[str, Rule]  # for flags that depend on the horizon, which is settled then


def steps_of(flags: Flags) -> float:
    """Return the horizon in optimizer steps."""
    assert flags.global_batch is not None  # with_split sets it
    return flags.target_tokens / flags.global_batch


# The longest horizon and the widest model for which rates were compared
FITTED_STEPS = 2930
FITTED_WIDTH = 256


def fitted_lr(flags: Flags, config: SpiderConfig) -> float:
    """Return the peak learning rate for a horizon and a width; half of it for AdamW.

    A fit to runs of up to FITTED_STEPS and FITTED_WIDTH (docs/results/learning.md)."""
    by_steps = min(0.02, 0.116 * steps_of(flags) ** -0.4)
    by_width = (128 / config.hidden_size) ** 0.5
    by_optimizer = 0.5 if flags.optimizer in ("adamw", "adamw8bit") else 1.0
    return float(f"{by_steps * by_width * by_optimizer:.3g}")


def fitted_warmup(flags: Flags, config: SpiderConfig) -> int:
    """Return the optimizer steps of warm-up: a twenty-fifth of the horizon, at most 40 and at least
    6; of a very short one a fifth."""
    steps = steps_of(flags)
    return int(min(40, max(steps / 25, min(6, steps / 5))))


EVALUATIONS = 10  # of a run, by the rule below


def even_evaluations(flags: Flags, config: SpiderConfig) -> int:
    """Return the steps between evaluations, for EVALUATIONS of them in a run."""
    return max(1, math.ceil(steps_of(flags) / EVALUATIONS))


FITTED: dict[str, Rule] = dict(lr=fitted_lr, warmup_steps=fitted_warmup)
# Measured in docs/results/learning.md. The ten evaluations on tinyshakespeare's validation split,
# each as long as 8 steps, add 3% to the recipe's 2,930 steps, and 31% to one pass (245 steps).
TINY = Recipe(
    values=dict(
        n_loops=1,
        seq_len=4096,
        micro_batch=1,
        target_tokens=12_000_000,
        dropout=0.5,
        engram_reset=True,
        ckpt_every=500,
        eval_tokens=262_144,
    ),
    rules=FITTED | dict(eval_every=even_evaluations),
)
RECIPES = {
    "1b": Recipe(dict(global_batch=131_072, engram_reset=True), FITTED),
    "base": Recipe(dict(n_loops=1, global_batch=131_072, engram_reset=True), FITTED),
    "original": Recipe({}, {}),  # the flags of the project that this one began from
    "small": Recipe(
        TINY.values | dict(target_tokens=30_000_000, eval_tokens=1_048_576), TINY.rules
    ),
    "tiny": TINY,
}


if __name__ == "__main__":
    common.check_flags_early(parse_args, "train.py")
    common.set_allocator()

import numpy as np
import torch
from loguru import logger
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record

from data import (
    Batch,
    Feed,
    Loader,
    Source,
    StepLayout,
    mock_source,
    open_data,
    validation_sets,
)
from spider import estimate, machine, threads
from spider.checkpoint import (
    FROM_SCRATCH,
    CheckpointWriter,
    Origin,
    check_weights,
    find_checkpoints,
    load_origin,
)
from spider.common import CheckpointError, Diverged, Stopped, WorldError, say
from spider.curves import write_curves
from spider.distributed import World, shard_model, sharding_of
from spider.flash_attention import choose_flash_attention
from spider.fp8 import convert_to_fp8, describe_fp8
from spider.memory import EngramTable
from spider.noise import step_seed
from spider.optim import ENGRAM_TABLES, Optimizers, kinds_of
from spider.run import (
    Metrics,
    RunProgress,
    StepEvents,
    StopSignals,
    Tracker,
    start_profiler,
    start_wandb,
)
from spider.scoring import EVAL_BYTES, IGNORED, Totals, score_model
from spider.state import gather_model, load_model, model_state
from spider.vocabulary import BOS_ID, VOCAB_SIZE
from spider_model import Spider, SpiderOutput
from tile_moe import KERNELS, multiplies_at_once, resolve_backend
from tokenizer import decode

# --------------------------------------------------------------------------------------------------
# The plan of a run: stages from flags to Plan, each a function of values

MAX_MICRO_BATCH = 1 << 16  # sequences, where --global_batch chooses


@dataclass(frozen=True)
class Plan:
    """A run as `settle` decided it: `plan.flags` has the resolved value of every flag."""

    flags: Flags
    recipe: str  # model whose defaults were used
    config: SpiderConfig
    model_class: type[Spider]
    # Without storage, on the meta device, until build_model makes it real.
    model: Spider = field(compare=False, repr=False)
    ranks: int = 1
    checkpoint_size: float = 0.0  # bytes
    documents_per_byte: float = 0.0  # of the data, for the estimate of memory
    memory: dict[str, float] = field(default_factory=dict)  # bytes of a rank, by purpose
    reasons: tuple[str, ...] = ()  # why something was chosen, for the log

    @property
    def sequences(self) -> int:
        """Sequences per optimizer step, on all ranks together."""
        return self.layout.sequences

    @property
    def layout(self) -> StepLayout:
        """How the sequences of a step are spread over ranks and micro-steps."""
        return StepLayout(self.flags.micro_batch, self.flags.grad_accum, self.ranks)

    @property
    def step_bytes(self) -> int:
        """Bytes per optimizer step, on all ranks together."""
        return self.sequences * self.flags.seq_len

    @property
    def horizon(self) -> int:
        """Optimizer steps from the start to --target_tokens."""
        return math.ceil(self.flags.target_tokens / self.step_bytes)


def settle(
    command: CommandLine,
    world: World,
    origin: Origin = FROM_SCRATCH,
    model_class: type[Spider] = Spider,
    sources: Sequence[Source] = (),
) -> Plan:
    """Resolve a command line into the plan of a run.

    origin: the checkpoint to begin with. sources: the data, whose documents take memory. Raise
    UsageError for flags that contradict one another or that this machine does not support, and
    CheckpointError for a checkpoint of another model."""
    given = command.given
    recipe = recipe_of(command.flags.model, origin, world.device)
    flags = with_recipe(command, recipe, origin)
    config = model_config(flags, recipe, origin, model_class)
    with torch.device("meta"):
        model = model_class(config)
    if origin.state is not None and origin.path is not None:
        check_weights(origin.path, origin.state, model)

    has_tables = any(isinstance(module, EngramTable) for module in model.modules())
    flags = with_tables(flags, given, has_tables)
    splits = splits_of(flags, given, world.ranks, origin)
    # The horizon needs a step's bytes, which are the same in all splits; with_memory chooses one.
    flags = with_split(flags, splits[0], world.ranks)
    flags = with_horizon(flags, given, recipe, model)
    flags, reasons = with_machine(flags, config, world)
    plan = Plan(
        flags,
        recipe,
        config,
        model_class,
        model,
        ranks=world.ranks,
        reasons=tuple(reasons),
        checkpoint_size=sum(estimate.state_size(model, flags.optimizer)),
        documents_per_byte=sum(source.weight * source.documents_per_byte() for source in sources),
    )
    return with_memory(plan, splits, world)


def recipe_of(model: str, origin: Origin, device: torch.device) -> str:
    """Return the recipe: that of --model, else the checkpoint's, else one that suits the device."""
    if model != "auto":
        return model
    recorded = (origin.state or {}).get("recipe")
    return recorded or ("1b" if device.type == "cuda" else "tiny")


def with_recipe(command: CommandLine, recipe: str, origin: Origin) -> Flags:
    """Fill in the recipe's values, and what the checkpoint decides, of flags that are not given."""
    flags, given, _ = command
    defaults = dict(RECIPES[recipe].values)
    if "micro_batch" in given:  # then a step has --grad_accum of them
        defaults.pop("global_batch", None)
    if origin.state is not None:
        saved_config = SpiderConfig.from_saved(origin.state["cfg"])
        defaults["n_loops"] = origin.state.get("n_loops", saved_config.n_loops)
    if origin.resumes and flags.minutes is not None:
        check_minutes(flags, origin.flags)
        for name in ("target_tokens", "eval_tokens"):  # --minutes chose them at the start
            if name in origin.flags:
                defaults[name] = origin.flags[name]
    return replace(flags, **{name: value for name, value in defaults.items() if name not in given})


def check_minutes(flags: Flags, recorded: Mapping[str, Any]):
    """Raise UsageError if --minutes is not that by which the run to resume was started."""
    before = recorded.get("minutes")
    if before == flags.minutes:
        return
    start = "without --minutes"
    remedy = "leave --minutes out"
    if before is not None:
        start = f"with --minutes {before:g}"
        remedy = f"give --minutes {before:g}"
    another = "add --reset_steps and " if flags.resume else ""
    raise UsageError(
        f"--minutes {flags.minutes:g}: the run that this command continues was started {start}: "
        f"{remedy} to continue it, or {another}name a new --ckpt_dir to start another run"
    )


def model_config(
    flags: Flags, recipe: str, origin: Origin, model_class: type[Spider] = Spider
) -> SpiderConfig:
    """Return the configuration of the model: the checkpoint's, else that of the recipe, with --set
    applied.

    Raise CheckpointError, with the fields, if --set or --model ask for weights of other names or
    shapes than the checkpoint has."""
    fresh = apply_settings(replace(SpiderConfig.preset(recipe), n_loops=flags.n_loops), flags.set)
    if origin.state is None:
        return fresh
    saved = SpiderConfig.from_saved(origin.state["cfg"])
    config = apply_settings(replace(saved, vocab_size=VOCAB_SIZE), flags.set)
    check_same_model(saved, config, origin.path, model_class)
    if flags.model != "auto":
        check_same_model(saved, fresh, origin.path, model_class)
    return config


def apply_settings(config: SpiderConfig, text: str | None) -> SpiderConfig:
    """Return a config with the changes of --set (NAME=VALUE,...).

    Raise UsageError for a bad name or value."""
    try:
        return config.changed(text or "")
    except ValueError as fault:
        raise UsageError(f"--set: {fault}") from None


def check_same_model(
    saved: SpiderConfig, asked: SpiderConfig, path: Path | None, model_class: type[Spider]
):
    """Raise CheckpointError if a config asks for other weights than a checkpoint's."""
    changes = [
        f"{one.name} is {getattr(saved, one.name)}, not {getattr(asked, one.name)}"
        for one in fields(asked)
        if one.name != "n_loops" and getattr(saved, one.name) != getattr(asked, one.name)
    ]
    if not changes:
        return
    asked_shapes = shapes(replace(asked, n_loops=saved.n_loops), model_class)
    if asked_shapes != shapes(saved, model_class):
        more = f"; and {len(changes) - 3} other fields" if len(changes) > 3 else ""
        raise CheckpointError(
            f"{path}: holds another model: {'; '.join(changes[:3])}{more}. Leave --model and --set "
            f"out, or train a new model in another --ckpt_dir"
        )


def shapes(config: SpiderConfig, model_class: type[Spider]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's parameters and buffers by name."""
    with torch.device("meta"):
        weights = model_class(config).state_dict()
    return {name: tuple(value.shape) for name, value in weights.items()}


def with_tables(flags: Flags, given: Set[str], has_tables: bool) -> Flags:
    """Switch --engram_reset off for a model without Engram tables; UsageError if it is given."""
    if has_tables:
        return flags
    if flags.engram_reset and "engram_reset" in given:
        raise UsageError("--engram_reset: this model has no Engram tables")
    return replace(flags, engram_reset=False)


class Split(NamedTuple):
    """How an optimizer step is split into micro-steps."""

    micro_batch: int
    grad_accum: int


def splits_of(
    flags: Flags, given: Set[str], ranks: int, origin: Origin = FROM_SCRATCH
) -> list[Split]:
    """Return the splits of a step that the flags allow, the preferred ones first.

    With --global_batch (given, or the recipe's) these are all that give its bytes, the largest
    micro-batch first; memory decides among them. An interrupted run prefers the split that it
    had."""
    if flags.global_batch is None:
        return [Split(flags.micro_batch, flags.grad_accum)]
    row_bytes = flags.seq_len * ranks  # of a sequence on every rank
    sequences, rest = divmod(flags.global_batch, row_bytes)
    if rest and "global_batch" not in given:  # the recipe's: as many bytes or a few more
        sequences += 1
        rest = 0
    asked = {name: getattr(flags, name) for name in Split._fields if name in given}
    splits = []
    for micro_batch in range(min(sequences, MAX_MICRO_BATCH), 0, -1):
        split = Split(micro_batch, sequences // micro_batch)
        if sequences % micro_batch == 0 and asked.items() <= split._asdict().items():
            splits.append(split)
    if rest or not splits:
        times = "".join(f" times --{name} {value}" for name, value in asked.items())
        raise UsageError(
            f"--global_batch: {flags.global_batch:,} bytes are not a multiple of {row_bytes:,} "
            f"(--seq_len times ranks){times}"
        )
    if origin.resumes:
        before = origin.flags.get("micro_batch")
        splits.sort(key=lambda split: split.micro_batch != before)
    return splits


def with_split(flags: Flags, split: Split, ranks: int) -> Flags:
    """Set the batch: a split of the step, and the bytes that follow from it."""
    step_bytes = split.micro_batch * split.grad_accum * ranks * flags.seq_len
    return replace(flags, **split._asdict(), global_batch=step_bytes)


def with_horizon(flags: Flags, given: Set[str], recipe: str, model: Spider) -> Flags:
    """Resolve --target_tokens, and the flags that the recipe derives from the horizon.

    Raise UsageError for flags that need an evaluation if there is none."""
    config = model.config
    if flags.target_flops:
        cost = estimate.flops_per_byte(
            model, config.bytes_per_segment, flags.n_loops, flags.seq_len
        )
        flags = replace(flags, target_tokens=whole_bytes(flags.target_flops / cost))
    elif flags.target_param_data_ratio:
        parameters = sum(
            model.get_parameter(name).numel()
            for name, kind in kinds_of(model).items()
            if kind.component != ENGRAM_TABLES
        )
        target = whole_bytes(flags.target_param_data_ratio * parameters)
        flags = replace(flags, target_tokens=target)

    derived: dict[str, Any] = {
        name: rule(flags, config)
        for name, rule in RECIPES[recipe].rules.items()
        if name not in given
    }
    flags = replace(flags, **derived)
    if not flags.eval_every:
        for name, used in (("keep_best", flags.keep_best), ("patience", flags.patience)):
            if used:
                raise UsageError(
                    f"--{name} needs the validation loss, but --eval_every 0 disables evaluation"
                )
    return flags


def whole_bytes(number: float) -> int:
    """Return a computed number of bytes as a value that --target_tokens would take."""
    return max(1, math.ceil(min(number, LARGEST)))


def with_machine(flags: Flags, config: SpiderConfig, world: World) -> tuple[Flags, list[str]]:
    """Resolve precision, compilation, optimizer and expert backend; return the reasons to log, too.

    Unlike the stages before it, this one asks the hardware and the other ranks. It also activates
    FlashAttention in torch, for the whole process."""
    device = world.device
    compiles, why_compile = machine.resolve_compile(flags.compile, device)
    precision, why_precision = machine.resolve_precision(flags.precision, device)
    check_fp8_experts(flags.fp8_experts, precision, device, config)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    backend, why_backend = resolve_backend(flags.moe_backend, device, config, dtype, compiles)
    why_attention = ""
    if precision != "fp32" and not flags.deterministic:
        why_attention = choose_flash_attention(
            device, config.n_heads, config.v_head_dim, config.byte_window
        )
    # On unlike GPUs ranks may choose differently: a kernel is kept only where all chose it.
    if flags.moe_backend == "auto" and not any(world.all(backend == name) for name in KERNELS):
        backend = "grouped"
    flags = replace(
        flags,
        precision=precision,
        moe_backend=backend,
        compile=flags.compile if compiles else "off",
        optimizer="muon" if flags.optimizer == "auto" else flags.optimizer,
    )
    reasons = [why_precision, why_compile, why_backend, why_attention]
    return flags, [line for line in reasons if line]


def check_fp8_experts(asked: bool, precision: str, device: torch.device, config: SpiderConfig):
    """Raise UsageError if --fp8_experts is given but not supported."""
    if not asked:
        return
    if not config.has_experts:
        raise UsageError("--fp8_experts: this model has no routed experts")
    if precision != "fp8":
        raise UsageError(f"--fp8_experts needs --precision fp8; the precision is {precision}")
    if device.type == "cuda" and not multiplies_at_once(device, torch.bfloat16):
        raise UsageError(
            "--fp8_experts: torch's grouped FP8 product needs sm_90 or sm_100; leave out the flag "
            "to run the experts in bf16"
        )


def with_memory(plan: Plan, splits: Sequence[Split], world: World) -> Plan:
    """Choose the split and --recompute by the memory that a step is estimated to take.

    Rank 0 chooses, for all."""
    plans = [replace(plan, flags=with_split(plan.flags, split, world.ranks)) for split in splits]

    def estimate_split(i: int, recompute: str) -> dict[str, float]:
        return estimate.estimate_memory(plan.model, plans[i], recompute, world)

    def choose() -> estimate.MemoryChoice:
        available = machine.memory_of(world.device, world.local_ranks)
        return estimate.choose_memory(len(plans), plan.flags.recompute, estimate_split, available)

    i, recompute, memory = world.on_rank0(choose)
    chosen = plans[i]
    return replace(chosen, flags=replace(chosen.flags, recompute=recompute), memory=memory)


def with_minutes(
    plan: Plan, command: CommandLine, sources: Sequence[Source], rate: float
) -> tuple[Plan, CommandLine]:
    """Choose the horizon so that the run takes --minutes at `rate` bytes/s.

    What was chosen counts as given from then on."""
    assert command.flags.minutes is not None
    chosen = fit_into(command.flags.minutes, plan, rate, sources, command.given)
    command = command._replace(given=command.given | chosen.keys())
    flags = replace(plan.flags, **chosen)
    flags = with_horizon(flags, command.given, plan.recipe, plan.model)
    return replace(plan, flags=flags), command


def fit_into(
    minutes: float, plan: Plan, rate: float, sources: Sequence[Source], given: Set[str]
) -> dict[str, Any]:
    """Return target_tokens and eval_tokens for a run of `minutes` at `rate` bytes/s.

    An evaluation costs a third of training per byte, and reads at most the held-out bytes that
    there are. All evaluations get at most a quarter of the time, unless --eval_tokens is given."""
    flags = plan.flags
    total = 60 * minutes * rate
    evaluations: float = EVALUATIONS
    by_rule = "eval_every" not in given and "eval_every" in RECIPES[plan.recipe].rules
    if flags.eval_every and not by_rule:
        evaluations = max(1, total / (flags.eval_every * plan.step_bytes))  # one at the end
    held_out = sum(len(source.val) for source in sources)
    eval_tokens = flags.eval_tokens
    if "eval_tokens" not in given:
        eval_tokens = max(1, min(eval_tokens, held_out, int(0.75 * total / evaluations)))
    target = total
    if flags.eval_every:
        target = total - evaluations * min(eval_tokens, held_out) / 3
    target_tokens = max(plan.step_bytes, int(min(target, LARGEST)))
    return dict(target_tokens=target_tokens, eval_tokens=eval_tokens)


# --------------------------------------------------------------------------------------------------
# The schedule: all that varies by step

HALTING_WARMUP = 1 / 8  # of the horizon, so that every loop learns (docs/results/mechanisms.md)
DROPOUT_EPOCHS = 10  # until dropout reaches --dropout: text is memorized gradually


class StepSettings(NamedTuple):
    """What varies by step."""

    n_loops: int
    lr_factor: float = 1.0  # of the peak learning rate
    dropout: float = 0.0
    halting_warmup: float = 1.0  # factor on halting probabilities
    clears_tables: bool = False  # clear the Engram tables after the step


@dataclass(frozen=True)
class Schedule:
    """The settings of each step, a function of a run's progress."""

    flags: Flags
    loader: Loader
    horizon: int  # steps done plus steps left at the current batch size

    def at(self, progress: RunProgress) -> StepSettings:
        """Return the settings of the next step."""
        step = progress.step
        first = progress.next_sequence(self.flags.seq_len)
        begins_epoch = self.loader.epoch(first) > progress.epoch
        return StepSettings(
            n_loops=loops_of_step(self.flags, step),
            lr_factor=lr_factor(step, self.horizon, self.flags),
            dropout=dropout_at(self.flags, self.loader, first),
            halting_warmup=min(1.0, (step + 1) / (HALTING_WARMUP * self.horizon)),
            clears_tables=begins_epoch and clears_tables(self.flags, self.loader, first),
        )


def lr_factor(step: int, horizon: int, flags: Flags) -> float:
    """Return the learning rate of a step (from 0) as a fraction of the peak: linear warm-up, then
    --schedule."""
    warmup = flags.warmup_steps
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = min(1.0, (step - warmup) / max(1, horizon - warmup))
    match flags.schedule:
        case "cosine":
            shape = 0.5 * (1 + math.cos(math.pi * done))
        case "wsd" if flags.wsd_decay_fraction:
            shape = min(1.0, (1 - done) / flags.wsd_decay_fraction)
        case "wsd":
            shape = 1.0
        case _:
            raise ValueError(f"schedule: {flags.schedule!r} has no rates")
    return flags.min_lr_fraction + (1 - flags.min_lr_fraction) * shape


def clears_tables(flags: Flags, loader: Loader, first: int) -> bool:
    """Decide whether to clear the Engram tables for an epoch that begins at sequence `first`.

    Not if less than half of the epoch will be read: nearly empty tables at the end of a run cost
    more than memorized rows."""
    bytes_left = flags.target_tokens - first * flags.seq_len
    epochs_left = bytes_left * loader.share / loader.targets
    return flags.engram_reset and float(loader.share @ epochs_left) >= 0.5


def dropout_at(flags: Flags, loader: Loader, first: int) -> float:
    """Return the dropout of a step that begins at sequence `first`: 0 in the first epoch, growing
    to --dropout after DROPOUT_EPOCHS. For a mixture it is the mean over its sources."""
    grown = (loader.epochs(first) / DROPOUT_EPOCHS).clip(max=1)
    return flags.dropout * float(loader.share @ grown)


def loops_of_step(flags: Flags, step: int) -> int:
    """Return --n_loops, or with --random_loops a Poisson draw of that mean, at least 1.

    The draw is the same on every rank."""
    if not flags.random_loops:
        return flags.n_loops
    generator = np.random.default_rng(step_seed(flags.seed, step, "loops"))
    return max(1, int(generator.poisson(flags.n_loops)))


# --------------------------------------------------------------------------------------------------
# The model: initialization, FP8, compilation


def build_model(model: Spider, plan: Plan, world: World) -> Spider:
    """Make a model on the meta device ready to train, in place; return it.

    It is initialized from --seed, gets precision, backend and compilation, and is sharded over the
    ranks. Raise TooLarge where a step surely needs more memory than there is."""
    flags = plan.flags
    estimate.check_memory(plan, world)
    torch.manual_seed(flags.seed)
    model.to_empty(device=world.device)
    model.init_weights()
    emulated = flags.precision == "fp8" and not machine.multiplies_bf16(world.device)
    in_fp32 = flags.precision == "fp32" or emulated
    model.compute_dtype = torch.float32 if in_fp32 else torch.bfloat16
    model.recompute = flags.recompute
    model.set_backend(flags.moe_backend)
    if flags.precision == "fp8":
        logger.info(describe_fp8(model, flags.fp8_experts))
        convert_to_fp8(model, world.device, flags.fp8_experts, plan.step_bytes // plan.ranks)
    if flags.compile != "off" and (obstacle := model.compile_layers()):
        logger.warning(f"compiled only the byte layers, not the core's: {obstacle}")
    model.train()
    shard_model(model, world, flags.grad_accum)
    return model


def warm_up(model: Spider, plan: Plan, device: torch.device):
    """Compile kernels by two passes on dummy bytes; weights, random state, buffers and data
    position stay unchanged.

    If torch.compile fails on the layers, run them uncompiled under --compile auto, else raise
    UsageError."""
    flags = plan.flags
    ids = torch.arange(flags.micro_batch * flags.seq_len, device=device) % 251
    ids = ids.view(flags.micro_batch, flags.seq_len)
    try:
        with model.cast_weights_once():
            for noise_seed in range(2):
                model(ids, ids, n_loops=flags.n_loops, noise_seed=noise_seed).loss.backward()
    except Exception as fault:  # whatever Dynamo, Inductor and Triton provoke
        if not model.compiled or machine.is_out_of_memory(fault):
            raise
        line = machine.describe_compile_error(fault, device)
        if flags.compile == "on" or plan.ranks > 1:
            raise UsageError(f"--compile: {line}; or use --compile off") from fault
        logger.warning(f"{line}: the layers run uncompiled")
        model.uncompile_layers()
    model.zero_grad(set_to_none=True)


def optimizers_of(flags: Flags, model: Spider) -> Optimizers:
    """Build the optimizers of a model from the flags."""
    return Optimizers(
        model,
        optimizer=flags.optimizer,
        lr=flags.lr,
        engram_lr=flags.engram_lr,
        weight_decay=flags.weight_decay,
        beta1=flags.beta1,
        beta2=flags.beta2,
        momentum=flags.momentum,
    )


# --------------------------------------------------------------------------------------------------
# One optimizer step


class StepSums(NamedTuple):
    """What the micro-steps of a step add up to, on this rank."""

    terms: dict[str, Tensor]  # loss (nats), total_loss, segments, mean_loops, other loss terms
    tokens_per_expert: Tensor  # [L, E]
    boundary_counts: Tensor  # see Spider.update_boundaries
    n_bytes: int


class StepResult(NamedTuple):
    """The numbers of a step, over all ranks."""

    metrics: dict[str, Any]
    votes: list[float]  # for each signal, the ranks that were asked to stop


def accumulate(
    model: Spider, batches: list[Batch], now: StepSettings, targets: Tensor | None = None
) -> StepSums:
    """Run forward and backward over a step's micro-steps; change nothing but gradients.

    targets: those of all ranks, float64, by default this rank's. Waits for the device once per
    micro-step, for the number of segments."""
    sharding = sharding_of(model)
    passes = len(batches) * sharding.ranks
    all_targets: Tensor | int
    if targets is None:
        all_targets = max(1, sum(batch.targets for batch in batches))
    else:
        all_targets = targets.clamp_min(1)
    sums: dict[str, Tensor] = {}
    # Terms that are means over bytes (by_byte) weigh by the batch's part of the step's targets, so
    # that all bytes weigh equally, however many are PAD. The others (balance, ponder, boundaries,
    # ...) are means over all passes.
    with model.cast_weights_once():
        for batch in batches:
            out: SpiderOutput = model(
                batch.ids,
                batch.labels,
                now.n_loops,
                batch.noise_seed,
                batch.cu_seqlens,
                batch.longest,
                dropout=now.dropout,
                halting_warmup=now.halting_warmup,
            )
            # labels were given
            assert out.loss is not None and out.by_byte is not None
            assert out.nats_per_byte is not None and out.loss_terms is not None
            weight = batch.targets / all_targets
            if isinstance(weight, Tensor):
                weight = weight.to(out.loss.dtype)
            loss = out.by_byte * weight + (out.loss - out.by_byte) / passes
            sharding.backward(model, loss, last=batch is batches[-1])

            terms = dict(
                loss=out.nats_per_byte.detach() * weight,
                total_loss=loss.detach(),
                segments=out.segments,
                mean_loops=out.mean_loops / passes,
                tokens_per_expert=out.tokens_per_expert,
                boundary_counts=out.boundary_counts,
            )
            for name, term in out.loss_terms.items():
                terms[name] = term * weight if name in out.BYTE_TERMS else term / passes
            for name, term in terms.items():
                sums[name] = term + sums.get(name, 0)
    return StepSums(
        tokens_per_expert=sums.pop("tokens_per_expert"),
        boundary_counts=sums.pop("boundary_counts"),
        terms=sums,
        n_bytes=sum(batch.n_bytes for batch in batches),
    )


def targets_of_all(batches: Sequence[Batch], world: World) -> Tensor | None:
    """Sum the targets of a step over ranks, on the device, since the host need not know; None on
    one rank."""
    if world.ranks == 1:
        return None
    targets = sum(batch.targets for batch in batches)
    return world.sum(torch.full((), targets, dtype=torch.float64, device=world.device))


def update(
    model: Spider,
    optimizers: Optimizers,
    sums: StepSums,
    now: StepSettings,
    grad_clip: float = 1.0,
    votes: Sequence[float] = (),
) -> StepResult:
    """Update the weights from accumulated gradients; return the step's numbers.

    Waits for the device once, for all numbers, before it changes a weight. If loss or gradient is
    not finite, no weight changes and `skipped` is true."""
    tokens = sums.tokens_per_expert
    # Numbers that the host knows are filled in on the device: a copy from the host would wait.
    known = torch.stack(
        [tokens.new_full((), number, dtype=torch.float64) for number in (sums.n_bytes, *votes)]
    )
    # One all-reduce for all numbers of the step
    terms = torch.stack(list(sums.terms.values())).double()
    parts = (terms, known, tokens.flatten().double(), sums.boundary_counts.double())
    total_norm, flat = optimizers.sharding.all_reduce_step(optimizers.dense, torch.cat(parts))
    terms, known, tokens_sum, boundary_counts = flat.split([len(part) for part in parts])
    tokens = tokens_sum.float().view_as(tokens)
    balance = tokens.new_ones(1)
    if tokens.numel():
        balance = tokens.amax(1) / tokens.mean(1).clamp_min(1)

    # One wait for the device for those that the host must know
    norms = torch.stack((total_norm, balance.mean()))
    norm, expert_balance, *numbers = torch.cat((norms, terms.float(), known)).tolist()
    named = dict(zip(sums.terms, numbers[: len(terms)], strict=True))
    n_bytes, *votes = numbers[len(terms) :]
    skipped = not (math.isfinite(named["total_loss"]) and math.isfinite(norm))
    if not skipped:
        if 0 < grad_clip < norm:
            nn.utils.clip_grads_with_norm_(optimizers.dense, grad_clip, total_norm)
        optimizers.step()
        model.update_expert_bias(tokens)
        model.update_boundaries(boundary_counts.float(), named["loss"])
        if now.clears_tables:
            optimizers.reset_tables()
    optimizers.zero_grad()

    segments = named.pop("segments")
    metrics = dict(
        loss=named.pop("loss"),
        total_loss=named.pop("total_loss"),
        grad_norm=norm,
        bytes_per_segment=n_bytes / max(1, segments),
        mean_loops=named.pop("mean_loops"),
        expert_balance=expert_balance,
        skipped=skipped,
        **named,
    )
    return StepResult(metrics, votes)


def step_alone(
    model: Spider,
    optimizers: Optimizers,
    batches: list[Batch],
    now: StepSettings,
    grad_clip: float = 1.0,
) -> dict[str, Any]:
    """Run an optimizer step of a model outside of a run; return its metrics."""
    sums = accumulate(model, batches, now)
    return update(model, optimizers, sums, now, grad_clip).metrics


# --------------------------------------------------------------------------------------------------
# Evaluation

SAMPLE_START = 64  # bytes of held-out text, the default prompt of a sample


@torch.no_grad()
def evaluate(
    model: Spider, sets: Mapping[str, tuple[Tensor, Tensor]], rows: int, n_loops: int, world: World
) -> dict[str, float]:
    """Evaluate on validation rows (ids and labels [n, T]) by source, `rows` at a time, distributed
    over ranks.

    Return val_loss, val_bpb and val_bytes_per_segment over all sources. If there are several, add
    the bits per byte of each as val_bpb/NAME. The model's training mode is restored."""
    targets = sum(int((labels != IGNORED).sum()) for _, labels in sets.values())
    logger.info(f"evaluating on {targets:,} bytes")
    was_training = model.training
    model.eval()
    by_source = {}
    for name, (ids, labels) in sets.items():
        batches = zip(ids.split(rows), labels.split(rows), strict=True)
        by_source[name] = score_model(model, batches, n_loops, world)
    model.train(was_training)

    total = Totals.of(by_source.values())
    results = {
        "val_loss": total.loss,
        "val_bpb": total.bits_per_byte,
        "val_bytes_per_segment": total.bytes_per_segment,
    }
    line = (
        f"validation: loss {total.loss:.4f} nats per byte, bpb {total.bits_per_byte:.4f}, "
        f"{total.bytes_per_segment:.2f} bytes per segment"
    )
    if len(by_source) > 1:
        for name, of_source in by_source.items():
            results[f"val_bpb/{name}"] = of_source.bits_per_byte
            line += f", {name} {of_source.bits_per_byte:.4f}"
    logger.info(line)
    return results


def log_sample(
    model: Spider, step: int, flags: Flags, validation: Mapping[str, tuple[Tensor, Tensor]]
):
    """Log 200 generated bytes; the generator's seed is a function of (--seed, step).

    They continue --sample_prompt, else the first bytes of the `validation` rows, else a line break:
    BOS alone is a bad prompt, because a text file is one document and has it only once."""
    prompt = [ord("\n")]
    if flags.sample_prompt:
        prompt = [BOS_ID, *os.fsencode(flags.sample_prompt)]
    elif validation:
        ids, _ = next(iter(validation.values()))
        prompt = ids[0, :SAMPLE_START].tolist()
    generator = torch.Generator(model.embed_tokens.device)
    generator.manual_seed(step_seed(flags.seed, step, "sample"))
    model.eval()
    try:
        generated = model.generate(prompt, 200, generator=generator, n_loops=flags.n_loops)
        text = decode(list(generated))
        logger.info(f"step {step} continues {decode(prompt)!r}: {text!r}")
    except FloatingPointError as fault:
        logger.warning(f"step {step}: no sample: {fault}")
    model.train()


# --------------------------------------------------------------------------------------------------
# The dry run

MIN_SECONDS_TIMED = 2.0  # seconds of steps that a dry run times, at least one step


def time_steps(plan: Plan, world: World, sources: Sequence[Source]) -> float:
    """Measure the bytes/s of optimizer steps as in the middle of the run.

    They train a model of their own."""
    flags = plan.flags
    logger.info(f"timing steps of {plan.step_bytes:,} bytes")
    loader = Loader(sources, flags.seq_len, flags.seed)
    with torch.device("meta"):  # a subclass may hold what cannot be copied from plan.model
        model = plan.model_class(plan.config)
    model = build_model(model, plan, world)
    if flags.compile != "off":
        warm_up(model, plan, world.device)
    optimizers = optimizers_of(flags, model)
    times: list[float] = []
    while len(times) < 2 or sum(times[1:]) < MIN_SECONDS_TIMED:  # the first step is a warm-up
        step = plan.horizon // 2 + len(times)
        start = time.perf_counter()
        first = step * plan.sequences
        batches = [batch.to(world.device) for batch in loader.batches(step, first, plan.layout)]
        now = StepSettings(flags.n_loops, dropout=dropout_at(flags, loader, first))
        optimizers.set_lr(flags.lr, lr_factor(step, plan.horizon, flags))
        step_alone(model, optimizers, batches, now, flags.grad_clip)
        times.append(time.perf_counter() - start)
    return plan.step_bytes / float(np.median(times[1:]))


def print_dry_run(
    plan: Plan, remarks: Sequence[str], sources: Sequence[Source], world: World
) -> int:
    """Print what a run is and costs, the verdict last.

    Return the exit status: 1 if memory or disk do not suffice, else 0."""
    flags = plan.flags
    estimate.print_tables(plan, plan.model)
    if flags.precision == "fp8":
        print(describe_fp8(plan.model, flags.fp8_experts))
    for source in sources:
        say(str(source))
    for line in remarks:
        say(line)
    loader = Loader(sources, flags.seq_len, flags.seed)
    for line in horizon_warnings(plan, loader, plan.horizon):
        say(f"warning: {line}")
    lacking = estimate.print_memory_and_disk(plan, world)

    bound, expected = estimate.rates(plan, machine.product_rate(world.device) * world.ranks)
    steps = flags.max_steps or plan.horizon
    n_bytes = steps * plan.step_bytes
    obstacle = estimate.obstacle_to_timing(plan, world, bound)
    if obstacle is None:
        rate = time_steps(plan, world, sources)
        duration = f"{estimate.describe_duration(n_bytes / rate)} at {rate:,.0f} bytes/s, as timed"
    else:
        duration = (
            f"at least {estimate.describe_duration(n_bytes / bound)}: matrix products alone allow "
            f"{bound:,.0f} bytes/s (no step was timed: {obstacle})"
        )
        if world.device.type == "cuda" and flags.precision != "fp32":
            duration = (
                f"about {estimate.describe_duration(n_bytes / expected)} at an expected "
                f"{expected:,.0f} bytes/s, {duration}"
            )
    say(f"run: {steps:,} steps of {plan.step_bytes:,} bytes, {duration}")
    if lacking:
        say(f"verdict: NOT ENOUGH {'; '.join(lacking)}")
        return 1
    say("verdict: enough memory and disk")
    return 0


# --------------------------------------------------------------------------------------------------
# Resuming

# --minutes chose a horizon, which is compared itself.
COMPARED = [name for name in RECORDED if name != "minutes"]
MIXTURE = {"targets", "shares"}  # of the sources, see Loader.mixture
READS = {name for name, spec in SPECS.items() if spec.reads} | MIXTURE
EVALUATES = {name for name, spec in SPECS.items() if spec.evaluates} | MIXTURE
# No changes by themselves: the same data may have moved, and the same step be split otherwise.
MOVED = {"data_dir", "micro_batch"}


class Start(NamedTuple):
    """Where a run begins, and where it ends."""

    path: Path | None  # the checkpoint that it begins with
    loader: Loader
    progress: RunProgress
    changed: dict[str, str]  # settings that differ from those of the run so far, described
    in_place: bool  # the run resumes in its own directory
    horizon: int  # steps done plus steps left at the current batch size
    last_step: int


def start_of(origin: Origin, plan: Plan, sources: Sequence[Source]) -> Start:
    """Find where a run begins, by its checkpoint, and where it ends."""
    flags = plan.flags
    loader = Loader(sources, flags.seq_len, flags.seed)
    progress = RunProgress()
    changed: dict[str, str] = {}
    in_place = False
    if origin.resumes:
        assert origin.state is not None and origin.path is not None
        known = {one.name for one in fields(RunProgress)}
        saved = {name: value for name, value in origin.state.items() if name in known}
        progress = RunProgress(**saved)
        changed = changes_since(origin.state, plan, loader.mixture)
        in_place = origin.path.parent == Path(flags.ckpt_dir)
    if changed.keys() - MOVED:
        progress.forget_losses(evaluations=bool(EVALUATES & changed.keys()))
        # With more data the position may be in an earlier epoch; tables are cleared when an epoch
        # exceeds this one.
        epoch = loader.epoch(progress.next_sequence(flags.seq_len))
        progress.epoch = min(progress.epoch, epoch)
    progress.n_loops = flags.n_loops
    bytes_left = max(0, flags.target_tokens - progress.bytes_seen)
    horizon = progress.step + math.ceil(bytes_left / plan.step_bytes)
    last_step = flags.max_steps or horizon
    return Start(origin.path, loader, progress, changed, in_place, horizon, last_step)


def has_work(start: Start, flags: Flags) -> bool:
    """Return whether a run has a step to train, or the evaluation of its last step to make up for,
    as after a signal. One without work writes nothing.

    Raise UsageError if a run without work has other settings than its checkpoint, or another
    directory, and Diverged if it had diverged."""
    progress = start.progress
    if progress.step < start.last_step and not progress.out_of_patience(flags.patience):
        return True
    progress.check_divergence(1)
    nothing_left = f"{start.path}: no step is left to train"
    longer = "train longer (--max_steps, --target_tokens, --patience)"
    if not start.in_place:
        raise UsageError(
            f"--resume: {nothing_left}: {longer}, or add --reset_steps to begin a new run from its "
            f"weights"
        )
    changed = [line for name, line in start.changed.items() if name not in MOVED]
    if changed:
        raise UsageError(
            f"{nothing_left}, but settings differ: {'; '.join(changed)}: leave them as they were, "
            f"{longer}, or name a new --ckpt_dir"
        )
    evaluated = progress.metrics is None or "val_loss" in progress.metrics
    return flags.eval_every > 0 and not evaluated and progress.step == start.last_step


def restore(origin: Origin, start: Start, model: Spider, optimizers: Optimizers):
    """Load a checkpoint into model and optimizers, or only its weights.

    Log what is loaded, and the settings that have changed since."""
    state = origin.state
    if state is None:
        return
    what = "resuming from" if origin.resumes else "weights of"
    logger.info(f"{what} {origin.path} (step {state['step']})")
    load_model(model, state["model_state_dict"])
    if not origin.resumes:
        return
    optimizers.load_state_dict(state["optimizer_state_dict"])
    if start.changed:
        changes = "; ".join(start.changed.values())
        logger.warning(f"settings differ from the run so far: {changes}")
    if READS & start.changed.keys():
        logger.warning(
            "they change which text a step reads: until each source begins its next epoch, some of "
            "its text is read again, and some is skipped"
        )
    if start.progress.exploded:
        logger.warning(
            f"{origin.path}: the loss had exploded by then; to go back, name an earlier checkpoint "
            f"by --resume, and a new --ckpt_dir"
        )


def changes_since(state: dict, plan: Plan, mixture: dict[str, Any]) -> dict[str, str]:
    """Compare a plan with the checkpoint that it resumes from: describe each change by name.

    What an older checkpoint lacks counts as unchanged."""
    now = asdict(plan.config) | {name: getattr(plan.flags, name) for name in COMPARED}
    now |= dict(n_loops=plan.flags.n_loops, **mixture)
    before = asdict(SpiderConfig.from_saved(state["cfg"])) | state.get("flags", {})
    before |= {name: state[name] for name in ("n_loops", *mixture) if name in state}
    return {
        name: f"{name} was {before[name]}, is {value}"
        for name, value in now.items()
        if before.get(name, value) != value
    }


# --------------------------------------------------------------------------------------------------
# The run


@dataclass
class Run:
    """A run in progress: what a step reads and changes, and what is due after it."""

    plan: Plan
    model: Spider
    optimizers: Optimizers
    loader: Loader
    feed: Feed
    schedule: Schedule
    progress: RunProgress
    world: World
    stop: StopSignals
    validation: Mapping[str, tuple[Tensor, Tensor]]  # held-out rows by source
    writer: CheckpointWriter
    last_step: int
    metrics_file: Metrics | None = None  # on rank 0
    tracker: Tracker | None = None
    # of flops_per_byte, by its arguments
    costs: dict[tuple[float, int], float] = field(default_factory=dict)

    @property
    def flags(self) -> Flags:
        return self.plan.flags

    def is_done(self) -> bool:
        """Return whether the last step is done."""
        return self.progress.step >= self.last_step

    def is_due(self, every: int) -> bool:
        """Return whether to do now what is done after every so many steps, and after the last one.

        Nothing is due before the first step, or once the run was asked to stop. 0: never."""
        if not every or self.progress.metrics is None or self.stop.agreed:
            return False
        return self.is_done() or self.progress.step % every == 0

    def due_save(self, ends: bool) -> bool:
        """Return whether to save. `ends`: the run ends now. Step 0 is never saved."""
        progress = self.progress
        if progress.step <= max(0, self.writer.saved_step):
            return False
        if ends:
            return True
        regular = progress.step % self.flags.ckpt_every == 0
        best = self.flags.keep_best and progress.is_best
        return (regular or best) and not progress.skipped

    def ends(self) -> bool:
        """Return whether the run ends after this step."""
        if self.is_done() or self.stop.agreed is not None:
            return True
        return self.progress.out_of_patience(self.flags.patience)

    def evaluate_and_sample(self):
        """Evaluate and sample, if it is due.

        A signal interrupts both, but not the record of an evaluation: it would be half made."""
        progress = self.progress
        numbers = self.stop.may_interrupt(self.evaluate_if_due)
        if numbers is not None:
            regular = progress.step % self.flags.eval_every == 0
            progress.record_evaluation(numbers, counts=regular)
            self.writer.mark_unsaved(progress.step)  # a resumed checkpoint lacks the evaluation
        self.stop.may_interrupt(self.sample)

    def evaluate_if_due(self) -> dict[str, float] | None:
        """Evaluate, if it is due; not if the checkpoint has this step's evaluation."""
        due = self.is_due(self.flags.eval_every) and self.progress.val_loss is None
        return self.evaluate() if due else None

    def evaluate(self) -> dict[str, float]:
        """Evaluate the model as it is."""
        rows = max(self.flags.micro_batch, EVAL_BYTES // self.flags.seq_len)
        return evaluate(self.model, self.validation, rows, self.flags.n_loops, self.world)

    def sample(self):
        """Log a sample, if it is due."""
        if not self.is_due(self.flags.sample_every):
            return
        whole = gather_model(self.model)
        if whole is not None:
            log_sample(whole, self.progress.step, self.flags, self.validation)

    def record_metrics(self, first_step: int):
        """Write the step's line of metrics.jsonl; wandb gets those from `first_step` on."""
        metrics = self.progress.metrics
        if metrics and self.metrics_file:
            self.metrics_file.write(metrics)
        if metrics and self.tracker and self.progress.step >= first_step:
            self.tracker.log(metrics, step=self.progress.step)

    def save(self):
        """Save a checkpoint; metrics.jsonl is complete up to it."""
        self.writer.save(self.state(), self.sync_metrics)

    def sync_metrics(self):
        """Sync metrics.jsonl to disk."""
        if self.metrics_file:
            self.metrics_file.sync()

    def state(self) -> dict[str, Any]:
        """Build the state of a checkpoint from tensors and plain values; see checkpoint.py for the
        keys."""
        return dict(
            model_state_dict=model_state(self.model),
            optimizer_state_dict=self.optimizers.state_dict(),
            cfg=asdict(self.model.config),
            recipe=self.plan.recipe,
            **self.loader.mixture,
            flags={name: getattr(self.flags, name) for name in RECORDED},
            **asdict(self.progress),
        )

    def flops_per_byte(self, bytes_per_segment: float, n_loops: int) -> float:
        """Return the FLOPs per byte of a step, for the MFU."""
        length = round(max(1.0, bytes_per_segment), 1)
        key = length, n_loops
        if key not in self.costs:
            self.costs[key] = estimate.flops_per_byte(
                self.model, length, n_loops, self.flags.seq_len
            )
        return self.costs[key]


def train_step(run: Run) -> StepEvents:
    """Run one optimizer step, and record its metrics in `run.progress`.

    Return what the log says of it beside the metrics."""
    start = time.perf_counter()
    plan = run.plan
    flags = plan.flags
    progress = run.progress
    first = progress.next_sequence(flags.seq_len)
    epoch = run.loader.epoch(first)
    now = run.schedule.at(progress)
    run.optimizers.set_lr(flags.lr, now.lr_factor)

    batches = run.feed.take()
    sums = accumulate(run.model, batches, now, targets_of_all(batches, run.world))
    result = update(run.model, run.optimizers, sums, now, flags.grad_clip, run.stop.votes())
    run.stop.agree(result.votes)

    metrics = result.metrics
    rate = plan.step_bytes / (time.perf_counter() - start)
    cost = run.flops_per_byte(metrics["bytes_per_segment"], now.n_loops)
    peak = machine.product_rate(run.world.device) * run.world.ranks
    metrics |= dict(
        lr=flags.lr * now.lr_factor,
        tok_per_sec=rate,
        bf16_mfu=rate * cost / peak,
        memory=machine.peak_memory(run.world.device),
        time=time.time(),
    )
    bytes_seen = (first + plan.sequences) * flags.seq_len
    return progress.record(metrics, bytes_seen, epoch, now.clears_tables)


# --------------------------------------------------------------------------------------------------
# The log: what was chosen, and where the run begins


def describe_plan(plan: Plan, command: CommandLine, world: World) -> list[str]:
    """Return the lines of the log that say what was chosen: by `auto`, by the recipe, by the
    environment."""
    flags = plan.flags
    given = command.given
    parameters = sum(p.numel() for p in plan.model.parameters()) / 1e6
    hardware = f"{torch.get_num_threads()} threads"
    if world.device.type == "cuda":
        hardware = torch.cuda.get_device_name(world.device)
    layout = ""
    if world.ranks > 1:
        layout = f", {world.ranks} ranks: {world.replicas} replicas of {world.shards} shards"
    lines = [
        f"model {plan.recipe}, {parameters:.1f}M parameters, {flags.n_loops} loops; "
        f"{world.device}, {hardware}{layout}",
        f"precision {flags.precision}, compile {flags.compile}, expert backend "
        f"{flags.moe_backend}, optimizer {flags.optimizer}, recompute {flags.recompute}",
        *plan.reasons,
    ]
    if world.device.type == "cpu" and torch.get_num_threads() > 1 and threads.idle_threads_spin():
        lines.append(
            "torch was imported before spider: its idle threads spin, which is slow beside other "
            "programs; import spider first"
        )
    recipe = RECIPES[plan.recipe]
    if "micro_batch" not in given | recipe.values.keys() or "global_batch" in given:
        lines.append(
            f"a step of {plan.step_bytes:,} bytes: --micro_batch {flags.micro_batch} --grad_accum "
            f"{flags.grad_accum}"
        )
    if flags.minutes:
        lines.append(
            f"--minutes {flags.minutes:g} set this run's horizon, {flags.target_tokens:,} bytes, "
            f"when the run was started; to train longer, give --target_tokens instead"
        )
    by_recipe = (recipe.values.keys() | recipe.rules.keys()) - given
    if "lr" in by_recipe:
        width = plan.config.hidden_size
        line = f"--lr {flags.lr:g} follows from {plan.horizon:,} steps and a width of {width:,}"
        if plan.horizon > FITTED_STEPS or width > FITTED_WIDTH:
            line += (
                f", extrapolated from runs of up to {FITTED_STEPS:,} steps and {FITTED_WIDTH:,} "
                f"wide (docs/results/learning.md)"
            )
        lines.append(line)
    elif "lr" in recipe.rules:
        computed = recipe.rules["lr"](flags, plan.config)
        if not computed / FAR < flags.lr < computed * FAR:
            lines.append(f"--lr {flags.lr:g}: without it, the recipe would take {computed:g}")
    if "global_batch" in given:
        by_recipe.discard("micro_batch")
    if "micro_batch" in given:
        by_recipe.discard("global_batch")
    if by_recipe:
        chosen = [pasteable(name, getattr(flags, name)) for name in SPECS if name in by_recipe]
        lines.append(f"recipe of {plan.recipe}: {' '.join(chosen)}")
    if command.inherited:
        inherited = [pasteable(name, value) for name, value in command.inherited.items()]
        lines.append(f"environment or --config: {' '.join(inherited)}")
    return lines


def pasteable(name: str, value: object) -> str:
    """Format a flag as on the command line."""
    if value is True:
        return f"--{name}"
    text = str(value)
    separator = "=" if value is False or text.startswith("-") else " "
    return f"--{name}{separator}{shlex.quote(text)}"


FAR = 4  # a given learning rate from the recipe's, for a line of the log
MAX_EPOCHS = 20  # of a horizon without a warning
MIN_STEPS = 250  # of a horizon without a warning; a run loses 3 to 6 nats, divided by its steps
MUCH_HIGHER = 1.5  # a learning rate, relative to the last one


def horizon_warnings(plan: Plan, loader: Loader, horizon: int) -> list[str]:
    """Return warnings for a horizon in steps that does not suit the data or --max_steps."""
    flags = plan.flags
    warnings = []
    epochs = (flags.target_tokens * loader.share / loader.targets).max()
    if epochs > MAX_EPOCHS and not flags.mock_data:
        warnings.append(
            f"--target_tokens {flags.target_tokens:,} is {epochs:,.0f} epochs, in which the model "
            f"memorizes the data: use at most {int(flags.target_tokens * MAX_EPOCHS / epochs):,}, "
            f"or more data"
        )
    smallest = plan.ranks * flags.seq_len  # bytes of a step
    if horizon < MIN_STEPS and plan.step_bytes > smallest and not flags.mock_data:
        better = max(1, flags.target_tokens // (4 * MIN_STEPS * smallest)) * smallest
        warnings.append(
            f"the horizon is only {horizon:,} steps: fewer bytes a step (--global_batch {better}, "
            f"without --micro_batch and --grad_accum) give a lower loss, more slowly on a GPU"
        )
    last = min(horizon, flags.max_steps or horizon)
    ends_in_warmup = flags.warmup_steps >= last and not flags.mock_data
    if ends_in_warmup:
        factor = lr_factor(last - 1, horizon, flags)
        warnings.append(
            f"the warm-up is not over at step {last:,}, where the learning rate is {factor:.0%} of "
            f"the peak: lower --warmup_steps from {flags.warmup_steps:,} to {last // 5:,}"
        )
    if flags.max_steps > horizon:
        least = flags.lr * flags.min_lr_fraction
        warnings.append(
            f"--max_steps {flags.max_steps:,} is beyond the horizon of {horizon:,} steps: the "
            f"steps after it run at the minimum learning rate, {least:.2e}; raise --target_tokens "
            f"for a schedule over all of them"
        )
    elif last < horizon and not flags.mock_data and not ends_in_warmup:
        factor = lr_factor(flags.max_steps - 1, horizon, flags)
        if factor > 2 * flags.min_lr_fraction:
            warnings.append(
                f"--max_steps {flags.max_steps:,} ends the run at {factor:.0%} of the peak "
                f"learning rate, which decays over {horizon:,} steps: use --target_tokens "
                f"{flags.max_steps * plan.step_bytes} for a better loss"
            )
    return warnings


def rise_warnings(plan: Plan, progress: RunProgress, horizon: int) -> list[str]:
    """Return a warning if a run resumes at a much higher learning rate than it had.

    So it is if its horizon is raised after the rate has fallen. The warm-up is no such rise: the
    last step's rate is compared with what it would be by the present schedule."""
    flags = plan.flags
    before = (progress.metrics or {}).get("lr")
    now = flags.lr * lr_factor(max(0, progress.step - 1), horizon, flags)
    if not before or now < MUCH_HIGHER * before:
        return []
    return [
        f"the learning rate rises from {before:.2e} to {now:.2e}: the loss rises at first, and "
        f"falls below that of the run so far only towards step {horizon:,}; in a new --ckpt_dir, "
        f"by --resume, the checkpoints so far would be kept"
    ]


def describe_start(run: Run):
    """Log where a run begins and what a step costs, and warn of a horizon that does not suit."""
    plan = run.plan
    flags = plan.flags
    progress = run.progress
    length = plan.config.bytes_per_segment
    cost = estimate.flops_per_byte(run.model, length, flags.n_loops, flags.seq_len)
    logger.info(
        f"step {progress.step:,} of {run.last_step:,}, each of {plan.step_bytes:,} bytes; "
        f"{cost / 1e9:.2g} GFLOP per byte at {length:.2g} bytes per segment; checkpoints in "
        f"{flags.ckpt_dir}"
    )
    horizon = run.schedule.horizon
    warnings = horizon_warnings(plan, run.loader, horizon)
    for line in (*warnings, *rise_warnings(plan, progress, horizon)):
        logger.warning(line)


# --------------------------------------------------------------------------------------------------
# The log: steps, and the end

LOG_LINES = 100  # without --log_every: about so many lines of steps in a run
LOG_SECONDS = 60.0  # ... and at least one every so often


class Column(NamedTuple):
    """A column of a step's line in the log."""

    cell: str  # a format of the step's metrics
    meaning: str


def columns_of(plan: Plan, device: torch.device) -> list[Column]:
    """Return the columns that suit a model and a device."""
    config = plan.config
    columns = [
        Column("loss {loss:.4f}", "loss (cross-entropy in nats per byte)"),
        Column("bpb {bpb:.4f}", "bpb (the same in bits per byte)"),
        Column("lr {lr:.2e}", "lr (learning rate)"),
        Column("norm {grad_norm:.3f}", "norm (of the gradient, before clipping)"),
        Column("{tok_per_sec:,.0f} bytes/s", "bytes/s (of this step)"),
    ]
    if device.type == "cuda":
        meaning = "MFU (model FLOPs relative to the measured bf16 peak)"
        columns.append(Column("MFU {bf16_mfu:.1%}", meaning))
    if config.n_recurrent_layers:
        meaning = "bytes/segment (mean length)"
        columns.append(Column("{bytes_per_segment:.2f} bytes/segment", meaning))
        if plan.flags.random_loops or (plan.flags.n_loops > 1 and config.act):
            meaning = "loops (until a segment halts, mean)"
            columns.append(Column("{mean_loops:.2f} loops", meaning))
    if config.has_experts:
        meaning = "balance (load of the busiest expert, 1 is even)"
        columns.append(Column("balance {expert_balance:.2f}", meaning))
    columns.append(Column("{memory:.2f} GB", "GB (peak memory so far)"))
    columns.append(Column("ETA {eta}", "ETA (time left)"))
    return columns


class StepLog:
    """Log steps: a line every --log_every steps, or about LOG_LINES of them, and what is
    unusual."""

    def __init__(self, plan: Plan, device: torch.device, progress: RunProgress, last_step: int):
        self.plan = plan
        self.progress = progress
        self.columns = columns_of(plan, device)
        self.first_step = progress.step + 1
        self.last_step = last_step
        self.every = plan.flags.log_every or math.ceil(last_step / LOG_LINES)
        self.began = time.perf_counter()
        self.logged = self.began  # time of the last line
        meanings = ", ".join(column.meaning for column in self.columns)
        logger.info(f"columns of a step: {meanings}")

    def log(self, events: StepEvents):
        """Log the last step, if a line is due, and its events."""
        step = self.progress.step
        now = time.perf_counter()
        overdue = self.plan.flags.log_every is None and now - self.logged > LOG_SECONDS
        at_an_end = step in (self.first_step, self.last_step)
        if overdue or at_an_end or step % self.every == 0:
            self.logged = now
            pace = (now - self.began) / (step - self.first_step + 1)  # evaluations and all
            logger.info(self.line((self.last_step - step) * pace))
        if events.begins_epoch:
            logger.info(epoch_line(self.progress, events.cleared))
        if self.progress.skipped or events.spike:
            logger.warning(odd_step_line(self.progress, self.plan))

    def line(self, seconds_left: float) -> str:
        """Format the last step's metrics."""
        metrics = self.progress.metrics
        assert metrics is not None
        values = metrics | dict(
            bpb=metrics["loss"] / math.log(2), eta=estimate.describe_duration(seconds_left)
        )
        cells = [column.cell.format(**values) for column in self.columns]
        return " | ".join((f"step {metrics['step']}/{self.last_step}", *cells))

    def seconds(self) -> float:
        """Return the duration of the run so far."""
        return time.perf_counter() - self.began


def epoch_line(progress: RunProgress, cleared: bool) -> str:
    """Describe the beginning of an epoch, and what it changes."""
    line = f"step {progress.step} begins epoch {progress.epoch} (counted from 0)"
    if cleared:
        line += (
            ": the Engram tables are empty again (--engram_reset), so the next losses are higher"
        )
    return line


def odd_step_line(progress: RunProgress, plan: Plan) -> str:
    """Describe a skipped step or a loss spike, with the command that prints its batch."""
    flags = plan.flags
    what = "skipped: loss or gradient is not finite" if progress.skipped else "is a spike"
    where = "--mock_data" if flags.mock_data else quoted(flags.data_dir)
    first = progress.next_sequence(flags.seq_len) - plan.sequences
    return (
        f"step {progress.step} {what}; its batch: python data.py show {where} --seq_len "
        f"{flags.seq_len} --seed {flags.seed} --first {first} --count {plan.sequences}"
    )


def describe_end(plan: Plan, start: Start, how: str):
    """Log what a run that has ended by itself gave, and what a user can do next.

    how: it ended, the last words of the line."""
    progress = start.progress
    best = progress.best_loss
    found = f"best validation loss {best:.4f}, " if math.isfinite(best) else ""
    last = (progress.metrics or {}).get("val_loss")
    if last is not None and last > best:
        found = f"validation loss {last:.4f} (the best was {best:.4f}; --keep_best keeps it), "
    logger.info(f"done: step {progress.step}, {progress.bytes_seen:,} bytes, {found}{how}")
    if plan.model_class is Spider:  # sample.py loads no other
        logger.info(f"next: python sample.py {quoted(plan.flags.ckpt_dir)}")
    logger.info(outlook(plan.flags, start))


def outlook(flags: Flags, start: Start) -> str:
    """Return how to train longer after a run that has ended by itself."""
    progress = start.progress
    if progress.out_of_patience(flags.patience):
        return (
            f"ended by --patience {flags.patience}: the last {progress.unimproved} evaluations did "
            f"not lower the validation loss; to continue, raise it, or set it to 0"
        )
    if progress.step < start.horizon:
        return "to continue, raise --max_steps"
    ends_it = [
        f"--{name}"
        for name in ("minutes", "target_flops", "target_param_data_ratio", "max_steps")
        if getattr(flags, name)
    ]
    same = "the same flags"
    if ends_it:
        same += f" without {' and '.join(ends_it)}"
    return (
        f"to train longer: {same}, but --resume {quoted(flags.ckpt_dir)}, a new --ckpt_dir and a "
        f"larger --target_tokens; the rate rises again, and with it the loss at first"
    )


# --------------------------------------------------------------------------------------------------
# main


class Opened(NamedTuple):
    """What a run begins with."""

    plan: Plan
    remarks: list[str]  # of the plan, for the log
    sources: list[Source]
    origin: Origin


def configure_torch(device: torch.device, deterministic: bool):
    """Set what torch has one of in a process. Call it before the first work on the device."""
    if device.type == "cpu":
        machine.keep_freed_memory()
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # Filling new memory takes time, and helps only code that reads it before it writes there.
        settings = torch.utils.deterministic
        settings.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def open_run(
    command: CommandLine, world: World, closing: ExitStack, model_class: type[Spider] = Spider
) -> Opened:
    """Configure this process, join the other ranks, find data and checkpoint, and settle the
    plan."""
    flags = command.flags
    machine.start_log("INFO" if world.is_rank0 else "ERROR")
    device = machine.resolve_device(flags.device)
    configure_torch(device, flags.deterministic)
    world.join(device, flags.shards, flags.rank_timeout)
    sources = [mock_source(flags.seed)] if flags.mock_data else open_data(flags.data_dir)
    directory = Path(flags.ckpt_dir)

    def open_directory() -> Origin:
        if not flags.dry_run:
            directory.mkdir(parents=True, exist_ok=True)
            closing.enter_context(common.locked(directory))
        return load_origin(directory, flags.resume, flags.reset_steps)

    origin = world.on_rank0(open_directory)
    plan = settle(command, world, origin, model_class, sources)
    if flags.minutes and not origin.resumes:
        if world.ranks > 1:
            raise UsageError("--minutes times steps on one process: use --target_tokens")
        rate = time_steps(plan, world, sources)
        plan, command = with_minutes(plan, command, sources, rate)
    return Opened(plan, describe_plan(plan, command, world), sources, origin)


def start_run(
    opened: Opened, start: Start, world: World, stop: StopSignals, closing: ExitStack
) -> Run:
    """Build model and optimizers, and restore the checkpoint."""
    plan = opened.plan
    flags = plan.flags
    loader = start.loader
    progress = start.progress
    validation = {}
    if flags.eval_every:
        validation = validation_sets(opened.sources, flags.seq_len, flags.eval_tokens)
    model = build_model(plan.model, plan, world)
    optimizers = optimizers_of(flags, model)
    restore(opened.origin, start, model, optimizers)
    writer = open_writer(flags, progress, world, start.in_place)
    first = progress.next_sequence(flags.seq_len)
    run = Run(
        plan=plan,
        model=model,
        optimizers=optimizers,
        loader=loader,
        feed=Feed(loader, plan.layout, world.rank, world.device, progress.step, first),
        schedule=Schedule(flags, loader, start.horizon),
        progress=progress,
        world=world,
        stop=stop,
        validation=validation,
        writer=writer,
        last_step=start.last_step,
    )
    if world.is_rank0:
        settings = asdict(flags)
        run.tracker = start_wandb(flags.run, settings, progress, closing, start.in_place)
    describe_start(run)
    # A checkpoint has the rate of the last step, also where only its evaluation is left.
    optimizers.set_lr(flags.lr, lr_factor(max(0, progress.step - 1), start.horizon, flags))
    return run


def open_writer(
    flags: Flags, progress: RunProgress, world: World, in_place: bool
) -> CheckpointWriter:
    """Return a writer that knows the checkpoints in --ckpt_dir.

    in_place: the run resumes in its own directory, so that its present step is saved there."""
    directory = Path(flags.ckpt_dir)
    saved = []
    if world.is_rank0:
        # Not later ones: load_origin found them damaged, but find_checkpoints reads no checksums.
        saved = [one for one in find_checkpoints(directory) if one.step <= progress.step]
    return CheckpointWriter(
        directory,
        saved,
        flags.keep_last,
        flags.keep_best,
        world,
        saved_step=progress.step if in_place else -1,
    )


def open_metrics(run: Run, closing: ExitStack):
    """Open metrics.jsonl, and have the curves drawn at the end."""
    progress = run.progress
    stop = run.stop
    directory = Path(run.flags.ckpt_dir)
    first_line = progress.step if progress.metrics else progress.step + 1
    run.metrics_file = closing.enter_context(Metrics(directory / "metrics.jsonl", first_line))
    closing.callback(lambda: write_curves(directory, stop.agreed or stop.asked))


def main(
    command: CommandLine,
    world: World,
    stop: StopSignals,
    closing: ExitStack,
    model_class: type[Spider] = Spider,
) -> int:
    """Train, from the flags to the last checkpoint, and return the exit status.

    `closing` closes all resources."""
    # ----------------------------------------------------------------------------------------------
    # What was chosen
    opened = open_run(command, world, closing, model_class)
    plan = opened.plan
    if plan.flags.dry_run:
        if not world.is_rank0:
            return 0
        return print_dry_run(plan, opened.remarks, opened.sources, world)
    start = start_of(opened.origin, plan, opened.sources)
    if not world.on_rank0(lambda: has_work(start, plan.flags)):
        describe_end(plan, start, "nothing left to train")
        return 0
    for line in (*opened.remarks, *map(str, opened.sources)):
        logger.info(line)
    logger.info(estimate.describe_memory(plan.memory, world))

    # ----------------------------------------------------------------------------------------------
    # Model and optimizers, restored from the checkpoint
    run = start_run(opened, start, world, stop, closing)
    has_others_weights = opened.origin.path is not None and not opened.origin.resumes
    del opened  # frees the checkpoint's state, which is in the model now, before passes take memory
    if plan.flags.precision == "fp8" or plan.flags.compile != "off":
        warm_up(run.model, plan, world.device)
    progress = run.progress
    if has_others_weights and run.validation:
        logger.info("before the first step:")
        run.evaluate()  # for the log alone: step 0 is never saved, so it is no best loss
    log = StepLog(plan, world.device, progress, run.last_step)
    profiler = None
    if plan.flags.profile and world.is_rank0:
        profiler = start_profiler(Path(plan.flags.ckpt_dir), closing)
    if world.is_rank0:  # not before: a signal up to here leaves the file as it is
        open_metrics(run, closing)
    closing.callback(run.writer.thread.shutdown)  # before the file is closed, which it syncs
    stop.begin_steps()

    # ----------------------------------------------------------------------------------------------
    # The loop: what is due after a step, then the next one
    while True:
        # Once in a while: evaluate and sample
        run.evaluate_and_sample()
        run.record_metrics(log.first_step)

        # Once in a while: save
        ends = run.ends()  # asked once: a signal may arrive at any time
        if run.due_save(ends):
            run.save()
        progress.check_divergence(plan.flags.max_skipped)
        if ends:
            break

        # ------------------------------------------------------------------------------------------
        events = train_step(run)
        # ------------------------------------------------------------------------------------------

        # Once in a while: a line of the log
        log.log(events)
        if profiler:
            profiler.step()

    # ----------------------------------------------------------------------------------------------
    # The end
    directory = plan.flags.ckpt_dir
    if progress.step == 0:  # a signal arrived in the loop, but before the first step
        raise Stopped("stopped before the first step")
    if not run.writer.holds(progress.step):
        raise CheckpointError(
            f"--ckpt_dir: step {progress.step} could not be saved in {directory}: make room; the "
            f"same command resumes from the older checkpoints that are there"
        )
    if stop.agreed:
        raise Stopped(
            f"stopped after step {progress.step}, which is saved in {directory}; the same command "
            f"resumes"
        )
    progress.check_divergence(1)
    describe_end(plan, start, f"{log.seconds():.0f} s")
    return 0


# --------------------------------------------------------------------------------------------------
# The command line

# Errors that all ranks of a host have, and its first one prints
SHARED_ERRORS = UsageError, CheckpointError, Diverged


def command_line(argv: list[str] | None = None, model_class: type[Spider] = Spider) -> int:
    """Run train.py with these arguments, for Spider or a subclass (docs/guide/trying-an-idea.md).

    Exit status: 0; 2 with one line on stderr for a bad flag, environment, file or machine; 1 for
    divergence, or a dry run without enough memory or disk; 128 plus the signal's number if a signal
    stopped the run."""
    try:
        world = World()
    except WorldError as fault:
        common.print_error("train.py", f"error: {fault}")
        return 2
    with StopSignals(world.ranks, world.by_torchrun) as stop:

        def work() -> int:
            return train(parse_args(argv), world, stop, model_class)

        try:
            silent = SHARED_ERRORS if world.local_rank else ()
            return common.run_program(work, "train.py", silent=silent)
        except Stopped as where:
            number = stop.agreed or stop.asked
            assert number is not None  # a signal raised Stopped
            if stop.agreed:  # by all ranks; before the first step others may be in a collective
                world.leave()
            if world.is_rank0:
                common.print_error("train.py", f"{number.name}: {where}")
            return 128 + number


def train(command: CommandLine, world: World, stop: StopSignals, model_class: type[Spider]) -> int:
    """Run main, close its resources, and leave the other ranks."""
    advice = "give half of --micro_batch and twice --grad_accum, or lower --seq_len"
    try:
        with machine.memory_advice(advice), ExitStack() as closing:
            status = main(command, world, stop, closing, model_class)
    except Diverged:  # on all ranks, after the same step
        world.leave()
        raise
    world.leave()
    return status


if __name__ == "__main__":
    sys.exit(record(command_line)())
