"""The code of docs/guide/trying-an-idea.md: its model decodes as it trains, and train.py trains
it."""

import re

import pytest
import torch

import sample
import train
from conftest import ROOT, metrics, run_flags, small_config, text
from spider.optim import kinds_of
from spider_model import Spider

BLOCKS = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs" / "guide" / "trying-an-idea.md").read_text(), re.DOTALL
)


@pytest.fixture(scope="module")
def page() -> dict:
    """Return the names that the page's blocks define, run in order."""
    names = {"__name__": "my_idea"}
    for block in BLOCKS:
        exec(block, names)
    return names


def test_the_pages_model_trains_and_decodes_as_in_the_full_pass(page):
    model, ids = page["MySpider"](small_config()), text(2, 24)
    out = model.train()(ids, ids, noise_seed=0)
    out.loss.backward()
    assert out.loss_terms["logit_z_loss"] > 0
    torch.testing.assert_close(
        out.loss.detach(), out.nats_per_byte.detach() + sum(out.loss_terms.values())
    )
    new = (
        dict(model.named_parameters()).keys()
        - dict(Spider(small_config()).named_parameters()).keys()
    )
    assert len(new) == 2 + 4  # scales of prelude and coda; gates of four layers
    assert all(
        model.get_parameter(name).grad.abs().sum() > 0
        for name in new
        if "prelude" in name or "coda" in name
    )
    for name in new:
        assert kinds_of(model)[name].optimizer == ("adamw" if name.endswith("scale") else "muon")
    with torch.no_grad():
        full, state = model.eval()(ids).logits, model.decoding_state(2)
        stepped = torch.cat(
            [model.step(part, state) for part in ids.split([9, 1, 14], dim=1)], dim=1
        )
    torch.testing.assert_close(stepped, full, rtol=0, atol=2e-5)


def test_train_py_trains_the_pages_model_and_sample_py_samples_from_it(
    page, tmp_path, shards, capsys
):
    flags, directory = (
        run_flags(shards, tmp_path / "run", "--precision", "fp32", steps=2),
        str(tmp_path / "run"),
    )
    assert page["main"](flags) == 0
    assert all(line["logit_z_loss"] > 0 for line in metrics(tmp_path / "run"))
    assert "next: python sample.py" not in capsys.readouterr().err
    for argv in (["--prompt", "a", "--bytes", "4"], ["--eval", str(shards)], ["--show", "abc"]):
        assert page["talk"]([directory, *argv, "--device", "cpu"]) == 0
    assert page["talk"]([directory, "--export", str(tmp_path / "export")]) == 2
    for program in (sample.main, train.command_line):
        capsys.readouterr()
        assert program([directory] if program is sample.main else flags) == 2
        assert "weights do not match Spider" in capsys.readouterr().err
