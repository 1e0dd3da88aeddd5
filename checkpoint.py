"""What survives a kill: checkpoints that are whole or not there, metrics.jsonl beside them.

    python checkpoint.py convert SRC DST  # spider-step100.pt into a directory of parts, or such a directory into a file

A checkpoint is torch.save's archive of tensors and plain values, read by `torch.load(weights_only=True)` and nothing
else. Its end holds the SHA-256 of the rest, so that an altered byte is noticed. A thread of its own writes it. In parts
(--sharded_checkpoints, see sharded.py) it is a directory of such archives, a file of them for each rank that wrote.
"""

import ctypes
import hashlib
import io
import json
import math
import mmap
import os
import pickletools
import re
import shutil
import sys
import threading
import time
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from loguru import logger
from torch import Tensor
from torch.utils._pytree import tree_map_only

import data
import files
import tokenizer
from distributed import Rows, Share, Stored, World
from spider_model import MAX_LOOPS, PRESETS, Spider, SpiderConfig


class CheckpointError(Exception):
    """A checkpoint or its directory cannot be used; the message is one line that names it, and the remedy."""


@dataclass
class Progress:
    """Where a run stands; saved with every checkpoint."""
    step: int = 0                         # optimizer steps done
    bytes_seen: int = 0                   # training bytes consumed, PAD included
    epoch: int = 0                        # in which the last step began that was not skipped
    best_loss: float = math.inf           # lowest validation loss, nats per byte
    best_before_end: float | None = None  # the same without an evaluation that took place only since the run ended here
    average_loss: float | None = None     # of about the last 20 steps' losses
    last_loss: float | None = None
    noise: float = 0.0                    # mean difference of the loss from one step to the next, about as many
    lowest_average: float = math.inf
    skipped: int = 0                      # steps in a row, up to now, that were not finite
    owed: dict | None = None              # numbers of the last step where its evaluation was cut short
    wandb: dict | None = None             # name and id of the run there
    n_loops: int = 1                      # loops that the run trains with, perhaps more than the model was made for
    lineage: int = 0                      # grows when a run starts over or goes back: the order of runs in a directory

    @property
    def written(self) -> int:
        """Steps whose line is in metrics.jsonl: all but one that is owed."""
        return self.step - (self.owed is not None)

    def record(self, numbers: dict, bytes_seen: int, epoch: int) -> bool:
        """Takes in a step that is done, whose line is owed until it is written; whether its loss is a spike."""
        self.step, self.bytes_seen = self.step + 1, bytes_seen
        self.owed = dict(step=self.step, bytes_seen=bytes_seen, epoch=epoch, **numbers)
        self.skipped = self.skipped + 1 if numbers["skipped"] else 0
        self.epoch = self.epoch if self.skipped else epoch
        return not self.skipped and self.watch(numbers["loss"])

    def take_evaluation(self, loss: float, at_end: bool):
        """Takes in a validation loss; `at_end`: it was due only because the run ends here."""
        self.best_before_end = self.best_loss if at_end else None
        self.best_loss = min(self.best_loss, loss)

    def goes_past_end(self, last_step: int) -> bool:
        """Whether the run had ended here with an evaluation due to that alone; it is taken back then."""
        past_end = self.step < last_step and self.best_before_end is not None
        if past_end:
            self.best_loss, self.best_before_end = self.best_before_end, None
        return past_end

    def expect_other_losses(self):
        """Forgets what the losses were: those of other flags or data tell nothing about the next ones."""
        self.average_loss = self.last_loss = None
        self.noise, self.lowest_average = 0.0, math.inf

    def watch(self, loss: float) -> bool:
        """Takes a finite loss into the averages; whether it is a spike: far from them by the measure of their noise."""
        if self.average_loss is None:
            self.average_loss = self.last_loss = loss
        spike = self.step > SPIKE_AFTER and loss > self.average_loss + max(5 * self.noise, 0.2 * self.average_loss)
        self.average_loss += 0.05 * (loss - self.average_loss)
        self.noise += 0.05 * (abs(loss - self.last_loss) - self.noise)
        self.last_loss = loss
        self.lowest_average = min(self.lowest_average, self.average_loss)
        return spike

    @property
    def exploded(self) -> bool:
        """Whether the loss is no number, worse than knowing nothing, or half as high again as its average once was."""
        if self.skipped or self.average_loss is None:
            return self.skipped > 0
        loss = max(self.average_loss, self.last_loss - 4 * self.noise)
        return loss > 1.5 * self.lowest_average or self.last_loss > 1 + math.log(tokenizer.VOCAB_SIZE)


