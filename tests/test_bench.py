"""The benchmark: its command line, its sections, and that a step that it times is a whole one."""

import json
import subprocess
import sys

import pytest
import torch

import bench
from conftest import ROOT
from spider.model import parameters
from spider.training import muon
from spider.training.ranks import World


@pytest.mark.parametrize("flags,complaint", (
    (["--set", "nonsense=1"], "not a field"), (["--seq_len", "4e18"], "--seq_len: '4e18' is not"),
    (["--micro_batch=0"], "--micro_batch"), (["--model", "2b"], "2b"), (["--only", "x"], "--only: x"), (["--x"], "--x"),
    (["--out", __file__], "File exists"), (["--flags", "x"], "--flags needs --rehearse"),
    (["--compiled"], "--compiled needs --rehearse"),
    (["--data_dir", "/no/such"], "no such directory"),
    (["--data_dir", ".", "--rehearse", "h200"], "uses synthetic sentences")))
def test_what_the_benchmark_cannot_do_is_one_line_before_anything_is_measured(flags, complaint, capsys):
    assert bench.main(["--device", "cpu", *flags]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and said.err.startswith("bench.py: error: ")
    assert complaint in said.err


def test_a_step_of_the_benchmark_is_a_whole_one_and_leaves_the_model_as_it_was(monkeypatch):
    step = bench.Step(bench.Bench(World(), "cpu", "tiny", seq_len="64", micro_batch="2"))
    model = step.model
    before = {name: p.clone() for name, p in model.named_parameters() if "table" not in name}
    orthogonalize, done = muon.orthogonalize, []
    monkeypatch.setattr(muon, "orthogonalize", lambda matrices, *rest: (
        done.append(matrices[:, 0, 0].numel()), orthogonalize(matrices, *rest))[1])
    step()
    matrices = parameters.matrices_of(model)
    assert sum(done) == sum(p[..., 0, 0].numel() for name, p in model.named_parameters() if name in matrices)
    for name, p in model.named_parameters():
        if name in before:
            torch.testing.assert_close(p, before[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("model,experts", (("tiny", True), ("small", False)))
def test_backends_and_experts_in_fp8_are_compared_where_there_are_experts(model, experts):
    b = bench.Bench(World(), "cpu", model)
    b.fp8 = True
    assert ("fp8, experts too" in dict(bench.precisions(b))) == experts == bool(bench.backend_names(b))


def test_a_model_without_experts_has_no_section_of_backends(capsys):
    assert bench.main(["--device", "cpu", "--model", "small", "--only", "backends"]) == 0
    assert "###" not in capsys.readouterr().out


@pytest.mark.slow
def test_the_benchmark_measures_every_section_and_keeps_its_figures(tmp_path):
    done = subprocess.run([sys.executable, ROOT / "bench.py", "--model", "tiny", "--device", "cpu", "--seq_len", "32",
                           "--micro_batch", "16", "--out", "docs"], cwd=tmp_path, text=True, capture_output=True,
                           timeout=600)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "docs" / "bench-cpu.json").read_text())
    for table in ("ceilings", "headline", "precisions", "backends", "experts alone", "bytes per segment",
                  "sequence lengths", "loops", "core", "parts", "segments", "decoding", "traffic, on paper"):
        assert f"### {table}" in done.stdout and figures[table], table
    slow, fast = figures["bytes per segment"][0], figures["bytes per segment"][-1]
    assert slow["bytes/segment"] == 1 and fast["bytes/segment"] > 3
    shares = [row["share"] for row in figures["parts"] if not row["part"].startswith("forward:")]
    assert sum(shares) == pytest.approx(1)
    assert [row["step"].partition(", ")[2] for row in figures["headline"]] == [
        "", "4 micro-steps", "nothing recomputed", "all recomputed"]
    assert all(row["ms"] > 0 for row in figures["headline"]) and figures["headline"][0]["host, ms"] > 0
    assert figures["core"][0]["times the first's"] == 1 and figures["core"][1]["bytes/segment"] < 32
    assert all(row["times as fast"] > 1 and row["share of floor"] > 0 for row in figures["decoding"])


def test_a_section_that_the_time_no_longer_suffices_for_is_named(capsys):
    assert bench.main(["--device", "cpu", "--only", "segments", "--minutes", "0"]) == 0
    said = capsys.readouterr().out
    assert "segments: skipped, 0.0 minutes are nearly over (--minutes)" in said and "###" not in said
