"""Spider: a byte-level Recurrent-Depth Transformer.

    bytes -> embed_tokens -> prelude (byte rate) -> segments -> recurrent core (segment rate, looped)
          -> unpool + residual -> coda (byte rate) -> norm -> lm_head

What it is made of, and where each part comes from:
    MLA, latent attention with a decoupled rotary key                                     DeepSeek-V2, arXiv 2405.04434
    mixture of experts, balanced by a bias on the selection, without capacity             DeepSeek-V3, arXiv 2412.19437
    learned segments, mean pooling                           FlexiTokens, arXiv 2507.12720; Nawrot, arXiv 2211.09761
    recurrent depth with a stable linear injection (LTI)          Huginn, arXiv 2502.05171; Parcae, arXiv 2604.12946
    adaptive computation time (ACT)                                                             Graves, arXiv 1603.08983
    Engram, a memory of hashed n-grams, at segment rate and at byte rate     arXiv 2601.07372; BLT, arXiv 2412.09871
    what followed in the document where the last bytes stood before              the match model of PAQ, Mahoney 2005

Everything runs on packed rows, [rows, hidden_size], with `cu_seqlens` marking where a document starts: nothing is
padded to a longest row, memory grows with the number of bytes, and no document sees another. Shapes in comments:
B sequences of T bytes, M = B * T bytes, N segments of them, D hidden size, H heads, E experts, k experts per token,
L core layers.
Parameters are fp32 (the type that they were given); products run in `Spider.compute_dtype`.
"""

import logging
import math
import operator
from collections.abc import Callable
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, fields
from functools import cache
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tile_moe import Routing, balance, fp8_grouped_product, grouped_product, moe_forward, place, route
from tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE

BOUNDARIES = ("learned", "whitespace", "every_third", "every_byte")
RECOMPUTE = ("nothing", "core", "all")
MAX_LOOPS = 4096                          # of the core, in a flag as in a checkpoint


@dataclass
class SpiderConfig:
    """Every size of the model; plain values, saved in the checkpoint. The defaults are `1b`."""
    vocab_size: int = VOCAB_SIZE
    hidden_size: int = 2048               # multiples of 16, as those of experts: grouped products take no others
    n_prelude_layers: int = 2
    n_recurrent_layers: int = 6           # 0: no core, the byte layers alone, as a control arm
    n_coda_layers: int = 2
    n_loops: int = 6                      # loops trained with; beyond them the last one's adapter serves
    # attention (MLA)
    n_heads: int = 16
    q_lora_rank: int = 768
    kv_lora_rank: int = 320
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128                 # the query/key width, a multiple of 8: every attention kernel takes that
    rope_theta: float = 10000.0
    byte_window: int = 0                  # bytes that prelude and coda look back on, their own included; 0: all
    # feed-forward and experts
    intermediate_size: int = 4096         # of the dense layers of prelude and coda
    n_routed_experts: int = 32            # 0: only the shared one, a dense feed-forward
    n_shared_experts: int = 1             # as one SwiGLU of n_shared_experts * moe_intermediate_size
    n_experts_per_tok: int = 2
    moe_intermediate_size: int = 512
    expert_bias_rate: float = 0.001       # step of the selection bias, once per optimizer step
    aux_loss_weight: float = 0.01
    z_loss_weight: float = 0.001
    # segments
    boundaries: str = "learned"           # or, as control arms, whitespace, every_third, every_byte
    boundary_prior: float = 0.3           # first rate of boundaries per byte
    boundary_loss_weight: float = 1.0
    boundary_alpha: float = 1 / 3         # boundaries per byte are kept between alpha - lambda * sigma and alpha
    boundary_lambda: float = 3.0
    boundary_sigma: float = 0.023
    # recurrence
    lti: bool = True                      # False: v = h + e, to measure what the stable injection is worth
    lora_rank: int = 16                   # of the adapter of each loop; 0: none
    act: bool = True                      # False: the last loop's state is the output
    act_threshold: float = 0.99
    ponder_weight: float = 0.001          # of the ACT cost; 0: none
    # Engram: tables of hashed n-grams, before some core layers and at byte rate before prelude and head
    engram_layers: tuple[int, ...] = (1, 4)
    engram_orders: tuple[int, ...] = (3, 4, 6, 8)
    engram_heads: int = 4                 # hashes per order
    engram_rows: int = 29_000             # rows of each hash's table, about (the next free prime below)
    engram_dim: int = 64                  # width of a row
    engram_byte_orders: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    engram_byte_rows: int = 47_700
    engram_byte_dim: int = 128
    engram_match_orders: tuple[int, ...] = (3, 4, 5, 6, 8, 12, 16, 24)  # of what followed in the document; (): none

    def __post_init__(self):
        for f in fields(self):
            value, kind = getattr(self, f.name), type(f.default)
            if kind is tuple and type(value) is list:                      # when read back from JSON
                setattr(self, f.name, value := tuple(value))
            if type(value) not in ((int, float) if kind is float else (kind,)) or (
                    kind is tuple and any(type(part) is not int for part in value)):
                raise ValueError(f"{f.name} must be of type {'tuple of int' if kind is tuple else kind.__name__}")
            low, high = RANGES.get(f.name, (value, value))
            if not low <= value <= high:
                raise ValueError(f"{f.name} must be at least {low} and at most {high}")
        for holds, rule in (
                (self.hidden_size % 16 == 0, "hidden_size must be a multiple of 16"),
                (self.moe_intermediate_size % 16 == 0, "moe_intermediate_size must be a multiple of 16"),
                (self.qk_nope_head_dim + self.qk_rope_head_dim == self.v_head_dim,
                 "qk_nope_head_dim + qk_rope_head_dim must equal v_head_dim"),
                (self.v_head_dim % 8 == 0, "v_head_dim must be a multiple of 8"),
                (self.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim must be even"),
                (self.boundaries in BOUNDARIES, f"boundaries must be one of {', '.join(BOUNDARIES)}"),
                (0 < self.boundary_prior < 1, "boundary_prior must lie between 0 and 1"),
                (self.n_routed_experts + self.n_shared_experts > 0,
                 "n_routed_experts, n_shared_experts: there must be a routed or a shared expert"),
                (not self.n_routed_experts or self.n_experts_per_tok <= self.n_routed_experts,
                 "n_experts_per_tok must lie between 1 and n_routed_experts"),
                (not self.n_recurrent_layers or all(0 <= i < self.n_recurrent_layers for i in self.engram_layers),
                 "engram_layers must lie between 0 and n_recurrent_layers - 1"),
                (not self.engram_layers or self.engram_orders, "engram_layers need engram_orders")):
            if not holds:
                raise ValueError(rule)
        for name in ("engram_orders", "engram_byte_orders", "engram_match_orders"):
            orders = getattr(self, name)
            if list(orders) != sorted(set(orders)) or not all(1 <= order <= 32 for order in orders):
                raise ValueError(f"{name} must be ascending numbers of bytes from 1 to 32")
        for name, tables in (("engram", self.engram_heads), ("engram_byte", 1)):
            orders, rows = getattr(self, f"{name}_orders"), getattr(self, f"{name}_rows")
            if len(primes_below(rows, len(orders) * tables)) < len(orders) * tables:
                raise ValueError(f"{name}_rows must be larger: {len(orders) * tables} tables need primes below it")

    @property
    def bytes_per_segment(self) -> float:
        """About how many there will be: in the middle of the boundary loss's band, or as the control arms cut."""
        least = self.boundary_alpha - self.boundary_lambda * self.boundary_sigma
        return {"learned": 2 / max(1e-6, self.boundary_alpha + max(0, least)), "whitespace": 5.0, "every_third": 3.0,
                "every_byte": 1.0}[self.boundaries]

    @classmethod
    def preset(cls, name: str) -> "SpiderConfig":
        """`tiny` (two CPU cores), `small` (about 100M parameters) or `1b` (996M), each with every component."""
        return cls(**PRESETS[name])


# What each number may be: beyond it nothing sensible lies, and what is built of it would take for ever or overflow.
RANGES = {
    "vocab_size": (VOCAB_SIZE, 1 << 16), "hidden_size": (1, 1 << 16), "n_prelude_layers": (0, 256),
    "n_recurrent_layers": (0, 256), "n_coda_layers": (0, 256), "n_loops": (1, MAX_LOOPS), "n_heads": (1, 1024),
    "q_lora_rank": (1, 1 << 16), "kv_lora_rank": (1, 1 << 16), "qk_nope_head_dim": (1, 256),
    "qk_rope_head_dim": (1, 256), "v_head_dim": (1, 256), "rope_theta": (1, 1e12), "byte_window": (0, 1 << 16),
    "intermediate_size": (1, 1 << 18),
    "n_routed_experts": (0, 4096), "n_shared_experts": (0, 256), "n_experts_per_tok": (1, 256),
    "moe_intermediate_size": (1, 1 << 18), "expert_bias_rate": (0, 1), "aux_loss_weight": (0, 1e6),
    "z_loss_weight": (0, 1e6), "boundary_prior": (0, 1), "boundary_loss_weight": (0, 1e6), "boundary_alpha": (0, 1),
    "boundary_lambda": (0, 1e6), "boundary_sigma": (0, 1), "lora_rank": (0, 4096), "act_threshold": (0, 1),
    "ponder_weight": (0, 1e6), "engram_heads": (1, 16), "engram_rows": (1, 1 << 24), "engram_dim": (1, 4096),
    "engram_byte_rows": (1, 1 << 24), "engram_byte_dim": (1, 4096),
}

PRESETS = {
    "1b": {},
    "small": dict(hidden_size=768, n_recurrent_layers=4, n_loops=2, n_heads=12, q_lora_rank=256, kv_lora_rank=128,
                  qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=64, intermediate_size=1536, n_routed_experts=16,
                  moe_intermediate_size=256, engram_layers=(1, 3), engram_rows=12_000, engram_dim=32,
                  engram_byte_rows=24_000, engram_byte_dim=64),
    "tiny": dict(hidden_size=128, n_prelude_layers=1, n_recurrent_layers=2, n_coda_layers=1, n_loops=1, n_heads=2,
                 q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=64,
                 byte_window=64, intermediate_size=256, n_routed_experts=8, moe_intermediate_size=64, lora_rank=4,
                 engram_layers=(1,), engram_heads=2, engram_rows=2_000, engram_dim=16, engram_byte_rows=131_072,
                 engram_byte_dim=32),
}


class CoreStats(NamedTuple):              # a tuple: FSDP looks for the gradients' way back in those
    """What a run of the core reports beside its output. Losses are means over layer visits or segments."""
    aux_loss: Tensor                      # f_e * P_e balance loss
    z_loss: Tensor                        # router z-loss
    ponder: Tensor                        # ACT's loops + remainder, per segment
    mean_loops: Tensor                    # loops until halting, per segment
    load: Tensor                          # [L, E] fp32, tokens of an expert relative to an even share, sum over loops


@dataclass
class SpiderOutput:
    """Result of a forward pass; tensors are scalars unless a shape is given."""
    logits: Tensor                        # [B, T, vocab_size], fp32
    loss: Tensor | None                   # what is minimised; None without labels
    nats_per_byte: Tensor | None          # cross-entropy alone, over the labels that count
    segments: Tensor                      # number of segments, all sequences together
    mean_loops: Tensor
    tokens_per_expert: Tensor             # [L, E] fp32, over all loops
    parts: Tensor | None = None           # [4] what LOSS_PARTS add to nats_per_byte in the loss


LOSS_PARTS = "boundary_loss", "aux_loss", "z_loss", "ponder_loss"


# ---------------------------------------------------------------------------------------------------------------------
# Products, norm, rows of documents, rotary positions, attention

class Linear(nn.Linear):
    """nn.Linear whose fp32 weight is cast to the input's type; values come from Spider.init_weights alone."""

    cast: Tensor | None = None            # of the weight, while Spider.cast_weights_once lasts

    def __init__(self, in_features: int, out_features: int, bias: bool = False):
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self):
        pass

    def cast_weight(self, dtype: torch.dtype):
        if dtype != self.weight.dtype:
            self.cast = self.weight.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, weight_of(self, x.dtype), self.bias)


