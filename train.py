"""Train Spider, a byte-level Recurrent-Depth Transformer, from memory-mapped byte shards.

    python train.py --mock_data --max_steps 20 --seq_len 128 --micro_batch 2            # smoke run, on any machine
    python train.py --data_dir data                                                     # `1b` on a GPU, `tiny` on a CPU
    torchrun --standalone --nproc_per_node 8 train.py --data_dir data --shards 8        # several GPUs

The same command again resumes from the newest checkpoint in --ckpt_dir. All randomness is a function of (--seed, step),
so an interrupted run ends like an uninterrupted one. `python train.py --help` lists the flags.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

from spider.errors import UsageError
from spider.flags import (Flag, config_text, error_line, integer, nonempty, one_of, parse_flags, path_name, real,
                          run_program)
from spider.model.config import BACKENDS, MAX_LOOPS, PRESETS, RECOMPUTE, SpiderConfig
from spider.training.plan import (OPTIMIZERS, BatchShape, MachinePlan, OptimizerSettings, OutputPlan, Plan, Schedule,
                                  apply_settings, describe, explain, pick, step_seed)

# ---------------------------------------------------------------------------------------------------------------------
# Flags by heading of --help, which is also their section in a --config file. Defaults are those of `1b`; RECIPES holds
# what differs for the others.

HIGHEST_RATE = 1000.0                     # a larger learning rate is a typo: steps overflow
MOST_MICRO_STEPS = 1 << 16

GROUPS = {"basics": (
    Flag("model", "auto", one_of("auto", *PRESETS), "auto: the checkpoint's, else 1b on a GPU, tiny elsewhere"),
    Flag("data_dir", "data", path_name, "directory of .bin shards, or a mixture: web:0.7,code:0.3",
         "DATA_DIR", metavar="DIR"),
    Flag("mock_data", False, None, "train on synthetic, learnable bytes instead of --data_dir"),
    Flag("ckpt_dir", "checkpoints", path_name, "directory for checkpoints and metrics.jsonl; --mock_data adds mock/ "
         "to the default", metavar="DIR"),
    Flag("target_tokens", 10_000_000_000, integer(1), "bytes to train on: the horizon of the schedule",
         "TARGET_TOKENS", metavar="BYTES"),
    Flag("max_steps", 0, integer(0), "stop after this many optimizer steps; 0: stop at --target_tokens. Beyond that "
         "horizon the learning rate stays at its minimum", metavar="STEPS"),
    Flag("resume", None, path_name, "checkpoint to resume from, if not the newest good one in --ckpt_dir",
         metavar="CHECKPOINT"),
    Flag("dry_run", "off", one_of("off", "on", "config"), "on (or no value): check the data, print the settings, "
         "memory and cost of the run, and stop; config: print the settings as a file for --config", alone="on"),
    Flag("config", None, path_name, "TOML file of flag values, in sections named like these headings; flags and "
         "environment variables override it", metavar="FILE"),
), "model": (
    Flag("set", None, str, "fields of SpiderConfig to change, e.g. lora_rank=0,engram_match_words=1+2",
         metavar="NAME=VALUE,..."),
    Flag("n_loops", 6, integer(1, MAX_LOOPS), "loops of the recurrent core", "N_LOOPS"),
    Flag("random_loops", False, None, "draw the loops of each step from a Poisson distribution with mean --n_loops"),
), "batch": (
    Flag("seq_len", 2048, integer(2, 1 << 24), "bytes per sequence", "SEQ_LEN", metavar="BYTES"),
    Flag("micro_batch", 64, integer(1, 1 << 20), "sequences per device and micro-step; lower it to save memory",
         "MICRO_BATCH"),
    Flag("grad_accum", 1, integer(1, MOST_MICRO_STEPS), "micro-steps per optimizer step", "GRAD_ACCUM"),
    Flag("global_batch", None, integer(1), "bytes per optimizer step over all ranks, instead of --grad_accum",
         metavar="BYTES"),
    Flag("seed", 0, integer(0), "seed of weights, data order, segment noise, dropout and loop counts"),
), "horizon": (
    Flag("target_flops", None, real(0, open_low=True), "training FLOPs, instead of --target_tokens", metavar="FLOPS"),
    Flag("target_param_data_ratio", None, real(0, open_low=True), "training bytes per parameter (not counting the "
         "Engram tables), instead of --target_tokens", metavar="RATIO"),
), "optimizer": (
    Flag("optimizer", "auto", one_of("auto", *OPTIMIZERS), "auto: muon for matrices, AdamW for the rest"),
    Flag("lr", OptimizerSettings.lr, real(0, HIGHEST_RATE, open_low=True), "peak learning rate (Muon's updates are "
         "scaled to AdamW's size)", "LR", metavar="RATE"),
    Flag("engram_lr", OptimizerSettings.engram_lr, real(0, HIGHEST_RATE), "learning rate of the Engram tables: the "
         "size of a row's first step", metavar="RATE"),
    Flag("engram_reset", False, None, "clear the Engram tables at the start of each further epoch, since they memorize "
         "the text"),
    Flag("schedule", "cosine", one_of("cosine", "wsd"), "decay after warm-up; wsd: constant, then linear"),
    Flag("warmup_steps", 10, integer(0), "optimizer steps of linear warm-up", metavar="STEPS"),
    Flag("wsd_decay_fraction", 0.2, real(0, 1), "last fraction of the horizon, in which wsd decays",
         metavar="FRACTION"),
    Flag("min_lr_fraction", 0.1, real(0, 1), "learning rate at the horizon, as a fraction of the peak",
         metavar="FRACTION"),
    Flag("weight_decay", OptimizerSettings.weight_decay, real(0, HIGHEST_RATE), "weight decay of matrices; vectors and "
         "Engram tables have none"),
    Flag("dropout", 0.0, real(0, 0.9), "dropout on the core's input and output, and a fifth of it on the bytes "
         "before and after; 0 in the first epoch, in full from the eleventh on", metavar="RATE"),
    Flag("beta1", OptimizerSettings.beta1, real(0, 1, open_high=True), "AdamW's beta1"),
    Flag("beta2", OptimizerSettings.beta2, real(0, 1, open_high=True), "AdamW's beta2"),
    Flag("momentum", OptimizerSettings.momentum, real(0, 1, open_high=True), "Muon's momentum"),
    Flag("grad_clip", 1.0, real(0), "clip the gradient to this norm, not counting the Engram tables; 0: off",
         metavar="NORM"),
    Flag("max_skipped", 10, integer(1), "stop after this many steps in a row with a non-finite loss or gradient",
         metavar="STEPS"),
), "machine": (
    Flag("device", "auto", one_of("auto", "cpu", "cuda"), "auto: cuda if available"),
    Flag("precision", "auto", one_of("auto", "fp8", "bf16", "fp32"), "auto: bf16 if the hardware has it"),
    Flag("fp8_experts", False, None, "with fp8: convert the routed experts too, with row-wise scales"),
    Flag("moe_backend", "auto", one_of("auto", *BACKENDS), "expert kernels; auto: grouped with compiled layers, else "
         "tile if it works here, else grouped; loop: the reference"),
    Flag("compile", "auto", one_of("auto", "on", "off"), "torch.compile the layers (mode default); no value: on; auto: "
         "on for a GPU, if it works there", alone="on"),
    Flag("recompute", "auto", one_of("auto", *RECOMPUTE), "activation checkpointing: layers that backward computes "
         "again; auto: the fewest with which a step fits into memory"),
    Flag("no_gradient_checkpointing", False, None, "same as --recompute nothing"),
    Flag("shards", 1, integer(1, 1 << 16), "shard weights, gradients and optimizer state over this many ranks; the "
         "groups of ranks are replicas", metavar="RANKS"),
    Flag("rank_timeout", 300.0, real(0, 1e6, open_low=True), "seconds that ranks wait for one another after the first "
         "step; saves have no limit", metavar="SECONDS"),
    Flag("deterministic", False, None, "on a GPU: use deterministic kernels, some of them slower"),
), "checkpoints": (
    Flag("ckpt_every", 50, integer(1), "optimizer steps between checkpoints", "CKPT_EVERY", metavar="STEPS"),
    Flag("keep_last", 2, integer(2, 1 << 20), "number of newest checkpoints to keep"),
    Flag("keep_best", False, None, "save at each new lowest validation loss, and keep that checkpoint beside the "
         "newest ones; sample.py DIR --best loads it"),
    Flag("sharded_checkpoints", False, None, "write checkpoints as directories with a file per rank, for models too "
         "large for one file"),
    Flag("reset_steps", False, None, "with --resume: load only the weights; fresh optimizer, step 0, data from the "
         "start"),
), "evaluation": (
    Flag("eval_every", 250, integer(0), "optimizer steps between evaluations; there is one more at the end; 0: none",
         metavar="STEPS"),
    Flag("eval_tokens", 1_048_576, integer(1, 1 << 40), "validation bytes per evaluation, always the same ones",
         metavar="BYTES"),
    Flag("patience", 0, integer(0), "end the run after this many evaluations in a row without a lower validation "
         "loss; 0: never"),
    Flag("sample_every", 0, integer(0), "optimizer steps between logged samples; 0: none", metavar="STEPS"),
    Flag("sample_prompt", None, str, "prompt of the samples; default: held-out text, if the run evaluates"),
), "logs": (
    Flag("log_every", 1, integer(1), "optimizer steps between lines of the log; metrics.jsonl has every step",
         metavar="STEPS"),
    Flag("run", None, nonempty("a name"), "log to wandb under this name (WANDB_MODE=offline works)"),
    Flag("profile", False, None, "write a profiler trace of steps 3 to 5 to --ckpt_dir"),
)}
FLAGS = tuple(flag for group in GROUPS.values() for flag in group)
# Groups of flags that exclude each other: one on the command line or in the environment overrides the others in a
# --config file.
ALTERNATIVES = (("target_tokens", "target_flops", "target_param_data_ratio"), ("grad_accum", "global_batch"),
                ("recompute", "no_gradient_checkpointing"), ("data_dir", "mock_data"))


def measured_rate(config: SpiderConfig, steps: float) -> float:
    """Return the peak learning rate for a horizon in steps, a fit to runs of tiny (docs/results/learning.md)."""
    return float(f"{min(0.02, 0.116 * steps ** -0.4 * (128 / config.hidden_size) ** 0.5):.3g}")


def brief_warmup(config: SpiderConfig, steps: float) -> int:
    """Return the warm-up for a horizon in steps, brief if that is short (docs/results/learning.md)."""
    return int(min(40, steps / 25))


def ten_evaluations(config: SpiderConfig, steps: float) -> int:
    """Return the steps between evaluations, for ten per horizon. On tinyshakespeare's validation split one takes as
    long as 8 steps of tiny: ten add 3% to the recipe's 2,930 steps, and 31% to one pass (245 steps)."""
    return max(1, math.ceil(steps / 10))


