"""Counts of parameters and FLOPs."""

import re

import torch

from conftest import ROOT, settled
from spider.model import costs
from spider.model.config import SpiderConfig
from spider_model import Spider


def test_the_1b_model_has_996m_parameters_in_the_shares_of_the_design():
    with torch.device("meta"):
        model = Spider(SpiderConfig.preset("1b"))
    table = costs.parameter_table(model)
    total = sum(count for count, _ in table.values())
    assert total == sum(p.numel() for p in model.parameters())
    assert abs(total / 996e6 - 1) < 0.005
    engram = sum(count for name, (count, _) in table.items() if name.startswith("Engram"))
    assert 0.17 < engram / total < 0.19
    assert abs(model.flops_per_byte(10 / 3, 6, 256) / 2.0e9 - 1) < 0.1                     # performance.md's floor
    assert abs(model.flops_per_byte(1, 6, 256) / 4.8e9 - 1) < 0.15


def test_base_has_the_compute_of_1b():
    costs = []
    for preset in ("1b", "base"):
        config = SpiderConfig.preset(preset)
        with torch.device("meta"):
            costs.append(Spider(config).flops_per_byte(config.bytes_per_segment, config.n_loops, 2048))
    assert abs(costs[1] / costs[0] - 1) < 0.15


def test_the_originals_model_is_the_one_set_that_readme_names():
    changes, = re.findall(r"--model 1b --set (\S+)", (ROOT / "README.md").read_text())
    assert settled("--model", "1b", "--set", changes).config == SpiderConfig() != SpiderConfig.preset("1b")
