"""Layers over packed rows: Linears that cast their weights, norms, dropout, attention by padded
batches."""

import pytest
import torch
import torch.nn.functional as F

import spider_model
from conftest import awake, small_config, text
from spider import memory
from spider.attention import attend_padded
from spider.layers import (
    Linear,
    WideLinear,
    WideProduct,
    bf16_terms,
    cast_weights_once,
    rms_norm,
    weight_of,
)
from spider.noise import byte_noise, dropped, uniform
from spider.packing import Packing

CPU = torch.device("cpu")


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


@pytest.mark.parametrize(
    "function", (lambda x, y: rms_norm(x, 1e-3), memory._Match.apply), ids=("norm", "match")
)
def test_hand_written_backward_passes_are_the_derivatives(function):
    x, y = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True).unbind()
    assert torch.autograd.gradcheck(function, (x, y))


def correlation(a, b):
    return abs(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1])


def test_noise_is_uniform_and_a_function_of_seed_and_row():
    whole, parts = byte_noise(1000, 8, 16, CPU), [byte_noise(1000 + i, 4, 16, CPU) for i in (0, 4)]
    assert torch.equal(whole, torch.cat(parts))
    for seed in (7, None):
        noise = uniform(byte_noise(seed, 200, 500, CPU))
        assert noise.min() > 0 and noise.max() < 1
        assert abs(noise.mean() - 1 / 2) < 0.005 and abs(noise.var() - 1 / 12) < 0.002
        assert (
            correlation(noise[:, 1:], noise[:, :-1]) < 0.02
            and correlation(noise[1:], noise[:-1]) < 0.02
        )


def test_dropout_drops_its_share_of_each_row_and_column_and_keeps_the_mean():
    noise, x = byte_noise(3, 1, 2000, CPU)[0], torch.ones(2000, 400)
    first, other = (dropped(x, 0.25, noise, site) for site in (0, 1))
    assert set(first.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    out = (first == 0).float()
    assert abs(out.mean() - 0.25) < 0.002
    # five sigma
    assert (out.mean(0) - 0.25).abs().max() < 0.05 and (out.mean(1) - 0.25).abs().max() < 0.11
    for a, b in ((out[:, 1:], out[:, :-1]), (out[1:], out[:-1]), (out, (other == 0).float())):
        assert correlation(a, b) < 0.01


@pytest.mark.parametrize(
    "changes", ({}, dict(boundaries="words", segment_offsets=3, core_loss_weight=0.2)), ids=str
)
def test_dropout_applies_in_training_at_four_sites_by_the_seeds_of_rows(changes, monkeypatch):
    ids, model = text(4, 48, seed=8), awake(small_config(**changes))

    def nats(ids, seed):
        return model(ids, ids, noise_seed=seed).nats_per_byte

    with torch.no_grad():
        plain = nats(ids, 0)
        evaluated, model.dropout = nats(ids, 0) if model.eval() else None, 0.5
        assert nats(ids, 0) == evaluated
        model.train()
        assert abs(nats(ids, 0) - plain) > 1e-5 and nats(ids, 0) == nats(ids, 0)
        torch.testing.assert_close(
            nats(ids, 0), torch.stack([nats(ids[i : i + 1], i) for i in range(4)]).mean()
        )
        sites = []
        monkeypatch.setattr(
            spider_model, "dropped", lambda x, rate, noise, site: sites.append((site, rate)) or x
        )
        nats(ids, 0)
    # bytes, core's input and output, bytes
    assert sites == [(0, 0.1), (1, 0.5), (2, 0.5), (3, 0.1)]


LENGTHS = (
    (1,),
    (5, 1, 1, 2, 0, 3),
    (16, 256, 0, 256) + (16,) * 20,
    (4,) * 100 + (130,) + (4,) * 100,
    (600, 1, 30, 17, 0, 16, 200, 513),
    (1,) * 50,
    (96, 80, 70, 33),
)


def attention_inputs(lengths, dtype, window=0) -> tuple[torch.Tensor, torch.Tensor, Packing]:
    """Return qkv [rows, 2, 3, 8] with a gradient, cu_seqlens and packing of documents of these
    lengths."""
    cu_seqlens = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)
    rows = int(cu_seqlens[-1])
    qkv = (
        torch.randn(rows, 2, 3, 8, generator=torch.Generator().manual_seed(0))
        .to(dtype)
        .requires_grad_()
    )
    return (
        qkv,
        cu_seqlens,
        Packing.build(cu_seqlens, rows, max(lengths), small_config(), dtype, window),
    )


def attend_alone(qkv, window):
    """Attend in one document [n, 2, 3, 8] by a mask over all its rows."""
    ahead = torch.arange(len(qkv)) - torch.arange(len(qkv))[:, None]
    mask = (ahead <= 0) & (ahead > -(window or len(qkv)))
    return F.scaled_dot_product_attention(*qkv.permute(2, 1, 0, 3), attn_mask=mask).transpose(0, 1)


@pytest.mark.parametrize(
    "dtype,atol", ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.03)), ids=str
)
@pytest.mark.parametrize("window", (0, 1, 16, 24))
@pytest.mark.parametrize(
    "lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)} documents up to {max(lengths)}"
)
def test_documents_attend_together_as_alone_in_value_and_gradient(lengths, window, dtype, atol):
    qkv, cu_seqlens, packing = attention_inputs(lengths, dtype, window)
    upstream = torch.randn(len(qkv), 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    out = attend_padded(qkv, packing)
    (grad,) = torch.autograd.grad(out, qkv, upstream)
    alone = qkv.detach().double().requires_grad_()
    expected = torch.cat(
        [attend_alone(part, window) for part in alone.split(cu_seqlens.diff().tolist())]
    ).flatten(1)
    (expected_grad,) = torch.autograd.grad(expected, alone, upstream.double())
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=0, atol=4 * atol)


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
