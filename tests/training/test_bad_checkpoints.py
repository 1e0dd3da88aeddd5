"""Damaged checkpoints, hundreds of them: each is read, or refused in one line that names it."""

import copy
import math
import os
import random
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import train
from conftest import make_shards, run, run_flags
from fuzzing import JUNK, mutated
from spider.console import one_line
from spider.errors import CheckpointError
from spider.model.config import SpiderConfig
from spider.training.checkpoint_format import walk
from spider.training.checkpoint_loading import find_checkpoints, load_checkpoint
from spider_model import Spider


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch):
    """No waiting for the disk: hundreds of cases, and no power cut among them."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict:
    """The state of a small run after three steps, the last of which owes its evaluation."""
    root = tmp_path_factory.mktemp("trained")
    path = run(root, make_shards(root / "data"), steps=3) / "spider-step3.pt"
    state = torch.load(path)
    return state | dict(owed=dict(step=3, loss=2.0, skipped=False, grad_norm=1.0, lr=0.1))


@pytest.mark.parametrize("value", ((0,) * 200_000, (0, 0), (-1,), tuple(range(200_000)), (1 << 31,)))
@pytest.mark.parametrize("name", [f.name for f in fields(SpiderConfig) if type(f.default) is tuple])
def test_a_long_or_odd_list_in_the_config_of_a_checkpoint_is_refused_before_anything_is_built(
        tmp_path, trained, name, value):
    """Of 200,000 layers with Engram, a state to decode with would be of 419 GB."""
    torch.save(trained | dict(cfg=trained["cfg"] | {name: value}), path := tmp_path / "spider-step3.pt")
    with pytest.raises(CheckpointError, match=name):
        load_checkpoint(path, lambda config: pytest.fail("built"))
    with pytest.raises(ValueError, match=name):
        SpiderConfig(**{"n_recurrent_layers": 0, name: value})


def read_or_refused(path: Path, capsys) -> bool:
    """Tell whether a checkpoint is read; fail unless what is said is printable, and a refusal names the file in a
    line."""
    try:
        load_checkpoint(path, Spider, sealed=False)
        return True
    except CheckpointError as fault:
        assert one_line(fault).startswith(f"{path}") and len(str(fault)) < 70_000
        assert find_checkpoints(path.parent, Spider) == []
        return False


@pytest.mark.parametrize("cases", (80, pytest.param(400, marks=pytest.mark.slow)))
def test_a_checkpoint_with_altered_bytes_is_read_or_refused_in_a_line(tmp_path, trained, capsys, cases):
    rng, path, read = random.Random(12), tmp_path / "spider-step3.pt", 0
    torch.save(trained, path)
    sound = path.read_bytes()
    pickled = sound.index(b"PK", 4)                           # the plain values come first, the tensors' numbers behind
    for case in range(cases):
        cut = rng.randrange(pickled) if case % 2 else rng.randrange(len(sound) - 8)
        part = mutated(rng, sound[cut:cut + 40])
        path.write_bytes(sound[:cut] + (part + bytes(40))[:40] + sound[cut + 40:] if case % 4 else mutated(rng, sound))
        read += read_or_refused(path, capsys)
    assert cases / 8 < read < cases * 7 / 8


@pytest.mark.parametrize("cases", (48, pytest.param(240, marks=pytest.mark.slow)))
def test_a_checkpoint_with_any_value_altered_goes_on_or_is_refused_in_a_line(tmp_path, trained, capsys, cases):
    rng, path, read, refused = random.Random(13), tmp_path / "spider-step3.pt", 0, 0
    shards = make_shards(tmp_path / "data")
    paths = [keys for keys, value, _ in walk(trained) if keys and keys[0] != "model_state_dict"]
    for case in range(cases):
        *above, last = rng.choice(paths if case % 4 else [keys for keys in paths if len(keys) < 3])
        state = inside = copy.copy(trained)
        for name in above:
            inside[name] = copy.copy(inside[name]) if not isinstance(inside[name], tuple) else list(inside[name])
            inside = inside[name]
        if rng.random() < 0.8:
            inside[last] = rng.choice([*JUNK, math.nan, math.inf, -math.inf, 10 ** 300, 1 << 62, (), torch.ones(3),
                                       "\x1b[2J"])
        elif isinstance(inside, dict):
            inside["no \x1b" if isinstance(last, str) else 99] = inside.pop(last)
        torch.save(state, path)
        if not read_or_refused(path, capsys):
            refused += 1
        elif (read := read + 1) < cases / 8:
            argv = run_flags(shards, tmp_path / "new", "--resume", str(path), steps=4)
            status, said = train.command_line(argv), capsys.readouterr().err.splitlines()
            assert status in (0, 2) and all(line.isprintable() for line in said), (above, last, inside, said)
            shutil.rmtree(tmp_path / "new", ignore_errors=True)
    assert refused > cases / 4 and read > cases / 10
