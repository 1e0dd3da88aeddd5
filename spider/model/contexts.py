"""Contexts: hashes of some of the last bytes, which the memories look up.

A context is named after its span, counted back from a byte:

    3        the last three bytes
    1-4      the three bytes before the last byte
    word1    the bytes after the last end of a word: mostly the current word so far
    word2    the bytes after the second-to-last end: mostly two words
    word1-2  the bytes between these two ends: the previous word alone
    above    the last byte, and in the previous line the bytes above it and above the next two

The end of a word is found within 31 bytes, the beginning of the previous line within 255 bytes.

Shapes, as suffixes of names:
    L  bytes of a text
    M  bytes of the text whose contexts are looked up
    W  last bytes, the newest first
    X  contexts
"""

import operator
from functools import cached_property
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from spider.config import REACH, span_of
from spider.vocabulary import PAD_ID

# Hashes of spans are polynomials in BASE mod 2^64. BASE is odd, so that it has an inverse.
BASE = 0x1E3779B97F4A7C15
INVERSE = pow(BASE, -1, 1 << 64)


def word_ends(ids_L: Tensor, position_L: Tensor) -> Tensor:
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
    after_word_byte = F.pad(is_word_byte[:-1], (1, 0)) & (position_L > 0)
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

    def __init__(self, ids_L: Tensor, position_L: Tensor, index_M: Tensor):
        """ids_L: int64. position_L: int64, each byte's position in its document. index_M: int64,
        the M bytes' indices in the text."""
        self.ids = ids_L
        self.position = position_L
        self.index = index_M
        self.position_M = position_L.index_select(0, index_M)
        self.newest_ends_of: dict[str, Tensor] = {}  # by unit: word or line
        self.key_of: dict[str, Tensor] = {}  # by context

    def select(self, chosen: Tensor) -> "PastBytes":
        """Keep only some of the M bytes. chosen: their indices among the M."""
        return PastBytes(self.ids, self.position, self.index.index_select(0, chosen))

    @cached_property
    def word_ends(self) -> Tensor:
        """Mark the ends of words, bool [L]."""
        return word_ends(self.ids, self.position)

    @cached_property
    def sums(self) -> tuple[Tensor, Tensor]:
        """Compute S[l] and BASE^-l for each l, both [L + 1]."""
        power_L = torch.full_like(self.ids, BASE).cumprod(0)
        inverse_L = torch.full_like(self.ids, INVERSE).cumprod(0)
        sums = ((self.ids + 1) * power_L).cumsum(0)
        return F.pad(sums, (1, 0)), F.pad(inverse_L, (1, 0), value=1)

    def hash(self, begin_M: Tensor, end_M: Tensor) -> Tensor:
        """Return hash(begin, end), int64 [M]."""
        sums, inverse = self.sums
        return (sums[end_M] - sums[begin_M]) * inverse[end_M]

    def newest_ends(self, unit: str) -> Tensor:
        """Return for each l the last of the first l bytes that ends a unit, or -1: [L + 1]."""
        if unit not in self.newest_ends_of:
            ends_L = self.word_ends if unit == "word" else self.ids == ord("\n")
            byte_L = torch.arange(len(self.ids), device=self.ids.device)
            newest = torch.where(ends_L, byte_L, -1).cummax(0).values
            self.newest_ends_of[unit] = F.pad(newest, (1, 0), value=-1)
        return self.newest_ends_of[unit]

    def since(self, unit: str, n: int) -> Tensor:
        """Count the bytes after the n-th last end of a word or line, [M]; n if the unit is a byte.

        If the document has no such end within reach, return the largest count within reach."""
        if unit == "byte" or n == 0:
            return torch.full_like(self.index, n)
        end_M = self.index + 1
        for _ in range(n):
            end_M = self.newest_ends(unit)[end_M.clamp_min(0)]
        distance_M = self.index - end_M
        in_document = (end_M >= 0) & (distance_M <= self.position_M)
        most = REACH[unit] - 1
        return torch.where(in_document, distance_M, most).clamp_max(most)

    def span(self, context: str) -> tuple[Tensor, Tensor]:
        """Return where a context begins and ends in the text, both [M]. It may begin before the
        document."""
        if context == "above":
            return self.span_above()
        unit, first, last = span_of(context)
        after_M = self.index + 1
        return after_M - self.since(unit, last), after_M - self.since(unit, first)

    def span_above(self) -> tuple[Tensor, Tensor]:
        """Return where the bytes above the last byte and the next two begin and end, both [M].

            previous line    width = 10
                                 ^^^
            this line        heigh

        A line begins with the line break before it. If the previous line has one byte, or begins
        out of reach, return the last three bytes."""
        since_break_M = self.since("line", 1)
        since_second_M = self.since("line", 2)
        line_before_M = since_second_M - since_break_M  # its length: `above` is this far back
        is_found = since_second_M < REACH["line"] - 1
        back_M = torch.where(is_found, line_before_M, 2).clamp_min(2)
        begin_M = self.index - back_M
        return begin_M, begin_M + 3

    def key(self, context: str) -> Tensor:
        """Return the key of a context, int64 [M]: the hash of its bytes. A context that begins
        before the document gets a key from its position alone."""
        if context not in self.key_of:
            begin_M, end_M = self.span(context)
            hash_M = self.hash(begin_M.clamp_min(0), end_M.clamp_min(0))
            if context == "above":
                hash_M = hash_M + BASE * self.ids[self.index]
            in_document = self.index - begin_M <= self.position_M
            self.key_of[context] = torch.where(in_document, hash_M, -1 - self.position_M)
        return self.key_of[context]

    def keys_of_last_bytes(self, multiplier: Tensor) -> list[Tensor]:
        """Return for n from 1 to W the key of the last n bytes, int64 [M]: the XOR over k < n of
        byte k * multiplier[k], where byte 0 is the newest."""
        back_W1 = torch.arange(len(multiplier), device=self.ids.device)[:, None]
        earlier_WM = self.ids[(self.index - back_W1).clamp_min(0)]
        byte_WM = torch.where(back_W1 <= self.position_M, earlier_WM, PAD_ID)
        products = byte_WM * multiplier[:, None]
        return [*accumulate(products.unbind(), operator.xor)]

    def keys(self, contexts: tuple[str, ...], multiplier: Tensor) -> Tensor:
        """Return the key of each context, int64 [X, M].

        multiplier: int64, odd, one for each byte of the longest context."""
        lengths = [int(name) for name in contexts if name.isdecimal()]
        of_last_bytes = self.keys_of_last_bytes(multiplier[: max(lengths, default=0)])
        keys = [
            of_last_bytes[int(name) - 1] if name.isdecimal() else self.key(name)
            for name in contexts
        ]
        return torch.stack(keys)
