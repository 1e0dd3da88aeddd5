"""Routing and experts of a mixture-of-experts layer, behind one signature for three backends.

    loop      one expert after the other in plain Python: the reference that the others are tested against
    grouped   rows sorted by expert, one grouped product per weight (torch's grouped_mm), no host synchronisation
    tile      the same, with the gating, sorting, expanding and reducing done by DeepSeek's TileKernels

Shapes: N tokens, k experts per token, E experts, D hidden size, F expert width, P rows sorted by expert: every token k
times, each expert's rows filled up to a multiple of ALIGNMENT, and a tail up to a bound that needs no look at the data.
No backend drops a token, and an expert may receive none or all of them. -1 in place of an expert is none.
"""

import importlib.util
import re
import shutil
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spider.errors import SpiderError

ALIGNMENT = 16                         # rows: what FP8 products need, and few distinct sizes for a CPU's kernels
TILE_CAPABILITY = (9, 0)  # of a GPU, at least: Hopper, Blackwell (sm_120 stands in no list, but the original ran there)
TILE_WIDTH = 256          # TileKernels reduces hidden sizes that are multiples of this


class BackendError(SpiderError, RuntimeError):
    """A backend was asked for that cannot run here; the message names the remedy."""


def resolve_backend(name: str, device: torch.device, config, dtype: torch.dtype, say: Callable = lambda line: None,
                    agree: Callable = bool, compiled: bool = False) -> str:
    """Resolve a backend: `auto` becomes `tile` where TileKernels pass a check on this GPU, else `grouped`, as it does
    where layers are compiled, which tile's operations would keep the core from; a `tile` that fails is an error. config
    has hidden_size, n_routed_experts and n_experts_per_tok; dtype is that of the products.

    `say` gets a line where `auto` does without TileKernels on a GPU, and one where torch's grouped product is slow;
    `agree` says, given whether this rank can, whether all can."""
    on_gpu = device.type == "cuda"
    if name == "tile" and (obstacle := find_obstacle(device, config, dtype)):
        raise BackendError(f"--moe_backend tile: {obstacle}; or use --moe_backend grouped")
    if name == "auto" and compiled:
        name = "grouped"
    if name == "auto":
        obstacle = find_obstacle(device, config, dtype) if on_gpu else "no GPU"
        name = "tile" if on_gpu and agree(obstacle is None) else "grouped"
        if on_gpu and name == "grouped":
            say(f"experts without TileKernels: {obstacle or 'on another rank --moe_backend tile says why'}")
    if on_gpu and name != "loop" and not multiplies_at_once(device, dtype):
        say(f"on this GPU ({describe(device)}) torch multiplies {str(dtype)[6:]} experts one after the other and waits "
            f"for the device at each grouped product (docs/results/performance.md, Grouped products)")
    return name


