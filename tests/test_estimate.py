"""Estimates of a run: memory, what is recomputed for it, segments, the rate that a dry run
expects."""

import json
import math
import os
import re
import shutil
import weakref
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from itertools import count
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.overrides import _get_current_function_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train
from conftest import (
    SMALL,
    contents,
    on_meta,
    refused,
    run_flags,
    settled,
    small_config,
    text,
    world_of,
)
from data import Batch, Feed, Loader, mock_source, open_data
from jobs import command
from spider import estimate, machine
from spider.common import TooLarge
from spider.config import SpiderConfig
from spider.estimate import MicroStep, choose_memory, estimate_memory
from spider.plan import Plan, print_dry_run
from spider_model import Block, RecurrentBlock, Spider
from stand_in_gpu import StandInGPU
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
        if operation in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            # not computed, for speed
            out = args[0].new_zeros(*args[0].shape[:-1], args[1].shape[-1])
        else:
            out = operation(*args, **(kwargs or {}))
        for storage in storages(out) - storages((args, kwargs)):
            self.live += storage.nbytes()
            weakref.finalize(storage, self.end, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return out

    def end(self, size: int):
        self.live -= size


class Kernel(torch.autograd.Function):
    """What a GPU's kernel saves: its operands and, of each row, an fp32 number per head; its
    gradients are zero."""

    @staticmethod
    def forward(ctx, out, heads, *operands):
        ctx.save_for_backward(*operands, torch.empty(len(out), heads))
        return out.detach()

    @staticmethod
    def backward(ctx, grad):
        *operands, _ = ctx.saved_tensors
        return None, None, *map(torch.zeros_like, operands)


class SavingGPU(StandInGPU):
    """A stand-in whose norms and attention save what kernels do."""

    def run(self, func, *args, **kwargs):
        if str(func) == "torch_attn._varlen_attn":
            q, k, v = args[:3]
            out = torch.zeros_like(v)
            return Kernel.apply(out, q.shape[1], q, k, v, out), None, None
        if func == torch.nn.functional.rms_norm:
            x = args[0]
            with torch.no_grad():
                y = func(*args, **kwargs)
            return Kernel.apply(y, 1, x)
        return super().run(func, *args, **kwargs)


class OnGPU:
    """A layer that is on the stand-in in recomputation, too, where no mode is active."""

    def forward(self, *args, **kwargs):
        with nullcontext() if _get_current_function_mode() else SavingGPU():
            return super().forward(*args, **kwargs)


class SavingSpider(Spider):
    block_class = type("GPUBlock", (OnGPU, Block), {})
    core_block_class = type("GPURecurrentBlock", (OnGPU, RecurrentBlock), {})


FEW_ROWS = "engram_rows=99,engram_byte_rows=99"
OUTSIDE = {
    "parameters",
    "optimizer",
    "process at start",
    "checkpoint copy",
    "oneDNN kernels (at most)",
    "attention's backward pass",  # inside the kernel
}


def peak_and_estimate(plan: Plan, model: Spider, device: str, ids) -> tuple[float, float]:
    """Measure the gradients of a step, with all that they take; return that and its estimate."""
    model = train.build_model(model, plan, world_of())
    memory = estimate_memory(model, plan, plan.flags.recompute, world_of(device))
    with LiveBytes() as measured:
        batches = [Batch.of(ids, ids, 0)] * plan.flags.grad_accum
        train.accumulate(model, batches, train.StepSettings(plan.flags.n_loops))
    return measured.peak, sum(size for name, size in memory.items() if name not in OUTSIDE)


@pytest.mark.parametrize(
    "flags, lengths",
    (
        ("--recompute all --precision bf16", (129, 127)),
        ("--recompute nothing --grad_accum 2 --precision fp32", (256,)),
    ),
)
def test_the_estimate_bounds_the_memory_of_a_step_on_a_cpu_whatever_its_documents(flags, lengths):
    """Halves are the worst case if one row is whole: all of them are padded to its length."""
    base = f"--model tiny --set {FEW_ROWS} --seq_len 256 --micro_batch 4 --n_loops 2"
    plan = settled(*base.split(), *flags.split())
    ids = text(4, 256)
    ends = torch.tensor(lengths * (256 // sum(lengths))).cumsum(0)
    ids[1:, ends - 1] = EOS_ID
    peak, estimated = peak_and_estimate(plan, plan.model, "cpu", ids)
    assert peak < estimated < 2 * peak


NARROW = """
    hidden_size=256 intermediate_size=512 n_heads=4 q_lora_rank=96 kv_lora_rank=64 v_head_dim=64
    qk_nope_head_dim=32 qk_rope_head_dim=32 n_routed_experts=4 moe_intermediate_size=64
    engram_byte_dim=32 engram_dim=16 n_recurrent_layers=1 engram_layers=0
"""


@pytest.mark.parametrize(
    "model, sizes, recompute",
    (("tiny", "", "nothing"), ("small", "", "all"), ("1b", NARROW, "core")),
)
def test_a_step_takes_the_memory_that_is_estimated(model, sizes, recompute):
    sizes = ",".join([FEW_ROWS, *sizes.split()])
    flags = f"--model {model} --set {sizes} --seq_len 512 --micro_batch 4 --precision bf16"
    plan = settled(*flags.split(), "--recompute", recompute)
    with torch.device("meta"):
        model = SavingSpider(plan.config)
    ids = torch.tensor(list(b"four five. " * 400))[:2048].view(4, 512)
    with SavingGPU():
        peak, estimated = peak_and_estimate(plan, model, "cuda", ids)
    assert estimated == pytest.approx(peak, rel=0.05)


# One after the other, and the error of the difference that each makes: larger where gradients of
# weights, the padding of experts, or scalars of each row have a share.
CHANGES = {
    "n_prelude_layers=2": 0.01,
    "intermediate_size=1024": 0.05,
    "recompute=all": 0.01,
    "vocab_size=1600": 0.08,
    "n_prelude_layers=3": 0.01,
    "recompute=nothing": 0.01,
    "rows=2048,vocab_size=272,intermediate_size=128": 0.01,
    "hidden_size=128": 0.01,
    "qk_rope_head_dim=24,qk_nope_head_dim=8": 0.01,
    "vocab_size=400": 0.01,
    "engram_byte_contexts=1+2": 0.01,
    "engram_votes=4,engram_match_contexts=3+4+5": 0.01,
    "engram_vote_ages=true": 0.01,
    "n_recurrent_layers=1": 0.05,
    "boundaries=learned": 0.05,
    "core_loss_weight=0.1": 0.01,
    "hidden_size=256": 0.02,
    "engram_layers=0": 0.03,
    "engram_heads=4": 0.01,
    "n_shared_experts=3": 0.01,
    "n_routed_experts=2": 0.06,
    "moe_intermediate_size=128": 0.03,
    "n_experts_per_tok=1": 0.03,
    "dropout=1": 0.01,
    "n_loops=3": 0.03,
    "recompute=core": 0.03,
    "n_recurrent_layers=2": 0.04,
    "n_routed_experts=16": 0.05,
}
SMALLEST = """
    hidden_size=64 n_prelude_layers=1 n_coda_layers=0 n_recurrent_layers=0 n_heads=4 q_lora_rank=128
    kv_lora_rank=64 qk_nope_head_dim=16 qk_rope_head_dim=16 v_head_dim=32 intermediate_size=128
    n_routed_experts=0 moe_intermediate_size=32 lora_rank=2 engram_byte_contexts=
    engram_byte_rows=99 engram_byte_dim=64 engram_match_contexts= engram_contexts=3+4
    engram_heads=2 engram_dim=32 engram_rows=99 engram_layers= boundaries=words boundary_prior=0.19
"""


@cache
def measure(number: int) -> tuple[float, float]:
    """Return the peak bytes of a step after so many CHANGES, and those that are estimated."""
    step = MicroStep(2, 8192, 512, 2, "nothing", False)
    changed = SMALLEST.split()
    for setting in ",".join([*CHANGES][:number]).split(","):
        name, _, value = setting.partition("=")
        if name in MicroStep._fields:
            step = step._replace(**{name: value if name == "recompute" else int(value)})
        elif name:
            changed.append(setting)
    c = SpiderConfig().changed(",".join(changed))
    model = SavingSpider(c).train()
    model.compute_dtype = torch.bfloat16
    model.recompute = step.recompute
    ids = torch.tensor(list(b"four five. " * 800))[: step.rows].view(-1, 512)
    with SavingGPU(), model.cast_weights_once(), LiveBytes() as measured:
        out = model(ids, ids, step.n_loops, noise_seed=0, dropout=0.5 * step.dropout)
        out.loss.backward()
    rate = float(out.segments) / step.rows
    if c.boundaries != "words":
        c = c.changed(f"boundary_rate={rate},boundary_alpha={rate},boundary_lambda=0")
    return measured.peak - out.boundary_counts.nbytes, estimate.activations(c, step)


@pytest.mark.parametrize("number, error", [*enumerate(CHANGES.values())], ids=CHANGES)
def test_a_size_changes_the_peak_of_a_step_by_what_is_estimated(number, error):
    before, estimated_before = measure(number)
    after, estimated = measure(number + 1)
    assert estimated - estimated_before == pytest.approx(after - before, rel=error)


@pytest.mark.parametrize("optimizer", ("muon", "adamw"))
def test_weights_and_the_state_of_an_optimizer_take_the_bytes_that_are_estimated(optimizer):
    plan = settled(*f"--model tiny --set {SMALL} --optimizer {optimizer}".split())
    model = train.build_model(plan.model, plan, world_of())
    optimizers = train.optimizers_of(plan.flags, model)
    ids = text(2, 64)
    train.train_step(model, optimizers, [Batch.of(ids, ids, 0)], train.StepSettings(1))
    size = sum(storage.nbytes() for storage in storages(optimizers.state_dict()))
    weights = sum(parameter.nbytes for parameter in model.parameters())
    estimated = estimate.state_size(model, optimizer)
    assert estimated.dense + estimated.tables == weights
    assert estimated.dense_state + estimated.table_state == pytest.approx(size, rel=0.01)


def test_the_largest_micro_batch_is_chosen_that_fits_with_the_least_recomputation():
    """With room to spare; if nothing fits, the least of all."""
    micro_batches = (8, 4, 2, 1)
    per_sequence = dict(nothing=10, core=5, all=3)

    def estimate(split, recompute):
        return {"activations": micro_batches[split] * per_sequence[recompute]}

    for available, wanted in (
        (80 / 0.85, (0, "nothing")),
        (80 / 0.86, (1, "nothing")),
        (10 / 0.85, (3, "nothing")),
        (5 / 0.85, (3, "core")),
        (5 / 0.86, (3, "all")),
        (1, (3, "all")),
    ):
        assert choose_memory(4, "auto", estimate, available)[:2] == wanted
    assert choose_memory(4, "core", estimate, 1)[:2] == (3, "core")


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
    """Settle the plan of a recipe on a card that only has properties."""

    def settle_on(card: Card, *argv: str) -> Plan:
        properties = SimpleNamespace(total_memory=card.memory)
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: properties)
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: card.capability)
        monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda **_: True)
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (card.memory, card.memory))
        no_kernels = "--compile off --moe_backend loop --deterministic".split()
        return settled(*no_kernels, *argv, device="cuda", sources=[mock_source(0)])

    return settle_on


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_a_card_trains_131072_bytes_a_step_in_the_largest_micro_batches_without_recomputation(
    plan_on, card, monkeypatch, capsys
):
    monkeypatch.setattr(machine, "product_rate", lambda _: 1e14)
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


