"""FlashAttention 4 or 3 in place of the 2 that torch's variable-length attention has, where one of
them is installed.

torch 2.11 and 2.13 call their support a prototype, so values and gradients are tested on the GPU
before it is used. By their sources FA4 trains only with 2.13: in 2.11 its backward pass refuses
windows, and varlen_attn always gives it one.
"""

import importlib.util
from collections.abc import Iterator
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import attention

from spider.kernel_checks import Check, find_wrong, first_error, value_and_gradients

TOLERANCE = 0.02  # error of values and gradients in bf16, relative to their norm


# By torch's name, the fastest first: the module that torch imports, and the major capabilities of
# the GPUs that it supports
IMPLEMENTATIONS = {
    "FA4": ("flash_attn.cute.interface", (9, 10)),
    "FA3": ("flash_attn_interface", (9,)),
}


def choose_flash_attention(device: torch.device, heads: int, width: int, window: int) -> str:
    """Activate the first usable implementation; return a line for the log, or "" if none is
    installed.

    It must support this GPU and pass a test with this number and width of heads, without a window
    and with this one. window: in rows, 0 for none.
    """
    remarks = []
    for name in IMPLEMENTATIONS:
        if not is_usable(name, device):
            continue
        try:
            attention.activate_flash_attention_impl(name)
            checks = check_attention(device, heads, width, 0)
            if window:
                checks = chain(checks, check_attention(device, heads, width, window))
            wrong = find_wrong(checks)
        except Exception as fault:  # whatever a prototype provokes
            wrong = f"it fails ({first_error(fault)})"
        if wrong is None:
            remarks.append(f"attention by {name}")
            break
        attention.restore_flash_attention_impl()
        remarks.append(f"{name} not used: {wrong}")
    return "; ".join(remarks)


def is_usable(name: str, device: torch.device) -> bool:
    """Return whether an implementation is installed and supports a device."""
    if device.type != "cuda":
        return False
    module, capabilities = IMPLEMENTATIONS[name]
    try:
        if importlib.util.find_spec(module) is None:
            return False
    except ImportError:  # it lacks a package in which the module would be
        return False
    return torch.cuda.get_device_capability(device)[0] in capabilities


def check_attention(device: torch.device, heads: int, width: int, window: int) -> Iterator[Check]:
    """Compare the active implementation and its gradients with plain products. window: in rows, 0
    for none."""
    from torch.nn.attention.varlen import varlen_attn

    lengths = torch.tensor([200, 1, 57, 300])  # documents' rows
    longest = int(lengths.max())
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).to(device, torch.int32)
    generator = torch.Generator(device).manual_seed(0)

    def draw(width: int) -> Tensor:
        rows = int(lengths.sum())
        numbers = torch.randn(rows, heads, width, generator=generator, device=device)
        return numbers.bfloat16()

    def by_kernel(q: Tensor, k: Tensor, wide_v: Tensor) -> Tensor:
        out = varlen_attn(
            q,
            k,
            wide_v[:, :, width:],
            cu_seqlens,
            cu_seqlens,
            longest,
            longest,
            window_size=(window - 1, 0),
        )
        assert isinstance(out, Tensor)  # a tuple only if asked
        return out

    def by_mask(q: Tensor, k: Tensor, wide_v: Tensor) -> Tensor:
        return attend_by_mask(q, k, wide_v[:, :, width:], cu_seqlens, window)

    # v is a slice, as a layer's values are
    operands = dict(q=draw(width), k=draw(width), v=draw(2 * width))
    within = f" within a window of {window}" if window else ""
    yield from value_and_gradients(
        by_kernel, by_mask, operands, draw(width), called="its {}" + within, tolerance=TOLERANCE
    )


def attend_by_mask(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, window: int = 0) -> Tensor:
    """Attend causally inside each document by a mask over all rows: [rows, H, width] -> the same.

    window: the most rows that a row attends to, 0 for all.
    """
    row = torch.arange(len(q), device=q.device)
    document = torch.searchsorted(cu_seqlens[1:], row, right=True)
    back = row[:, None] - row
    hidden = (document[:, None] != document) | (back < 0)
    if window:
        hidden |= back >= window
    score = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    weights = score.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)
