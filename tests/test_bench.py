"""The benchmark: its command line, its sections, and that a step that it times is a whole one."""

import re
from functools import partialmethod

import pytest
import torch

import bench
from spider import optim
from spider_model import Spider

SMALL = ["--device=cpu", "--seq_len=32", "--micro_batch=2"]


@pytest.mark.parametrize("flags, complaint", (
    (["--set", "nonsense=1"], "nonsense"), (["--seq_len", "4e18"], "--seq_len: '4e18' is not"), (["--x"], "--x"),
    (["--model", "2b"], "2b"), (["--only", "eager,x"], "--only: x: not among machine, ceilings, eager")))
def test_a_bad_flag_is_one_line_before_anything_is_measured(flags, complaint, capsys):
    assert bench.main([*SMALL, *flags]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("bench.py: error: ") and complaint in err


def test_a_failing_section_does_not_end_the_others_but_an_unusable_gpu_does(monkeypatch, capsys):
    def fail(b):
        raise AssertionError("two\nlines")

    def poison(b):
        b.wait = lambda: fail(b)
    monkeypatch.setattr(bench, "SECTIONS", dict(fail=fail, works=lambda b: print("works"), poison=poison))
    assert bench.main([*SMALL, "--only", "fail,works,poison,works"]) == 1
    out = capsys.readouterr().out
    assert "\nfail: FAILED: AssertionError('two\\nlines')\nTraceback" in out
    assert out.count("works\n") == 1 and out.index("works\n") < out.index("the GPU is unusable")


def test_a_step_is_a_whole_one_and_leaves_the_weights_as_they_were(monkeypatch):
    step, multiplied = bench.Step(bench.Bench(SMALL), *bench.TINY_1B), []
    before = {name: p.clone() for name, p in step.model.named_parameters()}
    monkeypatch.setattr(optim, "orthogonalize", lambda matrices, *rest, work=optim.orthogonalize: (
        multiplied.append(len(matrices)), work(matrices, *rest))[1])
    step()
    by_name = step.optimizers.by_name
    assert by_name.keys() == {"muon", "adamw", "engram"}
    for optimizer in by_name.values():
        assert all(optimizer.state[p] for group in optimizer.param_groups for p in group["params"])
    assert sum(multiplied) == sum(p[..., 0, 0].numel() for p in by_name["muon"].param_groups[0]["params"])
    for name, p in step.model.named_parameters():
        torch.testing.assert_close(p, before[name], rtol=0, atol=1e-12)


@pytest.mark.slow
def test_every_section_but_fp8_measures_on_a_cpu(monkeypatch, capsys):
    monkeypatch.setattr(Spider, "compile_layers", partialmethod(Spider.compile_layers, backend="aot_eager"))  # seconds
    assert bench.main(SMALL) == 0
    out = capsys.readouterr().out
    assert [title.replace("fp32", "bf16") for title in re.findall("### (.*)", out)] == [
        "machine", "ceilings", "step, bf16, compile off", "step, bf16, compile on", "experts"]
    assert "\nfp8: skipped" in out and re.search(r"\| grouped \| \d+ \| [\d.]+ \|  \|", out)