def multiplies_at_once(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a grouped product is one kernel that needs no look at the group sizes: in torch's GroupedBlas.cpp
    bf16 on compute capability 9.x and 10.x; elsewhere it reads them back and calls mm for each group."""
    return dtype == torch.bfloat16 and torch.cuda.get_device_capability(device)[0] in (9, 10)


def describe(device: torch.device) -> str:
    return "sm_%d%d" % torch.cuda.get_device_capability(device)


# ---------------------------------------------------------------------------------------------------------------------
# Whether TileKernels can serve


def find_obstacle(device: torch.device, config, dtype: torch.dtype) -> str | None:
    """Return why TileKernels cannot serve this model on this device, and the remedy; None if they can. Compiles the
    kernels that training will call: seconds for each the first time, then they come from tilelang's cache."""
    too_old = "TileKernels needs a GPU from Hopper on (sm_90 or above)"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < TILE_CAPABILITY:
        return too_old
    if importlib.util.find_spec("tile_kernels") is None:
        return 'TileKernels is not installed: pip install -e ".[tile]"'
    if device.type != "cuda":
        return too_old
    if not config.n_routed_experts:
        return "the model has no routed experts"
    if config.hidden_size % TILE_WIDTH:
        return f"TileKernels needs a hidden_size that is a multiple of {TILE_WIDTH}, not {config.hidden_size}"
    try:
        from tile_kernels import moe
        from tilelang.contrib.nvcc import get_nvcc_compiler
    except Exception as fault:            # other versions fail in other ways: no module, no attribute, an assertion
        return f'TileKernels does not import ({first_error(fault)}): pip install -e ".[tile]"'
    try:
        compiler = get_nvcc_compiler()    # CUDA_HOME, PATH, the wheel nvidia-cuda-nvcc, /usr/local/cuda
    except RuntimeError:
        compiler = ""
    if shutil.which(compiler) is None:
        return f"TileKernels is compiled by nvcc, and there is no {compiler or 'nvcc'}: set CUDA_HOME to a CUDA toolkit"
    try:
        with torch.cuda.device(device):   # where TileKernels puts its results
            wrong = find_disagreement(moe, device, config, dtype)
        obstacle = wrong and f"{wrong} of TileKernels does not compute what it should on this GPU ({describe(device)})"
    except Exception as fault:
        obstacle = f"TileKernels fails on this GPU ({describe(device)}): {first_error(fault)}"
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as fault:         # a fault of a kernel stays with the process: nothing else would run either
        raise BackendError(f"the check of TileKernels left the GPU in error ({first_error(fault)}); start again with "
                           f"--moe_backend grouped") from None
    return obstacle


def first_error(fault: Exception) -> str:
    """Describe a fault in a line: of a compiler's output, which stands behind a whole source, the first error."""
    lines = [line.strip() for line in str(fault).splitlines() if line.strip()] or [""]
    line = next((line for line in lines if re.search(r"(error|fatal)\s*: *\S", line)), lines[0])
    return f"{type(fault).__name__}: {line[:200]}".removesuffix(": ")


def find_disagreement(ops, device: torch.device, config, dtype: torch.dtype) -> str | None:
    """Name the first of six operations that differs from the plain one, on tokens with ties, weights of zero, and slots
    without an expert; enough tokens for several of a GPU's processors. Numbers are such that all sums are exact."""
    plain, generator = TORCH_OPERATIONS, torch.Generator().manual_seed(0)
    tokens, experts, k = 1000, config.n_routed_experts, config.n_experts_per_tok
    def draw(low, high, *shape, dtype=torch.float32):
        return torch.randint(low, high, shape, generator=generator).to(device, dtype)
    scores = draw(0, 8, tokens, experts)
    topk_idx = plain.topk_gate(scores, k)
    if not torch.equal(ops.topk_gate(scores, k), topk_idx):
        return "topk_gate"
    weights = draw(0, 2, tokens, k)
    for ours, theirs in zip(plain.normalize_weight(weights), ops.normalize_weight(weights)):
        if not torch.allclose(ours, theirs, rtol=1e-5, atol=0):
            return "normalize_weight"
    topk_idx = topk_idx.masked_fill(draw(0, 8, tokens, k) == 0, -1)
    if not torch.allclose(plain.aux_fi(topk_idx, experts, k), ops.aux_fi(topk_idx, experts, k), rtol=1e-5, atol=0):
        return "aux_fi"
    mapping = topk_idx, experts, row_bound(tokens * k, experts), ALIGNMENT
    (to_expert, _, _, ours, _, end, *_), theirs = plain.get_fused_mapping(*mapping), ops.get_fused_mapping(*mapping)
    slot_to_pos = theirs[3]               # the order inside an expert is free
    if not (torch.equal(theirs[0], to_expert) and torch.equal(theirs[5], end)
            and torch.equal(slot_to_pos.flatten().sort().values, ours.flatten().sort().values)
            and torch.equal(torch.where(slot_to_pos < 0, -1, to_expert[slot_to_pos]).long(), topk_idx)):
        return "get_fused_mapping"
    x, rows = (draw(-8, 9, count, config.hidden_size, dtype=dtype) for count in (tokens, len(to_expert)))
    if not torch.equal(ops.expand_to_fused(x, slot_to_pos, to_expert),
                       plain.expand_to_fused(x, slot_to_pos, to_expert)):
        return "expand_to_fused"
    if not torch.equal(ops.reduce_fused(rows, None, slot_to_pos), plain.reduce_fused(rows, None, slot_to_pos)):
        return "reduce_fused"
    return None


# ---------------------------------------------------------------------------------------------------------------------
# The six operations, with the names and signatures of tile_kernels.moe; none of them carries a gradient. Ties go to the
# smaller index, weights of zero stay zero, -1 is skipped.

def operations(backend: str):
    """Return the module of TileKernels for `tile`, the plain-torch equivalents for the others."""
    if backend == "tile":
        import tile_kernels.moe
        return tile_kernels.moe
    return TORCH_OPERATIONS


def _topk_gate(scores, num_topk):
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :num_topk].contiguous()  # topk: ties anyhow


