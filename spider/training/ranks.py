"""Ranks: process groups, device mesh, and the collectives by which ranks agree.

    torchrun --standalone --nproc_per_node 8 train.py ... --shards 4     # 2 replicas of 4 shards

A `World` holds this process's rank, its device, the mesh of (replicas, shards), rank = replica * shards + shard, and
the votes of all ranks. With one process there is no process group, and the collectives are no-ops.

Every rank runs the same collectives. Ranks agree on anything that ends the loop or skips an update in one all-reduce
per step, after its passes and before its update; it also carries the number of targets of the next step. sharding.py
shards a model; heartbeat.py detects lost ranks.
"""

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

FIRST_STEP_TIMEOUT = 1800.0               # seconds, of collectives until the end of the first step


class World:
    """The ranks of a run; a single process until `join`."""

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
        self.alone = False                           # rank 0 continues without the others, only to save
        self.steps = 0                               # since the start of this process
        self.own_votes: dict[str, Callable[[], bool]] = {}   # this rank's vote by name
        self.votes: dict[str, bool] = {}             # by name: did any rank vote for it at the last all-reduce?
        self.check_signals: Callable = lambda: None  # called after a vote between steps; may raise
        self.own_targets: Callable = lambda: (0, None)       # this rank's targets in the next step, and an error
        self.next_targets: tuple[int, int] | None = None     # targets of all ranks, and the number of errors

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

    # -----------------------------------------------------------------------------------------------------------------
    # Joining and leaving

    def local_device(self, device: torch.device) -> torch.device:
        """Return this rank's device of a type; raise WorldError if this machine has too few."""
        if self.ranks > 1 and device.type == "cuda":
            if self.local_rank >= torch.cuda.device_count():
                raise WorldError(f"--nproc_per_node {self.local_ranks}: this machine has {torch.cuda.device_count()} "
                                 f"GPUs: start one process per GPU")
            device = torch.device("cuda", self.local_rank)
            torch.cuda.set_device(device)
        return device

    def join(self, device: torch.device, shards: int, timeout: float):
        """Join the other ranks and arrange all as replicas of `shards` shards. `timeout`: seconds, of collectives after
        the first step. The world is a context manager, which leaves the process group at its end."""
        if self.bad_environ:
            raise WorldError(f"WORLD_SIZE={self.ranks}, but {', '.join(self.bad_environ)}: start with torchrun, or "
                             f"unset them")
        if self.ranks % shards:
            raise WorldError(f"--shards {shards} does not divide {self.ranks} rank{'s' * (self.ranks > 1)}: use a "
                             f"divisor")
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
            raise WorldError(f"rank {self.rank} of {self.ranks} cannot reach the others: "
                             f"{str(fault).splitlines()[0]}: start all with torchrun, with the same --rdzv_endpoint"
                             ) from None
        self.set_timeout(first)
        self.heartbeat.start()

    def make_mesh(self, shards: int):
        """Arrange the ranks as replicas of `shards` shards."""
        self.shards = shards
        self.mesh = dist.init_device_mesh(self.device.type, (self.replicas, shards),
                                          mesh_dim_names=("replicas", "shards"))

    def set_timeout(self, timeout: timedelta):
        groups = dist.group.WORLD, self.mesh.get_group("replicas"), self.mesh.get_group("shards"), self.other_group
        for group in groups if self.other_group else groups[:-1]:
            dist.distributed_c10d._set_pg_timeout(timeout, group)

    def background_group(self) -> dist.ProcessGroup | None:
        """Return a gloo group for collectives in background threads; None for one rank."""
        if self.ranks > 1 and self.other_group is None:
            timeout = timedelta(seconds=max(FIRST_STEP_TIMEOUT, self.timeout))
            self.other_group = dist.new_group(backend="gloo", timeout=timeout)
        return self.other_group

    def __enter__(self):
        return self

    def __exit__(self, kind, fault, trace):
        """Leave the process group; Heartbeat.stop reports an error to the others."""
        if self.heartbeat is not None:
            self.heartbeat.stop(fault)
            if fault is None:
                dist.destroy_process_group()  # after an error, this could hang in a collective

    def should_print(self, line: str, shared: bool) -> bool:
        """Return whether this rank prints a final error line; `shared`: all ranks have the same line."""
        if self.ranks == 1:
            return True
        return self.is_rank0 if self.heartbeat is None or shared else self.heartbeat.claim(line)

    # -----------------------------------------------------------------------------------------------------------------
    # Collectives of plain values

    def sum(self, values: Tensor) -> Tensor:
        """All-reduce values in place, as a sum."""
        if self.ranks > 1:
            dist.all_reduce(values)
        return values

    def on_rank0(self, work: Callable, background: bool = False):
        """Run `work` on rank 0, and return its result (or raise its error) on every rank; other ranks get tensors on
        the meta device. `background`: use the background group, without a timeout."""
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
        """Wait, without a timeout, until the work of every rank is done. Ranks all-reduce every second meanwhile, so
        that a lost rank is still noticed. `background`: use the background group."""
        if self.ranks == 1 or self.alone:
            wait([work])
            return
        busy = torch.ones(1, device="cpu" if background else self.device)
        while busy.item():
            wait([work], min(HEARTBEAT, self.timeout / 4))
            dist.all_reduce(busy.fill_(not work.done()), group=self.other_group if background else None)

    def continue_alone(self) -> bool:
        """Let rank 0 continue without the others, which are lost or hang. Return False on other ranks, and if rank 0
        does not hold the whole state."""
        self.alone = self.is_rank0 and self.shards == 1
        return self.alone

    def distribute(self, batches: Iterable) -> Iterator[tuple]:
        """Distribute batches over ranks: yield (batch, 1), or (the first batch, 0) if this rank has none left but must
        join the collectives. Ranks vote between rounds."""
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
        """Return whether any rank voted for `name` at the last all-reduce; with one process, its vote now."""
        return self.votes.get(name, False) if self.ranks > 1 else self.own_votes[name]()

    def all_reduce_votes(self):
        """Vote between the all-reduces of steps, and act on signals."""
        if self.ranks > 1:
            votes = torch.tensor(self.cast_votes(), dtype=torch.float64, device=self.device)
            self.count_votes(self.sum(votes).tolist())
            self.check_signals()

    def cast_votes(self) -> list[float]:
        return [float(vote()) for vote in self.own_votes.values()]

    def count_votes(self, votes: list[float]):
        self.votes = {name: count > 0 for name, count in zip(self.own_votes, votes)}

    def targets_of_step(self) -> int:
        """Return the number of targets on all ranks in the next step. If a rank has an error instead of batches, all
        stop: that rank raises its error, the others LeftByPeer.

        The number comes from the all-reduce of the previous step, because the loss is divided by it; only the first
        step needs an all-reduce of its own."""
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
    """Agree on a prefix of store keys for these processes alone; raise RuntimeError after `timeout` seconds.

    torchrun's store survives restarts and keeps the addresses of dead ranks. Its restart count is local to a host, so
    it differs on a host that rejoined. Therefore rank 0 posts a random call, the others answer with random tokens, and
    rank 0 lists the tokens: an old call's list has none of the new ones."""
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
