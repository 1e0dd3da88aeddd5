"""Train Spider, a byte-level Recurrent-Depth Transformer, from memory-mapped byte shards.

    python train.py --mock_data --max_steps 20 --seq_len 128 --micro_batch 2      # smoke run
    python train.py --text input.txt                           # `1b` on a GPU, `tiny` on a CPU
    torchrun --standalone --nproc_per_node 8 train.py --data_dir data --shards 8  # several GPUs

The same command resumes from the newest checkpoint in --ckpt_dir. All randomness is a function of
(--seed, step, position), so an interrupted run gives the same result as an uninterrupted run.
--model selects a recipe, which sets the defaults of other flags (RECIPES in train.py); --dry_run
shows them.
"""

# From top to bottom: flags -> recipes -> schedule -> model and optimizers -> one optimizer step ->
# evaluation -> main: set up, loop, end -> command line. (The docstring above is part of --help.)

from spider.threads import start_script

if __name__ == "__main__":
    start_script("train.py")  # before torch is imported

import argparse
import gc
import math
import os
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from loguru import logger
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record

from data import (
    Batch,
    Loader,
    Prefetcher,
    Source,
    StepLayout,
    mock_source,
    open_data,
    validation_sets,
)
from spider import errors, files, machine
from spider.config import BACKENDS, OPTIMIZERS, PRESETS, RANGES, RECOMPUTE, SEQ_LEN, SpiderConfig
from spider.data.prepare import Documents, prepare
from spider.errors import CheckpointError, Diverged, Stopped, UsageError
from spider.flags import (
    Parser,
    add_flags,
    flag,
    integer,
    parse_words,
    path_name,
    read_toml,
    real,
    words_of,
)
from spider.model.noise import step_seed
from spider.training import estimate, fp8, resolve
from spider.training.checkpoint import (
    FROM_SCRATCH,
    CheckpointWriter,
    StartCheckpoint,
    check_finished,
    load_start,
    progress_of,
    restore,
)
from spider.training.curves import REDRAW_SECONDS, write_curves
from spider.training.distributed import Sharded, World, shard_model, sharding_of
from spider.training.log import StepLog, describe_recipe, describe_run, log_end
from spider.training.optim import Optimizers
from spider.training.plan import CommandLine, Plan, Recipe, Rule
from spider.training.run import Metrics, RunProgress, StopSignals, start_profiler, start_wandb
from spider.training.scoring import EVAL_BYTES, Totals, score_model
from spider.training.state import gather_model, materialize, model_state, on_meta
from spider.vocabulary import BOS_ID
from spider_model import Spider
from tokenizer import decode

# --------------------------------------------------------------------------------------------------
# Flags

# Arguments of `flag`: the parser of a value, and the value's name in --help
N = integer(1), "N"
BYTES = integer(1), "BYTES"
STEPS = integer(0), "STEPS"
SOME_STEPS = integer(1), "STEPS"
POSITIVE = real(0, above=True)
RATE = real(0, 1000), "RATE"
FRACTION = real(0, 1), "FRACTION"
BETA = real(0, 0.99999), "BETA"
DIRECTORY = path_name, "DIR"


def on_or_off(text: str) -> str:
    """Parse a value of --compile. TOML files and sweeps write True and False."""
    return {"true": "on", "false": "off"}.get(text.lower(), text)


