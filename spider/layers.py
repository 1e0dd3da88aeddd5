"""Layers over rows: Linears that cast their weights, RMSNorm, SwiGLU.

Parameters are fp32 (or another dtype, if converted); products run in `Spider.compute_dtype`, the
dtype of activations. Sums over rows, routing and losses are at least fp32. Shapes: M rows, D hidden
size, H heads.
"""

from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
# Feed-forward


class SwiGLU(nn.Module):
    """Gated feed-forward, [rows, D] -> [rows, D]."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, normed_input=True)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)
