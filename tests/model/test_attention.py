"""Attention within documents, in padded batches, and the cache of decoding."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from conftest import small_config
from spider.model.attention import ALL_TOKENS, MLA, LatentCache, attend_padded, tokens_before
from spider.model.packing import Packing, StepTokens
from stand_in_gpu import stand_in_gpu

LENGTHS = (
    (1,),
    (5, 1, 1, 2, 0, 3),
    (4,) * 100 + (130,) + (4,) * 100,
    (600, 1, 30, 17, 0, 16, 200, 513),
)


def attend_alone(qkv: torch.Tensor, window: int) -> torch.Tensor:
    """Attend in one document [n, H, 3, width] with a full mask -> [n, H, width]."""
    position = torch.arange(len(qkv))
    distance = position[:, None] - position
    visible = (distance >= 0) & (distance < (window or len(qkv)))
    q, k, v = qkv.permute(2, 1, 0, 3)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(0, 1)


@pytest.mark.parametrize(
    "dtype,atol", ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.03)), ids=str
)
@pytest.mark.parametrize("window", (0, 1, 24))
@pytest.mark.parametrize("lengths", LENGTHS)
def test_packed_documents_attend_as_if_alone_forward_and_backward(lengths, window, dtype, atol):
    tokens = sum(lengths)
    cu_seqlens = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)
    packing = Packing.build(cu_seqlens, tokens, max(lengths), small_config(), dtype, window)
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(tokens, 2, 3, 8, generator=generator).to(dtype).requires_grad_()
    upstream = torch.randn(tokens, 16, generator=generator).to(dtype)

    out = attend_padded([*qkv.unbind(2)], packing)
    (grad,) = torch.autograd.grad(out, qkv, upstream)

    exact_qkv = qkv.detach().double().requires_grad_()
    alone = [attend_alone(document, window) for document in exact_qkv.split(lengths)]
    expected = torch.cat(alone).flatten(1)
    (expected_grad,) = torch.autograd.grad(expected, exact_qkv, upstream.double())
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=0, atol=4 * atol)


def test_preceding_tokens_stay_in_the_document_nearest_last():
    cu_seqlens = torch.tensor((0, 3, 5), dtype=torch.int32)
    packing = Packing.build(cu_seqlens, 5, 3, small_config(), torch.float32)
    x = torch.tensor((1, 2, 3, 4, 5))[:, None]
    assert tokens_before(x, packing, 2)[:, 0].tolist() == [[0, 0], [0, 1], [1, 2], [0, 0], [0, 4]]


@pytest.mark.parametrize("window", (0, 1, 3, 8))
@pytest.mark.parametrize("step_lengths", ([1] * 23, [9, 1, 1, 7, 5], [23]))
def test_windowed_cache_keeps_and_attends_only_to_its_window(step_lengths, window):
    """Decode two documents in one batch; the second starts five tokens later."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 30, 4, dtype=torch.float64, generator=generator)
    q = torch.randn(2, 30, 2, 4, dtype=torch.float64, generator=generator)
    buffer = torch.zeros(1, 1, 2, 1, 4, dtype=torch.float64)
    before = np.zeros(2, dtype=np.int64)
    for tokens in ([5, 0], *([n, n] for n in step_lengths)):
        step = StepTokens(np.array(tokens), before)
        cache = LatentCache(buffer, step, window).of(0)
        now = (step.document, step.position)
        out = cache.attend(q[now], x[now], scale=0.7, value_width=3)
        for document, position, y in zip(*(t.tolist() for t in now), out, strict=True):
            first = max(0, position + 1 - window) if window else 0
            keys = x[document, first : position + 1]
            weights = (0.7 * q[document, position] @ keys.T).softmax(-1)
            torch.testing.assert_close(y, weights @ keys[:, :3], rtol=0, atol=1e-12)
        buffer = cache.buffer
        before = before + tokens
    if window:
        assert buffer.shape[3] <= max(16, 2 * (window + max(step_lengths) - 1))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_layer_on_a_gpu_attends_as_on_a_cpu(dtype):
    """Only bf16 uses the kernel. At these widths values would be misaligned for it."""
    config = small_config(qk_nope_head_dim=12, qk_rope_head_dim=4)
    torch.manual_seed(0)
    layer = MLA(config)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(60, 32).to(dtype)
    cu_seqlens = torch.tensor([0, 35, 40, 60], dtype=torch.int32)
    outs = []
    for device in (nullcontext, stand_in_gpu):
        with device(), torch.no_grad():
            packing = Packing.build(cu_seqlens, 60, 35, config, dtype, window=9)
            outs.append(layer(x, packing, ALL_TOKENS)[0])
    assert (packing.max_seqlen_as_size is None) == (dtype == torch.float32)
    assert (outs[1] - outs[0]).norm() < 0.02 * outs[0].norm()
