"""First values: alike from the meta device, of modules of others too, and nothing forgotten."""

import pytest
import torch

from conftest import small_config
from spider.model import casting, layers
from spider_model import Spider


def test_meta_construction_then_init_weights_equals_direct_construction():
    config = small_config()
    torch.manual_seed(1)
    direct = Spider(config)
    with torch.device("meta"):
        model = Spider(config)
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(77)
    torch.manual_seed(1)
    model.init_weights()
    for (name, a), (_, b) in zip([*direct.named_parameters(), *direct.named_buffers()],
                                 [*model.named_parameters(), *model.named_buffers()]):
        assert torch.equal(a, b), name


class Convolved(layers.Block):
    """A block as a researcher may extend it: modules of torch's own, and a parameter in a list."""

    def __init__(self, *given):
        super().__init__(*given)
        config = given[0]
        self.conv, self.norm = torch.nn.Conv1d(config.hidden_size, 8, 4), torch.nn.BatchNorm1d(8)
        self.scales = torch.nn.ParameterList([torch.nn.Parameter(torch.empty(3))])

    def reset_parameters(self):
        self.scales[0].data.fill_(2)


def everything(model) -> dict:
    return dict([*model.named_parameters(), *model.named_buffers()])


def from_meta(config) -> Spider:
    """A model as train.py makes it, in memory that holds something."""
    with torch.device("meta"):
        model = Spider(config)
    model.to_empty(device="cpu")
    for tensor in everything(model).values():
        tensor.data.fill_(77)
    torch.manual_seed(1)
    model.init_weights()
    return model


def test_modules_that_the_model_does_not_know_initialize_themselves_and_change_no_weight_of_its_own(monkeypatch):
    torch.manual_seed(1)
    plain = everything(Spider(config := small_config()))
    monkeypatch.setattr(Spider, "block_class", Convolved)
    torch.manual_seed(1)
    direct, later = everything(Spider(config)), everything(from_meta(config))
    assert direct.keys() == later.keys() > plain.keys()
    for name, tensor in direct.items():
        assert torch.equal(tensor, later[name]) and (name not in plain or torch.equal(tensor, plain[name])), name
    assert 0 < direct["prelude.0.conv.weight"].abs().max() <= 128 ** -0.5
    assert not torch.equal(direct["prelude.0.conv.weight"], direct["coda.0.conv.weight"])
    assert (direct["prelude.0.scales.0"] == 2).all() and (direct["coda.0.norm.running_var"] == 1).all()
    assert direct["coda.0.norm.num_batches_tracked"] == 0


class Gained(casting.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.gain = torch.nn.Parameter(torch.ones(()))


FORGOTTEN = {
    "scale": lambda block: setattr(block, "scale", torch.nn.Parameter(torch.ones(3))),
    "halves": lambda block: block.register_parameter("halves", torch.nn.Parameter(torch.ones(2, dtype=torch.float16))),
    "mask": lambda block: block.register_buffer("mask", torch.ones(4, 4).tril().bool()),
    "counts": lambda block: block.register_buffer("counts", torch.arange(3), persistent=False),
    "more.gain": lambda block: block.add_module("more", Gained(4, 4)),
    "mixing.in_proj_weight": lambda block: block.add_module("mixing", torch.nn.MultiheadAttention(4, 2)),
}


@pytest.mark.parametrize("make", (Spider, from_meta))
@pytest.mark.parametrize("name", FORGOTTEN)
def test_what_nobody_initializes_is_named(monkeypatch, make, name):
    """However it was constructed: what a constructor sets is lost where a model is made on the meta device."""
    class Forgetful(layers.Block):
        def __init__(self, *given):
            super().__init__(*given)
            FORGOTTEN[name](self)
    monkeypatch.setattr(Spider, "block_class", Forgetful)
    with pytest.raises(RuntimeError, match=f"uninitialized: prelude.0.{name}.*coda.0.{name}.*reset_parameters"):
        make(small_config())
    with torch.device("meta"):
        Spider(small_config())            # where there is no value
