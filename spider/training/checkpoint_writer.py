"""Write checkpoints in a background thread (`CheckpointWriter`); `write_durably` writes one, atomically."""

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
    """Write checkpoints in a background thread, so that the loop only waits for the copy out of device memory.

    A file under its final name is complete and durable. A failure (a full disk) is logged and retried; older files
    stay. `saved`: this run's checkpoints, of which `retained` chooses those to keep. With several ranks, rank 0 writes
    and the others send it their rows; if `sharded`, each rank writes its share, and rank 0 the rest.
    """
    retry_after = 60.0                    # seconds between a failure and the next attempt

    def __init__(self, directory: Path, saved: list[SavedCheckpoint], keep_last: int, step: int = 0,
                 world: World | None = None, sharded: bool = False, keep_best: bool = False):
        self.directory, self.saved, self.keep_last, self.keep_best = directory, saved, keep_last, keep_best
        self.sharded, self.world = sharded, World() if world is None else world
        if sharded:
            from spider.training import sharded_checkpoint  # noqa: F401  # takes a second, so not in the loop
            self.world.background_group()
        self.step = step                  # of the newest saved state
        self.thread, self.copy = ThreadPoolExecutor(1), None
        self.writing = self.thread.submit(lambda: None)
        self.failed_at: float | None = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.thread.shutdown()

    def save(self, state: dict, before_rename: Callable):
        """Wait for the previous write, copy a state, and start to write it. Every rank calls it."""
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
            torch.cuda.synchronize()      # until the copies are complete
        self.failed_at, self.step = None, state["step"]
        self.writing = self.thread.submit(self._write, self.copy, before_rename, time.perf_counter() - began)

    def wait(self) -> bool:
        """Wait for the current write on all ranks; return whether the last one here succeeded. Every rank calls it."""
        self.world.wait_for_all(self.writing)
        self.writing.result()
        return self.failed_at is None

    def holds(self, step: int) -> bool:
        """Wait for the current write; return whether the state of a step is saved. Every rank calls it."""
        saved = self.wait()
        return self.world.on_rank0(lambda: saved and self.step == step)

    def retry_is_due(self) -> bool:
        """Return whether it is time to retry a failed save."""
        return self.failed_at is not None and time.monotonic() > self.failed_at + self.retry_after

    def _chunk(self, value: Tensor | ShardedRows) -> Chunk:
        return chunk_to_write(value, self.world.rank, self.world.ranks)

    def _write(self, state: dict, before_rename: Callable, in_loop: float):
        began = time.perf_counter()
        path = checkpoint_path(self.directory, state["step"], self.sharded)

        def make_room():
            before_rename()
            if os.path.lexists(path) and path not in [one.path for one in self.saved]:
                set_aside(path, state["lineage"])  # a checkpoint of an earlier run
        try:
            write_durably(path, state, make_room, self.world if self.sharded else None)
        except OSError as fault:
            self.failed_at = time.monotonic()
            if self.world.is_rank0:
                logger.error(f"CHECKPOINT NOT SAVED: {path}: {fault.strerror or fault}; older checkpoints are intact; "
                             f"training continues and will retry")
            return
        if self.world.is_rank0:
            logger.info(f"saved {path}: {1e3 * in_loop:.0f} ms in the loop, {time.perf_counter() - began:.1f} s in the "
                        f"background")
            self._prune(SavedCheckpoint(state["lineage"], state["step"], path, state["exploded"],
                                        state.get("val_loss")))

    def _prune(self, newest: SavedCheckpoint):
        """Delete the checkpoints that `newest` makes obsolete."""
        others = [one for one in self.saved if one.step != newest.step]
        kept = retained([*others, newest], self.keep_last, self.keep_best)
        obsolete = [one.path for one in self.saved if one not in kept and one.path != newest.path]
        self.saved[:] = kept
        for path in (note_path(self.directory), *obsolete):
            try:
                remove(path)
            except OSError as fault:
                logger.warning(f"{path} cannot be deleted: {fault.strerror}")


def write_durably(path: Path, state: dict, before_rename: Callable, world: World | None = None):
    """Write a state atomically, as one file or, given a `world`, sharded. Then every rank calls this with Chunks for
    tensors, rank 0 calls `before_rename`, and if one rank fails, all raise OSError."""
    if world is not None:
        from spider.training import sharded_checkpoint
        sharded_checkpoint.save(path, state, before_rename, world)
        return
    with files.durable(path, "wb", before_rename) as file:
        write_archive(file, state)
