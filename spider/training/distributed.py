"""Several ranks: the process group (`World`), and a model sharded or replicated by FSDP2.

    torchrun --standalone --nproc_per_node 8 train.py ... --shards 4     # 2 replicas of 4 shards

The mesh is (replicas, shards), rank = replica * shards + shard. Every rank runs the same
collectives. Decisions that all ranks must share (stop, skip an update) travel as numbers in each
step's all-reduce, before the update. If a rank dies, torchrun names it and ends the others; then
the same command resumes from the newest checkpoint.

`shard_model` calls fully_shard. Its groups are each byte block, the core, and the rest; the core is
gathered once for all its loops. Optimizers see this rank's rows of each parameter as plain tensors.
Engram tables are not sharded: their gradients are all-reduced once per step. `sharding_of` returns
a model's `Sharding`, on several ranks its subclass `Sharded`. state.py gathers and distributes
checkpoints.
"""

import math
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from loguru import logger
from torch import Tensor, nn

# torch._C adds this function to the module
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

from spider import threads
from spider.errors import UsageError, WorldError
from spider.model.memory import EngramTable, tables_of

if TYPE_CHECKING:
    # importing this takes most of a second, and a single process does not need it
    from torch.distributed.device_mesh import DeviceMesh

    from spider_model import Spider

# --------------------------------------------------------------------------------------------------
# Ranks


def rank_and_count(environ: Mapping[str, str], rank_name: str, count_name: str) -> tuple[int, int]:
    """Read a rank and the number of ranks from environment variables with these names; default:
    (0, 1). Raise WorldError if they contradict each other."""
    count = environ.get(count_name) or "1"
    rank = environ.get(rank_name) or ("0" if count == "1" else "")
    are_numbers = rank.isdecimal() and count.isdecimal()
    if not are_numbers or int(rank) >= int(count):
        settings = [f"{name}={environ.get(name, 'unset')}" for name in (rank_name, count_name)]
        raise WorldError(
            f"{', '.join(settings)}: start all ranks with torchrun, or unset its variables for a "
            f"single process"
        )
    return int(rank), int(count)


SLOW_START = (
    "the ranks have not met within a minute: check that all of them have started; if so, NCCL may "
    "hang between PCIe cards: set NCCL_P2P_DISABLE=1 (docs/scaling.md)"
)


