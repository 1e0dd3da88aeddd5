"""Ranks: everything of the trainer that knows there may be several processes.

    torchrun --standalone --nproc_per_node 8 train.py ... --shards 4     # 2 replicas of 4 shards

One engine for every layout: FSDP2's fully_shard over a mesh of (replicas, shards), rank = replica * shards + shard. Its
groups are each byte block, the core (gathered once for all its loops) and the rest. Optimizers work on a rank's own
rows of each parameter as plain tensors. Engram tables stay outside, whole on every rank, their summed rows added up
once a step. A `World` of one process has no process group, and its methods do what the caller would have done.

Every rank runs the same collectives: what makes a run leave the loop, change its course or skip an update is agreed on
first, in the one sum of a step, after its passes and before its update, which has the targets of the next step as well.
A rank that cannot go on alone says why in the store, and the others say which rank they lost.
"""

import hashlib
import math
import os
import re
import socket
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from spider.errors import LeftByPeer, WorldError
from spider.model.engram import EngramTable
from spider.training.sharding import HalvedRows, Part, bounds_of, casting
from spider.training.state_tensors import RemoteTensor, ShardedRows

FIRST_STEP = 1800.0                       # seconds that ranks wait for each other until the first step is done
HEARTBEAT = 1.0                           # seconds between two signs of life of a rank


