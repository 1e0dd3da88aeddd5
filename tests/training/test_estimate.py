"""Estimates of a run: memory, recomputation, FLOPs, speed, disk; the dry run."""

import json
import math
import os
import re
import shutil
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch.utils._pytree import tree_leaves

import train
from conftest import (
    SMALL,
    contents,
    on_meta,
    resolved,
    small_config,
    text,
    world_of,
)
from data import Batch
from jobs import command
from rehearsal.peaks import BATCH, MODELS, PEAKS
from spider import machine
from spider.config import RECOMPUTE
from spider.errors import TooLarge
from spider.model.memory import tables_of
from spider.training import estimate
from spider.training.estimate import estimate_memory, first_that_fits
from spider.training.plan import Plan
from spider.training.resolve import print_dry_run
from train import time_steps

# --------------------------------------------------------------------------------------------------
# Memory


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("model, precision", PEAKS)
def test_estimated_gpu_memory_is_within_a_seventh_of_the_rehearsed_peak(
    model, precision, recompute, plan_on
):
    flags = f"--model={model} {MODELS[model]} --precision={precision} --recompute={recompute}"
    plan = plan_on(CARDS["H200"], *flags.split(), *BATCH.split())
    peak = PEAKS[model, precision][RECOMPUTE.index(recompute)]
    assert sum(plan.memory.values()) / 1e9 == pytest.approx(peak, rel=1 / 7)


@pytest.mark.parametrize("optimizer", ("muon", "adamw"))
def test_weights_and_optimizer_state_take_the_estimated_bytes(optimizer):
    plan = resolved(*f"--model tiny --set {SMALL} --optimizer {optimizer}".split())
    model = train.build_model(plan.model, plan, world_of())
    optimizers = train.optimizers_of(plan.flags, model)
    ids = text(2, 64)
    train.train_step(model, optimizers, [Batch.of(ids, ids, 0)], train.StepSettings(1))
    tensors = (t for t in tree_leaves(optimizers.state_dict()) if isinstance(t, torch.Tensor))
    size = sum(t.nbytes for t in tensors)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    estimated = estimate.state_size(model, optimizer)
    assert estimated.dense + estimated.tables == weights
    assert estimated.dense_state + estimated.table_state == pytest.approx(size, rel=0.01)


def test_first_fitting_plan_is_chosen_else_the_last(monkeypatch):
    monkeypatch.setattr(estimate, "estimate_memory", lambda size, _: {"activations": size})
    for available, wanted in ((80 / 0.85, 0), (80 / 0.86, 1), (10 / 0.85, 2), (1, 2)):
        monkeypatch.setattr(machine, "memory_of", lambda *_, n=available: n)
        assert first_that_fits([80, 40, 10], world_of())[0] == wanted


def test_recomputation_is_chosen_only_if_no_micro_batch_fits_without(monkeypatch):
    """The smallest micro-batch without recomputation is tried before the largest with it."""
    tried = []

    def fits(plan, _):
        flags = plan.flags
        tried.append((flags.micro_batch, flags.recompute))
        return {"activations": math.inf}

    monkeypatch.setattr(estimate, "estimate_memory", fits)
    chosen = resolved(*"--model tiny --seq_len 64 --global_batch 128".split()).flags
    assert tried == [(n, recompute) for recompute in RECOMPUTE for n in (2, 1)]
    assert (chosen.micro_batch, chosen.grad_accum, chosen.recompute) == (1, 2, "all")


class Card(NamedTuple):
    capability: tuple[int, int]
    memory: float  # bytes, as torch reports them
    split_1b: tuple[int, int]  # micro-batch and accumulation
    split_base: tuple[int, int]
    fits_original: bool


CARDS = {
    "RTX 4090": Card((8, 9), 25.3e9, (4, 16), (8, 8), False),
    "RTX 5090": Card((12, 0), 33.7e9, (8, 8), (8, 8), False),
    "L40S": Card((8, 9), 47.7e9, (8, 8), (16, 4), False),
    "H100": Card((9, 0), 85.0e9, (32, 2), (32, 2), True),
    "H200": Card((9, 0), 150.1e9, (64, 1), (64, 1), True),
}


