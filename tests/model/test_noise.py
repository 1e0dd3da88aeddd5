"""Noise and dropout are functions of seed and position."""

import torch

import spider_model
from conftest import awake, small_config, text
from spider.model.boundaries import STRAY_SITE
from spider.model.noise import apply_dropout, byte_noise, uniform
from spider_model import Spider

CPU = torch.device("cpu")


def correlation(a, b):
    return abs(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1])


def test_noise_is_uniform_and_neighbours_are_not_correlated():
    noise = uniform(byte_noise(7, 200, 500, CPU))
    assert noise.min() > 0 and noise.max() < 1
    assert abs(noise.mean() - 1 / 2) < 0.005
    assert abs(noise.var() - 1 / 12) < 0.002
    assert correlation(noise[:, 1:], noise[:, :-1]) < 0.02
    assert correlation(noise[1:], noise[:-1]) < 0.02


def test_dropout_drops_its_share_without_a_pattern_and_keeps_the_mean():
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


def test_each_place_of_dropout_has_a_site_of_its_own(monkeypatch):
    sites = []
    monkeypatch.setattr(
        spider_model, "apply_dropout", lambda x, rate, noise, site: sites.append(site) or x
    )
    ids = text(1, 48)
    Spider(small_config())(ids, ids, n_loops=1, noise_seed=0, dropout=0.5)
    assert len(sites) == len({*sites, STRAY_SITE}) - 1 == 4


def test_dropout_applies_in_training_alone_by_the_seeds_of_rows():
    """The witness of --dropout has its rates and sites."""
    ids = text(4, 48, seed=8)
    model = awake(small_config())

    @torch.no_grad()
    def nats(ids, seed, dropout=0.5):
        return model(ids, ids, noise_seed=seed, dropout=dropout).nats_per_byte

    assert abs(nats(ids, 0) - nats(ids, 0, dropout=0.0)) > 1e-5
    row_by_row = torch.stack([nats(ids[i : i + 1], seed=i) for i in range(4)])
    torch.testing.assert_close(nats(ids, 0), row_by_row.mean())
    model.eval()
    assert nats(ids, 0) == nats(ids, 0, dropout=0.0)
