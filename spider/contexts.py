"""Contexts: what the memories look up, as a hash of some of the last bytes.

A context is named after its span, which is counted back from a byte:

    3        the last three bytes
    1-4      the three bytes before the last one
    word2    the bytes since the second last end of a word: the current word and the one before
    word1-2  the bytes between the last two ends: the word before alone
    above    the last byte, and those above it and above the next two, in the line before

Spans of words lie within the last 31 bytes, lines within 255.

Shapes, as suffixes of names:
    L  bytes of a text
    M  those whose contexts are looked up
    W  last bytes, the newest first
"""

import operator
from functools import cached_property
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from spider.config import REACH, SPAN_BYTES, span_of
from spider.vocabulary import PAD_ID


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
        self.windows: dict[tuple[str, int], Tensor] = {}  # see `window`

    def select(self, chosen: Tensor) -> "Past":
        """Return the past of the chosen ones of the M bytes, by index."""
        return Past(self.ids, self.position, self.index.index_select(0, chosen))

    def bytes_back(self, distance: Tensor) -> Tensor:
        """Return the bytes at distances [..., M] before each, PAD before the document."""
        earlier = self.ids[(self.index - distance).clamp_min(0)]
        return torch.where(distance <= self.position[self.index], earlier, PAD_ID)

    @cached_property
    def word_ends(self) -> Tensor:
        """Mark ends of words, bool [L]."""
        return word_ends(self.ids, self.position)

    def since(self, unit: str, n: int) -> Tensor:
        """Count the bytes since the n-th last end of a unit, [M]; n for bytes.

        Without such an end, and for more distant ones, it is the most that is searched."""
        if unit == "byte" or n == 0:
            return torch.full_like(self.index, n)
        ends_L = self.word_ends if unit == "word" else self.ids == ord("\n")
        byte_L = torch.arange(len(self.ids), device=self.ids.device)
        newest_L = torch.where(ends_L, byte_L, -1).cummax(0).values
        end_M = self.index + 1
        for _ in range(n):
            end_M = newest_L[(end_M - 1).clamp_min(0)]
        distance_M = self.index - end_M
        found = (end_M >= 0) & (distance_M <= self.position[self.index])
        most = REACH[unit] - 1
        return torch.where(found, distance_M, most).clamp_max(most)

    def window(self, unit: str, n: int, start_M: Tensor) -> Tensor:
        """Return the last bytes before the n-th last end of a unit, start bytes back: [W, M]."""
        if (unit, n) not in self.windows:
            back_W1 = torch.arange(SPAN_BYTES, device=self.ids.device)[:, None]
            self.windows[unit, n] = self.bytes_back(back_W1 + start_M)
        return self.windows[unit, n]

    def keys(self, contexts: tuple[str, ...], multiplier: Tensor) -> Tensor:
        """Hash each context: XOR of byte * multiplier over its span, the newest byte first, int64
        [X, M].

        multiplier [W]: odd, for spans of at most W bytes."""
        hashes: dict[tuple[str, int], Tensor] = {}  # [W + 1, M], of spans by their length
        keys = []
        for name in contexts:
            unit, first, last = span_of(name)
            start_M = self.since(unit, first)
            length_M = self.since(unit, last) - start_M
            added: Tensor | int = 0
            if unit == "word":
                added = length_M  # zero bytes must change the key, too
            elif unit == "line":  # the same columns of the line before
                start_M = (length_M - 2).clamp_min(0)
                length_M = torch.full_like(length_M, 3)
                added = self.ids[self.index]
            if (unit, first) not in hashes:
                window_WM = self.window(unit, first, start_M)[: len(multiplier)]
                products = window_WM * multiplier[:, None]
                prefixes = accumulate(products.unbind(), operator.xor)
                hashes[unit, first] = F.pad(torch.stack([*prefixes]), (0, 0, 1, 0))
            keys.append(hashes[unit, first].gather(0, length_M[None])[0] + added)
        return torch.stack(keys)
