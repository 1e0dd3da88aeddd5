"""Train Spider, a byte-level Recurrent-Depth Transformer, from memory-mapped byte shards.

    python train.py --mock_data --max_steps 20 --seq_len 128 --micro_batch 2            # smoke run, on any machine
    python train.py --data_dir data --seq_len 256 --micro_batch 112 --grad_accum 4      # one GPU
    torchrun --standalone --nproc_per_node 8 train.py --data_dir data --shards 8        # several

The same command again goes on from the newest checkpoint in --ckpt_dir. Everything random is a function of (--seed,
step), so that an interrupted run ends like an undisturbed one. `python train.py --help` lists the flags.
"""

import argparse
import ctypes
import dataclasses
import hashlib
import importlib.util
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache, partial
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import SimpleNamespace

import numpy as np
import torch
from loguru import logger
from torch import Tensor, nn

import cost
import data
import files
import look
import tokenizer
from checkpoint import CheckpointError, Progress, RunDirectory, check_same_model, run_state
from distributed import LeftByPeer, World, WorldError
from engram import EngramTable
from layers import Linear, document_cu_seqlens
from leaving import Diverged, Leaving, Stopped, StopSignals, wants_memory
from optim import OPTIMIZERS, Optimizers, OptimizerSettings, multiplies_bf16, quiet
from spider_model import (LOSS_PARTS, MAX_LOOPS, PRESETS, RECOMPUTE, MoE, Spider, SpiderConfig, SpiderOutput,
                          component_of)
from tile_moe import BACKENDS, BackendError, multiplies_at_once, resolve_backend


class UsageError(Exception):
    """Something that was asked for cannot be done; the message is one line that names it and the remedy."""


# ---------------------------------------------------------------------------------------------------------------------
# Flags and environment: flag, then environment variable, then default

@dataclass(frozen=True)
class Flag:
    """One setting of the command line; `parse` turns its text into a value or raises ValueError with what it wants."""
    name: str
    default: object
    parse: Callable | None                # None: a switch; alone it means on, and `off` undoes a recipe's
    help: str
    env: str | None = None
    alone: str | None = None              # the text that it stands for without one, where it need not have one


def integer(low: int, high: int = (1 << 62) - 1) -> Callable:
    def parse(text):
        try:
            value = int(text) if files.decimal(text).isdigit() else float(text)  # 10e9 is a whole number too
        except ValueError:
            value = math.nan
        if not low <= value <= high or value != int(value):
            raise ValueError(f"a whole number of at least {low}" + f" and at most {high}" * (high < 1 << 61))
        return int(value)
    return parse


def real(low: float, high: float = math.inf, open_low: bool = False, open_high: bool = False) -> Callable:
    def parse(text):
        value = files.number(text)
        excluded = (open_low and value == low) or (open_high and value == high) or math.isinf(value)
        if excluded or not low <= value <= high:
            raise ValueError(f"a number {'above' if open_low else 'of at least'} {low:g}" + (
                "" if high == math.inf else f" and {'below' if open_high else 'at most'} {high:g}"))
        return value
    return parse


def one_of(*choices: str) -> Callable:
    def parse(text):
        if text not in choices:
            raise ValueError(f"one of {', '.join(choices)}")
        return text
    parse.choices = choices               # --help shows them
    return parse


HIGHEST_RATE = 1000.0                     # beyond it nothing is learned, and steps overflow
MOST_MICRO_STEPS = 1 << 16

# Defaults are the recipe of `1b`; RECIPES below has what is otherwise for the smaller models.
FLAGS = (
    # model
    Flag("model", "auto", one_of("auto", *PRESETS), "auto: the checkpoint's, else 1b on a GPU, tiny elsewhere"),
    Flag("set", None, str, "NAME=VALUE,... fields of SpiderConfig to change, e.g. lora_rank=0,engram_layers=0+1"),
    Flag("n_loops", 6, integer(1, MAX_LOOPS), "loops of the recurrent core", "N_LOOPS"),
    Flag("random_loops", False, None, "draw the loops of each step from a Poisson distribution around --n_loops"),
    # data
    Flag("data_dir", "data", files.a_path, "directory of .bin shards, or a mixture: web:0.7,code:0.3", "DATA_DIR"),
    Flag("mock_data", False, None, "synthetic, learnable bytes in place of --data_dir"),
    Flag("seq_len", 2048, integer(2, 1 << 24), "bytes per sequence", "SEQ_LEN"),
    Flag("micro_batch", 64, integer(1, 1 << 20), "sequences a device takes at once; fewer: less memory", "MICRO_BATCH"),
    Flag("grad_accum", 1, integer(1, MOST_MICRO_STEPS), "micro-steps per optimizer step", "GRAD_ACCUM"),
    Flag("global_batch", None, integer(1), "bytes per optimizer step on all ranks together, in place of --grad_accum"),
    # horizon
    Flag("target_tokens", 10_000_000_000, integer(1), "bytes to train on, the schedule's horizon", "TARGET_TOKENS"),
    Flag("target_flops", None, real(0, open_low=True), "the horizon as training FLOPs, in place of --target_tokens"),
    Flag("target_param_data_ratio", None, real(0, open_low=True), "the same as bytes per parameter, tables left out"),
    Flag("max_steps", 0, integer(0), "stop after so many optimizer steps; 0: at --target_tokens, beyond which the "
         "learning rate stays at its lowest"),
    # optimizer
    Flag("optimizer", "auto", one_of("auto", *OPTIMIZERS), "auto: muon (AdamW for the rest)"),
    Flag("lr", OptimizerSettings.lr, real(0, HIGHEST_RATE, open_low=True), "peak learning rate (Muon's steps have AdamW's "
         "size)", "LR"),
    Flag("engram_lr", OptimizerSettings.engram_lr, real(0, HIGHEST_RATE),
         "learning rate of the Engram tables: the size of a row's first step"),
    Flag("engram_reset", False, None, "empty the Engram tables, which memorise what they saw, as an epoch begins"),
    Flag("schedule", "cosine", one_of("cosine", "wsd"), "after warm-up: cosine, or constant and then a linear decay"),
    Flag("warmup_steps", 10, integer(0), "optimizer steps of linear warm-up"),
    Flag("wsd_decay_fraction", 0.2, real(0, 1), "part of the horizon in which wsd decays"),
    Flag("min_lr_fraction", 0.1, real(0, 1), "learning rate at the horizon, as a part of the peak"),
    Flag("weight_decay", OptimizerSettings.weight_decay, real(0, HIGHEST_RATE),
         "of matrices; never of vectors and Engram tables"),
    Flag("dropout", 0.0, real(0, 0.9), "of what the core reads and of what it hands back, a fifth as much of "
         "bytes before and behind it; grows over ten epochs, from 0 in the first"),
    Flag("beta1", OptimizerSettings.beta1, real(0, 1, open_high=True), "AdamW's first decay"),
    Flag("beta2", OptimizerSettings.beta2, real(0, 1, open_high=True), "AdamW's second decay"),
    Flag("momentum", OptimizerSettings.momentum, real(0, 1, open_high=True), "Muon's momentum"),
    Flag("grad_clip", 1.0, real(0), "largest norm of the gradient, Engram tables apart; 0: off"),
    Flag("max_skipped", 10, integer(1), "stop after so many steps in a row that are not finite"),
    Flag("seed", 0, integer(0), "of weights, data order, segment noise, dropout and loop counts"),
    # machine
    Flag("device", "auto", one_of("auto", "cpu", "cuda"), "auto: cuda where there is one"),
    Flag("precision", "auto", one_of("auto", "fp8", "bf16", "fp32"), "auto: bf16 where the hardware has it, fp8 only "
         "where layers are compiled too"),
    Flag("fp8_experts", False, None, "with fp8: the routed experts too, scaled by row"),
    Flag("moe_backend", "auto", one_of("auto", *BACKENDS), "auto: grouped with compiled layers, else tile where it "
         "runs, else grouped; loop: reference"),
    Flag("compile", "auto", one_of("auto", "on", "off"), "torch.compile the layers (mode default); alone: on; auto: on "
         "a GPU, where it works", alone="on"),
    Flag("shards", 1, integer(1, 1 << 16), "ranks that share out weights and optimizer state; the rest replicate them"),
    Flag("rank_timeout", 300, real(0, 1e6, open_low=True), "seconds that ranks wait for one another, after the first "
         "step; for a save as long as it takes"),
    Flag("deterministic", False, None, "on a GPU: kernels that give the same bits every time, some slower"),
    Flag("recompute", "auto", one_of("auto", *RECOMPUTE), "layers whose activations the backward pass computes again; "
         "auto: the fewest with which a step fits into the device's memory"),
    Flag("no_gradient_checkpointing", False, None, "the same as --recompute nothing"),
    # checkpoints
    Flag("ckpt_dir", "checkpoints", files.a_path, "where checkpoints and metrics.jsonl go; its mock/ with --mock_data"),
    Flag("ckpt_every", 50, integer(1), "optimizer steps between checkpoints", "CKPT_EVERY"),
    Flag("sharded_checkpoints", False, None, "write a directory, every rank its part, where one file gets too large"),
    Flag("keep_last", 2, integer(2, 1 << 20), "checkpoints of this run to keep"),
    Flag("resume", None, files.a_path, "checkpoint to go on from; without it the newest good one in --ckpt_dir"),
    Flag("reset_steps", False, None, "take the weights alone: fresh optimizer, step 0, data from the start"),
    # evaluation and logs
    Flag("eval_every", 250, integer(0), "optimizer steps between evaluations, one more at the end; 0: none"),
    Flag("eval_tokens", 1_048_576, integer(1, 1 << 40), "validation bytes to evaluate on, always the same ones"),
    Flag("sample_every", 0, integer(0), "optimizer steps between printed samples; 0: none"),
    Flag("sample_prompt", None, str, "what samples go on from; without it held-out text, where there is evaluation"),
    Flag("run", None, files.filled("a name"), "name of a wandb run; without it no wandb (WANDB_MODE=offline works)"),
    Flag("dry_run", False, None, "print what would be trained, its memory and cost, check the data, and stop"),
    Flag("profile", False, None, "write a profiler trace of steps 3 to 5 to --ckpt_dir"),
)


