"""The page docs/guide/your-own-loop.md runs as it stands, but for sizes."""

import re
import warnings
from pathlib import Path

import pytest
import torch

from conftest import ROOT
from spider.checkpoint import load_checkpoint
from spider.inference import model_of
from spider.memory import EngramTable
from spider_model import Spider

BLOCKS = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs" / "guide" / "your-own-loop.md").read_text(), re.DOTALL
)
SIZES, SMALLER = (
    f"steps, rows, length, peak = {numbers}\n"
    for numbers in ("200, 4, 512, 0.01", "12, 2, 128, 0.02")
)


@pytest.mark.parametrize(
    "under_trainer", (False, pytest.param(True, marks=pytest.mark.slow)), ids=("own", "Trainer")
)
def test_every_block_of_the_page_runs_and_moves_every_table(
    under_trainer, tmp_path, monkeypatch, capsys
):
    """Trainer's block apart, whose imports take longer than all others."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(EngramTable, "warned", False)
    (tmp_path / "text.txt").write_bytes((ROOT / "LICENSE").read_bytes())
    assert BLOCKS[0].count(SIZES) == 1 and ["Trainer" in block for block in BLOCKS] == [
        False
    ] * 3 + [True]
    names, models = {}, []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*Engram tables")
        for block in BLOCKS:
            if under_trainer or "Trainer" not in block:
                exec(block.replace(SIZES, SMALLER), names)
                models.append(names["model"])
    assert len({*map(id, models)}) == 1 + under_trainer and models[0] is models[2]
    losses = [float(loss) for loss in re.findall(r"step \d+: (\S+) nats", capsys.readouterr().out)]
    assert len(losses) == 2 and losses[1] < 4 < 5 < losses[0]
    for model in models:
        tables = [module for module in model.modules() if isinstance(module, EngramTable)]
        assert len(tables) == 3 and all(
            table.weight.any() and not table.gathered() for table in tables
        )
    state = load_checkpoint(Path("spider-step200.pt"))
    assert model_of(state, torch.device("cpu"), torch.float32, Spider).config == names["config"]
