"""Layers over packed rows: Linears that cast their weights, RMSNorm, dropout, MLA, SwiGLU, Block.

Parameters are fp32 (or another dtype, if converted); products run in `Spider.compute_dtype`, the
dtype of activations. Sums over rows, routing and losses are at least fp32. Shapes: M rows, D hidden
size, H heads.
"""

from collections.abc import Callable
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spider.config import SpiderConfig
from spider.packing import ALL_ROWS, ActiveRows, Cache, Packing, causal_mask

# --------------------------------------------------------------------------------------------------
# Linears. The loops of the core, recomputation and micro-steps all use the same weights, so inside
# `cast_weights_once` each weight is cast once per optimizer step, and its gradients are summed
# before the cast back.


class Linear(nn.Linear):
    """nn.Linear that casts its weight to the input's dtype; initialized only by
    Spider.init_weights."""

    cast: Tensor | None = None  # the cast weight, inside cast_weights_once

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, normed_input: bool = False
    ):
        """normed_input: whether rms_norm makes the inputs, so that they are at most
        sqrt(in_features) in size."""
        super().__init__(in_features, out_features, bias=bias)
        self.normed_input = normed_input

    def reset_parameters(self):
        pass

    def cast_weight(self, dtype: torch.dtype):
        if dtype != self.weight.dtype:
            self.cast = self.weight.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(
            x, weight_of(self, x.dtype), None if self.bias is None else self.bias.to(x.dtype)
        )


class WideLinear(Linear):
    """Linear that computes in fp32 (or wider) for any input dtype: router, boundary and halting
    predictors. Nothing here allows TF32, nor does torch by default. `cast` has the terms of the
    weight, see WideProduct."""

    def cast_weight(self, dtype: torch.dtype):
        if self.weight.is_cuda and dtype == torch.bfloat16 and self.weight.dtype == torch.float32:
            self.cast = bf16_terms(self.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        weight = wide(self.weight)
        if x.is_cuda and x.dtype == torch.bfloat16 and weight.dtype == torch.float32:
            y = WideProduct.apply(
                x, weight, bf16_terms(weight.detach()) if self.cast is None else self.cast
            )
            return y if self.bias is None else y + self.bias
        dtype = torch.promote_types(x.dtype, weight.dtype)
        return F.linear(
            x.to(dtype), weight.to(dtype), None if self.bias is None else self.bias.to(dtype)
        )


class WideProduct(torch.autograd.Function):
    """Multiply bf16 x [M, D] by an fp32 weight [N, D] to fp32 [M, N], as exactly as fp32 does, but
    on the tensor cores of bf16, which are more than ten times as fast.

    An fp32 number is the sum of three in bf16, of 8 bits each, and products of two bf16 numbers are
    exact in fp32, which also sums them. So this is one product with three times the columns. terms
    [3 * N, D]: those of the weight, which itself only receives the gradient."""

    @staticmethod
    def forward(ctx, x, weight, terms):
        ctx.save_for_backward(x, terms)
        return mm_to_fp32(x, terms.mT).unflatten(1, (3, -1)).sum(1)

    @staticmethod
    def backward(ctx, grad):
        x, terms = ctx.saved_tensors
        of_grad = bf16_terms(grad, dim=1)  # [M, 3 * N]
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            # rounded to bf16, for which two terms of each suffice, and three products
            first, second, _ = of_grad.chunk(3, dim=1)
            of_weight = terms.chunk(3)
            grad_x = torch.cat((first, first, second), dim=1) @ torch.cat(
                (of_weight[0], of_weight[1], of_weight[0])
            )
        if ctx.needs_input_grad[1]:
            grad_weight = mm_to_fp32(of_grad.mT, x).unflatten(0, (3, -1)).sum(0)
        return grad_x, grad_weight, None


def bf16_terms(x: Tensor, dim: int = 0) -> Tensor:
    """Split fp32 numbers into three in bf16, side by side along a dimension, whose sum they are up
    to the smallest exponents."""
    first = x.to(torch.bfloat16)
    rest = x - first
    second = rest.to(torch.bfloat16)
    third = (rest - second).to(torch.bfloat16)
    return torch.cat((first, second, third), dim=dim)


def mm_to_fp32(a: Tensor, b: Tensor) -> Tensor:
    """Multiply matrices in bf16, with the sums as the fp32 result."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def weight_of(linear: nn.Linear, dtype: torch.dtype) -> Tensor:
    """Return a Linear's weight in a dtype, using its cast if there is one. That of a wrapped
    Linear, as peft makes them, is its product with a unit matrix."""
    if not hasattr(linear, "cast"):
        return (
            linear(torch.eye(linear.in_features, dtype=dtype, device=linear.weight.device))
            .to(dtype)
            .mT
        )
    if linear.cast is not None and linear.cast.dtype == dtype:
        return linear.cast
    return linear.weight.to(dtype)


def wide(x: Tensor) -> Tensor:
    """Return x in at least fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@contextmanager
def cast_weights_once(model: nn.Module):
    """Cast weights to `compute_dtype` once for all passes inside. Every module with a
    `cast_weight(dtype)` method keeps its cast in `cast`. Use it around all passes of an optimizer
    step: weights must not change inside."""
    modules = [module for module in model.modules() if hasattr(module, "cast_weight")]
    try:
        if model.casts_early:
            # FSDP casts in the forward of each group, after it has gathered the weights
            for module in modules:
                module.cast_weight(model.compute_dtype)
        yield
    finally:
        for module in modules:
            module.cast = None


# --------------------------------------------------------------------------------------------------
# RMSNorm without weights; the Linear that follows makes them redundant


def rms_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) over the last dimension."""
    if x.is_cuda:
        return F.rms_norm(x, x.shape[-1:], eps=eps)
    return (
        _RMSNormCPU.apply(x, eps)
        if torch.is_grad_enabled()
        else (x * inverse_rms(x, eps)).to(x.dtype)
    )


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """Return 1 / sqrt(mean(x^2) + eps), [..., 1], at least in fp32."""
    dtype = x.dtype if x.dtype.itemsize > 2 else torch.float32
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)
    # eps as a tensor on the device: CUDA's addcmul refuses one on the host
    return torch.addcmul(length.new_full((), eps), length, length, value=1 / x.shape[-1]).rsqrt_()


class _RMSNormCPU(torch.autograd.Function):
    """RMSNorm for CPUs, where torch's own backward takes two to three times as long."""

    @staticmethod
    def forward(ctx, x, eps):
        scale = inverse_rms(x, eps).to(x.dtype)
        y = x * scale
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx, grad):
        y, scale = ctx.saved_tensors
        return torch.addcmul(grad, y, (grad * y).mean(-1, keepdim=True), value=-1) * scale, None


