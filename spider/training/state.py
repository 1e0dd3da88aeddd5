"""Build a model, and move the state of model and optimizers to a checkpoint and back.

Build: `on_meta` makes a model without storage, `materialize` gives it storage and values.

Save: `model_state` and `optimizer_states` return the state, with `ShardedRows` for tensors of which
each rank has only some rows. `copy_to_host` copies the state to host memory; checkpoint.py writes
this copy to a file.

Load: model and optimizers first make their own state, as in a new run. `load_model` and
`load_optimizers` then copy the values of a file into this state by name. So shapes, dtypes and
layouts are the run's own, whatever the file holds. With several ranks, only rank 0 reads the file;
it broadcasts each value, and every rank keeps its rows.

The state of an optimizer has torch's format: `param_groups`, and `state`, which maps the index of
each parameter to a dict of values.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from loguru import logger
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only, tree_map_with_path

from spider import machine
from spider.config import SpiderConfig
from spider.errors import CheckpointError
from spider.training.distributed import ShardedParameter, Sharding, World, sharding_of
from spider_model import Spider

SCALE_BLOCK = 256  # numbers per scale in 8-bit AdamW
NESTED = "__bnb_optimizer_quant_state__"  # key of the nested dict with bitsandbytes' tensors
MAX_STEPS = 1 << 31  # the kernel of 8-bit AdamW counts steps in 32 bits


def row_bounds(param: ShardedParameter, key: str) -> list[int] | None:
    """Return the first row of each shard, and the number of rows, for an optimizer's value `key` of
    a sharded parameter. Return None if every rank has the whole value."""
    if key in ("exp_avg", "exp_avg_sq", "momentum_buffer", "state1", "state2"):
        return param.bounds
    if key in ("absmax1", "absmax2"):
        row = math.prod(param.shape[1:])
        return [math.ceil(bound * row / SCALE_BLOCK) for bound in param.bounds]
    return None


# --------------------------------------------------------------------------------------------------
# A new model


def on_meta(model_class: type[Spider], config: SpiderConfig) -> Spider:
    """Build a model on the meta device: shapes without storage."""
    with torch.device("meta"):
        return model_class(config)


def materialize(
    model: Spider, device: torch.device, weights: Mapping[str, Tensor] | None = None
) -> Spider:
    """Give a model on the meta device storage and initial values, then load the weights, if given.
    Return the model. Raise CheckpointError if the weights do not fit."""
    model.to_empty(device=device)
    model.init_weights()  # hash constants, too, which no file holds
    if weights is not None:
        load_model(model, weights)
    return model


# --------------------------------------------------------------------------------------------------
# Save


@dataclass
class ShardedRows:
    """A tensor of which each rank holds the rows of its shard."""

    local: Tensor
    bounds: list[int]  # first row of each shard, and the number of rows

    def gather(self, earlier: object) -> Tensor | None:
        """Return all rows in host memory on rank 0, and None on other ranks. Every rank calls this;
        the ranks of the first replica send their rows.

        earlier: a tensor to overwrite, if it has the right shape and dtype."""
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
    """Run dist.isend or dist.irecv with another rank, and wait. Use a batch of one operation, since
    NCCL warns about operations outside a batch."""
    for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, rank)]):
        work.wait()


def host_buffer(shape: Sequence[int], like: Tensor, earlier: object) -> Tensor:
    """Return `earlier` if it is a tensor of this shape and the dtype of `like`; else return a new
    tensor in host memory, page-locked if `like` is on a GPU."""
    size = torch.Size(shape)
    if isinstance(earlier, Tensor) and earlier.shape == size and earlier.dtype == like.dtype:
        return earlier
    if like.is_cuda:
        try:
            machine.check_pinnable(size.numel() * like.element_size())
            return torch.empty(size, dtype=like.dtype, pin_memory=True)
        except RuntimeError as fault:
            warn_of_pageable(str(fault).partition("\n")[0])
    return torch.empty(size, dtype=like.dtype)


@cache  # so that it warns once
def warn_of_pageable(reason: str):
    """Warn that the host copy for checkpoints is not page-locked."""
    logger.warning(f"checkpoints are copied to pageable memory, which takes longer: {reason}")


def copy_to_host(value: Any, earlier: Any, keeps: bool) -> Any:
    """Copy the tensors in nested dicts to host memory, and gather ShardedRows. Every rank calls
    this.

    earlier: the copy of an earlier state, whose tensors are overwritten if they fit. keeps: False
    on ranks that do not need the copy, which get None for each tensor."""
    if isinstance(value, ShardedRows):
        return value.gather(earlier)
    if isinstance(value, Tensor):
        if not keeps:
            return None
        return host_buffer(value.shape, value, earlier).copy_(value.detach(), non_blocking=True)
    if isinstance(value, dict):
        copies = {}
        for key, entry in value.items():
            earlier_entry = earlier.get(key) if isinstance(earlier, dict) else None
            copies[key] = copy_to_host(entry, earlier_entry, keeps)
        return copies
    return value


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return weights and buffers by name, sharded weights as ShardedRows."""
    weights = model.state_dict()
    for param in sharding_of(model).params:
        weights[param.name] = ShardedRows(param.local, param.bounds)
    return weights


