"""The recurrent core: its state stays bounded, more loops than trained, activation checkpointing."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

import spider_model
import tile_moe
from conftest import awake, small_config, text
from spider_model import Spider


def test_the_decay_stays_inside_0_and_1_and_the_state_bounded_at_64_loops():
    model = awake(small_config())
    ids = text(4, 64)
    with torch.no_grad():
        torch.testing.assert_close(model.core.decay(), torch.full((32,), math.exp(-0.1)), rtol=0, atol=1e-6)
    for lr in (1e-2, 1.0, 1e3, 1e6):
        dense = [p for name, p in model.core.named_parameters() if not name.endswith("table.weight")]
        optimizer = torch.optim.SGD(dense, lr=lr)
        model(ids, ids, noise_seed=1).loss.backward()
        for p in (model.core.log_A, model.core.dt):
            p.grad.add_(torch.randn_like(p))
        optimizer.step()
        optimizer.zero_grad()
        decay = model.core.decay()
        assert (decay > 0).all() and (decay < 1).all()
        model.core.load_state_dict(awake(small_config()).core.state_dict())
    states = []
    model.core.adapt, adapt = lambda y, loop: (states.append(adapt(y, loop)), states[-1])[1], model.core.adapt
    with torch.no_grad():
        model.core.halt_predictor.bias.fill_(-30)                          # no segment halts before the last loop
        model.core.dt.fill_(-20)                                           # the slowest decay there is
        model(ids, n_loops=64, noise_seed=1)
    sizes = torch.stack([h.norm(dim=1).max() for h in states])
    added = F.pad(sizes, (1, 0)).diff()  # what a loop adds does not grow with what is there
    assert sizes.isfinite().all() and added[32:].max() <= 1.2 * added[:32].max()


def test_the_state_at_the_start_grows_no_more_than_what_it_takes_in():
    """Each loop takes e in whole, at a layer's input size, and keeps 0.9 of what was there."""
    torch.manual_seed(0)
    model = Spider(small_config(n_loops=6))
    states = []
    model.core.adapt, adapt = lambda y, loop: (states.append(adapt(y, loop)), states[-1])[1], model.core.adapt
    with torch.no_grad():
        model(text(8, 64), noise_seed=1)
    size = [h.square().mean().sqrt().item() for h in states]
    summed = [(1 - math.exp(-0.1 * t)) / (1 - math.exp(-0.1)) for t in range(1, 7)]  # of A h + e, e of size 1
    assert all(0.8 * alone < with_layers < 1.5 * alone for with_layers, alone in zip(size, summed)), size


def test_more_loops_than_trained_use_the_last_adapter():
    model = awake(small_config(n_loops=2)).eval()
    ids = text(2, 32)
    with torch.no_grad():
        four = model(ids, n_loops=4).logits
        model.core.loop_embedding.data = model.core.loop_embedding.data[[0, 1, 1, 1]]
        model.core.lora_up.data, model.core.lora_down.data = (
            w.data[[0, 1, 1, 1]] for w in (model.core.lora_up, model.core.lora_down))
        model.core.config = dataclasses.replace(model.config, n_loops=4)
        torch.testing.assert_close(model(ids, n_loops=4).logits, four)


def test_recomputation_keeps_the_first_routing_even_if_the_scores_have_moved():
    model = awake(small_config(n_recurrent_layers=1, n_loops=1, engram_layers=()))
    model.recompute = "core"
    seen = []
    def route(score, bias, k, backend, topk_idx=None, original=tile_moe.route):
        chosen, weights = original(score if not seen else -score, bias, k, backend, topk_idx)
        seen.append(chosen)
        return chosen, weights
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spider_model, "route", route)
        ids = text(2, 32)
        model(ids, ids, noise_seed=0).loss.backward()
    assert len(seen) == 2 and torch.equal(*seen)


def test_the_expert_bias_moves_towards_balance():
    model = awake(small_config())
    for layer in model.core.layers:
        layer.moe.expert_bias.zero_()
    model.update_expert_bias(torch.tensor([[4.0, 0.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0]]))
    torch.testing.assert_close(model.core.layers[0].moe.expert_bias, torch.tensor([-0.001, 0.001, 0, 0]))
    assert not model.core.layers[1].moe.expert_bias.any()
