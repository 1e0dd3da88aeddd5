"""The code of docs/guide/trying-an-idea.md: its model decodes as it trains, and train.py trains
it."""

import pytest
import torch

import sample
import train
from conftest import code_blocks, metrics, run_flags, small_config, text
from spider.errors import UsageError
from spider.training.optim import kinds_of
from spider_model import RecurrentBlock, Spider
from tokenizer import EOS_ID


@pytest.fixture(scope="module")
def page() -> dict:
    """Return the names that the page's blocks define."""
    names = {"__name__": "my_idea"}
    for block in code_blocks("guide/trying-an-idea.md"):
        exec(block, names)
    return names


def test_the_pages_model_trains_and_decodes_as_in_the_full_pass(page):
    model = page["MySpider"](small_config())
    ids = text(2, 24)
    ids[0, 11] = EOS_ID
    out = model.train()(ids, ids, noise_seed=0)
    out.loss.backward()
    assert out.loss_terms["logit_z_loss"] > 0
    terms = out.nats_per_byte.detach() + sum(out.loss_terms.values())
    torch.testing.assert_close(out.loss.detach(), terms)
    parameters = dict(model.named_parameters())
    new = parameters.keys() - dict(Spider(small_config()).named_parameters()).keys()
    assert {kinds_of(model)[name].optimizer for name in new} == {"adamw", "muon"}
    for name in new:
        assert parameters[name].grad.any() or "core" in name
    with torch.no_grad():
        full = model.eval()(ids).logits
        state = model.decoding_state(2)
        stepped = [model.step(part, state) for part in ids[:, :10].split([9, 1], dim=1)]
        swapped = model.step(ids[[1, 0], 10:], state.copy([1, 0]))
    stepped.append(swapped[[1, 0]])
    torch.testing.assert_close(torch.cat(stepped, dim=1), full, rtol=0, atol=2e-5)


def test_a_core_layer_that_calls_tokens_before_is_refused_in_decoding(page):
    class Core(RecurrentBlock):
        def forward(self, x_nD, packing, retrieved, active, state, caches, reuse=None):
            if caches[0] is not None:
                page["tokens_before"](x_nD, packing, 1, caches[0])
            return super().forward(x_nD, packing, retrieved, active, state, caches, reuse)

    class MixedCore(Spider):
        core_block_class = Core

    with pytest.raises(UsageError, match="for layers of prelude and coda, not of the core"):
        MixedCore(small_config()).eval().decoding_state()


def test_train_py_trains_the_pages_model_and_sample_py_samples_from_it(
    page, tmp_path, shards, monkeypatch, capsys
):
    """If a layer keeps no rows, its model trains and is evaluated, but does not write."""
    directory = tmp_path / "run"
    flags = run_flags(shards, directory, "--precision fp32", steps=2)
    assert page["main"](flags) == 0
    assert all(line["logit_z_loss"] > 0 for line in metrics(directory))
    assert "next: python sample.py" not in capsys.readouterr().err
    for command in ("--prompt a --bytes 4", f"--eval {shards}", "--show abc"):
        assert page["talk"](f"{directory} {command} --device cpu".split()) == 0
    assert page["talk"]([str(directory), "--export", str(tmp_path / "export")]) == 2
    for program, argv in ((sample.main, [str(directory)]), (train.command_line, flags)):
        capsys.readouterr()
        assert program(argv) == 2
        assert "holds another model: " in capsys.readouterr().err
    tokens_before = page["tokens_before"]
    monkeypatch.setitem(page, "tokens_before", lambda *args: tokens_before(*args[:3]))
    assert page["talk"]([str(directory), "--eval", str(shards)]) == 0
    assert page["talk"]([str(directory), "--prompt", "a"]) == 2
    assert "must keep the last rows" in capsys.readouterr().err.splitlines()[-1]
    more = "--max_steps 3 --sample_every 1 --compile=False".split()
    assert page["main"]([*flags, *more]) == 0
    assert "step 3: no sample: MySpider's logits in decoding differ" in capsys.readouterr().err