def test_fp8_takes_memory_for_gate_and_up_in_fp32():
    plan = settled("--model", "1b", "--precision", "bf16", "--micro_batch", "16")
    in_fp8 = replace(plan, flags=replace(plan.flags, precision="fp8"))
    sizes = [
        estimate_memory(plan.model, each, "nothing", world_of("cuda")) for each in (plan, in_fp8)
    ]
    assert sizes[1]["activations"] - sizes[0]["activations"] == 16 * 2048 * 3 * 4 * 4096
    assert sizes[1]["cast weights"] < sizes[0]["cast weights"]


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
    memory = estimate_memory(on_meta(plan.config), plan, "nothing", world_of("cuda"))
    size = memory["attention's backward pass"]
    assert size == pytest.approx((sequences * length + 128 * documents) * 16 * 128 * 4, rel=1e-3)
    assert size == pytest.approx(expected, rel=0.01)
    narrow = replace(plan, config=plan.config.changed("qk_nope_head_dim=16,v_head_dim=80"))
    rows = sequences * length
    assert estimate.flash_backward(narrow, rows) / estimate.flash_backward(plan, rows) == 96 / 128


def test_a_rank_has_its_part_of_weights_and_gradients_and_of_the_checkpoints_copy():
    """Of two shards on one machine."""
    world = world_of()
    world.ranks = world.local_ranks = world.shards = 2
    for grad_accum, part in ((1, 2), (2, 1)):
        plan = settled("--model", "tiny", "--grad_accum", str(grad_accum))
        memory = estimate_memory(plan.model, plan, "nothing", world)
        tables = [table.weight for table in estimate.tables_of(plan.model).values()]
        of_tables = sum(table.nbytes for table in tables)
        weights = sum(p.nbytes for p in plan.model.parameters()) - of_tables
        state = estimate.state_size(plan.model, "muon")
        assert memory["parameters"] == of_tables + weights / 2
        assert memory["optimizer"] == state.table_state + state.dense_state / 2
        assert memory["gradients"] == weights / part
        assert memory["checkpoint copy"] == plan.checkpoint_size / 2


