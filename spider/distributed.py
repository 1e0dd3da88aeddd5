"""Several ranks: the process group (`World`), and a model sharded or replicated over it by FSDP2.

    torchrun --standalone --nproc_per_node 8 train.py ... --shards 4     # 2 replicas of 4 shards

The mesh is (replicas, shards), rank = replica * shards + shard. Every rank runs the same
collectives; whatever ends the loop or skips an update is a number in the all-reduce of each step,
before its update. If a rank dies, torchrun names it and ends the others, and the same command
resumes from the newest checkpoint.

`shard_model` calls fully_shard. Its groups are each byte block, the core (gathered once for all its
loops), and the rest. Optimizers see this rank's rows of each parameter as plain tensors. Engram
tables are not sharded; their gradients are all-reduced once per step. `sharding_of` returns a
model's `Sharded` or `Unsharded`, one interface for both.
"""

import math
import os
import re
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing import _prctl_pr_set_pdeathsig
from torch.utils._pytree import tree_map_only

from spider import common
from spider.common import UsageError, WorldError
from spider.memory import EngramTable

SCALE_BLOCK = 256  # elements per scale of 8-bit AdamW


# --------------------------------------------------------------------------------------------------
# Ranks


def rank_of(environ: Mapping[str, str], rank: str, ranks: str) -> tuple[int, int]:
    """Return a rank and the number of ranks, (0, 1) by default, from variables of these names."""
    remedy = "start all ranks with torchrun, or unset its variables for a single process"
    for name in (rank, ranks):
        if environ.get(name) and not re.fullmatch("[0-9]{1,9}", environ[name]):
            raise WorldError(f"{name}={environ[name]} is not a whole number: {remedy}")
    number, count = int(environ.get(rank) or 0), int(environ.get(ranks) or 1)
    if number >= count or count > 1 and not environ.get(rank):
        settings = ", ".join(
            f"{name}={environ[name]}" if environ.get(name) else f"{name} is not set"
            for name in (rank, ranks)
        )
        raise WorldError(f"{settings}: {remedy}")
    return number, count


