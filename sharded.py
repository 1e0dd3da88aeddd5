"""Writes a checkpoint in parts (--sharded_checkpoints): every rank its own, by torch.distributed.checkpoint.

spider-step{N}/ holds `__{rank}_0.distcp`, what each rank wrote; `.metadata`, a pickle, by which that library and all
that builds on it read them; and state.pt, a sealed checkpoint of plain values alone, with the SHA-256 of the other
files and the place of every tensor's rows in them. That one is what checkpoint.py reads. The directory gets its name
when all of it is on the disk: before that, it is not there.
"""

import os
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.futures import Future
from torch.utils._pytree import tree_map_only

import files
from checkpoint import PLAIN, Digested, nodes, put_directory_in_place, remove, write_checkpoint
from distributed import Share
from files import sync

# One process without a group is what it says it takes for granted.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")


def save(path: Path, state: dict, before_rename: Callable, group: dist.ProcessGroup | None):
    """Writes a state whose tensors are Shares; every rank of the group calls it, `before_rename` is the first one's.
    OSError on all ranks, and nothing at `path`, where one of them cannot write."""
    temporary, leads = path.with_name(f".{path.name}.tmp"), group is None or group.rank() == 0
    shares = {".".join(map(str, place)): (place, value) for place, value, _ in nodes(state) if isinstance(value, Share)}

    def finish(table: dict[str, dict], sums: dict[str, str]):
        if table.keys() != shares.keys():
            raise RuntimeError(f"ranks disagree on {min(table.keys() ^ shares.keys())}")
        plain = tree_map_only(Share, lambda share: torch.empty(0, dtype=share.dtype), state)
        with files.durable(temporary / PLAIN, "wb") as file:
            write_checkpoint(file, plain | dict(files=sums, parts=table))
        before_rename()
        put_directory_in_place(temporary, path)
        sync(path.parent)
    try:
        dcp.save(shares, storage_writer=Writer(temporary, finish), planner=Planner(), process_group=group,
                 no_dist=group is None)
    except CheckpointException as failed:
        rank, (fault, _) = min(failed.failures.items())
        if leads:
            remove(temporary)
        if not isinstance(fault, OSError):
            raise fault from None
        where = f"rank {rank}: " if group else ""
        raise OSError(fault.errno, f"{where}{fault.strerror or fault}") from None


class Planner(dcp.DefaultSavePlanner):
    """Has each rank write the Shares that it was given, and the library only number the pieces."""

    def __init__(self):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([item_of(name, share) for name, (_, share) in self.state_dict.items()
                              if share.rows is not None])
        return self.plan

    def create_global_plan(self, plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(plans)
        nested = {name: tuple(map(str, place)) for name, (place, _) in self.state_dict.items()}
        return plans, replace(metadata, planner_data=nested)  # by which others make nested dicts of it again

    def resolve_data(self, item: WriteItem) -> torch.Tensor:
        return self.state_dict[item.index.fqn][1].rows


def item_of(name: str, share: Share) -> WriteItem:
    offsets = torch.Size([share.first, *[0] * (len(share.shape) - 1)][:len(share.shape)])
    chunk = ChunkStorageMetadata(offsets, share.rows.shape)
    return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=TensorWriteData(
        chunk, TensorProperties(dtype=share.dtype), torch.Size(share.shape)))


class Writer(dcp.FileSystemWriter):
    """The library's, with the SHA-256 of each file; `finish_with` is called on the first rank, when all is written,
    with the pieces of every tensor and these sums, and what it raises is raised on all ranks."""

    def __init__(self, directory: Path, finish_with: Callable):
        super().__init__(directory, per_thread_copy_ahead=0)  # the copies are in host memory already
        self.fs, self.finish_with = Files(), finish_with

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan                       # the library makes the directory here, which the first rank has yet to remove

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        remove(self.path)                 # by the first rank, before any goes on, and all learn of it if it fails
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: Planner) -> Future:
        self.fs.mkdir(self.path)
        try:
            results = super().write_data(plan, planner).wait()
        except RuntimeError:
            raise self.fs.fault or OSError("torch.save failed") from None
        done = Future()
        done.set_result([*results, self.fs.sums])
        return done

    def finish(self, metadata: Metadata, results: list[list]):
        sums = {name: sha256 for result in results for name, sha256 in result.pop().items()}
        super().finish(metadata, results)
        sums |= self.fs.sums
        sync(self.path)
        numbers = {name: number for number, name in enumerate(sorted(sums))}
        pieces = {name: [] for name in metadata.state_dict_metadata}
        for name in numbers:
            if not (self.path / name).is_file():
                raise OSError(f"{name} is not there, though a rank wrote it: --ckpt_dir has to be on a disk that all "
                              f"ranks share")
        for one in (one for result in results for one in result):
            where = one.storage_data
            chunk = metadata.state_dict_metadata[one.index.fqn].chunks[one.index.index]
            first, rows = (chunk.offsets[0], chunk.sizes[0]) if chunk.sizes else (0, 1)
            pieces[one.index.fqn].append([numbers[where.relative_path], where.offset, where.length, first, rows])
        self.finish_with({name: dict(shape=list(metadata.state_dict_metadata[name].size),
                                     pieces=torch.tensor(sorted(found, key=lambda piece: piece[3])))
                          for name, found in pieces.items()}, {name: sums[name] for name in numbers})


class Files(FileSystem):
    """Files whose SHA-256 is worked out while they are written."""

    def __init__(self):
        self.written: dict[str, Digested] = {}

    @contextmanager
    def create_stream(self, path: Path, mode: str):
        with files.open_own(Path(path), mode) as file:
            self.written[Path(path).name.removesuffix(".tmp")] = out = Digested(file)
            yield out
            if not file.closed:           # as .metadata, which the library has synced while it was in a buffer
                file.flush()
                os.fsync(file.fileno())

    @property
    def sums(self) -> dict[str, str]:
        return {name: file.sha256.hexdigest() for name, file in self.written.items()}

    @property
    def fault(self) -> OSError | None:
        return next((file.fault for file in self.written.values() if file.fault), None)
