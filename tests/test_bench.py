"""The benchmark: its tables, and that a step that it times is a whole one."""

import json
import re
from functools import partialmethod

import pytest
import torch

import bench
from conftest import SMALL as SIZES
from conftest import weights_of
from spider import machine
from spider.training import optim
from spider.training.distributed import World
from spider_model import Spider

SMALL = ["--device=cpu", "--seq_len=32", "--micro_batch=2"]
SMALL_1B = [*SMALL, "--model=1b", "--n_loops=2", f"--set={SIZES}"]


def test_a_step_is_a_whole_one_and_leaves_the_weights_as_they_were(monkeypatch):
    world = World({}, torch.device("cpu"))
    plan, sources = bench.resolve_step(SMALL_1B, world)
    step = bench.Step(plan, sources, world)
    before = weights_of(step.model)
    orthogonalize = optim.orthogonalize
    counts = []

    def counted(matrices, *rest):
        counts.append(len(matrices))
        return orthogonalize(matrices, *rest)

    monkeypatch.setattr(optim, "orthogonalize", counted)
    step()
    by_name = step.optimizers.by_name
    assert by_name.keys() == {"muon", "adamw", "engram"}
    for optimizer in by_name.values():
        assert all(optimizer.state[p] for group in optimizer.param_groups for p in group["params"])
    matrices = by_name["muon"].param_groups[0]["params"]
    assert sum(counts) == sum(p[..., 0, 0].numel() for p in matrices)
    for name, p in step.model.named_parameters():
        torch.testing.assert_close(p, before[name], rtol=0, atol=1e-12)


def test_the_batch_on_a_gpu_is_the_recommended_one(monkeypatch):
    # which NVIDIA calls 141 GB
    monkeypatch.setattr(machine, "memory_of", lambda *_: 139.8 * (1 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "H200")
    world = World({}, torch.device("cuda"))
    plan, _ = bench.resolve_step(["--moe_backend=loop", "--compile=off"], world)
    assert (plan.flags.micro_batch, plan.flags.grad_accum) == (448, 1)
    assert plan.flags.recompute == "nothing"


def test_text_is_synthetic_unless_data_dir_is_given(shards):
    world = World({}, torch.device("cpu"))
    _, synthetic = bench.resolve_step(SMALL, world)
    _, from_files = bench.resolve_step([*SMALL, "--data_dir", str(shards)], world)
    assert [str(source) for source in synthetic] != [str(source) for source in from_files]


def test_overlapping_kernels_of_a_trace_count_once(tmp_path):
    spans = (
        ("kernel", 1000, 2000),
        ("gpu_memcpy", 2500, 1000),
        ("kernel", 5000, 500),
        ("cpu_op", 0, 90000),
        ("gpu_user_annotation", 0, 90000),
        ("kernel", 1100, 10),
    )
    events = [{"ph": "X", "cat": kind, "ts": start, "dur": length} for kind, start, length in spans]
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps(dict(traceEvents=[{"ph": "M", "name": "x"}, *events])))
    assert machine.read_trace(trace) == (3.0, 4)


@pytest.mark.slow
def test_machine_and_step_are_measured_on_a_cpu(monkeypatch, capsys):
    # seconds
    monkeypatch.setattr(
        Spider, "compile_layers", partialmethod(Spider.compile_layers, backend="aot_eager")
    )
    assert bench.main([*SMALL, "--compile=on", "--precision=fp32"]) == 0
    out = capsys.readouterr().out
    assert re.findall("### (.*)", out) == [
        "machine",
        "step of 2 x 32 x 1 bytes, fp32, grouped experts, recompute nothing",
    ]
    for row in ("torch.compile", "product, fp32, TFLOP/s", "layers compiled | True", "MFU"):
        assert f"\n| {row} |" in out
