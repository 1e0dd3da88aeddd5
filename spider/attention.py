"""Multi-head latent attention (MLA) over packed rows, and the cache of its latents in decoding.

Keys and values are projections of one narrow latent per row (DeepSeek-V2, arXiv 2405.04434).
Shapes: M rows, D hidden size, H heads.
"""

import math
from copy import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spider.config import SpiderConfig
from spider.layers import Linear, rms_norm, weight_of
from spider.packing import Packing

# --------------------------------------------------------------------------------------------------
# The rows that a loop computes


@dataclass
class ActiveRows:
    """The segments that are still in the core: the rows that a loop computes. Later segments read
    the others as their last loop left them.

    With `index`, only these rows are computed. To avoid waiting for their number on the host,
    `mask` computes all N rows and selects the results. With neither, all rows are active.
    """

    index: Tensor | None = None  # int64 [n], ascending
    mask: Tensor | None = None  # bool [N]
    halted: Tensor | None = None  # bool [n]: computed once more, for later segments to read

    def select(self, x: Tensor) -> Tensor:
        """Select the active rows, [N, ...] -> [n, ...]."""
        return x if self.index is None else x.index_select(0, self.index)

    def scatter(self, x: Tensor, rows: int) -> Tensor:
        """Scatter [n, D] to [rows, D]; other rows are zero."""
        return (
            x if self.index is None else x.new_zeros(rows, x.shape[1]).index_copy(0, self.index, x)
        )

    def merge(self, before: Tensor | None, x: Tensor) -> Tensor:
        """Update the active rows of `before` [N, D] by x [n, D]."""
        if self.index is not None:
            return before.index_copy(0, self.index, x)
        return x if self.mask is None else torch.where(self.mask[:, None], x, before)


ALL_ROWS = ActiveRows()


# --------------------------------------------------------------------------------------------------
# The cache of decoding


def causal_mask(q: Tensor, m: int, window: int) -> Tensor:
    """Return the causal (and window) mask to add to scores [n, m] of the last n of m rows, q [...,
    n, width]: 0 or -inf."""
    n = q.shape[-2]
    hidden = q.new_full((n, m), -math.inf)
    return (
        hidden.triu(m - n + 1) + hidden.tril(m - n - window)
        if m > window
        else hidden.triu(m - n + 1)
    )


class Cache:
    """The rows of earlier decoding steps in a ring buffer: `held` [layers, loops, documents, slots,
    width], with row p of a document in slot p % slots. A loop's rows also count for later loops,
    until those put their own.

    before [documents]: rows of each document in earlier steps. window: rows that a row attends to,
    including itself; 0: all. There are twice as many slots as needed, so that rows are seldom
    moved; a single row's window has just its own.
    """

    def __init__(self, held: Tensor, packing: Packing, before: Tensor, window: int = 0):
        one = packing.longest == 1 and len(before) == 1  # a single row
        last = before if one else before + packing.cu_seqlens.diff() - 1  # [documents]
        rows = int(last.max()) + 1  # host synchronisation
        need = min(rows, window + packing.longest - 1) if window else rows
        exact = one and need == window  # exactly one slot per visible row
        if held.shape[3] != need if exact else not need <= held.shape[3] <= max(16, 4 * need):
            slot = torch.arange(need if exact else 2 * need, device=held.device)
            # the newest row p < before of each slot, p % slots == slot
            kept = before[:, None] - 1 - (before[:, None] - 1 - slot) % len(slot)
            held = held[
                :, :, torch.arange(len(before), device=held.device)[:, None], kept % held.shape[3]
            ]
        self.held, self.packing, self.layer, self.loop = held, packing, 0, 0
        self.slot = packing.position % held.shape[3]  # [N]
        if len(before) > 1:
            self.slot = self.slot + packing.document * held.shape[3]
        self.read, self.hidden = min(rows, held.shape[3]), None  # slots in use; their mask
        if not one:
            slot = torch.arange(self.read, device=held.device)
            # [documents, 1, read]
            stored = (last[:, None] - (last[:, None] - slot) % held.shape[3])[:, None]
            row = (before[:, None] + torch.arange(packing.longest, device=held.device))[:, :, None]
            self.hidden = (stored < 0) | (stored > row)  # [documents, longest, read]
            if window:
                self.hidden |= stored <= row - window
            self.padded_row = (
                packing.document * packing.longest
                + packing.position
                - before.index_select(0, packing.document)
            )

    def of(self, layer: int, loop: int = 0) -> "Cache":
        """Return a view for a layer and loop."""
        view = copy(self)
        view.layer, view.loop = layer, loop
        return view

    def put(self, x: Tensor) -> Tensor:
        """Store the step's rows [N, width]; return all rows of the loop, [documents, slots,
        width]."""
        held = self.held[self.layer, self.loop :]
        held.flatten(1, 2).index_copy_(1, self.slot, x.expand(len(held), -1, -1))
        return held[0]

    def look_back(self, distances: list[int]) -> "Cache":
        """Choose the distances, in rows, for `put_and_look_back`."""
        position = self.packing.position - torch.tensor(distances, device=self.held.device)[:, None]
        slots = self.held.shape[3]
        self.back = (self.packing.document * slots + position % slots).flatten()
        self.there = (position >= 0)[:, :, None]
        return self

    def put_and_look_back(self, x: Tensor) -> Tensor:
        """Store the step's rows [N, width]; return earlier ones [distances, N, width], zero before
        a document's start."""
        back = self.put(x).flatten(0, 1).index_select(0, self.back).view(-1, *x.shape)
        return torch.where(self.there, back, 0)

    def attend(self, q: Tensor, x: Tensor, scale: float, value_width: int) -> Tensor:
        """Attend from q [N, H, width] to the step's rows x [N, width] and all stored ones -> [N, H,
        value_width]. All heads share the rows; values are the first numbers of keys."""
        documents, longest, (rows, heads, width) = (
            len(self.packing.cu_seqlens) - 1,
            self.packing.longest,
            q.shape,
        )
        held = self.put(x)[:, : self.read]
        regular = documents * longest == rows
        if not regular:
            q = q.new_zeros(documents * longest, heads, width).index_copy(0, self.padded_row, q)
        q = q.reshape(documents, longest * heads, width)
        score = torch.baddbmm(q.new_zeros(()), q, held.mT, beta=0, alpha=scale)
        if self.hidden is not None:
            score.view(documents, longest, heads, -1).masked_fill_(
                self.hidden[:, :, None], -math.inf
            )
        out = torch.bmm(score.softmax(-1), held[..., :value_width]).view(
            documents * longest, heads, value_width
        )
        return out if regular else out.index_select(0, self.padded_row)


