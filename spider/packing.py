"""Packed rows: documents without padding, segments of bytes, the rows still in the core, the cache
of decoding.

A batch is [rows, hidden_size]; `cu_seqlens` marks where documents start, so memory grows with the
number of bytes and documents do not see each other. Shapes: M byte rows, N segments, D hidden size.
"""

import math
from copy import copy
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenizer import BOS_ID, EOS_ID

# --------------------------------------------------------------------------------------------------
# Documents


def document_starts(input_ids: Tensor) -> Tensor:
    """Mark the starts of documents in [B, T]: BOS, and bytes after EOS; bool [B, T]."""
    starts = input_ids == BOS_ID
    starts[:, 1:] |= input_ids[:, :-1] == EOS_ID
    return starts


def document_cu_seqlens(input_ids: Tensor) -> Tensor:
    """Return cu_seqlens of the documents in [B, T], int32 [documents + 1]; every row starts one."""
    starts = document_starts(input_ids)
    starts[:, 0] = True
    return F.pad(starts.flatten().nonzero().squeeze(1), (0, 1), value=input_ids.numel()).to(
        torch.int32
    )


def longest_bound(cu_seqlens: Tensor, length: int) -> int:
    """Return an upper bound of the documents' lengths: a power of two, at least 16, but at most
    `length`. Attention's kernel launches blocks for so many rows of every document. cu_seqlens: on
    the host."""
    longest = int(cu_seqlens.diff().max())
    return min(length, max(16, 1 << (longest - 1).bit_length()))


@dataclass
class Packing:
    """The document of each packed row, and the inputs of attention that follow from it."""

    cu_seqlens: Tensor  # int32 [documents + 1], first row of each document, and the number of rows
    document: Tensor  # int64 [rows]
    position: Tensor  # int64 [rows], row within its document, including earlier steps' rows
    longest: int  # upper bound of rows in a document
    cos: Tensor  # [rows, 1, qk_rope_head_dim], of both halves
    sin: Tensor  # the same, negative in the first half
    # (documents, padded length) of each padded batch; None: varlen kernel
    buckets: list[tuple[int, int]] | None
    # int64 [rows], each row's index in the padded batches; None: the same
    padded_row: Tensor | None
    window: int  # attention window in rows, including the row itself; 0: unlimited
    # [longest, 0]: its size carries the bound into a compiled graph, in which an int would be a
    # constant, and each other number another graph
    extent: Tensor | None = None

    @classmethod
    def build(
        cls,
        cu_seqlens: Tensor,
        rows: int,
        bound: int,
        config,
        dtype: torch.dtype,
        window: int = 0,
        before: Tensor | None = None,
    ) -> "Packing":
        """Build the packing of `rows` rows with cu_seqlens int32 [documents + 1] and documents of
        at most `bound` rows. config: has qk_rope_head_dim and rope_theta; dtype: of attention;
        before [documents]: rows of earlier decoding steps."""
        device = cu_seqlens.device
        row = torch.arange(rows, device=device)
        if before is not None and rows == len(before) and bound == 1:  # one row per document
            document, position = row, before
        else:
            document = torch.searchsorted(cu_seqlens[1:], row, right=True)
            position = row - (
                cu_seqlens if before is None else cu_seqlens[:-1] - before
            ).index_select(0, document)
        buckets = padded_row = extent = None
        if before is None and (
            device.type == "cpu" or dtype not in (torch.bfloat16, torch.float16)
        ):
            buckets, start = pad_documents(cu_seqlens.diff(), bound)
            padded_row = None if start is None else start.index_select(0, document) + position
        elif before is None:
            extent = torch.empty(bound, 0, device=device)
        frequency, signed = rotary_frequencies(config.qk_rope_head_dim, config.rope_theta, device)
        position_of = position[:, None, None]
        cos, sin = (position_of * frequency).cos().to(dtype), (position_of * signed).sin().to(dtype)
        return cls(
            cu_seqlens, document, position, bound, cos, sin, buckets, padded_row, window, extent
        )


