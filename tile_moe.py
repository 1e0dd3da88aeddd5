"""Routing and experts of a mixture-of-experts layer, behind one signature for four backends.

    loop      one expert after another in plain Python: the reference for testing the others
    grouped   tokens sorted by expert, one grouped product per weight (torch's grouped_mm)
    triton    the same with spider/model/grouped_triton.py, where torch's product is a loop
    tile      like grouped; gating, sorting, expanding and reducing with DeepSeek's TileKernels

No backend drops a token. An expert may get any number of the tokens, from none to all.

Tensor names end with their shape, `topk_idx_NK`. In this file,

    N  tokens: segments           D  hidden size
    K  experts per token          F  width of an expert
    E  experts                    G  2 * F, gate and up side by side
    A  assignments, N * K:        V  visits: routings that are balanced together
       token and chosen expert
    P  slots: the assignments sorted by expert. Each expert's slots are padded to a multiple of
       ALIGNMENT, and all slots to a number that does not depend on the data:

           | expert 0, padding | expert 1, padding | ... | unused |
                               ^ expert_end[0]     ^ expert_end[1]
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

# isort: split
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spider.config import SpiderConfig
from spider.errors import SpiderError
from spider.model.kernel_checks import Check, find_wrong, first_error, value_and_gradients
from spider.model.layers import SwiGLU, WideLinear
from spider.model.packing import round_up

ALIGNMENT = 16  # slots: FP8 products require it; it also limits the number of CPU kernels
# What TileKernels needs: Hopper or Blackwell (sm_120 is not listed, but the original ran there),
# and a hidden size that is a multiple of TILE_WIDTH.
TILE_CAPABILITY = (9, 0)
TILE_WIDTH = 256
# backends that are tested before they are used, and what pip installs for them
KERNELS = {"triton": "Triton's grouped product", "tile": "TileKernels"}
PACKAGES = {"triton": "triton", "tile": '-e ".[tile]"'}

# (slots [P, D], weights [E, D, F], expert_end [E]) -> [P, F]
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

    `auto` becomes the first of these on a GPU, `grouped` elsewhere:

        triton    if torch's grouped product is a loop, and the kernels pass their test
        tile      if layers are not compiled (torch.compile does not support TileKernels), and the
                  kernels pass their test
        grouped   otherwise

    dtype: the products' dtype. compiled: whether layers are compiled. Raise BackendError if
    `triton` or `tile` is requested but fails its test.
    """
    if name in KERNELS:
        obstacle = find_obstacle(name, device, config, dtype)
        if obstacle:
            raise BackendError(f"--moe_backend {name}: {obstacle}; or use --moe_backend grouped")
    if name != "auto":
        return name, ""
    candidates = []
    if device.type == "cuda" and config.has_experts:
        if not has_grouped_kernel(device, dtype):
            candidates.append("triton")
        if not compiled:
            candidates.append("tile")
    remarks: list[str] = []
    for backend in candidates:
        obstacle = find_obstacle(backend, device, config, dtype)
        if obstacle is None:
            return backend, "; ".join(remarks)
        remarks.append(f"{KERNELS[backend]} not used: {obstacle}")
    return "grouped", "; ".join(remarks)


