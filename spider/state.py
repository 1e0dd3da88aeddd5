"""The state of a model and its optimizers on its way to a checkpoint, and back.

To save: `model_state` and `optimizer_states` return it with `ShardedRows` where each rank has only
a part, and `copy_to_host` copies it to host memory. checkpoint.py writes the copy to a file.

To load: checkpoint.py reads a file on rank 0, and the other ranks get the same state with tensors
on the meta device. `load_model` and `load_optimizers` broadcast it, and each rank keeps its rows.
Before that, `check_tree` and `check_fits` refuse tensors that are not what a run saves: kernels
and collectives trust shapes and dtypes, and torch does not check them.

The state of an optimizer is torch's: `param_groups`, and `state`, which has a dict of values for
each parameter, by its number.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from loguru import logger
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_with_path

from spider import machine
from spider.common import LARGEST, CheckpointError
from spider.distributed import Sharded, ShardedParameter, Sharding, World, sharding_of

if TYPE_CHECKING:
    from spider_model import Spider

SCALE_BLOCK = 256  # numbers that share a scale in 8-bit AdamW
NESTED = "__bnb_optimizer_quant_state__"  # where bitsandbytes puts the tensors of a parameter
MOST_STEPS = 1 << 31  # the kernel of 8-bit AdamW counts them in 32 bits

# --------------------------------------------------------------------------------------------------
# What the optimizers keep of a parameter


def kinds_of_state(
    optimizer: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> list[dict[str, object]]:
    """Return the states that an optimizer may have of a parameter after its first step: by key,
    what `kind_of` returns for the value."""
    like_parameter = dtype, shape
    match optimizer:
        case "muon":
            return [dict(momentum_buffer=like_parameter)]
        case "engram":
            return [dict(sum=(dtype, shape[:1]))]
        case "adamw":
            step = torch.float32, ()
            return [dict(step=step, exp_avg=like_parameter, exp_avg_sq=like_parameter)]
    assert optimizer == "adamw8bit", optimizer
    floats = torch.float32, shape
    small = dict(state1=floats, state2=floats)
    quantized = torch.uint8, shape
    table = torch.float32, (256,)
    scales = torch.float32, (math.ceil(math.prod(shape) / SCALE_BLOCK),)
    large = dict(
        state1=quantized, state2=quantized, qmap1=table, qmap2=table, absmax1=scales, absmax2=scales
    )
    return [{"step": int, NESTED: small}, {"step": int, NESTED: large}]


def row_bounds(param: ShardedParameter | None, key: str) -> list[int] | None:
    """Return the first row of each shard, and the number of rows, of an optimizer's value for a
    parameter; None if every rank has all of the value."""
    if param is None:
        return None
    if key in ("exp_avg", "exp_avg_sq", "momentum_buffer", "state1", "state2"):
        return param.bounds
    if key in ("absmax1", "absmax2"):
        row = math.prod(param.shape[1:])
        return [math.ceil(bound * row / SCALE_BLOCK) for bound in param.bounds]
    return None


# --------------------------------------------------------------------------------------------------
# To save


@dataclass
class ShardedRows:
    """A tensor of which each rank has the rows of its shard."""

    local: Tensor
    bounds: list[int]  # first row of each shard, and the number of rows

    def gather(self, earlier: object) -> Tensor | None:
        """Return all rows in host memory on rank 0, and None on the others. Every rank calls this;
        the ranks of the first replica send their rows.

        earlier: a tensor to overwrite, if it fits."""
        shards = len(self.bounds) - 1
        rank = dist.get_rank()
        if rank != 0:
            if rank < shards and self.local.numel():
                exchange(dist.isend, self.local.detach().contiguous(), 0)
            return None
        rows = host_buffer((self.bounds[-1], *self.local.shape[1:]), self.local, earlier)
        rows[: self.bounds[1]].copy_(self.local.detach())
        for shard in range(1, shards):
            part = rows[self.bounds[shard] : self.bounds[shard + 1]]
            if part.numel():
                received = torch.empty_like(part, device=self.local.device)
                exchange(dist.irecv, received, shard)
                part.copy_(received)
        return rows


def exchange(operation: Callable, tensor: Tensor, rank: int):
    """Run dist.isend or dist.irecv with another rank, and wait for it. It is a batch of one, since
    NCCL warns of operations outside a batch."""
    for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, rank)]):
        work.wait()


def host_buffer(shape: Sequence[int], like: Tensor, earlier: object) -> Tensor:
    """Return `earlier` if it is a tensor of this shape and of the dtype of `like`, else a new one
    in host memory, page-locked for a tensor on a GPU."""
    size = torch.Size(shape)
    if isinstance(earlier, Tensor) and earlier.shape == size and earlier.dtype == like.dtype:
        return earlier
    if like.is_cuda:
        try:
            machine.check_lockable(size.numel() * like.element_size())
            return torch.empty(size, dtype=like.dtype, pin_memory=True)
        except RuntimeError as fault:
            warn_of_pageable(str(fault).partition("\n")[0])
    return torch.empty(size, dtype=like.dtype)


@cache  # it warns once
def warn_of_pageable(reason: str):
    """Warn that a copy for checkpoints is not page-locked."""
    logger.warning(f"checkpoints are copied to pageable memory, which takes longer: {reason}")


def copy_to_host(value: Any, earlier: Any, keeps: bool) -> Any:
    """Copy the tensors in nested dicts to host memory. Every rank calls this, since it gathers
    ShardedRows; those that do not keep the copy get None for each tensor.

    earlier: the copy of an earlier state, whose tensors are overwritten where they fit."""
    if isinstance(value, ShardedRows):
        return value.gather(earlier)
    if isinstance(value, Tensor):
        if not keeps:
            return None
        buffer = host_buffer(value.shape, value, earlier)
        return buffer.copy_(value.detach(), non_blocking=True)
    if isinstance(value, dict):
        copies = {}
        for key, entry in value.items():
            earlier_entry = earlier.get(key) if isinstance(earlier, dict) else None
            copies[key] = copy_to_host(entry, earlier_entry, keeps)
        return copies
    return value


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return weights and buffers by name; sharded ones as ShardedRows."""
    weights: dict[str, Any] = model.state_dict()
    for param in sharding_of(model).params:
        weights[param.name] = ShardedRows(param.local, param.bounds)
    return weights


