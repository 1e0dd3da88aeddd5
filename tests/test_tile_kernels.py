"""The checks of kernels against plain operations, and the choice of a backend."""

import math
import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import tile_moe
from spider.config import SpiderConfig
from spider.errors import UsageError
from spider.model.kernel_checks import find_wrong
from spider.training.resolve import check_fp8_experts
from stand_in_kernels import INSTALLED, D, E, K, Kernels, kernels
from tile_moe import (
    KERNELS,
    BackendError,
    check_operations,
    check_product,
    grouped_product,
    operations,
    resolve_backend,
    route,
)

CONFIG = SpiderConfig(hidden_size=D, n_routed_experts=E, n_experts_per_tok=K)
CPU = torch.device("cpu")
GPU = torch.device("cuda")


BOTH_DTYPES = pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)


@BOTH_DTYPES
def test_check_accepts_any_order_within_an_expert(dtype, kernels):
    assert find_wrong(check_operations(CPU, CONFIG, dtype)) is None


def swap_two_slots(mapping):
    """Swap the second slots of the first and the last expert."""
    _, _, pos_to_slot, slot_to_pos, expert_start, *_ = mapping
    second = expert_start[[0, -1]] + 1
    slot_to_pos.view(-1)[pos_to_slot[second].long()] = second.flip(0)
    return mapping


WRONG = {
    "topk_gate": lambda idx: idx.flip(1),
    "normalize_weight": lambda pair: (pair[0], pair[1] * 1.001),
    "aux_fi": lambda load: load * 1.001,
    "get_fused_mapping": swap_two_slots,
    "expand_to_fused": lambda x: x.roll(1, 0),
    "reduce_fused": lambda y: y + (y != 0),
}


@pytest.mark.parametrize("name", WRONG)
def test_check_names_the_wrong_operation(name, kernels, monkeypatch):
    right = getattr(Kernels, name)
    monkeypatch.setattr(Kernels, name, lambda *args: WRONG[name](right(*args)))
    assert find_wrong(check_operations(CPU, CONFIG, torch.float32)).startswith(f"{name} is off by ")


@pytest.mark.gpu
@INSTALLED
@BOTH_DTYPES
def test_tile_kernels_pass_the_check_on_hopper_and_newer_gpus(dtype):
    if torch.cuda.get_device_capability() < tile_moe.TILE_CAPABILITY:
        pytest.skip("an older GPU")
    assert tile_moe.find_obstacle("tile", GPU, SpiderConfig(), dtype) is None
    for experts in (32, 20):  # for NaN the kernel returns indices 2^31 - 1 and 20
        score = torch.full((300, experts), math.nan, device="cuda")
        assert (route(score, torch.zeros(experts, device="cuda"), 2, "tile")[0] < experts).all()


def in_place_of_gpu(check, *arguments):
    return check(*(CPU if argument == GPU else argument for argument in arguments))


@pytest.fixture
def machine(monkeypatch, kernels):
    """Pretend that a GPU has TileKernels and Triton, which pass the checks. Attributes of the
    result change the GPU: its capability, Triton's product, and `fault`, an error that the device
    raises after a check."""
    found = SimpleNamespace(capability=(9, 0), product=grouped_product, fault=None)

    def synchronize(device):
        if found.fault:
            raise RuntimeError(found.fault)

    triton = SimpleNamespace(grouped_product=lambda *operands: found.product(*operands))
    monkeypatch.setitem(sys.modules, "spider.model.grouped_triton", triton)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found.capability)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    for name in ("check_operations", "check_product"):
        on_cpu = partial(in_place_of_gpu, getattr(tile_moe, name))
        monkeypatch.setattr(tile_moe, name, on_cpu)
    found.resolve = lambda name, dtype=torch.bfloat16, config=CONFIG, **more: resolve_backend(
        name, GPU, config, dtype, **more
    )
    return found


@pytest.mark.parametrize("capability", ((8, 9), (9, 0), (10, 3), (12, 0)))
def test_auto_chooses_a_backend_by_gpu_and_compilation(machine, capability):
    machine.capability = capability
    at_once = capability[0] in (9, 10)
    assert machine.resolve("auto") == ("tile" if at_once else "triton", "")
    assert machine.resolve("auto", compiled=True) == ("grouped" if at_once else "triton", "")
    assert machine.resolve("auto", torch.float32, compiled=True) == ("triton", "")
    assert machine.resolve("triton") == ("triton", "")
    assert machine.resolve("loop", torch.float32) == ("loop", "")
    assert machine.resolve("grouped", torch.float32) == ("grouped", "")


