"""The recurrent core: a bounded state, loops beyond training, routing under recomputation, and ACT
halting."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

import tile_moe
from conftest import awake, documents, small_config, text
from spider.layers import rms_norm
from spider_model import Halting, Spider


def states_of(model: Spider, *given, **options) -> list[torch.Tensor]:
    """Return the core's state after every loop of a pass."""
    states, adapt = [], model.core.adapt
    model.core.adapt = lambda y, loop: states.append(adapt(y, loop)) or states[-1]
    with torch.no_grad():
        model(*given, **options)
    del model.core.adapt
    return states


def words_of_two(length: int) -> torch.Tensor:
    """Return a row of words of two letters, so that every third byte ends a segment."""
    row = 97 + text(1, length) % 26
    row[:, 2::3] = ord(" ")
    return row


@pytest.mark.parametrize("lr", (1e-2, 1.0, 1e3, 1e6))
def test_the_decay_stays_between_0_and_1_after_any_step(lr):
    model, ids = awake(small_config()), text(4, 64)
    torch.testing.assert_close(
        model.core.decay().detach(), torch.full((32,), math.exp(-0.1)), rtol=0, atol=1e-6
    )
    model(ids, ids, noise_seed=1).loss.backward()
    for p in (model.core.log_A, model.core.dt):
        p.grad.add_(torch.randn_like(p))
    torch.optim.SGD((model.core.log_A, model.core.dt), lr=lr).step()
    assert (model.core.decay() > 0).all() and (model.core.decay() < 1).all()


def test_the_state_stays_bounded_over_64_loops_with_the_slowest_decay():
    model = awake(small_config())
    with torch.no_grad():
        model.core.halt_predictor.bias.fill_(-30)  # no segment halts before the last loop
        model.core.dt.fill_(-20)
    sizes = torch.stack(
        [h.norm(dim=1).max() for h in states_of(model, text(4, 64), n_loops=64, noise_seed=1)]
    )
    added = F.pad(sizes, (1, 0)).diff()  # by each loop: does not grow with the state
    assert sizes.isfinite().all() and added[32:].max() <= 1.2 * added[:32].max()


def test_the_initial_state_grows_no_more_than_its_input():
    """Each loop adds e, of size 1, and keeps 0.9 of the state."""
    torch.manual_seed(0)
    states = states_of(Spider(small_config(n_loops=6)), text(8, 64), noise_seed=1)
    size = [h.square().mean().sqrt().item() for h in states]
    alone = [(1 - math.exp(-0.1 * t)) / (1 - math.exp(-0.1)) for t in range(1, 7)]  # without layers
    assert all(0.8 * b < a < 1.5 * b for a, b in zip(size, alone, strict=True)), size


def test_loops_beyond_training_use_the_last_adapter():
    model, ids = awake(small_config(n_loops=2)).eval(), text(2, 32)
    with torch.no_grad():
        four = model(ids, n_loops=4).logits
        for parameter in (model.core.loop_embedding, model.core.lora_up, model.core.lora_down):
            parameter.data = parameter.data[[0, 1, 1, 1]]
        model.core.config = dataclasses.replace(model.config, n_loops=4)
        torch.testing.assert_close(model(ids, n_loops=4).logits, four)


def test_recomputation_keeps_the_first_routing_even_if_the_scores_change(monkeypatch):
    model, ids = awake(small_config(n_recurrent_layers=1, n_loops=1, engram_layers=())), text(2, 32)
    model.recompute, chosen = "core", []

    def route(score, bias, k, backend, topk_idx=None, original=tile_moe.route):
        topk_idx, weights = original(-score if chosen else score, bias, k, backend, topk_idx)
        chosen.append(topk_idx)
        return topk_idx, weights

    monkeypatch.setattr(tile_moe, "route", route)
    model(ids, ids, noise_seed=0).loss.backward()
    assert len(chosen) == 2 and torch.equal(*chosen)


def test_the_expert_bias_moves_towards_an_even_load():
    model = awake(small_config())
    model.update_expert_bias(torch.tensor([[4.0, 0.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0]]))
    torch.testing.assert_close(
        model.core.layers[0].moe.expert_bias, torch.tensor([-0.001, 0.001, 0, 0])
    )
    assert not model.core.layers[1].moe.expert_bias.any()


