"""The optimizers: Muon for matrices, AdamW (optionally 8-bit) for the rest, row-wise Adagrad for
Engram tables.

`KINDS` is the table of parameters: which optimizer steps each one, and how often the forward pass
multiplies by it. `Optimizers` steps a whole model; muon_ranks.py has what Muon needs on several
ranks; state.py saves and loads optimizer states. Sources: Muon, Jordan et al. 2024, with the step
size of Moonlight (arXiv 2502.16982); bitsandbytes for 8-bit AdamW.

Shapes: n matrices [n, r, c].
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from spider.config import OPTIMIZERS
from spider.errors import WorldError
from spider.machine import has_bf16, quiet
from spider.model.memory import EngramTable, tables_of
from spider.training.distributed import Sharded, ShardedParameter, sharding_of
from spider.training.muon_ranks import MatrixAssignment
from spider.training.state import SCALE_BLOCK, load_optimizers, optimizer_states

# --------------------------------------------------------------------------------------------------
# Kinds of parameters


class Read(Enum):
    """How often the forward pass multiplies by a parameter."""

    BYTE = "once per byte"
    SEGMENT = "once per segment"
    LOOP = "in each loop of a segment"
    ONE_LOOP = "in its own loop of a segment"
    CHOSEN = "in each loop, if the router chose the expert"
    LOOKUP = "never: it is looked up"


class Kind(NamedTuple):
    """A row of the table. Parameters with at least two dimensions decay, except those of
    `adagrad`."""

    pattern: str  # regular expression, searched for in the parameter's name
    component: str  # row of the table that --dry_run prints
    optimizer: str
    read: Read
    rate: float = 1.0  # AdamW's learning rate, relative to the usual one


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
    # unstable at the full rate
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
# Stacks of matrices, which Muon steps like the weights of Linears
STACKS = re.compile(
    r"engram_(input|output)\.followed$|moe\.w_(gate|up|down)$|core\.(lora_(down|up)|offset_proj)$"
)


def kinds_of(model: nn.Module) -> dict[str, Kind]:
    """Return the kind of every parameter by name. Muon steps only weights of Linears and STACKS;
    AdamW steps everything else, such as a parameter that a researcher adds."""
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
    """Return AdamW's parameter groups, some of them empty: at the usual rate the weights, then the
    vectors; then the groups at other rates."""
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
    """The optimizers of one model, stepped together.

    A slice without a gradient (an idle expert, an unused loop) still moves under AdamW, as in
    torch, by its fading momentum and weight decay. Muon leaves the slice unchanged.
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
        momentum: float = 0.9,
    ):
        """optimizer: one of OPTIMIZERS, for all parameters except the Engram tables; raise
        ValueError for any other name. engram_lr: learning rate of the tables."""
        if optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer: {optimizer!r} is not one of {', '.join(OPTIMIZERS)}")
        self.sharding = sharding_of(model)
        self.tables = tables_of(model)
        # by name; of a sharded model, this rank's rows
        own_rows = {param.name: param.local for param in self.sharding.params}
        params = dict(model.named_parameters()) | own_rows
        kinds = kinds_of(model)
        matrices = [params[name] for name, kind in kinds.items() if kind.optimizer == "muon"]
        others = [params[name] for name, kind in kinds.items() if kind.optimizer == "adamw"]
        # Parameters whose gradients are clipped. Tables need no clipping: the step of a row does
        # not depend on the norm of its gradient.
        self.dense = matrices + others
        assert len(self.dense) + len(self.tables) == len(params), "a parameter without an optimizer"

        groups = adamw_groups(params, kinds, lr, weight_decay)
        self.by_name: dict[str, torch.optim.Optimizer] = {}
        if optimizer == "muon":
            assignment = None
            if isinstance(self.sharding, Sharded):
                sharded = [p for p in self.sharding.params if kinds[p.name].optimizer == "muon"]
                assignment = MatrixAssignment(self.sharding.world, sharded)
            self.by_name["muon"] = Muon(matrices, lr, momentum, weight_decay, assignment)
        else:
            groups[0]["params"] += matrices
        name = "adamw"
        adamw: Callable[..., torch.optim.Optimizer] = partial(AdamW, fused=True)
        if optimizer == "adamw8bit":
            name = "adamw8bit"
            adamw = adamw_8bit_class(self.sharding.params)
        self.by_name[name] = adamw(groups, lr=lr, betas=(beta1, beta2))  # both classes take these
        self.adagrad: RowwiseAdagrad | None = None
        if self.tables:
            self.adagrad = RowwiseAdagrad(self.tables, engram_lr)
            self.by_name["engram"] = self.adagrad

    def set_lr(self, peak: float, factor: float):
        """Set the learning rate to `peak * factor`. Skip the tables: their accumulators anneal the
        rate of each row."""
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
        """Return the state of each optimizer by name, with sharded tensors as ShardedRows."""
        return optimizer_states(self.sharding, self.by_name)

    def load_state_dict(self, states: dict):
        """Copy the states of all optimizers, but keep this run's settings. Raise CheckpointError if
        a state does not fit."""
        load_optimizers(self.sharding, self.by_name, states)


