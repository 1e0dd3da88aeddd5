"""Triton's grouped product: values and gradients by Triton's interpreter, which needs no GPU, and
on a GPU; its kernels as machine code of each architecture."""

import importlib.util
import os
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from spider.config import SpiderConfig
from tile_moe import moe_forward, multiply_in_turn, resolve_backend

SHAPES = 200
# of shared memory that a block may take
KIBIBYTES = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
TRITON = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton: pip install triton"
)


@pytest.mark.slow
@TRITON
def test_the_product_and_its_gradients_equal_experts_in_turn_by_the_interpreter():
    """In a process of its own, since Triton decides as it is imported whether it interprets."""
    done = subprocess.run(
        [sys.executable, __file__],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@TRITON
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_the_product_passes_the_check_on_a_gpu_and_equals_experts_in_turn_there(dtype):
    device = torch.device("cuda")
    assert resolve_backend("triton", device, SpiderConfig(), dtype) == ("triton", "")
    for seed in range(20):
        check_product(random.Random(seed), dtype, device)
        check_layer(random.Random(seed), torch.bfloat16, device)


@pytest.mark.slow
@TRITON
@pytest.mark.parametrize("architecture", KIBIBYTES)
def test_kernels_compile_without_spills_into_the_shared_memory_of_a_block(
    architecture, monkeypatch
):
    import triton
    from triton.backends.compiler import GPUTarget

    from cubins import resources, spills
    from spider.grouped_triton import grouped_product, weight_grad

    made, end = [], torch.zeros(32, dtype=torch.int32)
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", architecture, 32),
        get_current_device=lambda: architecture,
        get_current_stream=lambda device: 0,
    )
    monkeypatch.setattr(type(triton.runtime.driver), "active", driver)

    def compile_only(self, *args, warmup, run=triton.runtime.JITFunction.run, **settings):
        made.append(run(self, *args, warmup=True, **settings))

    monkeypatch.setattr(triton.runtime.JITFunction, "run", compile_only)
    for d, f, dtype in (
        (2048, 1024, torch.bfloat16),
        (512, 2048, torch.bfloat16),
        (2048, 1024, torch.float32),
        (80, 48, torch.bfloat16),
    ):  # of `1b`; with blocks of 16
        for n in (512, 32 * 512):  # with small blocks, and with large ones
            rows, weights, grad = (
                torch.empty(shape, dtype=dtype) for shape in ((n, d), (32, d, f), (n, f))
            )
            grouped_product(rows, weights, end)
            grouped_product(grad, weights.mT, end)
        weight_grad(rows, grad, end)
    assert len(made) == 20
    for kernel in made:
        print(
            f"{kernel.metadata.target} {kernel.metadata.name} {kernel.metadata.shared} "
            f"{resources(kernel)}"
        )
        assert kernel.metadata.target.arch == architecture and not spills(kernel)
        assert kernel.metadata.shared <= 1024 * KIBIBYTES[architecture]


def check_product(draw: random.Random, dtype, device="cpu"):
    """Compare a product of a random shape and its gradients with those in float64: each number
    may be off by the rounding of the result and of a sum in fp32. Rows after the last expert's
    are NaN."""
    from spider import grouped_triton

    grouped_product = grouped_triton.grouped_product
    # 0: the shapes are too small for large blocks
    grouped_triton.LARGE_FROM = draw.choice((0, 512))
    experts, d, f = (
        draw.randint(1, 6),
        16 * draw.randint(1, 5),
        draw.choice((16, 32, 48, 80, 128, 192, 256)),
    )
    counts = [draw.choice((0, 0, 1, 16, 63, 64, 65, draw.randint(0, 130))) for _ in range(experts)]
    if draw.random() < 0.2:  # one expert gets all rows
        counts = [0] * experts
        counts[draw.randrange(experts)] = draw.randint(1, 300)
    end = torch.tensor(counts, device=device).cumsum(0).int()
    used, unused = sum(counts), draw.choice((0, 16))
    torch.manual_seed(draw.randrange(1 << 31))
    rows, weights, upstream = (
        torch.randn(shape, device=device).to(dtype)
        for shape in ((used + unused, d), (experts, d, f), (used + unused, f))
    )
    rows[used:], upstream[used:] = torch.nan, torch.nan
    if draw.random() < 0.5:  # column-major
        weights = weights.mT.contiguous().mT
    results = []
    for product, cast in (
        (grouped_product, torch.Tensor.clone),
        (multiply_in_turn, torch.Tensor.double),
        # which gives the size of the summands
        (multiply_in_turn, lambda t: t.double().abs()),
    ):
        operands = [cast(t).requires_grad_() for t in (rows, weights)]
        y = product(*operands, end)
        grad_rows, grad_weights = torch.autograd.grad(y, operands, cast(upstream))
        results.append((y[:used], grad_rows[:used], grad_weights))
    rounding = 2**-8 if dtype == torch.bfloat16 else 0
    for ours, exact, summands in zip(*results, strict=True):
        assert ours.dtype == dtype and ours.shape == exact.shape
        bound = (exact.abs() if dtype == torch.bfloat16 else summands) * rounding + summands * 1e-6
        assert ((ours.double() - exact).abs() <= bound).all(), (counts, d, f)
    assert not results[0][2][torch.tensor(counts, device=device) == 0].any()  # exactly zero


def check_layer(draw: random.Random, dtype, device="cpu"):
    """Compare a layer of experts and its five gradients with `loop`, in float64."""
    tokens, experts, k = draw.randint(2, 70), draw.randint(2, 6), draw.randint(1, 2)
    d, width = 16 * draw.randint(1, 4), 16 * draw.randint(1, 4)
    torch.manual_seed(draw.randrange(1 << 31))
    topk_idx = torch.rand(tokens, draw.randint(k, experts), device=device).topk(k).indices
    topk_idx[torch.rand(topk_idx.shape, device=device) < 0.1] = -1
    shapes = (tokens, d), (tokens, k), (experts, d, width), (experts, d, width), (experts, width, d)
    x, topk_weights, *weights = (torch.randn(shape, device=device).to(dtype) for shape in shapes)
    upstream, results = torch.randn(tokens, d, device=device), []
    for backend, cast in (("triton", torch.Tensor.clone), ("loop", torch.Tensor.double)):
        tensors = [cast(t).requires_grad_() for t in (x, topk_weights.float(), *weights)]
        y = moe_forward(tensors[0], topk_idx, *tensors[1:], backend)
        results.append((y, *torch.autograd.grad((y * upstream.to(y.dtype)).sum(), tensors)))
    for ours, exact in zip(*results, strict=True):
        tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
        assert (ours.double() - exact).norm() <= tolerance * exact.norm(), (
            tokens,
            experts,
            d,
            width,
        )


def check_operations():
    """Check what torch.compile is told of the operations: their results' shapes, and the
    gradient."""
    from spider.grouped_triton import grouped_product, weight_grad

    rows, weights, grad = torch.randn(48, 32), torch.randn(3, 32, 16), torch.randn(48, 16)
    end = torch.tensor([16, 16, 48], dtype=torch.int32)
    torch.library.opcheck(grouped_product, (rows.requires_grad_(), weights.requires_grad_(), end))
    torch.library.opcheck(weight_grad, (rows.detach(), grad, end))


def interpret():
    """Check random shapes by Triton's interpreter."""
    import interpreting  # noqa: F401  mends it

    check_operations()
    for seed in range(SHAPES):
        dtype = (torch.bfloat16, torch.float32)[seed % 2]
        check_product(random.Random(seed), dtype)
        check_layer(random.Random(seed), dtype)


if __name__ == "__main__":
    interpret()
