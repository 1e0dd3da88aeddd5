"""The optimizers: Muon for matrices, AdamW (optionally 8-bit) for the rest, row-wise Adagrad for
Engram tables.

`KINDS` is the table of parameters: which optimizer steps them, and how often products read them.
`Optimizers` steps all of a model, on one rank or on several. Sources: Muon, Jordan et al. 2024,
with the step size of Moonlight (arXiv 2502.16982); bitsandbytes for 8-bit AdamW.
"""

import math
import re
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spider.common import CheckpointError, WorldError
from spider.config import OPTIMIZERS
from spider.distributed import SCALE_BLOCK, ShardedParameter, World, is_plain, sharding_of
from spider.machine import multiplies_bf16, quiet
from spider.memory import EngramTable

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

    name: str  # regular expression, searched in the parameter's name
    component: str  # of the table that --dry_run prints
    optimizer: str
    read: Read
    rate: float = 1.0  # AdamW's learning rate, relative to that of others


ENGRAM_TABLES, _ENGRAM, _LOOPS = (
    "Engram tables",
    "Engram projections",
    "loop adapters, injection, halting",
)
_HEAD, _BOUNDARIES = "embedding and head", "boundary predictor"
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
        kind = next(kind for kind in KINDS if re.search(kind.name, name))
        if kind.optimizer == "muon" and p not in linears and not STACKS.search(name):
            kind = kind._replace(optimizer="adamw")
        kinds[name] = kind
    return kinds


# --------------------------------------------------------------------------------------------------
# All optimizers of a model


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
        """optimizer: one of OPTIMIZERS, for all but the Engram tables, whose learning rate is
        engram_lr; raise ValueError for another name."""
        if optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer: {optimizer!r} is not one of {', '.join(OPTIMIZERS)}")
        self.sharding = sharding_of(model)
        self.tables = tables = [m for m in model.modules() if isinstance(m, EngramTable)]
        params, kinds = self.sharding.parameters(model), kinds_of(model)
        matrices = [params[name] for name, kind in kinds.items() if kind.optimizer == "muon"]
        # Groups of AdamW, by weight decay and relative rate; matrices join the first where they are
        # not Muon's.
        groups = {(True, 1.0): [], (False, 1.0): []}
        for name, kind in kinds.items():
            if kind.optimizer == "adamw":
                groups.setdefault((params[name].ndim >= 2, kind.rate), []).append(params[name])
        # The step of a table's row does not depend on its gradient's norm, so tables are not
        # clipped.
        self.dense = matrices + [
            params[name] for name, kind in kinds.items() if kind.optimizer == "adamw"
        ]
        assert len(self.dense) + len(tables) == len(params), "a parameter without an optimizer"
        adam = [
            dict(
                params=group,
                lr=lr * rate,
                relative_rate=rate,
                weight_decay=weight_decay if decays else 0.0,
            )
            for (decays, rate), group in groups.items()
        ]
        self.by_name: dict[str, torch.optim.Optimizer] = {}
        if optimizer == "muon":
            sharded = {id(param.local): param for param in self.sharding.params}
            assignment = (
                MatrixAssignment(self.sharding.world, [sharded[id(p)] for p in matrices])
                if sharded
                else None
            )
            self.by_name["muon"] = Muon(matrices, lr, momentum, weight_decay, assignment)
        else:
            adam[0]["params"] += matrices
        if optimizer == "adamw8bit":
            self.by_name["adamw8bit"] = adamw_8bit(adam, lr, (beta1, beta2), self.sharding.params)
        else:
            self.by_name["adamw"] = torch.optim.AdamW(adam, lr=lr, betas=(beta1, beta2), fused=True)
        if tables:
            self.by_name["engram"] = RowwiseAdagrad(tables, engram_lr)

    def set_lr(self, peak: float, factor: float):
        """Set the learning rate to `peak * factor`, except for the tables, whose accumulators
        anneal it row by row."""
        for name, optimizer in self.by_name.items():
            for group in optimizer.param_groups if name != "engram" else ():
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
        self.by_name["engram"].reset()

    def state_dict(self) -> dict:
        """Return the state of each optimizer by name; sharded tensors as ShardedRows."""
        return self.sharding.optimizer_states(self.by_name)

    def load_state_dict(self, states: dict):
        """Load the states of all optimizers, but keep this run's settings. Raise CheckpointError if
        one does not fit."""
        if states.keys() != self.by_name.keys():
            raise CheckpointError(
                f"the checkpoint has the optimizers {', '.join(map(str, states))}, this run "
                f"{', '.join(self.by_name)}: use --optimizer as before, or --reset_steps"
            )
        for name, optimizer in self.by_name.items():
            check_optimizer_state(name, optimizer, states[name], self.sharding.params)
        states = self.sharding.own_optimizer_states(self.by_name, states)
        for name, optimizer in self.by_name.items():
            take_state(optimizer, states[name])


