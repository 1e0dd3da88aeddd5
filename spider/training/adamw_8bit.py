"""AdamW with states of 8 bits (bitsandbytes), on one rank or on shards."""

import math

import torch

from spider.errors import WorldError
from spider.training.machine import quiet

BLOCK = 256                               # elements for which it keeps one scale
MIN_8BIT = 4096                           # elements from which on it keeps 8 bits


def adamw_8bit(params, settings: dict, sharded: list) -> torch.optim.Optimizer:
    """Construct bitsandbytes' AdamW8bit; on the shards of `sharded` parameters with the number of bits, and the blocks
    of one scale, that the whole parameter has."""
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
            if p.numel():                 # a shard may have no row of it
                super().update_step(group, p, gindex, pindex)
    return ShardedAdamW8bit(params, **settings)


def check_blocks(sharded: list):
    """Raise WorldError where a shard of a parameter begins within a block of one scale: it would be another scale."""
    for param in sharded:
        row = math.prod(param.shape[1:])
        if math.prod(param.shape) >= MIN_8BIT and any(bound * row % BLOCK for bound in param.bounds[1:-1]):
            raise WorldError(f"--shards {len(param.bounds) - 1}: 8-bit AdamW scales {BLOCK} numbers together, and "
                             f"{param.name} {list(param.shape)} would be cut between them: use other --shards, or "
                             f"--optimizer adamw")
