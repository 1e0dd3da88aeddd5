"""A CPU that stands in for a GPU. Tensors tell Spider's code that they are on a GPU, so the code
takes its GPU branches. References replace the two kernels that CPUs lack. Calls in which the host
would wait for a GPU are recorded."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from conftest import ROOT

ROOMS = [path for name in ("spider", "tests") for path in ROOT.glob(f"{name}/**")]
OURS = {str(path) for path in (ROOT, *ROOMS)}
CPU = torch.device("cpu")
GPU = torch.device("cuda")
# Functions that read values on the host or copy from the host, or whose result's size depends on
# values
WAITS = {
    *"__bool__ __float__ __index__ __int__ bincount cpu equal item masked_select multinomial "
    "new_tensor nonzero numpy tensor tolist unique".split()
}


@contextmanager
def stand_in_gpu() -> Iterator["StandInGPU"]:
    """Make all tensors appear to be on a GPU inside the block, forward and backward."""
    mode = StandInGPU()
    apply = BackwardCFunction.apply

    def apply_in_mode(*args):
        with mode:  # torch exits the mode in a backward pass
            return apply(*args)

    with pytest.MonkeyPatch.context() as patch, mode:
        patch.setattr(BackwardCFunction, "apply", apply_in_mode)
        patch.setattr(torch.cuda, "synchronize", None)
        yield mode


class StandInGPU(TorchFunctionMode):
    """waits: file, line and name of the calls in which the host would wait."""

    def __init__(self):
        super().__init__()
        self.waits: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        caller = sys._getframe(1)
        # libraries see the CPU, even in a virtual environment below this directory
        if os.path.dirname(caller.f_code.co_filename) in OURS:
            if func == torch.Tensor.is_cuda.__get__:
                return True
            if func == torch.Tensor.device.__get__:
                return GPU
        if waits(func.__name__, args, kwargs):
            self.waits.append(f"{caller.f_code.co_filename}:{caller.f_lineno} {func.__name__}")
        args, kwargs = tree_map_only(torch.device, lambda device: CPU, (args, kwargs))
        return self.run(func, *args, **kwargs)

    def run(self, func, *args, **kwargs):
        """Run a function on the CPU."""
        if func == torch.mm and "out_dtype" in kwargs:
            a, b = args
            return a.to(kwargs["out_dtype"]) @ b.to(kwargs["out_dtype"])
        if str(func) == "torch_attn._varlen_attn":
            check_addresses(*args[:3])
            return varlen_attn(*args[:7], window_size=args[9]), None, None
        return func(*args, **kwargs)


def waits(name: str, args: tuple, kwargs: dict) -> bool:
    """Return whether the host would wait for the GPU in this call."""
    if name == "to":
        given = (*args, *kwargs.values())
        copies = any(isinstance(value, torch.device) for value in given)
        return copies and not kwargs.get("non_blocking")
    if name == "__getitem__":
        return isinstance(args[1], torch.Tensor) and args[1].dtype == torch.bool
    return name in WAITS


def check_addresses(*operands: torch.Tensor):
    """Check that tokens begin at multiples of 16 bytes, since the kernel reads 16 bytes at once."""
    for t in operands:
        assert t.dtype == torch.bfloat16 and t.stride(2) == 1
        assert not any(numbers % 8 for numbers in (t.storage_offset(), t.stride(0), t.stride(1)))


def varlen_attn(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, window_size):
    """Attend causally within each document, with a mask over all tokens: [tokens, heads, width] ->
    the same shape. The kernel does not write tokens from max_q on in a document: NaN here."""
    token = torch.arange(len(q))
    document = torch.searchsorted(cu_seq_q[1:], token, right=True)
    distance = token[:, None] - token
    hidden = (document[:, None] != document) | (distance < 0)
    if window_size[0] >= 0:
        hidden |= distance > window_size[0]
    score = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * q.shape[-1] ** -0.5
    weights = score.masked_fill(hidden, -torch.inf).softmax(-1)
    out = torch.einsum("hqk,khd->qhd", weights, v.float()).to(q.dtype)
    is_computed = token - cu_seq_q.index_select(0, document) < max_q
    return torch.where(is_computed[:, None, None], out, torch.nan)