# --------------------------------------------------------------------------------------------------
# Rotary embedding


class _Rotate(torch.autograd.Function):
    """Apply the rotary embedding in place to the last numbers of each head: x [rows, H *
    head_dim]."""

    @staticmethod
    def forward(ctx, x, heads, cos, sin):
        ctx.save_for_backward(cos, sin)
        ctx.heads = heads
        ctx.mark_dirty(x)
        return _rotate_(x, heads, cos, sin, 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        return _rotate_(grad, ctx.heads, *ctx.saved_tensors, -1), None, None, None


def _rotate_(x: Tensor, heads: int, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """Rotate x by its rows' angles in place, or back (direction -1)."""
    rope = x.view(len(x), heads, -1)[:, :, -cos.shape[2] :]
    swapped = rope.roll(cos.shape[2] // 2, -1)
    rope.mul_(cos).addcmul_(swapped, sin, value=direction)
    return x


# --------------------------------------------------------------------------------------------------
# Attention inside documents


def attend_varlen(q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> Tensor:
    """Attend causally inside each document by torch's variable-length kernel: q, k, v [rows, H,
    head_dim] -> [rows, H * head_dim]."""
    from torch.nn.attention.varlen import varlen_attn

    cu, longest = packing.cu_seqlens, packing.extent.shape[0]
    return varlen_attn(
        q, k, v, cu, cu, longest, longest, window_size=(packing.window - 1, 0)
    ).flatten(1)


def attend_padded(qkv: Tensor, packing: Packing) -> Tensor:
    """Attend in the same way by padded batches of documents, where there is no such kernel: qkv
    [rows, H, 3, head_dim] -> [rows, H * head_dim]."""
    sizes = [documents * length for documents, length in packing.buckets]
    if packing.padded_row is not None:
        qkv = qkv.new_zeros(sum(sizes), *qkv.shape[1:]).index_copy_(0, packing.padded_row, qkv)
    batches = qkv.split(sizes) if len(sizes) > 1 else [qkv]
    batches = [
        _attend_batch(batch.unflatten(0, bucket), packing.window).flatten(0, 1)
        for batch, bucket in zip(batches, packing.buckets, strict=True)
    ]
    out = torch.cat(batches) if len(batches) > 1 else batches[0]
    return out if packing.padded_row is None else out.index_select(0, packing.padded_row)


def _attend_batch(qkv: Tensor, window: int) -> Tensor:
    """Attend in a padded batch: qkv [documents, rows, H, 3, head_dim] -> [documents, rows, H *
    head_dim]. Padding follows the last row, so the causal mask hides it. With a window, blocks of
    that size attend to themselves and the block before."""
    documents, longest = qkv.shape[:2]
    if not 0 < window < longest:
        return _attend_block(*qkv.unbind(3), longest)
    blocks = F.pad(qkv, (0, 0, 0, 0, 0, 0, 0, -longest % window)).unflatten(1, (-1, window))
    first = _attend_block(*blocks[:, 0].unbind(3), window)
    q, k, v = torch.cat((blocks[:, :-1], blocks[:, 1:]), dim=2).flatten(0, 1).unbind(3)
    rest = _attend_block(q[:, window:], k, v, window)
    return torch.cat((first, rest.unflatten(0, (documents, -1)).flatten(1, 2)), dim=1)[:, :longest]


def _attend_block(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Attend from the last n of m rows, each to at most `window` rows: q [B, n, H, head_dim], k, v
    [B, m, H, head_dim] -> [B, n, H * head_dim]."""
    batch, n, heads, width = q.shape
    m = k.shape[1]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if q.dtype == torch.bfloat16 and m <= 2048:
        # up to there plain bf16 products are faster than SDPA on a CPU
        q, k, v = (t.reshape(batch * heads, -1, width) for t in (q, k, v))
        outs = []
        for rows in q.split(512, dim=1):  # skip keys after the last of these rows
            last = min(m, m - n + 512 * len(outs) + rows.shape[1])
            score = torch.baddbmm(
                causal_mask(rows, last, window), rows, k[:, :last].mT, alpha=width**-0.5
            )
            outs.append(torch.bmm(score.softmax(-1), v[:, :last]))
        out = (torch.cat(outs, dim=1) if len(outs) > 1 else outs[0]).view(batch, heads, n, width)
    elif m > n:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=causal_mask(q, m, window))
    else:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2).reshape(batch, n, heads * width)


# --------------------------------------------------------------------------------------------------
# MLA


class MLA(nn.Module):
    """Multi-head latent attention; later rows read only a row's latent, kv_lora_rank +
    qk_rope_head_dim numbers."""

    def __init__(self, config: SpiderConfig):
        super().__init__()
        self.config, c = config, config
        head_dim = c.qk_nope_head_dim + c.qk_rope_head_dim
        self.q_a_proj = Linear(c.hidden_size, c.q_lora_rank, normed_input=True)
        self.q_b_proj = Linear(c.q_lora_rank, c.n_heads * head_dim, normed_input=True)
        self.kv_a_proj = Linear(
            c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim, normed_input=True
        )
        self.kv_b_proj = Linear(
            c.kv_lora_rank, c.n_heads * (c.qk_nope_head_dim + c.v_head_dim), normed_input=True
        )
        self.o_proj = Linear(c.n_heads * c.v_head_dim, c.hidden_size)

    def forward(
        self,
        x: Tensor,
        packing: Packing,
        active: ActiveRows,
        latent: Tensor | None = None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend from the active rows x [n, D] -> [n, D]; also return the latents [rows,
        kv_lora_rank + rope], not rotated, in which inactive rows keep the given ones of the loop
        before. A cache has earlier latents, normed and rotated."""
        c = self.config
        latent = active.merge(latent, self.kv_a_proj(x))
        rows, heads = len(latent), c.n_heads
        q = active.scatter(self.q_b_proj(rms_norm(self.q_a_proj(x))), rows)
        if not isinstance(self.q_b_proj, Linear):
            # FP8's output is a view, which autograd does not let us modify
            q = q.clone()
        # [rows, H, nope + rope]
        q = _Rotate.apply(q, heads, packing.cos, packing.sin).view(rows, heads, -1)
        c_kv, k_rope = latent.split_with_sizes((c.kv_lora_rank, c.qk_rope_head_dim), dim=-1)
        c_kv, k_rope = rms_norm(c_kv), _Rotate.apply(k_rope.clone(), 1, packing.cos, packing.sin)
        if cache is not None:
            return self.o_proj(active.select(self.absorbed(q, c_kv, k_rope, cache))), latent
        kv = self.kv_b_proj(c_kv).view(rows, heads, -1)  # [rows, H, nope + v]
        k_nope, v = kv.split_with_sizes((c.qk_nope_head_dim, c.v_head_dim), dim=-1)
        k_rope = k_rope[:, None].expand(-1, heads, -1)  # shared by the heads
        if packing.buckets is None:
            v = v if c.qk_nope_head_dim % 8 == 0 else v.contiguous()  # 16-byte alignment
            out = attend_varlen(q, torch.cat((k_nope, k_rope), dim=-1), v, packing)
        else:
            out = attend_padded(
                torch.cat((q, k_nope, k_rope, v), dim=-1).view(rows, heads, 3, -1), packing
            )
        return self.o_proj(active.select(out)), latent

    def absorbed(self, q: Tensor, c_kv: Tensor, k_rope: Tensor, cache: Cache) -> Tensor:
        """Attend over the latents directly -> [rows, H * v_head_dim], without expanding them to
        keys and values: q (W_UK c) = (q W_UK) c, and the weighted sum of W_UV c is W_UV times the
        weighted sum of c."""
        c = self.config
        # [H, nope + v, c_kv]
        weight = weight_of(self.kv_b_proj, c_kv.dtype).view(c.n_heads, -1, c.kv_lora_rank)
        w_uk, w_uv = weight.split_with_sizes((c.qk_nope_head_dim, c.v_head_dim), dim=1)
        q_nope, q_rope = q.split_with_sizes((c.qk_nope_head_dim, c.qk_rope_head_dim), dim=-1)
        q = torch.cat((torch.bmm(q_nope.transpose(0, 1), w_uk).transpose(0, 1), q_rope), dim=-1)
        held = torch.cat((c_kv, k_rope), dim=-1)
        out = cache.attend(q, held, c.v_head_dim**-0.5, c.kv_lora_rank)  # [rows, H, c_kv]
        return torch.bmm(out.transpose(0, 1), w_uv.mT).transpose(0, 1).flatten(1)
