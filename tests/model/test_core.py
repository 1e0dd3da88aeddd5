"""The recurrent core: a bounded state, loops beyond training, routing under recomputation, and ACT
halting."""

import dataclasses
from contextlib import nullcontext
from itertools import product

import pytest
import torch
import torch.nn.functional as F

import tile_moe
from conftest import awake, documents, small_config, text
from spider_model import Halting, Spider
from stand_in_gpu import stand_in_gpu

# --------------------------------------------------------------------------------------------------
# Loops


def test_decay_is_between_0_and_1_for_any_parameters():
    core = Spider(small_config()).core
    for log_A, dt in product((-1e6, -20.0, 0.0, 20.0, 1e6), repeat=2):
        with torch.no_grad():
            core.log_A.fill_(log_A)
            core.dt.fill_(dt)
        assert (core.decay() > 0).all() and (core.decay() < 1).all()


def test_loops_beyond_training_use_the_last_adapter():
    model = awake(small_config(n_loops=2)).eval()
    ids = text(2, 32)
    with torch.no_grad():
        four = model(ids, n_loops=4).logits
        for parameter in (model.core.loop_embedding, model.core.lora_up, model.core.lora_down):
            parameter.data = parameter.data[[0, 1, 1, 1]]
        model.core.config = dataclasses.replace(model.config, n_loops=4)
        torch.testing.assert_close(model(ids, n_loops=4).logits, four)


# --------------------------------------------------------------------------------------------------
# Routing


def test_recomputation_reuses_the_routing_even_if_scores_change(monkeypatch):
    model = awake(small_config(n_recurrent_layers=1, n_loops=1, engram_layers=()))
    model.recompute = "core"
    ids = text(2, 32)
    chosen = []

    def route(score, bias, k, backend, topk_idx=None, original=tile_moe.route):
        topk_idx, weights = original(-score if chosen else score, bias, k, backend, topk_idx)
        chosen.append(topk_idx)
        return topk_idx, weights

    monkeypatch.setattr(tile_moe, "route", route)
    model(ids, ids, noise_seed=0).loss.backward()
    assert len(chosen) == 2 and torch.equal(*chosen)


# --------------------------------------------------------------------------------------------------
# Halting


def test_act_weights_are_p_then_the_remainder_at_the_threshold():
    """The last segment's sum equals the threshold."""
    # [segment, loop]
    p = torch.tensor([[0.2, 0.3, 0.1], [0.9375, 0.5, 0.1], [0.5, 0.375, 0.9], [0.5, 0.25, 0.9]])
    weights = torch.tensor([[0.2, 0.3, 0.5], [1, 0, 0], [0.5, 0.5, 0], [0.5, 0.5, 0]])
    halting = Halting(torch.full((4,), 1 / 4), 0.75, drop_halted=False)
    for loop in range(3):
        halting.add(F.one_hot(torch.full((4,), loop), 3).float(), p[:, loop], last=loop == 2)
    torch.testing.assert_close(halting.output_ND, weights)
    torch.testing.assert_close(halting.loops, torch.tensor((3 + 1 + 2 + 2) / 4))
    torch.testing.assert_close(halting.ponder, torch.tensor((3.5 + 2 + 2.5 + 2.5) / 4))


@pytest.mark.parametrize(
    "changes, recompute, at_once",
    (
        ({}, "core", False),
        ({}, "core", True),
        (dict(n_routed_experts=0, lora_rank=0), "nothing", False),
        (dict(boundaries="words", segment_offsets=3, core_loss_weight=0.2), "nothing", False),
    ),
    ids=str,
)
def test_dropping_halted_segments_equals_masking_them(changes, recompute, at_once):
    """This holds even if all segments, or all segments of a document, have halted."""
    config = small_config(n_loops=5, n_recurrent_layers=3, engram_layers=(1, 2), **changes)
    ids = documents(30, 2, 70, 1, 25)
    labels = text(1, 128, seed=9)

    def run(drop_halted: bool):
        """Return a pass's output, gradients, and number of loops."""
        model = awake(config, dtype=torch.float64)
        model.core.drop_halted = drop_halted
        model.recompute = recompute
        with torch.no_grad():
            model.core.halt_predictor.weight.mul_(0 if at_once else 100)
            model.core.halt_predictor.bias.fill_(8 if at_once else 0.5)
        visits = []
        hook = model.core.layers[0].register_forward_pre_hook(lambda *_: visits.append(0))
        out = model(ids, labels, noise_seed=3, dropout=0.3)
        hook.remove()  # before recomputation
        out.loss.backward()
        # parameters of skipped loops have no gradient
        grads = {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in model.named_parameters()
        }
        return out, grads, len(visits)

    out, grads, loops = run(drop_halted=True)
    masked, masked_grads, masked_loops = run(drop_halted=False)
    assert masked_loops == 5
    if at_once:
        assert float(out.mean_loops) == pytest.approx(1)
        assert loops == 1
    else:
        assert 1.2 < out.mean_loops < 4.8
    for name, value in vars(out).items():
        rtol = 1e-6 if name in ("tokens_per_expert", "loss_terms") else 1e-10  # counted in fp32
        torch.testing.assert_close(value, vars(masked)[name], rtol=rtol, atol=1e-12, msg=name)
    torch.testing.assert_close(grads, masked_grads, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("on_gpu", (False, True))
def test_halted_segments_run_one_more_loop_and_are_then_dropped(on_gpu):
    """All segments except the last halt in the first loop. A GPU never drops segments, because the
    host would wait."""
    model = awake(small_config(boundaries="words", n_loops=4)).eval()
    model.core.halt = lambda h: F.pad(h.new_ones(len(h) - 1), (0, 1))
    tokens = []
    layer = model.core.layers[0]
    layer.register_forward_pre_hook(lambda module, args: tokens.append(len(args[0])))
    words = torch.tensor([[*b"ab " * 16]])
    with stand_in_gpu() if on_gpu else nullcontext():
        model.step(words, model.decoding_state())
        with torch.no_grad():
            model(words)
    assert tokens == 2 * ([16] * 4 if on_gpu else [16, 16, 1, 1])