class World:
    """The ranks of a run, a single process until `join`. Without torchrun collectives do
    nothing."""

    def __init__(self, environ: Mapping[str, str] = os.environ):
        """Raise WorldError if torchrun's variables contradict one another."""
        self.rank, self.ranks = rank_of(environ, "RANK", "WORLD_SIZE")
        self.local_rank, self.local_ranks = rank_of(environ, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        self.by_torchrun = "TORCHELASTIC_RUN_ID" in environ
        self.device, self.shards, self.mesh = torch.device("cpu"), 1, None

    @property
    def is_rank0(self) -> bool:
        """Return whether this is the rank that logs and writes files."""
        return self.rank == 0

    @property
    def shard(self) -> int:
        return self.rank % self.shards

    @property
    def replica(self) -> int:
        return self.rank // self.shards

    @property
    def replicas(self) -> int:
        return self.ranks // self.shards

    def join(self, device: torch.device, shards: int, timeout: float):
        """Join the other ranks, each on its own device of a type, and arrange all as replicas of
        `shards` shards. `timeout`: seconds, of collectives. Raise WorldError if that is not
        possible."""
        if self.ranks % shards:
            raise WorldError(f"--shards {shards} does not divide {self.ranks} ranks: use a divisor")
        self.device, self.shards = device, shards
        if self.by_torchrun:
            stop_with_parent()
        if self.ranks == 1:
            return
        if device.type == "cuda":
            # Slurm may show a process its own GPU alone, with index 0, or all GPUs of the node.
            self.device = torch.device("cuda", self.local_rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        backend = "nccl" if device.type == "cuda" else "gloo"
        limit = timedelta(seconds=timeout)
        try:
            store, _, _ = next(dist.rendezvous("env://", self.rank, self.ranks, timeout=limit))
            # torchrun's own store survives --max-restarts, with the addresses of dead ranks.
            shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if shared else "0"
            store = dist.PrefixStore(f"attempt{attempt}", store)
            if backend == "nccl":
                self._require_own_gpu(store)
            dist.init_process_group(
                backend,
                store=store,
                rank=self.rank,
                world_size=self.ranks,
                timeout=limit,
                device_id=self.device if backend == "nccl" else None,
            )
            self.mesh = dist.init_device_mesh(
                device.type, (self.replicas, shards), mesh_dim_names=("replicas", "shards")
            )
            for name in self.mesh.mesh_dim_names:  # else torch's own, half an hour
                dist.distributed_c10d._set_pg_timeout(limit, self.mesh.get_group(name))
            self.all(True)  # rank 0 may hold the store: it must not end while others still connect
        except (RuntimeError, ValueError) as fault:
            raise WorldError(
                f"rank {self.rank} of {self.ranks} cannot reach the others: "
                f"{str(fault).splitlines()[0]}: start all with torchrun, with the same "
                f"--rdzv_endpoint"
            ) from None

    def _require_own_gpu(self, store: dist.Store):
        """Raise UsageError, on all ranks, if two have the same GPU: NCCL would fail with a message
        about its inside."""
        store.set(f"gpu{self.rank}", str(torch.cuda.get_device_properties(self.device).uuid))
        gpus = store.multi_get([f"gpu{rank}" for rank in range(self.ranks)])
        shared = [rank for rank, gpu in enumerate(gpus) if gpus.count(gpu) > 1]
        if not shared:
            return
        store.set(f"told{self.rank}", "")
        if self.is_rank0:  # it may hold the store
            store.wait([f"told{rank}" for rank in range(self.ranks)])
        raise UsageError(
            f"ranks {', '.join(map(str, shared))} of {self.ranks} would share GPUs: start at "
            f"most one "
            f"process per GPU of a host (here {torch.cuda.device_count()}), each with its "
            f"LOCAL_RANK"
        )

    def leave(self):
        """Leave the process group, where all ranks do. After an error of one it just ends: this
        could hang."""
        if self.mesh is not None:
            dist.destroy_process_group()

    def sum(self, values: Tensor) -> Tensor:
        """All-reduce values in place, as a sum."""
        if self.ranks > 1:
            dist.all_reduce(values)
        return values

    def all(self, holds: bool) -> bool:
        """Return whether something holds on all ranks."""
        return int(self.sum(torch.tensor(int(holds), device=self.device))) == self.ranks

    def on_rank0(self, work: Callable):
        """Run `work` on rank 0, and return its result (or raise its error) on every rank; other
        ranks get tensors on the meta device."""
        if self.ranks == 1:
            return work()
        outcome, own = [None, None], None  # result and error
        if self.is_rank0:
            try:
                own = work()
                outcome[0] = tree_map_only(Tensor, lambda t: t.to("meta"), own)
            except Exception as fault:
                outcome[1] = fault
        dist.broadcast_object_list(outcome, 0, device=self.device)
        if outcome[1] is not None:
            raise outcome[1]
        return own if self.is_rank0 else outcome[0]

    def distribute(self, batches: Iterable) -> Iterator[tuple]:
        """Distribute batches over ranks: yield (batch, 1), or (the first batch, 0) if this rank has
        none left but must join the collectives."""
        if self.ranks == 1:
            yield from ((batch, 1) for batch in batches)
            return
        batches = list(batches)
        for i in range(0, len(batches), self.ranks):
            own = i + self.rank < len(batches)
            yield batches[i + self.rank if own else 0], int(own)


def stop_with_parent():
    """Have the kernel send SIGTERM to this process when its parent dies (Linux only). For ranks of
    torchrun: after SIGKILL it could not stop them, and they would train on unseen."""
    # at the end of the thread that started this process: torchrun's main one
    _prctl_pr_set_pdeathsig(signal.SIGTERM)
    if os.getppid() != common.PARENT:  # it died before
        os.kill(os.getpid(), signal.SIGTERM)


# --------------------------------------------------------------------------------------------------
# One process


@dataclass
class ShardedParameter:
    """A sharded parameter."""

    name: str
    dtensor: nn.Parameter  # FSDP's
    local: nn.Parameter  # this rank's rows in the same memory, as a plain tensor for the optimizer
    bounds: list[int]  # first row of each shard, and the number of rows

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.dtensor.shape)

    def state_bounds(self, key: str) -> list[int] | None:
        """Return the bounds of an optimizer state that is sharded like the parameter; None if it is
        not sharded."""
        if key in ("exp_avg", "exp_avg_sq", "momentum_buffer", "state1", "state2"):
            return self.bounds
        row = math.prod(self.shape[1:])
        return (
            [-(-bound * row // SCALE_BLOCK) for bound in self.bounds]
            if key in ("absmax1", "absmax2")
            else None
        )


class Unsharded:
    """A model that is not sharded, trained by one process."""

    ranks = 1
    params: list[ShardedParameter] = []

    def parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Return the parameters for the optimizers by name; for a sharded model, this rank's
        rows."""
        return dict(model.named_parameters())

    def backward(self, model: nn.Module, loss: Tensor, last: bool):
        """Run the backward pass of a micro-step. `loss`: this rank's term of the sum over ranks;
        `last`: whether this is the last micro-step."""
        loss.backward()

    def all_reduce_step(self, params: list[Tensor], numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Sum a step's numbers (float64) over ranks; return the norm of the gradients of `params`,
        and the sums."""
        grads = [p.grad for p in params if p.grad is not None]
        if not grads:  # all frozen but the tables
            return numbers.new_zeros((), dtype=torch.float32), numbers
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads))), numbers

    def all_reduce_tables(self, tables: Iterable[EngramTable]):
        """All-reduce the gradients of Engram tables."""

    def gather_model(self, model: nn.Module) -> nn.Module | None:
        """Return the unsharded model on rank 0, for sampling; None on the other ranks."""
        return model

    def model_state(self, model: nn.Module) -> dict:
        """Return weights and buffers by name; sharded ones as ShardedRows."""
        return model.state_dict()

    def optimizer_states(self, optimizers: dict[str, torch.optim.Optimizer]) -> dict:
        """Return the state of each optimizer by name; sharded tensors as ShardedRows."""
        return {name: optimizer.state_dict() for name, optimizer in optimizers.items()}

    def load_model(self, model: nn.Module, weights: dict[str, Tensor]):
        """Load weights into a model, broadcast from rank 0."""
        model.load_state_dict(weights)

    def own_optimizer_states(
        self, optimizers: dict[str, torch.optim.Optimizer], states: dict
    ) -> dict:
        """Return this rank's rows of optimizer states, broadcast from rank 0."""
        return states


