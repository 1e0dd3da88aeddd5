"""SpiderConfig: refused values name their field, accepted ones make a model that trains."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import gradients, small_config, text
from spider.config import BOUNDARIES, PRESETS, RANGES, SpiderConfig
from spider_model import Spider


@pytest.mark.parametrize("field", dataclasses.fields(SpiderConfig), ids=lambda field: field.name)
def test_a_value_out_of_range_or_of_another_type_is_refused_by_the_fields_name(field):
    wrong = [None, {}]
    if type(field.default) in (int, float):
        low, high = RANGES[field.name]
        wrong += [-1, low - 1, high + 1, 10**15, 10**400, math.nan, math.inf, "1", True]
    for value in wrong:
        with pytest.raises(ValueError, match=f"^{field.name} must be "):
            SpiderConfig(**{field.name: value})


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if "layers" in name else name for name in RANGES],
)
def test_a_model_with_a_number_at_its_upper_bound_is_constructed_or_refused_by_a_rule_that_names_it(
    name,
):
    half = RANGES["v_head_dim"][1] // 2
    heads = (
        dict(v_head_dim=2 * half, qk_nope_head_dim=half, qk_rope_head_dim=half)
        if name == "v_head_dim"
        else {}
    )
    try:
        config = small_config(**{name: RANGES[name][1]} | heads)
    except ValueError as fault:
        assert name in str(fault) or name == "engram_heads" and "engram_rows" in str(fault)
    else:
        with torch.device("meta"):
            assert all(p.numel() < 1 << 60 for p in Spider(config).parameters())


def test_an_unknown_preset_is_refused_with_the_names_of_all():
    with pytest.raises(ValueError, match=f"'huge' is not one of {', '.join(PRESETS)}"):
        SpiderConfig.preset("huge")


@st.composite
def some_changes(draw) -> dict:
    """Draw values, sensible or not, for a few fields."""
    whole = st.sampled_from((-1, 0, 1, 2, 3, 5, 7, 8, 15, 16, 17, 24, 32, 48, 64, 65))
    kinds = {
        int: whole,
        float: st.floats(0, 1.5) | st.sampled_from((-1.0, math.nan, math.inf, 1e6)),
        tuple: st.lists(whole | st.integers(0, 8), max_size=4),
        bool: st.booleans(),
        str: st.sampled_from(BOUNDARIES),
    }
    chosen = draw(
        st.lists(st.sampled_from(dataclasses.fields(SpiderConfig)), min_size=1, max_size=4)
    )
    return {field.name: draw(kinds[type(field.default)]) for field in chosen}


@settings(deadline=None, max_examples=40)
@given(some_changes())
def test_any_config_is_refused_by_a_fields_name_or_makes_a_model_that_trains(changes):
    try:
        config = small_config(**changes)
    except ValueError as fault:
        assert (
            any(field.name in str(fault) for field in dataclasses.fields(SpiderConfig))
            and len(str(fault)) < 200
        )
        return
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Spider(config).parameters())
    if parameters * config.n_loops * config.n_recurrent_layers < 4e6:
        for dtype in (torch.float32, torch.bfloat16):
            model, ids = Spider(config), text(2, 24)
            model.compute_dtype = dtype
            loss = model(ids, ids, noise_seed=0).loss
            loss.backward()
            assert loss.isfinite() and all(
                g is None or g.isfinite().all() for g in gradients(model).values()
            )


def test_configs_of_earlier_checkpoints_are_read():
    older = vars(SpiderConfig(boundaries="learned")).copy()  # when flexitokens had this name
    del older["boundary_rate"]
    for saved, boundaries in (
        (older, "flexitokens"),
        ({}, "flexitokens"),
        (dict(boundaries="words"), "words"),
        (dict(boundaries="learned"), "learned"),  # a user's own few fields
        (vars(SpiderConfig(boundaries="learned")), "learned"),
    ):
        assert SpiderConfig.from_saved(saved).boundaries == boundaries
    assert SpiderConfig.from_saved(dict(places=3, lti=True)) == SpiderConfig(segment_offsets=3)
    with pytest.raises(ValueError, match="lti"):
        SpiderConfig.from_saved(dict(lti=False))
