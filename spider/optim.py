"""The optimizers: Muon for matrices, AdamW (optionally 8-bit) for the rest, row-wise Adagrad for
Engram tables.

`KINDS` is the table of parameters: which optimizer steps them, and how often products read them.
`Optimizers` steps all of a model, on one rank or on several; muon_ranks.py has what Muon needs for
several, and state.py loads and saves what optimizers keep. Sources: Muon, Jordan et al. 2024, with
the step size of Moonlight (arXiv 2502.16982); bitsandbytes for 8-bit AdamW.

Shapes: n matrices [n, r, c].
"""

import math
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from spider.common import WorldError
from spider.config import OPTIMIZERS
from spider.distributed import Sharded, ShardedParameter, Sharding, sharding_of
from spider.machine import multiplies_bf16, quiet
from spider.memory import EngramTable, Lookups
from spider.muon_ranks import MOST_TOGETHER, MatrixAssignment
from spider.state import SCALE_BLOCK, load_optimizers, optimizer_states

# --------------------------------------------------------------------------------------------------
# Kinds of parameters


class Read(Enum):
    """Frequency with which the forward pass of a byte multiplies by a parameter."""

    BYTE = "once a byte"
    SEGMENT = "once a segment"
    LOOP = "in each loop of a segment"
    ONE_LOOP = "in its own loop of a segment"
    CHOSEN = "in each loop, the chosen experts of all"
    LOOKUP = "looked up, not multiplied"


class Kind(NamedTuple):
    """A row of the table. Weights with at least two dimensions decay, but for those of
    `adagrad`."""

    pattern: str  # regular expression, searched in the parameter's name
    component: str  # of the table that --dry_run prints
    optimizer: str
    read: Read
    rate: float = 1.0  # AdamW's learning rate, relative to that of others


ENGRAM_TABLES = "Engram tables"
_ENGRAM = "Engram projections"
_LOOPS = "loop adapters, injection, halting"
_HEAD = "embedding and head"
_BOUNDARIES = "boundary predictor"
KINDS = (  # the first row that matches applies
    Kind(r"engram.*table\.weight", ENGRAM_TABLES, "adagrad", Read.LOOKUP),
    Kind(r"engram.*followed", ENGRAM_TABLES, "muon", Read.LOOKUP),
    Kind(r"engram.*conv_weight", _ENGRAM, "adamw", Read.LOOP),
    Kind(r"engram_output\.(gate|votes|logits)\.", _ENGRAM, "adamw", Read.BYTE),
    Kind(r"engram_(input|output)\.", _ENGRAM, "muon", Read.BYTE),
    Kind(r"engram\.", _ENGRAM, "muon", Read.SEGMENT),
    # the whole rate is unstable
    Kind(r"boundary_predictor\.regression", _BOUNDARIES, "adamw", Read.BYTE, 1 / 8),
    Kind(r"boundary_predictor", _BOUNDARIES, "adamw", Read.BYTE),
    Kind(r"halt_predictor", _LOOPS, "adamw", Read.LOOP),
    Kind(r"router", "router", "adamw", Read.LOOP),
    Kind(r"moe\.w_(gate|up|down)$", "routed experts", "muon", Read.CHOSEN),
    Kind(r"moe\.shared\.", "shared experts", "muon", Read.LOOP),
    Kind(r"core\.layers.*attention\.", "core attention", "muon", Read.LOOP),
    Kind(r"core\.(out_proj|offset_proj)", "unpooling", "muon", Read.SEGMENT),
    Kind(r"core\.lora_(down|up)$", _LOOPS, "muon", Read.ONE_LOOP),
    Kind(r"core\.loop_embedding$", _LOOPS, "adamw", Read.LOOKUP),
    Kind(r"core\.", _LOOPS, "muon", Read.LOOP),
    Kind(r"prelude\.", "prelude", "muon", Read.BYTE),
    Kind(r"coda\.", "coda", "muon", Read.BYTE),
    Kind(r"embed_tokens$|null_segment$", _HEAD, "adamw", Read.LOOKUP),
    Kind(r"lm_head", _HEAD, "adamw", Read.BYTE),
    Kind(r"", _HEAD, "muon", Read.BYTE),
)
# Stacks of matrices, beside Linears' weights
STACKS = re.compile(
    r"engram_(input|output)\.followed$|moe\.w_(gate|up|down)$|core\.(lora_(down|up)|offset_proj)$"
)


