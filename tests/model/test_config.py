"""SpiderConfig: what it refuses is named, what it takes trains."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import gradients, small_config, text
from spider.model.config import BOUNDARIES, PRESETS, RANGES, SpiderConfig
from spider_model import Spider


@pytest.mark.parametrize("preset", PRESETS)
def test_every_number_of_the_config_has_a_range_that_its_presets_lie_inside(preset):
    config = SpiderConfig.preset(preset)
    numbers = {f.name for f in dataclasses.fields(config) if type(f.default) in (int, float)}
    assert RANGES.keys() == numbers
    for name in numbers:
        twice = 2 * type(getattr(config, name))(RANGES[name][1])
        for beyond in (twice, -1, math.nan, math.inf, 10 ** 5000, "1", None, True):
            with pytest.raises(ValueError, match=f"^{name} must be "):
                dataclasses.replace(config, **{name: beyond})


@st.composite
def configs(draw) -> dict:
    """A few fields of small_config changed, to sense and nonsense."""
    whole = st.sampled_from((0, 1, 2, 3, 5, 7, 8, 15, 16, 17, 24, 32, 48, 64, 65, -1, 10 ** 9, 10 ** 18, 4 * 10 ** 18))
    kinds = {int: whole, float: st.floats(0, 1.5) | st.floats(), bool: st.booleans(), tuple: st.lists(
        whole | st.integers(0, 8), max_size=4), str: st.sampled_from(BOUNDARIES)}
    names = draw(st.lists(st.sampled_from(dataclasses.fields(SpiderConfig)), min_size=1, max_size=4))
    return {f.name: draw(kinds[type(f.default)]) for f in names}


@settings(deadline=None, max_examples=60)
@given(configs())
def test_a_config_is_refused_by_the_name_of_a_field_or_makes_a_model_that_trains(changes):
    try:
        config = small_config(**changes)
    except ValueError as fault:
        assert any(f.name in str(fault) for f in dataclasses.fields(SpiderConfig)) and len(str(fault)) < 200
        return
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Spider(config).parameters())
    if parameters * config.n_loops * config.n_recurrent_layers < 4e6:
        for dtype in (torch.float32, torch.bfloat16):
            model, ids = Spider(config), text(2, 24)
            model.compute_dtype = dtype
            loss = model(ids, ids, noise_seed=0).loss
            loss.backward()
            assert loss.isfinite() and all(g is None or g.isfinite().all() for g in gradients(model).values())
