"""Train Spider, a byte-level Recurrent-Depth Transformer, from memory-mapped byte shards.

    python train.py --mock_data --max_steps 20 --seq_len 128 --micro_batch 2            # smoke run, on any machine
    python train.py --data_dir data --seq_len 256 --micro_batch 112 --grad_accum 4      # one GPU
    torchrun --standalone --nproc_per_node 8 train.py --data_dir data --shards 8        # several

The same command again goes on from the newest checkpoint in --ckpt_dir. Everything random is a function of (--seed,
step), so that an interrupted run ends like an undisturbed one. `python train.py --help` lists the flags.
"""

import argparse
import dataclasses
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from loguru import logger
from torch import Tensor, nn

import tokenizer
from spider import console, errors, flags
from spider.data import shards
from spider.data.loader import Loader, validation_rows
from spider.errors import CheckpointError, Diverged, LeftByPeer, Stopped, UsageError, WorldError
from spider.flags import Flag, Parser, integer, one_of, real
from spider.model.config import MAX_LOOPS, PRESETS, RECOMPUTE, SpiderConfig
from spider.model.engram import EngramTable
from spider.model.parameters import component_of, halved_weights
from spider.training import dry_run, machine
from spider.training.batches import Batch, Feed, batches_of, step_seed
from spider.training.curves import leave_curves
from spider.training.fp8 import convert_to_fp8, describe_fp8
from spider.training.machine import (keep_freed_memory, multiplies_bf16, resolve_compile, resolve_device,
                                     resolve_precision, start_log, wants_memory)
from spider.training.memory import beside_tensors, check_memory, checkpoint_size, choose_recompute, estimate_memory
from spider.training.optim import OPTIMIZERS, Optimizers, OptimizerSettings
from spider.training.ranks import World
from spider.training.run_directory import RunDirectory, check_same_model, run_state
from spider.training.run_log import odd_step_line, progress_line
from spider.training.stopping import Stopping, StopSignals
from spider.training.trackers import start_profiler, start_wandb
from spider_model import Spider, SpiderOutput
from tile_moe import BACKENDS, BackendError, multiplies_at_once, resolve_backend

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
    Flag("data_dir", "data", flags.a_path, "directory of .bin shards, or a mixture: web:0.7,code:0.3", "DATA_DIR"),
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
    Flag("ckpt_dir", "checkpoints", flags.a_path, "where checkpoints and metrics.jsonl go; its mock/ with --mock_data"),
    Flag("ckpt_every", 50, integer(1), "optimizer steps between checkpoints", "CKPT_EVERY"),
    Flag("sharded_checkpoints", False, None, "write a directory, every rank its part, where one file gets too large"),
    Flag("keep_last", 2, integer(2, 1 << 20), "checkpoints of this run to keep"),
    Flag("keep_best", False, None, "save whenever the validation loss is the lowest so far, and keep that checkpoint "
         "beside the newest ones; sample.py DIR --best takes it"),
    Flag("resume", None, flags.a_path, "checkpoint to go on from; without it the newest good one in --ckpt_dir"),
    Flag("reset_steps", False, None, "take the weights alone: fresh optimizer, step 0, data from the start"),
    # evaluation and logs
    Flag("eval_every", 250, integer(0), "optimizer steps between evaluations, one more at the end; 0: none"),
    Flag("eval_tokens", 1_048_576, integer(1, 1 << 40), "validation bytes to evaluate on, always the same ones"),
    Flag("patience", 0, integer(0), "end the run after so many evaluations in a row that did not lower the validation "
         "loss; 0: never"),
    Flag("log_every", 1, integer(1), "optimizer steps between lines of the log; metrics.jsonl has every step"),
    Flag("sample_every", 0, integer(0), "optimizer steps between printed samples; 0: none"),
    Flag("sample_prompt", None, str, "what samples go on from; without it held-out text, where there is evaluation"),
    Flag("run", None, flags.filled("a name"), "name of a wandb run; without it no wandb (WANDB_MODE=offline works)"),
    Flag("dry_run", False, None, "print what would be trained, its memory and cost, check the data, and stop"),
    Flag("profile", False, None, "write a profiler trace of steps 3 to 5 to --ckpt_dir"),
)