def _normalize_weight(weights):
    denominator = weights.sum(-1) + 1e-20
    return denominator, weights / denominator[:, None]


def _aux_fi(topk_idx, num_experts, num_aux_topk):
    chosen = topk_idx.flatten() + 1  # -1, no expert, counts in the first count, which is dropped
    count = torch.zeros(num_experts + 1, device=chosen.device)
    count.index_add_(0, chosen, torch.ones(len(chosen), device=chosen.device))
    return count[1:] * (num_experts / (len(topk_idx) * num_aux_topk))


def _rows_by_expert(topk_idx, num_experts, num_expanded_tokens, alignment):
    """Assign rows by counting: no sort, no look at the data. -> of each slot its row, int64 [N, k], -1 for a slot
    of no expert; of each row its slot, [P], -1 where nothing lies; expert_end and aligned counts, [E]."""
    slots, device = topk_idx.numel(), topk_idx.device
    chosen = torch.arange(num_experts, device=device)[:, None] == topk_idx.flatten()         # [E, slots]
    rank = chosen.cumsum(1)               # of a slot among those of its expert, from 1 on
    aligned = (rank[:, -1] + (alignment - 1)) // alignment * alignment
    end = aligned.cumsum(0)
    row = rank.add_((end - aligned)[:, None]).mul_(chosen).sum(0)                          # from 1 on
    slot = row.new_full((1 + num_expanded_tokens,), -1).scatter_(0, row, torch.arange(slots, device=device))[1:]
    return (row - 1).view(topk_idx.shape), slot, end, aligned


def _get_fused_mapping(topk_idx, num_experts, num_expanded_tokens, alignment):
    """Return pos_to_expert [P], pos_to_token [P], pos_to_token_topk [P] (-1 where nothing lies), token_topk_to_pos [N,
    k], expert_start, expert_end, num_tokens_per_expert [E], all int32 and aligned; like the original's, the last is
    []."""
    row, slot, end, aligned = _rows_by_expert(topk_idx, num_experts, num_expanded_tokens, alignment)
    expert = torch.where(slot < 0, -1, topk_idx.flatten()[slot])
    mapping = expert, slot.div(topk_idx.shape[1], rounding_mode="floor"), slot, row, end - aligned, end, aligned
    return *(t.int() for t in mapping), []


def _expand_to_fused(x, token_topk_to_pos, pos_to_expert):
    tokens, k = token_topk_to_pos.shape
    source = torch.full((len(pos_to_expert) + 1,), tokens, dtype=torch.int64, device=x.device)  # -1 is its last row
    source[token_topk_to_pos.flatten()] = torch.arange(tokens * k, device=x.device) // k
    return F.pad(x, (0, 0, 0, 1)).index_select(0, source[:-1])


