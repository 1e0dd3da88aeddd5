"""Noise and dropout are functions of seed and position."""

import pytest
import torch

import spider_model
from conftest import awake, small_config, text
from spider.noise import byte_noise, dropped, uniform

CPU = torch.device("cpu")


def correlation(a, b):
    return abs(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1])


def test_noise_is_uniform_and_a_function_of_seed_and_row():
    whole, parts = byte_noise(1000, 8, 16, CPU), [byte_noise(1000 + i, 4, 16, CPU) for i in (0, 4)]
    assert torch.equal(whole, torch.cat(parts))
    for seed in (7, None):
        noise = uniform(byte_noise(seed, 200, 500, CPU))
        assert noise.min() > 0 and noise.max() < 1
        assert abs(noise.mean() - 1 / 2) < 0.005 and abs(noise.var() - 1 / 12) < 0.002
        assert (
            correlation(noise[:, 1:], noise[:, :-1]) < 0.02
            and correlation(noise[1:], noise[:-1]) < 0.02
        )


def test_dropout_drops_its_share_of_each_row_and_column_and_keeps_the_mean():
    noise, x = byte_noise(3, 1, 2000, CPU)[0], torch.ones(2000, 400)
    first, other = (dropped(x, 0.25, noise, site) for site in (0, 1))
    assert set(first.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    out = (first == 0).float()
    assert abs(out.mean() - 0.25) < 0.002
    # five sigma
    assert (out.mean(0) - 0.25).abs().max() < 0.05 and (out.mean(1) - 0.25).abs().max() < 0.11
    for a, b in ((out[:, 1:], out[:, :-1]), (out[1:], out[:-1]), (out, (other == 0).float())):
        assert correlation(a, b) < 0.01


@pytest.mark.parametrize(
    "changes", ({}, dict(boundaries="words", segment_offsets=3, core_loss_weight=0.2)), ids=str
)
def test_dropout_applies_in_training_at_four_sites_by_the_seeds_of_rows(changes, monkeypatch):
    ids, model = text(4, 48, seed=8), awake(small_config(**changes))

    def nats(ids, seed):
        return model(ids, ids, noise_seed=seed).nats_per_byte

    with torch.no_grad():
        plain = nats(ids, 0)
        evaluated, model.dropout = nats(ids, 0) if model.eval() else None, 0.5
        assert nats(ids, 0) == evaluated
        model.train()
        assert abs(nats(ids, 0) - plain) > 1e-5 and nats(ids, 0) == nats(ids, 0)
        torch.testing.assert_close(
            nats(ids, 0), torch.stack([nats(ids[i : i + 1], i) for i in range(4)]).mean()
        )
        sites = []
        monkeypatch.setattr(
            spider_model, "dropped", lambda x, rate, noise, site: sites.append((site, rate)) or x
        )
        nats(ids, 0)
    # bytes, core's input and output, bytes
    assert sites == [(0, 0.1), (1, 0.5), (2, 0.5), (3, 0.1)]
