"""What survives a kill: checkpoints that are whole or not there, metrics.jsonl beside them.

    python checkpoint.py convert SRC DST  # spider-step100.pt into a directory of parts, or such a directory into a file

A checkpoint is torch.save's archive of tensors and plain values, read by `torch.load(weights_only=True)` and nothing
else. Its end holds the SHA-256 of the rest, so that an altered byte is noticed. A thread of its own writes it. In parts
(--sharded_checkpoints, see sharded.py) it is a directory of such archives, a file of them for each rank that wrote.
"""

import ctypes
import hashlib
import io
import math
import mmap
import os
import pickletools
import re
import shutil
import zipfile
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from loguru import logger
from torch import Tensor
from torch.utils._pytree import tree_map_only

from spider.errors import CheckpointError
from spider.files import is_count
from spider.model.config import MAX_LOOPS, PRESETS, SpiderConfig
from spider.training.state_tensors import RemoteTensor, copy_to_host

# A checkpoint is torch.save's zip archive whose comment, at the very end, is this and the SHA-256 of all before it.
SEAL = b"spider sha256:"
PLAIN_END = b"PK\5\6", b"\0\0"          # the 22 bytes that end an archive without a comment, begin and end so


class Digested:
    """A binary file whose SHA-256 is worked out while it is written."""

    def __init__(self, file):
        self.file, self.sha256, self.fault = file, hashlib.sha256(), None

    def write(self, part) -> int:
        self.sha256.update(part)
        try:
            return self.file.write(part)
        except OSError as fault:          # which torch.save would hide
            self.fault = fault
            raise

    def __getattr__(self, name: str):
        return getattr(self.file, name)


def write_checkpoint(file, state: dict):
    """Writes a state and its seal to a binary file; OSError where the file cannot take it."""
    out = Digested(file)
    try:
        torch.save(state, out)
    except RuntimeError:
        raise out.fault or OSError("torch.save failed") from None
    comment = SEAL + out.sha256.hexdigest().encode()
    file.seek(-2, os.SEEK_CUR)            # the length of the comment, 0 so far
    file.write(len(comment).to_bytes(2, "little") + comment)


