"""Multi-head latent attention (MLA) over packed rows, and the cache of its latents in decoding.

Keys and values are projections of one narrow latent per row (DeepSeek-V2, arXiv 2405.04434).

Shapes, as suffixes of names:
    M  packed rows: bytes in prelude and coda, segments in the core
    n  active rows: those of the M rows that a loop computes
    D  hidden size
    H  heads
    Q  width of a head: qk_nope_head_dim + qk_rope_head_dim, which equals v_head_dim
    R  width of a head's rotated part: qk_rope_head_dim
    C  kv_lora_rank, the part of a latent from which keys and values are made
    B  documents, in a padded batch or in a cache
    T  rows of each of these documents, padding included
    S  slots of the cache per document
"""

import math
from copy import copy
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spider.config import SpiderConfig
from spider.errors import UsageError
from spider.model.layers import Linear, rms_norm, weight_of
from spider.model.packing import ALL_TOKENS, ActiveTokens, Packing

# --------------------------------------------------------------------------------------------------
# The cache of decoding


class Cache:
    """Rows of earlier decoding steps in ring buffers, one per layer, loop and document.

    Row p of a document is in slot p % S. With four slots, after rows 0 to 5:

        slot                0    1    2    3
        rows written       0, 4 1, 5  2    3
        position_in(slot)   4    5    2    3
                                 ^ newest

    The number of slots follows the rows that are needed, with room to spare, so that the buffer is
    seldom copied. A cache serves one step. The next step makes another from its `buffer`.
    """

    buffer: Tensor  # [layers, loops, B, S, width]
    slot: Tensor  # int64 [M], where the step's rows go in [B * S]
    used_slots: int  # a bound of the slots in use; those behind it were never filled
    layer: int  # of a view, see `of`
    slots: Tensor  # [loops, B * S, width], the part of `buffer` from a layer's loop on, see `of`

    def __init__(self, buffer: Tensor, packing: Packing, before: Tensor, window: int = 0):
        """Prepare the buffer of the step before for a step's rows.

        packing: of the step's rows. before int64 [B]: rows of each document in earlier steps.
        window: rows that a row reads, including itself; 0: all. Waits for the device."""
        lengths = before + packing.cu_seqlens.diff()
        rows = int(lengths.max())  # host synchronisation
        needed = min(rows, window + packing.max_seqlen - 1) if window else rows
        slots = buffer.shape[3]
        if is_single_token(packing) and needed == window:
            # Exactly the window: each new row overwrites the one that it no longer sees.
            if slots != needed:
                buffer = _with_slots(buffer, before, needed)
        elif not needed <= slots <= max(16, 4 * needed):
            buffer = _with_slots(buffer, before, 2 * needed)
        self.buffer = buffer
        self.packing = packing
        self.slot = self.slot_of(packing.position)
        self.used_slots = min(rows, buffer.shape[3])

    def slot_of(self, position: Tensor) -> Tensor:
        """Return the slot in [B * S] of a position in each row's document, [..., M]."""
        slots = self.buffer.shape[3]
        return self.packing.document * slots + position % slots

    def of(self, layer: int, loop: int = 0) -> Self:
        """Return a view for a layer and loop, on the same buffer."""
        view = copy(self)
        view.layer = layer
        view.slots = self.buffer[layer, loop:].flatten(1, 2)
        return view

    def put(self, x: Tensor) -> Tensor:
        """Store the step's rows [M, width]; return all rows of this layer and loop, [B * S, width].

        This also fills all later loops. A segment that halts is not computed there, so these loops
        read its last state."""
        self.slots.index_copy_(1, self.slot, x.expand(len(self.slots), -1, -1))
        return self.slots[0]


