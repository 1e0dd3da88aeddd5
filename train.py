"""Train Spider, a byte-level Recurrent-Depth Transformer, from memory-mapped byte shards.

    python train.py --mock_data --max_steps 20 --seq_len 128 --micro_batch 2      # smoke run
    python train.py --data_dir data                            # `1b` on a GPU, `tiny` on a CPU
    torchrun --standalone --nproc_per_node 8 train.py --data_dir data --shards 8  # several GPUs

The same command again resumes from the newest checkpoint in --ckpt_dir. All randomness is a
function of (--seed, step), so an interrupted run ends like an uninterrupted one. `python train.py
--help` lists the flags, with the defaults of `1b`; other models have recipes of their own (RECIPES
in train.py), and the log shows what they set.
"""

import argparse
import math
import os
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace

from spider import common
from spider.common import UsageError, integer, path_name, quoted, real
from spider.config import BACKENDS, MAX_LOOPS, OPTIMIZERS, PRESETS, RECOMPUTE, SpiderConfig

# --------------------------------------------------------------------------------------------------
# Flags, by heading of --help. Defaults are those of `1b`; RECIPES holds what differs for the
# others.

ENVIRONMENT = (
    "seq_len",
    "micro_batch",
    "grad_accum",
    "n_loops",
    "lr",
    "data_dir",
    "target_tokens",
    "ckpt_every",
)
SWITCH = argparse.BooleanOptionalAction
COUNT, STEPS, RATE = integer(1), integer(0), real(0, 1000)


def flag_parser() -> argparse.ArgumentParser:
    parser = common.Parser(
        prog="train.py", description=__doc__, usage="python train.py [--FLAG VALUE ...]"
    )
    flag = parser.add_argument_group("basics").add_argument
    flag(
        "--model",
        default="auto",
        choices=("auto", *PRESETS),
        help="auto: the checkpoint's, or 1b on a GPU, or tiny",
    )
    flag(
        "--data_dir",
        default="data",
        type=path_name,
        metavar="DIR",
        help=".bin shards, or a mixture web:0.7,code:0.3",
    )
    flag(
        "--mock_data",
        action="store_true",
        help="train on synthetic, learnable bytes instead of --data_dir",
    )
    flag(
        "--ckpt_dir",
        default="checkpoints",
        type=path_name,
        metavar="DIR",
        help="directory for checkpoints and metrics.jsonl; --mock_data adds mock/ to the default",
    )
    flag(
        "--target_tokens",
        default=10_000_000_000,
        type=COUNT,
        metavar="BYTES",
        help="bytes to train on: the horizon",
    )
    flag(
        "--minutes",
        type=real(0, 1e9, above=True),
        metavar="N",
        help="choose --target_tokens for about this many minutes, by timing a few steps",
    )
    flag(
        "--max_steps",
        default=0,
        type=STEPS,
        metavar="STEPS",
        help="stop after this many optimizer steps; 0: at --target_tokens. Later steps use the "
        "minimum learning rate",
    )
    flag(
        "--resume",
        type=path_name,
        metavar="CHECKPOINT",
        help="checkpoint to start from, or a run's directory, of which the newest is taken; the "
        "run goes on in "
        "--ckpt_dir, and if that holds a run already, that one is resumed instead",
    )
    flag(
        "--reset_steps",
        action="store_true",
        help="with --resume: load only the weights, and begin at step 0",
    )
    flag(
        "--dry_run",
        action="store_true",
        help="print settings, memory, disk and time of the run, and stop",
    )
    flag(
        "--config",
        type=path_name,
        metavar="FILE",
        help="TOML file of flag values; flags and environment variables override it",
    )

    flag = parser.add_argument_group("model").add_argument
    flag(
        "--set",
        metavar="NAME=VALUE,...",
        help="fields of SpiderConfig to change: lora_rank=0,engram_match_words=1+2",
    )
    flag(
        "--n_loops",
        default=6,
        type=integer(1, MAX_LOOPS),
        metavar="N",
        help="loops of the recurrent core",
    )
    flag(
        "--random_loops",
        action="store_true",
        help="draw the loops of each step: Poisson with mean --n_loops",
    )

    flag = parser.add_argument_group("batch").add_argument
    flag(
        "--seq_len",
        default=2048,
        type=integer(2, 1 << 24),
        metavar="BYTES",
        help="bytes per sequence",
    )
    flag(
        "--micro_batch",
        default=64,
        type=COUNT,
        metavar="N",
        help="sequences per device and micro-step; with --global_batch, and without "
        "--grad_accum, the most that fit",
    )
    flag("--grad_accum", default=1, type=COUNT, metavar="N", help="micro-steps per optimizer step")
    flag(
        "--global_batch",
        type=COUNT,
        metavar="BYTES",
        help="bytes per step over all ranks, instead of --grad_accum",
    )
    flag(
        "--seed",
        default=0,
        type=STEPS,
        metavar="N",
        help="seed of weights, data order, noise, loop counts",
    )

    flag = parser.add_argument_group("horizon").add_argument
    flag(
        "--target_flops",
        type=real(0, above=True),
        metavar="FLOPS",
        help="training FLOPs, instead of --target_tokens",
    )
    flag(
        "--target_param_data_ratio",
        type=real(0, above=True),
        metavar="RATIO",
        help="training bytes per parameter (without Engram tables), instead of --target_tokens",
    )

    flag = parser.add_argument_group("optimizer").add_argument
    flag(
        "--optimizer",
        default="auto",
        choices=("auto", *OPTIMIZERS),
        help="auto: muon for matrices, AdamW for others",
    )
    flag(
        "--lr",
        default=3e-4,
        type=real(0, 1000, above=True),
        metavar="RATE",
        help="peak learning rate (Muon's updates are scaled to AdamW's size)",
    )
    flag(
        "--engram_lr",
        default=0.25,
        type=RATE,
        metavar="RATE",
        help="learning rate of the Engram tables: the size of a row's first step",
    )
    flag(
        "--engram_reset",
        default=False,
        action=SWITCH,
        help="clear the Engram tables at the start of each further epoch, since they memorize "
        "the text",
    )
    flag(
        "--schedule",
        default="cosine",
        choices=("cosine", "wsd"),
        help="decay; wsd: constant, then linear",
    )
    flag(
        "--warmup_steps",
        default=10,
        type=STEPS,
        metavar="STEPS",
        help="optimizer steps of linear warm-up",
    )
    flag(
        "--wsd_decay_fraction",
        default=0.2,
        type=real(0, 1),
        metavar="FRACTION",
        help="last fraction of the horizon, in which wsd decays",
    )
    flag(
        "--min_lr_fraction",
        default=0.1,
        type=real(0, 1),
        metavar="FRACTION",
        help="learning rate at the horizon, as a fraction of the peak",
    )
    flag(
        "--weight_decay",
        default=0.1,
        type=RATE,
        metavar="RATE",
        help="of matrices; not of vectors or hashed Engram tables",
    )
    flag(
        "--dropout",
        default=0.0,
        type=real(0, 0.9),
        metavar="RATE",
        help="on the core's input and output, a fifth of it on bytes; 0 in the first epoch, "
        "whole from the eleventh",
    )
    flag("--beta1", default=0.9, type=real(0, 0.99999), metavar="BETA", help="of AdamW")
    flag("--beta2", default=0.95, type=real(0, 0.99999), metavar="BETA", help="of AdamW")
    flag("--momentum", default=0.95, type=real(0, 0.99999), metavar="BETA", help="of Muon")
    flag(
        "--grad_clip",
        default=1.0,
        type=real(0),
        metavar="NORM",
        help="largest norm of the gradient, not counting the hashed Engram tables; 0: off",
    )
    flag(
        "--max_skipped",
        default=10,
        type=COUNT,
        metavar="STEPS",
        help="stop after this many steps in a row with a non-finite loss or gradient",
    )

    flag = parser.add_argument_group("machine").add_argument
    flag(
        "--device", default="auto", choices=("auto", "cpu", "cuda"), help="auto: cuda if available"
    )
    flag(
        "--precision",
        default="auto",
        choices=("auto", "fp8", "bf16", "fp32"),
        help="auto: bf16 where supported; fp32 without TF32: for comparisons, slow on a GPU",
    )
    flag(
        "--fp8_experts",
        action="store_true",
        help="with fp8: convert the routed experts too, with row-wise scales",
    )
    flag(
        "--moe_backend",
        default="auto",
        choices=("auto", *BACKENDS),
        help="auto: tile or grouped, or triton where torch's grouped product is a loop; loop: "
        "the reference",
    )
    flag(
        "--compile",
        default="auto",
        nargs="?",
        const="on",
        choices=("auto", "on", "off"),
        help="torch.compile the layers (mode default); auto: on a GPU where it works",
    )
    flag(
        "--recompute",
        default="auto",
        choices=("auto", *RECOMPUTE),
        help="activation checkpointing; auto: as few layers as let a step fit into memory",
    )
    flag(
        "--no_gradient_checkpointing",
        dest="recompute",
        action="store_const",
        const="nothing",
        default=argparse.SUPPRESS,
        help="same as --recompute nothing",
    )
    flag(
        "--shards",
        default=1,
        type=COUNT,
        metavar="RANKS",
        help="shard weights, gradients and optimizer state over this many ranks; groups of ranks "
        "are replicas",
    )
    flag(
        "--rank_timeout",
        default=900.0,
        type=real(0, 1e6, above=True),
        metavar="SECONDS",
        help="that ranks wait for one another",
    )
    flag(
        "--deterministic",
        action="store_true",
        help="on a GPU: use deterministic kernels, some of them slower",
    )

    flag = parser.add_argument_group("checkpoints").add_argument
    flag(
        "--ckpt_every",
        default=50,
        type=COUNT,
        metavar="STEPS",
        help="optimizer steps between checkpoints",
    )
    flag("--keep_last", default=2, type=integer(2), metavar="N", help="newest checkpoints to keep")
    flag(
        "--keep_best",
        action="store_true",
        help="save at each new lowest validation loss, and keep that checkpoint too; sample.py "
        "DIR --best loads it",
    )

    flag = parser.add_argument_group("evaluation").add_argument
    flag(
        "--eval_every",
        default=250,
        type=STEPS,
        metavar="STEPS",
        help="optimizer steps between evaluations; one more at the end; 0: none",
    )
    flag(
        "--eval_tokens",
        default=1_048_576,
        type=COUNT,
        metavar="BYTES",
        help="held-out bytes per evaluation",
    )
    flag(
        "--patience",
        default=0,
        type=STEPS,
        metavar="N",
        help="end the run after this many evaluations in a row without a lower loss; 0: never",
    )
    flag(
        "--sample_every",
        default=0,
        type=STEPS,
        metavar="STEPS",
        help="steps between logged samples; 0: none",
    )
    flag(
        "--sample_prompt",
        metavar="TEXT",
        help="prompt of the samples; default: held-out text, if the run evaluates",
    )

    flag = parser.add_argument_group("logs").add_argument
    flag(
        "--log_every",
        type=COUNT,
        metavar="STEPS",
        help="optimizer steps between lines of the log; default: about a hundred lines a run, "
        "and one a minute",
    )
    flag("--run", metavar="NAME", help="log to wandb under this name (WANDB_MODE=offline works)")
    flag(
        "--profile",
        action="store_true",
        help="write a profiler trace of steps 3 to 5 to --ckpt_dir",
    )
    return parser


