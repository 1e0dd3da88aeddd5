"""Learned boundaries: what the predictor learns from, and what moves its threshold."""

import math

import pytest
import torch
import torch.nn.functional as F

import spider_model
import train
from conftest import awake, documents, gradients, small_config, text
from spider.model import surprise
from spider.model.config import SpiderConfig
from spider.training.batches import Batch
from spider.training.optimizers import Optimizers
from spider.training.plan import OptimizerSettings
from spider_model import Spider
from tokenizer import BOS_ID, EOS_ID, PAD_ID

PREDICTOR = "boundary_predictor."
ALONE = dict(boundaries="learned", places=3, core_loss_weight=0.2, aux_loss_weight=0.0, z_loss_weight=0.0,
             ponder_weight=0.0)                        # only terms that are means over bytes


def learner(dtype=torch.float64, **changes) -> Spider:
    model = awake(small_config(**ALONE | changes), dtype=dtype)
    if dtype == torch.float64:
        model.set_backend("loop")
    return model


@pytest.mark.parametrize("core_loss_weight", (0.0, 0.2))
def test_the_gain_is_what_the_loss_loses_when_a_segment_takes_the_place_of_the_one_before(core_loss_weight,
                                                                                          monkeypatch):
    """The oracle unpools without one segment and its boundary, and moves a little way from there. Boundaries at bytes
    without a label do not count."""
    model, ids = learner(core_loss_weight=core_loss_weight), documents(31, 17, 12)
    labels = text(1, 60, seed=3)
    labels[0, 20:24] = -100
    given, predicted, unpool = {}, [], Spider.unpool

    def remembering(self, z, null, b, packing, cu, open_bytes=0, back=0):
        given.setdefault("b", b)
        return unpool(self, z, null, b, packing, cu, open_bytes, back)
    monkeypatch.setattr(Spider, "unpool", remembering)
    monkeypatch.setattr(model, "predict_boundaries",
                        lambda x: predicted.append(Spider.predict_boundaries(model, x)) or predicted[-1])
    out = model(ids, labels, noise_seed=0)
    predicted[0].retain_grad()
    (5 * out.loss).backward()                          # also under another weight of the loss
    ends, found = (given["b"] > 0).nonzero().flatten().tolist(), predicted[0].grad[:, 1]
    labelled = [end for end in ends if labels[0, end] != -100]
    assert len(labelled) > 8 and len(labelled) < len(ends) and found.nonzero().flatten().tolist() == labelled
    factor = 2 * surprise.LOSS_WEIGHT * 5 / 56
    gains = (predicted[0][:, 1] - found * model.config.boundary_rate / factor).detach()

    def loss(segment, step):
        """With the bytes behind a segment moved by `step` away from what they receive without it."""
        def moved(self, z, null, b, packing, cu, open_bytes=0, back=0):
            whole, fewer, end = unpool(self, z, null, b, packing, cu, open_bytes), b.clone(), ends[segment]
            if back:
                return whole                           # nothing is observed
            fewer[end] = 0
            kept, less = torch.arange(len(z)) != segment, torch.where(cu > segment, cu - 1, cu)
            until = min(*(other for other in (*ends, 60) if other > end), int(packing.cu_seqlens[
                packing.document[end] + 1]), 60)
            change = torch.zeros_like(whole)
            change[end:until] = (whole - unpool(self, z[kept], null, fewer, packing, less, open_bytes))[end:until]
            return whole + step * change
        monkeypatch.setattr(Spider, "unpool", moved)
        with torch.no_grad():
            out = model(ids, labels, noise_seed=0)
            return out.nats_per_byte + out.loss_terms["core_loss"]
    for segment, end in enumerate(ends):
        if end in labelled:
            slope = (loss(segment, 1e-5) - loss(segment, -1e-5)) / 2e-5 * 56
            assert gains[end] == pytest.approx(-slope.item(), rel=1e-4, abs=1e-6), end


def test_it_changes_no_value_and_no_gradient_but_its_own(monkeypatch):
    ids = documents(20, 25, 3)
    results = []
    for observes in (True, False):
        model = learner()
        if not observes:
            monkeypatch.setattr(surprise.SurprisePredictor, "observe",
                                lambda self, predicted, ids, b, packing, unpooled, earlier: (unpooled, None))
        out = model(ids, ids.roll(-1), noise_seed=0)
        out.loss.backward()
        results.append((out.logits, gradients(model)))
    (logits, grads), (other, without) = results
    assert torch.equal(logits, other)
    for name, grad in grads.items():
        if name.startswith(PREDICTOR):
            assert grad.abs().sum() > 0 and without[name] is None, name
        elif grad is not None:
            torch.testing.assert_close(grad, without[name], rtol=1e-10, atol=1e-14, msg=name)


