"""Estimate a run before it starts: parameters, FLOPs, memory of a step, duration.

The memory estimate counts what each module saves for its backward pass; it agrees within 10% with a
step on fake tensors (tests/rehearsal). `plan` is a train.Plan. Shapes and names of sizes as in
config.py.
"""

import math
import shutil
from collections.abc import Callable
from pathlib import Path

from torch import nn

from spider.checkpoint import checkpoint_paths
from spider.common import TooLarge
from spider.config import RECOMPUTE, SpiderConfig
from spider.distributed import World
from spider.fp8 import takes_fp8
from spider.machine import free_memory, memory_of, multiplies_bf16, process_memory
from spider.memory import EngramTable
from spider.optim import ENGRAM_TABLES, Read, kinds_of
from spider.packing import round_up, row_step

# --------------------------------------------------------------------------------------------------
# Parameters and FLOPs


def parameter_table(model: nn.Module) -> dict[str, tuple[int, float]]:
    """Return for each component (parameters, active parameters per byte): core layers count once,
    experts top-k."""
    table = {}
    for name, kind in kinds_of(model).items():
        size, share = model.get_parameter(name).numel(), 1.0
        if kind.read is Read.CHOSEN:
            share = model.config.n_experts_per_tok / model.config.n_routed_experts
        elif kind.component == ENGRAM_TABLES:
            share = 0.0  # only a few rows are read
        total, active = table.get(kind.component, (0, 0.0))
        table[kind.component] = (total + size, active + size * share)
    return table


def flops_per_byte(model: nn.Module, bytes_per_segment: float, n_loops: int, seq_len: int) -> float:
    """Count training FLOPs (forward and backward, no recomputation) per byte, causal attention
    included. Counts parameters by name, since FP8 conversion replaces Linears."""
    c, segments_per_byte = model.config, 1 / bytes_per_segment
    # multiply-adds of a forward pass: weights times their uses
    products = c.scores_core * model.lm_head.weight.numel()
    for name, kind in kinds_of(model).items():
        p = model.get_parameter(name)
        if p.ndim < 2 or kind.read is Read.LOOKUP:
            continue
        size = p.numel()
        if kind.read is Read.CHOSEN:
            size *= c.n_experts_per_tok / c.n_routed_experts
        if kind.read is Read.ONE_LOOP:
            size /= c.n_loops
        if kind.read is not Read.BYTE:
            size *= segments_per_byte * (1 if kind.read is Read.SEGMENT else n_loops)
        products += size
    window = min(c.byte_window or seq_len, seq_len)
    seen = window - window * window / (2 * seq_len)  # bytes, on average
    seen_by_core = n_loops * segments_per_byte**2 * seq_len / 2  # segments, per byte
    attention = (
        2
        * c.n_heads
        * c.v_head_dim
        * (seen * (c.n_prelude_layers + c.n_coda_layers) + c.n_recurrent_layers * seen_by_core)
    )
    return 6 * products + 3 * 2 * attention


# --------------------------------------------------------------------------------------------------
# Memory of a step


def attention_kept(c: SpiderConfig) -> int:
    """Count the numbers per row that attention saves for backward: low-rank projections and their
    norms, q, k, v and the result."""
    return 2 * (c.q_lora_rank + c.kv_lora_rank) + c.qk_rope_head_dim + 4 * c.n_heads * c.v_head_dim


def block_kept(c: SpiderConfig, size: int) -> float:
    """Count the bytes per row that a byte layer saves for backward: inputs and norms of attention
    and FFN, attention, gate, up and their product."""
    return size * (4 * c.hidden_size + attention_kept(c) + 4 * c.intermediate_size) + 4 * (
        c.n_heads + 4
    )


def visit_kept(c: SpiderConfig, size: int, has_engram: bool) -> float:
    """Count the bytes per segment that a core layer saves in one loop: like a byte layer, and
    routing, experts and Engram."""
    experts = (
        c.n_experts_per_tok
        * bool(c.n_routed_experts)
        * (c.hidden_size + 5 * c.moe_intermediate_size)
    )
    shared = 4 * c.n_shared_experts * c.moe_intermediate_size
    width = (4 + 2 * has_engram) * c.hidden_size
    return size * (width + attention_kept(c) + experts + shared) + 12 * c.n_routed_experts


