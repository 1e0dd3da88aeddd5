"""Which backend computes the experts: whether TileKernels can serve, and what `auto` takes."""

import importlib.util
import math
import sys
from contextlib import nullcontext
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from stand_in_kernels import INSTALLED, WIDTH, D, E, K, Kernels, N, kernels, routing  # noqa: F401

import tile_moe
import train
from conftest import settled
from spider import errors
from spider.model.config import SpiderConfig
from spider.training import machine
from tile_moe import TORCH_OPERATIONS, BackendError, find_disagreement, resolve_backend, route

CONFIG = SpiderConfig(hidden_size=D, n_routed_experts=E, n_experts_per_tok=K)
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_the_check_passes_kernels_that_agree_whatever_their_order_inside_an_expert(dtype, kernels):
    assert find_disagreement(Kernels, CPU, CONFIG, dtype) is None
    assert find_disagreement(TORCH_OPERATIONS, CPU, CONFIG, dtype) is None


def swap_two_positions(mapping):
    """Of the first slot of the first expert and of the last one."""
    (_, _, to_slot, slot_to_pos, *_), first = mapping, mapping[4][[0, -1]]
    slot_to_pos.view(-1)[to_slot[first].long()] = first.flip(0)
    return mapping


WRONG = {"topk_gate": lambda idx: idx.flip(1), "normalize_weight": lambda pair: (pair[0], pair[1] * 1.001),
         "aux_fi": lambda load: load * 1.001, "get_fused_mapping": swap_two_positions,
         "expand_to_fused": lambda rows: rows.roll(1, 0), "reduce_fused": lambda y: y + (y != 0)}


@pytest.mark.parametrize("name", WRONG)
def test_the_check_names_the_kernel_that_disagrees(name, kernels):
    right = getattr(Kernels, name)
    broken = type("Broken", (Kernels,), {name: staticmethod(lambda *args: WRONG[name](right(*args)))})
    assert find_disagreement(broken, CPU, CONFIG, torch.float32) == name


@pytest.fixture
def machine(monkeypatch, tmp_path, kernels):
    """A machine with a GPU and TileKernels that pass their check, as far as resolve_backend looks; a namespace of what
    it finds: capability, nvcc, ops, fault (of the device, afterwards), and the lines it says."""
    nvcc = tmp_path / "nvcc"
    nvcc.touch(0o755)
    found = SimpleNamespace(capability=(9, 0), nvcc=str(nvcc), ops=Kernels, fault=None, lines=[])
    def compiler():
        if found.nvcc is None:
            raise RuntimeError("Failed to automatically detect CUDA installation.")
        return found.nvcc
    def synchronize(device):
        if found.fault:
            raise RuntimeError(found.fault)
    modules = {name: ModuleType(name) for name in ("tile_kernels", "tilelang", "tilelang.contrib",
                                                   "tilelang.contrib.nvcc")}
    modules["tile_kernels"].moe, modules["tilelang.contrib.nvcc"].get_nvcc_compiler = None, compiler
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(importlib.util, "find_spec", modules.get)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found.capability)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(tile_moe, "find_disagreement",
                        lambda moe, device, config, dtype: find_disagreement(found.ops, CPU, config, dtype))
    found.resolve = lambda name, dtype=torch.bfloat16, config=CONFIG, **more: resolve_backend(
        name, GPU, config, dtype, found.lines.append, **more)
    return found


@pytest.mark.parametrize("capability", ((9, 0), (10, 0), (10, 3), (12, 0)))
def test_auto_takes_tile_kernels_that_pass_their_check_on_any_gpu_from_hopper_on(machine, capability):
    machine.capability = capability
    assert machine.resolve("auto") == machine.resolve("tile") == "tile"
    assert bool(machine.lines) == (capability[0] == 12)                   # of grouped products, see below


def test_auto_takes_grouped_with_compiled_layers_and_says_where_that_is_slow(machine):
    assert machine.resolve("auto", compiled=True) == "grouped" and not machine.lines
    machine.capability = (12, 0)
    assert machine.resolve("auto", compiled=True) == "grouped" and "one after the other" in machine.lines[0]
    assert machine.resolve("tile", compiled=True) == "tile"


