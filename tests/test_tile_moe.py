"""Routing and experts: all backends match one dense reference, forward and backward."""

import math
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tile_moe
from conftest import has_fp8
from stand_in_gpu import stand_in_gpu
from stand_in_kernels import INSTALLED, ROUTINGS, WIDTH, D, E, K, Kernels, N, kernels, routing
from tile_moe import ALIGNMENT, balance, moe_forward, route, sort_by_expert


class Operands(NamedTuple):
    """The arguments of moe_forward that get a gradient."""

    x: Tensor
    topk_weights: Tensor
    w_gate_up: Tensor
    w_down: Tensor


def operands(dtype: torch.dtype, device: str = "cpu", hidden: int = D) -> Operands:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * 0.5

    x = draw(N, hidden).to(dtype)
    topk_weights = draw(N, K).softmax(-1).float()
    w_gate_up = draw(E, hidden, 2 * WIDTH).to(dtype)
    w_down = draw(E, WIDTH, hidden).to(dtype)
    return Operands(*(t.to(device).requires_grad_() for t in (x, topk_weights, w_gate_up, w_down)))


def dense_reference(topk_idx: Tensor, tensors: Operands) -> Tensor:
    """Compute every expert on every token in float64, weighted by a one-hot routing matrix."""
    x, topk_weights, w_gate_up, w_down = (t.double() for t in tensors)
    gate, up = torch.einsum("nd,edf->enf", x, w_gate_up).chunk(2, dim=-1)
    every = torch.einsum("enf,efd->end", F.silu(gate) * up, w_down)
    weight = (F.one_hot(topk_idx, E) * topk_weights[..., None]).sum(1)  # [N, E]
    return torch.einsum("ne,end->nd", weight, every)


def check_close(ours: Tensor, exact: Tensor, tolerance: float):
    """Check the norm of the difference, relative to the norm of `exact`."""
    exact = exact.detach().double()
    assert (ours.detach().double() - exact).norm() <= tolerance * exact.norm()


def check_backend(
    backend: str,
    kind: str,
    dtype: torch.dtype,
    tolerance: float,
    device: str = "cpu",
    hidden: int = D,
    product=None,
):
    """Compare a backend's value and all its gradients with the reference."""
    tensors = operands(dtype, device, hidden)
    upstream = torch.randn(N, hidden, generator=torch.Generator().manual_seed(2)).to(device)
    topk_idx = routing(kind).to(device)
    y = moe_forward(tensors.x, topk_idx, *tensors[1:], backend, product)
    exact = dense_reference(topk_idx, tensors)
    assert y.dtype == dtype
    check_close(y, exact, tolerance)
    ours = torch.autograd.grad((y * upstream.to(dtype)).sum(), tensors)
    theirs = torch.autograd.grad((exact * upstream).sum(), tensors)
    for grad, exact_grad in zip(ours, theirs, strict=True):
        check_close(grad, exact_grad, tolerance)


EVERY_ROUTING = pytest.mark.parametrize("kind", ROUTINGS)
BOTH_PRECISIONS = pytest.mark.parametrize(
    "dtype,tolerance", ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)), ids=str
)


@EVERY_ROUTING
@BOTH_PRECISIONS
@pytest.mark.parametrize("backend", ("loop", "grouped", "tile"))
def test_backends_match_the_dense_reference_in_value_and_gradients(
    backend, kind, dtype, tolerance, kernels
):
    check_backend(backend, kind, dtype, tolerance)


@pytest.mark.gpu
@EVERY_ROUTING
@pytest.mark.parametrize(
    "backend", ("grouped", pytest.param("tile", marks=INSTALLED)), ids=("grouped", "tile")
)
def test_backends_match_the_dense_reference_on_a_gpu(backend, kind):
    check_backend(backend, kind, torch.bfloat16, 2e-2, "cuda", hidden=256)


@pytest.mark.gpu
@EVERY_ROUTING
def test_fp8_experts_match_the_dense_reference_on_a_gpu(kind):
    if not has_fp8(experts=True):
        pytest.skip("torch's grouped FP8 product needs sm_90 or sm_100")

    def product(slots, weights, end):
        return tile_moe.fp8_grouped_product(slots, weights.mT.contiguous().mT, end)

    check_backend("grouped", kind, torch.bfloat16, 0.1, "cuda", hidden=256, product=product)


@EVERY_ROUTING
@pytest.mark.parametrize("backend", ("loop", "grouped"))
def test_emulated_fp8_experts_match_the_reference_to_fp8_rounding(backend, kind):
    """e4m3 keeps 4 bits, an error of 3% in each of three products in a row. An error near zero
    would mean that nothing was rounded."""
    check_backend(backend, kind, torch.bfloat16, 0.1, product=tile_moe.fp8_grouped_product)
    with pytest.raises(AssertionError):
        check_backend(backend, kind, torch.float32, 0.005, product=tile_moe.fp8_grouped_product)


@pytest.mark.parametrize("device", (nullcontext, stand_in_gpu))
@BOTH_PRECISIONS
def test_single_decoded_token_matches_the_dense_reference(dtype, tolerance, device):
    topk_idx = routing("uneven")
    x, topk_weights, *weights = operands(dtype)
    with torch.no_grad(), device():
        for i in range(N):
            one = slice(i, i + 1)
            y = moe_forward(x[one], topk_idx[one], topk_weights[one], *weights, "grouped")
            assert y.dtype == dtype
            exact = dense_reference(topk_idx[one], Operands(x[one], topk_weights[one], *weights))
            check_close(y, exact, tolerance)


