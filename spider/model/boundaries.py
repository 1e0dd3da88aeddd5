"""Boundaries of segments by a rule, or by FlexiTokens (arXiv 2507.12720) and the loss that controls their rate; see
surprise.py for learned ones."""

import torch
import torch.nn.functional as F
from torch import Tensor

from spider.model.config import SpiderConfig
from spider.model.ngrams import word_ends
from spider.model.noise import uniform
from spider.model.packing import Packing
from tokenizer import EOS_ID, PAD_ID


def flexitokens_boundaries(p: Tensor, packing: Packing, dtype: torch.dtype, noise: Tensor | None,
                           summed: Tensor | None) -> Tensor:
    """Cut where the sum of probabilities p [M] over the document, plus an offset, crosses an integer: b [M].

    This is systematic sampling: each byte is cut with probability p as in independent draws, but segments are more
    even. In training the offset is drawn once per document from noise [M]; otherwise it is 0.5, so that evaluation cuts
    as often. The gradient is straight-through to p. summed [documents] float64: in decoding, the sum of p over earlier
    steps, which is updated."""
    total = p.detach().double()
    if summed is not None and packing.longest == 1:                                          # a byte of each document
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
    return b + (p - p.detach()).nan_to_num(0) if p.requires_grad else b  # stays 0 or 1 even if p diverges


def rule_boundaries(rule: str, ids: Tensor, shifted: Tensor, packing: Packing, dtype: torch.dtype) -> Tensor:
    """Cut by one of the rules in config.BOUNDARIES: b [M] for ids [M]."""
    if rule == "words":
        return word_ends(shifted[:2]).squeeze(0).to(dtype)
    if rule == "whitespace":
        return torch.isin(ids, ids.new_tensor(list(b" \t\n\r"))).to(dtype)
    every = 3 if rule == "every_third" else 1
    return (packing.position % every == every - 1).to(dtype)


def respect_sentinels(b: Tensor, ids: Tensor) -> Tensor:
    """End a segment at every EOS and none at PAD."""
    return torch.where(ids == EOS_ID, 1, torch.where(ids == PAD_ID, 0, b))


def boundary_loss(b: Tensor, input_ids: Tensor, config: SpiderConfig) -> Tensor:
    """Return the mean distance of sequences' boundaries per byte from the band [alpha - lambda * sigma, alpha]."""
    if config.boundaries != "flexitokens":
        return b.new_zeros(())
    real = (input_ids != PAD_ID).sum(1).clamp_min(1)
    rate = b.view(input_ids.shape).sum(1) / real                                             # [B]
    low = config.boundary_alpha - config.boundary_lambda * config.boundary_sigma
    return ((rate - config.boundary_alpha).relu() + (low - rate).relu()).mean()
