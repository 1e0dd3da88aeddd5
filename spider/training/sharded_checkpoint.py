"""Write a sharded checkpoint (--sharded_checkpoints) by torch.distributed.checkpoint: every rank writes its rows
(`save`).

The directory spider-step{N}/ holds
- `__{rank}_0.distcp`, the rows that a rank wrote,
- `.metadata`, a pickle by which torch.distributed.checkpoint reads them,
- state.pt, a checkpoint of plain values, with the SHA-256 of the other files, and the file and offset of every tensor's
  rows; sharded_reading.py reads this.
It gets its name when all of it is on disk.
"""

import os
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.futures import Future
from torch.utils._pytree import tree_map_only

from spider import files
from spider.files import sync
from spider.training.checkpoint_files import INDEX, remove, replace_directory
from spider.training.checkpoint_format import HashingFile, walk, write_archive
from spider.training.heartbeat import in_background
from spider.training.ranks import World
from spider.training.state_tensors import Chunk

# The library warns if there is no process group, which is the normal case for one process.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")


def save(path: Path, state: dict, before_rename: Callable, world: World):
    """Write a state whose tensors are Chunks; every rank calls it. Rank 0 calls `before_rename` before the directory
    gets its name. If a rank cannot write, raise OSError on all ranks and leave `path` unchanged."""
    temporary, group = path.with_name(f".{path.name}.tmp"), world.background_group()
    chunks = {".".join(map(str, keys)): (keys, value) for keys, value, _ in walk(state) if isinstance(value, Chunk)}
    writer = Writer(temporary, world)

    def finish():
        table, sums = writer.table_and_sums()
        if table.keys() != chunks.keys():
            raise RuntimeError(f"ranks disagree on {min(table.keys() ^ chunks.keys())}")
        plain = tree_map_only(Chunk, lambda chunk: torch.empty(0, dtype=chunk.dtype), state)
        with files.durable(temporary / INDEX, "wb") as file:
            write_archive(file, plain | dict(files=sums, parts=table))
        before_rename()
        replace_directory(temporary, path)
        sync(path.parent)
    try:
        dcp.save(chunks, storage_writer=writer, planner=Planner(), process_group=group, no_dist=group is None)
        world.on_rank0(finish, background=group is not None)
    except (CheckpointException, OSError) as failed:
        rank, (fault, _) = min(getattr(failed, "failures", {0: (failed, None)}).items())
        if world.is_rank0:
            remove(temporary)
        if not isinstance(fault, OSError):
            raise fault from None
        where = f"rank {rank}: " if group else ""
        raise OSError(fault.errno, f"{where}{fault.strerror or fault}") from None


class Planner(dcp.DefaultSavePlanner):
    """Plan that each rank writes its own Chunks; the library only numbers them."""

    def __init__(self):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([write_item(name, chunk) for name, (_, chunk) in self.state_dict.items()
                              if chunk.local is not None])
        return self.plan

    def create_global_plan(self, plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(plans)
        nested = {name: tuple(map(str, keys)) for name, (keys, _) in self.state_dict.items()}
        return plans, replace(metadata, planner_data=nested)  # lets other programs restore nested dicts

    def resolve_data(self, item: WriteItem) -> torch.Tensor:
        return self.state_dict[item.index.fqn][1].local


def write_item(name: str, chunk: Chunk) -> WriteItem:
    offsets = torch.Size([chunk.first, *[0] * (len(chunk.shape) - 1)][:len(chunk.shape)])
    stored = ChunkStorageMetadata(offsets, chunk.local.shape)
    return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=TensorWriteData(
        stored, TensorProperties(dtype=chunk.dtype), torch.Size(chunk.shape)))


class Writer(dcp.FileSystemWriter):
    """The library's writer, plus the SHA-256 of each file. It waits for slow ranks outside the library's collectives,
    which would time out: `write_data` returns when all have written, and `table_and_sums` does the work of
    `finish`."""

    def __init__(self, directory: Path, world: World):
        super().__init__(directory, per_thread_copy_ahead=0)  # chunks are already in host memory
        self.fs, self.world = Files(), world

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan                       # the library would create the directory, which rank 0 still has to remove

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        remove(self.path)                 # on rank 0, before any rank writes; all ranks see a failure
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: Planner) -> Future:
        def write():
            self.fs.mkdir(self.path)
            return super(Writer, self).write_data(plan, planner).wait()
        writing = in_background(write)
        self.world.wait_for_all(writing, background=True)
        try:
            results = writing.result()
        except RuntimeError:
            raise self.fs.fault or OSError("torch.save failed") from None
        done = Future()
        done.set_result([*results, self.fs.sums])
        return done

    def finish(self, metadata: Metadata, results: list[list]):
        self.written = metadata, results

    def table_and_sums(self) -> tuple[dict[str, dict], dict[str, str]]:
        """Write the metadata, on rank 0 after all have written; return the chunks of every tensor, and the SHA-256
        sums."""
        metadata, results = self.written
        sums = {name: sha256 for result in results for name, sha256 in result.pop().items()}
        super().finish(metadata, results)
        sums |= self.fs.sums
        sync(self.path)
        numbers = {name: number for number, name in enumerate(sorted(sums))}
        pieces = {name: [] for name in metadata.state_dict_metadata}
        for name in numbers:
            if not (self.path / name).is_file():
                raise OSError(f"{name} is missing, though a rank wrote it: --ckpt_dir must be on a disk that all ranks "
                              f"share")
        for one in (one for result in results for one in result):
            where = one.storage_data
            chunk = metadata.state_dict_metadata[one.index.fqn].chunks[one.index.index]
            first, rows = (chunk.offsets[0], chunk.sizes[0]) if chunk.sizes else (0, 1)
            pieces[one.index.fqn].append([numbers[where.relative_path], where.offset, where.length, first, rows])
        return ({name: dict(shape=list(metadata.state_dict_metadata[name].size),
                            pieces=torch.tensor(sorted(found, key=lambda piece: piece[3])))
                 for name, found in pieces.items()}, {name: sums[name] for name in numbers})


class Files(FileSystem):
    """A file system that computes the SHA-256 of files while they are written."""

    def __init__(self):
        self.written: dict[str, HashingFile] = {}

    @contextmanager
    def create_stream(self, path: Path, mode: str):
        with files.open_own(Path(path), mode) as file:
            self.written[Path(path).name.removesuffix(".tmp")] = out = HashingFile(file)
            yield out
            if not file.closed:           # .metadata: the library synced it before the buffer was flushed
                file.flush()
                os.fsync(file.fileno())

    @property
    def sums(self) -> dict[str, str]:
        return {name: file.sha256.hexdigest() for name, file in self.written.items()}

    @property
    def fault(self) -> OSError | None:
        return next((file.fault for file in self.written.values() if file.fault), None)
