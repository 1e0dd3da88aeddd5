"""Attention without a kernel for documents: on a CPU, and in fp32."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from conftest import small_config
from spider.model import attention
from spider.model.packing import Packing

MIXED = ((1,), (5, 1, 1, 2, 0, 3), (16, 256, 0, 256) + (16,) * 20, (4,) * 100 + (130,) + (4,) * 100,
         (600, 1, 30, 17, 0, 16, 200, 513), (1,) * 50, (96, 80, 70, 33))


def attention_of(lengths, dtype, window=0) -> tuple[torch.Tensor, torch.Tensor, Packing]:
    """qkv [rows, 2, 3, 8] with a gradient, cu_seqlens and packing of documents of these lengths."""
    cu_seqlens = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)
    rows = int(cu_seqlens[-1])
    qkv = torch.randn(rows, 2, 3, 8, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    return qkv, cu_seqlens, Packing.build(cu_seqlens, rows, max(lengths), small_config(), dtype, window)


def attend_alone(part, window):
    """One document's rows [n, 2, 3, 8], each looking back on `window` of them, by a mask over all of them."""
    ahead = torch.arange(len(part)) - torch.arange(len(part))[:, None]
    mask = (ahead <= 0) & (ahead > -(window or len(part)))
    return F.scaled_dot_product_attention(*part.permute(2, 1, 0, 3), attn_mask=mask).transpose(0, 1)


@pytest.mark.parametrize("dtype,atol", ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.03)),
                         ids=("float64", "float32", "bfloat16"))
@pytest.mark.parametrize("window", (0, 1, 16, 24))
@pytest.mark.parametrize("lengths", MIXED, ids=lambda lengths: f"{len(lengths)} documents up to {max(lengths)}")
def test_documents_of_any_lengths_attend_as_each_would_alone_in_value_and_gradient(lengths, window, dtype, atol):
    qkv, cu_seqlens, packing = attention_of(lengths, dtype, window)
    upstream = torch.randn(len(qkv), 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    out = attention.attend_filled(qkv, packing)
    grad, = torch.autograd.grad(out, qkv, upstream)
    alone = qkv.detach().double().requires_grad_()
    expected = torch.cat([attend_alone(part, window) for part in alone.split(cu_seqlens.diff().tolist())]).flatten(1)
    expected_grad, = torch.autograd.grad(expected, alone, upstream.double())
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=0, atol=4 * atol)


class Made(TorchDispatchMode):
    """Counts the elements that operations make inside it."""
    elements = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        if not operation.is_view:
            self.elements += sum(t.numel() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor))
        return out


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_many_short_documents_beside_a_long_one_cost_what_they_cost_apart(dtype):
    """16,384 bytes, 3,584 documents of four of them: filled up to the longest, they would cost 640 times as much."""
    short, long = (4,) * 1792, (2048,)

    def cost(lengths):
        with Made() as made:
            qkv, _, packing = attention_of(lengths, dtype)
            attention.attend_filled(qkv, packing).sum().backward()
        return made.elements
    assert cost(short + long + short) < 3 * (cost(short + short) + cost(long))
