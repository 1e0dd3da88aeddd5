"""Estimates of a run: memory, the layers that are recomputed for it, a rate."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import weakref
from dataclasses import replace
from functools import partial
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import spider_model
import train
from conftest import ROOT, SMALL, contents, final_state, run, run_flags, settled, small_config, text
from spider import errors
from spider.data.shards import Shard, Source, Stream
from spider.model import config
from spider.model.config import RECOMPUTE
from spider.training import dry_run, machine
from spider.training.batches import Batch
from spider.training.memory import choose_recompute, estimate_memory
from train import parse_args, time_steps


class Live(TorchDispatchMode):
    """Bytes of the tensors made inside it that are alive, and the most there were."""
    live = peak = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        given, made = ({t.untyped_storage() for t in tree_leaves(tree) if isinstance(t, torch.Tensor)}
                       for tree in ((args, kwargs), out))
        for storage in made - given:
            self.live += storage.nbytes()
            weakref.finalize(storage, self.end, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return out

    def end(self, size: int):
        self.live -= size


RECOMPUTED = dict(least=("--recompute", "all"), less=("--recompute", "core"),
                  more=("--recompute", "nothing", "--grad_accum", "2"))
LENGTHS = {"whole rows": (256,), "halves": (129, 127)}
TELLING = "least-halves-bf16", "less-whole rows-fp32", "more-whole rows-bf16", "more-halves-fp32"


@pytest.mark.parametrize("flags, lengths, precision", [
    pytest.param(flags, lengths, precision, id=name, marks=() if name in TELLING else pytest.mark.slow)
    for recomputed, flags in RECOMPUTED.items() for rows, lengths in LENGTHS.items() for precision in ("fp32", "bf16")
    for name in (f"{recomputed}-{rows}-{precision}",)])
def test_the_memory_that_is_estimated_bounds_what_a_step_takes_whatever_its_documents(lengths, flags, precision):
    """Halves are the worst case, if one row is whole: all of them are filled up to its length."""
    plan = settled("--model", "tiny", "--seq_len", "256", "--micro_batch", "8", "--n_loops", "2", "--precision",
                   precision, *flags)
    model = train.build_model(plan, torch.device("cpu"))
    said = estimate_memory(model, plan, torch.device("cpu"), plan.machine.recompute)
    ids = text(8, 256)
    ends = torch.tensor(lengths * (256 // sum(lengths))).cumsum(0)
    ids[1:, ends - 1] = train.tokenizer.EOS_ID
    with Live() as memory:
        train.accumulate(model, [Batch.of(ids, ids, 0)] * plan.batch.grad_accum, 2)
    estimated = sum(said.values()) - said["parameters"] - said["optimizer"]
    assert memory.peak < estimated < 2 * memory.peak


def test_auto_recomputes_the_least_that_fits_with_room_to_spare_and_all_where_nothing_does():
    needs = dict(nothing=dict(a=50.0, b=10.0), core=dict(a=30.0, b=10.0), all=dict(a=20.0, b=5.0))
    for there, chosen in ((70, "nothing"), (61, "core"), (45, "core"), (44, "all"), (5, "all")):
        assert choose_recompute("auto", needs.get, there) == (chosen, needs[chosen])
    assert choose_recompute("core", needs.get, 5) == ("core", needs["core"])


def estimated(*flags, recompute: str, precision="bf16") -> float:
    """GB of a step of 1b on a GPU."""
    plan = settled("--model", "1b", "--seq_len", "256", "--micro_batch", "112", "--precision", precision, *flags)
    with torch.device("meta"):
        model = spider_model.Spider(plan.config)
    return sum(estimate_memory(model, plan, torch.device("cuda"), recompute).values()) / 1e9


def test_what_is_recomputed_takes_less_memory_and_other_rows_more():
    step = partial(estimated, "--set", "boundary_rate=0.3")        # the design's 3.3 bytes per segment
    nothing, core, everything = (step(recompute=recompute) for recompute in RECOMPUTE)
    assert everything < 0.8 * core and core < 0.6 * nothing
    assert step("--grad_accum", "4", recompute="core") > core + 3 and step(recompute="core", precision="fp8") > core
    assert step("--seq_len", "2048", "--micro_batch", "64", recompute="core") > 2.5 * core


def test_the_flag_of_the_original_is_recompute_nothing_and_what_is_chosen_is_one_line(tmp_path, shards, capsys):
    assert parse_args(["--no_gradient_checkpointing"]).recompute == "nothing" and parse_args([]).recompute == "auto"
    with pytest.raises(errors.UsageError, match="--no_gradient_checkpointing means --recompute nothing, which"):
        parse_args(["--no_gradient_checkpointing", "--recompute", "all"])
    states = []
    for flags, said in (((), "recompute nothing (auto)"), (("--recompute", "all"), "recompute all")):
        states.append(final_state(run(tmp_path, shards, *flags, steps=2, ckpt="run" + "".join(flags))))
        lines = [line for line in capsys.readouterr().err.splitlines() if said in line]
        assert len(lines) == 1 and lines[0].endswith(said)
    for name, value in states[0]["model_state_dict"].items():
        torch.testing.assert_close(states[1]["model_state_dict"][name], value, rtol=1e-3, atol=1e-4, msg=name)


def test_a_step_that_a_cpu_cannot_hold_is_refused_before_it_is_tried(tmp_path, shards, capsys):
    argv = run_flags(shards, tmp_path / "run", "--micro_batch", str(1 << 20), "--seq_len", "600")
    assert train.command_line([*argv, "--recompute", "auto"]) == 2
    err = capsys.readouterr().err.splitlines()
    assert "--micro_batch: the run needs about" in err[-1]
    assert any(line.endswith("recompute all (auto)") for line in err)
    assert any("memory: about" in line and "NOT ENOUGH" in line for line in err)


@pytest.mark.parametrize("lines", ("[" * 200_000, '{"step": 2, "tok_per_sec": 0, "bytes_seen": 128}', '{"step": 2}',
                                   "3",
                                   '{"step": 2, "tok_per_sec": 1e-320, "bytes_seen": 128}',
                                   '{"tok_per_sec": 9, "bytes_seen": 128}',
                                   '{"step": 2, "tok_per_sec": 9, "bytes_seen": 7}'))
def test_a_rate_that_no_run_had_or_one_of_other_steps_is_not_gone_by(tmp_path, lines):
    line = '{"step": 1, "tok_per_sec": 5.0, "bytes_seen": %d}'
    first = line % 64
    for text, rate in ((first, None), (f"{first}\n{line % 128}", 5.0), (f"{first}\n{lines}", None), ("", None)):
        (tmp_path / "metrics.jsonl").write_text(text)
        assert dry_run.rate_of_run(str(tmp_path), 64) == rate


# ---------------------------------------------------------------------------------------------------------------------
# What a process takes, and the dry run

def test_a_run_takes_no_more_memory_than_its_line_says_and_not_much_less(tmp_path):
    """With the process itself and the copy for checkpoints; what it may come to take later stands apart."""
    flags = ["--mock_data", "--max_steps", "3", "--ckpt_every", "2", "--eval_every", "0", "--ckpt_dir", str(tmp_path)]
    done = subprocess.run([sys.executable, ROOT / "train.py", "--model", "tiny", "--device", "cpu", "--seq_len", "1024",
                           *flags], text=True, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr
    line, = [line for line in done.stderr.splitlines() if "memory: about" in line]
    said = {name: float(size) for name, size in re.findall(r"[,:] ([a-z][A-Za-z ()]*?) (\d+\.\d\d)(?=,|$)", line)}
    peak = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["memory"]
    total = float(re.search(r"about (\S+) GB", line)[1])
    assert total == pytest.approx(sum(said.values()), abs=0.05)
    sure = total - sum(size for name, size in said.items() if "at most" in name)
    assert {"process at start", "checkpoint copy", "parameters"} <= said.keys()
    assert 0.6 * peak < sure and peak < 1.1 * total


def test_what_dropout_drops_is_counted_a_byte_a_number():
    bytes_and_segments = 112 * 256 * (1 + 1 / config.SpiderConfig.preset("1b").bytes_per_segment)
    grown = estimated("--dropout", "0.5", recompute="nothing") - estimated(recompute="nothing")
    assert grown * 1e9 == pytest.approx(2 * 2048 * bytes_and_segments, rel=0.02)


def test_the_estimate_is_worked_out_once(tmp_path, shards, monkeypatch):
    estimate, calls = estimate_memory, []
    monkeypatch.setattr(train, "estimate_memory", lambda *given, **options: calls.append(1) or estimate(
        *given, **options))
    run(tmp_path, shards, "--recompute", "core", steps=1)
    assert calls == [1]


@pytest.mark.parametrize("short", ((), ("memory",), ("disk",), ("memory", "disk")), ids="-".join)
def test_the_dry_run_first_names_what_does_not_suffice_and_ends_with_status_1(tmp_path, shards, monkeypatch, short,
                                                                             capsys):
    if "memory" in short:
        monkeypatch.setattr(machine, "memory_of", lambda *_: 1e6)
    if "disk" in short:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1e5))
    assert train.command_line(run_flags(shards, tmp_path / "run", "--dry_run")) == (1 if short else 0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (f"NOT ENOUGH {' and '.join(short)}" if short else "enough memory and disk")
    places = [next(i for i, line in enumerate(lines) if line.startswith(start)) for start in (
        "memory: about", "disk: ", "run: ", "data: ", "model tiny, changed", "parameters by component", "flags")]
    assert places == sorted(places) and places[3] < 8 and not (tmp_path / "run").exists()


def test_the_dry_run_times_whole_steps_of_the_middle_of_the_run_and_writes_nothing(tmp_path, shards, monkeypatch,
                                                                                   capsys):
    """Two micro-steps of two sequences each; a clock by which everything takes half a second."""
    seen, accumulate, update = [], train.accumulate, train.update
    monkeypatch.setattr(train, "accumulate", lambda model, batches, loops: (
        seen.append((model.dropout, loops, [(tuple(batch.ids.shape), batch.noise_seed) for batch in batches])),
        accumulate(model, batches, loops))[1])
    monkeypatch.setattr(train, "update", lambda *args: (seen.append("update"), update(*args))[1])
    monkeypatch.setattr(train, "time_steps", time_steps)
    monkeypatch.setattr(train.time, "perf_counter", partial(next, count(0, 0.5)))
    before = contents(shards)
    argv = run_flags(shards, tmp_path / "run", "--dry_run", "--grad_accum", "2", "--target_tokens", "12800")
    assert train.command_line(argv) == 0
    assert "at 256 bytes/s (timed steps of this size)" in capsys.readouterr().out
    noise = [train.step_seed(0, step, "noise") for step in range(50, 54)]
    assert seen[1::2] == ["update"] * 4 and seen[::2] == [
        (seen[0][0], 2, [((2, 32), seed), ((2, 32), seed + 2)]) for seed in noise]
    assert 0.4 < seen[0][0] <= 0.5 and contents(shards) == before and os.listdir(tmp_path) == ["data"]


@pytest.mark.parametrize("reason,because", (("slow", "a step takes too long"), ("full", "there is too little memory"),
                                            ("ranks", "there are several ranks"), ("compiled", "compiling")))
def test_where_no_step_is_timed_the_dry_run_gives_a_bound_and_the_reason(tmp_path, monkeypatch, reason, because):
    plan = settled("--ckpt_dir", str(tmp_path), "--seq_len", "64")
    plan = replace(plan, batch=replace(plan.batch, ranks=1 + (reason == "ranks")),
                   machine=replace(plan.machine, compile=reason == "compiled"),
                   memory=dict(activations=math.inf if reason == "full" else 1.0))
    bound = 1.0 if reason == "slow" else 1e6
    at_least, rate, origin = dry_run.expected_rate(plan, torch.device("cpu"), bound, None)
    assert (at_least, rate) == ("at least ", bound) and f"no step was timed, because {because}" in origin


def test_a_duration_is_in_units_that_people_have():
    said = [dry_run.lasting(seconds) for seconds in (0.26, 90, 125, 3599, 7200, 2.48e4 * 3600, 1e13)]
    assert said == ["0.3 seconds", "90 seconds", "2.1 minutes", "60 minutes", "2.0 hours", "2.8 years", "316,881 years"]


# ---------------------------------------------------------------------------------------------------------------------
# Segments

def source(name: str, text: bytes, weight: float = 1.0) -> Source:
    ids = np.frombuffer(text, np.uint8).astype(np.uint16)
    return Source(name, weight, *(Stream([Shard("memory", ids)]),) * 2)


@pytest.mark.parametrize("rule,lengths,mean", (
    ("words", (4, 64), 1 / (0.75 / 4 + 0.25 / 64)), ("every_third", (64 / 21,) * 2, 64 / 21), ("learned", (), None),
    ("flexitokens", (), None)))
def test_segments_are_measured_on_the_text_of_each_source_by_the_models_own_rule(rule, lengths, mean):
    """Words of three letters and a space, and one without an end; what is learned cannot be measured before."""
    sources = [source("words", b"abc def " * 500, 0.75), source("bases", b"ACGT" * 1000, 0.25)]
    with torch.device("meta"):
        model = spider_model.Spider(small_config(boundaries=rule))
    found = dry_run.segment_lengths(model, sources, 64, 0)
    assert (*found.values(),) == pytest.approx(lengths, rel=0.03)
    mean = model.config.bytes_per_segment if mean is None else mean
    assert dry_run.mean_length(model.config, sources, found) == pytest.approx(mean, rel=0.03)


@pytest.mark.parametrize("dry", (True, False))
def test_text_whose_words_never_end_is_a_warning_with_the_remedy(tmp_path, shards, capsys, dry):
    np.random.default_rng(0).choice(np.frombuffer(b"ACGT", np.uint8), 700).astype("<u2").tofile(shards / "train-0.bin")
    for rule, warned in (("words", 1), ("every_third", 0)):
        setting = SMALL.replace("boundaries=flexitokens", f"boundaries={rule}")
        argv = run_flags(shards, tmp_path / rule, "--set", setting, *["--dry_run"] * dry, steps=2)
        assert train.command_line(argv) == 0
        lines = [line for part in capsys.readouterr() for line in part.splitlines() if "segments have" in line]
        assert len(lines) == warned
        assert all(f"{shards}: segments have 32 bytes" in line for line in lines)
        assert all(line.endswith("--set boundaries=every_third or learned instead of words") for line in lines)


def test_flexitokens_that_end_next_to_nothing_are_a_warning_at_the_first_step(tmp_path, shards, capsys):
    """Not so learned boundaries: at the first step no surprise is known yet."""
    rare = SMALL.replace("boundary_prior=0.15", "boundary_prior=0.0001")
    learned = SMALL.replace("boundaries=flexitokens", "boundaries=learned,boundary_rate=0.0001")
    for name, setting, warned in (("rare", rare, 1), ("usual", SMALL, 0), ("learned", learned, 0)):
        run(tmp_path, shards, "--set", setting, "--eval_every", "0", steps=2, ckpt=name)
        lines = [line for line in capsys.readouterr().err.splitlines() if "segments have" in line]
        assert len(lines) == warned and all("step 1: " in line for line in lines)
        assert all(line.endswith("--set boundaries=every_third or learned instead of flexitokens") for line in lines)
