"""Estimate a run before it starts: parameters, FLOPs, memory per step, duration.

The estimate of memory is within a seventh of a step's peak (tests/rehearsal/peaks.py). It decides
micro-batch and recomputation; on one GPU, train.fit_micro_batch then tests whether they fit.
"""

import shutil
from collections import defaultdict
from collections.abc import Container, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from spider import machine
from spider.errors import TooLarge
from spider.machine import free_memory, has_bf16, process_memory
from spider.model.memory import tables_of
from spider.training import checkpoint, fp8
from spider.training.distributed import World
from spider.training.optim import ENGRAM_TABLES, Read, kinds_of
from spider.training.plan import Plan
from spider_model import Spider

# --------------------------------------------------------------------------------------------------
# Parameters and FLOPs


def parameter_table(model: Spider) -> dict[str, tuple[int, float]]:
    """Count the parameters of each component: all, and those that a byte uses. Core layers count
    once, whatever the number of loops; of the experts, the top k are used."""
    config = model.config
    table: dict[str, tuple[int, float]] = {}
    for name, kind in kinds_of(model).items():
        size = model.get_parameter(name).numel()
        fraction = 1.0
        if kind.read is Read.CHOSEN:
            fraction = config.n_experts_per_tok / config.n_routed_experts
        elif kind.component == ENGRAM_TABLES:
            fraction = 0.0  # a byte reads only a few rows
        parameters, active = table.get(kind.component, (0, 0.0))
        table[kind.component] = parameters + size, active + size * fraction
    return table


def matrix_uses(model: Spider, segments_per_byte: float, n_loops: int) -> dict[str, float]:
    """Return how many times a byte multiplies by each matrix, or by each matrix of a stack, on
    average."""
    c = model.config
    loops = segments_per_byte * n_loops
    uses = {
        Read.BYTE: 1.0,
        Read.SEGMENT: segments_per_byte,
        Read.LOOP: loops,
        Read.ONE_LOOP: loops / c.n_loops,
        Read.CHOSEN: loops * c.n_experts_per_tok / max(1, c.n_routed_experts),
        Read.LOOKUP: 0.0,
    }
    return {
        name: uses[kind.read]
        for name, kind in kinds_of(model).items()
        if model.get_parameter(name).ndim >= 2
    }


def flops_per_byte(
    model: Spider,
    bytes_per_segment: float,
    n_loops: int,
    seq_len: int,
    fast: Container[str] = (),
) -> float:
    """Count training FLOPs per byte: forward and backward, causal attention, no recomputation.

    Count parameters by name, since the conversion to FP8 replaces Linears. fast: names of weights
    whose FLOPs count half, since FP8 products run at twice the rate.
    """
    c = model.config
    segments_per_byte = 1 / bytes_per_segment
    # Multiply-adds of a forward pass: sum of numel * uses over all weights
    products: float = 0
    if c.n_recurrent_layers and c.core_loss_weight:
        products += model.get_parameter("lm_head.weight").numel()
    for name, uses in matrix_uses(model, segments_per_byte, n_loops).items():
        rate = 0.5 if name in fast else 1.0
        products += model.get_parameter(name).numel() * rate * uses
    window = min(c.byte_window or seq_len, seq_len)
    # Averages per byte: the bytes that it attends to in a byte layer; the segments that its
    # segment attends to in a core layer, in all loops, divided by the segment's bytes
    seen_by_byte = window - window * window / (2 * seq_len)
    seen_by_core = n_loops * segments_per_byte**2 * seq_len / 2
    byte_layers = c.n_prelude_layers + c.n_coda_layers
    attention = (
        2
        * c.n_heads
        * c.v_head_dim
        * (seen_by_byte * byte_layers + c.n_recurrent_layers * seen_by_core)
    )
    return 6 * products + 3 * 2 * attention


# --------------------------------------------------------------------------------------------------
# Memory of a step


class StateSize(NamedTuple):
    """Bytes of a model and its optimizer state."""

    dense: int  # parameters without Engram tables
    tables: int  # Engram tables
    dense_state: float  # optimizer state of `dense`
    table_state: float


