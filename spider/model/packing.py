"""Packed tokens: documents without padding.

A token is what a layer sees: a byte in the byte layers, a segment in the core. A batch of tokens is
[tokens, hidden_size], and `cu_seqlens` marks where documents start. So memory grows with the number
of tokens, and documents do not see each other.

Shapes, as suffixes of names:
    M  packed tokens
    n  active tokens, the part of M that a loop computes
    B  documents
    D  hidden_size
    R  qk_rope_head_dim, the rotated numbers of a head
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from spider.config import SpiderConfig
from spider.model.contexts import Integers, to_device
from spider.vocabulary import BOS_ID, EOS_ID

# --------------------------------------------------------------------------------------------------
# Documents


def check_ids(name: str, ids: Tensor, rows: int | None = None, length: int | None = None):
    """Raise ValueError unless ids are int64 [rows, length] and not empty. None allows any size."""
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


def document_starts(input_ids: Integers) -> Integers:
    """Mark the starts of documents, which are BOS and the bytes after EOS: [sequences, length] ->
    bool [sequences, length]."""
    starts = input_ids == BOS_ID
    starts[:, 1:] |= input_ids[:, :-1] == EOS_ID
    return starts


def document_cu_seqlens(input_ids: Tensor) -> Tensor:
    """Return cu_seqlens of the documents in ids [sequences, length]: int32 [B + 1]. Every sequence
    starts a document."""
    starts = document_starts(input_ids)
    starts[:, 0] = True
    first_tokens = starts.flatten().nonzero().squeeze(1)
    return F.pad(first_tokens, (0, 1), value=input_ids.numel()).to(torch.int32)


def max_seqlen_of(cu_seqlens: Tensor, length: int) -> int:
    """Return an upper bound of the documents' lengths: a power of two, at least 16, or `length` if
    that is less.

    Attention's kernel launches blocks for this many tokens of every document. cu_seqlens: on the
    host."""
    max_seqlen = int(cu_seqlens.diff().max())
    return min(length, max(16, next_power_of_two(max_seqlen)))


class Bucket(NamedTuple):
    """A padded batch of documents."""

    documents: int
    length: int  # tokens of each document, padding included


class StepTokens:
    """The tokens of a decoding step, M in B documents: int64 NumPy arrays, on the host."""

    def __init__(self, length: np.ndarray, before: np.ndarray):
        """length [B]: the step's tokens of each document. before [B]: those of earlier steps."""
        self.length = length
        self.before = before
        self.document = np.arange(len(length)).repeat(length)  # [M]
        first = length.cumsum() - length
        # [M], each token's index in its document's tokens of the step
        self.index_in_step = np.arange(len(self.document)) - first[self.document]
        self.position = before[self.document] + self.index_in_step  # [M], in the document
        self.max_seqlen = int(length.max())
        # whether there is only one token, as in sampling one text
        self.is_single = len(length) == len(self.document) == 1


