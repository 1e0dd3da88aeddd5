"""Muon (Jordan et al. 2024) for matrices and stacks of matrices, on one rank or several: `Muon` is the optimizer,
`orthogonalize` its Newton-Schulz iteration."""

from collections.abc import Callable

import torch
from torch import Tensor

from spider.training.machine import multiplies_bf16


class Muon(torch.optim.Optimizer):
    """Orthogonalized momentum for matrices [r, c] and stacks of them [..., r, c].

    torch.optim.Muon only takes single matrices; here stacks of experts and all matrices of one shape form a batch. The
    update is 0.2 * sqrt(max(r, c)) times an orthogonal matrix, as large as AdamW's (Moonlight, arXiv 2502.16982). It
    does not fade with the momentum. Therefore anything without a gradient keeps weights and momentum: a parameter, or
    one matrix of a stack (an idle expert, the adapter of a loop that did not run).
    `assignment`: which rank orthogonalizes which matrix (sharded_muon.MatrixAssignment); None for one rank.
    """

    batch_elements = 1 << 26              # maximum elements of a batch

    def __init__(self, params, lr: float, momentum: float, weight_decay: float,
                 assignment: Callable | None = None):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))
        self.assignment = assignment

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            if self.assignment is not None:
                self._step_assigned(group["params"], group)
                continue
            batches = {}
            for p in group["params"]:
                if p.grad is not None:
                    batches.setdefault(p.shape[-2:], []).append(p)
            for params in batches.values():
                per_batch = max(1, self.batch_elements // params[0].numel())
                for i in range(0, len(params), per_batch):
                    self._step_batch(params[i:i + per_batch], group)

    def _buffer(self, p: Tensor) -> Tensor:
        if not self.state[p]:
            self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        return self.state[p]["momentum_buffer"]

    def _step_batch(self, params: list[Tensor], group: dict):
        """Step parameters whose matrices have the same shape, as one batch."""
        momentum, lr = group["momentum"], group["lr"]
        rows, columns = params[0].shape[-2:]
        weights = [p.view(-1, rows, columns) for p in params]                                # n matrices in all
        buffers = [self._buffer(p).view(-1, rows, columns) for p in params]
        grads = [p.grad.reshape(-1, rows, columns) for p in params]
        fresh, kept, moved, counts = 1 - momentum, 1 - lr * group["weight_decay"], None, [len(w) for w in weights]
        if any(p.ndim > 2 for p in params):  # 1 or 0 per matrix, [n, 1, 1], without a host sync
            moved = torch.cat([has_gradient(g) for g in grads])
            fresh, kept = (torch.where(moved, value, idle).to(weights[0].dtype).split(counts)
                           for value, idle in ((fresh, 0.0), (kept, 1.0)))
        torch._foreach_lerp_(buffers, grads, fresh)
        if lr == 0:                       # on a CPU, baddbmm in bf16 returns garbage if both its factors are 0
            return
        ahead = weights[0].new_empty(sum(counts), rows, columns, dtype=dtype_of_products(params[0]))
        for out, grad, buffer in zip(ahead.split(counts), grads, buffers):  # Nesterov, up to scale
            torch.add(grad, buffer, alpha=momentum / (1 - momentum), out=out)
        updates = orthogonalize(ahead, moved, -lr * 0.2 * max(rows, columns) ** 0.5).split(counts)
        for i, (p, update) in enumerate(zip(weights, updates)):
            if moved is None:
                torch.add(update, p, alpha=kept, out=p)
            else:
                torch.addcmul(update, p, kept[i], out=p)

    def _step_assigned(self, params: list[Tensor], group: dict):
        """Step sharded parameters, of which this rank has some rows, or some matrices of a stack. All ranks exchange
        all parameters, with zeros for those without a gradient."""
        momentum, lr = group["momentum"], group["lr"]
        ahead, moved = [], []             # moved: 1 or 0 per matrix, as above
        for p in params:
            if p.grad is None:
                moved.append(None)
                ahead.append(torch.zeros_like(p, dtype=dtype_of_products(p)))
                continue
            moved.append((has_gradient(p.grad) if p.ndim > 2 else p.new_ones(())).to(p.dtype))
            buffer = self._buffer(p).lerp_(p.grad, moved[-1] * (1 - momentum))
            ahead.append(p.grad.lerp(buffer, momentum).to(dtype_of_products(p)))
        for p, update, moves, size in zip(params, self.assignment(ahead, orthogonalize), moved, self.assignment.sizes):
            if moves is not None:
                p.mul_(1 - moves * (lr * group["weight_decay"]))
                p.add_(update.to(p.dtype).mul_(moves), alpha=-lr * 0.2 * size ** 0.5)


def dtype_of_products(p: Tensor) -> torch.dtype:
    return torch.bfloat16 if multiplies_bf16(p.device) else torch.float32


def has_gradient(grads: Tensor) -> Tensor:
    """Return for each matrix of a stack [n, r, c] whether its gradient is not all zero: bool [n, 1, 1]."""
    return torch.linalg.vector_norm(grads, dim=(1, 2), keepdim=True) != 0


def orthogonalize(matrices: Tensor, moved: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """Orthogonalize matrices [n, r, c] approximately, by five Newton-Schulz steps of Muon's quintic, and multiply by
    `scale`. The result is 0 where `moved`, bool [n, 1, 1], is false.

    Normalization takes no extra pass over x: the first Gram matrix has its norm, the first polynomial divides by it."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    for i in range(5):
        gram = x @ x.mT
        if i == 0:                        # the trace is the squared norm of x
            norm = gram.diagonal(dim1=1, dim2=2).sum(1, dtype=torch.float32).sqrt()[:, None, None]
            size = 1 / (norm + 1e-7) if moved is None else moved / (norm + 1e-7)
            gram = gram * (size * size).to(gram.dtype)
        polynomial = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        if i == 0:
            polynomial.diagonal(dim1=1, dim2=2).add_(3.4445)
            x = polynomial.mul_(size.to(x.dtype)) @ x
        else:                             # adding 3.4445 on the diagonal instead would double or triple bf16's error
            last = scale if i == 4 else 1.0
            x = torch.baddbmm(x, polynomial, x, beta=3.4445 * last, alpha=last)
    return x.mT if tall else x