@dataclass(frozen=True)
class Flags:
    """The flags of train.py. RECIPES overrides some of these defaults for each --model.

    Command line, environment and --config file set these fields. In a Plan, every field holds its
    resolved value."""

    model: str = flag(
        "auto",
        "auto: the checkpoint's model, else 1b on a GPU with bf16 and 20 GB, else tiny",
        heading="basics",
        choices=("auto", *PRESETS),
    )
    data_dir: str = flag(
        "data", "directory of .bin shards, or a mixture web:0.7,code:0.3", *DIRECTORY
    )
    text: str | None = flag(
        None,
        "train on a text instead of --data_dir: a file, a folder, OWNER/NAME of the Hugging Face "
        "hub, or pydoc; the first run prepares shards in data/NAME",
        path_name,
        "PATH",
    )
    mock_data: bool = flag(False, "train on synthetic, learnable bytes instead of --data_dir")
    ckpt_dir: str = flag(
        "checkpoints",
        "directory for checkpoints and metrics.jsonl; --mock_data adds mock/, --text adds NAME",
        *DIRECTORY,
    )
    target_tokens: int = flag(
        10_000_000_000, "bytes to train on (the horizon); a byte is a token", *BYTES
    )
    minutes: float | None = flag(
        None,
        "choose --target_tokens for a run of about this many minutes, by timing a few steps; for "
        "one process only",
        real(0, 1e9, above=True),
        "N",
    )
    max_steps: int = flag(
        0, "stop after this many optimizer steps; 0: run to --target_tokens", *STEPS
    )
    resume: str | None = flag(
        None,
        "checkpoint to start from, or a run's directory (its newest checkpoint); ignored if "
        "--ckpt_dir already holds a run: that run resumes instead",
        path_name,
        "CHECKPOINT",
    )
    reset_steps: bool = flag(False, "with --resume: load only the weights, and start at step 0")
    dry_run: bool = flag(
        False,
        "print settings, memory, disk and time of the run, then exit (still prepares --text)",
    )
    config: str | None = flag(
        None,
        "TOML file of flags; command line and environment override it",
        path_name,
        "FILE",
    )

    set: str | None = flag(
        None,
        "fields of SpiderConfig to change: lora_rank=0,engram_match_contexts=3+word1",
        metavar="NAME=VALUE,...",
        heading="model",
    )
    n_loops: int = flag(6, "loops of the recurrent core", integer(*RANGES["n_loops"]), "N")
    random_loops: bool = flag(
        False, "draw each step's number of loops: Poisson with mean --n_loops"
    )

    seq_len: int = flag(2048, "bytes per sequence", integer(*SEQ_LEN), "BYTES", heading="batch")
    micro_batch: int = flag(
        64,
        "sequences per device and micro-step; if only --global_batch is given: the largest "
        "micro-batch that fits",
        *N,
    )
    grad_accum: int = flag(1, "micro-steps per optimizer step", *N)
    global_batch: int | None = flag(
        None, "bytes per optimizer step on all ranks together, instead of --grad_accum", *BYTES
    )
    seed: int = flag(0, "seed of weights, data order, noise and loop counts", integer(0), "N")

    target_flops: float | None = flag(
        None, "training FLOPs, instead of --target_tokens", POSITIVE, "FLOPS", heading="horizon"
    )
    target_param_data_ratio: float | None = flag(
        None,
        "training bytes per parameter (without Engram tables), instead of --target_tokens",
        POSITIVE,
        "RATIO",
    )

    optimizer: str = flag(
        "auto",
        "auto: Muon for matrices, AdamW for other parameters",
        heading="optimizer",
        choices=("auto", *OPTIMIZERS),
    )
    lr: float = flag(
        3e-4,
        "peak learning rate (Muon's updates are scaled to AdamW's size); all recipes except "
        "original compute it from horizon and width, and halve it for AdamW",
        real(0, 1000, above=True),
        "RATE",
    )
    engram_lr: float = flag(
        0.25,
        "learning rate of the Engram tables (Adagrad): size of a table row's first update",
        *RATE,
    )
    engram_reset: bool = flag(
        False,
        "clear the Engram tables at the start of every epoch after the first, because they "
        "memorize the text",
    )
    schedule: str = flag(
        "cosine",
        "decay of the learning rate: cosine, or constant and then linear (wsd)",
        choices=("cosine", "wsd"),
    )
    warmup_steps: int = flag(
        10, "steps of linear warm-up; all recipes except original compute them", *STEPS
    )
    wsd_decay_fraction: float = flag(
        0.2,
        "with wsd: fraction of the run, at its end, in which the learning rate decays",
        *FRACTION,
    )
    min_lr_fraction: float = flag(
        0.1, "learning rate at the horizon, as a fraction of the peak", *FRACTION
    )
    weight_decay: float = flag(
        0.1, "weight decay of matrices; none for vectors and hashed Engram tables", *RATE
    )
    dropout: float = flag(
        0.0,
        "dropout at the core's input and output, and a fifth of it on the bytes before and after "
        "the core; it grows from 0 in epoch 1 to RATE in epoch 11",
        real(0, 0.9),
        "RATE",
    )
    beta1: float = flag(0.9, "beta1 of AdamW", *BETA)
    beta2: float = flag(0.95, "beta2 of AdamW", *BETA)
    momentum: float = flag(0.9, "momentum of Muon", *BETA)
    grad_clip: float = flag(
        1.0, "largest gradient norm, hashed Engram tables not counted; 0: off", real(0), "NORM"
    )
    max_skipped: int = flag(
        10, "stop after this many consecutive steps with a non-finite loss or gradient", *SOME_STEPS
    )

    device: str = flag(
        "auto", "auto: cuda if available", heading="machine", choices=("auto", "cpu", "cuda")
    )
    precision: str = flag(
        "auto",
        "auto: bf16 if supported; fp32 (without TF32) is for comparisons, and slow on a GPU",
        choices=("auto", "fp8", "bf16", "fp32"),
    )
    fp8_experts: bool = flag(
        False, "with fp8: convert the routed experts too, with row-wise scales"
    )
    moe_backend: str = flag(
        "auto",
        "kernels of the experts; auto: triton if torch has no grouped kernel for this GPU, else "
        "tile if it works and layers are not compiled, else grouped; loop: the reference",
        choices=("auto", *BACKENDS),
    )
    compile: str = flag(
        "auto",
        "torch.compile the layers; auto: on a GPU, if it works",
        on_or_off,
        nargs="?",
        const="on",
        choices=("auto", "on", "off"),
    )
    recompute: str = flag(
        "auto",
        "layers with activation checkpointing; auto: the fewest with which a step fits in memory",
        choices=("auto", *RECOMPUTE),
    )
    shards: int = flag(
        1,
        "ranks that share one copy of weights, gradients and optimizer state (an FSDP group); if "
        "the run has more ranks, each group holds a replica",
        integer(1),
        "RANKS",
    )
    rank_timeout: float = flag(
        900.0, "how long ranks wait for each other, in seconds", real(0, 1e6, above=True), "SECONDS"
    )
    deterministic: bool = flag(False, "on a GPU: use deterministic kernels; some are slower")

    ckpt_every: int = flag(50, "steps between checkpoints", *SOME_STEPS, heading="checkpoints")
    keep_last: int = flag(2, "newest checkpoints to keep", integer(2), "N")
    keep_best: bool = flag(
        False,
        "save at every new lowest validation loss, and keep that checkpoint too; sample.py DIR "
        "--best loads it",
    )

    eval_every: int = flag(
        250,
        "steps between evaluations; the last step is always evaluated; 0: no evaluation",
        *STEPS,
        heading="evaluation",
    )
    eval_tokens: int = flag(1_048_576, "held-out bytes per evaluation", *BYTES)
    patience: int = flag(
        0,
        "end the run after this many consecutive evaluations without a lower loss; 0: never",
        integer(0),
        "N",
    )
    sample_every: int = flag(0, "steps between logged samples; 0: none", *STEPS)
    sample_prompt: str | None = flag(
        None, "prompt of the samples; default: held-out text if the run evaluates", metavar="TEXT"
    )

    log_every: int | None = flag(
        None,
        "steps between lines of the log; default: a line per hundredth of the run, but at most one "
        "every ten seconds and at least one every ten minutes",
        *SOME_STEPS,
        heading="logs",
    )
    run: str | None = flag(
        None, "log to wandb under this name (WANDB_MODE=offline works)", metavar="NAME"
    )
    profile: bool = flag(False, "write a profiler trace of steps 3 to 5 to --ckpt_dir")

    def recorded(self) -> dict[str, Any]:
        """Return the flags that a checkpoint records; a resumed run reports changes of them."""
        return {name: value for name, value in asdict(self).items() if name not in UNRECORDED}


# Flags that a checkpoint does not record: training does not depend on them, or the checkpoint has
# an entry of its own for them
UNRECORDED = """
    model text ckpt_dir max_steps resume reset_steps dry_run config set n_loops grad_accum
    target_flops target_param_data_ratio max_skipped device precision fp8_experts moe_backend
    compile recompute shards rank_timeout deterministic ckpt_every keep_last keep_best eval_every
    patience sample_every sample_prompt log_every run profile
""".split()

# Flags that an environment variable also sets; its name is the flag's in capitals
ENVIRONMENT = "data_dir target_tokens n_loops seq_len micro_batch grad_accum lr ckpt_every".split()

# Mutually exclusive flags: a flag set in one source (say, the command line) drops the others from
# sources of lower precedence (say, the --config file).
HORIZONS = ("target_tokens", "minutes", "target_flops", "target_param_data_ratio")
ALTERNATIVES = (HORIZONS, ("grad_accum", "global_batch"), ("data_dir", "mock_data", "text"))


