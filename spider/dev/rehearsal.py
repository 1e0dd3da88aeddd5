"""Estimate a training step on a GPU without having one: count kernels, memory traffic, FLOPs and peak memory.

    python bench.py --rehearse h200                                            # the table; minutes, no GPU
    python bench.py --rehearse h200 --flags="--precision fp8 --grad_accum 4"   # one setting, by train.py's flags

This runs train.py's own step on torch's fake tensors, which have a device, a shape and strides but no memory: every
operation passes the checks of a CUDA build, but nothing is computed. Each operation is counted: kernels, FLOPs (torch's
formulas), bytes. MemTracker of torch.distributed tracks live memory. If the host reads a value from the device, it gets
the number of segments by the config. Times are lower bounds, from the card's rates and FLOOR per kernel."""

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import nn
from torch.distributed._tools.common_utils import get_untyped_storages
from torch.distributed._tools.mem_tracker import MemTracker

from spider.dev.absent_gpu import Card, build, fake_batch, fake_tensors, settle, stand_in
from spider.dev.operations import LAUNCH, Operation, Trace, fused_seconds, tensors
from spider.training.memory import estimate_memory
from spider.training.plan import Plan
from spider.training.sharding import Unsharded


@dataclass
class Step:
    """A rehearsed step: its operations and its memory."""
    plan: Plan
    operations: list[Operation]
    peak: float                           # bytes of live tensors
    estimate: float                       # the same by memory.estimate_memory
    memory: dict[str, float]              # bytes by kind at the peak
    waits: int                            # host synchronizations


class Alone(Unsharded):
    """Mark the backward passes of an unsharded model in a trace."""

    def __init__(self, trace: Trace, tracker: MemTracker):
        self.trace, self.tracker, self.casts = trace, tracker, 0

    def backward(self, model, loss, last):
        casts = [t for module in model.modules() for t in tensors(getattr(module, "cast", None))]
        self.casts = sum({s: s.nbytes() for t in casts for s in get_untyped_storages(t)}.values())
        self.trace.phase = "backward"
        super().backward(model, loss, last)
        self.trace.phase = "rest"
        self.tracker.reset_mod_stats()    # they only support one pass


def fill_state(optimizers):
    """Create the optimizers' state by a step."""
    for p in optimizers.dense:
        p.grad = torch.empty_like(p)
    for table in optimizers.tables:
        device = table.weight.device
        table.gather(torch.zeros(1, dtype=torch.int64, device=device), table.weight.new_zeros(1, table.weight.shape[1]))
    optimizers.step()
    optimizers.zero_grad()


def rehearse(card: Card, flags: list[str], trainer: ModuleType) -> Step:
    """Run one optimizer step with train.py's flags on fake tensors."""
    device = torch.device("cuda")
    torch.set_float32_matmul_precision("high")
    with stand_in(card):
        plan = settle(trainer, flags)
        with fake_tensors():
            model, optimizers = build(trainer, plan)
            fill_state(optimizers)
            estimate = sum(estimate_memory(model, plan, device, plan.machine.recompute).values())
            batch = fake_batch(plan, plan.batch.micro_batch)
            trace, tracker = Trace(int(batch.real / plan.config.bytes_per_segment)), MemTracker()
            tracker.track_external(model, *optimizers.by_name.values(), batch.ids, batch.labels, batch.cu_seqlens)
            model.sharding = sharding = Alone(trace, tracker)
            with marked(model, optimizers, trace), tracker, trace:
                trace.phase = "cast"
                trainer.step_alone(model, optimizers, [batch] * plan.batch.grad_accum, plan.n_loops,
                                   plan.optimizer.grad_clip)
            memory = {getattr(kind, "value", kind): size
                      for kind, size in tracker.get_tracker_snapshot("peak")[torch.device("cuda", 0)].items()}
            del model, optimizers, batch
    return Step(plan, trace.operations, memory.pop("Total"), estimate, kinds(memory, sharding.casts), trace.waits)


def kinds(memory: dict[str, float], casts: float) -> dict[str, float]:
    """Name MemTracker's kinds of memory, without empty ones; it counts `casts`, the cast weights, as activations."""
    casts = min(casts, memory["Activation"])
    named = {"activations": memory["Activation"] - casts, "parameters": memory["Parameter"],
             "optimizer": memory["Optstate"], "gradients": memory["Gradient"], "cast weights": casts,
             "temporaries, gradients of tables": memory["Temp"], "the rest": memory["Buffer"] + memory["Other"]}
    return {kind: size for kind, size in named.items() if size > 5e6}


