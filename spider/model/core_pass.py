"""The inputs of one forward pass of the recurrent core, and what it reports: CorePass, CoreStats, states of layers."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from spider.model.cache import Cache
from spider.model.packing import Packing

LayerState = tuple[Tensor | None, Tensor | None]   # of a core layer, [N, ...]: its latents, its convolution's input
LayerCaches = tuple[Cache | None, Cache | None]    # the same of earlier steps, when decoding


class CoreStats(NamedTuple):              # a tuple: FSDP finds the tensors that carry gradients in those
    """The report of a pass through the core, beside its output. Losses are means over layer visits or segments."""
    aux_loss: Tensor                      # f_e * P_e balance loss
    z_loss: Tensor                        # router z-loss
    ponder: Tensor                        # ACT's loops + remainder, per segment
    mean_loops: Tensor                    # loops until halting, per segment
    load: Tensor                          # [L, E] fp32, tokens of an expert relative to an even share, sum over loops


@dataclass(frozen=True)
class CorePass:
    """One forward pass through the core, beside the pooled segments z [N, D]."""
    packing: Packing                      # of the segments
    last_bytes: Tensor                    # int64 [K, N], the last bytes of each, see ngrams.shifted_bytes
    share: Tensor                         # [N], 1 / segments, 0 for rows that fill up
    n_loops: int
    recompute: bool = False               # activation checkpointing of every visit of a layer
    warmup: float = 1.0                   # factor on halting probabilities
    dropout: float = 0.0                  # rate at both ends of the core
    noise: Tensor | None = None           # int64 [N], dropout's; None: nothing is dropped
    latents: Cache | None = None          # when decoding: attention latents of earlier segments
    convolved: Cache | None = None        # when decoding: what the Engram convolutions read of earlier segments
