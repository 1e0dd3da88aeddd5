"""Layers that treat each token separately: Linears that cast their weights, RMSNorm, SwiGLU.

Parameters are fp32 (or another dtype, if converted). Matrix products run in Spider.compute_dtype,
the dtype of activations. Sums over tokens, routing and losses are at least fp32.

Shapes, as suffixes of names:
    M  tokens
    D  inputs of a product
    F  outputs of a product
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# --------------------------------------------------------------------------------------------------
# Linears. Loops of the core, recomputation and micro-steps use the same weights. Inside
# `cast_weights_once` each weight is cast once per optimizer step, and its gradients are summed
# before they are cast back.


class Linear(nn.Linear):
    """nn.Linear that casts its weight to the input's dtype, initialized by Spider.init_weights."""

    cast: Tensor | None = None  # the cast weight, inside cast_weights_once

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, normed_input: bool = False
    ):
        """normed_input: the inputs come from rms_norm, so their magnitude is at most
        sqrt(in_features), which FP8 uses."""
        super().__init__(in_features, out_features, bias=bias)
        self.normed_input = normed_input

    def reset_parameters(self):
        """Do nothing. nn.Linear's constructor calls this, but init_weights sets the values."""

    def cast_weight(self, dtype: torch.dtype):
        """Store the weight in a dtype, see cast_weights_once."""
        if dtype != self.weight.dtype:
            self.cast = self.weight.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, weight_of(self, x.dtype), bias)