@contextmanager
def marked(model, optimizers, trace: Trace):
    """Record the current phase and module in the trace."""
    names = {module: name for name, module in model.named_modules()}

    def enter(module, _):
        if module is model:
            trace.phase = "forward"
        elif module in names:
            trace.stack.append(names[module])

    def leave(module, *_):
        if module is not model and module in names:
            trace.stack.pop()

    def step(original=optimizers.step):
        trace.phase = "optimizer"
        original()
        trace.phase = "rest"
    optimizers.step = step
    handles = [nn.modules.module.register_module_forward_pre_hook(enter),
               nn.modules.module.register_module_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# ---------------------------------------------------------------------------------------------------------------------
# Tables


def summary(card: Card, step: Step) -> dict:
    """Return a step's figures as plain values: totals, and the largest operations and modules."""
    def largest(key, count):
        seconds, kernels, moved, sums = Counter(), Counter(), Counter(), []
        for operation in step.operations:
            which = key(operation)
            seconds[which] += operation.seconds(card)
            kernels[which] += operation.kernels
            moved[which] += operation.moved
        for which, spent in seconds.most_common(count):
            sums.append((*which, spent, kernels[which], moved[which]))
        return sums
    seconds = sum(o.seconds(card) for o in step.operations)
    update = sum(o.kernels for o in step.operations if o.phase in ("cast", "optimizer", "rest"))
    kernels = sum(o.kernels for o in step.operations)
    return dict(
        bytes=step.plan.batch.bytes, precision=step.plan.machine.precision,
        kernels=kernels, kernels_of_a_micro_step=(kernels - update) // step.plan.batch.grad_accum,
        kernels_of_the_update=update, seconds=seconds, fused=fused_seconds(step.operations, card),
        flops=sum(o.flops for o in step.operations),
        peak=step.peak, estimate=step.estimate, recompute=step.plan.machine.recompute, memory=step.memory,
        waits=step.waits, by_rate=largest(lambda o: (o.rate,), 5),
        by_phase=largest(lambda o: (o.phase,), 9), by_module=largest(lambda o: (o.module, o.phase), 16),
        by_operation=largest(lambda o: (o.name,), 16), by_shape=largest(lambda o: (o.name, o.phase, o.shapes), 16))


LONG = dict(seq_len=2048, micro_batch=64)
SETTINGS = {                              # rows of the table, as train.py's flags; 112 x 256 by default
    "bf16": dict(precision="bf16", recompute="core"),
    "bf16, 4 micro-steps": dict(precision="bf16", recompute="core", grad_accum=4),
    "fp8": dict(precision="fp8", recompute="core"),
    "bf16, nothing recomputed": dict(precision="bf16", recompute="nothing"),
    "bf16, all recomputed": dict(precision="bf16", recompute="all"),
    "bf16, 64 x 2048": dict(precision="bf16", recompute="core", **LONG),
    "fp8, 64 x 2048": dict(precision="fp8", recompute="core", **LONG),
}

# The layers and loops of 1b at minimal sizes, so that a step's time is that of the host.
HOST_SIZES = ("hidden_size=32,n_heads=2,q_lora_rank=16,kv_lora_rank=16,qk_nope_head_dim=8,qk_rope_head_dim=8,"
              "v_head_dim=16,intermediate_size=32,n_routed_experts=2,moe_intermediate_size=16,engram_rows=300,"
              "engram_dim=8,engram_byte_rows=300,engram_byte_dim=8")
BLIND ="""
Not modeled: the inside of kernels (partial tiles, bank conflicts, caches); fragmentation of the allocator, and the CUDA
context (about 0.5 GB); pinned copies; torch.compile (`ideally fused` is a lower bound, with all elementwise operations
between two products in one kernel); documents shorter than a sequence, unbalanced experts, segments that halt early;
clocks, power, other ranks. The number of kernels per operation is assumed (spider/dev/operations.py). Times are lower
bounds."""


MISS = 1.5                                # ratio to its bound from which a figure is listed


def against_bounds(measured: list[dict], found: dict[str, dict]) -> tuple[list[dict], list[dict]]:
    """Return rows of measured and rehearsed figures, and those that exceed theirs by more than MISS, worst first.
    measured: rows with `step` and some of `ms`, `peak GB`, `kernels`, `host, ms`; the bound of the last is the GPU's
    time."""
    rows = []
    for row in measured:
        if (one := found.get(row["step"])) is None:
            continue
        bounds = {"ms": one["seconds"] * 1e3, "peak GB": one["peak"] / 1e9, "kernels": one["kernels"],
                  "host, ms": one["seconds"] * 1e3}
        rows += [{"step": row["step"], "figure": figure, "measured": row[figure], "rehearsed": bound,
                  "times": row[figure] / bound}
                 for figure, bound in bounds.items() if isinstance(row.get(figure), (int, float))]
    return rows, sorted((row for row in rows if row["times"] > MISS), key=lambda row: -row["times"])


def row_of(card: Card, name: str, found: dict) -> dict:
    """Return a row of the table."""
    return {"step": name, "kernels": found["kernels"], "of a micro-step": found["kernels_of_a_micro_step"],
            "of the update": found["kernels_of_the_update"], "GPU, ms": found["seconds"] * 1e3,
            "bytes/s": found["bytes"] / found["seconds"], "ideally fused, ms": found["fused"] * 1e3,
            "bytes/s, fused": found["bytes"] / found["fused"], "launches, host ms": found["kernels"] * LAUNCH * 1e3,
            "peak GB": found["peak"] / 1e9, "estimated GB": found["estimate"] / 1e9,
            "fits": "yes" if found["peak"] < card.memory else "NO"}


def details(found: dict[str, dict]) -> dict[str, list[dict]]:
    """Return further tables: memory by kind for every step, and a breakdown of the time of the first one."""
    kinds = dict.fromkeys(kind for one in found.values() for kind in one["memory"])
    memory = [{"at the peak, GB": kind} | {name: one["memory"].get(kind, 0) / 1e9 for name, one in found.items()}
              for kind in kinds]
    name, first = next(iter(found.items()))

    def rows(key, *columns):
        return [dict(zip((*columns, "ms", "kernels", "GB moved"),
                         (*row[:-3], row[-3] * 1e3, row[-2], row[-1] / 1e9))) for row in first[key]]
    return {"memory by kind": memory, f"{name}: by phase": rows("by_phase", "phase"),
            f"{name}: by kind": rows("by_rate", "kind"),
            f"{name}: largest operations": rows("by_operation", "operation"),
            f"{name}: the same by shape": rows("by_shape", "operation", "phase", "operands"),
            f"{name}: by module": rows("by_module", "module", "phase")}
