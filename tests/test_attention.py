"""Attention inside documents by padded batches, and the cache of decoding."""

import pytest
import torch
import torch.nn.functional as F

from conftest import small_config
from spider.attention import Cache, attend_padded
from spider.packing import Packing

LENGTHS = (
    (1,),
    (5, 1, 1, 2, 0, 3),
    (16, 256, 0, 256) + (16,) * 20,
    (4,) * 100 + (130,) + (4,) * 100,
    (600, 1, 30, 17, 0, 16, 200, 513),
    (1,) * 50,
    (96, 80, 70, 33),
)


def attention_inputs(lengths, dtype, window=0) -> tuple[torch.Tensor, torch.Tensor, Packing]:
    """Return qkv [rows, 2, 3, 8] with a gradient, cu_seqlens and packing of documents of these
    lengths."""
    cu_seqlens = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)
    rows = int(cu_seqlens[-1])
    qkv = (
        torch.randn(rows, 2, 3, 8, generator=torch.Generator().manual_seed(0))
        .to(dtype)
        .requires_grad_()
    )
    return (
        qkv,
        cu_seqlens,
        Packing.build(cu_seqlens, rows, max(lengths), small_config(), dtype, window),
    )


def attend_alone(qkv, window):
    """Attend in one document [n, 2, 3, 8] by a mask over all its rows."""
    ahead = torch.arange(len(qkv)) - torch.arange(len(qkv))[:, None]
    mask = (ahead <= 0) & (ahead > -(window or len(qkv)))
    return F.scaled_dot_product_attention(*qkv.permute(2, 1, 0, 3), attn_mask=mask).transpose(0, 1)


@pytest.mark.parametrize(
    "dtype,atol", ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.03)), ids=str
)
@pytest.mark.parametrize("window", (0, 1, 16, 24))
@pytest.mark.parametrize(
    "lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)} documents up to {max(lengths)}"
)
def test_documents_attend_together_as_alone_in_value_and_gradient(lengths, window, dtype, atol):
    qkv, cu_seqlens, packing = attention_inputs(lengths, dtype, window)
    upstream = torch.randn(len(qkv), 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    out = attend_padded(qkv, packing)
    (grad,) = torch.autograd.grad(out, qkv, upstream)
    alone = qkv.detach().double().requires_grad_()
    expected = torch.cat(
        [attend_alone(part, window) for part in alone.split(cu_seqlens.diff().tolist())]
    ).flatten(1)
    (expected_grad,) = torch.autograd.grad(expected, alone, upstream.double())
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=0, atol=4 * atol)


@pytest.mark.parametrize("window", (0, 1, 3, 8))
@pytest.mark.parametrize("parts", ([1] * 23, [9, 1, 1, 7, 5], [23]))
def test_a_cache_with_a_window_keeps_only_that_and_masks_the_rest(window, parts):
    """Two documents side by side; the second starts five rows later."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 30, 4, dtype=torch.float64, generator=generator)
    q = torch.randn(2, 30, 2, 4, dtype=torch.float64, generator=generator)
    held, before = (
        torch.zeros(1, 1, 2, 1, 4, dtype=torch.float64),
        torch.zeros(2, dtype=torch.int64),
    )
    for rows in ([5, 0], *([n, n] for n in parts)):
        cu_seqlens = torch.tensor([0, rows[0], sum(rows)], dtype=torch.int32)
        packing = Packing.build(
            cu_seqlens, sum(rows), max(rows), small_config(), torch.float64, 0, before
        )
        at = packing.document, packing.position
        cache = Cache(held, packing, before, window)
        for d, p, y in zip(
            *(t.tolist() for t in at), cache.attend(q[at], x[at], 0.7, 3), strict=True
        ):
            keys = x[d, max(0, p + 1 - window) if window else 0 : p + 1]
            torch.testing.assert_close(
                y, (0.7 * q[d, p] @ keys.T).softmax(-1) @ keys[:, :3], rtol=0, atol=1e-12
            )
        held, before = cache.buffer, before + torch.tensor(rows)
    assert not window or held.shape[3] <= max(16, 2 * (window + max(parts) - 1))