# Defaults of flags by model; a function computes one from the config and the horizon in steps. Those of tiny are
# measured in docs/results/learning.md.
TINY = dict(n_loops=1, seq_len=4096, micro_batch=1, target_tokens=12_000_000, lr=measured_rate,
            warmup_steps=brief_warmup, dropout=0.5, engram_reset=True, ckpt_every=500, eval_every=ten_evaluations,
            eval_tokens=262_144)
RECIPES = {
    "1b": {}, "base": dict(n_loops=1),
    "small": TINY | dict(target_tokens=30_000_000, eval_tokens=1_048_576), "tiny": TINY,
}


def parse_args(argv: list[str] | None = None, environ=os.environ) -> SimpleNamespace:
    """Parse flags, see flags.parse_flags for the result; raise UsageError for a bad value or contradicting flags."""
    args = parse_flags(GROUPS, argv, environ, prog="train.py", doc=__doc__, recipes=RECIPES, alternatives=ALTERNATIVES)
    if args.no_gradient_checkpointing and args.recompute not in ("auto", "nothing"):
        raise UsageError("--no_gradient_checkpointing means --recompute nothing, which contradicts --recompute "
                         f"{args.recompute}: give one of the two")
    args.recompute = "nothing" if args.no_gradient_checkpointing else args.recompute
    if args.mock_data and "ckpt_dir" not in args.given:
        args.ckpt_dir = os.path.join(args.ckpt_dir, "mock")
    return args


