"""The batches of a step, prefetched by a thread."""

import dataclasses
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from queue import SimpleQueue
from threading import Thread

import torch
from torch import Tensor

import tokenizer
from spider.data.loader import Loader
from spider.model.packing import document_cu_seqlens
from spider.training.plan import BatchShape, step_seed
from spider.training.progress import RunProgress
from spider.training.ranks import World


@dataclass
class Batch:
    """The sequences of a micro-step, with counts that are cheap to compute on the host before the copy."""
    ids: Tensor                           # [B, T] int64
    labels: Tensor                        # [B, T] int64, -100 is ignored
    noise_seed: int                       # of the first row's segments and dropout
    cu_seqlens: Tensor                    # int32 [documents + 1]
    targets: int                          # labels other than -100
    real: int                             # bytes that are not PAD

    @classmethod
    def of(cls, ids: Tensor, labels: Tensor, noise_seed: int) -> "Batch":
        """Make a batch on the host."""
        return cls(ids, labels, noise_seed, document_cu_seqlens(ids), int((labels != -100).sum()),
                   int((ids != tokenizer.PAD_ID).sum()))

    def to(self, device: torch.device) -> "Batch":
        if device.type == "cpu":
            return self
        moved = (t.pin_memory().to(device, non_blocking=True) for t in (self.ids, self.labels, self.cu_seqlens))
        return dataclasses.replace(self, **dict(zip(("ids", "labels", "cu_seqlens"), moved)))


def batches_of(loader: Loader, shape: BatchShape, seed: int, world: World, step: int, first: int) -> Iterable[Batch]:
    """Yield this rank's micro-batches of a step; `first` is the number of the step's first sequence."""
    noise = step_seed(seed, step, "noise")
    for micro_step in range(shape.grad_accum):
        ids, labels, _ = loader.micro_batch(first, micro_step, shape.micro_batch, world.rank, world.ranks)
        noise_seed = noise + (micro_step * world.ranks + world.rank) * shape.micro_batch
        yield Batch.of(ids, labels, noise_seed).to(world.device)


class Feed:
    """Provide this rank's micro-batches step by step; a thread prefetches those of the next step.

    The thread is a daemon, so that signals and the end of the process do not wait for a slow disk.
    """

    def __init__(self, loader: Loader, shape: BatchShape, seed: int, world: World, progress: RunProgress,
                 closing: ExitStack):
        self.loader, self.shape, self.seed, self.world = loader, shape, seed, world
        self.first, self.steps = progress.bytes_seen // shape.seq_len, count(progress.step)
        self.wanted, self.fetched, self.next, self.closed = SimpleQueue(), SimpleQueue(), None, False
        world.own_targets = self.own_targets
        self.thread = Thread(target=self._fetch_all, daemon=True)
        self.thread.start()
        self.wanted.put(True)
        closing.callback(self.close)

    def take(self) -> tuple[list[Batch], int, int]:
        """Return the next step's batches, the number of targets on all ranks, and the epoch of the step; start to fetch
        the step after it. An error on one rank stops all."""
        targets = self.world.targets_of_step()
        (batches, epoch), self.next = self.next, None
        self.wanted.put(True)
        return batches, targets, epoch

    def own_targets(self) -> tuple[int, BaseException | None]:
        """Wait for the next step's batches; return this rank's number of targets in them, and the error if there was
        one."""
        if self.next is None:
            self.next = self.fetched.get()
        if isinstance(self.next, BaseException):
            return 0, self.next
        return sum(batch.targets for batch in self.next[0]), None

    def close(self):
        self.closed = True
        self.wanted.put(False)
        self.thread.join(1.0)             # long enough, unless the disk hangs

    def _fetch_all(self):
        while self.wanted.get():
            try:
                self.fetched.put(self._fetch(next(self.steps), self.first))
            except BaseException as fault:
                self.fetched.put(fault)
            self.first += self.shape.sequences

    def _fetch(self, step: int, first: int) -> tuple[list[Batch], int]:
        out = []
        for batch in batches_of(self.loader, self.shape, self.seed, self.world, step, first):
            out.append(batch)
            if self.closed:
                break
        return out, self.loader.epoch(first)
