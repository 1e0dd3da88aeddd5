"""Estimate the memory of a training step by purpose, and choose activation checkpointing so that the step fits.

The estimate counts what each module saves for its backward pass. It agrees within 10% with a step on fake tensors
(spider/dev/rehearsal.py, docs/results/performance.md). On a CPU the rest of the process is added.
"""

import math

import torch
from torch import nn

from spider.errors import TooLarge
from spider.model.config import RECOMPUTE, SpiderConfig
from spider.model.engram_table import EngramTable
from spider.model.packing import round_up
from spider.model.parameters import matrices_of, takes_fp8
from spider.training.machine import memory_of, multiplies_bf16, process_memory
from spider.training.plan import Plan
from spider.training.ranks import World


def attention_kept(c: SpiderConfig) -> int:
    """Count the numbers per row that attention saves for backward: low-rank projections and their norms, q, k, v and
    the result."""
    return 2 * (c.q_lora_rank + c.kv_lora_rank) + c.qk_rope_head_dim + 4 * c.n_heads * c.v_head_dim


def block_kept(c: SpiderConfig, size: int) -> float:
    """Count the bytes per row that a byte layer saves for backward: inputs and norms of attention and FFN, attention,
    gate, up and their product."""
    return size * (4 * c.hidden_size + attention_kept(c) + 4 * c.intermediate_size) + 4 * (c.n_heads + 4)


def visit_kept(c: SpiderConfig, size: int, has_engram: bool) -> float:
    """Count the bytes per segment that a core layer saves in one loop: like a byte layer, and routing, experts and
    Engram."""
    experts = c.n_experts_per_tok * bool(c.n_routed_experts) * (c.hidden_size + 5 * c.moe_intermediate_size)
    shared = 4 * c.n_shared_experts * c.moe_intermediate_size
    width = (4 + 2 * has_engram) * c.hidden_size
    return size * (width + attention_kept(c) + experts + shared) + 12 * c.n_routed_experts


def byte_rate_kept(c: SpiderConfig, size: int) -> tuple[float, float]:
    """Count the bytes per row that all other modules at byte rate save: Engram, boundaries, head, integers. Return the
    total, and the share of modules after the byte layers, which is freed before those run backward."""
    read = (len(c.engram_byte_orders) + c.match_contexts) * c.engram_byte_dim
    width = (len(c.engram_byte_orders) + c.matches_before_head) * c.engram_byte_dim          # before the head
    head = (1 + c.scores_core) * (size * 2 * c.hidden_size + (8 + size) * c.vocab_size)
    votes = c.engram_votes * c.match_contexts  # ids as read and in order, int64, and weights
    head += (18 + size) * votes + size * c.hidden_size * (votes > 0) + size * c.vocab_size * c.engram_logits
    written = size * 2 * (width + c.hidden_size) * (width > 0)
    predictor = {"flexitokens": 8, "learned": 6 + size}.get(c.boundaries, 0) * bool(c.n_recurrent_layers)
    numbers = 8 * (c.longest_order + 6 + 3 * len(c.engram_byte_orders) + 4 * c.match_contexts)
    return size * read + predictor * c.hidden_size + written + head + numbers, written + head


def activations(c: SpiderConfig, n_loops: int, rows: int, seq_len: int, size: int, recompute: str, rate: float,
                dropout: bool) -> float:
    """Count the bytes of activations at the end of a forward pass, or in backward while the first checkpointed layer is
    recomputed; segments have `rate` bytes. Dropout saves masks twice at byte rate and twice at segment rate."""
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
    else:                                 # of each visit: input, latents, convolved memory, choice of experts
        kept = n_loops * (c.n_recurrent_layers * (size * (c.hidden_size + latent) + 8 * c.n_experts_per_tok)
                          + engrams * size * c.hidden_size)
        if not layers:
            kept += max(visits)
    kept += n_loops * c.hidden_size * 4 * size  # read-out, adapter and halting of each loop
    kept += engrams * size * (memory + 3 * c.hidden_size) + c.hidden_size * (
        (3 + c.places) * size + 4 + 2 * dropout)
    return total + segments * kept


def state_size(model: nn.Module, optimizer: str) -> tuple[float, float, float]:
    """Return the bytes of all parameters, of the dense optimizer state, and of the state of Engram tables."""
    tables = [m for m in model.modules() if isinstance(m, EngramTable)]
    total = sum(p.numel() for p in model.parameters())
    dense = total - sum(m.weight.numel() for m in tables)
    matrices = sum(model.get_parameter(name).numel() for name in matrices_of(model))
    state = {"adamw": 8 * dense, "adamw8bit": 2.05 * dense, "muon": 4 * matrices + 8 * (dense - matrices)}[optimizer]
    return 4 * total, state, 4 * sum(len(m.weight) for m in tables)


