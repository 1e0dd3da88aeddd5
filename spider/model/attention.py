"""Multi-head latent attention (MLA) over packed documents."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spider.model.cache import Cache, out_of_sight
from spider.model.casting import Linear, weight_of
from spider.model.config import SpiderConfig
from spider.model.norm import rms_norm
from spider.model.packing import ActiveRows, Packing


class _Rotate(torch.autograd.Function):
    """Apply the rotary embedding in place to the last numbers of each head: x [rows, H * head_dim]."""

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
    """Rotate x by its rows' angles in place, or back (`way` -1)."""
    rope = x.view(len(x), heads, -1)[:, :, -cos.shape[2]:]
    turned = rope.roll(cos.shape[2] // 2, -1)
    rope.mul_(cos).addcmul_(turned, sin, value=way)
    return x


def attend(q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> Tensor:
    """Attend causally inside each document by a varlen kernel: q, k, v [rows, H, head_dim] -> [rows, H * head_dim]."""
    from torch.nn.attention.varlen import varlen_attn
    cu, longest = packing.cu_seqlens, packing.longest
    return varlen_attn(q, k, v, cu, cu, longest, longest, window_size=(packing.window - 1, 0)).flatten(1)


def attend_filled(qkv: Tensor, packing: Packing) -> Tensor:
    """Attend like `attend`, with padded batches of documents: qkv [rows, H, 3, head_dim] -> [rows, H * head_dim]."""
    sizes = [documents * length for documents, length in packing.buckets]
    if packing.padded_row is not None:
        qkv = qkv.new_zeros(sum(sizes), *qkv.shape[1:]).index_copy_(0, packing.padded_row, qkv)
    batches = qkv.split(sizes) if len(sizes) > 1 else [qkv]
    batches = [_attend_padded(batch.unflatten(0, bucket), packing.window).flatten(0, 1)
               for batch, bucket in zip(batches, packing.buckets)]
    out = torch.cat(batches) if len(batches) > 1 else batches[0]
    return out if packing.padded_row is None else out.index_select(0, packing.padded_row)


def _attend_padded(qkv: Tensor, window: int) -> Tensor:
    """Attend in a padded batch: qkv [documents, rows, H, 3, head_dim] -> [documents, rows, H * head_dim]. Padding
    follows the last row, so the causal mask hides it. With a window, blocks of that size attend to themselves and the
    block before."""
    documents, longest = qkv.shape[:2]
    if not 0 < window < longest:
        return _attend_block(*qkv.unbind(3), longest)
    blocks = F.pad(qkv, (0, 0, 0, 0, 0, 0, 0, -longest % window)).unflatten(1, (-1, window))
    first = _attend_block(*blocks[:, 0].unbind(3), window)
    q, k, v = torch.cat((blocks[:, :-1], blocks[:, 1:]), dim=2).flatten(0, 1).unbind(3)
    rest = _attend_block(q[:, window:], k, v, window)
    return torch.cat((first, rest.unflatten(0, (documents, -1)).flatten(1, 2)), dim=1)[:, :longest]


def _attend_block(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Attend from the last n of m rows, each to at most `window` rows: q [B, n, H, head_dim], k, v [B, m, H, head_dim]
    -> [B, n, H * head_dim]."""
    batch, n, heads, width = q.shape
    m = k.shape[1]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if q.dtype == torch.bfloat16 and m <= 2048:  # up to there plain bf16 products are faster than SDPA on a CPU
        q, k, v = (t.reshape(batch * heads, -1, width) for t in (q, k, v))
        outs = []
        for rows in q.split(512, dim=1):  # skip keys after the last of these rows
            last = min(m, m - n + 512 * len(outs) + rows.shape[1])
            score = torch.baddbmm(out_of_sight(rows, last, window), rows, k[:, :last].mT, alpha=width ** -0.5)
            outs.append(torch.bmm(score.softmax(-1), v[:, :last]))
        out = (torch.cat(outs, dim=1) if len(outs) > 1 else outs[0]).view(batch, heads, n, width)
    elif m > n:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=out_of_sight(q, m, window))
    else:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2).reshape(batch, n, heads * width)


class MLA(nn.Module):
    """Multi-head latent attention; later rows read only a row's latent, kv_lora_rank + qk_rope_head_dim numbers."""

    def __init__(self, config: "SpiderConfig"):
        super().__init__()
        self.config, c = config, config
        head_dim = c.qk_nope_head_dim + c.qk_rope_head_dim
        self.q_a_proj = Linear(c.hidden_size, c.q_lora_rank)
        self.q_b_proj = Linear(c.q_lora_rank, c.n_heads * head_dim)
        self.kv_a_proj = Linear(c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim)
        self.kv_b_proj = Linear(c.kv_lora_rank, c.n_heads * (c.qk_nope_head_dim + c.v_head_dim))
        self.o_proj = Linear(c.n_heads * c.v_head_dim, c.hidden_size)

    def forward(self, x: Tensor, packing: Packing, active: ActiveRows, latent: Tensor | None = None,
                cache: Cache | None = None) -> tuple[Tensor, Tensor]:
        """Attend from the active rows x [n, D] -> [n, D]; also return the latents [rows, kv_lora_rank + rope], not
        rotated, in which inactive rows keep the given ones of the loop before. A cache has earlier latents, normed and
        rotated."""
        c = self.config
        latent = active.merge(latent, self.kv_a_proj(x))
        rows, heads = len(latent), c.n_heads
        q = active.spread(self.q_b_proj(rms_norm(self.q_a_proj(x))), rows)
        if not isinstance(self.q_b_proj, Linear):  # the output of FP8 is a view, which autograd does not let us modify
            q = q.clone()
        q = _Rotate.apply(q, heads, packing.cos, packing.sin).view(rows, heads, -1)          # [rows, H, nope + rope]
        c_kv, k_rope = latent.split_with_sizes((c.kv_lora_rank, c.qk_rope_head_dim), dim=-1)
        c_kv, k_rope = rms_norm(c_kv), _Rotate.apply(k_rope.clone(), 1, packing.cos, packing.sin)
        if cache is not None:
            return self.o_proj(active.pick(self.absorbed(q, c_kv, k_rope, cache))), latent
        kv = self.kv_b_proj(c_kv).view(rows, heads, -1)                                    # [rows, H, nope + v]
        k_nope, v = kv.split_with_sizes((c.qk_nope_head_dim, c.v_head_dim), dim=-1)
        k_rope = k_rope[:, None].expand(-1, heads, -1)
        if packing.buckets is None:
            v = v if c.qk_nope_head_dim % 8 == 0 else v.contiguous()                         # 16-byte alignment
            out = attend(q, torch.cat((k_nope, k_rope), dim=-1), v, packing)
        else:
            out = attend_filled(torch.cat((q, k_nope, k_rope, v), dim=-1).view(rows, heads, 3, -1), packing)
        return self.o_proj(active.pick(out)), latent

    def absorbed(self, q: Tensor, c_kv: Tensor, k_rope: Tensor, cache: Cache) -> Tensor:
        """Attend over the latents directly -> [rows, H * v_head_dim], without expanding them to keys and values: q
        (W_UK c) = (q W_UK) c, and the weighted sum of W_UV c is W_UV times the weighted sum of c."""
        c = self.config
        weight = weight_of(self.kv_b_proj, c_kv.dtype).view(c.n_heads, -1, c.kv_lora_rank)   # [H, nope + v, c_kv]
        w_uk, w_uv = weight.split_with_sizes((c.qk_nope_head_dim, c.v_head_dim), dim=1)
        q_nope, q_rope = q.split_with_sizes((c.qk_nope_head_dim, c.qk_rope_head_dim), dim=-1)
        q = torch.cat((torch.bmm(q_nope.transpose(0, 1), w_uk).transpose(0, 1), q_rope), dim=-1)
        held = torch.cat((c_kv, k_rope), dim=-1)
        out = cache.attend(q, held, c.v_head_dim ** -0.5, c.kv_lora_rank)                    # [rows, H, c_kv]
        return torch.bmm(out.transpose(0, 1), w_uv.mT).transpose(0, 1).flatten(1)