SPIKE_AFTER = 20                          # steps that the averages of the loss need before they say anything


class Found(NamedTuple):
    """A checkpoint in a directory; they sort from the oldest to the newest."""
    lineage: int
    step: int
    path: Path
    exploded: bool = False


class CheckpointWriter:
    """Writes checkpoints in a thread of its own, so that the loop waits for the copy out of device memory alone.

    A file under its final name is whole and durable. What fails (a full disk) is said and tried again; the older files
    stay. `kept` are this run's checkpoints: the newest `keep_last` of them, and the newest two that had not exploded:
    two, since the update after the last such loss may be the one that ruined the weights. Of several ranks the first
    one writes, and the others send it their rows; or, `in_parts`, each writes its share, the first one the rest.
    """
    retry_after = 60.0                    # seconds from a failure to the next try

    def __init__(self, directory: Path, kept: list[Found], keep_last: int, step: int = 0, world: World | None = None,
                 in_parts: bool = False):
        self.directory, self.kept, self.keep_last, self.in_parts = directory, kept, keep_last, in_parts
        self.world = World() if world is None else world
        if in_parts:
            import sharded  # noqa: F401  # takes a second, which is not to be one of the loop's
            self.world.group_beside()
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
        if not self.world.leads and not self.in_parts:
            for _, value, _ in nodes(state):
                if isinstance(value, Rows):
                    value.gathered()
            self.step = state["step"]
            return
        if self.in_parts:
            state = tree_map_only((Tensor, Rows), self.world.share, state)
        self.copy = copied(state, self.copy)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()      # the copies have arrived
        self.failed_at, self.step = None, state["step"]
        self.writing = self.thread.submit(self._write, self.copy, before_rename, time.perf_counter() - began)

    def wait(self) -> bool:
        """Waits for the write under way on any rank; whether the last one here succeeded. Every rank calls it."""
        self.world.wait_for_all(self.writing)
        self.writing.result()
        return self.failed_at is None

    def holds(self, step: int) -> bool:
        """Waits for the write under way; whether the state of a step is saved. Every rank calls it."""
        saved = self.wait()
        return self.world.lead(lambda: saved and self.step == step)

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
            if self.world.leads:
                logger.error(f"CHECKPOINT NOT SAVED: {path}: {fault.strerror or fault}; training goes on, the older "
                             f"ones stay as they are, and it is tried again")
            return
        if not self.world.leads:
            return
        logger.info(f"saved {path}: {1e3 * in_loop:.0f} ms of the loop, {time.perf_counter() - began:.1f} s beside it")
        replaced = [old for old in self.kept if old.step == state["step"] and old.path != path]  # in the other form
        self.kept[:] = [old for old in self.kept if old.step != state["step"]] + [
            Found(state["lineage"], state["step"], path, state["exploded"])]
        sound = [old for old in self.kept if not old.exploded][-2:]
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
        import sharded                    # which writes by what is here
        sharded.save(path, state, before_rename, world)
        return
    with files.durable(path, "wb", before_rename) as file:
        write_checkpoint(file, state)


