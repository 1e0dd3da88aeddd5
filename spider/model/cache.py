"""The cache that decoding reads: rows of earlier steps, by layer, loop and document."""

import math
from copy import copy

import torch
from torch import Tensor

from spider.model.packing import Packing


def out_of_sight(q: Tensor, m: int, window: int) -> Tensor:
    """Return what to add to scores [n, m] of the last n of m rows, q [..., n, width]: -inf where a row may not look,
    else 0."""
    n = q.shape[-2]
    hidden = q.new_full((n, m), -math.inf)
    return hidden.triu(m - n + 1) + hidden.tril(m - n - window) if m > window else hidden.triu(m - n + 1)


class Cache:
    """The rows that layers read of earlier steps' rows while a step runs: `held` [layers, loops, documents, slots,
    width], a document's row p in slot p % slots. What a loop puts there stands for later loops until they put
    something.

    before [documents]: a document's rows of earlier steps. window: how many rows a row sees, itself included; 0: all.
    There are slots for twice as many rows as are seen, so that they are seldom moved.
    """

    def __init__(self, held: Tensor, packing: Packing, before: Tensor, window: int = 0):
        one = packing.longest == 1 and len(before) == 1                                      # row: documents are few
        last = before if one else before + packing.cu_seqlens.diff() - 1                     # [documents]
        rows = int(last.max()) + 1                                                           # host synchronisation
        need = min(rows, window + packing.longest - 1) if window else rows
        snug = one and need == window     # then each slot holds a row that is seen
        if held.shape[3] != need if snug else not need <= held.shape[3] <= max(16, 4 * need):
            slot = torch.arange(need if snug else 2 * need, device=held.device)
            kept = before[:, None] - 1 - (before[:, None] - 1 - slot) % len(slot)          # the row to lie there
            held = held[:, :, torch.arange(len(before), device=held.device)[:, None], kept % held.shape[3]]
        self.held, self.packing, self.layer, self.loop = held, packing, 0, 0
        self.slot = packing.position % held.shape[3]                                        # [N]
        if len(before) > 1:
            self.slot = self.slot + packing.document * held.shape[3]
        self.read, self.hidden = min(rows, held.shape[3]), None                              # slots; which a row skips
        if not one:
            slot = torch.arange(self.read, device=held.device)
            lies = (last[:, None] - (last[:, None] - slot) % held.shape[3])[:, None]        # [documents, 1, read]
            row = (before[:, None] + torch.arange(packing.longest, device=held.device))[:, :, None]
            self.hidden = (lies < 0) | (lies > row)                                      # [documents, longest, read]
            if window:
                self.hidden |= lies <= row - window
            self.padded_row = (packing.document * packing.longest + packing.position
                               - before.index_select(0, packing.document))

    def of(self, layer: int, loop: int = 0) -> "Cache":
        """Return the part of it that a layer reads and writes in a loop."""
        part = copy(self)
        part.layer, part.loop = layer, loop
        return part

    def put(self, x: Tensor) -> Tensor:
        """Keep the step's rows [N, width]; return all that the loop holds, [documents, slots, width]."""
        held = self.held[self.layer, self.loop:]
        held.flatten(1, 2).index_copy_(1, self.slot, x.expand(len(held), -1, -1))
        return held[0]

    def look_back(self, distances: list[int]) -> "Cache":
        """Choose what `put_and_look_back` returns: the rows so many rows before the step's."""
        position = self.packing.position - torch.tensor(distances, device=self.held.device)[:, None]
        slots = self.held.shape[3]
        self.back = (self.packing.document * slots + position % slots).flatten()
        self.there = (position >= 0)[:, :, None]
        return self

    def put_and_look_back(self, x: Tensor) -> Tensor:
        """Keep the step's rows [N, width]; return [distances, N, width], zero before a document's start."""
        back = self.put(x).flatten(0, 1).index_select(0, self.back).view(-1, *x.shape)
        return torch.where(self.there, back, 0)

    def attend(self, q: Tensor, x: Tensor, scale: float, value_width: int) -> Tensor:
        """Attend from the step's rows to themselves, x [N, width], and all that are held, for every head: q
        [N, H, width] -> [N, H, value_width]. Values are the first numbers of keys."""
        documents, longest, (rows, heads, width) = len(self.packing.cu_seqlens) - 1, self.packing.longest, q.shape
        held = self.put(x)[:, :self.read]
        regular = documents * longest == rows
        if not regular:
            q = q.new_zeros(documents * longest, heads, width).index_copy(0, self.padded_row, q)
        q = q.reshape(documents, longest * heads, width)
        score = torch.baddbmm(q.new_zeros(()), q, held.mT, beta=0, alpha=scale)
        if self.hidden is not None:
            score.view(documents, longest, heads, -1).masked_fill_(self.hidden[:, :, None], -math.inf)
        out = torch.bmm(score.softmax(-1), held[..., :value_width]).view(documents * longest, heads, value_width)
        return out if regular else out.index_select(0, self.padded_row)
