"""Routing and experts: three backends, one result."""

import importlib.util
import math
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import tile_moe
import train
from conftest import awake, small_config, text, train_step
from spider import errors
from spider.training import machine
from spider.training.batches import Batch
from spider.training.optim import Optimizers
from tile_moe import TORCH_OPERATIONS, BackendError, find_disagreement, moe_forward, resolve_backend, route
from train import parse_args

N, K, E, D, WIDTH = 37, 2, 5, 32, 16
INSTALLED = pytest.mark.skipif(importlib.util.find_spec("tile_kernels") is None,
                               reason='needs pip install -e ".[tile]"')


class Kernels:
    """TileKernels as their sources read, without a GPU: what they demand of their arguments, what they do with NaN, an
    order of their own inside an expert, garbage where they write nothing. A fault on the device is an IndexError."""

    @staticmethod
    def topk_gate(scores, num_topk):
        assert scores.dim() == 2 and scores.is_contiguous() and scores.dtype == torch.float32
        scores, chosen = F.pad(scores, (0, -scores.shape[1] % 32), value=-math.inf), []       # a warp a row
        for _ in range(num_topk):
            best = scores.nan_to_num(-math.inf, math.inf, -math.inf).amax(1, keepdim=True)
            found = torch.where(scores == best, torch.arange(scores.shape[1]), 2 ** 31 - 1).amin(1)
            scores[torch.arange(scores.shape[1]) == found[:, None]] = -math.inf
            chosen.append(found)
        return torch.stack(chosen, 1)

    @staticmethod
    def normalize_weight(weights):
        assert weights.is_contiguous() and weights.dtype == torch.float32
        denominator = weights.sum(-1) + 1e-20
        return denominator, weights / denominator[:, None]

    @staticmethod
    def aux_fi(topk_idx, num_experts, num_aux_topk):
        assert topk_idx.is_contiguous()
        share = num_experts / (len(topk_idx) * num_aux_topk)
        if not ((topk_idx >= -1) & (topk_idx < num_experts)).all():
            raise IndexError("device-side assert triggered")
        return torch.stack([sum([share] * int((topk_idx == e).sum()), torch.zeros(())) for e in range(num_experts)])

    @staticmethod
    def get_fused_mapping(topk_idx, num_experts, num_expanded_tokens, alignment):
        assert topk_idx.is_contiguous() and topk_idx.dtype == torch.int64
        to_expert, to_token, to_slot = (torch.full((num_expanded_tokens,), -1, dtype=torch.int32) for _ in range(3))
        to_pos, starts, ends, end = torch.full((topk_idx.numel(),), -1, dtype=torch.int32), [], [], 0
        if not ((topk_idx >= -1) & (topk_idx < num_experts)).all():
            raise IndexError("an illegal memory access was encountered")
        for expert in range(num_experts):
            slots = (topk_idx.flatten() == expert).nonzero().flatten().flip(0).int()
            place = slice(end, end + len(slots))
            to_expert[place], to_slot[place], to_token[place] = expert, slots, slots // topk_idx.shape[1]
            to_pos[slots] = torch.arange(end, end + len(slots), dtype=torch.int32)
            starts.append(end)
            end += -(-len(slots) // alignment) * alignment
            ends.append(end)
        start, end = torch.tensor(starts, dtype=torch.int32), torch.tensor(ends, dtype=torch.int32)
        return to_expert, to_token, to_slot, to_pos.view(topk_idx.shape), start, end, end - start, []

    @staticmethod
    def expand_to_fused(x, token_topk_to_pos, pos_to_expert):
        assert x.is_contiguous() and token_topk_to_pos.is_contiguous()
        out = torch.full((len(pos_to_expert), x.shape[1]), math.nan, dtype=x.dtype)
        out[pos_to_expert < 0] = 0
        held = token_topk_to_pos >= 0
        out[token_topk_to_pos[held]] = x[:, None].expand(*token_topk_to_pos.shape, -1)[held]
        return out

    @staticmethod
    def reduce_fused(x, topk_weights, token_topk_to_pos):
        assert x.is_contiguous() and x.shape[1] % tile_moe.TILE_WIDTH == 0 and topk_weights is None
        rows = x[token_topk_to_pos].float().masked_fill((token_topk_to_pos < 0)[..., None], 0)
        return rows.sum(1).to(x.dtype)


@pytest.fixture
def kernels(monkeypatch):
    """`tile` takes the kernels above, at these tests' sizes."""
    monkeypatch.setattr(tile_moe, "operations", lambda backend: Kernels if backend == "tile" else TORCH_OPERATIONS)
    monkeypatch.setattr(tile_moe, "TILE_WIDTH", D)


def routing(kind: str) -> torch.Tensor:
    """topk_idx [N, K] in which experts receive tokens unevenly, none, or all."""
    generator = torch.Generator().manual_seed(0)
    if kind == "uneven":
        return torch.rand(N, E, generator=generator).topk(K).indices
    if kind == "two experts take all":
        return torch.tensor([[3, 1]]).repeat(N, 1)
    return torch.rand(N, E - 1, generator=generator).topk(K).indices                         # one expert gets nothing


def inputs(dtype):
    generator = torch.Generator().manual_seed(1)
    shapes = ((N, D), (N, K), (E, D, WIDTH), (E, D, WIDTH), (E, WIDTH, D))
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) * 0.5 for shape in shapes]
    tensors[1] = tensors[1].softmax(-1)
    return [t.to(torch.float32 if i == 1 else dtype).requires_grad_() for i, t in enumerate(tensors)]


