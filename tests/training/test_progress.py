"""Spikes and explosions of the loss are told from noise."""

import itertools

import numpy as np
from conftest import run

import data
import train
from spider.training.progress import RunProgress


def test_spikes_and_explosions_are_told_from_noise():
    progress, noise = RunProgress(), np.random.default_rng(0)
    for progress.step in range(200):
        assert not progress.watch(2 + 0.1 * noise.normal()) and not progress.exploded
    assert progress.watch(2.9) and not progress.exploded
    assert progress.watch(5.6) and progress.exploded
    progress.watch(2.0)
    assert not progress.exploded
    progress.skipped = 1
    assert progress.exploded


def test_a_spike_is_logged_with_the_command_that_shows_its_batch(tmp_path, shards, monkeypatch, capsys):
    update, steps = train.update, itertools.count(1)

    def spiked(*args, **options):
        numbers = update(*args, **options)
        return numbers | dict(loss=numbers["loss"] + 5.0 * (next(steps) == 30))
    monkeypatch.setattr(train, "update", spiked)
    run(tmp_path, shards, "--seed", "3", steps=32)
    said, = [line for line in capsys.readouterr().err.splitlines() if "is a spike" in line]
    command = said[said.index("data.py show"):].split()[1:]
    assert "step 30 " in said and command[2:] == "--seq_len 32 --seed 3 --first 58 --count 2".split()
    assert data.main(command) == 0 and len(capsys.readouterr().out.splitlines()) >= 2
