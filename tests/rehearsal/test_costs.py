"""A step on fake tensors: memory, FLOPs compared with the estimate of --dry_run, kernels, and a
lower bound of the time."""

from collections import defaultdict

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.flop_counter import FlopCounterMode

import train
from rehearsal import gpu
from rehearsal.peaks import BATCH, PEAKS
from rehearsal.refusals import Watch, is_composite, is_view, tensors
from spider.config import RECOMPUTE
from spider.training import estimate
from spider.training.distributed import Sharding
from tile_moe import ALIGNMENT

pytestmark = pytest.mark.rehearsal


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("model, precision", PEAKS)
def test_peak_memory_of_a_step_matches_the_table(model, precision, recompute):
    """tests/training/test_estimate.py compares the estimate with the same table."""
    gpu.stand_in()
    flags = f"--precision={precision} --recompute={recompute} {BATCH}"
    plan = gpu.resolve_plan(model, *flags.split())
    documents = plan.flags.micro_batch
    with FakeTensorMode(), Watch(int(plan.step_bytes / plan.config.bytes_per_segment)):
        spider, optimizers = gpu.build(plan)
        gpu.step(plan, spider, optimizers, documents)
        tracker = MemTracker()
        # the first step has created the optimizers' state
        tracker.track_external(spider, *optimizers.by_name.values())

        def backward(*args, run=Sharding.backward, **last):
            run(*args, **last)
            tracker.reset_mod_stats()  # the tracker handles a single pass

        Sharding.backward = backward
        with tracker:
            gpu.step(plan, spider, optimizers, documents)
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cuda", 0)]["Total"]
    print(f"peak {peak / 1e9:.2f} GB")
    expected = PEAKS[model, precision][RECOMPUTE.index(recompute)]
    assert peak / 1e9 == pytest.approx(expected, rel=0.03)


# FLOPs: torch counts plain products. The arguments of these functions are shapes; documents have
# equal length.


def attention(q, k, v, cu_seqlens, *_, **__) -> int:
    """Count the causal half of the scores and of the products with values."""
    tokens, heads, width = q
    return 2 * heads * width * tokens * tokens // (cu_seqlens[0] - 1)


def grouped_product(a, b, offs, *_, **__) -> int:
    """Count without the rows that pad experts. Shapes: a [rows, in], b [experts, in, out]; for the
    gradient of weights a [in, rows], b [rows, out]."""
    rows, inner = a if len(b) == 3 else reversed(a)
    return 2 * (rows - ALIGNMENT * offs[0]) * inner * b[-1]


def attention_backward(grad, q, k, v, out, log_sum, cu_seqlens, *_, **__):
    return 2 * attention(q, k, v, cu_seqlens)


FORMULAS = {
    torch.ops.torch_attn._varlen_attn: attention,
    torch.ops.aten._grouped_mm: grouped_product,
    torch.ops.torch_attn._varlen_attn_backward: attention_backward,
}
# Sustained FLOP/s of products in bf16 and in fp32 (without TF32), and bytes/s
CARDS = {
    "H200": (790e12, 50e12, 4.0e12),
    "H100": (790e12, 50e12, 2.8e12),
    "RTX PRO 6000": (400e12, 90e12, 1.5e12),
    "A100": (250e12, 17e12, 1.7e12),
    "RTX 4090": (150e12, 60e12, 0.9e12),
}
# rates relative to products in bf16
FP8 = 1.84
ATTENTION = 0.38
SHORTEST = 2e-6  # seconds per kernel
NO_KERNEL = {
    *"empty empty_like new_empty empty_strided new_empty_strided _unsafe_view "
    "_local_scalar_dense".split()
}
# operations that access only some rows of the first operand
SOME_ROWS = {*"index_select index embedding gather index_add_ index_copy_ index_put_".split()}


