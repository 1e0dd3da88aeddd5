"""Cast weights for products, for each product or once for all passes of an optimizer step.

Parameters are fp32 (or another dtype, if converted); products run in Spider.compute_dtype. Linear and WideLinear cast
in forward. Inside `cast_weights_once` every module with a `cast_weight(dtype)` (these, MoE, FP8's Linears) keeps its
cast in `cast`. `cast_experts` casts stacked expert weights. Under FSDP `cast_hook` casts a group's weights after they
are gathered, and `gather_in_bf16` gathers them in bf16.
"""

from collections.abc import Callable
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


class Linear(nn.Linear):
    """nn.Linear that casts its weight to the input's dtype; initialized only by Spider.init_weights."""

    cast: Tensor | None = None            # the cast weight, inside cast_weights_once

    def __init__(self, in_features: int, out_features: int, bias: bool = False):
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self):
        pass

    def cast_weight(self, dtype: torch.dtype):
        if dtype != self.weight.dtype:
            self.cast = self.weight.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, weight_of(self, x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class WideLinear(Linear):
    """Linear with an fp32 (or wider) result for any input dtype, [N, D] -> [N, E]. On a GPU bf16 inputs are not
    cast."""

    def cast_weight(self, dtype: torch.dtype):
        if dtype == torch.bfloat16 and self.weight.is_cuda:
            self.cast = halves(self.weight.detach(), 0)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = wide(self.weight), None if self.bias is None else wide(self.bias)
        if x.dtype == torch.bfloat16 and x.is_cuda and weight.dtype == torch.float32:
            y = _Wide.apply(x, weight, halves(weight.detach(), 0) if self.cast is None else self.cast)
            return y if bias is None else y + bias
        dtype = torch.promote_types(x.dtype, weight.dtype)
        return F.linear(x.to(dtype), weight.to(dtype), bias if bias is None else bias.to(dtype))


class _Wide(torch.autograd.Function):
    """Multiply x in bf16 by a weight in fp32: x [N, D], weight [E, D], its halves [2 * E, D] -> fp32 [N, E]. Two bf16
    halves have 16 bits of mantissa, more than TF32, and x needs no cast to fp32."""

    @staticmethod
    def forward(ctx, x, weight, split):
        ctx.save_for_backward(x, split)
        high, low = wide_product(x, split.mT).chunk(2, dim=1)
        return high + low

    @staticmethod
    def backward(ctx, grad):
        x, split = ctx.saved_tensors
        grads = halves(grad, 1)                                                              # [N, 2 * E]
        high, low = wide_product(grads.mT, x).chunk(2)
        return grads[:, :grad.shape[1]] @ split[:len(split) // 2], high + low, None


def halves(x: Tensor, dim: int) -> Tensor:
    """Split x in fp32 into a sum of two numbers in bf16, side by side along `dim`."""
    high = x.to(torch.bfloat16)
    return torch.cat((high, (x - high).to(torch.bfloat16)), dim=dim)


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply a @ b in bf16, summed and returned in fp32."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def weight_of(linear: nn.Linear, dtype: torch.dtype) -> Tensor:
    """Return a Linear's weight in a dtype, using its cast if there is one."""
    for weight in (linear.cast, linear.weight):
        if weight is not None and weight.dtype == dtype:
            return weight
    return linear.weight.to(dtype)


def cast_experts(weights: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype, joined: bool, fp8: bool
                 ) -> tuple[Tensor, Tensor | None, Tensor]:
    """Cast w_gate, w_up and w_down. `joined`: concatenate the first two for a backend that multiplies them as one (see
    moe_forward). `fp8`: use column-major order, which its kernels need."""
    w_gate, w_up, w_down = (w.to(dtype) for w in weights)
    if joined:
        w_gate, w_up = torch.cat((w_gate, w_up), dim=-1), None
    return tuple(w.mT.contiguous().mT if fp8 and w is not None else w for w in (w_gate, w_up, w_down))


@contextmanager
def cast_weights_once(model: nn.Module):
    """Cast weights to `compute_dtype` once for all loops, recomputations and micro-steps inside; their gradients are
    also accumulated before the cast back. Use it around all passes of an optimizer step: weights must not change."""
    modules = [module for module in model.modules() if hasattr(module, "cast_weight")]
    try:
        for module in modules if model.casts_early else ():
            module.cast_weight(model.compute_dtype)
        yield
    finally:
        for module in modules:
            module.cast = None


def wide(x: Tensor) -> Tensor:
    """Return x in at least fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def gather_in_bf16(model: nn.Module, params: set[int]):
    """Replace parameters, given by id, by Bf16Gathered, which FSDP gathers in bf16."""
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if id(p) in params:
                setattr(module, name, nn.Parameter(Bf16Gathered(p.detach())))


class Bf16Gathered(Tensor):
    """Rows of a weight that is only used in bf16. FSDP calls the two hooks of such a tensor: ranks gather bf16, half
    the bytes of fp32, and convert the gathered weight back to fp32."""

    @staticmethod
    def __new__(cls, rows: Tensor):
        return Tensor._make_wrapper_subclass(cls, rows.size(), strides=rows.stride(), dtype=rows.dtype,
                                             storage_offset=rows.storage_offset(), device=rows.device)

    def __init__(self, rows: Tensor):
        self.rows = rows

    @classmethod
    def __torch_dispatch__(cls, function, types, inputs=(), kwargs=None):
        inputs, kwargs = tree_map_only(cls, lambda wrapped: wrapped.rows, (inputs, kwargs or {}))
        return tree_map_only(Tensor, cls, function(*inputs, **kwargs))

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        return (self.rows.to(torch.bfloat16),), None

    def fsdp_post_all_gather(self, gathered, metadata, param_dtype, *, out=None):
        (rows,) = gathered
        full = rows.to(param_dtype) if out is None else out.data.copy_(rows)
        rows.untyped_storage().resize_(0)  # FSDP would keep it as long as the weight, and allocates it again
        return full, (full,)


def cast_hook(model: nn.Module, modules: list[nn.Module]) -> Callable:
    """Return a hook that casts the weights of an FSDP group after they are gathered, inside its forward. A cast before
    that would be of shards; the gradient of a cast made elsewhere would come too late and be lost silently."""
    def cast(*_):
        for module in modules:
            module.cast_weight(model.compute_dtype)
    return cast