class WideLinear(Linear):
    """Linear that computes in at least fp32 for inputs of any dtype.

    In narrower dtypes and in TF32, near-ties of router, boundary and halting predictors would flip.
    Neither this project nor torch's defaults allow TF32. On a GPU, bf16 inputs use WideProduct, and
    `cast` holds the terms of the weight."""

    def cast_weight(self, dtype: torch.dtype):
        """Store the terms of the weight, see WideProduct."""
        if self.weight.is_cuda and dtype == torch.bfloat16 and self.weight.dtype == torch.float32:
            self.cast = bf16_terms(self.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        weight = wide(self.weight)
        if x.is_cuda and x.dtype == torch.bfloat16 and weight.dtype == torch.float32:
            terms = bf16_terms(weight.detach()) if self.cast is None else self.cast
            y = WideProduct.apply(x, weight, terms)
            return y if self.bias is None else y + self.bias
        dtype = torch.promote_types(x.dtype, weight.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        return F.linear(x.to(dtype), weight.to(dtype), bias)


class WideProduct(torch.autograd.Function):
    """Multiply bf16 x [M, D] by an fp32 weight [F, D] on the tensor cores of bf16: fp32 [M, F].

    The result is as exact as an fp32 product, and bf16 is more than ten times as fast. With fp32
    products, a step of `1b` would take 2% longer (docs/results/gpu-estimates.md).

    An fp32 number is the sum of three bf16 terms of 8 bits each. Products of two bf16 numbers are
    exact in fp32, in which they are also summed. So one product with three times the columns is
    enough.

    weight_terms: [3 * F, D], bf16_terms of the weight. The weight itself is an argument only to
    receive the gradient."""

    @staticmethod
    def forward(ctx, x_MD, weight_FD, weight_terms):
        ctx.save_for_backward(x_MD, weight_terms)
        products = torch.mm(x_MD, weight_terms.mT, out_dtype=torch.float32)  # [M, 3 * F]
        return products.unflatten(1, (3, -1)).sum(1)

    @staticmethod
    def backward(ctx, grad_MF):
        x_MD, weight_terms = ctx.saved_tensors
        grad_terms = bf16_terms(grad_MF, dim=1)  # [M, 3 * F]
        grad_x_MD = None
        grad_weight_FD = None
        if ctx.needs_input_grad[0]:
            # The result is rounded to bf16, so the two largest terms of each factor suffice. Of
            # their four products, the smallest is below that rounding, too.
            grad_1, grad_2, _ = grad_terms.chunk(3, dim=1)
            weight_1, weight_2, _ = weight_terms.chunk(3)
            weights = torch.cat((weight_1, weight_2, weight_1))
            grad_x_MD = torch.cat((grad_1, grad_1, grad_2), dim=1) @ weights
        if ctx.needs_input_grad[1]:
            products = torch.mm(grad_terms.mT, x_MD, out_dtype=torch.float32)  # [3 * F, D]
            grad_weight_FD = products.unflatten(0, (3, -1)).sum(0)
        return grad_x_MD, grad_weight_FD, None


def bf16_terms(x: Tensor, dim: int = 0) -> Tensor:
    """Split fp32 numbers into three bf16 terms, concatenated along a dimension. The terms sum to
    the number, except at the smallest exponents."""
    first = x.to(torch.bfloat16)
    rest = x - first
    second = rest.to(torch.bfloat16)
    third = (rest - second).to(torch.bfloat16)
    return torch.cat((first, second, third), dim=dim)


def weight_of(linear: nn.Linear, dtype: torch.dtype) -> Tensor:
    """Return a Linear's weight in a dtype: its stored cast if it has one."""
    if not hasattr(linear, "cast"):
        # wrapped, as by peft: get the weight from the product with a unit matrix
        unit = torch.eye(linear.in_features, dtype=dtype, device=linear.weight.device)
        return linear(unit).to(dtype).mT
    weight: Any = linear.cast
    if weight is None or weight.dtype != dtype:
        weight = linear.weight
    return weight if weight.dtype == dtype else weight.to(dtype)


def wide(x: Tensor) -> Tensor:
    """Return x in at least fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@contextmanager
def cast_weights_once(model: nn.Module) -> Iterator[None]:
    """Cast weights to `compute_dtype` once for all passes inside the context.

    Every module with a method `cast_weight(dtype)` keeps its result in `cast`. Enter the context
    around all passes of an optimizer step: weights must not change inside."""
    modules: list[Any] = [module for module in model.modules() if hasattr(module, "cast_weight")]
    try:
        # Under FSDP, each group casts in its forward instead, after it has gathered the weights.
        if model.casts_early:
            for module in modules:
                module.cast_weight(model.compute_dtype)
        yield
    finally:
        for module in modules:
            module.cast = None


# --------------------------------------------------------------------------------------------------
# RMSNorm without weights, which the next Linear makes redundant


def rms_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) over the last dimension."""
    if x.is_cuda:
        return F.rms_norm(x, x.shape[-1:], eps=eps)
    if torch.is_grad_enabled():
        return _RMSNormCPU.apply(x, eps)
    return (x * inverse_rms(x, eps)).to(x.dtype)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """Return 1 / sqrt(mean(x^2) + eps), [..., 1], in at least fp32."""
    dtype = x.dtype if x.dtype.itemsize > 2 else torch.float32
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)
    eps_on_device = length.new_full((), eps)  # CUDA's addcmul refuses a tensor on the host
    mean_square = torch.addcmul(eps_on_device, length, length, value=1 / x.shape[-1])  # + eps
    return mean_square.rsqrt_()


class _RMSNormCPU(torch.autograd.Function):
    """RMSNorm for CPUs, on which torch's own backward takes two to three times as long."""

    @staticmethod
    def forward(ctx, x, eps):
        scale = inverse_rms(x, eps).to(x.dtype)
        y = x * scale
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx, grad):
        y, scale = ctx.saved_tensors
        along = (grad * y).mean(-1, keepdim=True)  # the part along y changes only the length
        return torch.addcmul(grad, y, along, value=-1) * scale, None


# --------------------------------------------------------------------------------------------------
# Feed-forward


class SwiGLU(nn.Module):
    """Gated feed-forward (Shazeer, arXiv 2002.05202), [M, hidden_size] -> [M, hidden_size]."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, normed_input=True)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)