@dataclass
class Packing:
    """The document of each packed token, and what attention needs to know about documents.

    Three ways to attend use different fields:

        in bf16 or fp16 on a GPU   max_seqlen_as_size, see attend_varlen
        else                       buckets and padded_index, see attend_padded
        in decoding                none of them, see LatentCache
    """

    cu_seqlens: Tensor  # int32 [B + 1], each document's first token, then the number of tokens
    document: Tensor  # int64 [M]
    position: Tensor  # int64 [M], in the document, counting tokens of earlier decoding steps
    max_seqlen: int  # upper bound of a document's tokens
    cos: Tensor  # [M, 1, R], for both halves
    sin: Tensor  # [M, 1, R], negative in the first half
    window: int = 0  # tokens that a token attends to, itself included; 0: all
    buckets: list[Bucket] | None = None  # the padded batches
    # int64 [M], each token's index in them; None: nothing is padded
    padded_index: Tensor | None = None
    # [max_seqlen, 0]. Its size carries max_seqlen into compiled graphs, where sizes are dynamic. An
    # int would be a constant of the graph, and every new value would need a new graph.
    max_seqlen_as_size: Tensor | None = None

    @classmethod
    def build(
        cls,
        cu_seqlens: Tensor,
        tokens: int,
        max_seqlen: int,
        config: SpiderConfig,
        dtype: torch.dtype,
        window: int = 0,
    ) -> "Packing":
        """Build the packing of `tokens` tokens of a full pass.

        cu_seqlens: int32 [B + 1]. dtype: for attention."""
        device = cu_seqlens.device
        token = torch.arange(tokens, device=device)
        document = torch.searchsorted(cu_seqlens[1:], token, right=True)
        position = token - cu_seqlens.index_select(0, document)

        cos, sin = cos_and_sin(position, config, dtype)
        packing = cls(cu_seqlens, document, position, max_seqlen, cos, sin, window)
        has_kernel = device.type != "cpu" and dtype in (torch.bfloat16, torch.float16)
        if has_kernel:
            packing.max_seqlen_as_size = torch.empty(max_seqlen, 0, device=device)
        else:
            packing.buckets, start = pad_documents(cu_seqlens.diff(), max_seqlen)
            if start is not None:
                packing.padded_index = start.index_select(0, document) + position
        return packing

    @classmethod
    def of_step(
        cls, step: StepTokens, config: SpiderConfig, dtype: torch.dtype, device: torch.device
    ) -> "Packing":
        """Build the packing of a decoding step. dtype: for attention."""
        cu_seqlens = np.append(0, step.length.cumsum()).astype(np.int32)
        document = to_device(step.document, device)
        position = to_device(step.position, device)
        cos, sin = cos_and_sin(position, config, dtype)
        return cls(to_device(cu_seqlens, device), document, position, step.max_seqlen, cos, sin)