class Changed(torch.autograd.Function):
    """Apply one function to a value and another to its gradient."""

    @staticmethod
    def forward(ctx, x, change_value, change_gradient):
        ctx.change_gradient = change_gradient
        return change_value(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.change_gradient(grad), None, None


def spoil(value=torch.clone, slots=torch.clone, weights=torch.clone):
    """Return a grouped product with a changed value, or changed gradients of slots or weights."""

    def product(slots_PD, weights_EDF, expert_end):
        slots_PD = Changed.apply(slots_PD, torch.clone, slots)
        weights_EDF = Changed.apply(weights_EDF, torch.clone, weights)
        return Changed.apply(grouped_product(slots_PD, weights_EDF, expert_end), value, torch.clone)

    return product


def without_empty_experts(grad):
    """Make the gradient of an expert without slots nonzero, as uninitialized memory is."""
    return torch.where((grad == 0).all((1, 2), keepdim=True), 1e-3, grad)


@BOTH_DTYPES
def test_check_accepts_a_right_product_and_names_what_is_wrong(dtype):
    def wrong(product) -> str | None:
        return find_wrong(check_product(product, CPU, CONFIG, dtype))

    assert wrong(grouped_product) is None
    for part, change, named in (
        ("value", lambda y: y.roll(1, 1), "the value of "),
        ("value", lambda y: y * math.nan, "the value of "),
        ("slots", lambda g: g * 1.01, "the gradient of slots of "),
        ("weights", lambda g: g.roll(1, 0), "the gradient of weights of "),
        ("weights", without_empty_experts, "the gradient of weights of "),
    ):
        assert wrong(spoil(**{part: change})).startswith(named)


def raising(message: str):
    def fail(*_):
        raise RuntimeError(message)

    return fail


PTXAS = "PTXAS error: Internal Triton PTX codegen error"
NVCC = "// a long source\nCompilation error:\nnvcc fatal   : Unsupported gpu\nCommand:"


def product(replacement):
    return lambda machine, patch: setattr(machine, "product", replacement)


def kernel(name, replacement):
    return lambda machine, patch: patch.setattr(Kernels, name, replacement)


def without(module):
    def remove(machine, patch):
        patch.setattr(tile_moe, "operations", operations)
        patch.setitem(sys.modules, module, None)

    return remove


@pytest.mark.parametrize(
    "backend, change, expected",
    (
        ("triton", product(spoil(value=torch.neg)), "computes wrong results on this GPU: the v"),
        (
            "triton",
            without("spider.model.grouped_triton"),
            "cannot be imported.*pip install triton",
        ),
        ("tile", kernel("expand_to_fused", raising(NVCC)), "fails.*: nvcc fatal   : Unsup"),
        ("tile", without("tile_kernels"), r"cannot be imported.*pip install -e \"\.\[tile\]\""),
    ),
)
def test_unusable_kernel_is_an_error_and_auto_falls_back_to_grouped(
    machine, monkeypatch, backend, change, expected
):
    change(machine, monkeypatch)
    if backend == "triton":
        machine.capability = (12, 0)
    whole = f"^--moe_backend {backend}: .*{expected}.*; or use --moe_backend grouped$"
    with pytest.raises(BackendError, match=whole):
        machine.resolve(backend)
    chosen, line = machine.resolve("auto", compiled=backend == "triton")
    assert chosen == "grouped"
    assert re.match(f"{KERNELS[backend]} not used: .*{expected}", line)
    assert "\n" not in line


def test_auto_tries_tile_kernels_after_triton(machine):
    machine.capability = (12, 0)
    machine.product = raising(PTXAS)
    backend, line = machine.resolve("auto")
    assert backend == "tile"
    assert "Triton's grouped product not used" in line


@pytest.mark.parametrize(
    "capability, change, message",
    (
        ((8, 9), {}, "sm_90"),
        ((9, 0), dict(hidden_size=48), "hidden_size that is a multiple of 32, not 48"),
        ((9, 0), dict(n_routed_experts=0), "no routed experts"),
    ),
)
def test_tile_refuses_unsupported_gpus_and_models(machine, capability, change, message):
    machine.capability = capability
    with pytest.raises(BackendError, match=message):
        machine.resolve("tile", config=replace(CONFIG, **change))


@pytest.mark.parametrize("name", ("auto", "tile", "triton"))
def test_check_that_crashes_the_gpu_ends_the_run(machine, name):
    """CUDA is unusable for the rest of the process, so `auto` cannot fall back to grouped."""
    machine.fault = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might"
    with pytest.raises(BackendError, match="illegal memory access.*--moe_backend grouped$"):
        machine.resolve(name)


def test_without_a_gpu_auto_uses_grouped_and_kernels_are_errors():
    for name, backend in (("auto", "grouped"), ("loop", "loop"), ("grouped", "grouped")):
        assert resolve_backend(name, CPU, CONFIG, torch.float32) == (backend, "")
    for name in KERNELS:
        with pytest.raises(BackendError, match="needs a GPU"):
            resolve_backend(name, CPU, CONFIG, torch.float32)


def test_fp8_experts_need_a_gpu_with_a_grouped_fp8_product(machine):
    machine.capability = (12, 0)
    with pytest.raises(UsageError, match="^--fp8_experts: .*sm_90"):
        check_fp8_experts("fp8", GPU, SpiderConfig())
