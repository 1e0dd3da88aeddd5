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
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spider.distributed import ShardedParameter, World

Shape = tuple[int, ...]


class Matrix(NamedTuple):
    """A matrix, and the rank that orthogonalizes it."""

    param: int  # index of its parameter
    in_param: int  # index in its shard's part of the parameter; 0 for a matrix cut into rows
    shard: int | None  # the shard with the whole matrix; None: it is cut into rows
    rows: tuple[int, ...]  # number of its rows on each shard
    columns: int
    owner: int = -1  # a rank; -1: not assigned yet

    @property
    def cost(self) -> int:
        """Return the multiplications of a product of the matrix with itself."""
        rows = sum(self.rows)
        return rows * self.columns * min(rows, self.columns)


def matrices_of(params: Sequence[ShardedParameter]) -> list[Matrix]:
    """List the matrices of parameters. FSDP cuts a single matrix into rows, and a stack between its
    matrices."""
    matrices = []
    for i, param in enumerate(params):
        rows, columns = param.shape[-2:]
        # number of rows, or of matrices of a stack, on each shard
        counts = [end - begin for begin, end in pairwise(param.bounds)]
        if len(param.shape) == 2:
            matrices.append(Matrix(i, 0, None, tuple(counts), columns))
            continue
        for shard, count in enumerate(counts):
            rows_by_shard = [0] * len(counts)
            rows_by_shard[shard] = rows
            whole = Matrix(i, 0, shard, tuple(rows_by_shard), columns)
            matrices += [whole._replace(in_param=index) for index in range(count)]
    return matrices


def assign(matrices: Sequence[Matrix], world: World) -> list[Matrix]:
    """Assign matrices to owners: the largest first, each to the rank with the least work so far.
    Every rank computes the same assignment.

    Any rank may own a matrix that is cut into rows. A whole one stays on its shard, of which each
    replica has a rank."""
    work_of = [0] * world.ranks
    assigned = []
    for matrix in sorted(matrices, key=lambda matrix: -matrix.cost):
        ranks = range(world.ranks)
        if matrix.shard is not None:
            ranks = ranks[matrix.shard :: world.shards]
        owner = min(ranks, key=work_of.__getitem__)
        work_of[owner] += matrix.cost
        assigned.append(matrix._replace(owner=owner))
    return assigned


