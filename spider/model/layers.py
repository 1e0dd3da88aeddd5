"""What layers are built of: products, norm, packed rows of documents, latent attention with its cache, feed-forward.

Rows of several documents lie one after the other, [rows, D], with `cu_seqlens` marking where each starts (Packing);
where attention has no kernel for that they are filled up in buckets. Shapes as in spider_model.py. Source of MLA:
DeepSeek-V2, arXiv 2405.04434.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spider.model.attention import MLA
from spider.model.cache import Cache
from spider.model.casting import Linear
from spider.model.config import SpiderConfig
from spider.model.norm import rms_norm
from spider.model.packing import ALL_ROWS, Packing


class SwiGLU(nn.Module):
    """Gated feed-forward, [rows, D] -> [rows, D]."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Block(nn.Module):
    """A dense layer at byte rate, [M, D] -> [M, D]."""

    compiled: Callable | None = None      # see Spider.compile_layers

    def __init__(self, config: "SpiderConfig"):
        super().__init__()
        self.attention = MLA(config)
        self.ffn = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, packing: Packing, cache: Cache | None = None) -> Tensor:
        if self.compiled is not None and torch.is_grad_enabled():
            return self.compiled(self, x, packing)
        return self.run(x, packing, cache)

    def run(self, x: Tensor, packing: Packing, cache: Cache | None = None) -> Tensor:
        x = x + self.attention(rms_norm(x), packing, ALL_ROWS, cache=cache)[0]
        return x + self.ffn(rms_norm(x))
