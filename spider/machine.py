"""The machine: device, precision, compilation, memory, rates."""

import ctypes
import json
import logging
import math
import os
import re
import sys
import time
import warnings
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from loguru import logger
from torch import Tensor, nn

from spider.common import TooLarge, UsageError, one_line

# --------------------------------------------------------------------------------------------------
# Choices of `auto`


def resolve_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: no CUDA device is visible; use --device cpu")
    return torch.device(
        "cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu"
    )


def resolve_compile(name: str, device: torch.device) -> tuple[bool, str]:
    """Decide whether to compile the layers; return that and, for `auto`, why. Raise UsageError if
    --compile on does not work here."""
    if name == "off":
        return False, ""
    if name == "auto" and device.type == "cpu":
        return False, "not compiled: on a CPU that takes minutes (--compile on)"
    obstacle = obstacle_to_compile(device)
    if name == "on" and obstacle:
        raise UsageError(f"--compile: {obstacle}; or use --compile off")
    if name == "on":
        return True, ""
    return obstacle is None, obstacle or "torch.compile passed a test"


def obstacle_to_compile(device: torch.device) -> str | None:
    """Return why torch.compile does not work here, with the remedy, or None. Compiles a small
    function and compares its value and gradient with eager mode: seconds, if nothing is cached."""

    def small_function(x: Tensor) -> Tensor:
        return (nn.functional.silu(x) @ x).square().mean()

    x = torch.linspace(-2, 2, 64, device=device).view(8, 8).requires_grad_()
    try:
        results = []
        for function in (small_function, torch.compile(small_function)):
            y = function(x)
            results.append((y, *torch.autograd.grad(y, x)))
        torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)
    except Exception as fault:  # whatever Triton, its C compiler and its cache provoke
        return describe_compile_error(fault, device)
    return None


def describe_compile_error(fault: Exception, device: torch.device) -> str:
    """Describe a failure of torch.compile in one line, with what it needs."""
    # some errors have no message
    first = (str(fault).strip().splitlines() or [type(fault).__name__])[0][:200]
    triton = ", and a Triton that knows this GPU" if device.type == "cuda" else ""
    return (
        f"torch.compile fails here ({first}); it needs a C++ compiler and Python's headers "
        f"(python3-dev){triton}"
    )


def resolve_precision(name: str, device: torch.device) -> tuple[str, str]:
    """Choose the precision; return it and, for `auto`, why. `auto` is bf16 where the hardware has
    it, never fp8, until a GPU has shown that fp8 pays (bench.py prints the ratio). Any other name
    is checked against the hardware."""
    on_gpu = device.type == "cuda"
    if name == "fp8" and on_gpu and torch.cuda.get_device_capability(device) < (8, 9):
        raise UsageError(
            "--precision fp8: this GPU has no FP8 (it needs compute capability 8.9); use "
            "--precision bf16"
        )
    if name == "fp8" and not on_gpu:
        logger.warning("fp8 on a CPU is torchao's emulation: slow, for tests only")
    if name != "auto":
        return name, ""
    if multiplies_bf16(device):
        return "bf16", ""
    return "fp32", "this machine has no bf16 instructions"


def multiplies_bf16(device: torch.device) -> bool:
    """Return whether the hardware has bf16 products; emulated on a CPU, they take a hundred times
    as long as fp32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported()


# --------------------------------------------------------------------------------------------------
# Memory


CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container, in bytes, or "max"


def memory_of(device: torch.device, local_ranks: int = 1) -> float:
    """Return the memory in bytes of the GPU, or a local rank's share of that of the machine or
    container."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):
        total = min(total, int(CGROUP_LIMIT.read_text()))
    return total / local_ranks


def proc_bytes(file: str, field: str) -> float:
    """Return a field of a file in /proc, in bytes; 0 where there is none, as on macOS."""
    found = (
        re.search(rf"{field}:\s*(\d+) kB", Path(file).read_text()) if Path(file).exists() else None
    )
    return 1024 * int(found[1]) if found else 0


def process_memory(field: str) -> float:
    """Return the bytes of this process: VmRSS, resident now, or VmHWM, the peak."""
    # getrusage's maximum includes that of the parent process
    return proc_bytes("/proc/self/status", field)


def free_memory(device: torch.device) -> float:
    """Return the free bytes of the GPU, or at most those of the machine or container."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(proc_bytes("/proc/meminfo", "MemAvailable") or math.inf, memory_of(device))


def peak_memory(device: torch.device) -> float:
    """Return the peak memory so far in GB, of the GPU or of the process."""
    return (
        torch.cuda.max_memory_allocated(device)
        if device.type == "cuda"
        else process_memory("VmHWM")
    ) / 1e9


def keep_freed_memory():
    """Let glibc keep freed memory; returned to the kernel, it would have to be faulted in again
    page by page."""
    trim_threshold, top_pad, mmap_max = -1, -2, -4
    with suppress(OSError, AttributeError):  # another C library: nothing to set
        libc = ctypes.CDLL("libc.so.6")
        for parameter, size in ((mmap_max, 0), (trim_threshold, (1 << 31) - 1), (top_pad, 1 << 26)):
            libc.mallopt(parameter, size)


def is_out_of_memory(fault: Exception) -> bool:
    """Return whether an error means out of memory, on the host or a GPU."""
    return isinstance(
        fault, (MemoryError, torch.OutOfMemoryError)
    ) or "can't allocate memory" in str(fault)


@contextmanager
def memory_advice(advice: str):
    """Turn an out-of-memory error inside into TooLarge, with advice."""
    try:
        yield
    except (MemoryError, RuntimeError) as fault:
        if not is_out_of_memory(fault):
            raise
        asked = re.search(r"llocate ([\d.]+ \w+)", str(fault))
        raise TooLarge(
            f"out of memory{f' ({asked[1]} requested)' if asked else ''}: {advice}"
        ) from fault


# --------------------------------------------------------------------------------------------------
# Rates and the log


@lru_cache
def product_rate(device: torch.device) -> float:
    """Measure the FLOP/s of a bf16 matrix product (fp32 on a CPU without bf16), the best of
    three."""
    n, best = 8192 if device.type == "cuda" else 1024, math.inf
    dtype = torch.bfloat16 if multiplies_bf16(device) else torch.float32
    x = (
        torch.empty(n, n, device=device)
        .normal_(generator=torch.Generator(device).manual_seed(0))
        .to(dtype)
    )
    for _ in range(4):  # the first one is a warm-up
        start = time.perf_counter()
        y = x @ x
        float(y[0, 0])  # waits for the device
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best


class Work(NamedTuple):
    """What a GPU does in a profiler's trace."""

    busy: float  # ms in which it works
    span: float  # ms from its first work to the end of its last
    kernels: int  # kernels and copies


def read_trace(path: Path) -> Work:
    """Sum up a trace that torch's profiler wrote. What runs at the same time counts once."""
    spans = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in json.loads(path.read_text())["traceEvents"]
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    )  # in us
    busy, end = 0.0, -math.inf
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    span = end - spans[0][0] if spans else 0.0
    return Work(busy / 1e3, span / 1e3, len(spans))


def start_log(level: str = "INFO"):
    """Send log lines to stderr, with the time; escape line breaks and control characters in
    them."""
    logger.configure(
        handlers=[dict(sink=sys.stderr, format="{time:HH:mm:ss} {message}", level=level)],
        patcher=lambda record: record.update(message=one_line(record["message"])),
    )


@contextmanager
def quiet():
    """Silence warnings and logs inside: some libraries report their missing optional
    dependencies."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
