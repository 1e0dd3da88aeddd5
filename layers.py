"""What layers are built of: products, norm, packed rows of documents, latent attention with its cache, feed-forward.

Rows of several documents lie one after the other, [rows, D], with `cu_seqlens` marking where each starts (Packing);
where attention has no kernel for that they are filled up in buckets. Shapes as in spider_model.py. Source of MLA:
DeepSeek-V2, arXiv 2405.04434.
"""

import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenizer import BOS_ID, EOS_ID

if TYPE_CHECKING:
    from spider_model import SpiderConfig


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
        return F.linear(x, weight_of(self, x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class WideLinear(Linear):
    """Linear in at least fp32 whatever its rows and weights are, [N, D] -> [N, E]. On a GPU rows in bf16 are multiplied
    as they are."""

    def cast_weight(self, dtype: torch.dtype):
        if dtype == torch.bfloat16 and self.weight.is_cuda:
            self.cast = halves(self.weight.detach(), 0)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = wide(self.weight), None if self.bias is None else wide(self.bias)
        if x.dtype == torch.bfloat16 and x.is_cuda and weight.dtype == torch.float32:
            y = _Wide.apply(x, weight, halves(weight.detach(), 0) if self.cast is None else self.cast)
            return y if bias is None else y + bias
        dtype = torch.promote_types(x.dtype, weight.dtype)
        return F.linear(x.to(dtype), weight.to(dtype), bias if bias is None else bias.to(dtype))


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


def wide(x: Tensor) -> Tensor:
    """x in at least fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


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
    def build(cls, cu_seqlens: Tensor, rows: int, bound: int, config: "SpiderConfig", dtype: torch.dtype,
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
    """The segments that have not left the core: rows that a loop computes. Of the others, what later segments read stays
    as their last loop left it.

    Where the host knows `index`, they have left every product. Where it would have to wait for their number, all N rows
    are computed, and `mask` says whose results count. With neither, none has left.
    """
    index: Tensor | None = None           # int64 [n], ascending
    mask: Tensor | None = None            # bool [N]
    halted: Tensor | None = None          # bool [n]: computed once more, for what later segments read

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

    def __init__(self, config: "SpiderConfig"):
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

    def __init__(self, config: "SpiderConfig"):
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