def state_size(model: nn.Module, optimizer: str) -> StateSize:
    """Count the bytes of parameters and optimizer state. optimizer: one of OPTIMIZERS."""
    tables = [table.weight for table in tables_of(model)]
    in_tables = sum(table.numel() for table in tables)
    dense = sum(p.numel() for p in model.parameters()) - in_tables
    if optimizer == "adamw":
        state: float = 8 * dense
    elif optimizer == "adamw8bit":
        state = 2.05 * dense
    else:  # Muon keeps one moment for matrices, AdamW two for all other parameters
        matrices = sum(
            model.get_parameter(name).numel()
            for name, kind in kinds_of(model).items()
            if kind.optimizer == "muon"
        )
        state = 4 * matrices + 8 * (dense - matrices)
    return StateSize(4 * dense, 4 * in_tables, state, 4 * sum(map(len, tables)))


def estimate_memory(plan: Plan, world: World) -> dict[str, float]:
    """Estimate the peak bytes of a rank in a step, by purpose. On a CPU, include the rest of the
    process."""
    model = plan.model
    flags = plan.flags
    size = 4 if flags.precision == "fp32" else 2
    n_bytes = flags.micro_batch * flags.seq_len  # of a micro-step
    on_cpu = world.device.type == "cpu"
    state = state_size(model, flags.optimizer)

    kept = size * n_bytes * activations_per_byte(plan)
    if on_cpu:
        kept *= 1.35  # for padding of documents, and fragmentation by malloc
    casts = 0
    if flags.precision != "fp32":
        casts = state.dense * size // 4
    if flags.precision == "fp8":  # a converted weight takes one byte
        casts -= sum(model.get_parameter(name).numel() for name in weights_in_fp8(model))

    gradients: float = state.dense
    table_grads = table_gradients(model, n_bytes * flags.grad_accum)
    gathered = 0
    if world.ranks > 1:  # see shard_model; tables and their gradients are not sharded
        table_grads = state.tables
        gathered = state.dense
        if flags.grad_accum == 1:
            gradients /= world.shards
            if world.shards > 1:  # gathered group by group; the core is the largest group
                gathered = 4 * sum(
                    p.numel() for name, p in model.named_parameters() if name.startswith("core.")
                )
    elif flags.grad_accum == 1:
        # Gradients take the place of activations; with several micro-steps, they exist beforehand.
        gradients = max(0.0, gradients + table_grads - kept)
        table_grads = 0.0

    memory = {
        "parameters": state.tables + state.dense / world.shards,
        "gradients": gradients,
        "gradients of tables": table_grads,
        "optimizer": state.dense_state / world.shards + state.table_state,
        "cast weights": casts,
        "activations": kept,
        # ids and labels, int64, of this step and the next step (data.Prefetcher)
        "batches": 2 * 2 * 8 * n_bytes * flags.grad_accum,
        "gathered weights": gathered,
    }
    if on_cpu:
        memory |= {
            "process at start": process_memory("VmRSS"),
            "checkpoint copy": plan.checkpoint_size / world.local_ranks,
            # In bf16, oneDNN has two caches of 1,024 kernels, one kernel per size of a product (in
            # Muon, also per learning rate).
            "growth of the process": 1e9 if has_bf16(world.device) else 1e8,
        }
    return memory


def table_gradients(model: nn.Module, n_bytes: int) -> float:
    """Estimate the bytes of the gradients of Engram tables after `n_bytes` bytes of text."""
    tables = tables_of(model)
    lookups = sum(table.width for table in tables)
    in_tables = sum(table.weight.numel() for table in tables)
    return min(4.0 * lookups * n_bytes, 8.0 * in_tables)


