"""Routing and experts: three backends, one result."""

import importlib.util

import pytest
import torch
import torch.nn.functional as F

import tile_moe
from tile_moe import BackendError, moe_forward, resolve_backend, route

N, K, E, D, WIDTH = 37, 2, 5, 32, 16


def routing(kind: str) -> torch.Tensor:
    """topk_idx [N, K] in which experts receive tokens unevenly, none, or all."""
    generator = torch.Generator().manual_seed(0)
    if kind == "uneven":
        return torch.rand(N, E, generator=generator).topk(K).indices
    if kind == "two experts take all":
        return torch.tensor([[3, 1]]).repeat(N, 1)
    return torch.rand(N, E - 1, generator=generator).topk(K).indices                         # one expert gets nothing


def inputs(dtype):
    generator = torch.Generator().manual_seed(1)
    shapes = ((N, D), (N, K), (E, D, WIDTH), (E, D, WIDTH), (E, WIDTH, D))
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) * 0.5 for shape in shapes]
    tensors[1] = tensors[1].softmax(-1)
    return [t.to(torch.float32 if i == 1 else dtype).requires_grad_() for i, t in enumerate(tensors)]


def dense_reference(x, topk_idx, topk_weights, w_gate, w_up, w_down):
    """Every expert on every token in float64, weighted by a one-hot routing matrix."""
    x, topk_weights, w_gate, w_up, w_down = (t.double() for t in (x, topk_weights, w_gate, w_up, w_down))
    every = torch.einsum("enf,efd->end", F.silu(torch.einsum("nd,edf->enf", x, w_gate))
                         * torch.einsum("nd,edf->enf", x, w_up), w_down)
    weight = (F.one_hot(topk_idx, E) * topk_weights[..., None]).sum(1)                       # [N, E]
    return torch.einsum("ne,end->nd", weight, every)


def check_backend(backend: str, kind: str, dtype, tolerance: float, device="cpu", product=tile_moe.grouped_product):
    """Value and every gradient of a backend against the float64 reference."""
    tensors = [t.detach().to(device).requires_grad_() for t in inputs(dtype)]
    topk_idx = routing(kind).to(device)
    upstream = torch.randn(N, D, generator=torch.Generator().manual_seed(2)).to(device)
    x, topk_weights, *weights = tensors
    y = moe_forward(x, topk_idx, topk_weights, *weights, backend, product)
    expected = dense_reference(x, topk_idx, topk_weights, *weights)
    ours = (y, *torch.autograd.grad((y * upstream.to(y.dtype)).sum(), tensors))
    theirs = (expected, *torch.autograd.grad((expected * upstream).sum(), tensors))
    assert y.dtype == dtype
    for a, b in zip(ours, theirs):
        assert (a.double() - b.double()).norm() <= tolerance * b.double().norm()


KINDS = pytest.mark.parametrize("kind", ("uneven", "two experts take all", "one expert gets nothing"))


@KINDS
@pytest.mark.parametrize("backend", ("loop", "grouped"))
@pytest.mark.parametrize("dtype,tolerance", ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)))
def test_backends_equal_the_dense_reference_in_value_and_gradient(backend, kind, dtype, tolerance):
    check_backend(backend, kind, dtype, tolerance)


@pytest.mark.parametrize("backend", ("loop", "grouped"))
def test_gate_and_up_weights_side_by_side_change_nothing(backend):
    tensors, topk_idx = inputs(torch.float32), routing("uneven")
    x, topk_weights, w_gate, w_up, w_down = tensors
    results = []
    for weights in ((w_gate, w_up), (torch.cat((w_gate, w_up), dim=-1), None)):
        y = moe_forward(x, topk_idx, topk_weights, *weights, w_down, backend)
        results.append((y, *torch.autograd.grad(y.square().sum(), tensors)))
    for separate, together in zip(*results):
        torch.testing.assert_close(together, separate)


@pytest.mark.parametrize("joined", (False, True))
@pytest.mark.parametrize("dtype,tolerance", ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)))
def test_a_token_alone_equals_the_dense_reference(joined, dtype, tolerance):
    topk_idx = routing("uneven")
    x, topk_weights, w_gate, w_up, w_down = (t.detach() for t in inputs(dtype))
    expected = dense_reference(x, topk_idx, topk_weights, w_gate, w_up, w_down)
    gate_up = (torch.cat((w_gate, w_up), dim=-1), None) if joined else (w_gate, w_up)
    with torch.no_grad():
        y = torch.cat([moe_forward(x[i:i + 1], topk_idx[i:i + 1], topk_weights[i:i + 1], *gate_up, w_down, "grouped")
                       for i in range(N)])
    assert y.dtype == dtype and (y.double() - expected).norm() <= tolerance * expected.norm()


@KINDS
@pytest.mark.parametrize("backend", ("loop", "grouped"))
def test_experts_in_emulated_fp8_follow_the_reference_within_its_rounding(backend, kind):
    """e4m3 keeps 4 bits: 3% a product, three in a row; and rounding there must be, else nothing was emulated."""
    check_backend(backend, kind, torch.bfloat16, 0.1, product=tile_moe.fp8_grouped_product)
    with pytest.raises(AssertionError):
        check_backend(backend, kind, torch.float32, 0.005, product=tile_moe.fp8_grouped_product)


