"""Segments of bytes: pool bytes to segments, and unpool segments to bytes.

Let b_t be 1 if a segment ends with byte t, else 0. Within a document,

    c_t = sum of b_u over u < t          index of the segment that byte t belongs to
    w_t = 1 + c_t - stopgrad(c_t)        1, with the gradient of the index
    z_s = sum of w_t h_t / sum of w_t    over the bytes t with c_t = s: mean of segment s
    f_t = sum of b_u over u <= t         segments that have ended at or before byte t

Pooling returns z (FlexiTokens, arXiv 2507.12720). The gradient reaches b through w alone. Unpooling
gives byte t segment f_t - 1, the last segment that ended at or before it, so it is causal without a
shift. If f_t is 0, the byte gets a learned null output (-) instead.

    b_t              0 0 1 0 1 0 0
    c_t              0 0 0 1 1 2 2    the last two bytes are an open segment, which is not pooled;
    f_t              0 0 1 1 2 2 2    in decoding, later steps continue it
    segment f_t - 1  - - 0 0 1 1 1

Shapes, as suffixes of names:
    M  bytes
    N  segments
    B  documents
    D  hidden size
    O  segment offsets: a segment can have a different output at each distance from its end
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def pool_segments(h: Tensor, b: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Average the bytes of each finished segment, in O(M * D), with the gradient of the published
    dense einsum.

    h [M, D]; b [M] with a straight-through gradient; cu_seqlens int32 [B + 1]. Return z [N, D],
    documents in order, and segment_cu_seqlens int32 [B + 1]. This waits for the device."""
    document_M, ended_M = _documents_and_segments(b, cu_seqlens)
    segment_cu_seqlens = F.pad(ended_M, (1, 0)).index_select(0, cu_seqlens)
    segments = int(segment_cu_seqlens[-1])  # host synchronisation

    # The row of each byte in the sums: its segment if that has finished, else row N.
    segment_M = ended_M - b.detach().round().long()
    first_of_next = segment_cu_seqlens.index_select(0, document_M + 1)
    row_M = torch.where(segment_M < first_of_next, segment_M, segments)

    # c and w, whose gradient reaches b
    boundaries_before = b.cumsum(0) - b
    before_document = boundaries_before.index_select(0, cu_seqlens.index_select(0, document_M))
    c_M = boundaries_before - before_document
    w_M = 1 + c_M - c_M.detach()

    weights = w_M.new_zeros(segments + 1, 1).index_add(0, row_M, w_M[:, None])
    sums = _SumRows.apply(h, w_M, row_M, segments + 1)
    z_ND = sums[:segments] / weights[:segments]
    return z_ND.to(h.dtype), segment_cu_seqlens.to(torch.int32)


class _SumRows(torch.autograd.Function):
    """Add weight[m] * h[m] to row `row[m]` of the sums: [M, D] -> [rows, D].

    Unlike autograd, it does not save the products."""

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
    """Give each byte the last segment of its document that ended at or before it: [M, D].

    z [N, D]; b [M], which gets no gradient; cu_seqlens and segment_cu_seqlens int32 [B + 1]. null
    [D] or [B, D]: for bytes before a document's first boundary. offset [M]: the segment offset of
    each byte, if a segment has an output per offset: z [N, O, D], null [O, D] or [B, O, D]. back:
    give each byte the segment this many before the last."""
    document_M, ended_M = _documents_and_segments(b, cu_seqlens)
    ended_M = ended_M - back
    null = null.view(-1, *z.shape[1:])
    n_nulls = len(null)  # 1 or B
    rows = torch.cat((null.to(z.dtype), z))
    has_segment = ended_M > segment_cu_seqlens.index_select(0, document_M)
    row_of_segment = n_nulls + ended_M - 1
    row_of_null = document_M.clamp_max(n_nulls - 1)
    row_M = torch.where(has_segment, row_of_segment, row_of_null)
    if offset is not None:
        row_M = row_M * z.shape[1] + offset
        rows = rows.flatten(0, 1)
    return rows.index_select(0, row_M)


def segment_offsets(boundary_M: Tensor, start_M: Tensor, count: int) -> Tensor:
    """Return each byte's segment offset, int64 [M]: its distance from the last boundary, at most
    count - 1. Before the first boundary, count as if one preceded the document.

    boundary_M: from last_boundary. start_M: the first byte of each byte's document."""
    byte_M = torch.arange(len(boundary_M), device=boundary_M.device)
    origin_M = torch.where(boundary_M < start_M, start_M - 1, boundary_M)
    return (byte_M - origin_M).clamp_max(count - 1)


def last_boundary(b: Tensor) -> Tensor:
    """Return the last boundary at or before each byte, int64 [M]; -1 before the first boundary."""
    byte_M = torch.arange(len(b), device=b.device)
    return torch.where(b.detach() > 0, byte_M, -1).cummax(0).values


def boundary_before_last(b: Tensor) -> Tensor:
    """Return the boundary before each byte's last boundary, int64 [M]; -1 before the second."""
    last_M = last_boundary(b)
    last_before_M = F.pad(last_M, (1, -1), value=-1)  # not at the byte itself
    return last_before_M.index_select(0, last_M.clamp_min(0))


def segment_ends(b: Tensor, tokens: int) -> Tensor:
    """Return the last byte of each segment, int64 [tokens], from boundaries b [M].

    tokens: the number of segments, padding included; padding gets byte 0."""
    byte_M = torch.arange(len(b), device=b.device)
    segment_M = b.detach().round().long().cumsum(0) - 1
    # bytes inside segments go to an extra element, which is cut off
    token_M = torch.where(b.detach() > 0, segment_M, tokens)
    return byte_M.new_zeros(tokens + 1).index_copy_(0, token_M, byte_M)[:tokens]


def _documents_and_segments(b: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Return two int64 [M]: the document of each byte, and how many segments ended at or before it,
    counted over all documents."""
    byte_M = torch.arange(len(b), device=b.device)
    document_M = torch.searchsorted(cu_seqlens[1:], byte_M, right=True)
    ended_M = b.detach().round().long().cumsum(0)
    return document_M, ended_M
