"""Casts of weights."""

import torch

from spider.model import casting


def test_products_of_rows_in_bf16_with_a_weight_in_fp32_are_those_of_fp32_in_value_and_gradient():
    """A weight in bf16 alone would be off by 1e-3."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 64, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(8, 64, generator=generator, requires_grad=True)
    upstream = torch.randn(50, 8, generator=generator)
    ours = casting._Wide.apply(x, weight, casting.halves(weight.detach(), 0))
    theirs = x.double() @ weight.double().T
    for a, b, tolerance in ((ours, theirs, 1e-5), *zip(torch.autograd.grad(ours, (weight, x), upstream),
                                                       torch.autograd.grad(theirs, (weight, x), upstream.double()),
                                                       (1e-5, 5e-3))):
        assert (a.double() - b.double()).norm() < tolerance * b.double().norm()
