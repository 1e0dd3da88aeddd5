"""Where segments end: FlexiTokens, words, and learned boundaries.

    flexitokens   sampled from learned probabilities; a loss controls their rate (arXiv 2507.12720)
    words         at the end of each word: contexts.word_ends (SpaceByte, arXiv 2404.14408)
    learned       where the next byte is hard to predict and a boundary pays: SurprisePredictor

Tensor names end with their shape: B sequences, M packed bytes, D hidden size, V vocabulary. b_M is
1 where a segment ends, else 0. Losses and entropies are in nats.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from spider.config import SpiderConfig
from spider.model.contexts import Integers, library_of
from spider.model.layers import WideLinear
from spider.model.noise import splitmix, uniform
from spider.model.packing import Packing
from spider.model.segments import last_boundary
from spider.vocabulary import EOS_ID, PAD_ID

# --------------------------------------------------------------------------------------------------
# FlexiTokens


def flexitokens_boundaries(
    p_M: Tensor, packing: Packing, noise_M: Tensor | None, summed: Tensor | None
) -> Tensor:
    """End a segment where the running sum of p over the document, plus an offset, crosses an
    integer: b [M].

    This is systematic sampling: a segment ends at each byte with probability p, as with independent
    draws, but lengths vary less. In training each document draws its offset from its noise; in
    evaluation the offset is 0.5, which gives as many boundaries. The gradient is straight-through
    to p.

    summed [documents] float64: in decoding, the sum of p over earlier steps, updated here."""
    total_M = p_M.detach().double().cumsum(0)  # over all documents
    before_M = nn.functional.pad(total_M, (1, -1))
    start_M = packing.cu_seqlens.index_select(0, packing.document)
    offset_M = 0.5 - before_M.index_select(0, start_M)  # minus the earlier documents
    if summed is not None:
        offset_M = offset_M + summed.index_select(0, packing.document)
        summed.index_add_(0, packing.document, p_M.double())
    if noise_M is not None:
        offset_M = offset_M - 0.5 + uniform(noise_M.index_select(0, start_M))
    crosses_M = (total_M + offset_M).floor() > (before_M + offset_M).floor()
    b_M = crosses_M.to(p_M.dtype)
    if p_M.requires_grad:
        # p - p is 0, or NaN if p diverges; b stays 0 or 1 even then
        b_M = b_M + (p_M - p_M.detach()).nan_to_num(0)
    return b_M


def end_documents(b_M: Integers, ids_M: Integers) -> Integers:
    """Return b with the boundaries of special ids: EOS always ends a segment, PAD never."""
    library = library_of(b_M)
    return library.where(ids_M == EOS_ID, 1, library.where(ids_M == PAD_ID, 0, b_M))


def boundary_loss(b_M: Tensor, input_ids: Tensor, config: SpiderConfig) -> Tensor:
    """Return the loss that controls the rate of FlexiTokens' boundaries: the distance of a
    sequence's boundaries per byte from the band [alpha - lambda * sigma, alpha], averaged over
    sequences."""
    if config.boundaries != "flexitokens":
        return b_M.new_zeros(())
    n_bytes = (input_ids != PAD_ID).sum(1).clamp_min(1)  # [B]
    rate = b_M.view(input_ids.shape).sum(1) / n_bytes
    high = config.boundary_alpha
    low = high - config.boundary_lambda * config.boundary_sigma
    return ((rate - high).relu() + (low - rate).relu()).mean()


# --------------------------------------------------------------------------------------------------
# Learned boundaries

GAIN_WEIGHT = 3.0  # weight of the gain in the score; surprise has weight 1
# Steps between which the regression's weight in the score rises linearly from 0 to 1
TRUST_BEGINS = 30
TRUST_COMPLETE = 60
HISTOGRAM_DECAY = 0.9  # each step's factor on the counts of earlier scores, after TRUST_COMPLETE
STRAY_RATE = 0.003  # random boundaries per byte, in training
STRAY_SITE = 5  # site of the noise; dropout has sites 0 to 3, see spider_model
LOSS_WEIGHT = 0.001  # weight of both squared errors: too small to affect gradient clipping
# The regression's targets are clamped to these, in nats
MAX_LOSS = 12.0
MAX_GAIN = 3.0
# The histogram of scores has N_BINS bins of BIN nats each, from -MAX_SCORE to MAX_SCORE
MAX_SCORE = 8.0
N_BINS = 1 << 16
BIN = 2 * MAX_SCORE / N_BINS
TIE_BINS = 64  # bins over which `tie` spreads equal scores


class PredictorTerms(NamedTuple):
    """What SurprisePredictor adds to a training pass, before the bytes' losses are known."""

    predicted_loss_M: Tensor  # loss of each byte's next byte, for surprise_loss
    zero_nats_M: Tensor  # zeros to add to the actual losses, see GainRegression
    counts: Tensor  # see SurprisePredictor.count


