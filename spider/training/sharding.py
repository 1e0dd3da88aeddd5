"""Shard a model over ranks (FSDP2): weights, gradients and optimizer states.

`shard_model` calls fully_shard over the mesh of (replicas, shards). Its groups are each byte block, the core (gathered
once for all its loops) and the rest. Optimizers see this rank's rows of each parameter as plain tensors. Engram tables
are not sharded; their gradients are all-reduced once per step.

`sharding_of` returns a model's `Sharded`, or `Unsharded`, the same interface for a single process.
"""

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spider.errors import WorldError
from spider.model import parameters
from spider.model.casting import Bf16Gathered, cast_hook, gather_in_bf16
from spider.model.engram_table import EngramTable
from spider.training.adamw_8bit import BLOCK
from spider.training.ranks import World
from spider.training.state_tensors import RemoteTensor, ShardedRows

ROW_STATES = {"exp_avg", "exp_avg_sq", "momentum_buffer", "state1", "state2"}  # of optimizers, shaped like a parameter
BLOCK_STATES = {"absmax1", "absmax2"}     # of 8-bit AdamW, one number per block


@dataclass
class ShardedParameter:
    """A sharded parameter."""
    name: str
    dtensor: nn.Parameter                 # FSDP's
    local: nn.Parameter                   # this rank's rows in the same memory, as a plain tensor for the optimizer
    bounds: list[int]                     # first row of each shard, and the number of rows

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.dtensor.shape)

    def state_bounds(self, key: str) -> list[int] | None:
        """Return the bounds of an optimizer state that is sharded like the parameter; None if it is not sharded."""
        if key in ROW_STATES:
            return self.bounds
        row = math.prod(self.shape[1:])
        return [-(-bound * row // BLOCK) for bound in self.bounds] if key in BLOCK_STATES else None


class Unsharded:
    """A model that is not sharded, trained by one process."""
    ranks = 1
    params: list[ShardedParameter] = []

    def parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Return the parameters for the optimizers by name; for a sharded model, this rank's rows."""
        return dict(model.named_parameters())

    def backward(self, model: nn.Module, loss: Tensor, last: bool):
        """Run the backward pass of a micro-step. `loss`: this rank's term of the sum over ranks; `last`: whether this
        is the last micro-step."""
        loss.backward()

    def all_reduce_step(self, params: list[Tensor], sums: Tensor, counts: list[Tensor], real: int):
        """All-reduce once per step, after its passes; return the gradient norm, sums, counts and real bytes."""
        return nn.utils.get_total_norm([p.grad for p in params if p.grad is not None]), sums, counts, real

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

    def load_model(self, model: nn.Module, weights: dict[str, Tensor | RemoteTensor]):
        """Load weights into a model one by one: broadcast from rank 0, or, for RemoteTensors, read by each rank."""
        model.load_state_dict(weights)

    def shard_states(self, optimizers: dict[str, torch.optim.Optimizer], states: dict) -> dict:
        """Return this rank's rows of optimizer states, broadcast from rank 0 or read by each rank."""
        return states


class Sharded(Unsharded):
    """A sharded model: this rank's rows of its parameters, and the collectives of training."""

    def __init__(self, world: World, params: list[ShardedParameter], replicated: dict[str, Tensor]):
        self.world, self.ranks, self.params = world, world.ranks, params
        self.replicated = replicated                 # tables and buffers by name: not sharded

    def parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        local = {param.name: param.local for param in self.params}
        return {name: local.get(name, p) for name, p in model.named_parameters()}

    def backward(self, model: nn.Module, loss: Tensor, last: bool):
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        (loss * self.ranks).backward()    # FSDP takes the mean over ranks

    def all_reduce_step(self, params: list[Tensor], sums: Tensor, counts: list[Tensor], real: int):
        """Put the gradients of this rank's rows into `grad` of `params`, and all-reduce once: sums, votes, the targets
        of the next step, and a fingerprint of one tensor in turn. Raise WorldError if replicas differ in it."""
        world = self.world
        for param in self.params:
            param.local.grad = None if param.dtensor.grad is None else param.dtensor.grad.to_local()
            param.dtensor.grad = None     # else the next step's gradient would be added to it
        grads = [p.grad for p in params if p.grad is not None]
        squares = torch.stack(torch._foreach_norm(grads)).double().square().sum() / world.replicas
        name, mark = self._fingerprint()
        targets, fault = world.own_targets()
        votes = torch.tensor([real, targets, fault is not None, *world.cast_votes()], dtype=torch.float64)
        marks = torch.zeros(world.shards, dtype=torch.float64, device=world.device)
        marks[world.shard] = mark
        flat = torch.cat([count.flatten() for count in counts]).double()
        values = squares[None], sums.double(), flat, votes.to(world.device), marks
        squares, sums, flat, votes, marks = world.sum(torch.cat(values)).split([len(value) for value in values])
        real, targets, faults, *votes = votes.tolist()                                       # waits for the device
        world.next_targets = int(targets), int(faults)
        world.count_votes(votes)
        own, *marks = torch.cat(((mark * world.replicas)[None], marks)).tolist()
        if marks[world.shard] != own or name in self.replicated and any(other != own for other in marks):
            raise WorldError(f"{name} is no longer the same on all ranks, {world.steps} steps after the start: go back "
                             f"to an earlier checkpoint by --resume")
        world.steps += 1
        if world.steps == 1:
            world.set_timeout(timedelta(seconds=world.timeout))
        flat = flat.float().split([count.numel() for count in counts])
        return squares[0].sqrt().float(), sums.float(), [x.view_as(count) for x, count in zip(flat, counts)], real

    def _fingerprint(self) -> tuple[str, Tensor]:
        """Return the name of a tensor, another one each step, and the sum of its bits: an integer, whose sums over
        ranks are exact."""
        tensors = [(param.name, param.local) for param in self.params] + list(self.replicated.items())
        name, tensor = tensors[self.world.steps % len(tensors)]
        bits = tensor.detach().contiguous().view(torch.int32).sum(dtype=torch.int64)
        return name, (bits & 0xFFFFFFFF).double()

    def all_reduce_tables(self, tables: Iterable[EngramTable]):
        for table in tables:
            _, grad, square = table.sum_up()
            dist.all_reduce(grad.div_(self.ranks))               # `backward` has multiplied by it
            dist.all_reduce(square.div_(self.ranks ** 2))

    def gather_model(self, model: nn.Module) -> nn.Module | None:
        self.world.all_reduce_votes()     # a signal stops it here
        weights = {param.name: self._sharded(param.local, param.bounds).gather() for param in self.params}
        if not self.world.is_rank0:
            return None
        with torch.device("meta"):
            plain = type(model)(model.config)
        for name, value in (weights | self.replicated).items():
            path, _, name = name.rpartition(".")
            module = plain.get_submodule(path)
            if name in module._buffers:
                module._buffers[name] = value
            else:
                module._parameters[name] = nn.Parameter(value.to(self.world.device))
        plain.compute_dtype = model.compute_dtype
        for moe in parameters.moe_layers(model)[:1]:
            plain.set_backend(moe.backend)
        return plain

    # -----------------------------------------------------------------------------------------------------------------
    # States

    def model_state(self, model: nn.Module) -> dict:
        rows = {param.name: self._sharded(param.local, param.bounds) for param in self.params}
        return {name: rows.get(name, value) for name, value in model.state_dict().items()}

    def optimizer_states(self, optimizers: dict[str, torch.optim.Optimizer]) -> dict:
        return self._map_states(optimizers, super().optimizer_states(optimizers), self._sharded)

    def _sharded(self, value: Tensor, bounds: list[int] | None) -> Tensor | ShardedRows:
        return value if bounds is None else ShardedRows(value, bounds, self.world.rank, self.ranks)

    @torch.no_grad()
    def load_model(self, model: nn.Module, weights: dict[str, Tensor | RemoteTensor]):
        for param in self.params:
            param.local.copy_(self._own_rows(weights[param.name], param.bounds))
        for name, value in self.replicated.items():
            if name in weights:
                value.copy_(self._own_rows(weights[name], None))

    def shard_states(self, optimizers: dict[str, torch.optim.Optimizer], states: dict) -> dict:
        """Raise ValueError if a state does not fit its parameter."""
        return self._map_states(optimizers, states, self._own_rows)

    def _own_rows(self, value: Tensor | RemoteTensor, bounds: list[int] | None) -> Tensor:
        """Return this rank's rows of a value (all if `bounds` is None), broadcast from rank 0 or read from files."""
        world = self.world
        if isinstance(value, RemoteTensor):
            return value.rows(*() if bounds is None else bounds[world.shard:world.shard + 2]).to(world.device)
        full = value.to(world.device) if world.is_rank0 else torch.empty(value.shape, dtype=value.dtype,
                                                                         device=world.device)
        dist.broadcast(full, 0)
        return (full if bounds is None else full[bounds[world.shard]:bounds[world.shard + 1]]).clone()

    def _map_states(self, optimizers: dict[str, torch.optim.Optimizer], states: dict, change: Callable) -> dict:
        """Apply `change` to each tensor of the optimizers' states and the bounds of its rows (None: not sharded)."""
        params, out = {id(param.local): param for param in self.params}, {}

        def changed(value, param: ShardedParameter | None, key: str = ""):
            if isinstance(value, dict):   # AdamW8bit nests its quantized state
                return {key: changed(entry, param, key) for key, entry in value.items()}
            tensor = isinstance(value, (Tensor, RemoteTensor))
            return change(value, param and param.state_bounds(key)) if tensor else value
        for name, optimizer in optimizers.items():
            of_optimizer = [params.get(id(p)) for group in optimizer.param_groups for p in group["params"]]
            out[name] = dict(states[name], state={
                i: changed(state, of_optimizer[i]) for i, state in states[name]["state"].items()})
        return out


UNSHARDED = Unsharded()


def sharding_of(model: nn.Module) -> Unsharded:
    """Return the sharding of a model."""
    return getattr(model, "sharding", UNSHARDED)


def shard_model(model: nn.Module, world: World, grad_accum: int):
    """Shard a model that every rank holds whole. Weights that are only multiplied in bf16 are gathered in bf16."""
    if world.ranks == 1:
        return
    from torch.distributed.fsdp import fully_shard
    tables = {m.weight for m in model.modules() if isinstance(m, EngramTable)}
    rows = {name: len(p) for name, p in model.named_parameters() if p.ndim}
    if world.shards > 1:
        gather_in_bf16(model, {id(p) for p in parameters.halved_weights(model) if len(p) % world.shards == 0})
    # FSDP warns of views among outputs, in case they are written to; here they are not.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    # With gradient accumulation, weights stay gathered and gradients unsharded until the end of the step: that costs
    # memory, but communicates only once per step.
    reshards = grad_accum == 1 and world.shards > 1
    model.casts_early, grouped = False, set()
    for group in (*model.prelude, *([model.core] if model.core is not None else []), *model.coda, model):
        members = [m for m in group.modules() if m not in grouped]
        grouped.update(members)
        fully_shard(group, mesh=world.mesh, ignored_params=tables,
                    reshard_after_forward=reshards and group is not model)  # the root is needed first in backward
        group.register_forward_pre_hook(cast_hook(model, [m for m in members if hasattr(m, "cast_weight")]))
    params = []
    for name, p in model.named_parameters():
        if p not in tables:
            local = p.to_local().detach()
            local = nn.Parameter(local.rows if isinstance(local, Bf16Gathered) else local)
            size = -(-rows[name] // world.shards)
            params.append(ShardedParameter(name, p, local, [min(i * size, rows[name])
                                                            for i in range(world.shards + 1)]))
    replicated = {name: p for name, p in model.named_parameters() if p in tables} | dict(model.named_buffers())
    model.sharding = Sharded(world, params, replicated)
