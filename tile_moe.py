"""Routing and experts of a mixture-of-experts layer, behind one signature for four backends.

    loop      one expert after the other in plain Python: the reference for tests of the others
    grouped   rows sorted by expert, one grouped product per weight (torch's grouped_mm)
    triton    the same by spider/grouped_triton.py, for GPUs on which torch's product is a loop
    tile      like grouped, with gating, sorting, expanding and reducing by DeepSeek's TileKernels

Shapes: N tokens, k experts per token, E experts, D hidden size, F expert width, P rows sorted by
expert: every token k times, each expert's rows padded to a multiple of ALIGNMENT, at least one, and
padding at the end up to a bound that does not depend on the data. No backend drops a token; an
expert may get none or all of them. Expert -1 means none.
"""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spider.common import SpiderError
from spider.config import SpiderConfig
from spider.layers import SwiGLU, WideLinear
from spider.packing import round_up

ALIGNMENT = 16  # rows: required by FP8 products; also limits the number of CPU kernels
# minimum of TileKernels: Hopper, Blackwell (sm_120 is not listed, but the original ran there)
TILE_CAPABILITY = (9, 0)
TILE_WIDTH = 256  # TileKernels needs hidden sizes that are multiples of this
# backends that are tested before their use
KERNELS = {"triton": "Triton's grouped product", "tile": "TileKernels"}
PACKAGES = {"triton": "triton", "tile": '-e ".[tile]"'}


class BackendError(SpiderError, RuntimeError):
    """The requested backend cannot run here; the message names the remedy."""


def resolve_backend(
    name: str,
    device: torch.device,
    config: SpiderConfig,
    dtype: torch.dtype,
    compiled: bool = False,
) -> tuple[str, str]:
    """Resolve a backend; return it, and a line to log or "". On a GPU `auto` becomes the first of
    these that passes a test there: `triton` if torch's grouped product is a loop, `tile` unless
    layers are compiled, since torch.compile does not support TileKernels; else `grouped`. Raise
    BackendError if `triton` or `tile` is requested but fails.
    dtype: of the products."""
    on_gpu, remarks = device.type == "cuda", []
    torch_loops = (
        on_gpu and name != "loop" and config.has_experts and not multiplies_at_once(device, dtype)
    )
    if name in KERNELS and (obstacle := find_obstacle(name, device, config, dtype)):
        raise BackendError(f"--moe_backend {name}: {obstacle}; or use --moe_backend grouped")
    if name == "auto":
        name = "grouped"
        candidates = {"triton": torch_loops, "tile": on_gpu and not compiled}
        for backend in filter(candidates.get, KERNELS):
            obstacle = find_obstacle(backend, device, config, dtype)
            if obstacle is None:
                name = backend
                break
            remarks.append(f"{KERNELS[backend]} not used: {obstacle}")
    if torch_loops and name != "triton":
        number = str(dtype).removeprefix("torch.")
        remarks.append(
            f"on this GPU torch runs {number} experts one after the other and waits for the "
            f"device at each "
            f"grouped product (docs/results/performance.md)"
        )
    return name, "; ".join(remarks)