def kinds_of(model: nn.Module) -> dict[str, Kind]:
    """Return the kind of every parameter by name. Muon steps only weights of Linears and STACKS;
    AdamW steps all else, such as a parameter that a researcher adds."""
    linears = {m.weight for m in model.modules() if isinstance(m, nn.Linear)}
    kinds = {}
    for name, p in model.named_parameters():
        kind = next(kind for kind in KINDS if re.search(kind.pattern, name))
        if kind.optimizer == "muon" and p not in linears and not STACKS.search(name):
            kind = kind._replace(optimizer="adamw")
        kinds[name] = kind
    return kinds


# --------------------------------------------------------------------------------------------------
# All optimizers of a model


def adamw_groups(
    params: Mapping[str, nn.Parameter], kinds: Mapping[str, Kind], lr: float, weight_decay: float
) -> list[dict[str, Any]]:
    """Return AdamW's groups of parameters. Weights of the usual rate come first, then vectors of
    that rate, then those of other rates; a group may be empty."""
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {(True, 1.0): [], (False, 1.0): []}
    for name, kind in kinds.items():
        if kind.optimizer == "adamw":
            decays = params[name].ndim >= 2
            groups.setdefault((decays, kind.rate), []).append(params[name])
    return [
        dict(
            params=group,
            lr=lr * rate,
            relative_rate=rate,
            weight_decay=weight_decay if decays else 0.0,
        )
        for (decays, rate), group in groups.items()
    ]


