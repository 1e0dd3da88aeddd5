"""Golden values, which golden.py writes, and this only reads."""

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
def test_five_steps_from_the_command_line_give_the_golden_values(case, tmp_path):
    assert golden.too_large(GOLDEN["runs"][case], golden.observe(case, tmp_path)) == []


@pytest.mark.parametrize("recipe", golden.RECIPES)
def test_presets_give_the_golden_flags_and_configuration(recipe):
    """The runs are given all flags, so a default that changes is found here. A flag or field that
    is new since the values were written has the same default in all presets."""
    expected = GOLDEN["recipes"][recipe]
    for part, observed in json.loads(json.dumps(golden.observe_recipe(recipe))).items():
        defaults = vars(train.Flags() if part == "flags" else SpiderConfig())
        new = {name: defaults[name] for name in observed.keys() - expected[part].keys()}
        assert observed == expected[part] | json.loads(json.dumps(new)), (
            "if a preset is meant to change, write the golden values (CONTRIBUTING.md)"
        )


GOLDEN_FLAGS = [row.name for row in ROWS if row.witness in ("-", "golden")]


@pytest.mark.parametrize("name", GOLDEN_FLAGS)
def test_some_golden_run_has_another_value_of_a_flag_than_its_default(name):
    """A run that ignores the flag could pass for a run with the default."""
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
    pytest.fail(f"--{name} has its default in all golden runs: see FLAGS of tests/table.py")


def test_every_golden_value_belongs_to_a_case():
    assert GOLDEN["runs"].keys() == golden.CASES.keys()
    assert GOLDEN["recipes"].keys() == golden.RECIPES.keys()


def test_golden_values_are_not_written_while_product_files_differ_from_the_last_commit(tmp_path):
    subprocess.run(["git", "init"], cwd=tmp_path, check=True)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "golden.json").touch()
    assert golden.product_changes(tmp_path) == []
    (tmp_path / "train.py").touch()
    assert golden.product_changes(tmp_path) == ["train.py"]