def load_optimizer_state(name: str, optimizer: torch.optim.Optimizer, state: dict):
    """Load a checkpoint's state of an optimizer of Optimizers, by its name there, but keep the
    settings. Raise CheckpointError if it does not fit."""
    check_optimizer_state(name, optimizer, state)
    take_state(optimizer, state)


def take_state(optimizer: torch.optim.Optimizer, state: dict):
    """Load a state that was checked; of its groups of parameters nothing is taken, since they have
    the settings."""
    optimizer.load_state_dict(
        dict(state=state["state"], param_groups=optimizer.state_dict()["param_groups"])
    )


# where bitsandbytes puts the tensors of a parameter's state
NESTED = "__bnb_optimizer_quant_state__"


def check_optimizer_state(
    name: str,
    optimizer: torch.optim.Optimizer,
    state: dict,
    sharded: Sequence[ShardedParameter] = (),
):
    """Raise CheckpointError unless a whole state has the parameters, and for each the tensors, that
    the optimizer makes: kernels trust names, shapes and dtypes, and torch does not check them."""
    shapes = {id(param.local): param.shape for param in sharded}
    params = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    try:
        groups = [group["params"] for group in state["param_groups"]]
        if groups != [group["params"] for group in optimizer.state_dict()["param_groups"]]:
            raise ValueError("it has other groups of parameters")
        for i, tensors in state["state"].items():
            if i not in params:
                raise ValueError(f"it has an unknown parameter {i!r}")
            p = params[i]
            if name == "adamw8bit":
                tensors = {
                    key: value for key, value in tensors.items() if key != NESTED
                } | tensors.get(NESTED, {})
            shape = shapes.get(id(p), tuple(p.shape))
            found = {key: kind_of(value) for key, value in tensors.items()}
            if found and found not in state_layouts(name, p.dtype, shape):
                listed = ", ".join(f"{key}: {kind}" for key, kind in found.items())
                raise ValueError(f"for a parameter {list(shape)} it has {listed[:200]}")
    except Exception as fault:  # whatever a foreign state provokes
        reason = str(fault).partition("\n")[0]
        raise CheckpointError(
            f"the checkpoint's state of {name} does not fit this model ({reason}): use "
            f"--reset_steps "
            f"to load only the weights"
        ) from None


def kind_of(value) -> str:
    """Return dtype and shape of a plain tensor, or the name of another type."""
    return dtype_and_shape(value.dtype, value.shape) if is_plain(value) else type(value).__name__


