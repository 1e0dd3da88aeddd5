"""What a run would take, before it takes it: memory by purpose, disk, a rate, days; --dry_run prints it.

Memory is counted, not tried: what each part of the model keeps for its backward pass. docs/performance.md holds it
against what a rehearsed step has alive (rehearsal.py): they agree within 10%. What a process takes beside its tensors
is added where they share the machine's memory. Of a rate see train.time_steps.
"""

import dataclasses
import math
import os
import re
import resource
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from loguru import logger

import data
import files
from checkpoint import checkpoint_paths, existing_parent, numbers_of
from distributed import World
from engram import EngramTable, shifted_bytes
from layers import Packing, document_cu_seqlens, round_up
from optim import matrices_of, multiplies_bf16
from spider_model import RECOMPUTE, Spider, SpiderConfig
from tokenizer import PAD_ID


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


def activations(c: SpiderConfig, n_loops: int, rows: int, seq_len: int, size: int, recompute: str, rate: float,
                dropout: bool) -> float:
    """Bytes alive when a forward pass has ended, or as the first layer that is recomputed goes backward, of segments of
    `rate` bytes; dropout keeps which numbers it dropped, at two places of bytes and two of segments."""
    layers, fixed = c.n_prelude_layers + c.n_coda_layers, byte_rate_kept(c, size)
    total, block = rows * (fixed[0] + 2 * dropout * c.hidden_size), rows * block_kept(c, size)
    if recompute == "all" and layers:
        total += rows * layers * size * c.hidden_size + max(0, block - rows * fixed[1])
    else:
        total += layers * block
    if not c.n_recurrent_layers:
        return total
    step = max(1, min(seq_len, rows // 64))
    segments = round_up(max(1, math.ceil(rows / rate)), step)
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
    kept += engrams * size * (memory + 3 * c.hidden_size) + c.hidden_size * (
        (3 + c.places) * size + 4 + 2 * dropout)
    return total + segments * kept


def state_size(model: Spider, optimizer: str) -> tuple[float, float, float]:
    """Bytes of all parameters, of the optimizer's state of those that are no tables, and of that of tables."""
    tables = [m for m in model.modules() if isinstance(m, EngramTable)]
    total = sum(p.numel() for p in model.parameters())
    dense = total - sum(m.weight.numel() for m in tables)
    matrices = sum(model.get_parameter(name).numel() for name in matrices_of(model))
    state = {"adamw": 8 * dense, "adamw8bit": 2.05 * dense, "muon": 4 * matrices + 8 * (dense - matrices)}[optimizer]
    return 4 * total, state, 4 * sum(len(m.weight) for m in tables)


def estimate_memory(model: Spider, n_loops: int, args, optimizer: str, precision: str, device: torch.device,
                    recompute: str, world: World | None = None, rate: float | None = None) -> dict[str, float]:
    """Bytes by purpose that tensors take at once in a step of one rank of a world; `rate`: bytes per segment, where it
    is not the config's.

    Where attention has no kernel for documents (on a CPU, and in fp32), they are filled up to at most twice their rows:
    how far is up to the data, so the bound is counted, apart."""
    c, size = model.config, 4 if precision == "fp32" else 2
    rate = c.bytes_per_segment if rate is None else rate
    tables = {name: m for name, m in model.named_modules() if isinstance(m, EngramTable)}
    total = sum(p.numel() for p in model.parameters())
    dense = total - sum(m.weight.numel() for m in tables.values())
    _, state, sums = state_size(model, optimizer)
    rows = args.micro_batch * args.seq_len
    kept = activations(c, n_loops, rows, args.seq_len, size, recompute, rate, args.dropout > 0)
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


KERNELS = 1e9                             # bytes: oneDNN keeps 1,024 kernels twice, one for each size of a product, and
                                          # for each learning rate in Muon's; with the holes that malloc leaves between


def beside_tensors(model: Spider, optimizer: str, device: torch.device, world: World) -> dict[str, float]:
    """Bytes by purpose that a rank takes of the device's memory beside a step's tensors."""
    if device.type != "cpu":
        return {}
    return {"this process before them": process_memory("VmRSS"),
            "copy for checkpoints": checkpoint_size(model, optimizer) / world.local_ranks,
            "kernels of products, at most": KERNELS * multiplies_bf16(device)}


def memory_of(device: torch.device, world: World | None = None) -> float:
    """Bytes of the GPU, or of the machine; of a `world` whose ranks share it, those of each."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 if world is None else world.local_ranks)


FITS = 0.9                                # of the memory: the rest is for the context, and for holes between tensors


def choose_recompute(asked: str, estimate, there: float) -> tuple[str, dict[str, float]]:
    """What is recomputed, and its memory: what is asked for; for `auto` the least that fits into `there` bytes by
    `estimate`, or all where nothing does."""
    for recompute in RECOMPUTE if asked == "auto" else (asked,):
        memory = estimate(recompute)
        if sum(memory.values()) <= FITS * there:
            break
    return recompute, memory


def describe_memory(memory: dict[str, float], there: float) -> str:
    """One line: what a run takes of `there` bytes, and for what."""
    needed = sum(memory.values())
    verdict = "NOT ENOUGH" if needed > there else "enough"
    return (f"memory: about {needed / 1e9:.3g} GB of {there / 1e9:.3g}, {verdict}: "
            + ", ".join(f"{name} {size / 1e9:.2f}" for name, size in memory.items() if size >= 5e6))


def check_memory(needed: float, device: torch.device, world: World):
    """TooLarge where a CPU's memory is sure not to suffice for `needed` bytes by each rank that is here: the kernel
    would kill the run without a word."""
    if device.type == "cpu" and needed > 1.25 * memory_of(device, world):
        raise TooLarge(f"--micro_batch: a run takes about {needed * world.local_ranks / 1e9:.0f} GB, this machine has "
                       f"{memory_of(device) / 1e9:.0f}: lower it, and raise --grad_accum as much; or lower --seq_len "
                       f"or --model")


def checkpoint_size(model: Spider, optimizer: str) -> float:
    """Bytes of a checkpoint."""
    return sum(state_size(model, optimizer))


def proc_bytes(file: str, field: str) -> float | None:
    """What a file of /proc says in kB; None where there is none."""
    found = re.search(rf"{field}:\s*(\d+) kB", Path(file).read_text()) if Path(file).exists() else None
    return 1024 * int(found[1]) if found else None


def process_memory(field: str) -> float:
    """Bytes of this process: VmRSS, what it has now, or VmHWM, the most it had."""
    own = proc_bytes("/proc/self/status", field)  # getrusage's maximum begins with that of the process that started it
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if own is None else own


def free_memory(device: torch.device) -> float:
    """Bytes of the device's memory, or of the machine's, that nobody uses."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = proc_bytes("/proc/meminfo", "MemAvailable")
    return memory_of(device) if free is None else free


def peak_memory(device: torch.device) -> float:
    """Most memory used so far, GB: of the GPU where there is one, else of the process."""
    return (torch.cuda.max_memory_allocated(device) if device.type == "cuda" else process_memory("VmHWM")) / 1e9


# ---------------------------------------------------------------------------------------------------------------------
# Segments of a text

SAMPLED, AT_ONCE = 1 << 18, 1 << 14       # bytes of a source that its segments are measured on, and of them at a time
LONG_SEGMENT = 64                         # bytes: the core, which runs once a segment, has little to say then


def segment_lengths(model: Spider, sources: list[data.Source], args) -> dict[str, float]:
    """Bytes per segment that the model's rule makes of each source's training data, by its name; of none where cuts are
    learned, or there is no core."""
    c, lengths = model.config, {}
    for source in sources if model.core is not None and c.boundaries != "learned" else ():
        loader, rows = data.Loader([source], args.seq_len, args.seed), max(1, AT_ONCE // args.seq_len)
        real = segments = 0
        for first in range(0, max(1, SAMPLED // args.seq_len), rows):
            ids, _ = loader.rows(np.arange(first, first + rows))
            packing = Packing.build(document_cu_seqlens(ids), ids.numel(), args.seq_len, c, torch.float32)
            shifted = shifted_bytes(ids.flatten(), packing.position, 2)
            real += int((ids != PAD_ID).sum())
            segments += int(model.boundaries(None, ids, shifted, packing, None).sum())
        lengths[source.name] = min(args.seq_len, real / max(1, segments))
    return lengths


def mean_length(c: SpiderConfig, sources: list[data.Source], lengths: dict[str, float]) -> float:
    """Bytes per segment of all sources together; the config's where none was measured."""
    return 1 / sum(s.weight / lengths[s.name] for s in sources) if lengths else c.bytes_per_segment


def segment_warnings(c: SpiderConfig, lengths: dict[str, float], seq_len: int) -> list[str]:
    """A line for each of `lengths`, bytes per segment by what has them, at which the core is next to idle."""
    remedy = " or ".join(rule for rule in ("every_third", "learned") if rule != c.boundaries)
    return [f"{name}: a segment has {length:,.0f} bytes on average, and the core, which runs once a segment, next to "
            f"nothing to do: --set boundaries={remedy} in place of {c.boundaries}"
            for name, length in lengths.items() if c.n_recurrent_layers and length >= min(LONG_SEGMENT, seq_len)]


# ---------------------------------------------------------------------------------------------------------------------
# Time

TOO_LONG = 30.0                           # seconds: a step that takes more at the machine's full rate is not timed


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


def rate_of_run(args) -> float | None:
    """Bytes/s of the last steps of a run in --ckpt_dir, of as many bytes each; None where there are none."""
    path = Path(args.ckpt_dir) / "metrics.jsonl"
    with suppress(OSError, ValueError, KeyError, TypeError):
        lines = [numbers_of(line) for line in path.read_text().splitlines()[-100:]] if path.is_file() else []
        rates = [float(line["tok_per_sec"]) for before, line in pairwise(lines)
                 if line["bytes_seen"] - before["bytes_seen"] == args.global_batch]
        if rates and all(1e-3 < rate < 1e15 for rate in rates):
            return float(np.median(rates))


def expected_rate(args, device: torch.device, ranks: int, needed: float, bound: float,
                  time_steps: Callable) -> tuple[str, float, str]:
    """"at least" where a run takes longer than its rate says, else nothing; the rate in bytes/s, and where that comes
    from: of a run in --ckpt_dir, else of `time_steps`, else the `bound` that the machine's products set. `needed`:
    bytes of memory."""
    if (rate := rate_of_run(args)) is not None:
        return "", rate, f"measured by the run in {args.ckpt_dir}"
    obstacle = ("of several ranks" if ranks > 1 else "of compiled layers: they take minutes to compile"
                if args.compile == "on" else "for want of memory" if needed > free_memory(device) else
                "since it takes too long" if args.global_batch > TOO_LONG * bound else None)
    if obstacle:
        return "at least ", bound, f"its products alone, at this machine's rate of them; no step was timed, {obstacle}"
    logger.info(f"times a step of {args.global_batch:,} bytes")
    return "", time_steps(), "steps of these sizes, timed here"


def lasting(seconds: float) -> str:
    """A duration for people."""
    for unit, length in (("years", 365.25 * 86400), ("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1)):
        if seconds >= 2 * length or unit == "seconds":
            count = seconds / length
            return f"{count:,.0f} {unit}" if count >= 10 else f"{count:.1f} {unit}"


# ---------------------------------------------------------------------------------------------------------------------
# The horizon, beside the data

MOST_EPOCHS = 20                          # of a horizon, before it is a warning


def epochs_over(loader: data.Loader, target_tokens: int) -> np.ndarray:
    """Times that a horizon in bytes reads each source of the data."""
    return target_tokens * loader.share / loader.targets


def horizon_warnings(args, loader: data.Loader | None, horizon: int, lr_factor) -> list[str]:
    """A line each for a `horizon` of steps that does not suit the data, if there are any, or the steps that --max_steps
    leaves of it or adds to it; `lr_factor` is train.py's."""
    warnings, end = [], args.max_steps - 1
    epochs = 0.0 if loader is None else epochs_over(loader, args.target_tokens).max()
    if epochs > MOST_EPOCHS:
        warnings.append(f"--target_tokens {args.target_tokens:,} reads the data {epochs:,.0f} times over, which learns "
                        f"it by heart: at most {int(args.target_tokens * MOST_EPOCHS / epochs):,}, or more data")
    high = end < args.warmup_steps or lr_factor(end, horizon, args) > 2 * args.min_lr_fraction
    if 0 < args.max_steps < horizon and high:
        warnings.append(f"--max_steps {args.max_steps:,} ends the run at {lr_factor(end, horizon, args):.0%} of the "
                        f"peak rate, which falls over {horizon:,} steps: --target_tokens "
                        f"{args.max_steps * args.target_tokens // horizon} in its place would end at a better loss")
    if args.max_steps > horizon:
        warnings.append(f"--max_steps {args.max_steps:,}: steps {horizon + 1:,} to {args.max_steps:,} lie beyond the "
                        f"horizon, at a rate of {args.lr * lr_factor(end, horizon, args):.3g}: --target_tokens "
                        f"{args.max_steps * args.global_batch} spreads the schedule over all of them")
    return warnings


# ---------------------------------------------------------------------------------------------------------------------
# --dry_run

def print_verdict(args, memory: dict[str, float], there: float, checkpoint: float) -> bool:
    """Prints whether `there` bytes of memory and the disk suffice, and what is needed of them; returns it."""
    free = shutil.disk_usage(existing_parent(args.ckpt_dir)).free
    kept = min(args.keep_last, len(checkpoint_paths(Path(args.ckpt_dir))))
    lacking = [what for what, short in (("memory", sum(memory.values()) > there),
                                        ("disk", (args.keep_last + 1 - kept) * checkpoint > free)) if short]
    print(f"NOT ENOUGH {' and '.join(lacking)}" if lacking else "enough memory and disk")
    print(describe_memory(memory, there))
    print(f"disk: {free / 1e9:.1f} GB free for checkpoints of {checkpoint / 1e9:.2f} GB, {args.keep_last + 1} at a time"
          + f", {kept} of them there" * (kept > 0), flush=True)
    return not lacking


def print_outlook(args, loader: data.Loader | None, sources: list[data.Source], expected: tuple[str, float, str],
                  warnings: list[str]):
    """Prints steps, passes over the data and the time of a run at the rate `expected`, what its data is, and
    warnings."""
    at_least, rate, origin = expected
    step = args.global_batch
    steps = args.max_steps or math.ceil(args.target_tokens / step)     # from the start
    passes = "" if loader is None else f"{epochs_over(loader, steps * step).max():.3g} times over the data, "
    print(files.one_line(f"run: {steps:,} steps of {step:,} bytes, {passes}{at_least}{lasting(steps * step / rate)} of "
                         f"training at {rate:,.0f} bytes/s ({origin})"))
    if not sources:
        print(files.one_line(f"data: {args.data_dir!r} does not exist yet: python data.py prepare INPUT --out "
                             f"{args.data_dir}"))
    for source in sources:
        print(files.one_line(f"data: {source.name} (weight {source.weight:.3g}): {len(source.train):,} training ids, "
                             f"{len(source.val):,} for validation; ids checked"))
    for warning in warnings:
        print(files.one_line(f"warning: {warning}"))


def print_tables(model: Spider, n_loops: int, args, flags: list[str], usual: float):
    """Prints parameters by component, cost at the `usual` bytes per segment and others, configuration, `flags` by
    name; of a model on the meta device, too."""
    c, table = model.config, model.parameter_table()
    total, active = (sum(column) for column in zip(*table.values()))
    print(f"\n{'parameters by component':36}{'parameters':>14}{'share':>8}{'active per byte':>18}")
    for component, (count, used) in sorted(table.items(), key=lambda item: -item[1][0]):
        print(f"  {component:34}{count:14,}{count / total:8.1%}{used:18,.0f}")
    print(f"  {'total':34}{total:14,}{1:8.0%}{active:18,.0f}")
    flops = {rate: model.flops_per_byte(rate, n_loops, args.seq_len) for rate in (1, usual, 8)}
    print("\ntraining FLOPs per byte, " + ", ".join(
        f"{cost / 1e9:.3g} G at {rate:.2g} bytes per segment" for rate, cost in flops.items()))
    print("\nconfiguration")
    for field in dataclasses.fields(c):
        print(f"  {field.name} = {getattr(c, field.name)}")
    print("flags")
    for name in flags:
        print(files.one_line(f"  --{name} = {getattr(args, name)}"))
