"""The table of the kinds of parameters: every parameter of the model has a row of its own, and the rows keep the
rules."""

import pytest
import torch
from torch import nn

from conftest import small_config
from spider.model.config import PRESETS, SpiderConfig
from spider.model.parameters import KINDS, NEVER_FP8, Optimizer, Precision, kinds_of, takes_fp8
from spider_model import Spider

DEFAULTS = KINDS[-6:]                     # rows for whatever a researcher adds
CONFIGS = {name: SpiderConfig.preset(name) for name in PRESETS} | {
    "test": small_config(places=2),
    "learned boundaries": small_config(boundaries="learned", engram_votes=2, engram_logits=True)}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_has_a_row_of_its_own_and_no_row_is_without_a_parameter(name):
    with torch.device("meta"):
        model, others = Spider(CONFIGS[name]), [Spider(CONFIGS[other]) for other in ("test", "learned boundaries")]
    kinds = kinds_of(model)
    assert kinds.keys() == dict(model.named_parameters()).keys() and not set(kinds.values()) & set(DEFAULTS)
    assert {kind for other in others for kind in kinds_of(other).values()} == set(KINDS) - set(DEFAULTS)


@pytest.mark.parametrize("name", CONFIGS)
def test_fp8_takes_every_linear_but_those_that_are_named(name):
    with torch.device("meta"):
        model = Spider(CONFIGS[name])
    for path, module in model.named_modules():
        named = any(word in path for word in NEVER_FP8)
        assert takes_fp8(module, path) == (isinstance(module, nn.Linear) and not named)


def test_vectors_and_tables_have_no_decay_and_fp8_is_of_muons_matrices():
    with torch.device("meta"):
        model = Spider(CONFIGS["test"])
    for name, kind in kinds_of(model).items():
        if name.endswith(("table.weight", "log_A", "dt", "core.B", "null_segment")):
            assert not kind.decay, name
        if kind.precision is not Precision.FP32:
            assert kind.optimizer is Optimizer.MUON, name
