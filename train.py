"""Train Spider, a byte-level Recurrent-Depth Transformer, from memory-mapped byte shards.

    python train.py --mock_data --max_steps 20 --seq_len 128 --micro_batch 2            # smoke run, on any machine
    python train.py --data_dir data --seq_len 256 --micro_batch 112 --grad_accum 4      # one GPU
    torchrun --nproc_per_node 8 train.py --data_dir data                                # several (refused for now)

The same command again goes on from the newest checkpoint in --ckpt_dir. Everything random is a function of (--seed,
step), so that an interrupted run ends like an undisturbed one. `python train.py --help` lists the flags.
"""

import argparse
import ctypes
import dataclasses
import hashlib
import json
import logging
import math
import os
import re
import resource
import shlex
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import SimpleNamespace

import numpy as np
import torch
from loguru import logger
from torch import Tensor, nn

import data
import tokenizer
from checkpoint import (CheckpointError, Diverged, Leaving, Progress, RunDirectory, Stopped, StopSignals,
                        check_same_model, existing_parent, run_state, wants_memory)
from spider_model import (LOSS_PARTS, MAX_LOOPS, PRESETS, EngramTable, Linear, MoE, Spider, SpiderConfig, SpiderOutput,
                          document_cu_seqlens)
from tile_moe import BACKENDS, BackendError, resolve_backend


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


def integer(low: int, high: int = (1 << 62) - 1) -> Callable:
    def parse(text):
        try:
            value = int(text) if text.isdigit() else float(text)  # 10e9 is a whole number too
        except ValueError:
            value = math.nan
        if not low <= value <= high or value != int(value):
            raise ValueError(f"a whole number of at least {low}" + f" and at most {high}" * (high < 1 << 61))
        return int(value)
    return parse


def real(low: float, high: float = math.inf, open_low: bool = False, open_high: bool = False) -> Callable:
    def parse(text):
        try:
            value = float(text)
        except ValueError:
            raise ValueError("a number") from None
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


# Defaults are the recipe of `1b`; RECIPES below has what is otherwise for the smaller models.
FLAGS = (
    # model
    Flag("model", "auto", one_of("auto", *PRESETS), "auto: the checkpoint's, else 1b on a GPU, tiny elsewhere"),
    Flag("set", None, str, "NAME=VALUE,... fields of SpiderConfig to change, e.g. boundaries=whitespace,lora_rank=0"),
    Flag("n_loops", 6, integer(1, MAX_LOOPS), "loops of the recurrent core", "N_LOOPS"),
    Flag("random_loops", False, None, "draw the loops of each step from a Poisson distribution around --n_loops"),
    # data
    Flag("data_dir", "data", str, "directory of .bin shards, or a mixture: web:0.7,code:0.3", "DATA_DIR"),
    Flag("mock_data", False, None, "synthetic, learnable bytes in place of --data_dir"),
    Flag("seq_len", 2048, integer(2, 1 << 24), "bytes per sequence", "SEQ_LEN"),
    Flag("micro_batch", 64, integer(1, 1 << 20), "sequences a device takes at once; fewer: less memory", "MICRO_BATCH"),
    Flag("grad_accum", 1, integer(1, 1 << 16), "micro-steps per optimizer step", "GRAD_ACCUM"),
    # horizon
    Flag("target_tokens", 10_000_000_000, integer(1), "bytes to train on, the schedule's horizon", "TARGET_TOKENS"),
    Flag("target_flops", None, real(0, open_low=True), "the horizon as training FLOPs, in place of --target_tokens"),
    Flag("target_param_data_ratio", None, real(0, open_low=True), "the same as bytes per parameter, tables left out"),
    Flag("max_steps", 0, integer(0), "stop after so many optimizer steps; 0: at --target_tokens"),
    # optimizer
    Flag("optimizer", "auto", one_of("auto", "adamw", "adamw8bit", "muon"), "auto: muon (AdamW for the rest)"),
    Flag("lr", 3e-4, real(0, open_low=True), "peak learning rate (Muon's steps have AdamW's size)", "LR"),
    Flag("engram_lr", 0.25, real(0), "learning rate of the Engram tables: the size of a row's first step"),
    Flag("engram_reset", False, None, "empty the Engram tables, which memorise what they saw, as an epoch begins"),
    Flag("schedule", "cosine", one_of("cosine", "wsd"), "after warm-up: cosine, or constant and then a linear decay"),
    Flag("warmup_steps", 10, integer(0), "optimizer steps of linear warm-up"),
    Flag("wsd_decay_fraction", 0.2, real(0, 1), "part of the horizon in which wsd decays"),
    Flag("min_lr_fraction", 0.1, real(0, 1), "learning rate at the horizon, as a part of the peak"),
    Flag("weight_decay", 0.1, real(0), "of matrices; never of vectors and Engram tables"),
    Flag("beta1", 0.9, real(0, 1, open_high=True), "AdamW's first decay"),
    Flag("beta2", 0.95, real(0, 1, open_high=True), "AdamW's second decay"),
    Flag("momentum", 0.95, real(0, 1, open_high=True), "Muon's momentum"),
    Flag("grad_clip", 1.0, real(0), "largest norm of the gradient, Engram tables apart; 0: off"),
    Flag("max_skipped", 10, integer(1), "stop after so many steps in a row that are not finite"),
    Flag("seed", 0, integer(0), "of weights, data order, segment noise and loop counts"),
    # machine
    Flag("device", "auto", one_of("auto", "cpu", "cuda"), "auto: cuda where there is one"),
    Flag("precision", "auto", one_of("auto", "fp8", "bf16", "fp32"), "auto: the lowest that the hardware has"),
    Flag("fp8_experts", False, None, "with fp8: the routed experts too, scaled by row"),
    Flag("moe_backend", "auto", one_of("auto", *BACKENDS), "auto: tile where it runs, else grouped; loop: reference"),
    Flag("compile", False, None, "torch.compile the layers (mode default)"),
    Flag("deterministic", False, None, "on a GPU: kernels that give the same bits every time, some slower"),
    Flag("no_gradient_checkpointing", False, None, "keep the activations of the recurrent layers: faster, more memory"),
    # checkpoints
    Flag("ckpt_dir", "checkpoints", str, "where checkpoints and metrics.jsonl go"),
    Flag("ckpt_every", 50, integer(1), "optimizer steps between checkpoints", "CKPT_EVERY"),
    Flag("keep_last", 2, integer(2, 1 << 20), "checkpoints of this run to keep"),
    Flag("resume", None, str, "checkpoint to go on from; without it the newest good one in --ckpt_dir"),
    Flag("reset_steps", False, None, "take the weights alone: fresh optimizer, step 0, data from the start"),
    # evaluation and logs
    Flag("eval_every", 250, integer(0), "optimizer steps between evaluations, one more at the end; 0: none"),
    Flag("eval_tokens", 1_048_576, integer(1, 1 << 40), "validation bytes to evaluate on, always the same ones"),
    Flag("sample_every", 0, integer(0), "optimizer steps between printed samples; 0: none"),
    Flag("sample_prompt", None, str, "what samples go on from; without it held-out text, where there is evaluation"),
    Flag("run", None, str, "name of a wandb run; without it no wandb (WANDB_MODE=offline works)"),
    Flag("dry_run", False, None, "print what would be trained, its memory and cost, check the data, and stop"),
    Flag("profile", False, None, "write a profiler trace of steps 3 to 5 to --ckpt_dir"),
)


