"""Where segments end: FlexiTokens, words, and learned boundaries, with what their predictor
learns."""

import math

import pytest
import torch
import torch.nn.functional as F

import train
from conftest import awake, documents, gradients, small_config, text
from data import Batch
from spider import boundaries
from spider.boundaries import BINS, SurprisePredictor
from spider.noise import byte_noise
from spider.optim import Optimizers
from spider.packing import Packing
from spider.segments import last_boundary
from spider_model import Spider
from tokenizer import BOS_ID, EOS_ID, PAD_ID


def boundaries_of(model: Spider, ids: torch.Tensor, **options) -> torch.Tensor:
    """Return the boundaries b of a pass, in the shape of ids."""
    found, original = [], model.boundaries
    model.boundaries = lambda *given: found.append(original(*given)) or found[-1]
    with torch.no_grad():
        model(ids, **options)
    del model.boundaries
    return found[0].view(ids.shape)


def test_no_word_ends_at_the_first_byte_of_a_document():
    ids = torch.tensor([[BOS_ID, *b"ab", EOS_ID, *b" cd.", EOS_ID, *b".e"]])
    model = awake(small_config(boundaries="words")).eval()
    assert boundaries_of(model, ids).tolist() == [[0, 0, 0, 1, 0, 0, 0, 1, 1, 0, 0]]


def test_a_byte_is_cut_as_often_as_its_probability_and_segments_are_even():
    cu_seqlens, p = (
        torch.tensor([0, 64], dtype=torch.int32),
        torch.rand(64, generator=torch.Generator().manual_seed(0)),
    )
    packing = Packing.build(cu_seqlens, 64, 64, small_config(), torch.float32)
    cuts = torch.stack(
        [
            boundaries.flexitokens_boundaries(p, packing, torch.float32, noise, None)
            for noise in byte_noise(0, 3000, 64, p.device)
        ]
    )
    assert (cuts.mean(0) - p).abs().max() < 0.04
    assert (cuts.sum(1) - p.sum()).abs().max() <= 1  # independent draws would differ by several


def test_eos_ends_a_segment_and_pad_never_does():
    model = awake(small_config())
    ids = torch.cat((documents(9, 7), torch.full((1, 4), PAD_ID)), dim=1)
    with torch.no_grad():
        model.boundary_predictor[2].bias.fill_(-100)
        assert boundaries_of(model, ids).flatten().nonzero().flatten().tolist() == [8, 15]
        model.boundary_predictor[2].bias.fill_(100)
        assert boundaries_of(model, ids).flatten().tolist() == [1] * 16 + [0] * 4


def test_evaluation_cuts_as_often_as_training_within_a_tenth():
    model, ids = awake(small_config()), text(32, 64, seed=4)
    trained = boundaries_of(model, ids, noise_seed=5).sum()
    assert abs(boundaries_of(model.eval(), ids).sum() / trained - 1) < 0.1


def predictor_of(rate: float = 0.19, steps: int = 0) -> SurprisePredictor:
    predictor = SurprisePredictor(8, 272, rate)
    predictor.init_weights()
    predictor.steps.fill_(steps)
    return predictor


@pytest.mark.parametrize("steps, trust", ((30, 0.0), (45, 0.5), (60, 1.0), (99, 1.0)))
def test_a_score_weighs_a_gain_three_times_as_much_as_surprise_once_both_are_trusted(steps, trust):
    predictor = predictor_of(0.25, steps)
    predictor.entropy[65] = 0.7
    predicted = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.4, -0.2]])
    score = predictor.score(predicted, torch.full((4,), 65), torch.zeros(4, dtype=torch.int64))
    expected = 0.7 + trust * torch.tensor([0, 1, 3, -0.2]) + 0.075 * 64 * boundaries.BIN
    torch.testing.assert_close(score, expected)


def test_strays_are_the_same_random_bytes_for_a_seed_and_only_in_training():
    predictor, ids = predictor_of(), torch.full((20000,), 65)
    predictor.threshold.fill_(100.0)
    noise = byte_noise(0, 1, 20000, ids.device)[0]
    strays = predictor.boundaries(torch.zeros(20000, 2), ids, ids, noise).nonzero().flatten()
    assert 40 < len(strays) < 80 and strays[:5].tolist() == [222, 467, 468, 1078, 1492]
    assert not predictor.boundaries(torch.zeros(20000, 2), ids, ids, None).any()


