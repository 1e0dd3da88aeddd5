"""Counter-based noise, and dropout by it."""

import pytest
import torch

import spider_model
from conftest import awake, small_config, text
from spider.model.noise import byte_noise, dropped, uniform


def check_noise():
    """A row's noise is a function of seed + row alone: however a batch is split, its rows keep theirs."""
    whole = spider_model.byte_noise(1000, 8, 16, torch.device("cpu"))
    halves = [spider_model.byte_noise(1000 + i, 4, 16, torch.device("cpu")) for i in (0, 4)]
    assert torch.equal(whole, torch.cat(halves))


def check_uniform(noise):
    """Of numbers in (0, 1), [rows, columns]: as many of each size, and neighbours that say nothing of one another."""
    assert 0 < noise.min() and noise.max() < 1
    assert abs(noise.mean() - 1 / 2) < 0.005 and abs(noise.var() - 1 / 12) < 0.002
    for a, b in ((noise[:, 1:], noise[:, :-1]), (noise[1:], noise[:-1])):
        assert abs(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]) < 0.02


def test_noise_is_uniform_and_splits_with_the_batch():
    check_noise()
    check_uniform(uniform(byte_noise(7, 200, 500, torch.device("cpu"))))
    check_uniform(uniform(byte_noise(None, 200, 500, torch.device("cpu"))))


def test_dropout_drops_its_part_of_each_row_and_column_and_leaves_the_mean():
    noise, x = byte_noise(3, 1, 2000, torch.device("cpu"))[0], torch.ones(2000, 400)
    first, other = (dropped(x, 0.25, noise, site) for site in (0, 1))
    assert set(first.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    out = (first == 0).float()
    assert abs(out.mean() - 0.25) < 0.002
    assert (out.mean(0) - 0.25).abs().max() < 0.05 and (out.mean(1) - 0.25).abs().max() < 0.11  # five sigma
    for a, b in ((out[:, 1:], out[:, :-1]), (out[1:], out[:-1]), (out, (other == 0).float())):
        assert abs(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]) < 0.01


@pytest.mark.parametrize("cut", ({}, dict(boundaries="words", places=3, core_loss_weight=0.2)), ids=str)
def test_dropout_is_of_training_a_function_of_the_rows_seed_and_falls_where_it_says(cut):
    def nats(model, ids, seed):
        return model(ids, ids, noise_seed=seed).nats_per_byte
    ids = text(4, 48, seed=8)
    model = awake(small_config(**cut))
    with torch.no_grad():
        plain, evaluated = nats(model, ids, 0), nats(model.eval(), ids, 0)
        model.dropout = 0.5
        assert nats(model, ids, 0) == evaluated
        model.train()
        assert abs(nats(model, ids, 0) - plain) > 1e-5 and nats(model, ids, 0) == nats(model, ids, 0)
        rows = torch.stack([nats(model, ids[i:i + 1], i) for i in range(4)])
        torch.testing.assert_close(nats(model, ids, 0), rows.mean())
    seen, predict = {}, model.predict_boundaries
    model.predict_boundaries = lambda x: seen.update({"prelude": x}) or predict(x)
    for name, module in (("core", model.core.layers[0]), ("handed", model.core.out_proj), ("coda", model.coda[0])):
        module.register_forward_pre_hook(lambda module, args, name=name: seen.update({name: args[0]}))
    with torch.no_grad():
        model.core.loop_embedding.zero_()
        segments = int(model(ids, n_loops=1, noise_seed=0).segments)
    out = {name: rows[:segments if name in ("core", "handed") else None] == 0 for name, rows in seen.items()}
    for name, other, rate in (("core", "handed", 0.5), ("handed", "core", 0.5), ("prelude", "coda", 0.1),
                              ("coda", "prelude", 0.1)):
        assert abs(out[name].float().mean() - rate) < rate / 5, name
        assert abs(out[name][out[other]].float().mean() - rate) < rate / 2, "sites share what they drop"


def noise_of_the_batch(seed, sequences, length, device):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1 << 62, (sequences, length), generator=generator)


def test_noise_that_depends_on_the_batch_split_is_noticed(monkeypatch):
    monkeypatch.setattr(spider_model, "byte_noise", noise_of_the_batch)
    with pytest.raises(AssertionError):
        check_noise()
