"""Pooling and unpooling of segments."""

import pytest
import torch
import torch.nn.functional as F

from spider.segments import pool_segments, segment_offsets, unpool_segments


def dense_pool(h, b, cu_seqlens):
    """Pool by the published form, per document: an einsum with a [bytes, segments] matrix of
    weights."""
    pooled, counts = [], [0]
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        h_d, b_d = h[start:end], b[start:end]
        count = b_d.cumsum(0) - b_d  # c_t
        segments = int(b_d.detach().sum().round())
        distance = torch.arange(segments, dtype=h.dtype) - count[:, None]  # 0 inside the segment
        weight = (distance.detach().abs() < 0.5) * (1 - distance)
        pooled.append((weight / weight.sum(0, keepdim=True)).T @ h_d)
        counts.append(counts[-1] + segments)
    return torch.cat(pooled), torch.tensor(counts)


def unpool_in_turn(z, null, b, cu_seqlens, segment_cu_seqlens, back=0):
    """Unpool byte by byte: z [N, offsets, D], null [D]; the last offset serves all further
    bytes."""
    out = []
    for d in range(len(cu_seqlens) - 1):
        rows, ended = iter(z[segment_cu_seqlens[d] : segment_cu_seqlens[d + 1]]), []
        for t, end in enumerate(b[cu_seqlens[d] : cu_seqlens[d + 1]].tolist()):
            ended += [(next(rows), t)] if end else []
            segment, first = ended[-1 - back] if len(ended) > back else (null[None], t)
            out.append(segment[min(t - first, len(segment) - 1)])
    return torch.stack(out)


@pytest.mark.parametrize("offsets, back", ((1, 0), (3, 0), (3, 1)))
@pytest.mark.parametrize("rate", (0.0, 0.3, 1.0))
@pytest.mark.parametrize("lengths", ((1,), (40,), (7, 1, 30, 2)))
def test_pool_and_unpool_equal_the_dense_form_in_value_and_gradient(lengths, rate, offsets, back):
    generator = torch.Generator().manual_seed(3)
    rows, cu = sum(lengths), F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)
    b = (torch.rand(rows, generator=generator) < rate).double().requires_grad_()
    h, weight = torch.randn(2, rows, 6, generator=generator, dtype=torch.float64).unbind()
    mix, null = torch.randn(6 * offsets + 1, 6, generator=generator, dtype=torch.float64).split(
        (6 * offsets, 1)
    )
    inputs = h.requires_grad_(), b, null.squeeze(0).requires_grad_()
    results = []
    for dense in (False, True):
        z, segment_cu = (dense_pool if dense else pool_segments)(h, b, cu)
        read, null = (z @ mix.T).tanh().unflatten(1, (offsets, 6)), inputs[2]
        if dense:
            out = unpool_in_turn(read, null, b, cu, segment_cu, back)
        elif offsets == 1:
            out = unpool_segments(read.squeeze(1), null, b, cu, segment_cu)
        else:
            offset = segment_offsets(b, cu[:-1].repeat_interleave(cu.diff()), offsets, back=back)
            out = unpool_segments(read, null.repeat(offsets, 1), b, cu, segment_cu, offset, back)
        grads = torch.autograd.grad((out * weight).sum(), inputs, allow_unused=True)
        results.append(
            (
                z,
                segment_cu.long(),
                out,
                *(
                    torch.zeros_like(x) if grad is None else grad
                    for grad, x in zip(grads, inputs, strict=True)
                ),
            )
        )
    for ours, dense in zip(*results, strict=True):
        torch.testing.assert_close(ours, dense, rtol=1e-9, atol=1e-9)
