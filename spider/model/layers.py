"""SwiGLU, and Block, the layer at byte rate. The core's layer, RecurrentBlock, is in spider_model.py."""

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

    compiled: Callable | None = None      # of `in_one_graph`, see spider.model.compilation

    def __init__(self, config: SpiderConfig, attention_class: type[nn.Module] = MLA):
        super().__init__()
        self.attention = attention_class(config)
        self.ffn = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, packing: Packing, cache: Cache | None = None) -> Tensor:
        if self.compiled is not None and torch.is_grad_enabled():
            return self.compiled(self, x, packing)
        return self.run(x, packing, cache)

    def run(self, x: Tensor, packing: Packing, cache: Cache | None = None) -> Tensor:
        x = x + self.attention(rms_norm(x), packing, ALL_ROWS, cache=cache)[0]
        return x + self.ffn(rms_norm(x))

    def in_one_graph(self, x: Tensor, packing: Packing) -> Tensor:
        return self.run(x, packing)
