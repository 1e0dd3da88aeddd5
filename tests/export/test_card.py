"""The model card has the facts, and whatever others wrote as JSON alone."""

import json
import math

import pytest
import torch
from exporting import checkpoint, exported, refusal, spider  # noqa: F401

import sample


def test_the_model_card_has_the_facts_and_nothing_that_others_wrote_but_as_json(checkpoint, exported, tmp_path):
    card, state = (exported / "README.md").read_text(), torch.load(checkpoint)
    line = json.loads((checkpoint.parent / "metrics.jsonl").read_text().splitlines()[-1])
    for fact in (f"{state['bytes_seen']:,} bytes in 6 steps", f"{line['val_bpb']:.4f} bits per byte", "at step 6",
                 "32 bytes a sequence", '"lr": 0.01', '"data_dir": "data"', "the middle ones 3 times"):
        assert fact in card, fact
    assert str(checkpoint.parent.parent) not in card
    assert json.loads((exported / "config.json").read_text())["training"]["val_bpb"] == line["val_bpb"]
    state["flags"]["data_dir"] = "a\n```\n# Not so\x1b[2J\n"
    torch.save(state | dict(step=5), tmp_path / "spider-step5.pt")
    (tmp_path / "metrics.jsonl").write_text('{"step": 5, "bytes_seen": 7, "val_bpb": 0.1}\n{"step": [}\n')
    assert sample.main([str(tmp_path / "spider-step5.pt"), "--export", str(tmp_path / "out")]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "0.1000" not in card and "\n# Not so" not in card and "\x1b" not in card


HEADING = "5\n\n# Not so <img src=x onerror=alert(1)>\n"


@pytest.mark.parametrize("name, value", (
    ("lr", math.inf), ("lr", -math.inf), ("lr", math.nan), ("lr", -1.0), ("lr", HEADING), ("lr", True),
    ("seq_len", HEADING), ("seq_len", math.inf), ("seq_len", -5), ("seq_len", 10 ** 15), ("seq_len", "32"),
    ("seq_len", False), ("seq_len", None), ("schedule", HEADING), ("engram_reset", HEADING), ("seed", 0.5),
    ("data_dir", ""), ("data_dir", 7), ("no_such_flag", math.inf)))
def test_flags_that_no_run_has_are_refused_before_they_reach_the_model_card(checkpoint, tmp_path, capsys, name, value):
    state = torch.load(checkpoint)
    torch.save(state | dict(flags=state["flags"] | {name: value}), tmp_path / "spider-step6.pt")
    line = refusal(capsys, [tmp_path / "spider-step6.pt", "--export", tmp_path / "out"], sample.main)
    bad = f"{tmp_path / 'spider-step6.pt'}: invalid values of flags", f"{name} of the checkpoint's run: "
    assert any(words in line for words in bad), line
    assert [file.name for file in tmp_path.iterdir()] == ["spider-step6.pt"]


def test_a_model_card_holds_whatever_a_stranger_wrote_as_json_alone(checkpoint, tmp_path):
    state = torch.load(checkpoint)
    flags = {"data_dir": HEADING, HEADING: HEADING, "```": "```\n</pre>\u2028# Not so", "recipe": HEADING,
             "seq_len": 48}
    torch.save(state | dict(flags=state["flags"] | flags), tmp_path / "spider-step6.pt")
    assert sample.main([str(tmp_path / "spider-step6.pt"), "--export", str(tmp_path / "out")]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    above, _, below = card.partition("```json\n")
    block, _, below = below.partition("\n```\n")
    assert "48 bytes a sequence" in above and "Not so" not in above + below and "<" not in above + below
    name, _, written = block.partition("\n")
    assert json.loads(name) == "spider-step6.pt" and json.loads(written).items() >= {HEADING: HEADING}.items()
    config = json.loads((tmp_path / "out" / "config.json").read_text(), parse_constant=pytest.fail)
    assert config["max_position_embeddings"] == 48 and card.isascii()


VALUES = ("Infinity", "-Infinity", "NaN", "1e999", "-1", "true", "null", '"<b>"', "[]", "9" * 400)


@pytest.mark.parametrize("name, value", (
    *(("val_bpb", value) for value in VALUES),
    *(pytest.param(name, value, marks=() if value in ("1e999", '"<b>"') else pytest.mark.slow)
      for name in ("step", "bytes_seen") for value in VALUES)))
def test_figures_of_metrics_that_no_run_writes_are_passed_over(checkpoint, tmp_path, name, value):
    state = torch.load(checkpoint)
    torch.save(state, tmp_path / "spider-step6.pt")
    lines = [dict(step=5, bytes_seen=320, val_bpb=2.5), dict(step=6, bytes_seen=state["bytes_seen"])]
    (tmp_path / "metrics.jsonl").write_text(
        f"{json.dumps(lines[0])}\n" + json.dumps(dict(step=6, bytes_seen=state["bytes_seen"], val_bpb=9.5) | {
            name: "VALUE"}).replace('"VALUE"', value) + f"\n{json.dumps(lines[1])}\n")
    assert sample.main([str(tmp_path / "spider-step6.pt"), "--export", str(tmp_path / "out")]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text(), parse_constant=pytest.fail)
    assert config["training"]["val_bpb"] in ((2.5, 9.5) if name == "bytes_seen" else (2.5,))
    assert config["training"]["val_bpb_at_step"] in (5, 6)
    assert "2.5000 bits per byte" in (tmp_path / "out" / "README.md").read_text() or name == "bytes_seen"