def _reduce_fused(x, topk_weights, token_topk_to_pos):
    held = token_topk_to_pos >= 0
    weights = held if topk_weights is None else torch.where(held, topk_weights, 0)
    return F.embedding_bag(token_topk_to_pos.clamp_min(0), x, mode="sum", per_sample_weights=weights.to(x.dtype))


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


class ExpertRows(NamedTuple):
    """Where tokens' rows lie, of the backends that sort them."""
    row: Tensor               # [N, k], of each token
    source: Tensor            # [P]: of each row its token, of one that only fills up any; of `tile` its expert, or -1
    expert_end: Tensor        # [E] int32


def assign_rows(topk_idx: Tensor, n_experts: int, backend: str) -> ExpertRows | None:
    """Sort the slots [N, k] by expert; the reference, `loop`, has no use for that."""
    if backend == "loop":
        return None
    bound = row_bound(topk_idx.numel(), n_experts)
    if backend == "tile":
        pos_to_expert, _, _, row, _, expert_end, *_ = operations(backend).get_fused_mapping(
            topk_idx.contiguous(), n_experts, bound, ALIGNMENT)
        return ExpertRows(row, pos_to_expert, expert_end)
    row, slot, expert_end, _ = _rows_by_expert(topk_idx, n_experts, bound, ALIGNMENT)
    return ExpertRows(row, slot.clamp_min(0) // topk_idx.shape[1], expert_end.int())


def _expand(x, row, source, tile):
    """Copy tokens [N, D] to their rows [P, D]; rows that only fill up hold anything finite: they weigh nothing."""
    return operations("tile").expand_to_fused(x.contiguous(), row, source) if tile else x.index_select(0, source)


def _reduce(rows, row, tile):
    """Sum rows [P, D] to their tokens [N, D]; rows of no token are never read."""
    rows = rows.detach().contiguous()
    return operations("tile").reduce_fused(rows, None, row) if tile else F.embedding_bag(row, rows, mode="sum")


class _Expand(torch.autograd.Function):
    """Tokens to their rows; the gradient of a token is the sum over its rows."""

    @staticmethod
    def forward(ctx, x, row, source, tile):
        ctx.save_for_backward(row)
        ctx.tile = tile
        return _expand(x, row, source, tile)

    @staticmethod
    def backward(ctx, grad):
        return _reduce(grad, *ctx.saved_tensors, ctx.tile), None, None, None


class _Reduce(torch.autograd.Function):
    """Rows to their tokens: _Expand the other way round."""

    @staticmethod
    def forward(ctx, rows, row, source, tile):
        ctx.save_for_backward(row, source)
        ctx.tile = tile
        return _reduce(rows, row, tile)

    @staticmethod
    def backward(ctx, grad):
        return _expand(grad, *ctx.saved_tensors, ctx.tile), None, None, None


# ---------------------------------------------------------------------------------------------------------------------
# Routing


class Routing(NamedTuple):
    """One router's decision on N tokens."""
    score: Tensor | None      # [N, E] fp32; None without routed experts, as all the rest
    topk_idx: Tensor | None   # [N, k] int64
    rows: ExpertRows | None   # in the backends that sort them


def route(score: Tensor, expert_bias: Tensor, k: int, backend: str, topk_idx: Tensor | None = None
          ) -> tuple[Tensor, Tensor]:
    """Choose experts by a softmax over the scores [N, E]; selection by probability + expert_bias [E], weights from the
    probabilities alone: topk_idx [N, k] int64 and topk_weights [N, k] fp32, each row of which sums to 1.

    A given topk_idx, the decision of an earlier pass, is kept whatever the scores say now (recomputation).
    """
    ops, tile = operations(backend), backend == "tile"
    if topk_idx is None:
        topk_idx = ops.topk_gate(score.detach().softmax(-1) + expert_bias, k)
        if tile:                          # of a row of NaN it gives 2^31 - 1: any expert, the loss will be NaN anyway
            topk_idx.clamp_(0, len(expert_bias) - 1)
    if tile:
        return topk_idx, _Normalize.apply(score.softmax(-1).gather(1, topk_idx), ops)
    return topk_idx, score.gather(1, topk_idx).softmax(-1)  # the same: what all share cancels out


def balance(score: Tensor, topk_idx: Tensor, share: Tensor, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what V decisions cost, together: scores [V, N, E], topk_idx [V, N, k], share [V, N], each token's part in
    the means, 0 for a row that only fills up.

    Returns sums over V of aux_loss, sum_e f_e P_e, with P_e the mean probability and f_e an expert's tokens relative to
    an even share: 1 when balanced; and of z_loss, the mean squared log-partition of the scores; and f [V, E]."""
    (visits, tokens, experts), k = score.shape, topk_idx.shape[2]
    counted = topk_idx.masked_fill((share == 0)[:, :, None], -1)
    if backend == "tile" and not torch.are_deterministic_algorithms_enabled():  # alone of the six it adds in any order
        load = torch.stack([operations(backend).aux_fi(part, experts, k) for part in counted])
    else:                                 # all in one: as if every decision had experts of its own
        first = torch.arange(0, visits * experts, experts, device=score.device)[:, None, None]
        load = _aux_fi(torch.where(counted < 0, -1, counted + first).flatten(0, 1), visits * experts, k)
        load = load.view(visits, experts)
    part = share.sum(1)
    load = load * (tokens * share.amax(1))[:, None]  # aux_fi divides by all rows
    mean = torch.bmm(share[:, None], score.softmax(-1)).squeeze(1)                           # [V, E]
    aux_loss = (load / part.clamp_min(1e-9)[:, None] * mean).sum()
    return aux_loss, share.flatten() @ score.logsumexp(-1).square().flatten(), load


# ---------------------------------------------------------------------------------------------------------------------
# Experts


def grouped_product(rows: Tensor, weights: Tensor, expert_end: Tensor) -> Tensor:
    """Multiply rows [P, D], sorted by expert, each by its expert's weights [E, D, F]; expert_end [E] int32 -> [P, F].

    Rows behind the last expert's, and their gradients, come out uninitialised: nothing may sum over them."""
    product = {torch.bfloat16: F.grouped_mm, torch.float64: _multiply_in_turn}.get(rows.dtype, _uncompiled_grouped_mm)
    return product(rows, weights, offs=expert_end)


def _multiply_in_turn(rows: Tensor, weights: Tensor, offs: Tensor) -> Tensor:
    """Do grouped_mm in float64, which torch's has not: one product after the other, for what is to be exact."""
    *groups, tail = rows.tensor_split(offs.tolist())
    return torch.cat([group @ weight for group, weight in zip(groups, weights)] + [tail @ torch.zeros_like(weights[0])])


_uncompiled_grouped_mm = torch.compiler.disable(F.grouped_mm)  # torch.compile accepts it in bf16 alone


def fp8_grouped_product(rows: Tensor, weights: Tensor, expert_end: Tensor) -> Tensor:
    """Do the same with operands rounded to FP8 (e4m3), a power-of-two scale for each row and each weight column.

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
    """Round x to e4m3 under a power-of-two scale for each slice along `dim`, in its own type again."""
    largest = x.float().abs().amax(dim, keepdim=True).clamp_min(1e-12)
    scale = torch.exp2((448 / largest).log2().floor())
    return ((x.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / scale).to(x.dtype)


def moe_forward(x: Tensor, topk_idx: Tensor, topk_weights: Tensor, w_gate: Tensor, w_up: Tensor | None,
                w_down: Tensor, backend: str, product: Callable = grouped_product,
                expert_rows: ExpertRows | None = None) -> Tensor:
    """Return the weighted sum of each token's experts: y[n] = sum_j topk_weights[n, j] * SwiGLU_e(x[n]), e =
    topk_idx[n, j].

    x [N, D]; topk_idx [N, k] int64, -1 for none; topk_weights [N, k] fp32; w_gate and w_up [E, D, F], w_down [E, F, D],
    of x's type. w_up is None where w_gate holds both side by side, [E, D, 2F]: `grouped` and `tile` then need not join
    them. product is one of the two above; expert_rows, where known, `assign_rows` of topk_idx. Returns y [N, D].
    Differentiable in x, topk_weights and the three weights.
    """
    if len(x) == 1 and not (x.is_cuda or torch.is_grad_enabled()):
        return _one_row(x, topk_idx, topk_weights, w_gate, w_up, w_down)
    if backend == "loop":
        w_gate, w_up = w_gate.chunk(2, dim=-1) if w_up is None else (w_gate, w_up)
        return _loop(x, topk_idx, topk_weights, w_gate, w_up, w_down, product)
    w_gate_up = w_gate if w_up is None else torch.cat((w_gate, w_up), dim=-1)
    if expert_rows is None:
        topk_weights = topk_weights.masked_fill(topk_idx < 0, 0)  # as if it were the first expert's, for nothing
        expert_rows = assign_rows(topk_idx.clamp_min(0), len(w_down), backend)
    return _sorted(x, topk_weights, w_gate_up, w_down, product, expert_rows, backend == "tile")


def _loop(x, topk_idx, topk_weights, w_gate, w_up, w_down, product):
    multiply = torch.matmul if product is grouped_product else partial(_multiply_group, product)
    y = torch.zeros_like(x)
    for expert in topk_idx[topk_idx >= 0].unique().tolist():
        token, slot = (topk_idx == expert).nonzero(as_tuple=True)
        rows = x[token]
        hidden = F.silu(multiply(rows, w_gate[expert])) * multiply(rows, w_up[expert])
        weight = topk_weights[token, slot].to(x.dtype)
        y = y.index_add(0, token, multiply(hidden, w_down[expert]) * weight[:, None])
    return y


def _one_row(x, topk_idx, topk_weights, w_gate, w_up, w_down):
    """Compute a token alone, as decoding brings it to a CPU: nothing is sorted, experts' weights are read where they
    lie."""
    y = torch.zeros_like(x)
    for expert, weight in zip(topk_idx[0].tolist(), topk_weights.to(x.dtype).unbind(1)):
        if expert < 0:
            continue
        gate, up = (x @ w_gate[expert]).chunk(2, dim=-1) if w_up is None else (x @ w_gate[expert], x @ w_up[expert])
        y = y + (F.silu(gate) * up) @ w_down[expert] * weight
    return y


def _multiply_group(product, rows, weight):
    """Multiply one expert's rows [n, D] by its weight [D, F] by a grouped product, filled up to its alignment."""
    padded = F.pad(rows, (0, 0, 0, -len(rows) % ALIGNMENT))
    end = torch.full((1,), len(padded), dtype=torch.int32, device=rows.device)
    return product(padded, weight[None], end)[:len(rows)]


def row_bound(slots: int, experts: int) -> int:
    """Return P, which holds for any routing of so many slots; into fewer rows TileKernels would write out of bounds."""
    return (slots + (ALIGNMENT - 1) * experts) // ALIGNMENT * ALIGNMENT


def _sorted(x, topk_weights, w_gate_up, w_down, product, expert_rows, tile):
    row, source, expert_end = expert_rows
    rows = _Expand.apply(x, row, source, tile)                                                # [P, D]
    weights = topk_weights.to(x.dtype).flatten()
    row_weights = weights.new_zeros(len(source)).scatter_(0, row.flatten().long(), weights)   # 0 where nothing lies
    gate, up = product(rows, w_gate_up, expert_end).chunk(2, dim=-1)                          # [P, F]
    hidden = F.silu(gate) * up * row_weights[:, None]  # weighted where a row is narrowest
    return _Reduce.apply(product(hidden, w_down, expert_end), row, source, tile)
