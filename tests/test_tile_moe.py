"""Routing and experts: all backends equal one dense reference, forward and backward."""

import math

import pytest
import torch
import torch.nn.functional as F

import tile_moe
from conftest import has_fp8
from stand_in_kernels import INSTALLED, ROUTINGS, WIDTH, D, E, K, Kernels, N, kernels, routing
from tile_moe import ALIGNMENT, assign_rows, balance, moe_forward, route


def inputs(dtype):
    """Return x, topk_weights, w_gate, w_up and w_down with gradients."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((N, D), (N, K), (E, D, WIDTH), (E, D, WIDTH), (E, WIDTH, D))
    tensors = [
        torch.randn(shape, generator=generator, dtype=torch.float64) * 0.5 for shape in shapes
    ]
    tensors[1] = tensors[1].softmax(-1)
    return [
        t.to(torch.float32 if i == 1 else dtype).requires_grad_() for i, t in enumerate(tensors)
    ]


def dense_reference(x, topk_idx, topk_weights, w_gate, w_up, w_down):
    """Compute every expert on every token in float64, weighted by a one-hot routing matrix."""
    x, topk_weights, w_gate, w_up, w_down = (
        t.double() for t in (x, topk_weights, w_gate, w_up, w_down)
    )
    every = torch.einsum(
        "enf,efd->end",
        F.silu(torch.einsum("nd,edf->enf", x, w_gate)) * torch.einsum("nd,edf->enf", x, w_up),
        w_down,
    )
    weight = (F.one_hot(topk_idx, E) * topk_weights[..., None]).sum(1)  # [N, E]
    return torch.einsum("ne,end->nd", weight, every)


def check_backend(
    backend: str,
    kind: str,
    dtype,
    tolerance: float,
    device="cpu",
    product=tile_moe.grouped_product,
    dropped=(),
    joined=False,
):
    """Compare value and every gradient of a backend with the reference. `dropped`: slots without an
    expert; joined: gate and up weights are concatenated."""
    tensors = [t.detach().to(device).requires_grad_() for t in inputs(dtype)]
    topk_idx, upstream = (
        routing(kind),
        torch.randn(N, D, generator=torch.Generator().manual_seed(2)).to(device),
    )
    for slot in dropped:
        topk_idx[slot] = -1
    topk_idx, (x, topk_weights, w_gate, w_up, w_down) = topk_idx.to(device), tensors
    w = (torch.cat((w_gate, w_up), dim=-1), None) if joined else (w_gate, w_up)
    y = moe_forward(x, topk_idx, topk_weights, *w, w_down, backend, product)
    expected = dense_reference(
        x, topk_idx.clamp_min(0), topk_weights * (topk_idx >= 0), w_gate, w_up, w_down
    )
    ours = (y, *torch.autograd.grad((y * upstream.to(y.dtype)).sum(), tensors))
    theirs = (expected, *torch.autograd.grad((expected * upstream).sum(), tensors))
    assert y.dtype == dtype
    for a, b in zip(ours, theirs, strict=True):
        assert (a.double() - b.double()).norm() <= tolerance * b.double().norm()


EVERY_ROUTING = pytest.mark.parametrize("kind", ROUTINGS)


@EVERY_ROUTING
@pytest.mark.parametrize("backend", ("loop", "grouped", "tile"))
@pytest.mark.parametrize(
    "dtype,tolerance", ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)), ids=str
)
def test_backends_equal_the_dense_reference_in_value_and_gradient(
    backend, kind, dtype, tolerance, kernels
):
    check_backend(backend, kind, dtype, tolerance)
    check_backend(backend, kind, dtype, tolerance, joined=True)
    check_backend(backend, kind, dtype, tolerance, dropped=((3, 1), 5, (-1, 0)))


@pytest.mark.gpu
@EVERY_ROUTING
@pytest.mark.parametrize(
    "backend, fp8",
    (
        ("grouped", False),
        pytest.param("tile", False, marks=INSTALLED),
        ("loop", True),
        ("grouped", True),
    ),
)
def test_backends_equal_the_dense_reference_on_a_gpu(backend, fp8, kind, monkeypatch):
    if fp8 and not has_fp8(experts=True):
        pytest.skip("torch's grouped FP8 product needs sm_90 or sm_100")
    monkeypatch.setattr("test_tile_moe.D", 256)

    def fp8_product(rows, weights, end):
        return tile_moe.fp8_grouped_product(rows, weights.mT.contiguous().mT, end)  # column-major

    check_backend(
        backend,
        kind,
        torch.bfloat16,
        0.1 if fp8 else 2e-2,
        "cuda",
        fp8_product if fp8 else tile_moe.grouped_product,
    )


@EVERY_ROUTING
@pytest.mark.parametrize("backend", ("loop", "grouped"))
def test_experts_in_emulated_fp8_equal_the_reference_within_its_rounding(backend, kind):
    """e4m3 keeps 4 bits: 3% a product, three in a row. Without rounding nothing would be
    emulated."""
    check_backend(backend, kind, torch.bfloat16, 0.1, product=tile_moe.fp8_grouped_product)
    with pytest.raises(AssertionError):
        check_backend(backend, kind, torch.float32, 0.005, product=tile_moe.fp8_grouped_product)


@pytest.mark.parametrize("joined", (False, True))
@pytest.mark.parametrize(
    "dtype,tolerance", ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)), ids=str
)
def test_a_single_token_in_decoding_equals_the_dense_reference(joined, dtype, tolerance):
    topk_idx = routing("uneven")
    topk_idx[3, 1] = -1
    x, topk_weights, w_gate, w_up, w_down = (t.detach() for t in inputs(dtype))
    expected = dense_reference(
        x, topk_idx.clamp_min(0), topk_weights * (topk_idx >= 0), w_gate, w_up, w_down
    )
    gate_up = (torch.cat((w_gate, w_up), dim=-1), None) if joined else (w_gate, w_up)
    with torch.no_grad():
        y = torch.cat(
            [
                moe_forward(
                    x[i : i + 1],
                    topk_idx[i : i + 1],
                    topk_weights[i : i + 1],
                    *gate_up,
                    w_down,
                    "grouped",
                )
                for i in range(N)
            ]
        )
    assert y.dtype == dtype and (y.double() - expected).norm() <= tolerance * expected.norm()


def test_rows_without_a_token_never_reach_a_result():
    def product(rows, weights, expert_end):
        out = tile_moe.grouped_product(rows, weights, expert_end)
        return torch.where((torch.arange(len(out)) >= expert_end[-1])[:, None], torch.nan, out)

    check_backend("grouped", "uneven", torch.float32, 1e-6, product=product)


@EVERY_ROUTING
@pytest.mark.parametrize("backend", ("grouped", "tile"))
def test_every_expert_has_rows_and_every_slot_a_row_of_its_expert(backend, kind, kernels):
    """On sm_100 the weight gradient of a group without rows is uninitialized."""
    topk_idx = routing(kind)
    rows, source, end = assign_rows(topk_idx, E, backend)
    start = F.pad(end[:-1], (1, 0))
    assert (end > start).all() and (end % ALIGNMENT == 0).all() and end[-1] <= len(source)
    assert len(rows.unique()) == N * K
    assert ((start[topk_idx] <= rows) & (rows < end[topk_idx])).all()


def test_routing_selects_by_bias_and_weighs_by_probability():
    score, bias = torch.randn(8, E, requires_grad=True), torch.tensor([10.0, 0, 0, 0, 0])
    topk_idx, weights = route(score, bias, K, "grouped")
    assert (topk_idx == 0).any(1).all()
    chosen, upstream = score.softmax(-1).gather(1, topk_idx), torch.arange(16).view(8, 2)
    expected = chosen / chosen.sum(1, True)
    torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(
        *(torch.autograd.grad((w * upstream).sum(), score)[0] for w in (weights, expected))
    )
    assert torch.equal(route(-score, bias, K, "grouped", topk_idx)[0], topk_idx)  # a given choice


@pytest.mark.parametrize("backend", ("grouped", "tile"))
def test_balance_losses_and_loads_of_several_routings_leave_out_padding(backend, kernels):
    """Also of a routing in which all rows are padding."""
    score, bias = torch.randn(3, 8, E), torch.zeros(E)
    share = torch.tensor([[0.25] * 4 + [0.0] * 4, [0.1] * 8, [0.0] * 8])
    topk_idx = torch.stack([route(part, bias, K, "grouped")[0] for part in score])
    aux_loss, z_loss, load = balance(score, topk_idx, share, backend)
    expected_aux, expected_z = 0, 0
    for i, rows in ((0, 4), (1, 8)):
        f = torch.bincount(topk_idx[i, :rows].flatten(), minlength=E) * E / (rows * K)
        prob, logsumexp, weight = (
            score[i, :rows].softmax(-1),
            score[i, :rows].logsumexp(-1),
            share[i].sum(),
        )
        expected_aux = expected_aux + weight * (f * prob.mean(0)).sum()
        expected_z = expected_z + weight * logsumexp.square().mean()
        torch.testing.assert_close(load[i], f * weight)
    assert not load[2].any()
    torch.testing.assert_close(aux_loss, expected_aux)
    torch.testing.assert_close(z_loss, expected_z)


@pytest.mark.parametrize("backend", ("loop", "grouped", "tile"))
def test_nan_scores_give_nan_in_their_rows_alone_and_valid_indices(backend, kernels):
    nan = torch.full((3, 32), math.nan)
    assert (Kernels.topk_gate(nan, K) == 2**31 - 1).all() and (
        Kernels.topk_gate(nan[:, :20].clone(), K) == 20
    ).any()
    assert (route(nan, torch.zeros(32), K, backend)[0] < 32).all()
    score, (x, _, *weights) = torch.randn(N, E), inputs(torch.float32)
    score[4], score[9, 2] = math.nan, math.inf
    score.requires_grad_()
    topk_idx, topk_weights = route(score, torch.zeros(E), K, backend)
    aux_loss, *_ = balance(score[None], topk_idx[None], torch.full((1, N), 1 / N), backend)
    assert ((topk_idx >= 0) & (topk_idx < E)).all()
    y = moe_forward(x, topk_idx, topk_weights, *weights, backend)
    # of an infinite score the expert may not be chosen
    spoiled = {*y.isnan().any(1).nonzero().flatten().tolist()}
    assert 4 in spoiled and spoiled <= {4, 9} and aux_loss.isnan()
    (y.sum() + aux_loss).backward()
    assert score.grad[4].isnan().all()


def test_deterministic_mode_counts_loads_without_the_kernels_atomic_sums(kernels, monkeypatch):
    score, share = torch.randn(1, N, E), torch.full((1, N), 1 / N)
    topk_idx, _ = route(score[0], torch.zeros(E), K, "grouped")

    def load(backend):
        return balance(score, topk_idx[None], share, backend)[2]

    monkeypatch.setattr(Kernels, "aux_fi", staticmethod(lambda *args: torch.full((E,), math.nan)))
    assert load("tile").isnan().all()
    torch.use_deterministic_algorithms(True)
    try:
        counted = load("tile")
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(counted, load("grouped"))
