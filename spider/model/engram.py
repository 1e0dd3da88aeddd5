"""Lookup memories: Engram tables of hashed n-grams, at segment rate and at byte rate.

Engram (arXiv 2601.07372) looks up learned rows by the last bytes: at segment rate before core layers, at byte rate
(BLT, arXiv 2412.09871) before prelude and head. The match memory (the match model of PAQ, Mahoney 2005) finds the last
occurrences of the current context in the document and the bytes after them. Shapes as in spider_model.py.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spider.model.cache import Cache
from spider.model.casting import Linear
from spider.model.config import SpiderConfig
from spider.model.engram_table import EngramTable
from spider.model.match_memory import Matches, MatchMemory
from spider.model.norm import inverse_rms_of, rms_norm
from spider.model.packing import ActiveRows, round_up


class SegmentEngram(nn.Module):
    """The memory before a core layer: rows of the segment's last bytes, gated by the state, then convolved."""

    kernel_size = 4
    eps = 1e-3                            # of norms over tables, which start at zero: 1e-6 would multiply the first
                                          # gradients by a thousand, and these would stay in Adagrad's accumulators

    def __init__(self, config: "SpiderConfig"):
        super().__init__()
        self.table = EngramTable(config.engram_orders, config.engram_heads, config.engram_rows, config.engram_dim)
        self.key_proj = Linear(self.table.width, config.hidden_size)
        self.value_proj = Linear(self.table.width, config.hidden_size)
        self.conv_weight = nn.Parameter(torch.empty(self.kernel_size, config.hidden_size))

    @classmethod
    def taps(cls, config: "SpiderConfig") -> list[int]:
        """Return the distances, in segments, of the earlier taps of the convolution."""
        return [tap * len(config.engram_orders) for tap in range(1, cls.kernel_size)]

    def recall(self, shifted: Tensor, position: Tensor, dtype: torch.dtype) -> "Recalled":
        """Compute what all loops share, for segments at `position` [N] that end with bytes `shifted` [K, N]."""
        memory = self.table(shifted).flatten(1).to(dtype)
        key, value = rms_norm(self.key_proj(memory), self.eps), self.value_proj(memory)
        wide = torch.promote_types(dtype, torch.float32)
        power = torch.linalg.vector_norm(value, dim=1, keepdim=True, dtype=wide).square() / value.shape[1]
        if torch.is_grad_enabled():       # cheap to recompute, and three times as large as its inputs
            taps, row = checkpoint(self.taps_of, value, position, use_reentrant=False, preserve_rng_state=False)
        else:
            taps, row = self.taps_of(value, position)
        return Recalled(key, value, power, row, taps)

    def taps_of(self, value: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weighted values of all taps, [N, taps, D], and the index of each tap's segment, [N * taps]."""
        back = torch.arange(self.kernel_size, device=value.device) * len(self.table.orders)
        there = position[:, None] >= back                                                    # [N, taps]
        row = (torch.arange(len(value), device=value.device)[:, None] - back).clamp_min(0)
        taps = value.index_select(0, row.flatten()).unflatten(0, row.shape)
        return taps * (there[:, :, None] * self.conv_weight.to(value.dtype)), row.flatten()

    def forward(self, h: Tensor, recalled: "Recalled", active: ActiveRows, before: Tensor | None,
                cache: Cache | None = None) -> tuple[Tensor, Tensor]:
        """Add the memory to the active rows h [n, D]; return them, and the scales that the convolution reads. `before`:
        the scales of the loop before, which inactive rows keep.

        Only the gates change between loops. The convolution reads u = gate * value, normed: that is value times a
        scale per segment, [N, 1], so it is the sum of scales times the weighted values of the taps. In decoding, a
        cache holds the inputs of earlier steps, [N, D]."""
        key, value, power = (active.pick(tensor) for tensor in recalled[:3])
        gate = self.gate(h, key)
        scale = (gate * torch.rsqrt(gate * gate * power + self.eps)).to(h.dtype)
        if cache is None:
            read = active.merge(before, scale)
            number = read.flatten().index_select(0, recalled.row).view(len(read), 1, -1)     # [N, 1, taps]
            convolved = torch.bmm(active.pick(number), active.pick(recalled.taps)).squeeze(1)
        else:
            read = active.merge(before, scale * value)
            convolved = active.pick(self.convolve(read, cache))
        return torch.addcmul(h, gate.to(h.dtype), value) + F.silu(convolved), read

    def gate(self, h: Tensor, key: Tensor) -> Tensor:
        """Compute gates from states h [n, D] and keys [n, D]: [n, 1] in (0, 1), at least fp32."""
        match = _Match.apply(h, key)
        return torch.sigmoid(match.sign() * match.abs().clamp_min(1e-6).sqrt())

    def convolve(self, read: Tensor, cache: Cache) -> Tensor:
        """Apply the causal depthwise convolution over a document's segments in decoding, [N, D] -> [N, D]."""
        first, *weights = self.conv_weight.to(read.dtype)
        out = read * first
        for weight, x in zip(weights, cache.put_and_look_back(read)):
            out = out + x * weight
        return out


class Recalled(NamedTuple):
    """The lookups of a segment Engram, shared by all loops."""
    key: Tensor                           # [N, D], normed
    value: Tensor                         # [N, D]
    power: Tensor                         # [N, 1], mean square of value, at least fp32
    row: Tensor                           # int64 [N * taps], the segments that a segment's convolution reads
    taps: Tensor                          # [N, taps, D], values there times their weights, 0 before a document's start


class _Match(torch.autograd.Function):
    """Compute <rms_norm(h), key> / sqrt(D) of rows [n, D] -> [n, 1], at least fp32, without storing normed rows."""

    @staticmethod
    def forward(ctx, h, key):
        inverse_rms = inverse_rms_of(h, 1e-6)
        dot = torch.bmm(h[:, None], key[:, :, None]).squeeze(2).to(inverse_rms.dtype)
        match = dot * inverse_rms * h.shape[1] ** -0.5
        ctx.save_for_backward(h, key, inverse_rms, match)
        return match

    @staticmethod
    def backward(ctx, grad):
        h, key, inverse_rms, match = ctx.saved_tensors
        grad = grad * inverse_rms
        to_key = (grad * h.shape[1] ** -0.5).to(h.dtype)
        to_h = (grad * match * inverse_rms / h.shape[1]).to(h.dtype)
        return torch.addcmul(to_key * key, to_h, h, value=-1), to_key * h


class ByteEngram(nn.Module):
    """The memory at byte rate: rows of every n-gram order and of the match memory."""

    def __init__(self, config: "SpiderConfig", matches: int):
        super().__init__()
        orders, dim = config.engram_byte_orders, config.engram_byte_dim
        self.table = EngramTable(orders, 1, config.engram_byte_rows, dim) if orders else None
        rows = round_up(MatchMemory.NOTHING + 1, 32)  # so that sharding does not split blocks of 8-bit AdamW
        self.followed = nn.Parameter(torch.empty(matches, rows, dim)) if matches else None
        self.proj = Linear((len(orders) + matches) * dim, config.hidden_size)

    def rows(self, shifted: Tensor, matches: Matches | None, dtype: torch.dtype) -> Tensor:
        """Look up shifted [K, M] and the matches of [M, match contexts]: [M, orders and contexts, dim]."""
        rows = [self.table(shifted)] if self.table is not None else []                       # of [M, orders, dim]
        if self.followed is not None:
            first = torch.arange(len(self.followed), device=shifted.device) * self.followed.shape[1]
            rows.append(F.embedding(matches.row + first, self.followed.flatten(0, 1)))
        return torch.cat([tensor.to(dtype) for tensor in rows], dim=1)

    def forward(self, x: Tensor, shifted: Tensor, matches: Matches | None) -> Tensor:
        """Return the term to add to x [M, D]."""
        return self.proj(self.rows(shifted, matches, x.dtype).flatten(1))


class OutputEngram(ByteEngram):
    """The memory before the head, whose rows are weighted by gates of the state. It can also add to the logits
    directly: linearly from its rows (`engram_logits`), and by votes for the bytes that followed a context's last
    occurrences (`engram_votes`; beside tables they replace the rows of matches). A small network of the state weighs
    the votes, as the mixer of PAQ weighs predictions (Mahoney 2005)."""

    def __init__(self, config: "SpiderConfig"):
        super().__init__(config, config.matches_before_head)
        self.config, c, width = config, config, self.proj.in_features
        self.gate = Linear(c.hidden_size, width // c.engram_byte_dim)
        self.logits = Linear(width, c.vocab_size) if c.engram_logits else None
        votes = c.engram_votes * c.match_contexts
        self.votes = nn.Sequential(Linear(c.hidden_size, c.hidden_size // 2), nn.GELU(),
                                   Linear(c.hidden_size // 2, votes)) if votes else None

    def forward(self, x: Tensor, shifted: Tensor, matches: Matches | None) -> tuple[Tensor, Tensor | None]:
        """Return the terms to add to x [M, D] and to the logits [M, vocab_size]."""
        state, logits = rms_norm(x), None
        rows = (self.rows(shifted, matches, x.dtype) * self.gate(state).sigmoid()[:, :, None]).flatten(1)
        if self.logits is not None:
            logits = self.logits(rows)
        if self.votes is not None:
            followed, weight = self.cast_votes(state, matches)
            wide = torch.promote_types(x.dtype, torch.float32)
            logits = x.new_zeros(len(x), self.config.vocab_size, dtype=wide) if logits is None else logits.to(wide)
            logits = logits.scatter_add(1, followed.clamp_min(0), weight.to(wide))
        return self.proj(rows), logits

    def cast_votes(self, state: Tensor, matches: Matches) -> tuple[Tensor, Tensor]:
        """Return the ids that are voted for (-1: none) and the weights of the votes, both [M, contexts * engram_votes];
        a context's votes are adjacent, the newest occurrence first. A vote for anything but a byte weighs 0."""
        followed = matches.followed[:, :, :self.config.engram_votes].flatten(1)  # MatchMemory finds at least two
        return followed, torch.where((followed >= 0) & (followed < 256), self.votes(state), 0)
