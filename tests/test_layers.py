"""Layers over packed rows: Linears that cast their weights, norms, dropout, attention by padded
batches."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

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


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def relative_error(actual: Tensor, exact: Tensor) -> float:
    return float((actual.detach().double() - exact.detach()).norm() / exact.detach().norm())


# --------------------------------------------------------------------------------------------------
# Linears


def filled(layer: torch.nn.Linear) -> torch.nn.Linear:
    """Fill a layer's weight, and give it what cast_weights_once reads of a model."""
    torch.nn.init.normal_(layer.weight, generator=generator())
    layer.casts_early = True
    layer.compute_dtype = torch.bfloat16
    return layer


def test_a_linear_computes_in_its_inputs_dtype_with_a_weight_that_is_cast_once():
    linear = filled(Linear(64, 8))
    x = torch.randn(50, 64)
    exact = F.linear(x, linear.weight)
    with cast_weights_once(linear):
        assert linear.cast.dtype == torch.bfloat16
        assert weight_of(linear, torch.bfloat16) is linear.cast
        assert torch.equal(linear(x), exact)  # not by the cast weight
        for dtype in (torch.bfloat16, torch.float64):
            assert torch.equal(linear(x.to(dtype)), F.linear(x.to(dtype), linear.weight.to(dtype)))
    with pytest.raises(KeyError), cast_weights_once(linear):
        raise KeyError  # as a step that fails
    assert linear.cast is None


def test_a_wide_linear_computes_bf16_rows_in_fp32():
    """A weight in bf16 would be off by 1e-3."""
    linear = filled(WideLinear(64, 8))
    x = torch.randn(50, 64).bfloat16().requires_grad_()
    upstream = torch.randn(50, 8)
    with cast_weights_once(linear):
        y = linear(x)
    exact = x.double() @ linear.weight.double().T
    grad_weight, grad_x = torch.autograd.grad(y, (linear.weight, x), upstream)
    exact_grads = torch.autograd.grad(exact, (linear.weight, x), upstream.double())
    assert relative_error(y, exact) < 1e-6
    assert relative_error(grad_weight, exact_grads[0].double()) < 1e-6
    assert relative_error(grad_x, exact_grads[1].double()) < 5e-3  # of x's dtype


@pytest.mark.parametrize("columns", (1, 32))
def test_a_wide_product_of_bf16_and_fp32_is_as_exact_as_fp32_and_so_are_its_gradients(columns):
    """Numbers of all sizes. Beside float64, a single product in bf16 is off a thousand times as
    far."""
    numbers = generator()

    def draw(*shape: int) -> Tensor:
        size = torch.randn(shape, generator=numbers)
        return size * torch.randn(shape, generator=numbers).exp()

    x = draw(60, 256).bfloat16()
    weight = draw(columns, 256)
    upstream = draw(60, columns)

    def product_and_gradients(product, dtype: torch.dtype | None) -> tuple[Tensor, ...]:
        inputs = [t.clone() if dtype is None else t.to(dtype) for t in (x, weight)]
        inputs = [t.detach().requires_grad_() for t in inputs]
        y = product(*inputs)
        return y.detach(), *torch.autograd.grad(y, inputs, upstream.to(y.dtype))

    def wide_product(x: Tensor, weight: Tensor) -> Tensor:
        return WideProduct.apply(x, weight, bf16_terms(weight.detach()))

    results = product_and_gradients(wide_product, None)
    exact = product_and_gradients(F.linear, torch.float64)
    in_bf16 = product_and_gradients(F.linear, torch.bfloat16)
    assert [t.dtype for t in results] == [torch.float32, torch.bfloat16, torch.float32]
    for i in (0, 2):  # the product, and the gradient of the weight
        error = relative_error(results[i], exact[i])
        assert error < 3e-7 and relative_error(in_bf16[i], exact[i]) > 500 * error
    error = relative_error(results[1], exact[1])
    nearest = relative_error(exact[1].bfloat16(), exact[1])  # of numbers in bf16
    assert error < 2e-3 and error < 1.01 * nearest
    assert relative_error(in_bf16[1], exact[1]) > error


@pytest.mark.parametrize(
    "function", (lambda x, y: rms_norm(x, 1e-3), memory._Match.apply), ids=("norm", "match")
)
def test_hand_written_backward_passes_are_the_derivatives(function):
    x, y = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True).unbind()
    assert torch.autograd.gradcheck(function, (x, y))


# --------------------------------------------------------------------------------------------------
# Noise and dropout


def correlation(a: Tensor, b: Tensor) -> float:
    return abs(float(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]))