def dense_reference(x, topk_idx, topk_weights, w_gate, w_up, w_down):
    """Every expert on every token in float64, weighted by a one-hot routing matrix."""
    x, topk_weights, w_gate, w_up, w_down = (t.double() for t in (x, topk_weights, w_gate, w_up, w_down))
    every = torch.einsum("enf,efd->end", F.silu(torch.einsum("nd,edf->enf", x, w_gate))
                         * torch.einsum("nd,edf->enf", x, w_up), w_down)
    weight = (F.one_hot(topk_idx, E) * topk_weights[..., None]).sum(1)                       # [N, E]
    return torch.einsum("ne,end->nd", weight, every)


def check_backend(backend: str, kind: str, dtype, tolerance: float, device="cpu", product=tile_moe.grouped_product):
    """Value and every gradient of a backend against the float64 reference."""
    tensors = [t.detach().to(device).requires_grad_() for t in inputs(dtype)]
    topk_idx = routing(kind).to(device)
    upstream = torch.randn(N, D, generator=torch.Generator().manual_seed(2)).to(device)
    x, topk_weights, *weights = tensors
    y = moe_forward(x, topk_idx, topk_weights, *weights, backend, product)
    expected = dense_reference(x, topk_idx, topk_weights, *weights)
    ours = (y, *torch.autograd.grad((y * upstream.to(y.dtype)).sum(), tensors))
    theirs = (expected, *torch.autograd.grad((expected * upstream).sum(), tensors))
    assert y.dtype == dtype
    for a, b in zip(ours, theirs):
        assert (a.double() - b.double()).norm() <= tolerance * b.double().norm()


KINDS = pytest.mark.parametrize("kind", ("uneven", "two experts take all", "one expert gets nothing"))


@KINDS
@pytest.mark.parametrize("backend", ("loop", "grouped"))
@pytest.mark.parametrize("dtype,tolerance", ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)))
def test_backends_equal_the_dense_reference_in_value_and_gradient(backend, kind, dtype, tolerance):
    check_backend(backend, kind, dtype, tolerance)


@pytest.mark.parametrize("backend", ("loop", "grouped"))
def test_gate_and_up_weights_side_by_side_change_nothing(backend):
    tensors, topk_idx = inputs(torch.float32), routing("uneven")
    x, topk_weights, w_gate, w_up, w_down = tensors
    results = []
    for weights in ((w_gate, w_up), (torch.cat((w_gate, w_up), dim=-1), None)):
        y = moe_forward(x, topk_idx, topk_weights, *weights, w_down, backend)
        results.append((y, *torch.autograd.grad(y.square().sum(), tensors)))
    for separate, together in zip(*results):
        torch.testing.assert_close(together, separate)


@pytest.mark.parametrize("joined", (False, True))
@pytest.mark.parametrize("dtype,tolerance", ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)))
def test_a_token_alone_equals_the_dense_reference(joined, dtype, tolerance):
    topk_idx = routing("uneven")
    x, topk_weights, w_gate, w_up, w_down = (t.detach() for t in inputs(dtype))
    expected = dense_reference(x, topk_idx, topk_weights, w_gate, w_up, w_down)
    gate_up = (torch.cat((w_gate, w_up), dim=-1), None) if joined else (w_gate, w_up)
    with torch.no_grad():
        y = torch.cat([moe_forward(x[i:i + 1], topk_idx[i:i + 1], topk_weights[i:i + 1], *gate_up, w_down, "grouped")
                       for i in range(N)])
    assert y.dtype == dtype and (y.double() - expected).norm() <= tolerance * expected.norm()


