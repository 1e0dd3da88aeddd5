"""The grouped product of tile_moe.py in Triton, for GPUs on which torch's is a loop that waits for
the host.

Shapes: P rows sorted by expert (the slots of tile_moe.py), E experts, weights [E, D, F]. The rows
of expert e end at expert_end[e], which only the device reads. An expert may have any number of
rows, including 0. D and F are multiples of 16. Block sizes are powers of two that divide D and F,
so only rows need masks. Operands are bf16, or fp32 without TF32; sums are fp32.

Block sizes. Small and large blocks have 64 sums per thread. An expert's last block is half empty on
average, which wastes less with small blocks:

                                         64 x 128, 4 warps   128 x 128, 8 warps
    FLOP per byte read from L2                          43                   64
    waste, 340 rows per expert
        (`1b`, 112 x 256 bytes)            9% of the work                  19%
    waste, 1,550 rows per expert
        (`1b`, 64 x 2,048 bytes)                        2%                   4%

So blocks have 128 rows if experts have LARGE_FROM rows on average, except in fp32, where they are
always small. Weight gradients always use large blocks: their sides are D and F, which are multiples
of 128 except in small models. 4 stages of depth 32 take 48 KiB of shared memory in bf16 and 96 KiB
in fp32; every card has 99 KiB.

The operations are opaque to torch.compile, so a compiled layer runs the same kernels that were
tested at start.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 128  # columns of a result block
SMALL_BLOCK = 64  # rows of a result block
LARGE_BLOCK = 128
WARPS = {SMALL_BLOCK: 4, LARGE_BLOCK: 8}
LARGE_FROM = 512  # rows per expert
DEPTH = 32  # how many products a step of a block adds to each sum
STAGES = 4


def block_of(size: int, most: int) -> int:
    """Return the largest power of two that divides `size`, but at most `most`."""
    return min(most, size & -size)


@triton.jit
def product_kernel(
    rows,
    weights,
    expert_end,
    out,
    n_experts,
    stride_e,
    stride_d,
    stride_f,
    D: tl.constexpr,
    F: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Compute a block [ROWS, COLUMNS] of out [P, F], for one expert.

    Grid: (F / COLUMNS, P // ROWS + E). In this order, blocks that run together share rows, and then
    an expert's weights, in the L2 cache.
    """
    block = tl.program_id(1)
    # The blocks of expert e, whose first row is `start`, are numbered from start // ROWS + e. This
    # leaves enough numbers for each expert, without a sum over the experts before, because
    #     ceil((end - start) / ROWS) <= end // ROWS - start // ROWS + 1
    e = tl.arange(0, EXPERTS)  # a power of two
    ends = tl.load(expert_end + e, mask=e < n_experts, other=0)
    expert = tl.sum(((e < n_experts) & (ends // ROWS + e + 1 <= block)).to(tl.int32), axis=0)
    start = tl.load(expert_end + expert - 1, mask=expert > 0, other=0)
    end = tl.load(expert_end + expert, mask=expert < n_experts, other=0)
    first = start + (block - start // ROWS - expert) * ROWS
    if first >= end:  # a number that the expert does not need, or after the last expert
        return
    p = first + tl.arange(0, ROWS)
    is_of_expert = (p < end)[:, None]
    p = p[:, None].to(tl.int64)  # P * D may exceed 2^31
    d = tl.arange(0, DEPTH)
    f = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    a = rows + p * D + d[None, :]  # [ROWS, DEPTH]
    # [DEPTH, COLUMNS]
    b = weights + expert.to(tl.int64) * stride_e + d[:, None] * stride_d + f[None, :] * stride_f
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for _ in range(0, D, DEPTH):
        rows_block = tl.load(a, mask=is_of_expert, other=0.0)
        total += tl.dot(rows_block, tl.load(b), input_precision="ieee")
        a += DEPTH
        b += DEPTH * stride_d
    tl.store(out + p * F + f[None, :], total.to(out.dtype.element_ty), mask=is_of_expert)


@triton.jit
def weight_grad_kernel(
    rows,
    grad,
    expert_end,
    out,
    D: tl.constexpr,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Compute a block [ROWS, COLUMNS] of an expert's out [D, F]:

        out = sum over the expert's rows p of rows[p, :, None] * grad[p]

    Without rows it is zero. Grid: (F / COLUMNS, D / ROWS, E).
    """
    expert = tl.program_id(2)
    start = tl.load(expert_end + expert - 1, mask=expert > 0, other=0)
    end = tl.load(expert_end + expert)
    d = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    f = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(start, end, DEPTH):
        p = first + tl.arange(0, DEPTH)
        is_of_expert = p < end
        p = p.to(tl.int64)  # P * D may exceed 2^31
        # [ROWS, DEPTH]
        a = tl.load(rows + p[None, :] * D + d[:, None], mask=is_of_expert[None, :], other=0.0)
        # [DEPTH, COLUMNS]
        b = tl.load(grad + p[:, None] * F + f[None, :], mask=is_of_expert[:, None], other=0.0)
        total += tl.dot(a, b, input_precision="ieee")
    out += expert.to(tl.int64) * D * F
    tl.store(out + d[:, None] * F + f[None, :], total.to(out.dtype.element_ty))


@torch.library.custom_op("spider::grouped_product", mutates_args=())
def grouped_product(rows: Tensor, weights: Tensor, expert_end: Tensor) -> Tensor:
    """Multiply the rows [P, D] of each expert by its weights [E, D, F]; expert_end [E] int32
    -> [P, F].

    Rows after the last expert's, and their gradients, are uninitialized: nothing may sum over
    them."""
    n_experts, d, f = weights.shape
    rows = rows.contiguous()
    out = rows.new_empty(len(rows), f)
    columns = block_of(f, COLUMNS)
    height = SMALL_BLOCK
    if len(rows) >= LARGE_FROM * n_experts:
        height = LARGE_BLOCK
    warps = WARPS[height]
    if rows.dtype == torch.float32:  # fp32 products use no tensor cores and more registers
        height = SMALL_BLOCK
        warps = WARPS[LARGE_BLOCK]
    product_kernel[f // columns, len(rows) // height + n_experts](
        rows,
        weights,
        expert_end,
        out,
        n_experts,
        *weights.stride(),
        D=d,
        F=f,
        EXPERTS=triton.next_power_of_2(n_experts),
        ROWS=height,
        COLUMNS=columns,
        DEPTH=block_of(d, DEPTH),
        num_warps=warps,
        num_stages=STAGES,
    )
    return out


@torch.library.custom_op("spider::grouped_weight_grad", mutates_args=())
def weight_grad(rows: Tensor, grad: Tensor, expert_end: Tensor) -> Tensor:
    """Compute the gradient [E, D, F] of grouped_product's weights from rows [P, D] and the gradient
    [P, F] of its result."""
    rows = rows.contiguous()
    grad = grad.contiguous()
    d = rows.shape[1]
    f = grad.shape[1]
    out = rows.new_empty(len(expert_end), d, f)
    height = block_of(d, LARGE_BLOCK)
    columns = block_of(f, COLUMNS)
    weight_grad_kernel[f // columns, d // height, len(expert_end)](
        rows,
        grad,
        expert_end,
        out,
        D=d,
        F=f,
        ROWS=height,
        COLUMNS=columns,
        DEPTH=DEPTH,
        num_warps=WARPS.get(height, WARPS[SMALL_BLOCK]),
        num_stages=STAGES,
    )
    return out


# For torch.compile: the shapes of the results, and the gradient. These use shape[0], because len
# would fix a compiled graph to this number of rows.


@grouped_product.register_fake
def _fake_product(rows: Tensor, weights: Tensor, expert_end: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[2])


@weight_grad.register_fake
def _fake_weight_grad(rows: Tensor, grad: Tensor, expert_end: Tensor) -> Tensor:
    return rows.new_empty(expert_end.shape[0], rows.shape[1], grad.shape[1])


def _save(ctx, inputs: tuple[Tensor, ...], output: Tensor):
    ctx.save_for_backward(*inputs)


def _gradients(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    rows, weights, expert_end = ctx.saved_tensors
    grad_rows = grouped_product(grad, weights.mT, expert_end)
    return grad_rows, weight_grad(rows, grad, expert_end), None


grouped_product.register_autograd(_gradients, setup_context=_save)
