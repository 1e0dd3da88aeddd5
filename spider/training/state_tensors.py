"""Tensors of a state that lie elsewhere: on other ranks, or in a file."""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class Rows:
    """A value of a state, of which this rank has some rows."""
    own: Tensor
    bounds: list[int]
    world: object

    def gathered(self, into: Tensor | None = None) -> Tensor | None:
        """All rows in host memory on rank 0, in the tensor of an earlier time where it fits; None on other ranks, which
        send theirs meanwhile. Of several replicas the first one gives."""
        world, counts = self.world, [b - a for a, b in zip(self.bounds, self.bounds[1:])]
        if not world.is_rank0:
            if world.rank < world.shards and self.own.numel():
                dist.send(self.own.detach().contiguous(), 0)
            return None
        shape = self.bounds[-1], *self.own.shape[1:]
        if into is None or (into.shape, into.dtype) != (torch.Size(shape), self.own.dtype):
            into = torch.empty(shape, dtype=self.own.dtype, pin_memory=self.own.is_cuda)
        pieces = into.split(counts)
        pieces[0].copy_(self.own.detach())
        for rank, piece in enumerate(pieces[1:], 1):
            if piece.numel():
                arriving = piece if self.own.device.type == "cpu" else torch.empty_like(piece, device=self.own.device)
                dist.recv(arriving, rank)
                if arriving is not piece:
                    piece.copy_(arriving)
        return into


@dataclass
class Share:
    """What one rank writes of a tensor of a state where every rank writes its part; no `rows`: nothing."""
    rows: Tensor | None
    first: int                            # of the tensor's rows
    shape: tuple[int, ...]                # of the whole tensor
    dtype: torch.dtype


class Stored:
    """A tensor that lies in a checkpoint's files, of which every rank reads what it needs."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    def rows(self, first: int = 0, end: int | None = None) -> Tensor:
        raise NotImplementedError


def copied(value, into=None):
    """A copy in host memory of a nested state, into the tensors of an earlier copy where they fit."""
    if isinstance(value, Rows):
        return value.gathered(into)
    if isinstance(value, Share):
        return replace(value, rows=copied(value.rows, into.rows if isinstance(into, Share) else None))
    if isinstance(value, Stored):
        return value.rows()
    if isinstance(value, Tensor):
        fits = isinstance(into, Tensor) and (into.shape, into.dtype) == (value.shape, value.dtype)
        out = into if fits else torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
        return out.copy_(value.detach(), non_blocking=True)
    if isinstance(value, dict):
        return {key: copied(part, into.get(key) if isinstance(into, dict) else None) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        old = into if isinstance(into, (list, tuple)) and len(into) == len(value) else [None] * len(value)
        return type(value)(copied(part, its_old) for part, its_old in zip(value, old))
    return value