def test_slots_without_a_token_never_reach_a_result():
    def product(slots, weights, expert_end):
        out = tile_moe.grouped_product(slots, weights, expert_end)
        is_unused = torch.arange(len(out)) >= expert_end[-1]
        return torch.where(is_unused[:, None], torch.nan, out)

    check_backend("grouped", "uneven", torch.float32, 1e-6, product=product)


@EVERY_ROUTING
@pytest.mark.parametrize("backend", ("grouped", "tile"))
def test_every_expert_has_slots_and_tokens_get_slots_of_their_experts(backend, kind, kernels):
    """On sm_100 the weight gradient of a group without slots is uninitialized."""
    topk_idx = routing(kind)
    slots, source, end = sort_by_expert(topk_idx, E, backend)
    start = F.pad(end[:-1], (1, 0))
    assert (end > start).all()
    assert (end % ALIGNMENT == 0).all()
    assert end[-1] <= len(source)
    assert len(slots.unique()) == N * K
    assert (start[topk_idx] <= slots).all()
    assert (slots < end[topk_idx]).all()


@pytest.mark.parametrize("backend", ("loop", "grouped", "triton", "tile"))
@pytest.mark.parametrize("k", (1, 2, 3))
def test_routing_selects_with_the_bias_and_weights_by_probability(k, backend, kernels):
    """With k = 1 the weight is the probability itself, not normalized to 1."""
    score = torch.randn(8, E, requires_grad=True)
    topk_idx, weights = route(score, torch.tensor([10.0, 0, 0, 0, 0]), k, backend)
    assert (topk_idx == 0).any(1).all()
    chosen = score.softmax(-1).gather(1, topk_idx)
    expected = chosen if k == 1 else chosen / chosen.sum(1, True)
    torch.testing.assert_close(weights, expected)
    upstream = torch.arange(1, 1 + 8 * k).view(8, k)
    (grad,) = torch.autograd.grad((weights * upstream).sum(), score)
    (expected_grad,) = torch.autograd.grad((expected * upstream).sum(), score)
    torch.testing.assert_close(grad, expected_grad)


@pytest.mark.parametrize("backend", ("grouped", "tile"))
def test_balance_losses_and_counts_ignore_padding(backend, kernels):
    """Three routings at once; in the last, all tokens are padding."""
    score = torch.randn(3, 8, E)
    share = torch.tensor([[0.25] * 4 + [0.0] * 4, [0.1] * 8, [0.0] * 8])
    topk_idx = torch.stack([route(part, torch.zeros(E), K, "grouped")[0] for part in score])
    aux_loss, z_loss, count = balance(score, topk_idx, share, backend)
    expected_aux = torch.zeros(())
    expected_z = torch.zeros(())
    for i, tokens in ((0, 4), (1, 8)):
        weight = share[i].sum()
        expected_count = torch.bincount(topk_idx[i, :tokens].flatten(), minlength=E)
        f = expected_count * E / (tokens * K)
        prob = score[i, :tokens].softmax(-1)
        expected_aux += weight * (f * prob.mean(0)).sum()
        expected_z += weight * score[i, :tokens].logsumexp(-1).square().mean()
        assert torch.equal(count[i], expected_count.float())
    assert not count[2].any()
    torch.testing.assert_close(aux_loss, expected_aux)
    torch.testing.assert_close(z_loss, expected_z)


@pytest.mark.parametrize("backend", ("loop", "grouped", "tile"))
def test_nan_scores_give_valid_indices_and_nan_only_in_their_tokens(backend, kernels):
    assert (route(torch.full((3, 32), math.nan), torch.zeros(32), K, backend)[0] < 32).all()
    score = torch.randn(N, E)
    score[4] = math.nan
    score.requires_grad_()
    topk_idx, topk_weights = route(score, torch.zeros(E), K, backend)
    assert ((topk_idx >= 0) & (topk_idx < E)).all()
    aux_loss = balance(score[None], topk_idx[None], torch.full((1, N), 1 / N), backend).aux_loss
    assert aux_loss.isnan()
    x, _, w_gate_up, w_down = operands(torch.float32)
    y = moe_forward(x, topk_idx, topk_weights, w_gate_up, w_down, backend)
    assert y.isnan().any(1).nonzero().flatten().tolist() == [4]
    (y.sum() + aux_loss).backward()
    assert score.grad[4].isnan().all()


def test_deterministic_mode_counts_without_the_kernels_atomic_sums(kernels, monkeypatch):
    score = torch.randn(1, N, E)
    share = torch.full((1, N), 1 / N)
    topk_idx, _ = route(score[0], torch.zeros(E), K, "grouped")

    def counts(backend):
        return balance(score, topk_idx[None], share, backend).tokens_per_expert

    monkeypatch.setattr(Kernels, "aux_fi", staticmethod(lambda *args: torch.full((E,), math.nan)))
    assert counts("tile").isnan().all()
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert torch.equal(counts("tile"), counts("grouped"))