def optimizer_states(sharding: Sharding, optimizers: Mapping[str, Optimizer]) -> dict[str, Any]:
    """Return the state of each optimizer by name; sharded tensors as ShardedRows."""
    states = {name: optimizer.state_dict() for name, optimizer in optimizers.items()}
    if not isinstance(sharding, Sharded):
        return states

    def as_rows(value: Any, bounds: list[int] | None) -> Any:
        return value if bounds is None else ShardedRows(value, bounds)

    return change_states(sharding, optimizers, states, as_rows)


def change_states(
    sharding: Sharded, optimizers: Mapping[str, Optimizer], states: Mapping, change: Callable
) -> dict[str, Any]:
    """Return the states of optimizers with change(value, bounds) for each value, where the bounds
    are those of `row_bounds`."""
    by_local = {param.local: param for param in sharding.params}
    changed = {}
    for name, optimizer in optimizers.items():
        params = parameters_of(optimizer)
        by_param = {}
        for i, values in states[name]["state"].items():
            param = by_local.get(params[i])
            # 8-bit AdamW nests its values
            by_param[i] = tree_map_with_path(
                lambda path, value, p=param: change(value, row_bounds(p, path[-1].key)), values
            )
        changed[name] = dict(states[name], state=by_param)
    return changed


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of all groups, in the order by which a state counts them."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def gather_model(model: "Spider") -> "Spider | None":
    """Return a whole model on rank 0, for sampling, and None on the other ranks. A model that is
    not sharded is returned itself."""
    sharding = sharding_of(model)
    if not isinstance(sharding, Sharded):
        return model
    world = sharding.world
    weights = copy_to_host(model_state(model), None, world.is_rank0)
    if not world.is_rank0:
        return None
    with torch.device("meta"):
        whole = type(model)(model.config)
    whole.to_empty(device=world.device)
    whole.init_weights()  # also sets hash constants, which no state holds
    whole.load_state_dict(weights)
    whole.compute_dtype = model.compute_dtype
    whole.set_backend(model.backend)
    return whole


# --------------------------------------------------------------------------------------------------
# Check what was read


def check_tree(tree: Mapping[object, object], name: str, seen: set[int]):
    """Raise ValueError unless arithmetic, kernels and collectives can rely on the values in nested
    dicts: whole numbers are at most LARGEST, tensors are what their shapes say, and no dict occurs
    twice, so that their number is bounded. Of optimizers each tensor is also the only one in its
    memory, since kernels write there, and a step is one that a run reaches.

    seen: ids of the dicts and addresses of the optimizers' tensors so far."""
    of_optimizers = name.startswith("state.optimizer_state_dict")
    if id(tree) in seen:
        raise ValueError(f"{name} occurs twice")
    seen.add(id(tree))
    for key, value in tree.items():
        if not isinstance(key, (str, int)):
            raise ValueError(f"{name} has a key that is no text")
        if isinstance(value, dict):
            check_tree(value, f"{name}.{key}", seen)
        elif isinstance(value, int) and abs(value) > LARGEST:
            raise ValueError(f"{name}.{key} is too large")
        elif isinstance(value, Tensor) and not is_plain(value):
            raise ValueError(
                f"{name}.{key} must be a dense, contiguous tensor with a storage of its own: "
                f"save it by .contiguous().clone()"
            )
        if of_optimizers and isinstance(value, Tensor) and key not in ("qmap1", "qmap2"):
            if value.data_ptr() in seen:
                raise ValueError(f"{name}.{key} shares its memory with another value")
            if value.numel():
                seen.add(value.data_ptr())
        if of_optimizers and key == "step":
            check_step(value, f"{name}.{key}")


