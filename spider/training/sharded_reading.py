"""Read a sharded checkpoint (`read_sharded`), a directory with a file per rank that sharded_checkpoint.py wrote.

Its .metadata, a pickle for torch.distributed.checkpoint, is only checksummed here. The offsets of each tensor's rows
are also in state.pt, a file with a checksum like any checkpoint.
"""

import hashlib
import io
import math
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from spider.errors import CheckpointError
from spider.files import is_count
from spider.training.checkpoint_files import INDEX
from spider.training.checkpoint_format import check_regular, check_seal, read_archive, reading, walk
from spider.training.state_tensors import RemoteTensor

SHARD = re.compile("__[0-9]+_[0-9]+[.]distcp|[.]metadata")


@dataclass
class StoredTensor(RemoteTensor):
    """A tensor in the files of a sharded checkpoint; every rank reads the rows that it needs."""
    directory: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: list[tuple[str, int, int, int, int]]  # file, offset, length, first row, rows; sorted by row

    def rows(self, first: int = 0, end: int | None = None) -> Tensor:
        """Read some rows, or all, into host memory; raise CheckpointError if they are damaged."""
        end = (self.shape or (1,))[0] if end is None else end
        if len(self.chunks) == 1 and (0, end - first) == (first, self.chunks[0][4]):
            return self._read(*self.chunks[0])
        out = torch.empty((end - first, *self.shape[1:]) if self.shape else (), dtype=self.dtype)
        for chunk in self.chunks:
            begin, count = chunk[3:]
            low, high = max(first, begin), min(end, begin + count)
            if low < high:
                rows = self._read(*chunk)
                (out[low - first:high - first] if self.shape else out).copy_(
                    rows[low - begin:high - begin] if self.shape else rows)
        return out

    def _read(self, name: str, offset: int, length: int, first: int, count: int) -> Tensor:
        path = self.directory / name
        if not path.exists():
            raise CheckpointError(f"{path} does not exist here: a sharded checkpoint must be on a disk that all ranks "
                                  f"share")
        with reading(path):
            with open(path, "rb") as file:
                file.seek(offset)
                rows = read_archive(io.BytesIO(file.read(length)), length)
            if type(rows) is not Tensor or rows.dtype != self.dtype or rows.shape != (
                    (count, *self.shape[1:]) if self.shape else ()):
                raise ValueError(f"the tensor at {offset} is not the one that {INDEX} lists")
        return rows


def read_sharded(path: Path, sealed: bool) -> dict:
    """Read the state of a sharded checkpoint, with StoredTensors. Raise ValueError unless all rows of each are there
    once and, if `sealed`, all files match their checksums."""
    index = path / INDEX
    check_regular(index)
    if sealed:
        check_seal(index)
    state = read_archive(index, index.stat().st_size)
    sums, table = (state.pop(name, None) for name in ("files", "parts")) if isinstance(state, dict) else (None, None)
    if not (isinstance(sums, dict) and all(type(name) is str and SHARD.fullmatch(name) and type(sums[name]) is str
                                           for name in sums) and isinstance(table, dict)):
        raise ValueError(f"{INDEX} has no valid list of files")
    for name in sums:
        if not (path / name).is_file():
            raise ValueError(f"{name} is missing, or not a regular file")
    if sealed:
        check_sums(path, sums)
    sizes = {name: (path / name).stat().st_size for name in sums}
    state = with_stored_tensors(state, (), path, table, sizes)
    lengths = (chunk[2] for _, value, _ in walk(state) if isinstance(value, StoredTensor) for chunk in value.chunks)
    if sum(lengths) > sum(sizes.values()):
        raise ValueError("its chunks overlap")
    return state


def with_stored_tensors(value, keys: tuple, path: Path, table: dict, sizes: dict[str, int]):
    """Replace the empty tensors of a nested state by StoredTensors, whose chunks `table` lists by name."""
    if isinstance(value, dict):
        return {key: with_stored_tensors(entry, (*keys, key), path, table, sizes) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(with_stored_tensors(entry, (*keys, i), path, table, sizes) for i, entry in enumerate(value))
    if not isinstance(value, Tensor):
        return value
    name = ".".join(map(str, keys))
    if name not in table:
        raise ValueError(f"{name}: its rows are missing")
    return stored_tensor(path, name, table.pop(name), value.dtype, sizes)


def stored_tensor(path: Path, name: str, entry: dict, dtype: torch.dtype, sizes: dict[str, int]) -> StoredTensor:
    """Make the tensor of an entry of the table; `sizes`: of the files. Raise ValueError for missing rows, or offsets
    beyond the end of a file."""
    shape, rows = tuple(entry["shape"]), entry["pieces"].tolist()
    if not all(map(is_count, shape)) or math.prod(max(1, n) for n in shape) >= 1 << 60:
        raise ValueError(f"{name}: not a valid shape")
    names, chunks, end, row_bytes = list(sizes), [], 0, math.prod(shape[1:]) * dtype.itemsize
    for file, offset, length, first, count in rows:
        if first != end or min(file, offset, count) < 0 or count * row_bytes > length or (
                offset + length > sizes[names[file]]):
            raise ValueError(f"{name}: its chunks overlap, or rows are missing")
        chunks.append((names[file], offset, length, first, count))
        end += count
    if not chunks or end != (shape or (1,))[0]:
        raise ValueError(f"{name}: rows are missing")
    return StoredTensor(path, shape, dtype, chunks)


def check_sums(path: Path, sums: dict[str, str]):
    """Raise ValueError if a file of a directory does not match its SHA-256 in `sums`."""
    with ThreadPoolExecutor(8) as threads:
        for name, sha256 in zip(sums, threads.map(lambda name: sha256_of(path / name), sums)):
            if sha256 != sums[name]:
                raise ValueError(f"{name} is truncated or altered: its checksum does not match")


def sha256_of(path: Path) -> str:
    """Compute the SHA-256 of a file."""
    sha256 = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            sha256.update(block)
    return sha256.hexdigest()