# --------------------------------------------------------------------------------------------------
# Noise and dropout as functions of seed and position: neither ranks, micro-steps nor restarts
# change them


def byte_noise(
    seed: int | Tensor | None, sequences: int, length: int, device: torch.device
) -> Tensor:
    """Return a random number per byte, int64 [sequences, length]; row i is a function of seed + i.

    Without a seed, torch's default generator draws them."""
    if seed is None:
        return torch.randint(-1 << 63, (1 << 63) - 1, (sequences, length), device=device)
    row = splitmix(0, torch.arange(sequences, device=device) + seed)
    return splitmix(row[:, None], torch.arange(1, length + 1, device=device))


def splitmix(start: Tensor | int, index: Tensor) -> Tensor:
    """Return the numbers at `index` of the splitmix64 sequence from `start`, int64."""
    z = start + index * (0x9E3779B97F4A7C15 - (1 << 64))
    for shift, factor in (
        (30, 0xBF58476D1CE4E5B9 - (1 << 64)),
        (27, 0x94D049BB133111EB - (1 << 64)),
    ):
        z = (z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def uniform(number: Tensor) -> Tensor:
    """Map random int64 to fp32 in (0, 1)."""
    return (((number >> 40) & 0xFFFFFF).float() + 0.5) / (1 << 24)


def dropped(x: Tensor, rate: float, noise: Tensor | None, site: int) -> Tensor:
    """Apply dropout of a rate to x [n, D]; without noise return x. The mask is a function of the
    row's noise, int64 [n], and of the site."""
    if noise is None or not rate:
        return x
    salt = splitmix(site, torch.arange(1, x.shape[1] + 1, device=x.device)).int()
    z = (noise.int()[:, None] ^ salt).mul_(0x2C1B3C6D)  # a 32-bit hash
    z = ((z >> 15) & 0x1FFFF).bitwise_xor_(z).mul_(0x297A2D39)
    return x * (z >= round((rate - 0.5) * (1 << 32))) / (1 - rate)


# --------------------------------------------------------------------------------------------------
# Multi-head latent attention (MLA, arXiv 2405.04434): keys and values are projections of one narrow
# latent per row


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


# --------------------------------------------------------------------------------------------------
# Feed-forward, and the layer at byte rate


class SwiGLU(nn.Module):
    """Gated feed-forward, [rows, D] -> [rows, D]."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, normed_input=True)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Block(nn.Module):
    """A dense layer of prelude or coda, [M, D] -> [M, D]. The core's layer is RecurrentBlock in
    spider_model.py."""

    compiled: Callable | None = None  # of `in_one_graph`, see Spider.compile_layers

    def __init__(self, config: SpiderConfig, attention_class: type[nn.Module] = MLA):
        super().__init__()
        self.attention = attention_class(config)
        self.ffn = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, packing: Packing, cache: Cache | None = None) -> Tensor:
        if self.compiled is not None and torch.is_grad_enabled():
            return self.compiled(self, x, packing)
        return self.run(x, packing, cache)

    def run(self, x: Tensor, packing: Packing, cache: Cache | None = None) -> Tensor:
        x = x + self.attention(rms_norm(x), packing, ALL_ROWS, cache=cache)[0]
        return x + self.ffn(rms_norm(x))

    def in_one_graph(self, x: Tensor, packing: Packing) -> Tensor:
        return self.run(x, packing)
