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
    offsets: int = 1,
    back: int = 0,
) -> Tensor:
    """Give each byte the last segment of its document that ended at or before it: [M, D].

    z [N, O * D], a segment's output at each offset. null [O * D], for bytes before a document's
    first boundary. b [M], which gets no gradient. cu_seqlens and segment_cu_seqlens int32 [B + 1].
    offsets: O. back: give each byte the segment this many before the last.

    A byte's offset is its distance from the end of its segment, at most O - 1. Before the first
    boundary, count as if one preceded the document."""
    document_M, ended_M = _documents_and_segments(b, cu_seqlens)
    ended_M = ended_M - back
    has_segment = ended_M > segment_cu_seqlens.index_select(0, document_M)
    segment_M = torch.where(has_segment, ended_M, 0)  # counted from 1; 0: null

    end_M = F.pad(segment_ends(b, len(z)), (1, 0)).index_select(0, segment_M)
    end_M = torch.where(has_segment, end_M, cu_seqlens.index_select(0, document_M) - 1)
    byte_M = torch.arange(len(b), device=b.device)
    offset_M = (byte_M - end_M).clamp_max(offsets - 1)
    outputs = torch.cat((null[None].to(z.dtype), z)).unflatten(1, (offsets, -1)).flatten(0, 1)
    return outputs.index_select(0, segment_M * offsets + offset_M)


def last_boundary(b: Tensor) -> Tensor:
    """Return the last boundary at or before each byte, int64 [M]; -1 before the first boundary."""
    byte_M = torch.arange(len(b), device=b.device)
    return torch.where(b.detach() > 0, byte_M, -1).cummax(0).values


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