def optimizer_states(sharding: Sharding, optimizers: Mapping[str, Optimizer]) -> dict[str, Any]:
    """Return the state of each optimizer by name, sharded tensors as ShardedRows."""
    states = {name: one.state_dict() for name, one in optimizers.items()}
    by_local = {param.local: param for param in sharding.params}
    for name, optimizer in optimizers.items():
        params = parameters_of(optimizer)
        by_param = states[name]["state"]
        for i, values in by_param.items():
            if params[i] in by_local:
                by_param[i] = wrap_sharded(values, by_local[params[i]])
    return states


def wrap_sharded(values: dict[str, Any], param: ShardedParameter) -> dict[str, Any]:
    """Turn an optimizer's values for a sharded parameter into ShardedRows, unless every rank has
    the whole value."""

    def wrap(path: Sequence[Any], value: Any) -> Any:
        bounds = row_bounds(param, path[-1].key)
        return value if bounds is None else ShardedRows(value, bounds)

    return tree_map_with_path(wrap, values)  # 8-bit AdamW nests its values


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of all groups, in the order of their indices in a state."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def gather_model(model: Spider) -> Spider | None:
    """Gather a sharded model on rank 0, for sampling. Return None on the other ranks. A model on
    one rank is returned unchanged."""
    sharding = sharding_of(model)
    if sharding.ranks == 1:
        return model
    world = sharding.world
    weights = copy_to_host(model_state(model), None, world.is_rank0)
    if not world.is_rank0:
        return None
    whole = materialize(on_meta(type(model), model.config), world.device, weights)
    whole.compute_dtype = model.compute_dtype
    whole.set_backend(model.backend)
    return whole


# --------------------------------------------------------------------------------------------------
# Load


def copy_value(own: Tensor, saved: Any, bounds: list[int] | None, world: World) -> bool:
    """Copy a saved value, which rank 0 has, into this rank's tensor `own`: the whole value, or the
    rows of its shard (see `row_bounds`). Return whether the value fits, which only rank 0 knows.

    The collectives do not depend on the saved value, so a bad file cannot make ranks wait."""
    whole = own
    if world.ranks > 1:
        rows = own.shape[:1] if bounds is None else bounds[-1:]
        whole = own.new_empty([*rows, *own.shape[1:]])
    fits = True
    if world.rank == 0:
        try:
            fits = saved.shape == whole.shape
            if fits:
                whole.copy_(saved)
        except Exception:  # not a tensor, or one that copy_ refuses, such as a sparse tensor
            fits = False
    if world.ranks > 1:
        dist.broadcast(whole, 0)
        if bounds is not None:
            whole = whole[bounds[world.shard] : bounds[world.shard + 1]]
        own.copy_(whole)
    return fits