def fitted_lr(config: SpiderConfig, steps: float) -> float:
    """Return the peak learning rate for a horizon in steps, a fit to runs of tiny
    (docs/results/learning.md)."""
    return float(f"{min(0.02, 0.116 * steps**-0.4 * (128 / config.hidden_size) ** 0.5):.3g}")


# Defaults of flags by model; a function computes one from the config and the horizon in steps.
# Those of tiny are measured in docs/results/learning.md. Its ten evaluations on tinyshakespeare's
# validation split, each as long as 8 steps, add 3% to the recipe's 2,930 steps, and 31% to one pass
# (245 steps).
TINY = dict(
    n_loops=1,
    seq_len=4096,
    micro_batch=1,
    target_tokens=12_000_000,
    lr=fitted_lr,
    warmup_steps=lambda config, steps: int(min(40, steps / 25)),
    dropout=0.5,
    engram_reset=True,
    ckpt_every=500,
    eval_every=lambda config, steps: max(1, math.ceil(steps / 10)),
    eval_tokens=262_144,
)
RECIPES = {
    "1b": {},
    "base": dict(n_loops=1),
    "original": {},
    "small": TINY | dict(target_tokens=30_000_000, eval_tokens=1_048_576),
    "tiny": TINY,
}

# One of these overrides the others where they are set with less precedence.
ALTERNATIVES = (
    ("target_tokens", "minutes", "target_flops", "target_param_data_ratio"),
    ("grad_accum", "global_batch"),
    ("data_dir", "mock_data"),
)


def parse_args(
    argv: list[str] | None = None, environ: Mapping[str, str] = os.environ
) -> SimpleNamespace:
    """Return the values of all flags, in `given` the names of those set anywhere, and in
    `inherited` the values that are not from argv. Precedence: flag, environment variable, --config
    file, default. Raise UsageError for a bad value or flags that contradict one another."""
    parser = flag_parser()
    values, flags = vars(parser.parse_args([])), parser.given(argv)
    environment = {}
    for name in ENVIRONMENT:
        if name not in flags and environ.get(name.upper()):
            environment |= parser.value(
                name, environ[name.upper()], f"{name.upper()}={environ[name.upper()]}"
            )
    of_file = common.read_toml(parser, flags["config"]) if "config" in flags else {}
    given = {}  # a value is dropped where a stronger source gave one of its alternatives
    for source in (flags, environment, of_file):
        replaced = {name for names in ALTERNATIVES for name in names if given.keys() & {*names}}
        given = {name: value for name, value in source.items() if name not in replaced} | given
    inherited = {name: value for name, value in given.items() if name not in flags}
    args = SimpleNamespace(**values | given, given=set(given), inherited=inherited)
    if len(both := [name for name in ALTERNATIVES[0] if name in given]) > 1:
        raise UsageError(f"--{both[1]}: --{both[0]} already sets the horizon: give one")
    if "ckpt_dir" not in given and args.mock_data:
        args.ckpt_dir = os.path.join(args.ckpt_dir, "mock")
    if "ckpt_dir" not in given and args.reset_steps and args.resume:
        # a run has one directory
        args.ckpt_dir = os.path.join(args.ckpt_dir, f"from-{Path(args.resume).stem}")
    return args


if __name__ == "__main__":
    common.check_flags_early(parse_args, "train.py")
    common.set_allocator()

import numpy as np
import torch
from loguru import logger
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record

import tokenizer
from data import Batch, Feed, Loader, Source, mock_source, open_data, validation_sets
from spider import estimate, machine
from spider.checkpoint import CheckpointWriter, find_checkpoints, load_origin
from spider.common import CheckpointError, Diverged, Stopped, WorldError, say
from spider.curves import write_curves
from spider.distributed import World, shard_model, sharding_of
from spider.flash_attention import choose_flash_attention
from spider.fp8 import convert_to_fp8, describe_fp8
from spider.memory import EngramTable
from spider.noise import step_seed
from spider.optim import ENGRAM_TABLES, Optimizers, kinds_of
from spider.run import Metrics, RunProgress, StepEvents, StopSignals, start_profiler, start_wandb
from spider_model import Spider, SpiderOutput
from tile_moe import KERNELS, multiplies_at_once, resolve_backend

# --------------------------------------------------------------------------------------------------
# The plan of a run


@dataclass(frozen=True)
class Plan:
    """A run as `settle` decided it. Every flag is an attribute with its resolved value: plan.lr is
    --lr."""

    flags: Mapping[str, object]
    recipe: str  # the source of defaults
    config: SpiderConfig
    model_class: type[Spider] = Spider
    ranks: int = 1
    checkpoint_size: float = 0.0  # bytes
    documents_per_byte: float = 0.0  # of the data, for the estimate of memory
    # estimated bytes of a rank by purpose
    memory: Mapping[str, float] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()  # lines for the log

    def __getattr__(self, name: str):
        if name == "flags" or name not in self.flags:
            raise AttributeError(name)
        return self.flags[name]

    @property
    def sequences(self) -> int:
        """Sequences per optimizer step, on all ranks together."""
        return self.micro_batch * self.grad_accum * self.ranks

    @property
    def step_bytes(self) -> int:
        """Bytes per optimizer step, on all ranks together."""
        return self.sequences * self.seq_len

    @property
    def horizon(self) -> int:
        """Optimizer steps from the start to --target_tokens."""
        return math.ceil(self.target_tokens / self.step_bytes)


