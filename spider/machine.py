"""The machine: its device, precision, compilation, memory and speed; the log."""

import ctypes
import json
import logging
import math
import os
import re
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from torch import Tensor, nn

from spider.errors import TooLarge, UsageError, one_line
from spider.threads import memory_limit, read_file

# --------------------------------------------------------------------------------------------------
# Choices of `auto`


def resolve_device(name: str) -> torch.device:
    """Choose the device; `auto`: the GPU, if there is one. Raise UsageError if PyTorch cannot use
    the device."""
    if name == "cpu":
        return torch.device("cpu")
    with quiet():  # torch prints a paragraph about an old driver
        has_gpu = torch.cuda.is_available()
    obstacle = None
    if not has_gpu:
        driver = driver_cuda_version()
        if driver and torch.version.cuda is None:
            logger.warning("the NVIDIA GPU is not used: this PyTorch was built without CUDA")
        obstacle = why_no_gpu(torch.version.cuda, driver)
    elif torch.version.hip:
        logger.warning("AMD GPUs (ROCm) are untested")
    else:
        obstacle = why_no_code(torch.cuda.get_device_capability(), torch.cuda.get_arch_list())
    if name == "cuda" and not has_gpu and obstacle is None:
        obstacle = "no CUDA device is visible"
    if obstacle:
        raise UsageError(f"--device {name}: {obstacle}; or use --device cpu")
    return torch.device("cuda" if has_gpu else "cpu")


def driver_cuda_version() -> int:
    """Return the CUDA version that the NVIDIA driver supports (12040: 12.4), 0 without a driver."""
    version = ctypes.c_int(0)
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


def why_no_gpu(built_for: str | None, driver: int) -> str | None:
    """Return why no GPU is visible although a driver is loaded, with the remedy; None without a
    driver, or if this PyTorch is built without CUDA.

    built_for: the CUDA version of this PyTorch. driver: see driver_cuda_version."""
    if built_for is None or driver == 0:
        return None
    major = driver // 1000
    versions = (
        f"no GPU is visible: this PyTorch is built for CUDA {built_for}, the NVIDIA driver "
        f"supports CUDA {major}.{driver % 1000 // 10}"
    )
    if major < int(built_for.partition(".")[0]):
        return (
            f"{versions}: update the driver (CUDA 13 needs 580 or later), or install a PyTorch "
            f"built for CUDA {major} (https://pytorch.org)"
        )
    return f"{versions}: check nvidia-smi and CUDA_VISIBLE_DEVICES"


def why_no_code(capability: tuple[int, int], architectures: Sequence[str]) -> str | None:
    """Return why this PyTorch cannot run on a GPU, with the remedy, or None if it can.

    architectures: those that it has code for, as torch lists them. sm_86 runs on 8.6 to 8.9;
    compute_86 is compiled at run time for 8.6 and any later GPU."""
    major, minor = capability
    for architecture in architectures:
        code, _, number = architecture.partition("_")
        built_for = divmod(int(number.rstrip("af")), 10)
        runs = built_for[0] == major and built_for[1] <= minor
        if runs or (code == "compute" and built_for <= capability):
            return None
    return (
        f"this PyTorch has no code for a GPU of compute capability {major}.{minor}, only for "
        f"{', '.join(architectures)}: install one that has it (https://pytorch.org)"
    )


def resolve_compile(name: str, device: torch.device) -> bool:
    """Decide whether to compile the layers. If torch.compile does not work here, log why (`auto`)
    or raise UsageError (`on`)."""
    if name == "off" or (name == "auto" and device.type == "cpu"):  # a CPU takes minutes to compile
        return False
    obstacle = obstacle_to_compile(device)
    if name == "on" and obstacle:
        raise UsageError(f"--compile: {obstacle}; or use --compile off")
    if obstacle:
        logger.info(f"not compiled: {obstacle}")
    return obstacle is None


