"""Segments of bytes: pool the bytes of each, and unpool segments to bytes.

Boundaries b [M] are 1 where a segment ends, else 0. Shapes: M byte rows, N segments, D hidden size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def pool_segments(h: Tensor, b: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of each finished segment's bytes, in O(M * D), with the gradient of the
    published dense einsum.

    h [M, D]; b [M] with a straight-through gradient; cu_seqlens int32 [documents + 1]. Returns z
    [N, D], documents in order, and segment_cu_seqlens int32 [documents + 1]. Bytes after a
    document's last boundary belong to no segment. The gradient of b runs through w_t = 1 + c_t -
    stopgrad(c_t), where c_t is the number of boundaries before t in the document (FlexiTokens,
    arXiv 2507.12720).
    """
    z, total, segment_cu_seqlens = sum_segments(h, b, cu_seqlens)
    segments = len(z) + 1 - len(cu_seqlens)
    return (z[:segments] / total[:segments]).to(h.dtype), segment_cu_seqlens


def sum_segments(
    h: Tensor, b: Tensor, cu_seqlens: Tensor, open_segment: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums [N + documents, D] and weights [N + documents, 1] of pool_segments before the
    division, and segment_cu_seqlens. The last `documents` rows are the open segments, after each
    document's last boundary; pass them as `open_segment` when the documents continue."""
    document, finished = _documents_and_segments(b, cu_seqlens)
    segment_cu_seqlens = F.pad(finished, (1, 0)).index_select(0, cu_seqlens)
    segments = int(segment_cu_seqlens[-1])  # host synchronisation
    own = finished - b.detach().round().long()  # [M], segment of each byte
    own = torch.where(
        own < segment_cu_seqlens.index_select(0, document + 1), own, segments + document
    )
    before = b.cumsum(0) - b
    before = before - before.index_select(0, cu_seqlens.index_select(0, document))  # c_t
    weight = 1 + before - before.detach()
    rows = segments + len(cu_seqlens) - 1
    total = weight.new_zeros(rows, 1).index_add(0, own, weight[:, None])
    z = _SumRows.apply(h, weight, own, rows)
    if open_segment is not None:
        first = own.index_select(0, cu_seqlens[:-1])
        z, total = (
            z.index_add(0, first, open_segment[0]),
            total.index_add(0, first, open_segment[1]),
        )
    return z, total, segment_cu_seqlens.to(torch.int32)


class _SumRows(torch.autograd.Function):
    """Sum rows h [M, D] times weights [M] by `own` [M], [rows, D]; unlike autograd's, it does not
    save the products."""

    @staticmethod
    def forward(ctx, h, weight, own, rows):
        ctx.save_for_backward(h, weight, own)
        products = weight[:, None] * h
        return products.new_zeros(rows, h.shape[1]).index_add_(0, own, products)

    @staticmethod
    def backward(ctx, grad):
        h, weight, own = ctx.saved_tensors
        grad = grad.index_select(0, own)
        to_weight = (grad * h).sum(1)
        return grad.mul_(weight[:, None]).to(h.dtype), to_weight, None, None


def unpool_segments(
    z: Tensor,
    null: Tensor,
    b: Tensor,
    cu_seqlens: Tensor,
    segment_cu_seqlens: Tensor,
    offset: Tensor | None = None,
    back: int = 0,
) -> Tensor:
    """Give each byte the last segment of its document that ended at or before it, which is causal
    without a shift.

    z [N, D]; null [D] or [documents, D], for bytes before a document's first boundary; b [M];
    cu_seqlens and segment_cu_seqlens int32 [documents + 1]. Returns [M, D]; b gets no gradient.
    With `offset` [M] a segment has a row per segment offset, z [N, offsets, D] and null [offsets,
    D], and a byte gets the row of its offset. `back`: take the segment that many before.
    """
    document, finished = _documents_and_segments(b, cu_seqlens)
    null, finished = null.view(-1, *z.shape[1:]), finished - back
    own = torch.where(
        finished > segment_cu_seqlens.index_select(0, document),
        finished + len(null) - 1,
        document.clamp_max(len(null) - 1),
    )
    rows = torch.cat((null.to(z.dtype), z))
    if offset is not None:
        own, rows = own * z.shape[1] + offset, rows.flatten(0, 1)
    return rows.index_select(0, own)


def segment_offsets(
    b: Tensor, start: Tensor, count: int, open_bytes: Tensor | int = 0, back: int = 0
) -> Tensor:
    """Return each byte's segment offset, its distance from the last boundary, 0 at the boundary and
    at most `count` -
    1: int64 [M].

    start [M]: the first byte of each byte's document; open_bytes [M]: in decoding, earlier bytes
    since the last boundary. `back`: count from that many boundaries before the last."""
    row, last = torch.arange(len(b), device=b.device), last_boundary(b)
    for _ in range(back):
        last = F.pad(last, (1, 0), value=-1).index_select(0, last + (last < 0))
    return (row - torch.where(last < start, start - 1 - open_bytes, last)).clamp_max(count - 1)


def last_boundary(b: Tensor) -> Tensor:
    """Return the last row at or before each byte where b [M] is 1, int64 [M]; -1 before the
    first."""
    return torch.where(b.detach() > 0, torch.arange(len(b), device=b.device), -1).cummax(0).values


def last_byte_of(b: Tensor, rows: int) -> Tensor:
    """Return the last byte of each segment, int64 [rows], from boundaries b [M]; 0 for padding
    rows."""
    byte = torch.arange(len(b), device=b.device)
    own = torch.where(b.detach() > 0, b.detach().round().long().cumsum(0) - 1, rows)
    return byte.new_zeros(rows + 1).index_copy_(0, own, byte)[:rows]


def _documents_and_segments(b: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each byte, int64 [M], its document, and the number of segments that ended at or
    before it."""
    row = torch.arange(len(b), device=b.device)
    return torch.searchsorted(cu_seqlens[1:], row, right=True), b.detach().round().long().cumsum(0)