def obstacles(machine, monkeypatch):
    """Breaks the machine in one way after the other; what the line then says."""
    def refuse(*_):
        raise RuntimeError("// a long source\nCompilation error:\nnvcc fatal   : Unsupported gpu\nCommand:")
    machine.capability = (8, 9)
    yield "sm_90"
    machine.capability, there = (9, 0), machine.nvcc
    for machine.nvcc, line in ((None, "no nvcc"), ("/nowhere/bin/nvcc", "no /nowhere/bin/nvcc")):
        yield f"{line}: set CUDA_HOME"
    machine.nvcc = there
    machine.ops = type("Uncompiled", (Kernels,), {"expand_to_fused": refuse})
    yield r"sm_90\): RuntimeError: nvcc fatal   : Unsupported gpu"
    machine.ops = type("Broken", (Kernels,), {"aux_fi": lambda *args: Kernels.aux_fi(*args) * 2})
    yield r"wrong results on this GPU .*: aux_fi"
    machine.ops = Kernels
    monkeypatch.delattr(sys.modules["tile_kernels"], "moe")
    yield r"cannot be imported \(ImportError.*pip install -e \"\.\[tile\]\""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    yield r"not installed: pip install -e \"\.\[tile\]\""


def test_what_keeps_tile_kernels_from_running_is_one_line_and_auto_takes_grouped(machine, monkeypatch):
    for expected in obstacles(machine, monkeypatch):
        with pytest.raises(BackendError, match=f"^--moe_backend tile: .*{expected}.*; or use --moe_backend grouped$"):
            machine.resolve("tile")
        machine.lines.clear()
        assert machine.resolve("auto") == machine.resolve("grouped") == "grouped"
        assert [line for line in machine.lines if "TileKernels not used" in line] == machine.lines[:1]
        assert len(machine.lines[0].splitlines()) == 1


def test_sizes_that_tile_kernels_do_not_serve_are_refused(machine):
    with pytest.raises(BackendError, match="hidden_size that is a multiple of 32, not 48"):
        machine.resolve("tile", config=replace(CONFIG, hidden_size=48))
    for without in (dict(n_routed_experts=0), dict(n_recurrent_layers=0, engram_layers=())):
        with pytest.raises(BackendError, match="no routed experts"):
            machine.resolve("tile", config=replace(CONFIG, **without))


def test_a_check_that_leaves_the_gpu_in_error_ends_the_run_whatever_was_asked(machine):
    """Nothing else can run in that process: `auto` would take grouped and die of it."""
    machine.fault = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be"
    for name in ("auto", "tile"):
        with pytest.raises(BackendError, match="illegal memory access was encountered.*--moe_backend grouped$"):
            machine.resolve(name)


def test_auto_takes_tile_only_if_all_ranks_can(machine):
    asked = []
    assert machine.resolve("auto", agree=lambda able: asked.append(able)) == "grouped" and asked == [True]
    assert "another rank" in machine.lines[0]


def test_without_a_gpu_auto_is_grouped_and_silent_and_tile_an_error(machine):
    assert resolve_backend("auto", CPU, CONFIG, torch.float32, machine.lines.append) == "grouped"
    assert resolve_backend("loop", CPU, CONFIG, torch.float32, machine.lines.append) == "loop"
    assert not machine.lines
    with pytest.raises(BackendError, match="sm_90"):
        resolve_backend("tile", CPU, CONFIG, torch.float32)


def test_a_gpu_on_which_torch_loops_over_experts_is_named(machine):
    cases = {((9, 0), torch.bfloat16): 0, ((10, 0), torch.bfloat16): 0, ((9, 0), torch.float32): 1,
             ((8, 9), torch.bfloat16): 1, ((12, 0), torch.bfloat16): 1}
    for (machine.capability, dtype), lines in cases.items():
        machine.lines.clear()
        assert machine.resolve("grouped", dtype) == "grouped" and len(machine.lines) == lines
    assert "sm_120" in machine.lines[0] and "waits" in machine.lines[0]
    machine.lines.clear()
    assert machine.resolve("loop", torch.float32) == "loop" and not machine.lines


def test_fp8_experts_are_refused_where_torch_has_no_grouped_fp8_product(machine, monkeypatch):
    machine.capability = (12, 0)
    with pytest.raises(errors.UsageError, match="^--fp8_experts: .*sm_90"):
        train.check_fp8_experts(True, "fp8", GPU, SpiderConfig())


def test_fp8_experts_are_refused_where_there_are_none():
    with pytest.raises(errors.UsageError, match="^--fp8_experts: this model has no routed experts"):
        settled("--model", "small", "--precision", "fp8", "--fp8_experts")