def check_all_fit(misfits: Sequence[str], world: World):
    """Raise CheckpointError on all ranks if rank 0 lists values that do not fit. misfits: names."""

    def check():
        if misfits:
            raise CheckpointError(
                f"the checkpoint has a different {', '.join(misfits[:3])} than this run"
            )

    world.on_rank0(check)


@torch.no_grad()
def load_model(model: nn.Module, weights: Mapping[str, Tensor]):
    """Copy weights into a model. Raise CheckpointError if they do not fit."""
    sharding = sharding_of(model)
    own = model.state_dict() | {param.name: param.local for param in sharding.params}
    bounds = {param.name: param.bounds for param in sharding.params}
    misfits = [
        name
        for name, value in own.items()
        if not copy_value(value, weights.get(name), bounds.get(name), sharding.world)
    ]
    check_all_fit([*misfits, *(weights.keys() - own.keys())], sharding.world)


@torch.no_grad()
def load_optimizers(sharding: Sharding, optimizers: Mapping[str, Any], states: Mapping[str, dict]):
    """Let the optimizers of a model make their states, then copy the values of a checkpoint into
    these states. Settings such as the learning rate stay the run's own. Raise CheckpointError if
    the states do not fit.

    optimizers: by name, with a method make_state(p) that makes the state of a parameter."""
    world = sharding.world
    for optimizer in optimizers.values():
        optimizer.state.clear()
    saved = world.on_rank0(lambda: saved_values(optimizers, states), without_tensors)
    by_local = {param.local: param for param in sharding.params}
    misfits = []
    for name, optimizer in optimizers.items():
        params = parameters_of(optimizer)
        for i, values in saved[name].items():
            p = params[i]
            if values and not optimizer.state[p]:  # rank 0 has made it
                optimizer.make_state(p)
            param = by_local.get(p)
            state = optimizer.state[p]
            for key, own in state.items():
                value = values[key]
                if isinstance(own, Tensor):
                    bounds = None if param is None else row_bounds(param, key)
                    fits = copy_value(own, value, bounds, world)
                else:  # the step count of 8-bit AdamW
                    fits = isinstance(value, int) and 0 <= value < MAX_STEPS
                    state[key] = value
                if not fits:
                    misfits.append(f"{key} of {name}")
    check_all_fit(misfits, world)


def without_tensors(tree: Any) -> Any:
    """Replace each tensor in nested dicts with None."""
    return tree_map_only(Tensor, lambda _: None, tree)


def saved_values(
    optimizers: Mapping[str, Any], states: Mapping[str, dict]
) -> dict[str, dict[int, dict[str, Any]]]:
    """Return the values of a checkpoint by optimizer, index of the parameter, and name. Raise
    CheckpointError unless optimizers, parameter groups and names are those of this run."""
    try:
        if states.keys() != optimizers.keys():
            raise ValueError(f"it has {', '.join(states)}, this run has {', '.join(optimizers)}")
        saved: dict[str, dict[int, dict[str, Any]]] = {}
        for name, optimizer in optimizers.items():
            groups = [group["params"] for group in states[name]["param_groups"]]
            if groups != [group["params"] for group in optimizer.state_dict()["param_groups"]]:
                raise ValueError(f"{name} has different parameter groups")
            params = parameters_of(optimizer)
            saved[name] = {}
            for i, values in states[name]["state"].items():
                flat = values | values.get(NESTED, {})
                flat.pop(NESTED, None)
                if flat:  # a cleared Engram table has no values
                    optimizer.make_state(params[i])
                if flat.keys() != optimizer.state[params[i]].keys():
                    raise ValueError("a parameter has different values")
                saved[name][i] = flat
    except Exception as fault:  # a foreign state may cause any error
        reason = str(fault).partition("\n")[0][:200]
        raise CheckpointError(
            f"the checkpoint's optimizers do not fit this run ({reason}): use --optimizer as "
            f"before, or --reset_steps to load only the weights"
        ) from None
    return saved