def byte_rate_kept(c: SpiderConfig, size: int) -> tuple[float, float]:
    """Count the bytes per row that all other modules at byte rate save: Engram, boundaries, head,
    integers. Return the total, and the share of modules after the byte layers, which is freed
    before those run backward."""
    read = (len(c.engram_byte_orders) + c.match_contexts) * c.engram_byte_dim
    # before the head
    width = (len(c.engram_byte_orders) + c.matches_before_head) * c.engram_byte_dim
    head = (1 + c.scores_core) * (size * 2 * c.hidden_size + (8 + size) * c.vocab_size)
    votes = c.engram_votes * c.match_contexts  # ids as read and in order, int64, and weights
    head += (
        (18 + size) * votes
        + size * c.hidden_size * (votes > 0)
        + size * c.vocab_size * c.engram_logits
    )
    written = size * 2 * (width + c.hidden_size) * (width > 0)
    predictor = {"flexitokens": 8, "learned": 6 + size}.get(c.boundaries, 0) * bool(
        c.n_recurrent_layers
    )
    numbers = 8 * (c.longest_order + 6 + 3 * len(c.engram_byte_orders) + 4 * c.match_contexts)
    return size * read + predictor * c.hidden_size + written + head + numbers, written + head


def activations(
    c: SpiderConfig, n_loops: int, rows: int, seq_len: int, size: int, recompute: str, dropout: bool
) -> float:
    """Count the bytes of activations at the end of a forward pass, or in backward while the first
    checkpointed layer is recomputed. Dropout saves masks twice at byte rate and twice at segment
    rate."""
    layers, fixed = c.n_prelude_layers + c.n_coda_layers, byte_rate_kept(c, size)
    total, block = rows * (fixed[0] + 2 * dropout * c.hidden_size), rows * block_kept(c, size)
    if recompute == "all" and layers:
        total += rows * layers * size * c.hidden_size + max(0, block - rows * fixed[1])
    else:
        total += layers * block
    if not c.n_recurrent_layers:
        return total
    segments = round_up(max(1, math.ceil(rows / c.bytes_per_segment)), row_step(rows, seq_len))
    engrams = len(c.engram_layers)
    memory = len(c.engram_orders) * c.engram_heads * c.engram_dim
    latent = c.kv_lora_rank + c.qk_rope_head_dim
    visits = [visit_kept(c, size, i in c.engram_layers) for i in range(c.n_recurrent_layers)]
    if recompute == "nothing":
        kept = n_loops * sum(visits)
    else:  # of each visit: input, latents, convolved memory, choice of experts
        kept = n_loops * (
            c.n_recurrent_layers * (size * (c.hidden_size + latent) + 8 * c.n_experts_per_tok)
            + engrams * size * c.hidden_size
        )
        if not layers:
            kept += max(visits)
    kept += n_loops * c.hidden_size * 4 * size  # read-out, adapter and halting of each loop
    kept += engrams * size * (memory + 3 * c.hidden_size) + c.hidden_size * (
        (3 + c.segment_offsets) * size + 4 + 2 * dropout
    )
    return total + segments * kept


def state_size(model: nn.Module, optimizer: str) -> tuple[float, float, float]:
    """Return the bytes of all parameters, of the dense optimizer state, and of the state of Engram
    tables."""
    tables = [m for m in model.modules() if isinstance(m, EngramTable)]
    total = sum(p.numel() for p in model.parameters())
    dense = total - sum(m.weight.numel() for m in tables)
    matrices = sum(
        model.get_parameter(name).numel()
        for name, kind in kinds_of(model).items()
        if kind.optimizer == "muon"
    )
    state = {
        "adamw": 8 * dense,
        "adamw8bit": 2.05 * dense,
        "muon": 4 * matrices + 8 * (dense - matrices),
    }[optimizer]
    return 4 * total, state, 4 * sum(len(m.weight) for m in tables)


BATCHES, PADDING, FLASH_BACKWARD = (
    "batches",
    "padding of documents (at most)",
    "attention's backward pass",
)
# bytes: oneDNN caches 1,024 kernels twice, one per size of a product (in Muon also per learning
# rate); includes malloc's fragmentation
ONEDNN_CACHE = 1e9