if __name__ == "__main__" and {"-h", "--help"} & {*sys.argv}:  # answered before torch is imported, which takes seconds
    sys.exit(run_program(parse_args, "train.py"))

if __name__ == "__main__" and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the number of rows varies by step
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import numpy as np
import torch
from loguru import logger
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record

import tokenizer
from spider import console
from spider.data.loader import Loader, validation_sets
from spider.data.shards import Source, check, mock_source, open_data
from spider.errors import CheckpointError, Diverged, LeftByPeer, Stopped
from spider.model.engram_table import EngramTable
from spider.model.parameters import ENGRAM_TABLES, kinds_of
from spider.training import machine
from spider.training.batches import Batch, Feed, batches_of
from spider.training.checkpoint_contents import run_state
from spider.training.curves import write_curves
from spider.training.dry_run import (epochs_over, expected_rate, horizon_warnings, mean_length, print_outlook,
                                     print_tables, print_verdict, segment_lengths, segment_warnings)
from spider.training.evaluation import EVAL_BYTES, evaluate, print_sample
from spider.training.fp8 import convert_to_fp8, describe_fp8
from spider.training.machine import (keep_freed_memory, memory_advice, multiplies_bf16, resolve_compile,
                                     resolve_device, resolve_precision, start_log)
from spider.training.memory import (check_memory, checkpoint_size, choose_recompute, describe_memory, estimate_memory,
                                    memory_beside_tensors)
from spider.training.optimizers import Optimizers
from spider.training.progress import RunProgress
from spider.training.ranks import World
from spider.training.run_directory import RunDirectory
from spider.training.run_identity import RunIdentity, check_same_model
from spider.training.run_log import log_lines, odd_step_line, progress_line
from spider.training.sharding import shard_model, sharding_of
from spider.training.stopping import Stopping, StopSignals, tell_torchrun
from spider.training.trackers import start_profiler, start_wandb
from spider_model import Spider, SpiderOutput
from tile_moe import multiplies_at_once, resolve_backend

# ---------------------------------------------------------------------------------------------------------------------
# The plan of a run. Precedence: flag, environment, --config, recipe, device

def settle(args, device: torch.device, world: World | None = None, state: dict | None = None,
           origin: Path | None = None, open_sources: Callable[[], Sequence[Source]] = list,
           model_class: type[Spider] = Spider) -> Plan:
    """Resolve parsed flags into the plan of a run.

    state, origin: the checkpoint to resume from, and its path. open_sources: opens the data, to measure its segments;
    called after all flags have been checked. Raise UsageError for flags that contradict one another or that this
    machine does not support, and CheckpointError for a checkpoint of another model."""
    world = World() if world is None else world
    compiles, why_compile = resolve_compile(args.compile, device)
    precision, why_precision = resolve_precision(args.precision, device)
    recipe, suits = (state or {}).get("recipe"), "1b" if device.type == "cuda" else "tiny"
    recipe = (recipe or suits) if args.model == "auto" else args.model
    values = {flag.name: getattr(args, flag.name) for flag in FLAGS}
    values |= {name: value for name, value in RECIPES[recipe].items() if name not in args.given}
    config = (resolve_config(values, recipe) if state is None else
              config_of_checkpoint(values, recipe, state, origin, model_class))
    check_fp8_experts(args.fp8_experts, precision, device, config)
    if state is not None and "n_loops" not in args.given:
        values["n_loops"] = state.get("n_loops", config.n_loops)
    with torch.device("meta"):
        model = model_class(config)
    batch = resolve_batch(values, args.given, world.ranks)
    values |= dict(grad_accum=batch.grad_accum, global_batch=batch.bytes, compile="on" if compiles else "off")
    values["target_tokens"] = resolve_horizon(values, args.given, model)
    values |= {name: rule(config, values["target_tokens"] / batch.bytes)
               for name, rule in values.items() if callable(rule)}
    for name in ("keep_best", "patience"):
        if values[name] and not values["eval_every"]:
            raise UsageError(f"--{name} needs the validation loss, but --eval_every 0 disables evaluation")
    if not any(isinstance(module, EngramTable) for module in model.modules()):
        if values["engram_reset"] and "engram_reset" in args.given:
            raise UsageError("--engram_reset: this model has no Engram tables")
        values["engram_reset"] = False    # the recipe's
    remarks = []
    backend = resolve_backend(
        args.moe_backend, device, config, torch.float32 if precision == "fp32" else torch.bfloat16, remarks.append,
        agree=lambda able: int(world.sum(torch.tensor(int(able), device=device))) == world.ranks, compiled=compiles)
    optimizer = "muon" if args.optimizer == "auto" else args.optimizer
    sources = open_sources()
    lengths = segment_lengths(model, sources, batch.seq_len, args.seed)
    plan = Plan(recipe, config, args.data_dir, args.mock_data, batch, pick(Schedule, values),
                pick(OptimizerSettings, values, optimizer=optimizer),
                pick(MachinePlan, values, precision=precision, moe_backend=backend, compile=compiles),
                pick(OutputPlan, values), values, segment_lengths=lengths,
                bytes_per_segment=mean_length(config, sources, lengths),
                checkpoint_size=checkpoint_size(model, optimizer))
    recompute, memory = world.on_rank0(lambda: choose_recompute(
        args.recompute, lambda recompute: memory_beside_tensors(plan, device, world) | estimate_memory(
            model, plan, device, recompute, world), machine.memory_of(device, world.local_ranks)))
    plan = replace(plan, machine=replace(plan.machine, recompute=recompute), memory=memory,
                   flags=values | dict(recompute=recompute))
    why = [f"precision {precision}: {why_precision}"] * bool(why_precision)
    why += [f"layers {'not ' * (not compiles)}compiled: {why_compile}"] * bool(why_compile)
    threads = torch.get_num_threads()
    hardware = f"{threads} thread{'s' * (threads != 1)}" if device.type == "cpu" else torch.cuda.get_device_name(device)
    layout = f"{world.ranks} ranks, {world.replicas} replicas of {world.shards} shards" * (world.ranks > 1)
    choices = describe(plan, vars(args), sum(p.numel() for p in model.parameters()), f"{device}, {hardware}", layout)
    why = explain(plan, RECIPES[recipe], args.given, args.environment, why)
    return replace(plan, remarks=(*choices, *remarks, *why))