def has_grouped_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch's grouped product is a single kernel without a host sync.

    According to torch's GroupedBlas.cpp, it is one in bf16 on compute capability 9.x and 10.x.
    Elsewhere torch copies the group sizes to the host and calls mm for each group.
    """
    return dtype == torch.bfloat16 and torch.cuda.get_device_capability(device)[0] in (9, 10)


# --------------------------------------------------------------------------------------------------
# Testing kernels


def find_obstacle(
    backend: str, device: torch.device, config: SpiderConfig, dtype: torch.dtype
) -> str | None:
    """Return why the kernels of `triton` or `tile` cannot run this model here, or None.

    The reason names the remedy. The test compiles the kernels that training uses: seconds for each
    the first time, later from a cache. Raise BackendError if the test leaves the GPU unusable.
    """
    kernels = KERNELS[backend]
    if not config.has_experts:
        return "the model has no routed experts"
    if device.type != "cuda":
        return f"{kernels} needs a GPU"
    if backend == "tile":
        if torch.cuda.get_device_capability(device) < TILE_CAPABILITY:
            return "TileKernels needs a Hopper or newer GPU (sm_90 or above)"
        if config.hidden_size % TILE_WIDTH:
            return (
                f"TileKernels needs a hidden_size that is a multiple of {TILE_WIDTH}, "
                f"not {config.hidden_size}"
            )
    obstacle = None
    try:
        with torch.cuda.device(device):  # TileKernels allocates results on the current device
            if backend == "triton":
                wrong = find_wrong(check_product(triton_product, device, config, dtype))
            else:
                wrong = find_wrong(check_operations(device, config, dtype))
        if wrong:
            obstacle = f"{kernels} computes wrong results on this GPU: {wrong}"
    except ImportError as fault:
        obstacle = (
            f"{kernels} cannot be imported ({first_error(fault)}): pip install {PACKAGES[backend]}"
        )
    except Exception as fault:  # compilers and kernels can raise anything
        obstacle = f"{kernels} fails on this GPU: {first_error(fault)}"
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as fault:
        # a kernel's error stays in the CUDA context, where nothing can run any more
        raise BackendError(
            f"the test of {kernels} crashed on the GPU ({first_error(fault)}); restart with "
            f"--moe_backend grouped"
        ) from None
    return obstacle


def check_operations(
    device: torch.device, config: SpiderConfig, dtype: torch.dtype
) -> Iterator[Check]:
    """Compare TileKernels' six operations, as `tile` uses them, with plain torch.

    The scores have ties. There are enough tokens for several SMs, and all sums are exact. dtype:
    the tokens' dtype.
    """
    tokens = 1000
    experts = config.n_routed_experts
    k = config.n_experts_per_tok
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator).to(device)

    score_NE = draw(0, 8, tokens, experts).float()
    no_bias_E = torch.zeros(experts, device=device)
    topk_idx_NK, weights_NK = route(score_NE, no_bias_E, k, "grouped")
    their_topk_idx_NK, their_weights_NK = route(score_NE, no_bias_E, k, "tile")
    yield Check("topk_gate", their_topk_idx_NK, topk_idx_NK)
    yield Check("normalize_weight", their_weights_NK, weights_NK, 1e-5)

    counted_NK = topk_idx_NK.masked_fill(draw(0, 8, tokens, k) == 0, -1)
    load_1E = _counts(counted_NK[None], experts, "grouped") * (experts / (tokens * k))
    yield Check("aux_fi", operations().aux_fi(counted_NK, experts, k), load_1E[0], 1e-5)

    slot_NK, expert_P, expert_end_E = sort_by_expert(topk_idx_NK, experts, "tile")
    # an expert's slots may be in any order
    expert_NK = torch.bucketize(slot_NK, expert_end_E, right=True)
    yield Check("get_fused_mapping", expert_NK, topk_idx_NK)
    yield Check("get_fused_mapping", expert_P[slot_NK], topk_idx_NK)

    x_ND = draw(-8, 9, tokens, config.hidden_size).to(dtype)
    slots_PD = draw(-8, 9, len(expert_P), config.hidden_size).to(dtype)
    # 0 in padding slots
    expanded_PD = torch.zeros_like(slots_PD)
    expanded_PD[slot_NK.flatten()] = x_ND.repeat_interleave(k, dim=0)
    yield Check("expand_to_fused", _expand(x_ND, slot_NK, expert_P, tile=True), expanded_PD)
    reduced_ND = _reduce(slots_PD, slot_NK, tile=False)
    yield Check("reduce_fused", _reduce(slots_PD, slot_NK, tile=True), reduced_ND)


def check_product(
    product: GroupedProduct, device: torch.device, config: SpiderConfig, dtype: torch.dtype
) -> Iterator[Check]:
    """Compare a grouped product and its gradients with reference_product.

    The shapes are the model's, with about a hundred slots per expert and with a thousand, for which
    a kernel may use other blocks. Expert 1 has no slots. Slots after the last expert's are NaN. All
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
            slots_PD = draw(used + ALIGNMENT, d)
            weights_EDF = draw(experts, d, f)
            upstream_PF = draw(used + ALIGNMENT, f)
            slots_PD[used:] = math.nan
            upstream_PF[used:] = math.nan
            results = value_and_gradients(
                product, (slots_PD, weights_EDF), upstream_PF, expert_end_E
            )
            exact = value_and_gradients(
                reference_product,
                (slots_PD.float(), weights_EDF.float()),
                upstream_PF.float(),
                expert_end_E,
            )
            parts = ("value", "gradient of slots", "gradient of weights")
            for part, result, exact_result in zip(parts, results, exact, strict=True):
                yield Check(f"the {part} of {used} slots, {d} x {f},", result, exact_result)


