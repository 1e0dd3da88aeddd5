"""Tensors of a training state that this process does not hold completely: sharded over ranks, or stored in files.

`RemoteTensor` is their interface: shape, dtype, `rows` and `gather`. `ShardedRows` is sharded over ranks, `Chunk` is
what one rank writes of it; sharded_reading.StoredTensor is in files. `copy_to_host` copies a nested state.
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

SMALL_CHUNK = 1 << 20                     # bytes; replicated rows up to this size are written by one rank


class RemoteTensor:
    """A tensor of which this process holds some rows or none."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    def rows(self, first: int = 0, end: int | None = None) -> Tensor:
        """Return some rows, or all, in host memory; only if any rank can read them without the others."""
        raise NotImplementedError(type(self).__name__)

    def gather(self, into=None):
        """Return the tensor in host memory, in the buffer `into` if that fits. Every rank calls it if the tensor is
        sharded over ranks."""
        return self.rows()


@dataclass
class ShardedRows(RemoteTensor):
    """A tensor of which each rank holds the rows of its shard; rank = replica * shards + shard."""
    local: Tensor
    bounds: list[int]                     # first row of each shard, and the number of rows
    rank: int
    ranks: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.bounds[-1], *self.local.shape[1:]

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    @property
    def shards(self) -> int:
        return len(self.bounds) - 1

    def gather(self, into=None) -> Tensor | None:
        """Return all rows on rank 0, and None on the others; those of the first replica send their rows."""
        if self.rank:
            if self.rank < self.shards and self.local.numel():
                dist.send(self.local.detach().contiguous(), 0)
            return None
        out = host_buffer(self, into, self.local.is_cuda)
        first, *others = out.split([end - begin for begin, end in zip(self.bounds, self.bounds[1:])])
        first.copy_(self.local.detach())
        for rank, rows in enumerate(others, 1):
            if rows.numel():
                received = torch.empty_like(rows, device=self.local.device) if self.local.is_cuda else rows
                dist.recv(received, rank)
                if received is not rows:
                    rows.copy_(received)
        return out


@dataclass
class Chunk(RemoteTensor):
    """The rows of a tensor that one rank writes to a sharded checkpoint; `local` is None if it writes none."""
    local: Tensor | None
    first: int                            # of the tensor's rows
    shape: tuple[int, ...]                # of the whole tensor
    dtype: torch.dtype

    def gather(self, into=None) -> "Chunk":
        """Copy this rank's rows to host memory."""
        return replace(self, local=copy_to_host(self.local, into.local if isinstance(into, Chunk) else None))


def chunk_to_write(value: Tensor | ShardedRows, rank: int, ranks: int) -> Chunk:
    """Choose the rows of a tensor that a rank writes, so that each row is written once. Ranks that hold the same rows
    write equal numbers of them, or the first one all if they are small."""
    if isinstance(value, ShardedRows):
        local, bounds, shards = value.local, value.bounds, value.shards
    else:
        local, bounds, shards = value, [0, len(value) if value.ndim else 1], 1
    shard, holder, holders = rank % shards, rank // shards, ranks // shards
    if local.nbytes <= SMALL_CHUNK:
        holders = 1
    count = bounds[shard + 1] - bounds[shard]
    first, end = count * holder // holders, count * (holder + 1) // holders
    writes = holder < holders and (first < end or bounds[-1] == shard == 0)
    rows = local.detach()[first:end] if local.ndim else local.detach()
    return Chunk(rows if writes else None, bounds[shard] + first, (bounds[-1], *local.shape[1:]) if local.ndim else (),
                 local.dtype)


def host_buffer(like: Tensor | RemoteTensor, into, pinned: bool) -> Tensor:
    """Return `into` if it is a tensor of this shape and dtype, else a new one in host memory."""
    if isinstance(into, Tensor) and (tuple(into.shape), into.dtype) == (tuple(like.shape), like.dtype):
        return into
    return torch.empty(tuple(like.shape), dtype=like.dtype, pin_memory=pinned)


def copy_to_host(value, into=None):
    """Copy a nested state to host memory, into the tensors of an earlier copy if they fit. This gathers remote tensors,
    so every rank calls it if there are any."""
    if isinstance(value, RemoteTensor):
        return value.gather(into)
    if isinstance(value, Tensor):
        return host_buffer(value, into, value.is_cuda).copy_(value.detach(), non_blocking=True)
    if isinstance(value, dict):
        return {key: copy_to_host(entry, into.get(key) if isinstance(into, dict) else None)
                for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        old = into if isinstance(into, (list, tuple)) and len(into) == len(value) else [None] * len(value)
        return type(value)(map(copy_to_host, value, old))
    return value