def check_fp8_experts(asked: bool, precision: str, device: torch.device, config: SpiderConfig):
    """Raise UsageError if --fp8_experts is given but not supported."""
    if asked and not config.has_experts:
        raise UsageError("--fp8_experts: this model has no routed experts")
    if asked and precision != "fp8":
        raise UsageError(f"--fp8_experts needs --precision fp8; the precision is {precision}")
    if asked and device.type == "cuda" and not multiplies_at_once(device, torch.bfloat16):
        raise UsageError("--fp8_experts: torch's grouped FP8 product needs sm_90 or sm_100; leave out the flag to run "
                         "the experts in bf16")


def resolve_config(values: dict, recipe: str) -> SpiderConfig:
    """Return the recipe's preset with --n_loops and --set."""
    return apply_settings(replace(SpiderConfig.preset(recipe), n_loops=values["n_loops"]), values["set"])


def config_of_checkpoint(values: dict, recipe: str, state: dict, origin: Path,
                         model_class: type[Spider]) -> SpiderConfig:
    """Return the checkpoint's config with --set applied. Raise CheckpointError if --model or --set would change the
    shape of a weight."""
    there = SpiderConfig.from_saved(state["cfg"])
    config = apply_settings(replace(there, vocab_size=tokenizer.VOCAB_SIZE), values["set"])
    if state["cfg"].get("vocab_size") != config.vocab_size:
        raise CheckpointError(f"{origin} has another vocabulary: {state['cfg'].get('vocab_size')} ids instead of "
                              f"{config.vocab_size}")
    for asked in (config, *(resolve_config(values, recipe),) * (values["model"] != "auto")):
        check_same_model(origin, state["cfg"], asked, model_class)
    return config


