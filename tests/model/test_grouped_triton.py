"""Triton's grouped product: values and gradients in Triton's interpreter, which needs no GPU, and
on a GPU; machine code of its kernels for each architecture."""

import importlib.util
import os
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from spider.config import SpiderConfig
from test_tile_moe import check_backend
from tile_moe import reference_product, resolve_backend

SHAPES = 200
# largest shared memory of a block, by architecture
KIBIBYTES = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
TRITON = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton: pip install triton"
)


@pytest.mark.slow
@TRITON
def test_interpreted_product_and_gradients_equal_a_loop_over_experts():
    """Run in a separate process, because Triton decides on import whether to interpret."""
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
def test_gpu_product_passes_its_check_and_equals_a_loop_over_experts(dtype):
    device = torch.device("cuda")
    assert resolve_backend("triton", device, SpiderConfig(), dtype) == ("triton", "")
    for seed in range(20):
        check_product(random.Random(seed), dtype, device)
    check_backend("triton", "uneven", torch.bfloat16, 2e-2, device)


@pytest.mark.slow
@TRITON
@pytest.mark.parametrize("architecture", KIBIBYTES)
def test_kernels_compile_without_spills_and_fit_shared_memory(architecture, monkeypatch):
    import triton
    from triton.backends.compiler import GPUTarget

    from cubins import resources, spills
    from spider.model.grouped_triton import grouped_product, weight_grad

    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", architecture, 32),
        get_current_device=lambda: architecture,
        get_current_stream=lambda device: 0,
    )
    monkeypatch.setattr(type(triton.runtime.driver), "active", driver)
    compiled = []

    def compile_only(self, *args, warmup, run=triton.runtime.JITFunction.run, **settings):
        compiled.append(run(self, *args, warmup=True, **settings))

    monkeypatch.setattr(triton.runtime.JITFunction, "run", compile_only)
    end = torch.zeros(32, dtype=torch.int32)
    for d, f, dtype in (
        (2048, 1024, torch.bfloat16),  # shapes of `1b`
        (512, 2048, torch.bfloat16),
        (2048, 1024, torch.float32),
        (80, 48, torch.bfloat16),  # with blocks of 16
    ):
        weights = torch.empty(32, d, f, dtype=dtype)
        for n_rows in (512, 32 * 512):  # small blocks, large blocks
            rows = torch.empty(n_rows, d, dtype=dtype)
            grad = torch.empty(n_rows, f, dtype=dtype)
            grouped_product(rows, weights, end)
            grouped_product(grad, weights.mT, end)
        weight_grad(rows, grad, end)
    assert len(compiled) == 20
    for kernel in compiled:
        metadata = kernel.metadata
        print(f"{metadata.target} {metadata.name} {metadata.shared} {resources(kernel)}")
        assert metadata.target.arch == architecture
        assert not spills(kernel)
        assert metadata.shared <= 1024 * KIBIBYTES[architecture]


def random_counts(draw: random.Random, experts: int) -> list[int]:
    """Return numbers of rows per expert, near the sizes of blocks."""
    if draw.random() < 0.2:  # one expert gets all rows
        counts = [0] * experts
        counts[draw.randrange(experts)] = draw.randint(1, 300)
        return counts
    return [draw.choice((0, 0, 1, 16, 63, 64, 65, draw.randint(0, 130))) for _ in range(experts)]


def check_product(draw: random.Random, dtype: torch.dtype, device: str = "cpu"):
    """Compare a product of random shape and its gradients with float64.

    Tolerance: the rounding of the result and of an fp32 sum. Rows after the last expert's are NaN.
    """
    from spider.model import grouped_triton

    # 0: the shapes are too small for large blocks
    grouped_triton.LARGE_FROM = draw.choice((0, 512))
    experts = draw.randint(1, 6)
    d = 16 * draw.randint(1, 5)
    f = draw.choice((16, 32, 48, 80, 128, 192, 256))
    counts = random_counts(draw, experts)
    end = torch.tensor(counts, device=device).cumsum(0).int()
    used = sum(counts)
    n_rows = used + draw.choice((0, 16))
    torch.manual_seed(draw.randrange(1 << 31))
    rows = torch.randn(n_rows, d, device=device).to(dtype)
    weights = torch.randn(experts, d, f, device=device).to(dtype)
    upstream = torch.randn(n_rows, f, device=device).to(dtype)
    rows[used:] = torch.nan
    upstream[used:] = torch.nan
    if draw.random() < 0.5:  # column-major
        weights = weights.mT.contiguous().mT

    def results(product, cast) -> list[torch.Tensor]:
        operands = [cast(t).requires_grad_() for t in (rows, weights)]
        y = product(*operands, end)
        grad_rows, grad_weights = torch.autograd.grad(y, operands, cast(upstream))
        return [y[:used], grad_rows[:used], grad_weights]

    ours = results(grouped_triton.grouped_product, torch.Tensor.clone)
    exact = results(reference_product, torch.Tensor.double)
    # sums of absolute values bound the rounding
    summands = results(reference_product, lambda t: t.double().abs())
    for number, exact_number, size in zip(ours, exact, summands, strict=True):
        assert number.dtype == dtype
        assert number.shape == exact_number.shape
        bound = size * 1e-6
        if dtype == torch.bfloat16:
            bound += exact_number.abs() * 2**-8
        assert ((number.double() - exact_number).abs() <= bound).all(), (counts, d, f)
    is_empty = torch.tensor(counts, device=device) == 0
    assert not ours[2][is_empty].any()  # exactly zero


def check_operations():
    """Check what torch.compile knows of the operations: result shapes and the gradient."""
    from spider.model.grouped_triton import grouped_product, weight_grad

    rows = torch.randn(48, 32)
    weights = torch.randn(3, 32, 16)
    grad = torch.randn(48, 16)
    end = torch.tensor([16, 16, 48], dtype=torch.int32)
    torch.library.opcheck(grouped_product, (rows.requires_grad_(), weights.requires_grad_(), end))
    torch.library.opcheck(weight_grad, (rows.detach(), grad, end))


def interpret():
    """Check random shapes in Triton's interpreter."""
    import interpreting  # noqa: F401  fixes the interpreter

    check_operations()
    for seed in range(SHAPES):
        dtype = (torch.bfloat16, torch.float32)[seed % 2]
        check_product(random.Random(seed), dtype)
    check_backend("triton", "uneven", torch.float32, 1e-6)


if __name__ == "__main__":
    interpret()
