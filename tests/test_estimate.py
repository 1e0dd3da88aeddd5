"""Estimates of a run: memory, what is recomputed for it, segments, the rate that a dry run
expects."""

import json
import math
import os
import re
import shutil
import weakref
from dataclasses import replace
from functools import partial
from itertools import count, product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train
from conftest import contents, refused, run_flags, settled, text, world_of
from data import Batch, Feed, Loader, open_data
from jobs import command
from spider import config, estimate, machine
from spider.common import TooLarge
from spider.estimate import FLASH_BACKWARD, choose_memory, estimate_memory
from spider_model import Spider
from tokenizer import BOS_ID, EOS_ID
from train import time_steps

# --------------------------------------------------------------------------------------------------
# Memory


def storages(tree) -> set:
    return {t.untyped_storage() for t in tree_leaves(tree) if isinstance(t, torch.Tensor)}


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors made inside it that are alive, and the most there were."""

    live = 0
    peak = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        for storage in storages(out) - storages((args, kwargs)):
            self.live += storage.nbytes()
            weakref.finalize(storage, self.end, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return out

    def end(self, size: int):
        self.live -= size


RECOMPUTED = {
    "least": "--recompute all",
    "less": "--recompute core",
    "more": "--recompute nothing --grad_accum 2",
}
LENGTHS = {"whole rows": (256,), "halves": (129, 127)}
# these run also without -m slow
TELLING = {"least-halves-bf16", "less-whole rows-fp32", "more-whole rows-bf16", "more-halves-fp32"}
CASES = []
for recomputed, rows, precision in product(RECOMPUTED, LENGTHS, ("fp32", "bf16")):
    name = f"{recomputed}-{rows}-{precision}"
    marks = () if name in TELLING else pytest.mark.slow
    flags = f"{RECOMPUTED[recomputed]} --precision {precision}"
    CASES.append(pytest.param(flags, LENGTHS[rows], id=name, marks=marks))


@pytest.mark.parametrize("flags, lengths", CASES)
def test_the_estimate_bounds_the_memory_of_a_step_whatever_its_documents(flags, lengths):
    """Halves are the worst case if one row is whole: all of them are padded to its length."""
    base = "--model tiny --seq_len 256 --micro_batch 8 --n_loops 2"
    plan = settled(*base.split(), *flags.split())
    model = train.build_model(plan.model, plan, world_of())
    memory = estimate_memory(model, plan, plan.flags.recompute, world_of())
    ids = text(8, 256)
    ends = torch.tensor(lengths * (256 // sum(lengths))).cumsum(0)
    ids[1:, ends - 1] = EOS_ID
    with LiveBytes() as measured:
        batches = [Batch.of(ids, ids, 0)] * plan.flags.grad_accum
        train.accumulate(model, batches, train.StepSettings(2))
    outside = {
        "parameters",
        "optimizer",
        "process at start",
        "checkpoint copy",
        "oneDNN kernels (at most)",
    }
    estimated = sum(size for name, size in memory.items() if name not in outside)
    assert measured.peak < estimated < 2 * measured.peak


def test_auto_recomputes_the_least_that_fits_with_room_to_spare_and_all_if_nothing_does():
    needs = {
        "nothing": dict(a=50.0, b=10.0),
        "core": dict(a=30.0, b=10.0),
        "all": dict(a=20.0, b=5.0),
    }

    def estimate(split, recompute):
        return needs[recompute]

    for available, chosen in ((71, "nothing"), (70, "core"), (48, "core"), (47, "all"), (5, "all")):
        assert choose_memory(1, "auto", estimate, available) == (0, chosen, needs[chosen])
    assert choose_memory(1, "core", estimate, 5) == (0, "core", needs["core"])


def test_the_largest_micro_batch_that_fits_is_chosen_before_any_recomputation():
    micro_batches = (8, 4, 2, 1)
    per_sequence = dict(nothing=10, core=5, all=3)

    def estimate(split, recompute):
        return {"activations": micro_batches[split] * per_sequence[recompute]}

    for available, wanted in (
        (95, (0, "nothing")),
        (80, (1, "nothing")),
        (12, (3, "nothing")),
        (6, (3, "core")),
        (1, (3, "all")),
    ):
        assert choose_memory(4, "auto", estimate, available)[:2] == wanted


def gigabytes(flags: str = "", recompute: str = "nothing") -> float:
    """Estimate a step of 1b on a GPU, in bf16 unless flags say otherwise."""
    base = "--model 1b --seq_len 256 --micro_batch 112 --precision bf16"
    plan = settled(*base.split(), *flags.split())
    with torch.device("meta"):
        model = Spider(plan.config)
    return sum(estimate_memory(model, plan, recompute, world_of("cuda")).values()) / 1e9


def test_more_recomputation_takes_less_memory_and_more_rows_take_more():
    design = "--set boundary_rate=0.3"  # 3.3 bytes per segment
    core = gigabytes(design, "core")
    assert core < 0.6 * gigabytes(design, "nothing")
    assert gigabytes(design, "all") < 0.8 * core
    assert gigabytes(f"{design} --grad_accum 4", "core") > core + 3
    assert gigabytes(f"{design} --precision fp8", "core") > core
    assert gigabytes(f"{design} --seq_len 2048 --micro_batch 64", "core") > 2.5 * core


@pytest.mark.parametrize(
    "sequences, length, documents, expected", ((448, 256, 448, 1.41e9), (64, 2048, 2685, 3.89e9))
)
def test_the_gradient_of_q_in_fp32_takes_a_mebibyte_per_document_beyond_the_bytes(
    sequences, length, documents, expected, tmp_path
):
    """Of 16 heads of 128, in flash_api.cpp: [bytes + 128 * documents, heads, width]. The second
    text is lines of 49 bytes, of which some end with EOS and the others begin with BOS; each
    sequence begins a document, too."""
    ids = np.full(100_000, ord("a"), "<u2")
    if documents > sequences:
        ids[49:50_000:50] = EOS_ID
        ids[50_050::50] = BOS_ID
    ids.tofile(tmp_path / "train-0.bin")
    flags = f"--model 1b --seq_len {length} --micro_batch {sequences} --precision bf16"
    plan = settled(*flags.split(), sources=open_data(str(tmp_path)))
    with torch.device("meta"):
        model = Spider(plan.config)
    size = estimate_memory(model, plan, "nothing", world_of("cuda"))[FLASH_BACKWARD]
    assert size == pytest.approx((sequences * length + 128 * documents) * 16 * 128 * 4, rel=1e-3)
    assert size == pytest.approx(expected, rel=0.01)


def test_masks_of_dropout_take_a_byte_per_number():
    bytes_and_segments = 112 * 256 * (1 + 1 / config.SpiderConfig.preset("1b").bytes_per_segment)
    masks = gigabytes("--dropout 0.5") - gigabytes()
    assert masks * 1e9 == pytest.approx(2 * 2048 * bytes_and_segments, rel=0.02)


def test_a_step_that_a_cpu_cannot_hold_is_refused_before_it_is_tried(tmp_path, shards, capsys):
    argv = run_flags(shards, tmp_path / "run", "--micro_batch", str(1 << 20), "--seq_len", "600")
    assert train.command_line(argv) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "--micro_batch: the run needs at least" in lines[-1]
    assert any("recompute all" in line for line in lines)
    assert any("memory: about" in line and "NOT ENOUGH" in line for line in lines)


@pytest.mark.slow
def test_a_run_takes_about_the_memory_that_it_logs(tmp_path):
    """With the process itself and the copy for checkpoints; upper bounds stand apart."""
    flags = (
        "--mock_data --model tiny --device cpu --seq_len 1024 --max_steps 3 --ckpt_every 2 "
        "--eval_every 0"
    )
    done = command(*flags.split(), "--ckpt_dir", tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "memory: about" in line]
    logged = {
        name: float(size)
        for name, size in re.findall(r"[,:] ([a-z][A-Za-z ()]*?) (\d+\.\d\d)(?=,|$)", line)
    }
    peak = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["memory"]
    total = float(re.search(r"about (\S+) GB", line)[1])
    assert total == pytest.approx(sum(logged.values()), abs=0.05)
    sure = total - sum(size for name, size in logged.items() if "at most" in name)
    assert {"process at start", "checkpoint copy", "parameters"} <= logged.keys()
    assert 0.6 * peak < sure
    assert peak < 1.1 * total


# --------------------------------------------------------------------------------------------------
# The dry run


@pytest.mark.parametrize("short", ((), ("memory",), ("disk",), ("memory", "disk")), ids="-".join)
def test_the_dry_run_ends_with_what_does_not_suffice_and_with_status_1(
    tmp_path, shards, monkeypatch, short, capsys
):
    if "memory" in short:
        monkeypatch.setattr(machine, "memory_of", lambda *_: 1e6)
    if "disk" in short:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1e5))
    status = train.command_line(run_flags(shards, tmp_path / "run", "--dry_run"))
    assert status == (1 if short else 0)
    lines = capsys.readouterr().out.splitlines()
    verdict = f"NOT ENOUGH {' and '.join(short)}" if short else "enough memory and disk"
    assert lines[-1] == f"verdict: {verdict}"
    starts = (
        "parameters by component",
        "flags",
        "data: ",
        "model tiny",
        "memory: about",
        "disk: ",
        "run: ",
        "verdict: ",
    )
    order = []
    for start in starts:
        numbers = [i for i, line in enumerate(lines) if line.startswith(start)]
        order.append(numbers[0])
    assert order == sorted(order)
    assert order[-1] - order[2] < 12
    assert not (tmp_path / "run").exists()


def test_the_dry_run_times_whole_steps_of_the_middle_of_the_run_and_writes_nothing(
    tmp_path, shards, monkeypatch, capsys
):
    """Two micro-steps of two sequences each; a clock by which everything takes half a second."""
    events = []
    accumulate = train.accumulate
    update = train.update

    def recorded_accumulate(model, batches, now):
        shapes_and_seeds = [(tuple(batch.ids.shape), batch.noise_seed) for batch in batches]
        events.append((now.dropout, now.n_loops, shapes_and_seeds))
        return accumulate(model, batches, now)

    def recorded_update(*args):
        events.append("update")
        return update(*args)

    monkeypatch.setattr(train, "accumulate", recorded_accumulate)
    monkeypatch.setattr(train, "update", recorded_update)
    monkeypatch.setattr(train, "time_steps", time_steps)
    monkeypatch.setattr(train.time, "perf_counter", partial(next, count(0, 0.5)))
    before = contents(shards)
    argv = run_flags(
        shards, tmp_path / "run", "--dry_run", "--grad_accum", "2", "--target_tokens", "12800"
    )
    assert train.command_line(argv) == 0
    assert "at 256 bytes/s, as timed" in capsys.readouterr().out
    noise = [train.step_seed(0, step, "noise") for step in range(50, 55)]
    dropout = events[0][0]
    assert 0.4 < dropout <= 0.5
    assert events[1::2] == ["update"] * 5
    assert events[::2] == [(dropout, 2, [((2, 32), seed), ((2, 32), seed + 2)]) for seed in noise]
    assert contents(shards) == before
    assert os.listdir(tmp_path) == ["data"]


@pytest.mark.parametrize(
    "reason, because",
    (
        ("slow", "a step takes too long"),
        ("full", "there is too little memory"),
        ("ranks", "there are several ranks"),
        ("compiled", "compiling"),
    ),
)
def test_the_dry_run_times_no_step_where_that_would_take_long(tmp_path, reason, because):
    plan, world = settled("--ckpt_dir", str(tmp_path), "--seq_len", "64"), world_of()
    world.ranks = 2 if reason == "ranks" else 1
    plan = replace(
        plan,
        flags=replace(plan.flags, compile="auto" if reason == "compiled" else "off"),
        memory=dict(activations=math.inf if reason == "full" else 1.0),
    )
    bound = 1.0 if reason == "slow" else 1e6
    assert because in estimate.obstacle_to_timing(plan, world, bound)


def test_memory_that_only_some_documents_need_refuses_no_run(monkeypatch):
    monkeypatch.setattr(estimate, "memory_of", lambda *_: 100.0)
    memory = {"parameters": 100.0, estimate.BATCHES: 1.0, estimate.PADDING: 900.0}
    estimate.check_memory(memory, world_of())
    with pytest.raises(TooLarge, match="--micro_batch"):
        estimate.check_memory(memory | {"parameters": 130.0}, world_of())


@pytest.mark.parametrize("device", ("cpu", "cuda"))
def test_batches_that_no_device_holds_are_refused_and_name_the_accumulation(monkeypatch, device):
    monkeypatch.setattr(estimate, "memory_of", lambda *_: 100.0)
    memory = {"parameters": 20.0, estimate.BATCHES: 99.0, estimate.PADDING: 0.0}
    estimate.check_memory(memory, world_of(device))
    with pytest.raises(TooLarge, match="--grad_accum: the batches"):
        estimate.check_memory(memory | {estimate.BATCHES: 150.0}, world_of(device))


def test_the_estimate_counts_the_batches_of_a_step_and_of_the_next_one(shards):
    plan = settled("--model", "tiny", "--seq_len", "32", "--micro_batch", "4", "--grad_accum", "3")
    feed = Feed(Loader(open_data(str(shards)), 32, 0), plan.layout, 0, torch.device("cpu"), 0, 0)
    batches = [*feed.take(), *feed.take()]
    size = sum(batch.ids.nbytes + batch.labels.nbytes for batch in batches)
    assert plan.memory[estimate.BATCHES] == size


@pytest.mark.parametrize("flag", ("--grad_accum", "--micro_batch", "--global_batch"))
def test_the_largest_batch_that_a_flag_takes_is_refused_before_anything_is_built(
    tmp_path, shards, capsys, flag
):
    line = refused(run_flags(shards, tmp_path / "run", flag, str(1 << 61)), capsys)
    named = "--micro_batch" if flag == "--micro_batch" else "--grad_accum"
    assert line.startswith(f"train.py: error: {named}: ")
    assert "but this machine has" in line


@pytest.mark.parametrize("limit, most", (("5000\n", 5000), ("max\n", math.inf)))
def test_a_containers_memory_is_its_limit(tmp_path, monkeypatch, limit, most):
    of_machine = machine.memory_of(torch.device("cpu"))
    monkeypatch.setattr(machine, "CGROUP_LIMIT", tmp_path / "memory.max")
    (tmp_path / "memory.max").write_text(limit)
    assert machine.memory_of(torch.device("cpu"), 2) == min(of_machine, most) / 2
