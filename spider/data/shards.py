"""Find, map and check byte shards.

Shard, Stream, Source   a mapped file, several files as one sequence of ids, a directory with its weight
open_data               the sources of --data_dir; mock_source: the one of --mock_data
check, check_ids        refuse invalid ids
read_metadata           the metadata that `prepare` wrote
"""

import json
import math
import os
import random
import re
import resource
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from spider.errors import DataError
from spider.files import each_once, identity, is_count, naming, note_again, open_plain, walk
from spider.flags import number
from tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE

MIB = 1 << 20

CHECK_ALL = 2048 * MIB        # up to this size, `check` reads all of the data

HELD_OUT = 10_000_000         # maximum ids to hold out if there is no validation shard
RECORD_LIMIT = 256 * MIB      # maximum size of metadata.json or prepare.jsonl: a million shards
VALIDATION = re.compile(r"val(id(ation)?)?([^a-z]|$)", re.IGNORECASE)
RECORDS = "metadata.json", "prepare.jsonl"  # written by `prepare`, at the end and while it runs


class Shard(NamedTuple):
    """The ids of a file, or a slice of them that begins at id `first` of the file."""
    path: str
    ids: np.ndarray           # uint16
    first: int = 0
    stamp: tuple | None = None  # file_stamp when it was mapped; None: no file

    def check_unchanged(self):
        """Raise DataError if the mapped file has changed, since reading beyond its end would kill the process."""
        if self.stamp is None:
            return
        try:
            now = file_stamp(self.path)
        except OSError as fault:
            now = fault.strerror
        if now != self.stamp:
            what = (f"now: {now}" if isinstance(now, str) else "replaced or altered" if now[1] == self.stamp[1] else
                    f"it ends at byte offset {now[1]}, not {self.stamp[1]}")
            raise DataError(f"{self.path}: changed during the run ({what}): restore it; the same command resumes")


def file_stamp(file: str | int) -> tuple[int, int, int]:
    """Return (inode, size, mtime in ns) of a path or descriptor, to detect changes."""
    status = os.stat(file)
    return status.st_ino, status.st_size, status.st_mtime_ns