@pytest.fixture
def plan_on(monkeypatch):
    """Make the plan of a recipe for a card of which only the properties exist."""

    def make_plan(card: Card, *argv: str) -> Plan:
        properties = SimpleNamespace(total_memory=card.memory)
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: properties)
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: card.capability)
        monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda **_: True)
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (card.memory, card.memory))
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1e12))
        no_kernels = "--compile off --moe_backend loop --deterministic".split()
        return resolved(*no_kernels, *argv, device="cuda")

    return make_plan


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_card_gets_the_largest_micro_batch_without_recomputation(
    plan_on, card, monkeypatch, capsys
):
    monkeypatch.setattr(machine, "matmul_rate", lambda _: 1e14)
    world = world_of("cuda")
    for model, split in (("1b", card.split_1b), ("base", card.split_base)):
        plan = plan_on(card, "--model", model)
        flags = plan.flags
        assert (flags.micro_batch, flags.grad_accum, flags.recompute) == (*split, "nothing")
        assert flags.micro_batch * flags.grad_accum * 2048 == flags.global_batch == 131_072
        assert sum(plan.memory.values()) < 0.85 * card.memory

        estimate.check_memory(plan, world)
        compiled = replace(plan, flags=replace(flags, compile="on"))
        assert print_dry_run(compiled, [], world, lambda: 1.0) == 0
        assert capsys.readouterr().out.count("enough memory and disk") == 1

    original = plan_on(card, "--model", "original")
    assert (original.flags.micro_batch, original.flags.grad_accum) == (64, 1)
    print_dry_run(original, [], world, lambda: 1.0)
    assert ("NOT ENOUGH memory: give --global" in capsys.readouterr().out) != card.fits_original


def test_each_rank_holds_its_shard_of_weights_gradients_and_copy():
    """Two shards on one machine."""
    world = world_of()
    world.ranks = world.local_ranks = world.shards = 2
    for grad_accum, part in ((1, 2), (2, 1)):
        plan = resolved("--model", "tiny", "--grad_accum", str(grad_accum))
        memory = estimate_memory(plan, world)
        tables = [table.weight for table in tables_of(plan.model)]
        of_tables = sum(table.nbytes for table in tables)
        weights = sum(p.nbytes for p in plan.model.parameters()) - of_tables
        state = estimate.state_size(plan.model, "muon")
        assert memory["parameters"] == of_tables + weights / 2
        assert memory["optimizer"] == state.table_state + state.dense_state / 2
        assert memory["gradients"] == weights / part
        assert memory["checkpoint copy"] == plan.checkpoint_size / 2


def test_flops_count_each_use_of_a_weight_and_half_in_fp8():
    """At 2 bytes per segment and 3 loops, a core layer runs 1.5 times per byte, and each of the two
    loop adapters 0.75 times."""
    model = on_meta(small_config(n_routed_experts=4, n_experts_per_tok=1, n_loops=2))
    cost = partial(estimate.flops_per_byte, model, 2.0, 3, 64)
    byte_layer = "prelude.0.ffn.gate_up_proj.weight"
    routed = "core.layers.0.moe.w_up"
    for name, uses in (
        (byte_layer, 1),
        ("core.out_proj.weight", 0.5),
        ("core.layers.0.moe.router.weight", 1.5),
        (routed, 1.5 / 4),
        ("core.lora_up", 0.75),
    ):
        in_full = 6 * uses * model.get_parameter(name).numel()
        assert cost() - cost([name]) == pytest.approx(in_full / 2)
    converted = estimate.weights_in_fp8(model)
    assert byte_layer in converted
    assert routed not in converted and "lm_head.weight" not in converted
    assert routed in estimate.weights_in_fp8(model, experts=True)


