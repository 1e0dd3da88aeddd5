"""Routing and experts of a mixture-of-experts layer, behind one signature for four backends.

    loop      one expert after the other in plain Python: the reference for tests of the others
    grouped   rows sorted by expert, one grouped product per weight (torch's grouped_mm)
    triton    the same by spider/grouped_triton.py, for GPUs on which torch's product is a loop
    tile      like grouped, with gating, sorting, expanding and reducing by DeepSeek's TileKernels

No backend drops a token; an expert may get none or all of them. Expert -1 means none.

Shapes end the names of tensors, `topk_idx_NK`:

    N  tokens, rows of the core   D  hidden size
    K  experts per token          F  width of an expert
    E  experts                    G  2 * F, gate and up side by side
    S  slots, N * K               V  visits: routings that are balanced together
    P  rows sorted by expert: every token K times. Each expert's rows are padded to a multiple of
       ALIGNMENT, and the end up to a bound that does not depend on the data.
"""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from spider.config import SpiderConfig  # before torch: the package sets its threads

# isort: split
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spider.common import SpiderError
from spider.layers import SwiGLU, WideLinear
from spider.packing import round_up

ALIGNMENT = 16  # rows: required by FP8 products; also limits the number of CPU kernels
# minimum of TileKernels: Hopper, Blackwell (sm_120 is not listed, but the original ran there)
TILE_CAPABILITY = (9, 0)
TILE_WIDTH = 256  # TileKernels needs hidden sizes that are multiples of this
# backends that are tested before their use
KERNELS = {"triton": "Triton's grouped product", "tile": "TileKernels"}
PACKAGES = {"triton": "triton", "tile": '-e ".[tile]"'}

# (rows [P, D], weights [E, D, F], expert_end [E]) -> [P, F]
GroupedProduct = Callable[[Tensor, Tensor, Tensor], Tensor]


class BackendError(SpiderError, RuntimeError):
    """The requested backend cannot run here; the message names the remedy."""


def resolve_backend(
    name: str,
    device: torch.device,
    config: SpiderConfig,
    dtype: torch.dtype,
    compiled: bool = False,
) -> tuple[str, str]:
    """Resolve a backend; return it, and a line to log or "".

    On a GPU `auto` becomes the first of these that passes a test there: `triton`, if torch's
    grouped product is a loop; `tile`, unless layers are compiled, since torch.compile does not
    support TileKernels; else `grouped`. Raise BackendError if `triton` or `tile` is requested but
    fails.

    dtype: of the products. compiled: whether layers are.
    """
    on_gpu = device.type == "cuda"
    torch_loops = (
        on_gpu and name != "loop" and config.has_experts and not multiplies_at_once(device, dtype)
    )
    remarks = []
    if name in KERNELS:
        obstacle = find_obstacle(name, device, config, dtype)
        if obstacle:
            raise BackendError(f"--moe_backend {name}: {obstacle}; or use --moe_backend grouped")
    if name == "auto":
        candidates = []
        if torch_loops:
            candidates.append("triton")
        if on_gpu and not compiled:
            candidates.append("tile")
        name = "grouped"
        for backend in candidates:
            obstacle = find_obstacle(backend, device, config, dtype)
            if obstacle is None:
                name = backend
                break
            remarks.append(f"{KERNELS[backend]} not used: {obstacle}")
    if torch_loops and name != "triton":
        number = str(dtype).removeprefix("torch.")
        remarks.append(
            f"on this GPU torch runs {number} experts one after the other and waits for the device "
            f"at each grouped product (docs/results/performance.md)"
        )
    return name, "; ".join(remarks)


