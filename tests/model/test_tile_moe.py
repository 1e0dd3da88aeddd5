"""Routing and experts: three backends, one result."""

import math

import pytest
import torch
import torch.nn.functional as F
from stand_in_kernels import INSTALLED, WIDTH, D, E, K, Kernels, N, kernels, routing  # noqa: F401

import tile_moe
from conftest import awake, small_config, text
from spider.training.batches import Batch
from spider.training.optimizers import Optimizers
from spider.training.plan import OptimizerSettings
from tile_moe import moe_forward, route
from train import step_alone


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
def test_the_tile_path_equals_the_reference_with_operations_that_do_as_the_kernels(kind, kernels):
    check_backend("tile", kind, torch.float32, 1e-6)


@pytest.mark.gpu
@INSTALLED
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


@KINDS
@pytest.mark.parametrize("backend", ("grouped", "tile"))
def test_every_expert_gets_rows(backend, kind, kernels):
    """On sm_100 the weight gradient of a group without rows is uninitialized."""
    rows = tile_moe.assign_rows(routing(kind), E, backend)
    assert (rows.expert_end.diff(prepend=rows.expert_end.new_zeros(1)) > 0).all()
    assert rows.expert_end[-1] <= len(rows.source)


def test_the_mapping_assigns_every_slot_once_with_aligned_groups():
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
    topk_idx, weights = route(score, bias, K, "grouped")
    prob = score.softmax(-1)
    assert (topk_idx == 0).any(1).all()
    chosen = prob.gather(1, topk_idx)
    torch.testing.assert_close(weights, chosen / chosen.sum(1, True))
    aux_loss, z_loss, load = tile_moe.balance(score[None], topk_idx[None], share[None], "grouped")
    counts = torch.bincount(topk_idx[:6].flatten(), minlength=E).float()
    torch.testing.assert_close(load[0], counts * E / (6 * K))
    torch.testing.assert_close(aux_loss, (counts * E / (6 * K) * prob[:6].mean(0)).sum())
    torch.testing.assert_close(z_loss, score[:6].logsumexp(-1).square().mean())
    grad, = torch.autograd.grad((weights * torch.arange(16).view(8, 2)).sum(), score, retain_graph=True)
    chosen = prob.gather(1, topk_idx)
    expected, = torch.autograd.grad((chosen / chosen.sum(1, True) * torch.arange(16).view(8, 2)).sum(), score)
    torch.testing.assert_close(grad, expected)
    kept, _ = route(-score, bias, K, "grouped", topk_idx)
    assert torch.equal(kept, topk_idx)


@pytest.mark.parametrize("backend", ("grouped", "tile"))
def test_decisions_balanced_together_are_those_balanced_apart(backend, monkeypatch):
    """With rows that fill up, and a decision in which all rows do."""
    monkeypatch.setattr(tile_moe, "operations", lambda backend: tile_moe.TORCH_OPERATIONS)
    score, bias = torch.randn(3, 8, E, requires_grad=True), torch.zeros(E)
    share = torch.tensor([[0.25] * 4 + [0.0] * 4, [0.1] * 8, [0.0] * 8])
    topk_idx = torch.stack([route(part, bias, K, "grouped")[0] for part in score])
    together = tile_moe.balance(score, topk_idx, share, backend)
    apart = [tile_moe.balance(score[i:i + 1], topk_idx[i:i + 1], share[i:i + 1], "grouped") for i in range(3)]
    for a, b in zip(together, (*(sum(part[i] for part in apart) for i in (0, 1)), torch.cat([p[2] for p in apart]))):
        torch.testing.assert_close(a, b)
    even = share[0] / share[0].sum()      # of the first one by its formula
    f = torch.bincount(topk_idx[0, :4].flatten(), minlength=E) * E / (4 * K)
    torch.testing.assert_close(apart[0][0], (f * (even @ score[0].softmax(-1))).sum() * share[0].sum())


@pytest.mark.parametrize("backend", ("loop", "grouped", "tile"))
def test_a_slot_without_an_expert_is_skipped(backend, kernels):
    """Value and gradients are those of any expert with weight zero; whole tokens may have none."""
    x, topk_weights, *weights = inputs(torch.float32)
    topk_idx = routing("uneven")
    topk_idx[3, 1], topk_idx[5], topk_idx[-1, 0] = -1, -1, -1
    masked = topk_weights * (topk_idx >= 0)
    y = moe_forward(x, topk_idx, topk_weights, *weights, backend)
    expected = dense_reference(x, topk_idx.clamp_min(0), masked, *weights)
    upstream = torch.randn(N, D, generator=torch.Generator().manual_seed(2))
    ours, theirs = (torch.autograd.grad((out * upstream).sum(), [x, topk_weights, *weights])
                    for out in (y, expected))
    for a, b in zip((y, *ours), (expected, *theirs)):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        alone = moe_forward(x[3:4], topk_idx[3:4], topk_weights[3:4], *weights, backend)
    torch.testing.assert_close(alone.double(), expected[3:4], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ("loop", "grouped", "tile"))
def test_a_row_of_nan_scores_gives_nan_where_it_belongs_and_indices_that_exist(backend, kernels):
    nan = torch.full((3, 32), math.nan)
    assert (Kernels.topk_gate(nan, K) == 2 ** 31 - 1).all() and (Kernels.topk_gate(nan[:, :20].clone(), K) == 20).any()
    assert (route(nan, torch.zeros(32), K, backend)[0] < 32).all()
    score, (x, _, *weights) = torch.randn(N, E), inputs(torch.float32)
    score[4], score[9, 2] = math.nan, math.inf
    score.requires_grad_()
    topk_idx, topk_weights = route(score, torch.zeros(E), K, backend)
    aux_loss, *_ = tile_moe.balance(score[None], topk_idx[None], torch.full((1, N), 1 / N), backend)
    assert ((topk_idx >= 0) & (topk_idx < E)).all()
    y = moe_forward(x, topk_idx, topk_weights, *weights, backend)
    spoiled = {*y.isnan().any(1).nonzero().flatten().tolist()}  # of an infinite score the expert may not be chosen
    assert 4 in spoiled and spoiled <= {4, 9} and aux_loss.isnan()
    (y.sum() + aux_loss).backward()
    assert score.grad[4].isnan().all()


def test_nan_scores_skip_the_step_and_leave_the_run_alive(kernels):
    model = awake(small_config())
    model.set_backend("tile")
    optimizers, ids = Optimizers(model, OptimizerSettings("adamw")), text(2, 32)
    step = lambda: step_alone(model, optimizers, [Batch.of(ids, ids, 0)], 2)
    router = model.core.layers[0].moe.router.weight
    whole = router.detach().clone()
    router.data[1] = math.nan
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert step()["skipped"]
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name], rtol=0, atol=0, equal_nan=True, msg=name)
    router.data.copy_(whole)
    assert not step()["skipped"]


def test_under_deterministic_the_load_is_counted_not_summed_in_any_order(kernels, monkeypatch):
    """TileKernels' aux_fi adds floats atomically; nothing else of theirs depends on the order of threads."""
    score, share = torch.randn(1, N, E), torch.full((1, N), 1 / N)
    topk_idx, _ = route(score[0], torch.zeros(E), K, "grouped")

    def load(backend):
        return tile_moe.balance(score, topk_idx[None], share, backend)[2]
    monkeypatch.setattr(Kernels, "aux_fi", staticmethod(lambda *args: torch.full((E,), math.nan)))
    assert load("tile").isnan().all()
    torch.use_deterministic_algorithms(True)
    try:
        counted = load("tile")
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(counted, load("grouped"))
