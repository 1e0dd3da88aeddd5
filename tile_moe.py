"""Routing and experts of a mixture-of-experts layer, behind one signature for three backends.

    loop      one expert after the other in plain Python: the reference that the others are tested against
    grouped   rows sorted by expert, one grouped product per weight (torch's grouped_mm), no host synchronisation
    tile      the same, with the gating, sorting, expanding and reducing done by DeepSeek's TileKernels

Shapes: N tokens, k experts per token, E experts, D hidden size, F expert width, P rows sorted by expert: every token k
times, each expert's rows filled up to a multiple of ALIGNMENT, and a tail up to a bound that needs no look at the data.
No backend drops a token, and an expert may receive none or all of them.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

BACKENDS = ("loop", "grouped", "tile")
ALIGNMENT = 16                         # rows: what FP8 products need, and few distinct sizes for a CPU's kernels
TILE_CAPABILITIES = ((9, 0), (10, 0))  # Hopper, data-centre Blackwell
TILE_WIDTH = 256                       # TileKernels reduces hidden sizes that are multiples of this


class BackendError(RuntimeError):
    """A backend was asked for that cannot run here; the message names the remedy."""


def resolve_backend(name: str, device: torch.device, hidden_size: int) -> str:
    """`auto` becomes `tile` where it imports and the GPU is one it supports, else `grouped`; a named one is checked."""
    if name not in ("auto", "tile"):
        return name
    obstacle = None
    if importlib.util.find_spec("tile_kernels") is None:
        obstacle = 'TileKernels is not installed; run: pip install -e ".[tile]"'
    elif device.type != "cuda" or torch.cuda.get_device_capability(device) not in TILE_CAPABILITIES:
        obstacle = "TileKernels needs a Hopper or Blackwell GPU (sm_90, sm_100); use --moe_backend grouped"
    elif hidden_size % TILE_WIDTH:
        obstacle = f"hidden_size {hidden_size} is not a multiple of {TILE_WIDTH}; use --moe_backend grouped"
    if obstacle and name == "tile":
        raise BackendError(f"--moe_backend tile: {obstacle}")
    return "grouped" if obstacle else "tile"


# ---------------------------------------------------------------------------------------------------------------------
# The six operations, with the names and signatures of tile_kernels.moe; none of them carries a gradient

def operations(backend: str):
    """The module of TileKernels for `tile`, the plain-torch equivalents for the others."""
    if backend == "tile":
        import tile_kernels.moe
        return tile_kernels.moe
    return TORCH_OPERATIONS


def _topk_gate(scores, num_topk):
    return scores.topk(num_topk, dim=-1).indices


def _normalize_weight(weights):
    denominator = weights.sum(-1)
    return denominator, weights / denominator[:, None]


def _aux_fi(topk_idx, num_experts, num_aux_topk):
    chosen = topk_idx.flatten() + 1  # -1, no expert, counts in the first place, which is dropped
    count = torch.zeros(num_experts + 1, device=chosen.device)
    count.index_add_(0, chosen, torch.ones(len(chosen), device=chosen.device))
    return count[1:] * (num_experts / (len(topk_idx) * num_aux_topk))


def _get_fused_mapping(topk_idx, num_experts, num_expanded_tokens, alignment):
    """-> pos_to_expert [P], pos_to_token [P], pos_to_token_topk [P] (-1 where nothing lies), token_topk_to_pos [N, k],
    expert_start, expert_end, num_tokens_per_expert [E], all int32 and aligned; like the original's, the last is []."""
    device, slots = topk_idx.device, topk_idx.numel()
    by_expert, order = topk_idx.flatten().sort(stable=True)
    experts = torch.arange(num_experts, device=device)
    begin = torch.searchsorted(by_expert, experts)
    count = torch.searchsorted(by_expert, experts, right=True) - begin
    aligned = (count + alignment - 1) // alignment * alignment
    end = aligned.cumsum(0)
    start = end - aligned
    position = torch.arange(slots, device=device) + (start - begin).index_select(0, by_expert)
    pos_to_token_topk = order.new_full((num_expanded_tokens,), -1).scatter_(0, position, order)
    pos_to_expert = order.new_full((num_expanded_tokens,), -1).scatter_(0, position, by_expert)
    pos_to_token = torch.where(pos_to_token_topk < 0, -1, pos_to_token_topk // topk_idx.shape[1])
    token_topk_to_pos = torch.empty_like(order).scatter_(0, order, position).view(topk_idx.shape)
    mapping = pos_to_expert, pos_to_token, pos_to_token_topk, token_topk_to_pos, start, end, aligned
    return *(t.int() for t in mapping), []


def _expand_to_fused(x, token_topk_to_pos, pos_to_expert):
    tokens, k = token_topk_to_pos.shape
    source = torch.full((len(pos_to_expert),), tokens, dtype=torch.int64, device=x.device)
    source.scatter_(0, token_topk_to_pos.flatten().long(), torch.arange(tokens * k, device=x.device) // k)
    return F.pad(x, (0, 0, 0, 1)).index_select(0, source)


def _reduce_fused(x, topk_weights, token_topk_to_pos):
    return F.embedding_bag(token_topk_to_pos, x, mode="sum", per_sample_weights=topk_weights)


TORCH_OPERATIONS = SimpleNamespace(
    topk_gate=_topk_gate, normalize_weight=_normalize_weight, aux_fi=_aux_fi, get_fused_mapping=_get_fused_mapping,
    expand_to_fused=_expand_to_fused, reduce_fused=_reduce_fused)


class _Normalize(torch.autograd.Function):
    """Rows [N, k] divided by their sums."""

    @staticmethod
    def forward(ctx, weights, ops):
        denominator, normalized = ops.normalize_weight(weights.contiguous())
        ctx.save_for_backward(denominator, normalized)
        return normalized

    @staticmethod
    def backward(ctx, grad):
        denominator, normalized = ctx.saved_tensors
        return (grad - (grad * normalized).sum(-1, keepdim=True)) / denominator[:, None], None


class _Expand(torch.autograd.Function):
    """Tokens [N, D] copied to their rows [P, D], zero elsewhere; the gradient of a token is the sum over its rows."""

    @staticmethod
    def forward(ctx, x, token_topk_to_pos, pos_to_expert, ops):
        ctx.save_for_backward(token_topk_to_pos)
        ctx.ops = ops
        return ops.expand_to_fused(x.contiguous(), token_topk_to_pos, pos_to_expert)

    @staticmethod
    def backward(ctx, grad):
        return ctx.ops.reduce_fused(grad.contiguous(), None, *ctx.saved_tensors), None, None, None


class _Reduce(torch.autograd.Function):
    """Rows [P, D] summed to their tokens [N, D]: _Expand the other way round. Rows of no token are never read."""

    @staticmethod
    def forward(ctx, rows, token_topk_to_pos, pos_to_expert, ops):
        ctx.save_for_backward(token_topk_to_pos, pos_to_expert)
        ctx.ops = ops
        return ops.reduce_fused(rows.contiguous(), None, token_topk_to_pos)

    @staticmethod
    def backward(ctx, grad):
        return ctx.ops.expand_to_fused(grad.contiguous(), *ctx.saved_tensors), None, None, None


# ---------------------------------------------------------------------------------------------------------------------
# Routing

@dataclass
class Routing:
    """One router's decision on N tokens, and what it costs."""
    topk_idx: Tensor          # [N, k] int64
    topk_weights: Tensor      # [N, k] fp32, each row sums to 1
    load: Tensor | None       # [E] fp32, f_e = tokens of an expert relative to an even share
    aux_loss: Tensor | None         # sum_e f_e P_e, P_e the mean probability: 1 when balanced
    z_loss: Tensor | None     # mean squared log-partition of the scores


def route(score: Tensor, expert_bias: Tensor, k: int, share: Tensor | None, backend: str,
          topk_idx: Tensor | None = None) -> Routing:
    """Softmax over the scores [N, E]; selection by probability + expert_bias [E], weights from the probabilities alone.

    share [N] is each token's part in the means: 1 / tokens, or 0 for a row that only fills up; without it there are
    none. A given topk_idx [N, k],
    the decision of an earlier pass, is kept whatever the scores say now (recomputation); -1 in it is undecided.
    """
    ops, prob = operations(backend), score.softmax(-1)
    chosen = ops.topk_gate(prob.detach() + expert_bias, k)
    topk_idx = chosen if topk_idx is None else torch.where(topk_idx < 0, chosen, topk_idx)
    weights = _Normalize.apply(prob.gather(1, topk_idx), ops)
    if share is None:
        return Routing(topk_idx, weights, None, None, None)
    counted = topk_idx.masked_fill((share == 0)[:, None], -1)
    load = ops.aux_fi(counted, len(expert_bias), k) * (len(share) * share.max())  # aux_fi divides by all rows
    return Routing(topk_idx, weights, load, (load * (share @ prob)).sum(), share @ score.logsumexp(-1).square())


# ---------------------------------------------------------------------------------------------------------------------
# Experts

def grouped_product(rows: Tensor, weights: Tensor, expert_end: Tensor) -> Tensor:
    """rows [P, D] sorted by expert, each times its expert's weights [E, D, F]; expert_end [E] int32 -> [P, F].

    Rows behind the last expert's, and their gradients, come out uninitialised: nothing may sum over them."""
    product = F.grouped_mm if rows.dtype == torch.bfloat16 else _uncompiled_grouped_mm
    return product(rows, weights, offs=expert_end)


_uncompiled_grouped_mm = torch.compiler.disable(F.grouped_mm)  # torch.compile accepts it in bf16 alone


def fp8_grouped_product(rows: Tensor, weights: Tensor, expert_end: Tensor) -> Tensor:
    """The same with operands rounded to FP8 (e4m3), a power-of-two scale for each row and each weight column.

    torchao's kernels on a GPU (16 rows aligned, column-major weights); elsewhere a plain emulation, for tests."""
    if not rows.is_cuda:
        return _EmulatedFP8.apply(rows, weights, expert_end)
    from torchao.prototype.moe_training import _to_fp8_rowwise_then_scaled_grouped_mm
    return _to_fp8_rowwise_then_scaled_grouped_mm(rows, weights, expert_end, pad_token_groups_for_grouped_mm=False)


class _EmulatedFP8(torch.autograd.Function):
    """All three products of torchao's FP8 grouped product, operands rounded and multiplied in their own type."""

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
    """x rounded to e4m3 under a power-of-two scale for each slice along `dim`, in its own type again."""
    largest = x.float().abs().amax(dim, keepdim=True).clamp_min(1e-12)
    scale = torch.exp2((448 / largest).log2().floor())
    return ((x.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / scale).to(x.dtype)


def moe_forward(x: Tensor, topk_idx: Tensor, topk_weights: Tensor, w_gate: Tensor, w_up: Tensor | None,
                w_down: Tensor, backend: str, product: Callable = grouped_product) -> Tensor:
    """Weighted sum of each token's experts: y[n] = sum_j topk_weights[n, j] * SwiGLU_e(x[n]), e = topk_idx[n, j].

    x [N, D]; topk_idx [N, k] int64; topk_weights [N, k] fp32; w_gate and w_up [E, D, F], w_down [E, F, D], of x's type.
    w_up is None where w_gate holds both side by side, [E, D, 2F]: `grouped` and `tile` then need not join them.
    product is one of the two above. Returns y [N, D]. Differentiable in x, topk_weights and the three weights.
    """
    if len(x) == 1 and not (x.is_cuda or torch.is_grad_enabled()):
        return _one_row(x, topk_idx, topk_weights, w_gate, w_up, w_down)
    if backend == "loop":
        w_gate, w_up = w_gate.chunk(2, dim=-1) if w_up is None else (w_gate, w_up)
        return _loop(x, topk_idx, topk_weights, w_gate, w_up, w_down, product)
    w_gate_up = w_gate if w_up is None else torch.cat((w_gate, w_up), dim=-1)
    return _sorted(x, topk_idx, topk_weights, w_gate_up, w_down, product, operations(backend))


def _loop(x, topk_idx, topk_weights, w_gate, w_up, w_down, product):
    multiply = torch.matmul if product is grouped_product else partial(_multiply_group, product)
    y = torch.zeros_like(x)
    for expert in topk_idx.unique().tolist():
        token, slot = (topk_idx == expert).nonzero(as_tuple=True)
        rows = x[token]
        hidden = F.silu(multiply(rows, w_gate[expert])) * multiply(rows, w_up[expert])
        weight = topk_weights[token, slot].to(x.dtype)
        y = y.index_add(0, token, multiply(hidden, w_down[expert]) * weight[:, None])
    return y


def _one_row(x, topk_idx, topk_weights, w_gate, w_up, w_down):
    """A token alone, as decoding brings it to a CPU: nothing is sorted, experts' weights are read where they lie."""
    y = 0
    for expert, weight in zip(topk_idx[0].tolist(), topk_weights.to(x.dtype).unbind(1)):
        gate, up = (x @ w_gate[expert]).chunk(2, dim=-1) if w_up is None else (x @ w_gate[expert], x @ w_up[expert])
        y = y + (F.silu(gate) * up) @ w_down[expert] * weight
    return y


def _multiply_group(product, rows, weight):
    """One expert's rows [n, D] times its weight [D, F] by a grouped product, filled up to its alignment."""
    padded = F.pad(rows, (0, 0, 0, -len(rows) % ALIGNMENT))
    end = torch.full((1,), len(padded), dtype=torch.int32, device=rows.device)
    return product(padded, weight[None], end)[:len(rows)]


def _sorted(x, topk_idx, topk_weights, w_gate_up, w_down, product, ops):
    # The bound on P holds for any routing; fewer rows would be written out of bounds by TileKernels.
    bound = (topk_idx.numel() + (ALIGNMENT - 1) * len(w_down)) // ALIGNMENT * ALIGNMENT
    pos_to_expert, _, _, slot_to_pos, _, expert_end, *_ = ops.get_fused_mapping(
        topk_idx, len(w_down), bound, ALIGNMENT)
    rows = _Expand.apply(x, slot_to_pos, pos_to_expert, ops)                                  # [P, D]
    row_weights = topk_weights.new_zeros(bound).index_copy(0, slot_to_pos.flatten().long(), topk_weights.flatten())
    gate, up = product(rows, w_gate_up, expert_end).chunk(2, dim=-1)                          # [P, F]
    hidden = F.silu(gate) * up * row_weights[:, None].to(x.dtype)  # weighted where a row is narrowest
    return _Reduce.apply(product(hidden, w_down, expert_end), slot_to_pos, pos_to_expert, ops)
