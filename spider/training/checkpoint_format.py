"""The file format of checkpoints: write a file with its checksum, and read untrusted files safely.

A checkpoint file is torch.save's archive of tensors and plain values, followed by the SHA-256 of the rest, which
detects damage. `write_archive` writes it. `check_seal` and `read_archive` read it with `torch.load(weights_only=True)`,
inside `reading`, which turns any error into a CheckpointError. Both forms of a checkpoint, one file and a sharded
directory, consist of such files. `walk` lists all values of a state.
"""

import hashlib
import io
import mmap
import os
import pickletools
import re
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import torch
from loguru import logger
from torch import Tensor

from spider.errors import CheckpointError
from spider.files import is_count

# The comment at the end of the zip archive is SEAL and the SHA-256 of everything before it.
SEAL = b"spider sha256:"
PLAIN_END = b"PK\5\6", b"\0\0"            # first and last of the 22 bytes that end an archive without a comment


class HashingFile:
    """A binary file that computes its SHA-256 while it is written."""

    def __init__(self, file):
        self.file, self.sha256, self.fault = file, hashlib.sha256(), None

    def write(self, content) -> int:
        self.sha256.update(content)
        try:
            return self.file.write(content)
        except OSError as fault:          # torch.save hides it
            self.fault = fault
            raise

    def __getattr__(self, name: str):
        return getattr(self.file, name)


def write_archive(file: BinaryIO, state: dict):
    """Write a state and its checksum to a binary file; raise OSError if writing fails."""
    out = HashingFile(file)
    try:
        torch.save(state, out)
    except RuntimeError:
        raise out.fault or OSError("torch.save failed") from None
    comment = SEAL + out.sha256.hexdigest().encode()
    file.seek(-2, os.SEEK_CUR)            # the length of the comment, 0 so far
    file.write(len(comment).to_bytes(2, "little") + comment)


def check_seal(path: Path):
    """Raise ValueError if a file does not match its checksum; warn if it has none, as when another program saved it."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if (content[-22:-18], content[-2:]) == PLAIN_END:
            logger.warning(f"{path} has no checksum, since another program saved it: damage would go unnoticed")
            return
        length = len(SEAL) + 64
        with memoryview(content) as view, view[:-length - 2] as body:
            sha256 = hashlib.sha256(body)
        sha256.update(b"\0\0")
        if content[-length - 2:] != length.to_bytes(2, "little") + SEAL + sha256.hexdigest().encode():
            raise ValueError("truncated or altered: its checksum does not match")


def check_regular(path: Path):
    """Raise ValueError for a pipe, a device or a directory, since opening one may block forever."""
    if not path.is_file():
        path.stat()                       # raises FileNotFoundError if nothing is there
        raise ValueError("it is not a regular file")


@contextmanager
def reading(path: Path):
    """Turn any error inside, as a damaged or foreign file may cause, into a CheckpointError that names the file."""
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except Exception as fault:
        unsafe = re.search(r"Unsupported .*?(?= by default|[.] |\n|$)", str(fault))
        reason = unsafe[0] if unsafe else str(fault).partition("\n")[0] or type(fault).__name__
        raise CheckpointError(f"{path} is not a checkpoint that can be read safely: {reason}") from None


# ---------------------------------------------------------------------------------------------------------------------
# Reading untrusted files

# The globals in a Spider checkpoint's pickle: dicts, and dense tensors of these types. torch.load accepts more, such as
# bytearray and sparse tensors, where a number in the file can demand any amount of memory and time.
NAMES = {"torch._utils _rebuild_tensor_v2", "collections OrderedDict", "torch DoubleStorage", "torch FloatStorage",
         "torch HalfStorage", "torch BFloat16Storage", "torch LongStorage", "torch ByteStorage"}
MOST_VALUES, DEEPEST, LONGEST = 1 << 18, 16, 1 << 16    # values in a checkpoint, their depth, characters of a string


def read_archive(file: Path | io.BytesIO, size: int):
    """Read an archive of torch.save, tensors and plain values; tensors are mapped if `file` is a path. This executes
    nothing, and needs no more memory than the file's `size`. Raise ValueError for content that a run does not write."""
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
        if any(record.compress_type for record in records) or sum(record.file_size for record in records) > size:
            raise ValueError("its records are compressed or overlap")
        pickles = [record for record in records if record.filename.endswith(".pkl")]
        if sum(record.file_size for record in pickles) > 128 * MOST_VALUES:
            raise ValueError(f"more than {MOST_VALUES:,} values")
        names = {name for record in pickles for opcode, name, _ in pickletools.genops(archive.read(record))
                 if opcode.name == "GLOBAL"} - NAMES
    if names:
        raise ValueError(f"it contains {min(names)[:99].replace(' ', '.')}, which no Spider checkpoint does")
    if not (mapped := isinstance(file, Path)):
        file.seek(0)
    value = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    check_values(value, size)
    return value


def check_values(state, size: int):
    """Raise ValueError unless all values of a file of `size` bytes are plain (see is_plain), since kernels trust
    them."""
    total, storages = 0, set()
    for number, (path, value, container) in enumerate(walk(state)):
        if number > MOST_VALUES or len(path) > DEEPEST:
            raise ValueError(f"more than {MOST_VALUES:,} values, or nested deeper than {DEEPEST}")
        fault = None if is_plain(value) else f"a {type(value).__name__} that no run writes"
        if not fault and type(value) is Tensor and value.nbytes:
            storage, total = value.untyped_storage().data_ptr(), total + value.nbytes
            if storage in storages or total > size:
                fault = "shares its storage with another tensor"
            storages.add(storage)
        if not fault and path[:1] == ("optimizer_state_dict",):
            fault = optimizer_fault(path, value, container)
        if fault:
            raise ValueError(f"{'.'.join(map(str, path))}: {fault}")


def optimizer_fault(path: tuple, value, container) -> str | None:
    """Describe what is wrong with a value of an optimizer's state, or return None. Kernels rely on the dtypes; the only
    value that is not a tensor is the step count."""
    if type(value) is Tensor:
        dtype = torch.uint8 if path[-1] in ("state1", "state2") and "qmap1" in container else torch.float32
        return None if value.dtype == dtype else f"{value.dtype}, not {dtype}"
    of_parameter = path[2:3] == ("state",) and len(path) > 4 and not isinstance(value, dict)
    return "not a tensor" if of_parameter and not (path[-1] == "step" and is_count(value)) else None


def walk(value, path: tuple = (), container=None) -> Iterator[tuple]:
    """Yield a value and all nested values as (path of keys, value, container)."""
    yield path, value, container
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, entry in entries:
        yield from walk(entry, (*path, key), value)


def is_plain(value) -> bool:
    """Return whether a value is of a kind that a run writes: numbers and strings of sane size, dicts, lists, tuples,
    and dense CPU tensors, each in a storage of exactly its size."""
    if type(value) is Tensor:
        return (value.layout == torch.strided and value.device.type == "cpu" and value.is_contiguous()
                and value.untyped_storage().nbytes() == value.nbytes)
    if type(value) in (dict, OrderedDict):
        return all(type(key) in (int, str) and is_plain(key) for key in value)
    return (type(value) in (list, tuple, float, bool, type(None)) or type(value) is int and abs(value) < 1 << 63
            or type(value) is str and len(value) < LONGEST)
