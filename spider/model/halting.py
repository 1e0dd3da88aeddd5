"""Adaptive computation time (ACT): weigh the states of the loops by their halting probabilities."""

import torch
from torch import Tensor

from spider.model.packing import ALL_ROWS, ActiveRows


class Halting:
    """ACT over the loops of one pass (Graves, arXiv 1603.08983).

    The weight of a loop is p while the running sum is below the threshold. On the loop that reaches it, and on the last
    one, the weight is the remainder to 1, and the segment halts. It is computed once more, with weight 0, so that later
    segments can read its final state, and then leaves the core. (Without that, half a hop of a chain is lost.)

    A segment that halts in its first loop has weight 1 there for any p, so there is no gradient to continue, nor for
    later loops. Therefore a warm-up scales p until all loops have learned.
    """

    def __init__(self, share: Tensor, threshold: float, leave: bool, ends: bool):
        """Begin a pass. share [N]: 1 / segments, 0 for padding rows; leave: halted rows leave the products; ends: no
        later segment reads these, so the pass ends once all have halted."""
        self.threshold, self.leave, self.ends, self.active = threshold, leave, ends, ALL_ROWS
        self.share, self.remaining = share, torch.ones_like(share)  # [n] of active rows: 1 - weights; 0 once halted
        self.output: Tensor | None = None                           # [N, D]
        self.loops = self.ponder = 0                                # means over segments: loops; loops + remainder

    def add(self, h: Tensor, p: Tensor, last: bool) -> Tensor:
        """Add the states after a loop, h [n, D], with halting probabilities p [n]; return the states for the next loop,
        none after the last."""
        stays = self.share > 0                                      # the others halted in the loop before
        stops = torch.ones_like(stays) if last else 1 - self.remaining + p >= self.threshold
        weight = torch.where(stops, self.remaining, p)
        weighted = weight[:, None].to(h.dtype) * h
        index = self.active.index
        self.output = weighted if self.output is None else (
            self.output + weighted if index is None else self.output.index_add(0, index, weighted))
        share = self.share.sum()
        self.loops = self.loops + share
        self.ponder = self.ponder + share + self.share @ torch.where(stops, self.remaining, 0)
        self.share, self.remaining = self.share * ~stops, torch.where(stops, 0, self.remaining - weight)
        if last or not self.leave:
            self.active = ActiveRows(mask=stays)
            return h[:0] if last else h
        if self.ends and not self.share.any():
            return h[:0]
        stay = stays.nonzero().squeeze(1)
        if len(stay) < len(h):
            index = stay if index is None else index.index_select(0, stay)
            self.share, self.remaining = self.share.index_select(0, stay), self.remaining.index_select(0, stay)
            h = h.index_select(0, stay)
        self.active = ActiveRows(index, halted=self.share == 0)
        return h
