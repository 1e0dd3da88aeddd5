"""Segment boundaries: FlexiTokens, words, and learned boundaries with their predictor."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from conftest import awake, documents, gradients, small_config, text
from spider.model import boundaries, segments
from spider.model.boundaries import N_BINS, SurprisePredictor
from spider_model import Spider
from tokenizer import BOS_ID, EOS_ID, PAD_ID


def boundaries_of(model: Spider, ids: Tensor, **options) -> Tensor:
    """Return the boundaries b of a pass, shaped like ids."""
    collected = []
    decide = model.boundaries
    model.boundaries = lambda *given: collected.append(decide(*given)) or collected[-1]
    with torch.no_grad():
        model(ids, **options)
    del model.boundaries
    return collected[0].view(ids.shape)


# --------------------------------------------------------------------------------------------------
# Words and FlexiTokens


def test_words_never_end_at_the_first_byte_of_a_document():
    ids = torch.tensor([[BOS_ID, *b"ab", EOS_ID, *b" cd.", EOS_ID, *b".e"]])
    model = awake(small_config(boundaries="words")).eval()
    assert boundaries_of(model, ids).tolist() == [[0, 0, 0, 1, 0, 0, 0, 1, 1, 0, 0]]


def test_eos_ends_a_segment_and_pad_never_does():
    model = awake(small_config())
    ids = torch.cat((documents(9, 7), torch.full((1, 4), PAD_ID)), dim=1)
    bias = model.boundary_predictor[2].bias
    bias.data.fill_(-100)
    assert boundaries_of(model, ids).flatten().nonzero().flatten().tolist() == [8, 15]
    loss = boundaries.boundary_loss(torch.zeros(4), ids[:, -4:], model.config)  # only PAD
    assert loss == pytest.approx(1 / 3 - 3 * 0.023)
    bias.data.fill_(100)
    assert boundaries_of(model, ids).flatten().tolist() == [1] * 16 + [0] * 4


# --------------------------------------------------------------------------------------------------
# Learned boundaries: deciding


def predictor_of(rate: float = 0.19) -> SurprisePredictor:
    predictor = SurprisePredictor(8, 272, rate)
    predictor.init_weights()
    return predictor


@pytest.mark.parametrize("rate", (0.0513, 0.19, 0.413))
@pytest.mark.parametrize("spread", (0.0, 1e-5, 0.5))
def test_threshold_keeps_the_configured_rate_even_with_equal_bytes(rate, spread):
    predictor = predictor_of(rate)
    generator = torch.Generator().manual_seed(0)
    position = torch.arange(16400)
    for _ in range(80):
        ids = torch.randint(97, 110 if spread else 98, (16400,), generator=generator).clamp_max(105)
        predicted = spread * torch.randn(16400, 2, generator=generator)
        ends = predictor.boundaries(predicted, ids, position, None)
        assert ends.float().mean() == pytest.approx(rate, rel=0.2), int(predictor.steps)
        predictor.update(predictor.count(predicted, ids, position), 2.0)
    if not spread:
        gaps = ends.nonzero().diff(dim=0).float()
        assert gaps.std() < 0.3 * gaps.mean()  # for random gaps the two are equal


# --------------------------------------------------------------------------------------------------
# Learned boundaries: the step's update


def test_pairs_lie_within_documents_and_sentinels_have_no_score():
    model = learner()
    predictor = model.boundary_predictor
    predictor.init_weights()
    texts = (BOS_ID, *b"abacab", EOS_ID), (BOS_ID, *b"ba", EOS_ID), (*b"d",), (BOS_ID, PAD_ID)
    ids = torch.tensor([[i for text in texts for i in text]])
    counts = model(ids, ids, noise_seed=0).boundary_counts
    assert counts[:N_BINS].sum() == 12  # EOS and PAD have no score
    model.update_boundaries(counts, 2.5)
    a, b, c = b"abc"
    pairs = predictor.pairs
    assert {(i, j): int(pairs[i, j]) for i, j in pairs.nonzero().tolist()} == {
        (BOS_ID, a): 1,
        (BOS_ID, b): 1,
        (a, b): 2,
        (a, c): 1,
        (a, EOS_ID): 1,
        (b, a): 2,
        (b, EOS_ID): 1,
        (c, a): 1,
    }


@pytest.mark.parametrize("sequence", ([PAD_ID] * 8, [EOS_ID] * 8, [BOS_ID] * 8), ids=str)
def test_step_without_byte_pairs_keeps_all_buffers_finite(sequence):
    """Without scores the threshold does not change."""
    model = learner()
    model.boundary_predictor.init_weights()
    before = model.boundary_predictor.threshold.clone()
    for ids in (torch.tensor([sequence]), text(1, 32)):
        out = model(ids, ids.masked_fill(ids == PAD_ID, -100), noise_seed=0)
        model.update_boundaries(out.boundary_counts, out.nats_per_byte.item())
        if ids[0, 0] in (PAD_ID, EOS_ID):
            assert torch.equal(model.boundary_predictor.threshold, before)
        assert out.loss.isfinite()
        assert all(buffer.isfinite().all() for buffer in model.buffers())


# --------------------------------------------------------------------------------------------------
# Learned boundaries: the predictor's losses

PREDICTOR = "boundary_predictor."
BY_BYTE = dict(
    boundaries="learned",
    segment_offsets=3,
    core_loss_weight=0.2,
    aux_loss_weight=0.0,
    z_loss_weight=0.0,
    ponder_weight=0.0,
)  # leaves only loss terms that are means over bytes


def learner() -> Spider:
    """Make a model in float64, for exact comparisons."""
    return awake(small_config(**BY_BYTE), dtype=torch.float64)


def test_gain_is_the_loss_change_from_unpooling_the_previous_segment(
    monkeypatch,
):
    """Compare with finite differences. Only boundaries at labelled bytes count."""
    model = learner()
    ids = documents(31, 17, 12)
    labels = text(1, 60, seed=3)
    labels[0, 20:24] = -100
    ends = boundaries_of(model, ids, noise_seed=0).flatten().nonzero().flatten().tolist()
    labelled = [end for end in ends if labels[0, end] != -100]
    assert 8 < len(labelled) < len(ends)

    predicted = []
    predict = model.predict_boundaries
    model.predict_boundaries = lambda x: predicted.append(predict(x)) or predicted[-1]
    out = model(ids, labels, noise_seed=0)
    predicted[0].retain_grad()
    (5 * out.loss).backward()  # the gain must not depend on the weight of the loss
    grad = predicted[0].grad[:, 1]
    assert grad.nonzero().flatten().tolist() == labelled
    slope_of_error = 2 * boundaries.LOSS_WEIGHT * 5 / 56 / model.config.boundary_rate
    gains = (predicted[0][:, 1] - grad / slope_of_error).detach()

    def loss(end: int, step: float) -> Tensor:
        """Return the loss if bytes after boundary `end` receive their segment plus `step` times its
        difference to the previous segment."""

        def moved(*outputs, b, back=0, **given):
            whole = segments.unpool_segments(*outputs, b, back=back, **given)
            earlier = segments.unpool_segments(*outputs, b, back=1, **given)
            return whole + step * (segments.last_boundary(b) == end)[:, None] * (whole - earlier)

        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr("spider_model.unpool_segments", moved)
            out = model(ids, labels, noise_seed=0)
        return out.nats_per_byte + out.loss_terms["core_loss"]

    for end in labelled:
        slope = (loss(end, 1e-5) - loss(end, -1e-5)) / 2e-5 * 56
        assert gains[end] == pytest.approx(-slope.item(), rel=1e-4, abs=1e-6), end


@pytest.mark.parametrize("nats, target", ((2.0, 2.0), (50.0, 3.0), (-50.0, -3.0)))
def test_gains_are_clamped_to_three_nats(nats, target):
    """Bytes 1 and 2 receive their segment instead of zero; one nat is half of the loss."""
    gain = torch.full((3,), 0.3, requires_grad=True)
    unpooled = torch.tensor([[0.0], [1.0], [1.0]])
    ends = torch.tensor([0.0, 1.0, 0.0])
    out, zero_nats = boundaries.GainRegression.apply(unpooled, gain, ends, torch.zeros(3, 1), 0.25)
    (-0.5 * nats / 2 * out.sum() + 0.5 * zero_nats.sum()).backward()
    slope = 2 * boundaries.LOSS_WEIGHT * 0.5 / 0.25 * (0.3 - target)
    torch.testing.assert_close(gain.grad, torch.tensor([0, slope, 0]))


def test_surprise_targets_are_clamped_to_twelve_nats():
    losses = torch.tensor([4.0, 50.0, 4.0])
    has_label = torch.tensor([True, True, False])
    loss = boundaries.surprise_loss(torch.full((3,), 2.75), losses, has_label)
    torch.testing.assert_close(loss, torch.tensor(boundaries.LOSS_WEIGHT * (1.25**2 + 9.25**2)))


def test_predictor_changes_no_output_and_no_other_gradient(monkeypatch):
    ids = documents(20, 25, 3)

    def logits_and_gradients():
        model = learner()
        out = model(ids, ids.roll(-1), noise_seed=0)
        out.loss.backward()
        return out.logits, gradients(model)

    logits, grads = logits_and_gradients()
    monkeypatch.setattr(
        SurprisePredictor,
        "observe",
        lambda self, predicted, ids, b, packing, unpooled, earlier: (unpooled, None),
    )
    unobserved_logits, unobserved = logits_and_gradients()
    assert torch.equal(logits, unobserved_logits)
    for name, grad in grads.items():
        if name.startswith(PREDICTOR):
            assert grad.abs().sum() > 0 and unobserved[name] is None, name
        elif grad is not None:
            torch.testing.assert_close(grad, unobserved[name], rtol=1e-10, atol=1e-14, msg=name)


def test_external_loss_gives_the_predictor_no_gradient():
    model = learner()
    ids = text(2, 24)
    F.cross_entropy(model(ids, noise_seed=0).logits.flatten(0, 1), ids.flatten()).backward()
    for name, grad in gradients(model).items():
        if name.startswith(PREDICTOR):
            assert grad is None or not grad.any(), name