def check_step(value: Any, name: str):
    """Raise ValueError unless a value is a number of steps, or a tensor of one."""
    number = value
    if isinstance(value, Tensor) and value.numel() == 1:
        number = value.item()
    if type(number) not in (int, float) or not 0 <= number < MOST_STEPS:
        raise ValueError(f"{name} must be a number from 0 to {MOST_STEPS - 1}")


def is_plain(value: Tensor) -> bool:
    """Return whether a tensor is on the host, dense, contiguous and alone in its storage, like each
    that a run saves."""
    return (
        type(value) is Tensor
        and value.device.type == "cpu"
        and value.layout == torch.strided
        and not value.is_nested
        and not value.is_quantized
        and not value.is_conj()
        and not value.is_neg()
        and value.is_contiguous()
        and value.untyped_storage().nbytes() == value.nbytes
    )


def kind_of(value: object) -> Any:
    """Return dtype and shape of a tensor, the kinds of a dict's values by key, and the type of any
    other value."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape)
    if isinstance(value, dict):
        return {key: kind_of(entry) for key, entry in value.items()}
    return type(value)


def check_fits(
    optimizers: Mapping[str, Optimizer],
    states: Mapping[str, dict],
    sharded: Sequence[ShardedParameter] = (),
):
    """Raise CheckpointError unless optimizers can load their states: with the same groups of
    parameters, and for each parameter the values that the optimizer makes.

    sharded: parameters of which the optimizers have rows; the states have whole ones."""
    whole_shapes = {param.local: param.shape for param in sharded}
    try:
        for name, optimizer in optimizers.items():
            groups = [group["params"] for group in states[name]["param_groups"]]
            if groups != [group["params"] for group in optimizer.state_dict()["param_groups"]]:
                raise ValueError("it has other groups of parameters")
            params = dict(enumerate(parameters_of(optimizer)))
            for i, values in states[name]["state"].items():
                if i not in params:
                    raise ValueError(f"it has an unknown parameter {i!r}")
                shape = whole_shapes.get(params[i], tuple(params[i].shape))
                kinds = kind_of(values)
                if kinds and kinds not in kinds_of_state(name, params[i].dtype, shape):
                    raise ValueError(f"for a parameter {list(shape)} it has {kinds}"[:200])
    except Exception as fault:  # whatever a foreign state provokes
        reason = str(fault).partition("\n")[0]
        raise CheckpointError(
            f"the checkpoint's state of {name} does not fit this model ({reason}): use "
            f"--reset_steps to load only the weights"
        ) from None


# --------------------------------------------------------------------------------------------------
# To load


def broadcast_rows(value: Tensor, bounds: list[int] | None, world: World) -> Tensor:
    """Broadcast a tensor from rank 0, and return this rank's rows of it; all if `bounds` is
    None."""
    if world.is_rank0:
        whole = value.to(world.device)
    else:
        whole = torch.empty(value.shape, dtype=value.dtype, device=world.device)
    dist.broadcast(whole, 0)
    if bounds is not None:
        whole = whole[bounds[world.shard] : bounds[world.shard + 1]]
    return whole.clone()


@torch.no_grad()
def load_model(model: nn.Module, weights: dict[str, Tensor]):
    """Load weights into a model; with several ranks they are broadcast from rank 0."""
    sharding = sharding_of(model)
    if not isinstance(sharding, Sharded):
        model.load_state_dict(weights)
        return
    for param in sharding.params:
        param.local.copy_(broadcast_rows(weights[param.name], param.bounds, sharding.world))
    for name, value in sharding.replicated.items():
        if name in weights:
            value.copy_(broadcast_rows(weights[name], None, sharding.world))


def load_optimizers(
    sharding: Sharding, optimizers: Mapping[str, Optimizer], states: Mapping[str, dict]
):
    """Load the states of all optimizers of a model, but keep this run's settings. Raise
    CheckpointError if one does not fit."""
    if states.keys() != optimizers.keys():
        raise CheckpointError(
            f"the checkpoint has the optimizers {', '.join(map(str, states))}, this run "
            f"{', '.join(optimizers)}: use --optimizer as before, or --reset_steps"
        )
    if isinstance(sharding, Sharded):
        # the other ranks know only dtypes and shapes
        sharding.world.on_rank0(lambda: check_fits(optimizers, states, sharding.params))
        states = broadcast_optimizers(sharding, optimizers, states)
    else:
        check_fits(optimizers, states)
    for name, optimizer in optimizers.items():
        groups = optimizer.state_dict()["param_groups"]  # they have the settings
        optimizer.load_state_dict(dict(state=states[name]["state"], param_groups=groups))


def broadcast_optimizers(
    sharding: Sharded, optimizers: Mapping[str, Optimizer], states: Mapping
) -> dict[str, Any]:
    """Broadcast the states of optimizers from rank 0, and return this rank's rows of them."""

    def rows_of_rank(value: Any, bounds: list[int] | None) -> Any:
        if not isinstance(value, Tensor):
            return value
        return broadcast_rows(value, bounds, sharding.world)

    return change_states(sharding, optimizers, states, rows_of_rank)
