"""What a machine has: a GPU that PyTorch can use, precisions, memory."""

import math
import os
from types import SimpleNamespace

import pytest
import torch
from loguru import logger

from spider import machine
from spider.errors import TooLarge, UsageError
from spider.training import state

# versions of CUDA, of this PyTorch and of the driver
NO_GPU = (
    ("13.0", 0, None),
    ("13.0", 12040, "CUDA 13.0, .*supports CUDA 12.4: update the driver .*580"),
    ("12.8", 12040, "CUDA 12.8, .*supports CUDA 12.4: look at nvidia-smi"),
)


@pytest.mark.parametrize("made_for, driver, obstacle", NO_GPU)
def test_a_driver_without_a_visible_gpu_is_refused_with_both_versions(
    monkeypatch, made_for, driver, obstacle
):
    monkeypatch.setattr("torch.version.cuda", made_for)
    monkeypatch.setattr(machine, "driver_cuda_version", lambda: driver)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    check_device("cpu", obstacle)


SM_75_ON = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]  # PyTorch 2.13's for CUDA 13
# a GPU's compute capability, and what this PyTorch has code for
GPUS = (
    ((7, 0), SM_75_ON, "no code for .* 7.0, only for sm_75, "),  # V100
    ((8, 9), SM_75_ON, None),
    ((8, 0), ["sm_86"], "no code for "),
    ((12, 1), ["sm_90a", "compute_120"], None),
    ((9, 0), ["compute_100f"], "no code for "),
)


@pytest.mark.parametrize("capability, architectures, obstacle", GPUS)
def test_a_gpu_runs_code_of_its_generation_or_compiles_that_of_an_earlier_one(
    monkeypatch, capability, architectures, obstacle
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    monkeypatch.setattr("torch.cuda.get_arch_list", lambda: architectures)
    check_device("cuda", obstacle)


def check_device(chosen: str, obstacle: str | None):
    """Check what --device auto chooses, or that it is refused like --device cuda."""
    assert machine.resolve_device("cpu").type == "cpu"
    if obstacle is None:
        assert machine.resolve_device("auto").type == chosen
        return
    for name in ("auto", "cuda"):
        with pytest.raises(UsageError, match=f"--device {name}: .*{obstacle}.*--device cpu"):
            machine.resolve_device(name)


@pytest.mark.parametrize(
    "present, device, line",
    (
        ("torch.version.hip", "cuda", "nothing was tried on AMD's GPUs (ROCm)"),
        ("spider.machine.driver_cuda_version", "cpu", "this PyTorch is made without CUDA"),
    ),
)
def test_a_gpu_that_is_untried_or_unused_is_logged(monkeypatch, new_log, present, device, line):
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: device == "cuda")
    monkeypatch.setattr(present, lambda: 12040)
    machine.start_log()
    assert machine.resolve_device("auto").type == device
    assert line in new_log()


# a GPU's compute capability, what --precision auto is there, and what to use for others
PRECISIONS = (
    ((7, 5), "fp32", dict(bf16="fp32", fp8="auto")),
    ((8, 0), "bf16", dict(fp8="auto")),
    ((8, 9), "bf16", {}),
)


@pytest.mark.parametrize("capability, auto, refused", PRECISIONS)
def test_a_precision_that_a_gpu_lacks_is_refused_with_one_that_it_has(
    monkeypatch, capability, auto, refused
):
    gpu = torch.device("cuda")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: capability)
    monkeypatch.setattr(  # the oldest one only emulates bf16
        "torch.cuda.is_bf16_supported",
        lambda including_emulation=True: including_emulation or auto == "bf16",
    )
    assert machine.resolve_precision("auto", gpu) == auto
    for precision, remedy in refused.items():
        with pytest.raises(UsageError, match=f"--precision {precision}: .*--precision {remedy}"):
            machine.resolve_precision(precision, gpu)
    if not refused:
        assert machine.resolve_precision("fp8", gpu) == "fp8"


def test_a_run_leaves_the_callers_handlers_and_the_next_one_is_not_deterministic(new_log):
    lines = []
    handler = logger.add(lines.append, format="{message}")
    for deterministic in (True, False):
        machine.start_log()
        machine.configure_torch(torch.device("cpu"), deterministic)
        assert torch.are_deterministic_algorithms_enabled() == deterministic
    logger.info("once")
    logger.remove(handler)
    assert lines == ["once\n"] and new_log().count("once") == 1


def test_onednn_without_memory_is_a_lack_of_memory():
    assert machine.is_out_of_memory(RuntimeError("could not create a primitive"))
    unsupported = "could not create a primitive descriptor for a matmul primitive"
    assert not machine.is_out_of_memory(RuntimeError(unsupported))


def test_free_memory_of_a_gpu_leaves_out_what_is_in_use(monkeypatch):
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (3, 5))
    assert machine.free_memory(torch.device("cuda")) == 3


def test_cuda_without_host_memory_to_lock_is_reported_as_a_lack_of_host_memory():
    full = pytest.raises(TooLarge, match="host memory")
    with full, machine.memory_advice("lower --micro_batch"):
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be ...")


def test_a_copy_that_cannot_be_page_locked_is_pageable(new_log):
    """Without CUDA no memory is."""
    on_gpu = SimpleNamespace(is_cuda=True, dtype=torch.float32, element_size=lambda: 4)
    state.warn_of_pageable.cache_clear()
    machine.start_log()
    for _ in range(2):
        copy = state.host_buffer((3, 5), on_gpu, None)
        assert copy.shape == (3, 5) and not copy.is_pinned()
    assert state.host_buffer((3, 5), on_gpu, copy) is copy
    assert state.host_buffer((3, 5), on_gpu, copy.double()).dtype == torch.float32
    assert new_log().count("pageable") == 1


def test_no_memory_is_page_locked_that_would_leave_less_than_a_quarter_to_others(monkeypatch):
    monkeypatch.setattr(machine, "memory_of", lambda _: 100)
    monkeypatch.setattr(machine, "free_memory", lambda _: 40)
    machine.check_pinnable(15)
    with pytest.raises(RuntimeError, match="little memory"):
        machine.check_pinnable(16)


@pytest.mark.parametrize("limit, most", ((4000, 4000), (math.inf, 10_000)))
def test_memory_is_at_most_that_of_the_control_groups(monkeypatch, limit, most):
    """On a machine of 10,000 bytes, all of them free."""
    cpu = torch.device("cpu")
    monkeypatch.setattr(os, "sysconf", lambda _: 100)
    monkeypatch.setattr(machine, "proc_bytes", lambda *_: 10_000)
    monkeypatch.setattr(machine, "memory_limit", lambda: limit)
    assert machine.memory_of(cpu, 2) == most / 2
    assert machine.free_memory(cpu) == most