def cos_and_sin(
    position_M: Tensor, config: SpiderConfig, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return Packing's cos and sin of positions."""
    frequency, signed_frequency = rotary_frequencies(
        config.qk_rope_head_dim, config.rope_theta, position_M.device
    )
    position_M11 = position_M[:, None, None]
    cos = (position_M11 * frequency).cos().to(dtype)
    return cos, (position_M11 * signed_frequency).sin().to(dtype)


@cache
def rotary_frequencies(width: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the rotary frequencies of both halves, [width], and the same with the first half
    negated."""
    with torch.inference_mode(False):  # decoding may fill the cache, and training use it
        frequency = theta ** -(torch.arange(0, width, 2, device=device) / width)
        return torch.cat((frequency, frequency)), torch.cat((-frequency, frequency))


# --------------------------------------------------------------------------------------------------
# The tokens that a loop computes


@dataclass
class ActiveTokens:
    """The segments that are still in the core. Later segments read halted segments as their last
    loop left them.

    With `index`, layers compute only the active tokens, n of M. Without `index`, layers compute all
    tokens and discard the results of the inactive ones.
    """

    mask: Tensor | None = None  # bool [M], the active tokens; None: all
    index: Tensor | None = None  # int64 [n], the active tokens, ascending
    running: Tensor | None = None  # bool [M], tokens that have not halted; None: all

    def select(self, x: Tensor) -> Tensor:
        """Select the tokens to compute: [M, ...] -> [n, ...]."""
        if self.index is None:
            return x
        return x.index_select(0, self.index)

    def scatter(self, x: Tensor) -> Tensor:
        """Scatter computed tokens [n, ...] to all tokens [M, ...]; uncomputed tokens are zero."""
        if self.index is None:
            return x
        assert self.mask is not None
        return x.new_zeros(len(self.mask), *x.shape[1:]).index_copy(0, self.index, x)

    def merge(self, before_MD: Tensor | None, x_nD: Tensor) -> Tensor:
        """Return all tokens [M, D]: active ones from x, inactive ones from the previous loop.

        before is None in the first loop, when all tokens are active."""
        if before_MD is None or self.mask is None:
            return x_nD
        return torch.where(self.mask[:, None], self.scatter(x_nD), before_MD)


ALL_TOKENS = ActiveTokens()


# --------------------------------------------------------------------------------------------------
# Padded batches of documents

SMALL_PRODUCT = 1 << 16  # scores per head that take as long as the overhead of another product


def pad_documents(lengths_B: Tensor, max_seqlen: int) -> tuple[list[Bucket], Tensor | None]:
    """Divide documents into buckets, each padded to one length. Waits for the device.

    Returns the buckets, those of the longest documents first, and the start of each document among
    all padded tokens, int64 [B], or None if nothing is padded.

        lengths_B    5  40   3  33
        buckets     [3 documents of 48, 1 of 4]
        start_B      0  48 144  96
    """
    present, counts = torch.unique(lengths_B[lengths_B > 0], return_counts=True)
    lengths_and_counts = zip(present.flip(0).tolist(), counts.flip(0).tolist(), strict=True)
    buckets, shortest = _fill_buckets(lengths_and_counts, max_seqlen)
    if len(buckets) == 1 and buckets[0].documents * buckets[0].length == int(lengths_B.sum()):
        return buckets, None

    # The number of buckets with only longer documents is the index of a document's bucket. An empty
    # document comes after all buckets, and has length 0.
    is_shorter = lengths_B[:, None] < lengths_B.new_tensor(shortest)  # [B, buckets]
    bucket_B = is_shorter.sum(1)
    padded_lengths = lengths_B.new_tensor([*(bucket.length for bucket in buckets), 0])
    size_B = padded_lengths.index_select(0, bucket_B).long()  # tokens, padding included

    # Bucket by bucket, and in the order of the batch inside a bucket.
    order = bucket_B.argsort(stable=True)
    start_in_order = F.pad(size_B[order].cumsum(0), (1, -1))
    start_B = torch.empty_like(size_B)
    start_B[order] = start_in_order
    return buckets, start_B


def _fill_buckets(
    lengths_and_counts: Iterable[tuple[int, int]], max_seqlen: int
) -> tuple[list[Bucket], list[int]]:
    """Divide documents into buckets; also return the shortest length in each bucket.

    lengths_and_counts: (length, number of documents of this length), from the longest down.

    A bucket's padded length is its longest length, rounded up to a power of two below 16, and to a
    multiple of 16 above (max_seqlen at most), so that there are few different kernels. Shorter
    documents join the bucket as long as both hold:

        padded tokens <= 2 * tokens
        padded scores <= 1.5 * scores + SMALL_PRODUCT       scores determine attention's time
    """
    buckets: list[Bucket] = []
    shortest: list[int] = []
    tokens = 0  # tokens of the last bucket, without padding
    scores = 0
    for length, count in lengths_and_counts:
        more_tokens = length * count
        more_scores = length * more_tokens
        if buckets:
            widened = Bucket(buckets[-1].documents + count, buckets[-1].length)
            padded_tokens = widened.documents * widened.length
            padded_scores = padded_tokens * widened.length
            few_tokens = padded_tokens <= 2 * (tokens + more_tokens)
            few_scores = padded_scores <= 1.5 * (scores + more_scores) + SMALL_PRODUCT
            if few_tokens and few_scores:
                buckets[-1] = widened
                shortest[-1] = length
                tokens += more_tokens
                scores += more_scores
                continue
        padded = next_power_of_two(length) if length < 16 else round_up(length, 16)
        buckets.append(Bucket(count, min(padded, max_seqlen)))
        shortest.append(length)
        tokens = more_tokens
        scores = more_scores
    return buckets, shortest


# --------------------------------------------------------------------------------------------------
# Numbers of tokens


def mark_tokens_dynamic(*values: object):
    """Mark the first dimension of all tensors among the values as dynamic for torch.compile: the
    number of tokens, or of documents."""
    for value in values:
        if isinstance(value, Tensor):
            torch._dynamo.maybe_mark_dynamic(value, 0)


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def next_power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n >= 1."""
    return 1 << (n - 1).bit_length()


def padding_multiple(n_bytes: int, max_seqlen: int) -> int:
    """Return the multiple to which the core's segments are padded.

    n_bytes: bytes of the batch. max_seqlen: upper bound of a document's bytes. Few different
    numbers of segments mean few different kernels on a CPU, and few graphs of compiled layers.
    Products in FP8 need multiples of 16."""
    return round_up(max(1, min(max_seqlen, n_bytes // 64)), 16)
