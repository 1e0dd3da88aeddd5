"""Where segments end: FlexiTokens, words, and learned boundaries.

**FlexiTokens** (arXiv 2507.12720) samples boundaries from learned probabilities; a loss controls
their rate. **Words** (SpaceByte, arXiv 2404.14408) end where a word does: contexts.word_ends.
**Learned** boundaries are where the next byte is hard to predict, and where a boundary pays:
SurprisePredictor.

Shapes, also at the end of names: M packed bytes, D hidden size, V vocabulary. b_M is 1 where a
segment ends, else 0. Losses and entropies are in nats.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spider.config import SpiderConfig
from spider.model.layers import WideLinear
from spider.model.noise import splitmix, uniform
from spider.model.packing import Packing
from spider.model.segments import last_boundary
from spider.vocabulary import EOS_ID, PAD_ID

# --------------------------------------------------------------------------------------------------
# FlexiTokens


def flexitokens_boundaries(
    p_M: Tensor, packing: Packing, dtype: torch.dtype, noise_M: Tensor | None, summed: Tensor | None
) -> Tensor:
    """Cut where the sum of probabilities over the document, plus an offset, crosses an integer:
    b [M].

    This is systematic sampling: each byte is cut with probability p as in independent draws, but
    segments are more even. In training the offset is drawn once per document from its noise;
    otherwise it is 0.5, so that evaluation cuts as often. The gradient is straight-through to p.

    summed [documents] float64: in decoding, the sum of p over earlier steps. It is updated."""
    total_M = p_M.detach().double().cumsum(0)  # over all documents
    before_M = F.pad(total_M, (1, -1))
    start_M = packing.cu_seqlens.index_select(0, packing.document)
    offset_M = 0.5 - before_M.index_select(0, start_M)  # less the documents before
    if summed is not None:
        offset_M = offset_M + summed.index_select(0, packing.document)
        summed.index_add_(0, packing.document, p_M.double())
    if noise_M is not None:
        offset_M = offset_M - 0.5 + uniform(noise_M.index_select(0, start_M))
    crosses_M = (total_M + offset_M).floor() > (before_M + offset_M).floor()
    b_M = crosses_M.to(dtype)
    if p_M.requires_grad:
        # p - p has the value 0, or NaN if p diverges: b stays 0 or 1 even then
        b_M = b_M + (p_M - p_M.detach()).nan_to_num(0)
    return b_M


def boundary_loss(b_M: Tensor, input_ids: Tensor, config: SpiderConfig) -> Tensor:
    """Return the loss that keeps the rate of FlexiTokens' boundaries: the mean distance of
    sequences' boundaries per byte from the band [alpha - lambda * sigma, alpha]."""
    if config.boundaries != "flexitokens":
        return b_M.new_zeros(())
    n_bytes = (input_ids != PAD_ID).sum(1).clamp_min(1)  # [B]
    rate = b_M.view(input_ids.shape).sum(1) / n_bytes
    high = config.boundary_alpha
    low = high - config.boundary_lambda * config.boundary_sigma
    return ((rate - high).relu() + (low - rate).relu()).mean()


# --------------------------------------------------------------------------------------------------
# Learned boundaries

GAIN_WEIGHT = 3.0  # weight of a gain in the score, where surprise has 1
# Weight of the regression in the score, by step: 0 up to the first, then linear, 1 from the second
TRUST_BEGINS = 30
TRUST_COMPLETE = 60
HISTOGRAM_DECAY = 0.9  # factor on earlier scores' counts at each step, after TRUST_COMPLETE
STRAY_RATE = 0.003  # random boundaries per byte, in training
STRAY_SITE = 5  # site of the noise; dropout has 0 to 3, see spider_model
LOSS_WEIGHT = 0.001  # weight of both squared errors: so small that clipping does not see it
MAX_LOSS = 12.0  # targets of the regression are clamped to these, in nats
MAX_GAIN = 3.0
# The histogram of scores has N_BINS from -MAX_SCORE to MAX_SCORE nats, of BIN nats each
MAX_SCORE = 8.0
N_BINS = 1 << 16
BIN = 2 * MAX_SCORE / N_BINS
TIE_BINS = 64  # bins over which `tie` spreads equal scores


class PredictorTerms(NamedTuple):
    """What the predictor expects of a pass in training, before the losses of its bytes are
    known."""

    loss_M: Tensor  # expected losses of the next bytes
    zero_nats_M: Tensor  # zeros to add to the losses of the next bytes, see GainRegression
    counts: Tensor  # scores by bin and pairs of bytes, see `count`