def obstacle_to_compile(device: torch.device) -> str | None:
    """Return why torch.compile does not work here, with the remedy, or None if it works.

    Compile a small function and compare its value and gradient with eager mode, which takes seconds
    unless the result is cached.
    """

    def small_function(x: Tensor) -> Tensor:
        return (nn.functional.silu(x) @ x).square().mean()

    x = torch.linspace(-2, 2, 64, device=device).view(8, 8).requires_grad_()
    try:
        results = []
        for function in (small_function, torch.compile(small_function)):
            y = function(x)
            results.append((y, *torch.autograd.grad(y, x)))
        torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)
    except Exception as fault:  # anything that Triton, its C compiler or its cache raises
        return describe_compile_error(fault, device)
    return None


def describe_compile_error(fault: Exception, device: torch.device) -> str:
    """Describe a failure of torch.compile in one line, with what torch.compile needs."""
    lines = str(fault).strip().splitlines()
    reason = lines[0][:200] if lines else type(fault).__name__
    needs = "a C++ compiler and Python's headers (python3-dev)"
    if device.type == "cuda":
        needs += ", and a Triton that knows this GPU"
    return f"torch.compile fails here ({reason}); it needs {needs}"


def resolve_precision(name: str, device: torch.device) -> str:
    """Choose the precision; `auto`: bf16 if the hardware has it, else fp32.

    `auto` never chooses fp8, until a GPU has shown that fp8 pays. Raise UsageError if the GPU does
    not have the precision.
    """
    if device.type == "cuda":
        if name == "fp8" and not has_fp8(device):
            raise UsageError(
                "--precision fp8: this GPU has no FP8 (it needs compute capability 8.9); use "
                "--precision auto"
            )
        if name == "bf16" and not has_bf16(device):
            raise UsageError(
                "--precision bf16: this GPU has no bf16 (it needs compute capability 8.0); use "
                "--precision fp32"
            )
    elif name == "fp8":
        logger.warning("fp8 on a CPU is torchao's emulation: slow, for tests only")
    if name != "auto":
        return name
    return "bf16" if has_bf16(device) else "fp32"


def has_fp8(gpu: torch.device) -> bool:
    """Return whether a GPU has FP8 matrix products."""
    return torch.cuda.get_device_capability(gpu) >= (8, 9)


def has_bf16(device: torch.device) -> bool:
    """Return whether the hardware has bf16 matrix products.

    If a CPU emulates them, they take a hundred times as long as fp32 products.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported()


# --------------------------------------------------------------------------------------------------
# Memory


def memory_of(device: torch.device, local_ranks: int = 1) -> float:
    """Return the GPU's memory in bytes, or a local rank's part of the memory of the machine or
    container."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(total, memory_limit()) / local_ranks


def proc_bytes(file: str, field: str) -> float:
    """Return a field of a file in /proc, in bytes; 0 if there is none, as on macOS."""
    match = re.search(rf"{field}:\s*(\d+) kB", read_file(Path(file)))
    return 1024 * int(match[1]) if match else 0


def process_memory(field: str) -> float:
    """Return this process's memory in bytes: VmRSS, resident now, or VmHWM, the peak."""
    # getrusage's maximum includes the parent process's
    return proc_bytes("/proc/self/status", field)


def free_memory(device: torch.device) -> float:
    """Return the free bytes of the GPU, or an upper bound for the machine or container."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = proc_bytes("/proc/meminfo", "MemAvailable") or math.inf
    return min(available, memory_of(device))


def check_pinnable(n_bytes: int):
    """Raise RuntimeError, as CUDA does, if pinning this many bytes, which the kernel then cannot
    reclaim, would leave less than a quarter of the host's memory free."""
    host = torch.device("cpu")
    if free_memory(host) - n_bytes < memory_of(host) / 4:
        raise RuntimeError("the host has little memory left")


def peak_memory(device: torch.device) -> float:
    """Return the peak memory so far, of the GPU or of the process, in GB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return process_memory("VmHWM") / 1e9


def reset_peak_memory(device: torch.device):
    """Return torch's cached memory to the GPU, and measure the peak from now on."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