# --------------------------------------------------------------------------------------------------
# Routing operations, with TileKernels and in plain torch. Ties go to the smaller index, and expert
# -1 is skipped.


def operations() -> Any:
    """Import TileKernels' operations."""
    import tile_kernels.moe

    return tile_kernels.moe


class ExpertSlots(NamedTuple):
    """The assignments sorted by expert, for the backends that sort."""

    slot_NK: Tensor  # the slot of each assignment
    # each slot's token, any token for padding; for `tile`, each slot's expert, -1 for padding
    source_P: Tensor
    expert_end_E: Tensor  # int32, the slot after each expert's last one


def sort_by_expert(topk_idx_NK: Tensor, n_experts: int, backend: str) -> ExpertSlots:
    """Sort the assignments by expert.

    Every expert gets slots, even if all are padding with weight 0: on sm_100, grouped_mm leaves the
    weight gradient of an empty group uninitialized (pytorch issue 172439)."""
    if backend == "tile":
        return _slots_by_tile_kernels(topk_idx_NK, n_experts)
    return _slots_by_counting(topk_idx_NK, n_experts)


def max_slots(assignments: int, experts: int) -> int:
    """Return P: enough slots for any routing of the assignments and one more for each expert.

    With fewer slots, TileKernels would write out of bounds."""
    return (assignments + ALIGNMENT * experts) // ALIGNMENT * ALIGNMENT


def _slots_by_tile_kernels(topk_idx_NK: Tensor, n_experts: int) -> ExpertSlots:
    """Sort with TileKernels. Extra tokens, which choose each expert once, give every expert a slot;
    their slots then become padding."""
    tokens, k = topk_idx_NK.shape
    extra = torch.arange(round_up(n_experts, k), device=topk_idx_NK.device)
    extra_NK = extra.masked_fill(extra >= n_experts, -1).view(-1, k)
    expert_P, _, _, slot_NK, _, expert_end_E, *_ = operations().get_fused_mapping(
        torch.cat((topk_idx_NK, extra_NK)),
        n_experts,
        max_slots(topk_idx_NK.numel(), n_experts),
        ALIGNMENT,
    )
    extra_slots = slot_NK[tokens:].flatten()[:n_experts]
    expert_P.index_fill_(0, extra_slots.long(), -1)
    return ExpertSlots(slot_NK[:tokens], expert_P, expert_end_E)


