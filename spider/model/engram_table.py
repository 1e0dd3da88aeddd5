"""EngramTable: rows of hashed n-grams, whose gradients are gathered by row for the optimizer that takes them."""

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
    """One memory's rows: for each order n and head, row (XOR over k < n of byte_{t-k} * multiplier_k) mod a prime of
    its own. The tables lie one after the other in `weight`; a row never used stays zero. Gradients of lookups are not
    in weight.grad but in `gathered`, until `forget`. An optimizer that takes them from there, as optim.RowwiseAdagrad
    does, sets `claimed`; the first other one that steps over the weight is warned of."""

    claimed = warned = False              # warned: in this process, of any table

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
        """Make multipliers from `seed`, primes and offsets from the sizes."""
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
        """Keep what the optimizer needs of lookups: their rows [n], gradients [n, dim] and mean squares of these.

        They are listed as they come and, once more than half as many as the table has rows, summed by row: a step's
        memory is bounded by the table's, whatever the number of lookups and micro-steps. Merging equal rows before
        their squares are taken, as torch does when it adds sparse gradients on a CPU, would lose the squares."""
        if not (self.claimed or EngramTable.warned):
            unclaimed.add(self)
            watch_optimizers()
        grad = wide(grad)
        self.lookups.append((row, grad, torch.linalg.vector_norm(grad, dim=1).square_().div_(grad.shape[1])))
        if 2 * sum(len(row) for row, _, _ in self.lookups) > len(self.weight):
            self.sum_up()

    def sum_up(self) -> tuple[Tensor, Tensor, Tensor]:
        """Sum by row all that was gathered: every row of the table, its gradients and mean squares."""
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


unclaimed: WeakSet[EngramTable] = WeakSet()  # tables that have gathered gradients which nothing takes, so far


@cache
def watch_optimizers() -> RemovableHandle:
    """Look at every optimizer's step from the first call on."""
    return register_optimizer_step_post_hook(warn_of_unclaimed)


def warn_of_unclaimed(optimizer: torch.optim.Optimizer, *_):
    """Warn of an optimizer, once in a process, that it leaves Engram tables as they are."""
    if not unclaimed:
        return
    weights = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if any(id(table.weight) in weights and not table.claimed for table in unclaimed):
        EngramTable.warned = True
        unclaimed.clear()
        warnings.warn(f"{type(optimizer).__name__} moves no row of the Engram tables that it was given, where most "
                      f"parameters lie: their gradients are not in weight.grad. Take Spider's optim.Optimizers in its "
                      f"place, or optim.RowwiseAdagrad beside it: docs/guide/your-own-loop.md", stacklevel=3)


class _Lookup(torch.autograd.Function):
    """Rows of a table by address, [rows, tables] -> [rows, tables, dim]; the table gathers their gradients itself."""

    @staticmethod
    def forward(ctx, weight, address, table):
        ctx.save_for_backward(address)
        ctx.table = table
        return F.embedding(address, weight)

    @staticmethod
    def backward(ctx, grad):
        ctx.table.gather(ctx.saved_tensors[0].flatten(), grad.flatten(0, 1))
        return None, None, None