def estimate_memory(model: nn.Module, plan: Plan, device: torch.device, recompute: str,
                    world: World | None = None) -> dict[str, float]:
    """Estimate the peak bytes of tensors by purpose in a step of one rank, with `recompute` checkpointed.

    Without a variable-length attention kernel (on a CPU, and in fp32) documents are padded to at most twice their rows.
    The padding depends on the data; its upper bound is a separate entry."""
    c, batch, n_loops, rate = plan.config, plan.batch, plan.n_loops, plan.bytes_per_segment
    precision, size = plan.machine.precision, 4 if plan.machine.precision == "fp32" else 2
    tables = {name: m for name, m in model.named_modules() if isinstance(m, EngramTable)}
    total = sum(p.numel() for p in model.parameters())
    dense = total - sum(m.weight.numel() for m in tables.values())
    _, state, sums = state_size(model, plan.optimizer.optimizer)
    rows = batch.micro_batch * batch.seq_len
    kept = activations(c, n_loops, rows, batch.seq_len, size, recompute, rate, plan.schedule.dropout > 0)
    casts = dense * size if size < 4 else 0
    if precision == "fp8":                # one byte per converted weight; gate and up go to fp32 and back
        casts -= sum(m.weight.numel() for name, m in model.named_modules() if takes_fp8(m, name))
        kept += rows * 12 * c.intermediate_size
    filled = 0.0
    if size == 4 or device.type == "cpu":
        visits, layers = c.n_recurrent_layers * n_loops, c.n_prelude_layers + c.n_coda_layers
        for count, part in ((2 if recompute == "all" else layers, 1), (visits if recompute == "nothing" else 2, rate)):
            window = 2 * c.byte_window if part == 1 else 0
            scores = 0 if size == 4 else 2 * c.n_heads * min(window or 2048, batch.seq_len / part)
            copies = 12 if window else 5  # of a head's numbers: a window stores every block twice, and recomputation
                                          # adds their gradients
            filled += count * rows / part * (copies * c.n_heads * c.v_head_dim + scores) * size
    gathered = 0.0
    for name, table in tables.items():    # see EngramTable.gather: row, gradient and its square of each lookup
        lookups = table.prime.numel() * rows / (rate if name.startswith("core") else 1)
        rows_held = min(batch.grad_accum * lookups, 1.5 * len(table.weight) + lookups)
        gathered += rows_held * (4 * table.weight.shape[1] + 12)
    # with one micro-step, gradients replace activations; with several, they exist before
    gradients = 4 * dense if batch.grad_accum > 1 else max(0.0, 4 * dense - kept)
    memory = {"parameters": 4 * total, "gradients": gradients, "gradients of tables": gathered,
              "optimizer": state + sums, "cast weights": casts, "activations": kept,
              "padding of documents (at most)": filled}
    if world is not None and world.ranks > 1:  # see shard_model; tables and their summed gradients are not sharded
        whole, shards = batch.grad_accum > 1 or world.shards == 1, world.shards
        memory |= {"parameters": 4 * (total - dense) + 4 * dense / shards, "optimizer": state / shards + sums,
                   "gradients of tables": 4 * (total - dense),
                   "gradients": 4 * dense / (1 if batch.grad_accum > 1 else shards),
                   "gathered weights": 4 * (dense if whole else sum(
                       p.numel() for n, p in model.named_parameters() if n.startswith("core.")))}
    return memory


KERNELS = 1e9                             # bytes: oneDNN caches 1,024 kernels twice, one per size of a product (in Muon
                                          # also per learning rate); includes malloc's fragmentation


def memory_beside_tensors(plan: Plan, device: torch.device, world: World) -> dict[str, float]:
    """Return the bytes by purpose that a rank takes of the device's memory in addition to a step's tensors."""
    if device.type != "cpu":
        return {}
    return {"process at start": process_memory("VmRSS"),
            "checkpoint copy": plan.checkpoint_size / world.local_ranks,
            "oneDNN kernels (at most)": KERNELS * multiplies_bf16(device)}


FITS = 0.9                                # of the memory; the rest is for the context and fragmentation


def choose_recompute(asked: str, estimate, there: float) -> tuple[str, dict[str, float]]:
    """Choose what to recompute, and return it with its memory by `estimate`: for `auto` the least that fits into
    `there` bytes, or all if nothing fits."""
    for recompute in RECOMPUTE if asked == "auto" else (asked,):
        memory = estimate(recompute)
        if sum(memory.values()) <= FITS * there:
            break
    return recompute, memory


def describe_memory(memory: dict[str, float], there: float) -> str:
    """Describe the memory of a run by purpose, and whether it fits into `there` bytes."""
    needed = sum(memory.values())
    verdict = "NOT ENOUGH" if needed > there else "enough"
    return (f"memory: about {needed / 1e9:.3g} GB of {there / 1e9:.3g}, {verdict}: "
            + ", ".join(f"{name} {size / 1e9:.2f}" for name, size in memory.items() if size >= 5e6))


def check_memory(needed: float, device: torch.device, world: World):
    """Raise TooLarge if `needed` bytes for each local rank surely exceed the memory of a CPU, since the kernel would
    kill the run without a message."""
    if device.type == "cpu" and needed > 1.25 * memory_of(device, world.local_ranks):
        raise TooLarge(f"--micro_batch: the run needs about {needed * world.local_ranks / 1e9:.0f} GB, but this "
                       f"machine has {memory_of(device) / 1e9:.0f} GB: lower it and raise --grad_accum instead, or "
                       f"choose a smaller --seq_len or --model")


def checkpoint_size(model: nn.Module, optimizer: str) -> float:
    """Return the bytes of a checkpoint."""
    return sum(state_size(model, optimizer))