def activations_per_byte(plan: Plan) -> float:
    """Estimate how many numbers of activations a byte keeps at the peak of a step.

    The estimate is a sum over the parts of the model: a factor times the total width of the inputs
    and outputs of a byte's products. The factors are fitted to steps on fake tensors
    (tests/rehearsal).
    """
    c = plan.config
    n_loops = plan.flags.n_loops
    recompute = plan.flags.recompute
    segments = 1 / c.bytes_per_segment  # per byte
    byte_layers = c.n_prelude_layers + c.n_coda_layers
    widths: dict[str, float] = defaultdict(float)  # inputs and outputs, by part of the model
    for name, uses in matrix_uses(plan.model, segments, n_loops).items():
        shape = plan.model.get_parameter(name).shape
        widths[name.partition(".")[0]] += uses * shape[:-2].numel() * sum(shape[-2:])
    in_core = widths["core"]
    in_byte_layers = widths["prelude"] + widths["coda"]
    in_others = sum(widths.values()) - in_core - in_byte_layers
    in_a_layer = in_byte_layers / max(1, byte_layers)

    kept = 2.0 * in_others  # mostly in fp32
    if recompute == "nothing":
        kept += 0.9 * in_core
    else:  # the input of each visit to a layer, and what attention and routing keep
        visits = segments * n_loops * c.n_recurrent_layers
        kept += 2.5 * visits * c.hidden_size
    if recompute == "all":
        kept += byte_layers * c.hidden_size + 0.85 * in_a_layer
    else:
        kept += 1.1 * in_byte_layers
    if plan.flags.precision == "fp8":  # the casts of a layer go through fp32
        kept += 0.7 * in_a_layer
    return kept


def weights_in_fp8(model: nn.Module, experts: bool = False) -> list[str]:
    """Name the weights whose products run in FP8 with --precision fp8. Call this before the
    conversion. experts: --fp8_experts."""
    linears = [f"{name}.weight" for name, m in model.named_modules() if fp8.takes_fp8(m, name)]
    routed = [name for name, kind in kinds_of(model).items() if kind.read is Read.CHOSEN]
    return linears + routed if experts else linears


# --------------------------------------------------------------------------------------------------
# Choose by memory, or refuse

# Largest fraction of a GPU's memory that the estimate may reach. If the estimate is a seventh too
# low, the step still fits, but the warm-up halves its micro-batch.
MAX_MEMORY_FRACTION = 0.85


def first_that_fits(plans: Sequence[Plan], world: World) -> tuple[int, dict[str, float]]:
    """Return the index of the first plan whose step fits into memory, else of the last plan, and
    its memory by purpose."""
    available = machine.memory_of(world.device, world.local_ranks)
    for i, plan in enumerate(plans):
        memory = estimate_memory(plan, world)
        if sum(memory.values()) <= MAX_MEMORY_FRACTION * available:
            return i, memory
    return len(plans) - 1, memory


def check_memory(plan: Plan, world: World):
    """Raise TooLarge if a rank surely needs more memory than there is.

    Without this check, the kernel would kill a run on a CPU without a message, and a run on a GPU
    would fail only after minutes of compiling.
    """
    available = machine.memory_of(world.device, world.local_ranks)
    needed = sum(plan.memory.values())
    if needed > 1.25 * available:
        raise TooLarge(
            f"--micro_batch: the run needs about {needed * world.local_ranks / 1e9:.3g} GB, but "
            f"this machine has {available * world.local_ranks / 1e9:.3g} GB: {memory_remedy(plan)}"
        )
    if obstacle := obstacle_to_copy(plan, world):
        raise TooLarge(f"--ckpt_every: {obstacle}")


def memory_remedy(plan: Plan) -> str:
    """Say which flags make a step take less memory."""
    more_shards = f"raise --shards to {plan.ranks}, " if plan.flags.shards < plan.ranks else ""
    return (
        f"{more_shards}give --global_batch {plan.step_bytes} without --micro_batch, --grad_accum "
        f"and --recompute, or choose a smaller --seq_len or --model"
    )


def obstacle_to_copy(plan: Plan, world: World) -> str | None:
    """Return why the copy of a GPU's checkpoint would not fit into host memory, or None. Only rank
    0, which writes checkpoints, checks this; if it fails, torchrun ends the others."""
    # Add this process's memory: the checkpoint that it resumes from is freed before the first save.
    host = free_memory(torch.device("cpu")) + process_memory("VmRSS")
    if world.device.type == "cpu" or not world.is_rank0 or plan.checkpoint_size <= host:
        return None
    return (
        f"a checkpoint is copied to host memory: {plan.checkpoint_size / 1e9:.2f} GB of "
        f"{host / 1e9:.3g}: free some, or choose a smaller --model"
    )


# --------------------------------------------------------------------------------------------------
# The dry run

MAX_STEP_SECONDS = 30.0  # a step that takes longer even at the peak rate is not timed
LAUNCH_SECONDS = 0.07  # in which the host launches the kernels of a micro-step on a GPU


