"""The code of docs/guide/your-own-loop.md runs as printed, with smaller sizes."""

import re
import warnings
from pathlib import Path

import pytest
import torch

from conftest import ROOT, code_blocks, has_lookups
from spider.inference.load import model_of
from spider.model.memory import EngramTable, tables_of
from spider.training.checkpoint import load_checkpoint
from spider_model import Spider

# Three blocks train a model, save it, and train it with another optimizer. The last block trains a
# model with transformers' Trainer, whose imports take longer than all the rest.
*OWN_LOOP, TRAINER = code_blocks("guide/your-own-loop.md")
SIZES = "steps, rows, length, peak = 200, 4, 512, 0.01\n"
SMALLER = "steps, rows, length, peak = 12, 2, 64, 0.02\n"


@pytest.mark.parametrize(
    "blocks",
    (OWN_LOOP, pytest.param([*OWN_LOOP, TRAINER], marks=pytest.mark.slow)),
    ids=("own", "Trainer"),
)
def test_every_code_block_runs_and_trains_every_table(blocks, tmp_path, monkeypatch, capsys):
    assert OWN_LOOP[0].count(SIZES) == 1
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(EngramTable, "warned", False)
    (tmp_path / "text.txt").write_bytes((ROOT / "LICENSE").read_bytes())
    names = {}
    models = []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*Engram tables")
        for block in blocks:
            exec(block.replace(SIZES, SMALLER), names)
            models.append(names["model"])
    assert (models[-1] is models[0]) == (blocks is OWN_LOOP)
    first, last = (
        float(loss) for loss in re.findall(r"step \d+: (\S+) bits", capsys.readouterr().out)
    )
    assert last < 5.8 < 7.2 < first
    for model in models:
        tables = tables_of(model)
        assert len(tables) == 3
        assert all(table.weight.any() and not has_lookups(table) for table in tables)
    state = load_checkpoint(Path("spider-step200.pt"))
    assert model_of(state, torch.device("cpu"), torch.float32, Spider).config == names["config"]
