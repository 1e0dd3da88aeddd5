"""What a run would take, before it takes it: memory by purpose, a rate, hours, disk; --dry_run prints it.

Memory is counted, not tried: what each part of the model keeps for its backward pass. docs/performance.md holds it
against what a rehearsed step has alive (rehearsal.py): they agree within 10%.
"""

import dataclasses
import json
import math
import os
import re
import resource
import shutil
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

import data
import files
from checkpoint import existing_parent
from distributed import World
from engram import EngramTable
from layers import round_up
from optim import is_matrix, multiplies_bf16
from spider_model import RECOMPUTE, Spider, SpiderConfig


class TooLarge(Exception):
    """A step takes more memory than there is; the message is one line that names the remedy."""


# ---------------------------------------------------------------------------------------------------------------------
# Memory

def attention_kept(c: SpiderConfig) -> int:
    """Numbers a row that attention keeps for its backward pass: low ranks and their norms, q, k, v and the result."""
    return 2 * (c.q_lora_rank + c.kv_lora_rank) + c.qk_rope_head_dim + 4 * c.n_heads * c.v_head_dim


def block_kept(c: SpiderConfig, size: int) -> float:
    """Bytes a row that a byte layer keeps: input and norm of both parts, attention, and gate, up, their product."""
    return size * (4 * c.hidden_size + attention_kept(c) + 4 * c.intermediate_size) + 4 * (c.n_heads + 4)


def visit_kept(c: SpiderConfig, size: int, has_engram: bool) -> float:
    """Bytes a segment that a core layer keeps in a loop: as a byte layer, the router's choice, experts, memory."""
    experts = c.n_experts_per_tok * bool(c.n_routed_experts) * (c.hidden_size + 5 * c.moe_intermediate_size)
    shared = 4 * c.n_shared_experts * c.moe_intermediate_size
    width = (4 + 2 * has_engram) * c.hidden_size
    return size * (width + attention_kept(c) + experts + shared) + 12 * c.n_routed_experts


def byte_rate_kept(c: SpiderConfig, size: int) -> tuple[float, float]:
    """Bytes a row that the rest at byte rate keeps: byte memories, boundaries, head, whole numbers; and of it what
    stands behind the byte layers, which is gone when they go backward."""
    width = (len(c.engram_byte_orders) + c.match_contexts) * c.engram_byte_dim
    head = (1 + c.scores_core) * (size * 2 * c.hidden_size + (8 + size) * c.vocab_size)
    written = size * 2 * (width + c.hidden_size) * (width > 0)
    boundaries = 8 * c.hidden_size if c.boundaries == "learned" and c.n_recurrent_layers else 0
    numbers = 8 * (c.longest_order + 6 + 3 * len(c.engram_byte_orders) + 4 * c.match_contexts)
    return size * width + boundaries + written + head + numbers, written + head