def test_micro_steps_add_up_to_the_batch():
    """Rows of unequal length; counts, losses and gradients are those of one pass."""
    ids, labels = text(4, 40), text(4, 40, seed=1)
    ids[1, 9:], labels[1, 8:] = PAD_ID, -100
    whole = [Batch.of(ids, labels, 0)]
    parts = [Batch.of(ids[i:i + 1], labels[i:i + 1], i) for i in range(4)]
    results = []
    for batches in (whole, parts):
        model = learner()
        sums, (_, counts) = train.accumulate(model, batches, 2)
        results.append((sums["surprise_loss"], counts, gradients(model)))
    (loss, counts, grads), (other, others, split) = results
    assert loss > 0.001 and loss == pytest.approx(other.item(), rel=1e-10)
    assert torch.equal(counts, others) and counts[:surprise.BINS].sum() == 3 * 40 + 9
    for name, grad in grads.items():
        if name.startswith(PREDICTOR):
            torch.testing.assert_close(grad, split[name], rtol=1e-9, atol=1e-14, msg=name)


def test_pairs_lie_within_documents_and_entropies_are_those_of_the_next_byte():
    model = learner(torch.float32)
    with torch.no_grad():
        model.boundary_predictor.init_weights()
    ids = torch.tensor([[BOS_ID, *b"abacab", EOS_ID, BOS_ID, *b"ba", EOS_ID, PAD_ID]])
    out = model(ids, ids, noise_seed=0)
    model.update_boundaries(out.boundary_counts, 2.5)
    predictor = model.boundary_predictor
    counts = {(a, b): int(predictor.pairs[a, b]) for a, b in predictor.pairs.nonzero().tolist()}
    a, b, c = b"abc"
    assert counts == {(BOS_ID, a): 1, (a, b): 2, (a, c): 1, (b, a): 2, (c, a): 1, (b, EOS_ID): 1, (a, EOS_ID): 1,
                      (BOS_ID, b): 1}
    of_a = math.log(4) - 2 * math.log(2) / 4
    of_b = math.log(3) - 2 * math.log(2) / 3
    mean = (4 * of_a + 3 * of_b + 2 * math.log(2)) / 10
    for byte, entropy in ((a, of_a), (b, of_b), (c, 0), (BOS_ID, math.log(2))):
        assert predictor.entropy[byte].item() == pytest.approx(entropy - mean, abs=1e-6)
    assert predictor.mean_loss == 2.5 and predictor.steps == 1


@pytest.mark.parametrize("rate", (0.0513, 0.19, 0.413))
@pytest.mark.parametrize("spread", (0.0, 1e-5, 0.5))
def test_the_threshold_leaves_the_rate_that_was_asked_for_also_where_all_bytes_are_alike(rate, spread):
    predictor, generator = surprise.SurprisePredictor(8, 272, rate), torch.Generator().manual_seed(0)
    predictor.init_weights()
    for _ in range(80):
        ids = torch.randint(97, 110 if spread else 98, (16400,), generator=generator).clamp_max(105)
        predicted = spread * torch.randn(16400, 2, generator=generator)
        ends = predictor.boundaries(predicted, ids, torch.arange(16400), None)
        assert ends.float().mean() == pytest.approx(rate, rel=0.2), int(predictor.steps)
        predictor.update(predictor._count(predicted, ids, torch.arange(16400)), 2.0)
    if not spread:
        gaps = ends.nonzero().diff(dim=0).float()
        assert gaps.std() < 0.3 * gaps.mean()          # of random ones they would be alike


@pytest.mark.parametrize("row", ([PAD_ID] * 8, [EOS_ID] * 8, [BOS_ID] * 8), ids=str)
def test_a_step_without_a_pair_of_bytes_leaves_all_finite(row):
    model = learner(torch.float32)
    with torch.no_grad():
        model.boundary_predictor.init_weights()
    for ids in (torch.tensor([row]), text(1, 32)):
        out = model(ids, ids.masked_fill(ids == PAD_ID, -100), noise_seed=0)
        model.update_boundaries(out.boundary_counts, out.nats_per_byte.item())
        assert out.loss.isfinite() and all(x.isfinite().all() for x in model.buffers())
    with pytest.raises(ValueError, match="of a pass in evaluation"):
        model.update_boundaries(model.eval()(ids).boundary_counts, 1.0)


