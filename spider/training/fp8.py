"""FP8 with torchao (tensorwise): which Linears it converts, and their scales.

Each tensor of an FP8 product has a scale. torchao computes a dynamic scale from the largest number
of the tensor, which is known only after the whole tensor is written, so the cast needs a separate
kernel. Two scales are known beforehand, so a compiled layer casts those tensors in the kernel that
computes them:

    input after rms_norm     known: numbers are at most sqrt(D), which the scale fits into e4m3
    gradient of the output   known: about as large as 1 / bytes, since the loss is a mean over the
                             step's targets. GRAD_SCALE fits it into e5m2, whose range is a factor
                             of 2^32; larger numbers saturate
    weight, other inputs     dynamic (the inputs of o_proj, down_proj and core.out_proj)

Known scales are powers of two, which round nothing. docs/results/gpu-estimates.md has the loss with
both kinds of scales. D: the width of a Linear's input.
"""

import math
from dataclasses import replace
from functools import cache
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from spider.machine import quiet
from spider.model.layers import Linear
from spider_model import Spider

# Modules whose name contains one of these stay in high precision
NEVER_FP8 = (
    "boundary_predictor",
    "loop_embedding",
    "engram",
    "layernorm",
    "norm",
    "embed_tokens",
    "lm_head",
    "halt_predictor",
    "router",
)
# The scale of outputs' gradients per byte of a step. Gradients times the bytes of a step are:
#     root mean square      5e-7 (in the core, while its output projection is near 0) to 10
#     largest value         1e-5 to 50 (of core.out_proj in the first steps; later 1)
#     what e5m2 then holds  6e-8 to 224
# If many bytes have no target, gradients are larger by a factor of bytes / targets.
GRAD_SCALE = 256


def takes_fp8(module: nn.Module, name: str) -> TypeGuard[nn.Linear]:
    """Return whether --precision fp8 converts this module."""
    return isinstance(module, nn.Linear) and not any(word in name for word in NEVER_FP8)


def input_scale(linear: nn.Linear) -> float | None:
    """Return the scale of a Linear's input if it is known beforehand, else None.

    It is the largest power of two that keeps numbers up to sqrt(in_features) within e4m3's
    range."""
    if not getattr(linear, "normed_input", False):
        return None
    largest = math.sqrt(linear.in_features)
    return 2.0 ** math.floor(math.log2(torch.finfo(torch.float8_e4m3fn).max / largest))


def convert_to_fp8(model: nn.Module, device: torch.device, experts: bool, step_bytes: int):
    """Replace the model's Linears with torchao's Float8Linear (tensorwise), in place; parameters
    stay the same objects.

    Weights are cast once per optimizer step (layers.cast_weights_once). Evaluation does not use
    FP8. torchao's axiswise recipe does not work with activation checkpointing.

    experts: also convert the stacked expert weights, with row and column scales. step_bytes: bytes
    of an optimizer step on this rank; the loss is a mean over them.
    """
    with quiet():
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        from torchao.float8.float8_linear import Float8Linear

    # One tensor per value, so that a compiled graph has one input for it
    @cache
    def on_device(scale: float) -> Tensor:
        return torch.full((), scale, dtype=torch.float32, device=device)

    input_scales = {
        name: input_scale(module)
        for name, module in model.named_modules()
        if takes_fp8(module, name)
    }
    grad_scale = on_device(2.0 ** round(math.log2(GRAD_SCALE * step_bytes)))
    config = replace(
        Float8LinearConfig.from_recipe_name("tensorwise"),
        pad_inner_dim=True,
        emulate=device.type == "cpu",
    )
    convert_to_float8_training(model, config=config, module_filter_fn=takes_fp8)
    fp8_linear = fp8_linear_class()
    for name, module in model.named_modules():
        if isinstance(module, Float8Linear):
            scale = input_scales[name]
            module.__class__ = fp8_linear
            # for a number of tokens that is a multiple of 16, and for any other; made here, since
            # Dynamo of torch 2.11 cannot construct them inside a graph
            module.mm_config_aligned = mm_config(module, n_tokens=16)
            module.mm_config_ragged = mm_config(module, n_tokens=1)
            # attributes, since buffers would be cast with the model
            module.scale_of_input = None if scale is None else on_device(scale)
            module.scale_of_grad = grad_scale
        elif hasattr(module, "fp8"):  # MoE
            module.fp8 = experts


