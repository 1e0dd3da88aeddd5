"""Compare runs and presets with the golden values that golden.py wrote."""

import json
import subprocess

import pytest

import golden
import train
from conftest import resolved
from spider.config import SpiderConfig
from table import ROWS

GOLDEN = json.loads(golden.FILE.read_text())


@pytest.mark.parametrize("case", golden.CASES)
def test_five_steps_give_the_golden_values(case, tmp_path):
    assert golden.too_large(GOLDEN["runs"][case], golden.observe(case, tmp_path)) == []


@pytest.mark.parametrize("recipe", golden.RECIPES)
def test_presets_have_the_golden_flags_and_config(recipe):
    """Golden runs set every flag, so only this test notices a changed default. Flags and fields
    newer than the golden values must have the same default in all presets."""
    expected = GOLDEN["recipes"][recipe]
    for part, observed in json.loads(json.dumps(golden.observe_recipe(recipe))).items():
        defaults = vars(train.Flags() if part == "flags" else SpiderConfig())
        new = {name: defaults[name] for name in observed.keys() - expected[part].keys()}
        assert observed == expected[part] | json.loads(json.dumps(new)), (
            "if this change of a preset is intended, write the golden values (CONTRIBUTING.md)"
        )


GOLDEN_FLAGS = [row.name for row in ROWS if row.witness in ("-", "golden")]


@pytest.mark.parametrize("name", GOLDEN_FLAGS)
def test_some_golden_run_sets_the_flag_to_a_non_default_value(name):
    """If all runs had the default, a run that ignores the flag would change no golden value."""
    for case in golden.CASES.values():
        words = f"{golden.FLAGS} {case}".split()
        pairs = list(zip(words[::2], words[1::2], strict=True))
        others = [pair for pair in pairs if pair[0] != f"--{name}"]
        values = []
        for argv in (pairs, others):
            flags = resolved(*(word for pair in argv for word in pair)).flags
            values.append(getattr(flags, name))
        if values[0] != values[1]:
            return
    pytest.fail(f"--{name} has its default in all golden runs: see FLAGS in tests/table.py")


def test_every_golden_value_belongs_to_a_case():
    assert GOLDEN["runs"].keys() == golden.CASES.keys()
    assert GOLDEN["recipes"].keys() == golden.RECIPES.keys()


def test_uncommitted_product_files_prevent_writing_golden_values(tmp_path):
    subprocess.run(["git", "init"], cwd=tmp_path, check=True)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "golden.json").touch()
    assert golden.product_changes(tmp_path) == []
    (tmp_path / "train.py").touch()
    assert golden.product_changes(tmp_path) == ["train.py"]
