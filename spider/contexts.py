"""Contexts: what the memories look up, as a hash of some of the last bytes.

A context is named after its span, which is counted back from a byte:

    3        the last three bytes
    1-4      the three bytes before the last one
    word1    the bytes after the one that ended a word last: mostly the current word so far
    word2    ... that ended the word before that: mostly two words
    word1-2  the bytes between both: the word before alone
    above    the last byte, and those above it and above the next two in the line before; the last
             three where that line does not begin within 255 bytes

Ends of words are sought in the last 31 bytes.

Shapes, as suffixes of names:
    L  bytes of a text
    M  those whose contexts are looked up
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

# Odd, and its inverse mod 2^64: hashes of spans are sums of powers of it.
BASE = 0x1E3779B97F4A7C15
INVERSE = pow(BASE, -1, 1 << 64)


def word_ends(ids_L: Tensor, position_L: Tensor) -> Tensor:
    """Mark bytes that end a word: those that are not word bytes, after one that is. bool [L].

    position [L]: of each byte in its document. Word bytes are letters, digits, _, UTF-8
    continuation bytes, and the lead bytes of two-byte letters (from 0xC3 on: Latin, Greek,
    Cyrillic, Hebrew, Arabic). A Chinese character is therefore a word. This is the rule of
    SpaceByte, arXiv 2404.14408, except that there _ and those lead bytes end a word."""
    lower_case = ids_L | 32  # if it is a letter
    is_letter = (lower_case >= ord("a")) & (lower_case <= ord("z"))
    is_digit = (ids_L >= ord("0")) & (ids_L <= ord("9"))
    is_underscore = ids_L == ord("_")
    is_utf8 = (ids_L >= 0x80) & (ids_L < 0xE0) & (ids_L != 0xC2)
    is_word_byte = is_letter | is_digit | is_underscore | is_utf8
    after_word_byte = F.pad(is_word_byte[:-1], (1, 0)) & (position_L > 0)
    return after_word_byte & ~is_word_byte


class Past:
    """The bytes of a text up to each of M bytes, within their documents."""

    def __init__(self, ids_L: Tensor, position_L: Tensor, index_M: Tensor):
        """ids, position int64 [L]: bytes, and their positions in their documents. index int64 [M]:
        of the M bytes among them."""
        self.ids = ids_L
        self.position = position_L
        self.index = index_M
        self.position_M = position_L.index_select(0, index_M)
        self.ends_of: dict[str, Tensor] = {}  # see newest_ends
        self.keys_of: dict[str, Tensor] = {}  # by the name of a context that is not of bytes alone

    def select(self, chosen: Tensor) -> "Past":
        """Return the past of the chosen ones of the M bytes, by index."""
        return Past(self.ids, self.position, self.index.index_select(0, chosen))

    @cached_property
    def word_ends(self) -> Tensor:
        """Mark ends of words, bool [L]."""
        return word_ends(self.ids, self.position)

    def newest_ends(self, unit: str) -> Tensor:
        """Return the last end of a unit among the first l bytes for each l, or -1: [L + 1]."""
        if unit not in self.ends_of:
            ends_L = self.word_ends if unit == "word" else self.ids == ord("\n")
            byte_L = torch.arange(len(self.ids), device=self.ids.device)
            newest = torch.where(ends_L, byte_L, -1).cummax(0).values
            self.ends_of[unit] = F.pad(newest, (1, 0), value=-1)
        return self.ends_of[unit]

    def since(self, unit: str, n: int) -> Tensor:
        """Count the bytes since the n-th last end of a unit, [M]; n for bytes.

        Without such an end, and for more distant ones, it is the most that is searched."""
        if unit == "byte" or n == 0:
            return torch.full_like(self.index, n)
        end_M = self.index + 1
        for _ in range(n):
            end_M = self.newest_ends(unit)[end_M.clamp_min(0)]
        distance_M = self.index - end_M
        found = (end_M >= 0) & (distance_M <= self.position_M)
        most = REACH[unit] - 1
        return torch.where(found, distance_M, most).clamp_max(most)

    @cached_property
    def sums(self) -> tuple[Tensor, Tensor]:
        """Return for each l the sum of (byte k + 1) * BASE^(k + 1) over k < l, and BASE^-l, both
        [L + 1]."""
        ones = torch.ones_like(self.ids)
        power_L = (ones * BASE).cumprod(0)
        inverse_L = (ones * INVERSE).cumprod(0)
        sums = ((self.ids + 1) * power_L).cumsum(0)
        return F.pad(sums, (1, 0)), F.pad(inverse_L, (1, 0), value=1)

    def key(self, context: str) -> Tensor:
        """Hash the bytes of a context, wherever they are: int64 [M]. One that begins before the
        document gets a key of its own, by its position."""
        unit, first, last = span_of(context)
        start_M = self.since(unit, first)
        length_M = self.since(unit, last) - start_M
        if unit == "line":  # the same columns of the line before, if its beginning was found
            found = start_M + length_M < REACH[unit] - 1
            start_M = torch.where(found, length_M - 2, 0).clamp_min(0)
            length_M = torch.full_like(length_M, 3)
        stop_M = (self.index + 1 - start_M).clamp_min(0)
        begin_M = (stop_M - length_M).clamp_min(0)
        sums, inverse = self.sums
        hash_M = (sums[stop_M] - sums[begin_M]) * inverse[stop_M]
        if unit == "line":
            hash_M = hash_M + BASE * self.ids[self.index]
        in_document = start_M + length_M <= self.position_M + 1
        return torch.where(in_document, hash_M, -1 - self.position_M)

    def keys(self, contexts: tuple[str, ...], multiplier: Tensor) -> Tensor:
        """Return the key of each context, int64 [X, M].

        That of the last n bytes is XOR over k < n of a byte * multiplier[k], the newest first.
        multiplier int64 [W]: odd, for the longest such context."""
        multiplier = multiplier[
            : max((int(name) for name in contexts if name.isdecimal()), default=0)
        ]
        back_W1 = torch.arange(len(multiplier), device=self.ids.device)[:, None]
        earlier_WM = self.ids[(self.index - back_W1).clamp_min(0)]
        shifted_WM = torch.where(back_W1 <= self.position_M, earlier_WM, PAD_ID)
        products = shifted_WM * multiplier[:, None]
        of_bytes = [*accumulate(products.unbind(), operator.xor)]
        keys = []
        for name in contexts:
            if name.isdecimal():
                keys.append(of_bytes[int(name) - 1])
                continue
            if name not in self.keys_of:
                self.keys_of[name] = self.key(name)
            keys.append(self.keys_of[name])
        return torch.stack(keys)
