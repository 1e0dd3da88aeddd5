"""Muon on several ranks: which rank orthogonalizes which matrix, and how matrices reach it.

Muon needs whole matrices, but FSDP cuts a matrix into rows for the shards. So each matrix has an
owner, one of all ranks, and a step has four parts:

1. Within a replica, the shards send rows to the owners that are in this replica (all-to-all).
2. Each owner orthogonalizes its matrices.
3. The owners return the rows to the shards (all-to-all).
4. The replicas, which have the same rows of all matrices, exchange their results (all-gather).

FSDP cuts a stack (of experts, for example) between its matrices. These stay whole, and so their
owners have them already: they take part in 2 and 4 alone.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spider.distributed import ShardedParameter, World

Shape = tuple[int, ...]


class Matrix(NamedTuple):
    """A matrix, and the rank that orthogonalizes it."""

    param: int  # index of the parameter
    in_stack: int | None  # index in its shard's part of a stack; None: a matrix cut into rows
    rows: tuple[int, ...]  # number of its rows on each shard; of a stack, all on one
    columns: int
    owner: int = -1  # a rank; -1: not assigned yet

    @property
    def cost(self) -> int:
        """Return the multiplications of a product of the matrix with itself."""
        rows = sum(self.rows)
        return rows * self.columns * min(rows, self.columns)


def assign(params: Sequence[ShardedParameter], world: World) -> list[Matrix]:
    """Assign all matrices of parameters: the largest first, each to the rank with the least work so
    far. Every rank computes the same assignment.

    Any rank may own a matrix that is cut into rows. A matrix of a stack stays on its shard, of
    which each replica has a rank."""
    candidates: list[tuple[Matrix, range]] = []  # and the ranks that may own each
    for i, param in enumerate(params):
        rows, columns = param.shape[-2:]
        # number of rows, or of matrices of a stack, on each shard
        counts = [end - begin for begin, end in pairwise(param.bounds)]
        if len(param.shape) == 2:
            candidates.append((Matrix(i, None, tuple(counts), columns), range(world.ranks)))
            continue
        for shard, count in enumerate(counts):
            rows_here = [0] * world.shards
            rows_here[shard] = rows
            ranks_here = range(shard, world.ranks, world.shards)
            candidates += [
                (Matrix(i, in_stack, tuple(rows_here), columns), ranks_here)
                for in_stack in range(count)
            ]
    work_of = [0] * world.ranks
    assigned = []
    for matrix, ranks in sorted(candidates, key=lambda candidate: -candidate[0].cost):
        owner = min(ranks, key=work_of.__getitem__)
        work_of[owner] += matrix.cost
        assigned.append(matrix._replace(owner=owner))
    return assigned


class MatrixAssignment:
    """An assignment of whole matrices to ranks. A call applies a function to all of them."""

    def __init__(self, world: World, params: Sequence[ShardedParameter]):
        self.world = world
        self.matrices = assign(params, world)
        # matrices cut into rows that this replica owns, by the owner's shard
        self.split: list[list[Matrix]] = [[] for _ in range(world.shards)]
        # matrices of stacks that this rank owns
        self.stacked: list[Matrix] = []
        for matrix in self.matrices:
            replica, shard = divmod(matrix.owner, world.shards)
            if replica != world.replica:
                continue
            if matrix.in_stack is None:
                self.split[shard].append(matrix)
            elif shard == world.shard:
                self.stacked.append(matrix)

    def __call__(
        self, local: list[Tensor], work: Callable[[list[Tensor]], list[Tensor]]
    ) -> list[Tensor]:
        """Apply `work` to all matrices; it returns as many of the same shapes. `local`: this rank's
        rows of each parameter, or its matrices of a stack; the result has the same shapes."""
        # No elements, but the dtype and device of all that is exchanged: the ranks must agree on
        # them, also one that sends nothing.
        empty = local[0].new_empty(0)
        collected = self._collect(local, empty)
        stacked = [part_of(matrix, local) for matrix in self.stacked]
        updates = work([*collected, *stacked])
        results = self._return_rows(updates[: len(collected)], empty)
        results |= zip(self.stacked, updates[len(collected) :], strict=True)
        results |= self._exchange_between_replicas(results, empty)
        out = [torch.empty_like(rows) for rows in local]
        for matrix, result in results.items():
            part_of(matrix, out).copy_(result)
        return out

    def _collect(self, local: list[Tensor], empty: Tensor) -> list[Tensor]:
        """Send this rank's rows of split matrices to the owners; return the whole matrices that it
        owns itself."""
        owned_here = self.split[self.world.shard]
        sent = []
        shapes = []
        for shard, owned in enumerate(self.split):
            sent.append([local[matrix.param] for matrix in owned])
            shapes.append(shapes_on(shard, owned_here))
        received = self._all_to_all(sent, shapes, empty)
        return [torch.cat(rows) for rows in zip(*received, strict=True)]

    def _return_rows(self, wholes: list[Tensor], empty: Tensor) -> dict[Matrix, Tensor]:
        """Send the rows of the split matrices that this rank owns back to their shards; return its
        own rows of all split matrices of this replica."""
        sent: list[list[Tensor]] = [[] for _ in self.split]
        for matrix, whole in zip(self.split[self.world.shard], wholes, strict=True):
            for shard, rows in enumerate(whole.split(matrix.rows)):
                sent[shard].append(rows)
        shapes = [shapes_on(self.world.shard, owned) for owned in self.split]
        returned = self._all_to_all(sent, shapes, empty)
        results: dict[Matrix, Tensor] = {}
        for owned, parts in zip(self.split, returned, strict=True):
            results |= zip(owned, parts, strict=True)
        return results

    def _all_to_all(
        self, sent: list[list[Tensor]], shapes: list[list[Shape]], empty: Tensor
    ) -> list[list[Tensor]]:
        """Exchange tensors with the shards of this replica. `sent`: for each shard, the tensors for
        it. Return those received from each shard, in these shapes."""
        if self.world.shards == 1:
            return sent
        flat = [empty]
        sent_sizes = []
        for tensors in sent:
            flat += [tensor.flatten() for tensor in tensors]
            sent_sizes.append(sum(tensor.numel() for tensor in tensors))
        received_sizes = [total_size(of_shard) for of_shard in shapes]
        received = empty.new_empty(sum(received_sizes))
        dist.all_to_all_single(
            received,
            torch.cat(flat),
            received_sizes,
            sent_sizes,
            group=self.world.group("shards"),
        )
        chunks = received.split(received_sizes)
        return [cut(chunk, of_shard) for chunk, of_shard in zip(chunks, shapes, strict=True)]

    def _exchange_between_replicas(
        self, results: dict[Matrix, Tensor], empty: Tensor
    ) -> dict[Matrix, Tensor]:
        """Return this rank's rows of the matrices of all replicas, given those of its own."""
        world = self.world
        if world.replicas == 1:
            return {}
        by_replica: list[list[Matrix]] = [[] for _ in range(world.replicas)]
        for matrix in self.matrices:
            if matrix.rows[world.shard]:
                by_replica[matrix.owner // world.shards].append(matrix)
        shapes = [shapes_on(world.shard, owned) for owned in by_replica]
        longest = max(total_size(of_replica) for of_replica in shapes)
        owned_here = by_replica[world.replica]
        sending = torch.cat([empty, *(results[matrix].flatten() for matrix in owned_here)])
        sending = nn.functional.pad(sending, (0, longest - len(sending)))
        received = list(sending.new_empty(world.replicas, longest))
        dist.all_gather(received, sending, group=world.group("replicas"))
        exchanged: dict[Matrix, Tensor] = {}
        for owned, of_replica, padded in zip(by_replica, shapes, received, strict=True):
            parts = cut(padded[: total_size(of_replica)], of_replica)
            exchanged |= zip(owned, parts, strict=True)
        return exchanged


def part_of(matrix: Matrix, local: list[Tensor]) -> Tensor:
    """Return this rank's rows of a matrix, a view of its rows of each parameter."""
    rows = local[matrix.param]
    return rows if matrix.in_stack is None else rows[matrix.in_stack]


def shapes_on(shard: int, matrices: list[Matrix]) -> list[Shape]:
    """Return the shapes of a shard's rows of matrices."""
    return [(matrix.rows[shard], matrix.columns) for matrix in matrices]


def total_size(shapes: list[Shape]) -> int:
    """Return the number of elements of tensors of these shapes."""
    return sum(math.prod(shape) for shape in shapes)


def cut(flat: Tensor, shapes: list[Shape]) -> list[Tensor]:
    """Cut a flat tensor into tensors of these shapes."""
    parts = flat.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