def multiplies_at_once(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a grouped product is a single kernel without a host sync: in torch's
    GroupedBlas.cpp, bf16 on compute capability 9.x and 10.x. Otherwise torch copies the group sizes
    to the host and calls mm for each group."""
    return dtype == torch.bfloat16 and torch.cuda.get_device_capability(device)[0] in (9, 10)


# --------------------------------------------------------------------------------------------------
# Check of kernels


def find_obstacle(
    backend: str, device: torch.device, config: SpiderConfig, dtype: torch.dtype
) -> str | None:
    """Return why the kernels of `triton` or `tile` cannot run this model on this device, with the
    remedy, or None. Compiles the kernels of training: seconds for each the first time, later from a
    cache."""
    kernels = KERNELS[backend]
    if not config.has_experts:
        return "the model has no routed experts"
    if device.type != "cuda":
        return f"{kernels} needs a GPU"
    if backend == "tile" and torch.cuda.get_device_capability(device) < TILE_CAPABILITY:
        return "TileKernels needs a GPU from Hopper on (sm_90 or above)"
    if backend == "tile" and config.hidden_size % TILE_WIDTH:
        return (
            f"TileKernels needs a hidden_size that is a multiple of {TILE_WIDTH}, "
            f"not {config.hidden_size}"
        )
    try:
        with torch.cuda.device(device):  # TileKernels allocates its results on the current device
            if backend == "triton":
                from spider.grouped_triton import grouped_product as product

                wrong = find_wrong_product(product, device, config, dtype)
            else:
                wrong = find_disagreement(operations(), device, config, dtype)
        obstacle = wrong and f"{kernels} computes wrong results on this GPU: {wrong}"
    except ImportError as fault:
        obstacle = (
            f"{kernels} cannot be imported ({first_error(fault)}): pip install {PACKAGES[backend]}"
        )
    except Exception as fault:
        obstacle = f"{kernels} fails on this GPU: {first_error(fault)}"
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as fault:
        # a kernel's error stays in the CUDA context, so nothing else can run
        raise BackendError(
            f"a test of {kernels} crashed on the GPU ({first_error(fault)}); start again with "
            f"--moe_backend grouped"
        ) from None
    return obstacle


def first_error(fault: Exception) -> str:
    """Describe an error in one line; of a compiler's output, which follows the source, take the
    first error."""
    lines = [line.strip() for line in str(fault).splitlines() if line.strip()] or [""]
    line = next((line for line in lines if re.search(r"(error|fatal)\s*: *\S", line)), lines[0])
    return f"{type(fault).__name__}: {line[:200]}".removesuffix(": ")


def find_disagreement(
    ops, device: torch.device, config: SpiderConfig, dtype: torch.dtype
) -> str | None:
    """Name the first of the six operations that differs from plain torch, or return None. The data
    has ties, zero weights and slots without an expert, is large enough for several SMs, and makes
    all sums exact."""
    tokens, experts, k = 1000, config.n_routed_experts, config.n_experts_per_tok
    generator = torch.Generator().manual_seed(0)

    def draw(low, high, *shape, dtype=torch.float32):
        return torch.randint(low, high, shape, generator=generator).to(device, dtype)

    scores = draw(0, 8, tokens, experts)
    topk_idx = _topk_gate(scores, k)
    if not torch.equal(ops.topk_gate(scores, k), topk_idx):
        return "topk_gate"
    weights = draw(0, 2, tokens, k)
    total = weights.sum(-1) + 1e-20
    for ours, theirs in zip(
        (total, weights / total[:, None]), ops.normalize_weight(weights), strict=True
    ):
        if not torch.allclose(ours, theirs, rtol=1e-5, atol=0):
            return "normalize_weight"
    topk_idx = topk_idx.masked_fill(draw(0, 8, tokens, k) == 0, -1)
    if not torch.allclose(
        _aux_fi(topk_idx, experts, k), ops.aux_fi(topk_idx, experts, k), rtol=1e-5, atol=0
    ):
        return "aux_fi"
    bound = row_bound(tokens * k, experts)
    ours, slot, end = _rows_by_expert(topk_idx, experts, bound)
    to_expert, _, _, row, _, their_end, *_ = ops.get_fused_mapping(
        topk_idx, experts, bound, ALIGNMENT
    )
    if not (
        torch.equal(to_expert.long(), torch.where(slot < 0, -1, topk_idx.flatten()[slot]))
        and torch.equal(their_end.long(), end)
        # in any order
        and torch.equal(row.flatten().sort().values.long(), ours.flatten().sort().values)
        and torch.equal(torch.where(row < 0, -1, to_expert[row]).long(), topk_idx)
    ):
        return "get_fused_mapping"
    x, rows = (draw(-8, 9, count, config.hidden_size, dtype=dtype) for count in (tokens, bound))
    token, held = torch.arange(tokens, device=device)[:, None].expand_as(row), row >= 0
    expanded = torch.zeros_like(rows).index_copy_(0, row[held].long(), x[token[held]])
    if not torch.equal(ops.expand_to_fused(x, row, to_expert), expanded):
        return "expand_to_fused"
    if not torch.equal(ops.reduce_fused(rows, None, row), (rows[row] * held[..., None]).sum(1)):
        return "reduce_fused"
    return None


def find_wrong_product(
    product: Callable, device: torch.device, config: SpiderConfig, dtype: torch.dtype
) -> str | None:
    """Name what of a grouped product differs from experts in turn, its value or a gradient, or
    return None. The shapes are those of the model, with a hundred rows per expert and with a
    thousand, for which a kernel may have other blocks. Expert 1 has no rows, rows after the last
    expert's are NaN, and all sums are exact."""
    experts, hidden, width = (
        config.n_routed_experts,
        config.hidden_size,
        config.moe_intermediate_size,
    )
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape):
        return torch.randint(-8, 9, shape, generator=generator, device=device).to(dtype)

    for many in (1, 10):
        end = many * ((37 * torch.arange(experts) + 163) % 200).cumsum(0)
        used, end = int(end[-1]), end.int().to(device)
        for d, f in ((hidden, 2 * width), (width, hidden)):
            tensors = draw(used + ALIGNMENT, d), draw(experts, d, f), draw(used + ALIGNMENT, f)
            tensors[0][used:], tensors[2][used:] = math.nan, math.nan
            results = []
            for multiply, of_sums in ((product, dtype), (_multiply_in_turn, torch.float32)):
                rows, weights, upstream = (t.to(of_sums).requires_grad_() for t in tensors)
                y = multiply(rows, weights, end)
                grad_rows, grad_weights = torch.autograd.grad(y, (rows, weights), upstream)
                results.append(
                    (y[:used].to(dtype), grad_rows[:used].to(dtype), grad_weights.to(dtype))
                )
            for what, ours, theirs in zip(
                ("the product", "its rows' gradient", "its weights' gradient"),
                *results,
                strict=True,
            ):
                if not torch.equal(ours, theirs):
                    return f"{what}, {d} x {f}, {used} rows"
    return None


