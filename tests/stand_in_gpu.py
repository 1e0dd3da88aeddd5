"""A CPU that stands in for a GPU: tensors tell Spider that they are on one, so that all code that
asks takes its form for a GPU. The two kernels that no CPU has are replaced by references."""

import sys

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from conftest import ROOT
from spider.flash_attention import attend_by_mask

CPU = torch.device("cpu")
GPU = torch.device("cuda")


class StandInGPU(TorchFunctionMode):
    """Let all tensors be on a GPU inside a `with` block, forward and backward."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # libraries see the CPU
        if sys._getframe(1).f_code.co_filename.startswith(f"{ROOT}/"):
            if func == torch.Tensor.is_cuda.__get__:
                return True
            if func == torch.Tensor.device.__get__:
                return GPU
        if func == torch.mm and "out_dtype" in kwargs:
            a, b = args
            return a.to(kwargs["out_dtype"]) @ b.to(kwargs["out_dtype"])
        if str(func) == "torch_attn._varlen_attn":
            return plain_varlen_attn(*args), None, None
        args, kwargs = tree_map_only(torch.device, lambda device: CPU, (args, kwargs))
        return func(*args, **kwargs)


def plain_varlen_attn(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, causal, scale, window, *_):
    """Attend inside documents by a mask, in place of the kernel, which leaves rows from max_q on as
    they are, and reads 16 bytes at once, from any address."""
    for t in (q, k, v):
        assert t.dtype == torch.bfloat16 and t.stride(2) == 1
        assert not any(numbers % 8 for numbers in (t.storage_offset(), t.stride(0), t.stride(1)))
    out = attend_by_mask(q.float(), k.float(), v.float(), cu_seq_q, window[0] + 1).to(q.dtype)
    row = torch.arange(len(q))
    document = torch.searchsorted(cu_seq_q[1:], row, right=True)
    is_computed = row - cu_seq_q[document] < max_q
    return torch.where(is_computed[:, None, None], out, torch.nan)
