"""The cache of decoding: rows of earlier steps, by layer, loop and document."""

import math
from copy import copy

import torch
from torch import Tensor

from spider.model.packing import Packing


def out_of_sight(q: Tensor, m: int, window: int) -> Tensor:
    """Return the causal (and window) mask to add to scores [n, m] of the last n of m rows, q [..., n, width]: 0 or
    -inf."""
    n = q.shape[-2]
    hidden = q.new_full((n, m), -math.inf)
    return hidden.triu(m - n + 1) + hidden.tril(m - n - window) if m > window else hidden.triu(m - n + 1)


class Cache:
    """A ring buffer of earlier steps' rows: `held` [layers, loops, documents, slots, width], with row p of a document
    in slot p % slots. A loop's rows also count for later loops, until those put their own.

    before [documents]: rows of each document in earlier steps. window: rows that a row attends to, including itself; 0:
    all. There are twice as many slots as needed, so that rows are seldom moved.
    """

    def __init__(self, held: Tensor, packing: Packing, before: Tensor, window: int = 0):
        one = packing.longest == 1 and len(before) == 1                                      # a single row
        last = before if one else before + packing.cu_seqlens.diff() - 1                     # [documents]
        rows = int(last.max()) + 1                                                           # host synchronisation
        need = min(rows, window + packing.longest - 1) if window else rows
        snug = one and need == window     # exactly one slot per visible row
        if held.shape[3] != need if snug else not need <= held.shape[3] <= max(16, 4 * need):
            slot = torch.arange(need if snug else 2 * need, device=held.device)
            kept = before[:, None] - 1 - (before[:, None] - 1 - slot) % len(slot)          # the row for each slot
            held = held[:, :, torch.arange(len(before), device=held.device)[:, None], kept % held.shape[3]]
        self.held, self.packing, self.layer, self.loop = held, packing, 0, 0
        self.slot = packing.position % held.shape[3]                                        # [N]
        if len(before) > 1:
            self.slot = self.slot + packing.document * held.shape[3]
        self.read, self.hidden = min(rows, held.shape[3]), None                              # slots in use; their mask
        if not one:
            slot = torch.arange(self.read, device=held.device)
            stored = (last[:, None] - (last[:, None] - slot) % held.shape[3])[:, None]      # [documents, 1, read]
            row = (before[:, None] + torch.arange(packing.longest, device=held.device))[:, :, None]
            self.hidden = (stored < 0) | (stored > row)                                  # [documents, longest, read]
            if window:
                self.hidden |= stored <= row - window
            self.padded_row = (packing.document * packing.longest + packing.position
                               - before.index_select(0, packing.document))

    def of(self, layer: int, loop: int = 0) -> "Cache":
        """Return a view for a layer and loop."""
        view = copy(self)
        view.layer, view.loop = layer, loop
        return view

    def put(self, x: Tensor) -> Tensor:
        """Store the step's rows [N, width]; return all rows of the loop, [documents, slots, width]."""
        held = self.held[self.layer, self.loop:]
        held.flatten(1, 2).index_copy_(1, self.slot, x.expand(len(held), -1, -1))
        return held[0]

    def look_back(self, distances: list[int]) -> "Cache":
        """Choose the distances, in rows, for `put_and_look_back`."""
        position = self.packing.position - torch.tensor(distances, device=self.held.device)[:, None]
        slots = self.held.shape[3]
        self.back = (self.packing.document * slots + position % slots).flatten()
        self.there = (position >= 0)[:, :, None]
        return self

    def put_and_look_back(self, x: Tensor) -> Tensor:
        """Store the step's rows [N, width]; return earlier ones [distances, N, width], zero before a document's
        start."""
        back = self.put(x).flatten(0, 1).index_select(0, self.back).view(-1, *x.shape)
        return torch.where(self.there, back, 0)

    def attend(self, q: Tensor, x: Tensor, scale: float, value_width: int) -> Tensor:
        """Attend from q [N, H, width] to the step's rows x [N, width] and all stored ones -> [N, H, value_width]. All
        heads share the rows; values are the first numbers of keys."""
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