def mm_config(linear: Any, n_tokens: int) -> Any:
    """Return torchao's settings of a Float8Linear's three products. Only inner dimensions that are
    not multiples of 16 are padded: torchao copies a tensor even if the padding is empty."""
    # of the output, the gradient of the input, and the gradient of the weight
    inner_dims = (linear.in_features, linear.out_features, n_tokens)
    products = [
        product._replace(pad_inner_dim=inner_dim % 16 > 0)
        for product, inner_dim in zip(linear.linear_mm_config, inner_dims, strict=True)
    ]
    return type(linear.linear_mm_config)(*products)


# torchao is imported only if FP8 is used, so the classes that need it are made inside functions


def gradient_cast_class() -> type[torch.autograd.Function]:
    """Return the autograd function that casts the gradient of a Linear's output to FP8."""
    from torchao.float8.float8_training_tensor import GemmInputRole, hp_tensor_and_scale_to_float8

    @torch._dynamo.allow_in_graph
    class CastGradient(torch.autograd.Function):
        """Return a Linear's output unchanged; in backward, cast its gradient to FP8."""

        @staticmethod
        def forward(ctx, y: Tensor, scale: Tensor, mm_config) -> Tensor:
            ctx.save_for_backward(scale)
            ctx.mm_config = mm_config
            return y

        @staticmethod
        def backward(ctx, grad: Tensor):
            (scale,) = ctx.saved_tensors
            grad = torch.where(grad.isfinite(), grad, math.nan)  # saturation would hide an infinity
            grad = hp_tensor_and_scale_to_float8(
                grad, scale, torch.float8_e5m2, ctx.mm_config, GemmInputRole.GRAD_OUTPUT
            )
            return grad, None, None

    return CastGradient


@cache
def fp8_linear_class() -> type[nn.Module]:
    """Return the class of converted Linears."""
    with quiet():
        from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
        from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
        from torchao.float8.float8_training_tensor import (
            GemmInputRole,
            hp_tensor_and_scale_to_float8,
        )
    CastGradient = gradient_cast_class()

    class FP8Linear(Float8Linear):
        """Float8Linear that may cast its weight once per step and knows some scales beforehand. In
        evaluation it computes like Linear."""

        cast = None  # see layers.Linear
        scale_of_input: Tensor | None  # fp32, no dimensions; None: dynamic
        scale_of_grad: Tensor

        def cast_weight(self, dtype: torch.dtype):
            if not self.training:
                return Linear.cast_weight(self, dtype)
            self.cast = hp_tensor_to_float8_dynamic(
                self.weight.t(),
                self.config.cast_config_weight.target_dtype,
                self.mm_config_aligned,
                gemm_input_role=GemmInputRole.WEIGHT,
            )

        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                return Linear.forward(self, x)
            weight = self.weight.t() if self.cast is None else self.cast
            n_tokens = x.numel() // x.shape[-1]
            mm_config = self.mm_config_ragged if n_tokens % 16 else self.mm_config_aligned
            if self.scale_of_input is not None:
                x = hp_tensor_and_scale_to_float8(
                    x, self.scale_of_input, torch.float8_e4m3fn, mm_config, GemmInputRole.INPUT
                )
            y = matmul_with_hp_or_float8_args.apply(x, weight, mm_config, self.config)
            y = CastGradient.apply(y, self.scale_of_grad, mm_config)
            return y if self.bias is None else y + self.bias.to(y.dtype)

    return FP8Linear


def describe_fp8(model: Spider, experts: bool) -> str:
    """Describe in one line which Linears FP8 will convert. Call this before the conversion."""
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    kept = [name for name, linear in linears.items() if not takes_fp8(linear, name)]
    words = sorted({word for name in kept for word in NEVER_FP8 if word in name})
    line = (
        f"FP8 converts {len(linears) - len(kept)} of {len(linears)} Linears; kept in high "
        f"precision: {', '.join(words)}"
    )
    if not model.config.has_experts:
        return line
    if experts:
        return f"{line}; routed experts in FP8 with row and column scales"
    return f"{line}; routed experts in bf16, since their products are small (see --fp8_experts)"
