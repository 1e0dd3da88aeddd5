"""Segments of bytes: pool the bytes of each, and unpool segments to bytes.

Let b_t be 1 where a segment ends with byte t, else 0, and let sums run over bytes of one document.

    c_t = sum of b_u over u < t          index of the segment that byte t belongs to
    w_t = 1 + c_t - stopgrad(c_t)        1, with the gradient of the index
    z_s = sum of w_t h_t / sum of w_t    over bytes t with c_t = s: mean of segment s
    f_t = sum of b_u over u <= t         segments that have ended at or before byte t

Pooling returns z (FlexiTokens, arXiv 2507.12720). Its gradient with respect to b runs through w
alone. Bytes after a document's last boundary belong to no finished segment. Unpooling gives byte t
the segment f_t - 1, the last that ended at or before it. Therefore it is causal without a shift.
Where f_t is 0, the byte receives a learned null row instead.

In decoding, the bytes after the last boundary are an open segment, which later steps continue.

Shapes, as suffixes of names:
    M  bytes
    N  segments
    B  documents
    D  hidden size
    O  segment offsets (see segment_offsets), each with its own row in unpooling
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def pool_segments(h: Tensor, b: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of each finished segment's bytes, in O(M * D), with the gradient of the
    published dense einsum.

    h [M, D]; b [M] with a straight-through gradient; cu_seqlens int32 [B + 1]. Returns z [N, D],
    documents in order, and segment_cu_seqlens int32 [B + 1]. Waits for the device."""
    sums, weights, segment_cu_seqlens = sum_segments(h, b, cu_seqlens)
    documents = len(cu_seqlens) - 1
    segments = len(sums) - documents
    z_ND = sums[:segments] / weights[:segments]
    return z_ND.to(h.dtype), segment_cu_seqlens