class Optimizers:
    """The optimizers of one model by name, stepped together.

    A slice without a gradient (an idle expert, an unused loop) still moves under AdamW, as in
    torch: by its fading momentum and by weight decay. Muon leaves it unchanged.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: str = "muon",
        lr: float = 3e-4,
        engram_lr: float = 0.25,
        weight_decay: float = 0.1,
        beta1: float = 0.9,
        beta2: float = 0.95,
        momentum: float = 0.95,
    ):
        """optimizer: one of OPTIMIZERS, for all but the Engram tables; raise ValueError for another
        name. engram_lr: learning rate of the tables."""
        if optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer: {optimizer!r} is not one of {', '.join(OPTIMIZERS)}")
        self.sharding = sharding_of(model)
        self.tables = [m for m in model.modules() if isinstance(m, EngramTable)]
        params = self.sharding.parameters(model)
        kinds = kinds_of(model)
        matrices = [params[name] for name, kind in kinds.items() if kind.optimizer == "muon"]
        others = [params[name] for name, kind in kinds.items() if kind.optimizer == "adamw"]
        # Parameters whose gradients are clipped. Tables are not: the step of a table's row does not
        # depend on its gradient's norm.
        self.dense = matrices + others
        assert len(self.dense) + len(self.tables) == len(params), "a parameter without an optimizer"

        groups = adamw_groups(params, kinds, lr, weight_decay)
        betas = (beta1, beta2)
        self.by_name: dict[str, torch.optim.Optimizer] = {}
        if optimizer == "muon":
            assignment = assignment_of(matrices, self.sharding)
            self.by_name["muon"] = Muon(matrices, lr, momentum, weight_decay, assignment)
        else:
            groups[0]["params"] += matrices
        if optimizer == "adamw8bit":
            self.by_name["adamw8bit"] = adamw_8bit(groups, lr, betas, self.sharding.params)
        else:
            self.by_name["adamw"] = torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)
        self.adagrad: RowwiseAdagrad | None = None
        if self.tables:
            self.adagrad = RowwiseAdagrad(self.tables, engram_lr)
            self.by_name["engram"] = self.adagrad

    def set_lr(self, peak: float, factor: float):
        """Set the learning rate to `peak * factor`, except for the tables, whose accumulators
        anneal it row by row."""
        for optimizer in self.by_name.values():
            if optimizer is self.adagrad:
                continue
            for group in optimizer.param_groups:
                group["lr"] = peak * factor * group.get("relative_rate", 1.0)

    def step(self):
        self.sharding.all_reduce_tables(self.tables)
        for optimizer in self.by_name.values():
            optimizer.step()

    def zero_grad(self):
        for optimizer in self.by_name.values():
            optimizer.zero_grad(set_to_none=True)

    def reset_tables(self):
        """Zero the Engram tables and their accumulators."""
        if self.adagrad is not None:
            self.adagrad.reset()

    def state_dict(self) -> dict:
        """Return the state of each optimizer by name; sharded tensors as ShardedRows."""
        return optimizer_states(self.sharding, self.by_name)

    def load_state_dict(self, states: dict):
        """Load the states of all optimizers, but keep this run's settings. Raise CheckpointError if
        one does not fit."""
        load_optimizers(self.sharding, self.by_name, states)


# --------------------------------------------------------------------------------------------------
# Muon


def assignment_of(matrices: Sequence[nn.Parameter], sharding: Sharding) -> MatrixAssignment | None:
    """Assign matrices to the ranks that orthogonalize them; None for one process."""
    if not isinstance(sharding, Sharded):
        return None
    by_local = {param.local: param for param in sharding.params}
    return MatrixAssignment(sharding.world, [by_local[p] for p in matrices])


class Muon(torch.optim.Optimizer):
    """Orthogonalized momentum for matrices [r, c] and stacks of them [..., r, c].

    torch.optim.Muon only takes single matrices; here stacks of experts and all matrices of one
    shape form a batch. The update is 0.2 * sqrt(max(r, c)) times an orthogonal matrix, as large as
    AdamW's (Moonlight, arXiv 2502.16982). It does not fade with the momentum. Therefore anything
    without a gradient keeps weights and momentum: a parameter, or one matrix of a stack (an idle
    expert, the adapter of a loop that did not run).
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        lr: float,
        momentum: float,
        weight_decay: float,
        assignment: MatrixAssignment | None = None,
    ):
        """assignment: which rank orthogonalizes which matrix; None for one rank."""
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))
        self.assignment = assignment

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # torch's may also evaluate the loss
        for group in self.param_groups:
            if self.assignment is None:
                self._step_alone(group)
            else:
                self._step_assigned(group, self.assignment)

    def _step_alone(self, group: dict):
        """Step the parameters with a gradient, in batches whose matrices have the same shape."""
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for p in group["params"]:
            if p.grad is not None:
                by_shape.setdefault(p.shape[-2:], []).append(p)
        for params in by_shape.values():
            per_batch = max(1, MOST_TOGETHER // params[0].numel())
            for first in range(0, len(params), per_batch):
                self._step_batch(params[first : first + per_batch], group)

    def _buffer(self, p: Tensor) -> Tensor:
        """Return the momentum of a parameter."""
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
        return state["momentum_buffer"]

    def _step_batch(self, params: list[Tensor], group: dict):
        """Step parameters whose matrices have the same shape, as one batch."""
        lr = group["lr"]
        momentum = group["momentum"]
        rows, columns = params[0].shape[-2:]
        weights = [p.view(-1, rows, columns) for p in params]
        buffers = [self._buffer(p).view(-1, rows, columns) for p in params]
        grads = [gradient(p).reshape(-1, rows, columns) for p in params]
        counts = [len(w) for w in weights]  # of matrices: n in all
        # Of a stack, a matrix without a gradient keeps momentum and weights. This is decided on the
        # device, since the host would have to wait for it. None: every matrix has a gradient.
        mask = None
        if any(p.ndim > 2 for p in params):
            mask = torch.cat([has_gradient(g) for g in grads])
        fresh = 1 - momentum  # the new gradient's part of the momentum
        if mask is None:
            torch._foreach_lerp_(buffers, grads, fresh)
        else:
            parts = torch.where(mask, fresh, 0.0).to(weights[0].dtype).split(counts)
            torch._foreach_lerp_(buffers, grads, parts)
        if lr == 0:  # on a CPU, baddbmm in bf16 returns garbage if both its factors are 0
            return

        dtype = dtype_of_products(params[0])
        ahead = weights[0].new_empty(sum(counts), rows, columns, dtype=dtype)
        for out, grad, buffer in zip(ahead.split(counts), grads, buffers, strict=True):
            # Nesterov's lerp(grad, buffer, momentum), divided by 1 - momentum: orthogonalization
            # ignores the scale
            torch.add(grad, buffer, alpha=momentum / (1 - momentum), out=out)
        updates = orthogonalize(ahead, mask, -lr * 0.2 * max(rows, columns) ** 0.5)
        kept = 1 - lr * group["weight_decay"]  # of the weights
        if mask is None:
            for p, update in zip(weights, updates.split(counts), strict=True):
                torch.add(update, p, alpha=kept, out=p)
        else:
            factors = torch.where(mask, kept, 1.0).to(weights[0].dtype).split(counts)
            for p, update, factor in zip(weights, updates.split(counts), factors, strict=True):
                torch.addcmul(update, p, factor, out=p)

    def _step_assigned(self, group: dict, assignment: MatrixAssignment):
        """Step sharded parameters, of which this rank has some rows, or some matrices of a stack.
        All ranks exchange all parameters, with zeros for those without a gradient."""
        lr = group["lr"]
        momentum = group["momentum"]
        ahead = []
        # for each parameter 1 or 0 per matrix, whether it has a gradient; None: no matrix has one
        masks: list[Tensor | None] = []
        for p in group["params"]:
            dtype = dtype_of_products(p)
            if p.grad is None:
                masks.append(None)
                ahead.append(torch.zeros_like(p, dtype=dtype))
                continue
            mask = has_gradient(p.grad).to(p.dtype) if p.ndim > 2 else p.new_ones(())
            buffer = self._buffer(p).lerp_(p.grad, mask * (1 - momentum))
            masks.append(mask)
            ahead.append(p.grad.lerp(buffer, momentum).to(dtype))
        updates = assignment(ahead, orthogonalize)
        for p, update, mask, longer_side in zip(
            group["params"], updates, masks, assignment.longer_sides, strict=True
        ):
            if mask is not None:
                p.mul_(1 - mask * (lr * group["weight_decay"]))
                p.add_(update.to(p.dtype).mul_(mask), alpha=-lr * 0.2 * longer_side**0.5)


def gradient(p: Tensor) -> Tensor:
    """Return the gradient of a parameter that has one."""
    assert p.grad is not None
    return p.grad


def dtype_of_products(p: Tensor) -> torch.dtype:
    return torch.bfloat16 if multiplies_bf16(p.device) else torch.float32


def has_gradient(grads: Tensor) -> Tensor:
    """Return for each matrix of a stack [n, r, c] whether its gradient is not all zero: bool [n, 1,
    1]."""
    return torch.linalg.vector_norm(grads, dim=(1, 2), keepdim=True) != 0


def orthogonalize(matrices: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """Orthogonalize matrices [n, r, c] approximately, by four Newton-Schulz steps of Muon's
    quintic, and multiply by `scale`. The result is 0 where `mask`, bool [n, 1, 1], is false. A
    fifth step does not lower the loss (docs/results/learning.md).

    A step is x -> (3.4445 + quintic_polynomial(x x^T)) x. The first one also divides x by its norm,
    whose square is the trace of x x^T. So normalization takes no extra pass over x."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    gram = x @ x.mT
    trace = gram.diagonal(dim1=1, dim2=2).sum(1, dtype=torch.float32)
    norm = trace.sqrt()[:, None, None] + 1e-7
    inverse = 1 / norm if mask is None else mask / norm
    gram = gram * (inverse * inverse).to(gram.dtype)
    polynomial = quintic_polynomial(gram)
    polynomial.diagonal(dim1=1, dim2=2).add_(3.4445)
    x = polynomial.mul_(inverse.to(x.dtype)) @ x
    for factor in (1.0, 1.0, scale):
        polynomial = quintic_polynomial(x @ x.mT)
        # adding 3.4445 on the diagonal instead would double or triple bf16's error
        x = torch.baddbmm(x, polynomial, x, beta=3.4445 * factor, alpha=factor)
    return x.mT if tall else x


def quintic_polynomial(gram: Tensor) -> Tensor:
    """Return -4.7750 g + 2.0315 g g for Gram matrices g [n, r, r]: Muon's polynomial without its
    constant."""
    return torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)


# --------------------------------------------------------------------------------------------------
# Row-wise Adagrad for Engram tables


class RowwiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one accumulator per row of Engram tables. It updates only rows that were looked
    up, so the cost of a step does not depend on the size of the tables.

    A row's step is lr * g / sqrt(sum of mean(g^2) over all steps so far), where g is the sum of the
    gradients of the step's lookups of that row, in all micro-steps. So the root mean square of a
    row's step is at most lr, however often a batch looks the row up (docs/results/learning.md). It
    neither sorts nor synchronizes.
    """

    def __init__(self, tables: Sequence[EngramTable], lr: float):
        self.tables = {table.weight: table for table in tables}
        for table in tables:
            table.claimed = True
        super().__init__([*self.tables], dict(lr=lr))

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # torch's may also evaluate the loss
        for group in self.param_groups:
            for p in group["params"]:
                merged = self.tables[p].merged()
                if merged is not None:
                    self._step_table(p, merged, group["lr"])

    def _step_table(self, p: Tensor, merged: Lookups, lr: float):
        """Step a table's rows, see EngramTable.merged."""
        row, grad = merged
        length = torch.linalg.vector_norm(grad, dim=1)
        state = self.state[p]
        if not state:
            state["sum"] = length.new_zeros(len(p))
        state["sum"].index_add_(0, row, length.square_().div_(grad.shape[1]))
        scale = -lr / (state["sum"].index_select(0, row).sqrt_() + 1e-10)
        update = (grad * scale[:, None]).to(p.dtype)
        p.index_add_(0, row, update)  # with alpha it is ten times slower on a CPU

    def zero_grad(self, set_to_none: bool = True):
        for table in self.tables.values():
            table.forget()

    @torch.no_grad()
    def reset(self):
        """Zero the tables and clear their accumulators."""
        for p in self.tables:
            p.zero_()
            self.state[p].clear()


# --------------------------------------------------------------------------------------------------
# 8-bit AdamW

MIN_8BIT = 4096  # elements; smaller parameters have fp32 states


def adamw_8bit(
    groups: list[dict],
    lr: float,
    betas: tuple[float, float],
    sharded: Sequence[ShardedParameter],
) -> torch.optim.Optimizer:
    """Construct bitsandbytes' AdamW8bit. The shards of `sharded` parameters use the same number of
    bits, and the same blocks, as the whole parameter would. Raise WorldError if a shard begins
    inside a block, whose scale would then differ."""
    with quiet():
        import bitsandbytes
    if not sharded:
        return bitsandbytes.optim.AdamW8bit(groups, lr=lr, betas=betas)
    whole_sizes = {}
    for param in sharded:
        whole_sizes[param.local] = math.prod(param.shape)
        if math.prod(param.shape) >= MIN_8BIT and splits_a_block(param):
            raise WorldError(
                f"--shards {len(param.bounds) - 1} would split a block of {SCALE_BLOCK} numbers of "
                f"{param.name} {list(param.shape)}, which share a scale in 8-bit AdamW: use other "
                f"--shards, or --optimizer adamw"
            )

    class ShardedAdamW8bit(bitsandbytes.optim.AdamW8bit):
        def get_config(self, gindex, pindex, group):
            p = group["params"][pindex]
            config = super().get_config(gindex, pindex, group)
            quantizes = whole_sizes.get(p, p.numel()) >= MIN_8BIT
            return config | dict(min_8bit_size=0 if quantizes else math.inf)

        def update_step(self, group, p, gindex, pindex):
            if p.numel():  # a shard may be empty
                super().update_step(group, p, gindex, pindex)

    return ShardedAdamW8bit(groups, lr=lr, betas=betas)


def splits_a_block(param: ShardedParameter) -> bool:
    """Return whether a shard of a parameter begins inside a block of 8-bit AdamW."""
    row = math.prod(param.shape[1:])
    return any(bound * row % SCALE_BLOCK for bound in param.bounds[1:-1])