def measured_rate(config: SpiderConfig, steps: float) -> float:
    """The peak rate of a horizon of so many optimizer steps, by what was measured of tiny (docs/learning.md)."""
    return float(f"{min(0.02, 0.116 * steps ** -0.4 * (128 / config.hidden_size) ** 0.5):.3g}")


def brief_warmup(config: SpiderConfig, steps: float) -> int:
    """Steps of warm-up in a horizon of so many: of a short one not more than it can spare (docs/learning.md)."""
    return int(min(40, steps / 25))


def ten_evaluations(config: SpiderConfig, steps: float) -> int:
    """Steps between evaluations, ten in a horizon of so many. On all that validates of tinyshakespeare one takes as
    long as 8 steps of tiny: ten add 3% to the recipe's 2,930 steps, and 31% to one pass, 245."""
    return max(1, math.ceil(steps / 10))


# What a model trains with where neither flag nor environment says otherwise; a function makes it of config and steps.
# docs/learning.md measures what tiny has.
RECIPES = {
    "1b": {},
    "small": dict(n_loops=2, seq_len=4096, micro_batch=2, target_tokens=30_000_000, lr=measured_rate,
                  warmup_steps=brief_warmup, dropout=0.5, engram_reset=True, ckpt_every=250, eval_every=ten_evaluations,
                  eval_tokens=524_288),
    "tiny": dict(n_loops=1, seq_len=4096, micro_batch=1, target_tokens=12_000_000, lr=measured_rate,
                 warmup_steps=brief_warmup, dropout=0.5, engram_reset=True, ckpt_every=500, eval_every=ten_evaluations,
                 eval_tokens=262_144),
}


def said(value) -> str:
    """A recipe's value in words."""
    return "by the horizon" if callable(value) else "on" if value is True else str(value)


class Parser(data.Parser):
    def error(self, message):
        raise UsageError(files.one_line(message))


