"""Packed rows: documents without padding.

A batch is [rows, hidden_size]; `cu_seqlens` marks where documents start, so memory grows with the
number of bytes and documents do not see each other."""

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
