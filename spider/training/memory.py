"""Estimate the memory of a training step by purpose, and choose what is recomputed so that it fits.

Memory is counted, not tried: what each part of the model keeps for its backward pass. docs/results/performance.md
holds it against what a rehearsed step has alive (spider/dev/rehearsal.py): they agree within 10%. What a process takes
beside its tensors is added where they share the machine's memory. The rate comes from train.time_steps. """

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
    """Return the numbers per row that attention keeps for its backward pass: low ranks and their norms, q, k, v and the
    result."""
    return 2 * (c.q_lora_rank + c.kv_lora_rank) + c.qk_rope_head_dim + 4 * c.n_heads * c.v_head_dim


def block_kept(c: SpiderConfig, size: int) -> float:
    """Return the bytes per row that a byte layer keeps: input and norm of both parts, attention, and gate, up, their
    product."""
    return size * (4 * c.hidden_size + attention_kept(c) + 4 * c.intermediate_size) + 4 * (c.n_heads + 4)


def visit_kept(c: SpiderConfig, size: int, has_engram: bool) -> float:
    """Return the bytes per segment that a core layer keeps in a loop: as a byte layer, the router's choice, experts,
    memory."""
    experts = c.n_experts_per_tok * bool(c.n_routed_experts) * (c.hidden_size + 5 * c.moe_intermediate_size)
    shared = 4 * c.n_shared_experts * c.moe_intermediate_size
    width = (4 + 2 * has_engram) * c.hidden_size
    return size * (width + attention_kept(c) + experts + shared) + 12 * c.n_routed_experts


def byte_rate_kept(c: SpiderConfig, size: int) -> tuple[float, float]:
    """Return the bytes per row that the rest at byte rate keeps: byte memories, boundaries, head, whole numbers; and of
    it what stands behind the byte layers, which is gone when they go backward."""
    width = (len(c.engram_byte_orders) + c.match_contexts) * c.engram_byte_dim
    head = (1 + c.scores_core) * (size * 2 * c.hidden_size + (8 + size) * c.vocab_size)
    written = size * 2 * (width + c.hidden_size) * (width > 0)
    boundaries = 8 * c.hidden_size if c.boundaries == "learned" and c.n_recurrent_layers else 0
    numbers = 8 * (c.longest_order + 6 + 3 * len(c.engram_byte_orders) + 4 * c.match_contexts)
    return size * width + boundaries + written + head + numbers, written + head