UNSHARDED = Unsharded()


def sharding_of(model: nn.Module) -> Unsharded:
    """Return the sharding of a model."""
    return getattr(model, "sharding", UNSHARDED)


# --------------------------------------------------------------------------------------------------
# Several ranks


@dataclass
class ShardedRows:
    """A tensor of which each rank holds the rows of its shard."""

    local: Tensor
    bounds: list[int]  # first row of each shard, and the number of rows
    rank: int

    def gather(self, into: Tensor | None = None) -> Tensor | None:
        """Return all rows in host memory on rank 0, in `into` if that fits; None on the others. The
        ranks of the first replica send their rows; every rank calls this."""
        if self.rank:
            if self.rank < len(self.bounds) - 1 and self.local.numel():
                exchange(dist.isend, self.local.detach().contiguous(), 0)
            return None
        out = host_buffer((self.bounds[-1], *self.local.shape[1:]), self.local, into)
        first, *others = out.split(
            [end - begin for begin, end in zip(self.bounds, self.bounds[1:], strict=False)]
        )
        first.copy_(self.local.detach())
        for rank, rows in enumerate(others, 1):
            if rows.numel():
                received = torch.empty_like(rows, device=self.local.device)
                exchange(dist.irecv, received, rank)
                rows.copy_(received)
        return out