@pytest.mark.parametrize(
    "argv, bound, expected",
    (
        ("--precision bf16", 438e3, 219e3),
        ("--precision fp8", 694e3, 1e6 / (1000 / 694 + 1000 / 438)),
        ("--precision bf16 --micro_batch 1", 438e3, 2048 / 0.07),  # the host is too slow
    ),
)
def test_expected_gpu_rate_is_below_the_rate_of_matrix_products(
    argv, bound, expected, plan_on, monkeypatch, capsys
):
    """An H200 with 790 TFLOP/s. FP8 doubles the rate only of converted weights."""
    monkeypatch.setattr(machine, "matmul_rate", lambda _: 790e12)
    plan = plan_on(CARDS["H200"], "--model", "1b", *argv.split())
    rates = estimate.predict_speed(plan, 790e12)
    assert rates == pytest.approx((bound, expected), rel=0.01)
    bound, expected = rates
    compiled = replace(plan, flags=replace(plan.flags, compile="on"))
    print_dry_run(compiled, [], world_of("cuda"), lambda: 1.0)
    shown = capsys.readouterr().out
    assert f"at an expected {expected:,.0f} bytes/s, at least" in shown
    assert f"matrix products alone allow {bound:,.0f} bytes/s" in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, steps",
    (
        ("tiny --micro_batch 4", 6),
        ("tiny --micro_batch 4 --recompute all", 6),
        ("small", 6),
        # oneDNN caches bf16 kernels for each number of segments, so the peak comes late
        ("tiny --seq_len 512", 320 if machine.has_bf16(torch.device("cpu")) else 12),
    ),
)
def test_cpu_run_takes_the_estimated_memory_within_a_seventh(flags, steps, tmp_path):
    """The memory includes the checkpoint copy and the process, so the run has its own process."""
    run = f"--mock_data --device cpu --eval_every 0 --max_steps {steps} --ckpt_every {steps // 2}"
    words = ["--model", *flags.split(), *run.split(), "--ckpt_dir", tmp_path]
    dry, done = command(*words, "--dry_run", cwd=tmp_path), command(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    estimated = float(re.search(r"memory: about (\S+) GB", dry.stdout)[1])
    peak = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["memory"]
    assert estimated == pytest.approx(peak, rel=1 / 7)


# --------------------------------------------------------------------------------------------------
# The dry run


@pytest.mark.parametrize("short", ((), ("memory",), ("memory", "disk")), ids="-".join)
def test_dry_run_without_enough_memory_or_disk_has_status_1(
    train_small, monkeypatch, short, capsys
):
    if "memory" in short:
        monkeypatch.setattr(machine, "memory_of", lambda *_: 1e6)
    if "disk" in short:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1e5))
    directory = train_small("--dry_run", status=1 if short else 0)
    lines = capsys.readouterr().out.splitlines()
    remedies = dict(memory="choose a smaller --seq_len or --model", disk="name a --ckpt_dir")
    verdict = "NOT ENOUGH" if short else "enough memory and disk"
    assert lines[-1].startswith(f"verdict: {verdict}")
    for lacking in short:
        assert f"{lacking}: " in lines[-1] and remedies[lacking] in lines[-1]
    summary = [line.partition(":")[0] for line in lines[-4:]]
    assert summary == ["memory", "disk", "run", "verdict"]
    assert not directory.exists()


def test_run_warns_if_the_disk_lacks_room_for_checkpoints(train_small, monkeypatch, new_log):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1e5))
    train_small("--eval_every 0", steps=1)
    assert "NOT ENOUGH disk: make room" in new_log()


def test_dry_run_times_mid_run_steps_and_writes_nothing(
    tmp_path, shards, train_small, monkeypatch, capsys
):
    """Two micro-steps of two sequences each; by the fake clock every step takes half a second."""
    steps = []
    train_step = train.train_step

    def recorded_step(model, optimizers, batches, now, *rest):
        shapes_and_seeds = [(tuple(batch.ids.shape), batch.noise_seed) for batch in batches]
        steps.append((now.dropout, now.n_loops, shapes_and_seeds))
        return train_step(model, optimizers, batches, now, *rest)

    monkeypatch.setattr(train, "train_step", recorded_step)
    monkeypatch.setattr(train, "time_steps", time_steps)
    monkeypatch.setattr(train.time, "perf_counter", partial(next, count(0, 0.5)))
    before = contents(shards)
    train_small("--dry_run --grad_accum 2 --target_tokens 12800")
    assert "run: 6 steps of 128 bytes, 0:00:03 at 256 bytes/s, as timed" in capsys.readouterr().out
    noise = [train.step_seed(0, step, "noise") for step in range(50, 55)]
    dropout = steps[0][0]
    assert 0.4 < dropout <= 0.5
    assert steps == [(dropout, 2, [((2, 32), seed), ((2, 32), seed + 2)]) for seed in noise]
    assert contents(shards) == before
    assert os.listdir(tmp_path) == ["data"]