# What a model trains with where neither flag nor environment says otherwise. docs/learning.md measures that of tiny;
# that of small has its rates scaled down by width, and is not measured.
RECIPES = {
    "1b": {},
    "small": dict(n_loops=2, seq_len=1024, micro_batch=8, target_tokens=80_000_000, lr=1.5e-3, warmup_steps=100,
                  engram_reset=True, ckpt_every=250, eval_every=1000, eval_tokens=524_288),
    "tiny": dict(n_loops=1, seq_len=1024, micro_batch=2, target_tokens=12_000_000, lr=6e-3, warmup_steps=40,
                 engram_reset=True, no_gradient_checkpointing=True, ckpt_every=500, eval_every=1000,
                 eval_tokens=262_144),
}


class Parser(data.Parser):
    def error(self, message):
        raise UsageError(data.one_line(message))


def parse_args(argv: list[str] | None = None, environ=os.environ) -> SimpleNamespace:
    """Values of all flags by name; `given`, the names set by flag or environment, and what the `environment` says.

    A bad value of either is a UsageError.
    """
    parser = Parser(prog="train.py", description=__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in FLAGS:
        text = flag.help + (f"; default {flag.default}" if flag.default not in (None, False) else "")
        text += "".join(f"; {name}: {'on' if recipe[flag.name] is True else recipe[flag.name]}"
                        for name, recipe in RECIPES.items() if flag.name in recipe)
        text += f"; environment {flag.env}" if flag.env else ""
        choices = ("on", "off") if flag.parse is None else getattr(flag.parse, "choices", None)
        switch = dict(nargs="?", const="on") if flag.parse is None else {}
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
    return args


def take_recipe(args, device: torch.device, saved: str | None = None):
    """Fills in what neither flag nor environment gave, from the recipe of --model, named in `args.recipe`: `auto` is
    the one that a checkpoint was made with, else what suits the device."""
    suits = "1b" if device.type == "cuda" else "tiny"
    args.recipe = (saved or suits) if args.model == "auto" else args.model
    for key, value in RECIPES[args.recipe].items():
        if key not in args.given:
            setattr(args, key, value)


def take_horizon(args, model: Spider, n_loops: int):
    """Turns --target_flops or --target_param_data_ratio into --target_tokens; two of the three are one too many."""
    given = [name for name in ("target_tokens", "target_flops", "target_param_data_ratio") if name in args.given]
    if len(given) > 1:
        raise UsageError(f"--{given[1]}: --{given[0]} gives the horizon already, by flag or environment; give one")
    if args.target_flops:
        args.target_tokens = math.ceil(args.target_flops / model.flops_per_byte(3.3, n_loops, args.seq_len))
    elif args.target_param_data_ratio:
        tables = sum(m.weight.numel() for m in model.modules() if isinstance(m, EngramTable))
        parameters = sum(p.numel() for p in model.parameters()) - tables
        args.target_tokens = math.ceil(args.target_param_data_ratio * parameters)
    if args.target_tokens >= 1 << 62:
        raise UsageError(f"--{given[0]}: a horizon of {args.target_tokens:.0e} bytes: at most {1 << 62:.0e}")


def model_config(args) -> SpiderConfig:
    """The config of the recipe's preset with what --n_loops and --set ask for."""
    config = dataclasses.replace(SpiderConfig.preset(args.recipe), n_loops=args.n_loops)
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
                fields[name] = tuple(int(part) for part in text.split("+") if part)
            else:
                fields[name] = kind(text)
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


def multiplies_bf16(device: torch.device) -> bool:
    """Whether the hardware has bf16 products; a CPU without them takes a hundred times as long as in fp32."""
    return torch.cuda.is_bf16_supported() if device.type == "cuda" else torch.cpu._is_avx512_bf16_supported()


def resolve_precision(name: str, device: torch.device) -> str:
    """`auto` takes the lowest precision that the hardware multiplies fast; a named one is checked."""
    on_gpu = device.type == "cuda"
    fp8 = on_gpu and torch.cuda.get_device_capability(device) >= (8, 9)
    if name == "fp8" and on_gpu and not fp8:
        raise UsageError("--precision fp8: this GPU has no FP8 (it needs compute capability 8.9); use --precision bf16")
    if name == "fp8" and not on_gpu:
        logger.warning("fp8 on a CPU is torchao's emulation: slow, for tests only")
    return name if name != "auto" else "fp8" if fp8 else "bf16" if multiplies_bf16(device) else "fp32"


@lru_cache
def product_rate(device: torch.device) -> float:
    """FLOP/s of a bf16 product here, the best of three; of an fp32 one on a CPU that has no others."""
    n, best = 8192 if device.type == "cuda" else 1024, math.inf
    dtype = torch.bfloat16 if multiplies_bf16(device) else torch.float32
    x = torch.empty(n, n, device=device).normal_(generator=torch.Generator(device).manual_seed(0)).to(dtype)
    for _ in range(4):                    # the first one sets up
        start = time.perf_counter()
        y = x @ x
        float(y[0, 0])                    # waits for the device
        best = min(best, time.perf_counter() - start)
    return 2 * n ** 3 / best


def keep_freed_memory():
    """Has glibc keep what tensors free for the next ones: handed back, it is faulted in again page by page."""
    trim_threshold, top_pad, mmap_max = -1, -2, -4
    with suppress(OSError, AttributeError):  # another C library: nothing to set
        libc = ctypes.CDLL("libc.so.6")
        for parameter, size in ((mmap_max, 0), (trim_threshold, (1 << 31) - 1), (top_pad, 1 << 26)):
            libc.mallopt(parameter, size)


def start_log():
    """Log lines go to stderr: the time and a printable line, whatever a file's name, a checkpoint or a model put in."""
    logger.configure(handlers=[dict(sink=sys.stderr, format="{time:HH:mm:ss} {message}")],
                     patcher=lambda record: record.update(message=data.one_line(record["message"])))


@contextmanager
def quiet():
    """Inside, libraries that are imported do not tell which of their own parts they lack."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


# Modules with one of these in their name stay in high precision.
NEVER_FP8 = ("boundary_predictor", "loop_embedding", "engram", "layernorm", "norm", "embed_tokens", "lm_head",
             "halt_predictor", "router")


def takes_fp8(module: nn.Module, name: str) -> bool:
    """Whether a module is one that FP8 converts."""
    return isinstance(module, nn.Linear) and not any(word in name for word in NEVER_FP8)


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
                self.weight.t(), self.config.cast_config_weight.target_dtype, self.linear_mm_config,
                gemm_input_role=GemmInputRole.WEIGHT)

        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                return Linear.forward(self, x)
            weight = self.weight.t() if self.cast is None else self.cast
            return matmul_with_hp_or_float8_args.apply(x, weight, self.linear_mm_config, self.config)

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
# Optimizers

class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised (Jordan et al. 2024), for matrices [r, c] and stacks of them [..., r, c].

    torch.optim.Muon takes single matrices only; here a stack of experts, and all matrices of one shape, are one batch.
    The step has the size of AdamW's, 0.2 * sqrt(max(r, c)) times an orthogonal matrix (Moonlight, arXiv 2502.16982).
    That size does not fade with the momentum, so what had no gradient stays as it is, weights and momentum: a parameter
    without one, and in a stack each matrix of gradient zero (an idle expert, the adapter of a loop that did not run).
    """

    batch_elements = 1 << 26              # most elements stacked at a time

    def __init__(self, params, lr: float, momentum: float, weight_decay: float):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            batches = {}
            for p in group["params"]:
                if p.grad is not None:
                    batches.setdefault(p.shape[-2:], []).append(p)
            for params in batches.values():
                per_batch = max(1, self.batch_elements // params[0].numel())
                for i in range(0, len(params), per_batch):
                    self._step_batch(params[i:i + per_batch], group)

    def _step_batch(self, params: list[Tensor], group: dict):
        momentum, lr = group["momentum"], group["lr"]
        for p in params:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        rows, columns = params[0].shape[-2:]
        weights = [p.view(-1, rows, columns) for p in params]                                # of n matrices together
        buffers = [self.state[p]["momentum_buffer"].view(-1, rows, columns) for p in params]
        grads = [p.grad.reshape(-1, rows, columns) for p in params]
        fresh, kept, counts = 1 - momentum, 1 - lr * group["weight_decay"], [len(w) for w in weights]
        stacked = any(p.ndim > 2 for p in params)
        if stacked:                       # 1 or 0 for each matrix, [n, 1, 1]: the host need not know
            moved = torch.cat([torch.linalg.vector_norm(g, dim=(1, 2), keepdim=True) for g in grads]) != 0
            fresh, kept = (torch.where(moved, part, rest).to(weights[0].dtype).split(counts)
                           for part, rest in ((fresh, 0.0), (kept, 1.0)))
        torch._foreach_lerp_(buffers, grads, fresh)
        looking_ahead = torch._foreach_lerp(grads, buffers, momentum)                        # Nesterov
        dtype = torch.bfloat16 if multiplies_bf16(params[0].device) else torch.float32
        update = orthogonalize(torch.cat(looking_ahead).to(dtype)).to(grads[0].dtype)
        if stacked:
            update.mul_(moved)
        torch._foreach_mul_(weights, kept)
        torch._foreach_add_(weights, update.split(counts), alpha=-lr * 0.2 * max(rows, columns) ** 0.5)


def orthogonalize(matrices: Tensor) -> Tensor:
    """[n, r, c] -> the same, singular values moved towards 1 by five Newton-Schulz steps of Muon's quintic."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.mT if tall else x


class RowwiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one accumulator per row of Engram tables, on the rows looked up only: a large table costs what is
    read of it.

    A row's step is lr * sum(g) / sqrt(sum of mean(g^2) over all lookups so far), sums over the step's lookups g of the
    row, however they are dealt out to micro-steps. It neither sorts nor synchronises.
    """

    def __init__(self, tables: list[EngramTable], lr: float):
        self.tables = {table.weight: table for table in tables}
        super().__init__([*self.tables], dict(lr=lr))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                gathered = self.tables[p].gathered()
                if gathered and not self.state[p]:
                    self.state[p]["sum"] = p.new_zeros(len(p))
                for row, _, square in gathered:
                    self.state[p]["sum"].index_add_(0, row, square)
                for row, grad, _ in gathered:
                    scale = -group["lr"] / (self.state[p]["sum"].index_select(0, row).sqrt_() + 1e-10)
                    p.index_add_(0, row, grad * scale[:, None])  # its alpha would make it ten times slower on a CPU

    def zero_grad(self, set_to_none: bool = True):
        for table in self.tables.values():
            table.forget()

    @torch.no_grad()
    def reset(self):
        """Empties the tables and forgets their past."""
        for p in self.tables:
            p.zero_()
            self.state[p].clear()


class Optimizers:
    """The optimizers of one model by name, stepped together; what belongs to which is decided here.

    A slice without gradient (of an expert, of a loop) goes on moving under AdamW, as it does in torch: by its momentum
    while that fades, and by weight decay. Muon leaves it alone.
    """

    def __init__(self, model: Spider, name: str, args):
        tables = [m for m in model.modules() if isinstance(m, EngramTable)]
        matrices = [p for key, p in model.named_parameters() if is_matrix(key, p)]
        taken = {id(p) for p in [table.weight for table in tables] + matrices}
        rest = [p for p in model.parameters() if id(p) not in taken]
        adam = [dict(params=[p for p in rest if p.ndim >= 2], weight_decay=args.weight_decay),
                dict(params=[p for p in rest if p.ndim < 2], weight_decay=0.0)]
        self.dense = matrices + rest      # what clipping sees; a row's step does not depend on its gradient's size
        self.parts: dict[str, torch.optim.Optimizer] = {}
        if name == "muon":
            self.parts["muon"] = Muon(matrices, args.lr, args.momentum, args.weight_decay)
        else:
            adam[0]["params"] += matrices
        settings = dict(lr=args.lr, betas=(args.beta1, args.beta2))
        if name == "adamw8bit":
            with quiet():
                import bitsandbytes
            self.parts["adamw8bit"] = bitsandbytes.optim.AdamW8bit(adam, **settings)
        else:
            self.parts["adamw"] = torch.optim.AdamW(adam, fused=True, **settings)
        if tables:
            self.parts["engram"] = RowwiseAdagrad(tables, args.lr)
        self.engram_lr = args.engram_lr

    def set_lr(self, peak: float, factor: float):
        """The schedule's factor of the peak for all but the tables, whose accumulators anneal them row by row."""
        for name, part in self.parts.items():
            for group in part.param_groups:
                group["lr"] = self.engram_lr if name == "engram" else peak * factor

    def step(self):
        for part in self.parts.values():
            part.step()

    def zero_grad(self):
        for part in self.parts.values():
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> dict:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, states: dict):
        if states.keys() != self.parts.keys():
            raise UsageError(f"the checkpoint's optimizers are {', '.join(states)}, this run's "
                             f"{', '.join(self.parts)}: use --optimizer as before, or --reset_steps")
        for name, part in self.parts.items():
            groups = [{key: value for key, value in group.items() if key != "params"} for group in part.param_groups]
            try:
                part.load_state_dict(states[name])
                check_optimizer_state(name, part)
            except Exception as fault:    # whatever a foreign state provokes
                raise UsageError(f"the checkpoint's state of {name} does not fit this model ({fault}): --reset_steps "
                                 f"takes the weights alone") from None
            for group, settings in zip(part.param_groups, groups):
                group.update(settings)    # the flags of this run, not of the one before


def check_optimizer_state(name: str, part: torch.optim.Optimizer):
    """ValueError where the state of a parameter is not of the names and shapes that its kernels take for granted."""
    kinds = {"muon": [{"momentum_buffer"}], "adamw": [{"step", "exp_avg", "exp_avg_sq"}], "engram": [{"sum"}],
             "adamw8bit": [{"step", "state1", "state2"},
                           {"step", "state1", "state2", "qmap1", "qmap2", "absmax1", "absmax2"}]}[name]
    for group in part.param_groups:
        for p in group["params"]:
            state, blocks = part.state.get(p, {}), math.ceil(p.numel() / 256)
            shapes = {"step": (), "sum": (len(p),) if p.ndim else (), "qmap1": (256,), "qmap2": (256,),
                      "absmax1": (blocks,), "absmax2": (blocks,)}
            if state and state.keys() not in kinds:
                raise ValueError(f"it has {', '.join(map(str, state))}")
            for key, value in state.items():
                shape = tuple(value.shape) if isinstance(value, Tensor) else ()
                if shape != shapes.get(key, tuple(p.shape)):
                    raise ValueError(f"{key} {list(shape)} for a parameter {list(p.shape)}")


def is_matrix(name: str, p: Tensor) -> bool:
    """Whether a parameter is a matrix, or a stack of them, between hidden spaces: what Muon is for."""
    apart = ("embed_tokens", "lm_head", "router", "boundary_predictor", "halt_predictor", "loop_embedding",
             "conv_weight", "table", "gate")
    return p.ndim >= 2 and not any(part in apart for part in name.split("."))


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation and samples

EVAL_BYTES = 8192                         # least bytes to evaluate at a time


@torch.no_grad()
def evaluate(model: Spider, rows: tuple[Tensor, Tensor], micro_batch: int, n_loops: int, device) -> dict:
    """Cross-entropy on the fixed validation rows (ids and labels [n, T]): nats and bits per byte, bytes per segment."""
    logger.info(f"evaluates on {rows[0].numel():,} bytes")
    progress = data.Progress("evaluates", rows[0].numel()) if sys.stderr.isatty() else None
    model.eval()
    nats, count, real, segments = (torch.zeros((), device=device, dtype=torch.float64) for _ in range(4))
    with model.cast_weights_once():
        for i in range(0, len(rows[0]), micro_batch):
            ids, labels = (part[i:i + micro_batch].to(device) for part in rows)
            out = model(ids, labels, n_loops=n_loops)
            counted = (labels != -100).sum()
            nats += out.nats_per_byte * counted
            count += counted
            real += (ids != tokenizer.PAD_ID).sum()
            segments += out.segments
            if progress:
                progress.add(ids.numel())
    model.train()
    loss, rate = float(nats / count), float(real / segments.clamp_min(1))
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
# What a run would be: --dry_run and the start-up lines

def estimate_memory(model: Spider, n_loops: int, args, optimizer: str, dtype_bytes: int) -> dict[str, float]:
    """Bytes by purpose; activations by counting what a layer keeps for its backward pass at 3.3 bytes per segment.

    Where attention has no kernel for documents (on a CPU, and in fp32), they are filled up to at most twice their rows:
    how far is up to the data, so the bound is counted, apart."""
    c = model.config
    total = sum(p.numel() for p in model.parameters())
    tables = {name: m for name, m in model.named_modules() if isinstance(m, EngramTable)}
    dense = total - sum(m.weight.numel() for m in tables.values())
    matrices = sum(p.numel() for n, p in model.named_parameters() if is_matrix(n, p))
    state = {"adamw": 8 * dense, "adamw8bit": 2 * dense, "muon": 4 * matrices + 8 * (dense - matrices)}[optimizer]
    rows, segments = args.micro_batch * args.seq_len, args.micro_batch * args.seq_len / 3.3
    heads = c.n_heads * c.v_head_dim
    attention = 4 * c.hidden_size + 2 * (c.q_lora_rank + c.kv_lora_rank) + 8 * heads
    block = attention + 3 * c.hidden_size + 4 * c.intermediate_size
    expert = (c.n_experts_per_tok + c.n_shared_experts) * (2 * c.hidden_size + 4 * c.moe_intermediate_size)
    visit = attention + 3 * c.hidden_size + expert
    visits, layers = c.n_recurrent_layers * n_loops, c.n_prelude_layers + c.n_coda_layers
    kept = visits * visit if args.no_gradient_checkpointing else visits * c.hidden_size + visit
    width = sum(m.width for m in tables.values())
    activations = rows * (layers * block + 2 * width) * dtype_bytes
    activations += segments * kept * dtype_bytes + rows * c.vocab_size * 12

    filled, gathered = 0.0, 0.0
    if dtype_bytes == 4 or resolve_device(args.device).type == "cpu":
        for count, part in ((layers, 1), (visits if args.no_gradient_checkpointing else 1, 3.3)):
            window = 2 * c.byte_window if part == 1 else 0
            scores = 0 if dtype_bytes == 4 else 2 * c.n_heads * min(window or 512, args.seq_len / part)
            copies = 10 if window else 4   # of a head's numbers: under a window every block lies there twice
            filled += count * rows / part * (copies * heads + scores) * dtype_bytes
    for name, table in tables.items():    # see EngramTable.gather: row, gradient and its square of each lookup
        lookups = table.prime.numel() * (segments if name.startswith("core") else rows)
        gathered += min(args.grad_accum * lookups, 1.5 * len(table.weight) + lookups) * (4 * table.weight.shape[1] + 12)
    return {"parameters": 4 * total, "gradients": 4 * dense + gathered,
            "optimizer": state + 4 * sum(len(table.weight) for table in tables.values()),
            "weights cast to bf16": dtype_bytes % 4 * dense, "activations": activations,
            "documents filled up, at most": filled}


def check_memory(needed: float, device: torch.device):
    """UsageError where a CPU's memory is sure not to suffice: the kernel would kill the run without a word."""
    here = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if device.type == "cpu" and needed > 1.25 * here:
        raise UsageError(f"--micro_batch: a step takes about {needed / 1e9:.0f} GB, this machine has {here / 1e9:.0f}: "
                         f"lower it, and raise --grad_accum as much; or lower --seq_len or --model")


def checkpoint_size(memory: dict[str, float]) -> float:
    """Bytes of a checkpoint, from what estimate_memory says."""
    return memory["parameters"] + memory["optimizer"]


MOST_EPOCHS = 20                          # of a horizon, before it is a warning
ASSUMED_SHARE = 0.2                       # of the machine's matrix rate that a step reaches, where nothing was measured


def epochs_over(loader: data.Loader, target_tokens: int) -> float:
    """Times that a horizon in bytes reads the data, of a mixture the source that is read most often."""
    return max(target_tokens * loader.counts / loader.counts.sum() / loader.targets)


def empties_tables(args, loader: data.Loader, first: int) -> bool:
    """Whether an epoch that begins at sequence `first` empties the Engram tables. Not if less than half of it will be
    read: a run would end with tables that know next to nothing, which costs more than rows that hold answers."""
    return args.engram_reset and epochs_over(loader, args.target_tokens - first * args.seq_len) >= 0.5


def horizon_warnings(args, loader: data.Loader, horizon: int) -> list[str]:
    """A line each for a `horizon` of steps that does not suit the data, or the steps that --max_steps leaves of it."""
    warnings, epochs, end = [], epochs_over(loader, args.target_tokens), args.max_steps - 1
    if epochs > MOST_EPOCHS:
        warnings.append(f"--target_tokens {args.target_tokens:,} reads the data {epochs:,.0f} times over, which learns "
                        f"it by heart: at most {int(args.target_tokens * MOST_EPOCHS / epochs):,}, or more data")
    high = end < args.warmup_steps or lr_factor(end, horizon, args) > 2 * args.min_lr_fraction
    if 0 < args.max_steps < horizon and high:
        warnings.append(f"--max_steps {args.max_steps:,} ends the run at {lr_factor(end, horizon, args):.0%} of the "
                        f"peak rate, which falls over {horizon:,} steps: --target_tokens "
                        f"{args.max_steps * args.target_tokens // horizon} in its place would end at a better loss")
    return warnings


def expected_rate(args, device: torch.device, flops_per_byte: float) -> tuple[float, str]:
    """Bytes/s, and where that comes from: the last steps of a run in --ckpt_dir, else the machine's matrix rate."""
    path = Path(args.ckpt_dir) / "metrics.jsonl"
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        lines = path.read_text().splitlines()[-100:] if path.is_file() else []
        rates = [float(json.loads(line)["tok_per_sec"]) for line in lines]
        if rates and all(1e-3 < rate < 1e15 for rate in rates):
            return float(np.median(rates)), f"measured by the run in {args.ckpt_dir}"
    return ASSUMED_SHARE * product_rate(device) / flops_per_byte, (
        f"estimated, {ASSUMED_SHARE:.0%} of this machine's rate of products")


def print_outlook(args, device: torch.device, loader: data.Loader | None, memory: float, flops_per_byte: float):
    """Steps, passes over the data and hours of a run, and whether it fits into this machine."""
    step = args.micro_batch * args.grad_accum * args.seq_len
    horizon = math.ceil(args.target_tokens / step)
    steps = args.max_steps or horizon     # from the start
    rate, origin = expected_rate(args, device, flops_per_byte)
    passes = "" if loader is None else f"{epochs_over(loader, steps * step):.3g} times over the data, "
    print(data.one_line(f"run: {steps:,} steps of {step:,} bytes, {passes}{steps * step / rate / 3600:.3g} hours at "
                        f"{rate:,.0f} bytes/s ({origin})"))
    here = (torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else
            os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    print(f"this machine has {here / 1e9:.0f} GB for it: {'NOT ENOUGH' if memory > here else 'enough'}")
    for warning in () if loader is None else horizon_warnings(args, loader, horizon):
        print(f"warning: {warning}")


def print_dry_run(model: Spider, n_loops: int, args, memory: dict[str, float], sources, loader, device: torch.device):
    """--dry_run: configuration, parameters by component, cost, memory, time, disk, data, FP8; allocates no weight."""
    c = model.config
    print("configuration")
    for field in dataclasses.fields(c):
        print(f"  {field.name} = {getattr(c, field.name)}")
    print("flags")
    for flag in FLAGS:
        print(data.one_line(f"  --{flag.name} = {getattr(args, flag.name)}"))
    table = model.parameter_table()
    total, active = (sum(column) for column in zip(*table.values()))
    print(f"\n{'parameters by component':36}{'parameters':>14}{'share':>8}{'active per byte':>18}")
    for component, (count, used) in sorted(table.items(), key=lambda item: -item[1][0]):
        print(f"  {component:34}{count:14,}{count / total:8.1%}{used:18,.0f}")
    print(f"  {'total':34}{total:14,}{1:8.0%}{active:18,.0f}")
    flops = {rate: model.flops_per_byte(rate, n_loops, args.seq_len) for rate in (1, 3.3, 5)}
    print("\ntraining FLOPs per byte, " + ", ".join(
        f"{cost / 1e9:.3g} G at {rate} bytes per segment" for rate, cost in flops.items()))
    print(f"\nmemory, estimated: {sum(memory.values()) / 1e9:.1f} GB ("
          + ", ".join(f"{name} {size / 1e9:.2f}" for name, size in memory.items()) + ")")
    print_outlook(args, device, loader, sum(memory.values()), flops[3.3])
    checkpoint = checkpoint_size(memory)
    free = shutil.disk_usage(existing_parent(args.ckpt_dir)).free
    print(f"checkpoint: {checkpoint / 1e9:.2f} GB, written from a copy in host memory, {args.keep_last + 1} at a time; "
          f"free on disk {free / 1e9:.1f} GB"
          + ("" if free > (args.keep_last + 1) * checkpoint else ": NOT ENOUGH"))
    if not sources:
        print(data.one_line(f"data: {args.data_dir!r} does not exist yet: python data.py prepare INPUT --out "
                            f"{args.data_dir}"))
    for source in sources:
        print(data.one_line(f"data: {source.name} (weight {source.weight:.3g}): {len(source.train):,} training ids, "
                            f"{len(source.val):,} for validation; ids checked"))
    print(describe_fp8(model, args.fp8_experts))


def peak_memory(device: torch.device) -> float:
    """Most memory used so far, GB: of the GPU where there is one, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    status = Path("/proc/self/status")    # getrusage's maximum begins with that of the process that started this one
    own = re.search(r"VmHWM:\s*(\d+) kB", status.read_text()) if status.exists() else None
    return 1024 * int(own[1] if own else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) / 1e9


# ---------------------------------------------------------------------------------------------------------------------
# One optimizer step

def make_real(model: Spider, device: torch.device, precision: str, backend: str, args):
    """Turns a model on the meta device into one that trains: values from --seed, precision, backend, compilation."""
    torch.manual_seed(args.seed)
    model.to_empty(device=device)
    model.init_weights()
    emulated = precision == "fp8" and not multiplies_bf16(device)
    model.compute_dtype = torch.float32 if precision == "fp32" or emulated else torch.bfloat16
    model.gradient_checkpointing = not args.no_gradient_checkpointing
    model.set_backend(backend)
    if precision == "fp8":
        logger.info(describe_fp8(model, args.fp8_experts))
        convert_to_fp8(model, device, args.fp8_experts)
    if args.compile:
        for layer in (*model.prelude, *model.core.layers, *model.coda):
            layer.compile()
    model.train()


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
    noise_seed: int                       # of the first row's segment noise
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


def accumulate(model: Spider, batches: list[Batch], n_loops: int) -> tuple[Tensor, Tensor]:
    """Forward and backward over the micro-steps of a step, which leaves gradients and changes nothing else.

    Returns sums over the micro-steps: fp32 [8] of nats, loss, segments, loops and the loss's other parts, and tokens
    per expert [L, E]. Waits for the device once a micro-step, for the number of segments.
    """
    sums, tokens, targets = 0, 0, max(1, sum(batch.targets for batch in batches))
    with model.cast_weights_once():
        for batch in batches:
            out: SpiderOutput = model(batch.ids, batch.labels, n_loops, batch.noise_seed, batch.cu_seqlens)
            nats = out.nats_per_byte * (batch.targets / targets)  # bytes count alike, however many others are PAD
            loss = nats + (out.loss - out.nats_per_byte) / len(batches)
            loss.backward()
            sums = sums + torch.cat((torch.stack((
                nats.detach(), loss.detach(), out.segments, out.mean_loops / len(batches))), out.parts / len(batches)))
            tokens = tokens + out.tokens_per_expert
    return sums, tokens


def update(model: Spider, optimizers: Optimizers, sums: Tensor, tokens: Tensor, real: int, args,
           empty_tables: bool = False) -> dict:
    """The update from accumulated gradients; returns the step's statistics, `real` bytes of which were not PAD.

    Waits once for the device, for all numbers, before the weights are touched: where loss or gradient is not finite
    they stay as they are, and `skipped` is true. `empty_tables`: the Engram tables lose all that they learned.
    """
    norm = nn.utils.clip_grad_norm_(optimizers.dense, args.grad_clip or math.inf)
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


def out_of_memory(fault: Exception, args) -> str | None:
    """One line of advice where an error is for want of memory, else None."""
    if not wants_memory(fault):
        return None
    asked = re.search(r"llocate ([\d.]+ \w+)", str(fault))
    return ("out of memory" + (f", {asked[1]} were asked for" if asked else "")
            + f": lower --micro_batch (now {args.micro_batch}) and raise --grad_accum as much, or lower --seq_len (now "
              f"{args.seq_len})"
            + ", or leave --no_gradient_checkpointing out" * args.no_gradient_checkpointing)


# ---------------------------------------------------------------------------------------------------------------------
# The run

STEP_PATIENCE = 8.0                       # seconds that a signal leaves a step to end, before it is dropped


def command_line(argv: list[str] | None = None) -> int:
    """Exit status: 0; 2 with one line on stderr for a bad flag, environment, file or machine; 1 for divergence; 128 and
    the signal's number where one ended the run in order."""
    status, args = 2, None
    with StopSignals() as stop:
        try:
            args = parse_args(argv)
            with ExitStack() as closing:
                main(args, stop, closing)
            sys.stdout.flush()
            return 0
        except BrokenPipeError:           # of `--dry_run | head`: nobody reads on
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except (UsageError, CheckpointError, data.DataError, BackendError) as fault:
            line = f"error: {fault}"
        except Diverged as fault:
            status, line = 1, f"error: {fault}"
        except Stopped as where:
            status, line = 128 + stop.asked, f"{stop.asked.name}: {where}"
        except OSError as fault:
            line = f"error: {fault.filename}: {fault.strerror}"
        except (MemoryError, RuntimeError) as fault:
            line = out_of_memory(fault, args)
            if line is None:
                raise
            line = f"error: {line}"
        stop.seconds = None
        with suppress(OSError):           # stderr may be gone
            print(f"train.py: {data.one_line(line)}", file=sys.stderr)
    return status


def how_to_go_on(args) -> str:
    origin = [f"--{name}" for name in ("resume", "reset_steps") if getattr(args, name)]
    return "the same command" + f" without {' and '.join(origin)}" * bool(origin) + " goes on"


def set_up(args, closing: ExitStack) -> tuple[torch.device, str]:
    """Device and precision, and the settings of this process that go with them."""
    device = resolve_device(args.device)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UsageError(f"WORLD_SIZE={os.environ['WORLD_SIZE']}: training on several ranks is not built yet; start "
                         f"one process")
    precision = resolve_precision(args.precision, device)
    if args.fp8_experts and precision != "fp8":
        raise UsageError(f"--fp8_experts: the precision is {precision}; it goes with --precision fp8")
    if device.type == "cpu":
        keep_freed_memory()
    torch.set_float32_matmul_precision("high")
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        closing.callback(torch.use_deterministic_algorithms, False)
        torch.utils.deterministic.fill_uninitialized_memory = False
    return device, precision


def config_of_run(args, origin: Path | None, state: dict | None) -> tuple[SpiderConfig, int]:
    """The model's config, that of the checkpoint `origin` where a run goes on from its `state`, and the loops."""
    config = model_config(args)
    if not state:
        return config, args.n_loops
    if state["cfg"].get("vocab_size") != config.vocab_size:
        raise CheckpointError(f"{origin} has another vocabulary: {state['cfg'].get('vocab_size')} ids, here are "
                              f"{config.vocab_size}")
    if args.model != "auto" or args.set:
        check_same_model(origin, state["cfg"], config)
    config = SpiderConfig(**state["cfg"])
    return config, args.n_loops if "n_loops" in args.given else state.get("n_loops", config.n_loops)


def say_what_was_chosen(args, model: Spider, n_loops: int, device: torch.device, precision: str, backend: str,
                        optimizer: str):
    """A line for each choice, those of `auto` marked, and one for the recipe; they are what --dry_run prints first."""
    sizes = dataclasses.replace(SpiderConfig.preset(args.recipe), n_loops=model.config.n_loops)
    name = args.recipe if model.config == sizes else f"{args.recipe}, changed"
    parameters = sum(p.numel() for p in model.parameters())
    say = print if args.dry_run else logger.info
    threads = f"{torch.get_num_threads()} threads" if device.type == "cpu" else torch.cuda.get_device_name(device)
    for choice, asked in ((f"model {name}, {parameters / 1e6:.1f}M parameters, {n_loops} loops", args.model),
                          (f"device {device}, {threads}", args.device), (f"precision {precision}", args.precision),
                          (f"experts {backend}", args.moe_backend), (f"optimizer {optimizer}", args.optimizer)):
        say(choice + " (auto)" * (asked == "auto"))
    taken = [f"--{name} {'on' if value is True else value}"
             for name, value in RECIPES[args.recipe].items() if name not in args.given
             and (name != "n_loops" or value == n_loops)]  # else they are the checkpoint's
    say(f"recipe of {args.recipe}: {' '.join(taken) or 'nothing is taken from it'}")
    if args.environment:
        say(data.one_line(f"from the environment: {' '.join(args.environment)}"))


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


class Feed:
    """This rank's micro-batches, step after step; a thread works out those of a step during the one before it.

    The thread is a daemon: where a disk holds it up, a signal and the end of the process do not wait for it.
    """

    def __init__(self, loader: data.Loader, args, rank: int, ranks: int, device: torch.device, progress: Progress,
                 closing: ExitStack):
        self.loader, self.args, self.rank, self.ranks, self.device = loader, args, rank, ranks, device
        self.first, self.steps = progress.bytes_seen // args.seq_len, count(progress.step)
        self.wanted, self.fetched, self.closed = SimpleQueue(), SimpleQueue(), False
        self.thread = Thread(target=self._fetch_all, daemon=True)
        self.thread.start()
        self.wanted.put(True)
        closing.callback(self.close)

    def take(self) -> tuple[list[Batch], int]:
        """The next step's batches, and the epoch that it begins in; those of the step after it are begun."""
        fetched = self.fetched.get()
        if isinstance(fetched, BaseException):
            raise fetched
        self.wanted.put(True)
        return fetched

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
            self.first += self.args.micro_batch * self.ranks * self.args.grad_accum

    def _fetch(self, step: int, first: int) -> tuple[list[Batch], int]:
        noise, out = step_seed(self.args.seed, step, "noise"), []
        for micro_step in range(self.args.grad_accum):
            if self.closed:
                break
            ids, labels, _ = self.loader.micro_batch(first, micro_step, self.args.micro_batch, self.rank, self.ranks)
            noise_seed = noise + (micro_step * self.ranks + self.rank) * self.args.micro_batch
            out.append(Batch.of(ids, labels, noise_seed).to(self.device))
        return out, self.loader.epoch(first)


def main(args: SimpleNamespace, stop: StopSignals, closing: ExitStack):
    """A whole run, from the flags to the last checkpoint; what it opens is closed by `closing`."""
    start_log()

    # -----------------------------------------------------------------------------------------------------------------
    # Devices and ranks
    device, precision = set_up(args, closing)
    rank, ranks = 0, 1

    # -----------------------------------------------------------------------------------------------------------------
    # What to go on from, and which model that makes
    home = RunDirectory(Path(args.ckpt_dir), args.resume, args.reset_steps, closing, look_only=args.dry_run)
    state = home.load()
    take_recipe(args, device, state and state.get("recipe"))
    config, n_loops = config_of_run(args, home.origin, state)
    with torch.device("meta"):
        model = Spider(config)
    take_horizon(args, model, n_loops)
    if args.engram_reset and not any(isinstance(module, EngramTable) for module in model.modules()):
        if "engram_reset" in args.given:
            raise UsageError("--engram_reset: this model has no Engram tables")
        args.engram_reset = False         # the recipe's
    backend = resolve_backend(args.moe_backend, device, config.hidden_size)
    optimizer = "muon" if args.optimizer == "auto" else args.optimizer
    say_what_was_chosen(args, model, n_loops, device, precision, backend, optimizer)

    # -----------------------------------------------------------------------------------------------------------------
    # Data
    sources = open_sources(args)
    loader = data.Loader(sources, args.seq_len, args.seed) if sources else None
    memory = estimate_memory(model, n_loops, args, optimizer, 4 if precision == "fp32" else 2)
    if args.dry_run:
        return print_dry_run(model, n_loops, args, memory, sources, loader, device)
    validation = data.validation_rows(sources, args.seq_len, args.eval_tokens) if args.eval_every else None
    eval_rows = max(args.micro_batch, EVAL_BYTES // args.seq_len)  # at a time: without gradients there is room for more
    logger.info(", ".join(f"{s.name}: {len(s.train):,} training and {len(s.val):,} validation ids" for s in sources))
    check_memory(sum(memory.values()) + checkpoint_size(memory), device)

    # -----------------------------------------------------------------------------------------------------------------
    # Model, real: values, FP8, compilation
    make_real(model, device, precision, backend, args)

    # -----------------------------------------------------------------------------------------------------------------
    # Optimizer; both as the checkpoint had them
    optimizers = Optimizers(model, optimizer, args)
    progress = home.restore(state, model, optimizers, n_loops, loader, args)
    del state

    # -----------------------------------------------------------------------------------------------------------------
    # Loop state
    batch = args.micro_batch * ranks * args.grad_accum                                       # sequences per step
    bytes_left = max(0, args.target_tokens - progress.bytes_seen)
    horizon = progress.step + math.ceil(bytes_left / (batch * args.seq_len))
    last_step = args.max_steps or horizon
    flops_per_byte = lru_cache(lambda loops, rate: model.flops_per_byte(rate, loops, args.seq_len))
    ceiling = product_rate(device)
    logger.info(f"{batch * args.seq_len:,} bytes a step, {last_step:,} steps; {flops_per_byte(n_loops, 3.3) / 1e9:.2g} "
                f"GFLOP per byte at 3.3 bytes per segment; checkpoints in {home.path}")
    for warning in horizon_warnings(args, loader, horizon):
        logger.warning(warning)
    metrics_file, writer = home.open(progress, last_step, args.keep_last, checkpoint_size(memory))
    tracker = start_wandb(args, progress, closing)
    profiler = start_profiler(device, home.path, closing) if args.profile else None
    if progress.written >= last_step:
        logger.info(f"nothing to do: step {progress.step} of {last_step} is done; raise --max_steps or --target_tokens")
    elif precision == "fp8" or args.compile:
        warm_up(model, args.micro_batch, args.seq_len, n_loops, device)
    feed = Feed(loader, args, rank, ranks, device, progress, closing)
    optimizers.set_lr(args.lr, lr_factor(max(0, progress.step - 1), horizon, args))  # as the checkpoint had it
    leaving = Leaving(stop, writer, progress.step, last_step, args.max_skipped)

    def save():
        writer.save(run_state(model, optimizers, progress, loader, args), metrics_file.sync)

    # -----------------------------------------------------------------------------------------------------------------
    # The loop
    while leaving.goes_on(progress):
        if progress.owed is None:         # else a run before this one did the step, and owes what follows it
            # ---------------------------------------------------------------------------------------------------------
            step_start = time.perf_counter()
            first = progress.bytes_seen // args.seq_len
            model.ponder_warmup = min(1.0, (progress.step + 1) / (args.warmup_steps + 1))
            with leaving.droppable(STEP_PATIENCE):  # up to the update nothing but gradients changes
                batches, epoch = feed.take()
                sums, tokens = accumulate(model, batches, loops := loops_of_step(args, n_loops, progress.step))
            if leaving.drops():
                break
            lr = args.lr * (factor := lr_factor(progress.step, horizon, args))
            optimizers.set_lr(args.lr, factor)
            numbers = update(model, optimizers, sums, tokens, sum(part.real for part in batches), args,
                             empty_tables=epoch > progress.epoch and empties_tables(args, loader, first))
            rate = batch * args.seq_len / (time.perf_counter() - step_start)
            # ---------------------------------------------------------------------------------------------------------
            mfu = rate * flops_per_byte(loops, round(max(1.0, numbers["bytes_per_segment"]), 2)) / ceiling
            numbers |= dict(lr=lr, tok_per_sec=rate, bf16_mfu=mfu, memory=peak_memory(device), time=time.time())
            spike = progress.record(numbers, (first + batch) * args.seq_len, epoch)
            remaining = leaving.seconds_left(progress.step, pauses_left(args, progress.step, last_step))
            logger.info(progress_line(progress.owed, last_step, remaining, device))
            # Once in a while: a step to look at
            if progress.skipped or spike:
                logger.warning(odd_step_line(progress, first, batch, args))
            if profiler:
                profiler.step()
        metrics = progress.owed
        evaluates, samples = (every and (progress.step % every == 0 or progress.step == last_step)
                              for every in (args.eval_every, args.sample_every))
        # Once in a while: evaluate and sample; the step's line is owed until that is done
        if evaluates or samples:
            with leaving.pause(bool(evaluates) + bool(samples)):
                if evaluates:
                    metrics = metrics | evaluate(model, validation, eval_rows, n_loops, device)
                if samples:
                    print_sample(model, progress.step, n_loops, args, validation and validation[0][0])
            if leaving.drops():
                break
        if evaluates:
            progress.take_evaluation(metrics["val_loss"], at_end=progress.step % args.eval_every != 0)
        metrics_file.write(metrics)
        if tracker:
            tracker.log(metrics, step=progress.step)
        progress.owed = None
        # Once in a while: save
        if not progress.skipped and (progress.step % args.ckpt_every == 0 or writer.retry_is_due()):
            save()

    # -----------------------------------------------------------------------------------------------------------------
    # The end
    if not writer.holds(progress.step):
        save()
    leaving.report(progress, how_to_go_on(args))


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