def _slots_by_counting(topk_idx_NK: Tensor, n_experts: int) -> ExpertSlots:
    """Find the slots by counting, without a sort or a host sync."""
    device = topk_idx_NK.device
    k = topk_idx_NK.shape[1]
    expert_E = torch.arange(n_experts, device=device)
    is_chosen_EA = expert_E[:, None] == topk_idx_NK.flatten()
    rank_EA = is_chosen_EA.cumsum(1)  # an assignment's number within its expert, from 1
    count_E = rank_EA[:, -1]
    padded_E = ((count_E + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT).clamp_min(ALIGNMENT)
    expert_end_E = padded_E.cumsum(0)
    expert_start_E = expert_end_E - padded_E
    # In place, since [E, A] is large. Row e has the slots of assignments to expert e, 0 for others.
    slot_if_chosen_EA = rank_EA.add_(expert_start_E[:, None] - 1).mul_(is_chosen_EA)
    slot_A = slot_if_chosen_EA.sum(0)
    assignment_A = torch.arange(len(slot_A), device=device)
    padding_P = slot_A.new_zeros(max_slots(len(slot_A), n_experts))
    assignment_P = padding_P.scatter_(0, slot_A, assignment_A)
    return ExpertSlots(slot_A.view(topk_idx_NK.shape), assignment_P // k, expert_end_E.int())


class _Normalize(torch.autograd.Function):
    """Divide the weights of each token by their sum, with TileKernels: [N, K] -> [N, K]."""

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


def _expand(x_ND: Tensor, slot_NK: Tensor, source_P: Tensor, tile: bool) -> Tensor:
    """Copy tokens [N, D] to their slots [P, D]. Padding may get any finite value: its weight
    is 0."""
    if tile:
        return operations().expand_to_fused(x_ND.contiguous(), slot_NK, source_P)
    return x_ND.index_select(0, source_P)


def _reduce(slots_PD: Tensor, slot_NK: Tensor, tile: bool) -> Tensor:
    """Sum slots [P, D] to their tokens [N, D]. Padding is never read."""
    slots_PD = slots_PD.detach().contiguous()
    if tile:
        return operations().reduce_fused(slots_PD, None, slot_NK)
    return F.embedding_bag(slot_NK, slots_PD, mode="sum")


class _Move(torch.autograd.Function):
    """Copy tokens to slots, or sum slots to tokens: each is the gradient of the other."""

    @staticmethod
    def forward(ctx, x: Tensor, slot_NK: Tensor, source_P: Tensor, tile: bool, to_slots: bool):
        ctx.save_for_backward(slot_NK, source_P)
        ctx.tile = tile
        ctx.to_slots = to_slots
        if to_slots:
            return _expand(x, slot_NK, source_P, tile)
        return _reduce(x, slot_NK, tile)

    @staticmethod
    def backward(ctx, grad: Tensor):
        slot_NK, source_P = ctx.saved_tensors
        if ctx.to_slots:
            grad = _reduce(grad, slot_NK, ctx.tile)
        else:
            grad = _expand(grad, slot_NK, source_P, ctx.tile)
        return grad, None, None, None, None


# --------------------------------------------------------------------------------------------------
# Routing


class Routing(NamedTuple):
    """The routing of N tokens; all None without routed experts."""

    score: Tensor | None  # [N, E] fp32
    topk_idx: Tensor | None  # [N, K] int64
    slots: ExpertSlots | None  # for backends that sort


def route(
    score_NE: Tensor,
    expert_bias_E: Tensor,
    k: int,
    backend: str,
    topk_idx_NK: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose experts; return topk_idx [N, K] int64 and topk_weights [N, K] fp32.

        topk_idx       the experts with the k largest softmax(score) + expert_bias
        topk_weights   their softmax(score), scaled to a sum of 1

    With k = 1 the weight is not scaled, as in Switch Transformer (arXiv 2101.03961): a weight of 1
    would leave the router no gradient from the loss. topk_idx_NK: from an earlier pass, to reuse in
    recomputation.
    """
    tile = backend == "tile"
    if topk_idx_NK is None:
        biased_NE = score_NE.detach().softmax(-1) + expert_bias_E
        if tile:  # topk_gate returns 2^31 - 1 for NaN scores; the loss will be NaN anyway
            topk_idx_NK = operations().topk_gate(biased_NE, k).clamp_(0, len(expert_bias_E) - 1)
        else:  # torch.topk is not stable
            order_NE = biased_NE.sort(dim=-1, descending=True, stable=True).indices
            topk_idx_NK = order_NE[:, :k].contiguous()
    if k == 1:
        return topk_idx_NK, score_NE.softmax(-1).gather(1, topk_idx_NK)
    if tile:
        return topk_idx_NK, _Normalize.apply(score_NE.softmax(-1).gather(1, topk_idx_NK))
    # equals dividing the probabilities by their sum: the common factor cancels
    return topk_idx_NK, score_NE.gather(1, topk_idx_NK).softmax(-1)


class Balance(NamedTuple):
    """The balance losses of several routings."""

    aux_loss: Tensor  # sum over routings of sum_e f_e P_e
    z_loss: Tensor  # sum over routings of the mean squared log-partition
    tokens_per_expert: Tensor  # [V, E] fp32


def balance(
    score_VNE: Tensor, topk_idx_VNK: Tensor, token_weight_VN: Tensor, backend: str
) -> Balance:
    """Compute the balance losses of V routings.

    P_e is the mean probability of expert e. f_e is its load: its tokens relative to an even load.
    token_weight: each token's weight in means: 0 for tokens to ignore, equal for all others.
    """
    _, tokens, experts = score_VNE.shape
    k = topk_idx_VNK.shape[2]
    is_ignored_VN1 = (token_weight_VN == 0)[:, :, None]
    tokens_VE = _counts(topk_idx_VNK.masked_fill(is_ignored_VN1, -1), experts, backend)
    # relative to an even load of N tokens, then of 1 / weight tokens (no padding); divided by
    # total_V, to an even load of the tokens with a weight
    load_VE = tokens_VE * (experts / (tokens * k)) * (tokens * token_weight_VN.amax(1))[:, None]

    total_V = token_weight_VN.sum(1).clamp_min(1e-9)
    prob_VNE = score_VNE.softmax(-1)
    mean_prob_VE = torch.bmm(token_weight_VN[:, None], prob_VNE).squeeze(1)
    aux_loss = (load_VE / total_V[:, None] * mean_prob_VE).sum()
    squared_VN = score_VNE.logsumexp(-1).square()
    z_loss = token_weight_VN.flatten() @ squared_VN.flatten()
    return Balance(aux_loss, z_loss, tokens_VE)


def _counts(topk_idx_VNK: Tensor, experts: int, backend: str) -> Tensor:
    """Count the assignments to each expert in each routing, fp32 [V, E]."""
    visits, tokens, k = topk_idx_VNK.shape
    # TileKernels' aux_fi, which divides by an even load, sums in no fixed order
    if backend == "tile" and not torch.are_deterministic_algorithms_enabled():
        loads = [operations().aux_fi(topk_idx_NK, experts, k) for topk_idx_NK in topk_idx_VNK]
        return (torch.stack(loads) * (tokens * k / experts)).round()
    # count all routings at once, as if each had its own experts
    first_expert_V = torch.arange(0, visits * experts, experts, device=topk_idx_VNK.device)
    distinct_VNK = torch.where(topk_idx_VNK < 0, -1, topk_idx_VNK + first_expert_V[:, None, None])
    index = distinct_VNK.flatten() + 1  # -1 goes to the first count, which is not returned
    count = torch.zeros(visits * experts + 1, device=index.device)
    count.index_add_(0, index, torch.ones(len(index), device=index.device))
    return count[1:].view(visits, experts)


# --------------------------------------------------------------------------------------------------
# Experts


def grouped_product(slots_PD: Tensor, weights_EDF: Tensor, expert_end_E: Tensor) -> Tensor:
    """Multiply the slots of each expert by its weights: -> [P, F].

    expert_end: int32. Slots after the last expert's, and their gradients, are uninitialized:
    nothing may sum over them."""
    if slots_PD.dtype == torch.float64:
        return reference_product(slots_PD, weights_EDF, expert_end_E)
    if slots_PD.dtype != torch.bfloat16 and torch.compiler.is_compiling():
        # torch.compile can trace grouped_mm only in bf16
        return torch.compiler.disable(F.grouped_mm)(slots_PD, weights_EDF, offs=expert_end_E)
    return F.grouped_mm(slots_PD, weights_EDF, offs=expert_end_E)


def triton_product(slots_PD: Tensor, weights_EDF: Tensor, expert_end_E: Tensor) -> Tensor:
    """Compute grouped_product with the kernels of spider/model/grouped_triton.py."""
    from spider.model.grouped_triton import grouped_product as product

    return product(slots_PD, weights_EDF, expert_end_E)


def reference_product(slots_PD: Tensor, weights_EDF: Tensor, expert_end_E: Tensor) -> Tensor:
    """Compute grouped_product with a loop over experts, in any dtype: the exact reference.

    grouped_mm does not support float64. Slots after the last expert's become 0, or NaN if they are
    not finite."""
    *groups, tail = slots_PD.tensor_split(expert_end_E.tolist())
    products = [group @ weight for group, weight in zip(groups, weights_EDF, strict=True)]
    return torch.cat([*products, tail @ torch.zeros_like(weights_EDF[0])])


def fp8_grouped_product(slots_PD: Tensor, weights_EDF: Tensor, expert_end_E: Tensor) -> Tensor:
    """Compute grouped_product in FP8 (e4m3), with a power-of-two scale per slot and per weight
    column.

    On a GPU this uses torchao's kernels, which need column-major weights and each expert's slots
    aligned to 16. Elsewhere it is an emulation for tests."""
    if not slots_PD.is_cuda:
        return _EmulatedFP8.apply(slots_PD, weights_EDF, expert_end_E)
    from torchao.prototype.moe_training import _to_fp8_rowwise_then_scaled_grouped_mm

    return _to_fp8_rowwise_then_scaled_grouped_mm(
        slots_PD, weights_EDF, expert_end_E, pad_token_groups_for_grouped_mm=False
    )


class _EmulatedFP8(torch.autograd.Function):
    """Emulate torchao's FP8 grouped product and its two gradients: round the operands to FP8,
    multiply in their own dtype."""

    @staticmethod
    def forward(ctx, slots_PD: Tensor, weights_EDF: Tensor, expert_end_E: Tensor) -> Tensor:
        ctx.save_for_backward(slots_PD, weights_EDF, expert_end_E)
        return F.grouped_mm(_round_fp8(slots_PD, -1), _round_fp8(weights_EDF, 1), offs=expert_end_E)

    @staticmethod
    def backward(ctx, grad_PF: Tensor) -> tuple[Tensor, Tensor, None]:
        slots_PD, weights_EDF, expert_end_E = ctx.saved_tensors
        grad_slots_PD = F.grouped_mm(
            _round_fp8(grad_PF, -1), _round_fp8(weights_EDF, -1).mT, offs=expert_end_E
        )
        # slots after the last expert's are uninitialized and would set the scales of all slots
        is_used_P1 = torch.arange(len(slots_PD), device=slots_PD.device)[:, None] < expert_end_E[-1]
        slots_PD = _round_fp8(torch.where(is_used_P1, slots_PD, 0), 0)
        grad_PF = _round_fp8(torch.where(is_used_P1, grad_PF, 0), 0)
        grad_weights_EDF = F.grouped_mm(slots_PD.mT, grad_PF, offs=expert_end_E)
        return grad_slots_PD, grad_weights_EDF, None


E4M3_MAX = 448


def _round_fp8(x: Tensor, dim: int) -> Tensor:
    """Round x to e4m3 with a power-of-two scale per slice along `dim`; return it in x's dtype."""
    largest = x.float().abs().amax(dim, keepdim=True).clamp_min(1e-12)
    scale = torch.exp2((E4M3_MAX / largest).log2().floor())
    scaled = (x.float() * scale).clamp(-E4M3_MAX, E4M3_MAX)
    return (scaled.to(torch.float8_e4m3fn).float() / scale).to(x.dtype)


# the product of each backend that sorts by expert
PRODUCTS = {
    "grouped": grouped_product,
    "triton": triton_product,
    "tile": grouped_product,
}


def moe_forward(
    x_ND: Tensor,
    topk_idx_NK: Tensor,
    topk_weights_NK: Tensor,
    w_gate_up_EDG: Tensor,
    w_down_EFD: Tensor,
    backend: str,
    product: GroupedProduct | None = None,
    expert_slots: ExpertSlots | None = None,
) -> Tensor:
    """Return the weighted sum of each token's experts, y [N, D].

        y[n] = sum_j topk_weights[n, j] * SwiGLU_e(x[n]), e = topk_idx[n, j]

    Differentiable in x, topk_weights and both weights.

    topk_idx: int64. topk_weights: fp32. w_gate_up, w_down: in x's dtype. product: replaces the
    backend's own product, even the loop of `loop`. expert_slots: sort_by_expert of topk_idx, if
    known.
    """
    # Decoding a single token needs no sorting. On a CPU, it needs no copies of weights, either.
    is_one_token = len(x_ND) == 1 and not torch.is_grad_enabled()
    if is_one_token and x_ND.is_cuda:
        return _one_token(x_ND, topk_idx_NK[0], topk_weights_NK[0], w_gate_up_EDG, w_down_EFD)
    if is_one_token or (backend == "loop" and product is None):
        return _loop(x_ND, topk_idx_NK, topk_weights_NK, w_gate_up_EDG, w_down_EFD)
    if product is None:
        product = PRODUCTS[backend]
    if expert_slots is None:
        expert_slots = sort_by_expert(topk_idx_NK, len(w_down_EFD), backend)
    slot_NK, source_P, expert_end_E = expert_slots
    tile = backend == "tile"

    slots_PD = _Move.apply(x_ND, slot_NK, source_P, tile, True)
    weight_A = topk_weights_NK.to(x_ND.dtype).flatten()
    padding_P = weight_A.new_zeros(len(source_P))
    weight_P = padding_P.scatter_(0, slot_NK.flatten().long(), weight_A)
    gate_PF, up_PF = product(slots_PD, w_gate_up_EDG, expert_end_E).chunk(2, dim=-1)
    # weighted where slots are narrowest
    hidden_PF = F.silu(gate_PF) * up_PF * weight_P[:, None]
    out_PD = product(hidden_PF, w_down_EFD, expert_end_E)
    return _Move.apply(out_PD, slot_NK, source_P, tile, False)


def _loop(
    x_ND: Tensor,
    topk_idx_NK: Tensor,
    topk_weights_NK: Tensor,
    w_gate_up_EDG: Tensor,
    w_down_EFD: Tensor,
) -> Tensor:
    """Compute one expert after another."""
    w_gate_EDF, w_up_EDF = w_gate_up_EDG.chunk(2, dim=-1)
    y_ND = torch.zeros_like(x_ND)
    for expert in topk_idx_NK.unique().tolist():
        token, choice = (topk_idx_NK == expert).nonzero(as_tuple=True)
        x = x_ND[token]
        hidden = F.silu(x @ w_gate_EDF[expert]) * (x @ w_up_EDF[expert])
        weight = topk_weights_NK[token, choice].to(x_ND.dtype)
        y_ND = y_ND.index_add(0, token, hidden @ w_down_EFD[expert] * weight[:, None])
    return y_ND


def _one_token(
    x_1D: Tensor,
    topk_idx_K: Tensor,
    topk_weights_K: Tensor,
    w_gate_up_EDG: Tensor,
    w_down_EFD: Tensor,
) -> Tensor:
    """Compute the experts of a single token with copies of their weights, [1, D]."""
    w_gate_up_KDG = w_gate_up_EDG.index_select(0, topk_idx_K)
    gate_K1F, up_K1F = torch.matmul(x_1D, w_gate_up_KDG).chunk(2, dim=-1)
    hidden_K1F = F.silu(gate_K1F) * up_K1F
    out_K1D = torch.bmm(hidden_K1F, w_down_EFD.index_select(0, topk_idx_K))
    return (out_K1D * topk_weights_K.to(x_1D.dtype)[:, None, None]).sum(0)


# --------------------------------------------------------------------------------------------------
# The layer


class MoE(nn.Module):
    """Routed experts and a shared one, [N, D] -> [N, D]. Experts have no capacity limit, so no
    token is dropped."""

    expert_bias: Tensor  # [E] fp32, for the selection only, see Spider.update_expert_bias
    shared: SwiGLU | None
    cast: tuple[Tensor, Tensor] | None = None  # result of weights(), inside cast_weights_once

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
        """Cast the weights; return gate and up as one tensor [E, D, G], and down [E, F, D]."""
        w_gate_up_EDG = torch.cat((self.w_gate.to(dtype), self.w_up.to(dtype)), dim=-1)
        w_down_EFD = self.w_down.to(dtype)
        if self.fp8:  # FP8 kernels need column-major order
            w_gate_up_EDG = w_gate_up_EDG.mT.contiguous().mT
            w_down_EFD = w_down_EFD.mT.contiguous().mT
        return w_gate_up_EDG, w_down_EFD

    def cast_weight(self, dtype: torch.dtype):
        """Keep the cast weights of the routed experts, see cast_weights_once."""
        self.cast = self.weights(dtype) if self.config.n_routed_experts else None

    def forward(self, x_ND: Tensor, reuse: Routing | None = None) -> tuple[Tensor, Routing]:
        """Route the tokens to experts and sum the outputs. reuse: the routing of an earlier pass
        over the same tokens."""
        if not self.config.n_routed_experts:
            assert self.shared is not None  # a SpiderConfig has routed experts or shared ones
            return self.shared(x_ND), Routing(None, None, None)
        score_NE = self.router(x_ND)
        topk_idx_NK, topk_weights_NK = route(
            score_NE,
            self.expert_bias,
            self.config.n_experts_per_tok,
            self.backend,
            None if reuse is None else reuse.topk_idx,
        )
        slots = None if reuse is None else reuse.slots
        if slots is None and torch.is_grad_enabled() and self.backend != "loop":
            slots = sort_by_expert(topk_idx_NK, len(self.expert_bias), self.backend)
        w_gate_up_EDG, w_down_EFD = self.weights(x_ND.dtype) if self.cast is None else self.cast
        y_ND = moe_forward(
            x_ND,
            topk_idx_NK,
            topk_weights_NK,
            w_gate_up_EDG,
            w_down_EFD,
            self.backend,
            fp8_grouped_product if self.fp8 and self.training else None,
            slots,
        )
        if self.shared is not None:
            y_ND = y_ND + self.shared(x_ND)
        return y_ND, Routing(score_NE, topk_idx_NK, slots)