def parse_args(argv: list[str] | None = None, environ=os.environ) -> SimpleNamespace:
    """Values of all flags by name; `given`, the names set by flag or environment, and what the `environment` says.

    A bad value of either is a UsageError.
    """
    parser = Parser(prog="train.py", description=__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in FLAGS:
        text = flag.help + (f"; default {flag.default}" if flag.default not in (None, False) else "")
        text += "".join(f"; {name}: {said(recipe[flag.name])}"
                        for name, recipe in RECIPES.items() if flag.name in recipe)
        text += f"; environment {flag.env}" if flag.env else ""
        choices = ("on", "off") if flag.parse is None else getattr(flag.parse, "choices", None)
        alone = "on" if flag.parse is None else flag.alone
        switch = dict(nargs="?", const=alone) if alone else {}
        parser.add_argument(f"--{flag.name}", metavar="{" + ",".join(choices) + "}" if choices else "X",
                            help=text.replace("%", "%%"), **switch)
    given = vars(parser.parse_args(argv))
    args = SimpleNamespace(given=set(), environment=[])
    for flag in FLAGS:
        text, source = given[flag.name], f"--{flag.name}"
        if text is None and flag.env and environ.get(flag.env):
            text, source = environ[flag.env], flag.env
            args.environment.append(f"{source}={text}")
        if text is None:
            setattr(args, flag.name, flag.default)
            continue
        try:
            setattr(args, flag.name, flag.parse(text) if flag.parse else one_of("on", "off")(text) == "on")
        except ValueError as wanted:
            raise UsageError(f"{source}: {text!r} is not {wanted}") from None
        args.given.add(flag.name)
    if args.no_gradient_checkpointing and args.recompute not in ("auto", "nothing"):
        raise UsageError(f"--no_gradient_checkpointing: it is --recompute nothing, and --recompute {args.recompute} is "
                         "given: give one of the two")
    args.recompute = "nothing" if args.no_gradient_checkpointing else args.recompute
    if args.mock_data and "ckpt_dir" not in args.given:
        args.ckpt_dir = os.path.join(args.ckpt_dir, "mock")
    return args


def take_recipe(args, device: torch.device, saved: str | None = None):
    """Fills in what neither flag nor environment gave, from the recipe of --model, named in `args.recipe`: `auto` is
    the one that a checkpoint was made with, else what suits the device."""
    suits = "1b" if device.type == "cuda" else "tiny"
    args.recipe = (saved or suits) if args.model == "auto" else args.model
    for key, value in RECIPES[args.recipe].items():
        if key not in args.given:
            setattr(args, key, value)


def take_batch(args, ranks: int):
    """Settles --grad_accum by --global_batch or the other way round; given both, they must say the same."""
    at_once = args.micro_batch * args.seq_len * ranks
    if args.global_batch is None:
        args.global_batch = at_once * args.grad_accum
        return
    if args.global_batch % at_once:
        raise UsageError(f"--global_batch: {args.global_batch:,} bytes are not a multiple of the {at_once:,} that "
                         f"{ranks} rank{'s' * (ranks > 1)} of {args.micro_batch} x {args.seq_len} take at once: lower "
                         f"--micro_batch, or change --global_batch")
    if "grad_accum" in args.given and args.grad_accum * at_once != args.global_batch:
        raise UsageError(f"--grad_accum: {args.grad_accum} makes {args.grad_accum * at_once:,} bytes a step on {ranks} "
                         f"rank{'s' * (ranks > 1)}, --global_batch is {args.global_batch:,}: give one of the two")
    args.grad_accum = args.global_batch // at_once
    if args.grad_accum > MOST_MICRO_STEPS:
        raise UsageError(f"--global_batch: {args.global_batch:,} bytes are {args.grad_accum:,} micro-steps of "
                         f"{at_once:,}: at most {MOST_MICRO_STEPS:,}, or raise --micro_batch")


def take_recompute(args, model: Spider, n_loops: int, optimizer: str, precision: str, device: torch.device,
                   world: World | None = None, rate: float | None = None) -> dict[str, float]:
    """Settles --recompute auto, alike on all ranks; returns the bytes by purpose that a rank then takes of the device's
    memory. `rate`: bytes per segment, where it is not the config's."""
    world = World() if world is None else world
    estimate = partial(cost.estimate_memory, model, n_loops, args, optimizer, precision, device, world=world, rate=rate)
    args.recompute, memory = world.lead(lambda: cost.choose_recompute(
        args.recompute, lambda recompute: cost.beside_tensors(model, optimizer, device, world) | estimate(recompute),
        cost.memory_of(device, world)))
    return memory


def take_horizon(args, model: Spider, n_loops: int):
    """Turns --target_flops or --target_param_data_ratio into --target_tokens; two of the three are one too many. What
    a recipe makes of the horizon is settled then."""
    given = [name for name in ("target_tokens", "target_flops", "target_param_data_ratio") if name in args.given]
    if len(given) > 1:
        raise UsageError(f"--{given[1]}: --{given[0]} gives the horizon already, by flag or environment; give one")
    if args.target_flops:
        per_byte = model.flops_per_byte(model.config.bytes_per_segment, n_loops, args.seq_len)
        args.target_tokens = max(1, math.ceil(min(args.target_flops / per_byte, 1 << 62)))
    elif args.target_param_data_ratio:
        parameters = sum(p.numel() for name, p in model.named_parameters() if component_of(name) != "Engram tables")
        args.target_tokens = math.ceil(min(args.target_param_data_ratio * parameters, 1 << 62))
    if args.target_tokens >= 1 << 62:
        raise UsageError(f"--{given[0]}: a horizon of {args.target_tokens:.0e} bytes: at most {1 << 62:.0e}")
    for flag in FLAGS:
        if callable(rule := getattr(args, flag.name)):
            setattr(args, flag.name, rule(model.config, args.target_tokens / args.global_batch))


def model_config(args, base: SpiderConfig | None = None) -> SpiderConfig:
    """What --set makes of a config; without one, of the recipe's preset with --n_loops."""
    config = dataclasses.replace(SpiderConfig.preset(args.recipe), n_loops=args.n_loops) if base is None else base
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    for setting in (args.set or "").split(",") if args.set else ():
        name, _, text = setting.partition("=")
        if name == "n_loops":
            raise UsageError("--set: n_loops has a flag of its own, --n_loops")
        if name not in fields:
            raise UsageError(f"--set: {name!r} is not a field of SpiderConfig")
        kind = type(fields[name])
        try:
            if kind is bool:
                fields[name] = {"true": True, "false": False}[text.lower()]
            elif kind is tuple:
                fields[name] = tuple(int(files.decimal(part)) for part in text.split("+") if part)
            else:
                fields[name] = text if kind is str else kind(files.decimal(text))
        except (ValueError, KeyError):
            wanted = {bool: "true or false", tuple: "whole numbers joined by +"}.get(kind, kind.__name__)
            raise UsageError(f"--set: {name} takes {wanted}, not {text!r}") from None
    try:
        return SpiderConfig(**fields)
    except ValueError as fault:
        raise UsageError(f"--set: {fault}") from None


# ---------------------------------------------------------------------------------------------------------------------
# Pure functions of the step

def lr_factor(step: int, horizon: int, args) -> float:
    """Learning rate of a step (from 0) as a part of the peak: linear warm-up, then --schedule down to the floor."""
    if step < args.warmup_steps:
        return (step + 1) / (args.warmup_steps + 1)
    done = min(1.0, (step - args.warmup_steps) / max(1, horizon - args.warmup_steps))
    if args.schedule == "cosine":
        shape = 0.5 * (1 + math.cos(math.pi * done))
    else:
        shape = min(1.0, (1 - done) / args.wsd_decay_fraction) if args.wsd_decay_fraction else 1.0
    return args.min_lr_fraction + (1 - args.min_lr_fraction) * shape


def empties_tables(args, loader: data.Loader, first: int) -> bool:
    """Whether an epoch that begins at sequence `first` empties the Engram tables. Not if less than half of it will be
    read: a run would end with tables that know next to nothing, which costs more than rows that hold answers."""
    left = cost.epochs_over(loader, args.target_tokens - first * args.seq_len)
    return args.engram_reset and float(loader.share @ left) >= 0.5


def dropout_at(args, loader: data.Loader, first: int) -> float:
    """The dropout of a step that begins at sequence `first`: none of text that is read for the first time, then more
    each time, up to --dropout after DROPOUT_EPOCHS; of a mixture the mean over its sources."""
    return args.dropout * float(loader.share @ (loader.epochs(first) / DROPOUT_EPOCHS).clip(max=1))


def step_seed(seed: int, step: int, purpose: str) -> int:
    """A well-mixed number below 2^62 for one purpose in one step."""
    digest = hashlib.blake2b(f"{purpose}:{seed}:{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def loops_of_step(args, n_loops: int, step: int) -> int:
    """--n_loops, or with --random_loops a Poisson draw around it, at least 1; the same on every rank."""
    if not args.random_loops:
        return n_loops
    return max(1, int(np.random.default_rng(step_seed(args.seed, step, "loops")).poisson(n_loops)))


# ---------------------------------------------------------------------------------------------------------------------
# Devices and precision

def resolve_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: no CUDA device is visible; use --device cpu")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


def obstacle_to_compile(device: torch.device) -> str | None:
    """What keeps torch.compile from working here, with the remedy, or None: it compiles a small function, runs it and
    its gradient and compares, seconds where nothing is cached."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "Triton is not installed; run: pip install triton"
    x = torch.linspace(-2, 2, 64, device=device).view(8, 8).requires_grad_()
    try:
        results = []
        for function in (small_function, torch.compile(small_function)):
            y = function(x)
            results.append((y, *torch.autograd.grad(y, x)))
        torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)
    except Exception as fault:            # whatever Triton, its C compiler and its cache provoke
        return f"torch.compile fails here ({str(fault).strip().splitlines()[0][:200]}); it needs a C++ compiler" + (
            " and a Triton that knows this GPU" * (device.type == "cuda"))
    return None


def small_function(x: Tensor) -> Tensor:
    return (nn.functional.silu(x) @ x).square().mean()


def resolve_compile(name: str, device: torch.device) -> tuple[bool, str]:
    """Whether layers are compiled, and of `auto` why; what was asked for is checked."""
    if name == "off" or name == "auto" and device.type == "cpu":
        return False, "on a CPU it takes minutes before the first step" * (name == "auto")
    obstacle = obstacle_to_compile(device)
    if obstacle and name == "on":
        raise UsageError(f"--compile: {obstacle}; --compile off goes without")
    return not obstacle, (obstacle or "a small function compiles and agrees") * (name == "auto")


def resolve_precision(name: str, device: torch.device, compiles: bool) -> tuple[str, str]:
    """The precision, and of `auto` why: the fastest that the hardware has, FP8 only with compiled layers, since its
    casts are many small kernels (docs/performance.md). A named one is checked."""
    on_gpu = device.type == "cuda"
    fp8 = on_gpu and torch.cuda.get_device_capability(device) >= (8, 9)
    if name == "fp8" and on_gpu and not fp8:
        raise UsageError("--precision fp8: this GPU has no FP8 (it needs compute capability 8.9); use --precision bf16")
    if name == "fp8" and not on_gpu:
        logger.warning("fp8 on a CPU is torchao's emulation: slow, for tests only")
    if name != "auto":
        return name, ""
    if fp8 and compiles:
        return "fp8", "the GPU has it, and layers are compiled"
    if multiplies_bf16(device):
        return "bf16", "fp8 pays only with --compile" * fp8
    return "fp32", "there are no bf16 products here"


def keep_freed_memory():
    """Has glibc keep what tensors free for the next ones: handed back, it is faulted in again page by page."""
    trim_threshold, top_pad, mmap_max = -1, -2, -4
    with suppress(OSError, AttributeError):  # another C library: nothing to set
        libc = ctypes.CDLL("libc.so.6")
        for parameter, size in ((mmap_max, 0), (trim_threshold, (1 << 31) - 1), (top_pad, 1 << 26)):
            libc.mallopt(parameter, size)


def start_log(level: str = "INFO"):
    """Log lines go to stderr: the time and a printable line, whatever a file's name, a checkpoint or a model put in."""
    logger.configure(handlers=[dict(sink=sys.stderr, format="{time:HH:mm:ss} {message}", level=level)],
                     patcher=lambda record: record.update(message=files.one_line(record["message"])))


# Modules with one of these in their name stay in high precision.
NEVER_FP8 = ("boundary_predictor", "loop_embedding", "engram", "layernorm", "norm", "embed_tokens", "lm_head",
             "halt_predictor", "router")


def takes_fp8(module: nn.Module, name: str) -> bool:
    """Whether a module is one that FP8 converts."""
    return isinstance(module, nn.Linear) and not any(word in name for word in NEVER_FP8)


def halved_weights(model: Spider) -> list[nn.Parameter]:
    """Weights that all products take as bf16; those of FP8 are cast from fp32."""
    if model.compute_dtype != torch.bfloat16:
        return []
    linears = [m.weight for name, m in model.named_modules() if type(m) is Linear and takes_fp8(m, name)]
    return linears + [w for m in model.modules() if isinstance(m, MoE) and m.config.n_routed_experts
                      for w in (m.w_gate, m.w_up, m.w_down)]


def convert_to_fp8(model: Spider, device: torch.device, experts: bool):
    """Swaps the model's Linears for torchao's Float8Linear, tensorwise, in place; parameters stay the same objects.

    Weights are cast once per optimizer step (Spider.cast_weights_once), and evaluation multiplies without FP8.
    torchao's own axiswise recipe clashes with recomputation. `experts`: the stacked weights of the experts as well.
    """
    with quiet():
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
        from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
        from torchao.float8.float8_training_tensor import GemmInputRole

    class FP8Linear(Float8Linear):
        """torchao's, whose product takes a weight that was cast before."""
        cast = None

        def cast_weight(self, dtype: torch.dtype):
            if not self.training:
                return Linear.cast_weight(self, dtype)
            self.cast = hp_tensor_to_float8_dynamic(
                self.weight.t(), self.config.cast_config_weight.target_dtype, self.multiplying(16),
                gemm_input_role=GemmInputRole.WEIGHT)

        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                return Linear.forward(self, x)
            weight = self.weight.t() if self.cast is None else self.cast
            rows = x.numel() // x.shape[-1]  # what the weight's gradient sums over
            return matmul_with_hp_or_float8_args.apply(x, weight, self.multiplying(rows), self.config)

        def multiplying(self, rows: int):
            """torchao's settings of the three products, to pad what is no multiple of 16 and nothing else: it copies
            what it pads, where nothing is added too."""
            summed = self.in_features, self.out_features, rows
            return type(self.linear_mm_config)(*(product._replace(pad_inner_dim=size % 16 > 0) for product, size
                                                 in zip(self.linear_mm_config, summed)))

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name("tensorwise"), pad_inner_dim=True,
                                 emulate=device.type == "cpu")
    convert_to_float8_training(model, config=config, module_filter_fn=takes_fp8)
    for module in model.modules():
        if isinstance(module, Float8Linear):
            module.__class__ = FP8Linear
        elif isinstance(module, MoE):
            module.fp8 = experts


def describe_fp8(model: Spider, experts: bool) -> str:
    """One line: how many Linears FP8 converts, and what it leaves and why. Ask before the conversion."""
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    kept = sorted({word for name, module in linears for word in NEVER_FP8 if word in name})
    count = sum(takes_fp8(module, name) for name, module in linears)
    return (f"FP8 converts {count} of {len(linears)} Linears; high precision by name: {', '.join(kept)}; "
            + ("the routed experts by row and column scales" if experts else
               "the routed experts stay in bf16: their products are small, see --fp8_experts"))


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation and samples

EVAL_BYTES = 8192                         # least bytes to evaluate at a time


@torch.no_grad()
def cross_entropy(model: Spider, batches: Iterable[tuple[Tensor, Tensor]], size: int, n_loops: int, device,
                  world: World | None = None) -> tuple[float, int, float]:
    """Mean nats of the labels that count, their number, and bytes per segment, over batches of (ids, labels), each
    [n, T] int64, of `size` ids together, dealt out to ranks; the model comes back in the mode that it was in."""
    world = World() if world is None else world
    progress = files.Progress("evaluates", size) if sys.stderr.isatty() and world.leads else None
    sums, training = torch.zeros(4, device=device, dtype=torch.float64), model.training
    model.eval()
    with model.cast_weights_once():
        for batch, counts in world.rounds(batches):
            ids, labels = (part.to(device) for part in batch)
            out = model(ids, labels, n_loops=n_loops)
            counted = (labels != -100).sum()
            sums += counts * torch.stack((out.nats_per_byte.double() * counted, counted,
                                          (ids != tokenizer.PAD_ID).sum(), out.segments))
            if progress:
                progress.add(ids.numel() * world.ranks)
    model.train(training)
    nats, count, real, segments = world.sum(sums).tolist()
    return nats / count if count else math.nan, int(count), real / max(1, segments)


def evaluate(model: Spider, rows: tuple[Tensor, Tensor], micro_batch: int, n_loops: int, device,
             world: World | None = None) -> dict:
    """Cross-entropy on the fixed validation rows (ids and labels [n, T]): nats and bits per byte, bytes per segment."""
    logger.info(f"evaluates on {rows[0].numel():,} bytes")
    batches = list(zip(*(part.split(micro_batch) for part in rows)))
    loss, _, rate = cross_entropy(model, batches, rows[0].numel(), n_loops, device, world)
    bpb = loss / math.log(2)
    logger.info(f"validation: loss {loss:.4f} nats per byte, bpb {bpb:.4f}, {rate:.2f} bytes per segment")
    return dict(val_loss=loss, val_bpb=bpb, val_bytes_per_segment=rate)


SAMPLE_START = 64                         # bytes of held-out text that a sample without prompt goes on from


def print_sample(model: Spider, step: int, n_loops: int, args, held_out: Tensor | None):
    """Logs 200 bytes that the model writes; the generator is a function of (--seed, step).

    They go on from --sample_prompt, or from the beginning of held-out text (ids), or from a line's end: where a text
    file is one document, BOS stands once in all of the data, and what follows it was never learned."""
    if args.sample_prompt:
        prompt, start = [tokenizer.BOS_ID, *os.fsencode(args.sample_prompt)], args.sample_prompt
    elif held_out is None:
        prompt = start = "\n"
        prompt = list(prompt.encode())
    else:
        prompt = held_out[:SAMPLE_START].tolist()
        start = f"(held-out text) {tokenizer.decode(prompt)}"
    logger.info("samples 200 bytes")
    generator = torch.Generator(model.embed_tokens.device).manual_seed(step_seed(args.seed, step, "sample"))
    model.eval()
    with torch.no_grad():
        try:
            text = tokenizer.decode(list(model.generate(prompt, 200, generator=generator, n_loops=n_loops)))
            logger.info(f"step {step} goes on from {start!r}: {text!r}")
        except FloatingPointError as fault:
            logger.warning(f"step {step} writes nothing: {fault}")
    model.train()


# ---------------------------------------------------------------------------------------------------------------------
# One optimizer step

def make_real(model: Spider, device: torch.device, precision: str, backend: str, args,
              world: World | None = None):
    """Turns a model on the meta device into one that trains: values from --seed, precision, backend, compilation; of
    several ranks each keeps its shard."""
    torch.manual_seed(args.seed)
    model.to_empty(device=device)
    model.init_weights()
    emulated = precision == "fp8" and not multiplies_bf16(device)
    model.compute_dtype = torch.float32 if precision == "fp32" or emulated else torch.bfloat16
    model.recompute = args.recompute
    model.set_backend(backend)
    if precision == "fp8":
        logger.info(describe_fp8(model, args.fp8_experts))
        convert_to_fp8(model, device, args.fp8_experts)
    if args.compile == "on" and (obstacle := model.compile_layers()):                        # auto is settled by set_up
        logger.warning(f"only byte layers are compiled, not the core's: {obstacle}")
    model.train()
    if world is not None:
        world.spread(model, args.grad_accum, halved_weights(model))


def warm_up(model: Spider, micro_batch: int, seq_len: int, n_loops: int, device: torch.device):
    """Two passes on dummy bytes, which compile kernels; no weight, random state, buffer or data position changes."""
    ids = (torch.arange(micro_batch * seq_len, device=device) % 251).view(micro_batch, seq_len)
    with model.cast_weights_once():
        for noise_seed in range(2):
            model(ids, ids, n_loops=n_loops, noise_seed=noise_seed).loss.backward()
    model.zero_grad(set_to_none=True)


@dataclass
class Batch:
    """One micro-step's sequences; what only the host can count cheaply is counted there, before they travel."""
    ids: Tensor                           # [B, T] int64
    labels: Tensor                        # [B, T] int64, -100 where nothing counts
    noise_seed: int                       # of the first row's segments and dropout
    cu_seqlens: Tensor                    # int32 [documents + 1]
    targets: int                          # labels that count
    real: int                             # bytes that are not PAD

    @classmethod
    def of(cls, ids: Tensor, labels: Tensor, noise_seed: int) -> "Batch":
        """A batch on the host."""
        return cls(ids, labels, noise_seed, document_cu_seqlens(ids), int((labels != -100).sum()),
                   int((ids != tokenizer.PAD_ID).sum()))

    def to(self, device: torch.device) -> "Batch":
        if device.type == "cpu":
            return self
        moved = (t.pin_memory().to(device, non_blocking=True) for t in (self.ids, self.labels, self.cu_seqlens))
        return dataclasses.replace(self, **dict(zip(("ids", "labels", "cu_seqlens"), moved)))


def accumulate(model: Spider, batches: list[Batch], n_loops: int, targets: int | None = None,
               world: World | None = None) -> tuple[Tensor, Tensor]:
    """Forward and backward over the micro-steps of a step, which leaves gradients and changes nothing else. `targets`:
    of all ranks together, where there are others.

    Returns sums over the micro-steps: fp32 [9] of nats, loss, segments, loops and the loss's other parts, and tokens
    per expert [L, E]. Waits for the device once a micro-step, for the number of segments.
    """
    world = World() if world is None else world
    sums, tokens, parts = 0, 0, len(batches) * world.ranks
    targets = max(1, sum(batch.targets for batch in batches) if targets is None else targets)
    with model.cast_weights_once():
        for batch in batches:
            out: SpiderOutput = model(batch.ids, batch.labels, n_loops, batch.noise_seed, batch.cu_seqlens)
            share = batch.targets / targets  # bytes count alike, however many others are PAD
            loss = out.by_byte * share + (out.loss - out.by_byte) / parts
            world.backward(model, loss, last=batch is batches[-1])
            sums = sums + torch.cat((torch.stack((
                out.nats_per_byte.detach() * share, loss.detach(), out.segments, out.mean_loops / parts)),
                out.parts[:-1] / parts, out.parts[-1:] * share))
            tokens = tokens + out.tokens_per_expert
    return sums, tokens


def update(model: Spider, optimizers: Optimizers, sums: Tensor, tokens: Tensor, real: int, args,
           empty_tables: bool = False) -> dict:
    """The update from accumulated gradients; returns the step's statistics, `real` bytes of which were not PAD.

    Waits once for the device, for all numbers, before the weights are touched: where loss or gradient is not finite
    they stay as they are, and `skipped` is true. `empty_tables`: the Engram tables lose all that they learned.
    """
    norm, sums, tokens, real = optimizers.world.after_step(optimizers.dense, sums, tokens, real)
    nn.utils.clip_grads_with_norm_(optimizers.dense, args.grad_clip or math.inf, norm)
    balance = tokens.amax(1) / tokens.mean(1).clamp_min(1) if tokens.numel() else tokens.new_ones(1)
    nats, loss, segments, loops, *parts, norm, balance = torch.cat((sums, torch.stack((norm, balance.mean())))).tolist()
    skipped = not (math.isfinite(loss) and math.isfinite(norm))
    if not skipped:
        optimizers.step()
        model.update_expert_bias(tokens)
        if empty_tables:
            optimizers.parts["engram"].reset()
    optimizers.zero_grad()
    return dict(loss=nats, total_loss=loss, grad_norm=norm, bytes_per_segment=real / max(1, segments),
                mean_loops=loops, expert_balance=balance, skipped=skipped, **dict(zip(LOSS_PARTS, parts)))


TIMED = 2.0                               # seconds of steps that a dry run times, one at least


def time_steps(config: SpiderConfig, n_loops: int, args, world: World, precision: str, backend: str, optimizer: str,
               loader: data.Loader | None) -> float:
    """Bytes/s of whole steps of a model of its own, as they are in the middle of a run: its data, learning rate and
    dropout. Nothing is written. Where there is no data yet, made-up sentences serve."""
    loader = data.Loader([data.mock_source(args.seed)], args.seq_len, args.seed) if loader is None else loader
    with torch.device("meta"):
        model = Spider(config)
    make_real(model, world.device, precision, backend, args)
    optimizers, times, batch = Optimizers(model, optimizer, args), [], args.global_batch // args.seq_len
    horizon = math.ceil(args.target_tokens / args.global_batch)
    while not times or sum(times) < TIMED:
        step = horizon // 2 + len(times)
        start = time.perf_counter()
        batches = list(batches_of(loader, args, world, step, step * batch))
        model.dropout = dropout_at(args, loader, step * batch)
        sums, tokens = accumulate(model, batches, n_loops)
        optimizers.set_lr(args.lr, lr_factor(step, horizon, args))
        update(model, optimizers, sums, tokens, sum(part.real for part in batches), args)
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return args.global_batch / float(np.median(times[1:] or times))  # the first one sets up


def out_of_memory(fault: Exception, args) -> str | None:
    """One line of advice where an error is for want of memory, else None."""
    if not wants_memory(fault):
        return None
    asked = re.search(r"llocate ([\d.]+ \w+)", str(fault))
    return ("out of memory" + (f", {asked[1]} were asked for" if asked else "")
            + f": lower --micro_batch (now {args.micro_batch}) and raise --grad_accum as much, or lower --seq_len (now "
              f"{args.seq_len})"
            + ", or take --recompute all" * (args.recompute != "all"))


# ---------------------------------------------------------------------------------------------------------------------
# The run

HALTING_WARMUP = 1 / 8                    # of the horizon: until then every loop learns (docs/mechanisms.md, Halting)
DROPOUT_EPOCHS = 10                       # until --dropout is all there: text is known by heart little by little
STEP_PATIENCE = 8.0                       # seconds that a signal leaves a step to end, before it is dropped


def command_line(argv: list[str] | None = None) -> int:
    """Exit status: 0; 2 with one line on stderr for a bad flag, environment, file or machine; 1 for divergence, and for
    a dry run that finds not enough memory or disk; 128 and the signal's number where one ended the run in order."""
    status, args, world, shared = 2, None, World(), False
    with StopSignals(world) as stop:
        try:
            args = parse_args(argv)
            with ExitStack() as closing:
                closing.enter_context(world)
                closing.callback(setattr, stop, "seconds", None)  # nothing interrupts what the world tells the others
                done = main(args, stop, closing, world)
            sys.stdout.flush()
            return done
        except BrokenPipeError:           # of `--dry_run | head`: nobody reads on
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except (UsageError, cost.TooLarge, CheckpointError, data.DataError, BackendError, WorldError) as fault:
            line = f"error: {fault}"
        except LeftByPeer:
            return status
        except Diverged as fault:
            status, line, shared = 1, f"error: {fault}", True
        except Stopped as where:
            status, line, shared = 128 + stop.asked, f"{stop.asked.name}: {where}", world.steps > 0
        except OSError as fault:
            line = f"error: {fault.filename}: {fault.strerror}"
        except (MemoryError, RuntimeError) as fault:
            line = out_of_memory(fault, args)
            if line is None:
                raise
            line = f"error: {line}"
        stop.seconds = None
        with suppress(OSError):           # stderr may be gone
            if world.says(line, shared):
                print(f"train.py: {files.one_line(line)}\n", end="", file=sys.stderr)  # of several ranks: one write
    return status


def how_to_go_on(args) -> str:
    origin = [f"--{name}" for name in ("resume", "reset_steps") if getattr(args, name)]
    return "the same command" + f" without {' and '.join(origin)}" * bool(origin) + " goes on"


def set_up(args, closing: ExitStack, world: World) -> tuple[torch.device, str]:
    """Device and precision, and the settings of this process that go with them; meets the other ranks."""
    device = world.place(resolve_device(args.device))
    compiles, why_compile = resolve_compile(args.compile, device)
    precision, why_precision = resolve_precision(args.precision, device, compiles)
    args.why = [why for why in (f"precision {precision}: {why_precision}" * bool(why_precision),
                                f"layers {'not ' * (not compiles)}compiled: {why_compile}" * bool(why_compile)) if why]
    args.compile = "on" if compiles else "off"
    if args.fp8_experts and precision != "fp8":
        raise UsageError(f"--fp8_experts: the precision is {precision}; it goes with --precision fp8")
    if args.fp8_experts and device.type == "cuda" and not multiplies_at_once(device, torch.bfloat16):
        raise UsageError("--fp8_experts: torch's grouped FP8 product needs sm_90 or sm_100; without the flag experts "
                         "multiply in bf16")
    if device.type == "cpu":
        keep_freed_memory()
    torch.set_float32_matmul_precision("high")
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        closing.callback(torch.use_deterministic_algorithms, False)
        torch.utils.deterministic.fill_uninitialized_memory = False
    world.join(device, args.shards, args.rank_timeout)
    return device, precision


@contextmanager
def refusals(args, world: World):
    """Inside, what forbids to go on in --ckpt_dir ends a run; a dry run says so in a line, and looks on without it."""
    try:
        yield
    except CheckpointError as fault:
        if args.resume or not args.dry_run:
            raise
        if world.leads:
            print(files.one_line(f"a run would be refused: {fault}"))


def config_of_run(args, home: RunDirectory | None, state: dict | None, world: World) -> SpiderConfig:
    """The model's config. Where a run goes on from its `state` it is that of the checkpoint, of which --set may change
    what has no shape, and so is --n_loops; --model is to have its shapes."""
    if not state:
        return model_config(args)
    with refusals(args, world):
        there = SpiderConfig(**state["cfg"])
        config = model_config(args, dataclasses.replace(there, vocab_size=tokenizer.VOCAB_SIZE))
        if state["cfg"].get("vocab_size") != config.vocab_size:
            raise CheckpointError(f"{home.origin} has another vocabulary: {state['cfg'].get('vocab_size')} ids, here "
                                  f"are {config.vocab_size}")
        for asked in (config, *(model_config(args),) * (args.model != "auto")):
            check_same_model(home.origin, state["cfg"], asked)
        if "n_loops" not in args.given:
            args.n_loops = state.get("n_loops", config.n_loops)
        if args.dry_run and world.leads:
            print(files.one_line(home.start_line(state)))
        return config
    return model_config(args)


def say_what_was_chosen(args, model: Spider, n_loops: int, device: torch.device, precision: str, backend: str,
                        optimizer: str, recompute: tuple[str, str], world: World, remarks: list[str]):
    """A line for each choice, those of `auto` marked, the remarks, one for the recipe."""
    sizes = dataclasses.replace(SpiderConfig.preset(args.recipe), n_loops=model.config.n_loops)
    name = args.recipe if model.config == sizes else f"{args.recipe}, changed"
    parameters = sum(p.numel() for p in model.parameters())
    say = logger.info if not args.dry_run else print if world.leads else lambda line: None
    threads = f"{torch.get_num_threads()} threads" if device.type == "cpu" else torch.cuda.get_device_name(device)
    for choice, asked in ((f"model {name}, {parameters / 1e6:.1f}M parameters, {n_loops} loops", args.model),
                          (f"device {device}, {threads}", args.device), (f"precision {precision}", args.precision),
                          (f"experts {backend}", args.moe_backend), (f"optimizer {optimizer}", args.optimizer),
                          recompute,
                          *((f"{world.ranks} ranks, {world.replicas} replicas of {world.shards} shards", ""),)
                          * (world.ranks > 1)):
        say(choice + " (auto)" * (asked == "auto"))
    for remark in remarks:
        say(files.one_line(remark))
    if args.why:
        say(files.one_line(f"chosen so (auto): {'; '.join(args.why)}"))
    recipe = RECIPES[args.recipe]
    taken = [f"--{name} {said(getattr(args, name))}" for name, value in recipe.items() if name not in args.given
             and (callable(value) or value == getattr(args, name))]  # else a checkpoint's, or another horizon's
    nothing = "nothing is taken from it" if recipe else "every default of --help"
    say(f"recipe of {args.recipe}: {' '.join(taken) or nothing}")
    if args.environment:
        say(files.one_line(f"from the environment: {' '.join(args.environment)}"))


def open_sources(args) -> list[data.Source]:
    """The data, checked; nothing where a dry run names none and there is none yet."""
    if args.dry_run and not (args.mock_data or "data_dir" in args.given or Path(args.data_dir).exists()):
        return []
    sources = [data.mock_source(args.seed)] if args.mock_data else data.open_data(args.data_dir)
    data.check(sources)
    return sources


def start_wandb(args, progress: Progress, closing: ExitStack):
    """The wandb run that --run names, or None; a checkpoint of the same name says which one to go on with."""
    if not args.run:
        return None
    before = progress.wandb if progress.wandb and progress.wandb["name"] == args.run else {}
    settings = {flag.name: getattr(args, flag.name) for flag in FLAGS}
    try:
        import wandb
        run = wandb.init(project="spider", name=args.run, id=before.get("id"), resume="allow", config=settings)
    except Exception as fault:            # of its installation, its settings, its network, its service
        raise UsageError(f"--run: wandb does not start: {fault}; WANDB_MODE=offline needs no network") from None
    progress.wandb = dict(name=args.run, id=run.id)
    closing.callback(run.finish)
    return run


def batches_of(loader: data.Loader, args, world: World, step: int, first: int) -> Iterable[Batch]:
    """A rank's micro-batches of a step whose sequences begin at number `first`."""
    noise = step_seed(args.seed, step, "noise")
    for micro_step in range(args.grad_accum):
        ids, labels, _ = loader.micro_batch(first, micro_step, args.micro_batch, world.rank, world.ranks)
        noise_seed = noise + (micro_step * world.ranks + world.rank) * args.micro_batch
        yield Batch.of(ids, labels, noise_seed).to(world.device)


class Feed:
    """This rank's micro-batches, step after step; a thread works out those of a step during the one before it.

    The thread is a daemon: where a disk holds it up, a signal and the end of the process do not wait for it.
    """

    def __init__(self, loader: data.Loader, args, world: World, progress: Progress, closing: ExitStack):
        self.loader, self.args, self.world = loader, args, world
        self.first, self.steps = progress.bytes_seen // args.seq_len, count(progress.step)
        self.wanted, self.fetched, self.next, self.closed = SimpleQueue(), SimpleQueue(), None, False
        world.look_ahead = self.look_ahead
        self.thread = Thread(target=self._fetch_all, daemon=True)
        self.thread.start()
        self.wanted.put(True)
        closing.callback(self.close)

    def take(self) -> tuple[list[Batch], int, int]:
        """The next step's batches, the targets in those of all ranks, and the epoch that it begins in; the batches of
        the step after it are begun. What keeps one rank from its batches is met by all."""
        targets = self.world.before_step()
        (batches, epoch), self.next = self.next, None
        self.wanted.put(True)
        return batches, targets, epoch

    def look_ahead(self) -> tuple[int, BaseException | None]:
        """This rank's targets in the next step, or what keeps it from its batches; waits for them."""
        if self.next is None:
            self.next = self.fetched.get()
        if isinstance(self.next, BaseException):
            return 0, self.next
        return sum(batch.targets for batch in self.next[0]), None

    def close(self):
        self.closed = True
        self.wanted.put(False)
        self.thread.join(1.0)             # a thread that is well ends in order

    def _fetch_all(self):
        while self.wanted.get():
            try:
                self.fetched.put(self._fetch(next(self.steps), self.first))
            except BaseException as fault:
                self.fetched.put(fault)
            self.first += self.args.micro_batch * self.world.ranks * self.args.grad_accum

    def _fetch(self, step: int, first: int) -> tuple[list[Batch], int]:
        out = []
        for batch in batches_of(self.loader, self.args, self.world, step, first):
            out.append(batch)
            if self.closed:
                break
        return out, self.loader.epoch(first)


def dry_run(args, model: Spider, n_loops: int, precision: str, device: torch.device, world: World,
            memory: dict[str, float], size: float, sources: list[data.Source], loader: data.Loader | None,
            lengths: dict[str, float], usual: float, time_them: Callable, say: Callable) -> int:
    """Prints what a run would take, the verdict first; exit status 1 where memory or disk do not suffice."""
    enough = cost.print_verdict(args, memory, cost.memory_of(device, world), size)
    peak = cost.product_rate(device) * world.ranks * (2 if precision == "fp8" else 1)
    bound = peak / model.flops_per_byte(usual, n_loops, args.seq_len)
    rate = cost.expected_rate(args, device, world.ranks, sum(memory.values()), bound, time_them)
    warnings = (cost.horizon_warnings(args, loader, math.ceil(args.target_tokens / args.global_batch), lr_factor)
                + cost.segment_warnings(model.config, lengths, args.seq_len))
    cost.print_outlook(args, loader, sources, rate, warnings)
    say()
    cost.print_tables(model, n_loops, args, [flag.name for flag in FLAGS], usual)
    print(describe_fp8(model, args.fp8_experts))
    return 0 if enough else 1


def main(args: SimpleNamespace, stop: StopSignals, closing: ExitStack, world: World) -> int:
    """A whole run, from the flags to the last checkpoint; what it opens is closed by `closing`. Returns the exit status
    of one that comes to its end."""
    start_log("INFO" if world.leads else "ERROR")

    # -----------------------------------------------------------------------------------------------------------------
    # Devices and ranks
    device, precision = set_up(args, closing, world)

    # -----------------------------------------------------------------------------------------------------------------
    # What to go on from, and which model that makes
    home = state = None
    with refusals(args, world):
        home = RunDirectory(Path(args.ckpt_dir), args.resume, args.reset_steps, closing, args.dry_run, world,
                            args.mock_data)
        state = home.load()
    take_recipe(args, device, state and state.get("recipe"))
    config = config_of_run(args, home, state, world)
    n_loops = args.n_loops
    with torch.device("meta"):
        model = Spider(config)
    take_batch(args, world.ranks)
    take_horizon(args, model, n_loops)
    if args.engram_reset and not any(isinstance(module, EngramTable) for module in model.modules()):
        if "engram_reset" in args.given:
            raise UsageError("--engram_reset: this model has no Engram tables")
        args.engram_reset = False         # the recipe's
    remarks = []
    backend = resolve_backend(
        args.moe_backend, device, config, torch.float32 if precision == "fp32" else torch.bfloat16, remarks.append,
        agree=lambda able: int(world.sum(torch.tensor(int(able), device=device))) == world.ranks,
        compiled=args.compile == "on")
    optimizer = "muon" if args.optimizer == "auto" else args.optimizer

    # -----------------------------------------------------------------------------------------------------------------
    # Data, and what the run takes
    sources = open_sources(args)
    loader = data.Loader(sources, args.seq_len, args.seed) if sources else None
    lengths = cost.segment_lengths(model, sources, args)
    usual, asked = cost.mean_length(config, sources, lengths), args.recompute  # bytes per segment
    memory = take_recompute(args, model, n_loops, optimizer, precision, device, world, usual)
    size = cost.checkpoint_size(model, optimizer)
    say = partial(say_what_was_chosen, args, model, n_loops, device, precision, backend, optimizer,
                  (f"recompute {args.recompute}", asked), world, remarks)
    if args.dry_run:
        time_them = partial(time_steps, config, n_loops, args, world, precision, backend, optimizer, loader)
        return dry_run(args, model, n_loops, precision, device, world, memory, size, sources, loader, lengths, usual,
                       time_them, say) if world.leads else 0
    say()
    logger.info(cost.describe_memory(memory, cost.memory_of(device, world)))
    validation = data.validation_rows(sources, args.seq_len, args.eval_tokens) if args.eval_every else None
    eval_rows = max(args.micro_batch, EVAL_BYTES // args.seq_len)  # at a time: without gradients there is room for more
    logger.info(", ".join(f"{s.name}: {len(s.train):,} training and {len(s.val):,} validation ids" for s in sources))
    cost.check_memory(sum(memory.values()), device, world)

    # -----------------------------------------------------------------------------------------------------------------
    # Model, real: values, FP8, compilation
    make_real(model, device, precision, backend, args, world)

    # -----------------------------------------------------------------------------------------------------------------
    # Optimizer; both as the checkpoint had them
    optimizers = Optimizers(model, optimizer, args, world)
    progress = home.restore(state, model, optimizers, n_loops, loader, args)
    del state

    # -----------------------------------------------------------------------------------------------------------------
    # Loop state
    batch = args.global_batch // args.seq_len                                                # sequences per step
    bytes_left = max(0, args.target_tokens - progress.bytes_seen)
    horizon = progress.step + math.ceil(bytes_left / (batch * args.seq_len))
    last_step = args.max_steps or horizon
    flops_per_byte = lru_cache(lambda loops, rate: model.flops_per_byte(rate, loops, args.seq_len))
    ceiling = cost.product_rate(device) * world.ranks
    logger.info(f"{batch * args.seq_len:,} bytes a step, {last_step:,} steps; {flops_per_byte(n_loops, usual) / 1e9:.2g}"
                f" GFLOP per byte at {usual:.2g} bytes per segment; checkpoints in {home.path}")
    for warning in (*cost.horizon_warnings(args, loader, horizon, lr_factor),
                    *cost.segment_warnings(config, lengths, args.seq_len)):
        logger.warning(warning)
    metrics_file, writer = home.open(progress, last_step, args.keep_last, size, args.sharded_checkpoints)
    tracker = start_wandb(args, progress, closing) if world.leads else None
    profiler = start_profiler(device, home.path, closing) if args.profile and world.leads else None
    if progress.written >= last_step:
        logger.info(f"nothing to do: step {progress.step} of {last_step} is done; raise --max_steps or --target_tokens")
    elif precision == "fp8" or args.compile == "on":
        warm_up(model, args.micro_batch, args.seq_len, n_loops, device)
    feed = Feed(loader, args, world, progress, closing)
    optimizers.set_lr(args.lr, lr_factor(max(0, progress.step - 1), horizon, args))  # as the checkpoint had it
    leaving = Leaving(stop, writer, progress.step, last_step, args.max_skipped, world)
    if world.leads:
        closing.callback(leave_curves, home.path, stop)

    def save():
        writer.save(run_state(model, optimizers, progress, loader, args, world), metrics_file.sync)

    # -----------------------------------------------------------------------------------------------------------------
    # The loop
    first_step = progress.step + 1
    while leaving.goes_on(progress):
        if progress.owed is None:         # else a run before this one did the step, and owes what follows it
            # ---------------------------------------------------------------------------------------------------------
            step_start = time.perf_counter()
            first = progress.bytes_seen // args.seq_len
            model.halting_warmup = min(1.0, (progress.step + 1) / (HALTING_WARMUP * horizon))
            with leaving.droppable(STEP_PATIENCE):  # up to the update nothing but gradients changes
                batches, targets, epoch = feed.take()
                loops = loops_of_step(args, n_loops, progress.step)
                model.dropout = dropout_at(args, loader, first)
                sums, tokens = accumulate(model, batches, loops, targets, world)
            if leaving.drops():
                break
            lr = args.lr * (factor := lr_factor(progress.step, horizon, args))
            optimizers.set_lr(args.lr, factor)
            numbers = update(model, optimizers, sums, tokens, sum(part.real for part in batches), args,
                             empty_tables=epoch > progress.epoch and empties_tables(args, loader, first))
            rate = batch * args.seq_len / (time.perf_counter() - step_start)
            # ---------------------------------------------------------------------------------------------------------
            mfu = rate * flops_per_byte(loops, round(max(1.0, numbers["bytes_per_segment"]), 2)) / ceiling
            numbers |= dict(lr=lr, tok_per_sec=rate, bf16_mfu=mfu, memory=cost.peak_memory(device), time=time.time())
            spike = progress.record(numbers, (first + batch) * args.seq_len, epoch)
            remaining = leaving.seconds_left(progress.step, pauses_left(args, progress.step, last_step))
            logger.info(progress_line(progress.owed, last_step, remaining, device))
            # Once in a while: a step to look at
            if progress.skipped or spike:
                logger.warning(odd_step_line(progress, first, batch, args))
            if progress.step == first_step and not lengths:  # of cuts that are learned no sample tells before
                for warning in cost.segment_warnings(config, {f"step {first_step}": numbers["bytes_per_segment"]},
                                                     args.seq_len):
                    logger.warning(warning)
            if profiler:
                profiler.step()
        metrics = progress.owed
        evaluates, samples = (every and (progress.step % every == 0 or progress.step == last_step)
                              for every in (args.eval_every, args.sample_every))
        # Once in a while: evaluate and sample; the step's line is owed until that is done
        if evaluates or samples:
            with leaving.pause(bool(evaluates) + bool(samples)):
                if evaluates:
                    metrics = metrics | evaluate(model, validation, eval_rows, n_loops, device, world)
                if samples and (whole := world.whole_model(model)) is not None:
                    print_sample(whole, progress.step, n_loops, args, validation and validation[0][0])
            if leaving.drops():
                break
        if evaluates:
            progress.take_evaluation(metrics["val_loss"], at_end=progress.step % args.eval_every != 0)
        metrics_file.write(metrics)
        if tracker:
            tracker.log(metrics, step=progress.step)
        progress.owed = None
        # Once in a while: save
        if not progress.skipped and (progress.step % args.ckpt_every == 0 or leaving.retry_is_due()):
            save()

    # -----------------------------------------------------------------------------------------------------------------
    # The end
    if not writer.holds(progress.step):
        save()
    leaving.report(progress, how_to_go_on(args))
    return 0


def leave_curves(directory: Path, stop: StopSignals):
    """At the end of a run that no signal ended, whose seconds are for saving: curves.png beside its metrics, where
    matplotlib is installed."""
    try:
        if stop.asked is None and (lines := look.read_metrics(directory / "metrics.jsonl")):
            with quiet():
                look.draw_curves(directory / "curves.png", {"training": lines})
    except ModuleNotFoundError:
        pass
    except Exception as fault:            # of its installation, of a full disk: no fault of the run
        logger.warning(f"curves.png is not drawn: {fault}")


def pauses_left(args, step: int, last_step: int) -> int:
    """Evaluations and samples that a run still makes from a step on, its own and those of the end included."""
    return sum(last_step // every - (step - 1) // every + (last_step % every > 0)
               for every in (args.eval_every, args.sample_every) if every)


def progress_line(metrics: dict, last_step: int, remaining: float, device: torch.device) -> str:
    """The step's numbers for people; `remaining` in seconds."""
    bpb = metrics["loss"] / math.log(2)
    return (f"step {metrics['step']}/{last_step} | loss {metrics['loss']:.4f} | bpb {bpb:.4f} | "
            f"lr {metrics['lr']:.2e} | norm {metrics['grad_norm']:.3f} | {metrics['tok_per_sec']:,.0f} bytes/s | "
            + f"MFU {metrics['bf16_mfu']:.1%} | " * (device.type == "cuda")
            + f"{metrics['bytes_per_segment']:.2f} bytes/segment | {metrics['mean_loops']:.2f} loops | "
            f"balance {metrics['expert_balance']:.2f} | {metrics['memory']:.2f} GB | "
            f"ETA {timedelta(seconds=round(remaining))}")


def odd_step_line(progress: Progress, first: int, batch: int, args) -> str:
    """What was odd about the last step, and the command that shows its sequences, `batch` from `first` on."""
    loss, where = progress.owed["loss"], "--mock_data" if args.mock_data else shlex.quote(args.data_dir)
    what = ("skipped: loss or gradient is not finite" if progress.skipped else
            f"is a spike: loss {loss:.3f}, {progress.average_loss:.3f} on average")
    return (f"step {progress.step} {what}; its batch: python data.py show {where} --seq_len {args.seq_len} --seed "
            f"{args.seed} --first {first} --count {batch}")


def start_profiler(device: torch.device, directory: Path, closing: ExitStack):
    """torch's profiler over steps 3 to 5 of this process; leaves trace.json for chrome://tracing or Perfetto."""
    from torch.profiler import ProfilerActivity, profile, schedule
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")

    def write(finished):
        finished.export_chrome_trace(str(directory / "trace.json"))
        order = f"self_{device.type}_time_total"
        table = finished.key_averages().table(sort_by=order, row_limit=25)
        for line in ("profile of steps 3 to 5:", *table.split("\n")):
            logger.info(line)
    profiler = profile(activities=activities, schedule=schedule(wait=1, warmup=1, active=3, repeat=1),
                       on_trace_ready=write)
    profiler.start()
    closing.callback(profiler.stop)
    return profiler


if __name__ == "__main__":
    sys.exit(command_line())
