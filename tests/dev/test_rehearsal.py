"""A step on a GPU that is not there: what is counted, and that a step passes torch's checks of one."""

import shutil
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import bench
from conftest import SMALL
from spider.dev import absent_gpu, operations, rehearsal
from spider.dev.absent_gpu import CARDS, RehearsalError, in_child
from spider.dev.operations import FLOOR, Operation, Trace, fused_seconds

H200 = CARDS["h200"]


def traced(function) -> list[Operation]:
    """Return what a function does on fake tensors of a GPU."""
    with FakeTensorMode(), Trace(7) as trace:
        function()
    return trace.operations


def test_operations_are_counted_by_kernels_flops_and_bytes():
    product, = traced(lambda: torch.empty(64, 128, dtype=torch.bfloat16, device="cuda") @ torch.empty(
        128, 32, dtype=torch.bfloat16, device="cuda"))
    assert (product.name, product.kernels, product.flops, product.rate) == ("mm", 1, 2 * 64 * 128 * 32, "bf16")
    assert product.moved == 2 * (64 * 128 + 128 * 32 + 64 * 32)
    rows = torch.device("cuda")
    total, = traced(lambda: torch.empty(1000, 16, device=rows).expand(1000, 16).add_(torch.empty(1, 16, device=rows)))
    assert total.moved == 4 * (1000 * 16 + 16 + 1000 * 16) and total.kernels == 1 and total.flops == 0
    assert not traced(lambda: torch.empty(8, 8, device=rows).view(64).unsqueeze(0).expand(3, -1).detach())
    assert not traced(lambda: torch.empty(8, 8).sum())                                       # on the host


def test_a_gather_reads_the_rows_that_it_takes_and_an_expanded_tensor_is_read_once():
    taken, = traced(lambda: torch.empty(100_000, 8, device="cuda").index_select(
        0, torch.empty(10, dtype=torch.int64, device="cuda")))
    assert taken.moved == 2 * 10 * 8 * 4 + 10 * 8
    assert operations.nbytes(torch.empty(1, 8).expand(50, 8)) == 8 * 4


def test_what_the_host_reads_of_the_device_is_the_number_of_segments():
    read = []

    def function():
        read.extend(torch.ops.aten._local_scalar_dense(torch.empty((), dtype=dtype, device="cuda"))
                    for dtype in (torch.int32, torch.int64, torch.float32))
    traced(function)
    assert read == [7, 7, 1.0]


def operation(name, rate="elementwise", phase="forward", reads=(), writes=(), flops=0.0) -> Operation:
    moved = sum(size for _, size in (*reads, *writes))
    return Operation(name, phase, "", "", 1, flops, moved, rate, list(reads), list(writes))


def test_a_time_is_the_longest_of_products_traffic_and_the_shortest_kernel():
    assert operation("add").seconds(H200) == FLOOR
    assert operation("add", writes=[(1, 4_000_000_000)]).seconds(H200) == pytest.approx(1e-3)
    assert operation("mm", "bf16", flops=790e12).seconds(H200) == pytest.approx(1)
    assert operation("_scaled_mm", "fp8", flops=790e12).seconds(H200) < 0.6


def test_fused_operations_read_what_was_there_and_write_what_is_read_later():
    large = 400_000_000                    # 0.1 ms
    chain = [operation("mul", reads=[(1, large)], writes=[(2, large)]),
             operation("add", reads=[(2, large)], writes=[(3, large)]),
             operation("mm", "bf16", reads=[(3, large)], writes=[(4, large)])]
    assert sum(o.seconds(H200) for o in chain) == pytest.approx(6e-4)
    assert fused_seconds(chain, H200) == pytest.approx(4e-4)                                 # 2 is never written
    chain[1].phase = chain[0].phase = "optimizer"                                            # lists of tensors stay
    assert fused_seconds(chain, H200) == pytest.approx(6e-4)


def test_measured_figures_stand_beside_the_rehearsed_and_the_worst_misses_come_first():
    found = {"a": dict(seconds=0.1, peak=10e9, kernels=100), "b": dict(seconds=0.2, peak=10e9, kernels=100)}
    measured = [{"step": "a", "ms": 140.0, "peak GB": 16.0, "kernels": 120, "host, ms": 300.0},
                {"step": "b", "ms": "out of memory"}, {"step": "c", "ms": 5.0}]
    rows, missed = rehearsal.against_bounds(measured, found)
    assert [(row["figure"], row["rehearsed"], row["times"]) for row in rows] == [
        ("ms", 100.0, 1.4), ("peak GB", 10.0, 1.6), ("kernels", 100, 1.2), ("host, ms", 100.0, 3.0)]
    assert [row["figure"] for row in missed] == ["host, ms", "peak GB"]
    assert [absent_gpu.card_of(name) for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA A100")] == [
        "h100", "h200", None]


