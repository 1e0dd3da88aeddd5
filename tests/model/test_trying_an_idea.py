"""The page docs/guide/trying-an-idea.md runs as it stands: its model decodes as it trains, and train.py trains it."""

import json
import re

import pytest
import torch

from conftest import ROOT, awake, run_flags, small_config, text
from spider.training.checkpoint_contents import foreign_classes
from spider.model.parameters import Optimizer, kinds_of
from spider_model import Spider

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "guide" / "trying-an-idea.md").read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def page() -> dict:
    """Names of the page's blocks, run one after the other."""
    names = {"__name__": "my_idea"}
    for block in BLOCKS:
        exec(block, names)
    return names


def test_each_idea_of_the_page_is_shorter_than_thirty_lines():
    assert len(BLOCKS) == 4 and max(len(block.splitlines()) for block in BLOCKS) < 30


def test_the_ideas_train_and_decode_step_by_step_as_in_the_full_pass(page):
    model, ids = page["MySpider"](small_config()), text(2, 24)
    out = model.train()(ids, ids, noise_seed=0)
    out.loss.backward()
    assert out.loss_terms["logit_z_loss"] > 0
    torch.testing.assert_close(out.loss.detach(), out.nats_per_byte.detach() + sum(out.loss_terms.values()))
    new = dict(model.named_parameters()).keys() - dict(Spider(small_config()).named_parameters()).keys()
    assert len(new) == 2 + 4              # scales of prelude and coda; gates of four layers
    assert all(model.get_parameter(name).grad.abs().sum() > 0 for name in new if "prelude" in name or "coda" in name)
    kinds = kinds_of(model)
    assert {kinds[name].optimizer for name in new if name.endswith("scale")} == {Optimizer.ADAMW}
    assert {kinds[name].optimizer for name in new if name.endswith("gate_proj.weight")} == {Optimizer.MUON}
    with torch.no_grad():
        full, state = model.eval()(ids).logits, model.decoding_state(2)
        stepped = torch.cat([model.step(part, state) for part in ids.split([9, 1, 14], dim=1)], dim=1)
    torch.testing.assert_close(stepped, full, rtol=0, atol=2e-5)


def test_train_py_trains_them_and_logs_the_loss_by_its_name(page, tmp_path, shards):
    assert page["main"](run_flags(shards, tmp_path / "run", "--precision", "fp32", steps=2)) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["logit_z_loss"] > 0 for line in lines)


def test_a_model_names_the_classes_that_are_not_ours(page):
    assert foreign_classes(awake(small_config())) == []
    model = page["MySpider"](small_config())
    assert foreign_classes(model) == ["my_idea.GatedMLA", "my_idea.MySpider", "my_idea.ScaledBlock"]