@pytest.mark.parametrize(
    "steps, trusted, kept", ((29, False, 0), (30, True, 0), (59, True, 0), (60, True, 0.9))
)
def test_scores_of_earlier_steps_fade_by_a_tenth_once_the_predictor_is_trusted(
    steps, trusted, kept
):
    """`steps` before the update. Until the next step trusts the predictor, counts of bytes give the
    scores."""
    predictor, counts = predictor_of(steps=steps), torch.zeros(BINS + 272**2)
    predictor.histogram[7], counts[[5, BINS + 272 * 65 + 66]] = 100.0, torch.tensor([20.0, 10.0])
    predictor.update(counts, 2.0)
    expected = torch.zeros(BINS)
    expected[5], expected[7] = 20, kept * 100
    if not trusted:
        expected = torch.zeros(BINS)
        # the entropy of 65 is the mean; a tie has 64 bins
        expected[BINS // 2 : BINS // 2 + 64] = 20 / 64
    torch.testing.assert_close(predictor.histogram, expected)
    assert predictor.steps == steps + 1 and predictor.mean_loss == 2


@pytest.mark.parametrize("rate", (0.0513, 0.19, 0.413))
@pytest.mark.parametrize("spread", (0.0, 1e-5, 0.5))
def test_the_threshold_leaves_the_configured_rate_even_if_all_bytes_are_alike(rate, spread):
    predictor, generator = predictor_of(rate), torch.Generator().manual_seed(0)
    for _ in range(80):
        ids = torch.randint(97, 110 if spread else 98, (16400,), generator=generator).clamp_max(105)
        predicted = spread * torch.randn(16400, 2, generator=generator)
        ends = predictor.boundaries(predicted, ids, torch.arange(16400), None)
        assert ends.float().mean() == pytest.approx(rate, rel=0.2), int(predictor.steps)
        predictor.update(predictor._count(predicted, ids, torch.arange(16400)), 2.0)
    if not spread:
        gaps = ends.nonzero().diff(dim=0).float()
        assert gaps.std() < 0.3 * gaps.mean()  # of random ones they would be alike


PREDICTOR = "boundary_predictor."
BY_BYTE = dict(
    boundaries="learned",
    segment_offsets=3,
    core_loss_weight=0.2,
    aux_loss_weight=0.0,
    z_loss_weight=0.0,
    ponder_weight=0.0,
)  # only terms that are means over bytes


def learner(**changes) -> Spider:
    """Make a model in float64, for exact comparisons."""
    return awake(small_config(**BY_BYTE | changes), dtype=torch.float64)


@pytest.mark.parametrize("core_loss_weight", (0.0, 0.2))
def test_the_gain_is_the_change_of_the_loss_if_bytes_receive_the_segment_before_instead(
    core_loss_weight, monkeypatch
):
    """Compare with finite differences. Boundaries at bytes without a label do not count."""
    model, ids = learner(core_loss_weight=core_loss_weight), documents(31, 17, 12)
    labels, predicted = text(1, 60, seed=3), []
    labels[0, 20:24] = -100
    ends = boundaries_of(model, ids, noise_seed=0).flatten().nonzero().flatten().tolist()
    model.predict_boundaries = lambda x: (
        predicted.append(Spider.predict_boundaries(model, x)) or predicted[-1]
    )
    out = model(ids, labels, noise_seed=0)
    predicted[0].retain_grad()
    (5 * out.loss).backward()  # also under another weight of the loss
    found = predicted[0].grad[:, 1]
    labelled = [end for end in ends if labels[0, end] != -100]
    assert 8 < len(labelled) < len(ends) and found.nonzero().flatten().tolist() == labelled
    factor = 2 * boundaries.LOSS_WEIGHT * 5 / 56
    gains = (predicted[0][:, 1] - found * model.config.boundary_rate / factor).detach()

    def loss(end, step, unpool=Spider.unpool):
        """Compute the loss with the bytes after a boundary moved by `step` away from the segment
        before."""

        def moved(self, z, null, b, *given, back=0):
            whole, earlier = (unpool(self, z, null, b, *given, back=back) for back in (0, 1))
            return whole + step * (last_boundary(b) == end)[:, None] * (whole - earlier)

        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(Spider, "unpool", moved)
            out = model(ids, labels, noise_seed=0)
        return out.nats_per_byte + out.loss_terms["core_loss"]

    for end in labelled:
        slope = (loss(end, 1e-5) - loss(end, -1e-5)) / 2e-5 * 56
        assert gains[end] == pytest.approx(-slope.item(), rel=1e-4, abs=1e-6), end


@pytest.mark.parametrize("nats, target", ((2.0, 2.0), (50.0, 3.0), (-50.0, -3.0)))
def test_a_gain_beyond_three_nats_counts_as_three(nats, target):
    """Bytes 1 and 2 receive their segment instead of zero; a nat weighs half of the loss."""
    predictor, cu = predictor_of(0.25), torch.tensor([0, 3], dtype=torch.int32)
    predicted = torch.tensor([[0.0, 0.3]] * 3, requires_grad=True)
    unpooled = torch.tensor([[0.0], [1.0], [1.0]])
    packing = Packing.build(cu, 3, 3, small_config(), torch.float32)
    out, observed = predictor.observe(
        predicted,
        torch.full((3,), 65),
        torch.tensor([0.0, 1.0, 0.0]),
        packing,
        unpooled,
        torch.zeros(3, 1),
    )
    observed.nat_weight, observed.counted = torch.tensor(0.5), torch.ones(3, dtype=torch.bool)
    (-0.5 * nats / 2 * out.sum()).backward()
    slope = 2 * boundaries.LOSS_WEIGHT * 0.5 / 0.25 * (0.3 - target)
    torch.testing.assert_close(predicted.grad, torch.tensor([[0, 0], [0, slope], [0, 0]]))


def test_surprise_is_fitted_to_losses_up_to_twelve_nats():
    predictor = predictor_of()
    predictor.entropy[65] = 0.5
    predictor.mean_loss.fill_(2.0)
    observed = boundaries.Observed(
        torch.tensor([[0.25, 9.0]] * 3), torch.full((3,), 65), torch.zeros(0)
    )
    loss = predictor.surprise_loss(
        observed,
        torch.tensor(0.0),
        torch.tensor([4.0, 50.0, 4.0]),
        torch.tensor([True, True, False]),
    )
    torch.testing.assert_close(loss, torch.tensor(boundaries.LOSS_WEIGHT * (1.25**2 + 9.25**2)))


def test_the_predictor_changes_no_value_and_no_other_gradient(monkeypatch):
    ids, results = documents(20, 25, 3), []
    for observes in (True, False):
        model = learner()
        if not observes:
            monkeypatch.setattr(
                SurprisePredictor,
                "observe",
                lambda self, predicted, ids, b, packing, unpooled, earlier: (unpooled, None),
            )
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


def test_a_loss_other_than_the_models_leaves_the_gain_without_a_gradient():
    model, ids = learner(), text(2, 24)
    F.cross_entropy(model(ids, noise_seed=0).logits.flatten(0, 1), ids.flatten()).backward()
    assert not any(
        grad is not None and grad.any()
        for name, grad in gradients(model).items()
        if name.startswith(PREDICTOR)
    )


def test_pairs_lie_within_documents_and_entropies_are_those_of_the_next_byte():
    model, (a, b, c) = learner(), b"abc"
    model.boundary_predictor.init_weights()
    ids = torch.tensor([[BOS_ID, *b"abacab", EOS_ID, BOS_ID, *b"ba", EOS_ID, PAD_ID]])
    counted, predictor = model(ids, ids, noise_seed=0).boundary_counts, model.boundary_predictor
    assert counted[:BINS].sum() == 10  # scores of all bytes but EOS and PAD
    model.update_boundaries(counted, 2.5)
    counts = {
        (first, then): int(predictor.pairs[first, then])
        for first, then in predictor.pairs.nonzero().tolist()
    }
    assert counts == {
        (BOS_ID, a): 1,
        (a, b): 2,
        (a, c): 1,
        (b, a): 2,
        (c, a): 1,
        (b, EOS_ID): 1,
        (a, EOS_ID): 1,
        (BOS_ID, b): 1,
    }
    of_a, of_b, two = math.log(4) - math.log(2) / 2, math.log(3) - 2 * math.log(2) / 3, math.log(2)
    expected = torch.tensor([of_a, of_b, 0, two]) - (4 * of_a + 3 * of_b + 2 * two) / 10
    torch.testing.assert_close(predictor.entropy[[a, b, c, BOS_ID]].float(), expected)


@pytest.mark.parametrize("row", ([PAD_ID] * 8, [EOS_ID] * 8, [BOS_ID] * 8), ids=str)
def test_a_step_without_a_pair_of_bytes_leaves_all_buffers_finite(row):
    model = learner()
    model.boundary_predictor.init_weights()
    for ids in (torch.tensor([row]), text(1, 32)):
        out = model(ids, ids.masked_fill(ids == PAD_ID, -100), noise_seed=0)
        model.update_boundaries(out.boundary_counts, out.nats_per_byte.item())
        assert out.loss.isfinite() and all(x.isfinite().all() for x in model.buffers())


def test_all_other_weights_start_as_with_words():
    def initial(rule):
        torch.manual_seed(3)
        return Spider(small_config(boundaries=rule)).state_dict()

    learned = initial("learned")
    assert all(torch.equal(p, learned[name]) for name, p in initial("words").items())


def test_learned_boundaries_find_the_bytes_before_a_surprise(monkeypatch):
    """A letter at random follows every third digit. Entropies of pairs do not tell, since the
    digits are 1, 2 and 1."""
    monkeypatch.setattr(boundaries, "TRUST", (5, 10))
    model = Spider(small_config(boundaries="learned", boundary_rate=0.25)).train()
    optimizers, generator = Optimizers(model, lr=0.02), torch.Generator().manual_seed(0)
    for step in range(60):
        ids = torch.randint(97, 113, (8, 65), generator=generator)
        ids[:, 1::4], ids[:, 2::4], ids[:, 3::4] = 49, 50, 49
        train.step_alone(model, optimizers, [Batch.of(ids[:, :-1], ids[:, 1:], step)], 2)
    share = boundaries_of(model.eval(), ids[:, :-1]).view(8, 16, 4).mean((0, 1))
    assert share[3] > 0.9 and share[:3].max() < 0.1, share
