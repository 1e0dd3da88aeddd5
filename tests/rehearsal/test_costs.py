"""Memory and FLOPs of a step, as --dry_run estimates them, beside what fake tensors hold and multiply."""

from unittest import mock

import pytest
import torch
from rehearsal import gpu
from rehearsal.refusals import Watch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.attention import varlen  # noqa: F401  registers its operations
from torch.utils.flop_counter import FlopCounterMode

import train
from spider import estimate
from spider.distributed import Unsharded
from tile_moe import ALIGNMENT

pytestmark = pytest.mark.rehearsal
STEPS = ("--precision=bf16 --recompute=core", "--precision=bf16 --recompute=nothing",
         "--precision=bf16 --recompute=all --seq_len=2048 --micro_batch=64",
         "--precision=bf16 --recompute=core --grad_accum=4", "--precision=bf16 --recompute=core --optimizer=adamw",
         "--precision=fp8 --recompute=core --seq_len=2048 --micro_batch=64 --grad_accum=2")


@pytest.mark.parametrize("flags", STEPS)
def test_memory_is_within_a_tenth_of_the_estimate(flags):
    with gpu.stand_in():
        # Fewer layers and loops of the core; its widths and the bytes of 1b.
        plan = gpu.settle("1b", "--set=n_recurrent_layers=2,engram_layers=1", "--micro_batch=112", *flags.split())
        with gpu.fake_tensors(), Watch(int(plan.micro_batch * plan.seq_len / plan.bytes_per_segment)):
            spider, optimizers = gpu.build(plan)
            gpu.step(plan, spider, optimizers, documents=plan.micro_batch)
            expected = sum(estimate.estimate_memory(spider, plan, plan.recompute, gpu.WORLD).values())
            tracker = MemTracker()
            tracker.track_external(spider, *optimizers.by_name.values())        # whose state the first step has made

            def backward(*args, run=Unsharded.backward, **last):
                run(*args, **last)
                tracker.reset_mod_stats()                             # it knows one pass only
            with tracker, mock.patch.object(Unsharded, "backward", backward):
                gpu.step(plan, spider, optimizers, documents=plan.micro_batch)
            peak = tracker.get_tracker_snapshot("peak")[torch.device("cuda", 0)]["Total"]
    print(f"peak {peak / 1e9:.2f} GB, estimate {expected / 1e9:.2f} GB, {expected / peak - 1:+.1%}")
    assert expected == pytest.approx(peak, rel=0.1)


# FLOPs: torch counts those of plain products. Arguments here are shapes; documents have equal length.

def attention(q, k, v, cu_seqlens, *_, **__) -> int:
    """Count the causal half of the scores, and of their products with the values."""
    rows, heads, width = q
    return 2 * heads * width * rows * rows // (cu_seqlens[0] - 1)


def grouped_product(a, b, offs, *_, **__) -> int:
    """Count without the rows that only pad experts: a [rows, in], b [experts, in, out], or of a gradient a [in, rows],
    b [rows, out]."""
    rows, inner = a if len(b) == 3 else reversed(a)
    return 2 * (rows - ALIGNMENT * offs[0]) * inner * b[-1]


FORMULAS = {torch.ops.torch_attn._varlen_attn: attention, torch.ops.aten._grouped_mm: grouped_product,
            torch.ops.torch_attn._varlen_attn_backward:
                lambda grad, q, k, v, out, log_sum, cu_seqlens, *_, **__: 2 * attention(q, k, v, cu_seqlens)}


@pytest.mark.parametrize("model", gpu.MODELS)
def test_flops_are_within_a_tenth_of_the_estimate(model):
    with gpu.stand_in():
        plan = gpu.settle(model, "--set=", "--n_loops=6", "--precision=bf16", "--recompute=nothing", "--seq_len=2048",
                          "--micro_batch=8")
        with gpu.fake_tensors(), Watch(int(plan.micro_batch * plan.seq_len / plan.bytes_per_segment)):
            spider, _ = gpu.build(plan)
            with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
                train.accumulate(spider, [gpu.batch_of(plan, documents=plan.micro_batch)], plan.n_loops)
            expected = plan.step_bytes * estimate.flops_per_byte(
                spider, plan.bytes_per_segment, plan.n_loops, plan.seq_len)
    counted = counter.get_total_flops()
    print(f"{model}: {counted / 1e12:.2f} TFLOP, estimate {expected / 1e12:.2f}, {expected / counted - 1:+.1%}")
    assert expected == pytest.approx(counted, rel=0.1)