def measured_rate(config: SpiderConfig, steps: float) -> float:
    """The peak rate of a horizon of so many optimizer steps, as measured on tiny (docs/results/learning.md)."""
    return float(f"{min(0.02, 0.116 * steps ** -0.4 * (128 / config.hidden_size) ** 0.5):.3g}")


def brief_warmup(config: SpiderConfig, steps: float) -> int:
    """Steps of warm-up in a horizon of so many: few of a short one (docs/results/learning.md)."""
    return int(min(40, steps / 25))


def ten_evaluations(config: SpiderConfig, steps: float) -> int:
    """Steps between evaluations, ten in a horizon of so many. On all that validates of tinyshakespeare one takes as
    long as 8 steps of tiny: ten add 3% to the recipe's 2,930 steps, and 31% to one pass, 245."""
    return max(1, math.ceil(steps / 10))


# What a model trains with where neither flag nor environment says otherwise; a function makes it of config and steps.
# docs/results/learning.md measures what tiny has.
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
    estimate = partial(estimate_memory, model, n_loops, args, optimizer, precision, device, world=world, rate=rate)
    args.recompute, memory = world.on_rank0(lambda: choose_recompute(
        args.recompute, lambda recompute: beside_tensors(model, optimizer, device, world) | estimate(recompute),
        machine.memory_of(device, world)))
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
                fields[name] = tuple(int(flags.decimal(part)) for part in text.split("+") if part)
            else:
                fields[name] = text if kind is str else kind(flags.decimal(text))
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


def empties_tables(args, loader: Loader, first: int) -> bool:
    """Whether an epoch that begins at sequence `first` empties the Engram tables. Not if less than half of it will be
    read: a run would end with tables that know next to nothing, which costs more than rows that hold answers."""
    left = dry_run.epochs_over(loader, args.target_tokens - first * args.seq_len)
    return args.engram_reset and float(loader.share @ left) >= 0.5


def dropout_at(args, loader: Loader, first: int) -> float:
    """The dropout of a step that begins at sequence `first`: none of text that is read for the first time, then more
    each time, up to --dropout after DROPOUT_EPOCHS; of a mixture the mean over its sources."""
    return args.dropout * float(loader.share @ (loader.epochs(first) / DROPOUT_EPOCHS).clip(max=1))


def loops_of_step(args, n_loops: int, step: int) -> int:
    """--n_loops, or with --random_loops a Poisson draw around it, at least 1; the same on every rank."""
    if not args.random_loops:
        return n_loops
    return max(1, int(np.random.default_rng(step_seed(args.seed, step, "loops")).poisson(n_loops)))


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation and samples


EVAL_BYTES = 8192                         # least bytes to evaluate at a time


@torch.no_grad()
def cross_entropy(model: Spider, batches: Iterable[tuple[Tensor, Tensor]], size: int, n_loops: int, device,
                  world: World | None = None) -> tuple[float, int, float]:
    """Mean nats of the labels that count, their number, and bytes per segment, over batches of (ids, labels), each
    [n, T] int64, of `size` ids together, dealt out to ranks; the model comes back in the mode that it was in."""
    world = World() if world is None else world
    progress = console.RunProgress("evaluates", size) if sys.stderr.isatty() and world.is_rank0 else None
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


