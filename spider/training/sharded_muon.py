"""Muon on several ranks: `MatrixAssignment` distributes the matrices to orthogonalize."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spider.training.ranks import World

MOST_TOGETHER = 1 << 26                   # maximum elements of a batch of matrices


class AssignedMatrix(NamedTuple):
    """A matrix that one rank orthogonalizes."""
    param: int                            # index of the parameter
    index: int | None                     # in the rank's part of a stack; None: a matrix sharded by rows
    rows: list[int]                       # on each shard
    columns: int
    replica: int                          # of its owner
    shard: int


class MatrixAssignment:
    """An assignment of whole matrices to ranks. Matrices sharded by rows are sent to their owner and back; those of a
    stack stay on their shard; replicas exchange results. Every rank computes the same assignment."""

    def __init__(self, world: World, shapes: list[tuple[int, ...]], bounds: list[list[int]]):
        """shapes: of the parameters; bounds: for each, the first row of every shard and the number of rows."""
        self.world, loads, matrices, found = world, [0] * world.ranks, [], []
        for i, (shape, ends) in enumerate(zip(shapes, bounds)):
            counts = [b - a for a, b in zip(ends, ends[1:])]
            rows, columns = shape[-2:]
            cost = rows * columns * min(rows, columns)
            if len(shape) == 2:
                found.append((cost, i, None, counts, columns, range(world.ranks)))
            else:
                found += [(cost, i, j, [rows * (k == s) for k in range(world.shards)], columns,
                           range(s, world.ranks, world.shards)) for s, count in enumerate(counts) for j in range(count)]
        for cost, i, index, counts, columns, allowed in sorted(found, key=lambda matrix: -matrix[0]):
            owner = min(allowed, key=lambda rank: loads[rank])
            loads[owner] += cost
            matrices.append(AssignedMatrix(i, index, counts, columns, owner // world.shards, owner % world.shards))
        self.matrices, self.balance = matrices, max(loads) * world.ranks / max(1, sum(loads))
        self.sizes = [max(shape[-2:]) for shape in shapes]                                   # longer side of a matrix

    def __call__(self, local: list[Tensor], work: Callable) -> list[Tensor]:
        """Apply `work`, [n, r, c] -> [n, r, c], to whole matrices. `local`: this rank's rows of each parameter; the
        result has the same shapes."""
        world = self.world
        mine = [matrix for matrix in self.matrices if matrix.replica == world.replica]
        cut = [matrix for matrix in mine if matrix.index is None]
        by_owner = [[matrix for matrix in cut if matrix.shard == shard] for shard in range(world.shards)]
        own = by_owner[world.shard]
        stacked = [matrix for matrix in mine if matrix.index is not None and matrix.shard == world.shard]

        received = self._all_to_all([[local[matrix.param] for matrix in owned] for owned in by_owner],
                                    [[(matrix.rows[shard], matrix.columns) for matrix in own]
                                     for shard in range(world.shards)])
        wholes = apply_in_batches([torch.cat(rows) for rows in zip(*received)]
                                  + [local[matrix.param][matrix.index] for matrix in stacked], work)
        back = [whole.split(matrix.rows) for matrix, whole in zip(own, wholes)]
        returned = self._all_to_all([[rows[shard] for rows in back] for shard in range(world.shards)],
                                    [[(matrix.rows[world.shard], matrix.columns) for matrix in owned]
                                     for owned in by_owner])
        done = {id(matrix): rows for owned, results in zip(by_owner, returned) for matrix, rows in zip(owned, results)}
        done |= {id(matrix): whole for matrix, whole in zip(stacked, wholes[len(own):])}
        done |= self._all_gather_replicas(done, local)
        out = [torch.empty_like(rows) for rows in local]
        for matrix in self.matrices:
            if id(matrix) in done:
                target = out[matrix.param] if matrix.index is None else out[matrix.param][matrix.index]
                target.copy_(done[id(matrix)])
        return out

    def _all_to_all(self, sent: list[list[Tensor]], shapes: list[list[tuple[int, int]]]) -> list[list[Tensor]]:
        """Exchange tensors with the shards of this replica; return the received ones, by shard, in these shapes."""
        if self.world.shards == 1:
            return sent
        flat = [[tensor.flatten() for tensor in tensors] for tensors in sent]
        sizes = [[math.prod(shape) for shape in of_shard] for of_shard in shapes]
        like = next(tensor for tensors in flat + [[torch.empty(0, device=self.world.device)]] for tensor in tensors)
        sending = torch.cat([like[:0], *(tensor for tensors in flat for tensor in tensors)])
        received = sending.new_empty(sum(map(sum, sizes)))
        dist.all_to_all_single(received, sending, [sum(of_shard) for of_shard in sizes],
                               [sum(map(len, tensors)) for tensors in flat], group=self.world.mesh.get_group("shards"))
        return [[tensor.view(shape) for tensor, shape in zip(chunk.split(of_shard), its_shapes)] for chunk, of_shard,
                its_shapes in zip(received.split([sum(of_shard) for of_shard in sizes]), sizes, shapes)]

    def _all_gather_replicas(self, done: dict[int, Tensor], local: list[Tensor]) -> dict[int, Tensor]:
        """Return this rank's rows of the matrices that the other replicas own."""
        world = self.world
        if world.replicas == 1:
            return {}
        shapes = {id(matrix): (matrix.rows[world.shard], matrix.columns) for matrix in self.matrices}
        by_replica = [[matrix for matrix in self.matrices if matrix.replica == replica and matrix.rows[world.shard]]
                      for replica in range(world.replicas)]
        longest = max(sum(math.prod(shapes[id(matrix)]) for matrix in owned) for owned in by_replica)
        sending = torch.cat([local[0].new_zeros(0), *(done[id(matrix)].flatten()
                                                      for matrix in by_replica[world.replica])])
        sending = nn.functional.pad(sending, (0, longest - len(sending)))
        received = list(sending.new_empty(world.replicas, longest))
        dist.all_gather(received, sending, group=world.mesh.get_group("replicas"))
        out = {}
        for owned, chunk in zip(by_replica, received):
            sizes = [math.prod(shapes[id(matrix)]) for matrix in owned]
            out |= {id(matrix): rows.view(shapes[id(matrix)])
                    for matrix, rows in zip(owned, chunk[:sum(sizes)].split(sizes))}
        return out


def apply_in_batches(matrices: list[Tensor], work: Callable) -> list[Tensor]:
    """Apply `work` to stacks of matrices of the same shape, with at most MOST_TOGETHER elements each."""
    by_shape, out = {}, [None] * len(matrices)
    for i, matrix in enumerate(matrices):
        by_shape.setdefault(matrix.shape, []).append(i)
    for shape, indices in by_shape.items():
        at_once = max(1, MOST_TOGETHER // math.prod(shape))
        for k in range(0, len(indices), at_once):
            batch = indices[k:k + at_once]
            for i, result in zip(batch, work(torch.stack([matrices[i] for i in batch])).unbind()):
                out[i] = result
    return out
