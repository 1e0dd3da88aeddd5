"""The match memory: the bytes that followed the last occurrences of the current context in the document."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spider.model.config import WORD_BYTES
from spider.model.ngrams import gram_keys, init_multiplier, word_ends


class Matches(NamedTuple):
    """Found by the match memory for C contexts of M bytes."""
    row: Tensor                           # int64 [M, C], see MatchMemory
    followed: Tensor                      # int64 [M, C, occurrences], the ids after them, newest first; -1: none


class MatchMemory(nn.Module):
    """A lookup in the document itself, without parameters, like the match model of compressors: a small transformer
    takes long to learn this.

    Contexts are the last n bytes for each n of `orders`, and the bytes since the n-th last end of a word for each n of
    `words` (at most WORD_BYTES - 1). For each context, find the last `occurrences` (at least two) in the document. A
    match's row is the byte after the last one: + 256 if the byte after the one before is the same, + 512 if it differs,
    or NOTHING."""

    NOTHING = 3 * 256                     # no earlier occurrence, or no byte after it

    def __init__(self, orders: tuple[int, ...], words: tuple[int, ...], occurrences: int = 2):
        super().__init__()
        self.orders, self.words, self.occurrences = orders, words, occurrences
        self.register_buffer("multiplier", torch.empty(max((*orders, WORD_BYTES * bool(words))), dtype=torch.int64))

    def init_hash(self, seed: int):
        init_multiplier(self.multiplier, seed)

    def forward(self, ids: Tensor, shifted: Tensor, document: Tensor) -> Matches:
        """Look up the contexts of all bytes, orders first: ids [M], shifted [longest context, M], document [M],
        ascending -> matches of [M, contexts]."""
        key, row = self.keys(shifted).sort(dim=1, stable=True)
        document = document[row]
        again = (key[:, 1:] == key[:, :-1]) & (document[:, 1:] == document[:, :-1])
        last = torch.full_like(row, -1).scatter_(1, row[:, 1:], torch.where(again, row[:, :-1], -1))
        return self.found(ids.expand_as(last), last, last)

    def keys(self, shifted: Tensor) -> Tensor:
        """Hash the bytes of each context, [contexts, M]."""
        orders, lengths = self.orders, tuple(range(1, WORD_BYTES)) if self.words else ()
        keys = gram_keys(shifted + 1, self.multiplier, orders + lengths)  # + 1: zero bytes must change the hash, too
        if self.words:
            ended = word_ends(shifted[:WORD_BYTES]).cumsum(0)                                # [WORD_BYTES - 1, M]
            by_length = torch.stack((torch.zeros_like(keys[0]), *keys[len(orders):]))
            keys[len(orders):] = [by_length.gather(0, (ended < n).sum(0, keepdim=True))[0] for n in self.words]
        return torch.stack(keys)

    def step(self, ids: Tensor, shifted: Tensor, position: Tensor, held: Tensor) -> tuple[Matches, Tensor]:
        """Look up the contexts of the next bytes in decoding: ids [rows, n], shifted [longest, rows * n], position
        [rows, n]. held int64 [1 + 2 * contexts, rows, slots] has for all earlier bytes of the documents the bytes, the
        keys of their contexts, and the previous occurrence of each. Returns the matches of [rows * n, contexts], and
        `held` with the new bytes; its slots double as they fill up."""
        if (need := int(position[:, -1].max()) + 1) > held.shape[2]:                         # host synchronisation
            held = F.pad(held, (0, 2 * need - held.shape[2]))
        keys = self.keys(shifted).view(-1, *ids.shape)
        at, count = position.expand(1 + len(keys), -1, -1), 1 + len(keys)
        held[:count].scatter_(2, at, torch.cat((ids[None], keys)))
        known, behind = held[1:count, :, None, :need], torch.arange(1, need + 1, dtype=torch.int32, device=ids.device)
        width = max(1, (1 << 22) // known.numel())                                           # bytes at a time
        last = torch.cat([((known == key[..., None]) & (behind <= t[..., None])).mul(behind).amax(-1)
                          for key, t in zip(keys.split(width, -1), position.split(width, -1))], dim=-1).long() - 1
        held[count:].scatter_(2, at[1:], last)
        return self.found(held[:1].expand(len(last), -1, -1), held[count:], last), held

    def found(self, ids: Tensor, before: Tensor, last: Tensor) -> Matches:
        """Return the matches of contexts with their last occurrence at `last` [C, ...] (-1: none). ids and `before` [C,
        ..., slots]: the bytes, and the previous occurrence of each context."""
        def at(x, slot):
            return torch.where(slot < 0, -1, x.gather(-1, slot.clamp(0, x.shape[-1] - 1)))
        followed = []
        for _ in range(self.occurrences):
            followed.append(at(ids, torch.where(last < 0, -1, last + 1)).flatten(1).T)
            last = at(before, last)
        newest, older = followed[:2]
        kind = torch.where(older < 0, 0, torch.where(newest == older, 256, 512))
        row = torch.where((newest < 0) | (newest > 255), self.NOTHING, newest + kind)
        return Matches(row, torch.stack(followed, dim=-1))
