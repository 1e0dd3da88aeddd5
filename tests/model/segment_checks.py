"""Pooling and unpooling in dense form, and the check that holds the model's against it."""

import torch
import torch.nn.functional as F

import spider_model


def dense_pool(h, b, cu_seqlens):
    """The published form, per document: softmax-free einsum with a [bytes, segments] matrix of weights."""
    pooled, counts = [], [0]
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()):
        h_d, b_d = h[start:end], b[start:end]
        count = b_d.cumsum(0) - b_d                                                          # c_t
        segments = int(b_d.detach().sum().round())
        distance = torch.arange(segments, dtype=h.dtype) - count[:, None]                    # 0 inside the segment
        inside = (distance.detach().abs() < 0.5).to(h.dtype)
        weight = inside * (1 - distance)
        pooled.append((weight / weight.sum(0, keepdim=True)).T @ h_d)
        counts.append(counts[-1] + segments)
    return torch.cat(pooled), torch.tensor(counts)


def dense_unpool(z, null, b, cu_seqlens, segment_cu_seqlens):
    out = []
    for d in range(len(cu_seqlens) - 1):
        seen = b[cu_seqlens[d]:cu_seqlens[d + 1]].detach().cumsum(0).round().long()
        table = torch.cat((null[None], z[segment_cu_seqlens[d]:segment_cu_seqlens[d + 1]]))
        out.append(F.one_hot(seen, len(table)).to(z.dtype) @ table)
    return torch.cat(out)


def dense_unpool_by_place(z, null, b, cu_seqlens, segment_cu_seqlens):
    """z [N, P, D]: a byte receives the row of its place behind the boundary, the last one from there on."""
    out, places = [], z.shape[1]
    for d in range(len(cu_seqlens) - 1):
        rows, segment, place = iter(z[segment_cu_seqlens[d]:segment_cu_seqlens[d + 1]]), null, 0
        for end in b[cu_seqlens[d]:cu_seqlens[d + 1]].tolist():
            segment, place = (next(rows), 0) if end else (segment, min(place + 1, places - 1))
            out.append(segment[place])
    return torch.stack(out)


def check_pooling(lengths, kind):
    """pool and unpool equal the dense form in value and gradient, in float64."""
    generator = torch.Generator().manual_seed(3)
    rows = sum(lengths)
    cu = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)
    hard = {"none": torch.zeros(rows), "all": torch.ones(rows),
            "some": (torch.rand(rows, generator=generator) < 0.3).float()}[kind].double()
    b = hard.requires_grad_()
    h = torch.randn(rows, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    null = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    mix = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    weight = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    results = []
    for pool, unpool in ((spider_model.pool_segments, spider_model.unpool_segments), (dense_pool, dense_unpool)):
        z, segment_cu = pool(h, b, cu)
        out = unpool((z @ mix).tanh(), null, b, cu, segment_cu)
        grads = torch.autograd.grad((out * weight).sum(), (h, b, null), allow_unused=True)
        results.append((z, segment_cu.long(), out, *(torch.zeros(()) if g is None else g for g in grads)))
    for ours, dense in zip(*results):
        torch.testing.assert_close(ours, dense.expand_as(ours), rtol=1e-9, atol=1e-9)
