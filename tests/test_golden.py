"""Golden values, which golden.py writes, and this only reads."""

import json
import subprocess

import pytest

import golden

GOLDEN = json.loads(golden.FILE.read_text())


@pytest.mark.parametrize("case", golden.CASES)
def test_five_steps_from_the_command_line_give_the_golden_values(case, tmp_path):
    assert golden.too_large(GOLDEN["runs"][case], golden.observe(case, tmp_path)) == []


def test_presets_give_the_golden_flags_and_configuration():
    """A default that changes is found here: the runs are given all flags."""
    observed = json.loads(json.dumps(golden.recipes()))
    for name, expected in GOLDEN["recipes"].items():
        assert observed[name] == expected, (
            f"{name}: if a new flag or field differs, write the golden values (CONTRIBUTING.md)"
        )


def test_every_golden_value_belongs_to_a_case():
    assert GOLDEN["runs"].keys() == golden.CASES.keys()
    assert GOLDEN["recipes"].keys() == golden.RECIPES.keys()


def test_golden_values_are_not_written_while_product_files_differ_from_the_last_commit(tmp_path):
    (tmp_path / "tests").mkdir()
    for name in ("train.py", "tests/golden.json"):
        (tmp_path / name).write_text("1")
    for words in ("init", "add .", "-c user.name=a -c user.email=a@b commit --message 1"):
        subprocess.run(["git", *words.split()], cwd=tmp_path, check=True)
    (tmp_path / "tests/golden.json").write_text("2")
    assert golden.product_changes(tmp_path) == []
    (tmp_path / "train.py").write_text("2")
    (tmp_path / "new.py").write_text("")
    assert golden.product_changes(tmp_path) == ["train.py", "new.py"]
