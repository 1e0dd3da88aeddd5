"""SpiderConfig: every field has an effect, valid values give a model that trains, and errors name
the field."""

import dataclasses
import math
from functools import cache

import pytest
import torch
from torch import Tensor

from conftest import awake, gradients, small_config, text, weights_of
from spider.config import BOUNDARIES, PRESETS, RANGES, USUAL_RANGES, SpiderConfig
from spider_model import Spider
from table import VARIANTS

FIELDS = dataclasses.fields(SpiderConfig)


def range_of(field: dataclasses.Field) -> tuple[float, float]:
    return RANGES.get(field.name, USUAL_RANGES[type(field.default)])


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_error_for_a_bad_value_or_type_names_the_field(field):
    wrong = [None, {}]
    if type(field.default) in (int, float):
        low, high = range_of(field)
        wrong += [-1, low - 1, high + 1, 10**15, 10**400, math.nan, math.inf, "1", True]
    for value in wrong:
        with pytest.raises(ValueError, match=f"^{field.name} must be "):
            SpiderConfig(**{field.name: value})


# --------------------------------------------------------------------------------------------------
# Every field has an effect


@cache
def effect_of(**changes) -> dict[str, Tensor]:
    """Return the weights, losses and logits of a small model, by name."""
    model = awake(small_config(**changes))
    ids = text(2, 48)
    out = model(ids, ids, noise_seed=0)
    model.update_expert_bias(out.tokens_per_expert)
    return dict(loss=out.loss, logits=out.logits) | out.loss_terms | weights_of(model)


CHANGES = [
    pytest.param(field, changes, id=f"{field}, {name}")
    for name, changes in VARIANTS.items()
    for field in changes
]


@pytest.mark.parametrize("field, changes", CHANGES)
def test_field_of_a_variant_has_an_effect(field, changes):
    """If a new field fails here, nothing reads it."""
    others = {name: value for name, value in changes.items() if name != field}
    try:
        expected = effect_of(**others)
    except ValueError:
        return  # the other fields are invalid without it
    found = effect_of(**changes)
    same = found.keys() == expected.keys() and all(
        found[name].shape == expected[name].shape and torch.equal(found[name], expected[name])
        for name in found
    )
    assert not same


def is_switch(field: dataclasses.Field) -> bool:
    """Return whether False, 0 or an empty tuple switches a field off. Rates and loss weights count
    only if off is their default."""
    type_ = type(field.default)
    try:
        small_config(**{field.name: type_()})
    except ValueError:
        return False
    return type_ in (bool, int, tuple) or not field.default


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_variants_change_every_field_and_set_switches_on_and_off(field):
    small = vars(small_config())[field.name]
    values = {small} | {row[field.name] for row in VARIANTS.values() if field.name in row}
    missing = (
        f"{field.name}: add a row with a value other than {small!r} to VARIANTS in tests/table.py"
    )
    assert len(values | {field.default}) > 1, missing
    if is_switch(field):
        assert {bool(value) for value in values} == {True, False}, missing
    elif field.name == "boundaries":
        assert values == {*BOUNDARIES}, missing


# --------------------------------------------------------------------------------------------------
# Values

NUMBERS = [
    pytest.param(field, marks=pytest.mark.slow if "layers" in field.name else (), id=field.name)
    for field in FIELDS
    if type(field.default) in USUAL_RANGES
]


@pytest.mark.parametrize("field", NUMBERS)
def test_number_at_its_upper_bound_gives_a_model_or_an_error_with_its_name(field):
    name = field.name
    most = range_of(field)[1]
    changes = {name: most}
    if name == "v_head_dim":
        changes |= dict(qk_nope_head_dim=most // 2, qk_rope_head_dim=most // 2)
    try:
        config = small_config(**changes)
    except ValueError as fault:
        refused_as = "engram_rows" if name == "engram_heads" else name
        assert refused_as in str(fault)
    else:
        with torch.device("meta"):
            assert all(p.numel() < 1 << 60 for p in Spider(config).parameters())


# sizes that give a valid model, and a change to them that breaks a rule
RULES = (
    ({}, dict(hidden_size=40)),
    ({}, dict(moe_intermediate_size=40)),
    ({}, dict(v_head_dim=24)),
    ({}, dict(qk_nope_head_dim=12, v_head_dim=20)),
    ({}, dict(qk_nope_head_dim=7, qk_rope_head_dim=9)),
    (dict(n_prelude_layers=0, n_recurrent_layers=0), dict(n_coda_layers=0)),
    ({}, dict(boundaries="lines")),
    (dict(act_threshold=1.0), dict(act_threshold=1.01)),
    ({}, dict(boundary_prior=1.0)),
    ({}, dict(boundary_rate=1.0)),
    (dict(n_shared_experts=0), dict(n_routed_experts=0)),
    (dict(n_experts_per_tok=4), dict(n_experts_per_tok=5)),
    ({}, dict(engram_layers=(2,))),
    ({}, dict(engram_contexts=())),
    (dict(engram_byte_contexts=("1", "32")), dict(engram_byte_contexts=("1", "33"))),
    (dict(engram_match_contexts=("word16",)), dict(engram_match_contexts=("word17",))),
    (dict(engram_heads=2, engram_contexts=("3",), engram_rows=3), dict(engram_rows=2)),
)


@pytest.mark.parametrize("sizes, change", RULES, ids=str)
def test_valid_sizes_train_and_a_broken_rule_is_refused_by_name(sizes, change):
    model = awake(small_config(**sizes))
    ids = text(2, 24)
    model(ids, ids, noise_seed=0).loss.backward()
    assert all(grad is None or grad.isfinite().all() for grad in gradients(model).values())
    with pytest.raises(ValueError, match="|".join(change)):
        small_config(**sizes | change)


def test_error_for_an_unknown_preset_lists_all_presets():
    with pytest.raises(ValueError, match=f"'huge' is not one of {', '.join(PRESETS)}"):
        SpiderConfig.preset("huge")


def test_saved_configs_old_and_new_load_and_unknown_fields_are_named():
    config = small_config(boundaries="learned")
    assert SpiderConfig.from_saved(dataclasses.asdict(config)) == config
    assert not config.changed("act=False").act
    lookups = "engram_layers=,engram_contexts=,engram_byte_contexts=,engram_match_contexts="
    assert config.changed(lookups).reach == 2  # needed to find the ends of words
    before = dict(engram_orders=[3], engram_byte_orders=[1, 2])
    before |= dict(engram_match_orders=[3, 12], engram_match_words=[1])
    assert SpiderConfig.from_saved(before).engram_byte_contexts == ("1", "2")
    assert SpiderConfig.from_saved(before).engram_match_contexts == ("3", "12", "word1")
    assert SpiderConfig.from_saved(dict(engram_match_words=[2])).engram_match_contexts == ("word2",)
    wide_band = small_config(boundary_alpha=0.25, boundary_sigma=1.0)
    assert wide_band.bytes_per_segment == 8
    with pytest.raises(TypeError, match="'places'"):
        SpiderConfig.from_saved(dict(places=3))