def dtype_and_shape(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def state_layouts(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> list[dict[str, str]]:
    """Return the states that an optimizer may have of a parameter: what kind_of returns for each
    value, by key."""
    whole = dtype_and_shape(dtype, shape)
    floats = dtype_and_shape(torch.float32, shape)
    quantized = dtype_and_shape(torch.uint8, shape)
    scales = dtype_and_shape(torch.float32, [math.ceil(math.prod(shape) / SCALE_BLOCK)])
    tables = dict(qmap1="float32 [256]", qmap2="float32 [256]", absmax1=scales, absmax2=scales)
    return {
        "muon": [dict(momentum_buffer=whole)],
        "adamw": [dict(step="float32 []", exp_avg=whole, exp_avg_sq=whole)],
        "adamw8bit": [
            dict(step="int", state1=floats, state2=floats),
            dict(step="int", state1=quantized, state2=quantized) | tables,
        ],
        "engram": [dict(sum=dtype_and_shape(dtype, shape[:1]))],
    }[name]


# --------------------------------------------------------------------------------------------------
# Muon

MOST_TOGETHER = 1 << 26  # maximum elements of a batch of matrices


class Muon(torch.optim.Optimizer):
    """Orthogonalized momentum for matrices [r, c] and stacks of them [..., r, c].

    torch.optim.Muon only takes single matrices; here stacks of experts and all matrices of one
    shape form a batch. The update is 0.2 * sqrt(max(r, c)) times an orthogonal matrix, as large as
    AdamW's (Moonlight, arXiv 2502.16982). It does not fade with the momentum. Therefore anything
    without a gradient keeps weights and momentum: a parameter, or one matrix of a stack (an idle
    expert, the adapter of a loop that did not run). `assignment`: which rank orthogonalizes which
    matrix (MatrixAssignment); None for one rank.
    """

    def __init__(
        self,
        params,
        lr: float,
        momentum: float,
        weight_decay: float,
        assignment: Callable | None = None,
    ):
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
                per_batch = max(1, MOST_TOGETHER // params[0].numel())
                for i in range(0, len(params), per_batch):
                    self._step_batch(params[i : i + per_batch], group)

    def _buffer(self, p: Tensor) -> Tensor:
        if not self.state[p]:
            self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        return self.state[p]["momentum_buffer"]

    def _step_batch(self, params: list[Tensor], group: dict):
        """Step parameters whose matrices have the same shape, as one batch."""
        momentum, lr = group["momentum"], group["lr"]
        rows, columns = params[0].shape[-2:]
        weights = [p.view(-1, rows, columns) for p in params]  # n matrices in all
        buffers = [self._buffer(p).view(-1, rows, columns) for p in params]
        grads = [p.grad.reshape(-1, rows, columns) for p in params]
        # factors of the new gradient, and of the weights
        fresh, kept = 1 - momentum, 1 - lr * group["weight_decay"]
        moved, counts = None, [len(w) for w in weights]  # moved None: every matrix has a gradient
        if any(p.ndim > 2 for p in params):
            # Of a stack, a matrix without a gradient changes neither momentum (0) nor weights (1);
            # no host sync.
            moved = torch.cat([has_gradient(g) for g in grads])
            fresh, kept = (
                torch.where(moved, value, idle).to(weights[0].dtype).split(counts)
                for value, idle in ((fresh, 0.0), (kept, 1.0))
            )
        torch._foreach_lerp_(buffers, grads, fresh)
        if lr == 0:  # on a CPU, baddbmm in bf16 returns garbage if both its factors are 0
            return
        ahead = weights[0].new_empty(sum(counts), rows, columns, dtype=dtype_of_products(params[0]))
        for out, grad, buffer in zip(ahead.split(counts), grads, buffers, strict=True):
            # Nesterov's lerp(grad, buffer, momentum), divided by 1 - momentum: scale does not
            # matter.
            torch.add(grad, buffer, alpha=momentum / (1 - momentum), out=out)
        updates = orthogonalize(ahead, moved, -lr * 0.2 * max(rows, columns) ** 0.5).split(counts)
        for i, (p, update) in enumerate(zip(weights, updates, strict=True)):
            if moved is None:
                torch.add(update, p, alpha=kept, out=p)
            else:
                torch.addcmul(update, p, kept[i], out=p)

    def _step_assigned(self, params: list[Tensor], group: dict):
        """Step sharded parameters, of which this rank has some rows, or some matrices of a stack.
        All ranks exchange all parameters, with zeros for those without a gradient."""
        momentum, lr = group["momentum"], group["lr"]
        ahead, moved = [], []  # moved: 1 or 0 per matrix, as above
        for p in params:
            if p.grad is None:
                moved.append(None)
                ahead.append(torch.zeros_like(p, dtype=dtype_of_products(p)))
                continue
            moved.append((has_gradient(p.grad) if p.ndim > 2 else p.new_ones(())).to(p.dtype))
            buffer = self._buffer(p).lerp_(p.grad, moved[-1] * (1 - momentum))
            ahead.append(p.grad.lerp(buffer, momentum).to(dtype_of_products(p)))
        for p, update, moves, size in zip(
            params, self.assignment(ahead, orthogonalize), moved, self.assignment.sizes, strict=True
        ):
            if moves is not None:
                p.mul_(1 - moves * (lr * group["weight_decay"]))
                p.add_(update.to(p.dtype).mul_(moves), alpha=-lr * 0.2 * size**0.5)


def dtype_of_products(p: Tensor) -> torch.dtype:
    return torch.bfloat16 if multiplies_bf16(p.device) else torch.float32


def has_gradient(grads: Tensor) -> Tensor:
    """Return for each matrix of a stack [n, r, c] whether its gradient is not all zero: bool [n, 1,
    1]."""
    return torch.linalg.vector_norm(grads, dim=(1, 2), keepdim=True) != 0


def orthogonalize(matrices: Tensor, moved: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """Orthogonalize matrices [n, r, c] approximately, by four Newton-Schulz steps of Muon's
    quintic, and multiply by `scale`. The result is 0 where `moved`, bool [n, 1, 1], is false. A
    fifth step does not lower the loss (docs/results/learning.md).

    Normalization takes no extra pass over x: the first Gram matrix has its norm, the first
    polynomial divides by it."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    for i in range(4):
        gram = x @ x.mT
        if i == 0:  # the trace is the squared norm of x
            norm = gram.diagonal(dim1=1, dim2=2).sum(1, dtype=torch.float32).sqrt()[:, None, None]
            size = 1 / (norm + 1e-7) if moved is None else moved / (norm + 1e-7)
            gram = gram * (size * size).to(gram.dtype)
        polynomial = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        if i == 0:
            polynomial.diagonal(dim1=1, dim2=2).add_(3.4445)
            x = polynomial.mul_(size.to(x.dtype)) @ x
        else:  # adding 3.4445 on the diagonal instead would double or triple bf16's error
            last = scale if i == 3 else 1.0
            x = torch.baddbmm(x, polynomial, x, beta=3.4445 * last, alpha=last)
    return x.mT if tall else x


# --------------------------------------------------------------------------------------------------
# Muon on several ranks


class AssignedMatrix(NamedTuple):
    """A matrix that one rank orthogonalizes."""

    param: int  # index of the parameter
    index: int | None  # in the rank's part of a stack; None: a matrix sharded by rows
    rows: list[int]  # on each shard
    columns: int
    replica: int  # of its owner
    shard: int


class MatrixAssignment:
    """An assignment of whole matrices to ranks. Matrices sharded by rows are sent to their owner
    and back; those of a stack stay on their shard; replicas exchange results. Every rank computes
    the same assignment."""

    def __init__(self, world: World, params: list[ShardedParameter]):
        self.world, loads, self.matrices = world, [0] * world.ranks, []
        found = []  # cost, the first four of AssignedMatrix, and the ranks that may own it
        for i, param in enumerate(params):
            counts = [b - a for a, b in zip(param.bounds, param.bounds[1:], strict=False)]
            rows, columns = param.shape[-2:]
            cost = rows * columns * min(rows, columns)
            if len(param.shape) == 2:
                found.append((cost, i, None, counts, columns, range(world.ranks)))
            else:
                found += [
                    (
                        cost,
                        i,
                        j,
                        [rows * (k == s) for k in range(world.shards)],
                        columns,
                        range(s, world.ranks, world.shards),
                    )
                    for s, count in enumerate(counts)
                    for j in range(count)
                ]
        # The largest first, each to the rank with the least work so far
        for cost, i, index, counts, columns, allowed in sorted(
            found, key=lambda matrix: -matrix[0]
        ):
            owner = min(allowed, key=lambda rank: loads[rank])
            loads[owner] += cost
            self.matrices.append(
                AssignedMatrix(
                    i, index, counts, columns, owner // world.shards, owner % world.shards
                )
            )
        self.sizes = [max(param.shape[-2:]) for param in params]  # longer side of a matrix

    def __call__(self, local: list[Tensor], work: Callable) -> list[Tensor]:
        """Apply `work`, [n, r, c] -> [n, r, c], to whole matrices. `local`: this rank's rows of
        each parameter; the result has the same shapes."""
        world = self.world
        mine = [matrix for matrix in self.matrices if matrix.replica == world.replica]
        cut = [matrix for matrix in mine if matrix.index is None]
        by_owner = [
            [matrix for matrix in cut if matrix.shard == shard] for shard in range(world.shards)
        ]
        own = by_owner[world.shard]
        stacked = [
            matrix for matrix in mine if matrix.index is not None and matrix.shard == world.shard
        ]

        empty = local[0].new_empty(0)  # of the dtype and device of all that is exchanged
        received = self._all_to_all(
            [[local[matrix.param] for matrix in owned] for owned in by_owner],
            [
                [(matrix.rows[shard], matrix.columns) for matrix in own]
                for shard in range(world.shards)
            ],
            empty,
        )
        wholes = apply_in_batches(
            [torch.cat(rows) for rows in zip(*received, strict=True)]
            + [local[matrix.param][matrix.index] for matrix in stacked],
            work,
        )
        back = [
            whole.split(matrix.rows) for matrix, whole in zip(own, wholes[: len(own)], strict=True)
        ]
        returned = self._all_to_all(
            [[rows[shard] for rows in back] for shard in range(world.shards)],
            [
                [(matrix.rows[world.shard], matrix.columns) for matrix in owned]
                for owned in by_owner
            ],
            empty,
        )
        done = {
            id(matrix): rows
            for owned, results in zip(by_owner, returned, strict=True)
            for matrix, rows in zip(owned, results, strict=True)
        }
        done |= {
            id(matrix): whole for matrix, whole in zip(stacked, wholes[len(own) :], strict=True)
        }
        done |= self._all_gather_replicas(done, empty)
        out = [torch.empty_like(rows) for rows in local]
        for matrix in self.matrices:
            if id(matrix) in done:
                target = (
                    out[matrix.param] if matrix.index is None else out[matrix.param][matrix.index]
                )
                target.copy_(done[id(matrix)])
        return out

    def _all_to_all(
        self, sent: list[list[Tensor]], shapes: list[list[tuple[int, int]]], empty: Tensor
    ) -> list[list[Tensor]]:
        """Exchange tensors with the shards of this replica; return the received ones, by shard, in
        these shapes. `empty` has their dtype and device: the ranks must agree, also where one sends
        nothing."""
        if self.world.shards == 1:
            return sent
        flat = [[tensor.flatten() for tensor in tensors] for tensors in sent]
        sizes = [[math.prod(shape) for shape in of_shard] for of_shard in shapes]
        sending = torch.cat([empty, *(tensor for tensors in flat for tensor in tensors)])
        received = sending.new_empty(sum(map(sum, sizes)))
        dist.all_to_all_single(
            received,
            sending,
            [sum(of_shard) for of_shard in sizes],
            [sum(map(len, tensors)) for tensors in flat],
            group=self.world.mesh.get_group("shards"),
        )
        return [
            [
                tensor.view(shape)
                for tensor, shape in zip(chunk.split(of_shard), its_shapes, strict=True)
            ]
            for chunk, of_shard, its_shapes in zip(
                received.split([sum(of_shard) for of_shard in sizes]), sizes, shapes, strict=True
            )
        ]

    def _all_gather_replicas(self, done: dict[int, Tensor], empty: Tensor) -> dict[int, Tensor]:
        """Return this rank's rows of the matrices that the other replicas own; `empty` as above."""
        world = self.world
        if world.replicas == 1:
            return {}
        shapes = {
            id(matrix): (matrix.rows[world.shard], matrix.columns) for matrix in self.matrices
        }
        by_replica = [
            [
                matrix
                for matrix in self.matrices
                if matrix.replica == replica and matrix.rows[world.shard]
            ]
            for replica in range(world.replicas)
        ]
        longest = max(
            sum(math.prod(shapes[id(matrix)]) for matrix in owned) for owned in by_replica
        )
        sending = torch.cat(
            [empty, *(done[id(matrix)].flatten() for matrix in by_replica[world.replica])]
        )
        sending = nn.functional.pad(sending, (0, longest - len(sending)))
        received = list(sending.new_empty(world.replicas, longest))
        dist.all_gather(received, sending, group=world.mesh.get_group("replicas"))
        out = {}
        for owned, chunk in zip(by_replica, received, strict=True):
            sizes = [math.prod(shapes[id(matrix)]) for matrix in owned]
            out |= {
                id(matrix): rows.view(shapes[id(matrix)])
                for matrix, rows in zip(owned, chunk[: sum(sizes)].split(sizes), strict=True)
            }
        return out


def apply_in_batches(matrices: list[Tensor], work: Callable) -> list[Tensor]:
    """Apply `work` to stacks of matrices of the same shape, with at most MOST_TOGETHER elements
    each."""
    by_shape, out = {}, [None] * len(matrices)
    for i, matrix in enumerate(matrices):
        by_shape.setdefault(matrix.shape, []).append(i)
    for shape, indices in by_shape.items():
        at_once = max(1, MOST_TOGETHER // math.prod(shape))
        for k in range(0, len(indices), at_once):
            batch = indices[k : k + at_once]
            for i, result in zip(
                batch, work(torch.stack([matrices[i] for i in batch])).unbind(), strict=True
            ):
                out[i] = result
    return out


# --------------------------------------------------------------------------------------------------
# Row-wise Adagrad for Engram tables


class RowwiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one accumulator per row of Engram tables. It updates only rows that were looked
    up, so the cost of a step does not depend on the size of the tables.

    A row's step is lr * sum(g) / sqrt(sum of mean(g^2) over all lookups so far), where g are the
    gradients of the step's lookups of that row, in all micro-steps. It neither sorts nor
    synchronizes.
    """

    def __init__(self, tables: list[EngramTable], lr: float):
        self.tables = {table.weight: table for table in tables}
        for table in tables:
            table.claimed = True
        super().__init__([*self.tables], dict(lr=lr))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                gathered = self.tables[p].gathered()
                if gathered and not self.state[p]:
                    self.state[p]["sum"] = gathered[0][2].new_zeros(len(p))
                for row, _, square in gathered:
                    self.state[p]["sum"].index_add_(0, row, square)
                for row, grad, _ in gathered:
                    scale = -group["lr"] / (
                        self.state[p]["sum"].index_select(0, row).sqrt_() + 1e-10
                    )
                    step = (grad * scale[:, None]).to(p.dtype)
                    p.index_add_(0, row, step)  # with alpha it is ten times slower on a CPU

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
    groups: list[dict], lr: float, betas: tuple[float, float], sharded: list[ShardedParameter]
) -> torch.optim.Optimizer:
    """Construct bitsandbytes' AdamW8bit. The shards of `sharded` parameters use the same number of
    bits, and the same blocks, as the whole parameter would; raise WorldError if a shard begins
    inside a block, whose scale would then differ."""
    with quiet():
        import bitsandbytes
    if not sharded:
        return bitsandbytes.optim.AdamW8bit(groups, lr=lr, betas=betas)
    for param in sharded:
        row = math.prod(param.shape[1:])
        if math.prod(param.shape) >= MIN_8BIT and any(
            bound * row % SCALE_BLOCK for bound in param.bounds[1:-1]
        ):
            raise WorldError(
                f"--shards {len(param.bounds) - 1} would split a block of {SCALE_BLOCK} numbers of "
                f"{param.name} {list(param.shape)}, which share a scale in 8-bit AdamW: use other "
                f"--shards, or --optimizer adamw"
            )
    sizes = {id(param.local): math.prod(param.shape) for param in sharded}

    class ShardedAdamW8bit(bitsandbytes.optim.AdamW8bit):
        def get_config(self, gindex, pindex, group):
            p = group["params"][pindex]
            config = super().get_config(gindex, pindex, group)
            return config | dict(
                min_8bit_size=0 if sizes.get(id(p), p.numel()) >= MIN_8BIT else math.inf
            )

        def update_step(self, group, p, gindex, pindex):
            if p.numel():  # a shard may be empty
                super().update_step(group, p, gindex, pindex)

    return ShardedAdamW8bit(groups, lr=lr, betas=betas)
