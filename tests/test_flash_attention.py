"""The choice of FlashAttention's version, with stand-ins for the packages and for the kernel."""

import pytest
import torch
from torch.nn import attention

from spider import flash_attention
from spider.flash_attention import (
    IMPLEMENTATIONS,
    attend_by_mask,
    choose_flash_attention,
    is_usable,
)

CPU = torch.device("cpu")


class Installed:
    """FA4 and FA3, with a kernel for each that a test may replace."""

    def __init__(self):
        self.kernels = dict.fromkeys(IMPLEMENTATIONS, attend_by_mask)
        self.active = None

    def activate(self, name: str):
        self.active = name

    def restore(self):
        self.active = None

    def varlen_attn(self, q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, window_size):
        assert window_size[1] == 0
        assert max_q == max_k == int(cu_seq_q.diff().max())
        return self.kernels[self.active](q, k, v, cu_seq_q, window_size[0] + 1)


@pytest.fixture
def installed(monkeypatch) -> Installed:
    fake = Installed()
    monkeypatch.setattr(flash_attention, "is_usable", lambda name, device: True)
    monkeypatch.setattr(attention, "activate_flash_attention_impl", fake.activate)
    monkeypatch.setattr(attention, "restore_flash_attention_impl", fake.restore)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", fake.varlen_attn)
    return fake


def refuse(*_):
    raise RuntimeError("windowed attention not supported\nmore")


def without_causality(q, k, v, cu_seqlens, window):
    return attend_by_mask(q.flip(0), k.flip(0), v.flip(0), 558 - cu_seqlens.flip(0)).flip(0)


def wrong_gradient(q, k, v, cu_seqlens, window):
    return attend_by_mask(q, k + 0.1 * (k - k.detach()), v, cu_seqlens, window)


def without_window(q, k, v, cu_seqlens, window):
    return attend_by_mask(q, k, v, cu_seqlens)


def test_the_first_version_that_passes_the_test_is_used_and_the_log_says_so(installed):
    assert choose_flash_attention(CPU, 2, 16, 64) == "attention by FA4"
    assert installed.active == "FA4"


@pytest.mark.parametrize(
    "fault, named",
    (
        (refuse, "RuntimeError: windowed attention not supported)"),
        (without_causality, "its value is off"),
        (wrong_gradient, "its gradient of k is off by 10.0%"),
        (without_window, "its value within a window of 64 is off"),
    ),
)
def test_a_version_that_fails_or_is_wrong_is_not_used_and_the_log_says_why(installed, fault, named):
    installed.kernels["FA4"] = fault
    line = choose_flash_attention(CPU, 2, 16, 64)
    assert line.startswith("FA4 not used: ")
    assert named in line
    assert line.endswith("; attention by FA3")
    assert installed.active == "FA3"
    installed.kernels["FA3"] = fault
    assert choose_flash_attention(CPU, 2, 16, 64).count("not used") == 2
    assert installed.active is None


def test_nothing_is_used_on_a_cpu_where_none_is_installed_or_on_another_gpu(monkeypatch):
    assert choose_flash_attention(CPU, 2, 16, 64) == ""
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert not any(is_usable(name, gpu) for name in IMPLEMENTATIONS)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert [is_usable(name, gpu) for name in IMPLEMENTATIONS] == [True, True]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    assert not any(is_usable(name, gpu) for name in IMPLEMENTATIONS)