class Costs(Watch):
    """Count kernels, FLOPs, bytes and least seconds: for products, and for all else by part of the
    step."""

    def __init__(self, number: int):
        super().__init__(number)
        self.formulas = FlopCounterMode(display=False, custom_mapping=FORMULAS).flop_registry
        self.part = ""
        # by part: kernels, FLOPs, bytes, least seconds on each card
        self.parts = defaultdict(lambda: [0] * (3 + len(CARDS)))

    def add(
        self, part: str, flops: int, moved: int, rate: float = 1, times: int = 1, fp32: bool = False
    ):
        cost = [1, flops, moved]
        for in_bf16, in_fp32, memory in CARDS.values():
            products = in_fp32 if fp32 else rate * in_bf16
            cost.append(max(flops / products, moved / memory, SHORTEST))
        self.parts[part] = [
            total + times * number for total, number in zip(self.parts[part], cost, strict=True)
        ]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        name = func._schema.name.split("::")[1]
        formula = self.formulas.get(func._overloadpacket)
        if out is NotImplemented or func.namespace == "prim" or name in NO_KERNEL:
            return out
        if is_composite(func) or is_view(func):
            return out
        if gpu.Graph.running and formula is None and "embedding_bag" not in name:
            return out  # inside a Triton kernel; Graph.moved has its bytes
        operands = tensors((args, kwargs))
        results = tensors(out)
        if name in SOME_ROWS:
            results = operands[-1:] if name[-1] == "_" else results * 2
            operands = operands[1:]
        moved = sum(t.numel() * t.element_size() for t in operands + (results or tensors(args[0])))
        if formula:
            rate = FP8 if operands[0].itemsize == 1 else 1
            if "attn" in name:
                rate = ATTENTION
            fp32 = operands[0].itemsize == 4
            part = "products in fp32" if fp32 else "products"
            self.add(part, formula(*args, **kwargs or {}, out_val=out), moved, rate, fp32=fp32)
        elif any(t.is_cuda for t in operands + results):
            self.add("others in graphs" if gpu.Graph.running else self.part, 0, moved)
        return out


@pytest.mark.parametrize("model", gpu.MODELS)
def test_flops_are_within_a_tenth_of_the_estimate(model):
    gpu.stand_in()
    flags = "--set= --n_loops=6 --precision=bf16 --recompute=nothing --seq_len=2048 --micro_batch=8"
    plan = gpu.resolve_plan(model, *flags.split())
    with FakeTensorMode(), Costs(int(plan.step_bytes / plan.config.bytes_per_segment)) as costs:
        spider, _ = gpu.build(plan)
        train.accumulate(
            spider,
            [gpu.batch_of(plan, documents=plan.flags.micro_batch)],
            train.StepSettings(plan.flags.n_loops),
        )
    cost = estimate.flops_per_byte(
        spider, plan.config.bytes_per_segment, plan.flags.n_loops, plan.flags.seq_len
    )
    counted = costs.parts["products"][1]
    expected = plan.step_bytes * cost
    print(
        f"{model}: {counted / 1e12:.2f} TFLOP, estimate {expected / 1e12:.2f}, "
        f"{expected / counted - 1:+.1%}"
    )
    assert expected == pytest.approx(counted, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, compiled, most",
    (
        ("--precision=bf16", True, 136),
        ("--precision=bf16", False, 156),
        ("--precision=fp8", True, 124),
        ("--precision=bf16 --micro_batch=448", True, 412),
        ("--precision=fp8 --micro_batch=448", True, 349),
        ("--precision=bf16 --grad_accum=4", True, 457),
        ("--precision=bf16 --micro_batch=64 --seq_len=2048", True, 522),
    ),
)
def test_least_time_of_a_step_does_not_grow(flags, compiled, most):
    gpu.stand_in()
    plan = gpu.resolve_plan(
        "1b", "--set=", "--n_loops=6", "--recompute=nothing", "--micro_batch=112", *flags.split()
    )
    graphs = gpu.generating()
    with FakeTensorMode(), Costs(int(plan.flags.micro_batch * plan.flags.seq_len / 5.3)) as costs:
        spider, optimizers = gpu.build(plan, compiled)
        gpu.step(plan, spider, optimizers, plan.flags.micro_batch)
        for graph in graphs:
            graph.runs = 0
        costs.parts.clear()
        costs.part = "outside of graphs"
        batches = [gpu.batch_of(plan, plan.flags.micro_batch)] * plan.flags.grad_accum
        now = train.StepSettings(plan.flags.n_loops)
        sums = train.accumulate(spider, batches, now)
        costs.part = "update"
        numbers = train.reduce_numbers(optimizers, sums)
        train.update(spider, optimizers, numbers, now, plan.flags.grad_clip)
    for graph in graphs:
        for moved in graph.moved:
            costs.add("Triton in graphs", 0, moved, times=graph.runs)
    costs.parts["together"] = [*map(sum, zip(*costs.parts.values(), strict=True))]
    print(f"{plan.step_bytes:,} bytes")
    for part, (kernels, flops, moved, *seconds) in costs.parts.items():
        times = ", ".join(
            f"{card} {1e3 * least:.1f} ms" for card, least in zip(CARDS, seconds, strict=True)
        )
        print(f"{part}: {kernels} kernels, {flops / 1e12:.1f} TFLOP, {moved / 1e9:.1f} GB; {times}")
    assert 1e3 * seconds[0] <= most
