"""Packed rows: where documents start, padding for attention kernels, active rows."""

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
    """The document of each packed row, and what attention needs of it."""
    cu_seqlens: Tensor                    # int32 [documents + 1], rows before each document's first one
    document: Tensor                      # int64 [rows]
    position: Tensor                      # int64 [rows], row within its document, earlier steps' rows included
    longest: int                          # an upper bound of rows in a document
    cos: Tensor                           # [rows, 1, qk_rope_head_dim], of both halves
    sin: Tensor                           # the same, negative in the first half
    buckets: list[tuple[int, int]] | None  # (documents, rows each is filled up to) of each product; None: one kernel
    padded_row: Tensor | None                   # int64 [rows], of a row, its row among the buckets' rows; None: its own
    window: int                           # rows that a row looks back on, its own included; 0: all of its document

    @classmethod
    def build(cls, cu_seqlens: Tensor, rows: int, bound: int, config, dtype: torch.dtype,
              window: int = 0, before: Tensor | None = None) -> "Packing":
        """Build the packing of cu_seqlens int32 [documents + 1] of `rows` rows, no document longer than `bound`; config
        has qk_rope_head_dim and rope_theta; dtype of attention; before [documents]: the rows that earlier steps of
        decoding brought."""
        device = cu_seqlens.device
        row = torch.arange(rows, device=device)
        if before is not None and rows == len(before) and bound == 1:                        # a row to each document
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
    """Return the angles of both halves of a rotary embedding at position 1, [width]; and the same, negative in the
    first half."""
    with torch.inference_mode(False):
        frequency = theta ** -(torch.arange(0, width, 2, device=device) / width)
        return torch.cat((frequency, frequency)), torch.cat((-frequency, frequency))


SMALL_PRODUCT = 1 << 16                   # scores of a head that take as long as one product more


def fill_up(lengths: Tensor, bound: int) -> tuple[list[tuple[int, int]], Tensor | None]:
    """Sort documents of lengths [documents] into buckets, each filled up to its longest one: its rows at most twice
    the documents' own, its scores, which attention's time goes by, at most half as many again, or a small product.

    Returns (documents, length) of each bucket, the longest first, and int64 [documents], where each document starts;
    None where that is where it starts already. Lengths are powers of two, from 16 on multiples of 16, or the bound:
    kernels are made once per size. Waits for the device.
    """
    kinds, counts = (part.flip(0).tolist() for part in torch.unique(lengths[lengths > 0], return_counts=True))
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
    size = lengths.new_tensor([size for _, size in buckets] + [0]).index_select(0, bucket).long()  # 0: of no rows
    order = bucket.argsort(stable=True)
    start = torch.empty_like(size)
    start[order] = F.pad(size[order].cumsum(0), (1, -1))
    return buckets, start


def document_starts(input_ids: Tensor) -> Tensor:
    """Mark where a document starts in [B, T]: at BOS and behind EOS; bool [B, T]."""
    starts = input_ids == BOS_ID
    starts[:, 1:] |= input_ids[:, :-1] == EOS_ID
    return starts


def document_cu_seqlens(input_ids: Tensor) -> Tensor:
    """Return where documents start in [B, T], each row's start included; int32 [documents + 1]."""
    starts = document_starts(input_ids)
    starts[:, 0] = True
    return F.pad(starts.flatten().nonzero().squeeze(1), (0, 1), value=input_ids.numel()).to(torch.int32)


@dataclass
class ActiveRows:
    """The segments that have not left the core: rows that a loop computes. Of the others, what later segments read
    stays as their last loop left it.

    Where the host knows `index`, they have left every product. Where it would have to wait for their number, all N rows
    are computed, and `mask` says whose results count. With neither, none has left.
    """
    index: Tensor | None = None           # int64 [n], ascending
    mask: Tensor | None = None            # bool [N]
    halted: Tensor | None = None          # bool [n]: computed once more, for what later segments read

    def pick(self, x: Tensor) -> Tensor:
        """Select from [N, ...] the rows that are computed, [n, ...]."""
        return x if self.index is None else x.index_select(0, self.index)

    def spread(self, x: Tensor, rows: int) -> Tensor:
        """Scatter [n, D] to [rows, D], zero where nothing was computed."""
        return x if self.index is None else x.new_zeros(rows, x.shape[1]).index_copy(0, self.index, x)

    def merge(self, before: Tensor | None, x: Tensor) -> Tensor:
        """Merge [n, D] into [N, D]: what was there before where nothing was computed, or where it does not count."""
        if self.index is not None:
            return before.index_copy(0, self.index, x)
        return x if self.mask is None else torch.where(self.mask[:, None], x, before)


ALL_ROWS = ActiveRows()
