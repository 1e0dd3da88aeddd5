"""Hash the n-grams and words that end at each byte."""

import operator
from itertools import accumulate

import torch
from torch import Tensor

from tokenizer import PAD_ID


def gram_keys(shifted: Tensor, multiplier: Tensor, orders: tuple[int, ...]) -> list[Tensor]:
    """Hash the last n bytes of each row to one number, for each order n: XOR over k < n of shifted[k] *
    multiplier[k]."""
    keys = list(accumulate((shifted[:len(multiplier)] * multiplier[:, None]).unbind(), operator.xor))
    return [keys[order - 1] for order in orders]


def word_ends(shifted: Tensor) -> Tensor:
    """Mark bytes before which a word has ended: it is not of a word, while the byte before is. Of words are letters,
    digits, _, what continues a character of UTF-8, and what begins one of two bytes that is a letter (from 0xC3 on:
    Latin, Greek, Cyrillic, Hebrew, Arabic). So a Chinese character is a word. The rule of SpaceByte, arXiv 2404.14408,
    but for _ and those letters, at each of which it ends a word.

    shifted [K, M], see shifted_bytes -> bool [K - 1, M], of the byte k back."""
    of_words = (((shifted | 32) >= ord("a")) & ((shifted | 32) <= ord("z"))
                | (shifted >= ord("0")) & (shifted <= ord("9")) | (shifted == ord("_"))
                | (shifted >= 0x80) & (shifted < 0xE0) & (shifted != 0xC2))
    return of_words[1:] & ~of_words[:-1]


def init_multiplier(multiplier: Tensor, seed: int):
    """Draw odd 64-bit numbers from `seed`; no random state is touched."""
    numbers = torch.Generator().manual_seed(seed)
    multiplier.copy_(torch.randint(-2 ** 62, 2 ** 62, multiplier.shape, generator=numbers) * 2 + 1)


def shifted_bytes(ids: Tensor, position: Tensor, longest: int) -> Tensor:
    """Shift ids [M] with their positions [M] in documents: [longest, M]: the byte k back, PAD before a start."""
    back = torch.arange(longest, device=ids.device)[:, None]
    row = torch.arange(len(ids), device=ids.device)
    return torch.where(position >= back, ids[(row - back).clamp_min(0)], PAD_ID)