class WideLinear(Linear):
    """Linear in fp32 whatever its rows are, [N, D] -> [N, E]. On a GPU rows in bf16 are multiplied as they are."""

    def cast_weight(self, dtype: torch.dtype):
        if dtype == torch.bfloat16 and self.weight.is_cuda:
            self.cast = halves(self.weight.detach(), 0)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.bfloat16 and x.is_cuda:
            y = _Wide.apply(x, self.weight, halves(self.weight.detach(), 0) if self.cast is None else self.cast)
            return y if self.bias is None else y + self.bias
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


class _Wide(torch.autograd.Function):
    """x in bf16 times a weight in fp32: x [N, D], weight [E, D], its halves [2 * E, D] -> fp32 [N, E]. Two halves in
    bf16 have 16 bits of a number, more than TF32 takes of it, and x need not be copied to fp32."""

    @staticmethod
    def forward(ctx, x, weight, parts):
        ctx.save_for_backward(x, parts)
        high, low = wide_product(x, parts.mT).chunk(2, dim=1)
        return high + low

    @staticmethod
    def backward(ctx, grad):
        x, parts = ctx.saved_tensors
        grads = halves(grad, 1)                                                              # [N, 2 * E]
        high, low = wide_product(grads.mT, x).chunk(2)
        return grads[:, :grad.shape[1]] @ parts[:len(parts) // 2], high + low, None


def halves(x: Tensor, dim: int) -> Tensor:
    """x in fp32 as a sum of two numbers in bf16, side by side along `dim`."""
    high = x.to(torch.bfloat16)
    return torch.cat((high, (x - high).to(torch.bfloat16)), dim=dim)


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in bf16, summed up and given in fp32."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def weight_of(linear: nn.Linear, dtype: torch.dtype) -> Tensor:
    """A Linear's weight in the type of a product: its cast, where there is one."""
    for weight in (linear.cast, linear.weight):
        if weight is not None and weight.dtype == dtype:
            return weight
    return linear.weight.to(dtype)


def inverse_rms_of(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps), [..., 1], at least in fp32."""
    dtype = x.dtype if x.dtype.itemsize > 2 else torch.float32
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)
    return torch.addcmul(EPS[eps], length, length, value=1 / x.shape[-1]).rsqrt_()


EPS = {eps: torch.tensor(eps) for eps in (1e-6, 1e-3)}  # as tensors, so that they are added in the same operation


class _RMSNormCPU(torch.autograd.Function):
    """RMSNorm without weights in few passes: torch's own backward takes two to three times as long on a CPU."""

    @staticmethod
    def forward(ctx, x, eps):
        inverse_rms = inverse_rms_of(x, eps).to(x.dtype)
        y = x * inverse_rms
        ctx.save_for_backward(y, inverse_rms)
        return y

    @staticmethod
    def backward(ctx, grad):
        y, inverse_rms = ctx.saved_tensors
        return torch.addcmul(grad, y, (grad * y).mean(-1, keepdim=True), value=-1) * inverse_rms, None


def rms_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension; no weights, the Linear that follows has them."""
    if x.is_cuda:
        return F.rms_norm(x, x.shape[-1:], eps=eps)
    return _RMSNormCPU.apply(x, eps) if torch.is_grad_enabled() else (x * inverse_rms_of(x, eps)).to(x.dtype)


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


@dataclass
class Packing:
    """Which document each packed row belongs to, and what attention needs to know of that."""
    cu_seqlens: Tensor                    # int32 [documents + 1], rows before each document's first one
    document: Tensor                      # int64 [rows]
    position: Tensor                      # int64 [rows], row within its document, earlier steps' rows included
    longest: int                          # an upper bound of rows in a document
    cos: Tensor                           # [rows, 1, qk_rope_head_dim], of both halves
    sin: Tensor                           # the same, negative in the first half
    buckets: list[tuple[int, int]] | None  # (documents, rows each is filled up to) of each product; None: one kernel
    slot: Tensor | None                   # int64 [rows], place of a row among the buckets' rows; None: its own
    window: int                           # rows that a row looks back on, its own included; 0: all of its document

    @classmethod
    def build(cls, cu_seqlens: Tensor, rows: int, bound: int, config: SpiderConfig, dtype: torch.dtype,
              window: int = 0, before: Tensor | None = None) -> "Packing":
        """cu_seqlens int32 [documents + 1] of `rows` rows, no document longer than `bound`; dtype of attention; before
        [documents]: the rows that earlier steps of decoding brought."""
        device = cu_seqlens.device
        row = torch.arange(rows, device=device)
        if before is not None and rows == len(before) and bound == 1:                        # a row to each document
            document, position = row, before
        else:
            document = torch.searchsorted(cu_seqlens[1:], row, right=True)
            position = row - (cu_seqlens if before is None else cu_seqlens[:-1] - before).index_select(0, document)
        buckets = slot = None
        if before is None and (device.type == "cpu" or dtype not in (torch.bfloat16, torch.float16)):
            buckets, start = fill_up(cu_seqlens.diff(), bound)
            slot = None if start is None else start.index_select(0, document) + position
        frequency, signed = frequencies(config.qk_rope_head_dim, config.rope_theta, device)
        position_of = position[:, None, None]
        cos, sin = (position_of * frequency).cos().to(dtype), (position_of * signed).sin().to(dtype)
        return cls(cu_seqlens, document, position, bound, cos, sin, buckets, slot, window)


@cache
def frequencies(width: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Angles of both halves of a rotary embedding at position 1, [width]; and the same, negative in the first half."""
    with torch.inference_mode(False):
        frequency = theta ** -(torch.arange(0, width, 2, device=device) / width)
        return torch.cat((frequency, frequency)), torch.cat((-frequency, frequency))


SMALL_PRODUCT = 1 << 16                   # scores of a head that take as long as one product more


def fill_up(lengths: Tensor, bound: int) -> tuple[list[tuple[int, int]], Tensor | None]:
    """Sorts documents of lengths [documents] into buckets, each filled up to its longest one: its rows at most twice
    the documents' own, its scores, which attention's time goes by, at most half as many again, or a small product.

    Returns (documents, length) of each bucket, the longest first, and int64 [documents], where each document starts;
    None where that is where it starts already. Lengths are powers of two, from 16 on multiples of 16, or the bound:
    kernels are made once per size. Waits for the device.
    """
    kinds, counts = (part.flip(0).tolist() for part in torch.unique(lengths[lengths > 0], return_counts=True))
    buckets, shortest, rows, scores = [], [], 0, 0                                           # of the last bucket
    for kind, count in zip(kinds, counts):
        documents, size = buckets[-1] if buckets else (0, 0)
        documents, rows, scores = documents + count, rows + kind * count, scores + kind * kind * count
        if buckets and documents * size <= 2 * rows and documents * size * size <= 1.5 * scores + SMALL_PRODUCT:
            buckets[-1], shortest[-1] = (documents, size), kind
        else:
            size = 1 << (kind - 1).bit_length() if kind < 16 else round_up(kind, 16)
            buckets.append((count, min(size, bound)))
            shortest.append(kind)
            rows, scores = kind * count, kind * kind * count
    if len(buckets) == 1 and rows == buckets[0][0] * buckets[0][1]:
        return buckets, None
    bucket = (lengths[:, None] < lengths.new_tensor(shortest)).sum(1)
    size = lengths.new_tensor([size for _, size in buckets] + [0]).index_select(0, bucket).long()  # 0: of no rows
    order = bucket.argsort(stable=True)
    start = torch.empty_like(size)
    start[order] = F.pad(size[order].cumsum(0), (1, -1))
    return buckets, start


def document_starts(input_ids: Tensor) -> Tensor:
    """Whether a document starts at a byte of [B, T]: at BOS and behind EOS; bool [B, T]."""
    starts = input_ids == BOS_ID
    starts[:, 1:] |= input_ids[:, :-1] == EOS_ID
    return starts


def document_cu_seqlens(input_ids: Tensor) -> Tensor:
    """Where documents start in [B, T], each row's start included; int32 [documents + 1]."""
    starts = document_starts(input_ids)
    starts[:, 0] = True
    return F.pad(starts.flatten().nonzero().squeeze(1), (0, 1), value=input_ids.numel()).to(torch.int32)


class _Rotate(torch.autograd.Function):
    """Rotary embedding, in place, of the last numbers of each head: x [rows, H * head_dim]."""

    @staticmethod
    def forward(ctx, x, heads, cos, sin):
        ctx.save_for_backward(cos, sin)
        ctx.heads = heads
        ctx.mark_dirty(x)
        return turn_(x, heads, cos, sin, 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        return turn_(grad, ctx.heads, *ctx.saved_tensors, -1), None, None, None


def turn_(x: Tensor, heads: int, cos: Tensor, sin: Tensor, way: int) -> Tensor:
    """x turned by its rows' angles, or back by them (`way` -1)."""
    part = x.view(len(x), heads, -1)[:, :, -cos.shape[2]:]
    turned = part.roll(cos.shape[2] // 2, -1)
    part.mul_(cos).addcmul_(turned, sin, value=way)
    return x


def attend(q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> Tensor:
    """Causal attention inside each document by one kernel: q, k, v [rows, H, head_dim] -> [rows, H * head_dim]."""
    from torch.nn.attention.varlen import varlen_attn
    cu, longest = packing.cu_seqlens, packing.longest
    return varlen_attn(q, k, v, cu, cu, longest, longest, window_size=(packing.window - 1, 0)).flatten(1)


def attend_filled(qkv: Tensor, packing: Packing) -> Tensor:
    """The same by products of documents that are filled up: qkv [rows, H, 3, head_dim] -> [rows, H * head_dim]."""
    sizes = [documents * length for documents, length in packing.buckets]
    if packing.slot is not None:
        qkv = qkv.new_zeros(sum(sizes), *qkv.shape[1:]).index_copy_(0, packing.slot, qkv)
    parts = qkv.split(sizes) if len(sizes) > 1 else [qkv]
    parts = [_attend_padded(part.unflatten(0, bucket), packing.window).flatten(0, 1)
             for part, bucket in zip(parts, packing.buckets)]
    out = torch.cat(parts) if len(parts) > 1 else parts[0]
    return out if packing.slot is None else out.index_select(0, packing.slot)


def _attend_padded(qkv: Tensor, window: int) -> Tensor:
    """The same for qkv [documents, rows, H, 3, head_dim] -> [documents, rows, H * head_dim]; behind a document's last
    row nothing looks. Under a window, blocks of as many rows look at themselves and at the block before."""
    documents, longest = qkv.shape[:2]
    if not 0 < window < longest:
        return _attend_block(*qkv.unbind(3), longest)
    blocks = F.pad(qkv, (0, 0, 0, 0, 0, 0, 0, -longest % window)).unflatten(1, (-1, window))
    first = _attend_block(*blocks[:, 0].unbind(3), window)
    q, k, v = torch.cat((blocks[:, :-1], blocks[:, 1:]), dim=2).flatten(0, 1).unbind(3)
    rest = _attend_block(q[:, window:], k, v, window)
    return torch.cat((first, rest.unflatten(0, (documents, -1)).flatten(1, 2)), dim=1)[:, :longest]


def _attend_block(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """The last n of m rows look at up to `window` rows: q [B, n, H, head_dim], k, v [B, m, H, head_dim] -> [B, n, H *
    head_dim]."""
    batch, n, heads, width = q.shape
    m = k.shape[1]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if q.dtype == torch.bfloat16 and m <= 2048:  # there a CPU's plain products are faster than its SDPA in bf16
        q, k, v = (t.reshape(batch * heads, -1, width) for t in (q, k, v))
        parts = []
        for rows in q.split(512, dim=1):  # what lies behind all of them is not multiplied
            last = min(m, m - n + 512 * len(parts) + rows.shape[1])
            score = torch.baddbmm(out_of_sight(rows, last, window), rows, k[:, :last].mT, alpha=width ** -0.5)
            parts.append(torch.bmm(score.softmax(-1), v[:, :last]))
        out = (torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]).view(batch, heads, n, width)
    elif m > n:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=out_of_sight(q, m, window))
    else:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2).reshape(batch, n, heads * width)


def out_of_sight(q: Tensor, m: int, window: int) -> Tensor:
    """What to add to scores [n, m] of the last n of m rows, q [..., n, width]: -inf where a row may not look, else 0."""
    n = q.shape[-2]
    hidden = q.new_full((n, m), -math.inf)
    return hidden.triu(m - n + 1) + hidden.tril(m - n - window) if m > window else hidden.triu(m - n + 1)


@dataclass
class Left:
    """The segments that have not halted: rows that a loop computes. Of the others, what later segments read stays as
    their last loop left it.

    Where the host knows `index`, halted rows leave every product. Where it would have to wait for their number, all N
    rows are computed, and `mask` says whose results count. With neither, nothing has halted.
    """
    index: Tensor | None = None           # int64 [n], ascending
    mask: Tensor | None = None            # bool [N]

    def pick(self, x: Tensor) -> Tensor:
        """[N, ...] -> the rows that are computed, [n, ...]."""
        return x if self.index is None else x.index_select(0, self.index)

    def spread(self, x: Tensor, rows: int) -> Tensor:
        """[n, D] -> [rows, D], zero where nothing was computed."""
        return x if self.index is None else x.new_zeros(rows, x.shape[1]).index_copy(0, self.index, x)

    def merge(self, before: Tensor | None, x: Tensor) -> Tensor:
        """[n, D] -> [N, D], what was there before where nothing was computed, or where it does not count."""
        if self.index is not None:
            return before.index_copy(0, self.index, x)
        return x if self.mask is None else torch.where(self.mask[:, None], x, before)


EVERY_ROW = Left()


class Cache:
    """What layers read of earlier steps' rows while a step runs: `held` [layers, loops, documents, places, width], a
    document's row p in place p % places. What a loop puts there stands for later loops until they put something.

    before [documents]: a document's rows of earlier steps. window: how many rows a row sees, itself included; 0: all.
    There are places for twice as many rows as are seen, so that they are seldom moved.
    """

    def __init__(self, held: Tensor, packing: Packing, before: Tensor, window: int = 0):
        one = packing.longest == 1 and len(before) == 1                                      # row: documents are few
        last = before if one else before + packing.cu_seqlens.diff() - 1                     # [documents]
        rows = int(last.max()) + 1                                                           # host synchronisation
        need = min(rows, window + packing.longest - 1) if window else rows
        snug = one and need == window     # then each place holds a row that is seen
        if held.shape[3] != need if snug else not need <= held.shape[3] <= max(16, 4 * need):
            place = torch.arange(need if snug else 2 * need, device=held.device)
            kept = before[:, None] - 1 - (before[:, None] - 1 - place) % len(place)          # the row to lie there
            held = held[:, :, torch.arange(len(before), device=held.device)[:, None], kept % held.shape[3]]
        self.held, self.packing, self.layer, self.loop = held, packing, 0, 0
        self.place = packing.position % held.shape[3]                                        # [N]
        if len(before) > 1:
            self.place = self.place + packing.document * held.shape[3]
        self.read, self.hidden = min(rows, held.shape[3]), None                              # places; which a row skips
        if not one:
            place = torch.arange(self.read, device=held.device)
            lies = (last[:, None] - (last[:, None] - place) % held.shape[3])[:, None]        # [documents, 1, read]
            row = (before[:, None] + torch.arange(packing.longest, device=held.device))[:, :, None]
            self.hidden = (lies < 0) | (lies > row)                                      # [documents, longest, read]
            if window:
                self.hidden |= lies <= row - window
            self.slot = packing.document * packing.longest + packing.position - before.index_select(0, packing.document)

    def of(self, layer: int, loop: int = 0) -> "Cache":
        """The part of it that a layer reads and writes in a loop."""
        part = copy(self)
        part.layer, part.loop = layer, loop
        return part

    def put(self, x: Tensor) -> Tensor:
        """Keeps the step's rows [N, width]; returns all that the loop holds, [documents, places, width]."""
        held = self.held[self.layer, self.loop:]
        held.flatten(1, 2).index_copy_(1, self.place, x.expand(len(held), -1, -1))
        return held[0]

    def look_back(self, distances: list[int]) -> "Cache":
        """Settles what `put_and_look_back` returns: the rows so many rows before the step's."""
        position = self.packing.position - torch.tensor(distances, device=self.held.device)[:, None]
        places = self.held.shape[3]
        self.back = (self.packing.document * places + position % places).flatten()
        self.there = (position >= 0)[:, :, None]
        return self

    def put_and_look_back(self, x: Tensor) -> Tensor:
        """Keeps the step's rows [N, width]; returns [distances, N, width], zero before a document's start."""
        back = self.put(x).flatten(0, 1).index_select(0, self.back).view(-1, *x.shape)
        return torch.where(self.there, back, 0)

    def attend(self, q: Tensor, x: Tensor, scale: float, value_width: int) -> Tensor:
        """Attention of the step's rows to themselves, x [N, width], and all that are held, for every head: q
        [N, H, width] -> [N, H, value_width]. Values are the first numbers of keys."""
        documents, longest, (rows, heads, width) = len(self.packing.cu_seqlens) - 1, self.packing.longest, q.shape
        held = self.put(x)[:, :self.read]
        regular = documents * longest == rows
        if not regular:
            q = q.new_zeros(documents * longest, heads, width).index_copy(0, self.slot, q)
        q = q.reshape(documents, longest * heads, width)
        score = torch.baddbmm(q.new_zeros(()), q, held.mT, beta=0, alpha=scale)
        if self.hidden is not None:
            score.view(documents, longest, heads, -1).masked_fill_(self.hidden[:, :, None], -math.inf)
        out = torch.bmm(score.softmax(-1), held[..., :value_width]).view(documents * longest, heads, value_width)
        return out if regular else out.index_select(0, self.slot)


class MLA(nn.Module):
    """Multi-head latent attention; what later rows read of a row is its latent alone, kv_lora_rank + rope numbers."""

    def __init__(self, config: SpiderConfig):
        super().__init__()
        self.config, c = config, config
        head_dim = c.qk_nope_head_dim + c.qk_rope_head_dim
        self.q_a_proj = Linear(c.hidden_size, c.q_lora_rank)
        self.q_b_proj = Linear(c.q_lora_rank, c.n_heads * head_dim)
        self.kv_a_proj = Linear(c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim)
        self.kv_b_proj = Linear(c.kv_lora_rank, c.n_heads * (c.qk_nope_head_dim + c.v_head_dim))
        self.o_proj = Linear(c.n_heads * c.v_head_dim, c.hidden_size)

    def forward(self, x: Tensor, packing: Packing, left: Left, latent: Tensor | None = None,
                cache: Cache | None = None) -> tuple[Tensor, Tensor]:
        """x [n, D] of the rows that are left -> the same, and the latents [rows, kv_lora_rank + rope], unrotated: the
        given ones, of the loop before, stay for the others. A cache holds earlier latents, normed and rotated."""
        c = self.config
        latent = left.merge(latent, self.kv_a_proj(x))
        rows, heads = len(latent), c.n_heads
        q = left.spread(self.q_b_proj(rms_norm(self.q_a_proj(x))), rows)
        if not isinstance(self.q_b_proj, Linear):  # what FP8 multiplied is a view, which autograd lets nobody write to
            q = q.clone()
        q = _Rotate.apply(q, heads, packing.cos, packing.sin).view(rows, heads, -1)          # [rows, H, nope + rope]
        c_kv, k_rope = latent.split_with_sizes((c.kv_lora_rank, c.qk_rope_head_dim), dim=-1)
        c_kv, k_rope = rms_norm(c_kv), _Rotate.apply(k_rope.clone(), 1, packing.cos, packing.sin)
        if cache is not None:
            return self.o_proj(left.pick(self.absorbed(q, c_kv, k_rope, cache))), latent
        kv = self.kv_b_proj(c_kv).view(rows, heads, -1)                                    # [rows, H, nope + v]
        k_nope, v = kv.split_with_sizes((c.qk_nope_head_dim, c.v_head_dim), dim=-1)
        k_rope = k_rope[:, None].expand(-1, heads, -1)
        if packing.buckets is None:
            v = v if c.qk_nope_head_dim % 8 == 0 else v.contiguous()                         # kernels read 16 bytes
            out = attend(q, torch.cat((k_nope, k_rope), dim=-1), v, packing)
        else:
            out = attend_filled(torch.cat((q, k_nope, k_rope, v), dim=-1).view(rows, heads, 3, -1), packing)
        return self.o_proj(left.pick(out)), latent

    def absorbed(self, q: Tensor, c_kv: Tensor, k_rope: Tensor, cache: Cache) -> Tensor:
        """The same attention over latents alone, [rows, H * v_head_dim]: keys and values are never made of them, since
        q (W_UK c) = (q W_UK) c, and the weighted sum of W_UV c is W_UV times that of c."""
        c = self.config
        weight = weight_of(self.kv_b_proj, c_kv.dtype).view(c.n_heads, -1, c.kv_lora_rank)   # [H, nope + v, c_kv]
        w_uk, w_uv = weight.split_with_sizes((c.qk_nope_head_dim, c.v_head_dim), dim=1)
        q_nope, q_rope = q.split_with_sizes((c.qk_nope_head_dim, c.qk_rope_head_dim), dim=-1)
        q = torch.cat((torch.bmm(q_nope.transpose(0, 1), w_uk).transpose(0, 1), q_rope), dim=-1)
        held = torch.cat((c_kv, k_rope), dim=-1)
        out = cache.attend(q, held, c.v_head_dim ** -0.5, c.kv_lora_rank)                    # [rows, H, c_kv]
        return torch.bmm(out.transpose(0, 1), w_uv.mT).transpose(0, 1).flatten(1)


class SwiGLU(nn.Module):
    """Gated feed-forward, [rows, D] -> [rows, D]."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Block(nn.Module):
    """A dense layer at byte rate, [M, D] -> [M, D]."""

    compiled: Callable | None = None      # see Spider.compile_layers

    def __init__(self, config: SpiderConfig):
        super().__init__()
        self.attention = MLA(config)
        self.ffn = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, packing: Packing, cache: Cache | None = None) -> Tensor:
        if self.compiled is not None and torch.is_grad_enabled():
            return self.compiled(self, x, packing)
        return self.run(x, packing, cache)

    def run(self, x: Tensor, packing: Packing, cache: Cache | None = None) -> Tensor:
        x = x + self.attention(rms_norm(x), packing, EVERY_ROW, cache=cache)[0]
        return x + self.ffn(rms_norm(x))


# ---------------------------------------------------------------------------------------------------------------------
# Mixture of experts

class MoE(nn.Module):
    """Routed experts and a shared one, [N, D] -> [N, D]; no capacity, no token is dropped."""

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
        self.shared = SwiGLU(c.hidden_size, c.n_shared_experts * width) if c.n_shared_experts else None
        self.fp8 = False                  # whether the routed experts multiply in FP8 when training
        self.cast = None                  # of the routed experts' weights, while Spider.cast_weights_once lasts

    def weights(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor]:
        """w_gate, w_up, w_down in the type of the products, the first two joined where a backend multiplies them as one
        (see moe_forward); for FP8 columns lie together, as its kernels want them."""
        w_gate, w_up, w_down = (w.to(dtype) for w in (self.w_gate, self.w_up, self.w_down))
        if self.backend != "loop":
            w_gate, w_up = torch.cat((w_gate, w_up), dim=-1), None
        return tuple(w.mT.contiguous().mT if self.fp8 and w is not None else w for w in (w_gate, w_up, w_down))

    def cast_weight(self, dtype: torch.dtype):
        self.cast = self.weights(dtype) if self.config.n_routed_experts else None

    def forward(self, x: Tensor, decided: Routing | None = None) -> tuple[Tensor, Routing]:
        """`decided` is the routing of an earlier pass over the same rows, which stays."""
        if not self.config.n_routed_experts:
            return self.shared(x), Routing(None, None, None)
        score = self.router(x)                                                               # [N, E]
        topk_idx, topk_weights = route(score, self.expert_bias, self.config.n_experts_per_tok, self.backend,
                                       decided and decided.topk_idx)
        places = decided and decided.places
        if places is None and torch.is_grad_enabled():
            places = place(topk_idx, len(self.expert_bias), self.backend)
        weights = self.weights(x.dtype) if self.cast is None else self.cast
        product = fp8_grouped_product if self.fp8 and self.training else grouped_product
        y = moe_forward(x, topk_idx, topk_weights, *weights, self.backend, product, places)
        return (y if self.shared is None else y + self.shared(x)), Routing(score, topk_idx, places)


# ---------------------------------------------------------------------------------------------------------------------
# Segments: where bytes are cut, pooled and handed back

def boundary_noise(seed: int | Tensor | None, sequences: int, length: int, device: torch.device) -> Tensor:
    """Uniform noise [sequences, length] in (0, 1), fp32; row i is a function of seed + i alone (splitmix64).

    Without a seed it comes from torch's default generator."""
    if seed is None:
        return torch.rand(sequences, length, device=device)

    def mix(z):
        for shift, factor in ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64))):
            z = (z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))) * factor
        return z ^ ((z >> 31) & ((1 << 33) - 1))
    golden = 0x9E3779B97F4A7C15 - (1 << 64)
    row = mix((torch.arange(sequences, device=device) + seed) * golden)
    bits = mix(row[:, None] + torch.arange(1, length + 1, device=device) * golden)
    return (((bits >> 40) & 0xFFFFFF).float() + 0.5) / (1 << 24)