@cache
def rotary_frequencies(width: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the rotary frequencies of both halves, [width], and the same with the first half
    negated."""
    with torch.inference_mode(False):
        frequency = theta ** -(torch.arange(0, width, 2, device=device) / width)
        return torch.cat((frequency, frequency)), torch.cat((-frequency, frequency))


SMALL_PRODUCT = 1 << 16  # scores per head that take as long as the overhead of one more product


def pad_documents(lengths: Tensor, bound: int) -> tuple[list[tuple[int, int]], Tensor | None]:
    """Sort documents of lengths [documents] into buckets, each padded to its longest document.
    Padding at most doubles the rows and adds half as many scores (which determine the time of
    attention) or SMALL_PRODUCT.

    Returns (documents, length) of each bucket, the longest first, and the padded start of each
    document, int64 [documents], or None if no row changes its place. To limit the number of
    kernels, lengths are powers of two, multiples of 16 from 16 on, or the bound. Waits for the
    device.
    """
    kinds, counts = (
        tensor.flip(0).tolist() for tensor in torch.unique(lengths[lengths > 0], return_counts=True)
    )
    buckets, shortest, rows, scores = [], [], 0, 0  # of the last bucket
    for kind, count in zip(kinds, counts, strict=True):
        documents, size = buckets[-1] if buckets else (0, 0)
        documents, rows, scores = (
            documents + count,
            rows + kind * count,
            scores + kind * kind * count,
        )
        if (
            buckets
            and documents * size <= 2 * rows
            and documents * size * size <= 1.5 * scores + SMALL_PRODUCT
        ):
            buckets[-1], shortest[-1] = (documents, size), kind
        else:
            size = 1 << (kind - 1).bit_length() if kind < 16 else round_up(kind, 16)
            buckets.append((count, min(size, bound)))
            shortest.append(kind)
            rows, scores = kind * count, kind * kind * count
    if len(buckets) == 1 and rows == buckets[0][0] * buckets[0][1]:
        return buckets, None
    bucket = (lengths[:, None] < lengths.new_tensor(shortest)).sum(1)
    # 0: empty
    size = lengths.new_tensor([size for _, size in buckets] + [0]).index_select(0, bucket).long()
    order = bucket.argsort(stable=True)
    start = torch.empty_like(size)
    start[order] = F.pad(size[order].cumsum(0), (1, -1))
    return buckets, start


def mark_rows_dynamic(*given):
    """Tell torch.compile of all tensors given that their number of rows varies."""
    for one in given:
        if isinstance(one, Tensor):
            torch._dynamo.maybe_mark_dynamic(one, 0)


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def row_step(n_bytes: int, longest: int) -> int:
    """Return the step in which the core's number of rows grows, for a batch of n_bytes in documents
    of at most `longest` bytes. Each number needs its own kernels on a CPU, so there are few;
    products in FP8 need multiples of 16, and compiled layers other graphs for other numbers."""
    return round_up(max(1, min(longest, n_bytes // 64)), 16)


# --------------------------------------------------------------------------------------------------
# Segments: pool their bytes, and unpool them to bytes. b [M] is 1 where a segment ends (0 or 1 in
# value)


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


# --------------------------------------------------------------------------------------------------
# Segments that have not halted


@dataclass
class ActiveRows:
    """The segments that are still in the core: the rows that a loop computes. Later segments read
    the others as their last loop left them.

    With `index`, only these rows are computed. To avoid waiting for their number on the host,
    `mask` computes all N rows and selects the results. With neither, all rows are active.
    """

    index: Tensor | None = None  # int64 [n], ascending
    mask: Tensor | None = None  # bool [N]
    halted: Tensor | None = None  # bool [n]: computed once more, for later segments to read

    def select(self, x: Tensor) -> Tensor:
        """Select the active rows, [N, ...] -> [n, ...]."""
        return x if self.index is None else x.index_select(0, self.index)

    def scatter(self, x: Tensor, rows: int) -> Tensor:
        """Scatter [n, D] to [rows, D]; other rows are zero."""
        return (
            x if self.index is None else x.new_zeros(rows, x.shape[1]).index_copy(0, self.index, x)
        )

    def merge(self, before: Tensor | None, x: Tensor) -> Tensor:
        """Update the active rows of `before` [N, D] by x [n, D]."""
        if self.index is not None:
            return before.index_copy(0, self.index, x)
        return x if self.mask is None else torch.where(self.mask[:, None], x, before)


ALL_ROWS = ActiveRows()


# --------------------------------------------------------------------------------------------------
# Decoding


def causal_mask(q: Tensor, m: int, window: int) -> Tensor:
    """Return the causal (and window) mask to add to scores [n, m] of the last n of m rows, q [...,
    n, width]: 0 or -inf."""
    n = q.shape[-2]
    hidden = q.new_full((n, m), -math.inf)
    return (
        hidden.triu(m - n + 1) + hidden.tril(m - n - window)
        if m > window
        else hidden.triu(m - n + 1)
    )


class Cache:
    """The rows of earlier decoding steps in a ring buffer: `held` [layers, loops, documents, slots,
    width], with row p of a document in slot p % slots. A loop's rows also count for later loops,
    until those put their own.

    before [documents]: rows of each document in earlier steps. window: rows that a row attends to,
    including itself; 0: all. There are twice as many slots as needed, so that rows are seldom
    moved; a single row's window has just its own.
    """

    def __init__(self, held: Tensor, packing: Packing, before: Tensor, window: int = 0):
        one = packing.longest == 1 and len(before) == 1  # a single row
        last = before if one else before + packing.cu_seqlens.diff() - 1  # [documents]
        rows = int(last.max()) + 1  # host synchronisation
        need = min(rows, window + packing.longest - 1) if window else rows
        exact = one and need == window  # exactly one slot per visible row
        if held.shape[3] != need if exact else not need <= held.shape[3] <= max(16, 4 * need):
            slot = torch.arange(need if exact else 2 * need, device=held.device)
            # the newest row p < before of each slot, p % slots == slot
            kept = before[:, None] - 1 - (before[:, None] - 1 - slot) % len(slot)
            held = held[
                :, :, torch.arange(len(before), device=held.device)[:, None], kept % held.shape[3]
            ]
        self.held, self.packing, self.layer, self.loop = held, packing, 0, 0
        self.slot = packing.position % held.shape[3]  # [N]
        if len(before) > 1:
            self.slot = self.slot + packing.document * held.shape[3]
        self.read, self.hidden = min(rows, held.shape[3]), None  # slots in use; their mask
        if not one:
            slot = torch.arange(self.read, device=held.device)
            # [documents, 1, read]
            stored = (last[:, None] - (last[:, None] - slot) % held.shape[3])[:, None]
            row = (before[:, None] + torch.arange(packing.longest, device=held.device))[:, :, None]
            self.hidden = (stored < 0) | (stored > row)  # [documents, longest, read]
            if window:
                self.hidden |= stored <= row - window
            self.padded_row = (
                packing.document * packing.longest
                + packing.position
                - before.index_select(0, packing.document)
            )

    def of(self, layer: int, loop: int = 0) -> "Cache":
        """Return a view for a layer and loop."""
        view = copy(self)
        view.layer, view.loop = layer, loop
        return view

    def put(self, x: Tensor) -> Tensor:
        """Store the step's rows [N, width]; return all rows of the loop, [documents, slots,
        width]."""
        held = self.held[self.layer, self.loop :]
        held.flatten(1, 2).index_copy_(1, self.slot, x.expand(len(held), -1, -1))
        return held[0]

    def look_back(self, distances: list[int]) -> "Cache":
        """Choose the distances, in rows, for `put_and_look_back`."""
        position = self.packing.position - torch.tensor(distances, device=self.held.device)[:, None]
        slots = self.held.shape[3]
        self.back = (self.packing.document * slots + position % slots).flatten()
        self.there = (position >= 0)[:, :, None]
        return self

    def put_and_look_back(self, x: Tensor) -> Tensor:
        """Store the step's rows [N, width]; return earlier ones [distances, N, width], zero before
        a document's start."""
        back = self.put(x).flatten(0, 1).index_select(0, self.back).view(-1, *x.shape)
        return torch.where(self.there, back, 0)

    def attend(self, q: Tensor, x: Tensor, scale: float, value_width: int) -> Tensor:
        """Attend from q [N, H, width] to the step's rows x [N, width] and all stored ones -> [N, H,
        value_width]. All heads share the rows; values are the first numbers of keys."""
        documents, longest, (rows, heads, width) = (
            len(self.packing.cu_seqlens) - 1,
            self.packing.longest,
            q.shape,
        )
        held = self.put(x)[:, : self.read]
        regular = documents * longest == rows
        if not regular:
            q = q.new_zeros(documents * longest, heads, width).index_copy(0, self.padded_row, q)
        q = q.reshape(documents, longest * heads, width)
        score = torch.baddbmm(q.new_zeros(()), q, held.mT, beta=0, alpha=scale)
        if self.hidden is not None:
            score.view(documents, longest, heads, -1).masked_fill_(
                self.hidden[:, :, None], -math.inf
            )
        out = torch.bmm(score.softmax(-1), held[..., :value_width]).view(
            documents * longest, heads, value_width
        )
        return out if regular else out.index_select(0, self.padded_row)


# --------------------------------------------------------------------------------------------------
# A pass through the core


@dataclass(frozen=True)
class CorePass:
    """The inputs of a forward pass through the core, other than the pooled segments z [N, D]."""

    packing: Packing  # of the segments
    last_bytes: Tensor  # int64 [K, N], the last bytes of each segment, see memory.shifted_bytes
    share: Tensor  # [N], 1 / segments, 0 for padding rows
    n_loops: int
    recompute: bool = False  # activation checkpointing of every visit of a layer
    warmup: float = 1.0  # factor on halting probabilities
    dropout: float = 0.0  # rate at both ends of the core
    noise: Tensor | None = None  # int64 [N], for dropout; None: no dropout
    latents: Cache | None = None  # in decoding: attention latents of earlier segments
    # in decoding: inputs of the Engram convolutions from earlier segments
    convolved: Cache | None = None