class LatentCache(Cache):
    """The cache of attention: latents of earlier rows, to which a step's rows attend."""

    hidden: Tensor | None = None  # bool [B, T, used_slots]: not visible to a row; None: all are
    padded_index: Tensor  # int64 [M], the step's rows in [B * T]; only with `hidden`
    kept: dict[int, Tensor] | None  # last rows by layer, see tokens_before; None in the core

    def __init__(
        self,
        buffer: Tensor,
        packing: Packing,
        before: Tensor,
        window: int = 0,
        kept: dict[int, Tensor] | None = None,
    ):
        super().__init__(buffer, packing, before, window)
        self.kept = kept
        if is_single_token(packing):  # it sees all that is stored
            return
        row_in_step = packing.position - before.index_select(0, packing.document)
        self.padded_index = packing.document * packing.max_seqlen + row_in_step

        slot = torch.arange(self.used_slots, device=buffer.device)
        rows_B = before + packing.cu_seqlens.diff()  # once the step's rows are stored
        stored_B1S = position_in(slot, rows_B, self.buffer.shape[3])[:, None]
        step = torch.arange(packing.max_seqlen, device=buffer.device)
        row_BT1 = (before[:, None] + step)[:, :, None]
        self.hidden = (stored_B1S < 0) | (stored_B1S > row_BT1)
        if window:
            self.hidden |= stored_B1S <= row_BT1 - window

    def attend(self, q: Tensor, x: Tensor, scale: float, value_width: int) -> Tensor:
        """Store the step's rows x [M, width] and attend to all rows -> [M, H, value_width].

        q [M, H, width]. All heads share the rows. Values are the first numbers of the keys."""
        rows, heads, width = q.shape
        documents = len(self.packing.cu_seqlens) - 1
        longest = self.packing.max_seqlen
        keys_BSw = self.put(x).unflatten(0, (documents, -1))[:, : self.used_slots]
        padded = documents * longest != rows
        if padded:
            q = q.new_zeros(documents * longest, heads, width).index_copy(0, self.padded_index, q)
        q = q.reshape(documents, longest * heads, width)
        score = torch.baddbmm(q.new_zeros(()), q, keys_BSw.mT, beta=0, alpha=scale)
        if self.hidden is not None:
            score_BTHS = score.view(documents, longest, heads, -1)
            score_BTHS.masked_fill_(self.hidden[:, :, None], -math.inf)
        out = torch.bmm(score.softmax(-1), keys_BSw[..., :value_width])
        out = out.view(documents * longest, heads, value_width)
        return out.index_select(0, self.padded_index) if padded else out


def tokens_before(
    x_MD: Tensor, packing: Packing, count: int, cache: LatentCache | None = None
) -> Tensor:
    """Return the `count` rows before each row of a byte layer, the nearest last: [M, D, count].
    They are zero before a document's start.

    cache: in decoding, that of the layer. It keeps the last rows, so call this once in a layer.
    Raise UsageError for that of a core layer, which keeps none."""
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


def is_single_token(packing: Packing) -> bool:
    """Return whether a step has one row of one document, as it has in sampling."""
    return packing.max_seqlen == 1 and len(packing.cu_seqlens) == 2


def position_in(slot: Tensor, rows_B: Tensor, slots: int) -> Tensor:
    """Return the position of the row in each slot, int64 [B, len(slot)]: the newest position p with
    p % slots == slot; below 0: none.

    rows: those that each document has stored so far."""
    newest_B1 = rows_B[:, None] - 1
    return newest_B1 - (newest_B1 - slot) % slots


def _with_slots(buffer: Tensor, rows_B: Tensor, slots: int) -> Tensor:
    """Copy a cache's buffer to one with another number of slots, [layers, loops, B, slots, width].
    The newest of each document's rows are kept."""
    slot = torch.arange(slots, device=buffer.device)
    row_BS = position_in(slot, rows_B, slots)
    document = torch.arange(len(rows_B), device=buffer.device)[:, None]
    return buffer[:, :, document, row_BS % buffer.shape[3]]


# --------------------------------------------------------------------------------------------------
# Rotary embedding


class _Rotate(torch.autograd.Function):
    """Apply the rotary embedding in place to the last numbers of each head: x [M, H * width]."""

    @staticmethod
    def forward(ctx, x, heads, cos, sin):
        ctx.save_for_backward(cos, sin)
        ctx.heads = heads
        ctx.mark_dirty(x)
        return _rotate_(x, heads, cos, sin, 1)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        grad = grad.clone(memory_format=torch.contiguous_format)
        return _rotate_(grad, ctx.heads, cos, sin, -1), None, None, None


