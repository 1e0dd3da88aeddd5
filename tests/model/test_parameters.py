"""Parameters of the model: the table KINDS, counts, initialization."""

import re

import pytest
import torch
from torch import nn

from conftest import on_meta, small_config
from spider.config import PRESETS, SpiderConfig
from spider.model.layers import Linear
from spider.training import estimate, optim
from spider_model import Block, Spider

CONFIGS = {name: SpiderConfig.preset(name) for name in PRESETS} | {
    "small test": small_config(segment_offsets=2),
    "learned boundaries": small_config(boundaries="learned", engram_votes=2, engram_logits=True),
}


# Parameters that AdamW steps, without layer numbers
BY_ADAMW = """
    embed_tokens null_segment lm_head.weight core.log_A core.dt core.B core.loop_embedding
    core.halt_predictor.weight core.halt_predictor.bias core.layers.moe.router.weight
    core.layers.engram.conv_weight engram_output.gate.weight engram_output.logits.weight
    engram_output.votes.weight boundary_predictor.weight boundary_predictor.bias
    boundary_predictor.regression.weight boundary_predictor.regression.bias
""".split()


def test_every_parameter_has_a_row_in_kinds_and_every_row_a_parameter():
    """The last row is for parameters that users add."""
    used = set()
    by_adamw = set()
    for model in map(on_meta, CONFIGS.values()):
        kinds = optim.kinds_of(model)
        assert kinds.keys() == dict(model.named_parameters()).keys()
        for path, kind in kinds.items():
            used.add(kind.pattern)
            if kind.optimizer == "adamw":
                by_adamw.add(re.sub(r"\.\d+", "", path))
            else:
                assert kind.optimizer == ("adagrad" if "table" in path else "muon"), path
            assert kind.rate == (1 / 8 if "regression" in path else 1), path
    assert used == {kind.pattern for kind in optim.KINDS[:-1]}
    assert by_adamw == {*BY_ADAMW}


@pytest.mark.parametrize("preset", ("1b", "original"))
def test_1b_and_original_have_the_designed_parameters_and_flops(preset):
    model = on_meta(SpiderConfig.preset(preset))
    total = sum(count for count, _ in estimate.parameter_table(model).values())
    assert total == sum(p.numel() for p in model.parameters())
    assert abs(total / 996e6 - 1) < 0.005
    assert abs(estimate.flops_per_byte(model, 10 / 3, 6, 256) / 2.0e9 - 1) < 0.1


def tensors_of(model: Spider) -> dict[str, torch.Tensor]:
    return dict([*model.named_parameters(), *model.named_buffers()])


def from_scratch(config: SpiderConfig, model_class: type[Spider]) -> Spider:
    torch.manual_seed(1)
    return model_class(config)


def from_meta(config: SpiderConfig, model_class: type[Spider]) -> Spider:
    """Build a model like train.py, in memory that holds other values."""
    with torch.device("meta"):
        model = model_class(config)
    model.to_empty(device="cpu")
    for tensor in tensors_of(model).values():
        tensor.data.fill_(77)
    torch.manual_seed(1)
    model.init_weights()
    return model


class Convolved(Block):
    """A block as users may extend it: modules of torch, and a parameter in a list."""

    def __init__(self, config, attention_class):
        super().__init__(config, attention_class)
        self.conv = nn.Conv1d(config.hidden_size, 8, 4)
        self.scales = nn.ParameterList([nn.Parameter(torch.empty(3))])

    def reset_parameters(self):
        self.scales[0].data.fill_(2)


@pytest.mark.parametrize(
    "changes", ({}, dict(boundaries="learned", segment_offsets=2, engram_votes=2)), ids=str
)
def test_initialization_from_meta_equals_direct_initialization(changes):
    """Modules that a subclass adds initialize themselves and change no value of the base model."""

    class Extended(Spider):
        block_class = Convolved

    config = small_config(**changes)
    own = tensors_of(from_scratch(config, Spider))
    direct = tensors_of(from_scratch(config, Extended))
    later = tensors_of(from_meta(config, Extended))
    assert direct.keys() == later.keys() >= own.keys()
    for name, tensor in direct.items():
        assert torch.equal(tensor, later[name]), name
        assert name not in own or torch.equal(tensor, own[name]), name
    weight = direct["prelude.0.conv.weight"]
    assert 0 < weight.abs().max() <= 128**-0.5
    assert not torch.equal(weight, direct["coda.0.conv.weight"])
    assert (direct["prelude.0.scales.0"] == 2).all()


class Gained(Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.gain = nn.Parameter(torch.ones(()))


FORGOTTEN = {
    "scale": lambda block: setattr(block, "scale", nn.Parameter(torch.ones(3))),
    "mask": lambda block: block.register_buffer("mask", torch.ones(4, 4), persistent=False),
    "more.gain": lambda block: block.add_module("more", Gained(4, 4)),
    "mixing.in_proj_weight": lambda block: block.add_module("mixing", nn.MultiheadAttention(4, 2)),
}


@pytest.mark.parametrize("build", (from_scratch, from_meta))
@pytest.mark.parametrize("name", FORGOTTEN)
def test_uninitialized_tensor_is_an_error_with_its_name(build, name):
    """This holds for both ways to build a model, since meta loses values from constructors."""

    class Forgetful(Block):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            FORGOTTEN[name](self)

    class Extended(Spider):
        block_class = Forgetful

    line = f"uninitialized: prelude.0.{name}.*coda.0.{name}.*reset_parameters"
    with pytest.raises(RuntimeError, match=line):
        build(small_config(), Extended)