class GainRegression(torch.autograd.Function):
    """Fit the gain of each boundary, in the backward pass, to the nats that the boundary saves.

    Return `unpooled` unchanged, and zero_nats [M], zeros to add to the losses of the bytes. The
    gradient of zero_nats is nat_weight = dL/dnats, the weight of each byte's loss in the loss L to
    minimize: 0 for a byte without a label, and for all bytes if L is not the model's.

    earlier_MD: what each byte would receive without its last boundary. rate: boundaries per
    byte."""

    @staticmethod
    def forward(ctx, unpooled_MD, gain_M, b_M, earlier_MD, rate):
        ctx.save_for_backward(unpooled_MD - earlier_MD, gain_M, b_M)
        ctx.rate = rate
        zero_nats_M = torch.zeros_like(gain_M)
        return unpooled_MD.view_as(unpooled_MD), zero_nats_M

    @staticmethod
    def backward(ctx, grad_MD, nat_weight_M):
        difference_MD, gain_M, b_M = ctx.saved_tensors

        # How a boundary changes L, to first order: summed over the bytes whose last boundary it is,
        #     change = dL/dunpooled * (unpooled - earlier)
        change_M = (grad_MD * difference_MD).sum(1).to(gain_M.dtype)
        boundary_M = last_boundary(b_M).clamp_min(0)
        change_M = torch.zeros_like(gain_M).index_add_(0, boundary_M, change_M)

        # The nats that the boundary saves:
        #     target = -change / nat_weight
        target_M = -change_M / nat_weight_M.clamp_min(1e-30)
        target_M = target_M.clamp(-MAX_GAIN, MAX_GAIN)

        # The squared error, a mean over the boundaries, which are `rate` of all bytes:
        #     error = LOSS_WEIGHT / rate * nat_weight * (gain - target)^2
        grad_M = 2 * LOSS_WEIGHT / ctx.rate * nat_weight_M * (gain_M - target_M)
        return grad_MD, torch.where(b_M > 0, grad_M, 0), None, None, None


def surprise_loss(predicted_M: Tensor, losses_M: Tensor, has_label_M: Tensor) -> Tensor:
    """Return the squared error of the predicted losses, summed over the bytes with a label."""
    error_M = predicted_M - losses_M.clamp_max(MAX_LOSS)
    return LOSS_WEIGHT * torch.where(has_label_M, error_M, 0).square().sum()