# --------------------------------------------------------------------------------------------------
# Muon


class Muon(torch.optim.Optimizer):
    """Orthogonalized momentum for matrices [r, c] and stacks of them [..., r, c].

    torch.optim.Muon takes single matrices only; here stacks of experts and all matrices of one
    shape form a batch. The update is 0.2 * sqrt(max(r, c)) times an orthogonal matrix, as large as
    AdamW's (Moonlight, arXiv 2502.16982). It does not fade with the momentum, so a parameter
    without a gradient keeps its weights and momentum, and so does one matrix of a stack (an idle
    expert, the adapter of a loop that did not run).
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        lr: float,
        momentum: float,
        weight_decay: float,
        assignment: MatrixAssignment | None,
    ):
        """assignment: which rank orthogonalizes which matrix; None for one rank."""
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))
        self.assignment = assignment
        self.dtype = torch.bfloat16 if has_bf16(params[0].device) else torch.float32

    def make_state(self, p: Tensor):
        """Make the state of a parameter, before its first step."""
        self.state[p]["momentum_buffer"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # torch's may also evaluate the loss
        for group in self.param_groups:
            if self.assignment is not None:  # all parameters at once, for a single exchange
                self._step_batches([[p] for p in group["params"]], group)
                continue
            params = [p for p in group["params"] if p.grad is not None]
            for batch in batches_by_shape(params):  # one after another, which takes less memory
                self._step_batches([batch], group)

    def _step_batches(self, batches: list[list[Tensor]], group: dict):
        """Step batches of parameters. All matrices of a batch have one shape."""
        masks = [has_gradient(batch) for batch in batches]
        momenta = [
            self._update_momentum(batch, mask, group["momentum"])
            for batch, mask in zip(batches, masks, strict=True)
        ]
        lr = group["lr"]
        if self.assignment is None:
            updates = [orthogonal_update(momentum, lr) for momentum in momenta]
        else:
            updates = self.assignment.map(partial(orthogonal_updates, lr=lr), momenta)
        for batch, update, mask in zip(batches, updates, masks, strict=True):
            apply_update(batch, update, mask, group)

    def _update_momentum(self, params: list[Tensor], mask: Tensor, momentum: float) -> Tensor:
        """Update the momentum buffers of the matrices in `mask`; return Nesterov's momentum,
        [n, r, c], with zeros outside the mask:

            buffer = momentum * buffer + (1 - momentum) * grad
            result = grad + momentum / (1 - momentum) * buffer

        This is lerp(grad, buffer, momentum) divided by 1 - momentum. Orthogonalization ignores the
        scale."""
        counts = matrix_counts(params)
        result = params[0].new_empty(sum(counts), *params[0].shape[-2:], dtype=self.dtype)
        active = mask.to(params[0].dtype)  # 1 or 0
        grad_weight = active * (1 - momentum)
        buffer_weight = active * (momentum / (1 - momentum))
        parts = zip(
            result.split(counts),
            grad_weight.split(counts),
            buffer_weight.split(counts),
            strict=True,
        )
        for p, (out, grad_factor, buffer_factor) in zip(params, parts, strict=True):
            if p.grad is None:
                out.zero_()
                continue
            if not self.state[p]:
                self.make_state(p)
            buffer = self.state[p]["momentum_buffer"].view(out.shape)
            grad = p.grad.reshape(out.shape)
            buffer.lerp_(grad, grad_factor)
            torch.addcmul(grad, buffer, buffer_factor, out=out)
        return result


MAX_BATCH_ELEMENTS = 1 << 26


def batches_by_shape(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group tensors by the shape of their matrices, in batches of at most MAX_BATCH_ELEMENTS."""
    by_shape: dict[torch.Size, list[Tensor]] = {}
    for tensor in tensors:
        by_shape.setdefault(tensor.shape[-2:], []).append(tensor)
    batches = []
    for alike in by_shape.values():
        size = max(1, MAX_BATCH_ELEMENTS // alike[0].numel())
        batches += [alike[first : first + size] for first in range(0, len(alike), size)]
    return batches


def matrix_counts(params: Sequence[Tensor]) -> list[int]:
    """Return the number of matrices of each parameter: 1, or the length of a stack."""
    return [p.shape[:-2].numel() for p in params]


def has_gradient(params: list[Tensor]) -> Tensor:
    """Return a mask of the parameters' matrices that have a gradient, bool [n, 1, 1].

    In a stack, a gradient of 0 counts as none. The device decides this, so that the host need not
    wait."""
    grads = [p.grad for p in params if p.grad is not None]
    if not grads or all(p.ndim == 2 for p in params):
        shape = (sum(matrix_counts(params)), 1, 1)
        return params[0].new_full(shape, bool(grads), dtype=torch.bool)
    norms = [torch.linalg.vector_norm(grad, dim=(-2, -1)).flatten() for grad in grads]
    return (torch.cat(norms) != 0)[:, None, None]


def orthogonal_updates(momenta: list[Tensor], lr: float) -> list[Tensor]:
    """Return what Muon adds to each of the weights [r, c], see orthogonal_update."""
    updates: dict[Tensor, Tensor] = {}
    for batch in batches_by_shape(momenta):
        updates |= zip(batch, orthogonal_update(torch.stack(batch), lr), strict=True)
    return [updates[momentum] for momentum in momenta]


def orthogonal_update(momenta: Tensor, lr: float) -> Tensor:
    """Return what Muon adds to weights, given their Nesterov momentum [n, r, c]."""
    if lr == 0:  # on a CPU, baddbmm in bf16 returns garbage if both factors (alpha, beta) are 0
        return torch.zeros_like(momenta)
    return orthogonalize(momenta, -lr * 0.2 * max(momenta.shape[1:]) ** 0.5)


def apply_update(params: list[Tensor], update: Tensor, mask: Tensor, group: dict):
    """Add an update [n, r, c] to parameters, and decay the matrices in `mask`. The update is 0 for
    the other matrices."""
    kept = torch.where(mask, 1 - group["lr"] * group["weight_decay"], 1.0).to(params[0].dtype)
    counts = matrix_counts(params)
    for p, change, factor in zip(params, update.split(counts), kept.split(counts), strict=True):
        weights = p.view(change.shape)
        torch.addcmul(change, weights, factor, out=weights)


# Muon's quintic: x -> (A + B g + C g g) x, with the Gram matrix g = x x^T
A = 3.4445
B = -4.7750
C = 2.0315


def orthogonalize(matrices: Tensor, scale: float = 1.0) -> Tensor:
    """Orthogonalize matrices [n, r, c] approximately, with four Newton-Schulz steps of Muon's
    quintic, and multiply by `scale`. A matrix of zeros stays zero. A fifth step does not lower the
    loss (docs/results/learning.md).

    The first step also divides x by its norm, the square root of the trace of g, so normalization
    takes no extra pass over x."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    gram = x @ x.mT
    trace = gram.diagonal(dim1=1, dim2=2).sum(1, dtype=torch.float32)
    norm = trace.sqrt()[:, None, None] + 1e-7
    inverse = norm.reciprocal()
    gram = gram * (inverse * inverse).to(gram.dtype)
    polynomial = torch.baddbmm(gram, gram, gram, beta=B, alpha=C)
    # Here each matrix has its own factor, which baddbmm does not take, so A is added to the
    # diagonal. In this step, that leaves bf16's error at 0.9%; in the steps below, the error would
    # double.
    polynomial.diagonal(dim1=1, dim2=2).add_(A)
    x = polynomial.mul_(inverse.to(x.dtype)) @ x
    for factor in (1.0, 1.0, scale):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=B, alpha=C)
        x = torch.baddbmm(x, polynomial, x, beta=A * factor, alpha=factor)
    return x.mT if tall else x


# --------------------------------------------------------------------------------------------------
# Row-wise Adagrad for Engram tables


class RowwiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one accumulator per row of the Engram tables.

    It updates only the rows that were looked up, so the cost of a step does not depend on the size
    of the tables. It neither sorts nor synchronizes. A row with the gradient g, summed over all
    lookups of a step, moves by

        lr * g / sqrt(sum of mean(g^2) over all steps so far)

    The root mean square of a row's step is thus at most lr, however often a batch looks the row up
    (docs/results/learning.md).
    """

    def __init__(self, tables: Sequence[EngramTable], lr: float):
        self.tables = {table.weight: table for table in tables}
        for table in tables:
            table.claimed = True
        super().__init__([*self.tables], dict(lr=lr))

    def make_state(self, p: Tensor):
        """Make the state of a table, before its first step."""
        dtype = torch.promote_types(p.dtype, torch.float32)  # like gradients
        self.state[p]["sum"] = torch.zeros(len(p), dtype=dtype, device=p.device)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # torch's may also evaluate the loss
        for group in self.param_groups:
            for p in group["params"]:
                gradients = self.tables[p].summed_gradients()
                if gradients is None:
                    continue
                row, grad = gradients
                length = torch.linalg.vector_norm(grad, dim=1)
                if not self.state[p]:
                    self.make_state(p)
                total = self.state[p]["sum"]
                total.index_add_(0, row, length.square_().div_(grad.shape[1]))
                scale = -group["lr"] / (total.index_select(0, row).sqrt_() + 1e-10)
                update = (grad * scale[:, None]).to(p.dtype)
                p.index_add_(0, row, update)  # with alpha: ten times slower on a CPU

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
# AdamW


class AdamW(torch.optim.AdamW):
    """torch's AdamW, with a state that can be made before the first step."""

    def make_state(self, p: Tensor):
        """Make the state of a parameter, as the first fused step does."""
        self.state[p] = dict(
            step=torch.zeros((), dtype=torch.float32, device=p.device),
            exp_avg=torch.zeros_like(p),
            exp_avg_sq=torch.zeros_like(p),
        )


MIN_8BIT = 4096  # elements; smaller parameters have fp32 states


def adamw_8bit_class(sharded: Sequence[ShardedParameter]) -> type[torch.optim.Optimizer]:
    """Return a subclass of bitsandbytes' AdamW8bit that gives each shard of `sharded` parameters
    the same number of bits and the same blocks as the whole parameter. Raise WorldError if a shard
    begins inside a block, whose scale would then differ."""
    with quiet():
        import bitsandbytes
    whole_sizes = {}
    for param in sharded:
        size = math.prod(param.shape)
        row = math.prod(param.shape[1:])
        splits_a_block = any(begin * row % SCALE_BLOCK for begin in param.bounds[1:-1])
        if size >= MIN_8BIT and splits_a_block:
            raise WorldError(
                f"--shards {len(param.bounds) - 1} would split a block of {SCALE_BLOCK} numbers of "
                f"{param.name} {list(param.shape)}, which share a scale in 8-bit AdamW: use other "
                f"--shards, or --optimizer adamw"
            )
        whole_sizes[param.local] = size

    class AdamW8bit(bitsandbytes.optim.AdamW8bit):
        def make_state(self, p):
            """Make the state of a parameter; it does not depend on the settings of its group."""
            self.init_state(self.param_groups[0] | dict(params=[p]), p, 0, 0)

        def get_config(self, gindex, pindex, group):
            p = group["params"][pindex]
            config = super().get_config(gindex, pindex, group)
            quantizes = whole_sizes.get(p, p.numel()) >= MIN_8BIT
            return config | dict(min_8bit_size=0 if quantizes else math.inf)

        def update_step(self, group, p, gindex, pindex):
            if p.numel():  # a shard may be empty
                super().update_step(group, p, gindex, pindex)

    return AdamW8bit