def flag_parser(prog: str = "train.py", description: str | None = __doc__) -> Parser:
    """Make the parser of Flags. Its result holds only the flags that are given."""
    parser = Parser(prog=prog, description=description, argument_default=argparse.SUPPRESS)
    add_flags(parser, Flags)
    add = parser.add_argument_group("aliases").add_argument
    add(
        "--no-engram_reset",
        dest="engram_reset",
        action="store_false",
        help="same as --engram_reset=False",
    )
    add(
        "--no_gradient_checkpointing",
        dest="recompute",
        action="store_const",
        const="nothing",
        help="same as --recompute nothing",
    )
    return parser


def parse_args(
    argv: list[str] | None = None, environ: Mapping[str, str] = os.environ
) -> CommandLine:
    """Parse flags. Precedence, highest first: command line, environment, --config file.

    Raise UsageError for a bad value, or for flags that contradict each other."""
    words = words_of(argv)
    if HELP & {*words}:
        print_help([word for word in words if word not in HELP], environ)
    parser = flag_parser()
    given = vars(parser.parse_args(words))
    from_environ: dict[str, Any] = {}
    for name in ENVIRONMENT:
        text = environ.get(name.upper())
        if name not in given and text:
            word = f"--{name}={text}"
            from_environ |= parse_words(parser, f"{name.upper()}={text}", [word])
    from_file = {}
    if "config" in given:
        path = given["config"]
        from_file = parse_words(parser, f"--config: {path}", read_toml(path))
    inherited = {}
    for source, values in {"environment": from_environ, "--config": from_file}.items():
        inherited[source] = remaining(values, given)
        given |= inherited[source]
    horizons = [name for name in HORIZONS if name in given]
    if len(horizons) > 1:
        raise UsageError(
            f"--{horizons[1]}: --{horizons[0]} already sets the horizon: give only one"
        )

    flags = Flags(**given)
    if flags.text:
        if flags.text == "-" or given.keys() & {"data_dir", "mock_data"}:
            raise UsageError(
                "--text: give a file, a folder or a name, without --data_dir or --mock_data; for "
                "standard input: python data.py prepare - --out data/NAME"
            )
        name = os.path.basename(os.path.abspath(flags.text)).strip(".").partition(".")[0]
        flags = replace(flags, data_dir=os.path.join(flags.data_dir, name))
    if "ckpt_dir" not in given:
        flags = replace(flags, ckpt_dir=default_ckpt_dir(flags))
    return CommandLine(flags, frozenset(given), inherited)


