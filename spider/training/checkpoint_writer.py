"""Write checkpoints in a thread beside the loop: `CheckpointWriter`; `write_durably` writes one, whole or not at
all."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from loguru import logger
from torch import Tensor
from torch.utils._pytree import tree_map_only

from spider import files
from spider.training.checkpoint_files import checkpoint_path, remove, set_aside
from spider.training.checkpoint_format import walk, write_archive
from spider.training.ranks import World
from spider.training.retention import SavedCheckpoint, retained
from spider.training.started_over import note_path
from spider.training.state_tensors import Chunk, ShardedRows, chunk_to_write, copy_to_host


class CheckpointWriter:
    """Writes checkpoints in a thread of its own, so that the loop waits for the copy out of device memory alone.

    A file under its final name is whole and durable. What fails (a full disk) is logged and tried again; the older
    files stay. `saved` are this run's checkpoints, of which `retained` chooses those to keep. Of several ranks the
    first one writes, and the others send it their rows; or, `sharded`, each writes its share, the first one the rest.
    """
    retry_after = 60.0                    # seconds from a failure to the next try

    def __init__(self, directory: Path, saved: list[SavedCheckpoint], keep_last: int, step: int = 0,
                 world: World | None = None, sharded: bool = False, keep_best: bool = False):
        self.directory, self.saved, self.keep_last, self.keep_best = directory, saved, keep_last, keep_best
        self.sharded, self.world = sharded, World() if world is None else world
        if sharded:
            from spider.training import sharded_checkpoint  # noqa: F401  # takes a second, which the loop has not
            self.world.background_group()
        self.step = step                  # of the newest state; that of the run's start is there already
        self.thread, self.copy = ThreadPoolExecutor(1), None
        self.writing = self.thread.submit(lambda: None)
        self.failed_at: float | None = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.thread.shutdown()

    def save(self, state: dict, before_rename: Callable):
        """Copy a state and begin to write it, once the write before it is done. Every rank calls it."""
        began = time.perf_counter()
        self.wait()
        if not self.world.is_rank0 and not self.sharded:
            for _, value, _ in walk(state):
                if isinstance(value, ShardedRows):
                    value.gather()
            self.step = state["step"]
            return
        if self.sharded:
            state = tree_map_only((Tensor, ShardedRows), self._chunk, state)
        self.copy = copy_to_host(state, self.copy)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()      # the copies have arrived
        self.failed_at, self.step = None, state["step"]
        self.writing = self.thread.submit(self._write, self.copy, before_rename, time.perf_counter() - began)

    def wait(self) -> bool:
        """Wait for the write under way on any rank; tell whether the last one here succeeded. Every rank calls it."""
        self.world.wait_for_all(self.writing)
        self.writing.result()
        return self.failed_at is None

    def holds(self, step: int) -> bool:
        """Wait for the write under way; tell whether the state of a step is saved. Every rank calls it."""
        saved = self.wait()
        return self.world.on_rank0(lambda: saved and self.step == step)

    def retry_is_due(self) -> bool:
        """Tell whether a save failed long enough ago to be tried again."""
        return self.failed_at is not None and time.monotonic() > self.failed_at + self.retry_after

    def _chunk(self, value: Tensor | ShardedRows) -> Chunk:
        return chunk_to_write(value, self.world.rank, self.world.ranks)

    def _write(self, state: dict, before_rename: Callable, in_loop: float):
        began = time.perf_counter()
        path = checkpoint_path(self.directory, state["step"], self.sharded)

        def make_room():
            before_rename()
            if os.path.lexists(path) and path not in [one.path for one in self.saved]:
                set_aside(path, state["lineage"])  # of a run before this one, which started over or went back
        try:
            write_durably(path, state, make_room, self.world if self.sharded else None)
        except OSError as fault:
            self.failed_at = time.monotonic()
            if self.world.is_rank0:
                logger.error(f"CHECKPOINT NOT SAVED: {path}: {fault.strerror or fault}; training continues, the older "
                             f"ones stay as they are, and it is tried again")
            return
        if self.world.is_rank0:
            logger.info(f"saved {path}: {1e3 * in_loop:.0f} ms of the loop, {time.perf_counter() - began:.1f} s beside "
                        f"it")
            self._prune(SavedCheckpoint(state["lineage"], state["step"], path, state["exploded"],
                                        state.get("val_loss")))

    def _prune(self, newest: SavedCheckpoint):
        """Delete what is needless now that there is a newer checkpoint."""
        others = [one for one in self.saved if one.step != newest.step]
        kept = retained([*others, newest], self.keep_last, self.keep_best)
        needless = [one.path for one in self.saved if one not in kept and one.path != newest.path]
        self.saved[:] = kept
        for path in (note_path(self.directory), *needless):
            try:
                remove(path)
            except OSError as fault:
                logger.warning(f"{path} stays: {fault.strerror}")


def write_durably(path: Path, state: dict, before_rename: Callable, world: World | None = None):
    """Write a state as one file, or sharded where there is a `world`, whole or not at all. Sharded, every rank of it
    calls this, with Chunks for tensors, and `before_rename` is called on the first one; OSError on all where one of
    them fails."""
    if world is not None:
        from spider.training import sharded_checkpoint
        sharded_checkpoint.save(path, state, before_rename, world)
        return
    with files.durable(path, "wb", before_rename) as file:
        write_archive(file, state)
