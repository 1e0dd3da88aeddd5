"""Time calls on a device, measure its peak rates, and collect the figures as tables.

Meter          a device, its clock, and the results so far
ceilings       measure rates of matrix products and copies; copy_rate and matrix_rate look them up
segments       measure pooling and unpooling
print_rows     print a Markdown table
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
    """A device and its results so far, which `keep` writes to the directory `out`."""

    def __init__(self, device: torch.device, fp8: bool, out: Path | None = None):
        self.device, self.gpu, self.fp8, self.out = device, device.type == "cuda", fp8, out
        self.about, self.results = {}, {}

    def keep(self):
        """Write the results so far to --out."""
        if self.out:
            path = self.out / f"bench-{self.device.type}.json"
            path.with_suffix(".tmp").write_text(json.dumps(self.about | self.results, indent=1, allow_nan=False) + "\n")
            path.with_suffix(".tmp").replace(path)

    def start_afresh(self):
        """Free the memory of the previous model, and reset the peak."""
        if self.gpu:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def wait(self):
        if self.gpu:
            torch.cuda.synchronize()

    def spent(self, function) -> float:
        """Return the seconds of a call: CPU time with a single thread, which other processes hardly affect, else wall
        time."""
        alone = not self.gpu and torch.get_num_threads() == 1
        clock = time.process_time if alone else time.perf_counter
        self.wait()
        start = clock()
        function()
        self.wait()
        return clock() - start

    def seconds(self, function, at_least: float = 0.3) -> float:
        """Return the median time of a call, after two warm-up calls."""
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
        """Wrap a function to add the seconds of its calls to spent[name]."""
        def wrapper(*arguments, **options):
            self.wait()
            start = time.perf_counter()
            out = function(*arguments, **options)
            self.wait()
            spent[name] = spent.get(name, 0) + time.perf_counter() - start
            return out
        return wrapper


def print_rows(name: str, rows: list[dict], head: bool = True):
    """Print a Markdown table; without `head`, append rows to the previous one."""
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
    """Return the CPU's name and its widest instruction set."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    name = next((line.split(":")[1].strip() for line in info.splitlines() if line.startswith("model name")),
                platform.processor())
    return name + next((f" with {flag}" for flag in ("amx_bf16", "avx512_bf16", "avx512f", "avx2")
                        if f" {flag}" in info), "")


def kernels(step) -> int:
    """Count the kernels, copies and fills of a step on the GPU."""
    from torch.profiler import ProfilerActivity, profile
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in found.events())


def ceilings(b: Meter):
    """Measure the peak rates of large matrix products and copies."""
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
    """Return the measured bytes/s of a large copy, counting reads and writes."""
    if "ceilings" not in b.results:
        ceilings(b)
    return next(row["rate"] * 1e9 for row in b.results["ceilings"] if row["unit"] == "GB/s")


def matrix_rate(b: Meter, precision: str) -> float:
    """Return the measured FLOP/s of a large product in a precision, or else in bf16, or else in fp32."""
    if "ceilings" not in b.results:
        ceilings(b)
    rates = {row["what"].split()[0]: row["rate"] * 1e12 for row in b.results["ceilings"]}
    return rates.get(precision, rates.get("bf16", rates["fp32"]))


def segments(b: Meter):
    """Measure pooling and unpooling, forward and backward, for several numbers of bytes, and the published dense
    form."""
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