def pool_segments(h: Tensor, b: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of each finished segment's bytes, in O(M * D), with the gradient of the published dense einsum.

    h [M, D]; b [M], 1 where a segment ends (0 or 1 in value, straight-through gradient); cu_seqlens int32
    [documents + 1]. Returns z [N, D], documents in order, and segment_cu_seqlens int32 [documents + 1]. Bytes behind a
    document's last boundary belong to no segment. The gradient to b runs through w_t = 1 + c_t - stopgrad(c_t), c_t the
    number of boundaries before t in the document (FlexiTokens, arXiv 2507.12720).
    """
    z, total, segment_cu_seqlens = sum_segments(h, b, cu_seqlens)
    segments = len(z) + 1 - len(cu_seqlens)
    return (z[:segments] / total[:segments]).to(h.dtype), segment_cu_seqlens


def sum_segments(h: Tensor, b: Tensor, cu_seqlens: Tensor,
                 begun: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The same before the division: sums [N + documents, D], weights [N + documents, 1] and segment_cu_seqlens. Behind
    the finished segments stands what each document has begun; so it comes in again, [documents, D] and [documents, 1],
    where the document goes on."""
    document, finished = _documents_and_segments(b, cu_seqlens)
    segment_cu_seqlens = F.pad(finished, (1, 0)).index_select(0, cu_seqlens)
    segments = int(segment_cu_seqlens[-1])                                                   # host synchronisation
    own = finished - b.detach().round().long()                                               # [M], segment of each byte
    own = torch.where(own < segment_cu_seqlens.index_select(0, document + 1), own, segments + document)
    before = b.cumsum(0) - b
    before = before - before.index_select(0, cu_seqlens.index_select(0, document))           # c_t
    weight = 1 + before - before.detach()
    rows = segments + len(cu_seqlens) - 1
    total = weight.new_zeros(rows, 1).index_add(0, own, weight[:, None])
    z = _SumRows.apply(h, weight, own, rows)
    if begun is not None:
        first = own.index_select(0, cu_seqlens[:-1])
        z, total = z.index_add(0, first, begun[0]), total.index_add(0, first, begun[1])
    return z, total, segment_cu_seqlens.to(torch.int32)


class _SumRows(torch.autograd.Function):
    """Rows h [M, D] times weights [M] summed up where `own` [M] says, [rows, D]; torch's own keeps the products."""

    @staticmethod
    def forward(ctx, h, weight, own, rows):
        ctx.save_for_backward(h, weight, own)
        return weight.new_zeros(rows, h.shape[1]).index_add_(0, own, weight[:, None] * h)

    @staticmethod
    def backward(ctx, grad):
        h, weight, own = ctx.saved_tensors
        grad = grad.index_select(0, own)
        to_weight = (grad * h).sum(1)
        return grad.mul_(weight[:, None]).to(h.dtype), to_weight, None, None


def unpool_segments(z: Tensor, null: Tensor, b: Tensor, cu_seqlens: Tensor, segment_cu_seqlens: Tensor) -> Tensor:
    """Hands each byte the last segment of its document finished at or before it: causal with nothing to shift.

    z [N, D], null [D] for bytes before a document's first boundary, or one for each document, [documents, D]; b [M],
    cu_seqlens and segment_cu_seqlens int32 [documents + 1]. Returns [M, D]; no gradient reaches b.
    """
    document, finished = _documents_and_segments(b, cu_seqlens)
    null = null.view(-1, z.shape[1])
    own = torch.where(finished > segment_cu_seqlens.index_select(0, document), finished + len(null) - 1,
                      document.clamp_max(len(null) - 1))
    return torch.cat((null.to(z.dtype), z)).index_select(0, own)


def _documents_and_segments(b: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Per byte, int64 [M]: its document, and the segments of all documents finished at or before it."""
    row = torch.arange(len(b), device=b.device)
    return torch.searchsorted(cu_seqlens[1:], row, right=True), b.detach().round().long().cumsum(0)


# ---------------------------------------------------------------------------------------------------------------------
# Engram: tables of hashed n-grams

def gram_keys(shifted: Tensor, multiplier: Tensor, orders: tuple[int, ...]) -> list[Tensor]:
    """The last n bytes of each row as one number, for each order n: XOR over k < n of shifted[k] * multiplier[k]."""
    keys = list(accumulate((shifted[:len(multiplier)] * multiplier[:, None]).unbind(), operator.xor))
    return [keys[order - 1] for order in orders]


def init_multiplier(multiplier: Tensor, seed: int):
    """Odd 64-bit numbers from `seed`; no random state is touched."""
    numbers = torch.Generator().manual_seed(seed)
    multiplier.copy_(torch.randint(-2 ** 62, 2 ** 62, multiplier.shape, generator=numbers) * 2 + 1)


def shifted_bytes(ids: Tensor, position: Tensor, longest: int) -> Tensor:
    """ids [M] with their positions [M] in documents -> [longest, M]: the byte k places back, PAD before a start."""
    back = torch.arange(longest, device=ids.device)[:, None]
    row = torch.arange(len(ids), device=ids.device)
    return torch.where(position >= back, ids[(row - back).clamp_min(0)], PAD_ID)


@cache
def primes_below(limit: int, count: int) -> tuple[int, ...]:
    """The `count` largest primes not above `limit`, descending; all of them where there are fewer."""
    found = []
    for n in range(limit, 1, -1):
        if len(found) == count:
            break
        if n == 2 or n % 2 and all(n % d for d in range(3, math.isqrt(n) + 1, 2)):
            found.append(n)
    return tuple(found)


class EngramTable(nn.Module):
    """One memory's rows: for each order n and head, row (XOR over k < n of byte_{t-k} * multiplier_k) mod a prime of
    its own. The tables lie one after the other in `weight`; a row never used stays zero. Gradients of lookups are not
    in weight.grad but in `gathered`, until `forget`."""

    def __init__(self, orders: tuple[int, ...], heads: int, rows: int, dim: int):
        super().__init__()
        self.orders, self.heads, self.width = orders, heads, len(orders) * heads * dim
        self.primes = primes_below(rows, len(orders) * heads)
        self.weight = nn.Parameter(torch.empty(sum(self.primes), dim))
        self.register_buffer("multiplier", torch.empty(max(orders), dtype=torch.int64))
        self.register_buffer("prime", torch.empty(len(orders), heads, dtype=torch.int64), persistent=False)
        self.register_buffer("offset", torch.empty(len(orders), heads, dtype=torch.int64), persistent=False)
        self.forget()

    def init_hash(self, seed: int):
        """Multipliers from `seed`, primes and offsets from the sizes."""
        init_multiplier(self.multiplier, seed)
        prime = torch.tensor(self.primes).view(self.prime.shape)
        self.prime.copy_(prime)
        self.offset.copy_(F.pad(prime.flatten().cumsum(0), (1, -1)).view(prime.shape))

    def addresses(self, shifted: Tensor) -> Tensor:
        """shifted [at least max(orders), rows] -> rows of `weight` int64 [rows, orders * heads]."""
        key = torch.stack(gram_keys(shifted, self.multiplier, self.orders), dim=1)           # [rows, orders]
        return (key[:, :, None].remainder(self.prime) + self.offset).flatten(1)

    def forward(self, shifted: Tensor) -> Tensor:
        """-> [rows, orders * heads, dim]; its gradient goes to `gather`, weight.grad stays None."""
        return _Lookup.apply(self.weight, self.addresses(shifted), self)

    def gather(self, row: Tensor, grad: Tensor):
        """Keeps what the optimizer needs of lookups: their rows [n], gradients [n, dim] and mean squares of these.

        They are listed as they come and, once more than half as many as the table has rows, summed by row: a step's
        memory is bounded by the table's, whatever the number of lookups and micro-steps. Merging equal rows before
        their squares are taken, as torch does when it adds sparse gradients on a CPU, would lose the squares."""
        self.lookups.append((row, grad, torch.linalg.vector_norm(grad, dim=1).square_().div_(grad.shape[1])))
        if 2 * sum(len(row) for row, _, _ in self.lookups) > len(self.weight):
            self.sum_up()

    def sum_up(self) -> tuple[Tensor, Tensor, Tensor]:
        """Sums by row all that was gathered: every row of the table, its gradients and mean squares."""
        if self.sums is None:
            rows = len(self.weight)
            self.sums = (torch.arange(rows, device=self.weight.device), torch.zeros_like(self.weight),
                         self.weight.new_zeros(rows))
        for row, grad, square in self.lookups:
            self.sums[1].index_add_(0, row, grad)
            self.sums[2].index_add_(0, row, square)
        self.lookups.clear()
        return self.sums

    def gathered(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Rows [n], gradients [n, dim] and mean squares [n] since `forget`; a row may come several times."""
        return self.lookups + [self.sums] * (self.sums is not None)

    def forget(self):
        self.lookups, self.sums = [], None


class _Lookup(torch.autograd.Function):
    """Rows of a table by address, [rows, tables] -> [rows, tables, dim]; the table gathers their gradients itself."""

    @staticmethod
    def forward(ctx, weight, address, table):
        ctx.save_for_backward(address)
        ctx.table = table
        return F.embedding(address, weight)

    @staticmethod
    def backward(ctx, grad):
        ctx.table.gather(ctx.saved_tensors[0].flatten(), grad.flatten(0, 1))
        return None, None, None


class SegmentEngram(nn.Module):
    """The memory in front of a core layer: what the segment's last bytes recall, gated by the state, then convolved."""

    kernel_size = 4
    eps = 1e-3                            # of norms over what tables hold: at their zero start, 1e-6 would multiply
                                          # gradients by a thousand, and Adagrad would never forget it

    def __init__(self, config: SpiderConfig):
        super().__init__()
        self.table = EngramTable(config.engram_orders, config.engram_heads, config.engram_rows, config.engram_dim)
        self.key_proj = Linear(self.table.width, config.hidden_size)
        self.value_proj = Linear(self.table.width, config.hidden_size)
        self.conv_weight = nn.Parameter(torch.empty(self.kernel_size, config.hidden_size))

    @classmethod
    def taps(cls, config: SpiderConfig) -> list[int]:
        """How many segments back the convolution looks, beside the segment itself."""
        return [tap * len(config.engram_orders) for tap in range(1, cls.kernel_size)]

    def recall(self, shifted: Tensor, position: Tensor, dtype: torch.dtype) -> "Recalled":
        """What all loops share, of segments at `position` [N] that end with the bytes `shifted` [K, N]."""
        memory = self.table(shifted).flatten(1).to(dtype)
        key, value = rms_norm(self.key_proj(memory), self.eps), self.value_proj(memory)
        wide = torch.promote_types(dtype, torch.float32)
        power = torch.linalg.vector_norm(value, dim=1, keepdim=True, dtype=wide).square() / value.shape[1]
        if torch.is_grad_enabled():       # cheap to do again, and three times as large as what it is made of
            taps, row = checkpoint(self.taps_of, value, position, use_reentrant=False, preserve_rng_state=False)
        else:
            taps, row = self.taps_of(value, position)
        return Recalled(key, value, power, row, taps)

    def taps_of(self, value: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """What each tap weighs of value, [N, taps, D], and the segments where it lies, [N * taps]."""
        back = torch.arange(self.kernel_size, device=value.device) * len(self.table.orders)
        there = position[:, None] >= back                                                    # [N, taps]
        row = (torch.arange(len(value), device=value.device)[:, None] - back).clamp_min(0)
        taps = value.index_select(0, row.flatten()).unflatten(0, row.shape)
        return taps * (there[:, :, None] * self.conv_weight.to(value.dtype)), row.flatten()

    def forward(self, h: Tensor, recalled: "Recalled", left: Left, before: Tensor | None,
                cache: Cache | None = None) -> tuple[Tensor, Tensor]:
        """h [n, D] of the rows that are left -> the same, and what the convolution reads; `before`: the loop before's,
        which stays for the others.

        Between loops nothing but gates changes. The convolution reads the normed u = gate * value, which is value times
        a number for each segment: these, [N, 1], times what each tap weighs of value. A cache holds what it read of
        earlier steps, [N, D]."""
        key, value, power = (left.pick(part) for part in recalled[:3])
        gate = self.gate(h, key)
        scale = (gate * torch.rsqrt(gate * gate * power + self.eps)).to(h.dtype)
        if cache is None:
            read = left.merge(before, scale)
            number = read.flatten().index_select(0, recalled.row).view(len(read), 1, -1)     # [N, 1, taps]
            convolved = torch.bmm(left.pick(number), left.pick(recalled.taps)).squeeze(1)
        else:
            read = left.merge(before, scale * value)
            convolved = left.pick(self.convolve(read, cache))
        return torch.addcmul(h, gate.to(h.dtype), value) + F.silu(convolved), read

    def gate(self, h: Tensor, key: Tensor) -> Tensor:
        """How far states h [n, D] let in what their keys [n, D] stand for: [n, 1] in (0, 1), at least fp32."""
        match = _Match.apply(h, key)
        return torch.sigmoid(match.sign() * match.abs().clamp_min(1e-6).sqrt())

    def convolve(self, read: Tensor, cache: Cache) -> Tensor:
        """Depthwise causal convolution over the segments of a document, of steps' rows [N, D] -> [N, D]."""
        first, *weights = self.conv_weight.to(read.dtype)
        out = read * first
        for weight, x in zip(weights, cache.put_and_look_back(read)):
            out = out + x * weight
        return out


class Recalled(NamedTuple):
    """What a segment Engram recalls, for all loops."""
    key: Tensor                           # [N, D], normed
    value: Tensor                         # [N, D]
    power: Tensor                         # [N, 1], mean square of value, at least fp32
    row: Tensor                           # int64 [N * taps], the segments that a segment's convolution reads
    taps: Tensor                          # [N, taps, D], values there times their weights, 0 before a document's start


class _Match(torch.autograd.Function):
    """<rms_norm(h), key> / sqrt(D) of rows [n, D] -> [n, 1], at least fp32, without the normed rows."""

    @staticmethod
    def forward(ctx, h, key):
        inverse_rms = inverse_rms_of(h, 1e-6)
        dot = torch.bmm(h[:, None], key[:, :, None]).squeeze(2).to(inverse_rms.dtype)
        match = dot * inverse_rms * h.shape[1] ** -0.5
        ctx.save_for_backward(h, key, inverse_rms, match)
        return match

    @staticmethod
    def backward(ctx, grad):
        h, key, inverse_rms, match = ctx.saved_tensors
        grad = grad * inverse_rms
        to_key = (grad * h.shape[1] ** -0.5).to(h.dtype)
        to_h = (grad * match * inverse_rms / h.shape[1]).to(h.dtype)
        return torch.addcmul(to_key * key, to_h, h, value=-1), to_key * h


class MatchMemory(nn.Module):
    """What a document says of itself: for each order n, the byte that followed where its last n bytes stood the last
    time before, and whether the same one had followed the time before that. A match model, as compressors have it,
    without parameters: a small transformer takes long to learn that it could look.

    What was found is a number: the byte, + 256 where the two agree, + 512 where they do not, or NOTHING."""

    NOTHING = 3 * 256                     # these bytes never stood there, or no byte followed them

    def __init__(self, orders: tuple[int, ...]):
        super().__init__()
        self.orders = orders
        self.register_buffer("multiplier", torch.empty(max(orders), dtype=torch.int64))

    def init_hash(self, seed: int):
        init_multiplier(self.multiplier, seed)

    def forward(self, ids: Tensor, shifted: Tensor, document: Tensor) -> Tensor:
        """ids [M], shifted [at least max(orders), M], document [M], ascending -> what was found, int64 [M, orders]."""
        key, place = torch.stack(gram_keys(shifted, self.multiplier, self.orders)).sort(dim=1, stable=True)
        document = document[place]
        again = (key[:, 1:] == key[:, :-1]) & (document[:, 1:] == document[:, :-1])
        last = torch.full_like(place, -1).scatter_(1, place[:, 1:], torch.where(again, place[:, :-1], -1))
        return self.found(ids.expand_as(last), last, last).T

    def step(self, ids: Tensor, shifted: Tensor, position: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
        """The same of the next bytes of documents that go on: ids [rows, n], shifted [longest, rows * n], position
        [rows, n]; held int64 [1 + 2 * orders, rows, places]: of the documents so far the bytes, the keys of their
        n-grams, and where these stood before. Returns what was found, [rows * n, orders], and `held` with these bytes,
        which doubles as it fills up."""
        if (need := int(position[:, -1].max()) + 1) > held.shape[2]:                         # host synchronisation
            held = F.pad(held, (0, 2 * need - held.shape[2]))
        keys = torch.stack(gram_keys(shifted, self.multiplier, self.orders)).view(-1, *ids.shape)
        at, count = position.expand(1 + len(keys), -1, -1), 1 + len(keys)
        held[:count].scatter_(2, at, torch.cat((ids[None], keys)))
        known, behind = held[1:count, :, None, :need], torch.arange(1, need + 1, dtype=torch.int32, device=ids.device)
        width = max(1, (1 << 22) // known.numel())                                           # bytes at a time
        last = torch.cat([((known == key[..., None]) & (behind <= t[..., None])).mul(behind).amax(-1)
                          for key, t in zip(keys.split(width, -1), position.split(width, -1))], dim=-1).long() - 1
        held[count:].scatter_(2, at[1:], last)
        return self.found(held[:1].expand(len(last), -1, -1), held[count:], last).flatten(1).T, held

    def found(self, ids: Tensor, before: Tensor, last: Tensor) -> Tensor:
        """For n-grams that stood at `last` [..., m] before (-1: nowhere) what followed there, [..., m]. ids and
        `before`, [..., places]: the bytes of places, and where their n-grams stood before."""
        def at(x, place):
            return x.gather(-1, place.clamp(0, x.shape[-1] - 1))
        second = torch.where(last < 0, -1, at(before, last))
        byte, agree = at(ids, last + 1), at(ids, last + 1) == at(ids, second + 1)
        kind = torch.where(second < 0, 0, torch.where(agree, 256, 512))
        return torch.where((last < 0) | (byte > 255), self.NOTHING, byte + kind)


class ByteEngram(nn.Module):
    """The memory at byte rate: rows of every order, and of what followed in the document, each weighed by a gate of the
    state where there is one."""

    def __init__(self, config: SpiderConfig, gated: bool):
        super().__init__()
        orders, matches, dim = config.engram_byte_orders, len(config.engram_match_orders), config.engram_byte_dim
        self.table = EngramTable(orders, 1, config.engram_byte_rows, dim) if orders else None
        rows = round_up(MatchMemory.NOTHING + 1, 32)  # 8-bit AdamW's blocks are then whole where ranks cut it
        self.followed = nn.Parameter(torch.empty(matches, rows, dim)) if matches else None
        self.proj = Linear((len(orders) + matches) * dim, config.hidden_size)
        self.gate = Linear(config.hidden_size, len(orders) + matches) if gated else None

    def forward(self, x: Tensor, shifted: Tensor, matched: Tensor | None) -> Tensor:
        """x [M, D], shifted [K, M], matched [M, match orders], see MatchMemory -> what is added to x, [M, D]."""
        rows = [self.table(shifted)] if self.table is not None else []                       # of [M, orders, dim]
        if matched is not None:
            first = torch.arange(len(self.followed), device=x.device) * self.followed.shape[1]
            rows.append(F.embedding(matched + first, self.followed.flatten(0, 1)))
        rows = torch.cat([part.to(x.dtype) for part in rows], dim=1)
        if self.gate is not None:
            rows = rows * self.gate(rms_norm(x)).sigmoid()[:, :, None]
        return self.proj(rows.flatten(1))


# ---------------------------------------------------------------------------------------------------------------------
# The recurrent core

Seen = tuple[Tensor | None, Tensor | None]  # of a core layer, [N, ...]: latents and what the convolution read
Past = tuple[Cache | None, Cache | None]    # the same of earlier steps, when decoding


class RecurrentBlock(nn.Module):
    """A layer of the core at segment rate: memory where it has one, attention, experts."""

    compiled: Callable | None = None      # of visit_in_one_graph, see Spider.compile_layers

    def __init__(self, config: SpiderConfig, has_engram: bool):
        super().__init__()
        self.engram = SegmentEngram(config) if has_engram else None
        self.attention = MLA(config)
        self.moe = MoE(config)

    def forward(self, x: Tensor, packing: Packing, recalled: Recalled | None, left: Left, seen: Seen,
                past: Past, decided: Routing | None = None) -> tuple[Tensor, Routing, Seen]:
        """x of the rows that are left, [n, D]; `seen` of the loop before, [N, ...]; `decided`, see MoE."""
        latent, read = seen
        if self.engram is not None:
            x, read = self.engram(x, recalled, left, read, past[1])
        y, latent = self.attention(rms_norm(x), packing, left, latent, past[0])
        x = x + y
        y, routing = self.moe(rms_norm(x), decided)
        return x + y, routing, (latent, read)


class RecurrentCore(nn.Module):
    """The looped layers: h <- y + LoRA_t(y), y = layers(A h + B e + loop_embedding[t]), read out by ACT."""

    def __init__(self, config: SpiderConfig):
        super().__init__()
        self.config, d, loops = config, config.hidden_size, config.n_loops
        self.layers = nn.ModuleList(RecurrentBlock(config, i in config.engram_layers)
                                    for i in range(config.n_recurrent_layers))
        self.loop_embedding = nn.Parameter(torch.empty(loops, d))
        if config.lti:
            self.log_A, self.dt, self.B = (nn.Parameter(torch.empty(d)) for _ in range(3))
        if config.lora_rank:
            self.lora_down = nn.Parameter(torch.empty(loops, d, config.lora_rank))
            self.lora_up = nn.Parameter(torch.empty(loops, config.lora_rank, d))
        self.halt_predictor = WideLinear(d, 1, bias=True) if config.act else None
        self.out_proj = Linear(d, d)
        self.halted_leave: bool | None = None  # whether halted rows leave the products; None: on a CPU

    def decay(self) -> Tensor:
        """A [D] = exp(-dt * exp(log_A)), inside (0, 1) in fp32 whatever is learned."""
        rate = F.softplus(self.dt) * self.log_A.clamp(-15, 15).exp()
        return torch.exp(-rate.clamp(1e-4, 15))

    def inject(self, h: Tensor | None, e: Tensor, loop: int, decay: Tensor | None) -> Tensor:
        """A h + B e + loop_embedding, in fp32; h is None before the first loop."""
        if not self.config.lti:
            v = e + self.loop_embedding[loop]
            return (v if h is None else v + h).to(e.dtype)
        v = torch.addcmul(self.loop_embedding[loop], self.B, e)
        return (v if h is None else torch.addcmul(v, decay, h)).to(e.dtype)

    def adapt(self, y: Tensor, loop: int) -> Tensor:
        """The loop's adapter, on the normed state: what it adds is bounded, so that it cannot undo A < 1."""
        if not self.config.lora_rank:
            return y
        return y + rms_norm(y) @ self.lora_down[loop].to(y.dtype) @ self.lora_up[loop].to(y.dtype)

    def halt(self, h: Tensor) -> Tensor:
        """Halting probabilities [n] of states [n, D]; without ACT no segment halts before the last loop."""
        if self.halt_predictor is None:
            return self.loop_embedding.new_zeros(len(h))
        return self.halt_predictor(rms_norm(h)).sigmoid().squeeze(1)

    def forward(self, z: Tensor, packing: Packing, shifted: Tensor, n_loops: int, share: Tensor, recompute: bool,
                past: Past = (None, None), warmup: float = 1.0) -> tuple[Tensor, CoreStats | None]:
        """z [N, D] pooled segments, shifted [K, N] their last bytes, share [N] 1 / segments, 0 for rows that fill up;
        past: when decoding, what layers hold of earlier segments; warmup: factor on halting probabilities.

        Returns what the bytes receive of each segment, [N, D], and statistics, None when decoding."""
        e, h, visits = rms_norm(z), None, []
        recalled = [layer.engram and layer.engram.recall(shifted, packing.position, z.dtype) for layer in self.layers]
        seen: list[Seen] = [(None, None)] * len(self.layers)
        counted = past[0] is None
        leave = not (z.is_cuda and counted) if self.halted_leave is None else self.halted_leave
        halting, decay = Halting(share, self.config.act_threshold, leave), self.decay() if self.config.lti else None
        for t in range(n_loops):
            loop, left = min(t, self.config.n_loops - 1), halting.left
            y = self.inject(h, left.pick(e), loop, decay)
            for i, layer in enumerate(self.layers):
                earlier = past if past[0] is None else (
                    past[0].of(i, t), past[1].of(sum(j < i for j in self.config.engram_layers), t))
                y, routing, seen[i] = visit(layer, y, packing, recalled[i], left, seen[i], earlier, recompute)
                visits.append((routing.score, routing.topk_idx, halting.share))
            h = self.adapt(y, loop)
            h = halting.add(h, warmup * self.halt(h), last=t == n_loops - 1)
            if len(h) == 0:
                break
        output = self.out_proj(rms_norm(halting.output))
        if not counted:
            return output, None
        aux_loss, z_loss, load = self.balance(visits)
        means = (loss / (len(self.layers) * halting.loops.clamp_min(1e-9)) for loss in (aux_loss, z_loss))
        ponder = halting.ponder
        if decay is not None and n_loops > 1:  # has a gradient on every rank, those too whose segments halt at once
            ponder = ponder + 0 * decay.sum()
        return output, CoreStats(*means, ponder, halting.loops, load.detach())                 # 0 without a segment

    def balance(self, visits: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
        """Sums over visits of their losses, see tile_moe.balance, and the load [L, E]; of (score, topk_idx, share) of
        each visit, those of as many rows together."""
        layers, none = len(self.layers), self.loop_embedding.new_zeros(())
        if not self.config.n_routed_experts:
            return none, none, none.new_zeros(layers, 0)
        parts = []
        for _, group in groupby(visits, key=lambda visited: len(visited[0])):
            parts.append(balance(*map(torch.stack, zip(*group)), self.layers[0].moe.backend))
        aux_loss, z_loss, load = map(list, zip(*parts))
        return sum(aux_loss), sum(z_loss), torch.cat(load).unflatten(0, (-1, layers)).sum(0)


def visit(layer: RecurrentBlock, x: Tensor, packing: Packing, recalled, left: Left, seen: Seen, past: Past,
          recompute: bool) -> tuple[Tensor, Routing, Seen]:
    """One pass through a core layer, its activations recomputed in the backward pass if asked: with the routing of the
    first time, since a near-tie that falls the other way would corrupt the gradient."""
    if layer.compiled is not None and torch.is_grad_enabled():
        for part in (x, left.mask, *(recalled or ()), *seen, *vars(packing).values()):
            if isinstance(part, Tensor):  # whose rows are of another number each time
                torch._dynamo.maybe_mark_dynamic(part, 0)
        y, latent, read, score, topk_idx = layer.compiled(layer, x, packing, recalled, left, seen, recompute)
        return y, Routing(score, topk_idx, None), (latent, read)
    if not recompute:
        return layer(x, packing, recalled, left, seen, past)
    decided = [None]

    def run(x):
        y, routing, later = layer(x, packing, recalled, left, seen, past, decided[-1])
        decided.append(Routing(None, routing.topk_idx, routing.places))
        return y, routing, later
    return checkpoint(run, x, use_reentrant=False, preserve_rng_state=False)


def visit_in_one_graph(layer: RecurrentBlock, x: Tensor, packing: Packing, recalled, left: Left, seen: Seen,
                       recompute: bool) -> tuple[Tensor | None, ...]:
    """What torch.compile takes as one graph, forward and backward: the same in a flat tuple. Recomputation is then part
    of the backward graph, fused with it, and takes routing as it was."""
    def run(x):
        y, routing, (latent, read) = layer(x, packing, recalled, left, seen, (None, None))
        return y, latent, read, routing.score, routing.topk_idx
    if not recompute:
        return run(x)
    return checkpoint(run, x, use_reentrant=False, preserve_rng_state=False, context_fn=keeping_routing)


def keeping_routing():
    """For checkpoint: of what a visit computes, the choice of experts alone is kept."""
    return create_selective_checkpoint_contexts([torch.ops.aten.sort.stable])


class Halting:
    """ACT over the loops: weighs each segment's states by its halting probabilities (Graves, arXiv 1603.08983).

    Weight of a loop: p while the running sum stays below the threshold; on the loop that reaches it, and on the last
    one, what remains to 1. Then the segment has halted and leaves the core.

    A segment that halts in its first loop has weight 1 there whatever its p: nothing teaches it to go on, nor later
    loops to be worth it. So p is scaled by a warm-up, and until it ends every loop learns.
    """

    def __init__(self, share: Tensor, threshold: float, leave: bool):
        self.threshold, self.leave, self.left = threshold, leave, EVERY_ROW
        self.share, self.remaining = share, torch.ones_like(share)  # [n] of the rows left: part of all, 1 - weights
        self.output: Tensor | None = None                           # [N, D]
        self.loops = self.ponder = 0                                # means over segments: loops; loops + remainder

    def add(self, h: Tensor, p: Tensor, last: bool) -> Tensor:
        """Takes the states after a loop, h [n, D], and their halting probabilities p [n]; returns the states of the
        segments that the next loop computes, none after the last."""
        stops = torch.ones_like(p, dtype=torch.bool) if last else 1 - self.remaining + p >= self.threshold
        weight = torch.where(stops, self.remaining, p)
        part = weight[:, None].to(h.dtype) * h
        index = self.left.index
        self.output = part if self.output is None else (
            self.output + part if index is None else self.output.index_add(0, index, part))
        self.loops = self.loops + self.share.sum()
        self.ponder = self.ponder + self.share.sum() + self.share @ torch.where(stops, self.remaining, 0)
        goes_on = ~stops & (self.share > 0)
        if last or not self.leave:
            self.left = Left(mask=goes_on)
            self.share, self.remaining = self.share * goes_on, torch.where(stops, 0, self.remaining - weight)
            return h[:0] if last else h
        stay = goes_on.nonzero().squeeze(1)
        if len(stay) == len(h):
            self.remaining = self.remaining - weight
            return h
        self.left = Left(stay if index is None else index.index_select(0, stay))
        self.share, self.remaining = self.share.index_select(0, stay), (self.remaining - weight).index_select(0, stay)
        return h.index_select(0, stay)


# ---------------------------------------------------------------------------------------------------------------------
# The whole model

PIECE = 256                               # bytes a row that one pass of decoding takes, which bounds its memory


@dataclass
class DecodingState:
    """What a model knows of what each row has read: tensors and plain values, so that vars(state.copy()) can be saved,
    and DecodingState(**saved) goes on. It is of the device and compute_dtype of the model that made it. C is the width
    of a latent; places double as they fill up."""
    n_loops: int
    last_bytes: Tensor                    # int64 [rows, longest_order], PAD before the document
    position: Tensor                      # int64 [rows], bytes of the document so far
    segments: Tensor                      # int64 [rows], finished segments of it
    summed: Tensor                        # float64 [rows], boundary probabilities over it
    begun: Tensor                         # [rows, D], sum of the bytes behind the last boundary
    begun_bytes: Tensor                   # [rows, 1], their number
    handed: Tensor                        # [rows, D], what bytes receive of the last finished segment
    matches: Tensor                       # int64 [1 + 2 * match orders, rows, places]: see MatchMemory.step
    byte_latents: Tensor                  # [prelude and coda layers, 1, rows, places, C], normed and rotated
    segment_latents: Tensor               # [L, n_loops, rows, places, C]: as each segment's last loop left them
    convolved: Tensor                     # [Engram layers of the core, n_loops, rows, places, D]: what they convolve

    def copy(self, rows: list[int] | None = None) -> "DecodingState":
        """A state of its own of all rows, or of the named ones, as often as they are named."""
        def pick(x):
            if not isinstance(x, Tensor) or rows is None:
                return x.clone() if isinstance(x, Tensor) else x
            return x.index_select({5: 2, 3: 1}.get(x.ndim, 0), torch.tensor(rows, device=x.device))
        return DecodingState(**{name: pick(x) for name, x in vars(self).items()})

    def start_documents(self, rows: Tensor, null: Tensor | None):
        """Forgets what the rows, bool [rows], have read: nothing looks behind a document's start."""
        for x in (self.position, self.segments, self.summed, self.begun, self.begun_bytes, self.last_bytes):
            x.masked_fill_(rows.view(-1, *(1,) * (x.ndim - 1)), PAD_ID if x is self.last_bytes else 0)
        if null is not None:
            self.handed = torch.where(rows[:, None], null.to(self.handed.dtype), self.handed)


class Spider(nn.Module):
    """The model; see the head of the file for its parts and `model.md`'s notation for its shapes."""

    def __init__(self, config: SpiderConfig):
        super().__init__()
        self.config, c = config, config
        self.compute_dtype = torch.float32       # type of products and activations; parameters keep theirs
        self.recompute = "nothing"               # one of RECOMPUTE: layers whose activations the backward pass redoes
        self.compiled = False                    # see compile_layers
        self.casts_early = True                  # False: weights are whole in their group's forward alone, cast there
        self.halting_warmup = 1.0                # in training on halting probabilities and ponder_weight
        self.longest_order = max((1,) + c.engram_orders + c.engram_byte_orders + c.engram_match_orders)
        self.embed_tokens = nn.Parameter(torch.empty(c.vocab_size, c.hidden_size))
        byte_memory = bool(c.engram_byte_orders + c.engram_match_orders)
        self.engram_match = MatchMemory(c.engram_match_orders) if c.engram_match_orders else None
        self.engram_input = ByteEngram(c, gated=False) if byte_memory else None
        self.prelude = nn.ModuleList(Block(c) for _ in range(c.n_prelude_layers))
        self.core = RecurrentCore(c) if c.n_recurrent_layers else None
        if self.core is not None:
            self.null_segment = nn.Parameter(torch.empty(c.hidden_size))
        if self.core is not None and c.boundaries == "learned":
            width = c.hidden_size // 4
            self.boundary_predictor = nn.Sequential(WideLinear(c.hidden_size, width, bias=True), nn.GELU(),
                                                    Linear(width, 1, bias=True))
        self.coda = nn.ModuleList(Block(c) for _ in range(c.n_coda_layers))
        self.engram_output = ByteEngram(c, gated=True) if byte_memory else None
        self.lm_head = Linear(c.hidden_size, c.vocab_size)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """Every value of the model, buffers included:

            embed_tokens                        N(0, 1)
            Linear.weight, w_gate, w_up         N(0, 1 / fan_in); biases 0
            o_proj, down_proj, w_down           the same divided by sqrt(2 * layers, the core's counted once per loop)
            lm_head, halt_predictor             N(0, 0.02^2); the halting bias is -3: at 0 it would stick at one loop
            boundary_predictor's last bias      logit(boundary_prior)
            loop_embedding                      N(0, 0.02^2)
            log_A, dt, B                        such that A = 0.905 and B = 1: at (1 - A) / (1 - A^n_loops), which keeps
                                                the state at e's size, what layers add drowns e (docs/mechanisms.md)
            lora_down, lora_up                  N(0, 1 / fan_in), 0
            core.out_proj                       0: at the start the core adds nothing to the bytes
            null_segment, conv_weight           0
            Engram tables, followed             0; their hash constants from the table's place in the model
            expert_bias                         0
        """
        c = self.config
        depth = c.n_prelude_layers + c.n_recurrent_layers * c.n_loops + c.n_coda_layers
        tables = 0
        for module in self.modules():
            if isinstance(module, Linear):
                module.weight.normal_(std=module.in_features ** -0.5)
                if module.bias is not None:
                    module.bias.zero_()
            elif isinstance(module, MoE):
                module.expert_bias.zero_()
                if c.n_routed_experts:
                    module.w_gate.normal_(std=c.hidden_size ** -0.5)
                    module.w_up.normal_(std=c.hidden_size ** -0.5)
                    module.w_down.normal_(std=(2 * depth * c.moe_intermediate_size) ** -0.5)
            elif isinstance(module, EngramTable):
                module.weight.zero_()
                module.forget()
                module.init_hash(tables)
                tables += 1
            elif isinstance(module, SegmentEngram):
                module.conv_weight.zero_()
            elif isinstance(module, MatchMemory):
                module.init_hash(0)
            elif isinstance(module, ByteEngram) and module.followed is not None:
                module.followed.zero_()
        for module in self.modules():
            if isinstance(module, (MLA, SwiGLU)):
                (module.o_proj if isinstance(module, MLA) else module.down_proj).weight.mul_((2 * depth) ** -0.5)
        self.embed_tokens.normal_()
        self.lm_head.weight.normal_(std=0.02)
        if self.core is not None:
            self.null_segment.zero_()
            self._init_core(self.core)
        if self.core is not None and c.boundaries == "learned":
            self.boundary_predictor[2].bias.fill_(math.log(c.boundary_prior / (1 - c.boundary_prior)))

    def _init_core(self, core: RecurrentCore):
        c, rate = self.config, 0.1
        core.loop_embedding.normal_(std=0.02)
        core.out_proj.weight.zero_()
        if c.lti:
            core.log_A.zero_()
            core.dt.fill_(math.log(math.expm1(rate)))
            core.B.fill_(1)
        if c.lora_rank:
            core.lora_down.normal_(std=c.hidden_size ** -0.5)
            core.lora_up.zero_()
        if c.act:
            core.halt_predictor.weight.normal_(std=0.02)
            core.halt_predictor.bias.fill_(-3)

    def boundaries(self, x: Tensor, input_ids: Tensor, packing: Packing, noise_seed: int | Tensor | None,
                   summed: Tensor | None = None) -> Tensor:
        """Where segments end: b [M] fp32 (0 or 1 in value). EOS always ends one, PAD never.

        A byte ends a segment where the sum of p over the document, plus an offset, passes a whole number: systematic
        sampling, in which each byte is cut with probability p as in independent draws, but segments are even. The
        offset is drawn once a document when training, 0.5 otherwise, so that evaluation cuts as often as training.
        The gradient goes straight through to p. summed [documents] float64: when decoding, the sum of p over earlier
        steps; it goes on.
        """
        c, ids, dtype = self.config, input_ids.reshape(-1), self.embed_tokens.dtype
        if c.boundaries == "learned":
            p = self.boundary_predictor(rms_norm(x)).squeeze(1).sigmoid()          # [M]
            total = p.detach().double()
            if summed is not None and packing.longest == 1:                                  # a byte of each document
                before, offset = 0, 0.5 + summed
                summed += total
            else:
                start = packing.cu_seqlens.index_select(0, packing.document)
                before = F.pad(total := total.cumsum(0), (1, -1))
                offset = 0.5 - before.index_select(0, start)
                if summed is not None:
                    offset = offset + summed.index_select(0, packing.document)
                    summed.index_add_(0, packing.document, p.double())
            if self.training:
                offset = offset - 0.5 + boundary_noise(noise_seed, *input_ids.shape, ids.device).flatten()[start]
            b = ((total + offset).floor() > (before + offset).floor()).to(dtype)
            if p.requires_grad:
                b = b + (p - p.detach()).nan_to_num(0)  # a count, whatever diverges
        elif c.boundaries == "whitespace":
            b = torch.isin(ids, ids.new_tensor(list(b" \t\n\r"))).to(dtype)
        else:
            every = 3 if c.boundaries == "every_third" else 1
            b = (packing.position % every == every - 1).to(dtype)
        return torch.where(ids == EOS_ID, 1, torch.where(ids == PAD_ID, 0, b))

    def boundary_loss(self, b: Tensor, input_ids: Tensor) -> Tensor:
        """By how much each sequence's boundaries per byte miss the band between alpha - lambda * sigma and alpha."""
        c = self.config
        if c.boundaries != "learned":
            return b.new_zeros(())
        real = (input_ids != PAD_ID).sum(1).clamp_min(1)
        rate = b.view(input_ids.shape).sum(1) / real                                         # [B]
        low = c.boundary_alpha - c.boundary_lambda * c.boundary_sigma
        return ((rate - c.boundary_alpha).relu() + (low - rate).relu()).mean()

    def recur(self, z: Tensor, b: Tensor, cu_seqlens: Tensor, shifted: Tensor, longest: int, n_loops: int,
              state: "DecodingState | None" = None) -> tuple[Tensor, CoreStats]:
        """Runs the core on pooled segments z [N, D] that end where b [M] is 1, no document longer than `longest`.

        Its rows are filled up to few sizes, since kernels are made once per size; the surplus is a document apart. It
        is never empty: every rank runs the same parts of the model, and none leaves the others waiting.
        When decoding there is none, and `state` goes on."""
        segments, device = len(z), z.device
        rows = segments if state is not None else round_up(max(1, segments), max(1, min(longest, len(b) // 64)))
        byte = torch.arange(len(b), device=device)
        own = torch.where(b.detach() > 0, b.detach().round().long().cumsum(0) - 1, rows)
        last_byte = byte.new_zeros(rows + 1).index_copy_(0, own, byte)[:rows]                # of each segment
        share = F.pad(self.embed_tokens.new_full((segments,), 1 / max(1, segments)), (0, rows - segments))
        cu_seqlens = F.pad(cu_seqlens, (0, int(rows > segments)), value=rows)
        before = None if state is None else state.segments
        packing = Packing.build(cu_seqlens, rows, longest, self.config, self.compute_dtype, 0, before)
        past, taps = (None, None), SegmentEngram.taps(self.config)
        if state is not None:
            past = (Cache(state.segment_latents, packing, before),
                    Cache(state.convolved, packing, before, taps[-1] + 1).look_back(taps))
        z, stats = self.core(F.pad(z, (0, 0, 0, rows - segments)), packing, shifted.index_select(1, last_byte), n_loops,
                             share, self.recompute != "nothing" and torch.is_grad_enabled(), past,
                             self.halting_warmup if self.training else 1.0)
        if state is not None:
            state.segment_latents, state.convolved = (cache.held for cache in past)
            state.segments = before + cu_seqlens.diff()
        return z[:segments], stats

    def before_core(self, ids: Tensor, packing: Packing, shifted: Tensor, matched: Tensor | None,
                    cache: Cache | None = None) -> Tensor:
        """Embedding, byte memory and prelude: ids [M] -> [M, D]."""
        x = F.embedding(ids, self.embed_tokens).to(self.compute_dtype)
        if self.engram_input is not None:
            x = x + self.engram_input(x, shifted, matched)
        for i, block in enumerate(self.prelude):
            x = self.run(block, x, packing, cache and cache.of(i))
        return x

    def run(self, block: Block, x: Tensor, packing: Packing, cache: Cache | None) -> Tensor:
        """A byte layer, its activations recomputed in the backward pass where all are."""
        if self.recompute == "all" and torch.is_grad_enabled():
            return checkpoint(block, x, packing, use_reentrant=False, preserve_rng_state=False)
        return block(x, packing, cache)

    def after_core(self, x: Tensor, packing: Packing, shifted: Tensor, matched: Tensor | None,
                   cache: Cache | None = None) -> Tensor:
        """Coda, byte memory and head: [M, D] -> logits [M, vocab_size]."""
        for i, block in enumerate(self.coda, len(self.prelude)):
            x = self.run(block, x, packing, cache and cache.of(i))
        if self.engram_output is not None:
            x = x + self.engram_output(x, shifted, matched)
        return self.lm_head(rms_norm(x)).to(self.embed_tokens.dtype)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, n_loops: int | None = None,
                noise_seed: int | Tensor | None = None, cu_seqlens: Tensor | None = None) -> SpiderOutput:
        """input_ids [B, T] int64; labels [B, T], already shifted, -100 ignored; n_loops, or the config's.

        In training mode row i's segment noise is a function of noise_seed + i, or comes from torch's default generator
        where that is None. Documents end at EOS and begin at BOS; every row begins one. cu_seqlens is
        document_cu_seqlens(input_ids): worked out beforehand on the host, it saves a wait for the device.
        """
        c, (sequences, length) = self.config, input_ids.shape
        n_loops = c.n_loops if n_loops is None else n_loops
        ids = input_ids.reshape(-1)
        cu_seqlens = document_cu_seqlens(input_ids) if cu_seqlens is None else cu_seqlens
        if self.compiled:                 # else a graph is made anew for another number of documents
            torch._dynamo.maybe_mark_dynamic(cu_seqlens, 0)
        packing = Packing.build(cu_seqlens, len(ids), length, c, self.compute_dtype, c.byte_window)
        shifted = shifted_bytes(ids, packing.position, self.longest_order)
        matched = self.engram_match and self.engram_match(ids, shifted, packing.document)
        x = self.before_core(ids, packing, shifted, matched)                                 # [M, D]
        none = self.embed_tokens.new_zeros(())
        segments, boundary_loss = 0, none
        stats = CoreStats(none, none, none, none, none.new_zeros(0, c.n_routed_experts))
        if self.core is not None:
            b = self.boundaries(x, input_ids, packing, noise_seed)
            boundary_loss = self.boundary_loss(b, input_ids)
            z, segment_cu_seqlens = pool_segments(x, b, packing.cu_seqlens)
            segments = len(z)
            z, stats = self.recur(z, b, segment_cu_seqlens, shifted, length, n_loops)
            x = x + unpool_segments(z, self.null_segment, b, packing.cu_seqlens, segment_cu_seqlens)
        logits = self.after_core(x, packing, shifted, matched)                               # [M, vocab_size]

        loss = nats = parts = None
        if labels is not None:
            targets = labels.reshape(-1)
            nats = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
            nats = nats / (targets != -100).sum().clamp_min(1)
            parts = (c.boundary_loss_weight * boundary_loss, c.aux_loss_weight * stats.aux_loss,
                     c.z_loss_weight * stats.z_loss, c.ponder_weight * self.halting_warmup * stats.ponder)
            loss, parts = sum(parts, nats), torch.stack(parts).detach()
        tokens = (stats.load * (segments * c.n_experts_per_tok / max(1, c.n_routed_experts))).round()  # they are whole
        return SpiderOutput(logits.view(sequences, length, -1), loss, nats, none + segments,
                            stats.mean_loops.detach(), tokens, parts)

    @contextmanager
    def cast_weights_once(self):
        """Inside, weights keep one cast to `compute_dtype`, and one gradient before it is cast back, for all loops,
        recomputations and micro-steps. Weights must not change meanwhile: it spans an optimizer step's passes."""
        modules = [module for module in self.modules() if hasattr(module, "cast_weight")]
        try:
            for module in modules if self.casts_early else ():
                module.cast_weight(self.compute_dtype)
            yield
        finally:
            for module in modules:
                module.cast = None

    def zero_grad(self, set_to_none: bool = True):
        """Drops all gradients, those too that Engram tables have gathered."""
        super().zero_grad(set_to_none)
        for module in self.modules():
            if isinstance(module, EngramTable):
                module.forget()

    def compile_layers(self, **settings) -> str | None:
        """Has torch.compile make one graph of each kind of layer, for passes with gradients: evaluation and decoding,
        whose shapes are others, go without. Numbers of segments and documents are sizes that may change; settings go
        to torch.compile. The functions are compiled, not the modules, whose hooks are those of FSDP.

        Returns why the core's layers are left out, or None: what would break their graph leaves nothing of it."""
        obstacle = None
        if self.compute_dtype != torch.bfloat16:
            obstacle = "torch.compile takes grouped products in bf16 alone"
        elif any(isinstance(module, MoE) and module.backend == "tile" for module in self.modules()):
            obstacle = "torch.compile does not know TileKernels' operations; --moe_backend grouped is compiled"
        self.compiled = True
        # It warns of operations in place that are recomputed: here they write to what was made just before.
        logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
        visits = torch.compile(visit_in_one_graph, **settings)
        blocks = torch.compile(Block.run, **settings)
        for module in self.modules():
            if isinstance(module, Block):
                module.compiled = blocks
            elif isinstance(module, RecurrentBlock) and not obstacle:
                module.compiled = visits
        return obstacle

    def set_backend(self, backend: str):
        """Which of tile_moe.BACKENDS computes the experts."""
        for module in self.modules():
            if isinstance(module, MoE):
                module.backend = backend

    @torch.no_grad()
    def update_expert_bias(self, tokens_per_expert: Tensor):
        """Once per optimizer step: moves each expert's bias towards balance by the tokens [L, E] that it received in
        all loops, micro-steps and ranks."""
        layers = () if self.core is None else self.core.layers
        for layer, tokens in zip(layers, tokens_per_expert):
            layer.moe.expert_bias += self.config.expert_bias_rate * (tokens.mean() - tokens).sign()

    def decoding_state(self, rows: int = 1, n_loops: int | None = None) -> DecodingState:
        """The state of `rows` rows that have read nothing yet; n_loops, or the config's."""
        c, weight = self.config, self.embed_tokens
        n_loops, latent = c.n_loops if n_loops is None else n_loops, c.kv_lora_rank + c.qk_rope_head_dim
        held = weight.new_zeros(0, dtype=self.compute_dtype)
        count = torch.zeros(rows, dtype=torch.int64, device=weight.device)
        null = held.new_zeros(c.hidden_size) if self.core is None else self.null_segment.detach().to(held.dtype)
        return DecodingState(
            n_loops=n_loops, last_bytes=count.new_full((rows, self.longest_order), PAD_ID), position=count,
            segments=count.clone(), summed=count.double(), begun=weight.new_zeros(rows, c.hidden_size),
            begun_bytes=weight.new_zeros(rows, 1), handed=null.repeat(rows, 1),
            matches=count.new_zeros(1 + 2 * len(c.engram_match_orders), rows, 1),
            byte_latents=held.new_zeros(c.n_prelude_layers + c.n_coda_layers, 1, rows, 1, latent),
            segment_latents=held.new_zeros(c.n_recurrent_layers, n_loops, rows, 1, latent),
            convolved=held.new_zeros(len(c.engram_layers), n_loops, rows, 1, c.hidden_size))

    @torch.no_grad()
    def step(self, input_ids: Tensor, state: DecodingState) -> Tensor:
        """Feeds input_ids [rows, n] int64 to a state, which goes on: logits [rows, n, vocab_size], fp32, those of
        `forward` in evaluation mode over all that the rows have read. The core runs where a segment ends, for all that
        end here together. Inside `cast_weights_once` weights are cast for many steps at once.

        RuntimeError in training mode, whose segments are drawn."""
        if self.training:
            raise RuntimeError("a model decodes in evaluation mode: call its eval() first")
        rows, n = input_ids.shape
        known = torch.cat((state.last_bytes, input_ids), dim=1)
        starts = document_starts(known[:, -n - 1:])[:, 1:]
        ends = {*range(PIECE, n, PIECE), *(starts[:, 1:].any(0).nonzero().flatten() + 1).tolist()} if n > 1 else ()
        if ends:                          # a pass reads one document a row
            return torch.cat([self.step(part, state) for part in input_ids.tensor_split(sorted(ends), dim=1)], dim=1)
        with torch.inference_mode():      # a tenth faster
            if starts[:, 0].any():
                state.start_documents(starts[:, 0], None if self.core is None else self.null_segment)
                known = torch.cat((state.last_bytes, input_ids), dim=1)

            ids, kept = input_ids.reshape(-1), self.longest_order
            cu_seqlens = torch.arange(0, (rows + 1) * n, n, dtype=torch.int32, device=ids.device)
            packing = Packing.build(cu_seqlens, rows * n, n, self.config, self.compute_dtype, 0, state.position)
            shifted = known.unfold(1, n, 1)[:, 1:].flip(1).transpose(0, 1).flatten(1)        # as in shifted_bytes
            cache = Cache(state.byte_latents, packing, state.position, self.config.byte_window)
            matched = None
            if self.engram_match is not None:
                matched, state.matches = self.engram_match.step(
                    input_ids, shifted, packing.position.view(rows, n), state.matches)
            x = self.before_core(ids, packing, shifted, matched, cache)
            if self.core is not None:
                b = self.boundaries(x, input_ids, packing, None, state.summed)
            if self.core is not None and n == 1 and not b.any():  # what was begun goes on
                state.begun, state.begun_bytes = state.begun + x, state.begun_bytes + 1
                x = x + state.handed
            elif self.core is not None:
                z, total, segment_cu_seqlens = sum_segments(x, b, cu_seqlens, (state.begun, state.begun_bytes))
                z, state.begun = z.tensor_split((-rows,))
                total, state.begun_bytes = total.tensor_split((-rows,))
                z = (z / total).to(x.dtype)
                if len(z):
                    longest = int(segment_cu_seqlens.diff().max())
                    z, _ = self.recur(z, b, segment_cu_seqlens, shifted, longest, state.n_loops, state)
                handed = unpool_segments(z, state.handed, b, cu_seqlens, segment_cu_seqlens)
                state.handed = handed.view(rows, n, -1)[:, -1]
                x = x + handed
            logits = self.after_core(x, packing, shifted, matched, cache)
            state.byte_latents, state.position, state.last_bytes = cache.held, state.position + n, known[:, -kept:]
        return logits.view(rows, n, -1).clone()  # an ordinary tensor again

    @torch.no_grad()
    def go_on(self, logits: Tensor, state: DecodingState, max_new_bytes: int, temperature: float = 1.0,
              top_k: int | None = None, top_p: float | None = None, generator: torch.Generator | None = None):
        """Yields up to max_new_bytes times what each row writes next, a list of ids (0-255), None once it has ended.

        logits [rows, vocab_size] are those of the last byte that the state has read; what is yielded has been read as
        well when the next is asked for. See `draw` for the rest. Weights must not change before it ends.
        FloatingPointError where a logit is no finite number."""
        ended = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
        with self.cast_weights_once():
            for written in range(max_new_bytes):
                if written:
                    logits = self.step(chosen[:, None], state)[:, -1]
                if not logits.isfinite().all():
                    raise FloatingPointError("the model's logits are not finite numbers: its weights are ruined")
                chosen = torch.where(ended, PAD_ID, draw(logits, temperature, top_k, top_p, generator))
                ended |= chosen == EOS_ID
                if ended.all():
                    return
                yield [byte if byte < 256 else None for byte in chosen.tolist()]

    def generate(self, ids: list[int], max_new_bytes: int, temperature: float = 1.0, top_k: int | None = None,
                 generator: torch.Generator | None = None, n_loops: int | None = None, top_p: float | None = None):
        """Yields up to max_new_bytes ids (0-255) after the prefix `ids`, until EOS; see `go_on`."""
        state = self.decoding_state(n_loops=n_loops)
        with self.cast_weights_once():
            logits = self.step(torch.tensor([ids], device=self.embed_tokens.device), state)[:, -1]
        for (byte,) in self.go_on(logits, state, max_new_bytes, temperature, top_k, top_p, generator):
            yield byte

    # -----------------------------------------------------------------------------------------------------------------
    # Sizes and costs, from the config alone: FP8 conversion would hide Linears from a count of modules

    def parameter_table(self) -> dict[str, tuple[int, float]]:
        """Component -> (parameters, of these read per byte: core layers per visit, of experts the chosen ones)."""
        table = {}
        for name, p in self.named_parameters():
            component, share = component_of(name), 1.0
            if component == "routed experts":
                share = self.config.n_experts_per_tok / self.config.n_routed_experts
            elif component == "Engram tables":
                share = 0.0  # a few rows
            total, active = table.get(component, (0, 0.0))
            table[component] = (total + p.numel(), active + p.numel() * share)
        return table

    def flops_per_byte(self, bytes_per_segment: float, n_loops: int, seq_len: int) -> float:
        """Training FLOPs (forward and backward, no recomputation) per byte, causal attention included."""
        c = self.config
        width, rate = c.n_heads * c.v_head_dim, 1 / bytes_per_segment
        products = 0.0
        for name, p in self.named_parameters():
            if p.ndim < 2 or component_of(name) == "Engram tables" or name in ("embed_tokens", "core.loop_embedding"):
                continue
            size = p.numel()
            if component_of(name) == "routed experts":
                size *= c.n_experts_per_tok / c.n_routed_experts
            if name.startswith("core.lora"):
                size /= c.n_loops
            if name.startswith("core."):
                once = ".engram.key_proj" in name or ".engram.value_proj" in name
                size *= rate * (1 if once else n_loops)
            products += size
        window = min(c.byte_window or seq_len, seq_len)
        seen = window - window * window / (2 * seq_len)                                      # bytes, on average
        attention = 2 * width * (seen * (c.n_prelude_layers + c.n_coda_layers)
                                 + c.n_recurrent_layers * n_loops * rate * rate * seq_len / 2)
        return 6 * products + 3 * 2 * attention


def draw(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None,
         generator: torch.Generator | None) -> Tensor:
    """Draws a byte or EOS for each row of logits [rows, vocab_size] -> int64 [rows]. temperature 0 takes the likeliest;
    top_k leaves the k likeliest, top_p the likeliest ones that together have the probability p."""
    logits = logits.float().clone()
    logits[:, 256:EOS_ID] = -math.inf                                                        # PAD, BOS
    logits[:, EOS_ID + 1:] = -math.inf                                                       # sentinels
    if temperature == 0:
        return logits.argmax(1)
    logits = (logits - logits.amax(1, keepdim=True)).double() / temperature                  # any temperature above 0
    ordered, order = logits.softmax(1).float().sort(descending=True)
    if top_k is not None:
        ordered[:, top_k:] = 0
    if top_p is not None:
        ordered[(ordered.cumsum(1) - ordered) / ordered.sum(1, keepdim=True) >= top_p] = 0
    return order.gather(1, torch.multinomial(ordered, 1, generator=generator)).squeeze(1)


def component_of(name: str) -> str:
    """The line of the parameter table that a parameter belongs to."""
    parts = name.split(".")
    for part, component in (("table", "Engram tables"), ("followed", "Engram tables"), ("engram", "Engram projections"),
                            ("engram_input", "Engram projections"), ("engram_output", "Engram projections"),
                            ("prelude", "prelude"), ("coda", "coda"), ("boundary_predictor", "boundary predictor"),
                            ("attention", "core attention"), ("router", "router"), ("shared", "shared experts"),
                            ("moe", "routed experts"), ("core", "loop adapters, injection, halting")):
        if part in parts:
            return component
    return "embedding and head"