def sum_segments(h: Tensor, b: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum the bytes of each segment: numerator and denominator of pool_segments.

    Returns the sums of w_t h_t [N + B, D] and of w_t [N + B, 1], of the finished segments and then
    of an open one per document; and segment_cu_seqlens int32 [B + 1] of the finished ones. Waits
    for the device."""
    documents = len(cu_seqlens) - 1
    document_M, ended_M = _documents_and_segments(b, cu_seqlens)
    segment_cu_seqlens = F.pad(ended_M, (1, 0)).index_select(0, cu_seqlens)
    segments = int(segment_cu_seqlens[-1])  # host synchronisation

    # The row of each byte's sum, counted over all documents.
    segment_M = ended_M - b.detach().round().long()
    first_of_next = segment_cu_seqlens.index_select(0, document_M + 1)
    row_M = torch.where(segment_M < first_of_next, segment_M, segments + document_M)

    boundaries_before = b.cumsum(0) - b
    before_document = boundaries_before.index_select(0, cu_seqlens.index_select(0, document_M))
    c_M = boundaries_before - before_document
    w_M = 1 + c_M - c_M.detach()

    rows = segments + documents
    weights = w_M.new_zeros(rows, 1).index_add(0, row_M, w_M[:, None])
    sums = _SumRows.apply(h, w_M, row_M, rows)
    return sums, weights, segment_cu_seqlens.to(torch.int32)


def add_open_segments(sums: Tensor, segment_cu_seqlens: Tensor, open_sums: Tensor) -> Tensor:
    """Add the sums [B, D] of the segments that the last decoding step left open to the sums
    [N + B, D] of this step, see sum_segments. A document's first segment continues its open one."""
    open_row_B = torch.arange(len(sums) - len(open_sums), len(sums), device=sums.device)
    has_finished_B = segment_cu_seqlens.diff() > 0
    row_B = torch.where(has_finished_B, segment_cu_seqlens[:-1], open_row_B)
    return sums.index_add(0, row_B, open_sums)


class _SumRows(torch.autograd.Function):
    """Multiply rows h [M, D] by weights [M] and sum them by target row [M], to [rows, D].

    Unlike autograd's own, it does not save the products."""

    @staticmethod
    def forward(ctx, h, weight, row, rows):
        ctx.save_for_backward(h, weight, row)
        products = weight[:, None] * h
        return products.new_zeros(rows, h.shape[1]).index_add_(0, row, products)

    @staticmethod
    def backward(ctx, grad):
        h, weight, row = ctx.saved_tensors
        grad = grad.index_select(0, row)
        grad_weight = (grad * h).sum(1)
        return grad.mul_(weight[:, None]).to(h.dtype), grad_weight, None, None


def unpool_segments(
    z: Tensor,
    null: Tensor,
    b: Tensor,
    cu_seqlens: Tensor,
    segment_cu_seqlens: Tensor,
    offset: Tensor | None = None,
    back: int = 0,
) -> Tensor:
    """Give each byte the last segment of its document that ended at or before it, [M, D].

    z [N, D]; b [M], which gets no gradient; cu_seqlens and segment_cu_seqlens int32 [B + 1]. null
    [D] or [B, D]: for bytes before a document's first boundary. With `offset` [M] a segment has a
    row per segment offset, z [N, O, D], null [O, D] or [B, O, D], and a byte gets the row of its
    offset. `back`: take the segment that many before."""
    document_M, ended_M = _documents_and_segments(b, cu_seqlens)
    ended_M = ended_M - back
    null = null.view(-1, *z.shape[1:])
    null_output = len(null)  # 1 or B
    rows = torch.cat((null.to(z.dtype), z))
    has_segment = ended_M > segment_cu_seqlens.index_select(0, document_M)
    row_of_segment = null_output + ended_M - 1
    row_of_null = document_M.clamp_max(null_output - 1)
    row_M = torch.where(has_segment, row_of_segment, row_of_null)
    if offset is not None:
        row_M = row_M * z.shape[1] + offset
        rows = rows.flatten(0, 1)
    return rows.index_select(0, row_M)


def segment_offsets(
    boundary_M: Tensor, start_M: Tensor, count: int, open_bytes: Tensor | int = 0
) -> Tensor:
    """Return each byte's segment offset, its distance from a boundary: int64 [M].

    It is 0 at the boundary and at most count - 1. boundary_M: see last_boundary. start_M: the first
    byte of each byte's document, from which bytes before its first boundary count. open_bytes [M]:
    in decoding, earlier bytes since the last boundary."""
    byte_M = torch.arange(len(boundary_M), device=boundary_M.device)
    before_start_M = start_M - 1 - open_bytes
    origin_M = torch.where(boundary_M < start_M, before_start_M, boundary_M)
    return (byte_M - origin_M).clamp_max(count - 1)


def last_boundary(b: Tensor) -> Tensor:
    """Return the last byte at or before each byte where b [M] is 1, int64 [M]; -1 before the
    first."""
    byte_M = torch.arange(len(b), device=b.device)
    return torch.where(b.detach() > 0, byte_M, -1).cummax(0).values


def boundary_before_last(b: Tensor) -> Tensor:
    """Return the boundary before the last one, int64 [M]; -1 before the second."""
    last_M = last_boundary(b)
    last_before_M = F.pad(last_M, (1, -1), value=-1)  # not at the byte itself
    return last_before_M.index_select(0, last_M.clamp_min(0))


def segment_ends(b: Tensor, rows: int) -> Tensor:
    """Return the last byte of each segment, int64 [rows], from boundaries b [M].

    rows: N or more; the last byte of the rows after N, which are padding, is 0."""
    byte_M = torch.arange(len(b), device=b.device)
    segment_M = b.detach().round().long().cumsum(0) - 1
    row_M = torch.where(b.detach() > 0, segment_M, rows)  # bytes inside segments: a row to drop
    return byte_M.new_zeros(rows + 1).index_copy_(0, row_M, byte_M)[:rows]


def _documents_and_segments(b: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each byte, int64 [M], its document, and the number of segments that ended at or
    before it, counted over all documents."""
    byte_M = torch.arange(len(b), device=b.device)
    document_M = torch.searchsorted(cu_seqlens[1:], byte_M, right=True)
    ended_M = b.detach().round().long().cumsum(0)
    return document_M, ended_M