def test_lookups_of_an_engram_table_take_less_than_is_estimated_however_many():
    """Four micro-steps of 2,000 lookups each, in a table of about 500 rows."""
    model = Spider(small_config(engram_rows=250))
    plan = SimpleNamespace(config=model.config, flags=SimpleNamespace(grad_accum=4))
    name, table = next(item for item in estimate.tables_of(model).items() if "core" in item[0])
    lookups = 4 * len(table.weight)
    with LiveBytes() as measured:
        for _ in range(4):
            row = torch.arange(lookups) % len(table.weight)
            table.gather(row, torch.ones(lookups, table.weight.shape[1]))
            del row
    rows = lookups / len(table.primes) * model.config.bytes_per_segment
    estimated = estimate.table_gradients({name: table}, plan, rows)
    assert measured.peak < estimated < 2 * measured.peak


def test_fp8_halves_the_flops_of_the_products_that_it_converts_and_no_others():
    """At 2 bytes per segment and 3 loops, a core layer runs 1.5 times per byte."""
    c = small_config(n_routed_experts=4, n_experts_per_tok=2)
    model = on_meta(c)
    cost = partial(estimate.flops_per_byte, model, 2.0, 3, 64)
    gate = "prelude.0.ffn.gate_up_proj.weight"
    assert cost() - cost([gate]) == 3 * model.get_parameter(gate).numel()
    routed = "core.layers.0.moe.w_up"
    assert cost() - cost([routed]) == 3 * 1.5 * 2 / 4 * model.get_parameter(routed).numel()
    converted = estimate.weights_in_fp8(model)
    assert gate in converted and routed not in converted and "lm_head.weight" not in converted
    assert routed in estimate.weights_in_fp8(model, experts=True)