class World:
    """The ranks of a run, this one among them; one process until `join`."""

    def __init__(self, environ=os.environ):
        numbers = {name: environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
        good = {name: re.fullmatch("[0-9]{1,9}", text) for name, text in numbers.items()}
        self.rank, self.ranks, self.local_rank, self.local_ranks = (
            int(numbers[name]) if good[name] else default for name, default in zip(numbers, (0, 1, 0, 1)))
        needed = [*numbers, "MASTER_ADDR", "MASTER_PORT"] if self.ranks > 1 else []
        self.odd = [f"{name}={text!r}" for name, text in numbers.items() if text and not good[name]] + [
            f"{name} is not set" for name in needed if not environ.get(name)]
        self.device, self.shards, self.mesh, self.store = torch.device("cpu"), 1, None, None
        self.beside: dist.ProcessGroup | None = None
        self.parts: list[Part] = []
        self.whole: dict[str, Tensor] = {}           # what every rank has all of: tables and buffers
        self.ballot: dict[str, Callable[[], bool]] = {}
        self.votes: dict[str, bool] = {}
        self.check_signals: Callable = lambda: None           # called after a vote between steps; it may raise
        self.look_ahead: Callable = lambda: (0, None)    # targets of this rank's next step, and what keeps it from them
        self.ahead: tuple[int, int] | None = None    # targets of all in the next step, ranks that are kept from theirs
        self.stopped = threading.Event()
        self.alone = False                           # whether the first rank goes on without the others, to save
        self.warned = False                          # whether a rank has said that it leaves, and why
        self.named = ""                              # what a rank has said of those that were lost
        self.steps = 0                               # since the start of this process

    # -----------------------------------------------------------------------------------------------------------------
    # Coming and going

    @property
    def is_rank0(self) -> bool:
        """Whether this is the rank that logs and writes files."""
        return self.rank == 0

    @property
    def shard(self) -> int:
        return self.rank % self.shards

    @property
    def replicas(self) -> int:
        return self.ranks // self.shards

    def place(self, device: torch.device) -> torch.device:
        """This rank's device of a kind; WorldError where this machine has too few."""
        if self.ranks > 1 and device.type == "cuda":
            if self.local_rank >= torch.cuda.device_count():
                raise WorldError(f"--nproc_per_node {self.local_ranks}: this machine has {torch.cuda.device_count()} "
                                 f"GPUs: start as many processes")
            device = torch.device("cuda", self.local_rank)
            torch.cuda.set_device(device)
        return device

    def join(self, device: torch.device, shards: int, timeout: float):
        """Meets the other ranks, and arranges them as replicas of `shards` shards. `timeout`: seconds that they wait
        for each other once the first step is done. It is a context's business to leave: see __exit__."""
        if self.odd:
            raise WorldError(f"WORLD_SIZE={self.ranks}, but {', '.join(self.odd)}: start by torchrun, or unset them")
        if self.ranks % shards:
            raise WorldError(f"--shards {shards}: {self.ranks} rank{'s' * (self.ranks > 1)} cannot be shared out so: a "
                             f"divisor of their number")
        self.device, self.shards, self.timeout = device, shards, timeout
        if self.ranks == 1:
            return
        first = timedelta(seconds=max(FIRST_STEP, timeout))
        try:
            store, _, _ = next(dist.rendezvous("env://", self.rank, self.ranks, timeout=first))
            meeting = meet(store, self.rank, self.ranks, first.total_seconds())
            self.store = dist.PrefixStore(meeting, store)
            self.heart = dist.PrefixStore(meeting, store.clone())
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=self.store, rank=self.rank,
                                    world_size=self.ranks, timeout=first,
                                    device_id=device if device.type == "cuda" else None)
            self.arrange(shards)
        except (RuntimeError, ValueError) as fault:
            raise WorldError(f"rank {self.rank} of {self.ranks} does not reach the others: "
                             f"{str(fault).splitlines()[0]}: start all by torchrun, with one --rdzv_endpoint") from None
        self.set_timeout(first)
        self.store.set(f"host/{self.rank}", f"{socket.gethostname()}, process {os.getpid()}")
        threading.Thread(target=self._beat, daemon=True).start()

    def arrange(self, shards: int):
        """Lays the ranks out as replicas of so many shards, without a model so far."""
        self.shards, self.parts, self.whole = shards, [], {}
        self.mesh = dist.init_device_mesh(self.device.type, (self.replicas, shards),
                                          mesh_dim_names=("replicas", "shards"))

    def set_timeout(self, timeout: timedelta):
        groups = dist.group.WORLD, self.mesh.get_group("replicas"), self.mesh.get_group("shards"), self.beside
        for group in groups if self.beside else groups[:-1]:
            dist.distributed_c10d._set_pg_timeout(timeout, group)

    def group_beside(self) -> dist.ProcessGroup | None:
        """A group for what a thread of each rank does beside training, over the hosts' network; None for one rank."""
        if self.ranks > 1 and self.beside is None:
            self.beside = dist.new_group(backend="gloo", timeout=timedelta(seconds=max(FIRST_STEP, self.timeout)))
        return self.beside

    def _beat(self):
        beats = 0
        with suppress(RuntimeError):      # the store is gone: so is the job
            while not self.stopped.wait(HEARTBEAT):
                self.heart.set(f"beat/{self.rank}", str(beats := beats + 1))
                if not self.warned and self.heart.check(["fault"]):
                    self.warned = True
                    self.heart.set(f"warned/{self.rank}", "")
                if not self.named and self.heart.check(["named"]):
                    self.named = self.heart.get("named").decode()
                    self.heart.set(f"named/{self.rank}", "")

    def __enter__(self):
        return self

    def __exit__(self, kind, fault, trace):
        """Leaves the others. A fault of this rank alone is noted for them; that of having lost others becomes a
        WorldError which names them."""
        if self.store is None:
            return
        try:
            if fault is not None and is_loss(fault):
                found = self._heard_why() or within(10 * HEARTBEAT, self._name_the_lost, None)
                raise self._heard_why() or found or lost(["rank 0 or its host"]) from None
            if fault is not None:
                within(5 * HEARTBEAT, lambda: self._warn(fault), None)
        finally:
            if fault is not None:
                within((10 if self.is_rank0 else 1) * HEARTBEAT, self._leave, None)
            self.stopped.set()
            if fault is None:
                dist.destroy_process_group()  # else a group at work might not come to its end

    def _heard_why(self) -> Exception | None:
        """What signs of life have brought of why a collective fails: nothing to say where a rank says it itself."""
        return LeftByPeer() if self.warned else WorldError(self.named) if self.named else None

    def _warn(self, fault: BaseException):
        """Notes a fault of this rank for the others, who learn of it with their signs of life: what it shows as is a
        collective that fails when this process ends."""
        self.store.set(f"warned/{self.rank}", "")
        if not isinstance(fault, LeftByPeer):
            self.store.set(f"left/{self.rank}", str(fault))
            self.store.set("fault", "")

    def _leave(self):
        """The first rank, with which the store may go, ends last: when all others know why, or are lost. They may learn
        of a loss from their signs of life alone, while they wait for this rank in a collective."""
        self.store.set(f"leaves/{self.rank}", "")
        waits_for = {*range(self.ranks)} if self.is_rank0 else ()
        while waits_for and not self.stopped.wait(0.1):
            waits_for = {rank for rank in waits_for
                         if not any(self.store.check([f"{word}/{rank}"]) for word in ("warned", "named", "leaves"))}

    def _name_the_lost(self) -> Exception:
        """What to say of a collective that failed: nothing where a rank says itself why it left."""
        everyone = set(range(self.ranks)) - {self.rank}

        def have(kind: str) -> set[int]:
            return {rank for rank in everyone if self.store.check([f"{kind}/{rank}"])}

        def beats() -> dict[int, bytes]:
            return {rank: self.store.get(f"beat/{rank}") for rank in have("beat")}
        self.store.set(f"lost/{self.rank}", "")
        before = beats()
        time.sleep(0 if have("left") else 4 * HEARTBEAT)
        if have("left"):
            return LeftByPeer()
        after, known = beats(), have("host")
        gone = sorted(rank for rank in everyone - have("lost") if after.get(rank) == before.get(rank))
        found = lost([f"rank {rank}" + (f" ({self.store.get(f'host/{rank}').decode()})" if rank in known else "")
                      for rank in gone])
        for rank in gone:
            self.store.set(f"leaves/{rank}", "")
        if gone:
            self.store.set("named", str(found))
        return found

    def says(self, line: str, shared: bool) -> bool:
        """Whether this rank is the one to print a last line; `shared`: all ranks have the same one."""
        if self.ranks == 1:
            return True
        if self.store is None or shared:
            return self.is_rank0
        key = f"said/{hashlib.sha256(line.encode()).hexdigest()}"
        return within(HEARTBEAT, lambda: self.store.add(key, 1) == 1, True)

    # -----------------------------------------------------------------------------------------------------------------
    # Agreeing

    def on_rank0(self, work: Callable, beside: bool = False):
        """What `work` returns on rank 0, or raises there, on every rank; of tensors the others get shapes (meta).
        `beside`: over the group beside, however long it takes."""
        if self.ranks == 1 or self.alone:
            return work()
        told, own = [None, None], None
        if beside:
            done = in_background(work if self.is_rank0 else lambda: None)
            self.wait_for_all(done, beside)
            work = done.result
        if self.is_rank0:
            try:
                own = work()
                told[0] = tree_map_only(Tensor, lambda t: t.to("meta"), own)
            except Exception as fault:
                told[1] = fault
        dist.broadcast_object_list(told, 0, self.beside if beside else None, None if beside else self.device)
        if told[1] is not None:
            raise told[1]
        return own if self.is_rank0 else told[0]

    def wait_for_all(self, work: Future, beside: bool = False):
        """Wait until the work of every rank is done, however long that takes: the limit on waiting is for ranks that
        are lost, and one that is heard of every second is not. `beside`: over the group beside."""
        if self.ranks == 1 or self.alone:
            wait([work])
            return
        busy = torch.ones(1, device="cpu" if beside else self.device)
        while busy.item():
            wait([work], min(HEARTBEAT, self.timeout / 4))
            dist.all_reduce(busy.fill_(not work.done()), group=self.beside if beside else None)

    def goes_alone(self) -> bool:
        """Has the first rank do without the others from here on, where they are lost or wait in vain; false where it
        does not have all that a checkpoint holds, and on other ranks."""
        self.alone = self.is_rank0 and self.shards == 1
        return self.alone

    def sum(self, values: Tensor) -> Tensor:
        """Values of all ranks added up, in place."""
        if self.ranks > 1:
            dist.all_reduce(values)
        return values

    def before_step(self) -> int:
        """Targets of all ranks together in the step that begins; where one has met a fault in its place, all leave.

        They agreed on it in the sum of the step before; only the first step needs one of its own. It cannot wait for
        the sum of its own step: the loss of each target hangs on how many there are."""
        targets, fault = self.look_ahead()
        if self.ranks > 1:
            if self.ahead is None:
                self.ahead = tuple(self.sum(torch.tensor([targets, fault is not None], device=self.device)).tolist())
            (targets, faults), self.ahead = self.ahead, None
            if faults and fault is None:
                raise LeftByPeer
        if fault is not None:
            raise fault
        return targets

    def heard(self, name: str) -> bool:
        """Whether any rank voted for something in the last vote; of one process, its vote now."""
        return self.votes.get(name, False) if self.ranks > 1 else self.ballot[name]()

    def vote(self):
        """Has ranks hear each other between the sums of steps."""
        if self.ranks > 1:
            votes = torch.tensor(self._cast_votes(), dtype=torch.float64, device=self.device)
            self._count(self.sum(votes).tolist())
            self.check_signals()

    def _cast_votes(self) -> list[float]:
        return [float(vote()) for vote in self.ballot.values()]

    def _count(self, votes: list[float]):
        self.votes = {name: count > 0 for name, count in zip(self.ballot, votes)}

    def rounds(self, chunks: Iterable) -> Iterator[tuple]:
        """Deals work out over ranks: (chunk, 1), or (the first chunk, 0) where this rank has none left and only keeps
        the others company. They hear each other between rounds."""
        if self.ranks == 1:
            yield from ((chunk, 1) for chunk in chunks)
            return
        chunks = list(chunks)
        for i in range(0, len(chunks), self.ranks):
            self.vote()
            own = i + self.rank < len(chunks)
            yield chunks[i + self.rank if own else 0], int(own)

    # -----------------------------------------------------------------------------------------------------------------
    # The model: sharded, its gradients, its statistics

    def shard_model(self, model: nn.Module, grad_accum: int, halved: Iterable[nn.Parameter] = ()):
        """Leaves each rank its rows of the model's parameters, whole on every rank so far; `halved` are multiplied as
        bf16 alone, and gathered so."""
        if self.ranks == 1:
            return
        from torch.distributed.fsdp import fully_shard
        tables = {m.weight for m in model.modules() if isinstance(m, EngramTable)}
        shapes = {name: p.shape for name, p in model.named_parameters()}
        halved = {id(p) for p in halved if self.shards > 1 and len(p) % self.shards == 0}
        for module in model.modules():
            for name, p in module.named_parameters(recurse=False):
                if id(p) in halved:
                    setattr(module, name, nn.Parameter(HalvedRows(p.detach())))
        groups = [*model.prelude, *([model.core] if model.core is not None else []), *model.coda, model]
        # Under accumulation weights stay gathered and gradients whole from a step's first pass to its last: it costs
        # memory, and communicates once a step.
        reshards = grad_accum == 1 and self.shards > 1
        # It warns of views among outputs, to which nothing here writes.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        model.casts_early = False
        taken = set()
        for group in groups:
            members = [m for m in group.modules() if m not in taken]
            taken.update(members)
            fully_shard(group, mesh=self.mesh, ignored_params=tables,
                        reshard_after_forward=reshards and group is not model)  # its backward pass begins with it
            group.register_forward_pre_hook(casting(model, [m for m in members if hasattr(m, "cast_weight")]))
        for name, p in model.named_parameters():
            if p in tables:
                self.whole[name] = p
                continue
            own = p.to_local().detach()
            own = nn.Parameter(own.rows if isinstance(own, HalvedRows) else own)
            size = -(-shapes[name][0] // self.shards)
            bounds = [min(i * size, shapes[name][0]) for i in range(self.shards + 1)]
            self.parts.append(Part(name, p, own, bounds))
        self.whole |= dict(model.named_buffers())

    def parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """This rank's rows of the model's parameters by name: what optimizers work on."""
        if self.ranks == 1:
            return dict(model.named_parameters())
        own = {part.name: part.own for part in self.parts}
        return {name: own.get(name, p) for name, p in model.named_parameters()}

    def whole_size(self, p: Tensor) -> int:
        """Elements of the parameter of which this rank has the rows p."""
        return next((math.prod(part.shape) for part in self.parts if part.own is p), p.numel())

    def backward(self, model: nn.Module, loss: Tensor, last: bool):
        """The backward pass of a micro-step, the `last` one of its step or not; `loss` is this rank's part of a sum."""
        if self.ranks == 1:
            loss.backward()
            return
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        (loss * self.ranks).backward()    # FSDP takes the mean over ranks

    def after_step(self, params: list[Tensor], sums: Tensor, tokens: Tensor, real: int):
        """Once a step, when its passes are done: gradients' norm, sums, tokens and real bytes, all over all ranks.

        Leaves gradients of this rank's rows in `grad` of `params`. One all-reduce carries all of it, the votes, what
        `before_step` will tell, and a fingerprint of one tensor, by turns, which must be the same on all replicas:
        WorldError where it is not.
        """
        if self.ranks == 1:
            return nn.utils.get_total_norm([p.grad for p in params if p.grad is not None]), sums, tokens, real
        for part in self.parts:
            part.own.grad = None if part.whole.grad is None else part.whole.grad.to_local()
            part.whole.grad = None        # else the next step's would be added to it
        grads = [p.grad for p in params if p.grad is not None]
        squares = torch.stack(torch._foreach_norm(grads)).double().square().sum() / self.replicas
        name, mark = self._fingerprint()
        targets, fault = self.look_ahead()
        votes = torch.tensor([real, targets, fault is not None, *self._cast_votes()], dtype=torch.float64)
        marks = torch.zeros(self.shards, dtype=torch.float64, device=self.device)
        marks[self.shard] = mark
        parts = squares[None], sums.double(), tokens.double().flatten(), votes.to(self.device), marks
        squares, sums, counts, votes, marks = self.sum(torch.cat(parts)).split([len(part) for part in parts])
        real, targets, faults, *votes = votes.tolist()                                       # waits for the device
        self.ahead = int(targets), int(faults)
        self._count(votes)
        own, *marks = torch.cat(((mark * self.replicas)[None], marks)).tolist()
        if marks[self.shard] != own or name in self.whole and any(other != own for other in marks):
            raise WorldError(f"{name} is not the same on all ranks any more, as was seen {self.steps} steps after this "
                             f"start: go back to a checkpoint before it by --resume")
        self.steps += 1
        if self.steps == 1:
            self.set_timeout(timedelta(seconds=self.timeout))
        return squares[0].sqrt().float(), sums.float(), counts.float().view(tokens.shape), real

    def _fingerprint(self) -> tuple[str, Tensor]:
        """A tensor's name, each step another one, and the sum of its bits: a whole number, of which sums are exact."""
        tensors = [(part.name, part.own) for part in self.parts] + list(self.whole.items())
        name, tensor = tensors[self.steps % len(tensors)]
        bits = tensor.detach().contiguous().view(torch.int32).sum(dtype=torch.int64)
        return name, (bits & 0xFFFFFFFF).double()

    def add_up(self, tables: Iterable[EngramTable]):
        """Sums over ranks what tables have gathered."""
        if self.ranks > 1:
            for table in tables:
                _, grad, square = table.sum_up()
                dist.all_reduce(grad.div_(self.ranks))           # what `backward` multiplied by
                dist.all_reduce(square.div_(self.ranks ** 2))

    def whole_model(self, model: nn.Module) -> nn.Module | None:
        """The model with all of its weights in one place, to write samples; None on all ranks but the first."""
        if self.ranks == 1:
            return model
        self.vote()                       # a signal ends it before it begins
        weights = {part.name: self._sharded(part.own, part.bounds).gather() for part in self.parts}
        if not self.is_rank0:
            return None
        with torch.device("meta"):
            plain = type(model)(model.config)
        for name, value in (weights | self.whole).items():
            module, _, name = name.rpartition(".")
            module = plain.get_submodule(module)
            if name in module._buffers:
                module._buffers[name] = value
            else:
                module._parameters[name] = nn.Parameter(value.to(self.device))
        plain.compute_dtype = model.compute_dtype
        for own, other in zip(plain.modules(), model.modules()):
            if hasattr(own, "backend"):
                own.backend = other.backend
        return plain

    # -----------------------------------------------------------------------------------------------------------------
    # States, of which a rank holds its rows

    def state_of(self, model: nn.Module) -> dict:
        """The model's weights and buffers, as ShardedRows where a rank has but some."""
        if self.ranks == 1:
            return model.state_dict()
        rows = {part.name: self._sharded(part.own, part.bounds) for part in self.parts}
        return {name: rows.get(name, value) for name, value in model.state_dict().items()}

    def states_of(self, optimizers: dict[str, torch.optim.Optimizer]) -> dict:
        """The same of optimizers, by name."""
        states = {name: part.state_dict() for name, part in optimizers.items()}
        return self._map_states(optimizers, states, lambda value, bounds: (
            value if bounds is None else self._sharded(value, bounds))) if self.ranks > 1 else states

    def _sharded(self, local: Tensor, bounds: list[int]) -> ShardedRows:
        return ShardedRows(local, bounds, self.rank, self.ranks)

    @torch.no_grad()
    def load(self, model: nn.Module, weights: dict[str, Tensor | RemoteTensor]):
        """Fills a model from whole weights, one after the other: rank 0 has them, or every rank reads its rows."""
        if self.ranks == 1:
            model.load_state_dict(weights)
            return
        for part in self.parts:
            part.own.copy_(self._take(weights[part.name], part.bounds))
        for name, value in self.whole.items():
            if name in weights:
                value.copy_(self._take(weights[name], None))

    def own_states(self, optimizers: dict[str, torch.optim.Optimizer], states: dict) -> dict:
        """This rank's rows of whole states, which rank 0 has or every rank reads; ValueError where one does not fit
        its parameter."""
        return self._map_states(optimizers, states, self._take) if self.ranks > 1 else states

    def _take(self, value: Tensor | RemoteTensor, bounds: list[int] | None) -> Tensor:
        if isinstance(value, RemoteTensor):
            return value.rows(*() if bounds is None else bounds[self.shard:self.shard + 2]).to(self.device)
        whole = value.to(self.device) if self.is_rank0 else torch.empty(value.shape, dtype=value.dtype, device=self.device)
        dist.broadcast(whole, 0)
        return (whole if bounds is None else whole[bounds[self.shard]:bounds[self.shard + 1]]).clone()

    def _map_states(self, optimizers: dict[str, torch.optim.Optimizer], states: dict, change: Callable) -> dict:
        """Optimizers' states by name with each tensor changed, given the bounds of its rows, None where it is whole."""
        parts, out = {id(part.own): part for part in self.parts}, {}
        for name, optimizer in optimizers.items():
            params = [p for group in optimizer.param_groups for p in group["params"]]
            out[name] = dict(states[name], state={
                i: {key: change(value, bounds_of(parts.get(id(params[i])), key))
                    if isinstance(value, (Tensor, RemoteTensor)) else value for key, value in state.items()}
                for i, state in states[name]["state"].items()})
        return out


def meet(store: dist.Store, rank: int, ranks: int, timeout: float) -> str:
    """A name that these ranks and no others have for what they put into a store; RuntimeError after so many seconds.

    torchrun's store outlives a restart, and has the addresses of ranks that died; its count of restarts is each host's
    own, and another one on a host that came back. So rank 0 calls, the others answer, and it says whom it heard: a call
    from before may stand there still, but it did not hear these."""
    own, deadline = uuid.uuid4().hex, time.monotonic() + timeout
    if rank == 0:
        store.set("spider/call", own)
        heard = [store.get(f"spider/{own}/{other}") for other in range(1, ranks)]            # waits for each
        store.set(f"spider/{own}/heard", b" ".join(heard))
        return f"spider/{own}"
    while time.monotonic() < deadline:
        call = store.get("spider/call").decode()
        store.set(f"spider/{call}/{rank}", own)
        if store.check([f"spider/{call}/heard"]) and own.encode() in store.get(f"spider/{call}/heard").split():
            return f"spider/{call}"
        time.sleep(0.1)
    raise RuntimeError("rank 0 does not answer")


def within(seconds: float, work: Callable, otherwise):
    """What `work` returns, `otherwise` where it fails or takes longer: the store may have gone, or stand still, with
    its host."""
    done = in_background(work)
    wait([done], seconds)
    return otherwise if not done.done() or isinstance(done.exception(), RuntimeError) else done.result()


def in_background(work: Callable) -> Future:
    """`work`, begun in a thread that the end of the process does not wait for."""
    done = Future()

    def run():
        try:
            done.set_result(work())
        except BaseException as fault:
            done.set_exception(fault)
    threading.Thread(target=run, daemon=True).start()
    return done


def lost(names: list[str]) -> WorldError:
    return WorldError(f"lost {' and '.join(names) or 'the network to the others'}: it ended, stands still or cannot be "
                      f"reached; what is saved stays, and the same command goes on from it")


def is_loss(fault: BaseException) -> bool:
    """Whether an error is that of a collective whose other ranks are gone."""
    return isinstance(fault, dist.DistError) or isinstance(fault, RuntimeError) and bool(
        re.search(r"gloo|NCCL|Connection (closed|reset)|[Tt]imed out|Broken pipe", str(fault)))
