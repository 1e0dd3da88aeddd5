"""Packed rows: document boundaries, padding for attention kernels, active rows."""

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenizer import BOS_ID, EOS_ID


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


@dataclass
class Packing:
    """The document of each packed row, and the inputs of attention that follow from it."""
    cu_seqlens: Tensor                    # int32 [documents + 1], first row of each document, and the number of rows
    document: Tensor                      # int64 [rows]
    position: Tensor                      # int64 [rows], row within its document, including earlier steps' rows
    longest: int                          # upper bound of rows in a document
    cos: Tensor                           # [rows, 1, qk_rope_head_dim], of both halves
    sin: Tensor                           # the same, negative in the first half
    buckets: list[tuple[int, int]] | None  # (documents, padded length) of each padded batch; None: varlen kernel
    padded_row: Tensor | None             # int64 [rows], each row's index in the padded batches; None: the same
    window: int                           # attention window in rows, including the row itself; 0: unlimited

    @classmethod
    def build(cls, cu_seqlens: Tensor, rows: int, bound: int, config, dtype: torch.dtype,
              window: int = 0, before: Tensor | None = None) -> "Packing":
        """Build the packing of `rows` rows with cu_seqlens int32 [documents + 1] and documents of at most `bound` rows.
        config: has qk_rope_head_dim and rope_theta; dtype: of attention; before [documents]: rows of earlier decoding
        steps."""
        device = cu_seqlens.device
        row = torch.arange(rows, device=device)
        if before is not None and rows == len(before) and bound == 1:                        # one row per document
            document, position = row, before
        else:
            document = torch.searchsorted(cu_seqlens[1:], row, right=True)
            position = row - (cu_seqlens if before is None else cu_seqlens[:-1] - before).index_select(0, document)
        buckets = padded_row = None
        if before is None and (device.type == "cpu" or dtype not in (torch.bfloat16, torch.float16)):
            buckets, start = fill_up(cu_seqlens.diff(), bound)
            padded_row = None if start is None else start.index_select(0, document) + position
        frequency, signed = frequencies(config.qk_rope_head_dim, config.rope_theta, device)
        position_of = position[:, None, None]
        cos, sin = (position_of * frequency).cos().to(dtype), (position_of * signed).sin().to(dtype)
        return cls(cu_seqlens, document, position, bound, cos, sin, buckets, padded_row, window)


@cache
def frequencies(width: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the rotary frequencies of both halves, [width], and the same with the first half negated."""
    with torch.inference_mode(False):
        frequency = theta ** -(torch.arange(0, width, 2, device=device) / width)
        return torch.cat((frequency, frequency)), torch.cat((-frequency, frequency))


SMALL_PRODUCT = 1 << 16                   # scores per head that take as long as the overhead of one more product


def fill_up(lengths: Tensor, bound: int) -> tuple[list[tuple[int, int]], Tensor | None]:
    """Sort documents of lengths [documents] into buckets, each padded to its longest document. Padding at most doubles
    the rows and adds half as many scores (which determine the time of attention) or SMALL_PRODUCT.

    Returns (documents, length) of each bucket, the longest first, and the padded start of each document, int64
    [documents], or None if nothing moves. To limit the number of kernels, lengths are powers of two, multiples of 16
    from 16 on, or the bound. Waits for the device.
    """
    kinds, counts = (tensor.flip(0).tolist() for tensor in torch.unique(lengths[lengths > 0], return_counts=True))
    buckets, shortest, rows, scores = [], [], 0, 0                                           # of the last bucket
    for kind, count in zip(kinds, counts):
        documents, size = buckets[-1] if buckets else (0, 0)
        documents, rows, scores = documents + count, rows + kind * count, scores + kind * kind * count
        if buckets and documents * size <= 2 * rows and documents * size * size <= 1.5 * scores + SMALL_PRODUCT:
            buckets[-1], shortest[-1] = (documents, size), kind
        else:
            size = 1 << (kind - 1).bit_length() if kind < 16 else round_up(kind, 16)
            buckets.append((count, min(size, bound)))
            shortest.append(kind)
            rows, scores = kind * count, kind * kind * count
    if len(buckets) == 1 and rows == buckets[0][0] * buckets[0][1]:
        return buckets, None
    bucket = (lengths[:, None] < lengths.new_tensor(shortest)).sum(1)
    size = lengths.new_tensor([size for _, size in buckets] + [0]).index_select(0, bucket).long()  # 0: empty
    order = bucket.argsort(stable=True)
    start = torch.empty_like(size)
    start[order] = F.pad(size[order].cumsum(0), (1, -1))
    return buckets, start


def document_starts(input_ids: Tensor) -> Tensor:
    """Mark the starts of documents in [B, T]: BOS, and bytes after EOS; bool [B, T]."""
    starts = input_ids == BOS_ID
    starts[:, 1:] |= input_ids[:, :-1] == EOS_ID
    return starts


def document_cu_seqlens(input_ids: Tensor) -> Tensor:
    """Return cu_seqlens of the documents in [B, T], int32 [documents + 1]; every row starts one."""
    starts = document_starts(input_ids)
    starts[:, 0] = True
    return F.pad(starts.flatten().nonzero().squeeze(1), (0, 1), value=input_ids.numel()).to(torch.int32)


@dataclass
class ActiveRows:
    """The segments that are still in the core: the rows that a loop computes. Later segments read the others as their
    last loop left them.

    With `index`, only these rows are computed. To avoid waiting for their number on the host, `mask` computes all N
    rows and selects the results. With neither, all rows are active.
    """
    index: Tensor | None = None           # int64 [n], ascending
    mask: Tensor | None = None            # bool [N]
    halted: Tensor | None = None          # bool [n]: computed once more, for later segments to read

    def pick(self, x: Tensor) -> Tensor:
        """Select the computed rows, [N, ...] -> [n, ...]."""
        return x if self.index is None else x.index_select(0, self.index)

    def spread(self, x: Tensor, rows: int) -> Tensor:
        """Scatter [n, D] to [rows, D]; other rows are zero."""
        return x if self.index is None else x.new_zeros(rows, x.shape[1]).index_copy(0, self.index, x)

    def merge(self, before: Tensor | None, x: Tensor) -> Tensor:
        """Update the active rows of `before` [N, D] by x [n, D]."""
        if self.index is not None:
            return before.index_copy(0, self.index, x)
        return x if self.mask is None else torch.where(self.mask[:, None], x, before)


ALL_ROWS = ActiveRows()