@KINDS
@pytest.mark.parametrize("backend", ("loop", "grouped"))
def test_experts_in_emulated_fp8_follow_the_reference_within_its_rounding(backend, kind):
    """e4m3 keeps 4 bits: 3% a product, three in a row; and rounding there must be, else nothing was emulated."""
    check_backend(backend, kind, torch.bfloat16, 0.1, product=tile_moe.fp8_grouped_product)
    with pytest.raises(AssertionError):
        check_backend(backend, kind, torch.float32, 0.005, product=tile_moe.fp8_grouped_product)


@pytest.mark.gpu
@KINDS
@pytest.mark.parametrize("backend", ("loop", "grouped"))
def test_experts_in_fp8_follow_the_reference_on_a_gpu(backend, kind, monkeypatch):
    monkeypatch.setattr("test_tile_moe.D", 256)
    column_major = tile_moe.fp8_grouped_product
    check_backend(backend, kind, torch.bfloat16, 0.1, "cuda",
                  lambda rows, w, end: column_major(rows, w.mT.contiguous().mT, end))


@KINDS
def test_the_tile_path_equals_the_reference_with_operations_that_do_as_the_kernels(kind, kernels):
    check_backend("tile", kind, torch.float32, 1e-6)


@pytest.mark.gpu
@INSTALLED
def test_tile_kernels_equal_the_reference_on_a_gpu(monkeypatch):
    monkeypatch.setattr("test_tile_moe.D", 256)
    for kind in ("uneven", "two experts take all", "one expert gets nothing"):
        check_backend("tile", kind, torch.bfloat16, 2e-2, "cuda")


@pytest.mark.gpu
@KINDS
def test_grouped_equals_the_reference_on_a_gpu(kind):
    check_backend("grouped", kind, torch.bfloat16, 2e-2, "cuda")


def test_an_expert_that_is_skipped_is_noticed():
    def product(rows, weights, expert_end):
        return F.grouped_mm(rows, weights * (torch.arange(E) != 3)[:, None, None], offs=expert_end)
    with pytest.raises(AssertionError):
        check_backend("grouped", "two experts take all", torch.float32, 1e-6, product=product)


def test_rows_that_no_token_owns_never_reach_a_result():
    def product(rows, weights, expert_end):
        out = tile_moe.grouped_product(rows, weights, expert_end)
        tail = torch.arange(len(out)) >= expert_end[-1]
        return torch.where(tail[:, None], torch.nan, out)
    check_backend("grouped", "uneven", torch.float32, 1e-6, product=product)


def test_the_mapping_places_every_slot_once_with_aligned_groups():
    topk_idx = routing("one expert gets nothing")
    bound = (topk_idx.numel() + 15 * E) // 16 * 16
    to_expert, to_token, to_slot, slot_to_pos, start, end, count, _ = tile_moe.TORCH_OPERATIONS.get_fused_mapping(
        topk_idx, E, bound, 16)
    assert sorted(to_slot[to_slot >= 0].tolist()) == list(range(N * K))
    for slot, position in enumerate(slot_to_pos.flatten().tolist()):
        assert to_slot[position] == slot and to_token[position] == slot // K
        expert = topk_idx.flatten()[slot]
        assert to_expert[position] == expert and start[expert] <= position < end[expert]
    assert (count % 16 == 0).all() and torch.equal(end, count.cumsum(0).int()) and end[-1] <= bound