def copied(value, into=None):
    """A copy in host memory of a nested state, into the tensors of an earlier copy where they fit."""
    if isinstance(value, Rows):
        return value.gathered(into)
    if isinstance(value, Share):
        return replace(value, rows=copied(value.rows, into.rows if isinstance(into, Share) else None))
    if isinstance(value, Stored):
        return value.rows()
    if isinstance(value, Tensor):
        fits = isinstance(into, Tensor) and (into.shape, into.dtype) == (value.shape, value.dtype)
        out = into if fits else torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
        return out.copy_(value.detach(), non_blocking=True)
    if isinstance(value, dict):
        return {key: copied(part, into.get(key) if isinstance(into, dict) else None) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        old = into if isinstance(into, (list, tuple)) and len(into) == len(value) else [None] * len(value)
        return type(value)(copied(part, its_old) for part, its_old in zip(value, old))
    return value


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
class Pieces(Stored):
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
    return tree_map_only(Stored, lambda value: value.rows(), state)


def sha256_of(path: Path) -> str:
    sha256 = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            sha256.update(part)
    return sha256.hexdigest()


def load_checkpoint(path: Path, sealed: bool = True, mapped: bool = False) -> dict:
    """Reads a checkpoint, weights only: nothing in the file is executed. `mapped`: its tensors stay in the file, those
    of one in parts as Stored.

    CheckpointError if it is none, or altered, or one whose `cfg` and weights make no Spider. `sealed` false: the
    checksum is not looked at, since it was before. What sample.py exported is read as well; it has weights alone.
    """
    import export                         # which reads by what is here
    state = export.read_export(path) if export.is_export(path) else read_state(path, sealed)
    with reading(path):
        weights, config = dict(state["model_state_dict"]), SpiderConfig(**state["cfg"])
        if config.n_prelude_layers + config.n_recurrent_layers + config.n_coda_layers > len(weights):
            raise ValueError("cfg has more layers than there are weights")
        with torch.device("meta"):
            expected = {name: likeness(tensor) for name, tensor in Spider(config).state_dict().items()}
        found = {name: likeness(tensor) for name, tensor in weights.items() if isinstance(tensor, (Tensor, Stored))}
        odd = sorted(str(name) for name in expected.keys() | weights.keys() if expected.get(name) != found.get(name))
    if odd:
        older = not any(name in weights for name in odd)
        raise CheckpointError(f"{path}: weights differ from its cfg's: {', '.join(odd[:3])}{', ...' * (len(odd) > 3)}"
                              + " (they are missing: an earlier version's model had none)" * older)
    state["model_state_dict"] = weights
    return state if mapped else copied(state)


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


def likeness(tensor: Tensor | Stored) -> tuple:
    """What a weight of a checkpoint has in common with the model's; its precision may differ."""
    return tuple(tensor.shape), tensor.dtype.is_floating_point


def is_count(value) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


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
KINDS = ({name: is_count for name in ("step", "bytes_seen", "skipped", "lineage", "epoch")}
         | {name: is_lowest for name in ("best_loss", "lowest_average")}
         | {name: lambda value: value is None or is_number(value) for name in ("average_loss", "last_loss")}
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


def checkpoint_paths(directory: Path) -> list[Path]:
    """What is named like a checkpoint; not copies by hand such as spider-step100-best.pt, nor what was set aside."""
    return [path for path in directory.glob("spider-step*") if re.fullmatch("spider-step[0-9]+([.]pt)?", path.name)]


def find_checkpoints(directory: Path) -> list[Found]:
    """A directory's checkpoints, oldest first, of which the newest is intact; others are named and passed over."""
    found = []
    for path in checkpoint_paths(directory):
        with passed_over():
            state = read_state(path, sealed=False)
            if path.stem != f"spider-step{state['step']}":
                raise CheckpointError(f"{path} is step {state['step']} under another name")
            found.append(Found(state.get("lineage", 0), state["step"], path, state.get("exploded", False)))
    found.sort()
    while found:
        with passed_over():
            load_checkpoint(found[-1].path, mapped=True)
            break
        found.pop()
    return found


@contextmanager
def passed_over():
    """Inside, a checkpoint that cannot be used is a warning."""
    try:
        yield
    except CheckpointError as fault:
        logger.warning(f"passed over: {fault}")


def set_aside(path: Path, lineage: int):
    """Gives a file of an earlier run a name that neither saving nor pruning touches; another takes its place next."""
    for number in count(lineage):
        name = path.with_suffix(f".before-{number}{path.suffix}")
        try:
            link(path, name)              # not renamed: a kill before it is replaced would leave none
        except FileExistsError:
            one, other = (part / PLAIN if is_in_parts(part) else part for part in (name, path))
            if not (one.exists() and one.samefile(other)):
                continue
        except OSError:                   # a file system without links
            os.rename(path, name)
        return


def link(path: Path, name: Path):
    """Gives a checkpoint a second name, in parts each of its files; FileExistsError where it is taken."""
    if path.suffix or path.is_symlink() or not is_in_parts(path):
        os.link(path, name, follow_symlinks=False)
        return
    if os.path.lexists(name):
        raise FileExistsError(name)
    temporary = name.with_name(f".{name.name}.tmp")
    remove(temporary)
    shutil.copytree(path, temporary, copy_function=os.link)
    os.rename(temporary, name)


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


def locked(directory: Path):
    """A context in which no other run works in a directory."""
    busy = CheckpointError(f"--ckpt_dir: another run works in {directory}: wait for it, or use another")
    return files.locked(directory, busy, logger.warning)


# What makes a run the same run: other values go on from the same weights, but as another run.
IDENTITY = ("seed", "data_dir", "mock_data", "seq_len", "micro_batch", "global_batch", "lr", "schedule", "warmup_steps",
            "target_tokens", "random_loops", "engram_reset", "engram_lr", "weight_decay", "dropout", "beta1",
            "beta2", "momentum", "grad_clip", "min_lr_fraction", "wsd_decay_fraction", "eval_tokens", "optimizer")


def run_state(model: Spider, optimizers, progress: Progress, loader: data.Loader, args, world: World) -> dict:
    """What a checkpoint holds: tensors and plain values; randomness has no state, all of it is from (seed, step)."""
    return dict(model_state_dict=world.state_of(model), optimizer_state_dict=optimizers.state_dict(),
                recipe=args.recipe, cfg=asdict(model.config), flags={name: getattr(args, name) for name in IDENTITY},
                targets=loader.targets.tolist(), exploded=progress.exploded, **asdict(progress))


class StartedOver(NamedTuple):
    """What a run that started over or went back began with; see RunDirectory."""
    lineage: int
    origin: str                           # the checkpoint, an absolute path
    reset_steps: bool


STARTED_OVER = "started-over.json"


def read_started_over(path: Path) -> StartedOver | None:
    """What a file says, None where there is none; CheckpointError where no run wrote it."""
    try:
        begun = StartedOver(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, RecursionError):
        begun = None
    if begun is None or not (is_count(begun.lineage) and type(begun.origin) is str and type(begun.reset_steps) is bool):
        raise CheckpointError(f"{path}: not what a run writes there: delete it to go on from the newest checkpoint")
    return begun


class RunDirectory:
    """A run's directory: what the run goes on from, and what it writes there; before `open` that is nothing.

    A run that starts over (--reset_steps) or goes back (--resume of another checkpoint than the newest) is one of its
    own, of the next `lineage`: it leaves the files of those before it. What it began with stands in started-over.json
    until it has saved, so that it is this run that goes on if it is killed before.

    Weights of mock data are no start for real data, nor the other way round, unless --resume names them.
    Of several ranks the first one alone looks into it, reads and writes, and tells the others what it found.
    """

    def __init__(self, path: Path, resume: str | None, reset_steps: bool, closing: ExitStack, look_only: bool = False,
                 world: World | None = None, mock_data: bool = False):
        self.path, self.closing, self.is_locked = path, closing, False
        self.is_named, self.mock_data = bool(resume), mock_data
        self.world = World() if world is None else world
        self.found, self.origin, self.begins_again, self.reset_steps, self.starts_over, self.lineage = self.world.lead(
            lambda: self._look(resume, reset_steps, look_only))

    def _look(self, resume: str | None, reset_steps: bool, look_only: bool) -> tuple:
        """Locks the directory where it is there, and settles what the run goes on from."""
        from export import is_export      # which reads by what is here
        path, closing = self.path, self.closing
        there = next(part for part in (path, *path.absolute().parents) if part.exists())
        if not there.is_dir():
            raise files.DataError(f"--ckpt_dir: {there} is a file, not a directory: name another")
        self.is_locked = path.is_dir() and not look_only
        if self.is_locked:
            closing.enter_context(locked(path))
        found = find_checkpoints(path)
        if checkpoint_paths(path) and not found and not resume:
            raise CheckpointError(f"--ckpt_dir: none of the checkpoints in {path} can be used: put back a good one, "
                                  f"name one by --resume, or use another directory")
        newest, begun = found[-1] if found else None, read_started_over(path / STARTED_OVER)
        if begun and newest and newest.lineage >= begun.lineage:
            begun = None                  # it has saved
        origin = resume or (begun.origin if begun else newest.path if newest else None)
        if reset_steps and origin is None:
            raise CheckpointError(f"--reset_steps: no checkpoint in {path} to take weights from; name one by --resume")
        origin = None if origin is None else Path(origin)
        if origin is not None and origin.is_dir() and not is_export(origin) and not is_in_parts(origin):
            raise CheckpointError(f"--resume: {origin} is not a checkpoint: it is a directory, and no export; "
                                  f"name one in it")
        begins_again = begun is not None and not resume and not reset_steps
        starts_over = origin is not None and (
            reset_steps or begun is not None or newest is None or origin.resolve() != newest.path.resolve())
        past = max((one.lineage for one in (newest, begun) if one), default=0)
        return (found, origin, begins_again, begun.reset_steps if begins_again else reset_steps, starts_over,
                past + (starts_over and not begins_again))

    def load(self) -> dict | None:
        """The state to go on from; None: there is none. Of several ranks the first has its tensors, in the file."""
        return None if self.origin is None else self.world.lead(self._load)

    def _load(self) -> dict:
        if self.begins_again:
            if not self.origin.exists():
                raise CheckpointError(f"{self.path / STARTED_OVER}: a run began from {self.origin}, which is gone: put "
                                      f"it back, or delete this file to go on with the run before")
            logger.info(f"the run that began from {self.origin} had saved nothing yet: it begins again")
        state = load_checkpoint(self.origin, sealed=self.starts_over, mapped=self.world.ranks > 1)
        of_mock_data = state.get("flags", {}).get("mock_data", self.mock_data)
        if of_mock_data != self.mock_data and not self.is_named:
            kinds = ("mock data", "real data") if of_mock_data else ("real data", "mock data")
            raise CheckpointError(f"--ckpt_dir: {self.origin} learned from {kinds[0]}, this run reads {kinds[1]}: use "
                                  f"another --ckpt_dir, or name it by --resume to go on from it all the same")
        if not self.reset_steps and "optimizer_state_dict" not in state:
            raise CheckpointError(f"--resume: {self.origin} has weights alone: --reset_steps starts a run with them")
        if state.get("exploded"):
            sound = [one.path for one in self.found if not one.exploded]
            back = f"; --resume {sound[-1]} goes back" if sound else ""
            logger.warning(f"{self.origin}: the loss had exploded before it{back}")
        return state

    def start_line(self, state: dict) -> str:
        """What a run takes from a state."""
        return f"{'weights of' if self.reset_steps else 'goes on from'} {self.origin} (step {state['step']})"

    def restore(self, state: dict | None, model: Spider, optimizers, n_loops: int, loader: data.Loader,
                args) -> Progress:
        """Fills model and optimizers from a state, and says what of the run changed since; where the run stands."""
        names = [f.name for f in fields(Progress) if state and not self.reset_steps and f.name in state]
        progress = Progress(**{name: state[name] for name in names})
        progress.n_loops, progress.lineage = n_loops, self.lineage
        progress.wandb = None if self.starts_over else progress.wandb
        if not state:
            return progress
        self.world.load(model, state["model_state_dict"])
        logger.info(self.start_line(state))
        changed = [f"{name} was {before}, is {is_now}"
                   for name, (before, is_now) in changes_of(state["cfg"], model.config).items()]
        if self.reset_steps:
            if changed:
                logger.info(f"changed by --set: {'; '.join(changed)}")
            return progress
        optimizers.load_state_dict(state["optimizer_state_dict"])
        before = dict(n_loops=state.get("n_loops", n_loops), dropout=0.0) | state.get("flags", {})  # dropout came later
        now = dict(n_loops=n_loops) | {name: getattr(args, name) for name in IDENTITY}
        changed += [f"--{name} was {before[name]}, is {now[name]}" for name in sorted(before.keys() & now)
                    if before[name] != now[name]]
        targets = loader.targets.tolist()
        if state.get("targets", targets) != targets:
            changed.append(f"bytes to train on were {state['targets']}, are {targets}")
        if changed:
            logger.warning(f"not the same run any more: {'; '.join(changed)}")
            progress.expect_other_losses()
            progress.epoch = min(progress.epoch, loader.epoch(progress.bytes_seen // args.seq_len))  # of other data
        return progress

    def open(self, progress: Progress, last_step: int, keep_last: int, size: float,
             in_parts: bool = False) -> tuple["Metrics", CheckpointWriter]:
        """Makes the directory, if need be; its metrics.jsonl, up to where the run stands, and its writer.

        CheckpointError where checkpoints of `size` bytes do not fit: two, or one where it replaces the oldest.
        """
        went_past_end = progress.goes_past_end(last_step)
        self.metrics = SimpleNamespace(write=lambda numbers: None, sync=None)  # of ranks that write nothing
        kept = self.world.lead(lambda: self._make(progress, went_past_end, keep_last, size))
        writer = CheckpointWriter(self.path, kept, keep_last, progress.written, self.world, in_parts)
        return self.metrics, self.closing.enter_context(writer)

    def _make(self, progress: Progress, went_past_end: bool, keep_last: int, size: float) -> list[Found]:
        """What `open` does to files; the run's checkpoints so far."""
        for leftover in self.path.glob(".spider-step*.tmp"):     # of a run that was killed while it saved
            remove(leftover)
        kept = [one for one in self.found if one.lineage == progress.lineage]
        copies, free = 2 if len(kept) < keep_last else 1, shutil.disk_usage(existing_parent(self.path)).free
        if free < copies * size:
            raise CheckpointError(f"--ckpt_dir: {self.path} has {free / 1e9:.3g} GB free, {copies} "
                                  f"checkpoint{'s' * (copies > 1)} of {size / 1e9:.3g} GB must fit: make room, or use "
                                  f"another")
        if not self.is_locked:
            self.path.mkdir(parents=True, exist_ok=True)
            self.closing.enter_context(locked(self.path))
        lines = self.path / "metrics.jsonl"
        if self.starts_over and not self.begins_again:
            if lines.exists():
                set_aside(lines, progress.lineage)
            with files.durable(self.path / STARTED_OVER) as file:
                json.dump(StartedOver(progress.lineage, str(self.origin.resolve()), self.reset_steps)._asdict(), file)
        metrics = Metrics(lines, -1 if self.starts_over else progress.written, went_past_end)
        self.metrics = self.closing.enter_context(metrics)
        return kept


def existing_parent(path: str | Path) -> Path:
    """The nearest directory above a path that exists."""
    return next(p for p in (Path(path).absolute(), *Path(path).absolute().parents) if p.is_dir())


def changes_of(saved: dict, config: SpiderConfig) -> dict[str, tuple]:
    """The fields in which a config is not a checkpoint's, what they were there and what they are; loops have a flag."""
    there = SpiderConfig(**saved)             # fields that came since then have their defaults
    return {f.name: (getattr(there, f.name), getattr(config, f.name)) for f in fields(config)
            if f.name != "n_loops" and getattr(there, f.name) != getattr(config, f.name)}


def shapes(config: SpiderConfig) -> dict[str, tuple]:
    """Shapes by name of all that a model holds."""
    with torch.device("meta"):
        model = Spider(config)
    return {name: tuple(x.shape) for part in (model.named_parameters(), model.named_buffers()) for name, x in part}


def check_same_model(path: Path, saved: dict, asked: SpiderConfig):
    """CheckpointError naming the fields by which the weights of a config have other shapes, or names, than a
    checkpoint's; those that change none, and loops, may differ."""
    there, changes = SpiderConfig(**saved), changes_of(saved, asked)
    if not changes or shapes(replace(asked, n_loops=there.n_loops)) == shapes(there):
        return

    def reshapes(name: str) -> bool:
        try:
            return shapes(replace(there, **{name: getattr(asked, name)})) != shapes(there)
        except ValueError:                # it goes with another field's change alone
            return True
    differing = [f"{name} {before} there, {now} asked for" for name, (before, now) in changes.items() if reshapes(name)]
    raise CheckpointError(f"{path} holds another model ({'; '.join(differing[:3])}), and its weights keep their "
                          f"shapes: leave that out of --model and --set, or train anew, without --resume, in a "
                          f"--ckpt_dir of its own")


def numbers_of(line: str) -> dict:
    """Read a line of metrics.jsonl; what is no finite number there becomes null, as where it is written. ValueError
    where it is not that of a step."""
    def finite(text: str) -> float | None:
        return value if math.isfinite(value := float(text)) else None
    try:
        numbers = json.loads(line, parse_float=finite, parse_constant=finite)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(numbers, dict) or not is_count(numbers.get("step")):
        raise ValueError("it has no step")
    return numbers


class Metrics:
    """metrics.jsonl, a line a step. What a full disk does not take is said once, and written with a later line."""

    def __init__(self, path: Path, step: int, went_past_end: bool = False):
        """Drops the lines behind `step`, which a resumed run writes again, and marks an evaluation that was due to the
        end of a run alone where it now goes on."""
        if path.exists() and not path.is_file():
            raise CheckpointError(f"{path} is no regular file: move it away")
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        with files.durable(path) as file:
            for number, line in enumerate(lines, 1):
                try:
                    numbers = numbers_of(line)
                    if numbers["step"] == step and went_past_end:
                        numbers["at_end"] = True
                    if numbers["step"] <= step:
                        file.write(json.dumps(numbers, allow_nan=False) + "\n")
                except ValueError:
                    logger.warning(f"{path}: line {number} is left out, it was cut off or altered")
        self.path, self.pending, self.complete, self.lock = path, b"", True, threading.Lock()
        self.file = files.open_own(path, "ab", 0)

    def write(self, numbers: dict):
        """Numbers that are not finite become null."""
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        with self.lock:
            self.pending += json.dumps(finite, allow_nan=False).encode() + b"\n"
        try:
            self._write_pending()
            self.complete = True
        except OSError as fault:
            if self.complete:
                logger.error(f"METRICS NOT WRITTEN: {self.path}: {fault.strerror}; kept for later")
            self.complete = False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def _write_pending(self):
        with self.lock:
            while self.pending:
                self.pending = self.pending[self.file.write(self.pending):]

    def sync(self):
        """Makes all lines durable, or raises OSError: no checkpoint is newer than the lines before it."""
        self._write_pending()
        os.fsync(self.file.fileno())


# ---------------------------------------------------------------------------------------------------------------------
# From one form into the other

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
        state = tree_map_only(Tensor, world.share, state)
    try:
        write_durably(target, state, lambda: None, world)
    except OSError as fault:
        raise CheckpointError(f"{target}: {fault.strerror or fault}") from None
    print(files.one_line(f"{target}: step {state['step']}, as {source} has it"))


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0; 2 with a line on stderr; 130 when interrupted, with nothing written."""
    parser = data.Parser(description=__doc__.partition("\n")[0])
    command = parser.add_subparsers(required=True, metavar="{convert}").add_parser(
        "convert", help="write a checkpoint in the other form: DST.pt is one file, any other DST a directory of parts")
    command.add_argument("source", metavar="SRC", type=files.checked(files.a_path))
    command.add_argument("target", metavar="DST", type=files.checked(files.a_path))
    status = 2
    try:
        args = parser.parse_args(argv)
        convert(Path(args.source), Path(args.target))
        return 0
    except (CheckpointError, data.DataError) as fault:
        line = str(fault)
    except KeyboardInterrupt:
        line, status = "interrupted; nothing was written", 130
    print(f"checkpoint.py: error: {files.one_line(line)}", file=sys.stderr)
    return status


if __name__ == "__main__":
    from checkpoint import main as run    # under the name by which the other files know it, and its errors
    sys.exit(run())