def check_seal(path: Path):
    """ValueError unless a file is as it was written, to the byte; one that another program saved has no seal."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if (content[-22:-18], content[-2:]) == PLAIN_END:
            logger.warning(f"{path} has no checksum: another program saved it, nothing says whether it is intact")
            return
        length = len(SEAL) + 64
        with memoryview(content) as view, view[:-length - 2] as body:
            sha256 = hashlib.sha256(body)
        sha256.update(b"\0\0")
        if content[-length - 2:] != length.to_bytes(2, "little") + SEAL + sha256.hexdigest().encode():
            raise ValueError("cut off or altered: its checksum does not fit")


# What a Spider checkpoint's pickle names: dicts, and plain tensors of these types. torch.load takes more, bytearray and
# sparse tensors among it, which need as much memory and time as a number in the file asks for.
NAMES = {"torch._utils _rebuild_tensor_v2", "collections OrderedDict", "torch DoubleStorage", "torch FloatStorage",
         "torch HalfStorage", "torch BFloat16Storage", "torch LongStorage", "torch ByteStorage"}
MOST_VALUES, DEEPEST, LONGEST = 1 << 18, 16, 1 << 16    # values in a checkpoint, their depth, characters of a string


def read_state(path: Path, sealed: bool) -> dict:
    """Reads a checkpoint whose tensors stay in the file; nothing in it is executed, and nothing takes more memory to
    read than the file has bytes. CheckpointError unless it is a regular file of plain values, as a run writes them, or
    such a directory of parts; `sealed`: and unaltered."""
    with reading(path):
        file = path / PLAIN if is_in_parts(path) else path
        check_regular(file)
        if sealed:
            check_seal(file)
        state = read_archive(file, file.stat().st_size)
        if file is not path:
            state = with_pieces(path, state, sealed)
    check_state(path, state)
    return state


def read_archive(file: Path | io.BytesIO, size: int):
    """What torch.save wrote, tensors and plain values; of a path, its tensors stay in the file. Nothing of it is
    executed. ValueError unless the `size` bytes are as a run writes them."""
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
        if any(record.compress_type for record in records) or sum(record.file_size for record in records) > size:
            raise ValueError("its records are compressed, or lie over one another")
        pickles = [record for record in records if record.filename.endswith(".pkl")]
        if sum(record.file_size for record in pickles) > 128 * MOST_VALUES:
            raise ValueError(f"more than {MOST_VALUES:,} values")
        names = {name for record in pickles for opcode, name, _ in pickletools.genops(archive.read(record))
                 if opcode.name == "GLOBAL"} - NAMES
    if names:
        raise ValueError(f"it names {min(names)[:99].replace(' ', '.')}, which no Spider checkpoint does")
    if not (mapped := isinstance(file, Path)):
        file.seek(0)
    value = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    check_values(value, size)
    return value


def check_regular(path: Path):
    """ValueError where a path is that of a pipe, a device or a directory: to open one may take for ever."""
    if not path.is_file():
        path.stat()                       # where there is nothing, an error of its own
        raise ValueError("it is no regular file")


def check_values(state, size: int):
    """ValueError unless all that a file of `size` bytes holds is plain (see is_plain): kernels trust its tensors."""
    total, storages = 0, set()
    for number, (place, value, inside) in enumerate(nodes(state)):
        if number > MOST_VALUES or len(place) > DEEPEST:
            raise ValueError(f"more than {MOST_VALUES:,} values, or more than {DEEPEST} inside one another")
        fault = None if is_plain(value) else f"not a {type(value).__name__} as a run writes it"
        if not fault and type(value) is Tensor and value.nbytes:
            storage, total = value.untyped_storage().data_ptr(), total + value.nbytes
            if storage in storages or total > size:
                fault = "shares its storage with another tensor"
            storages.add(storage)
        if not fault and place[:1] == ("optimizer_state_dict",):
            fault = optimizer_fault(place, value, inside)
        if fault:
            raise ValueError(f"{'.'.join(map(str, place))}: {fault}")


def optimizer_fault(place: tuple, value, inside) -> str | None:
    """What is wrong with a value of an optimizer's state: kernels take for granted of which type each tensor is, and
    what is no tensor there counts steps."""
    if type(value) is Tensor:
        dtype = torch.uint8 if place[-1] in ("state1", "state2") and "qmap1" in inside else torch.float32
        return None if value.dtype == dtype else f"{value.dtype}, not {dtype}"
    of_parameter = place[2:3] == ("state",) and len(place) > 4 and not isinstance(value, dict)
    return "no tensor" if of_parameter and not (place[-1] == "step" and is_count(value)) else None


def nodes(value, place: tuple = (), inside=None):
    """(place, value, what it is in) of a value and of all below it, at any depth."""
    yield place, value, inside
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, part in parts:
        yield from nodes(part, (*place, key), value)


def is_plain(value) -> bool:
    """Whether a value is of the kinds that a run writes: numbers and strings of sane size, dicts, lists and tuples, and
    dense tensors in this process's memory, each in a storage as large as its shape."""
    if type(value) is Tensor:
        return (value.layout == torch.strided and value.device.type == "cpu" and value.is_contiguous()
                and value.untyped_storage().nbytes() == value.nbytes)
    if type(value) in (dict, OrderedDict):
        return all(type(key) in (int, str) and is_plain(key) for key in value)
    return (type(value) in (list, tuple, float, bool, type(None)) or type(value) is int and abs(value) < 1 << 63
            or type(value) is str and len(value) < LONGEST)


# ---------------------------------------------------------------------------------------------------------------------
# In parts: a directory that sharded.py wrote. Of its .metadata, a pickle that torch.distributed.checkpoint would read,
# only the checksum is looked at here: where each tensor's rows lie stands in state.pt as well.

PLAIN = "state.pt"                        # a state with empty tensors, and where their rows are: sealed, it seals all
PART = re.compile("__[0-9]+_[0-9]+[.]distcp|[.]metadata")


def is_in_parts(path: Path) -> bool:
    return (path / PLAIN).is_file()


@dataclass
class Pieces(RemoteTensor):
    """A tensor in the files of a checkpoint in parts."""
    directory: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[tuple[str, int, int, int, int]]  # file, offset, length, first row, rows, in the order of rows

    def rows(self, first: int = 0, end: int | None = None) -> Tensor:
        """Some rows, in host memory; CheckpointError where they are not as a run writes them."""
        end = (self.shape or (1,))[0] if end is None else end
        if len(self.pieces) == 1 and (0, end - first) == (first, self.pieces[0][4]):
            return self._read(*self.pieces[0])
        out = torch.empty((end - first, *self.shape[1:]) if self.shape else (), dtype=self.dtype)
        for piece in self.pieces:
            begin, count = piece[3:]
            low, high = max(first, begin), min(end, begin + count)
            if low < high:
                part = self._read(*piece)
                (out[low - first:high - first] if self.shape else out).copy_(
                    part[low - begin:high - begin] if self.shape else part)
        return out

    def _read(self, name: str, offset: int, length: int, first: int, count: int) -> Tensor:
        path = self.directory / name
        if not path.exists():
            raise CheckpointError(f"{path} does not exist here: every rank reads a checkpoint in parts, which has to "
                                  f"lie on a disk that all of them share")
        with reading(path):
            with open(path, "rb") as file:
                file.seek(offset)
                part = read_archive(io.BytesIO(file.read(length)), length)
            if type(part) is not Tensor or part.dtype != self.dtype or part.shape != (
                    (count, *self.shape[1:]) if self.shape else ()):
                raise ValueError(f"at {offset} there is another tensor than {PLAIN} says")
        return part


