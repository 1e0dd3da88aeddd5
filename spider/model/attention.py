"""Multi-head latent attention (MLA) over packed tokens, and its cache in decoding.

Keys and values are projections of one narrow latent per token (DeepSeek-V2, arXiv 2405.04434).

Shapes, as suffixes of names:
    M  packed tokens: bytes in prelude and coda, segments in the core
    n  active tokens, the part of M that a loop computes
    D  hidden_size
    H  heads
    Q  width of a head: qk_nope_head_dim + qk_rope_head_dim, which equals v_head_dim
    R  qk_rope_head_dim, the rotated numbers of a head
    C  kv_lora_rank, the part of a latent from which keys and values are made
    B  documents, in a padded batch or in a cache
    T  tokens per document, padding included
    S  slots per document in a cache
"""

import math
from copy import copy
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spider.config import SpiderConfig
from spider.errors import UsageError
from spider.model.contexts import to_device
from spider.model.layers import Linear, rms_norm, weight_of
from spider.model.packing import ALL_TOKENS, ActiveTokens, Packing, StepTokens

# --------------------------------------------------------------------------------------------------
# The cache of decoding


class Cache:
    """Ring buffers with the tokens of earlier decoding steps, one per layer, loop and document.

    The token at position p of its document is in slot p % S. With S = 4, after positions 0 to 5:

        slot                0     1     2    3
        positions stored    0, 4  1, 5  2    3
        position_in(slot)   4     5     2    3
                                  ^ newest

    There are more slots than needed, so that the buffer is seldom copied to another size. A cache
    serves one step, and the next step makes a new cache from its `buffer`.
    """

    buffer: Tensor  # [layers, loops, B, S, width]
    slot: Tensor  # int64 [M], index of each of the step's tokens in [B * S]
    used_slots: int  # slots from this one on were never filled
    layer: int  # set by `of`
    slots: Tensor  # [loops, B * S, width], a layer's part of `buffer` from a loop on; set by `of`

    def __init__(self, buffer: Tensor, step: StepTokens, window: int):
        """Make room for the tokens of a step in the buffer of the previous step.

        window: tokens that a token reads, itself included; 0: all."""
        self.step = step
        self.tokens_B = step.before + step.length  # of each document, this step's included
        tokens = int(self.tokens_B.max())
        needed = min(tokens, window + step.max_seqlen - 1) if window else tokens
        slots = buffer.shape[3]
        if step.is_single and needed == window:
            # Exactly the window: each new token overwrites the one that just left the window.
            if slots != needed:
                buffer = _with_slots(buffer, step.before, needed)
        elif not needed <= slots <= max(16, 4 * needed):
            buffer = _with_slots(buffer, step.before, 2 * needed)
        self.buffer = buffer
        self.slot = to_device(self.slot_of(step.position), buffer.device)
        self.used_slots = min(tokens, buffer.shape[3])

    def slot_of(self, position: np.ndarray) -> np.ndarray:
        """Return the slots, among B * S, of positions [..., M] in the documents of the step's
        tokens."""
        slots = self.buffer.shape[3]
        return self.step.document * slots + position % slots

    def of(self, layer: int, loop: int = 0) -> Self:
        """Return a view of the same buffer for one layer and loop."""
        view = copy(self)
        view.layer = layer
        view.slots = self.buffer[layer, loop:].flatten(1, 2)
        return view

    def put(self, x: Tensor) -> Tensor:
        """Store the step's tokens x [M, width]; return the whole buffer of this layer and loop,
        [B * S, width].

        x is also stored for all later loops. Those loops do not compute segments that have halted,
        and read the state that is stored here."""
        self.slots.index_copy_(1, self.slot, x.expand(len(self.slots), -1, -1))
        return self.slots[0]