def test_the_reason_of_a_choice_is_logged_with_it(tmp_path, monkeypatch, capsys):
    def resolve(name, device, config, dtype, say, agree, compiled):
        say("a remark" if agree(True) and not agree(False) else "ranks do not agree")
        return "grouped"
    monkeypatch.setattr(train, "resolve_backend", resolve)
    flags = ["--mock_data", "--dry_run", "--model", "tiny", "--device", "cpu", "--ckpt_dir", str(tmp_path)]
    assert train.command_line(flags) == 0 and "\na remark\n" in capsys.readouterr().out


def reference_cases():
    """topk_idx [N, K] without and with slots that have no expert, and the mapping of each."""
    for kind in ("uneven", "two experts take all"):
        for dropped in (False, True):
            topk_idx = routing(kind)
            if dropped:
                topk_idx[::3, 1], topk_idx[7] = -1, -1
            yield topk_idx, TORCH_OPERATIONS.get_fused_mapping(topk_idx, E, tile_moe.row_bound(N * K, E), 16)


@INSTALLED
def test_plain_operations_are_those_of_tile_kernels_references(monkeypatch):
    """Ties, weights of zero, -1; get_fused_mapping has no reference there."""
    ref = importlib.import_module("tile_kernels.torch")
    module, ops = importlib.import_module("tile_kernels.torch.reduce_fused"), TORCH_OPERATIONS
    monkeypatch.setattr(module, "elementwise_fma", lambda a, b, c: a * b + c)                # compiled there
    for scores in (torch.randint(3, (N, E)).float(), torch.ones(N, E), torch.randn(N, E)):
        assert torch.equal(ops.topk_gate(scores, K), ref.stable_topk(scores, K))
    weights = torch.rand(N, K)
    weights[3], weights[5, 0] = 0, 0
    for ours, theirs in zip(ops.normalize_weight(weights), ref.normalize_weight(weights)):
        torch.testing.assert_close(ours, theirs)
    for topk_idx, (to_expert, _, _, slot_to_pos, *_) in reference_cases():
        torch.testing.assert_close(ops.aux_fi(topk_idx, E, K), ref.aux_fi(topk_idx, E, K))
        for dtype in (torch.float32, torch.bfloat16):
            x, rows = (torch.randint(-8, 9, (count, D)).to(dtype) for count in (N, len(to_expert)))
            assert torch.equal(ops.expand_to_fused(x, slot_to_pos, to_expert),
                               ref.expand_to_fused(x, slot_to_pos, to_expert))
            for given in (None, torch.randint(3, (N, K)).float()):
                reduced = [m.reduce_fused(rows, given, slot_to_pos) for m in (ops, ref)]
                assert torch.equal(*reduced)


def test_kernels_and_plain_operations_agree_on_ties_zeros_and_minus_one(kernels):
    """Without the package: the stand-in above keeps to the same rules, so that tests with it mean something."""
    for scores in (torch.randint(3, (N, E)).float(), torch.ones(N, E)):
        assert torch.equal(TORCH_OPERATIONS.topk_gate(scores, K), Kernels.topk_gate(scores, K))
    assert TORCH_OPERATIONS.topk_gate(torch.ones(1, E), K).tolist() == [[0, 1]]
    assert not TORCH_OPERATIONS.normalize_weight(torch.zeros(2, K))[1].any()
    for topk_idx, plain in reference_cases():
        own = Kernels.get_fused_mapping(topk_idx, E, tile_moe.row_bound(N * K, E), 16)
        for i in (0, 4, 5, 6):
            assert torch.equal(plain[i], own[i])
        for mapping in (plain, own):
            for name in ("expand_to_fused", "reduce_fused"):
                x = torch.randint(-8, 9, (N if name == "expand_to_fused" else len(plain[0]), D)).float()
                args = (mapping[3], mapping[0]) if name == "expand_to_fused" else (None, mapping[3])
                assert torch.equal(getattr(TORCH_OPERATIONS, name)(x, *args), getattr(Kernels, name)(x, *args))


@pytest.mark.gpu
@INSTALLED
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_tile_kernels_pass_their_check_on_a_gpu_from_hopper_on(dtype):
    if torch.cuda.get_device_capability() < tile_moe.TILE_CAPABILITY:
        pytest.skip("an older GPU")
    config = SpiderConfig()
    assert tile_moe.find_obstacle(GPU, config, dtype) is None
    for experts in (32, 20):                                              # 2^31 - 1 and 20 without further care
        score = torch.full((300, experts), math.nan, device="cuda")
        assert (route(score, torch.zeros(experts, device="cuda"), 2, "tile")[0] < experts).all()
