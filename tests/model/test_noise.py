"""Noise and dropout as functions of seed and position."""

import torch

import spider_model
from conftest import awake, small_config, text
from spider.model.boundaries import STRAY_SITE
from spider.model.noise import apply_dropout, byte_noise, uniform
from spider_model import Spider

CPU = torch.device("cpu")


def correlation(a, b):
    return abs(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1])


def test_noise_is_uniform_and_neighbors_are_uncorrelated():
    noise = uniform(byte_noise(7, 200, 500, CPU))
    assert noise.min() > 0 and noise.max() < 1
    assert abs(noise.mean() - 1 / 2) < 0.005
    assert abs(noise.var() - 1 / 12) < 0.002
    assert correlation(noise[:, 1:], noise[:, :-1]) < 0.02
    assert correlation(noise[1:], noise[:-1]) < 0.02


def test_dropout_zeroes_its_rate_without_a_pattern_and_rescales():
    noise = byte_noise(3, 1, 2000, CPU)[0]
    x = torch.ones(2000, 400)
    y = apply_dropout(x, 0.25, noise, site=0)
    assert set(y.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    mask = (y == 0).float()
    assert abs(mask.mean() - 0.25) < 0.002
    other_site = (apply_dropout(x, 0.25, noise, site=1) == 0).float()
    assert correlation(mask, other_site) < 0.01
    assert correlation(mask[:, 1:], mask[:, :-1]) < 0.01
    assert correlation(mask[1:], mask[:-1]) < 0.01


def test_each_dropout_has_its_own_site(monkeypatch):
    sites = []
    monkeypatch.setattr(
        spider_model, "apply_dropout", lambda x, rate, noise, site: sites.append(site) or x
    )
    ids = text(1, 48)
    Spider(small_config())(ids, ids, n_loops=1, noise_seed=0, dropout=0.5)
    assert len(sites) == len({*sites, STRAY_SITE}) - 1 == 4


def test_dropout_applies_only_in_training_with_a_seed_per_sequence():
    """test_witnesses.py has the rates at each site."""
    ids = text(4, 48, seed=8)
    model = awake(small_config())

    @torch.no_grad()
    def nats(ids, seed, dropout=0.5):
        return model(ids, ids, noise_seed=seed, dropout=dropout).nats_per_byte

    assert abs(nats(ids, 0) - nats(ids, 0, dropout=0.0)) > 1e-5
    one_by_one = torch.stack([nats(ids[i : i + 1], seed=i) for i in range(4)])
    torch.testing.assert_close(nats(ids, 0), one_by_one.mean())
    model.eval()
    assert nats(ids, 0) == nats(ids, 0, dropout=0.0)