def test_routing_weighs_by_probability_selects_by_bias_and_skips_rows_that_fill_up():
    score = torch.randn(8, E, requires_grad=True)
    bias = torch.tensor([10.0, 0, 0, 0, 0])
    share = torch.tensor([1 / 6] * 6 + [0.0] * 2)
    topk_idx, weights = route(score, bias, K, "grouped")
    prob = score.softmax(-1)
    assert (topk_idx == 0).any(1).all()
    chosen = prob.gather(1, topk_idx)
    torch.testing.assert_close(weights, chosen / chosen.sum(1, True))
    aux_loss, z_loss, load = tile_moe.balance(score[None], topk_idx[None], share[None], "grouped")
    counts = torch.bincount(topk_idx[:6].flatten(), minlength=E).float()
    torch.testing.assert_close(load[0], counts * E / (6 * K))
    torch.testing.assert_close(aux_loss, (counts * E / (6 * K) * prob[:6].mean(0)).sum())
    torch.testing.assert_close(z_loss, score[:6].logsumexp(-1).square().mean())
    grad, = torch.autograd.grad((weights * torch.arange(16).view(8, 2)).sum(), score, retain_graph=True)
    chosen = prob.gather(1, topk_idx)
    expected, = torch.autograd.grad((chosen / chosen.sum(1, True) * torch.arange(16).view(8, 2)).sum(), score)
    torch.testing.assert_close(grad, expected)
    kept, _ = route(-score, bias, K, "grouped", topk_idx)
    assert torch.equal(kept, topk_idx)


@pytest.mark.parametrize("backend", ("grouped", "tile"))
def test_decisions_balanced_together_are_those_balanced_apart(backend, monkeypatch):
    """With rows that fill up, and a decision in which all rows do."""
    monkeypatch.setattr(tile_moe, "operations", lambda backend: tile_moe.TORCH_OPERATIONS)
    score, bias = torch.randn(3, 8, E, requires_grad=True), torch.zeros(E)
    share = torch.tensor([[0.25] * 4 + [0.0] * 4, [0.1] * 8, [0.0] * 8])
    topk_idx = torch.stack([route(part, bias, K, "grouped")[0] for part in score])
    together = tile_moe.balance(score, topk_idx, share, backend)
    apart = [tile_moe.balance(score[i:i + 1], topk_idx[i:i + 1], share[i:i + 1], "grouped") for i in range(3)]
    for a, b in zip(together, (*(sum(part[i] for part in apart) for i in (0, 1)), torch.cat([p[2] for p in apart]))):
        torch.testing.assert_close(a, b)
    even = share[0] / share[0].sum()      # of the first one by its formula
    f = torch.bincount(topk_idx[0, :4].flatten(), minlength=E) * E / (4 * K)
    torch.testing.assert_close(apart[0][0], (f * (even @ score[0].softmax(-1))).sum() * share[0].sum())


