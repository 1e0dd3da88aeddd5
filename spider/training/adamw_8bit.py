"""8-bit AdamW (bitsandbytes), on one rank or sharded."""

import math

import torch

from spider.errors import WorldError
from spider.training.machine import quiet

BLOCK = 256                               # elements per scale
MIN_8BIT = 4096                           # elements; smaller parameters have fp32 states


def adamw_8bit(params, settings: dict, sharded: list) -> torch.optim.Optimizer:
    """Construct bitsandbytes' AdamW8bit. The shards of `sharded` parameters use the same number of bits, and the same
    blocks, as the whole parameter would."""
    with quiet():
        import bitsandbytes
    if not sharded:
        return bitsandbytes.optim.AdamW8bit(params, **settings)
    check_blocks(sharded)
    sizes = {id(param.local): math.prod(param.shape) for param in sharded}

    class ShardedAdamW8bit(bitsandbytes.optim.AdamW8bit):
        def get_config(self, gindex, pindex, group):
            p = group["params"][pindex]
            config = super().get_config(gindex, pindex, group)
            return config | dict(min_8bit_size=0 if sizes.get(id(p), p.numel()) >= MIN_8BIT else math.inf)

        def update_step(self, group, p, gindex, pindex):
            if p.numel():                 # a shard may be empty
                super().update_step(group, p, gindex, pindex)
    return ShardedAdamW8bit(params, **settings)


def check_blocks(sharded: list):
    """Raise WorldError if a shard begins inside a block, whose scale would then differ."""
    for param in sharded:
        row = math.prod(param.shape[1:])
        if math.prod(param.shape) >= MIN_8BIT and any(bound * row % BLOCK for bound in param.bounds[1:-1]):
            raise WorldError(f"--shards {len(param.bounds) - 1} would split a block of {BLOCK} numbers of "
                             f"{param.name} {list(param.shape)}, which share a scale in 8-bit AdamW: use other "
                             f"--shards, or --optimizer adamw")