def test_noise_is_uniform_and_a_function_of_seed_and_row():
    whole = byte_noise(1000, 8, 16, CPU)
    parts = [byte_noise(1000 + i, 4, 16, CPU) for i in (0, 4)]
    assert torch.equal(whole, torch.cat(parts))
    for seed in (7, None):
        noise = uniform(byte_noise(seed, 200, 500, CPU))
        assert noise.min() > 0 and noise.max() < 1
        assert abs(noise.mean() - 1 / 2) < 0.005 and abs(noise.var() - 1 / 12) < 0.002
        assert correlation(noise[:, 1:], noise[:, :-1]) < 0.02
        assert correlation(noise[1:], noise[:-1]) < 0.02


def test_dropout_drops_its_share_of_each_row_and_column_and_keeps_the_mean():
    noise = byte_noise(3, 1, 2000, CPU)[0]
    x = torch.ones(2000, 400)
    y, other = (dropped(x, 0.25, noise, site) for site in (0, 1))
    assert set(y.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    zero = (y == 0).float()
    assert abs(zero.mean() - 0.25) < 0.002
    assert (zero.mean(0) - 0.25).abs().max() < 0.05  # five standard deviations
    assert (zero.mean(1) - 0.25).abs().max() < 0.11
    assert correlation(zero[:, 1:], zero[:, :-1]) < 0.01
    assert correlation(zero[1:], zero[:-1]) < 0.01
    assert correlation(zero, (other == 0).float()) < 0.01


@pytest.mark.parametrize(
    "changes", ({}, dict(boundaries="words", segment_offsets=3, core_loss_weight=0.2)), ids=str
)
def test_dropout_applies_in_training_at_four_sites_by_the_seeds_of_rows(changes, monkeypatch):
    model = awake(small_config(**changes))
    ids = text(4, 48, seed=8)

    @torch.no_grad()
    def nats(ids: Tensor, seed: int, dropout: float = 0.5) -> Tensor:
        return model(ids, ids, noise_seed=seed, dropout=dropout).nats_per_byte

    model.eval()
    assert nats(ids, 0) == nats(ids, 0, dropout=0.0)
    model.train()
    assert abs(nats(ids, 0) - nats(ids, 0, dropout=0.0)) > 1e-5
    assert nats(ids, 0) == nats(ids, 0)
    of_rows = torch.stack([nats(ids[i : i + 1], i) for i in range(4)])
    torch.testing.assert_close(nats(ids, 0), of_rows.mean())
    sites = []
    monkeypatch.setattr(
        spider_model, "dropped", lambda x, rate, noise, site: sites.append((site, rate)) or x
    )
    nats(ids, 0)
    # bytes, core's input and output, bytes
    assert sites == [(0, 0.1), (1, 0.5), (2, 0.5), (3, 0.1)]


# --------------------------------------------------------------------------------------------------
# Attention by padded batches

LENGTHS = (
    (1,),
    (5, 1, 1, 2, 0, 3),
    (16, 256, 0, 256) + (16,) * 20,
    (4,) * 100 + (130,) + (4,) * 100,
    (600, 1, 30, 17, 0, 16, 200, 513),
    (1,) * 50,
    (96, 80, 70, 33),
)


def attend_alone(qkv: Tensor, window: int) -> Tensor:
    """Attend in one document [n, 2, 3, 8] by a mask over all its rows."""
    row = torch.arange(len(qkv))
    ahead = row - row[:, None]
    mask = (ahead <= 0) & (ahead > -(window or len(qkv)))
    q, k, v = qkv.permute(2, 1, 0, 3)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1)


@pytest.mark.parametrize(
    "dtype,atol", ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.03)), ids=str
)
@pytest.mark.parametrize("window", (0, 1, 16, 24))
@pytest.mark.parametrize(
    "lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)} documents up to {max(lengths)}"
)
def test_documents_attend_together_as_alone_in_value_and_gradient(lengths, window, dtype, atol):
    rows = sum(lengths)
    cu_seqlens = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)
    packing = Packing.build(cu_seqlens, rows, max(lengths), small_config(), dtype, window)
    qkv = torch.randn(rows, 2, 3, 8, generator=generator()).to(dtype).requires_grad_()
    upstream = torch.randn(rows, 16, generator=generator(1)).to(dtype)
    out = attend_padded(qkv, packing)
    (grad,) = torch.autograd.grad(out, qkv, upstream)
    alone = qkv.detach().double().requires_grad_()
    expected = [attend_alone(document, window) for document in alone.split(lengths)]
    expected = torch.cat(expected).flatten(1)
    (expected_grad,) = torch.autograd.grad(expected, alone, upstream.double())
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=0, atol=4 * atol)