def materialize(model: Spider, device: torch.device, precision: str, backend: str, args,
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
        world.shard_model(model, args.grad_accum, halved_weights(model))


def warm_up(model: Spider, micro_batch: int, seq_len: int, n_loops: int, device: torch.device):
    """Two passes on dummy bytes, which compile kernels; no weight, random state, buffer or data position changes."""
    ids = (torch.arange(micro_batch * seq_len, device=device) % 251).view(micro_batch, seq_len)
    with model.cast_weights_once():
        for noise_seed in range(2):
            model(ids, ids, n_loops=n_loops, noise_seed=noise_seed).loss.backward()
    model.zero_grad(set_to_none=True)


def accumulate(model: Spider, batches: list[Batch], n_loops: int, targets: int | None = None,
               world: World | None = None) -> tuple[dict[str, Tensor], Tensor]:
    """Forward and backward over the micro-steps of a step, which leaves gradients and changes nothing else. `targets`:
    of all ranks together, where there are others.

    Returns sums over the micro-steps by name: loss (nats), total_loss, segments, mean_loops and the loss's other terms;
    and tokens per expert [L, E]. Waits for the device once a micro-step, for the number of segments.
    """
    world = World() if world is None else world
    sums, tokens, parts = {}, 0, len(batches) * world.ranks
    targets = max(1, sum(batch.targets for batch in batches) if targets is None else targets)
    with model.cast_weights_once():
        for batch in batches:
            out: SpiderOutput = model(batch.ids, batch.labels, n_loops, batch.noise_seed, batch.cu_seqlens)
            share = batch.targets / targets  # bytes count alike, however many others are PAD
            loss = out.by_byte * share + (out.loss - out.by_byte) / parts
            world.backward(model, loss, last=batch is batches[-1])
            numbers = dict(loss=out.nats_per_byte.detach() * share, total_loss=loss.detach(), segments=out.segments,
                           mean_loops=out.mean_loops / parts)
            numbers |= {name: term * share if name in out.BYTE_TERMS else term / parts
                        for name, term in out.loss_terms.items()}
            sums = {name: number + sums.get(name, 0) for name, number in numbers.items()}
            tokens = tokens + out.tokens_per_expert
    return sums, tokens


def update(model: Spider, optimizers: Optimizers, sums: dict[str, Tensor], tokens: Tensor, real: int, args,
           empty_tables: bool = False) -> dict:
    """The update from accumulated gradients; returns the step's statistics, `real` bytes of which were not PAD.

    Waits once for the device, for all numbers, before the weights are touched: where loss or gradient is not finite
    they stay as they are, and `skipped` is true. `empty_tables`: the Engram tables lose all that they learned.
    """
    names, sums = list(sums), torch.stack(list(sums.values()))
    norm, sums, tokens, real = optimizers.world.after_step(optimizers.dense, sums, tokens, real)
    nn.utils.clip_grads_with_norm_(optimizers.dense, args.grad_clip or math.inf, norm)
    balance = tokens.amax(1) / tokens.mean(1).clamp_min(1) if tokens.numel() else tokens.new_ones(1)
    *sums, norm, balance = torch.cat((sums, torch.stack((norm, balance.mean())))).tolist()
    sums = dict(zip(names, sums))
    skipped = not (math.isfinite(sums["total_loss"]) and math.isfinite(norm))
    if not skipped:
        optimizers.step()
        model.update_expert_bias(tokens)
        if empty_tables:
            optimizers.parts["engram"].reset()
    optimizers.zero_grad()
    loss, total_loss, segments, loops = (sums.pop(name) for name in ("loss", "total_loss", "segments", "mean_loops"))
    return dict(loss=loss, total_loss=total_loss, grad_norm=norm, bytes_per_segment=real / max(1, segments),
                mean_loops=loops, expert_balance=balance, skipped=skipped, **sums)


TIMED = 2.0                               # seconds of steps that a dry run times, one at least


def time_steps(config: SpiderConfig, n_loops: int, args, world: World, precision: str, backend: str, optimizer: str,
               loader: Loader | None) -> float:
    """Bytes/s of whole steps of a model of its own, as they are in the middle of a run: its data, learning rate and
    dropout. Nothing is written. Where there is no data yet, made-up sentences serve."""
    loader = Loader([shards.mock_source(args.seed)], args.seq_len, args.seed) if loader is None else loader
    with torch.device("meta"):
        model = Spider(config)
    materialize(model, world.device, precision, backend, args)
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


HALTING_WARMUP = 1 / 8                    # of the horizon: until then every loop learns (results/mechanisms.md, Halting)
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
        except (UsageError, errors.TooLarge, CheckpointError, errors.DataError, BackendError, WorldError) as fault:
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
                print(f"train.py: {console.one_line(line)}\n", end="", file=sys.stderr)  # of several ranks: one write
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
        if world.is_rank0:
            print(console.one_line(f"a run would be refused: {fault}"))


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
        if args.dry_run and world.is_rank0:
            print(console.one_line(home.start_line(state)))
        return config
    return model_config(args)


def say_what_was_chosen(args, model: Spider, n_loops: int, device: torch.device, precision: str, backend: str,
                        optimizer: str, recompute: tuple[str, str], world: World, remarks: list[str]):
    """A line for each choice, those of `auto` marked, the remarks, one for the recipe."""
    sizes = dataclasses.replace(SpiderConfig.preset(args.recipe), n_loops=model.config.n_loops)
    name = args.recipe if model.config == sizes else f"{args.recipe}, changed"
    parameters = sum(p.numel() for p in model.parameters())
    say = logger.info if not args.dry_run else print if world.is_rank0 else lambda line: None
    threads = f"{torch.get_num_threads()} threads" if device.type == "cpu" else torch.cuda.get_device_name(device)
    for choice, asked in ((f"model {name}, {parameters / 1e6:.1f}M parameters, {n_loops} loops", args.model),
                          (f"device {device}, {threads}", args.device), (f"precision {precision}", args.precision),
                          (f"experts {backend}", args.moe_backend), (f"optimizer {optimizer}", args.optimizer),
                          recompute,
                          *((f"{world.ranks} ranks, {world.replicas} replicas of {world.shards} shards", ""),)
                          * (world.ranks > 1)):
        say(choice + " (auto)" * (asked == "auto"))
    for remark in remarks:
        say(console.one_line(remark))
    if args.why:
        say(console.one_line(f"chosen so (auto): {'; '.join(args.why)}"))
    recipe = RECIPES[args.recipe]
    taken = [f"--{name} {said(getattr(args, name))}" for name, value in recipe.items() if name not in args.given
             and (callable(value) or value == getattr(args, name))]  # else a checkpoint's, or another horizon's
    nothing = "nothing is taken from it" if recipe else "every default of --help"
    say(f"recipe of {args.recipe}: {' '.join(taken) or nothing}")
    if args.environment:
        say(console.one_line(f"from the environment: {' '.join(args.environment)}"))


def open_sources(args) -> list[shards.Source]:
    """The data, checked; nothing where a dry run names none and there is none yet."""
    if args.dry_run and not (args.mock_data or "data_dir" in args.given or Path(args.data_dir).exists()):
        return []
    sources = [shards.mock_source(args.seed)] if args.mock_data else shards.open_data(args.data_dir)
    shards.check(sources)
    return sources


def print_dry_run(args, model: Spider, n_loops: int, precision: str, device: torch.device, world: World,
            memory: dict[str, float], size: float, sources: list[shards.Source], loader: Loader | None,
            lengths: dict[str, float], usual: float, time_them: Callable, say: Callable) -> int:
    """Prints what a run would take, the verdict first; exit status 1 where memory or disk do not suffice."""
    enough = dry_run.print_verdict(args, memory, machine.memory_of(device, world), size)
    peak = machine.product_rate(device) * world.ranks * (2 if precision == "fp8" else 1)
    bound = peak / model.flops_per_byte(usual, n_loops, args.seq_len)
    rate = dry_run.expected_rate(args, device, world.ranks, sum(memory.values()), bound, time_them)
    warnings = (dry_run.horizon_warnings(args, loader, math.ceil(args.target_tokens / args.global_batch), lr_factor)
                + dry_run.segment_warnings(model.config, lengths, args.seq_len))
    dry_run.print_outlook(args, loader, sources, rate, warnings)
    say()
    dry_run.print_tables(model, n_loops, args, [flag.name for flag in FLAGS], usual)
    print(describe_fp8(model, args.fp8_experts))
    return 0 if enough else 1


def main(args: SimpleNamespace, stop: StopSignals, closing: ExitStack, world: World) -> int:
    """A whole run, from the flags to the last checkpoint; what it opens is closed by `closing`. Returns the exit status
    of one that comes to its end."""
    start_log("INFO" if world.is_rank0 else "ERROR")

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
    for name in ("keep_best", "patience"):
        if getattr(args, name) and not args.eval_every:
            raise UsageError(f"--{name}: it goes by the validation loss, and --eval_every 0 evaluates nothing")
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
    loader = Loader(sources, args.seq_len, args.seed) if sources else None
    lengths = dry_run.segment_lengths(model, sources, args)
    usual, asked = dry_run.mean_length(config, sources, lengths), args.recompute  # bytes per segment
    memory = take_recompute(args, model, n_loops, optimizer, precision, device, world, usual)
    size = checkpoint_size(model, optimizer)
    say = partial(say_what_was_chosen, args, model, n_loops, device, precision, backend, optimizer,
                  (f"recompute {args.recompute}", asked), world, remarks)
    if args.dry_run:
        time_them = partial(time_steps, config, n_loops, args, world, precision, backend, optimizer, loader)
        return print_dry_run(args, model, n_loops, precision, device, world, memory, size, sources, loader, lengths, usual,
                       time_them, say) if world.is_rank0 else 0
    say()
    logger.info(dry_run.describe_memory(memory, machine.memory_of(device, world)))
    validation = validation_rows(sources, args.seq_len, args.eval_tokens) if args.eval_every else None
    eval_rows = max(args.micro_batch, EVAL_BYTES // args.seq_len)  # at a time: without gradients there is room for more
    logger.info(", ".join(f"{s.name}: {len(s.train):,} training and {len(s.val):,} validation ids" for s in sources))
    check_memory(sum(memory.values()), device, world)

    # -----------------------------------------------------------------------------------------------------------------
    # Model, real: values, FP8, compilation
    materialize(model, device, precision, backend, args, world)

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
    ceiling = machine.product_rate(device) * world.ranks
    logger.info(f"{batch * args.seq_len:,} bytes a step, {last_step:,} steps; {flops_per_byte(n_loops, usual) / 1e9:.2g}"
                f" GFLOP per byte at {usual:.2g} bytes per segment; checkpoints in {home.path}")
    for warning in (*dry_run.horizon_warnings(args, loader, horizon, lr_factor),
                    *dry_run.segment_warnings(config, lengths, args.seq_len)):
        logger.warning(warning)
    metrics_file, writer = home.open(progress, last_step, args.keep_last, size, args.sharded_checkpoints,
                                     args.keep_best)
    tracker = start_wandb(args, {flag.name: getattr(args, flag.name) for flag in FLAGS}, progress, closing) if world.is_rank0 else None
    profiler = start_profiler(device, home.path, closing) if args.profile and world.is_rank0 else None
    if progress.written >= last_step:
        logger.info(f"nothing to do: step {progress.step} of {last_step} is done; raise --max_steps or --target_tokens")
    elif (precision == "fp8" or args.compile == "on") and not progress.is_out_of_patience(args.patience):
        warm_up(model, args.micro_batch, args.seq_len, n_loops, device)
    feed = Feed(loader, args, world, progress, closing)
    optimizers.set_lr(args.lr, lr_factor(max(0, progress.step - 1), horizon, args))  # as the checkpoint had it
    stopping = Stopping(stop, writer, progress.step, last_step, args.max_skipped, args.patience, world)
    if world.is_rank0:
        closing.callback(leave_curves, home.path, stop)

    def save():
        writer.save(run_state(model, optimizers, progress, loader, args, world), metrics_file.sync)

    # -----------------------------------------------------------------------------------------------------------------
    # The loop
    first_step = progress.step + 1
    while stopping.goes_on(progress):
        if progress.owed is None:         # else a run before this one did the step, and owes what follows it
            # ---------------------------------------------------------------------------------------------------------
            step_start = time.perf_counter()
            first = progress.bytes_seen // args.seq_len
            model.halting_warmup = min(1.0, (progress.step + 1) / (HALTING_WARMUP * horizon))
            with stopping.droppable(STEP_PATIENCE):  # up to the update nothing but gradients changes
                batches, targets, epoch = feed.take()
                loops = loops_of_step(args, n_loops, progress.step)
                model.dropout = dropout_at(args, loader, first)
                sums, tokens = accumulate(model, batches, loops, targets, world)
            if stopping.drops():
                break
            lr = args.lr * (factor := lr_factor(progress.step, horizon, args))
            optimizers.set_lr(args.lr, factor)
            numbers = update(model, optimizers, sums, tokens, sum(part.real for part in batches), args,
                             empty_tables=epoch > progress.epoch and empties_tables(args, loader, first))
            rate = batch * args.seq_len / (time.perf_counter() - step_start)
            # ---------------------------------------------------------------------------------------------------------
            mfu = rate * flops_per_byte(loops, round(max(1.0, numbers["bytes_per_segment"]), 2)) / ceiling
            numbers |= dict(lr=lr, tok_per_sec=rate, bf16_mfu=mfu, memory=machine.peak_memory(device), time=time.time())
            spike = progress.record(numbers, (first + batch) * args.seq_len, epoch)
            remaining = stopping.seconds_left(progress.step, pauses_left(args, progress.step, last_step))
            # Once in a while: a line of the log
            if progress.step % args.log_every == 0 or progress.step in (first_step, last_step):
                logger.info(progress_line(progress.owed, last_step, remaining, device))
            # Once in a while: a step to look at
            if progress.skipped or spike:
                logger.warning(odd_step_line(progress, first, batch, args))
            if progress.step == first_step and not lengths:  # of cuts that are learned no sample tells before
                for warning in dry_run.segment_warnings(config, {f"step {first_step}": numbers["bytes_per_segment"]},
                                                     args.seq_len):
                    logger.warning(warning)
            if profiler:
                profiler.step()
        metrics = progress.owed
        evaluates, samples = (every and (progress.step % every == 0 or progress.step == last_step)
                              for every in (args.eval_every, args.sample_every))
        # Once in a while: evaluate and sample; the step's line is owed until that is done
        if evaluates or samples:
            with stopping.pause(bool(evaluates) + bool(samples)):
                if evaluates:
                    metrics = metrics | evaluate(model, validation, eval_rows, n_loops, device, world)
                if samples and (whole := world.whole_model(model)) is not None:
                    print_sample(whole, progress.step, n_loops, args, validation and validation[0][0])
            if stopping.drops():
                break
        if evaluates:
            progress.record_evaluation(metrics["val_loss"], at_end=progress.step % args.eval_every != 0)
        metrics_file.write(metrics)
        if tracker:
            tracker.log(metrics, step=progress.step)
        progress.owed = None
        # Once in a while: save
        if not progress.skipped and (progress.step % args.ckpt_every == 0 or stopping.retry_is_due()
                                     or args.keep_best and progress.is_best):
            save()

    # -----------------------------------------------------------------------------------------------------------------
    # The end
    if not writer.holds(progress.step):
        save()
    stopping.report(progress, how_to_go_on(args))
    return 0


def pauses_left(args, step: int, last_step: int) -> int:
    """Evaluations and samples that a run still makes from a step on, its own and those of the end included."""
    return sum(last_step // every - (step - 1) // every + (last_step % every > 0)
               for every in (args.eval_every, args.sample_every) if every)


if __name__ == "__main__":
    sys.exit(command_line())
