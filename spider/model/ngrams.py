"""Hash the n-grams and words that end at each byte."""

import operator
from itertools import accumulate

import torch
from torch import Tensor

from tokenizer import PAD_ID


def gram_keys(shifted: Tensor, multiplier: Tensor, orders: tuple[int, ...]) -> list[Tensor]:
    """Hash the last n bytes of each row, for each order n: XOR over k < n of shifted[k] * multiplier[k]."""
    keys = list(accumulate((shifted[:len(multiplier)] * multiplier[:, None]).unbind(), operator.xor))
    return [keys[order - 1] for order in orders]


def word_ends(shifted: Tensor) -> Tensor:
    """Mark bytes that end a word: those that are not word bytes, after one that is. shifted [K, M] (see shifted_bytes)
    -> bool [K - 1, M], for the byte k positions back.

    Word bytes are letters, digits, _, UTF-8 continuation bytes, and the lead bytes of two-byte letters (from 0xC3 on:
    Latin, Greek, Cyrillic, Hebrew, Arabic). A Chinese character is therefore a word. This is the rule of SpaceByte,
    arXiv 2404.14408, except that there _ and those lead bytes end a word."""
    of_words = (((shifted | 32) >= ord("a")) & ((shifted | 32) <= ord("z"))
                | (shifted >= ord("0")) & (shifted <= ord("9")) | (shifted == ord("_"))
                | (shifted >= 0x80) & (shifted < 0xE0) & (shifted != 0xC2))
    return of_words[1:] & ~of_words[:-1]


def init_multiplier(multiplier: Tensor, seed: int):
    """Draw odd 64-bit multipliers from `seed`, without changing any random state."""
    numbers = torch.Generator().manual_seed(seed)
    multiplier.copy_(torch.randint(-2 ** 62, 2 ** 62, multiplier.shape, generator=numbers) * 2 + 1)


def shifted_bytes(ids: Tensor, position: Tensor, longest: int) -> Tensor:
    """Return the byte k positions back for each of ids [M], k < longest, as [longest, M]; PAD before a document."""
    back = torch.arange(longest, device=ids.device)[:, None]
    row = torch.arange(len(ids), device=ids.device)
    return torch.where(position >= back, ids[(row - back).clamp_min(0)], PAD_ID)