@pytest.mark.gpu
@KINDS
@pytest.mark.parametrize("backend", ("loop", "grouped"))
def test_experts_in_fp8_follow_the_reference_on_a_gpu(backend, kind, monkeypatch):
    monkeypatch.setattr("test_tile_moe.D", 256)
    column_major = tile_moe.fp8_grouped_product
    check_backend(backend, kind, torch.bfloat16, 0.1, "cuda",
                  lambda rows, w, end: column_major(rows, w.mT.contiguous().mT, end))


@KINDS
def test_the_tile_path_equals_the_reference_with_plain_torch_operations(kind, monkeypatch):
    """What `tile` adds to `grouped` is where its six operations come from."""
    monkeypatch.setattr(tile_moe, "operations", lambda backend: tile_moe.TORCH_OPERATIONS)
    check_backend("tile", kind, torch.float32, 1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("tile_kernels") is None, reason='needs pip install -e ".[tile]"')
def test_tile_kernels_equal_the_reference_on_a_gpu(monkeypatch):
    monkeypatch.setattr("test_tile_moe.D", 256)
    for kind in ("uneven", "two experts take all", "one expert gets nothing"):
        check_backend("tile", kind, torch.bfloat16, 2e-2, "cuda")


@pytest.mark.gpu
@KINDS
def test_grouped_equals_the_reference_on_a_gpu(kind):
    check_backend("grouped", kind, torch.bfloat16, 2e-2, "cuda")


def test_an_expert_that_is_skipped_is_noticed():
    def product(rows, weights, expert_end):
        return F.grouped_mm(rows, weights * (torch.arange(E) != 3)[:, None, None], offs=expert_end)
    with pytest.raises(AssertionError):
        check_backend("grouped", "two experts take all", torch.float32, 1e-6, product=product)


def test_rows_that_no_token_owns_never_reach_a_result():
    def product(rows, weights, expert_end):
        out = tile_moe.grouped_product(rows, weights, expert_end)
        tail = torch.arange(len(out)) >= expert_end[-1]
        return torch.where(tail[:, None], torch.nan, out)
    check_backend("grouped", "uneven", torch.float32, 1e-6, product=product)


def test_the_mapping_places_every_slot_once_with_aligned_groups():
    topk_idx = routing("one expert gets nothing")
    bound = (topk_idx.numel() + 15 * E) // 16 * 16
    to_expert, to_token, to_slot, slot_to_pos, start, end, count, _ = tile_moe.TORCH_OPERATIONS.get_fused_mapping(
        topk_idx, E, bound, 16)
    assert sorted(to_slot[to_slot >= 0].tolist()) == list(range(N * K))
    for slot, position in enumerate(slot_to_pos.flatten().tolist()):
        assert to_slot[position] == slot and to_token[position] == slot // K
        expert = topk_idx.flatten()[slot]
        assert to_expert[position] == expert and start[expert] <= position < end[expert]
    assert (count % 16 == 0).all() and torch.equal(end, count.cumsum(0).int()) and end[-1] <= bound


def test_routing_weighs_by_probability_selects_by_bias_and_skips_rows_that_fill_up():
    score = torch.randn(8, E, requires_grad=True)
    bias = torch.tensor([10.0, 0, 0, 0, 0])
    share = torch.tensor([1 / 6] * 6 + [0.0] * 2)
    out = route(score, bias, K, share, "grouped")
    prob = score.softmax(-1)
    assert (out.topk_idx == 0).any(1).all()
    chosen = prob.gather(1, out.topk_idx)
    torch.testing.assert_close(out.topk_weights, chosen / chosen.sum(1, True))
    counts = torch.bincount(out.topk_idx[:6].flatten(), minlength=E).float()
    torch.testing.assert_close(out.load, counts * E / (6 * K))
    torch.testing.assert_close(out.aux_loss, (counts * E / (6 * K) * prob[:6].mean(0)).sum())
    torch.testing.assert_close(out.z_loss, score[:6].logsumexp(-1).square().mean())
    grad, = torch.autograd.grad((out.topk_weights * torch.arange(16).view(8, 2)).sum(), score, retain_graph=True)
    chosen = prob.gather(1, out.topk_idx)
    expected, = torch.autograd.grad((chosen / chosen.sum(1, True) * torch.arange(16).view(8, 2)).sum(), score)
    torch.testing.assert_close(grad, expected)
    kept = route(-score, bias, K, share, "grouped", out.topk_idx)
    assert torch.equal(kept.topk_idx, out.topk_idx)


def test_tile_that_cannot_run_names_the_remedy_and_auto_takes_grouped(monkeypatch):
    cpu = torch.device("cpu")
    assert resolve_backend("auto", cpu, 256) == "grouped" and resolve_backend("loop", cpu, 256) == "loop"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match=r"pip install -e \"\.\[tile\]\""):
        resolve_backend("tile", cpu, 256)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.raises(BackendError, match="sm_90"):
        resolve_backend("tile", cpu, 256)
