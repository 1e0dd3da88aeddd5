"""Layers over tokens: Linears that cast their weights, norms."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spider.model.layers import (
    Linear,
    WideLinear,
    cast_weights_once,
    rms_norm,
    weight_of,
)
from stand_in_gpu import stand_in_gpu


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def relative_error(actual: Tensor, exact: Tensor) -> float:
    return float((actual.detach().double() - exact.detach()).norm() / exact.detach().norm())


# --------------------------------------------------------------------------------------------------
# Linears


def filled(layer: torch.nn.Linear) -> torch.nn.Linear:
    """Fill a layer's weight, and set the attributes of a model that cast_weights_once reads."""
    torch.nn.init.normal_(layer.weight, generator=generator())
    layer.casts_early = True
    layer.compute_dtype = torch.bfloat16
    return layer


def test_linear_computes_in_its_inputs_dtype_with_one_weight_cast():
    linear = filled(Linear(64, 8))
    x = torch.randn(50, 64)
    exact = F.linear(x, linear.weight)
    with cast_weights_once(linear):
        assert linear.cast.dtype == torch.bfloat16
        assert weight_of(linear, torch.bfloat16) is linear.cast
        assert torch.equal(linear(x), exact)  # uses the fp32 weight
        for dtype in (torch.bfloat16, torch.float64):
            assert torch.equal(linear(x.to(dtype)), F.linear(x.to(dtype), linear.weight.to(dtype)))
    with pytest.raises(KeyError), cast_weights_once(linear):
        raise KeyError  # like a failing step
    assert linear.cast is None


@pytest.mark.parametrize("casts_once", (False, True))
@pytest.mark.parametrize("device", (nullcontext, stand_in_gpu))
def test_wide_linear_multiplies_bf16_inputs_in_fp32(device, casts_once):
    """A bf16 weight would give an error of 1e-3."""
    linear = filled(WideLinear(64, 8, bias=True))
    torch.nn.init.normal_(linear.bias, generator=generator(1))
    x = torch.randn(50, 64).bfloat16().requires_grad_()
    upstream = torch.randn(50, 8)
    inputs = (x, linear.weight, linear.bias)
    with device(), cast_weights_once(linear) if casts_once else nullcontext():
        y = linear(x)
        (y * upstream).sum().backward()
        assert (linear.cast is not None) == (casts_once and device is stand_in_gpu)
    exact = x.double() @ linear.weight.double().T + linear.bias
    exact_grads = torch.autograd.grad(exact, inputs, upstream.double())
    assert relative_error(y, exact) < 1e-6
    for tensor, exact_grad in zip(inputs, exact_grads, strict=True):
        within = 2e-3 if tensor is x else 1e-6  # the gradient of x is bf16
        assert relative_error(tensor.grad, exact_grad.double()) < within


@pytest.mark.parametrize("device", (nullcontext, stand_in_gpu))
def test_rms_norm_and_its_gradient_follow_the_formula_with_large_eps(device):
    x = torch.randn(3, 8, dtype=torch.float64) / 32
    with device():
        y = rms_norm(x, 1e-3)
        assert torch.autograd.gradcheck(lambda x: rms_norm(x, 1e-3), x.requires_grad_())
    torch.testing.assert_close(y, x / (x.square().mean(1, keepdim=True) + 1e-3).sqrt())
