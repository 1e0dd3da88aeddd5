"""Ranks: who they are, how they meet, and what they agree on.

    torchrun --standalone --nproc_per_node 8 train.py ... --shards 4     # 2 replicas of 4 shards

A `World` holds this process's rank, its device, the mesh of (replicas, shards), rank = replica * shards + shard, and
the votes of all ranks. In a run of one process it has no process group, and its methods do what the caller would have
done.

Every rank runs the same collectives: what ends the loop, changes its course or skips an update is agreed on first, in
one all-reduce per step, after its passes and before its update. It carries the number of targets of the next step as
well. What each rank holds of a model is in sharding.py; how ranks notice that one was lost in heartbeat.py. """

import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from spider.errors import LeftByPeer, WorldError
from spider.training.heartbeat import HEARTBEAT, Heartbeat, in_background

FIRST_STEP_TIMEOUT = 1800.0               # seconds that ranks wait for each other until the first step is done


class World:
    """The ranks of a run, this one among them; one process until `join`."""

    def __init__(self, environ=os.environ):
        numbers = {name: environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
        good = {name: re.fullmatch("[0-9]{1,9}", text) for name, text in numbers.items()}
        self.rank, self.ranks, self.local_rank, self.local_ranks = (
            int(numbers[name]) if good[name] else default for name, default in zip(numbers, (0, 1, 0, 1)))
        needed = [*numbers, "MASTER_ADDR", "MASTER_PORT"] if self.ranks > 1 else []
        self.bad_environ = [f"{name}={text!r}" for name, text in numbers.items() if text and not good[name]] + [
            f"{name} is not set" for name in needed if not environ.get(name)]
        self.device, self.shards, self.mesh = torch.device("cpu"), 1, None
        self.heartbeat: Heartbeat | None = None
        self.other_group: dist.ProcessGroup | None = None
        self.alone = False                           # rank 0 continues without the others, to save
        self.steps = 0                               # since the start of this process
        self.own_votes: dict[str, Callable[[], bool]] = {}   # what this rank votes on, and how
        self.votes: dict[str, bool] = {}             # whether any rank voted for it, at the last all-reduce
        self.check_signals: Callable = lambda: None  # called after a vote between steps; it may raise
        self.own_targets: Callable = lambda: (0, None)       # this rank's targets in the next step, or an error
        self.next_targets: tuple[int, int] | None = None     # of all ranks, and how many have an error instead

    @property
    def is_rank0(self) -> bool:
        """Tell whether this is the rank that logs and writes files."""
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

    # -----------------------------------------------------------------------------------------------------------------
    # Joining and leaving

    def local_device(self, device: torch.device) -> torch.device:
        """Return this rank's device of a type; WorldError where this machine has too few."""
        if self.ranks > 1 and device.type == "cuda":
            if self.local_rank >= torch.cuda.device_count():
                raise WorldError(f"--nproc_per_node {self.local_ranks}: this machine has {torch.cuda.device_count()} "
                                 f"GPUs: start as many processes")
            device = torch.device("cuda", self.local_rank)
            torch.cuda.set_device(device)
        return device

    def join(self, device: torch.device, shards: int, timeout: float):
        """Meet the other ranks and arrange all as replicas of `shards` shards. `timeout`: seconds that they wait for
        each other once the first step is done. The world is a context, whose end leaves the others."""
        if self.bad_environ:
            raise WorldError(f"WORLD_SIZE={self.ranks}, but {', '.join(self.bad_environ)}: start by torchrun, or unset "
                             f"them")
        if self.ranks % shards:
            raise WorldError(f"--shards {shards}: does not divide {self.ranks} rank{'s' * (self.ranks > 1)}: choose a "
                             f"divisor of their number")
        self.device, self.shards, self.timeout = device, shards, timeout
        if self.ranks == 1:
            return
        first = timedelta(seconds=max(FIRST_STEP_TIMEOUT, timeout))
        try:
            store, _, _ = next(dist.rendezvous("env://", self.rank, self.ranks, timeout=first))
            prefix = agree_on_prefix(store, self.rank, self.ranks, first.total_seconds())
            own = dist.PrefixStore(prefix, store)
            self.heartbeat = Heartbeat(own, dist.PrefixStore(prefix, store.clone()), self.rank, self.ranks)
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=own, rank=self.rank,
                                    world_size=self.ranks, timeout=first,
                                    device_id=device if device.type == "cuda" else None)
            self.make_mesh(shards)
        except (RuntimeError, ValueError) as fault:
            raise WorldError(f"rank {self.rank} of {self.ranks} does not reach the others: "
                             f"{str(fault).splitlines()[0]}: start all by torchrun, with one --rdzv_endpoint") from None
        self.set_timeout(first)
        self.heartbeat.start()

    def make_mesh(self, shards: int):
        """Arrange the ranks as replicas of so many shards."""
        self.shards = shards
        self.mesh = dist.init_device_mesh(self.device.type, (self.replicas, shards),
                                          mesh_dim_names=("replicas", "shards"))

    def set_timeout(self, timeout: timedelta):
        groups = dist.group.WORLD, self.mesh.get_group("replicas"), self.mesh.get_group("shards"), self.other_group
        for group in groups if self.other_group else groups[:-1]:
            dist.distributed_c10d._set_pg_timeout(timeout, group)

    def background_group(self) -> dist.ProcessGroup | None:
        """Return a group for what a thread of each rank does beside training, over gloo; None for one rank."""
        if self.ranks > 1 and self.other_group is None:
            timeout = timedelta(seconds=max(FIRST_STEP_TIMEOUT, self.timeout))
            self.other_group = dist.new_group(backend="gloo", timeout=timeout)
        return self.other_group

    def __enter__(self):
        return self

    def __exit__(self, kind, fault, trace):
        """Leave the other ranks; see Heartbeat.stop for what they learn of an error, and what is raised."""
        if self.heartbeat is not None:
            self.heartbeat.stop(fault)
            if fault is None:
                dist.destroy_process_group()  # else a group at work might not come to its end

    def should_print(self, line: str, shared: bool) -> bool:
        """Tell whether this rank is the one to print a last line; `shared`: all ranks have the same one."""
        if self.ranks == 1:
            return True
        return self.is_rank0 if self.heartbeat is None or shared else self.heartbeat.claim(line)

    # -----------------------------------------------------------------------------------------------------------------
    # Collectives of plain values

    def sum(self, values: Tensor) -> Tensor:
        """All-reduce values by their sum, in place."""
        if self.ranks > 1:
            dist.all_reduce(values)
        return values

    def on_rank0(self, work: Callable, background: bool = False):
        """Return on every rank what `work` returns on rank 0, or raise what it raises there; of tensors the others get
        shapes (meta). `background`: over the background group, however long it takes."""
        if self.ranks == 1 or self.alone:
            return work()
        outcome, own = [None, None], None            # result and error
        if background:
            done = in_background(work if self.is_rank0 else lambda: None)
            self.wait_for_all(done, background)
            work = done.result
        if self.is_rank0:
            try:
                own = work()
                outcome[0] = tree_map_only(Tensor, lambda t: t.to("meta"), own)
            except Exception as fault:
                outcome[1] = fault
        dist.broadcast_object_list(outcome, 0, self.other_group if background else None,
                                   None if background else self.device)
        if outcome[1] is not None:
            raise outcome[1]
        return own if self.is_rank0 else outcome[0]

    def wait_for_all(self, work: Future, background: bool = False):
        """Wait until the work of every rank is done, however long it takes: the timeout is for ranks that are lost, and
        here each is heard of every second. `background`: over the background group."""
        if self.ranks == 1 or self.alone:
            wait([work])
            return
        busy = torch.ones(1, device="cpu" if background else self.device)
        while busy.item():
            wait([work], min(HEARTBEAT, self.timeout / 4))
            dist.all_reduce(busy.fill_(not work.done()), group=self.other_group if background else None)

    def continue_alone(self) -> bool:
        """Have rank 0 do without the others from here on, where they are lost or wait in vain. False on other ranks,
        and where rank 0 lacks some of what a checkpoint holds."""
        self.alone = self.is_rank0 and self.shards == 1
        return self.alone

    def distribute(self, batches: Iterable) -> Iterator[tuple]:
        """Distribute batches over ranks: yield (batch, 1), or (the first batch, 0) where this rank has none left and
        only takes part in the collectives. Ranks vote between rounds."""
        if self.ranks == 1:
            yield from ((batch, 1) for batch in batches)
            return
        batches = list(batches)
        for i in range(0, len(batches), self.ranks):
            self.all_reduce_votes()
            own = i + self.rank < len(batches)
            yield batches[i + self.rank if own else 0], int(own)

    # -----------------------------------------------------------------------------------------------------------------
    # Votes

    def any_voted(self, name: str) -> bool:
        """Tell whether any rank voted for something at the last all-reduce; of one process, its vote now."""
        return self.votes.get(name, False) if self.ranks > 1 else self.own_votes[name]()

    def all_reduce_votes(self):
        """Let ranks vote between the all-reduces of steps, and act on signals."""
        if self.ranks > 1:
            votes = torch.tensor(self.cast_votes(), dtype=torch.float64, device=self.device)
            self.count_votes(self.sum(votes).tolist())
            self.check_signals()

    def cast_votes(self) -> list[float]:
        return [float(vote()) for vote in self.own_votes.values()]

    def count_votes(self, votes: list[float]):
        self.votes = {name: count > 0 for name, count in zip(self.own_votes, votes)}

    def targets_of_step(self) -> int:
        """Return the targets of all ranks in the step that begins. Where a rank has an error in place of its batches,
        all leave: it raises that error, the others LeftByPeer.

        They agreed on it in the all-reduce of the step before; only the first step needs one of its own. It cannot wait
        for the all-reduce of its own step, since the loss of each target is divided by their number."""
        targets, fault = self.own_targets()
        if self.ranks > 1:
            if self.next_targets is None:
                counts = self.sum(torch.tensor([targets, fault is not None], device=self.device))
                self.next_targets = tuple(counts.tolist())
            (targets, faults), self.next_targets = self.next_targets, None
            if faults and fault is None:
                raise LeftByPeer
        if fault is not None:
            raise fault
        return targets


def agree_on_prefix(store: dist.Store, rank: int, ranks: int, timeout: float) -> str:
    """Agree on a prefix of keys that these ranks and no others use in a store; RuntimeError after so many seconds.

    torchrun's store outlives a restart, and has the addresses of ranks that died; its count of restarts is each host's
    own, and another one on a host that came back. So rank 0 calls, the others answer, and it lists whose answers it
    got: an old call may still stand there, but its list has none of these."""
    own, deadline = uuid.uuid4().hex, time.monotonic() + timeout
    if rank == 0:
        store.set("spider/call", own)
        answers = [store.get(f"spider/{own}/{other}") for other in range(1, ranks)]          # waits for each
        store.set(f"spider/{own}/answers", b" ".join(answers))
        return f"spider/{own}"
    while time.monotonic() < deadline:
        call = store.get("spider/call").decode()
        store.set(f"spider/{call}/{rank}", own)
        if store.check([f"spider/{call}/answers"]) and own.encode() in store.get(f"spider/{call}/answers").split():
            return f"spider/{call}"
        time.sleep(0.1)
    raise RuntimeError("rank 0 does not answer")
