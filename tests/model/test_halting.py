"""ACT: weights of loops, and rows that leave the core."""

import pytest
import torch
import torch.nn.functional as F

from conftest import awake, documents, small_config, text
from spider.model import norm
from spider_model import Halting


def check_halting():
    """Weights sum to 1, are p until the threshold, and what remains on the loop that reaches it."""
    p = torch.tensor([[0.2, 0.999, 0.5], [0.3, 0.5, 0.495], [0.1, 0.1, 0.9]]).T                # [segment, loop]
    for leave in (True, False):
        halting = Halting(torch.full((3,), 1 / 3), 0.99, leave, ends=True)
        for loop in range(3):
            state = F.one_hot(torch.full((3,), loop), 3).float()
            halting.add(halting.active.pick(state), halting.active.pick(p[:, loop]), loop == 2)
        expected = torch.tensor([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0], [0.5, 0.5, 0.0]])
        torch.testing.assert_close(halting.output, expected)
        torch.testing.assert_close(halting.loops, torch.tensor(2.0))
        torch.testing.assert_close(halting.ponder, torch.tensor((3.5 + 2.0 + 2.5) / 3))


def test_act_weights_sum_to_one_and_one_loop_gives_the_first_state():
    check_halting()
    model = awake(small_config())
    states = []
    model.core.adapt, adapt = lambda y, loop: (states.append(adapt(y, loop)), states[-1])[1], model.core.adapt
    halting = {}
    model.core.register_forward_hook(lambda module, args, out: halting.update(out=out[0]))
    with torch.no_grad():
        out = model(text(2, 32), n_loops=1, noise_seed=0)
    torch.testing.assert_close(halting["out"], model.core.out_proj(norm.rms_norm(states[0])))
    assert out.mean_loops == 1


@pytest.mark.parametrize("recompute", ("nothing", "core"))
@pytest.mark.parametrize("at_once", (False, True))
@pytest.mark.parametrize("cut", ({}, dict(n_routed_experts=0), dict(lti=False, lora_rank=0), dict(
    boundaries="words", places=3, core_loss_weight=0.2)), ids=str)
def test_rows_that_leave_the_core_compute_what_masked_ones_do(cut, at_once, recompute):
    """Also where all of a loop's segments have halted, and documents have halted as a whole."""
    ids, labels, results = documents(30, 2, 70, 1, 25), text(1, 128, seed=9), []
    for leave in (True, False):
        model = awake(small_config(n_loops=5, n_recurrent_layers=3, engram_layers=(1, 2), **cut), dtype=torch.float64)
        model.core.halted_leave, model.recompute, model.dropout = leave, recompute, 0.3
        model.set_backend("loop")         # grouped products know no float64
        with torch.no_grad():
            model.core.halt_predictor.weight.mul_(0 if at_once else 100)
            model.core.halt_predictor.bias.fill_(8 if at_once else 0.5)
        rows = []
        model.core.layers[0].register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
        out = model(ids, labels, noise_seed=3)
        visited = rows.copy()             # recomputation comes later
        out.loss.backward()
        results.append((out, {name: p.grad for name, p in model.named_parameters()}, visited))
    (leaving, gradients, rows), (masked, others, all_rows) = results
    assert rows == sorted(rows, reverse=True) and rows[0] == all_rows[0] and len(set(all_rows)) == 1
    if at_once:
        assert float(leaving.mean_loops) == pytest.approx(1) and len(rows) == 1 < len(all_rows)
    else:
        assert 1.2 < leaving.mean_loops < 4.8 and rows[-1] < rows[0]
    for name, value in vars(leaving).items():
        rtol = 1e-6 if name in ("tokens_per_expert", "loss_terms") else 1e-10  # counted in fp32
        torch.testing.assert_close(value, vars(masked)[name], rtol=rtol, atol=1e-12, msg=name)
    for name, grad in gradients.items():
        if grad is not None or others[name] is not None:
            torch.testing.assert_close(grad, others[name], rtol=1e-8, atol=1e-10, msg=name)  # the load is fp32


@pytest.mark.parametrize("leave", (True, False))
def test_what_a_halted_segment_leaves_behind_is_of_the_state_it_halted_with_and_stays(leave):
    """With every segment halting at once but the last, they are computed once more and then the last alone."""
    model = awake(small_config(boundaries="every_third", n_loops=4)).eval()
    ids, seen, computed = text(1, 24), [], []
    model.core.halted_leave = leave
    model.core.halt = lambda h: F.pad(h.new_ones(len(h) - 1), (0, 1))
    model.core.layers[0].register_forward_hook(lambda module, args, out: seen.append(out[2][0]))
    model.core.layers[0].register_forward_pre_hook(lambda module, args: computed.append(len(args[0])))
    with torch.no_grad():
        model(ids)
    first, second, *later = seen
    assert computed == ([8, 8, 1, 1] if leave else [8] * 4) and len(later) == 2
    assert ((first - second).abs().amax(1) > 1e-3).all()
    for loop in later:
        assert torch.equal(loop[:-1], second[:-1]) and not torch.equal(loop[-1], second[-1])


def test_where_all_segments_halt_nothing_is_computed_once_more_unless_later_ones_come():
    model = awake(small_config(boundaries="every_third", n_loops=4)).eval()
    ids, computed = text(1, 24), []
    model.core.halt = lambda h: h.new_ones(len(h))
    model.core.layers[0].register_forward_pre_hook(lambda module, args: computed.append(len(args[0])))
    with torch.no_grad():
        whole = model(ids).logits
        assert computed == [8]
        stepped = model.step(ids, model.decoding_state())
        assert computed == [8, 8, 8]
    torch.testing.assert_close(whole, stepped, rtol=1e-4, atol=1e-5)


def wrong_remainder(self, h, p, last, original=Halting.add):
    return original(self, h, p, False)


def test_a_wrong_act_remainder_is_noticed(monkeypatch):
    monkeypatch.setattr(Halting, "add", wrong_remainder)
    with pytest.raises(AssertionError):
        check_halting()