# mallopt's parameters, from malloc.h
M_TRIM_THRESHOLD = -1
M_TOP_PAD = -2
M_MMAP_MAX = -4


def keep_freed_memory():
    """Let glibc keep freed memory. The kernel would have to fault it in again page by page."""
    with suppress(OSError, AttributeError):  # another C library: nothing to set
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
        libc.mallopt(M_TOP_PAD, 1 << 26)


# In the message if CUDA cannot pin more host memory, or if another program has filled the GPU
CUDA_IS_FULL = "CUDA error: out of memory"
# The whole message; "... primitive descriptor" means an operation that oneDNN does not have
ONEDNN_IS_FULL = "could not create a primitive"


def is_out_of_memory(fault: Exception) -> bool:
    """Return whether an error means out of memory, on the host or a GPU."""
    if isinstance(fault, (MemoryError, torch.OutOfMemoryError)):
        return True
    message = str(fault)
    return (
        "can't allocate memory" in message or CUDA_IS_FULL in message or message == ONEDNN_IS_FULL
    )


@contextmanager
def memory_advice(advice: str) -> Iterator[None]:
    """Turn an out-of-memory error into TooLarge, with advice."""
    try:
        yield
    except (MemoryError, RuntimeError) as fault:
        if not is_out_of_memory(fault):
            raise
        if CUDA_IS_FULL in str(fault):
            advice = "CUDA can pin no more host memory, or another program uses the GPU"
        asked = re.search(r"llocate ([\d.]+ \w+)", str(fault))
        requested = f" ({asked[1]} requested)" if asked else ""
        raise TooLarge(f"out of memory{requested}: {advice}") from fault


# --------------------------------------------------------------------------------------------------
# Speed and the log


@lru_cache
def matmul_rate(device: torch.device) -> float:
    """Measure the FLOP/s of a matrix product in bf16 (fp32 on a CPU without bf16): best of
    three."""
    n = 8192 if device.type == "cuda" else 1024
    dtype = torch.bfloat16 if has_bf16(device) else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    x = torch.empty(n, n, device=device).normal_(generator=generator).to(dtype)
    best = math.inf
    for _ in range(4):  # the first is a warm-up
        start = time.perf_counter()
        y = x @ x
        float(y[0, 0])  # waits for the device
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best


def read_trace(path: Path) -> tuple[float, int]:
    """Return how many ms the GPU is busy in a trace by torch's profiler, and the number of kernels
    and copies. Overlapping kernels count once."""
    intervals = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in json.loads(path.read_text())["traceEvents"]
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    )  # in us
    busy = 0.0
    end = -math.inf  # end of all intervals so far
    for start, stop in intervals:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy / 1e3, len(intervals)


def escape_message(record: Any):
    """Escape line breaks and control characters in a log line."""
    record["message"] = one_line(record["message"])


HANDLERS = [0]  # loguru's default handler, later ours


def start_log(level: str = "INFO"):
    """Send log lines to stderr, with the time. Keep the handlers of the caller's program."""
    while HANDLERS:
        with suppress(ValueError):  # the caller may have removed it
            logger.remove(HANDLERS.pop())
    logger.configure(patcher=escape_message)
    HANDLERS.append(logger.add(sys.stderr, format="{time:HH:mm:ss} {message}", level=level))


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings and logs: some libraries report missing optional dependencies."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def configure_torch(device: torch.device, deterministic: bool):
    """Set torch's process-wide options. Call it before the first work on the device."""
    if device.type == "cpu":
        keep_freed_memory()
    if deterministic != torch.are_deterministic_algorithms_enabled():  # an earlier run may differ
        torch.use_deterministic_algorithms(deterministic)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Filling new memory costs time, and helps only code that reads memory before writing it.
        settings = torch.utils.deterministic
        settings.fill_uninitialized_memory = False  # type: ignore[attr-defined]
