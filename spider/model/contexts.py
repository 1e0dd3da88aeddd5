"""Contexts: hashes of some of the last bytes, which the memories look up.

A context is named after its span, counted back from a byte:

    3        the last three bytes
    1-4      the three bytes before the last byte
    word1    the bytes after the last end of a word: mostly the current word so far
    word2    the bytes after the second-to-last end: mostly two words
    word1-2  the bytes between these two ends: the previous word alone
    above    the last byte, and in the previous line the bytes above it and above the next two

The end of a word is found within 31 bytes, the beginning of the previous line within 255 bytes.

A full pass computes keys with torch on its device, decoding with NumPy on the host. Both run the
code of this file: `library_of` returns torch or numpy, whose functions here have the same names.

Shapes, as suffixes of names:
    L  bytes of a text
    M  bytes of the text whose contexts are looked up
    W  last bytes, the newest first
    X  contexts
"""

import operator
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from spider.config import MAX_CONTEXT_BYTES, REACH, span_of
from spider.vocabulary import PAD_ID

# Hashes of spans are polynomials in BASE mod 2^64. BASE is odd, so that it has an inverse.
BASE = 0x1E3779B97F4A7C15
INVERSE = pow(BASE, -1, 1 << 64)

Integers: TypeAlias = Any  # int64 or bool: a tensor, or in decoding a NumPy array


def library_of(x: Integers) -> Any:
    """Return torch or numpy, the library of x."""
    return torch if isinstance(x, Tensor) else np


def to_device(x: Integers, device: torch.device) -> Tensor:
    """Copy numbers to a device; a tensor on the device is returned unchanged.

    The host does not wait for a few numbers. CUDA may wait to stage more, since the memory is not
    pinned."""
    if isinstance(x, np.ndarray):
        x = torch.from_numpy(x)
    return x.to(device, non_blocking=True)


def prepend(first: int, x: Integers) -> Integers:
    """Return x with another number before it, [L] -> [L + 1]."""
    library = library_of(x)
    start = library.full((1,), first, dtype=x.dtype, device=x.device)
    return library.concatenate((start, x))


def running_max(x: Integers) -> Integers:
    return x.cummax(0).values if isinstance(x, Tensor) else np.maximum.accumulate(x)


def take(x_XL: Integers, index_XM: Integers) -> Integers:
    """Take elements of each row of x, [X, M]."""
    if isinstance(x_XL, Tensor):
        return x_XL.gather(1, index_XM)
    return np.take_along_axis(x_XL, index_XM, 1)


def word_ends(ids_L: Integers, position_L: Integers) -> Integers:
    """Mark bytes that end a word: bytes that are not word bytes, but follow one. bool [L].

    position_L: positions in the document. Word bytes are letters, digits, _, UTF-8 continuation
    bytes, and the lead bytes of two-byte letters (from 0xC3 on: Latin, Greek, Cyrillic, Hebrew,
    Arabic). A Chinese character is therefore a word. SpaceByte (arXiv 2404.14408) has the same
    rule, except that _ and these lead bytes end a word."""
    lower_case = ids_L | 32  # if the byte is a letter
    is_letter = (lower_case >= ord("a")) & (lower_case <= ord("z"))
    is_digit = (ids_L >= ord("0")) & (ids_L <= ord("9"))
    is_underscore = ids_L == ord("_")
    is_utf8 = (ids_L >= 0x80) & (ids_L < 0xE0) & (ids_L != 0xC2)
    is_word_byte = is_letter | is_digit | is_underscore | is_utf8
    after_word_byte = prepend(False, is_word_byte[:-1]) & (position_L > 0)
    return after_word_byte & ~is_word_byte