def multiplies_at_once(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch's grouped product is a single kernel without a host sync.

    In torch's GroupedBlas.cpp it is for bf16 on compute capability 9.x and 10.x. Otherwise torch
    copies the group sizes to the host and calls mm for each group.
    """
    return dtype == torch.bfloat16 and torch.cuda.get_device_capability(device)[0] in (9, 10)


# --------------------------------------------------------------------------------------------------
# Check of kernels


def find_obstacle(
    backend: str, device: torch.device, config: SpiderConfig, dtype: torch.dtype
) -> str | None:
    """Return why the kernels of `triton` or `tile` cannot run this model here, or None.

    The reason names the remedy. This compiles the kernels of training: seconds for each the first
    time, later from a cache. Raise BackendError if the test leaves the GPU unusable.
    """
    kernels = KERNELS[backend]
    if not config.has_experts:
        return "the model has no routed experts"
    if device.type != "cuda":
        return f"{kernels} needs a GPU"
    if backend == "tile":
        if torch.cuda.get_device_capability(device) < TILE_CAPABILITY:
            return "TileKernels needs a GPU from Hopper on (sm_90 or above)"
        if config.hidden_size % TILE_WIDTH:
            return (
                f"TileKernels needs a hidden_size that is a multiple of {TILE_WIDTH}, "
                f"not {config.hidden_size}"
            )
    obstacle = None
    try:
        with torch.cuda.device(device):  # TileKernels allocates its results on the current device
            if backend == "triton":
                from spider.grouped_triton import grouped_product as product

                wrong = find_wrong_product(product, device, config, dtype)
            else:
                wrong = find_disagreement(operations(), device, config, dtype)
        if wrong:
            obstacle = f"{kernels} computes wrong results on this GPU: {wrong}"
    except ImportError as fault:
        obstacle = (
            f"{kernels} cannot be imported ({first_error(fault)}): pip install {PACKAGES[backend]}"
        )
    except Exception as fault:  # whatever a compiler or a kernel provokes
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
    """Describe an error in one line.

    A compiler prints the source before its errors: then this is the first line with an error.
    """
    lines = [line.strip() for line in str(fault).splitlines() if line.strip()]
    first = lines[0] if lines else ""
    for line in lines:
        if re.search(r"(error|fatal)\s*: *\S", line):
            first = line
            break
    return f"{type(fault).__name__}: {first[:200]}".removesuffix(": ")


def find_disagreement(
    ops: Any, device: torch.device, config: SpiderConfig, dtype: torch.dtype
) -> str | None:
    """Name the first of TileKernels' six operations that differs from plain torch, or return None.

    The data has ties, zero weights and slots without an expert. It is large enough for several SMs,
    and all sums are exact. ops: the module of the operations. dtype: of the rows.
    """
    tokens = 1000
    experts = config.n_routed_experts
    k = config.n_experts_per_tok
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randint(low, high, shape, generator=generator).to(device, dtype)

    is_close = partial(torch.allclose, rtol=1e-5, atol=0)

    score_NE = draw(0, 8, tokens, experts)
    topk_idx_NK = _topk_gate(score_NE, k)
    if not torch.equal(ops.topk_gate(score_NE, k), topk_idx_NK):
        return "topk_gate"

    weights_NK = draw(0, 2, tokens, k)
    total_N = weights_NK.sum(-1) + 1e-20
    their_total_N, their_weights_NK = ops.normalize_weight(weights_NK)
    if not is_close(total_N, their_total_N):
        return "normalize_weight"
    if not is_close(weights_NK / total_N[:, None], their_weights_NK):
        return "normalize_weight"

    topk_idx_NK = topk_idx_NK.masked_fill(draw(0, 8, tokens, k) == 0, -1)
    if not is_close(_aux_fi(topk_idx_NK, experts, k), ops.aux_fi(topk_idx_NK, experts, k)):
        return "aux_fi"

    bound = row_bound(tokens * k, experts)
    mapping = fused_mapping(ops, topk_idx_NK, experts, bound)
    if not _is_right_mapping(mapping, topk_idx_NK, experts):
        return "get_fused_mapping"

    row_NK = mapping.row_NK
    has_row_NK = row_NK >= 0
    x_ND = draw(-8, 9, tokens, config.hidden_size, dtype=dtype)
    rows_PD = draw(-8, 9, bound, config.hidden_size, dtype=dtype)
    token_NK = torch.arange(tokens, device=device)[:, None].expand_as(row_NK)
    expanded_PD = torch.zeros_like(rows_PD).index_copy_(
        0, row_NK[has_row_NK].long(), x_ND[token_NK[has_row_NK]]
    )
    if not torch.equal(ops.expand_to_fused(x_ND, row_NK, mapping.expert_P), expanded_PD):
        return "expand_to_fused"
    reduced_ND = (rows_PD[row_NK] * has_row_NK[..., None]).sum(1)
    if not torch.equal(ops.reduce_fused(rows_PD, None, row_NK), reduced_ND):
        return "reduce_fused"
    return None


def _is_right_mapping(mapping: "FusedMapping", topk_idx_NK: Tensor, n_experts: int) -> bool:
    """Compare TileKernels' mapping with one by counting. An expert's slots may have any order."""
    ours = _rows_by_expert(topk_idx_NK, n_experts, n_rows=len(mapping.expert_P))
    expert_P = torch.where(ours.slot_P < 0, -1, topk_idx_NK.flatten()[ours.slot_P])
    if not torch.equal(mapping.expert_P.long(), expert_P):
        return False
    if not torch.equal(mapping.expert_end_E.long(), ours.expert_end_E):
        return False
    their_rows = mapping.row_NK.flatten().sort().values.long()
    if not torch.equal(their_rows, ours.row_NK.flatten().sort().values):
        return False  # else the next line might read out of bounds
    expert_NK = torch.where(mapping.row_NK < 0, -1, mapping.expert_P[mapping.row_NK])
    return torch.equal(expert_NK.long(), topk_idx_NK)


class ProductResults(NamedTuple):
    """A grouped product and its gradients, without the rows that belong to no expert."""

    product: Tensor
    rows_grad: Tensor
    weights_grad: Tensor


def find_wrong_product(
    product: GroupedProduct, device: torch.device, config: SpiderConfig, dtype: torch.dtype
) -> str | None:
    """Name what of a grouped product differs from experts in turn, its value or a gradient, or
    return None.

    The shapes are those of the model, with a hundred rows per expert and with a thousand, for which
    a kernel may have other blocks. Expert 1 has no rows. Rows after the last expert's are NaN. All
    sums are exact.
    """
    experts = config.n_routed_experts
    hidden = config.hidden_size
    width = config.moe_intermediate_size
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randint(-8, 9, shape, generator=generator, device=device).to(dtype)

    for scale in (1, 10):
        expert_end_E = scale * ((37 * torch.arange(experts) + 163) % 200).cumsum(0)
        used = int(expert_end_E[-1])
        expert_end_E = expert_end_E.int().to(device)
        for d, f in ((hidden, 2 * width), (width, hidden)):
            rows_PD = draw(used + ALIGNMENT, d)
            weights_EDF = draw(experts, d, f)
            upstream_PF = draw(used + ALIGNMENT, f)
            rows_PD[used:] = math.nan
            upstream_PF[used:] = math.nan
            operands = (rows_PD, weights_EDF, upstream_PF)
            ours = _results_of(product, operands, expert_end_E, dtype)
            exact = _results_of(multiply_in_turn, operands, expert_end_E, torch.float32)
            for what, result, wanted in zip(
                ("the product", "its rows' gradient", "its weights' gradient"),
                ours,
                exact,
                strict=True,
            ):
                if not torch.equal(result, wanted):
                    return f"{what}, {d} x {f}, {used} rows"
    return None


def _results_of(
    product: GroupedProduct,
    operands: tuple[Tensor, Tensor, Tensor],
    expert_end_E: Tensor,
    dtype: torch.dtype,
) -> ProductResults:
    """Compute a grouped product and its gradients in `dtype`; return them in the operands' dtype.

    operands: rows [P, D], weights [E, D, F], the result's gradient [P, F]."""
    used = int(expert_end_E[-1])
    rows_PD, weights_EDF, upstream_PF = (t.to(dtype).requires_grad_() for t in operands)
    y_PF = product(rows_PD, weights_EDF, expert_end_E)
    rows_grad, weights_grad = torch.autograd.grad(y_PF, (rows_PD, weights_EDF), upstream_PF)
    results = (y_PF[:used], rows_grad[:used], weights_grad)
    return ProductResults(*(result.to(operands[0].dtype) for result in results))


# --------------------------------------------------------------------------------------------------
# Operations of routing, of TileKernels and in plain torch; none has a gradient. Ties go to the
# smaller index, and expert -1 is skipped.


def operations() -> Any:
    """Return the module of TileKernels."""
    import tile_kernels.moe

    return tile_kernels.moe


class FusedMapping(NamedTuple):
    """The results of TileKernels' get_fused_mapping that are used here, all int32."""

    expert_P: Tensor  # expert of each row, -1 for padding
    row_NK: Tensor  # row of each slot, -1 for none
    expert_end_E: Tensor  # the row after each expert's last one


def fused_mapping(ops: Any, topk_idx_NK: Tensor, n_experts: int, n_rows: int) -> FusedMapping:
    expert_P, _, _, row_NK, _, expert_end_E, *_ = ops.get_fused_mapping(
        topk_idx_NK, n_experts, n_rows, ALIGNMENT
    )
    return FusedMapping(expert_P, row_NK, expert_end_E)


def _topk_gate(score_NE: Tensor, k: int) -> Tensor:
    """Choose the k experts of the largest scores, topk_idx [N, K]."""
    # topk is not stable
    return score_NE.sort(dim=-1, descending=True, stable=True).indices[:, :k].contiguous()


def _count_slots(topk_idx_NK: Tensor, n_experts: int) -> Tensor:
    """Count the slots of each expert, fp32 [E]."""
    chosen_S = topk_idx_NK.flatten() + 1  # -1 goes to the first count, which is dropped
    count = torch.zeros(n_experts + 1, device=chosen_S.device)
    count.index_add_(0, chosen_S, torch.ones(len(chosen_S), device=chosen_S.device))
    return count[1:]


def _aux_fi(topk_idx_NK: Tensor, n_experts: int, k: int) -> Tensor:
    """Return each expert's slots relative to an even load, fp32 [E]."""
    return _count_slots(topk_idx_NK, n_experts) * (n_experts / (len(topk_idx_NK) * k))


class SlotRows(NamedTuple):
    """Which slot is in which row, int64."""

    row_NK: Tensor  # row of each slot, -1 for slots without an expert
    slot_P: Tensor  # slot of each row, -1 for padding
    expert_end_E: Tensor  # the row after each expert's last one


def _rows_by_expert(
    topk_idx_NK: Tensor, n_experts: int, n_rows: int, at_least: int = 0
) -> SlotRows:
    """Assign rows to slots by counting, without a sort or a host sync.

    n_rows: P. at_least: rows that every expert gets, if only as padding."""
    device = topk_idx_NK.device
    expert_E = torch.arange(n_experts, device=device)
    is_chosen_ES = expert_E[:, None] == topk_idx_NK.flatten()
    rank_ES = is_chosen_ES.cumsum(1)  # of a slot within its expert, from 1 on
    count_E = rank_ES[:, -1]
    padded_E = ((count_E + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT).clamp_min(at_least)
    expert_end_E = padded_E.cumsum(0)
    expert_start_E = expert_end_E - padded_E
    # In place, since [E, S] is large. Rows count from 1 on here: 0 means that the slot did not
    # choose this expert, so the sum over experts is the row of the one that it chose, or 0.
    row_if_chosen_ES = rank_ES.add_(expert_start_E[:, None]).mul_(is_chosen_ES)
    row_from_1_S = row_if_chosen_ES.sum(0)
    slot_S = torch.arange(len(row_from_1_S), device=device)
    slot_from_1 = row_from_1_S.new_full((1 + n_rows,), -1).scatter_(0, row_from_1_S, slot_S)
    return SlotRows(
        row_NK=(row_from_1_S - 1).view(topk_idx_NK.shape),
        slot_P=slot_from_1[1:],
        expert_end_E=expert_end_E,
    )


class _Normalize(torch.autograd.Function):
    """Divide rows [N, K] by their sums."""

    @staticmethod
    def forward(ctx, weights_NK: Tensor) -> Tensor:
        denominator_N, normalized_NK = operations().normalize_weight(weights_NK.contiguous())
        ctx.save_for_backward(denominator_N, normalized_NK)
        return normalized_NK

    @staticmethod
    def backward(ctx, grad_NK: Tensor) -> Tensor:
        denominator_N, normalized_NK = ctx.saved_tensors
        mean_grad_N1 = (grad_NK * normalized_NK).sum(-1, keepdim=True)
        return (grad_NK - mean_grad_N1) / denominator_N[:, None]


class ExpertRows(NamedTuple):
    """The sorted order of tokens' rows, for the backends that sort."""

    row_NK: Tensor  # rows of each token
    # token of each row, any for padding; for `tile` instead the row's expert, -1 for padding
    source_P: Tensor
    expert_end_E: Tensor  # int32


def assign_rows(topk_idx_NK: Tensor, n_experts: int, backend: str) -> ExpertRows | None:
    """Sort slots by expert; return None for `loop`, which does not sort.

    Every expert gets rows, if only padding with weight 0: on sm_100 grouped_mm leaves the weight
    gradient of a group without rows uninitialized (pytorch issue 172439)."""
    if backend == "loop":
        return None
    tokens, k = topk_idx_NK.shape
    bound = row_bound(topk_idx_NK.numel(), n_experts)
    if backend == "tile":
        # Some tokens more, which choose each expert once, give each expert a row. These rows then
        # become padding.
        extra = torch.arange(round_up(n_experts, k), device=topk_idx_NK.device)
        extra_NK = extra.masked_fill(extra >= n_experts, -1).view(-1, k)
        mapping = fused_mapping(operations(), torch.cat((topk_idx_NK, extra_NK)), n_experts, bound)
        extra_rows = mapping.row_NK[tokens:].flatten()[:n_experts]
        mapping.expert_P.index_fill_(0, extra_rows.long(), -1)
        return ExpertRows(mapping.row_NK[:tokens], mapping.expert_P, mapping.expert_end_E)
    slots = _rows_by_expert(topk_idx_NK, n_experts, bound, at_least=ALIGNMENT)
    return ExpertRows(slots.row_NK, slots.slot_P.clamp_min(0) // k, slots.expert_end_E.int())


def row_bound(slots: int, experts: int) -> int:
    """Return P, enough rows for any routing of `slots` slots and one more for each expert.

    With fewer, TileKernels would write out of bounds."""
    return (slots + ALIGNMENT * experts) // ALIGNMENT * ALIGNMENT


def _expand(x_ND: Tensor, row_NK: Tensor, source_P: Tensor, tile: bool) -> Tensor:
    """Copy tokens [N, D] to their rows [P, D]. Padding rows get any finite values, since their
    weight is 0."""
    if tile:
        return operations().expand_to_fused(x_ND.contiguous(), row_NK, source_P)
    return x_ND.index_select(0, source_P)


def _reduce(rows_PD: Tensor, row_NK: Tensor, tile: bool) -> Tensor:
    """Sum rows [P, D] to their tokens [N, D]. Padding rows are never read."""
    rows_PD = rows_PD.detach().contiguous()
    if tile:
        return operations().reduce_fused(rows_PD, None, row_NK)
    return F.embedding_bag(row_NK, rows_PD, mode="sum")


class _Expand(torch.autograd.Function):
    """Copy tokens to their rows; the gradient of a token is the sum over its rows."""

    @staticmethod
    def forward(ctx, x_ND: Tensor, row_NK: Tensor, source_P: Tensor, tile: bool) -> Tensor:
        ctx.save_for_backward(row_NK)
        ctx.tile = tile
        return _expand(x_ND, row_NK, source_P, tile)

    @staticmethod
    def backward(ctx, grad_PD: Tensor) -> tuple[Tensor, None, None, None]:
        (row_NK,) = ctx.saved_tensors
        return _reduce(grad_PD, row_NK, ctx.tile), None, None, None


class _Reduce(torch.autograd.Function):
    """Sum rows to their tokens, the transpose of _Expand."""

    @staticmethod
    def forward(ctx, rows_PD: Tensor, row_NK: Tensor, source_P: Tensor, tile: bool) -> Tensor:
        ctx.save_for_backward(row_NK, source_P)
        ctx.tile = tile
        return _reduce(rows_PD, row_NK, tile)

    @staticmethod
    def backward(ctx, grad_ND: Tensor) -> tuple[Tensor, None, None, None]:
        row_NK, source_P = ctx.saved_tensors
        return _expand(grad_ND, row_NK, source_P, ctx.tile), None, None, None


# --------------------------------------------------------------------------------------------------
# Routing


class Routing(NamedTuple):
    """The routing of N tokens; all None without routed experts."""

    score: Tensor | None  # [N, E] fp32
    topk_idx: Tensor | None  # [N, K] int64
    rows: ExpertRows | None  # for backends that sort


def route(
    score_NE: Tensor,
    expert_bias_E: Tensor,
    k: int,
    backend: str,
    topk_idx_NK: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose experts by a softmax over the scores; return topk_idx and topk_weights.

    The selection uses probability + expert_bias, the weights only the probabilities. Those of
    several experts are scaled to a sum of 1. The weight of a single one is its probability, as in
    Switch Transformer (arXiv 2101.03961): a weight of 1 would leave the router no gradient from the
    loss. A topk_idx of an earlier pass is reused (recomputation).

    Returns topk_idx [N, K] int64 and topk_weights [N, K] fp32.
    """
    tile = backend == "tile"
    if topk_idx_NK is None:
        top_k = operations().topk_gate if tile else _topk_gate
        topk_idx_NK = top_k(score_NE.detach().softmax(-1) + expert_bias_E, k)
        if tile:  # it returns 2^31 - 1 for NaN scores; the loss will be NaN anyway
            topk_idx_NK.clamp_(0, len(expert_bias_E) - 1)
    if k == 1:
        return topk_idx_NK, score_NE.softmax(-1).gather(1, topk_idx_NK)
    if tile:
        return topk_idx_NK, _Normalize.apply(score_NE.softmax(-1).gather(1, topk_idx_NK))
    # the same as dividing probabilities by their sum, since the common factor cancels
    return topk_idx_NK, score_NE.gather(1, topk_idx_NK).softmax(-1)


class Balance(NamedTuple):
    """The balance losses of several routings."""

    aux_loss: Tensor  # sum over routings of sum_e f_e P_e
    z_loss: Tensor  # sum over routings of the mean squared log-partition
    count_VE: Tensor  # each expert's tokens, fp32


def balance(score_VNE: Tensor, topk_idx_VNK: Tensor, share_VN: Tensor, backend: str) -> Balance:
    """Compute the balance losses of V routings.

    share: each token's weight in the means, equal for all but 0 for padding. P_e is the mean
    probability of expert e. f_e is its load: its tokens relative to an even number of them.
    """
    _, tokens, experts = score_VNE.shape
    k = topk_idx_VNK.shape[2]
    is_padding_VN = share_VN == 0
    count_VE = _counts(topk_idx_VNK.masked_fill(is_padding_VN[:, :, None], -1), experts, backend)
    # relative to that of all rows, padding included, and then to that of rows with a share
    load_VE = count_VE * (experts / (tokens * k)) * (tokens * share_VN.amax(1))[:, None]

    total_V = share_VN.sum(1).clamp_min(1e-9)
    prob_VNE = score_VNE.softmax(-1)
    mean_prob_VE = torch.bmm(share_VN[:, None], prob_VNE).squeeze(1)
    aux_loss = (load_VE / total_V[:, None] * mean_prob_VE).sum()
    squared_VN = score_VNE.logsumexp(-1).square()
    z_loss = share_VN.flatten() @ squared_VN.flatten()
    return Balance(aux_loss, z_loss, count_VE)


def _counts(topk_idx_VNK: Tensor, experts: int, backend: str) -> Tensor:
    """Count each routing's slots of each expert, fp32 [V, E]."""
    visits, tokens, k = topk_idx_VNK.shape
    # TileKernels' aux_fi, which divides by an even load, sums in any order
    if backend == "tile" and not torch.are_deterministic_algorithms_enabled():
        loads = [operations().aux_fi(topk_idx_NK, experts, k) for topk_idx_NK in topk_idx_VNK]
        return (torch.stack(loads) * (tokens * k / experts)).round()
    # all at once, as if every routing had its own experts
    first_expert_V = torch.arange(0, visits * experts, experts, device=topk_idx_VNK.device)
    distinct_VNK = torch.where(topk_idx_VNK < 0, -1, topk_idx_VNK + first_expert_V[:, None, None])
    return _count_slots(distinct_VNK.flatten(0, 1), visits * experts).view(visits, experts)


# --------------------------------------------------------------------------------------------------
# Experts


def grouped_product(rows_PD: Tensor, weights_EDF: Tensor, expert_end_E: Tensor) -> Tensor:
    """Multiply rows, sorted by expert, by their experts' weights: -> [P, F].

    expert_end: int32. Rows after the last expert's, and their gradients, are uninitialized: nothing
    may sum over them."""
    if rows_PD.dtype == torch.float64:
        return multiply_in_turn(rows_PD, weights_EDF, expert_end_E)
    if rows_PD.dtype != torch.bfloat16 and torch.compiler.is_compiling():
        # traced, it works only in bf16
        return torch.compiler.disable(F.grouped_mm)(rows_PD, weights_EDF, offs=expert_end_E)
    return F.grouped_mm(rows_PD, weights_EDF, offs=expert_end_E)


def multiply_in_turn(rows_PD: Tensor, weights_EDF: Tensor, expert_end_E: Tensor) -> Tensor:
    """Compute grouped_product by a loop over experts, in any dtype, for exact references.

    grouped_mm does not support float64. Rows after the last expert's become 0."""
    *groups, tail = rows_PD.tensor_split(expert_end_E.tolist())
    products = [group @ weight for group, weight in zip(groups, weights_EDF, strict=True)]
    return torch.cat([*products, tail @ torch.zeros_like(weights_EDF[0])])


def fp8_grouped_product(rows_PD: Tensor, weights_EDF: Tensor, expert_end_E: Tensor) -> Tensor:
    """Compute grouped_product in FP8 (e4m3), with a power-of-two scale per row and per weight
    column.

    Uses torchao's kernels on a GPU, which need column-major weights and rows aligned to 16.
    Elsewhere it is an emulation for tests."""
    if not rows_PD.is_cuda:
        return _EmulatedFP8.apply(rows_PD, weights_EDF, expert_end_E)
    from torchao.prototype.moe_training import _to_fp8_rowwise_then_scaled_grouped_mm

    return _to_fp8_rowwise_then_scaled_grouped_mm(
        rows_PD, weights_EDF, expert_end_E, pad_token_groups_for_grouped_mm=False
    )


class _EmulatedFP8(torch.autograd.Function):
    """Emulate the three products of torchao's FP8 grouped product: round the operands, multiply in
    their dtype."""

    @staticmethod
    def forward(ctx, rows_PD: Tensor, weights_EDF: Tensor, expert_end_E: Tensor) -> Tensor:
        ctx.save_for_backward(rows_PD, weights_EDF, expert_end_E)
        return F.grouped_mm(_round_fp8(rows_PD, -1), _round_fp8(weights_EDF, 1), offs=expert_end_E)

    @staticmethod
    def backward(ctx, grad_PF: Tensor) -> tuple[Tensor, Tensor, None]:
        rows_PD, weights_EDF, expert_end_E = ctx.saved_tensors
        grad_rows_PD = F.grouped_mm(
            _round_fp8(grad_PF, -1), _round_fp8(weights_EDF, -1).mT, offs=expert_end_E
        )
        # rows after the last expert's are uninitialized, and would set the scales of all
        is_used_P1 = torch.arange(len(rows_PD), device=rows_PD.device)[:, None] < expert_end_E[-1]
        rows_PD = _round_fp8(torch.where(is_used_P1, rows_PD, 0), 0)
        grad_PF = _round_fp8(torch.where(is_used_P1, grad_PF, 0), 0)
        grad_weights_EDF = F.grouped_mm(rows_PD.mT, grad_PF, offs=expert_end_E)
        return grad_rows_PD, grad_weights_EDF, None


E4M3_MAX = 448


def _round_fp8(x: Tensor, dim: int) -> Tensor:
    """Round x to e4m3 with a power-of-two scale per slice along `dim`; return it in its own
    dtype."""
    largest = x.float().abs().amax(dim, keepdim=True).clamp_min(1e-12)
    scale = torch.exp2((E4M3_MAX / largest).log2().floor())
    scaled = (x.float() * scale).clamp(-E4M3_MAX, E4M3_MAX)
    return (scaled.to(torch.float8_e4m3fn).float() / scale).to(x.dtype)


def moe_forward(
    x_ND: Tensor,
    topk_idx_NK: Tensor,
    topk_weights_NK: Tensor,
    w_gate_up_EDG: Tensor,
    w_down_EFD: Tensor,
    backend: str,
    product: GroupedProduct = grouped_product,
    expert_rows: ExpertRows | None = None,
) -> Tensor:
    """Return the weighted sum of each token's experts, y [N, D].

        y[n] = sum_j topk_weights[n, j] * SwiGLU_e(x[n]), e = topk_idx[n, j]

    Differentiable in x, topk_weights and both weights.

    topk_idx: int64, -1 for none. topk_weights: fp32. w_gate_up, w_down: in x's dtype. product: one
    of the two above; `triton` computes the first by its own kernels. expert_rows: `assign_rows` of
    topk_idx, if known.
    """
    if len(x_ND) == 1 and not (x_ND.is_cuda or torch.is_grad_enabled()):
        return _one_token(x_ND, topk_idx_NK, topk_weights_NK, w_gate_up_EDG, w_down_EFD)
    if backend == "loop":
        return _loop(x_ND, topk_idx_NK, topk_weights_NK, w_gate_up_EDG, w_down_EFD, product)
    if backend == "triton" and product is grouped_product:
        from spider.grouped_triton import grouped_product as product
    if expert_rows is None:
        # slots without an expert are computed by the first one, with weight 0
        topk_weights_NK = topk_weights_NK.masked_fill(topk_idx_NK < 0, 0)
        expert_rows = assign_rows(topk_idx_NK.clamp_min(0), len(w_down_EFD), backend)
    assert expert_rows is not None  # only `loop` has none
    row_NK, source_P, expert_end_E = expert_rows
    tile = backend == "tile"

    rows_PD = _Expand.apply(x_ND, row_NK, source_P, tile)
    weight_S = topk_weights_NK.to(x_ND.dtype).flatten()
    padding_P = weight_S.new_zeros(len(source_P))
    weight_P = padding_P.scatter_(0, row_NK.flatten().long(), weight_S)
    gate_PF, up_PF = product(rows_PD, w_gate_up_EDG, expert_end_E).chunk(2, dim=-1)
    hidden_PF = F.silu(gate_PF) * up_PF * weight_P[:, None]  # weighted where rows are narrowest
    return _Reduce.apply(product(hidden_PF, w_down_EFD, expert_end_E), row_NK, source_P, tile)


def _loop(
    x_ND: Tensor,
    topk_idx_NK: Tensor,
    topk_weights_NK: Tensor,
    w_gate_up_EDG: Tensor,
    w_down_EFD: Tensor,
    product: GroupedProduct,
) -> Tensor:
    """Compute one expert after the other."""
    multiply: Callable[[Tensor, Tensor], Tensor] = torch.matmul
    if product is not grouped_product:
        multiply = partial(_multiply_group, product)
    w_gate_EDF, w_up_EDF = w_gate_up_EDG.chunk(2, dim=-1)
    y_ND = torch.zeros_like(x_ND)
    for expert in topk_idx_NK[topk_idx_NK >= 0].unique().tolist():
        token, slot = (topk_idx_NK == expert).nonzero(as_tuple=True)
        rows = x_ND[token]
        hidden = F.silu(multiply(rows, w_gate_EDF[expert])) * multiply(rows, w_up_EDF[expert])
        weight = topk_weights_NK[token, slot].to(x_ND.dtype)
        y_ND = y_ND.index_add(0, token, multiply(hidden, w_down_EFD[expert]) * weight[:, None])
    return y_ND


def _one_token(
    x_ND: Tensor,
    topk_idx_NK: Tensor,
    topk_weights_NK: Tensor,
    w_gate_up_EDG: Tensor,
    w_down_EFD: Tensor,
) -> Tensor:
    """Compute a single token, for decoding on a CPU, without sorting rows or copying weights."""
    y_ND = torch.zeros_like(x_ND)
    weights = topk_weights_NK.to(x_ND.dtype).unbind(1)
    for expert, weight in zip(topk_idx_NK[0].tolist(), weights, strict=True):
        if expert >= 0:
            gate, up = (x_ND @ w_gate_up_EDG[expert]).chunk(2, dim=-1)
            y_ND = y_ND + (F.silu(gate) * up) @ w_down_EFD[expert] * weight
    return y_ND


def _multiply_group(product: GroupedProduct, rows: Tensor, weight: Tensor) -> Tensor:
    """Multiply one expert's rows [n, D] by its weight [D, F] with a grouped product, padded to its
    alignment."""
    padded = F.pad(rows, (0, 0, 0, -len(rows) % ALIGNMENT))
    end = torch.full((1,), len(padded), dtype=torch.int32, device=rows.device)
    return product(padded, weight[None], end)[: len(rows)]


# --------------------------------------------------------------------------------------------------
# The layer


class MoE(nn.Module):
    """Routed experts and a shared one, [N, D] -> [N, D]. There is no capacity limit, so no token is
    dropped."""

    expert_bias: Tensor  # [E] fp32; for the selection, see Spider.update_expert_bias
    shared: SwiGLU | None
    cast: tuple[Tensor, Tensor] | None = None  # of weights(), inside cast_weights_once

    def __init__(self, config: SpiderConfig):
        super().__init__()
        self.config = config
        self.backend = "grouped"
        self.fp8 = False  # whether the routed experts train in FP8
        experts = config.n_routed_experts
        hidden = config.hidden_size
        width = config.moe_intermediate_size
        if experts:
            self.router = WideLinear(hidden, experts)
            self.w_gate = nn.Parameter(torch.empty(experts, hidden, width))
            self.w_up = nn.Parameter(torch.empty(experts, hidden, width))
            self.w_down = nn.Parameter(torch.empty(experts, width, hidden))
        self.register_buffer("expert_bias", torch.empty(experts))
        self.shared = None
        if config.n_shared_experts:
            self.shared = SwiGLU(hidden, config.n_shared_experts * width)

    def weights(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cast the weights: gate and up as one [E, D, G], and down [E, F, D]."""
        w_gate_up_EDG = torch.cat((self.w_gate.to(dtype), self.w_up.to(dtype)), dim=-1)
        w_down_EFD = self.w_down.to(dtype)
        if self.fp8:  # its kernels need column-major order
            w_gate_up_EDG = w_gate_up_EDG.mT.contiguous().mT
            w_down_EFD = w_down_EFD.mT.contiguous().mT
        return w_gate_up_EDG, w_down_EFD

    def cast_weight(self, dtype: torch.dtype):
        """Cast the weights of the routed experts, see cast_weights_once."""
        self.cast = self.weights(dtype) if self.config.n_routed_experts else None

    def forward(self, x_ND: Tensor, decided: Routing | None = None) -> tuple[Tensor, Routing]:
        """Route each row to its experts, or reuse `decided`, the routing of an earlier pass over
        the same rows."""
        if not self.config.n_routed_experts:
            assert self.shared is not None  # a SpiderConfig has routed experts or shared ones
            return self.shared(x_ND), Routing(None, None, None)
        score_NE = self.router(x_ND)
        topk_idx_NK, topk_weights_NK = route(
            score_NE,
            self.expert_bias,
            self.config.n_experts_per_tok,
            self.backend,
            None if decided is None else decided.topk_idx,
        )
        rows = None if decided is None else decided.rows
        if rows is None and torch.is_grad_enabled():
            rows = assign_rows(topk_idx_NK, len(self.expert_bias), self.backend)
        w_gate_up_EDG, w_down_EFD = self.weights(x_ND.dtype) if self.cast is None else self.cast
        y_ND = moe_forward(
            x_ND,
            topk_idx_NK,
            topk_weights_NK,
            w_gate_up_EDG,
            w_down_EFD,
            self.backend,
            fp8_grouped_product if self.fp8 and self.training else grouped_product,
            rows,
        )
        if self.shared is not None:
            y_ND = y_ND + self.shared(x_ND)
        return y_ND, Routing(score_NE, topk_idx_NK, rows)