def estimate_memory(model: nn.Module, plan, recompute: str, world: World) -> dict[str, float]:
    """Estimate the peak bytes of a rank by purpose in a step with `recompute` checkpointed; on a
    CPU with those of the rest of the process.

    Without a variable-length attention kernel (on a CPU, and in fp32) documents are padded to at
    most twice their rows. The padding depends on the data; its upper bound is a separate entry."""
    c, n_loops = plan.config, plan.flags.n_loops
    size = 4 if plan.flags.precision == "fp32" else 2
    tables = {name: m for name, m in model.named_modules() if isinstance(m, EngramTable)}
    total = sum(p.numel() for p in model.parameters())
    dense = total - sum(m.weight.numel() for m in tables.values())
    _, state, sums = state_size(model, plan.flags.optimizer)
    rows = plan.flags.micro_batch * plan.flags.seq_len
    kept = activations(
        c, n_loops, rows, plan.flags.seq_len, size, recompute, plan.flags.dropout > 0
    )
    casts = dense * size if size < 4 else 0
    if (
        plan.flags.precision == "fp8"
    ):  # one byte per converted weight; gate and up go to fp32 and back
        casts -= sum(m.weight.numel() for name, m in model.named_modules() if takes_fp8(m, name))
        kept += rows * 12 * c.intermediate_size
    flash = 0.0  # whose other memory is among the activations
    if size == 2 and world.device.type == "cuda":
        # FlashAttention 2 sums the gradient of q in fp32, 128 rows more for each document (dq_accum
        # in flash_api.cpp)
        documents = plan.flags.micro_batch + rows * plan.documents_per_byte
        flash = 4 * (rows + 128 * documents) * c.n_heads * round_up(c.v_head_dim, 32)
    filled = 0.0
    if size == 4 or world.device.type == "cpu":
        # held at once
        byte_passes = 2 if recompute == "all" else c.n_prelude_layers + c.n_coda_layers
        core_passes = c.n_recurrent_layers * n_loops if recompute == "nothing" else 2
        for passes, width, window in (
            (byte_passes, 1, 2 * c.byte_window),
            (core_passes, c.bytes_per_segment, 0),
        ):
            # Of a row, `width` bytes: scores that products of bf16 keep, and copies of each head's
            # numbers. A window stores every block twice, and recomputation adds their gradients.
            scores = (
                0 if size == 4 else 2 * c.n_heads * min(window or 2048, plan.flags.seq_len / width)
            )
            copies = (12 if window else 5) * c.n_heads * c.v_head_dim
            filled += passes * rows / width * (copies + scores) * size
    gathered = 0.0
    for name, table in tables.items():
        # see EngramTable.gather: row, gradient and its square of each lookup
        lookups = (
            table.prime.numel() * rows / (c.bytes_per_segment if name.startswith("core") else 1)
        )
        rows_held = min(plan.flags.grad_accum * lookups, 1.5 * len(table.weight) + lookups)
        gathered += rows_held * (4 * table.weight.shape[1] + 12)
    # with one micro-step, gradients replace activations; with several, they exist before
    gradients = 4 * dense if plan.flags.grad_accum > 1 else max(0.0, 4 * dense - kept)
    # ids and labels, int64, of this step and the next one (data.Feed)
    batches = 2 * 2 * 8 * rows * plan.flags.grad_accum
    memory = {
        "parameters": 4 * total,
        "gradients": gradients,
        "gradients of tables": gathered,
        "optimizer": state + sums,
        "cast weights": casts,
        "activations": kept,
        BATCHES: batches,
        PADDING: filled,
        FLASH_BACKWARD: flash,
    }
    if world.ranks > 1:  # see shard_model; tables and their summed gradients are not sharded
        whole, shards = plan.flags.grad_accum > 1 or world.shards == 1, world.shards
        of_core = sum(p.numel() for name, p in model.named_parameters() if name.startswith("core."))
        memory |= {
            "parameters": 4 * (total - dense) + 4 * dense / shards,
            "optimizer": state / shards + sums,
            "gradients of tables": 4 * (total - dense),
            "gradients": 4 * dense / (1 if plan.flags.grad_accum > 1 else shards),
            "gathered weights": 4 * (dense if whole else of_core),
        }
    if world.device.type == "cpu":
        memory |= {
            "process at start": process_memory("VmRSS"),
            "checkpoint copy": plan.checkpoint_size / world.local_ranks,
            "oneDNN kernels (at most)": ONEDNN_CACHE * multiplies_bf16(world.device),
        }
    return memory


# of the memory; the rest is for the context, fragmentation, and an error of up to a tenth
# (tests/rehearsal/test_costs.py)
FITS = 0.85


def choose_memory(
    splits: int, asked: str, estimate: Callable, available: float
) -> tuple[int, str, dict[str, float]]:
    """Choose one of several splits of a step into micro-steps, by number, and what to recompute:
    for `auto` the least with which a split fits into `available` bytes, and then the first such
    split. If nothing fits, the last of all. Return them with their memory by `estimate(split,
    recompute)`."""
    for recompute in RECOMPUTE if asked == "auto" else (asked,):
        for i in range(splits):
            memory = estimate(i, recompute)
            if sum(memory.values()) <= FITS * available:
                return i, recompute, memory
    return i, recompute, memory


