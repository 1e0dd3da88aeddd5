"""The grouped product of tile_moe.py in Triton, for GPUs on which torch's is a loop that waits for
the host.

Shapes: P rows sorted by expert, E experts, weights [E, D, F]. Rows of expert e end at
expert_end[e], which only the device reads; their number is any, 0 included. D and F are multiples
of 16: blocks are powers of two that divide them, so only rows need masks. Sums are fp32, of
products of bf16 or, without TF32, of fp32.

Blocks of 128 x 128 with 8 warps read an operand 64 FLOP a byte from the L2 cache, those of 64 x 128
with 4 warps 43; both have 64 sums a thread. But an expert's last block is half empty on average: at
the 340 rows of `1b`'s experts for 112 x 256 bytes that is 9% of the work with 64 rows and 19% with
128, at the 1,550 for 64 x 2048 bytes 2% and 4%. So blocks have 128 rows where experts have
LARGE_FROM of them on average. Gradients of weights always have large blocks, since D and F are no
multiple of a block's size only in small models. 4 stages of 32 in depth take 48 KiB of shared
memory in bf16, and 96 in fp32, of the 99 that every card has. In fp32 blocks of products are small.

Each operation is opaque to torch.compile, so a compiled layer runs the kernels that the check at
the start has run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 128  # of a block of the result
SMALL, LARGE = 64, 128  # its rows
WARPS = {SMALL: 4, LARGE: 8}
LARGE_FROM = 512  # rows per expert
DEPTH = 32  # of a step of a block's sum
STAGES = 4


def block_of(size: int, most: int) -> int:
    """Return the largest power of two that divides a size, or `most`."""
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
    """Compute a block [ROWS, COLUMNS] of out [P, F], all of it of one expert. Grid: (F / COLUMNS, P
    // ROWS + E), so that blocks which run together share rows, and then an expert's weights, in the
    L2 cache."""
    block = tl.program_id(1)
    # The blocks of expert e are numbered from its first row // ROWS + e. That leaves each expert as
    # many numbers as it can need, since ceil((end - start) / ROWS) <= end // ROWS - start // ROWS +
    # 1, without a sum over those before.
    e = tl.arange(0, EXPERTS)  # a power of two
    ends = tl.load(expert_end + e, mask=e < n_experts, other=0)
    expert = tl.sum(((e < n_experts) & (ends // ROWS + e + 1 <= block)).to(tl.int32), axis=0)
    start = tl.load(expert_end + expert - 1, mask=expert > 0, other=0)
    end = tl.load(expert_end + expert, mask=expert < n_experts, other=0)
    first = start + (block - start // ROWS - expert) * ROWS
    if first >= end:  # a number that its expert does not need, or after the last expert
        return
    p = first + tl.arange(0, ROWS)
    held = (p < end)[:, None]
    p = p[:, None].to(tl.int64)  # P * D may pass 2^31
    d = tl.arange(0, DEPTH)
    f = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    a = rows + p * D + d[None, :]  # [ROWS, DEPTH]
    # [DEPTH, COLUMNS]
    b = weights + expert.to(tl.int64) * stride_e + d[:, None] * stride_d + f[None, :] * stride_f
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for _ in range(0, D, DEPTH):
        total += tl.dot(tl.load(a, mask=held, other=0.0), tl.load(b), input_precision="ieee")
        a += DEPTH
        b += DEPTH * stride_d
    tl.store(out + p * F + f[None, :], total.to(out.dtype.element_ty), mask=held)


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
    """Compute a block [ROWS, COLUMNS] of an expert's out [D, F], the sum over its rows p of rows[p,
    :, None] * grad[p]. Grid: (F / COLUMNS, D / ROWS, E). An expert without rows gets zeros."""
    expert = tl.program_id(2)
    start = tl.load(expert_end + expert - 1, mask=expert > 0, other=0)
    end = tl.load(expert_end + expert)
    d = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    f = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(start, end, DEPTH):
        p = first + tl.arange(0, DEPTH)
        held, p = p < end, p.to(tl.int64)
        # [ROWS, DEPTH]
        a = tl.load(rows + p[None, :] * D + d[:, None], mask=held[None, :], other=0.0)
        # [DEPTH, COLUMNS]
        b = tl.load(grad + p[:, None] * F + f[None, :], mask=held[:, None], other=0.0)
        total += tl.dot(a, b, input_precision="ieee")
    out += expert.to(tl.int64) * D * F
    tl.store(out + d[:, None] * F + f[None, :], total.to(out.dtype.element_ty))


@torch.library.custom_op("spider::grouped_product", mutates_args=())
def grouped_product(rows: Tensor, weights: Tensor, expert_end: Tensor) -> Tensor:
    """Multiply rows [P, D], sorted by expert, by their experts' weights [E, D, F]; expert_end [E]
    int32 -> [P, F].

    Rows after the last expert's, and their gradients, are uninitialized: nothing may sum over
    them."""
    (n_experts, d, f), rows = weights.shape, rows.contiguous()
    out = rows.new_empty(len(rows), f)
    fp32 = rows.dtype == torch.float32  # whose products take no tensor cores, and more registers
    height = LARGE if len(rows) >= LARGE_FROM * n_experts and not fp32 else SMALL
    columns = block_of(f, COLUMNS)
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
        num_warps=WARPS[LARGE if fp32 else height],
        num_stages=STAGES,
    )
    return out


@torch.library.custom_op("spider::grouped_weight_grad", mutates_args=())
def weight_grad(rows: Tensor, grad: Tensor, expert_end: Tensor) -> Tensor:
    """Compute the gradient [E, D, F] of grouped_product's weights: rows [P, D], grad [P, F] of its
    result."""
    (d, f), rows, grad = (rows.shape[1], grad.shape[1]), rows.contiguous(), grad.contiguous()
    out = rows.new_empty(len(expert_end), d, f)
    height, columns = block_of(d, LARGE), block_of(f, COLUMNS)
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
        num_warps=WARPS.get(height, WARPS[SMALL]),
        num_stages=STAGES,
    )
    return out


# Of shape[0], not len, which would fix a compiled graph to this number of rows.
grouped_product.register_fake(
    lambda rows, weights, expert_end: rows.new_empty(rows.shape[0], weights.shape[2])
)
weight_grad.register_fake(
    lambda rows, grad, expert_end: rows.new_empty(expert_end.shape[0], rows.shape[1], grad.shape[1])
)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _gradients(ctx, grad):
    rows, weights, expert_end = ctx.saved_tensors
    return grouped_product(grad, weights.mT, expert_end), weight_grad(rows, grad, expert_end), None


grouped_product.register_autograd(_gradients, setup_context=_save)