@pytest.mark.parametrize("setting, more", (("n_routed_experts=7", 3 * 32), ("lora_rank=5", 2 * 32)))
def test_flops_count_what_each_loop_reads_of_routers_and_adapters(setting, more):
    """At a width of 32; of 3 more experts the scores alone, since as many are chosen. At 2 bytes
    per segment and 3 loops, 1.5 times per byte."""
    settings = dict(n_routed_experts=4, n_experts_per_tok=2, n_recurrent_layers=1, engram_layers=())
    small = small_config(**settings, n_loops=2, lora_rank=4)
    models = [on_meta(small), on_meta(small.changed(setting))]
    costs = [estimate.flops_per_byte(model, 2.0, 3, 64) for model in models]
    assert costs[1] - costs[0] == 6 * 1.5 * more


@pytest.mark.parametrize(
    "argv, bound, expected",
    (
        ("--precision bf16", 438e3, 219e3),
        ("--precision fp8", 694e3, 1e6 / (1000 / 694 + 1000 / 438)),
        ("--precision bf16 --micro_batch 1", 438e3, 2048 / 0.07),  # the host is too slow
    ),
)
def test_the_rate_to_expect_of_a_gpu_is_below_that_of_its_products(
    argv, bound, expected, plan_on, monkeypatch, capsys
):
    """On an H200 of 790 TFLOP/s; FP8 doubles the rate of what it converts alone."""
    monkeypatch.setattr(machine, "product_rate", lambda _: 790e12)
    plan = plan_on(CARDS["H200"], "--model", "1b", *argv.split())
    rates = estimate.rates(plan, 790e12)
    assert rates == pytest.approx((bound, expected), rel=0.01)
    bound, expected = rates
    compiled = replace(plan, flags=replace(plan.flags, compile="on"))
    print_dry_run(compiled, [], world_of("cuda"), lambda: 1.0)
    shown = capsys.readouterr().out
    assert f"at an expected {expected:,.0f} bytes/s, at least" in shown
    assert f"matrix products alone allow {bound:,.0f} bytes/s" in shown