class MatrixAssignment:
    """An assignment of matrices to owners. A call applies a function to all matrices, in the four
    parts above.

    The lists are indexed by the place of the owner: its shard in this replica, or its replica."""

    def __init__(self, world: World, params: Sequence[ShardedParameter]):
        self.world = world
        # matrices cut into rows, owned by this replica, by the owner's shard
        self.cut_by_shard: list[list[Matrix]] = [[] for _ in range(world.shards)]
        # matrices of stacks that this rank owns
        self.whole: list[Matrix] = []
        # matrices of which this rank has rows, by the owner's replica
        self.by_replica: list[list[Matrix]] = [[] for _ in range(world.replicas)]
        for matrix in assign(matrices_of(params), world):
            replica, shard = divmod(matrix.owner, world.shards)
            if matrix.rows[world.shard]:
                self.by_replica[replica].append(matrix)
            if matrix.shard is not None and matrix.owner == world.rank:
                self.whole.append(matrix)
            if matrix.shard is None and replica == world.replica:
                self.cut_by_shard[shard].append(matrix)

    def __call__(
        self, local: list[Tensor], work: Callable[[list[Tensor]], list[Tensor]]
    ) -> list[Tensor]:
        """Apply `work` to all matrices; it takes and returns a list of matrices [r, c].

        local: for each parameter this rank's rows of its matrix [1, r, c], or its matrices of a
        stack [n, r, c]; the result has the same shapes."""
        # No elements, but the dtype and device of all that is exchanged: the ranks must agree on
        # them, even a rank that sends nothing.
        empty = local[0].new_empty(0)
        collected = self._collect(local, empty)
        updates = work([*collected, *rows_of(self.whole, local)])
        results = self._return_rows(updates[: len(collected)], empty)
        results |= zip(self.whole, updates[len(collected) :], strict=True)
        results |= self._exchange_between_replicas(results, empty)
        out = [torch.empty_like(matrices) for matrices in local]
        for matrix, result in results.items():
            out[matrix.param][matrix.in_param].copy_(result)
        return out

    def _collect(self, local: list[Tensor], empty: Tensor) -> list[Tensor]:
        """Part 1: send this rank's rows to the owners, and return the whole matrices of which this
        rank is the owner."""
        owned_here = self.cut_by_shard[self.world.shard]
        sent = [rows_of(owned, local) for owned in self.cut_by_shard]
        shapes = [shapes_on(shard, owned_here) for shard in range(self.world.shards)]
        received = self._all_to_all(sent, shapes, empty)
        return [torch.cat(rows) for rows in zip(*received, strict=True)]

    def _return_rows(self, wholes: list[Tensor], empty: Tensor) -> dict[Matrix, Tensor]:
        """Part 3: send the rows of this rank's whole matrices back, and return its own rows of all
        matrices that its replica owns."""
        sent: list[list[Tensor]] = [[] for _ in self.cut_by_shard]
        for matrix, whole in zip(self.cut_by_shard[self.world.shard], wholes, strict=True):
            for shard, rows in enumerate(whole.split(matrix.rows)):
                sent[shard].append(rows)
        shapes = [shapes_on(self.world.shard, owned) for owned in self.cut_by_shard]
        returned = self._all_to_all(sent, shapes, empty)
        results: dict[Matrix, Tensor] = {}
        for owned, rows_of_owner in zip(self.cut_by_shard, returned, strict=True):
            results |= zip(owned, rows_of_owner, strict=True)
        return results

    def _exchange_between_replicas(
        self, results: dict[Matrix, Tensor], empty: Tensor
    ) -> dict[Matrix, Tensor]:
        """Part 4: send this rank's rows of the matrices that its replica owns to the same shard of
        the other replicas, and return its rows of theirs."""
        world = self.world
        if world.replicas == 1:
            return {}
        shapes = [shapes_on(world.shard, owned) for owned in self.by_replica]
        longest = max(map(total_size, shapes))
        owned_here = self.by_replica[world.replica]
        sending = flatten([results[matrix] for matrix in owned_here], empty)
        sending = nn.functional.pad(sending, (0, longest - len(sending)))
        received = list(sending.new_empty(world.replicas, longest))
        dist.all_gather(received, sending, group=world.group("replicas"))
        exchanged: dict[Matrix, Tensor] = {}
        for owned, of_replica, padded in zip(self.by_replica, shapes, received, strict=True):
            exchanged |= zip(owned, cut(padded, of_replica), strict=True)
        return exchanged

    def _all_to_all(
        self, sent: list[list[Tensor]], shapes: list[list[Shape]], empty: Tensor
    ) -> list[list[Tensor]]:
        """Exchange tensors with the shards of this replica. `sent`: for each shard, the tensors for
        it. Return the tensors from each shard, which have these shapes."""
        if self.world.shards == 1:
            return sent
        sent_sizes = [sum(map(Tensor.numel, tensors)) for tensors in sent]
        received_sizes = [total_size(of_shard) for of_shard in shapes]
        received = empty.new_empty(sum(received_sizes))
        dist.all_to_all_single(
            received,
            flatten(chain.from_iterable(sent), empty),
            received_sizes,
            sent_sizes,
            group=self.world.group("shards"),
        )
        chunks = received.split(received_sizes)
        return [cut(chunk, of_shard) for chunk, of_shard in zip(chunks, shapes, strict=True)]


def rows_of(matrices: list[Matrix], local: list[Tensor]) -> list[Tensor]:
    """Return this rank's rows of matrices, as views of what it has of each parameter."""
    return [local[matrix.param][matrix.in_param] for matrix in matrices]


def shapes_on(shard: int, matrices: list[Matrix]) -> list[Shape]:
    """Return the shapes of a shard's rows of matrices."""
    return [(matrix.rows[shard], matrix.columns) for matrix in matrices]


def total_size(shapes: list[Shape]) -> int:
    """Return the number of elements of tensors of these shapes."""
    return sum(math.prod(shape) for shape in shapes)


def flatten(tensors: Iterable[Tensor], empty: Tensor) -> Tensor:
    """Return the elements of tensors as a vector, of the dtype and device of `empty`."""
    return torch.cat([empty, *(tensor.flatten() for tensor in tensors)])


def cut(flat: Tensor, shapes: list[Shape]) -> list[Tensor]:
    """Cut the beginning of a flat tensor into tensors of these shapes."""
    sizes = [math.prod(shape) for shape in shapes]
    parts = flat[: sum(sizes)].split(sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