class SurprisePredictor(nn.Module):
    """Score how much a boundary is worth at each byte, and end a segment where the score exceeds a
    threshold:

        score = entropy(last byte) + trust * (surprise + GAIN_WEIGHT * gain) + tie

    - entropy of the next byte given the last one, relative to the mean entropy. It comes from
      counts of pairs of bytes, so it is known after one step (Harris 1955; BLT, arXiv 2412.09871,
      uses the entropy of a model).
    - surprise: the loss of the next byte beyond the entropy, as a small regression predicts it from
      the byte's state.
    - gain, the regression's second output: how many nats a boundary saves, to first order, if the
      bytes after it receive the segment that ends there instead of the segment before. It is
      observed at boundaries and, in training, at random strays. Without it the loss is 0.004 higher
      (docs/results/learning.md).
    - trust rises from 0 at TRUST_BEGINS to 1 at TRUST_COMPLETE, because early losses say little.
    - tie spaces boundaries evenly where all bytes are alike.

    The threshold is the quantile of scores that leaves `rate` boundaries per byte. The regression
    reads detached states, so only its own weights learn from its errors. All learning is
    from sums over bytes, so micro-batches and ranks make no difference. Call `update` once per
    optimizer step."""

    def __init__(self, hidden_size: int, vocab_size: int, rate: float):
        super().__init__()
        self.rate = rate
        self.regression = nn.Sequential(
            WideLinear(hidden_size, hidden_size // 4, bias=True),
            nn.GELU(),
            WideLinear(hidden_size // 4, 2, bias=True),
        )
        self.pairs: Tensor = nn.Buffer(torch.empty(vocab_size, vocab_size))  # counts by byte, next
        # entropy of the next byte after each byte, minus the mean
        self.entropy: Tensor = nn.Buffer(torch.empty(vocab_size))
        self.histogram: Tensor = nn.Buffer(torch.empty(N_BINS))  # counts of scores
        self.threshold: Tensor = nn.Buffer(torch.empty(1))
        self.mean_loss: Tensor = nn.Buffer(torch.empty(1))  # nats per byte in the last step
        self.steps: Tensor = nn.Buffer(torch.empty(1))

    @torch.no_grad()
    def init_weights(self):
        """Initialize weights and buffers: the gain is 0, and boundaries are evenly spaced."""
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
        """Predict surprise and gain [M, 2] from the normed states of bytes."""
        return self.regression(x_MD.detach())

    def trust(self, later: int = 0) -> Tensor:
        """Return the regression's weight [1] in this step, or `later` steps ahead."""
        since = self.steps + later - TRUST_BEGINS
        return (since / (TRUST_COMPLETE - TRUST_BEGINS)).clamp(0, 1)

    def score(self, predicted: Tensor, ids_M: Tensor, position_M: Tensor, later: int = 0) -> Tensor:
        """Return the bytes' scores [M]. position_M: positions in the document. later: see trust."""
        surprise_M, gain_M = predicted.unbind(1)
        trusted_M = self.trust(later) * (surprise_M + GAIN_WEIGHT * gain_M)
        # 0.3 keeps ties away from the initial threshold, 1 - rate
        tie_M = (position_M + 0.3) * self.rate % 1
        return self.entropy.index_select(0, ids_M) + trusted_M + tie_M * (TIE_BINS * BIN)

    @torch.no_grad()
    def boundaries(
        self, predicted: Tensor, ids_M: Tensor, position_M: Tensor, noise_M: Tensor | None
    ) -> Tensor:
        """Decide where segments end: bool [M]. noise_M: for strays, in training."""
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
        """Observe a training pass. Return `unpooled` with unchanged values, from whose gradient the
        gain learns (see GainRegression), and PredictorTerms."""
        surprise_M, gain_M = predicted.unbind(1)
        unpooled_MD, zero_nats_M = GainRegression.apply(
            unpooled_MD, gain_M, b_M, earlier_MD, self.rate
        )
        predicted_loss_M = self.entropy.index_select(0, ids_M) + surprise_M + self.mean_loss
        counts = self.count(predicted, ids_M, position_M)
        return unpooled_MD, PredictorTerms(predicted_loss_M, zero_nats_M, counts)

    @torch.no_grad()
    def count(self, predicted: Tensor, ids_M: Tensor, position_M: Tensor) -> Tensor:
        """Count scores by bin, with the next step's trust, and pairs of bytes: [N_BINS + V * V]
        fp32. EOS and PAD have no score. A pair lies within a document."""
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
        """Update entropies and threshold from the counts and the mean loss of a step, over all
        micro-steps and ranks."""
        scores, pairs = counts.split((N_BINS, self.pairs.numel()))
        self.pairs += pairs.view_as(self.pairs)
        total_V = self.pairs.sum(1)
        total = total_V.sum().clamp_min(1)
        entropy_V = torch.special.entr(self.pairs / total_V.clamp_min(1)[:, None]).sum(1)
        self.entropy.copy_(entropy_V - entropy_V @ total_V / total)
        self.steps += 1
        # As long as the next step's trust is 0, the counts of bytes determine the scores. Until
        # trust is complete, scores change too fast to keep the counts of earlier steps.
        untrusted = self._expected_scores(total_V * (scores.sum() / total))
        trusted = self.histogram * HISTOGRAM_DECAY * (self.steps > TRUST_COMPLETE) + scores
        self.histogram.copy_(torch.where(self.trust() > 0, trusted, untrusted))
        self._set_threshold()
        self.mean_loss.fill_(mean_loss)

    def _expected_scores(self, total_V: Tensor) -> Tensor:
        """Return the histogram of scores with zero trust: the entropy of each byte, counted
        total_V times and spread over the bins of its ties."""
        first_V = ((self.entropy + MAX_SCORE) / BIN).round().long()
        tie = torch.arange(TIE_BINS, device=total_V.device)
        bins = (first_V[:, None] + tie).clamp(0, N_BINS - 1)  # [V, TIE_BINS]
        counts = (total_V / TIE_BINS).repeat_interleave(TIE_BINS)
        return torch.zeros_like(self.histogram).index_add_(0, bins.flatten(), counts)

    def _set_threshold(self):
        """Set the threshold so that `rate` of the histogram's scores lie above it. Without scores,
        keep it."""
        falling = self.histogram.flip(0)  # from the highest bin down
        above = falling.cumsum(0)  # scores in this bin or a higher one
        wanted = self.rate * above[-1:]
        i = torch.searchsorted(above, wanted).clamp_max(N_BINS - 1)  # the bin of the threshold
        inside = falling[i]
        # the fraction of the bin above the threshold
        fraction = (wanted - above[i] + inside) / inside.clamp_min(1e-9)
        threshold = MAX_SCORE - (i + fraction) * BIN
        self.threshold.copy_(torch.where(wanted > 0, threshold, self.threshold))