@pytest.mark.slow
def test_a_run_takes_the_memory_that_it_logs(tmp_path):
    """With the process itself and the copy for checkpoints. On a CPU with bf16 oneDNN keeps kernels
    for each number of segments, so that the peak comes after some 300 steps."""
    flags = (
        "--mock_data --model tiny --device cpu --seq_len 512 --max_steps 320 --ckpt_every 310 "
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
    assert {"process at start", "checkpoint copy", "parameters"} <= logged.keys()
    assert peak == pytest.approx(total, rel=0.1)


# --------------------------------------------------------------------------------------------------
# The dry run


@pytest.mark.parametrize("short", ((), ("memory",), ("memory", "disk")), ids="-".join)
def test_the_dry_run_ends_with_what_does_not_suffice_and_with_status_1(
    tmp_path, shards, monkeypatch, short, capsys
):
    if "memory" in short:
        monkeypatch.setattr(estimate, "memory_of", lambda *_: 1e6)
    if "disk" in short:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1e5))
    status = train.command_line(run_flags(shards, tmp_path / "run", "--dry_run"))
    assert status == (1 if short else 0)
    lines = capsys.readouterr().out.splitlines()
    remedies = dict(memory="choose a smaller --seq_len or --model", disk="name a --ckpt_dir")
    verdict = "NOT ENOUGH" if short else "enough memory and disk"
    assert lines[-1].startswith(f"verdict: {verdict}")
    for lacking in short:
        assert f"{lacking}: " in lines[-1] and remedies[lacking] in lines[-1]
    for start in ("flags", "data: ", "model tiny"):
        assert any(line.startswith(start) for line in lines)
    summary = [line.partition(":")[0] for line in lines[-4:]]
    assert summary == ["memory", "disk", "run", "verdict"]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("free, warns", ((1e5, True), (1e10, False)))
def test_a_run_warns_of_a_disk_without_room_for_its_checkpoints(
    tmp_path, shards, monkeypatch, capsys, free, warns
):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    assert train.command_line(run_flags(shards, tmp_path, "--eval_every", "0", steps=1)) == 0
    assert ("NOT ENOUGH: make room" in capsys.readouterr().err) == warns


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


