"""Shards of parameters and optimizer state (FSDP2)."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from spider.errors import WorldError


@dataclass
class Part:
    """A parameter of which this rank has some rows, those of its shard."""
    name: str
    whole: nn.Parameter                   # FSDP's
    own: nn.Parameter                     # the rows as a plain tensor, in the same memory: what optimizers see
    bounds: list[int]                     # first row of each shard, and behind the last one

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.whole.shape)


BLOCK = 256                               # elements for which 8-bit AdamW keeps one scale


def bounds_of(part: Part | None, key: str) -> list[int] | None:
    """Which rows of an optimizer's value for a parameter each shard has; None: all of it."""
    if part is None or key not in ("exp_avg", "exp_avg_sq", "momentum_buffer", "state1", "state2", "absmax1",
                                   "absmax2"):
        return None
    if not key.startswith("absmax"):
        return part.bounds
    row = math.prod(part.shape[1:])
    return [-(-bound * row // BLOCK) for bound in part.bounds]


def check_blocks(parts: list[Part]):
    """WorldError where a shard of a parameter begins within a block of 8-bit AdamW: its scale would be another one."""
    for part in parts:
        row = math.prod(part.shape[1:])
        if math.prod(part.shape) >= MIN_8BIT and any(bound * row % BLOCK for bound in part.bounds[1:-1]):
            raise WorldError(f"--shards {len(part.bounds) - 1}: 8-bit AdamW scales {BLOCK} numbers together, and "
                             f"{part.name} {list(part.shape)} would be cut between them: use other --shards, or "
                             f"--optimizer adamw")


MIN_8BIT = 4096                           # elements from which on 8-bit AdamW keeps 8 bits


class HalvedRows(Tensor):
    """Rows of a weight that all products take as bf16: ranks send them so, half the bytes of fp32, and have the weight
    whole in fp32 again, with the values of its cast. FSDP calls the two hooks of a tensor that has them."""

    @staticmethod
    def __new__(cls, rows: Tensor):
        return Tensor._make_wrapper_subclass(cls, rows.size(), strides=rows.stride(), dtype=rows.dtype,
                                             storage_offset=rows.storage_offset(), device=rows.device)

    def __init__(self, rows: Tensor):
        self.rows = rows

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(cls, lambda halved: halved.rows, (args, kwargs or {}))
        return tree_map_only(Tensor, cls, function(*args, **kwargs))

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        return (self.rows.to(torch.bfloat16),), None

    def fsdp_post_all_gather(self, gathered, metadata, param_dtype, *, out=None):
        (rows,) = gathered
        whole = rows.to(param_dtype) if out is None else out.data.copy_(rows)
        rows.untyped_storage().resize_(0)  # FSDP would keep it as long as the weight, and makes room for it anew
        return whole, (whole,)


def casting(model: nn.Module, modules: list[nn.Module]) -> Callable:
    """A hook that casts the weights of a group once they are gathered, inside its forward: a cast from before would be
    of shards, and of one made elsewhere the gradient would come too late, and be lost without a word."""
    def cast(group: nn.Module, args):
        for module in modules:
            module.cast_weight(model.compute_dtype)
    return cast