class LatentCache(Cache):
    """The cache of attention: latents of earlier tokens, to which a step's tokens attend."""

    hidden: Tensor | None = None  # bool [B, T, used_slots]: not visible to a token; None: all are
    padded_index: Tensor  # int64 [M], index of the step's tokens in [B * T]; only with `hidden`

    def __init__(
        self,
        buffer: Tensor,
        step: StepTokens,
        window: int = 0,
        kept: dict[int, Tensor] | None = None,
    ):
        """kept: see tokens_before; None in the core. The others: see Cache."""
        super().__init__(buffer, step, window)
        self.kept = kept
        if step.is_single:  # which sees all slots
            return
        padded_index = step.document * step.max_seqlen + step.index_in_step
        self.padded_index = to_device(padded_index, buffer.device)

        stored_BS = position_in(np.arange(self.used_slots), self.tokens_B, self.buffer.shape[3])
        stored_B1S = to_device(stored_BS, buffer.device)[:, None]
        position_BT = step.before[:, None] + np.arange(step.max_seqlen)
        position_BT1 = to_device(position_BT, buffer.device)[:, :, None]
        self.hidden = (stored_B1S < 0) | (stored_B1S > position_BT1)
        if window:
            self.hidden |= stored_B1S <= position_BT1 - window

    def attend(self, q: Tensor, x: Tensor, scale: float, value_width: int) -> Tensor:
        """Store the latents x [M, width] of the step's tokens and attend to all stored latents.

        q [M, H, width] -> [M, H, value_width]. All heads read the same latents. A latent is the
        key, and its first value_width numbers are the value."""
        tokens, heads, width = q.shape
        documents = len(self.step.length)
        max_seqlen = self.step.max_seqlen
        keys_BSw = self.put(x).unflatten(0, (documents, -1))[:, : self.used_slots]
        padded = documents * max_seqlen != tokens
        if padded:
            q = q.new_zeros(documents * max_seqlen, heads, width).index_copy(
                0, self.padded_index, q
            )
        q = q.reshape(documents, max_seqlen * heads, width)
        score = torch.baddbmm(q.new_zeros(()), q, keys_BSw.mT, beta=0, alpha=scale)
        if self.hidden is not None:
            score_BTHS = score.view(documents, max_seqlen, heads, -1)
            score_BTHS.masked_fill_(self.hidden[:, :, None], -math.inf)
        out = torch.bmm(score.softmax(-1), keys_BSw[..., :value_width])
        out = out.view(documents * max_seqlen, heads, value_width)
        return out.index_select(0, self.padded_index) if padded else out


def tokens_before(
    x_MD: Tensor, packing: Packing, count: int, cache: LatentCache | None = None
) -> Tensor:
    """Return the `count` tokens before each token in a byte layer, the nearest last: [M, D, count].
    Before a document's start they are zero.

    cache: the layer's cache, in decoding. It keeps the last tokens, so call this function once per
    layer. Raise UsageError in a core layer, whose cache keeps none."""
    documents = 1 if cache is None else len(packing.cu_seqlens) - 1
    known_BTD = F.pad(x_MD.unflatten(0, (documents, -1)), (0, 0, count, 0))
    if cache is not None:
        if cache.kept is None:
            raise UsageError("tokens_before is for layers of prelude and coda, not of the core")
        known_BTD[:, :count] = cache.kept.get(cache.layer, 0)
        cache.kept[cache.layer] = known_BTD[:, -count:]
    earlier = known_BTD[:, :-1].unfold(1, count, 1).flatten(0, 1)
    distance = torch.arange(count, 0, -1, device=x_MD.device)
    in_document = packing.position[:, None] >= distance  # [M, count]
    return torch.where(in_document[:, None], earlier, 0)


def position_in(slot: np.ndarray, tokens_B: np.ndarray, slots: int) -> np.ndarray:
    """Return the position of the token in each slot, int64 [B, len(slot)], or a negative number for
    an empty slot: the newest position p with p % slots == slot.

    tokens_B: tokens of each document that are stored so far."""
    newest_B1 = tokens_B[:, None] - 1
    return newest_B1 - (newest_B1 - slot) % slots


