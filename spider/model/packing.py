"""Packed rows: documents without padding.

A batch is [rows, hidden_size]; `cu_seqlens` marks where documents start. So memory grows with the
number of bytes, and documents do not see each other.

Shapes, as suffixes of names:
    M  packed rows: bytes, or segments in the core
    B  documents
    R  width of a head's rotated part: qk_rope_head_dim
    n  active rows: those of the M rows that a loop computes
    D  hidden size
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spider.config import SpiderConfig
from spider.vocabulary import BOS_ID, EOS_ID

# --------------------------------------------------------------------------------------------------
# Documents


def check_ids(name: str, ids: Tensor, rows: int | None = None, length: int | None = None):
    """Raise ValueError unless ids are int64 [rows, length], not empty; None: any size."""
    fits = (
        ids.ndim == 2
        and ids.numel() > 0
        and rows in (None, ids.shape[0])
        and length in (None, ids.shape[1])
    )
    if not fits or ids.dtype != torch.int64:
        dtype = str(ids.dtype).removeprefix("torch.")
        raise ValueError(
            f"{name} must be int64 [{rows or 'B'}, {length or 'T'}], not empty; got {dtype} "
            f"{list(ids.shape)}"
        )


def document_starts(input_ids: Tensor) -> Tensor:
    """Mark the starts of documents: BOS, and bytes after EOS. [sequences, length] -> bool, the same
    shape."""
    starts = input_ids == BOS_ID
    starts[:, 1:] |= input_ids[:, :-1] == EOS_ID
    return starts


def document_cu_seqlens(input_ids: Tensor) -> Tensor:
    """Return cu_seqlens of the documents in [sequences, length], int32 [B + 1]. Every sequence
    starts a document."""
    starts = document_starts(input_ids)
    starts[:, 0] = True
    first_rows = starts.flatten().nonzero().squeeze(1)
    return F.pad(first_rows, (0, 1), value=input_ids.numel()).to(torch.int32)


def max_seqlen_of(cu_seqlens: Tensor, length: int) -> int:
    """Return an upper bound of the documents' lengths: a power of two, at least 16, but at most
    `length`.

    Attention's kernel launches blocks for so many rows of every document. cu_seqlens: on the
    host."""
    longest = int(cu_seqlens.diff().max())
    return min(length, max(16, next_power_of_two(longest)))


class Bucket(NamedTuple):
    """A padded batch of documents."""

    documents: int
    length: int  # rows of each document, padding included


@dataclass
class Packing:
    """The document of each packed row, and the inputs of attention that follow from it.

    Attention inside documents takes either `buckets`, on a CPU, or `extent`, for the
    variable-length kernel. In decoding both are None: the cache attends."""

    cu_seqlens: Tensor  # int32 [B + 1], first row of each document, and the number of rows
    document: Tensor  # int64 [M]
    position: Tensor  # int64 [M], row within its document, counting rows of earlier decoding steps
    max_seqlen: int  # upper bound of rows in a document
    cos: Tensor  # [M, 1, R], of both halves
    sin: Tensor  # [M, 1, R], negative in the first half
    buckets: list[Bucket] | None  # the padded batches
    padded_index: Tensor | None  # int64 [M], each row's index in these; None: the same
    window: int  # attention window in rows, including the row itself; 0: unlimited
    # [longest, 0]. Its size carries the bound into a compiled graph. An int would be a constant
    # there, and each other number another graph.
    extent: Tensor | None = None

    @classmethod
    def build(
        cls,
        cu_seqlens: Tensor,
        rows: int,
        bound: int,
        config: SpiderConfig,
        dtype: torch.dtype,
        window: int = 0,
        before: Tensor | None = None,
    ) -> "Packing":
        """Build the packing of `rows` rows in documents of at most `bound` rows.

        cu_seqlens int32 [B + 1]; dtype: of attention; before int64 [B]: in decoding, the rows of
        each document in earlier steps."""
        device = cu_seqlens.device
        row = torch.arange(rows, device=device)
        document = torch.searchsorted(cu_seqlens[1:], row, right=True)
        origin = cu_seqlens if before is None else cu_seqlens[:-1] - before  # position 0
        position = row - origin.index_select(0, document)

        buckets = None
        padded_index = None
        extent = None
        if before is None:
            has_kernel = device.type != "cpu" and dtype in (torch.bfloat16, torch.float16)
            if has_kernel:
                extent = torch.empty(bound, 0, device=device)
            else:
                buckets, start = pad_documents(cu_seqlens.diff(), bound)
                if start is not None:
                    padded_index = start.index_select(0, document) + position

        frequency, signed_frequency = rotary_frequencies(
            config.qk_rope_head_dim, config.rope_theta, device
        )
        position_M11 = position[:, None, None]
        return cls(
            cu_seqlens=cu_seqlens,
            document=document,
            position=position,
            max_seqlen=bound,
            cos=(position_M11 * frequency).cos().to(dtype),
            sin=(position_M11 * signed_frequency).sin().to(dtype),
            buckets=buckets,
            padded_index=padded_index,
            window=window,
            extent=extent,
        )


@cache
def rotary_frequencies(width: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the rotary frequencies of both halves, [width], and the same with the first half
    negated."""
    with torch.inference_mode(False):  # decoding may be the first to ask, and training the next
        frequency = theta ** -(torch.arange(0, width, 2, device=device) / width)
        return torch.cat((frequency, frequency)), torch.cat((-frequency, frequency))


