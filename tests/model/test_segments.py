"""Compare pooling with the published dense form, and unpooling with a loop over bytes."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from spider.model.segments import pool_segments, unpool_segments


def pool_densely(h, b, cu_seqlens):
    """Pool each document by the published form, an einsum with a [bytes, segments] matrix of
    weights."""
    pooled = []
    counts = [0]
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        h_document = h[start:end]
        b_document = b[start:end]
        count = b_document.cumsum(0) - b_document  # c_t
        segments = int(b_document.detach().sum().round())
        distance = torch.arange(segments, dtype=h.dtype) - count[:, None]  # 0 inside the segment
        weight = (distance.detach().abs() < 0.5) * (1 - distance)
        pooled.append((weight / weight.sum(0, keepdim=True)).T @ h_document)
        counts.append(counts[-1] + segments)
    return torch.cat(pooled), torch.tensor(counts)


def unpool_in_turn(z, null, b, cu_seqlens, segment_cu_seqlens, back):
    """Unpool byte by byte: z [N, offsets, D], null [D]. All bytes after the last offset use it."""
    out = []
    for document in range(len(cu_seqlens) - 1):
        segments = iter(z[segment_cu_seqlens[document] : segment_cu_seqlens[document + 1]])
        ended = []  # (segment, last byte)
        ends = b[cu_seqlens[document] : cu_seqlens[document + 1]].tolist()
        for t, is_end in enumerate(ends):
            if is_end:
                ended.append((next(segments), t))
            if len(ended) > back:
                segment, last_byte = ended[-1 - back]
                out.append(segment[min(t - last_byte, len(segment) - 1)])
            else:
                out.append(null)
    return torch.stack(out)


@pytest.mark.parametrize("offsets, back", ((1, 0), (3, 0), (3, 1)))
@pytest.mark.parametrize("rate", (0.0, 0.3, 1.0))
@pytest.mark.parametrize("lengths", ((1,), (40,), (7, 1, 30, 2)))
def test_pooling_equals_the_dense_form_forward_and_backward(lengths, rate, offsets, back):
    generator = torch.Generator().manual_seed(3)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tokens = sum(lengths)
    cu_seqlens = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)
    b = (torch.rand(tokens, generator=generator) < rate).double().requires_grad_()
    h = random(tokens, 6).requires_grad_()
    null = random(6).requires_grad_()
    mix = random(6, 6 * offsets)  # stands for the core
    upstream = random(tokens, 6)

    z, segment_cu_seqlens = pool_segments(h, b, cu_seqlens)
    out = unpool_segments(
        (z @ mix).tanh(), null.repeat(offsets), b, cu_seqlens, segment_cu_seqlens, offsets, back
    )

    dense_z, dense_cu_seqlens = pool_densely(h, b, cu_seqlens)
    dense_read = (dense_z @ mix).tanh().unflatten(1, (offsets, 6))
    dense_out = unpool_in_turn(dense_read, null, b, cu_seqlens, dense_cu_seqlens, back)

    assert segment_cu_seqlens.tolist() == dense_cu_seqlens.tolist()
    differentiate = partial(
        torch.autograd.grad,
        inputs=(h, b, null),
        grad_outputs=upstream,
        allow_unused=True,
        materialize_grads=True,
    )
    torch.testing.assert_close(
        (z, out, *differentiate(out)),
        (dense_z, dense_out, *differentiate(dense_out)),
        rtol=1e-9,
        atol=1e-9,
    )