def _with_slots(buffer: Tensor, tokens_B: np.ndarray, slots: int) -> Tensor:
    """Copy a cache's buffer to one with another number of slots, [layers, loops, B, slots, width],
    which gets the newest tokens of each document."""
    document = np.arange(len(tokens_B))[:, None]
    old_slot_BS = position_in(np.arange(slots), tokens_B, slots) % buffer.shape[3]
    index = to_device(document * buffer.shape[3] + old_slot_BS, buffer.device)
    return buffer.flatten(2, 3).index_select(2, index.flatten()).unflatten(2, index.shape)


# --------------------------------------------------------------------------------------------------
# Rotary embedding


class _Rotate(torch.autograd.Function):
    """Apply the rotary embedding to x [M, H * width] in place, see _rotate_."""

    @staticmethod
    def forward(ctx, x, heads, cos, sin):
        ctx.save_for_backward(cos, sin)
        ctx.heads = heads
        ctx.mark_dirty(x)
        return _rotate_(x, heads, cos, sin)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        grad = grad.clone(memory_format=torch.contiguous_format)
        return _rotate_(grad, ctx.heads, cos, sin, -1), None, None, None


def _rotate_(x: Tensor, heads: int, cos: Tensor, sin: Tensor, direction: int = 1) -> Tensor:
    """Rotate the last R numbers of each head in place; direction -1 rotates back.

        (a, b) -> (a cos - b sin, b cos + a sin)        a, b: the first and second R / 2 numbers

    cos, sin: [M, 1, R], see Packing. sin is negative in the first half."""
    rope_MHR = x.view(len(x), heads, -1)[:, :, -cos.shape[2] :]
    swapped = rope_MHR.roll(cos.shape[2] // 2, -1)
    rope_MHR.mul_(cos).addcmul_(swapped, sin, value=direction)
    return x


# --------------------------------------------------------------------------------------------------
# Attention inside documents


def attend_varlen(q_MHQ: Tensor, k_MHQ: Tensor, v_MHQ: Tensor, packing: Packing) -> Tensor:
    """Attend causally inside each document with torch's variable-length kernel -> [M, H * Q]."""
    from torch.nn.attention.varlen import varlen_attn

    assert packing.max_seqlen_as_size is not None  # Packing.build sets this or buckets
    cu_seqlens = packing.cu_seqlens
    max_seqlen = packing.max_seqlen_as_size.shape[0]
    window = (packing.window - 1, 0)  # tokens before and after a token; -1: all before it
    out = varlen_attn(
        q_MHQ, k_MHQ, v_MHQ, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, window_size=window
    )
    assert isinstance(out, Tensor)  # a tuple only if log-sums are requested
    return out.flatten(1)


def attend_padded(qkv: list[Tensor], packing: Packing) -> Tensor:
    """Attend causally inside each document without that kernel, in padded batches of documents.

    qkv: queries, keys and values, each [M, H, Q]. Returns [M, H * Q]."""
    assert packing.buckets is not None
    sizes = [bucket.documents * bucket.length for bucket in packing.buckets]
    if packing.padded_index is not None:
        padding = qkv[0].new_zeros(sum(sizes), *qkv[0].shape[1:])
        qkv = [padding.index_copy(0, packing.padded_index, x) for x in qkv]
    outs = []
    queries, keys, values = (x.split(sizes) for x in qkv)
    for i, bucket in enumerate(packing.buckets):
        batch = [x.unflatten(0, bucket) for x in (queries[i], keys[i], values[i])]
        out = _attend_batch(batch, packing.window)
        outs.append(out.flatten(0, 1))
    out = _concatenate(outs, dim=0)
    return out if packing.padded_index is None else out.index_select(0, packing.padded_index)


def _attend_batch(qkv: list[Tensor], window: int) -> Tensor:
    """Attend in a padded batch of documents: queries, keys and values, each [B, T, H, Q] ->
    [B, T, H * Q].

    Padding comes after the last token, so the causal mask hides it. A window cuts documents into
    blocks of its size, and each block attends to itself and to the previous block."""
    q, k, v = qkv
    documents, length = q.shape[:2]
    if window == 0 or window >= length:
        return _attend_block(q, k, v, length)
    padding = -length % window
    if padding:  # F.pad copies even if there is nothing to pad
        qkv = [F.pad(x, (0, 0, 0, 0, 0, padding)) for x in qkv]
    q, k, v = (x.unflatten(1, (-1, window)) for x in qkv)  # [B, blocks, window, H, Q]
    first = _attend_block(q[:, 0], k[:, 0], v[:, 0], window)

    # Each later block also reads the keys of the previous one: [B * (blocks - 1), 2 * window, H, Q]
    later_q = q[:, 1:].flatten(0, 1)
    pairs_k = torch.cat((k[:, :-1], k[:, 1:]), dim=2).flatten(0, 1)
    pairs_v = torch.cat((v[:, :-1], v[:, 1:]), dim=2).flatten(0, 1)
    later = _attend_block(later_q, pairs_k, pairs_v, window)
    later = later.reshape(documents, -1, later.shape[2])  # [B, T - window, H * Q]
    return torch.cat((first, later), dim=1)[:, :length]


def _attend_block(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Attend from the last t of T tokens, each to the last `window` tokens, itself included.

    q [B, t, H, Q], k and v [B, T, H, Q]. Returns [B, t, H * Q]."""
    tokens = q.shape[1]
    keys = k.shape[1]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, H, tokens, Q]
    if q.dtype == torch.bfloat16 and keys <= 2048:
        out = _attend_by_products(q, k, v, window)
    elif keys > tokens:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=causal_mask(q, keys, window))
    else:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2).flatten(2)


def _attend_by_products(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Attend with plain products, which in bf16 on a CPU are faster than SDPA up to 2048 keys.

    q [B, H, t, Q], k and v [B, H, T, Q], see _attend_block. Returns [B, H, t, Q]."""
    shape = q.shape
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))  # [B * H, tokens, Q]
    outs = []
    end = k.shape[1] - q.shape[1]
    for part in q.split(512, dim=1):
        end += part.shape[1]  # no token of this part sees a later key
        mask = causal_mask(part, end, window)
        score = torch.baddbmm(mask, part, k[:, :end].mT, alpha=shape[-1] ** -0.5)
        outs.append(torch.bmm(score.softmax(-1), v[:, :end]))
    return _concatenate(outs, dim=1).view(shape)


