"""Convert Linears to torchao FP8 (tensorwise), and describe which."""

import dataclasses

import torch
from torch import Tensor, nn

from spider.model.casting import Linear
from spider.model.parameters import NEVER_FP8, moe_layers, takes_fp8
from spider.training.machine import quiet


def convert_to_fp8(model: nn.Module, device: torch.device, experts: bool):
    """Replace the model's Linears by torchao's Float8Linear (tensorwise), in place; parameters stay the same objects.

    Weights are cast once per optimizer step (Spider.cast_weights_once); evaluation does not use FP8. torchao's axiswise
    recipe does not work with activation checkpointing. `experts`: convert the stacked expert weights too.
    """
    with quiet():
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
        from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
        from torchao.float8.float8_training_tensor import GemmInputRole

    class FP8Linear(Float8Linear):
        """Float8Linear whose weight may be cast beforehand."""
        cast = None

        def settle(self):
            """Build torchao's settings of the three products for row counts that are multiples of 16, and for others.
            Not in forward: Dynamo of torch 2.11 cannot construct named tuples inside a graph."""
            self.mm_config_aligned, self.mm_config_ragged = self.mm_config(16), self.mm_config(1)

        def mm_config(self, rows: int):
            """Pad only inner dimensions that are not multiples of 16: torchao copies a tensor even if the padding is
            empty."""
            inner = self.in_features, self.out_features, rows  # of forward, the input's and the weight's gradient
            return type(self.linear_mm_config)(*(product._replace(pad_inner_dim=size % 16 > 0)
                                                 for product, size in zip(self.linear_mm_config, inner)))

        def cast_weight(self, dtype: torch.dtype):
            if not self.training:
                return Linear.cast_weight(self, dtype)
            self.cast = hp_tensor_to_float8_dynamic(
                self.weight.t(), self.config.cast_config_weight.target_dtype, self.mm_config_aligned,
                gemm_input_role=GemmInputRole.WEIGHT)

        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                return Linear.forward(self, x)
            weight = self.weight.t() if self.cast is None else self.cast
            rows = x.numel() // x.shape[-1]
            mm_config = self.mm_config_ragged if rows % 16 else self.mm_config_aligned
            return matmul_with_hp_or_float8_args.apply(x, weight, mm_config, self.config)

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name("tensorwise"), pad_inner_dim=True,
                                 emulate=device.type == "cpu")
    convert_to_float8_training(model, config=config, module_filter_fn=takes_fp8)
    for module in model.modules():
        if isinstance(module, Float8Linear):
            module.__class__ = FP8Linear
            module.settle()
    for module in moe_layers(model):
        module.fp8 = experts


def describe_fp8(model: nn.Module, experts: bool) -> str:
    """Describe in one line which Linears FP8 converts. Call it before the conversion."""
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    kept = sorted({word for name, module in linears for word in NEVER_FP8 if word in name})
    count = sum(takes_fp8(module, name) for name, module in linears)
    said = f"FP8 converts {count} of {len(linears)} Linears; kept in high precision: {', '.join(kept)}"
    if not model.config.has_experts:
        return said
    return said + ("; routed experts in FP8 with row and column scales" if experts else
                   "; routed experts in bf16, since their products are small (see --fp8_experts)")