def remaining(weaker: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return the flags of a weaker source that no stronger source overrides.

    A stronger value overrides the flag itself and its ALTERNATIVES."""
    # `--mock_data False` does not choose mock data
    chosen = {name for name, value in given.items() if value is not False}
    dropped = set(given)
    for names in ALTERNATIVES:
        if chosen & {*names}:
            dropped.update(names)
    return {name: value for name, value in weaker.items() if name not in dropped}


def default_ckpt_dir(flags: Flags) -> str:
    """Return the default of --ckpt_dir: `checkpoints`, plus a subdirectory for each of these cases:

    --mock_data                                   mock
    --text PATH                                   NAME
    --resume RUN --reset_steps                    from-RUN
    --resume RUN/spider-stepN.pt --reset_steps    from-RUN-spider-stepN
    """
    directory = flags.ckpt_dir
    if flags.mock_data:
        directory = os.path.join(directory, "mock")
    if flags.text:
        directory = os.path.join(directory, os.path.basename(flags.data_dir))
    if flags.reset_steps and flags.resume:
        weights = os.path.relpath(flags.resume.removesuffix(".pt"), directory)
        names = [name for name in Path(weights).parts[-2:] if name != ".."]
        directory = os.path.join(directory, "-".join(("from", *names)))
    return directory


HELP = {"-h", "--help"}


def print_help(words: list[str], environ: Mapping[str, str]):
    """Print the flags with the defaults of the recipe that a new run would use, and exit."""
    flags = Flags()
    with suppress(UsageError):
        flags = parse_args(words, environ).flags
    has_gpu = flags.device != "cpu" and torch.cuda.is_available()
    name = resolve.recipe_of(flags.model, FROM_SCRATCH, torch.device("cuda" if has_gpu else "cpu"))
    recipe = RECIPES[name]
    parser = flag_parser()
    parser.usage = "python train.py [--FLAG VALUE ...]"
    variables = ", ".join(map(str.upper, ENVIRONMENT))
    parser.description = (
        f"{__doc__}\nEnvironment: {variables}.\nThe defaults below are those of --model {name}."
    )
    defaults = vars(Flags()) | recipe.values
    if "global_batch" in recipe.values:
        defaults |= dict(micro_batch="chosen", grad_accum="chosen")
    defaults |= dict.fromkeys(recipe.rules, "computed from the horizon")
    parser.set_defaults(**defaults)
    parser.print_help()
    parser.exit()


# --------------------------------------------------------------------------------------------------
# Recipes: defaults of flags by model


def steps_of(flags: Flags) -> float:
    """Return the horizon in optimizer steps."""
    assert flags.global_batch is not None  # resolve.with_split sets it
    return flags.target_tokens / flags.global_batch


def fitted_lr(flags: Flags, config: SpiderConfig) -> float:
    """Return the peak learning rate for a horizon and a width; AdamW gets half.

    Fitted to runs of up to 2,930 steps and width 256 (docs/results/learning.md)."""
    by_steps = min(0.02, 0.116 * steps_of(flags) ** -0.4)
    by_width = (128 / config.hidden_size) ** 0.5
    by_optimizer = 0.5 if flags.optimizer in ("adamw", "adamw8bit") else 1.0
    return float(f"{by_steps * by_width * by_optimizer:.3g}")


def fitted_warmup(flags: Flags, config: SpiderConfig) -> int:
    """Return the number of warm-up steps: 1/25 of the horizon, clamped to 6..40; 1/5 of a
    horizon under 30 steps."""
    steps = steps_of(flags)
    return int(min(40, max(steps / 25, min(6, steps / 5))))


def ten_evaluations(flags: Flags, config: SpiderConfig) -> int:
    """Return --eval_every for ten evaluations per run. resolve.with_evaluations makes fewer of them
    if they would take too long."""
    return max(1, math.ceil(steps_of(flags) / 10))


FITTED: dict[str, Rule] = dict(lr=fitted_lr, warmup_steps=fitted_warmup)
# Measured in docs/results/learning.md
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
    rules=FITTED | dict(eval_every=ten_evaluations),
)
RECIPES = {
    "1b": Recipe(dict(global_batch=131_072, engram_reset=True), FITTED),
    "base": Recipe(dict(n_loops=1, global_batch=131_072, engram_reset=True), FITTED),
    "original": Recipe(dict(momentum=0.95), {}),  # the model that this project began from
    "small": Recipe(
        TINY.values | dict(target_tokens=30_000_000, eval_tokens=1_048_576), TINY.rules
    ),
    "tiny": TINY,
}


# --------------------------------------------------------------------------------------------------
# The schedule: everything that varies by step

# Fraction of the horizon in which halting probabilities ramp up, so that every loop learns
# (docs/results/mechanisms.md)
HALTING_WARMUP = 1 / 8
DROPOUT_EPOCHS = 10  # complete epochs until dropout reaches --dropout


class StepSettings(NamedTuple):
    """The settings that vary by step."""

    n_loops: int
    lr_factor: float = 1.0  # fraction of the peak learning rate
    dropout: float = 0.0
    halting_warmup: float = 1.0  # factor on halting probabilities
    clears_tables: bool = False  # clear the Engram tables after the step


def settings_of_step(
    flags: Flags, loader: Loader, progress: RunProgress, horizon: int
) -> StepSettings:
    """Return the settings of the next step.

    horizon: steps done plus steps left at the present batch size."""
    step = progress.step
    first = progress.next_sequence(flags.seq_len)
    begins_epoch = loader.epoch(first) > progress.epoch
    return StepSettings(
        n_loops=loops_of_step(flags, step),
        lr_factor=lr_factor(step, horizon, flags),
        dropout=dropout_at(flags, loader, first),
        halting_warmup=min(1.0, (step + 1) / (HALTING_WARMUP * horizon)),
        clears_tables=begins_epoch and clears_tables(flags, loader, first),
    )


def lr_factor(step: int, horizon: int, flags: Flags) -> float:
    """Return the learning rate of a step (counted from 0) as a fraction of the peak: linear
    warm-up, then --schedule."""
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


def epochs_in(n_bytes: int, loader: Loader) -> np.ndarray:
    """Convert a number of training bytes to epochs of each source."""
    return n_bytes * loader.share / loader.targets


def clears_tables(flags: Flags, loader: Loader, first: int) -> bool:
    """Decide whether to clear the Engram tables for the epoch that begins at sequence `first`.

    Keep them if the run will read less than half of the epoch: nearly empty tables at the end of a
    run cost more than memorized rows."""
    bytes_left = flags.target_tokens - first * flags.seq_len
    epochs_left = epochs_in(bytes_left, loader)
    return flags.engram_reset and float(loader.share @ epochs_left) >= 0.5


def dropout_at(flags: Flags, loader: Loader, first: int) -> float:
    """Return the dropout of the step that begins at sequence `first`: 0 in the first epoch, then
    growing to --dropout over DROPOUT_EPOCHS. A mixture uses the weighted mean over its sources."""
    grown = (loader.epochs(first) / DROPOUT_EPOCHS).clip(max=1)
    return flags.dropout * float(loader.share @ grown)


def loops_of_step(flags: Flags, step: int) -> int:
    """Return --n_loops, or with --random_loops a Poisson draw with this mean, at least 1.

    All ranks draw the same number."""
    if not flags.random_loops:
        return flags.n_loops
    generator = np.random.default_rng(step_seed(flags.seed, step, "loops"))
    return max(1, int(generator.poisson(flags.n_loops)))


# --------------------------------------------------------------------------------------------------
# Model and optimizers


def build_model(model: Spider, plan: Plan, world: World) -> Spider:
    """Turn a model on the meta device into a model that is ready to train, in place; return it.

    Initialize it from --seed; set precision, expert backend and compilation; shard it over the
    ranks. Raise TooLarge if a step certainly needs more memory than there is."""
    flags = plan.flags
    estimate.check_memory(plan, world)
    torch.manual_seed(flags.seed)
    materialize(model, world.device)
    emulated = flags.precision == "fp8" and not machine.has_bf16(world.device)
    in_fp32 = flags.precision == "fp32" or emulated
    model.compute_dtype = torch.float32 if in_fp32 else torch.bfloat16
    model.recompute = flags.recompute
    model.set_backend(flags.moe_backend)
    if flags.precision == "fp8":
        logger.info(fp8.describe_fp8(model, flags.fp8_experts))
        fp8.convert_to_fp8(model, world.device, flags.fp8_experts, plan.step_bytes // plan.ranks)
    if flags.compile != "off" and (obstacle := model.compile_layers()):
        logger.warning(f"compiled the byte layers but not the core: {obstacle}")
    model.train()
    shard_model(model, world, flags.grad_accum)
    return model


def warm_up(model: Spider, plan: Plan, batch: Batch):
    """Run two passes on a batch, to compile kernels and allocate the memory of micro-steps.
    Weights, random state and buffers stay unchanged.

    If torch.compile fails, run the layers uncompiled under --compile auto, else raise UsageError.
    """
    flags = plan.flags
    try:
        with model.cast_weights_once():
            for noise_seed in range(2):
                if (
                    flags.grad_accum == 1
                ):  # as in training: without accumulation, every pass starts anew
                    model.zero_grad()
                out = model(
                    batch.ids,
                    batch.labels,
                    flags.n_loops,
                    noise_seed,
                    batch.cu_seqlens,
                    batch.max_seqlen,
                    dropout=flags.dropout,
                )
                out.loss.backward()
    except Exception as fault:  # Dynamo, Inductor and Triton raise errors of many types
        if not model.compiled or machine.is_out_of_memory(fault):
            raise
        line = machine.describe_compile_error(fault, batch.ids.device)
        if flags.compile == "on" or plan.ranks > 1:
            raise UsageError(f"--compile: {line}; or use --compile off") from fault
        logger.warning(f"{line}; continuing without torch.compile")
        model.uncompile_layers()
    else:
        return
    finally:
        model.zero_grad()
    warm_up(model, plan, batch)


# Fraction of a GPU's memory to leave free for CUDA itself, fragmentation, and batches with more
# segments
SPARE = 0.1


def can_test_memory(world: World) -> bool:
    """Return whether to check in the warm-up that a step fits into memory. Only on one GPU: several
    ranks would have to agree on the outcome."""
    return world.device.type == "cuda" and world.ranks == 1


def fit_micro_batch(
    model: Spider, optimizers: Optimizers, plan: Plan, loader: Loader, world: World
) -> Plan:
    """Warm up. On one GPU, halve the micro-batch until the passes leave a tenth of the memory free;
    return the plan with this micro-batch. The bytes of a step stay the same.

    Keep a micro-batch of 1 even if it leaves less; raise OutOfMemoryError if it does not fit."""
    tests_memory = can_test_memory(world)
    if not (tests_memory or plan.flags.precision == "fp8" or plan.flags.compile != "off"):
        return plan
    total = machine.memory_of(world.device)
    # A step needs more than the two passes allocate: table gradients of its further micro-steps
    # and, in a new run, the optimizers' state.
    state_to_come = 0.0
    if not any(optimizer.state for optimizer in optimizers.by_name.values()):
        state = estimate.state_size(model, plan.flags.optimizer)
        state_to_come = state.dense_state + state.table_state
    while True:
        (batch,) = loader.batches(0, 0, StepLayout(plan.flags.micro_batch, 1))
        can_halve = tests_memory and plan.flags.micro_batch > 1
        machine.reset_peak_memory(world.device)
        try:
            warm_up(model, plan, batch.to(world.device))
            in_step = estimate.table_gradients(model, plan.step_bytes)
            in_passes = estimate.table_gradients(model, 2 * batch.ids.numel())
            gradients_to_come = max(0.0, in_step - in_passes)
            peak = 1e9 * machine.peak_memory(world.device)  # bytes
            taken = peak + state_to_come + gradients_to_come
        except RuntimeError as fault:
            if not (can_halve and machine.is_out_of_memory(fault)):
                raise
            taken = total
        if not can_halve or taken <= (1 - SPARE) * total:
            return plan
        before = plan.flags.micro_batch
        plan = resolve.with_half_micro_batch(plan)
        logger.warning(
            f"--micro_batch {before} needs at least {taken / 1e9:.1f} GB of the GPU's "
            f"{total / 1e9:.1f}: using --micro_batch {plan.flags.micro_batch} --grad_accum "
            f"{plan.flags.grad_accum}, so the bytes of a step stay the same"
        )


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


def accumulate(model: Spider, batches: list[Batch], now: StepSettings) -> dict[str, Tensor]:
    """Run forward and backward over a step's micro-steps; only gradients change.

    Return sums over the micro-steps of this rank: loss (nats), total_loss, segments, mean_loops,
    the other loss terms, n_bytes, tokens_per_expert [L, E] (L: layers with experts), and
    boundary_counts (Spider.update_boundaries).
    One host-device sync per micro-step, for the number of segments."""
    sharding = sharding_of(model)
    passes = len(batches) * sharding.ranks
    targets = sum(batch.targets for batch in batches)
    all_targets: Tensor | int = max(1, targets)
    if isinstance(sharding, Sharded):  # summed on the device: the host does not need the sum
        world = sharding.world
        rank_targets = torch.full((), targets, dtype=torch.float64, device=world.device)
        all_targets = world.sum(rank_targets).clamp_min(1)
    sums: dict[str, Tensor] = {}
    # byte_loss, a mean over the bytes of a batch, is weighted by the batch's fraction of the step's
    # targets, so that all bytes of the step have equal weight. The rest of the loss (balance,
    # ponder, boundaries, ...) is averaged over passes.
    with model.cast_weights_once():
        for batch in batches:
            out = model(
                batch.ids,
                batch.labels,
                now.n_loops,
                batch.noise_seed,
                batch.cu_seqlens,
                batch.max_seqlen,
                dropout=now.dropout,
                halting_warmup=now.halting_warmup,
            )
            weight = batch.targets / all_targets
            if isinstance(weight, Tensor):
                weight = weight.to(out.loss.dtype)
            loss = out.byte_loss * weight + (out.loss - out.byte_loss) / passes
            sharding.backward(model, loss, last=batch is batches[-1])

            terms = dict(
                loss=out.nats_per_byte.detach() * weight,
                total_loss=loss.detach(),
                segments=out.segments,
                mean_loops=out.mean_loops / passes,
            )
            for name, term in out.loss_terms.items():
                terms[name] = term * weight if name in out.BYTE_TERMS else term / passes
            terms["n_bytes"] = scalar_like(batch.n_bytes, loss)
            terms["tokens_per_expert"] = out.tokens_per_expert
            terms["boundary_counts"] = out.boundary_counts
            for name, term in terms.items():
                sums[name] = term + sums.get(name, 0)
    return sums


def scalar_like(number: float, like: Tensor) -> Tensor:
    """Make a float64 scalar on the device of `like`. Fill it on the device, because a copy from the
    host would synchronize."""
    return like.new_full((), number, dtype=torch.float64)


def pack(tensors: Mapping[str, Tensor]) -> Tensor:
    """Concatenate tensors into one float64 vector."""
    return torch.cat([tensor.flatten() for tensor in tensors.values()]).double()


def unpack(vector: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undo `pack`, given tensors with the same names, shapes and dtypes."""
    parts = vector.split([tensor.numel() for tensor in like.values()])
    tensors = {}
    for part, (name, tensor) in zip(parts, like.items(), strict=True):
        tensors[name] = part.view_as(tensor).to(tensor.dtype)
    return tensors


# First keys of a line of metrics.jsonl, in order; the other loss terms follow
FIRST_METRICS = (
    "loss",
    "total_loss",
    "grad_norm",
    "bytes_per_segment",
    "mean_loops",
    "expert_balance",
)


class StepNumbers(NamedTuple):
    """The numbers of a step over all ranks: tensors on the device, and floats for the host."""

    total_norm: Tensor  # norm of the gradient
    tokens_per_expert: Tensor  # [L, E]
    boundary_counts: Tensor
    metrics: dict[str, float]
    votes: float  # sum of the ranks' votes to stop, see StopSignals


def reduce_numbers(
    optimizers: Optimizers, sums: dict[str, Tensor], vote: float = 0.0
) -> StepNumbers:
    """Sum the numbers of a step over ranks and compute the gradient's norm, in one all-reduce.

    Copy the numbers to the host, which needs them before the update. After the passes, the step
    waits for the device only here."""
    rank_sums = sums | dict(votes=scalar_like(vote, sums["loss"]))
    total_norm, packed = optimizers.sharding.all_reduce_step(optimizers.dense, pack(rank_sums))
    totals = unpack(packed, rank_sums)
    tokens = totals.pop("tokens_per_expert")
    boundary_counts = totals.pop("boundary_counts")
    balance = tokens.new_ones(1)
    if tokens.numel():
        balance = tokens.amax(1) / tokens.mean(1).clamp_min(1)

    scalars = dict(grad_norm=total_norm, expert_balance=balance.mean(), **totals)
    numbers = dict(zip(scalars, pack(scalars).tolist(), strict=True))  # waits for the device
    votes = numbers.pop("votes")
    numbers["bytes_per_segment"] = numbers.pop("n_bytes") / max(1, numbers.pop("segments"))
    metrics = {name: numbers.pop(name) for name in FIRST_METRICS}
    metrics |= numbers
    return StepNumbers(total_norm, tokens, boundary_counts, metrics, votes)


def update(
    model: Spider,
    optimizers: Optimizers,
    numbers: StepNumbers,
    now: StepSettings,
    grad_clip: float,
) -> bool:
    """Update the weights from the accumulated gradients; return whether they changed. Skip
    the update if loss or gradient is not finite."""
    metrics = numbers.metrics
    norm = metrics["grad_norm"]
    finite = math.isfinite(metrics["total_loss"]) and math.isfinite(norm)
    if finite:
        if 0 < grad_clip < norm:
            nn.utils.clip_grads_with_norm_(optimizers.dense, grad_clip, numbers.total_norm)
        optimizers.step()
        model.update_expert_bias(numbers.tokens_per_expert)
        model.update_boundaries(numbers.boundary_counts, metrics["loss"])
        if now.clears_tables:
            optimizers.reset_tables()
    optimizers.zero_grad()
    return finite


def train_step(
    model: Spider,
    optimizers: Optimizers,
    batches: list[Batch],
    now: StepSettings,
    grad_clip: float = 1.0,
    stop: StopSignals | None = None,
) -> tuple[dict[str, Any], float]:
    """Run one optimizer step; return its metrics, and the sum of the ranks' votes to stop."""
    sums = accumulate(model, batches, now)
    vote = 0.0 if stop is None else stop.vote  # read late: most signals arrive during the passes
    numbers = reduce_numbers(optimizers, sums, vote)
    updated = update(model, optimizers, numbers, now, grad_clip)
    return numbers.metrics | dict(skipped=not updated), numbers.votes


# --------------------------------------------------------------------------------------------------
# Evaluation and samples

SAMPLE_START = 64  # bytes of held-out text in the default prompt of a sample
SAMPLE_SECONDS = 10.0  # a sample ends after this time

Validation = Mapping[str, tuple[Tensor, Tensor]]  # ids and labels [n, T] of each source


@torch.no_grad()
def evaluate(
    model: Spider, validation: Validation, rows: int, n_loops: int, world: World
) -> dict[str, float]:
    """Evaluate on the validation sets, this many rows at a time, distributed over ranks.

    Return val_loss, val_bpb and val_bytes_per_segment over all sources; for several sources, also
    val_bpb/NAME of each. The model is in training mode afterward."""
    logger.info("evaluating")
    model.eval()
    total = Totals()
    by_source = {}
    for name, (ids, labels) in validation.items():
        batches = zip(ids.split(rows), labels.split(rows), strict=True)
        by_source[name] = score_model(model, batches, n_loops, world)
        total += by_source[name]
    model.train()
    results = {
        "val_loss": total.loss,
        "val_bpb": total.bits_per_byte,
        "val_bytes_per_segment": total.bytes_per_segment,
    }
    logger.info(
        f"validation: bpb {total.bits_per_byte:.4f}, loss {total.loss:.4f} nats, on "
        f"{total.targets:,} bytes"
    )
    if len(by_source) > 1:
        for name, source_total in by_source.items():
            results[f"val_bpb/{name}"] = source_total.bits_per_byte
            logger.info(f"validation of {name}: bpb {source_total.bits_per_byte:.4f}")
    return results


def log_sample(model: Spider, step: int, flags: Flags, validation: Validation):
    """Log a sample as lines of text; its seed is a function of (--seed, step).

    The sample continues --sample_prompt, else the first bytes of `validation`, else a line break.
    BOS alone is a bad prompt: a text file is one document, so BOS occurs in it only once."""
    whole = gather_model(model)
    if whole is None:  # not on rank 0
        return
    prompt = [ord("\n")]
    if flags.sample_prompt:
        prompt = [BOS_ID, *os.fsencode(flags.sample_prompt)]
    elif validation:
        ids, _ = next(iter(validation.values()))
        prompt = ids[0, :SAMPLE_START].tolist()
    generator = torch.Generator(whole.embed_tokens.device)
    generator.manual_seed(step_seed(flags.seed, step, "sample"))
    whole.eval()
    n_bytes = 200 if flags.sample_every else 64  # 64: the short sample at the end of a run
    began = time.perf_counter()
    generated = []
    try:
        for byte in whole.generate(prompt, n_bytes, generator=generator, n_loops=flags.n_loops):
            generated.append(byte)
            if time.perf_counter() - began > SAMPLE_SECONDS:  # a large model on a CPU
                break
        logger.info(f"step {step} continues {decode(prompt)[-40:]!r}:")
        for line in decode(generated).split("\n"):
            logger.info(f"    {line.expandtabs()}")
    except Exception as fault:  # such as out of memory: a failed sample must not end the run
        logger.warning(f"step {step}: no sample: {fault}")
    whole.train()


MIN_SECONDS_TIMED = 2.0  # total time of the timed steps


def time_steps(plan: Plan, world: World, loader: Loader) -> float:
    """Time a few mid-run optimizer steps on a throwaway model; return bytes/s."""
    flags = plan.flags
    logger.info(f"timing a few steps of {plan.step_bytes:,} bytes")
    # Leave plan.model to the run. Build a second model from its class: a deepcopy might fail.
    model = build_model(on_meta(plan.model_class, plan.config), plan, world)
    optimizers = optimizers_of(flags, model)
    plan = fit_micro_batch(model, optimizers, plan, loader, world)
    times: list[float] = []
    while len(times) < 2 or sum(times[1:]) < MIN_SECONDS_TIMED:  # the first step is a warm-up
        step = plan.horizon // 2 + len(times)
        began = time.perf_counter()
        first = step * plan.layout.sequences
        batches = [batch.to(world.device) for batch in loader.batches(step, first, plan.layout)]
        now = StepSettings(flags.n_loops, dropout=dropout_at(flags, loader, first))
        optimizers.set_lr(flags.lr, lr_factor(step, plan.horizon, flags))
        train_step(model, optimizers, batches, now, flags.grad_clip)
        times.append(time.perf_counter() - began)
    # Free the memory now: the run's own model needs it.
    del model, optimizers, batches
    gc.collect()
    torch.cuda.empty_cache()
    return plan.step_bytes / median(times[1:])


# --------------------------------------------------------------------------------------------------
# main


def open_sources(flags: Flags, world: World) -> list[Source]:
    """Open the training data; prepare shards of --text first, on rank 0."""
    if flags.text:
        out = Path(flags.data_dir)
        world.on_rank0(partial(prepare, [flags.text], out, Documents(), reuse=True))
    return [mock_source(flags.seed)] if flags.mock_data else open_data(flags.data_dir)


def open_ckpt_dir(flags: Flags, closing: ExitStack) -> StartCheckpoint:
    """Create and lock --ckpt_dir; return the checkpoint to start from. Only rank 0 calls this."""
    directory = Path(flags.ckpt_dir)
    if not flags.dry_run:
        directory.mkdir(parents=True, exist_ok=True)
        closing.enter_context(files.locked(directory))
    return load_start(directory, flags.resume, flags.reset_steps)


def lacks_evaluation(progress: RunProgress, flags: Flags, last_step: int) -> bool:
    """Return whether a finished run lacks the evaluation of its last step. A signal may have
    interrupted this evaluation."""
    if not flags.eval_every or progress.step != last_step or progress.metrics is None:
        return False
    return "val_loss" not in progress.metrics


def state_of(
    model: Spider, optimizers: Optimizers, plan: Plan, loader: Loader, progress: RunProgress
) -> dict[str, Any]:
    """Return the content of a checkpoint. Every rank calls this."""
    return dict(
        model_state_dict=model_state(model),
        optimizer_state_dict=optimizers.state_dict(),
        cfg=asdict(model.config),
        recipe=plan.recipe,
        **loader.mixture,
        flags=plan.flags.recorded(),
        **asdict(progress),
    )


def main(
    command: CommandLine,
    world: World,
    stop: StopSignals,
    closing: ExitStack,
    model_class: type[Spider],
) -> int:
    """Train, from the flags to the last checkpoint, and return the exit status.

    `closing` closes all resources."""
    # ----------------------------------------------------------------------------------------------
    # Process, ranks, data
    requested = command.flags
    directory = Path(requested.ckpt_dir)
    machine.start_log("INFO" if world.is_rank0 else "ERROR")
    device = machine.resolve_device(requested.device)
    machine.configure_torch(device, requested.deterministic)
    world.join(device, requested.shards, requested.rank_timeout)
    sources = open_sources(requested, world)
    held_out = sum(len(source.val) for source in sources)

    # ----------------------------------------------------------------------------------------------
    # Checkpoint, plan, position in the run
    start = world.on_rank0(
        partial(open_ckpt_dir, requested, closing), StartCheckpoint.without_tensors
    )
    plan = resolve.resolve_plan(command, RECIPES, world, start, model_class, held_out)
    loader = Loader(sources, plan.flags.seq_len, plan.flags.seed)
    if requested.minutes and not start.resumes:
        if world.ranks > 1:
            raise UsageError("--minutes times steps on one process: use --target_tokens")
        plan = resolve.with_minutes(plan, held_out, time_steps(plan, world, loader))
    progress, changed = progress_of(start, plan, loader.mixture, loader.epoch)
    bytes_left = max(0, plan.flags.target_tokens - progress.bytes_seen)
    horizon = progress.step + math.ceil(bytes_left / plan.step_bytes)  # the schedule's last step
    last_step = plan.flags.max_steps or horizon

    # ----------------------------------------------------------------------------------------------
    # What was chosen. A dry run ends here and changes no file; so does a finished run, unless it
    # lacks its last evaluation.
    remarks = describe_run(plan, sources, last_step, command.inherited, world)
    rate_of = partial(lr_factor, horizon=horizon, flags=plan.flags)
    epochs = epochs_in(plan.flags.target_tokens, loader).max()
    warnings = resolve.horizon_warnings(plan, epochs, horizon, rate_of)
    if requested.dry_run:
        if not world.is_rank0:
            return 0
        remarks += describe_recipe(plan)
        remarks += [f"warning: {line}" for line in warnings]
        return resolve.print_dry_run(plan, remarks, world, partial(time_steps, plan, world, loader))
    if progress.step >= last_step or progress.out_of_patience(plan.flags.patience):
        check_finished(start, plan, progress, changed)
        if not lacks_evaluation(progress, plan.flags, last_step):
            log_end(plan, progress, horizon, "nothing left to train")
            return 0
        # Else the loop below evaluates and saves, without a step.
    for line in remarks:
        logger.info(line)
    needs, lacking = estimate.describe_needs(plan, world)
    for line in needs if lacking else ():
        logger.info(line)
    for line in lacking:
        logger.warning(f"NOT ENOUGH {line}")

    # ----------------------------------------------------------------------------------------------
    # Model and optimizers, restored from the checkpoint
    validation: Validation = {}
    if plan.flags.eval_every:
        validation = validation_sets(sources, plan.flags.seq_len, plan.flags.eval_tokens)
    model = build_model(plan.model, plan, world)
    optimizers = optimizers_of(plan.flags, model)
    restore(start, model, optimizers, progress, changed)
    resumes_in_place = start.is_in(plan.flags.ckpt_dir)
    starts_from_weights = start.path is not None and not start.resumes
    del start  # free the checkpoint's tensors before the warm-up measures memory
    # Checkpoints record the learning rate, which the loop sets before each step. A run that lacks
    # only its last evaluation saves without a step, so set the last step's rate here.
    last_rate = rate_of(max(0, progress.step - 1))
    optimizers.set_lr(plan.flags.lr, last_rate)
    plan = fit_micro_batch(model, optimizers, plan, loader, world)
    flags = plan.flags  # final only now: the micro-batch may have been halved

    # ----------------------------------------------------------------------------------------------
    # Batches, checkpoints, logs
    next_sequence = progress.next_sequence(flags.seq_len)
    prefetcher = Prefetcher(
        loader, plan.layout, world.rank, world.device, progress.step, next_sequence
    )
    writer = CheckpointWriter(
        directory, flags.keep_last, flags.keep_best, world, progress.step, resumes_in_place
    )
    wandb_logger = None
    if world.is_rank0:
        wandb_logger = start_wandb(flags.run, asdict(flags), progress, closing, resumes_in_place)
    for line in (*warnings, *resolve.rise_warning(progress, flags.lr * last_rate)):
        logger.warning(line)
    rows = max(flags.micro_batch, EVAL_BYTES // flags.seq_len)
    evaluate_now = partial(evaluate, model, validation, rows, flags.n_loops, world)
    if starts_from_weights and validation:
        logger.info("before the first step:")
        evaluate_now()  # only logged: step 0 is never saved, so its loss cannot be best_loss
    log = StepLog(plan, progress, last_step)
    peak = machine.matmul_rate(world.device) * world.ranks
    flops_per_byte = cache(partial(estimate.flops_per_byte, model, seq_len=flags.seq_len))
    metrics_file = None
    profiler = None
    if world.is_rank0:
        if flags.profile:
            profiler = start_profiler(directory, closing)
        # Opened last, so that a signal before now leaves the file untouched. Opening drops the
        # line of the step resumed from; the loop writes it again, with any evaluation due.
        first_line = progress.step if progress.metrics else progress.step + 1
        metrics_file = closing.enter_context(Metrics(directory / "metrics.jsonl", first_line))
        # Plot at the end, unless a signal arrived (may_interrupt): there may be time only to save.
        closing.callback(stop.may_interrupt, partial(write_curves, directory, ends=True))
    closing.callback(writer.thread.shutdown)  # runs before the file is closed: the thread syncs it
    drawn_at = time.perf_counter()  # when curves.png was drawn

    def save():
        state = state_of(model, optimizers, plan, loader, progress)
        writer.save(state, metrics_file.sync if metrics_file else lambda: None)

    # ----------------------------------------------------------------------------------------------
    # The loop: first what is due after the previous step, then the next step
    while True:
        step = progress.step
        is_last = step >= last_step

        if progress.metrics:  # a step has been taken, now or before the run resumed
            # Periodically: evaluate. A signal interrupts the evaluation, but not its recording.
            evaluates = flags.eval_every and (is_last or step % flags.eval_every == 0)
            if evaluates and progress.val_loss is None:
                if is_last and step > writer.saved_step:
                    save()  # so a kill during the evaluation loses no step
                found = stop.may_interrupt(evaluate_now)
                if found is not None:
                    progress.record_evaluation(found, counts=step % flags.eval_every == 0)
                    writer.mark_unsaved(step)  # the saved state lacks the evaluation

            # Every step: its line of metrics.jsonl, and wandb
            if metrics_file:
                metrics_file.write(progress.metrics)
            if wandb_logger and step > writer.saved_step:
                wandb_logger.log(progress.metrics, step=step)

            # Periodically, and at the end of the run: sample
            samples = flags.sample_every and step % flags.sample_every == 0
            if samples or is_last or progress.out_of_patience(flags.patience):
                if is_last and step > writer.saved_step:
                    save()  # so a kill during the sample loses neither step nor evaluation
                stop.may_interrupt(partial(log_sample, model, step, flags, validation))

            # Periodically: draw the curves. The end of the run draws them again.
            clock = time.perf_counter()
            if metrics_file and evaluates and not is_last and clock - drawn_at > REDRAW_SECONDS:
                stop.may_interrupt(partial(write_curves, directory, ends=False))
                drawn_at = clock

        # Periodically: save. `ends` is computed once: a signal may change `stop` between its uses.
        ends = is_last or stop.agreed is not None or progress.out_of_patience(flags.patience)
        is_best = flags.keep_best and progress.is_best
        is_due = (step % flags.ckpt_every == 0 or is_best) and not progress.skipped
        if step > writer.saved_step and (ends or is_due):
            save()
        progress.check_divergence(flags.max_skipped)
        if ends:
            break

        # ------------------------------------------------------------------------------------------
        # One optimizer step
        stop.raises = False  # from here on, a signal waits for the end of the step
        began = time.perf_counter()
        first = progress.next_sequence(flags.seq_len)
        now = settings_of_step(flags, loader, progress, horizon)
        optimizers.set_lr(flags.lr, now.lr_factor)
        batches = prefetcher.take()
        metrics, votes = train_step(model, optimizers, batches, now, flags.grad_clip, stop)
        stop.agree(votes)
        # ------------------------------------------------------------------------------------------

        # The step's numbers, and periodically a line of the log
        rate = plan.step_bytes / (time.perf_counter() - began)
        length = round(max(1.0, metrics["bytes_per_segment"]), 1)
        metrics |= dict(
            lr=flags.lr * now.lr_factor,
            tok_per_sec=rate,
            bf16_mfu=rate * flops_per_byte(length, now.n_loops) / peak,
            memory=machine.peak_memory(world.device),
            time=time.time(),
        )
        bytes_seen = (first + plan.layout.sequences) * flags.seq_len
        events = progress.record(metrics, bytes_seen, loader.epoch(first), now.clears_tables)
        log.log(events)
        if profiler:
            profiler.step()

    # ----------------------------------------------------------------------------------------------
    # The end
    if stop.agreed and progress.step == 0:  # torch.compile may swallow the signal's exception
        raise Stopped("stopped before the first step")
    if not writer.holds(progress.step):
        raise CheckpointError(
            f"--ckpt_dir: step {progress.step} could not be saved in {directory}: free some disk "
            f"space; the same command resumes from the newest checkpoint there, if any"
        )
    if stop.agreed:
        raise Stopped(
            f"stopped after step {progress.step}, which is saved in {directory}; the same command "
            f"resumes"
        )
    progress.check_divergence(1)
    duration = estimate.describe_duration(time.perf_counter() - log.began)
    log_end(plan, progress, horizon, duration)
    return 0


# --------------------------------------------------------------------------------------------------
# The command line

LESS_MEMORY = "halve --micro_batch and double --grad_accum, or lower --seq_len"
# Errors that occur on all ranks of a host, and are printed by the first
SHARED_ERRORS = UsageError, CheckpointError, Diverged


def command_line(argv: list[str] | None = None, model_class: type[Spider] = Spider) -> int:
    """Run train.py with these arguments, for Spider or a subclass (docs/guide/trying-an-idea.md).

    Return the exit status, with one line on stderr unless it is 0:

        0        done
        1        divergence; or a dry run that lacks memory or disk
        2        a bad flag, environment, file or machine
        128 + n  signal n stopped the run"""
    local_rank = 0
    try:
        errors.prepare_streams()
        world = World()
        local_rank = world.local_rank
        with StopSignals(world.ranks) as stop:
            try:
                with machine.memory_advice(LESS_MEMORY), ExitStack() as closing:
                    status = main(parse_args(argv), world, stop, closing, model_class)
                    sys.stdout.flush()
            except Stopped as stopped:
                number = stop.agreed or stop.asked
                assert number is not None  # a signal raised Stopped
                status = 128 + number
                if world.is_rank0:
                    errors.print_error("train.py", f"{number.name}: {stopped}")
                if not stop.agreed:  # before step 1: no leave(), as ranks may be in a collective
                    return status
            except Diverged:  # on all ranks, after the same step
                world.leave()
                raise
            world.leave()
            return status
    except errors.EXPECTED as fault:
        silent = local_rank > 0 and isinstance(fault, SHARED_ERRORS)
        return errors.handle_error("train.py", fault, silent=silent)


if __name__ == "__main__":
    sys.exit(record(command_line)())
