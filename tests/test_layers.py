"""Layers over rows: Linears that cast their weights, norms."""

import pytest
import torch
import torch.nn.functional as F

from spider.layers import (
    Linear,
    WideLinear,
    WideProduct,
    bf16_terms,
    cast_weights_once,
    rms_norm,
    weight_of,
)


def filled(layer: torch.nn.Linear) -> torch.nn.Linear:
    torch.nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(0))
    layer.casts_early, layer.compute_dtype = True, torch.bfloat16
    return layer


def test_a_linear_computes_in_its_inputs_dtype_with_a_weight_that_is_cast_once():
    linear, x = filled(Linear(64, 8)), torch.randn(50, 64)
    exact = F.linear(x, linear.weight)
    with cast_weights_once(linear):
        assert (
            weight_of(linear, torch.bfloat16) is linear.cast and linear.cast.dtype == torch.bfloat16
        )
        assert torch.equal(linear(x), exact)  # not by the cast weight
        for dtype in (torch.bfloat16, torch.float64):
            assert torch.equal(linear(x.to(dtype)), F.linear(x.to(dtype), linear.weight.to(dtype)))
    with pytest.raises(KeyError), cast_weights_once(linear):
        raise KeyError  # as a step that fails
    assert linear.cast is None


def test_a_wide_linear_computes_bf16_rows_in_fp32():
    """A weight in bf16 would be off by 1e-3."""
    wide, x = filled(WideLinear(64, 8)), torch.randn(50, 64).bfloat16().requires_grad_()
    upstream = torch.randn(50, 8)
    with cast_weights_once(wide):
        ours, theirs = wide(x), x.double() @ wide.weight.double().T
    grads = (torch.autograd.grad(y, (wide.weight, x), upstream.to(y.dtype)) for y in (ours, theirs))
    for a, b, tolerance in ((ours, theirs, 1e-6), *zip(*grads, (1e-6, 5e-3), strict=True)):
        assert (a.double() - b.double()).norm() < tolerance * b.double().norm()


def test_the_norms_hand_written_backward_pass_is_the_derivative():
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rms_norm(x, 1e-3), x)


@pytest.mark.parametrize("columns", (1, 32))
def test_a_wide_product_of_bf16_and_fp32_is_as_exact_as_fp32_and_so_are_its_gradients(columns):
    """Numbers of all sizes; beside float64, a single product in bf16 is off a thousand times as
    far."""
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (
        torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()
        for shape in ((60, 256), (columns, 256), (60, columns))
    )
    x, results = x.bfloat16(), []

    def wide_product(x, weight):
        return WideProduct.apply(x, weight, bf16_terms(weight.detach()))

    for product, cast in (
        (wide_product, torch.Tensor.clone),
        (F.linear, torch.Tensor.double),
        (F.linear, torch.Tensor.bfloat16),
    ):
        inputs = [cast(t).requires_grad_() for t in (x, weight)]
        y = product(*inputs)
        results.append((y.detach(), *torch.autograd.grad(y, inputs, cast(grad))))
    (y, grad_x, grad_weight), exact, rounded = results
    assert (y.dtype, grad_x.dtype, grad_weight.dtype) == (
        torch.float32,
        torch.bfloat16,
        torch.float32,
    )
    for ours, true, bf16, most in zip(
        (y, grad_x, grad_weight), exact, rounded, (3e-7, 2e-3, 3e-7), strict=True
    ):
        off = float((ours.double() - true).norm() / true.norm())
        assert off < most and float((bf16.double() - true).norm() / true.norm()) > (
            500 * off if most < 1e-6 else off
        )
    nearest = (exact[1].bfloat16().double() - exact[1]).norm()
    assert (grad_x.double() - exact[1]).norm() < 1.01 * nearest  # of numbers in bf16