@pytest.mark.parametrize("backend", ("loop", "grouped", "tile"))
def test_a_slot_without_an_expert_is_skipped(backend, kernels):
    """Value and gradients are those of any expert with weight zero; whole tokens may have none."""
    x, topk_weights, *weights = inputs(torch.float32)
    topk_idx = routing("uneven")
    topk_idx[3, 1], topk_idx[5], topk_idx[-1, 0] = -1, -1, -1
    masked = topk_weights * (topk_idx >= 0)
    y = moe_forward(x, topk_idx, topk_weights, *weights, backend)
    expected = dense_reference(x, topk_idx.clamp_min(0), masked, *weights)
    upstream = torch.randn(N, D, generator=torch.Generator().manual_seed(2))
    ours, theirs = (torch.autograd.grad((out * upstream).sum(), [x, topk_weights, *weights])
                    for out in (y, expected))
    for a, b in zip((y, *ours), (expected, *theirs)):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        alone = moe_forward(x[3:4], topk_idx[3:4], topk_weights[3:4], *weights, backend)
    torch.testing.assert_close(alone.double(), expected[3:4], rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# TileKernels: their check at start, NaN, exactness, their own references

CONFIG = SimpleNamespace(hidden_size=D, n_routed_experts=E, n_experts_per_tok=K)
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
    yield "aux_fi of TileKernels does not compute"
    machine.ops = Kernels
    monkeypatch.delattr(sys.modules["tile_kernels"], "moe")
    yield r"does not import \(ImportError.*pip install -e \"\.\[tile\]\""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    yield r"not installed: pip install -e \"\.\[tile\]\""


def test_what_keeps_tile_kernels_from_running_is_one_line_and_auto_takes_grouped(machine, monkeypatch):
    for expected in obstacles(machine, monkeypatch):
        with pytest.raises(BackendError, match=f"^--moe_backend tile: .*{expected}.*; or use --moe_backend grouped$"):
            machine.resolve("tile")
        machine.lines.clear()
        assert machine.resolve("auto") == machine.resolve("grouped") == "grouped"
        assert [line for line in machine.lines if "without TileKernels" in line] == machine.lines[:1]
        assert len(machine.lines[0].splitlines()) == 1


def test_sizes_that_tile_kernels_do_not_serve_are_refused(machine):
    with pytest.raises(BackendError, match="hidden_size that is a multiple of 32, not 48"):
        machine.resolve("tile", config=SimpleNamespace(**vars(CONFIG) | {"hidden_size": 48}))
    with pytest.raises(BackendError, match="no routed experts"):
        machine.resolve("tile", config=SimpleNamespace(**vars(CONFIG) | {"n_routed_experts": 0}))


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
        train.check_fp8_experts(True, "fp8", GPU)


def test_what_the_choice_says_stands_among_the_choices(tmp_path, monkeypatch, capsys):
    def resolve(name, device, config, dtype, say, agree, compiled):
        say("a remark" if agree(True) and not agree(False) else "ranks do not agree")
        return "grouped"
    monkeypatch.setattr(tile_moe, "resolve_backend", resolve)
    flags = ["--mock_data", "--dry_run", "--model", "tiny", "--device", "cpu", "--ckpt_dir", str(tmp_path)]
    assert train.command_line(flags) == 0 and "\na remark\n" in capsys.readouterr().out


@pytest.mark.parametrize("backend", ("loop", "grouped", "tile"))
def test_a_row_of_nan_scores_gives_nan_where_it_belongs_and_indices_that_exist(backend, kernels):
    nan = torch.full((3, 32), math.nan)
    assert (Kernels.topk_gate(nan, K) == 2 ** 31 - 1).all() and (Kernels.topk_gate(nan[:, :20].clone(), K) == 20).any()
    assert (route(nan, torch.zeros(32), K, backend)[0] < 32).all()
    score, (x, _, *weights) = torch.randn(N, E), inputs(torch.float32)
    score[4], score[9, 2] = math.nan, math.inf
    score.requires_grad_()
    topk_idx, topk_weights = route(score, torch.zeros(E), K, backend)
    aux_loss, *_ = tile_moe.balance(score[None], topk_idx[None], torch.full((1, N), 1 / N), backend)
    assert ((topk_idx >= 0) & (topk_idx < E)).all()
    y = moe_forward(x, topk_idx, topk_weights, *weights, backend)
    spoiled = {*y.isnan().any(1).nonzero().flatten().tolist()}  # where a score is infinite, its expert may not be chosen
    assert 4 in spoiled and spoiled <= {4, 9} and aux_loss.isnan()
    (y.sum() + aux_loss).backward()
    assert score.grad[4].isnan().all()


def test_nan_scores_skip_the_step_and_leave_the_run_alive(kernels):
    model = awake(small_config())
    model.set_backend("tile")
    args = parse_args(["--optimizer", "adamw"])
    optimizers, ids = Optimizers(model, "adamw", args), text(2, 32)
    step = lambda: train_step(model, optimizers, [Batch.of(ids, ids, 0)], 2)
    router = model.core.layers[0].moe.router.weight
    whole = router.detach().clone()
    router.data[1] = math.nan
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert step()["skipped"]
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name], rtol=0, atol=0, equal_nan=True, msg=name)
    router.data.copy_(whole)
    assert not step()["skipped"]


def test_under_deterministic_the_load_is_counted_not_summed_in_any_order(kernels, monkeypatch):
    """TileKernels' aux_fi adds floats atomically; nothing else of theirs depends on the order of threads."""
    score, share = torch.randn(1, N, E), torch.full((1, N), 1 / N)
    topk_idx, _ = route(score[0], torch.zeros(E), K, "grouped")

    def load(backend):
        return tile_moe.balance(score, topk_idx[None], share, backend)[2]
    monkeypatch.setattr(Kernels, "aux_fi", staticmethod(lambda *args: torch.full((E,), math.nan)))
    assert load("tile").isnan().all()
    torch.use_deterministic_algorithms(True)
    try:
        counted = load("tile")
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(counted, load("grouped"))


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
    config = SimpleNamespace(hidden_size=2048, n_routed_experts=32, n_experts_per_tok=2)
    assert tile_moe.find_obstacle(GPU, config, dtype) is None
    for experts in (32, 20):                                              # 2^31 - 1 and 20 without further care
        score = torch.full((300, experts), math.nan, device="cuda")
        assert (route(score, torch.zeros(experts, device="cuda"), 2, "tile")[0] < experts).all()
