"""The inputs and statistics of a forward pass of the recurrent core: CorePass, CoreStats, states of layers."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from spider.model.cache import Cache
from spider.model.packing import Packing

LayerState = tuple[Tensor | None, Tensor | None]   # of a core layer, [N, ...]: latents, inputs of the convolution
LayerCaches = tuple[Cache | None, Cache | None]    # the same of earlier decoding steps


class CoreStats(NamedTuple):              # a tuple, in which FSDP finds tensors with gradients
    """The statistics of a pass through the core. Losses are means over layer visits or segments."""
    aux_loss: Tensor                      # f_e * P_e balance loss
    z_loss: Tensor                        # router z-loss
    ponder: Tensor                        # ACT's loops + remainder, per segment
    mean_loops: Tensor                    # loops until halting, per segment
    load: Tensor                          # [L, E] fp32, tokens per expert relative to an even load, summed over loops


@dataclass(frozen=True)
class CorePass:
    """The inputs of a forward pass through the core, other than the pooled segments z [N, D]."""
    packing: Packing                      # of the segments
    last_bytes: Tensor                    # int64 [K, N], the last bytes of each segment, see ngrams.shifted_bytes
    share: Tensor                         # [N], 1 / segments, 0 for padding rows
    n_loops: int
    recompute: bool = False               # activation checkpointing of every visit of a layer
    warmup: float = 1.0                   # factor on halting probabilities
    dropout: float = 0.0                  # rate at both ends of the core
    noise: Tensor | None = None           # int64 [N], for dropout; None: no dropout
    latents: Cache | None = None          # in decoding: attention latents of earlier segments
    convolved: Cache | None = None        # in decoding: inputs of the Engram convolutions from earlier segments