def activations(c: SpiderConfig, n_loops: int, rows: int, seq_len: int, size: int, recompute: str) -> float:
    """Bytes alive when a forward pass has ended, or as the first layer that is recomputed goes backward."""
    layers, fixed = c.n_prelude_layers + c.n_coda_layers, byte_rate_kept(c, size)
    total, block = rows * fixed[0], rows * block_kept(c, size)
    if recompute == "all" and layers:
        total += rows * layers * size * c.hidden_size + max(0, block - rows * fixed[1])
    else:
        total += layers * block
    if not c.n_recurrent_layers:
        return total
    step = max(1, min(seq_len, rows // 64))
    segments = round_up(max(1, math.ceil(rows / c.bytes_per_segment)), step)
    engrams = len(c.engram_layers)
    memory = len(c.engram_orders) * c.engram_heads * c.engram_dim
    latent = c.kv_lora_rank + c.qk_rope_head_dim
    visits = [visit_kept(c, size, i in c.engram_layers) for i in range(c.n_recurrent_layers)]
    if recompute == "nothing":
        kept = n_loops * sum(visits)
    else:                                 # of each visit its input, latents, what was convolved, the choice of experts
        kept = n_loops * (c.n_recurrent_layers * (size * (c.hidden_size + latent) + 8 * c.n_experts_per_tok)
                          + engrams * size * c.hidden_size)
        if not layers:
            kept += max(visits)
    kept += n_loops * c.hidden_size * 4 * size  # read-out, adapter and halting of each loop
    kept += engrams * size * (memory + 3 * c.hidden_size) + c.hidden_size * ((3 + c.places) * size + 4)
    return total + segments * kept


def estimate_memory(model: Spider, n_loops: int, args, optimizer: str, precision: str, device: torch.device,
                    recompute: str, world: World | None = None) -> dict[str, float]:
    """Bytes by purpose, of one rank of a world, as a step takes them at once.

    Where attention has no kernel for documents (on a CPU, and in fp32), they are filled up to at most twice their rows:
    how far is up to the data, so the bound is counted, apart."""
    c, size, rate = model.config, 4 if precision == "fp32" else 2, model.config.bytes_per_segment
    tables = {name: m for name, m in model.named_modules() if isinstance(m, EngramTable)}
    total = sum(p.numel() for p in model.parameters())
    dense = total - sum(m.weight.numel() for m in tables.values())
    matrices = sum(p.numel() for n, p in model.named_parameters() if is_matrix(n, p))
    state = {"adamw": 8 * dense, "adamw8bit": 2.05 * dense, "muon": 4 * matrices + 8 * (dense - matrices)}[optimizer]
    rows = args.micro_batch * args.seq_len
    kept = activations(c, n_loops, rows, args.seq_len, size, recompute)
    casts = dense * size if size < 4 else 0
    if precision == "fp8":                # a byte each of what it converts; and numbers of gate and up in fp32 and back
        casts -= sum(p.numel() for n, p in model.named_parameters() if n.endswith("proj.weight") and "engram" not in n)
        kept += rows * 12 * c.intermediate_size
    filled = 0.0
    if size == 4 or device.type == "cpu":
        visits, layers = c.n_recurrent_layers * n_loops, c.n_prelude_layers + c.n_coda_layers
        for count, part in ((2 if recompute == "all" else layers, 1), (visits if recompute == "nothing" else 2, rate)):
            window = 2 * c.byte_window if part == 1 else 0
            scores = 0 if size == 4 else 2 * c.n_heads * min(window or 2048, args.seq_len / part)
            copies = 12 if window else 5  # of a head's numbers: under a window every block lies there twice; where it
                                          # is recomputed, gradients of them lie beside them
            filled += count * rows / part * (copies * c.n_heads * c.v_head_dim + scores) * size
    gathered = 0.0
    for name, table in tables.items():    # see EngramTable.gather: row, gradient and its square of each lookup
        lookups = table.prime.numel() * rows / (rate if name.startswith("core") else 1)
        gathered += min(args.grad_accum * lookups, 1.5 * len(table.weight) + lookups) * (4 * table.weight.shape[1] + 12)
    sums = 4 * sum(len(table.weight) for table in tables.values())
    # of one micro-step gradients come as activations go; of several they are there before
    gradients = 4 * dense if args.grad_accum > 1 else max(0.0, 4 * dense - kept)
    memory = {"parameters": 4 * total, "gradients": gradients, "gathered for tables": gathered,
              "optimizer": state + sums, "weights cast": casts, "activations": kept,
              "documents filled up, at most": filled}
    if world is not None and world.ranks > 1:  # see World.spread; tables, and their gradients' sums, are whole
        whole, shards = args.grad_accum > 1 or world.shards == 1, world.shards
        memory |= {"parameters": 4 * (total - dense) + 4 * dense / shards, "optimizer": state / shards + sums,
                   "gathered for tables": 4 * (total - dense),
                   "gradients": 4 * dense / (1 if args.grad_accum > 1 else shards),
                   "weights gathered": 4 * (dense if whole else sum(
                       p.numel() for n, p in model.named_parameters() if n.startswith("core.")))}
    return memory


def memory_of(device: torch.device) -> float:
    """Bytes of the GPU, or of the machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


FITS = 0.9                                # of the memory: the rest is for the context, and for holes between tensors


def choose_recompute(asked: str, estimate, there: float) -> tuple[str, float]:
    """What is recomputed, and its bytes: what is asked for; for `auto` the least that fits into `there` bytes by
    `estimate`, or all where nothing does."""
    for recompute in RECOMPUTE if asked == "auto" else (asked,):
        needed = sum(estimate(recompute).values())
        if needed <= FITS * there:
            break
    return recompute, needed


def check_memory(needed: float, device: torch.device):
    """TooLarge where a CPU's memory is sure not to suffice: the kernel would kill the run without a word. `needed`:
    bytes, by all ranks that are here."""
    if device.type == "cpu" and needed > 1.25 * (here := memory_of(device)):
        raise TooLarge(f"--micro_batch: a step takes about {needed / 1e9:.0f} GB, this machine has {here / 1e9:.0f}: "
                       f"lower it, and raise --grad_accum as much; or lower --seq_len or --model")


def checkpoint_size(memory: dict[str, float]) -> float:
    """Bytes of a checkpoint, from what estimate_memory says."""
    return memory["parameters"] + memory["optimizer"]


def peak_memory(device: torch.device) -> float:
    """Most memory used so far, GB: of the GPU where there is one, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    status = Path("/proc/self/status")    # getrusage's maximum begins with that of the process that started this one
    own = re.search(r"VmHWM:\s*(\d+) kB", status.read_text()) if status.exists() else None
    return 1024 * int(own[1] if own else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) / 1e9


# ---------------------------------------------------------------------------------------------------------------------
# Time

ASSUMED_SHARE = 0.2                       # of the machine's matrix rate that a step reaches, where nothing was measured


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


# ---------------------------------------------------------------------------------------------------------------------
# The horizon, beside the data

MOST_EPOCHS = 20                          # of a horizon, before it is a warning


def epochs_over(loader: data.Loader, target_tokens: int) -> float:
    """Times that a horizon in bytes reads the data, of a mixture the source that is read most often."""
    return max(target_tokens * loader.counts / loader.counts.sum() / loader.targets)


def horizon_warnings(args, loader: data.Loader, horizon: int, lr_factor) -> list[str]:
    """A line each for a `horizon` of steps that does not suit the data, or the steps that --max_steps leaves of it;
    `lr_factor` is train.py's."""
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


# ---------------------------------------------------------------------------------------------------------------------
# --dry_run

def print_outlook(args, device: torch.device, loader: data.Loader | None, memory: float, flops_per_byte: float,
                  lr_factor):
    """Steps, passes over the data and hours of a run, and whether it fits into this machine."""
    step = args.global_batch
    horizon = math.ceil(args.target_tokens / step)
    steps = args.max_steps or horizon     # from the start
    rate, origin = expected_rate(args, device, flops_per_byte)
    passes = "" if loader is None else f"{epochs_over(loader, steps * step):.3g} times over the data, "
    print(files.one_line(f"run: {steps:,} steps of {step:,} bytes, {passes}{steps * step / rate / 3600:.3g} hours at "
                         f"{rate:,.0f} bytes/s ({origin})"))
    here = memory_of(device)
    print(f"this machine has {here / 1e9:.0f} GB for it: {'NOT ENOUGH' if memory > here else 'enough'}")
    for warning in () if loader is None else horizon_warnings(args, loader, horizon, lr_factor):
        print(f"warning: {warning}")


def print_dry_run(model: Spider, n_loops: int, args, flags: list[str], memory: dict[str, float], checkpoint: float,
                  sources, loader, device: torch.device, lr_factor):
    """Configuration, `flags` by name, parameters by component, cost, memory, time, disk, data; allocates no weight."""
    c = model.config
    print("configuration")
    for field in dataclasses.fields(c):
        print(f"  {field.name} = {getattr(c, field.name)}")
    print("flags")
    for name in flags:
        print(files.one_line(f"  --{name} = {getattr(args, name)}"))
    table = model.parameter_table()
    total, active = (sum(column) for column in zip(*table.values()))
    print(f"\n{'parameters by component':36}{'parameters':>14}{'share':>8}{'active per byte':>18}")
    for component, (count, used) in sorted(table.items(), key=lambda item: -item[1][0]):
        print(f"  {component:34}{count:14,}{count / total:8.1%}{used:18,.0f}")
    print(f"  {'total':34}{total:14,}{1:8.0%}{active:18,.0f}")
    flops = {rate: model.flops_per_byte(rate, n_loops, args.seq_len) for rate in (1, c.bytes_per_segment, 8)}
    print("\ntraining FLOPs per byte, " + ", ".join(
        f"{cost / 1e9:.3g} G at {rate:.2g} bytes per segment" for rate, cost in flops.items()))
    print(f"\nmemory, estimated: {sum(memory.values()) / 1e9:.1f} GB ("
          + ", ".join(f"{name} {size / 1e9:.2f}" for name, size in memory.items()) + ")")
    print_outlook(args, device, loader, sum(memory.values()), flops[c.bytes_per_segment], lr_factor)
    free = shutil.disk_usage(existing_parent(args.ckpt_dir)).free
    print(f"checkpoint: {checkpoint / 1e9:.2f} GB, written from a copy in host memory, {args.keep_last + 1} at a time; "
          f"free on disk {free / 1e9:.1f} GB"
          + ("" if free > (args.keep_last + 1) * checkpoint else ": NOT ENOUGH"))
    if not sources:
        print(files.one_line(f"data: {args.data_dir!r} does not exist yet: python data.py prepare INPUT --out "
                             f"{args.data_dir}"))
    for source in sources:
        print(files.one_line(f"data: {source.name} (weight {source.weight:.3g}): {len(source.train):,} training ids, "
                             f"{len(source.val):,} for validation; ids checked"))
