"""Lookup memories: Engram tables of hashed n-grams, at segment rate and at byte rate.

Engram (arXiv 2601.07372) recalls, of the last bytes, rows that training wrote: at segment rate before core layers, at
byte rate (BLT, arXiv 2412.09871) before prelude and head. The match memory (the match model of PAQ, Mahoney 2005) looks
up what followed in the document where the last bytes stood before. Shapes as in spider_model.py.
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
from spider.model.match_memory import MatchMemory
from spider.model.norm import inverse_rms_of, rms_norm
from spider.model.packing import ActiveRows, round_up


class SegmentEngram(nn.Module):
    """The memory in front of a core layer: what the segment's last bytes recall, gated by the state, then convolved."""

    kernel_size = 4
    eps = 1e-3                            # of norms over what tables hold: at their zero start, 1e-6 would multiply
                                          # gradients by a thousand, and Adagrad would never forget it

    def __init__(self, config: "SpiderConfig"):
        super().__init__()
        self.table = EngramTable(config.engram_orders, config.engram_heads, config.engram_rows, config.engram_dim)
        self.key_proj = Linear(self.table.width, config.hidden_size)
        self.value_proj = Linear(self.table.width, config.hidden_size)
        self.conv_weight = nn.Parameter(torch.empty(self.kernel_size, config.hidden_size))

    @classmethod
    def taps(cls, config: "SpiderConfig") -> list[int]:
        """Return how many segments back the convolution looks, beside the segment itself."""
        return [tap * len(config.engram_orders) for tap in range(1, cls.kernel_size)]

    def recall(self, shifted: Tensor, position: Tensor, dtype: torch.dtype) -> "Recalled":
        """Compute what all loops share, of segments at `position` [N] that end with the bytes `shifted` [K, N]."""
        memory = self.table(shifted).flatten(1).to(dtype)
        key, value = rms_norm(self.key_proj(memory), self.eps), self.value_proj(memory)
        wide = torch.promote_types(dtype, torch.float32)
        power = torch.linalg.vector_norm(value, dim=1, keepdim=True, dtype=wide).square() / value.shape[1]
        if torch.is_grad_enabled():       # cheap to do again, and three times as large as what it is made of
            taps, row = checkpoint(self.taps_of, value, position, use_reentrant=False, preserve_rng_state=False)
        else:
            taps, row = self.taps_of(value, position)
        return Recalled(key, value, power, row, taps)

    def taps_of(self, value: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return what each tap weighs of value, [N, taps, D], and the segments where it lies, [N * taps]."""
        back = torch.arange(self.kernel_size, device=value.device) * len(self.table.orders)
        there = position[:, None] >= back                                                    # [N, taps]
        row = (torch.arange(len(value), device=value.device)[:, None] - back).clamp_min(0)
        taps = value.index_select(0, row.flatten()).unflatten(0, row.shape)
        return taps * (there[:, :, None] * self.conv_weight.to(value.dtype)), row.flatten()

    def forward(self, h: Tensor, recalled: "Recalled", active: ActiveRows, before: Tensor | None,
                cache: Cache | None = None) -> tuple[Tensor, Tensor]:
        """Add the memory to the active rows h [n, D] -> the same, and what the convolution reads; `before`: the loop
        before's, which stays for the others.

        Between loops nothing but gates changes. The convolution reads the normed u = gate * value, which is value times
        a number for each segment: these, [N, 1], times what each tap weighs of value. A cache holds what it read of
        earlier steps, [N, D]."""
        key, value, power = (active.pick(part) for part in recalled[:3])
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
        """Return how far states h [n, D] let in what their keys [n, D] stand for: [n, 1] in (0, 1), at least fp32."""
        match = _Match.apply(h, key)
        return torch.sigmoid(match.sign() * match.abs().clamp_min(1e-6).sqrt())

    def convolve(self, read: Tensor, cache: Cache) -> Tensor:
        """Convolve causally and depthwise over the segments of a document, of steps' rows [N, D] -> [N, D]."""
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
    """<rms_norm(h), key> / sqrt(D) of rows [n, D] -> [n, 1], at least fp32, without the normed rows."""

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
    """The memory at byte rate: rows of every order, and of what followed in the document, each weighed by a gate of the
    state where there is one."""

    def __init__(self, config: "SpiderConfig", gated: bool):
        super().__init__()
        orders, matches, dim = config.engram_byte_orders, config.match_contexts, config.engram_byte_dim
        self.table = EngramTable(orders, 1, config.engram_byte_rows, dim) if orders else None
        rows = round_up(MatchMemory.NOTHING + 1, 32)  # 8-bit AdamW's blocks are then whole where ranks cut it
        self.followed = nn.Parameter(torch.empty(matches, rows, dim)) if matches else None
        self.proj = Linear((len(orders) + matches) * dim, config.hidden_size)
        self.gate = Linear(config.hidden_size, len(orders) + matches) if gated else None

    def forward(self, x: Tensor, shifted: Tensor, matched: Tensor | None) -> Tensor:
        """Recall for x [M, D], shifted [K, M], matched [M, match contexts], see MatchMemory -> what is added to x, [M,
        D]."""
        rows = [self.table(shifted)] if self.table is not None else []                       # of [M, orders, dim]
        if matched is not None:
            first = torch.arange(len(self.followed), device=x.device) * self.followed.shape[1]
            rows.append(F.embedding(matched + first, self.followed.flatten(0, 1)))
        rows = torch.cat([part.to(x.dtype) for part in rows], dim=1)
        if self.gate is not None:
            rows = rows * self.gate(rms_norm(x)).sigmoid()[:, :, None]
        return self.proj(rows.flatten(1))
