"""Muon over ranks: each orthogonalizes its share of the matrices."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spider.training.ranks import World


class Unit(NamedTuple):
    """A matrix that one rank orthogonalises."""
    param: int                            # of the list
    place: int | None                     # in a stack of matrices, among the rank's own; None: a matrix in rows
    rows: list[int]                       # of each shard
    columns: int
    replica: int                          # of its owner
    shard: int


class Deal:
    """Whole matrices for each rank to work on: those cut in rows are sent to an owner and back, those of a stack stay
    where they lie, and what replicas worked out is exchanged. Every rank makes the same plan by itself."""

    def __init__(self, world: World, params: list[nn.Parameter]):
        self.world = world
        parts = {id(part.own): part for part in world.parts}
        loads, units, found = [0] * world.ranks, [], []
        for i, p in enumerate(params):
            part = parts[id(p)]
            counts = [b - a for a, b in zip(part.bounds, part.bounds[1:])]
            rows, columns = part.shape[-2:]
            cost = rows * columns * min(rows, columns)
            if len(part.shape) == 2:
                found.append((cost, i, None, counts, columns, range(world.ranks)))
            else:
                found += [(cost, i, j, [rows * (k == s) for k in range(world.shards)], columns,
                           range(s, world.ranks, world.shards)) for s, count in enumerate(counts) for j in range(count)]
        for cost, i, place, counts, columns, allowed in sorted(found, key=lambda unit: -unit[0]):
            owner = min(allowed, key=lambda rank: loads[rank])
            loads[owner] += cost
            units.append(Unit(i, place, counts, columns, owner // world.shards, owner % world.shards))
        self.units, self.balance = units, max(loads) * world.ranks / max(1, sum(loads))
        self.sizes = [max(parts[id(p)].shape[-2:]) for p in params]                          # longer side of a matrix

    def __call__(self, pieces: list[Tensor], work: Callable) -> list[Tensor]:
        """This rank's rows of matrices or stacks of them, in the order of `params` -> the same of what `work` makes of
        whole matrices, [n, r, c] -> [n, r, c]."""
        world, here = self.world, self.world.rank // self.world.shards
        mine = [unit for unit in self.units if unit.replica == here]
        cut = [unit for unit in mine if unit.place is None]
        to = [[unit for unit in cut if unit.shard == shard] for shard in range(world.shards)]
        own = to[world.shard]

        arrived = self._swap([[pieces[unit.param] for unit in units] for units in to],
                             [[(unit.rows[shard], unit.columns) for unit in own] for shard in range(world.shards)])
        wholes = [torch.cat(rows) for rows in zip(*arrived)]
        stacked = [unit for unit in mine if unit.place is not None and unit.shard == world.shard]
        wholes = self._work(wholes + [pieces[unit.param][unit.place] for unit in stacked], work)
        back = [whole.split(unit.rows) for unit, whole in zip(own, wholes)]
        returned = self._swap([[rows[shard] for rows in back] for shard in range(world.shards)],
                              [[(unit.rows[world.shard], unit.columns) for unit in units] for units in to])
        done = {id(unit): rows for units, parts in zip(to, returned) for unit, rows in zip(units, parts)}
        done |= {id(unit): whole for unit, whole in zip(stacked, wholes[len(own):])}
        done |= self._exchange(done, pieces)
        out = [torch.empty_like(piece) for piece in pieces]
        for unit in self.units:
            if id(unit) in done:
                (out[unit.param] if unit.place is None else out[unit.param][unit.place]).copy_(done[id(unit)])
        return out

    def _work(self, matrices: list[Tensor], work: Callable) -> list[Tensor]:
        """Matrices of one shape together, up to a bound of memory."""
        groups, out = {}, [None] * len(matrices)
        for i, matrix in enumerate(matrices):
            groups.setdefault(matrix.shape, []).append(i)
        for shape, places in groups.items():
            at_once = max(1, MOST_TOGETHER // math.prod(shape))
            for k in range(0, len(places), at_once):
                some = places[k:k + at_once]
                for i, result in zip(some, work(torch.stack([matrices[i] for i in some])).unbind()):
                    out[i] = result
        return out

    def _swap(self, sent: list[list[Tensor]], shapes: list[list[tuple[int, int]]]) -> list[list[Tensor]]:
        """Tensors for each shard of this replica -> those that each of them sent, of these shapes."""
        if self.world.shards == 1:
            return sent
        flat = [[tensor.flatten() for tensor in tensors] for tensors in sent]
        sizes = [[math.prod(shape) for shape in some] for some in shapes]
        like = next(tensor for tensors in flat + [[torch.empty(0, device=self.world.device)]] for tensor in tensors)
        sending = torch.cat([like[:0], *(tensor for tensors in flat for tensor in tensors)])
        arriving = sending.new_empty(sum(map(sum, sizes)))
        dist.all_to_all_single(arriving, sending, [sum(some) for some in sizes],
                               [sum(map(len, tensors)) for tensors in flat], group=self.world.mesh.get_group("shards"))
        return [[tensor.view(shape) for tensor, shape in zip(part.split(some), its)]
                for part, some, its in zip(arriving.split([sum(some) for some in sizes]), sizes, shapes)]

    def _exchange(self, done: dict[int, Tensor], pieces: list[Tensor]) -> dict[int, Tensor]:
        """This rank's rows of what the other replicas worked out."""
        world = self.world
        if world.replicas == 1:
            return {}
        shapes = {id(unit): (unit.rows[world.shard], unit.columns) for unit in self.units}
        of = [[unit for unit in self.units if unit.replica == replica and unit.rows[world.shard]]
              for replica in range(world.replicas)]
        longest = max(sum(math.prod(shapes[id(unit)]) for unit in units) for units in of)
        here = of[world.rank // world.shards]
        sending = torch.cat([pieces[0].new_zeros(0), *(done[id(unit)].flatten() for unit in here)])
        sending = nn.functional.pad(sending, (0, longest - len(sending)))
        arriving = list(sending.new_empty(world.replicas, longest))
        dist.all_gather(arriving, sending, group=world.mesh.get_group("replicas"))
        out = {}
        for units, part in zip(of, arriving):
            sizes = [math.prod(shapes[id(unit)]) for unit in units]
            out |= {id(unit): rows.view(shapes[id(unit)])
                    for unit, rows in zip(units, part[:sum(sizes)].split(sizes))}
        return out


MOST_TOGETHER = 1 << 26                   # elements of matrices that are worked on at a time
