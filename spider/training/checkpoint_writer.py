"""Write checkpoints in a thread beside the loop."""

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from loguru import logger
from torch import Tensor
from torch.utils._pytree import tree_map_only

from spider import console, errors, files, flags
from spider.errors import CheckpointError
from spider.training.checkpoint import load_checkpoint, nodes, remove, whole, write_checkpoint
from spider.training.checkpoint_files import STARTED_OVER, Found, lowest, set_aside
from spider.training.ranks import World
from spider.training.state_tensors import Chunk, ShardedRows, chunk_to_write, copy_to_host


class CheckpointWriter:
    """Writes checkpoints in a thread of its own, so that the loop waits for the copy out of device memory alone.

    A file under its final name is whole and durable. What fails (a full disk) is said and tried again; the older files
    stay. `kept` are this run's checkpoints: the newest `keep_last` of them, and the newest two that had not exploded:
    two, since the update after the last such loss may be the one that ruined the weights; with `keep_best` the one of
    the lowest validation loss as well. Of several ranks the first
    one writes, and the others send it their rows; or, `in_parts`, each writes its share, the first one the rest.
    """
    retry_after = 60.0                    # seconds from a failure to the next try

    def __init__(self, directory: Path, kept: list[Found], keep_last: int, step: int = 0, world: World | None = None,
                 in_parts: bool = False, keep_best: bool = False):
        self.directory, self.kept, self.keep_last, self.in_parts = directory, kept, keep_last, in_parts
        self.keep_best = keep_best
        self.world = World() if world is None else world
        if in_parts:
            from spider.training import sharded_checkpoint  # noqa: F401  # takes a second, which is not to be one of the loop's
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
        """Copies a state and starts to write it, once the write before it is done. Every rank calls it."""
        began = time.perf_counter()
        self.wait()
        if not self.world.is_rank0 and not self.in_parts:
            for _, value, _ in nodes(state):
                if isinstance(value, ShardedRows):
                    value.gather()
            self.step = state["step"]
            return
        if self.in_parts:
            state = tree_map_only((Tensor, ShardedRows), self._chunk, state)
        self.copy = copy_to_host(state, self.copy)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()      # the copies have arrived
        self.failed_at, self.step = None, state["step"]
        self.writing = self.thread.submit(self._write, self.copy, before_rename, time.perf_counter() - began)

    def _chunk(self, value: Tensor | ShardedRows) -> Chunk:
        return chunk_to_write(value, self.world.rank, self.world.ranks)

    def wait(self) -> bool:
        """Waits for the write under way on any rank; whether the last one here succeeded. Every rank calls it."""
        self.world.wait_for_all(self.writing)
        self.writing.result()
        return self.failed_at is None

    def holds(self, step: int) -> bool:
        """Waits for the write under way; whether the state of a step is saved. Every rank calls it."""
        saved = self.wait()
        return self.world.on_rank0(lambda: saved and self.step == step)

    def retry_is_due(self) -> bool:
        return self.failed_at is not None and time.monotonic() > self.failed_at + self.retry_after

    def _write(self, state: dict, before_rename: Callable, in_loop: float):
        began = time.perf_counter()
        path = self.directory / f"spider-step{state['step']}{'' if self.in_parts else '.pt'}"

        def make_room():
            before_rename()
            if os.path.lexists(path) and path not in [old.path for old in self.kept]:
                set_aside(path, state["lineage"])  # of a run before this one, which started over or went back
        try:
            write_durably(path, state, make_room, self.world if self.in_parts else None)
        except OSError as fault:
            self.failed_at = time.monotonic()
            if self.world.is_rank0:
                logger.error(f"CHECKPOINT NOT SAVED: {path}: {fault.strerror or fault}; training goes on, the older "
                             f"ones stay as they are, and it is tried again")
            return
        if not self.world.is_rank0:
            return
        logger.info(f"saved {path}: {1e3 * in_loop:.0f} ms of the loop, {time.perf_counter() - began:.1f} s beside it")
        replaced = [old for old in self.kept if old.step == state["step"] and old.path != path]  # in the other form
        self.kept[:] = [old for old in self.kept if old.step != state["step"]] + [
            Found(state["lineage"], state["step"], path, state["exploded"], state.get("val_loss"))]
        sound = [old for old in self.kept if not old.exploded][-2:] + [lowest(self.kept)] * self.keep_best
        pruned = [old for old in self.kept[:-self.keep_last] if old not in sound]
        self.kept[:] = [old for old in self.kept if old not in pruned]
        for needless in (self.directory / STARTED_OVER, *(old.path for old in pruned + replaced)):
            try:
                remove(needless)
            except OSError as fault:
                logger.warning(f"{needless} stays: {fault.strerror}")


def write_durably(path: Path, state: dict, before_rename: Callable, world: World | None):
    """Writes a state as one file, or in parts where there is a `world`, whole or not at all. In parts every rank of it
    calls it, with Shares for tensors, and `before_rename` is called on the first one; OSError on all where one of them
    fails."""
    if world is not None:
        from spider.training import sharded_checkpoint  # which writes by what is here
        sharded_checkpoint.save(path, state, before_rename, world)
        return
    with files.durable(path, "wb", before_rename) as file:
        write_checkpoint(file, state)


def convert(source: Path, target: Path):
    """Writes a checkpoint again: into parts, or, where the name ends in .pt, into one file. It needs no other process,
    and of memory at most a whole state. CheckpointError where there is none, or something at `target` already."""
    if os.path.lexists(target):
        raise CheckpointError(f"{target} is there already: name another")
    state, world = load_checkpoint(source, mapped=True), World({}) if target.suffix != ".pt" else None
    if "optimizer_state_dict" not in state:
        raise CheckpointError(f"{source} has weights alone: train.py --resume --reset_steps takes it as it is")
    state = whole(state)
    if world is not None:
        state = tree_map_only(Tensor, lambda tensor: chunk_to_write(tensor, 0, 1), state)
    try:
        write_durably(target, state, lambda: None, world)
    except OSError as fault:
        raise CheckpointError(f"{target}: {fault.strerror or fault}") from None
    print(console.one_line(f"{target}: step {state['step']}, as {source} has it"))


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0; 2 with a line on stderr; 130 when interrupted, with nothing written."""
    parser = flags.Parser(description=__doc__.partition("\n")[0])
    command = parser.add_subparsers(required=True, metavar="{convert}").add_parser(
        "convert", help="write a checkpoint in the other form: DST.pt is one file, any other DST a directory of parts")
    command.add_argument("source", metavar="SRC", type=flags.path_name)
    command.add_argument("target", metavar="DST", type=flags.path_name)
    status = 2
    try:
        args = parser.parse_args(argv)
        convert(Path(args.source), Path(args.target))
        return 0
    except (CheckpointError, errors.DataError) as fault:
        line = str(fault)
    except KeyboardInterrupt:
        line, status = "interrupted; nothing was written", 130
    print(f"checkpoint.py: error: {console.one_line(line)}", file=sys.stderr)
    return status