class PastBytes:
    """The bytes of a text up to each of M bytes, within their documents.

    The hash of bytes a to b - 1 comes from prefix sums over the text, mod 2^64:

        S[l] = sum over k < l of (byte k + 1) * BASE^(k + 1)
        hash(a, b) = (S[b] - S[a]) * BASE^-b

    So equal bytes have equal hashes wherever they are. In the six bytes `xab ab`, a is 97, b is 98:

        hash(1, 3) = (98 * BASE^2 + 99 * BASE^3) * BASE^-3 = 98 * BASE^-1 + 99
        hash(4, 6) = (98 * BASE^5 + 99 * BASE^6) * BASE^-6 = 98 * BASE^-1 + 99
    """

    def __init__(self, ids_L: Integers, position_L: Integers, index_M: Integers):
        """ids_L: int64. position_L: int64, each byte's position in its document. index_M: int64,
        the M bytes' indices in the text."""
        self.library = library_of(ids_L)
        self.ids = ids_L
        self.position = position_L
        self.index = index_M
        self.position_M = position_L[index_M]
        self.newest_ends_of: dict[str, Integers] = {}  # by unit: word or line
        self.key_of: dict[str, Integers] = {}  # by context

    def select(self, chosen: Integers) -> "PastBytes":
        """Keep only some of the M bytes. chosen: their indices among the M."""
        return PastBytes(self.ids, self.position, self.index[chosen])

    @cached_property
    def word_ends(self) -> Integers:
        """Mark the ends of words, bool [L]."""
        return word_ends(self.ids, self.position)

    @cached_property
    def sums(self) -> tuple[Integers, Integers]:
        """Compute S[l] and BASE^-l for each l, both [L + 1]."""
        power_L = self.library.full_like(self.ids, BASE).cumprod(0)
        inverse_L = self.library.full_like(self.ids, INVERSE).cumprod(0)
        return prepend(0, ((self.ids + 1) * power_L).cumsum(0)), prepend(1, inverse_L)

    def hash(self, begin_M: Integers, end_M: Integers) -> Integers:
        """Return hash(begin, end), int64 [M]."""
        sums, inverse = self.sums
        return (sums[end_M] - sums[begin_M]) * inverse[end_M]

    def newest_ends(self, unit: str) -> Integers:
        """Find the last end of a unit among the first l bytes, for each l from -1 to L: return how
        many bytes there are up to this end, itself included, or 0 without an end. [L + 2], index
        l + 1."""
        if unit not in self.newest_ends_of:
            ends_L = self.word_ends if unit == "word" else self.ids == ord("\n")
            count_L = self.library.arange(1, len(self.ids) + 1, device=self.ids.device)
            end_L = self.library.where(ends_L, count_L, 0)
            newest_L = running_max(end_L)
            self.newest_ends_of[unit] = prepend(0, prepend(0, newest_L))
        return self.newest_ends_of[unit]

    def since(self, unit: str, n: int) -> Integers:
        """Count the bytes after the n-th last end of a word or line, [M]; n if the unit is a byte.

        If the document has no such end within reach, return the largest count within reach."""
        if unit == "byte" or n == 0:
            return self.library.full_like(self.index, n)
        end_M = self.index + 2  # l + 1: the l bytes include the byte itself
        for _ in range(n):
            # c bytes up to an end: index c is l + 1 for the l = c - 1 bytes before the end.
            end_M = self.newest_ends(unit)[end_M]
        distance_M = self.index + 1 - end_M
        most = REACH[unit] - 1
        is_found = (distance_M <= self.position_M) & (distance_M < most)
        return self.library.where(is_found, distance_M, most)

    def span(self, context: str) -> tuple[Integers, Integers]:
        """Return where a context begins and ends in the text, both [M]. It may begin before the
        document."""
        if context == "above":
            return self.span_above()
        unit, first, last = span_of(context)
        after_M = self.index + 1
        return after_M - self.since(unit, last), after_M - self.since(unit, first)

    def span_above(self) -> tuple[Integers, Integers]:
        """Return where the bytes above the last byte and the next two begin and end, both [M].

            previous line    width = 10
                                 ^^^
            this line        heigh

        A line begins with the line break before it. If the previous line has one byte, or begins
        out of reach, return the last three bytes."""
        since_break_M = self.since("line", 1)
        since_second_M = self.since("line", 2)
        line_before_M = since_second_M - since_break_M  # its length: `above` is this far back
        is_found = (since_second_M < REACH["line"] - 1) & (line_before_M > 2)
        back_M = self.library.where(is_found, line_before_M, 2)
        begin_M = self.index - back_M
        return begin_M, begin_M + 3

    def key(self, context: str) -> Integers:
        """Return the key of a context, int64 [M]: the hash of its bytes. A context that begins
        before the document gets a key from its position alone."""
        if context not in self.key_of:
            begin_M, end_M = self.span(context)
            in_document = self.index - begin_M <= self.position_M
            begin_M = self.library.where(in_document, begin_M, 0)
            end_M = self.library.where(in_document, end_M, 0)
            hash_M = self.hash(begin_M, end_M)
            if context == "above":
                hash_M = hash_M + BASE * self.ids[self.index]
            self.key_of[context] = self.library.where(in_document, hash_M, -1 - self.position_M)
        return self.key_of[context]

    @cached_property
    def last_bytes(self) -> Integers:
        """Return the last 32 bytes up to each byte, the newest first, PAD before the document:
        [32, M]."""
        back_W1 = self.library.arange(MAX_CONTEXT_BYTES, device=self.ids.device)[:, None]
        in_document = back_W1 <= self.position_M
        index_WM = self.library.where(in_document, self.index - back_W1, 0)
        return self.library.where(in_document, self.ids[index_WM], PAD_ID)

    def keys(self, contexts: tuple[str, ...], multiplier: Integers) -> Integers:
        """Return the key of each context, int64 [X, M]. The key of the last n bytes is the XOR over
        k < n of byte k * multiplier[k], where byte 0 is the newest.

        multiplier: int64, odd, one for each byte of the longest context."""
        longest = max((int(name) for name in contexts if name.isdecimal()), default=0)
        products = self.last_bytes[:longest] * multiplier[:longest, None]
        of_last_bytes = [*accumulate(products, operator.xor)]
        keys = [
            of_last_bytes[int(name) - 1] if name.isdecimal() else self.key(name)
            for name in contexts
        ]
        return self.library.stack(keys)
