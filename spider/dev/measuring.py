"""Time calls on a device, measure what it can do at most, and keep the figures as tables.

Meter          a device, a clock for it, and what was measured so far
ceilings       rates of matrix products and copies; copy_rate and matrix_rate look them up
segments       pooling and unpooling alone
print_rows     a table of Markdown
"""

import gc
import json
import platform
import statistics
import time
from pathlib import Path

import torch

from spider.model.segments import pool_segments, unpool_segments
from spider.training.machine import multiplies_bf16


class Meter:
    """A device, and what was measured on it so far; with `out` as a file in that directory."""

    def __init__(self, device: torch.device, fp8: bool, out: Path | None = None):
        self.device, self.gpu, self.fp8, self.out = device, device.type == "cuda", fp8, out
        self.about, self.results = {}, {}

    def keep(self):
        """Write what was measured so far to --out."""
        if self.out:
            path = self.out / f"bench-{self.device.type}.json"
            path.with_suffix(".tmp").write_text(json.dumps(self.about | self.results, indent=1, allow_nan=False) + "\n")
            path.with_suffix(".tmp").replace(path)

    def start_afresh(self):
        """Free the memory of the model before, and count from here."""
        if self.gpu:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def wait(self):
        if self.gpu:
            torch.cuda.synchronize()

    def spent(self, function) -> float:
        """Return the seconds of a call; of CPU time where one thread does it all, to which other processes add
        little."""
        alone = not self.gpu and torch.get_num_threads() == 1
        clock = time.process_time if alone else time.perf_counter
        self.wait()
        start = clock()
        function()
        self.wait()
        return clock() - start

    def seconds(self, function, at_least: float = 0.3) -> float:
        """Return the median time of a call, after two for warming up."""
        for _ in range(2):
            function()
        times, begun = [], time.perf_counter()
        while len(times) < 5 or time.perf_counter() - begun < at_least:
            times.append(self.spent(function))
        return statistics.median(times)

    def table(self, name: str, rows: list[dict]):
        self.results[name] = rows
        print_rows(name, rows)

    def timed(self, spent: dict, name: str, function):
        """Wrap a function so that the seconds of its calls are added to spent[name]."""
        def wrapper(*arguments, **options):
            self.wait()
            start = time.perf_counter()
            out = function(*arguments, **options)
            self.wait()
            spent[name] = spent.get(name, 0) + time.perf_counter() - start
            return out
        return wrapper


def print_rows(name: str, rows: list[dict], head: bool = True):
    """Print a table of Markdown; without `head`, more rows of the one before."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    if head:
        print(f"\n### {name}\n\n| {' | '.join(keys)} |\n|{'---|' * len(keys)}")
    for row in rows:
        print(f"| {' | '.join(show(row.get(key)) for key in keys)} |", flush=True)


def show(value) -> str:
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def processor() -> str:
    """Return the CPU's name and its widest instructions."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    name = next((line.split(":")[1].strip() for line in info.splitlines() if line.startswith("model name")),
                platform.processor())
    return name + next((f" with {flag}" for flag in ("amx_bf16", "avx512_bf16", "avx512f", "avx2")
                        if f" {flag}" in info), "")


def kernels(step) -> int:
    """Count the kernels, copies and fills that a step has the GPU do."""
    from torch.profiler import ProfilerActivity, profile
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in found.events())


def ceilings(b: Meter):
    """Measure matrix products and copies as large as fit, which nothing can exceed."""
    n, rows = 8192 if b.gpu else 2048, []
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        if dtype == torch.bfloat16 and not multiplies_bf16(b.device):
            continue
        x, w = (torch.randn(n, n, device=b.device).to(dtype) for _ in range(2))
        rows.append({"what": f"{name} product, {n} cubed", "rate": 2 * n ** 3 / b.seconds(lambda: x @ w) / 1e12,
                     "unit": "TFLOP/s"})
    if b.fp8:
        one = torch.ones((), device=b.device)
        x8, w8 = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn).t()
        t = b.seconds(lambda: torch._scaled_mm(x8, w8, one, one, out_dtype=torch.bfloat16, use_fast_accum=True))
        rows.append({"what": f"fp8 product, {n} cubed", "rate": 2 * n ** 3 / t / 1e12, "unit": "TFLOP/s"})
    source = torch.empty(1 << (30 if b.gpu else 27), dtype=torch.uint8, device=b.device)
    target = torch.empty_like(source)
    t = b.seconds(lambda: target.copy_(source))
    rows.append({"what": "copy, read and written", "rate": 2 * source.numel() / t / 1e9, "unit": "GB/s"})
    b.table("ceilings", rows)


def copy_rate(b: Meter) -> float:
    """Return the measured bytes/s of a large copy, read and written."""
    if "ceilings" not in b.results:
        ceilings(b)
    return next(row["rate"] * 1e9 for row in b.results["ceilings"] if row["unit"] == "GB/s")


def matrix_rate(b: Meter, precision: str) -> float:
    """Return the measured FLOP/s of a large product; for a name without one that of bf16, or of fp32."""
    if "ceilings" not in b.results:
        ceilings(b)
    rates = {row["what"].split()[0]: row["rate"] * 1e12 for row in b.results["ceilings"]}
    return rates.get(precision, rates.get("bf16", rates["fp32"]))


def segments(b: Meter):
    """Measure pooling and unpooling, forward and backward, per byte over the number of bytes, beside the dense
    published form."""
    rows = []
    for count in (4096, 16384, 65536):
        h = torch.randn(count, 128, device=b.device, requires_grad=True)
        cut = (torch.rand(count, device=b.device) < 0.3).float().requires_grad_()
        null = torch.zeros(128, device=b.device)
        cu = torch.tensor([0, count], dtype=torch.int32, device=b.device)

        def packed():
            z, segment_cu = pool_segments(h, cut, cu)
            (h + unpool_segments(z, null, cut, cu, segment_cu)).sum().backward()

        def dense():
            before = cut.cumsum(0) - cut
            distance = torch.arange(int(cut.sum()), device=b.device) - before[:, None]
            weight = (distance.detach() == 0) * (1 - distance)
            (weight / weight.sum(0)).T.matmul(h).sum().backward()
        row = {"bytes": count, "pool and unpool, ns a byte": b.seconds(packed) / count * 1e9}
        if count <= 16384:
            row["dense pool, ns a byte"] = b.seconds(dense) / count * 1e9
        rows.append(row)
    b.table("segments", rows)