def resolve_batch(values: dict, given: set[str], ranks: int) -> BatchShape:
    """Derive --grad_accum from --global_batch or the other way round; if both are given, they must agree."""
    shape = BatchShape(values["seq_len"], values["micro_batch"], 1, ranks)
    at_once, asked, micro_steps = shape.bytes, values["global_batch"], values["grad_accum"]
    if asked is None:
        return replace(shape, grad_accum=micro_steps)
    if asked % at_once:
        raise UsageError(f"--global_batch: {asked:,} bytes are not a multiple of a micro-step's {at_once:,} "
                         f"({ranks} rank{'s' * (ranks > 1)} of {shape.micro_batch} x {shape.seq_len}): lower "
                         f"--micro_batch, or change --global_batch")
    if "grad_accum" in given and micro_steps * at_once != asked:
        raise UsageError(f"--grad_accum: {micro_steps} makes {micro_steps * at_once:,} bytes a step on {ranks} "
                         f"rank{'s' * (ranks > 1)}, --global_batch is {asked:,}: give one of the two")
    if asked // at_once > MOST_MICRO_STEPS:
        raise UsageError(f"--global_batch: {asked:,} bytes are {asked // at_once:,} micro-steps of {at_once:,}, more "
                         f"than {MOST_MICRO_STEPS:,}: lower it, or raise --micro_batch")
    return replace(shape, grad_accum=asked // at_once)


def resolve_horizon(values: dict, given: set[str], model: Spider) -> int:
    """Return the horizon in bytes, from --target_tokens, --target_flops or --target_param_data_ratio."""
    given = [name for name in ("target_tokens", "target_flops", "target_param_data_ratio") if name in given]
    if len(given) > 1:
        raise UsageError(f"--{given[1]}: --{given[0]} already sets the horizon, by flag or environment: give one")
    horizon = values["target_tokens"]
    if values["target_flops"]:
        per_byte = model.flops_per_byte(model.config.bytes_per_segment, values["n_loops"], values["seq_len"])
        horizon = max(1, math.ceil(min(values["target_flops"] / per_byte, 1 << 62)))
    elif values["target_param_data_ratio"]:
        parameters = sum(model.get_parameter(name).numel() for name, kind in kinds_of(model).items()
                         if kind.component != ENGRAM_TABLES)
        horizon = math.ceil(min(values["target_param_data_ratio"] * parameters, 1 << 62))
    if horizon >= 1 << 62:
        raise UsageError(f"--{given[0]}: a horizon of {horizon:.0e} bytes is more than {1 << 62:.0e}")
    return horizon


# ---------------------------------------------------------------------------------------------------------------------
# Pure functions of the step

def lr_factor(step: int, horizon: int, schedule: Schedule) -> float:
    """Return the learning rate of a step (from 0) as a fraction of the peak: linear warm-up, then --schedule."""
    if step < schedule.warmup_steps:
        return (step + 1) / (schedule.warmup_steps + 1)
    done = min(1.0, (step - schedule.warmup_steps) / max(1, horizon - schedule.warmup_steps))
    if schedule.schedule == "cosine":
        shape = 0.5 * (1 + math.cos(math.pi * done))
    else:
        shape = min(1.0, (1 - done) / schedule.wsd_decay_fraction) if schedule.wsd_decay_fraction else 1.0
    return schedule.min_lr_fraction + (1 - schedule.min_lr_fraction) * shape


def empties_tables(plan: Plan, loader: Loader, first: int) -> bool:
    """Decide whether to clear the Engram tables for an epoch that begins at sequence `first`. Not if less than half of
    it will be read: nearly empty tables at the end of a run cost more than memorized rows."""
    left = epochs_over(loader, plan.schedule.target_tokens - first * plan.batch.seq_len)
    return plan.schedule.engram_reset and float(loader.share @ left) >= 0.5


def dropout_at(schedule: Schedule, loader: Loader, first: int) -> float:
    """Return the dropout of a step that begins at sequence `first`: 0 in the first epoch, growing to --dropout after
    DROPOUT_EPOCHS; for a mixture the mean over its sources."""
    return schedule.dropout * float(loader.share @ (loader.epochs(first) / DROPOUT_EPOCHS).clip(max=1))


def loops_of_step(schedule: Schedule, step: int) -> int:
    """Return --n_loops, or with --random_loops a Poisson draw of that mean, at least 1; the same on every rank."""
    if not schedule.random_loops:
        return schedule.n_loops
    generator = np.random.default_rng(step_seed(schedule.seed, step, "loops"))
    return max(1, int(generator.poisson(schedule.n_loops)))


HALTING_WARMUP = 1 / 8                    # of the horizon, so that every loop learns (docs/results/mechanisms.md)
DROPOUT_EPOCHS = 10                       # until dropout reaches --dropout: text is memorized gradually
STEP_PATIENCE = 8.0                       # seconds that a step may take to finish after a signal; then it is dropped


# ---------------------------------------------------------------------------------------------------------------------
# The model: initialization, precision, compilation

def build_model(plan: Plan, device: torch.device, world: World | None = None,
                model_class: type[Spider] = Spider) -> Spider:
    """Build the model of a plan, ready to train: initialize it from --seed, apply FP8, backend and compilation, shard
    it over the ranks."""
    with torch.device("meta"):
        model = model_class(plan.config)
    torch.manual_seed(plan.schedule.seed)
    model.to_empty(device=device)
    model.init_weights()
    machine_plan = plan.machine
    emulated = machine_plan.precision == "fp8" and not multiplies_bf16(device)
    model.compute_dtype = torch.float32 if machine_plan.precision == "fp32" or emulated else torch.bfloat16
    model.recompute = machine_plan.recompute
    model.set_backend(machine_plan.moe_backend)
    if machine_plan.precision == "fp8":
        logger.info(describe_fp8(model, machine_plan.fp8_experts))
        convert_to_fp8(model, device, machine_plan.fp8_experts)
    if machine_plan.compile and (obstacle := model.compile_layers()):
        logger.warning(f"compiled only the byte layers, not the core's: {obstacle}")
    model.train()
    if world is not None:
        shard_model(model, world, plan.batch.grad_accum)
    return model


def warm_up(model: Spider, batch: BatchShape, n_loops: int, device: torch.device, fall_back: bool = False):
    """Compile kernels by two passes on dummy bytes; weights, random state, buffers and data position stay unchanged. If
    torch.compile fails on the layers, run them uncompiled, with a warning, if `fall_back`; else raise UsageError."""
    ids = (torch.arange(batch.micro_batch * batch.seq_len, device=device) % 251).view(batch.micro_batch, batch.seq_len)
    try:
        with model.cast_weights_once():
            for noise_seed in range(2):
                model(ids, ids, n_loops=n_loops, noise_seed=noise_seed).loss.backward()
    except Exception as fault:            # whatever Dynamo, Inductor and Triton provoke
        if not model.compiled or machine.is_out_of_memory(fault):
            raise
        line = machine.describe_compile_error(fault, device)
        if not fall_back:
            raise UsageError(f"--compile: {line}; or use --compile off") from fault
        logger.warning(f"{line}: the layers run uncompiled")
        model.uncompile_layers()
    model.zero_grad(set_to_none=True)


# ---------------------------------------------------------------------------------------------------------------------
# One optimizer step

@dataclass
class Run:
    """State of a run: what a step reads and changes."""
    plan: Plan
    model: Spider
    optimizers: Optimizers
    loader: Loader
    feed: Feed
    progress: RunProgress
    world: World
    horizon: int                          # last step of the schedule, if all further steps have today's batch size
    flops_per_byte: Callable              # the model's method, cached, since it takes milliseconds


def train_step(run: Run, stopping: Stopping) -> bool | None:
    """Run one optimizer step and record its metrics in `run.progress`. Return whether its loss is a spike, or None if
    the step was dropped."""
    plan, model, progress, step_start = run.plan, run.model, run.progress, time.perf_counter()
    first = progress.bytes_seen // plan.batch.seq_len
    model.halting_warmup = min(1.0, (progress.step + 1) / (HALTING_WARMUP * run.horizon))
    with stopping.droppable(STEP_PATIENCE):  # before the update only gradients change
        batches, targets, epoch = run.feed.take()
        loops = loops_of_step(plan.schedule, progress.step)
        model.dropout = dropout_at(plan.schedule, run.loader, first)
        sums, counts = accumulate(model, batches, loops, targets)
    if stopping.drops():
        return None
    factor = lr_factor(progress.step, run.horizon, plan.schedule)
    run.optimizers.set_lr(plan.schedule.lr, factor)
    real = sum(batch.real for batch in batches)
    numbers = update(model, run.optimizers, sums, counts, real, plan.optimizer.grad_clip,
                     empty_tables=epoch > progress.epoch and empties_tables(plan, run.loader, first))
    rate = plan.batch.bytes / (time.perf_counter() - step_start)
    cost = run.flops_per_byte(round(max(1.0, numbers["bytes_per_segment"]), 1), loops, plan.batch.seq_len)
    device = run.world.device
    numbers |= dict(lr=plan.schedule.lr * factor, tok_per_sec=rate,
                    bf16_mfu=rate * cost / (machine.product_rate(device) * run.world.ranks),
                    memory=machine.peak_memory(device), time=time.time())
    return progress.record(numbers, (first + plan.batch.sequences) * plan.batch.seq_len, epoch)


def accumulate(model: Spider, batches: list[Batch], n_loops: int,
               targets: int | None = None) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Run forward and backward over a step's micro-steps; change nothing but gradients. `targets`: those of all ranks.

    Return sums over the micro-steps by name: loss (nats), total_loss, segments, mean_loops and the loss's other terms;
    and tokens_per_expert and boundary_counts. Waits for the device once per micro-step, for the number of segments.
    """
    sharding = sharding_of(model)
    sums, counts, passes = {}, [0, 0], len(batches) * sharding.ranks
    targets = max(1, sum(batch.targets for batch in batches) if targets is None else targets)
    with model.cast_weights_once():
        for batch in batches:
            out: SpiderOutput = model(batch.ids, batch.labels, n_loops, batch.noise_seed, batch.cu_seqlens)
            share = batch.targets / targets  # weigh all bytes equally, however many are PAD
            loss = out.by_byte * share + (out.loss - out.by_byte) / passes
            sharding.backward(model, loss, last=batch is batches[-1])
            numbers = dict(loss=out.nats_per_byte.detach() * share, total_loss=loss.detach(), segments=out.segments,
                           mean_loops=out.mean_loops / passes)
            numbers |= {name: term * share if name in out.BYTE_TERMS else term / passes
                        for name, term in out.loss_terms.items()}
            sums = {name: number + sums.get(name, 0) for name, number in numbers.items()}
            counts = [a + b for a, b in zip(counts, (out.tokens_per_expert, out.boundary_counts))]
    return sums, counts


def step_alone(model: Spider, optimizers: Optimizers, batches: list[Batch], n_loops: int, grad_clip: float = 1.0
               ) -> dict:
    """Run an optimizer step of a model outside of a run; return its metrics."""
    sums, counts = accumulate(model, batches, n_loops)
    return update(model, optimizers, sums, counts, sum(batch.real for batch in batches), grad_clip)


def update(model: Spider, optimizers: Optimizers, sums: dict[str, Tensor], counts: list[Tensor], real: int,
           grad_clip: float = 1.0, empty_tables: bool = False) -> dict:
    """Update the weights from accumulated gradients and return the step's metrics. `real`: its bytes that are not PAD;
    `empty_tables`: clear the Engram tables.

    Waits for the device once, for all numbers, before it changes a weight. If loss or gradient is not finite, no weight
    changes and `skipped` is true.
    """
    names, sums = list(sums), torch.stack(list(sums.values()))
    norm, sums, (tokens, scores), real = optimizers.sharding.all_reduce_step(optimizers.dense, sums, counts, real)
    nn.utils.clip_grads_with_norm_(optimizers.dense, grad_clip or math.inf, norm)
    balance = tokens.amax(1) / tokens.mean(1).clamp_min(1) if tokens.numel() else tokens.new_ones(1)
    *sums, norm, balance = torch.cat((sums, torch.stack((norm, balance.mean())))).tolist()
    sums = dict(zip(names, sums))
    skipped = not (math.isfinite(sums["total_loss"]) and math.isfinite(norm))
    if not skipped:
        optimizers.step()
        model.update_expert_bias(tokens)
        model.update_boundaries(scores, sums["loss"])
        if empty_tables:
            optimizers.reset_tables()
    optimizers.zero_grad()
    loss, total_loss, segments, loops = (sums.pop(name) for name in ("loss", "total_loss", "segments", "mean_loops"))
    return dict(loss=loss, total_loss=total_loss, grad_norm=norm, bytes_per_segment=real / max(1, segments),
                mean_loops=loops, expert_balance=balance, skipped=skipped, **sums)


# ---------------------------------------------------------------------------------------------------------------------
# The dry run

TIMED = 2.0                               # seconds of steps that a dry run times, at least one step


def time_steps(plan: Plan, world: World, loader: Loader | None, model_class: type[Spider] = Spider) -> float:
    """Measure the bytes/s of optimizer steps as in the middle of the run, on a model built for this. Without data, use
    synthetic sentences. Writes nothing."""
    seed, schedule = plan.schedule.seed, plan.schedule
    loader = Loader([mock_source(seed)], plan.batch.seq_len, seed) if loader is None else loader
    model = build_model(plan, world.device, model_class=model_class)
    optimizers, times = Optimizers(model, plan.optimizer), []
    while not times or sum(times) < TIMED:
        step = plan.horizon // 2 + len(times)
        start, first = time.perf_counter(), step * plan.batch.sequences
        batches = list(batches_of(loader, plan.batch, seed, world, step, first))
        model.dropout = dropout_at(schedule, loader, first)
        optimizers.set_lr(schedule.lr, lr_factor(step, plan.horizon, schedule))
        step_alone(model, optimizers, batches, plan.n_loops, plan.optimizer.grad_clip)
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return plan.batch.bytes / float(np.median(times[1:] or times))  # the first step is a warm-up


NOT_IN_CONFIG = {"dry_run", "resume", "reset_steps", "global_batch", "target_flops", "target_param_data_ratio",
                 "no_gradient_checkpointing"}  # specific to one run, or already resolved into another flag


def print_dry_run(plan: Plan, sources: Sequence[Source], world: World, model_class: type[Spider] = Spider) -> int:
    """Print the cost of a run, the verdict first; return exit status 1 if memory or disk do not suffice."""
    if plan.flags["dry_run"] == "config":
        print(config_text(GROUPS, {name: plan.flags[name] for name in plan.flags.keys() - NOT_IN_CONFIG}), end="")
        return 0
    with torch.device("meta"):
        model = model_class(plan.config)
    loader = Loader(sources, plan.batch.seq_len, plan.schedule.seed) if sources else None
    enough = print_verdict(plan, machine.memory_of(world.device, world.local_ranks))
    peak = machine.product_rate(world.device) * world.ranks * (2 if plan.machine.precision == "fp8" else 1)
    bound = peak / model.flops_per_byte(plan.bytes_per_segment, plan.n_loops, plan.batch.seq_len)
    rate = expected_rate(plan, world.device, bound, lambda: time_steps(plan, world, loader, model_class))
    print_outlook(plan, loader, sources, rate, horizon_warnings(plan, loader, plan.horizon, lr_factor)
                  + segment_warnings(plan.config, plan.segment_lengths, plan.batch.seq_len))
    for remark in plan.remarks:
        print(console.one_line(remark))
    print_tables(plan, model)
    print(describe_fp8(model, plan.machine.fp8_experts))
    return 0 if enough else 1


# ---------------------------------------------------------------------------------------------------------------------
# The run

def set_up(args, closing: ExitStack, world: World) -> torch.device:
    """Configure this process, join the other ranks, and return the device."""
    device = world.local_device(resolve_device(args.device))
    if device.type == "cpu":
        keep_freed_memory()
    torch.set_float32_matmul_precision("high")
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        closing.callback(torch.use_deterministic_algorithms, False)
        torch.utils.deterministic.fill_uninitialized_memory = False
    world.join(device, args.shards, args.rank_timeout)
    return device


@contextmanager
def refusals(tolerated: bool, world: World):
    """Print a CheckpointError raised inside as one line, if it is `tolerated` as in a dry run; else let it end the
    run."""
    try:
        yield
    except CheckpointError as fault:
        if not tolerated:
            raise
        if world.is_rank0:
            print(console.one_line(f"a run would be refused: {fault}"))


def open_sources(args) -> list[Source]:
    """Open and check the data; return an empty list in a dry run without --data_dir, if the default does not exist."""
    if args.dry_run != "off" and not (args.mock_data or "data_dir" in args.given or Path(args.data_dir).exists()):
        return []
    sources = [mock_source(args.seed)] if args.mock_data else open_data(args.data_dir)
    check(sources)
    return sources


def start_run(args, closing: ExitStack, world: World, model_class: type[Spider]):
    """Find the checkpoint to resume from and settle the plan; return the run's directory, the checkpoint's state, the
    plan and the data."""
    home = state = plan = None
    start_log("INFO" if world.is_rank0 else "ERROR")
    device, dry = set_up(args, closing, world), args.dry_run != "off"
    sources = cache(partial(open_sources, args))
    with refusals(dry and not args.resume, world):
        home = RunDirectory(Path(args.ckpt_dir), args.resume, args.reset_steps, closing, dry, world,
                            args.mock_data, model_class)
        state = home.load()
    if state is not None:
        with refusals(dry and not args.resume, world):
            plan = settle(args, device, world, state, home.origin, sources, model_class)
            if args.dry_run == "on" and world.is_rank0:
                print(console.one_line(home.start_line(state)))
    plan = settle(args, device, world, None, None, sources, model_class) if plan is None else plan
    return home, state, plan, sources()


def log_start(plan: Plan, model: Spider, loader: Loader, horizon: int, last_step: int):
    """Log the length of the run and the cost of a step; warn if horizon or segments do not suit the data."""
    cost = model.flops_per_byte(plan.bytes_per_segment, plan.n_loops, plan.batch.seq_len)
    logger.info(f"{last_step:,} step{'s' * (last_step != 1)} of {plan.batch.bytes:,} bytes; {cost / 1e9:.2g} GFLOP per "
                f"byte at {plan.bytes_per_segment:.2g} bytes per segment; checkpoints in {plan.output.ckpt_dir}")
    log_lines("WARNING", (*horizon_warnings(plan, loader, horizon, lr_factor),
                          *segment_warnings(plan.config, plan.segment_lengths, plan.batch.seq_len)))


def main(args: SimpleNamespace, stop: StopSignals, closing: ExitStack, world: World,
         model_class: type[Spider] = Spider) -> int:
    """Train, from the flags to the last checkpoint, and return the exit status. `closing` closes all resources."""
    # -----------------------------------------------------------------------------------------------------------------
    # Device, ranks, checkpoint to resume, plan
    home, state, plan, sources = start_run(args, closing, world, model_class)
    device, batch, out = world.device, plan.batch, plan.output
    if args.dry_run != "off":
        return print_dry_run(plan, sources, world, model_class) if world.is_rank0 else 0
    log_lines("INFO", (*plan.remarks, describe_memory(plan.memory, machine.memory_of(device, world.local_ranks)),
                       *map(str, sources)))

    # -----------------------------------------------------------------------------------------------------------------
    # Data, model and optimizers, restored from the checkpoint
    loader = Loader(sources, batch.seq_len, plan.schedule.seed)
    validation = validation_sets(sources, batch.seq_len, out.eval_tokens) if out.eval_every else {}
    eval_rows = max(batch.micro_batch, EVAL_BYTES // batch.seq_len)  # larger batches fit without gradients
    check_memory(sum(plan.memory.values()), device, world)
    model = build_model(plan, device, world, model_class)
    optimizers = Optimizers(model, plan.optimizer)
    identity = RunIdentity.of(plan.recipe, plan.flags)
    progress = home.restore(state, model, optimizers, plan.n_loops, loader, identity)
    del state

    # -----------------------------------------------------------------------------------------------------------------
    # Loop state
    bytes_left = max(0, plan.schedule.target_tokens - progress.bytes_seen)
    horizon = progress.step + math.ceil(bytes_left / batch.bytes)
    last_step, first_step = plan.schedule.max_steps or horizon, progress.step + 1
    log_start(plan, model, loader, horizon, last_step)
    metrics_file, writer = home.open(progress, last_step, out, plan.checkpoint_size)
    tracker = profiler = None
    if world.is_rank0:
        tracker = start_wandb(out.run, plan.flags, progress, closing)
        profiler = start_profiler(device, home.path, closing) if out.profile else None
        closing.callback(lambda: write_curves(home.path, stop.asked))
    if progress.written >= last_step:
        logger.info(f"nothing to do: the run is at step {progress.step} of {last_step}; to continue, raise --max_steps "
                    f"or --target_tokens")
    elif (plan.machine.precision == "fp8" or plan.machine.compile) and not progress.is_out_of_patience(out.patience):
        warm_up(model, batch, plan.n_loops, device, fall_back=args.compile == "auto" and world.ranks == 1)
    feed = Feed(loader, batch, plan.schedule.seed, world, progress, closing)
    run = Run(plan, model, optimizers, loader, feed, progress, world, horizon, cache(model.flops_per_byte))
    optimizers.set_lr(plan.schedule.lr, lr_factor(max(0, progress.step - 1), horizon, plan.schedule))  # as saved
    stopping = Stopping(stop, writer, progress.step, last_step, plan.optimizer.max_skipped, out.patience)

    def save():
        writer.save(run_state(model, optimizers, progress, identity, loader.targets.tolist()), metrics_file.sync)

    # -----------------------------------------------------------------------------------------------------------------
    # The loop
    while stopping.continues(progress):
        if progress.owed is None:         # else the run stopped after the step, before its evaluation
            if (spike := train_step(run, stopping)) is None:
                break
            # Once in a while: a line of the log
            if progress.step % out.log_every == 0 or progress.step in (first_step, last_step):
                remaining = stopping.seconds_left(progress.step, out.pauses(progress.step, last_step))
                logger.info(progress_line(progress.owed, last_step, remaining, device))
            # Once in a while: a skipped step or a loss spike
            if progress.skipped or spike:
                logger.warning(odd_step_line(progress, plan))
            # After the first step: the lengths of FlexiTokens are known only now
            if progress.step == first_step and not plan.segment_lengths and not plan.config.learns_boundaries:
                measured = {f"step {first_step}": progress.owed["bytes_per_segment"]}
                log_lines("WARNING", segment_warnings(plan.config, measured, batch.seq_len))
            if profiler:
                profiler.step()
        metrics = progress.owed
        evaluates, samples = (every and (progress.step % every == 0 or progress.step == last_step)
                              for every in (out.eval_every, out.sample_every))
        # Once in a while: evaluate and sample; the step's line of metrics is pending until then
        if evaluates or samples:
            with stopping.pause(bool(evaluates) + bool(samples)):
                if evaluates:
                    metrics = metrics | evaluate(model, validation, eval_rows, plan.n_loops, device, world)
                if samples and (whole := sharding_of(model).gather_model(model)) is not None:
                    print_sample(whole, progress.step, plan, validation)
            if stopping.drops():
                break
        if evaluates:
            progress.record_evaluation(metrics["val_loss"], at_end=progress.step % out.eval_every != 0)
        metrics_file.write(metrics)
        if tracker:
            tracker.log(metrics, step=progress.step)
        progress.owed = None
        # Once in a while: save
        if not progress.skipped and (progress.step % out.ckpt_every == 0 or stopping.retry_is_due()
                                     or out.keep_best and progress.is_best):
            save()

    # -----------------------------------------------------------------------------------------------------------------
    # The end
    if not writer.holds(progress.step):
        save()
    stopping.report(progress, out.resume_hint)
    return 0


# ---------------------------------------------------------------------------------------------------------------------
# The command line

def smaller_batch(args) -> str:
    """Return the advice for a step that takes more memory than there is."""
    return (f"lower --micro_batch (now {args.micro_batch}) and raise --grad_accum as much, or lower --seq_len (now "
            f"{args.seq_len})" + ", or take --recompute all" * (args.recompute != "all"))


def command_line(argv: list[str] | None = None, model_class: type[Spider] = Spider) -> int:
    """Run train.py with these arguments, for Spider or a subclass (docs/guide/trying-an-idea.md).

    Exit status: 0; 2 with one line on stderr for a bad flag, environment, file or machine; 1 for divergence, or a dry
    run without enough memory or disk; 128 plus the signal's number if a signal stopped the run."""
    status, args, world, shared = 2, None, World(), False
    with StopSignals(world) as stop:
        try:
            args = parse_args(argv)
            with memory_advice(smaller_batch(args)), ExitStack() as closing:
                closing.enter_context(world)
                closing.callback(setattr, stop, "seconds", None)  # no signal interrupts the world's last messages
                done = main(args, stop, closing, world, model_class)
            sys.stdout.flush()
            return done
        except BrokenPipeError:           # stdout is closed, as by `--dry_run | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except LeftByPeer:
            return status
        except Diverged as fault:
            status, line, shared = 1, f"error: {fault}", True
        except Stopped as where:
            status, line, shared = 128 + stop.asked, f"{stop.asked.name}: {where}", world.steps > 0
        except Exception as fault:
            line = error_line(fault)
            if line is None:
                raise
        stop.seconds = None
        with suppress(OSError):           # stderr may be gone
            if world.should_print(line, shared):
                print(f"train.py: {console.one_line(line)}\n", end="", file=sys.stderr)  # one write: ranks share it
        tell_torchrun(f"train.py: {console.one_line(line)}")
    return status


if __name__ == "__main__":
    sys.exit(record(command_line)())