MOST_BYTES = (1 << 62) - 1  # that --target_tokens takes
MAX_MICRO_BATCH = 1 << 16  # sequences, where --global_batch chooses


def whole_bytes(number: float) -> int:
    """Return a computed number of bytes as a value that --target_tokens would take."""
    return max(1, math.ceil(min(number, MOST_BYTES)))


def settle(
    args: SimpleNamespace,
    world: World,
    state: dict | None = None,
    resumes: bool = False,
    model_class: type[Spider] = Spider,
    sources: Sequence[Source] = (),
) -> Plan:
    """Resolve parsed flags into the plan of a run.

    state: of a checkpoint to begin with. resumes: continue that checkpoint's run, else use only its
    weights. sources: the data, whose documents take memory. Raise UsageError for flags that
    contradict one another or that this machine does not support, and CheckpointError for a
    checkpoint of another model."""
    device, given, state = world.device, args.given, state or {}
    flags = {
        name: value for name, value in vars(args).items() if name not in ("given", "inherited")
    }

    # Recipe: that of --model, else the checkpoint's, else the one that suits the device
    saved_flags, recipe = state.get("flags", {}), args.model
    if recipe == "auto":
        recipe = state.get("recipe") or ("1b" if device.type == "cuda" else "tiny")
    flags |= {name: value for name, value in RECIPES[recipe].items() if name not in given}
    if resumes and args.minutes:  # --minutes chose these when the run started
        check_minutes(args, saved_flags)
        chosen = {"target_tokens", "eval_tokens"} & saved_flags.keys() - given
        flags |= {name: saved_flags[name] for name in chosen}

    # Model
    config = apply_settings(
        replace(SpiderConfig.preset(recipe), n_loops=flags["n_loops"]), args.set
    )
    if state:
        config = config_of_checkpoint(
            state["cfg"], config if args.model != "auto" else None, args.set, model_class
        )
        if "n_loops" not in given:
            flags["n_loops"] = state.get("n_loops", config.n_loops)
    with torch.device("meta"):
        model = model_class(config)
    if not any(isinstance(module, EngramTable) for module in model.modules()):
        if flags["engram_reset"] and "engram_reset" in given:
            raise UsageError("--engram_reset: this model has no Engram tables")
        flags["engram_reset"] = False

    # Batch: all splits of a step into micro-steps that are possible, best first; memory decides
    # below
    splits = [{name: flags[name] for name in ("micro_batch", "grad_accum")}]
    row_bytes = flags["seq_len"] * world.ranks  # of a sequence on every rank
    if args.global_batch is not None:
        sequences, asked = (
            args.global_batch // row_bytes,
            {n: v for n, v in splits[0].items() if n in given},
        )
        splits = [
            dict(micro_batch=n, grad_accum=sequences // n)
            for n in range(min(sequences, MAX_MICRO_BATCH), 0, -1)
            if sequences % n == 0
        ]
        splits = [split for split in splits if asked.items() <= split.items()]
        if not splits or args.global_batch % row_bytes:
            raise UsageError(
                f"--global_batch: {args.global_batch:,} bytes are not a multiple of {row_bytes:,} "
                f"(--seq_len times ranks){''.join(f' times --{n} {v}' for n, v in asked.items())}"
            )
        if resumes:  # an interrupted run keeps its split
            splits.sort(key=lambda split: split["micro_batch"] != saved_flags.get("micro_batch"))
    flags["global_batch"] = math.prod(splits[0].values()) * row_bytes

    # Horizon, and the flags that follow from it
    if args.target_flops:
        cost = estimate.flops_per_byte(
            model, config.bytes_per_segment, flags["n_loops"], flags["seq_len"]
        )
        flags["target_tokens"] = whole_bytes(args.target_flops / cost)
    elif args.target_param_data_ratio:
        parameters = sum(
            model.get_parameter(name).numel()
            for name, kind in kinds_of(model).items()
            if kind.component != ENGRAM_TABLES
        )
        flags["target_tokens"] = whole_bytes(args.target_param_data_ratio * parameters)
    steps = flags["target_tokens"] / flags["global_batch"]
    flags |= {name: rule(config, steps) for name, rule in flags.items() if callable(rule)}
    for name in ("keep_best", "patience"):
        if flags[name] and not flags["eval_every"]:
            raise UsageError(
                f"--{name} needs the validation loss, but --eval_every 0 disables evaluation"
            )

    # Machine
    compiles, why_compile = machine.resolve_compile(args.compile, device)
    precision, why_precision = machine.resolve_precision(args.precision, device)
    check_fp8_experts(args.fp8_experts, precision, device, config)
    backend, why_backend = resolve_backend(
        args.moe_backend,
        device,
        config,
        torch.float32 if precision == "fp32" else torch.bfloat16,
        compiles,
    )
    why_attention = ""
    if precision != "fp32" and not args.deterministic:
        why_attention = choose_flash_attention(
            device, config.n_heads, config.v_head_dim, config.byte_window
        )
    # On unlike GPUs ranks may choose differently: a kernel is kept only where all chose it.
    if args.moe_backend == "auto" and not any(world.all(backend == name) for name in KERNELS):
        backend = "grouped"
    flags |= dict(
        precision=precision,
        moe_backend=backend,
        compile=args.compile if compiles else "off",
        optimizer="muon" if args.optimizer == "auto" else args.optimizer,
    )
    documents_per_byte = sum(source.weight * source.documents_per_byte() for source in sources)
    plan = Plan(
        flags,
        recipe,
        config,
        model_class,
        world.ranks,
        sum(estimate.state_size(model, flags["optimizer"])),
        documents_per_byte,
    )
    plans = [replace(plan, flags=flags | split) for split in splits]
    i, recompute, memory = world.on_rank0(
        lambda: estimate.choose_memory(
            len(plans),
            args.recompute,
            lambda i, recompute: estimate.estimate_memory(model, plans[i], recompute, world),
            machine.memory_of(device, world.local_ranks),
        )
    )
    plan = replace(plan, flags=plans[i].flags | dict(recompute=recompute), memory=memory)
    return replace(
        plan,
        remarks=describe_plan(
            plan, args, model, world, (why_precision, why_compile, why_backend, why_attention)
        ),
    )


def describe_plan(
    plan: Plan, args: SimpleNamespace, model: Spider, world: World, why: Iterable[str]
) -> tuple[str, ...]:
    """Return the lines that say what was chosen: by `auto`, by the recipe, by the environment."""
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    hardware = f"{torch.get_num_threads()} threads"
    if world.device.type == "cuda":
        hardware = torch.cuda.get_device_name(world.device)
    layout = (
        f", {world.ranks} ranks: {world.replicas} replicas of {world.shards} shards"
        if world.ranks > 1
        else ""
    )
    lines = [
        f"model {plan.recipe}, {parameters:.1f}M parameters, {plan.n_loops} loops; "
        f"{world.device}, {hardware}"
        f"{layout}",
        f"precision {plan.precision}, compile {plan.compile}, expert backend {plan.moe_backend}, "
        f"optimizer "
        f"{plan.optimizer}, recompute {plan.recompute}",
        *filter(None, why),
    ]
    if args.global_batch is not None:
        lines.append(
            f"a step of {plan.step_bytes:,} bytes: --micro_batch {plan.micro_batch} --grad_accum "
            f"{plan.grad_accum}"
        )
    if args.minutes:
        lines.append(
            f"--minutes chooses only at the start of a run, of which --target_tokens is "
            f"{plan.target_tokens:,}; to train longer, replace it by --target_tokens"
        )
    recipe = [
        pasteable(name, plan.flags[name])
        for name in RECIPES[plan.recipe]
        if name not in args.given and (name != "micro_batch" or args.global_batch is None)
    ]
    if recipe:
        lines.append(f"recipe of {plan.recipe}: {' '.join(recipe)}")
    if args.inherited:
        lines.append(
            f"environment or --config: "
            f"{' '.join(pasteable(*item) for item in args.inherited.items())}"
        )
    return tuple(lines)


def pasteable(name: str, value) -> str:
    """Format a flag as on the command line."""
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    text = str(value)
    return f"--{name}{'=' if text.startswith('-') else ' '}{shlex.quote(text)}"


def check_minutes(args: SimpleNamespace, saved_flags: Mapping[str, object]):
    """Raise UsageError if --minutes is another than that by which the run to resume was started."""
    before = saved_flags.get("minutes")
    if before != args.minutes:
        origin = "without --minutes" if before is None else f"for --minutes {before:g}"
        remedy = "leave it out" if before is None else "give that"
        new = "add --reset_steps" if args.resume else "name a new --ckpt_dir"
        raise UsageError(
            f"--minutes {args.minutes:g}: this resumes a run of "
            f"{saved_flags.get('target_tokens', 0):,} "
            f"bytes that was started {origin}: {remedy} to continue it; or {new} to start another"
        )


def check_fp8_experts(asked: bool, precision: str, device: torch.device, config: SpiderConfig):
    """Raise UsageError if --fp8_experts is given but not supported."""
    if asked and not config.has_experts:
        raise UsageError("--fp8_experts: this model has no routed experts")
    if asked and precision != "fp8":
        raise UsageError(f"--fp8_experts needs --precision fp8; the precision is {precision}")
    if asked and device.type == "cuda" and not multiplies_at_once(device, torch.bfloat16):
        raise UsageError(
            "--fp8_experts: torch's grouped FP8 product needs sm_90 or sm_100; leave out the "
            "flag to run "
            "the experts in bf16"
        )


def apply_settings(config: SpiderConfig, text: str | None) -> SpiderConfig:
    """Return a config with the changes of --set (NAME=VALUE,...); raise UsageError for a bad name
    or value."""
    try:
        return config.changed(text or "")
    except ValueError as fault:
        raise UsageError(f"--set: {fault}") from None


def config_of_checkpoint(
    saved_config: dict, asked: SpiderConfig | None, settings: str | None, model_class: type[Spider]
) -> SpiderConfig:
    """Return a checkpoint's config with --set applied. Raise CheckpointError, with the fields, if
    that or the `asked` model (of --model) has weights of other names or shapes."""
    saved = SpiderConfig.from_saved(saved_config)
    config = apply_settings(replace(saved, vocab_size=tokenizer.VOCAB_SIZE), settings)
    for other in (config, asked or config):  # what --set makes of it; what --model asks for
        changes = [
            f"{f.name} is {getattr(saved, f.name)}, not {getattr(other, f.name)}"
            for f in fields(other)
            if f.name != "n_loops" and getattr(saved, f.name) != getattr(other, f.name)
        ]
        if changes and shapes(replace(other, n_loops=saved.n_loops), model_class) != shapes(
            saved, model_class
        ):
            more = f"; and {len(changes) - 3} other fields" if len(changes) > 3 else ""
            raise CheckpointError(
                f"holds another model: {'; '.join(changes[:3])}{more}. Leave --model "
                f"and --set out, or train a new model in another --ckpt_dir"
            )
    return config


def shapes(config: SpiderConfig, model_class: type[Spider]) -> dict[str, tuple]:
    """Return the shapes of a model's parameters and buffers by name."""
    with torch.device("meta"):
        return {
            name: tuple(value.shape) for name, value in model_class(config).state_dict().items()
        }


MAX_EPOCHS = 20  # of a horizon without a warning
MUCH_HIGHER = 1.5  # a learning rate, relative to the last one


def horizon_warnings(plan: Plan, loader: Loader, horizon: int) -> list[str]:
    """Return warnings for a horizon in steps that does not suit the data or --max_steps."""
    warnings, epochs = [], (plan.target_tokens * loader.share / loader.targets).max()
    if epochs > MAX_EPOCHS and not plan.mock_data:
        warnings.append(
            f"--target_tokens {plan.target_tokens:,} is {epochs:,.0f} epochs, in which the model "
            f"memorizes "
            f"the data: use at most {int(plan.target_tokens * MAX_EPOCHS / epochs):,}, or more data"
        )
    factor = lr_factor(plan.max_steps - 1, horizon, plan)
    if 0 < plan.max_steps < horizon and factor > 2 * plan.min_lr_fraction and not plan.mock_data:
        warnings.append(
            f"--max_steps {plan.max_steps:,} ends the run at {factor:.0%} of the peak learning "
            f"rate, which "
            f"decays over {horizon:,} steps: use --target_tokens "
            f"{plan.max_steps * plan.step_bytes} for a "
            f"better loss"
        )
    if plan.max_steps > horizon:
        least = plan.lr * plan.min_lr_fraction
        warnings.append(
            f"--max_steps {plan.max_steps:,} is beyond the horizon of {horizon:,} steps: the "
            f"steps after "
            f"it run at the minimum learning rate, {least:.2e}; raise --target_tokens for a "
            f"schedule over "
            f"all of them"
        )
    return warnings


def rise_warnings(
    plan: Plan, loader: Loader, progress: RunProgress, horizon: int, in_place: bool
) -> list[str]:
    """Return a warning if a run resumes at a much higher learning rate than it had, as where its
    horizon was raised after the rate had fallen. in_place: it resumes in its own directory."""
    last = (progress.metrics or {}).get("lr")
    # of the last step, by the present schedule
    rate = plan.lr * lr_factor(max(0, progress.step - 1), horizon, plan)
    if not last or rate < MUCH_HIGHER * last:
        return []
    line = f"the learning rate rises from {last:.2e} to {rate:.2e}"
    first = progress.bytes_seen // plan.seq_len
    if loader.epoch(first) > progress.epoch and clears_tables(plan, loader, first):
        line += ", and the Engram tables are cleared (--engram_reset)"
    line += (
        f": the loss rises at first, and falls below that of the run so far only towards step "
        f"{horizon:,}"
    )
    if in_place:
        line += (
            f". Meanwhile --keep_last deletes the present checkpoints: to keep them, resume in a "
            f"new --ckpt_dir "
            f"by --resume {quoted(plan.ckpt_dir)}"
        )
    return [line]


# --------------------------------------------------------------------------------------------------
# Pure functions of the step

HALTING_WARMUP = 1 / 8  # of the horizon, so that every loop learns (docs/results/mechanisms.md)
DROPOUT_EPOCHS = 10  # until dropout reaches --dropout: text is memorized gradually


def lr_factor(step: int, horizon: int, plan: Plan) -> float:
    """Return the learning rate of a step (from 0) as a fraction of the peak: linear warm-up, then
    --schedule."""
    if step < plan.warmup_steps:
        return (step + 1) / (plan.warmup_steps + 1)
    done = min(1.0, (step - plan.warmup_steps) / max(1, horizon - plan.warmup_steps))
    if plan.schedule == "cosine":
        shape = 0.5 * (1 + math.cos(math.pi * done))
    else:
        shape = min(1.0, (1 - done) / plan.wsd_decay_fraction) if plan.wsd_decay_fraction else 1.0
    return plan.min_lr_fraction + (1 - plan.min_lr_fraction) * shape


def clears_tables(plan: Plan, loader: Loader, first: int) -> bool:
    """Decide whether to clear the Engram tables for an epoch that begins at sequence `first`. Not
    if less than half of it will be read: nearly empty tables at the end of a run cost more than
    memorized rows."""
    left = (plan.target_tokens - first * plan.seq_len) * loader.share / loader.targets
    return plan.engram_reset and float(loader.share @ left) >= 0.5


def dropout_at(plan: Plan, loader: Loader, first: int) -> float:
    """Return the dropout of a step that begins at sequence `first`: 0 in the first epoch, growing
    to --dropout after DROPOUT_EPOCHS; for a mixture the mean over its sources."""
    return plan.dropout * float(loader.share @ (loader.epochs(first) / DROPOUT_EPOCHS).clip(max=1))


def loops_of_step(plan: Plan, step: int) -> int:
    """Return --n_loops, or with --random_loops a Poisson draw of that mean, at least 1; the same on
    every rank."""
    if not plan.random_loops:
        return plan.n_loops
    generator = np.random.default_rng(step_seed(plan.seed, step, "loops"))
    return max(1, int(generator.poisson(plan.n_loops)))


# --------------------------------------------------------------------------------------------------
# The model: initialization, FP8, compilation


def build_model(plan: Plan, world: World) -> Spider:
    """Build the model of a plan, ready to train: initialize it from --seed, apply FP8, backend and
    compilation, shard it over the ranks. Raise TooLarge where a step surely needs more memory than
    there is."""
    estimate.check_memory(plan.memory, world)
    with torch.device("meta"):
        model = plan.model_class(plan.config)
    torch.manual_seed(plan.seed)
    model.to_empty(device=world.device)
    model.init_weights()
    emulated = plan.precision == "fp8" and not machine.multiplies_bf16(world.device)
    model.compute_dtype = torch.float32 if plan.precision == "fp32" or emulated else torch.bfloat16
    model.recompute = plan.recompute
    model.set_backend(plan.moe_backend)
    if plan.precision == "fp8":
        logger.info(describe_fp8(model, plan.fp8_experts))
        convert_to_fp8(model, world.device, plan.fp8_experts, plan.step_bytes // plan.ranks)
    if plan.compile != "off" and (obstacle := model.compile_layers()):
        logger.warning(f"compiled only the byte layers, not the core's: {obstacle}")
    model.train()
    shard_model(model, world, plan.grad_accum)
    return model


def warm_up(model: Spider, plan: Plan, device: torch.device):
    """Compile kernels by two passes on dummy bytes; weights, random state, buffers and data
    position stay unchanged. If torch.compile fails on the layers, run them uncompiled under
    --compile auto, else raise UsageError."""
    ids = torch.arange(plan.micro_batch * plan.seq_len, device=device) % 251
    ids = ids.view(plan.micro_batch, plan.seq_len)
    try:
        with model.cast_weights_once():
            for noise_seed in range(2):
                model(ids, ids, n_loops=plan.n_loops, noise_seed=noise_seed).loss.backward()
    except Exception as fault:  # whatever Dynamo, Inductor and Triton provoke
        if not model.compiled or machine.is_out_of_memory(fault):
            raise
        line = machine.describe_compile_error(fault, device)
        if plan.compile == "on" or plan.ranks > 1:
            raise UsageError(f"--compile: {line}; or use --compile off") from fault
        logger.warning(f"{line}: the layers run uncompiled")
        model.uncompile_layers()
    model.zero_grad(set_to_none=True)


# --------------------------------------------------------------------------------------------------
# One optimizer step


@dataclass
class Run:
    """The state of a run: what a step reads and changes."""

    plan: Plan
    model: Spider
    optimizers: Optimizers
    loader: Loader
    feed: Feed
    progress: RunProgress
    world: World
    stop: StopSignals
    # step at which the schedule ends: those done so far, and the rest at today's batch size; so not
    # plan.horizon where that has changed
    horizon: int
    costs: dict = field(default_factory=dict)  # FLOPs per byte, by bytes per segment and loops


def train_step(run: Run) -> StepEvents:
    """Run one optimizer step and record its metrics in `run.progress`; return what the log says of
    it."""
    plan, model, progress, world, start = (
        run.plan,
        run.model,
        run.progress,
        run.world,
        time.perf_counter(),
    )
    first = progress.bytes_seen // plan.seq_len
    epoch = run.loader.epoch(first)
    batches = run.feed.take()
    loops = loops_of_step(plan, progress.step)
    model.halting_warmup = min(1.0, (progress.step + 1) / (HALTING_WARMUP * run.horizon))
    model.dropout = dropout_at(plan, run.loader, first)
    factor = lr_factor(progress.step, run.horizon, plan)
    run.optimizers.set_lr(plan.lr, factor)
    targets = None
    if world.ranks > 1:  # those of all ranks, not read on the host
        targets = torch.full(
            (), sum(batch.targets for batch in batches), dtype=torch.float64, device=world.device
        )
        world.sum(targets)
    sums, counts = accumulate(model, batches, loops, targets)
    clears = epoch > progress.epoch and clears_tables(plan, run.loader, first)
    numbers = update(
        model, run.optimizers, sums, counts, batches, plan.grad_clip, clears, run.stop.votes()
    )
    run.stop.agree(numbers.pop("votes"))

    rate = plan.step_bytes / (time.perf_counter() - start)
    key = round(max(1.0, numbers["bytes_per_segment"]), 1), loops
    if key not in run.costs:
        run.costs[key] = estimate.flops_per_byte(model, *key, plan.seq_len)
    mfu = rate * run.costs[key] / (machine.product_rate(world.device) * world.ranks)
    numbers |= dict(
        lr=plan.lr * factor,
        tok_per_sec=rate,
        bf16_mfu=mfu,
        memory=machine.peak_memory(world.device),
        time=time.time(),
    )
    return progress.record(numbers, (first + plan.sequences) * plan.seq_len, epoch, clears)


def accumulate(
    model: Spider, batches: list[Batch], n_loops: int, targets: Tensor | None = None
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Run forward and backward over a step's micro-steps; change nothing but gradients. `targets`:
    those of all ranks.

    Return sums over the micro-steps by name: loss (nats), total_loss, segments, mean_loops and the
    loss's other terms; and tokens_per_expert and boundary_counts. Waits for the device once per
    micro-step, for the number of segments.
    """
    sharding = sharding_of(model)
    sums, counts, passes = {}, [0, 0], len(batches) * sharding.ranks
    targets = (
        max(1, sum(batch.targets for batch in batches)) if targets is None else targets.clamp_min(1)
    )
    # Terms that are means over bytes (by_byte) weigh by the batch's part of the step's targets, so
    # that all bytes weigh equally, however many are PAD. The others (balance, ponder, boundaries,
    # ...) are means over all passes.
    with model.cast_weights_once():
        for batch in batches:
            out: SpiderOutput = model(
                batch.ids, batch.labels, n_loops, batch.noise_seed, batch.cu_seqlens, batch.longest
            )
            weight = batch.targets / targets
            if isinstance(weight, Tensor):
                weight = weight.to(out.loss.dtype)
            loss = out.by_byte * weight + (out.loss - out.by_byte) / passes
            sharding.backward(model, loss, last=batch is batches[-1])
            numbers = dict(
                loss=out.nats_per_byte.detach() * weight,
                total_loss=loss.detach(),
                segments=out.segments,
                mean_loops=out.mean_loops / passes,
            )
            numbers |= {
                name: term * weight if name in out.BYTE_TERMS else term / passes
                for name, term in out.loss_terms.items()
            }
            sums = {name: number + sums.get(name, 0) for name, number in numbers.items()}
            counts = [
                a + b
                for a, b in zip(counts, (out.tokens_per_expert, out.boundary_counts), strict=True)
            ]
    return sums, counts


def update(
    model: Spider,
    optimizers: Optimizers,
    sums: dict[str, Tensor],
    counts: list[Tensor],
    batches: list[Batch],
    grad_clip: float = 1.0,
    clear_tables: bool = False,
    votes: Sequence[float] = (),
) -> dict:
    """Update the weights from accumulated gradients and return the step's metrics; `votes`, summed
    over ranks, are among them.

    Waits for the device once, for all numbers, before it changes a weight. If loss or gradient is
    not finite, no weight changes and `skipped` is true.
    """
    tokens, boundary_counts = counts  # [L, E], and what update_boundaries takes
    # Numbers that the host knows are filled in on the device, since a copy from the host would
    # wait.
    known = torch.stack(
        [
            tokens.new_full((), number, dtype=torch.float64)
            for number in (sum(batch.n_bytes for batch in batches), *votes)
        ]
    )
    # One all-reduce for all numbers of the step
    flat = torch.cat(
        (
            torch.stack(list(sums.values())).double(),
            known,
            tokens.flatten().double(),
            boundary_counts.double(),
        )
    )
    total_norm, flat = optimizers.sharding.all_reduce_step(optimizers.dense, flat)
    of_sums, known, of_tokens, boundary_counts = flat.split(
        (len(sums), len(known), tokens.numel(), boundary_counts.numel())
    )
    tokens = of_tokens.float().view_as(tokens)
    balance = tokens.amax(1) / tokens.mean(1).clamp_min(1) if tokens.numel() else tokens.new_ones(1)
    # One wait for the device for those that the host must know
    norm, balance, *numbers = torch.cat(
        (torch.stack((total_norm, balance.mean())), of_sums.float(), known)
    ).tolist()
    n_bytes, *votes = numbers[len(sums) :]
    sums = dict(zip(sums, numbers[: len(sums)], strict=True))
    skipped = not (math.isfinite(sums["total_loss"]) and math.isfinite(norm))
    if not skipped:
        if 0 < grad_clip < norm:
            nn.utils.clip_grads_with_norm_(optimizers.dense, grad_clip, total_norm)
        optimizers.step()
        model.update_expert_bias(tokens)
        model.update_boundaries(boundary_counts.float(), sums["loss"])
        if clear_tables:
            optimizers.reset_tables()
    optimizers.zero_grad()
    loss, total_loss, segments, loops = (
        sums.pop(name) for name in ("loss", "total_loss", "segments", "mean_loops")
    )
    return dict(
        loss=loss,
        total_loss=total_loss,
        grad_norm=norm,
        bytes_per_segment=n_bytes / max(1, segments),
        mean_loops=loops,
        expert_balance=balance,
        skipped=skipped,
        votes=votes,
        **sums,
    )


def step_alone(
    model: Spider,
    optimizers: Optimizers,
    batches: list[Batch],
    n_loops: int,
    grad_clip: float = 1.0,
) -> dict:
    """Run an optimizer step of a model outside of a run; return its metrics."""
    return update(model, optimizers, *accumulate(model, batches, n_loops), batches, grad_clip)


def optimizers_of(plan: Plan, model: Spider) -> Optimizers:
    return Optimizers(
        model,
        plan.optimizer,
        plan.lr,
        plan.engram_lr,
        plan.weight_decay,
        plan.beta1,
        plan.beta2,
        plan.momentum,
    )


# --------------------------------------------------------------------------------------------------
# Evaluation

EVAL_BYTES = 8192  # minimum bytes per evaluation batch; larger ones fit without gradients
SAMPLE_START = 64  # bytes of held-out text, the default prompt of a sample


@torch.no_grad()
def evaluate(
    model: Spider, sets: Mapping[str, tuple[Tensor, Tensor]], rows: int, n_loops: int, world: World
) -> dict[str, float]:
    """Evaluate on validation rows (ids and labels [n, T]) by source, `rows` at a time, distributed
    over ranks. Return val_loss, val_bpb and val_bytes_per_segment over all sources and, for several
    sources, the bits per byte of each as val_bpb/NAME. The model's training mode is restored."""
    logger.info(
        f"evaluating on {sum(int((labels != -100).sum()) for _, labels in sets.values()):,} bytes"
    )
    sums, training = {}, model.training  # sums of each source: nats, targets, bytes, segments
    model.eval()
    with model.cast_weights_once():
        for name, (all_ids, all_labels) in sets.items():
            own = torch.zeros(4, device=world.device, dtype=torch.float64)
            for batch, counts in world.distribute(
                zip(all_ids.split(rows), all_labels.split(rows), strict=True)
            ):
                ids, labels = (tensor.to(world.device) for tensor in batch)
                out, counted = model(ids, labels, n_loops=n_loops), (labels != -100).sum()
                own += counts * torch.stack(
                    (
                        out.nats_per_byte.double() * counted,
                        counted,
                        (ids != tokenizer.PAD_ID).sum(),
                        out.segments,
                    )
                )
            sums[name] = world.sum(own).tolist()
    model.train(training)
    nats, counted, n_bytes, segments = (sum(column) for column in zip(*sums.values(), strict=True))
    bpb, length, by_source = nats / counted / math.log(2), n_bytes / max(1, segments), {}
    if len(sums) > 1:
        by_source = {f"val_bpb/{name}": own[0] / own[1] / math.log(2) for name, own in sums.items()}
    logger.info(
        f"validation: loss {nats / counted:.4f} nats per byte, bpb {bpb:.4f}, {length:.2f} bytes "
        f"per segment"
        + "".join(f", {name.removeprefix('val_bpb/')} {own:.4f}" for name, own in by_source.items())
    )
    return dict(val_loss=nats / counted, val_bpb=bpb, val_bytes_per_segment=length) | by_source


def log_sample(
    model: Spider, step: int, plan: Plan, validation: Mapping[str, tuple[Tensor, Tensor]]
):
    """Log 200 generated bytes; the generator's seed is a function of (--seed, step).

    They continue --sample_prompt, else the first bytes of the `validation` rows, else a line break:
    BOS alone is a bad prompt, because a text file is one document and has it only once."""
    prompt = [ord("\n")]
    if plan.sample_prompt:
        prompt = [tokenizer.BOS_ID, *os.fsencode(plan.sample_prompt)]
    elif validation:
        ids, _ = next(iter(validation.values()))
        prompt = ids[0, :SAMPLE_START].tolist()
    generator = torch.Generator(model.embed_tokens.device).manual_seed(
        step_seed(plan.seed, step, "sample")
    )
    model.eval()
    try:
        text = tokenizer.decode(
            list(model.generate(prompt, 200, generator=generator, n_loops=plan.n_loops))
        )
        logger.info(f"step {step} continues {tokenizer.decode(prompt)!r}: {text!r}")
    except FloatingPointError as fault:
        logger.warning(f"step {step}: no sample: {fault}")
    model.train()


# --------------------------------------------------------------------------------------------------
# The dry run

MIN_SECONDS_TIMED = 2.0  # seconds of steps that a dry run times, at least one step


def time_steps(plan: Plan, world: World, sources: Sequence[Source]) -> float:
    """Measure the bytes/s of optimizer steps as in the middle of the run, on a model built for
    this."""
    logger.info(f"timing steps of {plan.step_bytes:,} bytes")
    loader = Loader(sources, plan.seq_len, plan.seed)
    model = build_model(plan, world)
    if plan.compile != "off":
        warm_up(model, plan, world.device)
    optimizers, times = optimizers_of(plan, model), []
    while len(times) < 2 or sum(times[1:]) < MIN_SECONDS_TIMED:  # the first step is a warm-up
        step, start = plan.horizon // 2 + len(times), time.perf_counter()
        first = step * plan.sequences
        batches = [batch.to(world.device) for batch in loader.batches(step, first, plan)]
        model.dropout = dropout_at(plan, loader, first)
        optimizers.set_lr(plan.lr, lr_factor(step, plan.horizon, plan))
        step_alone(model, optimizers, batches, plan.n_loops, plan.grad_clip)
        times.append(time.perf_counter() - start)
    return plan.step_bytes / float(np.median(times[1:]))


def fit_into(
    minutes: float, plan: Plan, rate: float, sources: Sequence[Source], given: Set[str]
) -> dict[str, int]:
    """Return target_tokens and eval_tokens for a run of `minutes` at `rate` bytes/s. Evaluation
    costs a third of training per byte, and gets at most a quarter of the time, unless --eval_tokens
    is among the flags that are `given`.
    """
    total, evaluations = 60 * minutes * rate, 10.0
    by_rule = "eval_every" not in given and callable(RECIPES[plan.recipe].get("eval_every"))
    if plan.eval_every and not by_rule:
        evaluations = max(1, total / (plan.eval_every * plan.step_bytes))  # one at the end
    eval_tokens = plan.eval_tokens
    held_out = sum(len(source.val) for source in sources)
    if "eval_tokens" not in given:
        eval_tokens = max(1, min(eval_tokens, held_out, int(0.75 * total / evaluations)))
    target = total - evaluations * min(eval_tokens, held_out) / 3 if plan.eval_every else total
    return dict(
        target_tokens=max(plan.step_bytes, int(min(target, MOST_BYTES))), eval_tokens=eval_tokens
    )


def print_dry_run(plan: Plan, sources: Sequence[Source], world: World) -> int:
    """Print what a run is and costs, the verdict last; return exit status 1 if memory or disk do
    not suffice."""
    with torch.device("meta"):
        model = plan.model_class(plan.config)
    estimate.print_tables(plan, model)
    if plan.precision == "fp8":
        print(describe_fp8(model, plan.fp8_experts))
    for source in sources:
        say(f"data: {source}")
    for line in plan.remarks:
        say(line)
    for line in horizon_warnings(plan, Loader(sources, plan.seq_len, plan.seed), plan.horizon):
        say(f"warning: {line}")
    lacking = estimate.print_memory_and_disk(
        plan, machine.memory_of(world.device, world.local_ranks)
    )

    peak = machine.product_rate(world.device) * world.ranks * (2 if plan.precision == "fp8" else 1)
    bound = peak / estimate.flops_per_byte(
        model, plan.config.bytes_per_segment, plan.n_loops, plan.seq_len
    )
    steps = plan.max_steps or plan.horizon
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
    say(f"run: {steps:,} steps of {plan.step_bytes:,} bytes, {duration}")
    say(
        f"verdict: NOT ENOUGH {' and '.join(lacking)}"
        if lacking
        else "verdict: enough memory and disk"
    )
    return 1 if lacking else 0


# --------------------------------------------------------------------------------------------------
# The run

# Flags whose change is logged when a run resumes, beside the config, the loops and the mixture
# (`targets`, `shares`).
LOGGED_IF_CHANGED = (
    "seed",
    "data_dir",
    "mock_data",
    "seq_len",
    "micro_batch",
    "global_batch",
    "lr",
    "schedule",
    "warmup_steps",
    "target_tokens",
    "random_loops",
    "engram_reset",
    "engram_lr",
    "weight_decay",
    "dropout",
    "beta1",
    "beta2",
    "momentum",
    "grad_clip",
    "min_lr_fraction",
    "wsd_decay_fraction",
    "eval_tokens",
    "optimizer",
)
# without --log_every: about so many lines, and one at least every so often
LOG_LINES, LOG_SECONDS = 100, 60.0
# these decide which bytes are evaluated
EVALUATED = {"mock_data", "seq_len", "eval_tokens", "targets", "shares"}
# and these which sequences a step reads
ORDER = {"mock_data", "seq_len", "seed", "targets", "shares"}


def restore(
    state: dict, resumes: bool, plan: Plan, model: Spider, optimizers: Optimizers, loader: Loader
) -> RunProgress:
    """Load a checkpoint into model and optimizers, or only its weights; log what has changed since;
    return the run's progress."""
    sharding_of(model).load_model(model, state["model_state_dict"])
    if not resumes:
        return RunProgress()
    optimizers.load_state_dict(state["optimizer_state_dict"])
    progress = RunProgress(
        **{f.name: state[f.name] for f in fields(RunProgress) if f.name in state}
    )
    # What an older checkpoint lacks counts as unchanged, since `before` begins with `now`.
    now = asdict(plan.config) | {name: plan.flags[name] for name in LOGGED_IF_CHANGED}
    now |= dict(n_loops=plan.n_loops, **loader.mixture())
    before = (
        now
        | asdict(SpiderConfig.from_saved(state["cfg"]))
        | state.get("flags", {})
        | {name: state[name] for name in ("n_loops", *loader.mixture()) if name in state}
    )
    changed = [name for name in now if before[name] != now[name]]
    if changed:
        logger.warning(
            "settings differ from the run so far: "
            + "; ".join(f"{name} was {before[name]}, is {now[name]}" for name in changed)
        )
    if {*changed} - {"data_dir"}:  # the same data may have moved
        if not ORDER.isdisjoint(changed):
            logger.warning(
                "they change which text a step reads: until each source begins its next epoch, "
                "some of its "
                "text is read again, and some is skipped"
            )
        progress.forget_losses(evaluations=not EVALUATED.isdisjoint(changed))
        # With more data the position may be in an earlier epoch; tables are cleared when an epoch
        # exceeds this one.
        progress.epoch = min(progress.epoch, loader.epoch(progress.bytes_seen // plan.seq_len))
    return progress


def run_state(
    plan: Plan, model: Spider, optimizers: Optimizers, progress: RunProgress, loader: Loader
) -> dict:
    """Build the state of a checkpoint from tensors and plain values; see checkpoint.py for the
    keys."""
    return dict(
        model_state_dict=sharding_of(model).model_state(model),
        optimizer_state_dict=optimizers.state_dict(),
        cfg=asdict(model.config),
        recipe=plan.recipe,
        **loader.mixture(),
        flags={name: plan.flags[name] for name in (*LOGGED_IF_CHANGED, "minutes")},
        **asdict(progress),
    )


def columns_of(plan: Plan, device: torch.device) -> list[tuple[str, str]]:
    """Return the columns of a step's line in the log: a format of its metrics, and its meaning."""
    columns = [
        ("loss {loss:.4f}", "loss (cross-entropy in nats per byte)"),
        ("bpb {bpb:.4f}", "bpb (the same in bits per byte)"),
        ("lr {lr:.2e}", "lr (learning rate)"),
        ("norm {grad_norm:.3f}", "norm (of the gradient, before clipping)"),
        ("{tok_per_sec:,.0f} bytes/s", "bytes/s (of this step)"),
    ]
    if device.type == "cuda":
        columns.append(
            ("MFU {bf16_mfu:.1%}", "MFU (model FLOPs relative to the measured bf16 peak)")
        )
    if plan.config.n_recurrent_layers:
        columns.append(("{bytes_per_segment:.2f} bytes/segment", "bytes/segment (mean length)"))
        if plan.random_loops or (plan.n_loops > 1 and plan.config.act):
            columns.append(("{mean_loops:.2f} loops", "loops (until a segment halts, mean)"))
    if plan.config.has_experts:
        columns.append(
            ("balance {expert_balance:.2f}", "balance (load of the busiest expert, 1 is even)")
        )
    return [
        *columns,
        ("{memory:.2f} GB", "GB (peak memory so far)"),
        ("ETA {eta}", "ETA (time left)"),
    ]


def progress_line(
    columns: list[tuple[str, str]], metrics: dict, last_step: int, remaining: float
) -> str:
    """Format a step's metrics for the log; `remaining` in seconds."""
    values = metrics | dict(
        bpb=metrics["loss"] / math.log(2), eta=estimate.describe_duration(remaining)
    )
    cells = [cell.format(**values) for cell, _ in columns]
    return " | ".join((f"step {metrics['step']}/{last_step}", *cells))


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
    what = "skipped: loss or gradient is not finite" if progress.skipped else "is a spike"
    where = "--mock_data" if plan.mock_data else quoted(plan.data_dir)
    first = progress.bytes_seen // plan.seq_len - plan.sequences
    return (
        f"step {progress.step} {what}; its batch: python data.py show {where} --seq_len "
        f"{plan.seq_len} --seed "
        f"{plan.seed} --first {first} --count {plan.sequences}"
    )


def open_run(
    args: SimpleNamespace, world: World, closing: ExitStack, model_class: type[Spider]
) -> tuple[Plan, list[Source], tuple]:
    """Configure this process, join the other ranks, find data and checkpoint, and settle the plan.
    Return the plan, the data, and the checkpoint: its path, its state, and whether the run resumes
    from it (see checkpoint.load_origin)."""
    machine.start_log("INFO" if world.is_rank0 else "ERROR")
    device = machine.resolve_device(args.device)
    if device.type == "cpu":
        machine.keep_freed_memory()
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    world.join(device, args.shards, args.rank_timeout)
    sources, directory = (
        [mock_source(args.seed)] if args.mock_data else open_data(args.data_dir),
        Path(args.ckpt_dir),
    )

    def open_directory():
        if not args.dry_run:
            directory.mkdir(parents=True, exist_ok=True)
            closing.enter_context(common.locked(directory))
        return load_origin(directory, args.resume, args.reset_steps, model_class)

    path, state, resumes = origin = world.on_rank0(open_directory)
    try:
        plan = settle(args, world, state, resumes, model_class, sources)
    except CheckpointError as fault:
        raise CheckpointError(f"{path}: {fault}") from None
    if args.minutes and not resumes:
        # the speed of this plan gives its horizon, which changes the plan
        if world.ranks > 1:
            raise UsageError("--minutes times steps on one process: use --target_tokens")
        rate = time_steps(plan, world, sources)
        chosen = fit_into(args.minutes, plan, rate, sources, args.given)
        args = SimpleNamespace(**vars(args) | chosen | dict(given=args.given | chosen.keys()))
        plan = settle(args, world, state, resumes, model_class, sources)
    return plan, sources, origin


def main(
    args: SimpleNamespace,
    world: World,
    stop: StopSignals,
    closing: ExitStack,
    model_class: type[Spider] = Spider,
) -> int:
    """Train, from the flags to the last checkpoint, and return the exit status. `closing` closes
    all resources."""
    plan, sources, (path, state, resumes) = open_run(args, world, closing, model_class)
    directory = Path(plan.ckpt_dir)
    if plan.dry_run:
        return print_dry_run(plan, sources, world) if world.is_rank0 else 0
    for line in (
        *plan.remarks,
        *map(str, sources),
        estimate.describe_memory(plan.memory, machine.memory_of(world.device, world.local_ranks)),
    ):
        logger.info(line)

    # ----------------------------------------------------------------------------------------------
    # Model and optimizers, restored from the checkpoint
    loader = Loader(sources, plan.seq_len, plan.seed)
    validation = validation_sets(sources, plan.seq_len, plan.eval_tokens) if plan.eval_every else {}
    eval_rows = max(plan.micro_batch, EVAL_BYTES // plan.seq_len)
    model = build_model(plan, world)
    optimizers, progress = optimizers_of(plan, model), RunProgress()
    if state is not None:
        logger.info(f"{'resuming from' if resumes else 'weights of'} {path} (step {state['step']})")
        progress = restore(state, resumes, plan, model, optimizers, loader)
    progress.n_loops, state = plan.n_loops, None
    if progress.exploded:
        logger.warning(
            f"{path}: the loss had exploded by then; to go back, name an earlier checkpoint by "
            f"--resume, "
            f"and a new --ckpt_dir"
        )

    # ----------------------------------------------------------------------------------------------
    # Loop state
    horizon = progress.step + math.ceil(
        max(0, plan.target_tokens - progress.bytes_seen) / plan.step_bytes
    )
    last_step, first_step = plan.max_steps or horizon, progress.step + 1
    log_every = plan.log_every or math.ceil(last_step / LOG_LINES)
    in_place = resumes and path.parent == directory
    metrics_file = tracker = profiler = None
    if world.is_rank0:
        first_line = progress.step if progress.metrics else progress.step + 1
        metrics_file = closing.enter_context(Metrics(directory / "metrics.jsonl", first_line))
        tracker = start_wandb(plan.run, plan.flags, progress, closing, in_place)
        profiler = start_profiler(directory, closing) if plan.profile else None
        closing.callback(lambda: write_curves(directory, stop.agreed or stop.asked))
    # Not later ones: load_origin found them damaged, but find_checkpoints reads no checksums.
    saved = (
        [one for one in find_checkpoints(directory) if one.step <= progress.step]
        if world.is_rank0
        else []
    )
    writer = CheckpointWriter(directory, saved, plan.keep_last, plan.keep_best, world)
    closing.callback(writer.thread.shutdown)
    if in_place:
        writer.step = progress.step
    cost = estimate.flops_per_byte(model, plan.config.bytes_per_segment, plan.n_loops, plan.seq_len)
    logger.info(
        f"step {progress.step:,} of {last_step:,}, each of {plan.step_bytes:,} bytes; "
        f"{cost / 1e9:.2g} GFLOP "
        f"per byte at {plan.config.bytes_per_segment:.2g} bytes per segment; checkpoints in "
        f"{directory}"
    )
    if progress.step < last_step:
        for line in (
            *horizon_warnings(plan, loader, horizon),
            *rise_warnings(plan, loader, progress, horizon, in_place),
        ):
            logger.warning(line)
        if plan.precision == "fp8" or plan.compile != "off":
            warm_up(model, plan, world.device)
    feed = Feed(
        loader, plan, world.rank, world.device, progress.step, progress.bytes_seen // plan.seq_len
    )
    run = Run(plan, model, optimizers, loader, feed, progress, world, stop, horizon)
    # As after the last step, so that a checkpoint saved before the next one has the same bits.
    optimizers.set_lr(plan.lr, lr_factor(max(0, progress.step - 1), horizon, plan))
    columns = columns_of(plan, world.device)
    if progress.step < last_step:
        logger.info(f"columns of a step: {', '.join(meaning for _, meaning in columns)}")
    began = logged = time.perf_counter()
    paused = 0.0
    stop.raises = False

    # ----------------------------------------------------------------------------------------------
    # The loop: what is due after a step, then the next one
    while True:
        metrics, last = progress.metrics, progress.step >= last_step

        # Once in a while: evaluate, unless the checkpoint has this step's evaluation, and sample
        may_pause = metrics is not None and not stop.agreed
        evaluates = may_pause and plan.eval_every and (last or progress.step % plan.eval_every == 0)
        samples = (
            may_pause and plan.sample_every and (last or progress.step % plan.sample_every == 0)
        )
        pause = time.perf_counter()
        try:
            stop.raises = world.ranks == 1  # several finish an evaluation together
            if evaluates and progress.val_loss is None:
                metrics |= evaluate(model, validation, eval_rows, plan.n_loops, world)
                progress.record_evaluation(
                    metrics["val_loss"], counts=progress.step % plan.eval_every == 0
                )
                # a resumed checkpoint of this step lacks the evaluation
                writer.step = progress.step - 1
            if samples and (whole := sharding_of(model).gather_model(model)) is not None:
                log_sample(whole, progress.step, plan, validation)
            stop.raises = False
        except Stopped:
            stop.raises = False
        paused += time.perf_counter() - pause
        if metrics and metrics_file:
            metrics_file.write(metrics)
        if tracker and progress.step >= first_step:
            tracker.log(metrics, step=progress.step)

        # Once in a while: save
        out_of_patience = 0 < plan.patience <= progress.unimproved
        ends = last or stop.agreed or out_of_patience
        due = progress.step % plan.ckpt_every == 0 or (plan.keep_best and progress.is_best)
        unsaved = progress.step > max(0, writer.step)  # step 0 is never saved
        if unsaved and (ends or (due and not progress.skipped)):
            writer.save(
                run_state(plan, model, optimizers, progress, loader),
                metrics_file and metrics_file.sync,
            )
        if progress.skipped >= plan.max_skipped:
            raise Diverged(
                f"the last {progress.skipped} steps had no finite loss or gradient, and changed "
                f"no weight: "
                f"resume with a lower --lr or more --warmup_steps"
            )
        if ends:
            break

        # ------------------------------------------------------------------------------------------
        events = train_step(run)
        # ------------------------------------------------------------------------------------------

        # Once in a while: a line of the log
        now = time.perf_counter()
        overdue = plan.log_every is None and now - logged > LOG_SECONDS
        if overdue or progress.step % log_every == 0 or progress.step in (first_step, last_step):
            logged = now
            pace = (now - began - paused) / (progress.step - first_step + 1)
            logger.info(
                progress_line(
                    columns, progress.metrics, last_step, (last_step - progress.step) * pace
                )
            )
        # Once in a while: an epoch begins; a step is skipped, or its loss is a spike
        if events.begins_epoch:
            logger.info(epoch_line(progress, events.cleared))
        if progress.skipped or events.spike:
            logger.warning(odd_step_line(progress, plan))
        if profiler:
            profiler.step()

    # ----------------------------------------------------------------------------------------------
    # The end
    if not writer.holds(progress.step):
        raise CheckpointError(
            f"--ckpt_dir: step {progress.step} could not be saved in {directory}; older "
            f"checkpoints "
            f"are intact: make room; the same command resumes"
        )
    if stop.agreed:
        raise Stopped(
            f"stopped after step {progress.step}, which is saved in {directory}; the same "
            f"command resumes"
        )
    if out_of_patience:
        more = (
            f"ended by --patience {plan.patience}: the last {progress.unimproved} evaluations "
            f"did not lower the "
            f"validation loss; to continue, raise it, or set it to 0"
        )
    elif progress.step < horizon:
        more = "to continue, raise --max_steps"
    else:
        ends_it = [
            f"--{name}"
            for name in ("minutes", "target_flops", "target_param_data_ratio", "max_steps")
            if plan.flags[name]
        ]
        flags = f"the same flags without {' and '.join(ends_it)}" if ends_it else "the same flags"
        more = (
            f"to train longer: {flags}, but --resume {quoted(directory)}, a new --ckpt_dir and a "
            f"larger "
            f"--target_tokens; the rate rises again, and with it the loss at first"
        )
    best = (
        f"best validation loss {progress.best_loss:.4f}, "
        if math.isfinite(progress.best_loss)
        else ""
    )
    logger.info(
        f"done: step {progress.step}, {progress.bytes_seen:,} bytes, "
        f"{best}{time.perf_counter() - began:.0f} s"
    )
    if plan.model_class is Spider:  # sample.py loads no other
        logger.info(f"next: python sample.py {quoted(directory)}")
    logger.info(more)
    return 0


# --------------------------------------------------------------------------------------------------
# The command line


# which all ranks of a host have, and its first one prints
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
            args = parse_args(argv)
            advice = (
                f"lower --micro_batch (now {args.micro_batch}) and raise --grad_accum as much, "
                f"or lower --seq_len"
            )
            try:
                with machine.memory_advice(advice), ExitStack() as closing:
                    status = main(args, world, stop, closing, model_class)
            except Diverged:  # on all ranks, after the same step
                world.leave()
                raise
            world.leave()
            return status

        try:
            return common.run_program(
                work, "train.py", silent=SHARED_ERRORS if world.local_rank else ()
            )
        except Stopped as where:
            number = stop.agreed or stop.asked
            if stop.agreed:  # by all ranks; before the first step others may be in a collective
                world.leave()
            if world.is_rank0:
                common.print_error("train.py", f"{number.name}: {where}")
            return 128 + number


if __name__ == "__main__":
    sys.exit(record(command_line)())