# --------------------------------------------------------------------------------------------------
# Operations of routing, of TileKernels and in plain torch; none has a gradient. Ties go to the
# smaller index, and expert -1 is skipped.


def operations():
    """Return the module of TileKernels."""
    import tile_kernels.moe

    return tile_kernels.moe


def _topk_gate(scores, num_topk):
    # topk is not stable
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :num_topk].contiguous()


def _aux_fi(topk_idx, num_experts, num_aux_topk):
    chosen = topk_idx.flatten() + 1  # -1 goes to the first count, which is dropped
    count = torch.zeros(num_experts + 1, device=chosen.device)
    count.index_add_(0, chosen, torch.ones(len(chosen), device=chosen.device))
    return count[1:] * (num_experts / (len(topk_idx) * num_aux_topk))


def _rows_by_expert(topk_idx, num_experts, num_rows, at_least=0):
    """Assign rows by counting, without a sort or host sync, `at_least` so many to every expert.

    Return the row of each slot, int64 [N, k], -1 for slots without an expert; the slot of each row,
    [P], -1 for padding; and expert_end [E]."""
    slots, device = topk_idx.numel(), topk_idx.device
    chosen = torch.arange(num_experts, device=device)[:, None] == topk_idx.flatten()  # [E, slots]
    rank = chosen.cumsum(1)  # of a slot within its expert, from 1 on
    aligned = ((rank[:, -1] + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT).clamp_min(at_least)
    end = aligned.cumsum(0)
    # In place: add where the expert begins, keep only the slot's own expert, and sum over experts;
    # 0 stands for none.
    row = rank.add_((end - aligned)[:, None]).mul_(chosen).sum(0)  # from 1 on
    slot = row.new_full((1 + num_rows,), -1).scatter_(0, row, torch.arange(slots, device=device))[
        1:
    ]
    return (row - 1).view(topk_idx.shape), slot, end


class _Normalize(torch.autograd.Function):
    """Divide rows [N, k] by their sums."""

    @staticmethod
    def forward(ctx, weights):
        denominator, normalized = operations().normalize_weight(weights.contiguous())
        ctx.save_for_backward(denominator, normalized)
        return normalized

    @staticmethod
    def backward(ctx, grad):
        denominator, normalized = ctx.saved_tensors
        return (grad - (grad * normalized).sum(-1, keepdim=True)) / denominator[:, None]


class ExpertRows(NamedTuple):
    """The sorted order of tokens' rows, for the backends that sort."""

    row: Tensor  # [N, k], rows of each token
    source: Tensor  # [P], token of each row, any for padding; for `tile` instead its expert, or -1
    expert_end: Tensor  # [E] int32


def assign_rows(topk_idx: Tensor, n_experts: int, backend: str) -> ExpertRows | None:
    """Sort the slots [N, k] by expert; return None for `loop`, which does not sort.

    Every expert gets rows, if only padding with weight 0: on sm_100 grouped_mm leaves the weight
    gradient of a group without rows uninitialized (pytorch issue 172439)."""
    if backend == "loop":
        return None
    tokens, k = topk_idx.shape
    bound = row_bound(topk_idx.numel(), n_experts)
    if backend == "tile":
        # A token more for every k experts, which gives each expert a row; these rows then become
        # padding.
        extra = torch.arange(round_up(n_experts, k), device=topk_idx.device)
        extra = extra.masked_fill(extra >= n_experts, -1).view(-1, k)
        pos_to_expert, _, _, row, _, expert_end, *_ = operations().get_fused_mapping(
            torch.cat((topk_idx, extra)), n_experts, bound, ALIGNMENT
        )
        pos_to_expert.index_fill_(0, row[tokens:].flatten()[:n_experts].long(), -1)
        return ExpertRows(row[:tokens], pos_to_expert, expert_end)
    row, slot, expert_end = _rows_by_expert(topk_idx, n_experts, bound, at_least=ALIGNMENT)
    return ExpertRows(row, slot.clamp_min(0) // k, expert_end.int())


def _expand(x, row, source, tile):
    """Copy tokens [N, D] to their rows [P, D]; padding rows get any finite values, since their
    weight is 0."""
    return (
        operations().expand_to_fused(x.contiguous(), row, source)
        if tile
        else x.index_select(0, source)
    )


def _reduce(rows, row, tile):
    """Sum rows [P, D] to their tokens [N, D]; padding rows are never read."""
    rows = rows.detach().contiguous()
    return (
        operations().reduce_fused(rows, None, row)
        if tile
        else F.embedding_bag(row, rows, mode="sum")
    )


class _Expand(torch.autograd.Function):
    """Copy tokens to their rows; the gradient of a token is the sum over its rows."""

    @staticmethod
    def forward(ctx, x, row, source, tile):
        ctx.save_for_backward(row)
        ctx.tile = tile
        return _expand(x, row, source, tile)

    @staticmethod
    def backward(ctx, grad):
        return _reduce(grad, *ctx.saved_tensors, ctx.tile), None, None, None


class _Reduce(torch.autograd.Function):
    """Sum rows to their tokens, the transpose of _Expand."""

    @staticmethod
    def forward(ctx, rows, row, source, tile):
        ctx.save_for_backward(row, source)
        ctx.tile = tile
        return _reduce(rows, row, tile)

    @staticmethod
    def backward(ctx, grad):
        return _expand(grad, *ctx.saved_tensors, ctx.tile), None, None, None


# --------------------------------------------------------------------------------------------------
# Routing


class Routing(NamedTuple):
    """The routing of N tokens; all None without routed experts."""

    score: Tensor | None  # [N, E] fp32
    topk_idx: Tensor | None  # [N, k] int64
    rows: ExpertRows | None  # for backends that sort


def route(
    score: Tensor, expert_bias: Tensor, k: int, backend: str, topk_idx: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose experts by a softmax over the scores [N, E]. Selection uses probability + expert_bias
    [E], weights only the probabilities: topk_idx [N, k] int64 and topk_weights [N, k] fp32, whose
    rows sum to 1.

    A given topk_idx, from an earlier pass, is reused (recomputation).
    """
    tile = backend == "tile"
    if topk_idx is None:
        topk_idx = (operations().topk_gate if tile else _topk_gate)(
            score.detach().softmax(-1) + expert_bias, k
        )
        if tile:  # it returns 2^31 - 1 for NaN scores; the loss will be NaN anyway
            topk_idx.clamp_(0, len(expert_bias) - 1)
    if tile:
        return topk_idx, _Normalize.apply(score.softmax(-1).gather(1, topk_idx))
    return topk_idx, score.gather(1, topk_idx).softmax(-1)  # equivalent: the common factor cancels


def balance(
    score: Tensor, topk_idx: Tensor, share: Tensor, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the balance losses of V routings: scores [V, N, E], topk_idx [V, N, k]; share [V, N],
    each token's weight in the means, 0 for padding.

    Returns sums over V of aux_loss = sum_e f_e P_e, where P_e is the mean probability and f_e an
    expert's tokens relative to an even load (1 if balanced), and of z_loss, the mean squared
    log-partition; and f [V, E]."""
    (visits, tokens, experts), k = score.shape, topk_idx.shape[2]
    counted = topk_idx.masked_fill((share == 0)[:, :, None], -1)
    if backend == "tile" and not torch.are_deterministic_algorithms_enabled():
        # TileKernels' aux_fi is not
        load = torch.stack([operations().aux_fi(routing, experts, k) for routing in counted])
    else:  # all at once, as if every routing had its own experts
        first = torch.arange(0, visits * experts, experts, device=score.device)[:, None, None]
        load = _aux_fi(
            torch.where(counted < 0, -1, counted + first).flatten(0, 1), visits * experts, k
        )
        load = load.view(visits, experts)
    total = share.sum(1)
    load = load * (tokens * share.amax(1))[:, None]  # aux_fi divides by all rows
    mean = torch.bmm(share[:, None], score.softmax(-1)).squeeze(1)  # [V, E]
    aux_loss = (load / total.clamp_min(1e-9)[:, None] * mean).sum()
    return aux_loss, share.flatten() @ score.logsumexp(-1).square().flatten(), load


# --------------------------------------------------------------------------------------------------
# Experts


def grouped_product(rows: Tensor, weights: Tensor, expert_end: Tensor) -> Tensor:
    """Multiply rows [P, D], sorted by expert, by their experts' weights [E, D, F]; expert_end [E]
    int32 -> [P, F].

    Rows after the last expert's, and their gradients, are uninitialized: nothing may sum over
    them."""
    product = F.grouped_mm
    if rows.dtype == torch.float64:
        product = _multiply_in_turn
    elif rows.dtype != torch.bfloat16 and torch.compiler.is_compiling():
        from spider.uncompiled import grouped_mm as product
    return product(rows, weights, offs=expert_end)


def _multiply_in_turn(rows: Tensor, weights: Tensor, offs: Tensor) -> Tensor:
    """Compute grouped_mm in float64, which torch does not support, by a loop; for exact
    references."""
    *groups, tail = rows.tensor_split(offs.tolist())
    return torch.cat(
        [group @ weight for group, weight in zip(groups, weights, strict=True)]
        + [tail @ torch.zeros_like(weights[0])]
    )


def fp8_grouped_product(rows: Tensor, weights: Tensor, expert_end: Tensor) -> Tensor:
    """Compute grouped_product in FP8 (e4m3), with a power-of-two scale per row and per weight
    column.

    Uses torchao's kernels on a GPU (rows aligned to 16, column-major weights), elsewhere an
    emulation for tests."""
    if not rows.is_cuda:
        return _EmulatedFP8.apply(rows, weights, expert_end)
    from torchao.prototype.moe_training import _to_fp8_rowwise_then_scaled_grouped_mm

    return _to_fp8_rowwise_then_scaled_grouped_mm(
        rows, weights, expert_end, pad_token_groups_for_grouped_mm=False
    )


class _EmulatedFP8(torch.autograd.Function):
    """Emulate the three products of torchao's FP8 grouped product: round the operands, multiply in
    their dtype."""

    @staticmethod
    def forward(ctx, rows, weights, expert_end):
        ctx.save_for_backward(rows, weights, expert_end)
        return F.grouped_mm(_round_fp8(rows, -1), _round_fp8(weights, 1), offs=expert_end)

    @staticmethod
    def backward(ctx, grad):
        rows, weights, expert_end = ctx.saved_tensors
        grad_rows = F.grouped_mm(_round_fp8(grad, -1), _round_fp8(weights, -1).mT, offs=expert_end)
        used = torch.arange(len(rows), device=rows.device)[:, None] < expert_end[-1]
        rows, grad = (_round_fp8(torch.where(used, t, 0), 0) for t in (rows, grad))
        return grad_rows, F.grouped_mm(rows.mT, grad, offs=expert_end), None


def _round_fp8(x: Tensor, dim: int) -> Tensor:
    """Round x to e4m3 with a power-of-two scale per slice along `dim`; return it in its own
    dtype."""
    largest = x.float().abs().amax(dim, keepdim=True).clamp_min(1e-12)
    scale = torch.exp2((448 / largest).log2().floor())
    return ((x.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / scale).to(
        x.dtype
    )


def moe_forward(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    w_gate: Tensor,
    w_up: Tensor | None,
    w_down: Tensor,
    backend: str,
    product: Callable = grouped_product,
    expert_rows: ExpertRows | None = None,
) -> Tensor:
    """Return the weighted sum of each token's experts: y[n] = sum_j topk_weights[n, j] *
    SwiGLU_e(x[n]), e = topk_idx[n, j].

    x [N, D]; topk_idx [N, k] int64, -1 for none; topk_weights [N, k] fp32; w_gate and w_up [E, D,
    F], w_down [E, F, D] in x's dtype. w_up is None if w_gate has both concatenated, [E, D, 2F],
    which saves a copy. product: one of the two above; `triton` computes the first by its own
    kernels. expert_rows: `assign_rows` of topk_idx, if known. Returns y [N, D]. Differentiable in
    x, topk_weights and the three weights.
    """
    w_gate_up = w_gate if w_up is None else torch.cat((w_gate, w_up), dim=-1)
    if len(x) == 1 and not (x.is_cuda or torch.is_grad_enabled()):
        return _one_row(x, topk_idx, topk_weights, w_gate_up, w_down)
    if backend == "loop":
        return _loop(x, topk_idx, topk_weights, w_gate_up, w_down, product)
    if backend == "triton" and product is grouped_product:
        from spider.grouped_triton import grouped_product as product
    if expert_rows is None:
        # computed by the first expert with weight 0
        topk_weights = topk_weights.masked_fill(topk_idx < 0, 0)
        expert_rows = assign_rows(topk_idx.clamp_min(0), len(w_down), backend)
    (row, source, expert_end), tile = expert_rows, backend == "tile"
    rows = _Expand.apply(x, row, source, tile)  # [P, D]
    weights = topk_weights.to(x.dtype).flatten()
    # 0 for padding
    row_weights = weights.new_zeros(len(source)).scatter_(0, row.flatten().long(), weights)
    gate, up = product(rows, w_gate_up, expert_end).chunk(2, dim=-1)  # [P, F]
    hidden = F.silu(gate) * up * row_weights[:, None]  # weighted here, where rows are narrowest
    return _Reduce.apply(product(hidden, w_down, expert_end), row, source, tile)


def _loop(x, topk_idx, topk_weights, w_gate_up, w_down, product):
    multiply = torch.matmul if product is grouped_product else partial(_multiply_group, product)
    (w_gate, w_up), y = w_gate_up.chunk(2, dim=-1), torch.zeros_like(x)
    for expert in topk_idx[topk_idx >= 0].unique().tolist():
        token, slot = (topk_idx == expert).nonzero(as_tuple=True)
        rows = x[token]
        hidden = F.silu(multiply(rows, w_gate[expert])) * multiply(rows, w_up[expert])
        weight = topk_weights[token, slot].to(x.dtype)
        y = y.index_add(0, token, multiply(hidden, w_down[expert]) * weight[:, None])
    return y


def _one_row(x, topk_idx, topk_weights, w_gate_up, w_down):
    """Compute a single token, for decoding on a CPU, without sorting rows or copying weights."""
    y = torch.zeros_like(x)
    for expert, weight in zip(
        topk_idx[0].tolist(), topk_weights.to(x.dtype).unbind(1), strict=True
    ):
        if expert >= 0:
            gate, up = (x @ w_gate_up[expert]).chunk(2, dim=-1)
            y = y + (F.silu(gate) * up) @ w_down[expert] * weight
    return y


def _multiply_group(product, rows, weight):
    """Multiply one expert's rows [n, D] by its weight [D, F] with a grouped product, padded to its
    alignment."""
    padded = F.pad(rows, (0, 0, 0, -len(rows) % ALIGNMENT))
    end = torch.full((1,), len(padded), dtype=torch.int32, device=rows.device)
    return product(padded, weight[None], end)[: len(rows)]


def row_bound(slots: int, experts: int) -> int:
    """Return P, enough rows for any routing of `slots` slots and one more for each expert; with
    fewer, TileKernels would write out of bounds."""
    return (slots + ALIGNMENT * experts) // ALIGNMENT * ALIGNMENT


# --------------------------------------------------------------------------------------------------
# The layer


class MoE(nn.Module):
    """Routed experts and a shared one, [N, D] -> [N, D]; there is no capacity limit, so no token is
    dropped."""

    def __init__(self, config: SpiderConfig):
        super().__init__()
        self.config, self.backend, c = config, "grouped", config
        experts, width = c.n_routed_experts, c.moe_intermediate_size
        if experts:
            self.router = WideLinear(c.hidden_size, experts)
            self.w_gate = nn.Parameter(torch.empty(experts, c.hidden_size, width))
            self.w_up = nn.Parameter(torch.empty(experts, c.hidden_size, width))
            self.w_down = nn.Parameter(torch.empty(experts, width, c.hidden_size))
        self.register_buffer("expert_bias", torch.empty(experts))
        self.shared = (
            SwiGLU(c.hidden_size, c.n_shared_experts * width) if c.n_shared_experts else None
        )
        self.fp8 = False  # whether the routed experts train in FP8
        self.cast = None  # cast weights of the routed experts, inside cast_weights_once

    def weights(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cast the weights: gate and up as one [E, D, 2F], and down. FP8's kernels need
        column-major order."""
        weights = (
            torch.cat((self.w_gate.to(dtype), self.w_up.to(dtype)), dim=-1),
            self.w_down.to(dtype),
        )
        return tuple(w.mT.contiguous().mT for w in weights) if self.fp8 else weights

    def cast_weight(self, dtype: torch.dtype):
        self.cast = self.weights(dtype) if self.config.n_routed_experts else None

    def forward(self, x: Tensor, decided: Routing | None = None) -> tuple[Tensor, Routing]:
        """Route each row to its experts, or reuse `decided`, the routing of an earlier pass over
        the same rows."""
        if not self.config.n_routed_experts:
            return self.shared(x), Routing(None, None, None)
        score = self.router(x)  # [N, E]
        topk_idx, topk_weights = route(
            score,
            self.expert_bias,
            self.config.n_experts_per_tok,
            self.backend,
            decided and decided.topk_idx,
        )
        rows = decided and decided.rows
        if rows is None and torch.is_grad_enabled():
            rows = assign_rows(topk_idx, len(self.expert_bias), self.backend)
        w_gate_up, w_down = self.weights(x.dtype) if self.cast is None else self.cast
        product = fp8_grouped_product if self.fp8 and self.training else grouped_product
        y = moe_forward(
            x, topk_idx, topk_weights, w_gate_up, None, w_down, self.backend, product, rows
        )
        return (y if self.shared is None else y + self.shared(x)), Routing(score, topk_idx, rows)
