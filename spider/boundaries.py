"""Where segments end: FlexiTokens, words, and learned boundaries.

**FlexiTokens** (arXiv 2507.12720) samples boundaries from learned probabilities; a loss controls
their rate. **Words** (SpaceByte, arXiv 2404.14408) end where a word does, see memory.word_ends.
**Learned** boundaries are where the next byte is hard to predict, and where a boundary pays:
SurprisePredictor. b [M] is 1 where a segment ends, else 0.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spider.config import SpiderConfig
from spider.layers import WideLinear
from spider.noise import splitmix, uniform
from spider.packing import Packing
from spider.segments import last_boundary
from tokenizer import EOS_ID, PAD_ID


def flexitokens_boundaries(
    p: Tensor, packing: Packing, dtype: torch.dtype, noise: Tensor | None, summed: Tensor | None
) -> Tensor:
    """Cut where the sum of probabilities p [M] over the document, plus an offset, crosses an
    integer: b [M].

    This is systematic sampling: each byte is cut with probability p as in independent draws, but
    segments are more even. In training the offset is drawn once per document from noise [M];
    otherwise it is 0.5, so that evaluation cuts as often. The gradient is straight-through to p.
    summed [documents] float64: in decoding, the sum of p over earlier steps, which is updated."""
    total = p.detach().double()
    if summed is not None and packing.longest == 1:  # a byte of each document
        before, offset = 0, 0.5 + summed
        summed += total
    else:
        start = packing.cu_seqlens.index_select(0, packing.document)
        before = F.pad(total := total.cumsum(0), (1, -1))
        offset = 0.5 - before.index_select(0, start)
        if summed is not None:
            offset = offset + summed.index_select(0, packing.document)
            summed.index_add_(0, packing.document, p.double())
    if noise is not None:
        offset = offset - 0.5 + uniform(noise.index_select(0, start))
    b = ((total + offset).floor() > (before + offset).floor()).to(dtype)
    # stays 0 or 1 even if p diverges
    return b + (p - p.detach()).nan_to_num(0) if p.requires_grad else b


def boundary_loss(b: Tensor, input_ids: Tensor, config: SpiderConfig) -> Tensor:
    """Return the mean distance of sequences' boundaries per byte from the band [alpha - lambda *
    sigma, alpha]."""
    if config.boundaries != "flexitokens":
        return b.new_zeros(())
    real = (input_ids != PAD_ID).sum(1).clamp_min(1)
    rate = b.view(input_ids.shape).sum(1) / real  # [B]
    low = config.boundary_alpha - config.boundary_lambda * config.boundary_sigma
    return ((rate - config.boundary_alpha).relu() + (low - rate).relu()).mean()


# --------------------------------------------------------------------------------------------------
# Learned boundaries

GAIN_WEIGHT = 3.0
TRUST = 30, 60  # steps: until the first the regression counts nothing, after the second fully
STRAYS = 0.003  # random boundaries per byte, in training
LOSS_WEIGHT = 0.001  # of both squared errors: nothing, in the norm by which gradients are clipped
MOST_LOSS, MOST_GAIN = 12.0, 3.0  # nats; larger ones count as this
# scores are counted in BINS, from -HIGHEST to HIGHEST nats; a tie has TIE
HIGHEST, BINS, TIE = 8.0, 1 << 16, 64
BIN = 2 * HIGHEST / BINS
HELD = 0.9  # of earlier counts at each step, after TRUST
STRAY_SITE = 5  # of the noise; dropout has others


@dataclass
class Observed:
    """A pass in training, as far as the predictor learns from it."""

    predicted: Tensor  # [M, 2]
    ids: Tensor  # [M]
    counts: Tensor  # for `update`: of scores by bin, and of pairs of bytes
    counted: Tensor | None = None  # bool [M], bytes with a label
    nat_weight: Tensor | None = None  # of a nat in the loss to minimize, known in backward


class SurprisePredictor(nn.Module):
    """Predict how much a boundary is worth at each byte, and keep the threshold above which a
    segment ends:

        score = entropy(last byte) + trust * (surprise + GAIN_WEIGHT * gain) + tie

    - entropy of the next byte given the last one, above its mean: from counts of pairs of bytes
      (Harris 1955; BLT, arXiv 2412.09871, cuts by the entropy of a model). It is known after one
      step.
    - surprise: what a small regression on the byte's state expects of the loss, beyond the entropy.
    - gain, its second output: the nats by which the loss falls, to first order, if the bytes behind
      the boundary receive the segment that ends there instead of the one before. It is observed at
      boundaries and, in training, at STRAYS, random ones. Without it the loss is 0.004 higher
      (docs/results/learning.md).
    - trust grows from 0 to 1 between the steps TRUST, since the first losses say little.
    - tie cuts evenly where all bytes are alike.

    The threshold follows the quantile of scores that leaves `rate` boundaries per byte. The
    regression reads detached states, so only its own weights learn from this. All that it learns
    from is a sum over bytes, so neither micro-batches nor ranks change it. `update` is called once
    per optimizer step."""

    def __init__(self, hidden_size: int, vocab_size: int, rate: float):
        super().__init__()
        self.rate = rate
        self.regression = nn.Sequential(
            WideLinear(hidden_size, hidden_size // 4, bias=True),
            nn.GELU(),
            WideLinear(hidden_size // 4, 2, bias=True),
        )
        # counts of a byte and the next one
        self.register_buffer("pairs", torch.empty(vocab_size, vocab_size))
        # nats above the mean, by the last byte
        self.register_buffer("entropy", torch.empty(vocab_size))
        self.register_buffer("histogram", torch.empty(BINS))  # of scores
        self.register_buffer("threshold", torch.empty(1))
        self.register_buffer("mean_loss", torch.empty(1))  # of the last step
        self.register_buffer("steps", torch.empty(1))

    @torch.no_grad()
    def init_weights(self):
        """Initialize weights and buffers: the gain is 0, the threshold cuts evenly."""
        for linear in self.regression[::2]:
            linear.weight.normal_(std=linear.in_features**-0.5)
            linear.bias.zero_()
        self.regression[2].weight[1] = 0
        for buffer in self.buffers():
            buffer.zero_()
        self.threshold.fill_((1 - self.rate) * TIE * BIN)
        self.mean_loss.fill_(math.log(len(self.entropy)))

    def forward(self, x: Tensor) -> Tensor:
        """Return surprise and gain [M, 2] of bytes with normed states x [M, D]."""
        return self.regression(x.detach())

    def trust(self, later: int = 0) -> Tensor:
        """Return the weight of the predictor [1], in this step or one that is later."""
        return ((self.steps + later - TRUST[0]) / (TRUST[1] - TRUST[0])).clamp(0, 1)

    @torch.no_grad()
    def score(self, predicted: Tensor, ids: Tensor, position: Tensor, later: int = 0) -> Tensor:
        """Return the scores [M] of bytes ids [M] at a position [M] in their document; `later`: see
        trust."""
        predicted = self.trust(later) * (predicted[:, 0] + GAIN_WEIGHT * predicted[:, 1])
        tie = (position + 0.3) * self.rate % 1  # never 1 - rate, up to rounding
        return self.entropy.index_select(0, ids) + predicted + tie * (TIE * BIN)

    @torch.no_grad()
    def boundaries(
        self, predicted: Tensor, ids: Tensor, position: Tensor, noise: Tensor | None
    ) -> Tensor:
        """Decide where segments end: bool [M]. noise [M]: in training, for strays."""
        ends = self.score(predicted, ids, position) > self.threshold
        return ends if noise is None else ends | (uniform(splitmix(STRAY_SITE, noise)) < STRAYS)

    def observe(
        self,
        predicted: Tensor,
        ids: Tensor,
        b: Tensor,
        packing: Packing,
        unpooled: Tensor,
        earlier: Tensor,
    ) -> tuple[Tensor, Observed]:
        """Observe a pass in training; return `unpooled` [M, D] with unchanged values, through which
        the gain learns in backward. b [M]: boundaries; earlier [M, D]: what bytes would have
        received without their last boundary.

        `amount` is a variable of value 0 at each boundary. unpooled + amount * (unpooled - earlier)
        makes its gradient the first-order change of the loss between the two segments, which is the
        target of the gain's regression."""
        observed, gain = (
            Observed(predicted, ids, self._count(predicted, ids, packing.position)),
            predicted[:, 1],
        )

        def gain_gradient(grad: Tensor) -> Tensor:
            # in place of the loss's, so that the regression alone learns
            if observed.nat_weight is None:  # of a loss that is not the model's
                return torch.zeros_like(grad)
            gained = (-grad / observed.nat_weight.clamp_min(1e-30)).clamp(-MOST_GAIN, MOST_GAIN)
            wrong = torch.where((b > 0) & observed.counted, gain.detach() - gained, 0)
            return 2 * LOSS_WEIGHT / self.rate * observed.nat_weight * wrong  # of the squared error

        amount = gain - gain.detach()
        if amount.requires_grad:
            amount.register_hook(gain_gradient)
        amount = amount.index_select(0, last_boundary(b).clamp_min(0))[:, None].to(unpooled.dtype)
        return torch.addcmul(unpooled, amount, (unpooled - earlier).detach()), observed

    def surprise_loss(
        self, observed: Observed, nats: Tensor, losses: Tensor, counted: Tensor
    ) -> Tensor:
        """Return the loss of entropy and surprise as predictions, a sum over the bytes that are
        `counted`, bool [M].

        losses [M]: of the next bytes; nats: their sum in the loss to minimize, which tells how much
        a nat weighs."""

        def keep(weight: Tensor):
            observed.nat_weight = weight

        observed.counted = counted
        if nats.requires_grad:
            nats.register_hook(keep)
        expected = (
            self.entropy.index_select(0, observed.ids) + observed.predicted[:, 0] + self.mean_loss
        )
        error = expected - losses.clamp_max(MOST_LOSS)
        return LOSS_WEIGHT * torch.where(counted, error, 0).square().sum()

    @torch.no_grad()
    def _count(self, predicted: Tensor, ids: Tensor, position: Tensor) -> Tensor:
        """Count scores, as the next step weighs them, by bin, and pairs of bytes: [BINS +
        vocab_size^2] fp32."""
        counts = torch.zeros(BINS + self.pairs.numel(), device=ids.device)
        bins = (
            ((self.score(predicted, ids, position, later=1) + HIGHEST) / BIN)
            .long()
            .clamp(0, BINS - 1)
        )
        pairs, known = ids[:-1] * len(self.entropy) + ids[1:], (ids != PAD_ID) & (ids != EOS_ID)
        follows = known[:-1] & (position[1:] > 0) & (ids[1:] != PAD_ID)
        counts.index_add_(0, bins, known.float())
        return counts.index_add_(0, BINS + pairs, follows.float())

    @torch.no_grad()
    def update(self, counts: Tensor, mean_loss: float):
        """Update entropies and threshold from a step's counts over all micro-steps and ranks, and
        its mean loss."""
        scores, pairs = counts.split((BINS, self.pairs.numel()))
        self.pairs += pairs.view_as(self.pairs)
        total = self.pairs.sum(1)
        entropy = torch.special.entr(self.pairs / total.clamp_min(1)[:, None]).sum(1)
        self.entropy.copy_(entropy - entropy @ total / total.sum().clamp_min(1))
        self.steps += 1
        held = self.histogram * HELD * (self.steps > TRUST[1]) + scores
        untrusted = self._expected_scores(total * (scores.sum() / total.sum().clamp_min(1)))
        self.histogram.copy_(torch.where(self.trust() > 0, held, untrusted))
        above = self.histogram.flip(0).cumsum(0)  # from the highest bin down
        wanted = self.rate * above[-1:]
        i = torch.searchsorted(above, wanted).clamp_max(BINS - 1)
        inside = self.histogram.flip(0)[i]
        part = (wanted - above[i] + inside) / inside.clamp_min(1e-9)
        self.threshold.copy_(torch.where(wanted > 0, HIGHEST - (i + part) * BIN, self.threshold))
        self.mean_loss.fill_(mean_loss)

    def _expected_scores(self, total: Tensor) -> Tensor:
        """Return the histogram of scores without trust, of bytes with counts `total`
        [vocab_size]."""
        first = ((self.entropy + HIGHEST) / BIN).round().long()[:, None]
        bins = (first + torch.arange(TIE, device=total.device)).clamp(0, BINS - 1)
        return torch.zeros_like(self.histogram).index_add_(
            0, bins.flatten(), (total / TIE).repeat_interleave(TIE)
        )