def activations(c: SpiderConfig, n_loops: int, rows: int, seq_len: int, size: int, recompute: str, rate: float,
                dropout: bool) -> float:
    """Return the bytes alive when a forward pass has ended, or as the first layer that is recomputed goes backward, of
    segments of `rate` bytes; dropout keeps which numbers it dropped, at two places of bytes and two of segments."""
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
    """Return the bytes by purpose that tensors take at once in a step of one rank, if `recompute` is what is
    recomputed.

    Where attention has no kernel for documents (on a CPU, and in fp32), they are filled up to at most twice their rows:
    how far is up to the data, so the bound is counted, apart."""
    c, batch, n_loops, rate = plan.config, plan.batch, plan.n_loops, plan.bytes_per_segment
    precision, size = plan.machine.precision, 4 if plan.machine.precision == "fp32" else 2
    tables = {name: m for name, m in model.named_modules() if isinstance(m, EngramTable)}
    total = sum(p.numel() for p in model.parameters())
    dense = total - sum(m.weight.numel() for m in tables.values())
    _, state, sums = state_size(model, plan.optimizer.optimizer)
    rows = batch.micro_batch * batch.seq_len
    kept = activations(c, n_loops, rows, batch.seq_len, size, recompute, rate, plan.schedule.dropout > 0)
    casts = dense * size if size < 4 else 0
    if precision == "fp8":                # a byte each of what it converts; and numbers of gate and up in fp32 and back
        casts -= sum(m.weight.numel() for name, m in model.named_modules() if takes_fp8(m, name))
        kept += rows * 12 * c.intermediate_size
    filled = 0.0
    if size == 4 or device.type == "cpu":
        visits, layers = c.n_recurrent_layers * n_loops, c.n_prelude_layers + c.n_coda_layers
        for count, part in ((2 if recompute == "all" else layers, 1), (visits if recompute == "nothing" else 2, rate)):
            window = 2 * c.byte_window if part == 1 else 0
            scores = 0 if size == 4 else 2 * c.n_heads * min(window or 2048, batch.seq_len / part)
            copies = 12 if window else 5  # of a head's numbers: under a window every block lies there twice; where it
                                          # is recomputed, gradients of them lie beside them
            filled += count * rows / part * (copies * c.n_heads * c.v_head_dim + scores) * size
    gathered = 0.0
    for name, table in tables.items():    # see EngramTable.gather: row, gradient and its square of each lookup
        lookups = table.prime.numel() * rows / (rate if name.startswith("core") else 1)
        rows_held = min(batch.grad_accum * lookups, 1.5 * len(table.weight) + lookups)
        gathered += rows_held * (4 * table.weight.shape[1] + 12)
    # of one micro-step gradients come as activations go; of several they are there before
    gradients = 4 * dense if batch.grad_accum > 1 else max(0.0, 4 * dense - kept)
    memory = {"parameters": 4 * total, "gradients": gradients, "gathered for tables": gathered,
              "optimizer": state + sums, "weights cast": casts, "activations": kept,
              "documents filled up, at most": filled}
    if world is not None and world.ranks > 1:  # see shard_model; tables, and their gradients' sums, are whole
        whole, shards = batch.grad_accum > 1 or world.shards == 1, world.shards
        memory |= {"parameters": 4 * (total - dense) + 4 * dense / shards, "optimizer": state / shards + sums,
                   "gathered for tables": 4 * (total - dense),
                   "gradients": 4 * dense / (1 if batch.grad_accum > 1 else shards),
                   "weights gathered": 4 * (dense if whole else sum(
                       p.numel() for n, p in model.named_parameters() if n.startswith("core.")))}
    return memory


KERNELS = 1e9                             # bytes: oneDNN keeps 1,024 kernels twice, one for each size of a product, and
                                          # for each learning rate in Muon's; with the holes that malloc leaves between


def memory_beside_tensors(plan: Plan, device: torch.device, world: World) -> dict[str, float]:
    """Return the bytes by purpose that a rank takes of the device's memory beside a step's tensors."""
    if device.type != "cpu":
        return {}
    return {"process before the first step": process_memory("VmRSS"),
            "copy for checkpoints": plan.checkpoint_size / world.local_ranks,
            "kernels of products, at most": KERNELS * multiplies_bf16(device)}


FITS = 0.9                                # of the memory: the rest is for the context, and for holes between tensors


def choose_recompute(asked: str, estimate, there: float) -> tuple[str, dict[str, float]]:
    """Choose what is recomputed; return it and its memory: what is asked for; for `auto` the least that fits into
    `there` bytes by `estimate`, or all where nothing does."""
    for recompute in RECOMPUTE if asked == "auto" else (asked,):
        memory = estimate(recompute)
        if sum(memory.values()) <= FITS * there:
            break
    return recompute, memory


def describe_memory(memory: dict[str, float], there: float) -> str:
    """Describe in one line what a run takes of `there` bytes, and for what."""
    needed = sum(memory.values())
    verdict = "NOT ENOUGH" if needed > there else "enough"
    return (f"memory: about {needed / 1e9:.3g} GB of {there / 1e9:.3g}, {verdict}: "
            + ", ".join(f"{name} {size / 1e9:.2f}" for name, size in memory.items() if size >= 5e6))


def check_memory(needed: float, device: torch.device, world: World):
    """Raise TooLarge where a CPU's memory is sure not to suffice for `needed` bytes by each rank that is here: the
    kernel would kill the run without a word."""
    if device.type == "cpu" and needed > 1.25 * memory_of(device, world.local_ranks):
        raise TooLarge(f"--micro_batch: a run takes about {needed * world.local_ranks / 1e9:.0f} GB, this machine has "
                       f"{memory_of(device) / 1e9:.0f}: lower it, and raise --grad_accum as much; or lower --seq_len "
                       f"or --model")


def checkpoint_size(model: nn.Module, optimizer: str) -> float:
    """Return the bytes of a checkpoint."""
    return sum(state_size(model, optimizer))