# --------------------------------------------------------------------------------------------------
# The rows that a loop computes


@dataclass
class ActiveTokens:
    """The segments that are still in the core. Later segments read the other ones as their last
    loop left them.

    With `index`, layers compute only the active rows, n of M. Without it they compute all rows,
    and discard the results of the others.
    """

    mask: Tensor | None = None  # bool [M], the active rows; None: all
    index: Tensor | None = None  # int64 [n], the same rows, ascending
    running: Tensor | None = None  # bool [M], those that have not halted; None: all

    def select(self, x: Tensor) -> Tensor:
        """Select the rows to compute, [M, ...] -> [n, ...]."""
        if self.index is None:
            return x
        return x.index_select(0, self.index)

    def scatter(self, x: Tensor) -> Tensor:
        """Scatter computed rows [n, ...] to all rows [M, ...]; the others are zero."""
        if self.index is None:
            return x
        assert self.mask is not None
        return x.new_zeros(len(self.mask), *x.shape[1:]).index_copy(0, self.index, x)

    def merge(self, before_MD: Tensor | None, x_nD: Tensor) -> Tensor:
        """Replace the active rows of the loop before by x, return all rows [M, D].

        `before` is None in the first loop, in which all rows are active."""
        if before_MD is None or self.mask is None:
            return x_nD
        return torch.where(self.mask[:, None], self.scatter(x_nD), before_MD)


ALL_TOKENS = ActiveTokens()


# --------------------------------------------------------------------------------------------------
# Padded batches of documents

SMALL_PRODUCT = 1 << 16  # scores per head that take as long as the overhead of one more product


def pad_documents(lengths_B: Tensor, bound: int) -> tuple[list[Bucket], Tensor | None]:
    """Sort documents of these lengths into buckets, each padded to its longest document.

    Returns the buckets, the longest documents first, and the padded start of each document, int64
    [B], or None if padding moves no row. bound: of the lengths. Waits for the device."""
    present, counts = torch.unique(lengths_B[lengths_B > 0], return_counts=True)
    lengths_and_counts = zip(present.flip(0).tolist(), counts.flip(0).tolist(), strict=True)
    buckets, shortest = _fill_buckets(lengths_and_counts, bound)
    if len(buckets) == 1 and buckets[0].documents * buckets[0].length == int(lengths_B.sum()):
        return buckets, None

    # A document is behind every bucket whose shortest document is longer than it. An empty one is
    # behind all: it has a bucket of length 0.
    is_behind = lengths_B[:, None] < lengths_B.new_tensor(shortest)  # [B, buckets]
    bucket_B = is_behind.sum(1)
    padded_lengths = lengths_B.new_tensor([*(bucket.length for bucket in buckets), 0])
    size_B = padded_lengths.index_select(0, bucket_B).long()  # rows, padding included

    # Bucket by bucket, in the order of the batch: a document starts where those before it end.
    order = bucket_B.argsort(stable=True)
    start_in_order = F.pad(size_B[order].cumsum(0), (1, -1))
    start_B = torch.empty_like(size_B)
    start_B[order] = start_in_order
    return buckets, start_B


def _fill_buckets(
    lengths_and_counts: Iterable[tuple[int, int]], bound: int
) -> tuple[list[Bucket], list[int]]:
    """Divide documents, given as (length, number of such documents) from the longest down, into
    buckets; also return the shortest length in each.

    Padding at most doubles a bucket's rows. It adds at most half as many scores (which determine
    the time of attention), or SMALL_PRODUCT. To limit the number of kernels, padded lengths are
    powers of two below 16, multiples of 16 from 16 on, or the bound."""
    buckets: list[Bucket] = []
    shortest: list[int] = []
    rows = 0  # rows of the last bucket, without padding
    scores = 0
    for length, count in lengths_and_counts:
        if buckets:
            widened = Bucket(buckets[-1].documents + count, buckets[-1].length)
            padded_rows = widened.documents * widened.length
            more_rows = rows + length * count
            more_scores = scores + length * length * count
            few_rows = padded_rows <= 2 * more_rows
            few_scores = padded_rows * widened.length <= 1.5 * more_scores + SMALL_PRODUCT
            if few_rows and few_scores:
                buckets[-1] = widened
                shortest[-1] = length
                rows = more_rows
                scores = more_scores
                continue
        size = next_power_of_two(length) if length < 16 else round_up(length, 16)
        buckets.append(Bucket(count, min(size, bound)))
        shortest.append(length)
        rows = length * count
        scores = length * length * count
    return buckets, shortest


# --------------------------------------------------------------------------------------------------
# Numbers of rows


def mark_tokens_dynamic(*values: object):
    """Tell torch.compile of all tensors among the values that their number of rows varies."""
    for value in values:
        if isinstance(value, Tensor):
            torch._dynamo.maybe_mark_dynamic(value, 0)


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def next_power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n, for n from 1 on."""
    return 1 << (n - 1).bit_length()


def padding_multiple(n_bytes: int, max_seqlen: int) -> int:
    """Return the step in which the core's number of rows grows.

    n_bytes: of the batch; longest: upper bound of a document's bytes. Each number of rows needs its
    own kernels on a CPU, so there are few. It is a multiple of 16, as products in FP8 need it, and
    compiled layers would need other graphs for other numbers."""
    return round_up(max(1, min(max_seqlen, n_bytes // 64)), 16)