def exchange(operation: Callable, tensor: Tensor, rank: int):
    """Run dist.isend or dist.irecv with another rank to its end, as a batch: a single one is a
    warning under NCCL."""
    for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, rank)]):
        work.wait()


def host_buffer(shape: tuple[int, ...], like: Tensor, into: Tensor | None) -> Tensor:
    """Return `into` if it is a tensor of this shape and dtype, else a new one in host memory."""
    if isinstance(into, Tensor) and (tuple(into.shape), into.dtype) == (tuple(shape), like.dtype):
        return into
    return torch.empty(shape, dtype=like.dtype, pin_memory=like.is_cuda)


def is_plain(value) -> bool:
    """Return whether kernels and collectives can rely on a tensor's shape: it is dense, contiguous
    and alone in its storage, like each that a run saves."""
    return (
        type(value) is Tensor
        and value.layout == torch.strided
        and not value.is_nested
        and not value.is_quantized
        and not value.is_conj()
        and not value.is_neg()
        and value.is_contiguous()
        and value.untyped_storage().nbytes() == value.nbytes
    )


class Sharded(Unsharded):
    """A sharded model: this rank's rows of its parameters, and the collectives of training."""

    def __init__(self, world: World, params: list[ShardedParameter], replicated: dict[str, Tensor]):
        self.world, self.ranks, self.params = world, world.ranks, params
        self.replicated = replicated  # tables and buffers by name: not sharded

    def parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        local = {param.name: param.local for param in self.params}
        return {name: local.get(name, p) for name, p in model.named_parameters()}

    def backward(self, model: nn.Module, loss: Tensor, last: bool):
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        (loss * self.ranks).backward()  # FSDP takes the mean over ranks

    def all_reduce_step(self, params: list[Tensor], numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Also put the gradients of this rank's rows into `grad` of `params`."""
        for param in self.params:
            param.local.grad = None if param.dtensor.grad is None else param.dtensor.grad.to_local()
            param.dtensor.grad = None  # else the next step's gradient would be added to it
        grads = [p.grad for p in params if p.grad is not None]
        squares = (
            torch.stack(torch._foreach_norm(grads)).double().square().sum() / self.world.replicas
        )
        squares, numbers = self.world.sum(torch.cat((squares[None], numbers))).split(
            (1, len(numbers))
        )
        return squares.sqrt().squeeze(0).float(), numbers

    def all_reduce_tables(self, tables: Iterable[EngramTable]):
        for table in tables:
            _, grad, square = table.sum_up()
            dist.all_reduce(grad.div_(self.ranks))  # `backward` has multiplied by it
            dist.all_reduce(square.div_(self.ranks**2))

    def gather_model(self, model: nn.Module) -> nn.Module | None:
        weights = {
            param.name: self._rows(param.local, param.bounds).gather() for param in self.params
        }
        if not self.world.is_rank0:
            return None
        with torch.device("meta"):
            plain = type(model)(model.config)
        # also sets hash constants, which are not in a state
        plain.to_empty(device=self.world.device).init_weights()
        plain.load_state_dict(
            weights
            | {name: value for name, value in self.replicated.items() if name in plain.state_dict()}
        )
        plain.compute_dtype = model.compute_dtype
        plain.set_backend(model.backend)
        return plain

    def model_state(self, model: nn.Module) -> dict:
        rows = {param.name: self._rows(param.local, param.bounds) for param in self.params}
        return {name: rows.get(name, value) for name, value in model.state_dict().items()}

    def optimizer_states(self, optimizers: dict[str, torch.optim.Optimizer]) -> dict:
        return self._map_states(optimizers, super().optimizer_states(optimizers), self._rows)

    def _rows(self, value: Tensor, bounds: list[int] | None) -> Tensor | ShardedRows:
        return value if bounds is None else ShardedRows(value, bounds, self.world.rank)

    @torch.no_grad()
    def load_model(self, model: nn.Module, weights: dict[str, Tensor]):
        for param in self.params:
            param.local.copy_(self._own_rows(weights[param.name], param.bounds))
        for name, value in self.replicated.items():
            if name in weights:
                value.copy_(self._own_rows(weights[name], None))

    def own_optimizer_states(
        self, optimizers: dict[str, torch.optim.Optimizer], states: dict
    ) -> dict:
        return self._map_states(optimizers, states, self._own_rows)

    def _own_rows(self, value: Tensor, bounds: list[int] | None) -> Tensor:
        """Return this rank's rows of a tensor (all if `bounds` is None), broadcast from rank 0."""
        world = self.world
        full = (
            value.to(world.device)
            if world.is_rank0
            else torch.empty(value.shape, dtype=value.dtype, device=world.device)
        )
        dist.broadcast(full, 0)
        return (
            full if bounds is None else full[bounds[world.shard] : bounds[world.shard + 1]]
        ).clone()

    def _map_states(
        self, optimizers: dict[str, torch.optim.Optimizer], states: dict, change: Callable
    ) -> dict:
        """Apply `change` to each tensor of the optimizers' states and the bounds of its rows (None:
        not sharded)."""
        params, out = {id(param.local): param for param in self.params}, {}

        def changed(value, param: ShardedParameter | None, key: str = ""):
            if isinstance(value, dict):  # AdamW8bit nests its quantized state
                return {key: changed(entry, param, key) for key, entry in value.items()}
            return (
                change(value, param and param.state_bounds(key))
                if isinstance(value, Tensor)
                else value
            )

        for name, optimizer in optimizers.items():
            of_optimizer = [
                params.get(id(p)) for group in optimizer.param_groups for p in group["params"]
            ]
            out[name] = dict(
                states[name],
                state={
                    i: changed(state, of_optimizer[i]) for i, state in states[name]["state"].items()
                },
            )
        return out


def shard_model(model: nn.Module, world: World, grad_accum: int):
    """Shard a model that every rank holds whole."""
    if world.ranks == 1:
        return
    from torch.distributed.fsdp import fully_shard

    tables = {m.weight for m in model.modules() if isinstance(m, EngramTable)}
    rows = {name: len(p) for name, p in model.named_parameters() if p.ndim}
    # FSDP warns of views among outputs, in case they are written to; here they are not.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    # With gradient accumulation, weights stay gathered and gradients unsharded until the end of the
    # step: that costs memory, but communicates only once per step.
    reshards = grad_accum == 1 and world.shards > 1
    model.casts_early, grouped = False, set()
    core = [] if model.core is None else [model.core]
    for group in (*model.prelude, *core, *model.coda, model):
        members = [m for m in group.modules() if m not in grouped]
        grouped.update(members)
        fully_shard(
            group,
            mesh=world.mesh,
            ignored_params=tables,
            # the root is needed first in backward
            reshard_after_forward=reshards and group is not model,
        )
        casting = [m for m in members if hasattr(m, "cast_weight")]
        group.register_forward_pre_hook(
            lambda *_, casting=casting: cast_weights(casting, model.compute_dtype)
        )
    params = []
    for name, p in model.named_parameters():
        if p not in tables:
            size = -(-rows[name] // world.shards)
            bounds = [min(i * size, rows[name]) for i in range(world.shards + 1)]
            params.append(ShardedParameter(name, p, nn.Parameter(p.to_local().detach()), bounds))
    replicated = {name: p for name, p in model.named_parameters() if p in tables} | dict(
        model.named_buffers()
    )
    model.sharding = Sharded(world, params, replicated)


def cast_weights(modules: list[nn.Module], dtype: torch.dtype):
    """Cast the weights of an FSDP group after they are gathered, inside its forward. A cast before
    that would be of shards; the gradient of a cast made elsewhere would come too late and be lost
    silently."""
    for module in modules:
        module.cast_weight(dtype)