def _rotate_(x: Tensor, heads: int, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """Rotate x by its rows' angles in place, or back (direction -1).

    Of each head the last R numbers rotate: their halves (a, b) become (a cos - b sin, b cos + a
    sin). cos, sin [M, 1, R]: see Packing, where sin has the signs."""
    rope_MHR = x.view(len(x), heads, -1)[:, :, -cos.shape[2] :]
    swapped = rope_MHR.roll(cos.shape[2] // 2, -1)
    rope_MHR.mul_(cos).addcmul_(swapped, sin, value=direction)
    return x


# --------------------------------------------------------------------------------------------------
# Attention inside documents


def attend_varlen(q_MHQ: Tensor, k_MHQ: Tensor, v_MHQ: Tensor, packing: Packing) -> Tensor:
    """Attend causally inside each document by torch's variable-length kernel -> [M, H * Q]."""
    from torch.nn.attention.varlen import varlen_attn

    assert packing.max_seqlen_as_size is not None  # Packing.build gives either this or buckets
    cu_seqlens = packing.cu_seqlens
    longest = packing.max_seqlen_as_size.shape[0]
    window = (packing.window - 1, 0)  # rows before and after the row itself; -1: all
    out = varlen_attn(
        q_MHQ, k_MHQ, v_MHQ, cu_seqlens, cu_seqlens, longest, longest, window_size=window
    )
    assert isinstance(out, Tensor)  # a tuple only if its log-sums are asked for
    return out.flatten(1)


def attend_padded(qkv: Tensor, packing: Packing) -> Tensor:
    """Attend in the same way without such a kernel, by padded batches of documents.

    qkv [M, H, 3, Q]: queries, keys and values, side by side. Returns [M, H * Q]."""
    assert packing.buckets is not None
    sizes = [bucket.documents * bucket.length for bucket in packing.buckets]
    if packing.padded_index is not None:
        padding = qkv.new_zeros(sum(sizes), *qkv.shape[1:])
        qkv = padding.index_copy_(0, packing.padded_index, qkv)
    batches = qkv.split(sizes) if len(sizes) > 1 else (qkv,)
    outs = []
    for batch, bucket in zip(batches, packing.buckets, strict=True):
        out = _attend_batch(batch.unflatten(0, bucket), packing.window)
        outs.append(out.flatten(0, 1))
    out = _concatenate(outs, dim=0)
    return out if packing.padded_index is None else out.index_select(0, packing.padded_index)


def _attend_batch(qkv: Tensor, window: int) -> Tensor:
    """Attend in a padded batch of documents: qkv [B, T, H, 3, Q] -> [B, T, H * Q].

    Padding follows the last row, so the causal mask hides it. With a window, rows are cut into
    blocks of that size. Each block attends to itself and to the block before."""
    documents, longest = qkv.shape[:2]
    if window == 0 or window >= longest:
        q, k, v = qkv.unbind(3)
        return _attend_block(q, k, v, longest)
    padding = (0, 0, 0, 0, 0, 0, 0, -longest % window)  # F.pad begins with the last dimension
    padded = F.pad(qkv, padding)
    blocks = padded.unflatten(1, (-1, window))  # [B, blocks, window, H, 3, Q]

    q, k, v = blocks[:, 0].unbind(3)
    first = _attend_block(q, k, v, window)

    # Each later block behind the one before it: [B * (blocks - 1), 2 * window, H, 3, Q].
    pairs = torch.cat((blocks[:, :-1], blocks[:, 1:]), dim=2)
    q, k, v = pairs.flatten(0, 1).unbind(3)
    later = _attend_block(q[:, window:], k, v, window)
    later = later.unflatten(0, (documents, -1))  # [B, blocks - 1, window, H * Q]

    out = torch.cat((first, later.flatten(1, 2)), dim=1)
    return out[:, :longest]


def _attend_block(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Attend from the last rows of a batch, each to at most `window` rows.

    k and v [B, T, H, Q] have all T rows, q [B, t, H, Q] the last t of them. Returns [B, t, H * Q].
    """
    rows = q.shape[1]
    keys = k.shape[1]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, H, rows, Q]
    if q.dtype == torch.bfloat16 and keys <= 2048:
        out = _attend_by_products(q, k, v, window)
    elif keys > rows:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=causal_mask(q, keys, window))
    else:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2).flatten(2)


def _attend_by_products(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Attend by plain products, which in bf16 are faster than SDPA on a CPU up to 2048 keys.

    q [B, H, t, Q], k and v [B, H, T, Q], as in _attend_block -> [B, H, t, Q]."""
    shape = q.shape
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))  # [B * H, rows, Q]
    outs = []
    end = k.shape[1] - q.shape[1]
    for part in q.split(512, dim=1):
        end += part.shape[1]  # no row of this part sees a later key
        mask = causal_mask(part, end, window)
        score = torch.baddbmm(mask, part, k[:, :end].mT, alpha=shape[-1] ** -0.5)
        outs.append(torch.bmm(score.softmax(-1), v[:, :end]))
    return _concatenate(outs, dim=1).view(shape)


def causal_mask(q: Tensor, keys: int, window: int) -> Tensor:
    """Return the mask to add to scores [t, keys]: 0 for keys that a row sees, -inf for others.

    q [..., t, Q] are the last t of as many rows as there are keys. A row sees itself and the rows
    before it, at most `window` in all."""
    rows = q.shape[-2]
    minus_inf = q.new_full((rows, keys), -math.inf)
    later = minus_inf.triu(keys - rows + 1)
    if keys <= window:
        return later
    return later + minus_inf.tril(keys - rows - window)


def _concatenate(tensors: list[Tensor], dim: int) -> Tensor:
    """Concatenate tensors, but do not copy a single one, as torch.cat does."""
    return torch.cat(tensors, dim=dim) if len(tensors) > 1 else tensors[0]


# --------------------------------------------------------------------------------------------------
# MLA


class MLA(nn.Module):
    """Multi-head latent attention. Later rows read only a row's latent, C + R numbers."""

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
        """Attend from the active rows x [n, D] -> [n, D]; also return the latents [M, C + R].

        latent [M, C + R]: those of the loop before, which inactive rows keep; None in the first
        loop. They are neither normed nor rotated. cache: in decoding, has the latents of earlier
        steps, normed and rotated."""
        c = self.config
        latent = active.merge(latent, self.kv_a_proj(x))
        rows = len(latent)
        q = active.scatter(self.q_b_proj(rms_norm(self.q_a_proj(x))))
        if not isinstance(self.q_b_proj, Linear):
            # FP8's output is a view, which autograd does not let us modify
            q = q.clone()
        q_MHQ = _Rotate.apply(q, c.n_heads, packing.cos, packing.sin).view(rows, c.n_heads, -1)
        c_kv, k_rope = latent.split_with_sizes((c.kv_lora_rank, c.qk_rope_head_dim), dim=-1)
        c_kv_MC = rms_norm(c_kv)
        k_rope_MR = _Rotate.apply(k_rope.clone(), 1, packing.cos, packing.sin)
        if cache is None:
            out = self._attend_in_documents(q_MHQ, c_kv_MC, k_rope_MR, packing)
        else:
            out = self._attend_to_cache(q_MHQ, c_kv_MC, k_rope_MR, cache)
        return self.o_proj(active.select(out)), latent

    def _attend_in_documents(
        self, q_MHQ: Tensor, c_kv_MC: Tensor, k_rope_MR: Tensor, packing: Packing
    ) -> Tensor:
        """Expand the latents to keys and values, and attend inside documents -> [M, H * Q]."""
        c = self.config
        rows, heads, _ = q_MHQ.shape
        kv = self.kv_b_proj(c_kv_MC).view(rows, heads, -1)  # [M, H, nope + Q]
        k_nope, v_MHQ = kv.split_with_sizes((c.qk_nope_head_dim, c.v_head_dim), dim=-1)
        k_rope_MHR = k_rope_MR[:, None].expand(-1, heads, -1)  # shared by the heads
        if packing.buckets is None:
            if c.qk_nope_head_dim % 8 != 0:
                v_MHQ = v_MHQ.contiguous()  # the kernel needs addresses in multiples of 16 bytes
            k_MHQ = torch.cat((k_nope, k_rope_MHR), dim=-1)
            return attend_varlen(q_MHQ, k_MHQ, v_MHQ, packing)
        qkv = torch.cat((q_MHQ, k_nope, k_rope_MHR, v_MHQ), dim=-1)
        return attend_padded(qkv.view(rows, heads, 3, -1), packing)

    def _attend_to_cache(
        self, q_MHQ: Tensor, c_kv_MC: Tensor, k_rope_MR: Tensor, cache: LatentCache
    ) -> Tensor:
        """Attend to the latents themselves -> [M, H * Q], without keys and values of each head.

        kv_b_proj's rows are W_UK and W_UV of each head. A score is q (W_UK c) = (q W_UK) c, so the
        query takes W_UK. The weighted sum of values W_UV c is W_UV times the weighted sum of c."""
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