def causal_mask(q: Tensor, keys: int, window: int) -> Tensor:
    """Return the mask to add to scores [t, keys]: 0 for visible keys, -inf for hidden keys.

    q: [..., t, Q], the last t of `keys` tokens. A token sees itself and earlier tokens, at most
    `window` in all."""
    tokens = q.shape[-2]
    minus_inf = q.new_full((tokens, keys), -math.inf)
    later = minus_inf.triu(keys - tokens + 1)
    if keys <= window:
        return later
    return later + minus_inf.tril(keys - tokens - window)


def _concatenate(tensors: list[Tensor], dim: int) -> Tensor:
    """Concatenate tensors. Unlike torch.cat, do not copy a single tensor."""
    return torch.cat(tensors, dim=dim) if len(tensors) > 1 else tensors[0]


# --------------------------------------------------------------------------------------------------
# MLA


class MLA(nn.Module):
    """Multi-head latent attention. Later tokens read only the latent of a token, C + R numbers."""

    def __init__(self, config: SpiderConfig):
        super().__init__()
        c = config
        self.config = config
        q_width = c.n_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim)
        kv_width = c.n_heads * (c.qk_nope_head_dim + c.v_head_dim)
        latent_width = c.kv_lora_rank + c.qk_rope_head_dim
        self.q_a_proj = Linear(c.hidden_size, c.q_lora_rank, normed_input=True)
        self.q_b_proj = Linear(c.q_lora_rank, q_width, normed_input=True)
        self.kv_a_proj = Linear(c.hidden_size, latent_width, normed_input=True)
        self.kv_b_proj = Linear(c.kv_lora_rank, kv_width, normed_input=True)
        self.o_proj = Linear(c.n_heads * c.v_head_dim, c.hidden_size)

    def forward(
        self,
        x: Tensor,
        packing: Packing,
        active: ActiveTokens = ALL_TOKENS,
        latent: Tensor | None = None,
        cache: LatentCache | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend from the active tokens x [n, D] -> [n, D]; also return the latents [M, C + R].

        latent: [M, C + R], latents of the previous loop, which inactive tokens keep; None in the
        first loop. They are not normed or rotated yet. cache: in decoding, holds the latents of
        earlier steps, normed and rotated."""
        c = self.config
        latent = active.merge(latent, self.kv_a_proj(x))
        tokens = len(latent)
        q = active.scatter(self.q_b_proj(rms_norm(self.q_a_proj(x))))
        if not isinstance(self.q_b_proj, Linear):
            # Float8Linear returns a view, which autograd does not let us modify in place
            q = q.clone()
        rotate = _Rotate.apply if torch.is_grad_enabled() else _rotate_
        q_MHQ = rotate(q, c.n_heads, packing.cos, packing.sin).view(tokens, c.n_heads, -1)
        c_kv, k_rope = latent.split_with_sizes((c.kv_lora_rank, c.qk_rope_head_dim), dim=-1)
        c_kv_MC = rms_norm(c_kv)
        k_rope_MR = rotate(k_rope.clone(), 1, packing.cos, packing.sin)
        if cache is None:
            out = self._attend_in_documents(q_MHQ, c_kv_MC, k_rope_MR, packing)
        else:
            out = self._attend_to_cache(q_MHQ, c_kv_MC, k_rope_MR, cache)
        return self.o_proj(active.select(out)), latent

    def _attend_in_documents(
        self, q_MHQ: Tensor, c_kv_MC: Tensor, k_rope_MR: Tensor, packing: Packing
    ) -> Tensor:
        """Expand latents to keys and values per head, and attend inside documents: [M, H * Q]."""
        c = self.config
        heads = c.n_heads
        kv = self.kv_b_proj(c_kv_MC).unflatten(1, (heads, -1))  # [M, H, nope + Q]
        k_nope, v_MHQ = kv.split_with_sizes((c.qk_nope_head_dim, c.v_head_dim), dim=-1)
        k_rope_MHR = k_rope_MR[:, None].expand(-1, heads, -1)  # shared by the heads
        k_MHQ = torch.cat((k_nope, k_rope_MHR), dim=-1)
        if packing.buckets is not None:
            return attend_padded([q_MHQ, k_MHQ, v_MHQ], packing)
        if c.qk_nope_head_dim % 8 != 0:
            v_MHQ = v_MHQ.contiguous()  # the kernel needs addresses in multiples of 16 bytes
        return attend_varlen(q_MHQ, k_MHQ, v_MHQ, packing)

    def _attend_to_cache(
        self, q_MHQ: Tensor, c_kv_MC: Tensor, k_rope_MR: Tensor, cache: LatentCache
    ) -> Tensor:
        """Attend to cached latents without expanding them to keys and values: [M, H * Q].

        W_UK and W_UV are the rows of kv_b_proj for a head's keys and values.

            score           q (W_UK c) = (q W_UK) c
            sum of values   sum a (W_UV c) = W_UV (sum a c)         a: attention weights
        """
        c = self.config
        weight = weight_of(self.kv_b_proj, c_kv_MC.dtype)
        weight_per_head = weight.view(c.n_heads, -1, c.kv_lora_rank)
        w_uk, w_uv = weight_per_head.split_with_sizes((c.qk_nope_head_dim, c.v_head_dim), dim=1)
        q_nope, q_rope = q_MHQ.split_with_sizes((c.qk_nope_head_dim, c.qk_rope_head_dim), dim=-1)
        q_c_MHC = torch.bmm(q_nope.transpose(0, 1), w_uk).transpose(0, 1)
        query = torch.cat((q_c_MHC, q_rope), dim=-1)  # [M, H, C + R]
        latent = torch.cat((c_kv_MC, k_rope_MR), dim=-1)  # [M, C + R]
        scale = c.v_head_dim**-0.5  # v_head_dim is also the width of q and k
        out_MHC = cache.attend(query, latent, scale, c.kv_lora_rank)
        return torch.bmm(out_MHC.transpose(0, 1), w_uv.mT).transpose(0, 1).flatten(1)