class World:
    """The ranks of a run: a single process until `join`. Without torchrun, collectives do
    nothing."""

    def __init__(self, environ: Mapping[str, str] = os.environ, device: str | torch.device = "cpu"):
        """environ: torchrun's variables; {} makes a single process, whatever is set. Raise
        WorldError if they contradict each other."""
        self.rank, self.ranks = rank_and_count(environ, "RANK", "WORLD_SIZE")
        self.local_rank, self.local_ranks = rank_and_count(
            environ, "LOCAL_RANK", "LOCAL_WORLD_SIZE"
        )
        self.by_torchrun = "TORCHELASTIC_RUN_ID" in environ
        self.device = torch.device(device)
        self.shards = 1
        self.mesh: DeviceMesh | None = None  # None for one rank

    @property
    def is_rank0(self) -> bool:
        """Return whether this rank logs and writes files."""
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
        """Join the other ranks, each on a device of its own, and arrange all ranks as replicas of
        `shards` shards. Raise WorldError if that fails.

        timeout: limit for each collective, in seconds."""
        if self.ranks % shards:
            raise WorldError(f"--shards {shards} does not divide {self.ranks} ranks: use a divisor")
        self.device = device
        self.shards = shards
        if self.by_torchrun:
            # If torchrun is killed, it cannot stop its ranks, and they would train on unseen. So
            # the kernel sends SIGTERM when torchrun's main thread, which started them, ends.
            _prctl_pr_set_pdeathsig(signal.SIGTERM)
            if os.getppid() != threads.PARENT_PID:  # the parent died before this call
                os.kill(os.getpid(), signal.SIGTERM)
        if self.ranks == 1:
            return
        if device.type == "cuda":
            # Slurm shows a process either its own GPU only, with index 0, or all GPUs of the node
            self.device = torch.device("cuda", self.local_rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        warning = threading.Timer(60.0, logger.warning, [SLOW_START])
        warning.daemon = True  # must not keep the process alive
        warning.start()
        try:
            self._start_groups(timedelta(seconds=timeout))
            self.all(True)  # rank 0, which may hold the store, must not end while others connect
        except (RuntimeError, ValueError) as fault:
            raise WorldError(
                f"rank {self.rank} of {self.ranks} cannot reach the others: "
                f"{str(fault).splitlines()[0]}: start all ranks with torchrun and the same "
                f"--rdzv_endpoint"
            ) from None
        finally:
            warning.cancel()

    def _start_groups(self, timeout: timedelta):
        """Start the process group of all ranks, and the groups of the mesh's dimensions."""
        store, _, _ = next(dist.rendezvous("env://", self.rank, self.ranks, timeout=timeout))
        # torchrun's own store survives --max-restarts, with the addresses of dead ranks
        attempt = "0"
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt{attempt}", store)
        on_gpus = self.device.type == "cuda"
        if on_gpus:
            self._require_own_gpu(store)
        dist.init_process_group(
            "nccl" if on_gpus else "gloo",
            store=store,
            rank=self.rank,
            world_size=self.ranks,
            timeout=timeout,
            device_id=self.device if on_gpus else None,
        )
        self.mesh = dist.init_device_mesh(
            self.device.type, (self.replicas, self.shards), mesh_dim_names=("replicas", "shards")
        )
        for dimension in ("replicas", "shards"):  # torch's default is half an hour
            dist.distributed_c10d._set_pg_timeout(timeout, self.group(dimension))

    def _require_own_gpu(self, store: dist.Store):
        """Raise UsageError on all ranks if two of them have the same GPU: NCCL would fail with a
        message about its internals."""
        store.set(f"gpu{self.rank}", str(torch.cuda.get_device_properties(self.device).uuid))
        gpus = store.multi_get([f"gpu{rank}" for rank in range(self.ranks)])
        store.set(f"read{self.rank}", "")
        if self.is_rank0:  # may hold the store, so it waits for the others
            store.wait([f"read{rank}" for rank in range(self.ranks)])
        shared = [str(rank) for rank, gpu in enumerate(gpus) if gpus.count(gpu) > 1]
        if shared:
            raise UsageError(
                f"ranks {', '.join(shared)} of {self.ranks} would share GPUs: start at most one "
                f"process per GPU of a host (here {torch.cuda.device_count()}), each with its own "
                f"LOCAL_RANK"
            )

    def leave(self):
        """Leave the process group, together with all ranks. After an error on one rank, the process
        just ends, since leaving could hang."""
        if self.mesh is not None:
            dist.destroy_process_group()

    def group(self, dimension: str) -> dist.ProcessGroup:
        """Return this rank's process group along a dimension of the mesh: `replicas` or
        `shards`."""
        assert self.mesh is not None, "one rank has no groups"
        return self.mesh.get_group(dimension)

    def sum(self, values: Tensor) -> Tensor:
        """Sum values over all ranks, in place."""
        if self.ranks > 1:
            dist.all_reduce(values)
        return values

    def all(self, holds: bool) -> bool:
        """Return whether a condition holds on all ranks."""
        return int(self.sum(torch.tensor(int(holds), device=self.device))) == self.ranks

    def on_rank0(self, work: Callable, for_others: Callable = lambda result: result):
        """Run `work` on rank 0 and return its result, or raise its error, on every rank. The other
        ranks receive `for_others(result)`."""
        if self.ranks == 1:
            return work()
        result = None
        broadcast: list[Any] = [None, None]  # result, error; torch receives into this list
        if self.is_rank0:
            try:
                result = work()
                broadcast[0] = for_others(result)
            except Exception as fault:
                broadcast[1] = fault
        dist.broadcast_object_list(broadcast, 0, device=self.device)
        received, error = broadcast
        if error is not None:
            raise error
        return result if self.is_rank0 else received

    def distribute(self, batches: Iterable) -> Iterator[tuple[Any, int]]:
        """Distribute batches over ranks: yield (batch, 1), or (another rank's batch, 0) if this
        rank has no batch left but must join the collectives. Read batches only when they are
        needed: a long text's windows may not fit into memory together."""
        remaining = iter(batches)
        while turn := list(islice(remaining, self.ranks)):
            if self.rank < len(turn):
                yield turn[self.rank], 1
            else:
                yield turn[0], 0


# --------------------------------------------------------------------------------------------------
# A model's parameters and gradients, on one rank or on several


@dataclass
class ShardedParameter:
    """A parameter that FSDP has sharded."""

    name: str
    dtensor: nn.Parameter  # FSDP's, a DTensor
    local: nn.Parameter  # this rank's rows in the same memory, as a plain tensor for the optimizer
    bounds: list[int]  # first row of each shard, then the number of rows

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.dtensor.shape)