class GainRegression(torch.autograd.Function):
    """Fit the gain of each boundary, in the backward pass, to the nats that the boundary saves.

    Returns `unpooled` unchanged, and `zero_nats`: zeros to add to the losses of bytes. The gradient
    of a byte's probe is the weight of a nat of that byte in the loss L to minimize. It is 0 for a
    byte without a label, and for all bytes if L is not the model's loss.

    earlier_MD: what bytes would receive without their last boundary."""

    @staticmethod
    def forward(ctx, unpooled_MD, gain_M, b_M, earlier_MD, rate):
        ctx.save_for_backward(unpooled_MD - earlier_MD, gain_M, b_M)
        ctx.rate = rate
        zero_nats_M = torch.zeros_like(gain_M)
        return unpooled_MD.view_as(unpooled_MD), zero_nats_M

    @staticmethod
    def backward(ctx, grad_MD, nat_weight_M):
        difference_MD, gain_M, b_M = ctx.saved_tensors

        # change of L by a boundary, to first order: the sum over the bytes after the boundary of
        #     dL/dunpooled * (unpooled - earlier)
        change_M = (grad_MD * difference_MD).sum(1).to(gain_M.dtype)
        boundary_M = last_boundary(b_M).clamp_min(0)
        change_M = torch.zeros_like(gain_M).index_add_(0, boundary_M, change_M)

        # nats saved: -change / (dL/dnat)
        target_M = -change_M / nat_weight_M.clamp_min(1e-30)
        target_M = target_M.clamp(-MAX_GAIN, MAX_GAIN)

        # gradient of the squared error, as a mean over the boundaries, `rate` of all bytes:
        #     d/dgain  LOSS_WEIGHT / rate * dL/dnat * (gain - target)^2
        grad_M = 2 * LOSS_WEIGHT / ctx.rate * nat_weight_M * (gain_M - target_M)
        return grad_MD, torch.where(b_M > 0, grad_M, 0), None, None, None


def surprise_loss(expected_M: Tensor, losses_M: Tensor, has_label_M: Tensor) -> Tensor:
    """Return the squared error of the losses that the predictor expects, a sum over the bytes with
    a label."""
    error_M = expected_M - losses_M.clamp_max(MAX_LOSS)
    return LOSS_WEIGHT * torch.where(has_label_M, error_M, 0).square().sum()


