"""Convert Linears to torchao FP8 (tensorwise), and say which."""

import dataclasses

import torch
from torch import Tensor, nn

from spider.model.casting import Linear
from spider.model.parameters import NEVER_FP8, moe_layers, takes_fp8
from spider.training.machine import quiet


def convert_to_fp8(model: nn.Module, device: torch.device, experts: bool):
    """Swap the model's Linears for torchao's Float8Linear, tensorwise, in place; parameters stay the same objects.

    Weights are cast once per optimizer step (Spider.cast_weights_once), and evaluation multiplies without FP8.
    torchao's own axiswise recipe clashes with recomputation. `experts`: the stacked weights of the experts as well.
    """
    with quiet():
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
        from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
        from torchao.float8.float8_training_tensor import GemmInputRole

    class FP8Linear(Float8Linear):
        """torchao's, whose product takes a weight that was cast before."""
        cast = None

        def cast_weight(self, dtype: torch.dtype):
            if not self.training:
                return Linear.cast_weight(self, dtype)
            self.cast = hp_tensor_to_float8_dynamic(
                self.weight.t(), self.config.cast_config_weight.target_dtype, self.multiplying(16),
                gemm_input_role=GemmInputRole.WEIGHT)

        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                return Linear.forward(self, x)
            weight = self.weight.t() if self.cast is None else self.cast
            rows = x.numel() // x.shape[-1]  # what the weight's gradient sums over
            return matmul_with_hp_or_float8_args.apply(x, weight, self.multiplying(rows), self.config)

        def multiplying(self, rows: int):
            """torchao's settings of the three products, to pad what is no multiple of 16 and nothing else: it copies
            what it pads, where nothing is added too."""
            summed = self.in_features, self.out_features, rows
            return type(self.linear_mm_config)(*(product._replace(pad_inner_dim=size % 16 > 0) for product, size
                                                 in zip(self.linear_mm_config, summed)))

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name("tensorwise"), pad_inner_dim=True,
                                 emulate=device.type == "cpu")
    convert_to_float8_training(model, config=config, module_filter_fn=takes_fp8)
    for module in model.modules():
        if isinstance(module, Float8Linear):
            module.__class__ = FP8Linear
    for module in moe_layers(model):
        module.fp8 = experts


def describe_fp8(model: nn.Module, experts: bool) -> str:
    """Describe in one line how many Linears FP8 converts, what it leaves and why. Call it before the conversion."""
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    kept = sorted({word for name, module in linears for word in NEVER_FP8 if word in name})
    count = sum(takes_fp8(module, name) for name, module in linears)
    return (f"FP8 converts {count} of {len(linears)} Linears; high precision by name: {', '.join(kept)}; "
            + ("the routed experts by row and column scales" if experts else
               "the routed experts stay in bf16: their products are small, see --fp8_experts"))
