"""Learned boundaries: a segment ends where the next byte is hard to predict, and where a boundary pays.

Two sources say how hard. The entropy of the next byte given the last one, from counts of pairs, is known after one step
(Harris 1955; BLT, arXiv 2412.09871, cuts by the entropy of a model). A small predictor on the bytes' states regresses
what the entropy leaves of the loss; its second output is the *gain* of a boundary: by how many nats the loss falls, to
first order, when the bytes behind it receive the segment that ends there and not the one before. The weight of both
grows from step TRUST[0] to TRUST[1], since the first losses say little.

    score = entropy(last byte) + trust * (surprise + GAIN_WEIGHT * gain);    a segment ends where score > threshold

The threshold follows the quantile of scores that leaves `rate` boundaries per byte. Gains are observed at boundaries,
in training also at STRAYS, random ones. The predictor reads detached states, so only its own weights learn from this.
Whatever it learns from is a sum over bytes, so neither micro-batches nor ranks change it.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spider.model.casting import WideLinear
from spider.model.noise import splitmix, uniform
from spider.model.packing import Packing
from tokenizer import EOS_ID, PAD_ID

GAIN_WEIGHT = 3.0
TRUST = 30, 60                            # steps
STRAYS = 0.003                            # per byte
HIGHEST, BINS = 8.0, 1024                 # of the histogram of scores, from -HIGHEST to HIGHEST nats
HELD = 0.5, 0.9                           # of the histogram's earlier counts at each step, before and after TRUST
LOSS_WEIGHT = 0.1                         # of both squared errors
MOST_LOSS, MOST_GAIN = 12.0, 3.0          # nats; larger ones count as this
STRAY_SITE = 5                            # of the noise; dropout has others


class Observed(NamedTuple):
    """What a pass in training tells the predictor."""
    predicted: Tensor                     # [M, 3]
    counts: Tensor                        # for `update`
    nat_weight: list[Tensor]              # filled in backward: the weight of a nat in the loss to minimize


class SurprisePredictor(nn.Module):
    """Predict entropy, surprise and gain at each byte, and keep the threshold; `update` is called once per step."""

    def __init__(self, hidden_size: int, vocab_size: int, rate: float):
        super().__init__()
        self.rate = rate
        self.regression = nn.Sequential(WideLinear(hidden_size, hidden_size // 4, bias=True), nn.GELU(),
                                        WideLinear(hidden_size // 4, 2, bias=True))
        self.register_buffer("pairs", torch.empty(vocab_size, vocab_size))  # counts of a byte and the next one
        self.register_buffer("entropy", torch.empty(vocab_size))            # nats above the mean, by the last byte
        self.register_buffer("histogram", torch.empty(BINS))
        self.register_buffer("threshold", torch.empty(1))
        self.register_buffer("mean_loss", torch.empty(1))                   # of the last step
        self.register_buffer("steps", torch.empty(1))

    @torch.no_grad()
    def init_state(self):
        """Initialize buffers, and the predicted gain to 0."""
        self.regression[2].weight[1] = 0
        for buffer in self.buffers():
            buffer.zero_()
        self.mean_loss.fill_(math.log(len(self.entropy)))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """Return entropy, surprise and gain [M, 3] of bytes ids [M] with normed states x [M, D]."""
        return torch.cat((self.entropy.index_select(0, ids)[:, None], self.regression(x.detach())), dim=1)

    @torch.no_grad()
    def score(self, predicted: Tensor) -> Tensor:
        """Return the scores [M] of predicted [M, 3]."""
        trust = ((self.steps - TRUST[0]) / (TRUST[1] - TRUST[0])).clamp(0, 1)
        return predicted[:, 0] + trust * (predicted[:, 1] + GAIN_WEIGHT * predicted[:, 2])

    @torch.no_grad()
    def boundaries(self, predicted: Tensor, position: Tensor, noise: Tensor | None) -> Tensor:
        """Decide where segments end: bool [M], at even distances before the first step. position [M]: in the document;
        noise [M]: in training, for strays."""
        ends = self.score(predicted) > self.threshold
        if noise is not None:
            ends = ends | (uniform(splitmix(STRAY_SITE, noise)) < STRAYS)
        even = ((position + 1) * self.rate).floor() > (position * self.rate).floor()
        return torch.where(self.steps > 0, ends, even)

    def observe(self, predicted: Tensor, ids: Tensor, b: Tensor, packing: Packing, unpooled: Tensor, z: Tensor,
                null: Tensor) -> tuple[Tensor, Observed]:
        """Observe a pass in training; return `unpooled` [M, D] as it is, but in backward the gain learns from its
        gradient. b [M], z [N, places * D] and null [places * D]: what it was made of."""
        observed, gain = Observed(predicted, self._count(predicted, ids, packing.position), []), predicted[:, 2]
        if not len(z):
            return unpooled, observed
        row, places = torch.arange(len(b), device=b.device), len(null) // unpooled.shape[1]
        with torch.no_grad():             # what bytes would have received without the last boundary before them
            start = packing.cu_seqlens.index_select(0, packing.document).long()
            last = torch.where(b > 0, row, -1).cummax(0).values
            before = F.pad(last[:-1], (1, 0), value=-1).index_select(0, last.clamp_min(0))   # the boundary before it
            has, had = last >= start, (last >= start) & (before >= start)
            offset = (row - torch.where(had, before, start - 1)).clamp_max(places - 1)
            segment = ((b > 0).long().cumsum(0) - 2).clamp_min(0)
            other = z.view(-1, unpooled.shape[1]).index_select(0, segment * places + offset)
            other = torch.where(had[:, None], other, null.view(places, -1).to(z.dtype).index_select(0, offset))
            more = torch.where(has[:, None], unpooled - other, 0)

        def error(grad: Tensor) -> Tensor:
            nat = observed.nat_weight[-1]
            gained = (-grad / nat.clamp_min(1e-30)).clamp(-MOST_GAIN, MOST_GAIN)
            return 2 * LOSS_WEIGHT / self.rate * nat * torch.where(b > 0, gain.detach() - gained, 0)
        amount = gain - gain.detach()     # 0: of the segment that ends here, instead of the one before
        if amount.requires_grad:
            amount.register_hook(error)
        return torch.addcmul(unpooled, amount.index_select(0, last.clamp_min(0))[:, None].to(unpooled.dtype),
                             more), observed

    @torch.no_grad()
    def _count(self, predicted: Tensor, ids: Tensor, position: Tensor) -> Tensor:
        """Count scores by bin and pairs of bytes: [BINS + vocab_size^2]."""
        real = (ids != PAD_ID) & (ids != EOS_ID)
        bins = ((self.score(predicted) / HIGHEST + 1) * (BINS / 2)).long().clamp(0, BINS - 1)
        pairs, follows = ids[:-1] * len(self.entropy) + ids[1:], real[:-1] & (position[1:] > 0)
        counts = self.threshold.new_zeros(BINS + self.pairs.numel())
        counts.index_add_(0, bins, real.to(counts.dtype))
        return counts.index_add_(0, BINS + pairs, follows.to(counts.dtype))

    def surprise_loss(self, observed: Observed, nats: Tensor, losses: Tensor) -> Tensor:
        """Return the loss [M] of entropy and surprise as predictions of the next bytes' losses [M]. nats: the sum of
        these in the loss to minimize, which tells how much a nat weighs there."""
        if nats.requires_grad:
            nats.register_hook(observed.nat_weight.append)
        entropy, surprise, _ = observed.predicted.unbind(1)
        return LOSS_WEIGHT * (entropy + surprise - losses.clamp_max(MOST_LOSS) + self.mean_loss).square()

    @torch.no_grad()
    def update(self, counts: Tensor, mean_loss: float):
        """Update entropies and threshold from a step's counts over all micro-steps and ranks, and its mean loss."""
        scores, pairs = counts.split((BINS, self.pairs.numel()))
        self.pairs += pairs.view_as(self.pairs)
        total = self.pairs.sum(1, keepdim=True)
        p = self.pairs / total.clamp_min(1)
        entropy = torch.special.entr(p).sum(1)
        self.entropy.copy_(entropy - entropy @ total.squeeze(1) / total.sum())
        self.histogram.mul_(torch.where(self.steps < TRUST[1], *HELD)).add_(scores)
        above = self.histogram.flip(0).cumsum(0)                                             # from the highest bin down
        wanted = self.rate * above[-1:]
        i = torch.searchsorted(above, wanted).clamp_max(BINS - 1)
        before = above[i] - self.histogram.flip(0)[i]
        part = (wanted - before) / (above[i] - before).clamp_min(1e-9)
        self.threshold.copy_(HIGHEST - (i + part) * (2 * HIGHEST / BINS))
        self.mean_loss.fill_(mean_loss)
        self.steps += 1

