"""FlashAttention 4 or 3 in place of the 2 that torch's variable-length attention has, where one of
them is installed.

torch 2.11 and 2.13 call their support a prototype, so values and gradients are tested on the GPU
before it is used. By their sources FA4 trains only with 2.13: in 2.11 its backward pass refuses
windows, and varlen_attn always gives it one.
"""

import importlib.util
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import attention

TOLERANCE = 0.02  # of values and gradients in bf16, relative to their norm


class Implementation(NamedTuple):
    name: str  # torch's
    module: str  # that torch imports
    capabilities: tuple[int, ...]  # major ones of the GPUs that it supports


IMPLEMENTATIONS = (  # the fastest first
    Implementation("FA4", "flash_attn.cute.interface", (9, 10)),
    Implementation("FA3", "flash_attn_interface", (9,)),
)


def choose_flash_attention(device: torch.device, heads: int, width: int, window: int) -> str:
    """Activate the first of IMPLEMENTATIONS that is installed, supports this GPU and passes a test
    with this number and width of heads, without a window and with this one (in rows; 0: none);
    return a line for the log, or "" if none is installed."""
    remarks = []
    for implementation in IMPLEMENTATIONS:
        if not is_usable(implementation, device):
            continue
        try:
            attention.activate_flash_attention_impl(implementation.name)
            wrong = find_wrong_attention(device, heads, width, 0)
            if wrong is None and window:
                wrong = find_wrong_attention(device, heads, width, window)
        except Exception as fault:  # whatever a prototype provokes
            wrong = f"it fails ({type(fault).__name__}: {str(fault).partition(chr(10))[0][:200]})"
        if wrong is None:
            remarks.append(f"attention by {implementation.name}")
            break
        attention.restore_flash_attention_impl()
        remarks.append(f"{implementation.name} not used: {wrong}")
    return "; ".join(remarks)


def is_usable(implementation: Implementation, device: torch.device) -> bool:
    """Return whether an implementation is installed and supports a device."""
    try:
        if device.type != "cuda" or importlib.util.find_spec(implementation.module) is None:
            return False
    except ImportError:  # it lacks a package in which the module would be
        return False
    return torch.cuda.get_device_capability(device)[0] in implementation.capabilities


def find_wrong_attention(device: torch.device, heads: int, width: int, window: int) -> str | None:
    """Name what of the active implementation differs from plain products, its value or a gradient,
    or return None."""
    from torch.nn.attention.varlen import varlen_attn

    lengths = torch.tensor([200, 1, 57, 300])
    cu_seqlens = torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).to(device, torch.int32)
    rows, longest = int(lengths.sum()), int(lengths.max())
    generator = torch.Generator(device).manual_seed(0)
    q, k, upstream = (
        torch.randn(rows, heads, width, generator=generator, device=device) for _ in range(3)
    )
    v = torch.randn(rows, heads, 2 * width, generator=generator, device=device)
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        inputs = [t.bfloat16().to(dtype).requires_grad_() for t in (q, k, v)]
        attended = *inputs[:2], inputs[2][:, :, width:]  # a slice, as a layer's values are
        if dtype == torch.bfloat16:
            out = varlen_attn(
                *attended, cu_seqlens, cu_seqlens, longest, longest, window_size=(window - 1, 0)
            )
        else:
            out = attend_by_mask(*attended, cu_seqlens, window)
        results.append((out, *torch.autograd.grad(out, inputs, upstream.bfloat16().to(dtype))))
    for name, ours, exact in zip(
        ("value", "gradient of q", "gradient of k", "gradient of v"), *results, strict=True
    ):
        off = float((ours.detach().float() - exact.detach()).norm() / exact.detach().norm())
        if not off <= TOLERANCE:
            within = f" within a window of {window}" if window else ""
            return f"its {name} is off by {off:.1%} on this GPU{within}"
    return None


def attend_by_mask(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, window: int = 0) -> Tensor:
    """Attend causally inside each document, to at most `window` rows (0: all), by a mask over all
    rows: [rows, H, width] -> the same."""
    row = torch.arange(len(q), device=q.device)
    document = torch.searchsorted(cu_seqlens[1:], row, right=True)
    back = row[:, None] - row
    hidden = (document[:, None] != document) | (back < 0)
    if window:
        hidden |= back >= window
    score = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hqk,khd->qhd", score.masked_fill(hidden, -torch.inf).softmax(-1), v)