def describe_memory(memory: dict[str, float], available: float) -> str:
    """Describe the memory of a run by purpose, and whether it fits into `available` bytes."""
    needed = sum(memory.values())
    verdict = "NOT ENOUGH" if needed > available else "enough"
    return f"memory: about {needed / 1e9:.3g} GB of {available / 1e9:.3g}, {verdict}: " + ", ".join(
        f"{name} {size / 1e9:.2f}" for name, size in memory.items() if size >= 5e6
    )


def check_memory(memory: dict[str, float], world: World):
    """Raise TooLarge if a local rank surely needs more memory than there is: for its batches alone,
    or on a CPU, where the kernel would kill the run without a message, for all but what depends on
    the documents."""
    available = memory_of(world.device, world.local_ranks)
    needed = memory[BATCHES]
    limit = available
    if world.device.type == "cpu":
        needed = sum(memory.values()) - memory[PADDING]
        limit = 1.25 * available
    if needed <= limit:
        return
    there = f"but this machine has {available * world.local_ranks / 1e9:.3g} GB"
    if memory[BATCHES] > needed / 2:
        raise TooLarge(
            f"--grad_accum: the batches of a step and the next one take "
            f"{memory[BATCHES] * world.local_ranks / 1e9:.3g} GB, {there}: lower it, or "
            f"--micro_batch or "
            f"--seq_len"
        )
    raise TooLarge(
        f"--micro_batch: the run needs at least {needed * world.local_ranks / 1e9:.3g} GB, "
        f"{there}: lower "
        f"it and raise --grad_accum instead, or choose a smaller --seq_len or --model"
    )


# --------------------------------------------------------------------------------------------------
# The dry run

TOO_LONG = 30.0  # seconds: a step that takes longer even at the peak rate is not timed


def obstacle_to_timing(plan, world: World, bound: float) -> str | None:
    """Return why the dry run times no step, or None. bound: bytes/s that matrix products alone
    allow."""
    if world.ranks > 1:
        return "there are several ranks"
    if plan.flags.compile != "off":
        return "compiling the layers takes minutes"
    if sum(plan.memory.values()) > free_memory(world.device):
        return "there is too little memory"
    if plan.step_bytes > TOO_LONG * bound:
        return "a step takes too long"
    return None


def describe_duration(seconds: float) -> str:
    """Format a duration for people."""
    for unit, length in (
        ("years", 365.25 * 86400),
        ("days", 86400),
        ("hours", 3600),
        ("minutes", 60),
        ("seconds", 1),
    ):
        if seconds >= 2 * length or unit == "seconds":
            count = seconds / length
            return f"{count:,.0f} {unit}" if count >= 10 else f"{count:.1f} {unit}"


def print_memory_and_disk(plan, available: float) -> list[str]:
    """Print the estimates of memory and disk; return which of the two do not suffice. available:
    bytes of memory."""
    directory, keep = Path(plan.flags.ckpt_dir), plan.flags.keep_last + plan.flags.keep_best
    existing = next(
        path for path in (directory.absolute(), *directory.absolute().parents) if path.is_dir()
    )
    free = shutil.disk_usage(existing).free
    kept = min(keep, len(checkpoint_paths(directory)))
    print(describe_memory(plan.memory, available))
    print(
        f"disk: {free / 1e9:.1f} GB free for {keep + 1} checkpoints of "
        f"{plan.checkpoint_size / 1e9:.2f} GB, {kept} "
        f"of which exist",
        flush=True,
    )
    lacking = []
    if sum(plan.memory.values()) > available:
        lacking.append("memory")
    if (keep + 1 - kept) * plan.checkpoint_size > free:
        lacking.append("disk")
    return lacking


def print_tables(plan, model: nn.Module):
    """Print parameters by component, FLOPs per byte, configuration and flags; the model may be on
    the meta device."""
    table = parameter_table(model)
    total, active = (sum(column) for column in zip(*table.values(), strict=True))
    print(f"{'parameters by component':36}{'parameters':>14}{'share':>8}{'active per byte':>18}")
    for component, (count, used) in sorted(table.items(), key=lambda item: -item[1][0]):
        print(f"  {component:34}{count:14,}{count / total:8.1%}{used:18,.0f}")
    print(f"  {'total':34}{total:14,}{1:8.0%}{active:18,.0f}")
    costs = {
        length: flops_per_byte(model, length, plan.flags.n_loops, plan.flags.seq_len)
        for length in (1, plan.config.bytes_per_segment, 8)
    }
    print(
        "\ntraining FLOPs per byte, "
        + ", ".join(
            f"{cost / 1e9:.3g} G at {length:.2g} bytes per segment"
            for length, cost in costs.items()
        )
    )
    for title, values in (("configuration", vars(plan.config)), ("flags", vars(plan.flags))):
        print(title)
        for name, value in values.items():
            print(f"  {name} = {value!r}")