class Sharding:
    """How a model is spread over ranks, as shards, replicas or both. This base class is for one
    process."""

    world = World({})
    ranks = 1
    params: Sequence[ShardedParameter] = ()

    def backward(self, model: nn.Module, loss: Tensor, last: bool):
        """Run the backward pass of a micro-step. loss: this rank's term of the sum over ranks.
        last: whether this is the last micro-step."""
        loss.backward()

    def all_reduce_step(self, params: Sequence[Tensor], numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Sum a step's numbers (float64) over ranks; return the gradient norm of `params` and the
        sums."""
        grads = [p.grad for p in params if p.grad is not None]
        if not grads:  # everything is frozen except the tables
            return numbers.new_zeros((), dtype=torch.float32), numbers
        norms = torch.stack(torch._foreach_norm(grads))
        return torch.linalg.vector_norm(norms), numbers

    def all_reduce_tables(self, tables: Iterable[EngramTable]):
        """All-reduce the gradients of Engram tables."""


UNSHARDED = Sharding()


def sharding_of(model: nn.Module) -> Sharding:
    """Return the sharding of a model."""
    return getattr(model, "sharding", UNSHARDED)


class Sharded(Sharding):
    """A model on several ranks with FSDP: this rank's rows of its parameters, and the collectives
    of training. With one shard, each rank has all rows: a replica of the model."""

    def __init__(self, world: World, params: list[ShardedParameter]):
        self.world = world
        self.ranks = world.ranks
        self.params = params

    def backward(self, model: nn.Module, loss: Tensor, last: bool):
        model.set_requires_gradient_sync(last)  # type: ignore[operator]  # FSDPModule's
        model.set_reshard_after_backward(last)  # type: ignore[operator]
        (loss * self.ranks).backward()  # FSDP takes the mean over ranks

    def all_reduce_step(self, params: Sequence[Tensor], numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Also put the gradients of this rank's rows into `grad` of `params`."""
        for param in self.params:
            grad: Any = param.dtensor.grad
            param.local.grad = None if grad is None else grad.to_local()
            param.dtensor.grad = None  # the next step would add to it
        norms = torch._foreach_norm([p.grad for p in params if p.grad is not None])
        # every replica has all rows, but the norm counts them once
        square = torch.stack(norms).double().square().sum() / self.world.replicas
        sums = self.world.sum(torch.cat((square[None], numbers)))
        return sums[0].sqrt().float(), sums[1:]

    def all_reduce_tables(self, tables: Iterable[EngramTable]):
        for table in tables:
            # `backward` has multiplied by the ranks
            dist.all_reduce(table.sum_up().div_(self.ranks))


# --------------------------------------------------------------------------------------------------
# Sharding


def shard_model(model: "Spider", world: World, grad_accum: int):
    """Shard a model that every rank has whole, and set its `sharding`. With one rank, do
    nothing."""
    if world.ranks == 1:
        return
    from torch.distributed.fsdp import fully_shard

    tables = {table.weight for table in tables_of(model)}
    rows = {name: len(p) for name, p in model.named_parameters() if p.ndim}
    # FSDP warns about outputs that are views, which must not be written to; nothing here does
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    # With gradient accumulation, weights stay gathered and gradients unsharded until the end of the
    # step, which costs memory but communicates only once per step
    reshards = grad_accum == 1 and world.shards > 1
    model.casts_early = False  # each group's weights are cast in its forward
    core = [] if model.core is None else [model.core]
    grouped = set()
    for group in (*model.prelude, *core, *model.coda, model):
        members = [m for m in group.modules() if m not in grouped]
        grouped.update(members)
        fully_shard(
            group,
            mesh=world.mesh,
            ignored_params=tables,
            # backward needs the root first
            reshard_after_forward=reshards and group is not model,
        )
        casting = [m for m in members if hasattr(m, "cast_weight")]
        group.register_forward_pre_hook(partial(cast_weights, model, casting))
    params = []
    for name, p in model.named_parameters():
        if p in tables:
            continue
        size = math.ceil(rows[name] / world.shards)
        bounds = [min(shard * size, rows[name]) for shard in range(world.shards + 1)]
        local = nn.Parameter(p.to_local().detach())  # type: ignore[attr-defined]  # a DTensor
        params.append(ShardedParameter(name, p, local, bounds))
    model.sharding = Sharded(world, params)  # type: ignore[assignment]  # neither Tensor nor Module


def cast_weights(model: "Spider", modules: Iterable[Any], *_):
    """Cast the weights of an FSDP group inside its forward, after they are gathered.

    Before the gathering, the cast would only see shards. Outside the group's forward, the gradient
    of the cast would come too late and be lost silently."""
    for module in modules:
        module.cast_weight(model.compute_dtype)
