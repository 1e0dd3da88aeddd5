"""Where segments end: by rules, and learned."""

import pytest
import torch

from conftest import awake, documents, small_config, text
from spider.model.ngrams import shifted_bytes, word_ends
from spider.model.noise import byte_noise
from spider.model.packing import Packing
from spider_model import Spider
from tokenizer import BOS_ID, EOS_ID, PAD_ID


@pytest.mark.parametrize("given, ends", (
    (b"to be, or", b"__x__x___"), (b"self.x_1 = f(a2)\n\n  y", b"____x___x___x__x_____"), (b"  ,,", b"____"),
    ("gr\u00fc\u00df \u4f60\u597d".encode(), b"______x___x__"), (b"a", b"_"),
    ("\u0434\u0430\u00a0\u0438\u2026".encode(), b"____x___x__")))
def test_words_end_at_the_first_byte_that_is_none_of_theirs(given, ends):
    ids = torch.tensor(list(given))
    found = word_ends(shifted_bytes(ids, torch.arange(len(ids)), 2)).squeeze(0)
    assert "".join("x" if end else "_" for end in found) == ends.decode()


def test_no_word_ends_at_the_first_byte_of_a_document():
    ids = torch.tensor([[BOS_ID, *b"ab", EOS_ID, *b" cd.", EOS_ID, *b".e"]])
    model = awake(small_config(boundaries="words")).eval()
    cut = []
    model.boundaries = lambda *given: cut.append(Spider.boundaries(model, *given)) or cut[-1]
    model(ids)
    assert cut[0].tolist() == [0, 0, 0, 1, 0, 0, 0, 1, 1, 0, 0]


def test_a_byte_is_cut_as_often_as_its_probability_and_segments_are_even():
    model = awake(small_config())
    ids = text(1, 64)
    with torch.no_grad():
        model.boundary_predictor[2].weight.normal_(std=0.5)
        cu_seqlens = torch.tensor([0, 64], dtype=torch.int32)
        packing = Packing.build(cu_seqlens, 64, 64, model.config, torch.float32)
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
        predicted = model.predict_boundaries(x)
        p = predicted.squeeze(1).sigmoid()
        shifted = shifted_bytes(ids.flatten(), packing.position, 2)
        cuts = torch.stack([model.boundaries(predicted, ids, shifted, packing, noise) for noise in byte_noise(
            0, 3000, 64, x.device)])
    assert p.std() > 0.05 and (cuts.mean(0) - p).abs().max() < 0.04
    assert (cuts.sum(1) - p.sum()).abs().max() <= 1  # independent draws would differ by several


def test_eos_ends_a_segment_and_pad_never_does():
    model = awake(small_config())
    ids = torch.cat((documents(9, 7), torch.full((1, 4), PAD_ID)), dim=1)
    with torch.no_grad():
        model.boundary_predictor[2].bias.fill_(-100)
        assert model(ids, noise_seed=0).segments == 2
        model.boundary_predictor[2].bias.fill_(100)
        assert model(ids, noise_seed=0).segments == 16


def test_evaluation_cuts_as_often_as_training_within_a_tenth():
    model = awake(small_config())
    ids = text(32, 64, seed=4)
    with torch.no_grad():
        trained = model.train()(ids, noise_seed=5).segments
        evaluated = model.eval()(ids).segments
    assert abs(evaluated / trained - 1) < 0.1