@pytest.mark.parametrize("reason", ("", "slow", "full", "ranks", "compiled"))
def test_dry_run_times_no_step_if_this_would_take_long(reason):
    world = world_of()
    world.ranks = 2 if reason == "ranks" else 1
    plan = resolved("--seq_len", "64")
    plan = replace(
        plan,
        flags=replace(plan.flags, compile="auto" if reason == "compiled" else "off"),
        memory=dict(activations=math.inf if reason == "full" else 1.0),
    )
    bound = 1.0 if reason == "slow" else 1e6
    assert estimate.is_timed(plan, world, bound) == (not reason)


@pytest.mark.parametrize(
    "device, needed, copy, refusal",
    (
        ("cpu", 130.0, 1.0, "--micro_batch: the run needs"),
        ("cpu", 125.0, 1e18, None),
        ("cuda", 130.0, 1.0, "--micro_batch: the run needs"),
        ("cuda", 125.0, 1e18, "--ckpt_every: a checkpoint is copied"),
    ),
)
def test_run_needing_far_too_much_memory_is_refused(monkeypatch, device, needed, copy, refusal):
    """The device has 100 bytes. `copy`: bytes of a checkpoint."""
    monkeypatch.setattr(machine, "memory_of", lambda *_: 100.0)
    memory = dict(parameters=needed)
    plan = replace(resolved("--model", "tiny"), memory=memory, checkpoint_size=copy)
    with pytest.raises(TooLarge, match=refusal) if refusal else nullcontext():
        estimate.check_memory(plan, world_of(device))


@pytest.mark.parametrize(
    "seconds, expected",
    ((119.4, "0:01:59"), (100_000, "1 day, 3:46:40"), (1e300, "115740740 days")),
)
def test_duration_is_shown_in_days_hours_minutes_and_seconds(seconds, expected):
    assert estimate.describe_duration(seconds).startswith(expected)


def test_checkpoint_copy_may_reuse_host_memory_of_the_process(monkeypatch):
    """The process holds the checkpoint that it resumes from, until the model has the values."""
    monkeypatch.setattr(estimate, "free_memory", lambda _: 1e6)
    held = machine.process_memory("VmRSS")
    plan = resolved("--model", "tiny")
    for size, lacks in ((0.9 * held, False), (1.2 * held, True)):
        obstacle = estimate.obstacle_to_copy(replace(plan, checkpoint_size=size), world_of("cuda"))
        assert (obstacle is not None) == lacks


@pytest.mark.parametrize("present", (0, 1, 5))
def test_disk_needs_room_for_the_remaining_checkpoints_and_one_more(present, tmp_path, monkeypatch):
    """The last two and the best are kept, so at most three exist, of 1,000 bytes each."""
    for step in range(present):
        (tmp_path / f"spider-step{step}.pt").touch()
    plan = resolved("--model", "tiny", "--keep_best", "--ckpt_dir", str(tmp_path))
    plan = replace(plan, checkpoint_size=1000.0)
    needed = 1000 * (4 - min(present, 3))
    for free, suffices in ((needed - 1, False), (needed, True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        lines, lacking = estimate.describe_needs(plan, world_of())
        assert [line[:4] for line in lacking] == ["disk"] * (not suffices)
        assert "for 4 checkpoints" in lines[1]


@pytest.mark.parametrize("flag", ("--micro_batch", "--global_batch"))
def test_largest_accepted_batch_is_refused_before_building_a_model(error_of, flag):
    assert "but this machine has" in error_of(f"{flag} {1 << 61}")