@pytest.mark.parametrize("device", ("cpu", "cuda"))
@pytest.mark.parametrize(
    "needs, copy, refusal",
    (
        (dict(parameters=100.0, padding=900.0), 1.0, None),  # only some documents need padding
        (dict(parameters=130.0), 1.0, "--micro_batch: the run needs"),
        (dict(parameters=125.0), 1.0, None),
        (dict(parameters=20.0), 1e18, "--ckpt_every: a checkpoint is copied"),
    ),
)
def test_a_run_that_needs_far_more_memory_than_there_is_is_refused(
    monkeypatch, device, needs, copy, refusal
):
    """A device of 100 bytes; `copy`: bytes of a checkpoint."""
    monkeypatch.setattr(estimate, "memory_of", lambda *_: 100.0)
    names = dict(parameters="parameters", padding=estimate.PADDING)
    memory = {name: needs.get(key, 0.0) for key, name in names.items()}
    plan = replace(settled("--model", "tiny"), memory=memory, checkpoint_size=copy)
    is_refused = refusal and (device == "cuda" or copy == 1.0)
    with pytest.raises(TooLarge, match=refusal) if is_refused else nullcontext():
        estimate.check_memory(plan, world_of(device))


@pytest.mark.parametrize(
    "model, gigabytes, ranks, remedy",
    (
        ("original", 25.3, 1, "give --global_batch 131072 without --micro_batch, --grad_accum"),
        ("original", 25.3, 2, "raise --shards to 2"),
        ("base", 8.2, 1, "give --micro_batch 1 without --grad_accum"),
        ("1b", 8.2, 1, "choose a smaller --seq_len or --model"),
    ),
)
def test_what_takes_too_much_memory_names_flags_with_which_it_fits(
    plan_on, model, gigabytes, ranks, remedy
):
    world = world_of("cuda")
    world.ranks = ranks
    plan = plan_on(Card((8, 9), 1e9 * gigabytes, (0, 0), (0, 0), False), "--model", model)
    assert estimate.memory_remedy(plan, world).startswith(remedy)


@pytest.mark.parametrize(
    "seconds, told", ((119, "119 seconds"), (120, "2.0 minutes"), (36_000, "10 hours"))
)
def test_a_duration_is_told_in_the_largest_unit_of_which_it_has_two(seconds, told):
    assert estimate.describe_duration(seconds) == told


def test_what_a_process_holds_of_the_hosts_memory_has_room_for_the_checkpoint_to_come(monkeypatch):
    """It holds the checkpoint from which it resumes, until the model has it."""
    monkeypatch.setattr(estimate, "free_memory", lambda _: 1e6)
    held = machine.process_memory("VmRSS")
    plan = settled("--model", "tiny")
    for size, lacks in ((0.9 * held, False), (1.2 * held, True)):
        assert (
            estimate.lacks_host_memory(replace(plan, checkpoint_size=size), world_of("cuda"))
            == lacks
        )


@pytest.mark.parametrize("present", (0, 1, 5))
def test_the_disk_needs_room_for_the_checkpoints_to_come_and_one_more(
    present, tmp_path, monkeypatch, capsys
):
    """Of the last two and the best, at most three exist. 1,000 bytes each."""
    for step in range(present):
        (tmp_path / f"spider-step{step}.pt").touch()
    plan = settled("--model", "tiny", "--keep_best", "--ckpt_dir", str(tmp_path))
    plan = replace(plan, checkpoint_size=1000.0)
    needed = 1000 * (4 - min(present, 3))
    for free, lacks in ((needed - 1, True), (needed, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        lacking = estimate.print_memory_and_disk(plan, world_of())
        assert [line[:4] for line in lacking] == ["disk"] * lacks
    assert "for 4 checkpoints" in capsys.readouterr().out


def test_the_estimate_counts_the_batches_of_a_step_and_of_the_next_one(shards):
    plan = settled("--model", "tiny", "--seq_len", "32", "--micro_batch", "4", "--grad_accum", "3")
    feed = Feed(Loader(open_data(str(shards)), 32, 0), plan.layout, 0, torch.device("cpu"), 0, 0)
    batches = [*feed.take(), *feed.take()]
    size = sum(batch.ids.nbytes + batch.labels.nbytes for batch in batches)
    assert plan.memory["batches"] == size


@pytest.mark.parametrize("flag", ("--micro_batch", "--global_batch"))
def test_the_largest_batch_that_a_flag_takes_is_refused_before_anything_is_built(
    tmp_path, shards, capsys, flag
):
    line = refused(run_flags(shards, tmp_path / "run", flag, str(1 << 61)), capsys)
    assert "but this machine has" in line