class SurprisePredictor(nn.Module):
    """Predict how much a boundary is worth at each byte, and keep the threshold above which a
    segment ends:

        score = entropy(last byte) + trust * (surprise + GAIN_WEIGHT * gain) + tie

    - entropy of the next byte given the last one, above its mean: from counts of pairs of bytes
      (Harris 1955; BLT, arXiv 2412.09871, cuts by the entropy of a model). It is known after one
      step.
    - surprise: what a small regression on the byte's state expects of the loss, beyond the entropy.
    - gain, its second output: how many nats a boundary saves, to first order. The loss is compared
      if the bytes behind it receive the segment that ends there, and if they receive the one
      before. It is observed at boundaries and, in training, at random strays. Without it the loss
      is 0.004 higher (docs/results/learning.md).
    - trust grows from 0 to 1 between two steps, since the first losses say little.
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
        self.pairs: Tensor = nn.Buffer(torch.empty(vocab_size, vocab_size))
        # entropy after each byte, in nats above the mean
        self.entropy: Tensor = nn.Buffer(torch.empty(vocab_size))
        self.histogram: Tensor = nn.Buffer(torch.empty(N_BINS))  # counts of scores
        self.threshold: Tensor = nn.Buffer(torch.empty(1))
        self.mean_loss: Tensor = nn.Buffer(torch.empty(1))  # nats per byte of the last step
        self.steps: Tensor = nn.Buffer(torch.empty(1))

    @torch.no_grad()
    def init_weights(self):
        """Initialize weights and buffers: the gain is 0, the threshold cuts evenly."""
        for layer in self.regression:
            if isinstance(layer, WideLinear):
                layer.weight.normal_(std=layer.in_features**-0.5)
                layer.bias.zero_()
        self.regression.get_parameter("2.weight")[1] = 0  # the gain
        for buffer in self.buffers():
            buffer.zero_()
        self.threshold.fill_((1 - self.rate) * TIE_BINS * BIN)
        self.mean_loss.fill_(math.log(len(self.entropy)))

    # ----------------------------------------------------------------------------------------------
    # Deciding

    def forward(self, x_MD: Tensor) -> Tensor:
        """Return surprise and gain [M, 2] of bytes with these normed states."""
        return self.regression(x_MD.detach())

    def trust(self, later: int = 0) -> Tensor:
        """Return the weight of the regression [1], in this step or one that is `later` ahead."""
        since = self.steps + later - TRUST_BEGINS
        return (since / (TRUST_COMPLETE - TRUST_BEGINS)).clamp(0, 1)

    @torch.no_grad()
    def score(self, predicted: Tensor, ids_M: Tensor, position_M: Tensor, later: int = 0) -> Tensor:
        """Return the scores [M] of bytes at a position in their document; `later`: see trust."""
        surprise_M, gain_M = predicted.unbind(1)
        predicted_M = self.trust(later) * (surprise_M + GAIN_WEIGHT * gain_M)
        tie_M = (position_M + 0.3) * self.rate % 1  # never 1 - rate, up to rounding
        return self.entropy.index_select(0, ids_M) + predicted_M + tie_M * (TIE_BINS * BIN)

    @torch.no_grad()
    def boundaries(
        self, predicted: Tensor, ids_M: Tensor, position_M: Tensor, noise_M: Tensor | None
    ) -> Tensor:
        """Decide where segments end: bool [M]. noise_M: in training, for strays."""
        ends_M = self.score(predicted, ids_M, position_M) > self.threshold
        if noise_M is None:
            return ends_M
        strays_M = uniform(splitmix(STRAY_SITE, noise_M)) < STRAY_RATE
        return ends_M | strays_M

    # ----------------------------------------------------------------------------------------------
    # Learning from a pass

    def observe(
        self,
        predicted: Tensor,
        ids_M: Tensor,
        b_M: Tensor,
        position_M: Tensor,
        unpooled_MD: Tensor,
        earlier_MD: Tensor,
    ) -> tuple[Tensor, PredictorTerms]:
        """Observe a pass in training; return `unpooled` with unchanged values, through which the
        gain learns in backward, see GainRegression."""
        surprise_M, gain_M = predicted.unbind(1)
        unpooled_MD, zero_nats_M = GainRegression.apply(
            unpooled_MD, gain_M, b_M, earlier_MD, self.rate
        )
        loss_M = self.entropy.index_select(0, ids_M) + surprise_M + self.mean_loss
        counts = self.count(predicted, ids_M, position_M)
        return unpooled_MD, PredictorTerms(loss_M, zero_nats_M, counts)

    @torch.no_grad()
    def count(self, predicted: Tensor, ids_M: Tensor, position_M: Tensor) -> Tensor:
        """Count scores by bin, as the next step weighs them, and pairs of bytes: [N_BINS + V * V]
        fp32. EOS and PAD have no score; a pair lies within a document."""
        counts = torch.zeros(N_BINS + self.pairs.numel(), device=ids_M.device)

        score_M = self.score(predicted, ids_M, position_M, later=1)
        bin_M = ((score_M + MAX_SCORE) / BIN).long().clamp(0, N_BINS - 1)
        has_score_M = (ids_M != PAD_ID) & (ids_M != EOS_ID)
        counts.index_add_(0, bin_M, has_score_M.float())

        first = ids_M[:-1]
        second = ids_M[1:]
        in_one_document = position_M[1:] > 0
        is_pair = has_score_M[:-1] & in_one_document & (second != PAD_ID)
        pair = first * len(self.entropy) + second  # its index in `pairs`
        counts.index_add_(0, N_BINS + pair, is_pair.float())
        return counts

    # ----------------------------------------------------------------------------------------------
    # Learning from a step

    @torch.no_grad()
    def update(self, counts: Tensor, mean_loss: float):
        """Update entropies and threshold from a step's counts over all micro-steps and ranks, and
        its mean loss."""
        scores, pairs = counts.split((N_BINS, self.pairs.numel()))
        self.pairs += pairs.view_as(self.pairs)
        total_V = self.pairs.sum(1)
        total = total_V.sum().clamp_min(1)
        entropy_V = torch.special.entr(self.pairs / total_V.clamp_min(1)[:, None]).sum(1)
        self.entropy.copy_(entropy_V - entropy_V @ total_V / total)
        self.steps += 1
        # Before the next step trusts the regression, scores follow from counts of bytes. Until
        # trust is complete they change too fast for those of earlier steps to count.
        untrusted = self._expected_scores(total_V * (scores.sum() / total))
        trusted = self.histogram * HISTOGRAM_DECAY * (self.steps > TRUST_COMPLETE) + scores
        self.histogram.copy_(torch.where(self.trust() > 0, trusted, untrusted))
        self._set_threshold()
        self.mean_loss.fill_(mean_loss)

    def _expected_scores(self, total_V: Tensor) -> Tensor:
        """Return the histogram of scores without trust: the entropies of bytes with these counts,
        each spread over the bins of its tie."""
        first_V = ((self.entropy + MAX_SCORE) / BIN).round().long()
        tie = torch.arange(TIE_BINS, device=total_V.device)
        bins = (first_V[:, None] + tie).clamp(0, N_BINS - 1)  # [V, TIE_BINS]
        share = (total_V / TIE_BINS).repeat_interleave(TIE_BINS)
        return torch.zeros_like(self.histogram).index_add_(0, bins.flatten(), share)

    def _set_threshold(self):
        """Set the threshold such that `rate` of the histogram's scores lie above it; it stays as it
        is without scores."""
        falling = self.histogram.flip(0)  # from the highest bin down
        above = falling.cumsum(0)  # scores in this bin or a higher one
        wanted = self.rate * above[-1:]
        i = torch.searchsorted(above, wanted).clamp_max(N_BINS - 1)  # the bin of the threshold
        inside = falling[i]
        part = (wanted - above[i] + inside) / inside.clamp_min(1e-9)  # part of the bin above it
        threshold = MAX_SCORE - (i + part) * BIN
        self.threshold.copy_(torch.where(wanted > 0, threshold, self.threshold))
