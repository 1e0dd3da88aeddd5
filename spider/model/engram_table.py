"""EngramTable: rows of hashed n-grams, whose gradients are gathered by row for their optimizer."""

import warnings
from functools import cache
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from spider.model.casting import wide
from spider.model.config import primes_below
from spider.model.ngrams import gram_keys, init_multiplier


class EngramTable(nn.Module):
    """The rows of one memory. For each order n and head, the row is (XOR over k < n of byte_{t-k} * multiplier_k) mod a
    prime of that table. All tables are concatenated in `weight`; unused rows stay zero.

    Gradients of lookups are not in weight.grad but in `gathered`, until `forget`. An optimizer that reads them there,
    like optimizers.RowwiseAdagrad, sets `claimed`; any other one that steps the weight causes a warning."""

    claimed = warned = False              # warned: once per process, for any table

    def __init__(self, orders: tuple[int, ...], heads: int, rows: int, dim: int):
        super().__init__()
        self.orders, self.heads, self.width = orders, heads, len(orders) * heads * dim
        self.primes = primes_below(rows, len(orders) * heads)
        self.weight = nn.Parameter(torch.empty(sum(self.primes), dim))
        self.register_buffer("multiplier", torch.empty(max(orders), dtype=torch.int64))
        self.register_buffer("prime", torch.empty(len(orders), heads, dtype=torch.int64), persistent=False)
        self.register_buffer("offset", torch.empty(len(orders), heads, dtype=torch.int64), persistent=False)
        self.forget()

    def init_hash(self, seed: int):
        """Set the multipliers from `seed`, primes and offsets from the sizes."""
        init_multiplier(self.multiplier, seed)
        prime = torch.tensor(self.primes).view(self.prime.shape)
        self.prime.copy_(prime)
        self.offset.copy_(F.pad(prime.flatten().cumsum(0), (1, -1)).view(prime.shape))

    def addresses(self, shifted: Tensor) -> Tensor:
        """Hash shifted [at least max(orders), rows] -> rows of `weight` int64 [rows, orders * heads]."""
        key = torch.stack(gram_keys(shifted, self.multiplier, self.orders), dim=1)           # [rows, orders]
        return (key[:, :, None].remainder(self.prime) + self.offset).flatten(1)

    def forward(self, shifted: Tensor) -> Tensor:
        """Look up [rows, orders * heads, dim]; its gradient goes to `gather`, weight.grad stays None."""
        return _Lookup.apply(self.weight, self.addresses(shifted), self)

    def gather(self, row: Tensor, grad: Tensor):
        """Record lookups for the optimizer: their rows [n], gradients [n, dim] and the gradients' mean squares.

        They are collected in a list, and summed by row once they exceed half the number of the table's rows. So memory
        is bounded by the table's size, for any number of lookups and micro-steps. torch's sparse gradients would not
        do: they are merged by row before squaring."""
        if not (self.claimed or EngramTable.warned):
            unclaimed.add(self)
            watch_optimizers()
        grad = wide(grad)
        self.lookups.append((row, grad, torch.linalg.vector_norm(grad, dim=1).square_().div_(grad.shape[1])))
        if 2 * sum(len(row) for row, _, _ in self.lookups) > len(self.weight):
            self.sum_up()

    def sum_up(self) -> tuple[Tensor, Tensor, Tensor]:
        """Sum all gathered lookups by row; return all rows of the table, their gradients and mean squares."""
        if self.sums is None:
            rows = len(self.weight)
            zeros = torch.zeros_like(wide(self.weight))
            self.sums = torch.arange(rows, device=self.weight.device), zeros, zeros.new_zeros(rows)
        for row, grad, square in self.lookups:
            self.sums[1].index_add_(0, row, grad)
            self.sums[2].index_add_(0, row, square)
        self.lookups.clear()
        return self.sums

    def gathered(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return rows [n], gradients [n, dim] and mean squares [n] since `forget`; a row may come several times."""
        return self.lookups + [self.sums] * (self.sums is not None)

    def forget(self):
        self.lookups, self.sums = [], None


unclaimed: WeakSet[EngramTable] = WeakSet()  # tables with gradients that no optimizer reads, so far


@cache
def watch_optimizers() -> RemovableHandle:
    """Hook into the steps of all optimizers, once."""
    return register_optimizer_step_post_hook(warn_of_unclaimed)


def warn_of_unclaimed(optimizer: torch.optim.Optimizer, *_):
    """Warn, once per process, if an optimizer was given Engram tables but does not update them."""
    if not unclaimed:
        return
    weights = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if any(id(table.weight) in weights and not table.claimed for table in unclaimed):
        EngramTable.warned = True
        unclaimed.clear()
        warnings.warn(f"{type(optimizer).__name__} does not update the Engram tables, which have most of the "
                      f"parameters: their gradients are not in weight.grad. Use Spider's optimizers.Optimizers, or "
                      f"optimizers.RowwiseAdagrad for the tables: see docs/guide/your-own-loop.md", stacklevel=3)


class _Lookup(torch.autograd.Function):
    """Look up rows of a table by address, [rows, tables] -> [rows, tables, dim]; the table gathers their gradients."""

    @staticmethod
    def forward(ctx, weight, address, table):
        ctx.save_for_backward(address)
        ctx.table = table
        return F.embedding(address, weight)

    @staticmethod
    def backward(ctx, grad):
        ctx.table.gather(ctx.saved_tensors[0].flatten(), grad.flatten(0, 1))
        return None, None, None
