"""Muon on several ranks: which rank orthogonalizes which matrix, and how the matrices get there.

Muon needs whole matrices, but FSDP cuts a matrix into rows for the shards. So each matrix has an
owner, one of all ranks, and a step takes four stages:

    1. collect         the shards of a replica send rows to the owners in this replica (all-to-all)
    2. orthogonalize   each owner, its own matrices
    3. return          the owners send the rows back to the shards (all-to-all)
    4. exchange        the replicas, which have the same rows, exchange results (all-gather)

FSDP cuts a stack (of experts, for example) between its matrices. Their owners have these matrices
whole already, so they skip stages 1 and 3.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spider.training.distributed import ShardedParameter, World


class Matrix(NamedTuple):
    """A matrix, and the rank that orthogonalizes it."""

    param: int  # index of its parameter
    in_param: int  # index in its shard's part of the parameter; 0 for a matrix cut into rows
    shard: int | None  # the shard that has the whole matrix; None: it is cut into rows
    rows: tuple[int, ...]  # number of rows on each shard; of a whole matrix, one number
    columns: int
    owner: int = -1  # a rank; -1: not assigned yet

    @property
    def cost(self) -> int:
        """Return the number of multiplications in a product of the matrix with its transpose."""
        rows = sum(self.rows)
        return rows * self.columns * min(rows, self.columns)


def matrices_of(params: Sequence[ShardedParameter]) -> list[Matrix]:
    """List the matrices of all parameters."""
    matrices = []
    for i, param in enumerate(params):
        rows, columns = param.shape[-2:]
        # number of rows, or of a stack's matrices, on each shard
        counts = [end - begin for begin, end in pairwise(param.bounds)]
        if len(param.shape) == 2:
            matrices.append(Matrix(i, 0, None, tuple(counts), columns))
            continue
        for shard, count in enumerate(counts):
            matrices += [Matrix(i, index, shard, (rows,), columns) for index in range(count)]
    return matrices


def assign_owners(matrices: Sequence[Matrix], world: World) -> list[Matrix]:
    """Assign matrices to owners: the largest first, each to the rank with the least work so far.
    Every rank computes the same assignment.

    Any rank may own a matrix that is cut into rows. Only the ranks of its shard, one in each
    replica, may own a whole matrix."""
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
    """An assignment of matrices to owners, and the four stages above.

    Lists `by_shard` have an entry for each shard of this replica, `by_replica` for each replica."""

    def __init__(self, world: World, params: Sequence[ShardedParameter]):
        self.world = world
        # cut matrices that this replica owns, by the owner's shard
        self.cut_by_shard: list[list[Matrix]] = [[] for _ in range(world.shards)]
        # matrices of stacks that this rank owns
        self.owned_whole = []
        # matrices that this shard has rows of, by the owner's replica
        self.by_replica: list[list[Matrix]] = [[] for _ in range(world.replicas)]
        for matrix in assign_owners(matrices_of(params), world):
            replica, shard = divmod(matrix.owner, world.shards)
            if matrix.shard in (None, world.shard):
                self.by_replica[replica].append(matrix)
            if matrix.shard is None and replica == world.replica:
                self.cut_by_shard[shard].append(matrix)
            if matrix.shard is not None and matrix.owner == world.rank:
                self.owned_whole.append(matrix)
        self.owned_cut = self.cut_by_shard[world.shard]

    def map(
        self, function: Callable[[list[Tensor]], list[Tensor]], local: list[Tensor]
    ) -> list[Tensor]:
        """Apply a function to all matrices on their owners. It takes and returns a list of matrices
        [r, c].

        local: for each parameter, this rank's rows of a cut matrix [1, r, c] or its matrices of a
        stack [n, r, c]. The result has the same shapes."""
        cut = self._collect(local)
        updates = function([*cut, *rows_of(self.owned_whole, local)])
        results = [torch.empty_like(matrices) for matrices in local]
        self._return_rows(updates[: len(cut)], results)
        copy_all(updates[len(cut) :], rows_of(self.owned_whole, results))
        self._exchange_between_replicas(results)
        return results

    def _collect(self, local: list[Tensor]) -> list[Tensor]:
        """Stage 1: send this rank's rows of cut matrices to the owners; return the matrices that
        this rank owns."""
        wholes = [local[0].new_empty(sum(matrix.rows), matrix.columns) for matrix in self.owned_cut]
        sent = [rows_of(matrices, local) for matrices in self.cut_by_shard]
        self._all_to_all(sent, self._rows_by_shard(wholes), local[0])
        return wholes

    def _return_rows(self, wholes: list[Tensor], results: list[Tensor]):
        """Stage 3: send the rows of the matrices that this rank owns to the shards; receive this
        rank's rows of all cut matrices of this replica into `results`."""
        received = [rows_of(matrices, results) for matrices in self.cut_by_shard]
        self._all_to_all(self._rows_by_shard(wholes), received, results[0])

    def _exchange_between_replicas(self, results: list[Tensor]):
        """Stage 4: send this shard's rows of the matrices that this replica owns to the other
        replicas; receive the rows of their matrices into `results`."""
        world = self.world
        if world.replicas == 1:
            return
        by_replica = [rows_of(matrices, results) for matrices in self.by_replica]
        max_size = max(map(total_size, by_replica))
        sending = flatten(by_replica[world.replica], results[0])
        sending = nn.functional.pad(sending, (0, max_size - len(sending)))
        received = list(sending.new_empty(world.replicas, max_size))
        dist.all_gather(received, sending, group=world.group("replicas"))
        for flat, rows in zip(received, by_replica, strict=True):
            unflatten(flat, rows)

    def _rows_by_shard(self, wholes: list[Tensor]) -> list[list[Tensor]]:
        """Split the cut matrices that this rank owns into each shard's rows."""
        by_shard: list[list[Tensor]] = [[] for _ in self.cut_by_shard]
        for matrix, whole in zip(self.owned_cut, wholes, strict=True):
            for rows, shard_rows in zip(whole.split(matrix.rows), by_shard, strict=True):
                shard_rows.append(rows)
        return by_shard

    def _all_to_all(self, sent: list[list[Tensor]], received: list[list[Tensor]], like: Tensor):
        """Send tensors to each shard of this replica, and receive tensors from each. All have the
        dtype and device of `like`."""
        if self.world.shards == 1:
            copy_all(sent[0], received[0])
            return
        received_sizes = [*map(total_size, received)]
        flat = like.new_empty(sum(received_sizes))
        dist.all_to_all_single(
            flat,
            flatten(chain.from_iterable(sent), like),
            received_sizes,
            [*map(total_size, sent)],
            group=self.world.group("shards"),
        )
        unflatten(flat, [*chain.from_iterable(received)])


def rows_of(matrices: list[Matrix], local: list[Tensor]) -> list[Tensor]:
    """Return this rank's rows of matrices, as views of its part of each parameter."""
    return [local[matrix.param][matrix.in_param] for matrix in matrices]


def total_size(tensors: Iterable[Tensor]) -> int:
    """Return the number of elements of tensors."""
    return sum(map(Tensor.numel, tensors))


def copy_all(sources: list[Tensor], targets: list[Tensor]):
    """Copy each source to its target."""
    if targets:  # _foreach_copy_ takes no empty list
        torch._foreach_copy_(targets, sources)


def flatten(tensors: Iterable[Tensor], like: Tensor) -> Tensor:
    """Return the elements of tensors as a vector with the dtype of `like`, on which the ranks must
    agree even if one has nothing to send."""
    return torch.cat([like.new_empty(0), *(tensor.flatten() for tensor in tensors)])


def unflatten(flat: Tensor, tensors: list[Tensor]):
    """Copy the elements of a vector, from its start, to tensors."""
    sizes = [tensor.numel() for tensor in tensors]
    parts = flat[: sum(sizes)].split(sizes)
    copy_all([part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)], tensors)