def with_pieces(path: Path, state, sealed: bool) -> dict:
    """A state as it was before its tensors were laid down in parts; ValueError unless each has all of its rows there,
    once, and, `sealed`, all files are as they were written."""
    sums, table = state.pop("files", None), state.pop("parts", None)
    if not (is_flat(sums) and all(PART.fullmatch(name) and type(sums[name]) is str for name in sums)
            and isinstance(table, dict)):
        raise ValueError(f"{PLAIN} does not list its files as a run does")
    for name in sums:
        if not (path / name).is_file():
            raise ValueError(f"{name} is missing, or no regular file")
    if sealed:
        with ThreadPoolExecutor(8) as threads:
            for name, sha256 in zip(sums, threads.map(lambda name: sha256_of(path / name), sums)):
                if sha256 != sums[name]:
                    raise ValueError(f"{name} is cut off or altered: its checksum does not fit")
    names = list(sums)
    sizes = {name: (path / name).stat().st_size for name in names}
    lengths = 0

    def pieces(place: tuple, value):
        nonlocal lengths
        name = ".".join(map(str, place))
        if isinstance(value, dict):
            return {key: pieces((*place, key), part) for key, part in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(pieces((*place, i), part) for i, part in enumerate(value))
        if not isinstance(value, Tensor):
            return value
        if name not in table:
            raise ValueError(f"{name}: its rows are missing")
        entry = table.pop(name)
        shape, rows = tuple(entry["shape"]), entry["pieces"].tolist()
        if not all(map(is_count, shape)) or math.prod(max(1, n) for n in shape) >= 1 << 60:
            raise ValueError(f"{name}: no shape of a tensor")
        found, end, row = [], 0, math.prod(shape[1:]) * value.itemsize
        for file, offset, length, first, count in rows:
            lengths += length
            if first != end or min(file, offset, count) < 0 or count * row > length or (
                    offset + length > sizes[names[file]]):
                raise ValueError(f"{name}: its pieces overlap, or rows are missing")
            found.append((names[file], offset, length, first, count))
            end += count
        if not found or end != (shape or (1,))[0]:
            raise ValueError(f"{name}: rows are missing")
        return Pieces(path, shape, value.dtype, found)
    state = pieces((), state)
    if lengths > sum(sizes.values()):
        raise ValueError("its pieces lie over one another")
    return state


def whole(state):
    """A state with tensors where it had them in parts; others stay where they are."""
    return tree_map_only(RemoteTensor, lambda value: value.rows(), state)


def sha256_of(path: Path) -> str:
    sha256 = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            sha256.update(part)
    return sha256.hexdigest()


def load_checkpoint(path: Path, sealed: bool = True, mapped: bool = False) -> dict:
    """Reads a checkpoint, weights only: nothing in the file is executed. `mapped`: its tensors stay in the file, those
    of one in parts as RemoteTensor.

    CheckpointError if it is none, or altered, or one whose `cfg` and weights make no Spider. `sealed` false: the
    checksum is not looked at, since it was before. What sample.py exported is read as well; it has weights alone.
    """
    from spider.export.read_back import is_export, read_export  # which reads by what is here
    state = read_export(path) if is_export(path) else read_state(path, sealed)
    with reading(path):
        from spider_model import Spider
        weights, config = dict(state["model_state_dict"]), SpiderConfig(**state["cfg"])
        if config.n_prelude_layers + config.n_recurrent_layers + config.n_coda_layers > len(weights):
            raise ValueError("cfg has more layers than there are weights")
        with torch.device("meta"):
            expected = {name: likeness(tensor) for name, tensor in Spider(config).state_dict().items()}
        found = {name: likeness(tensor) for name, tensor in weights.items() if isinstance(tensor, (Tensor, RemoteTensor))}
        odd = sorted(str(name) for name in expected.keys() | weights.keys() if expected.get(name) != found.get(name))
    if odd:
        older = not any(name in weights for name in odd)
        raise CheckpointError(f"{path}: weights differ from its cfg's: {', '.join(odd[:3])}{', ...' * (len(odd) > 3)}"
                              + " (they are missing: an earlier version's model had none)" * older)
    state["model_state_dict"] = weights
    return state if mapped else copy_to_host(state)


@contextmanager
def reading(path: Path):
    """Inside, whatever a damaged or foreign file provokes is a CheckpointError."""
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except Exception as fault:
        unsafe = re.search(r"Unsupported .*?(?= by default|[.] |\n|$)", str(fault))
        reason = unsafe[0] if unsafe else str(fault).partition("\n")[0] or type(fault).__name__
        raise CheckpointError(f"{path} is not a checkpoint that can be read safely: {reason}") from None


def likeness(tensor: Tensor | RemoteTensor) -> tuple:
    """What a weight of a checkpoint has in common with the model's; its precision may differ."""
    return tuple(tensor.shape), tensor.dtype.is_floating_point


def is_number(value) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300


def is_lowest(value) -> bool:
    """Tell whether a value is that of a lowest number so far, infinite where there was none."""
    return is_number(value) or type(value) is float and value == math.inf


def is_flat(value) -> bool:
    """Whether a value is a dict of plain values by name."""
    return isinstance(value, dict) and all(type(key) is str and type(part) in (int, float, bool, str, type(None))
                                           for key, part in value.items())


# What a checkpoint may hold, and what it has to look like.
KINDS = ({name: is_count for name in ("step", "bytes_seen", "skipped", "lineage", "epoch", "unimproved")}
         | {name: is_lowest for name in ("best_loss", "lowest_average")}
         | {name: lambda value: value is None or is_number(value) for name in ("average_loss", "last_loss", "val_loss")}
         | {name: lambda value: isinstance(value, dict) for name in (
             "model_state_dict", "optimizer_state_dict", "cfg")}
         | dict(n_loops=lambda value: is_count(value) and 1 <= value <= MAX_LOOPS, noise=is_number,
                best_before_end=lambda value: value is None or is_lowest(value),
                flags=lambda value: is_flat(value) and all(
                    type(part) is not float or is_number(part) for part in value.values()),
                owed=lambda value: value is None or is_flat(value) and is_count(value.get("step")) and all(
                    type(part) in (int, float, bool) for part in value.values()),
                exploded=lambda value: type(value) is bool,
                recipe=lambda value: type(value) is str and value in PRESETS,
                wandb=lambda value: value is None or is_flat(value) and all(
                    type(value.get(name)) is str for name in ("name", "id")),
                targets=lambda value: isinstance(value, list) and all(map(is_count, value))))


def fits_field(value, default) -> bool:
    """Whether a value of a checkpoint's cfg is of its field's kind, and no size that takes long only to look at."""
    if type(default) is tuple:
        return type(value) in (tuple, list) and all(fits_field(part, 0) for part in value)
    return (type(value) is type(default) or type(default) is float and type(value) is int) and (
        type(value) is not int or value < 1 << 32)


REQUIRED = {"model_state_dict", "optimizer_state_dict", "step", "cfg"}


def check_state(path: Path, state, required: set[str] = REQUIRED):
    """CheckpointError unless a state has what the contract names, and its plain values are as a run writes them."""
    state = state if isinstance(state, dict) else {}
    missing = required - state.keys()
    if missing:
        raise CheckpointError(f"{path} is not a Spider checkpoint: it lacks {', '.join(sorted(missing))}")
    wrong = [name for name, fits in KINDS.items() if name in state and not fits(state[name])]
    if (state.get("average_loss") is None) != (state.get("last_loss") is None):
        wrong.append("average_loss")
    if not wrong and state.get("owed") and not 0 < state["owed"]["step"] == state["step"]:
        wrong.append("owed")
    if not wrong:
        wrong = [f"cfg.{f.name}" for f in fields(SpiderConfig)
                 if f.name in state["cfg"] and not fits_field(state["cfg"][f.name], f.default)]
    if wrong:
        raise CheckpointError(f"{path}: {', '.join(wrong[:3])}: not what a Spider checkpoint has there")


def remove(path: Path):
    """Deletes a file, or a directory, which a kill in the midst of it leaves under the name of a temporary one."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    temporary = path if path.name.startswith(".") else path.with_name(f".{path.name}.tmp")
    os.rename(path, temporary)
    shutil.rmtree(temporary)


def put_directory_in_place(temporary: Path, path: Path):
    """Gives a directory its name; one that has it is replaced in one step, where the file system can do that."""
    if os.path.lexists(path):
        call = getattr(ctypes.CDLL(None), "renameat2", None)
        here, exchange = -100, 2          # AT_FDCWD, RENAME_EXCHANGE
        old = temporary
        if call is None or call(here, os.fsencode(temporary), here, os.fsencode(path), exchange):
            old = path.with_name(f".{path.name}.old.tmp")
            os.rename(path, old)          # a kill here leaves the checkpoints before it
            os.rename(temporary, path)
        remove(old)
        return
    os.rename(temporary, path)