class Stream:
    """Shards as one sequence of ids; Stream([Shard("memory", ids)]) needs no file."""

    def __init__(self, shards: Sequence[Shard]):
        self.shards = list(shards)
        self.starts = [0, *accumulate(len(shard.ids) for shard in self.shards)]
        self.bounds = np.array(self.starts)

    def __len__(self) -> int:
        return self.starts[-1]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return ids start .. stop - 1, uint16; a view if they are all in one shard."""
        i = bisect_right(self.starts, start) - 1
        if stop <= self.starts[i + 1]:
            return self.shards[i].ids[start - self.starts[i]:stop - self.starts[i]]
        return np.concatenate([shard.ids for shard in self.slice(start, stop).shards])

    def slice(self, start: int, stop: int) -> "Stream":
        """Return the stream of ids start .. stop - 1."""
        cuts = [(shard, max(0, start - begin), min(len(shard.ids), stop - begin))
                for shard, begin in zip(self.shards, self.starts)]
        return Stream([shard._replace(ids=shard.ids[a:b], first=shard.first + a) for shard, a, b in cuts if a < b])

    def where(self, index: int) -> str:
        """Return the file and byte offset of an id."""
        i = bisect_right(self.starts, index) - 1
        return f"{self.shards[i].path}: byte offset {2 * (self.shards[i].first + index - self.starts[i])}"


@dataclass
class Source:
    """The data of one directory, and its weight in the mixture."""
    name: str
    weight: float
    train: Stream
    val: Stream

    def __str__(self) -> str:
        return f"{self.name}: {len(self.train):,} training and {len(self.val):,} validation ids"


def open_data(spec: str) -> list[Source]:
    """Open a directory, or a mixture such as web:0.7,code:0.3 (positive weights, of any sum)."""
    if ":" not in spec or os.path.isdir(spec):
        return [open_source(spec, 1.0)]
    names, _, weights = zip(*(part.rpartition(":") for part in spec.split(",")))
    try:
        weights = [number(weight) for weight in weights]
    except ValueError:
        weights = [0]
    if not all(names) or not all(weight > 0 for weight in weights) or not sum(weights) < math.inf:
        raise DataError(f"{spec}: neither a directory nor a mixture dir:weight,dir:weight with positive weights")
    sources = [open_source(name, weight / sum(weights)) for name, weight in zip(names, weights)]
    if len({identity(name) for name in names}) < len(names):
        raise DataError(f"{spec}: a directory is named twice: give it once, with the sum of its weights")
    return sources


def open_source(directory: str, weight: float) -> Source:
    """Map a directory's shards; without a validation shard, hold out the last 1% of the ids."""
    low, high = resource.getrlimit(resource.RLIMIT_NOFILE)  # a mapped file keeps its descriptor
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(low, min(high, 1 << 16)), high))
    shards = [(split, map_shard(path, entry)) for path, split, entry in find_shards(directory)]
    train, val = (Stream([shard for its_split, shard in shards if its_split == split]) for split in ("train", "val"))
    if not len(train):
        raise DataError(f"{directory}: has only validation shards, none for training")
    if not len(val):
        cut = len(train) - min(len(train) // 100, HELD_OUT)
        train, val = train.slice(0, cut), train.slice(cut, len(train))
    return Source(directory, weight, train, val)


def find_shards(directory: str) -> list[tuple[str, str, dict | None]]:
    """List (path, split, entry in metadata.json) of the .bin files below a directory, sorted by relative name.

    Without an entry, the split is "val" if a file or folder name is like val, val_00, valid or validation-1, else
    "train". A file with several paths is listed once; skipped paths are printed.
    """
    advice = f"make shards by `python data.py prepare INPUT --out {directory}`"
    if not os.path.isdir(directory):
        raise DataError(f"{directory}: no such directory; {advice}")
    paths, _, again = walk(directory)
    names = sorted(os.path.relpath(path, directory) for path in paths if path.endswith((".bin", *RECORDS)))
    entries = {os.path.join(folder, entry["name"]): entry for folder in {"", *map(os.path.dirname, names)}
               for entry in read_metadata(os.path.join(directory, folder)).get("shards", ())}
    names = [name for name in names if name.endswith(".bin")]
    for name in sorted(entries.keys() - set(names)):
        raise DataError(f"{os.path.join(directory, name)}: missing, though metadata.json lists it")
    if not names:
        raise DataError(f"{directory}: no .bin file in it; {advice}")
    names, others = each_once(directory, names, first=entries)
    note_again(directory, again + others)
    splits = ["val" if any(VALIDATION.match(part) for part in Path(name).parts) else "train" for name in names]
    return [(os.path.join(directory, name), entries[name]["split"] if name in entries else split, entries.get(name))
            for name, split in zip(names, splits)]


def read_metadata(folder: str | Path) -> dict:
    """Read metadata.json of a folder; return an empty dict if there is none, or if it is from another program."""
    path, journal = (Path(folder, name) for name in RECORDS)
    if not os.path.lexists(path):
        if journal.exists():
            raise DataError(f"{folder}: `prepare` was interrupted here: repeat its command, which resumes")
        return {}
    try:
        metadata = json.loads(read_record(path))
    except (ValueError, RecursionError) as fault:
        raise DataError(f"{path}: not JSON: {fault}; delete it if it does not belong to these shards") from None
    shards = metadata.get("shards") if isinstance(metadata, dict) else None
    ours = isinstance(shards, list) and all(map(is_entry, shards))
    if not ours and isinstance(metadata, dict) and "fingerprint" in metadata:
        raise DataError(f"{path}: damaged: `shards` is not a list of objects with name, split, ids and sha256; copy it "
                        "again, or delete it to use the shards without it")
    return metadata if ours else {}


def is_entry(entry) -> bool:
    """Return whether a JSON value is a valid entry of a shard."""
    return (isinstance(entry, dict) and entry.get("split") in ("train", "val") and is_count(entry.get("ids"))
            and type(entry.get("name")) is type(entry.get("sha256")) is str)


def read_record(path: Path) -> bytes:
    """Read one of RECORDS; raise DataError if it is longer than any that `prepare` writes."""
    with naming(path), open_plain(path) as file:
        content = file.read(RECORD_LIMIT + 1)
    if len(content) > RECORD_LIMIT:
        raise DataError(f"{path}: longer than {RECORD_LIMIT:,} bytes; delete it if it does not belong to these shards")
    return content


def map_shard(path: str, entry: dict | None) -> Shard:
    """Map a file as a plain uint16 array, since slices of np.memmap are slow."""
    with naming(path), open_plain(path) as file:
        stamp = _, size, _ = file_stamp(file.fileno())
        if size == 0:
            raise DataError(f"{path}: empty (byte offset 0); delete it")
        if entry is not None and size != 2 * entry["ids"]:
            raise DataError(f"{path}: ends at byte offset {size}, but metadata.json says {2 * entry['ids']}: truncated "
                            "or altered; copy or prepare it again")
        if size % 2:
            raise DataError(f"{path}: half an id at byte offset {size - 1} (odd length): truncated, or not a shard")
        return Shard(path, np.memmap(file, "<u2", "r", shape=size // 2).view(np.ndarray), 0, stamp)


def check_ids(stream: Stream, start: int, stop: int):
    """Raise DataError at the first of the ids start .. stop - 1 that is above 271."""
    for begin in range(start, stop, MIB):  # pieces that fit into the CPU's cache
        stream.shards[bisect_right(stream.starts, begin) - 1].check_unchanged()
        piece = stream.read(begin, min(begin + MIB, stop))
        if piece.max() >= VOCAB_SIZE:
            i = int((piece >= VOCAB_SIZE).argmax())
            raise DataError(f"{stream.where(begin + i)}: id {piece[i]} is above {VOCAB_SIZE - 1}: damaged, or not a "
                            "shard")


def check(sources: Sequence[Source]):
    """Raise DataError for an id above 271. Checks all ids of up to 2 GiB, else the first and last MiB of every shard;
    training checks the ids of every batch.
    """
    streams = [stream for source in sources for stream in (source.train, source.val)]
    reach = MIB // 2 if sum(2 * len(stream) for stream in streams) > CHECK_ALL else CHECK_ALL
    for stream in streams:
        for start, stop in pairwise(stream.starts):
            check_ids(stream, start, min(start + reach, stop))
            check_ids(stream, max(start + reach, stop - reach), stop)


def mock_source(seed: int) -> Source:
    """Generate about 1 MB of sentences that a model learns within a few steps, and 70 kB for validation, in memory."""
    rng = random.Random(seed)
    words = ["".join(rng.choice("bdfgklmnprst") + rng.choice("aeiou") for _ in range(rng.choice((1, 2, 2, 3))))
             for _ in range(20)]
    often = [1 / (i + 1) for i in range(40)]
    sentences = [" ".join(rng.choices(words, often[:20], k=rng.randint(3, 5))) + ". " for _ in range(40)]

    def stream(documents: int) -> Stream:  # 8 sentences each; 0x02 and 0x03 stand for BOS and EOS
        text = "".join("\x02" + "".join(rng.choices(sentences, often, k=8)) + "\x03" for _ in range(documents))
        ids = np.frombuffer(text.encode(), np.uint8).astype(np.uint16)
        ids[ids == 2], ids[ids == 3] = BOS_ID, EOS_ID
        return Stream([Shard("mock data", ids)])

    return Source("mock", 1.0, stream(5000), stream(350))


def printable(ids: Iterable[int]) -> str:
    r"""Format ids for a terminal: printable text unchanged, other bytes as \n, \x07 or \\, ids as \<BOS> or \<259>."""
    names, out = {PAD_ID: "PAD", BOS_ID: "BOS", EOS_ID: "EOS"}, []
    for is_byte, run in groupby(ids, lambda i: i < 256):
        if is_byte:
            out += [c if c.isprintable() and c != "\\" else repr(c.encode("utf-8", "surrogateescape"))[2:-1]
                    for c in bytes(run).decode("utf-8", "surrogateescape")]
        else:
            out += [f"\\<{names.get(i, i)}>" for i in run]
    return "".join(out)