def predict_speed(plan: Plan, peak: float) -> tuple[float, float]:
    """Return two speeds in bytes/s: the limit that matrix products set, and the speed to expect of
    a GPU.

    Expect all other kernels to take as long as the products would in bf16, and the host to launch
    kernels no faster than LAUNCH_SECONDS allows (docs/results/gpu-estimates.md has `1b` by kernel).
    peak: FLOP/s of products in bf16.
    """
    flags = plan.flags
    shape = (plan.config.bytes_per_segment, flags.n_loops, flags.seq_len)
    others = flops_per_byte(plan.model, *shape) / peak  # seconds per byte, of other kernels
    products = others  # seconds per byte, of products
    if flags.precision == "fp8":
        fast = weights_in_fp8(plan.model, flags.fp8_experts)
        products = flops_per_byte(plan.model, *shape, fast) / peak
    launches = LAUNCH_SECONDS * flags.grad_accum / plan.step_bytes
    return 1 / products, 1 / max(products + others, launches)


def is_timed(plan: Plan, world: World, fastest: float) -> bool:
    """Return whether the dry run times a few steps: on one rank, if they fit into memory and do not
    take minutes. fastest: bytes/s that matrix products alone allow."""
    fits = sum(plan.memory.values()) <= free_memory(world.device)
    is_quick = plan.flags.compile == "off" and plan.step_bytes <= MAX_STEP_SECONDS * fastest
    return world.ranks == 1 and fits and is_quick


MAX_DURATION = 1e13  # seconds, within the range of timedelta


def describe_duration(seconds: float) -> str:
    """Format a duration for people: [days, ]hours:minutes:seconds."""
    return str(timedelta(seconds=round(min(seconds, MAX_DURATION))))


def describe_needs(plan: Plan, world: World) -> tuple[list[str], list[str]]:
    """Return lines about the memory of a step and the disk space of checkpoints, and remedies for
    what is lacking."""
    needed = sum(plan.memory.values())
    usable = machine.memory_of(world.device, world.local_ranks)
    if world.device.type == "cuda":
        usable *= MAX_MEMORY_FRACTION
    purposes = [f"{name} {size / 1e9:.2f}" for name, size in plan.memory.items() if size >= 5e6]
    directory = Path(plan.flags.ckpt_dir).absolute()
    existing = next(path for path in (directory, *directory.parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    wanted = plan.flags.keep_last + plan.flags.keep_best
    present = min(wanted, len(checkpoint.checkpoint_paths(directory)))
    missing = wanted + 1 - present  # a new checkpoint is written before the oldest is deleted
    lines = [
        f"memory: about {needed / 1e9:.3g} GB of {usable / 1e9:.3g} that a step may take: "
        f"{', '.join(purposes)}",
        f"disk: {free / 1e9:.1f} GB free for {wanted + 1} checkpoints of "
        f"{plan.checkpoint_size / 1e9:.2f} GB, {present} of which exist",
    ]
    lacking = []
    if needed > usable:
        lacking.append(f"memory: {memory_remedy(plan)}")
    if obstacle := obstacle_to_copy(plan, world):
        lacking.append(obstacle)
    if missing * plan.checkpoint_size > free:
        lacking.append("disk: make room, or name a --ckpt_dir on another disk")
    return lines, lacking


def print_tables(plan: Plan):
    """Print parameters by component, FLOPs per byte, configuration and flags."""
    table = parameter_table(plan.model)
    total = sum(parameters for parameters, _ in table.values())
    total_active = sum(active for _, active in table.values())
    print(f"{'parameters by component':36}{'parameters':>14}{'share':>8}{'active per byte':>18}")
    for component, (parameters, active) in sorted(table.items(), key=lambda item: -item[1][0]):
        print(f"  {component:34}{parameters:14,}{parameters / total:8.1%}{active:18,.0f}")
    print(f"  {'total':34}{total:14,}{1:8.0%}{total_active:18,.0f}")
    length = plan.config.bytes_per_segment
    cost = flops_per_byte(plan.model, length, plan.flags.n_loops, plan.flags.seq_len)
    print(f"\ntraining FLOPs per byte, {cost / 1e9:.3g} G at {length:.2g} bytes per segment")
    for title, values in (("configuration", vars(plan.config)), ("flags", vars(plan.flags))):
        print(title)
        for name, value in values.items():
            print(f"  {name} = {value!r}")