def test_a_loss_that_is_not_the_models_teaches_the_gain_nothing():
    model, ids = learner(), text(2, 24)
    F.cross_entropy(model(ids, noise_seed=0).logits.flatten(0, 1), ids.flatten()).backward()
    assert not any(grad is not None and grad.any() for name, grad in gradients(model).items()
                   if name.startswith(PREDICTOR))


def test_other_weights_start_as_with_a_rule():
    states = []
    for boundaries in ("learned", "words"):
        torch.manual_seed(3)
        states.append(Spider(small_config(boundaries=boundaries)).state_dict())
    learned, words = states
    assert all(torch.equal(p, learned[name]) for name, p in words.items())


def test_it_learns_where_the_next_byte_surprises(monkeypatch):
    """Letters at random after every digit: there it cuts, and no entropy of a pair tells, since digits are three."""
    monkeypatch.setattr(surprise, "TRUST", (5, 10))
    model = Spider(small_config(boundaries="learned", boundary_rate=0.25)).train()
    optimizers = Optimizers(model, OptimizerSettings(lr=0.02))
    generator = torch.Generator().manual_seed(0)
    for step in range(60):
        ids = torch.randint(97, 113, (8, 65), generator=generator)
        ids[:, 1::4], ids[:, 2::4], ids[:, 3::4] = 49, 50, 49            # a letter, then 1 2 1
        train.step_alone(model, optimizers, [Batch.of(ids[:, :-1], ids[:, 1:], step)], 2)
    cuts = []
    model.boundaries = lambda *given: cuts.append(Spider.boundaries(model, *given)) or cuts[-1]
    with torch.no_grad():
        model.eval()(ids[:, :-1])
    share = cuts[0].view(8, 16, 4).mean((0, 1))
    assert share[3] > 0.9 and share[:3].max() < 0.1, share


def test_only_the_update_moves_the_threshold():
    model = learner()
    ids = documents(30, 18)
    before = {name: x.clone() for name, x in model.named_buffers()}
    out = model.eval()(ids, ids)
    assert out.boundary_counts.numel() == 0 and "surprise_loss" not in out.loss_terms
    model.train()(ids, ids, noise_seed=0).loss.backward()  # before the step's update
    assert all(torch.equal(x, before[name]) for name, x in model.named_buffers())


def test_text_without_a_boundary_is_no_fault():
    model = learner(torch.float32)
    model.boundary_predictor.threshold.fill_(100.0)
    ids = text(2, 24)
    loss = model(ids, ids, noise_seed=0).loss
    loss.backward()
    assert loss.isfinite()


def test_its_rate_is_an_eighth_also_after_loading():
    model = learner(torch.float32)
    optimizers = Optimizers(model, OptimizerSettings(lr=1.0))
    optimizers.set_lr(0.8, 0.5)
    own = {id(p) for name, p in model.named_parameters() if name.startswith(PREDICTOR)}
    for again in range(2):
        for group in optimizers.by_name["adamw"].param_groups:
            slow = {id(p) for p in group["params"]} & own
            assert len(slow) in (0, len(group["params"]))
            assert group["lr"] == pytest.approx(0.05 if slow else 0.4)
        optimizers.load_state_dict(optimizers.state_dict())
        optimizers.set_lr(0.8, 0.5)


def test_older_checkpoints_called_flexitokens_learned():
    older = vars(SpiderConfig(boundaries="learned")).copy()
    del older["boundary_rate"]
    assert SpiderConfig.from_saved(older).boundaries == SpiderConfig.from_saved({}).boundaries == "flexitokens"
    assert SpiderConfig.from_saved(dict(boundaries="learned")).boundaries == "learned"     # a user's own few fields
    assert SpiderConfig.from_saved(dict(boundaries="words")).boundaries == "words"
    assert SpiderConfig.from_saved(vars(SpiderConfig(boundaries="learned"))).boundaries == "learned"


def test_a_gain_of_the_wrong_sign_is_noticed(monkeypatch):
    monkeypatch.setattr(spider_model.SurprisePredictor, "observe", wrong_sign)
    with pytest.raises(AssertionError):
        test_the_gain_is_what_the_loss_loses_when_a_segment_takes_the_place_of_the_one_before(0.2, monkeypatch)


def wrong_sign(self, predicted, ids, b, packing, unpooled, earlier, original=surprise.SurprisePredictor.observe):
    out, observed = original(self, predicted, ids, b, packing, unpooled, earlier)
    return 2 * unpooled - out, observed