def test_a_card_says_where_its_rates_are_from():
    for card in CARDS.values():
        assert card.source and card.fp8 > card.bf16 > card.fp32 and 1e12 < card.bandwidth < 1e13 and card.memory > 8e10


def test_without_a_cuda_build_or_a_compiler_nothing_is_rehearsed_and_one_line_says_what_to_install(capsys):
    for patch, remedy in ((mock.patch("torch.version.cuda", None), "pip install torch=="),
                          (mock.patch.multiple("torch.version", cuda="13.0"), "install g++")):
        with patch, mock.patch("shutil.which", lambda *_: None):
            assert bench.main(["--rehearse", "h200"]) == 2
        said = capsys.readouterr()
        assert said.out == "" and said.err.count("\n") == 1 and said.err.startswith("bench.py: error: --rehearse: ")
        assert remedy in said.err


SMALL_STEP = ("--model", "tiny", "--set", SMALL, "--seq_len", "64", "--micro_batch", "4", "--n_loops", "2")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_step_passes_the_checks_of_a_gpus_operations_in_any_build():
    """Forward, recomputation, backward and update, with kernels that a CPU has not: their shapes, types, strides."""
    step = in_child(bench.rehearsed_step, "h200", [*SMALL_STEP, "--recompute", "all"])
    phases = {row[0] for row in step["by_phase"]}
    assert phases == {"cast", "forward", "recomputation", "backward", "optimizer", "rest"}
    assert {"attention", "bf16"} <= {row[0] for row in step["by_rate"]} and step["kernels"] > 1000
    assert step["peak"] > 1e6 and step["recompute"] == "all"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("flags", ("--precision bf16 --optimizer adamw --grad_accum 2", "--precision fp8"))
def test_other_steps_pass_them_too(flags):
    """Not in fp32, which has no kernel for documents: their lengths are looked at, and fakes have none."""
    heads = "nope_head_dim=8,qk_rope_head_dim=8,v_head_dim=16", "nope_head_dim=16,qk_rope_head_dim=16,v_head_dim=32"
    step = [word.replace(*heads) for word in SMALL_STEP]                                     # FP8 takes multiples of 16
    assert step != SMALL_STEP and in_child(bench.rehearsed_step, "rtx6000", [*step, *flags.split()])["kernels"] > 1000


def test_a_step_that_fails_a_check_is_one_line():
    done = mock.Mock(returncode=1, stderr="...\nRuntimeError: no such shape\n")
    with mock.patch.multiple(absent_gpu, build_shim=lambda: "x", no_compiler=lambda: None), \
            mock.patch("subprocess.run", return_value=done):
        with pytest.raises(RehearsalError, match="a step of --lr 1 fails: RuntimeError: no such shape"):
            in_child(bench.rehearsed_step, "h200", ["--lr", "1"])


FEWER = ("--n_loops", "2", "--set", "n_recurrent_layers=2,engram_layers=1")  # the widths of 1b: its bytes, less time


@pytest.mark.rehearsal
@pytest.mark.parametrize("flags", (
    "--precision bf16 --recompute core", "--precision bf16 --recompute nothing", "--precision bf16 --recompute all",
    "--precision bf16 --recompute core --grad_accum 4", "--precision fp8 --recompute core",
    "--precision bf16 --recompute core --optimizer adamw",
    "--precision bf16 --recompute all --seq_len 2048 --micro_batch 64",
    "--precision fp8 --recompute core --seq_len 2048 --micro_batch 64 --grad_accum 2"))
def test_the_memory_that_is_estimated_is_within_a_tenth_of_the_rehearsed(flags):
    step = in_child(bench.rehearsed_step, "h200", [*flags.split(), *FEWER])
    assert step["estimate"] == pytest.approx(step["peak"], rel=0.1)


@pytest.mark.rehearsal
def test_a_step_of_1b_launches_and_holds_what_docs_say(capsys):
    """The bars of the headline step; a change that breaks one must say so."""
    assert bench.main(["--rehearse", "h200", "--flags=--precision bf16 --recompute core"]) == 0
    said = capsys.readouterr().out
    for table in ("### steps", "### memory by kind", "by phase", "largest operations", "by module", "Not modeled:"):
        assert table in said