@pytest.mark.parametrize("leave", (True, False))
def test_act_weights_are_p_until_the_sum_reaches_the_threshold_and_then_the_remainder(leave):
    """The sum of the last segment is equal to the threshold."""
    # [segment, loop]
    p = torch.tensor([[0.2, 0.3, 0.1], [0.9375, 0.5, 0.1], [0.5, 0.375, 0.9], [0.5, 0.25, 0.9]])
    weights = torch.tensor([[0.2, 0.3, 0.5], [1, 0, 0], [0.5, 0.5, 0], [0.5, 0.5, 0]])
    halting = Halting(torch.full((4,), 1 / 4), 0.75, leave, stop_when_all_halted=True)
    for loop in range(3):
        state = F.one_hot(torch.full((4,), loop), 3).float()
        halting.add(halting.active.select(state), halting.active.select(p[:, loop]), loop == 2)
    torch.testing.assert_close(halting.output_ND, weights)
    torch.testing.assert_close(halting.loops, torch.tensor((3 + 1 + 2 + 2) / 4))
    torch.testing.assert_close(halting.ponder, torch.tensor((3.5 + 2 + 2.5 + 2.5) / 4))


def test_with_one_loop_the_output_is_the_first_state():
    model, outputs = awake(small_config()), []
    model.core.register_forward_hook(lambda module, args, out: outputs.append(out))
    (state,) = states_of(model, text(2, 32), n_loops=1, noise_seed=0)
    ((output, stats),) = outputs
    torch.testing.assert_close(output, model.core.out_proj(rms_norm(state)))
    assert stats.mean_loops == pytest.approx(1)


@pytest.mark.parametrize("recompute", ("nothing", "core"))
@pytest.mark.parametrize("at_once", (False, True))
@pytest.mark.parametrize(
    "changes",
    (
        {},
        dict(n_routed_experts=0, lora_rank=0),
        dict(boundaries="words", segment_offsets=3, core_loss_weight=0.2),
    ),
    ids=str,
)
def test_leaving_rows_out_of_the_core_gives_the_results_of_masking_them(
    changes, at_once, recompute
):
    """Also where all segments, or all of a document, have halted."""
    ids, labels, outs, grads, visited = (
        documents(30, 2, 70, 1, 25),
        text(1, 128, seed=9),
        [],
        [],
        [],
    )
    for leave in (True, False):
        model = awake(
            small_config(n_loops=5, n_recurrent_layers=3, engram_layers=(1, 2), **changes),
            dtype=torch.float64,
        )
        model.core.drop_halted, model.recompute = leave, recompute
        with torch.no_grad():
            model.core.halt_predictor.weight.mul_(0 if at_once else 100)
            model.core.halt_predictor.bias.fill_(8 if at_once else 0.5)
        rows = []
        model.core.layers[0].register_forward_pre_hook(
            lambda module, args, rows=rows: rows.append(len(args[0]))
        )
        outs.append(model(ids, labels, noise_seed=3, dropout=0.3))
        visited.append(rows.copy())  # before those of recomputation
        outs[-1].loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    (leaving, masked), (rows, all_rows) = outs, visited
    assert rows == sorted(rows, reverse=True) and rows[0] == all_rows[0] and len(set(all_rows)) == 1
    if at_once:
        assert float(leaving.mean_loops) == pytest.approx(1) and len(rows) == 1 < len(all_rows)
    else:
        assert 1.2 < leaving.mean_loops < 4.8 and rows[-1] < rows[0]
    for name, value in vars(leaving).items():
        rtol = 1e-6 if name in ("tokens_per_expert", "loss_terms") else 1e-10  # counted in fp32
        torch.testing.assert_close(value, vars(masked)[name], rtol=rtol, atol=1e-12, msg=name)
    for name in grads[0].keys() & grads[1].keys():
        torch.testing.assert_close(grads[0][name], grads[1][name], rtol=1e-8, atol=1e-10, msg=name)
    assert not any(
        grads[i][name].any() for i in (0, 1) for name in grads[i].keys() - grads[1 - i].keys()
    )


@pytest.mark.parametrize("leave", (True, False))
def test_halted_segments_keep_the_latents_of_their_final_state(leave):
    """All segments but the last halt in the first loop; they are computed once more, and then the
    last alone."""
    model = awake(small_config(boundaries="words", n_loops=4)).eval()
    latents, computed = [], []
    model.core.drop_halted = leave
    model.core.halt = lambda h: F.pad(h.new_ones(len(h) - 1), (0, 1))
    model.core.layers[0].register_forward_hook(
        lambda module, args, out: latents.append(out[2].latents)
    )
    model.core.layers[0].register_forward_pre_hook(
        lambda module, args: computed.append(len(args[0]))
    )
    with torch.no_grad():
        model(words_of_two(48))
    first, second, *later = latents
    assert computed == ([16, 16, 1, 1] if leave else [16] * 4) and len(later) == 2
    assert ((first - second).abs().amax(1) > 1e-3).all()
    for loop in later:
        assert torch.equal(loop[:-1], second[:-1]) and not torch.equal(loop[-1], second[-1])
