"""Byte shards: what training reads, and the commands that make and check them.

    python data.py prepare books.txt web/ --out data      # .txt, .jsonl, .parquet, directories of them, or - for stdin
    python data.py prepare src/ --ext .py,.md --out code  # each file a document; --ext text: whatever is UTF-8
    python data.py verify data                            # sizes, checksums and ids
    python data.py show data --first 12544 --count 448    # what a run with --data_dir data read there

A shard is a headerless file of little-endian uint16 ids (tokenizer.py says which); `metadata.json` beside the shards
describes them. The shards of a split are read as one stream, in the order of their names. What sequence g of a run
holds is a pure function of (seed, g): any step, rank or restart works it out by itself, in O(1) memory.
"""

import argparse
import codecs
import fcntl
import gzip
import hashlib
import io
import json
import math
import multiprocessing
import os
import queue
import random
import re
import resource
import signal
import stat
import sys
import threading
import time
import zlib
from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE

MIB = 1 << 20
BLOCK = 10_000                # sequences in which the sources of a mixture have their exact shares
CHECK_ALL = 2048 * MIB        # up to here, `check` looks at all of the data
AHEAD = 4096                  # sequences whose places are worked out at a time: numpy's calls cost more than their work
HELD_OUT = 10_000_000         # most ids held out where no shard is for validation
LINE_LIMIT = 256 * MIB        # longest JSON line
RECORD_LIMIT = 256 * MIB      # longest metadata.json or prepare.jsonl that is read: a million shards
VALIDATION = re.compile(r"val(id(ation)?)?([^a-z]|$)", re.IGNORECASE)
RECORDS = "metadata.json", "prepare.jsonl"  # what `prepare` says of its shards, done and under way
STDIN = ".stdin.txt"          # standard input, while it is prepared


class DataError(Exception):
    """Data that cannot be used; the message is one line: file, place in it and, where there is one, the remedy."""


@contextmanager
def naming(path):
    """An operating system's error becomes a DataError that names the file, `path` where the error knows none."""
    try:
        yield
    except OSError as fault:
        raise DataError(f"{fault.filename or path}: {fault.strerror or fault}") from None


def one_line(message) -> str:
    """A message with its line breaks, control characters and lone surrogates (of file names) written as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(message))


@contextmanager
def reader_may_leave():
    """Inside and when it ends, nobody reading stdout any more (`| head`) is no fault: what is printed goes nowhere."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(line: str):
    """Prints one line, whatever names are in it."""
    with reader_may_leave():
        print(one_line(line))


def note(line: str):
    """Says something on stderr that is no result."""
    print(one_line(line), file=sys.stderr)


# ---------------------------------------------------------------------------------------------------------------------
# Files of others

class Counted(io.FileIO):
    """A file that calls `report` with the number of bytes that were read, each time."""

    def __init__(self, path: str | Path, report: Callable):
        def opener(name, flags: int) -> int:
            return os.open(name, flags | os.O_NONBLOCK)  # should it become a pipe meanwhile
        super().__init__(path, opener=opener)
        self.report = report

    def readinto(self, buffer) -> int | None:
        count = super().readinto(buffer)
        self.report(count or 0)
        return count


def open_plain(path: str | Path, report: Callable = lambda count: None) -> IO[bytes]:
    """A file to read; DataError at a pipe, a socket or a device, of which the opening alone may take for ever."""
    with naming(path):
        mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # whose opening says so
        kind = "pipe" if stat.S_ISFIFO(mode) else "socket" if stat.S_ISSOCK(mode) else "device"
        raise DataError(f"{path}: a {kind}, no file: delete it, or put what comes out of it into a file")
    return io.BufferedReader(Counted(path, report), 1 << 17)


def walk(directory: str, own: str | Path = "") -> tuple[list[str], dict[str, list[str]]]:
    """Paths of what is in and below a directory, links followed, `own` left out; and by reason what was passed over.

    A folder is looked into once, at its own place before links to it, so that loops end. Names that begin with a dot
    are passed over. DataError at a folder that cannot be looked into.
    """
    def refuse(fault: OSError):
        raise fault
    paths, hidden, again, links, ours = [], [], [], [directory], identity(own)
    seen = {ours}
    with naming(directory):
        for top in links:                                   # which grows
            if top != directory and holds(top):
                again.append(top)
                continue
            for folder, folders, files in os.walk(top, onerror=refuse):
                if (mark := identity(folder)) in seen:
                    again += [folder] * (mark != ours)
                    folders.clear()
                    continue
                seen.add(mark)
                hidden += [os.path.join(folder, name) for name in folders + files if name.startswith(".")]
                folders[:] = sorted(name for name in folders if not name.startswith("."))
                here = [os.path.join(folder, name) for name in folders + files if not name.startswith(".")]
                links += [path for path in here[:len(folders)] if os.path.islink(path)]
                paths += here
    return paths, {"hidden": hidden, AGAIN: again}


AGAIN = "read already"


def identity(path: str | Path) -> tuple[int, int] | str:
    """Device and inode, the same for every path to a file; the path where there is nothing."""
    try:
        status = os.stat(path)
        return status.st_dev, status.st_ino
    except OSError:
        return str(path)


def holds(link: str) -> bool:
    """Whether a link leads to a folder that the link is in, at whatever depth."""
    target = os.path.realpath(link)
    return os.path.commonpath([target, os.path.realpath(os.path.dirname(link))]) == target


def each_once(directory: str, names: Sequence[str], first: Container[str] = ()) -> tuple[list[str], list[str]]:
    """Names in a directory without those of a file that has another one, and the paths of those.

    What is left of several names is one that is in `first`, else one that is no link, else the first in their order.
    """
    kept, paths = {}, {name: os.path.join(directory, name) for name in names}
    for name in sorted(names, key=lambda name: (name not in first, os.path.islink(paths[name]))):
        kept.setdefault(identity(paths[name]), name)
    kept = set(kept.values())
    return [name for name in names if name in kept], [paths[name] for name in names if name not in kept]


def note_again(where: str, paths: Sequence[str]):
    """Names what walk and each_once passed over since it is read under another name."""
    if paths:
        note(f"{where}: passed over {', '.join(paths[:3])}" + f" and {len(paths) - 3} more" * (len(paths) > 3)
             + ": link loops, or other names of what is read anyway")


# ---------------------------------------------------------------------------------------------------------------------
# Shards, streams, sources

class Shard(NamedTuple):
    """Ids of a file, or a part of them that begins at id `first` of the file."""
    path: str
    ids: np.ndarray           # uint16
    first: int = 0
    stamp: tuple | None = None  # file_stamp when it was mapped; None: there is no file

    def check_unchanged(self):
        """DataError where the file is no longer the one mapped: ids beyond its end would kill the process."""
        if self.stamp is None:
            return
        try:
            now = file_stamp(self.path)
        except OSError as fault:
            now = fault.strerror
        if now != self.stamp:
            what = (f"now: {now}" if isinstance(now, str) else "replaced or altered" if now[1] == self.stamp[1] else
                    f"it ends at byte offset {now[1]}, not {self.stamp[1]}")
            raise DataError(f"{self.path}: changed during the run ({what}); shards must stay as they are: put it back "
                            "and give the same command again, it goes on")


def file_stamp(file: str | int) -> tuple[int, int, int]:
    """(inode, size, time of change in ns) of a path or descriptor: another file, or another content, has another."""
    status = os.stat(file)
    return status.st_ino, status.st_size, status.st_mtime_ns


class Stream:
    """Shards as one sequence of ids; Stream([Shard("memory", ids)]) is one without a file."""

    def __init__(self, shards: Sequence[Shard]):
        self.shards = list(shards)
        self.starts = [0, *accumulate(len(shard.ids) for shard in self.shards)]
        self.bounds = np.array(self.starts)

    def __len__(self) -> int:
        return self.starts[-1]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Ids start .. stop - 1, uint16; a view where one shard holds them all."""
        i = bisect_right(self.starts, start) - 1
        if stop <= self.starts[i + 1]:
            return self.shards[i].ids[start - self.starts[i]:stop - self.starts[i]]
        return np.concatenate([shard.ids for shard in self.part(start, stop).shards])

    def part(self, start: int, stop: int) -> "Stream":
        """The stream of ids start .. stop - 1."""
        cuts = [(shard, max(0, start - begin), min(len(shard.ids), stop - begin))
                for shard, begin in zip(self.shards, self.starts)]
        return Stream([shard._replace(ids=shard.ids[a:b], first=shard.first + a) for shard, a, b in cuts if a < b])

    def where(self, index: int) -> str:
        """File and byte offset of an id."""
        i = bisect_right(self.starts, index) - 1
        return f"{self.shards[i].path}: byte offset {2 * (self.shards[i].first + index - self.starts[i])}"


@dataclass
class Source:
    """The data of one directory, and its share of the training sequences."""
    name: str
    weight: float
    train: Stream
    val: Stream


def open_data(spec: str) -> list[Source]:
    """The sources of a directory, or of a mixture such as web:0.7,code:0.3 (weights above 0, of any sum)."""
    if ":" not in spec or os.path.isdir(spec):
        return [open_source(spec, 1.0)]
    names, _, weights = zip(*(part.rpartition(":") for part in spec.split(",")))
    try:
        weights = [float(weight) for weight in weights]
    except ValueError:
        weights = [0]
    if not all(names) or not all(weight > 0 for weight in weights) or not sum(weights) < math.inf:
        raise DataError(f"{spec}: neither a directory nor a mixture, written dir:weight,dir:weight, weights above 0")
    return [open_source(name, weight / sum(weights)) for name, weight in zip(names, weights)]


def open_source(directory: str, weight: float) -> Source:
    """Maps a directory's shards; where none is for validation, the last 1% of the ids are held out for it."""
    low, high = resource.getrlimit(resource.RLIMIT_NOFILE)  # a mapped file keeps its descriptor
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(low, min(high, 1 << 16)), high))
    shards = [(split, map_shard(path, entry)) for path, split, entry in find_shards(directory)]
    train, val = (Stream([shard for its_split, shard in shards if its_split == split]) for split in ("train", "val"))
    if not len(train):
        raise DataError(f"{directory}: every shard in it is for validation, none for training")
    if not len(val):
        cut = len(train) - min(len(train) // 100, HELD_OUT)
        train, val = train.part(0, cut), train.part(cut, len(train))
    return Source(directory, weight, train, val)


def find_shards(directory: str) -> list[tuple[str, str, dict | None]]:
    """(path, split, entry in metadata.json) of the .bin files in and below a directory, sorted by relative name.

    Without an entry, a name or a folder such as val, val_00, valid or validation-1 makes the split "val", else "train".
    A file that several paths lead to is there once; what is passed over, link loops as well, is said in one line.
    """
    advice = f"make shards by `python data.py prepare INPUT --out {directory}`"
    if not os.path.isdir(directory):
        raise DataError(f"{directory}: no such directory; {advice}")
    paths, passed = walk(directory)
    names = sorted(os.path.relpath(path, directory) for path in paths if path.endswith((".bin", *RECORDS)))
    entries = {os.path.join(folder, entry["name"]): entry for folder in {"", *map(os.path.dirname, names)}
               for entry in read_metadata(os.path.join(directory, folder)).get("shards", ())}
    names = [name for name in names if name.endswith(".bin")]
    for name in sorted(entries.keys() - set(names)):
        raise DataError(f"{os.path.join(directory, name)}: missing, though metadata.json lists it")
    if not names:
        raise DataError(f"{directory}: no .bin file in it; {advice}")
    names, again = each_once(directory, names, first=entries)
    note_again(directory, passed[AGAIN] + again)
    splits = ["val" if any(VALIDATION.match(part) for part in Path(name).parts) else "train" for name in names]
    return [(os.path.join(directory, name), entries[name]["split"] if name in entries else split, entries.get(name))
            for name, split in zip(names, splits)]


def read_metadata(folder: str | Path) -> dict:
    """metadata.json of a folder; empty where there is none, or somebody else's, which does not list shards as ours."""
    path, journal = (Path(folder, name) for name in RECORDS)
    if not os.path.lexists(path):
        if journal.exists():
            raise DataError(f"{folder}: `prepare` was cut short here; give the same command again, it goes on")
        return {}
    try:
        metadata = json.loads(read_record(path))
    except (ValueError, RecursionError) as fault:
        raise DataError(f"{path}: not JSON: {fault}; delete it if it is not about these shards") from None
    shards = metadata.get("shards") if isinstance(metadata, dict) else None
    ours = isinstance(shards, list) and all(map(is_entry, shards))
    if not ours and isinstance(metadata, dict) and "fingerprint" in metadata:
        raise DataError(f"{path}: damaged: `shards` is not a list of objects with name, split, ids and sha256; copy it "
                        "again, or delete it to have its shards checked by their format alone")
    return metadata if ours else {}


def is_entry(entry) -> bool:
    """Whether a JSON value describes a shard, as far as training relies on it."""
    return (isinstance(entry, dict) and entry.get("split") in ("train", "val") and is_count(entry.get("ids"))
            and type(entry.get("name")) is type(entry.get("sha256")) is str)


def is_count(value) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def read_record(path: Path) -> bytes:
    """What one of RECORDS holds; DataError where it is longer than any that `prepare` writes."""
    with naming(path), open_plain(path) as file:
        content = file.read(RECORD_LIMIT + 1)
    if len(content) > RECORD_LIMIT:
        raise DataError(f"{path}: longer than {RECORD_LIMIT:,} bytes; delete it if it is not about these shards")
    return content


def map_shard(path: str, entry: dict | None) -> Shard:
    """A memory-mapped file; its ids are a plain uint16 array, since slices of np.memmap are slow."""
    with naming(path), open_plain(path) as file:
        stamp = _, size, _ = file_stamp(file.fileno())
        if size == 0:
            raise DataError(f"{path}: empty (byte offset 0); delete it")
        if entry is not None and size != 2 * entry["ids"]:
            raise DataError(f"{path}: ends at byte offset {size}, but metadata.json says {2 * entry['ids']}: cut off "
                            "or altered; copy or prepare it again")
        if size % 2:
            raise DataError(f"{path}: half an id at byte offset {size - 1}, the length is odd: cut off, or not a shard")
        return Shard(path, np.memmap(file, "<u2", "r", shape=size // 2).view(np.ndarray), 0, stamp)


def check_ids(stream: Stream, start: int, stop: int):
    """Raises DataError at the first of the ids start .. stop - 1 that is above 271."""
    for begin in range(start, stop, MIB):  # pieces that stay in the cache
        stream.shards[bisect_right(stream.starts, begin) - 1].check_unchanged()
        piece = stream.read(begin, min(begin + MIB, stop))
        if piece.max() >= VOCAB_SIZE:
            i = int((piece >= VOCAB_SIZE).argmax())
            raise DataError(f"{stream.where(begin + i)}: id {piece[i]} is above {VOCAB_SIZE - 1}: damaged, or no shard")


def check(sources: Sequence[Source]):
    """Raises DataError at an id above 271: looks at all of up to 2 GiB, else at the first and last MiB of every shard.

    What is not looked at here is when it is read: every batch checks its own ids.
    """
    streams = [stream for source in sources for stream in (source.train, source.val)]
    reach = MIB // 2 if sum(2 * len(stream) for stream in streams) > CHECK_ALL else CHECK_ALL
    for stream in streams:
        for start, stop in pairwise(stream.starts):
            check_ids(stream, start, min(start + reach, stop))
            check_ids(stream, max(start + reach, stop - reach), stop)


def mock_source(seed: int) -> Source:
    """About 1 MB of made-up sentences, which a model learns within a few steps, and 70 kB to validate; no file."""
    rng = random.Random(seed)
    words = ["".join(rng.choice("bdfgklmnprst") + rng.choice("aeiou") for _ in range(rng.choice((1, 2, 2, 3))))
             for _ in range(20)]
    often = [1 / (i + 1) for i in range(40)]
    sentences = [" ".join(rng.choices(words, often[:20], k=rng.randint(3, 5))) + ". " for _ in range(40)]

    def stream(documents: int) -> Stream:  # of 8 sentences; 0x02 and 0x03 stand for BOS and EOS
        text = "".join("\x02" + "".join(rng.choices(sentences, often, k=8)) + "\x03" for _ in range(documents))
        ids = np.frombuffer(text.encode(), np.uint8).astype(np.uint16)
        ids[ids == 2], ids[ids == 3] = BOS_ID, EOS_ID
        return Stream([Shard("mock data", ids)])

    return Source("mock", 1.0, stream(5000), stream(350))


# ---------------------------------------------------------------------------------------------------------------------
# The order of the data: pure functions of (seed, g), vectorised over sequences g

# Constants of SplitMix64; numpy takes its own scalars in half the time.
ADD, MUL_1, MUL_2, BITS_27, BITS_30, BITS_31, BITS_32 = map(
    np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 27, 30, 31, 32))


def mix(x: np.ndarray) -> np.ndarray:
    """uint64 -> uint64, the step of SplitMix64: a bijection in which every input bit reaches every output bit."""
    x = x + ADD
    x = (x ^ (x >> BITS_30)) * MUL_1
    x = (x ^ (x >> BITS_27)) * MUL_2
    return x ^ (x >> BITS_31)


def key(seed: int, *parts) -> np.ndarray:
    """uint64 hash of a seed and of numbers or arrays of numbers, none below 0; at least one-dimensional."""
    x = mix(np.array([seed % 2 ** 64], np.uint64))
    for part in parts:
        x = mix(x ^ np.asarray(part).astype(np.uint64))
    return x


def permute(index: np.ndarray, n: np.ndarray | int, keys: np.ndarray) -> np.ndarray:
    """Where keyed bijections of [0, n), n < 2**52, take the indices [m] under keys [m]; n [m] or a number; int64 [m].

    A Feistel network of four rounds on two digits to a base just above sqrt(n). A value of n or more is taken through
    again (cycle walking), which with this base is seldom needed.
    """
    n = np.asarray(n)
    base = np.sqrt(n).astype(np.uint64) + np.uint64(1)
    high, low = np.divmod(index.astype(np.uint64), base)
    round_keys = keys
    for _ in range(4):
        high, low = low, (high + (mix(round_keys ^ low) >> BITS_32)) % base
        round_keys = round_keys + ADD
    out = (high * base + low).astype(np.int64)
    beyond = np.flatnonzero(out >= n)
    if beyond.size:
        out[beyond] = permute(out[beyond], np.broadcast_to(n, out.shape)[beyond], keys[beyond])
    return out


def shares(weights: Sequence[float], total: int) -> list[int]:
    """Whole numbers that sum to total, in proportion to the weights (largest remainder, ties to the first)."""
    exact = [weight / sum(weights) * total for weight in weights]
    out = [int(x) for x in exact]
    for k in sorted(range(len(out)), key=lambda k: out[k] - exact[k])[:total - sum(out)]:
        out[k] += 1
    return out


class Loader:
    """The training sequences of a run, numbered from 0 in one global order that ranks and micro-steps share out.

    Each epoch of a source covers every one of its targets (every id but the first) exactly once, cut anew into windows
    of up to seq_len, in another order. Blocks of 10,000 sequences hold the sources in exact proportion to the weights.
    """

    def __init__(self, sources: Sequence[Source], seq_len: int, seed: int):
        self.stream, self.offsets = join([source.train for source in sources])
        self.seq_len, self.seed = seq_len, seed
        self.targets = np.array([len(source.train) - 1 for source in sources])
        self.windows = -(-self.targets // seq_len)                                    # in an epoch
        self.counts = np.array(shares([source.weight for source in sources], BLOCK))  # in a block
        self.ends = self.counts.cumsum()
        self.ahead_from, self.ahead = 0, self._place(np.arange(0))  # places of sequences worked out together
        for source, targets, count in zip(sources, self.targets, self.counts):
            if targets < seq_len:
                raise DataError(f"{source.name}: a sequence of {seq_len:,} bytes is longer than the data "
                                f"({max(0, targets):,} bytes): lower --seq_len")
            if count == 0:
                raise DataError(f"{source.name}: weight {source.weight:g} is not one sequence in {BLOCK:,}: raise it")

    def micro_batch(self, first: int, micro_step: int, micro_batch: int, rank: int = 0, ranks: int = 1):
        """One rank's (input_ids, labels, g) of a micro-step; g int64 [micro_batch] numbers the sequences.

        `first` sequences were consumed before this optimizer step, whose sequences are the same on any number of ranks.
        """
        import torch
        begin = first + (micro_step * ranks + rank) * micro_batch - self.ahead_from
        if not 0 <= begin <= len(self.ahead[0]) - micro_batch:
            self.ahead_from, begin = begin + self.ahead_from, 0
            self.ahead = self._place(self.ahead_from + np.arange(max(micro_batch, AHEAD)))
        places = (part[begin:begin + micro_batch] for part in self.ahead)
        g = self.ahead_from + begin + np.arange(micro_batch)
        return *cut_rows(self.stream, *places, self.seq_len), torch.from_numpy(g)

    def rows(self, g: np.ndarray):
        """Sequences g [n]: (input_ids, labels), int64 [n, seq_len]; labels are shifted, -100 does not count."""
        return cut_rows(self.stream, *self._place(np.asarray(g)), self.seq_len)

    def epoch(self, g: int) -> int:
        """The largest epoch, from 0, that a source has reached by sequence g; it never falls."""
        block = g // BLOCK
        source, index = self._deal(np.arange(block * BLOCK, g + 1))
        reached = [index[source == k].max(initial=block * count - 1) for k, count in enumerate(self.counts)]
        return int(max(reached // self.windows))

    def _deal(self, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Source number of sequences g, and their index in that source's own endless sequence."""
        if len(self.counts) == 1:
            return np.zeros_like(g), g
        block, slot = np.divmod(g, BLOCK)
        slot = permute(slot, BLOCK, key(self.seed, 0, block))
        source = np.searchsorted(self.ends, slot, side="right")
        return source, block * self.counts[source] + slot - (self.ends - self.counts)[source]

    def _place(self, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Start and stop of sequences g in the joined stream: inputs are ids start .. stop - 1, labels one further."""
        source, index = self._deal(g)
        targets, windows = self.targets[source], self.windows[source]
        epoch, position = np.divmod(index, windows)
        keys = key(self.seed, 1 + source, epoch)
        # Where windows do not fit evenly, each epoch's first one has another length, which moves the cuts behind it.
        rest = targets % self.seq_len
        head = np.where(rest == 0, self.seq_len, rest + (mix(keys) >> 32).astype(np.int64) % (self.seq_len - rest))
        stop = head + permute(position, windows, keys) * self.seq_len
        begin = self.offsets[source]
        return begin + np.maximum(stop - self.seq_len, 0), begin + np.minimum(stop, targets)


def join(streams: Sequence[Stream]) -> tuple[Stream, np.ndarray]:
    """Streams as one, and where each begins in it, int64 [len(streams)]."""
    offsets = np.array([0, *accumulate(map(len, streams))][:-1])
    return Stream([shard for stream in streams for shard in stream.shards]), offsets


def cut_rows(stream: Stream, start: np.ndarray, stop: np.ndarray, seq_len: int):
    """(input_ids, labels), int64 [n, seq_len], of windows start .. stop [n], both ends included, of a stream.

    A window of fewer than seq_len targets is filled up with PAD, its labels with -100, as is every label that is PAD.
    """
    import torch  # here: the workers of `prepare` do without it and start in a tenth of the time
    pieces, padding = [], np.full(seq_len, PAD_ID, np.uint16)
    first, last = stream.bounds.searchsorted((start, stop), "right") - 1  # shards
    shards, spans = list(zip(first.tolist(), last.tolist())), list(zip(start.tolist(), stop.tolist()))
    touched = [stream.shards[i] for a, b in set(shards) for i in range(a, b + 1)]
    for shard in touched:
        shard.check_unchanged()
    for (i, j), (a, b), begin in zip(shards, spans, stream.bounds[first].tolist()):
        pieces.append(stream.shards[i].ids[a - begin:b - begin + 1] if i == j else stream.read(a, b + 1))
        if b - a < seq_len:
            pieces.append(padding[b - a:])
    ids = np.concatenate(pieces).reshape(-1, seq_len + 1)
    for shard in touched:
        shard.check_unchanged()
    if ids.max() >= VOCAB_SIZE:
        for a, b in spans:
            check_ids(stream, a, b + 1)
    both = np.empty((2, len(ids), seq_len), np.int64)  # as two arrays, malloc would map and fault them in every time
    input_ids, labels = both
    input_ids[:], labels[:] = ids[:, :-1], ids[:, 1:]
    short = np.flatnonzero(stop - start < seq_len)
    input_ids[short, (stop - start)[short]] = PAD_ID  # the window's last id is a target only
    labels[labels == PAD_ID] = -100
    return tuple(torch.from_numpy(both))


def validation_rows(sources: Sequence[Source], seq_len: int, eval_tokens: int):
    """The first eval_tokens validation targets, shared out by weight: (input_ids, labels), int64 [n, seq_len].

    A source with fewer targets than its share gives what it has. DataError where there is not one target.
    """
    wanted = shares([source.weight for source in sources], eval_tokens)
    counts = [min(count, len(source.val) - 1) for source, count in zip(sources, wanted)]
    stream, offsets = join([source.val for source in sources])
    spans = [(offset + a, offset + min(a + seq_len, count)) for offset, count in zip(offsets.tolist(), counts)
             for a in range(0, count, seq_len)]
    if not spans:
        raise DataError(f"{', '.join(source.name for source in sources)}: no byte to validate on; prepare more data, "
                        "raise --eval_tokens, or switch evaluation off with --eval_every 0")
    return cut_rows(stream, *np.array(spans).T, seq_len)


# ---------------------------------------------------------------------------------------------------------------------
# prepare, reading: cutters plan pieces (size, (reader, path, ...)), of a packed file one with its size on disk;
# readers of an open file yield (split, bytes, begins a document, ends it)

class Input(NamedTuple):
    path: str
    size: int
    stamp: int | str          # time of change, ns; of standard input its SHA-256
    kind: str                 # one of CUTTERS


class Options(NamedTuple):
    field: str
    val_fraction: float
    unit_bytes: int
    ext: str | None = None    # endings such as .py,.md, or TEXT: the files that are read, each of them one document
    format: str | None = None  # of standard input


KINDS = {".txt": "txt", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
PACKED = ".gz", ".zst"        # behind any of them but .parquet
TEXT = "text"                 # of --ext: whatever is UTF-8
STRANGERS = {b"PAR1": "parquet", b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}  # by their first bytes


def find_inputs(arguments: Sequence[str], out: Path, options: Options) -> list[Input]:
    """The files that the arguments name, directories searched in sorted order."""
    inputs = []
    for argument in arguments:
        if argument == "-":
            found = [spool(out / STDIN, options.format)]
        elif os.path.isdir(argument):
            found = search(argument, out, options)
        else:
            kind = kind_of(argument, options)
            found = [measure(argument, kind)] if kind else []
            if found and (fault := unfit(found[0], options)):
                raise DataError(f"{argument}: {fault}")
        if not found and options.ext:
            raise DataError(f"{argument}: --ext {options.ext} takes nothing of it")
        if not found:
            raise DataError(f"{argument}: takes {', '.join(KINDS)}, all but the last with {' or '.join(PACKED)} too, a "
                            "directory of them, or - for standard input; --ext takes others, each file as a document")
        inputs += found
    return inputs


def kind_of(path: str, options: Options) -> str | None:
    """How a file is cut, by its name; None: it is none of those that are read."""
    name = Path(path).name.lower()
    if options.ext == TEXT:
        return None if is_packed(name) else "document"
    name = Path(name).stem if is_packed(name) else name
    if options.ext:
        return "document" if name.endswith(tuple(options.ext.split(","))) else None
    kind = KINDS.get(Path(name).suffix)
    return None if kind == "parquet" and is_packed(path) else kind


def is_packed(path: str) -> bool:
    return path.lower().endswith(PACKED)


@contextmanager
def open_input(path: str, report: Callable = lambda count: None) -> Iterator[IO[bytes]]:
    """A file to read, unpacked as its name says; `report` gets the numbers of bytes as they are read from the disk.

    Memory does not hang on what is in it. DataError where it is damaged, or cut off, or nothing here unpacks it.
    """
    with naming(path), open_plain(path, report) as raw:
        if not is_packed(path):
            yield raw
            return
        faults = EOFError, zlib.error, gzip.BadGzipFile
        if path.lower().endswith(".zst"):
            zstd = import_zstd(path)
            faults = EOFError, zstd.ZstdError
        try:
            with gzip.GzipFile(fileobj=raw) if path.lower().endswith(".gz") else zstd.ZstdFile(raw) as file:
                yield file
        except faults as fault:
            raise DataError(f"{path}: cannot be unpacked: {fault}; copy it again, or unpack it otherwise") from None


def import_zstd(path: str):
    """Python's module, or the same for a Python that has none: others take a file that is cut off for a whole one."""
    try:
        from compression import zstd  # from Python 3.14 on
    except ImportError:
        try:
            from backports import zstd
        except ImportError:
            raise DataError(f'{path}: .zst needs backports.zstd; run: pip install -e ".[zstd]"') from None
    return zstd


def search(directory: str, out: Path, options: Options) -> list[Input]:
    """The inputs in and below a directory, sorted by name; what is passed over is counted by kind, in one line."""
    paths, passed = walk(directory, own=out)
    paths = [str(path) for path in sorted(map(Path, paths)) if not path.is_dir()]
    kinds = {path: kind for path in paths if (kind := kind_of(path, options))}
    wanted, again = each_once("", list(kinds))
    note_again(f"prepare: {directory}", passed.pop(AGAIN) + again)
    found, faults = [], {path: ending(path) or "without an ending" for path in paths if path not in kinds}
    for path in wanted:
        if options.ext == TEXT and not os.path.isfile(path):
            faults[path] = "not a file"
            continue
        source = measure(path, kinds[path])
        if fault := unfit(source, options):
            if not options.ext:
                raise DataError(f"{path}: {fault}")
            faults[path] = fault
        else:
            found.append(source)
    for path, fault in faults.items():
        passed.setdefault(fault, []).append(path)
    parts = [f"{len(some):,} {fault} ({some[0]}{', ...' * (len(some) > 1)})"
             for fault, some in sorted(passed.items(), key=lambda item: -len(item[1])) if some]
    if parts:
        note(f"prepare: {directory}: passed over {', '.join(parts[:8])}{', ...' * (len(parts) > 8)}"
             + "; --ext takes other kinds, each file as a document" * (len(kinds) < len(paths) and not options.ext))
    return found


def ending(path: str) -> str:
    suffixes = Path(path).suffixes
    return "".join(suffixes[-2:] if is_packed(path) else suffixes[-1:]).lower()


def unfit(source: Input, options: Options) -> str | None:
    """Why there is no document in a file, as far as that is known before it is read in earnest."""
    if not source.size:
        return "empty"
    if is_packed(source.path):
        with open_input(source.path) as file:
            return None if file.read(1) else "empty"
    if options.ext == TEXT:
        decoder = codecs.getincrementaldecoder("utf-8")()
        with naming(source.path), open_plain(source.path) as file:
            try:
                while piece := file.read(MIB):
                    decoder.decode(piece)
                    if b"\0" in piece:
                        return "not text"
                decoder.decode(b"", final=True)
            except UnicodeDecodeError:
                return "not UTF-8"
    return None


def measure(path: str, kind: str) -> Input:
    with open_plain(path) as file:
        status = os.stat(file.fileno())
    return Input(path, status.st_size, status.st_mtime_ns, kind)


def spool(path: Path, format: str | None) -> Input:
    """Standard input as a file: its length must be known before it is split. DataError where it needs a --format."""
    digest, progress = hashlib.sha256(), Progress("standard input")
    with open_own(path, "wb") as file:
        while piece := sys.stdin.buffer.read(MIB):
            file.write(piece)
            digest.update(piece)
            progress.add(len(piece))
    if not progress.done:
        raise DataError("-: empty")
    with open_plain(path) as file:
        line = file.readline(LINE_LIMIT)
    kind = next((kind for begin, kind in STRANGERS.items() if line.startswith(begin)), None)
    with suppress(ValueError, RecursionError):
        kind = "JSON-lines" if isinstance(json.loads(line), dict) else kind
    if kind and format is None:
        raise DataError(f"-: looks like {kind}: --format says what it is ({', '.join(FORMATS)}); unpack what is packed")
    return Input(str(path), progress.done, digest.hexdigest(), format or "txt")


def draw_split(number: int, place: int, options: Options) -> str:
    """The split of the document at a place (byte offset, row) of input file `number`: hangs on nothing else."""
    draw = hashlib.blake2b(b"%d:%d" % (number, place), digest_size=8).digest()
    return "val" if int.from_bytes(draw, "little") < options.val_fraction * 2 ** 64 else "train"


def cut_text(source: Input, number: int, options: Options) -> Iterator:
    """A text file is one document, but its last val_fraction is another, which validates."""
    if is_packed(source.path):
        yield 2 * source.size, (read_packed_text, source.path, options)  # read twice
        return
    cut = int(source.size * (1 - options.val_fraction))
    yield from cut_part(source, "train", 0, cut, options)
    yield from cut_part(source, "val", cut, source.size, options)


def cut_document(source: Input, number: int, options: Options) -> Iterator:
    split = draw_split(number, 0, options)
    if is_packed(source.path):
        yield source.size, (read_packed_document, source.path, split)
    else:
        yield from cut_part(source, split, 0, source.size, options)


def cut_part(source: Input, split: str, first: int, last: int, options: Options) -> Iterator:
    """The bytes first .. last - 1 of a file as one document."""
    for start in range(first, last, options.unit_bytes):
        stop = min(start + options.unit_bytes, last)
        yield stop - start, (read_text, source.path, split, start, stop, start == first, stop == last)


def read_text(file: IO[bytes], split: str, start: int, stop: int, begins: bool, ends: bool) -> Iterator:
    file.seek(start)
    while start < stop:
        piece = file.read(min(4 * MIB, stop - start))
        if not piece:
            raise DataError(f"{file.name}: ends at byte offset {start}: it changed while it was read")
        start += len(piece)
        yield split, piece, begins, ends and start == stop
        begins = False


def read_packed_text(file: IO[bytes], options: Options) -> Iterator:
    """What cut_text and read_text make of the same file unpacked, whose size is known once it was read."""
    size = 0
    while piece := file.read(MIB):
        size += len(piece)
    if not size:
        raise DataError(f"{file.name}: empty")
    cut = int(size * (1 - options.val_fraction))
    yield from read_text(file, "train", 0, cut, True, True)
    yield from read_text(file, "val", cut, size, True, True)


def read_packed_document(file: IO[bytes], split: str) -> Iterator:
    piece, begins = file.read(4 * MIB), True
    while piece:
        after = file.read(4 * MIB)
        yield split, piece, begins, not after
        piece, begins = after, False


def cut_jsonl(source: Input, number: int, options: Options) -> Iterator:
    if is_packed(source.path):
        yield source.size, (read_jsonl, source.path, number, 0, math.inf, options)
        return
    for start in range(0, source.size, options.unit_bytes):
        stop = min(start + options.unit_bytes, source.size)
        yield stop - start, (read_jsonl, source.path, number, start, stop, options)


def read_jsonl(file: IO[bytes], number: int, start: int, stop: float, options: Options) -> Iterator:
    """The documents of the lines that begin in start .. stop - 1."""
    file.seek(max(0, start - 1))
    while start and (rest := file.readline(MIB)) and not rest.endswith(b"\n"):
        pass
    offset = file.tell()
    while offset < stop and (line := file.readline(LINE_LIMIT + 1)):
        try:
            if line.strip() or len(line) > LINE_LIMIT:
                yield draw_split(number, offset, options), parse_document(line, options.field), True, True
        except (ValueError, RecursionError) as fault:
            file.seek(0)
            before = sum(file.read(min(MIB, offset - i)).count(b"\n") for i in range(0, offset, MIB))
            raise DataError(f"{file.name}:{before + 1}: {fault} (the line at byte offset {offset})") from None
        offset += len(line)


def parse_document(line: bytes, field: str) -> bytes:
    """The bytes of a JSON line's document; ValueError with the reason where there is none."""
    if len(line) > LINE_LIMIT:
        raise ValueError(f"a line of more than {LINE_LIMIT:,} bytes")
    try:
        record = json.loads(line.decode("utf-8"))
        if not isinstance(record, dict) or not isinstance(record.get(field), str):
            raise ValueError(f"no object with a string {field!r}; --field names another field")
        return record[field].encode("utf-8")
    except UnicodeDecodeError as fault:
        raise ValueError(f"not UTF-8 at byte {fault.start} of the line") from None
    except UnicodeEncodeError as fault:
        raise ValueError(f"a lone surrogate at character {fault.start} of {field!r}") from None
    except json.JSONDecodeError as fault:
        raise ValueError(f"not JSON: {fault.msg} at column {fault.colno}") from None


@contextmanager
def open_parquet(file: IO[bytes]):
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f'{file.name}: parquet needs pyarrow; run: pip install -e ".[parquet]"') from None
    try:
        with pyarrow.parquet.ParquetFile(file, page_checksum_verification=True) as table:  # of pages that have one
            yield table
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as fault:
        raise DataError(f"{file.name}: {' '.join(str(fault).split())}") from None


def cut_parquet(source: Input, number: int, options: Options) -> Iterator:
    with open_plain(source.path) as file, open_parquet(file) as table:
        columns, row = {column.name: str(column.type) for column in table.schema_arrow}, 0
        if columns.get(options.field) not in ("string", "large_string"):
            raise DataError(f"{source.path}: no string column {options.field!r}; --field names another of: "
                            + ", ".join(f"{name} ({kind})" for name, kind in columns.items()))
        for group in range(table.num_row_groups):
            rows = table.metadata.row_group(group)
            yield rows.total_byte_size, (read_parquet, source.path, number, group, row, options)
            row += rows.num_rows


def read_parquet(file: IO[bytes], number: int, group: int, row: int, options: Options) -> Iterator:
    """The documents of a row group, the first of which is row `row` of the file."""
    with open_parquet(file) as table:
        for batch in table.iter_batches(256, row_groups=[group], columns=[options.field], use_threads=False):
            for text in batch.column(0).cast("large_binary").to_pylist():
                if text is None:
                    raise DataError(f"{file.name}: row {row} (from 0) has no {options.field!r}")
                yield draw_split(number, row, options), text, True, True
                row += 1


CUTTERS = {"txt": cut_text, "jsonl": cut_jsonl, "parquet": cut_parquet, "document": cut_document}
FORMATS = "txt", "jsonl", "parquet"  # of standard input


def plan(inputs: Sequence[Input], options: Options) -> list[tuple[int, list]]:
    """Units of work (size, pieces): consecutive pieces (size, reader, path, ...) until they have unit_bytes or more."""
    units, size, pieces = [], 0, []
    for number, source in enumerate(inputs):
        for piece_size, piece in CUTTERS[source.kind](source, number, options):
            size += piece_size
            pieces.append((piece_size, *piece))
            if size >= options.unit_bytes:
                units.append((size, pieces))
                size, pieces = 0, []
    return units + [(size, pieces)] if pieces else units


# ---------------------------------------------------------------------------------------------------------------------
# prepare, writing

class Progress:
    """Bytes done, their rate and the time left, on stderr: in place on a terminal, else a line every 5 seconds."""

    def __init__(self, what: str, total: int = 0):
        self.what, self.total, self.done, self.lock = what, total, 0, threading.Lock()
        self.terminal, self.begun = sys.stderr.isatty(), time.monotonic()
        self.shown = self.begun

    def add(self, size: int):
        if not size:
            return
        with self.lock:
            self.done += size
            now, complete = time.monotonic(), self.done == self.total
            if now - self.shown < (0.1 if self.terminal else 5) and not complete:
                return
            self.shown, rate = now, max(1, self.done) / max(1e-3, now - self.begun)
            line = f"{self.what}: {self.done / 1e6:,.1f} MB at {rate / 1e6:,.3g} MB/s"
            if self.total:
                part = self.done / self.total
                line += f" [{'#' * int(30 * part):30}] {part:4.0%}, {(self.total - self.done) / rate:,.0f} s left"
            line = f"\r{line}\033[K" + "\n" * complete if self.terminal else f"{line}\n"
            print(line, end="", file=sys.stderr, flush=True)


def open_own(path: Path, mode: str, buffering: int = -1) -> IO:
    """A file to write, never what a link leads to: "w" makes one in place of what has the name, "a" refuses a link."""
    if "w" in mode:
        path.unlink(missing_ok=True)
    return open(path, mode.replace("w", "x"), buffering,
                opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666))


@contextmanager
def locked(directory: Path, busy: Exception, warn: Callable = note):
    """Inside, no other process works in a directory, or `busy` is raised; a lock that dies with the process."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.exists(directory) or not os.path.samefile(descriptor, directory):
                raise busy                # who had the lock has deleted the directory
        except BlockingIOError:
            raise busy from None
        except OSError as fault:          # some network file systems
            warn(f"{directory} cannot be locked ({fault.strerror}): see that nothing else works in it")
        yield
    finally:
        os.close(descriptor)


def put_in_place(file: IO, path: Path, before_rename: Callable | None = None):
    """Gives a written temporary file its name; from then on no kill or power cut loses it or leaves half of it."""
    file.flush()
    os.fsync(file.fileno())
    if before_rename is not None:
        before_rename()
    os.replace(file.name, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


@contextmanager
def durable(path: Path, mode: str = "w", before_rename: Callable | None = None) -> Iterator[IO]:
    """A file that replaces the one of its name once it is whole and on the disk; an exception leaves that one alone.

    Yields the open temporary file, `.NAME.tmp` beside it; `before_rename` is called when that one is on the disk.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with open_own(temporary, mode) as file:
        try:
            yield file
            put_in_place(file, path, before_rename)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


class ShardWriter:
    """A shard under way: `write` fills a temporary file, `finish` makes it durable and gives it its name."""

    def __init__(self, path: Path):
        self.path, self.temporary = path, path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self.file, self.sha256 = open_own(self.temporary, "wb", MIB), hashlib.sha256()
        self.ids = self.documents = self.size = 0  # the last of bytes of text

    def write(self, text: bytes, begins: bool, ends: bool):
        ids = np.empty(begins + len(text) + ends, "<u2")
        ids[begins:begins + len(text)] = np.frombuffer(text, np.uint8)
        ids[:begins], ids[len(ids) - ends:] = BOS_ID, EOS_ID
        with naming(self.path):
            self.file.write(ids)
        self.sha256.update(ids)
        self.ids, self.documents, self.size = self.ids + len(ids), self.documents + begins, self.size + len(text)

    def finish(self) -> dict:
        with naming(self.path), self.file:
            put_in_place(self.file, self.path)
        return dict(name=self.path.name, split=self.path.name.partition("-")[0], ids=self.ids, documents=self.documents,
                    sha256=self.sha256.hexdigest())


def write_unit(out: Path, unit: int, pieces: list, limit: int, report: Callable) -> list[dict]:
    """Writes train-UNIT.bin and val-UNIT.bin, as far as there is something for them; returns their metadata entries.

    Behind `limit` bytes of text a split goes on in UNIT_00001, and so on. `report` is told of the input that is read.
    """
    writers, entries, left = dict(train=[], val=[]), [], 0

    def read(count: int):                 # what is read ahead, or again, is no progress
        nonlocal left
        count = max(0, min(count, left - 1))
        left -= count
        report(count)
    try:
        for left, reader, path, *arguments in pieces:
            with open_input(path, read) as file:
                for split, text, begins, ends in reader(file, *arguments):
                    parts = writers[split]
                    if not parts or parts[-1].size >= limit:
                        entries += [part.finish() for part in parts[-1:]]
                        more = f"_{len(parts):05d}" if parts else ""  # behind train-00000.bin by name, too
                        parts.append(ShardWriter(out / f"{split}-{unit:05d}{more}.bin"))
                    parts[-1].write(text, begins, ends)
            report(left)
        entries += [part.finish() for parts in writers.values() for part in parts[-1:]]
        return sorted(entries, key=lambda entry: entry["name"])
    except BaseException:
        for entry in entries:             # half of a unit is nothing to go on from
            (out / entry["name"]).unlink()
        raise
    finally:
        for writer in writers["train"][-1:] + writers["val"][-1:]:
            writer.temporary.unlink(missing_ok=True)
            with suppress(OSError):       # of a full disk: the rest of this file is not wanted
                writer.file.close()


class Cancelled(Exception):
    """Another unit failed, or the run is to end; nobody asks for this one any more."""


progress_of_all = is_cancelled = None     # in a worker: what it shares with the others and with their parent


def begin_worker(*shared):
    """A worker must not outlive a killed run, beside whose successor it would write, nor answer Ctrl-C by itself."""
    global progress_of_all, is_cancelled
    progress_of_all, is_cancelled = shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if not parent.is_alive():  # or the thread would come too late: work is waiting
        os._exit(1)
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def report_to_parent(count: int):
    with progress_of_all.get_lock():
        progress_of_all.value += count
    if is_cancelled.value:
        raise Cancelled


def write_units(out: Path, units: dict[int, list], workers: int, limit: int, progress: Progress) -> Iterator:
    """(unit, its metadata entries) as the units get done."""
    if min(workers, len(units)) < 2:
        for unit, pieces in units.items():
            yield unit, write_unit(out, unit, pieces, limit, progress.add)
        return
    context, results = multiprocessing.get_context("spawn"), queue.SimpleQueue()
    shared = done, cancelled = context.Value("q"), context.RawValue("b")
    pool = ProcessPoolExecutor(min(workers, len(units)), context, begin_worker, shared)
    try:
        futures = {}
        for unit, pieces in units.items():
            futures[future := pool.submit(write_unit, out, unit, pieces, limit, report_to_parent)] = unit
            future.add_done_callback(results.put)
        for _ in units:
            future = None
            while future is None:
                with suppress(queue.Empty):
                    future = results.get(timeout=0.1)
                progress.add(done.get_obj().value - progress.done)  # without its lock, which a killed worker may hold
            yield futures[future], future.result()
    except BrokenProcessPool:
        raise DataError(f"{out}: a worker died (memory?); the same command goes on, with fewer --workers") from None
    finally:
        cancelled.value = True
        pool.shutdown(cancel_futures=True)


def read_journal(path: Path) -> tuple[str | None, dict[int, list[dict]]]:
    """The fingerprint of a run that was cut short, and the entries of its units whose files are there."""
    records, done = [], {}
    for line in read_record(path).splitlines() if path.exists() else ():
        try:
            records.append(json.loads(line))
        except (ValueError, RecursionError):  # the last line, which a kill cut short
            break
    for record in records[1:]:
        unit, entries = (record.get("unit"), record.get("shards")) if isinstance(record, dict) else (None, None)
        if is_count(unit) and isinstance(entries, list) and all(
                is_entry(entry) and is_count(entry.get("documents"))
                and re.fullmatch(f"{entry['split']}-{unit:05d}(_[0-9]{{5,}})?[.]bin", entry["name"])
                and is_file_of(path.parent / entry["name"], 2 * entry["ids"]) for entry in entries):
            done[unit] = entries
    return records[0] if records and isinstance(records[0], str) else None, done


def is_file_of(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def prepare(args: argparse.Namespace):
    """Turns args.inputs into shards in args.directory; the same command again goes on where a killed run stopped."""
    if not 0 <= args.val_fraction < 1 or not 0 < args.unit_mb < math.inf:
        raise DataError("--val_fraction takes 0 or more, but less than 1; --unit_mb more than 0")
    if args.format and "-" not in args.inputs:
        raise DataError("--format says what standard input is, and - is not among the inputs")
    out, unit_bytes = Path(args.directory), max(1, int(args.unit_mb * 1e6))
    options = Options(args.field, args.val_fraction, unit_bytes, args.ext, args.format)
    made = [path for path in (out, *out.parents) if not path.exists()]
    out.mkdir(parents=True, exist_ok=True)
    with locked(out, DataError(f"{out}: another prepare works in it: wait for it, or choose another --out")):
        try:
            fill(out, args.inputs, options, args.workers)
        except DataError as fault:
            if not any(out.glob("*.bin")):  # nothing to go on from
                (out / "prepare.jsonl").unlink(missing_ok=True)
            raise DataError(str(fault).replace(str(out / STDIN), "-")) from None
        finally:
            (out / STDIN).unlink(missing_ok=True)
            with suppress(OSError):  # of a directory that is not empty
                for path in made:
                    path.rmdir()


def fill(out: Path, arguments: Sequence[str], options: Options, workers: int):
    """Turns what the arguments name into shards and metadata.json, in a directory where no other process works."""
    inputs = find_inputs(arguments, out, options)
    units = plan(inputs, options)
    spooled = str(out / STDIN)
    known = [("-" if source.path == spooled else source.path, source.size, source.stamp) for source in inputs]
    given = [option for option in options if option is not None]
    fingerprint = hashlib.sha256(json.dumps([known, given]).encode()).hexdigest()
    started, done = read_journal(out / "prepare.jsonl")
    if (out / "metadata.json").exists() and read_metadata(out).get("fingerprint") == fingerprint:
        find_shards(str(out))
        (out / "prepare.jsonl").unlink(missing_ok=True)
        say(f"{out}: already prepared from these inputs; nothing to do")
        return
    if (out / "metadata.json").exists() or started != fingerprint and any(out.glob("*.bin")):
        raise DataError(f"{out}: holds shards from other inputs or options; choose another --out, or delete it")
    done = {unit: done[unit] for unit in done if started == fingerprint and unit < len(units)}
    if done:
        say(f"{out}: goes on; {len(done)} of {len(units)} units are done")
    shards = write_shards(out, units, done, fingerprint, workers, 2 * options.unit_bytes)  # no plain unit has more
    for source in inputs:
        if source.path != spooled and measure(source.path, source.kind) != source:
            raise DataError(f"{source.path}: changed while it was prepared; delete {out} and prepare again")
    if not shards:
        raise DataError(f"{', '.join(arguments)}: no document in there")
    totals = {split: {count: sum(entry[count] for entry in shards if entry["split"] == split)
                      for count in ("ids", "documents")} for split in ("train", "val")}
    metadata = dict(vocab_size=VOCAB_SIZE, dtype="uint16", totals=totals, inputs=arguments, options=options._asdict(),
                    fingerprint=fingerprint, shards=shards)
    with durable(out / "metadata.json") as file:
        file.write(json.dumps(metadata, indent=1) + "\n")
    (out / "prepare.jsonl").unlink()
    say(f"{out}: {len(shards)} shards; " + "; ".join(
        f"{split} {total['ids']:,} ids, {total['documents']:,} documents" for split, total in totals.items()))


def write_shards(out: Path, units: list, done: dict[int, list], fingerprint: str, workers: int, limit: int) -> list:
    """Does the units that are not done, each recorded in the journal; returns all metadata entries in order."""
    for leftover in out.glob(".*.tmp"):
        leftover.unlink()
    records = [fingerprint, *(dict(unit=unit, shards=entries) for unit, entries in done.items())]
    with durable(out / "prepare.jsonl") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    todo = {unit: pieces for unit, (_, pieces) in enumerate(units) if unit not in done}
    progress = Progress("prepare", sum(units[unit][0] for unit in todo))
    with open_own(out / "prepare.jsonl", "a") as journal:
        for unit, entries in write_units(out, todo, workers, limit, progress):
            done[unit] = entries
            journal.write(json.dumps(dict(unit=unit, shards=entries)) + "\n")
            journal.flush()
            os.fsync(journal.fileno())
    return [entry for unit in sorted(done) for entry in done[unit]]


# ---------------------------------------------------------------------------------------------------------------------
# verify, show, and the command line

def verify_shard(path: str, entry: dict | None, progress: Progress) -> str | None:
    """A shard's first fault, as a line."""
    try:
        stream, digest = Stream([map_shard(path, entry)]), hashlib.sha256()
        for start in range(0, len(stream), MIB):
            stop = min(start + MIB, len(stream))
            check_ids(stream, start, stop)
            if entry is not None:
                digest.update(stream.read(start, stop))
            progress.add(2 * (stop - start))
        if entry is not None and digest.hexdigest() != entry["sha256"]:
            return f"{path}: altered: its SHA-256 is not the one in metadata.json; copy or prepare it again"
    except DataError as fault:
        return str(fault)


def verify(args: argparse.Namespace) -> list[str]:
    """The faults of a directory's shards, a line each, found on all cores."""
    shards = find_shards(args.directory)
    progress = Progress("verify", sum(os.path.getsize(path) for path, _, _ in shards))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        faults = [line for line in pool.map(lambda shard: verify_shard(shard[0], shard[2], progress), shards) if line]
    unlisted = sum(entry is None for _, _, entry in shards)
    if not faults:
        say(f"{args.directory}: {len(shards)} shards are sound"
            + f", {unlisted} of them by their format alone: no metadata.json lists them" * (unlisted > 0))
    return faults


def printable(ids: Iterable[int]) -> str:
    r"""Ids for a terminal: printable text as it is, other bytes as \n, \x07 or \\, other ids as \<BOS> or \<259>."""
    names, out = {PAD_ID: "PAD", BOS_ID: "BOS", EOS_ID: "EOS"}, []
    for is_byte, run in groupby(ids, lambda i: i < 256):
        if is_byte:
            out += [c if c.isprintable() and c != "\\" else repr(c.encode("utf-8", "surrogateescape"))[2:-1]
                    for c in bytes(run).decode("utf-8", "surrogateescape")]
        else:
            out += [f"\\<{names.get(i, i)}>" for i in run]
    return "".join(out)


def show(args: argparse.Namespace):
    """Prints sequences of a run: number, epoch of its source, source, place of the first id; that id and the labels."""
    if args.mock_data == (args.directory is not None):
        raise DataError("show takes either the run's --data_dir or its --mock_data")
    sources = [mock_source(args.seed)] if args.mock_data else open_data(args.directory)
    loader = Loader(sources, args.seq_len, args.seed)
    with reader_may_leave():
        for g in range(args.first, args.first + args.count):
            (k,), (index,) = loader._deal(np.array([g]))
            (start,), _ = loader._place(np.array([g]))
            (inputs,), (labels,) = loader.rows([g])
            print(one_line(f"{g}: epoch {index // loader.windows[k]}, {sources[k].name}, {loader.stream.where(start)}"))
            print("    " + printable([int(inputs[0]), *labels.masked_fill(labels < 0, PAD_ID).tolist()]))


def endings(text: str) -> str:
    parts = text.lower().split(",")
    if text != TEXT and not all(re.fullmatch(r"[.][^\s/]+", part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is neither endings such as .py,.md nor {TEXT}")
    if not_text := [part for part in parts if KINDS.get(part, "txt") != "txt" or part in PACKED]:
        raise argparse.ArgumentTypeError(f"{', '.join(not_text)} would be taken as it stands, not read: leave it out")
    return ",".join(parts)


def whole(low: int, high: int = (1 << 62) - 1) -> Callable:
    def parse(text: str) -> int:
        value = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
        return value
    return parse


class Parser(argparse.ArgumentParser):
    """Refuses with an exception; train.py's is made of it."""

    def parse_args(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        for word in sys.argv[1:] if argv is None else argv:
            if word.startswith("--") and word.endswith("=--"):  # of which argparse makes []
                self.error(f"argument {word[:-3]}: '--' is no value")
        return super().parse_args(argv)

    def print_help(self, file: IO | None = None):
        with reader_may_leave():
            super().print_help(file)

    def error(self, message: str):
        raise DataError(f"{message}; see data.py --help")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="{prepare,verify,show}")
    command = commands.add_parser("prepare", help="make shards; the same command again goes on after a kill")
    command.add_argument("inputs", nargs="+", metavar="INPUT", help="text, JSON-lines, parquet, directory, - (stdin)")
    command.add_argument("--ext", type=endings, metavar="ENDINGS", help="take the files that end so (.py,.md,.rst) or "
                         "whatever is UTF-8 (text), and no others, each as one document")
    command.add_argument("--format", choices=FORMATS, help="what standard input is (txt)")  # all else has a name
    command.add_argument("--out", dest="directory", required=True, metavar="DIR", help="where the shards go")
    command.add_argument("--field", default="text", help="JSON field or parquet column with the text (text)")
    command.add_argument("--val_fraction", type=float, default=0.1, help="part that validates, 0 <= fraction < 1 (0.1)")
    command.add_argument("--workers", type=whole(1, 1 << 10), default=os.cpu_count(), help="processes (one per core)")
    command.add_argument("--unit_mb", type=float, default=64, help="MB of input per unit of work and shard (64)")
    command.set_defaults(run=prepare)
    command = commands.add_parser("verify", help="check shards against metadata.json, or else their format")
    command.add_argument("directory", metavar="DIR")
    command.set_defaults(run=verify)
    command = commands.add_parser("show", help="print what a run read: sequences by their number in its order")
    command.add_argument("directory", nargs="?", metavar="SPEC", help="the run's --data_dir: a directory or a mixture")
    command.add_argument("--mock_data", action="store_true", help="the synthetic data in place of SPEC")
    command.add_argument("--seq_len", type=whole(1), default=2048, help="the run's (2048)")
    command.add_argument("--seed", type=whole(0), default=0, help="the run's (0)")
    command.add_argument("--first", type=whole(0), default=0, metavar="G", help="number of the first sequence (0)")
    command.add_argument("--count", type=whole(1), default=1, metavar="N", help="sequences to print (1)")
    command.set_defaults(run=show)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0; 2 with a line on stderr for each fault; 130 when interrupted."""
    status = 2
    sys.stdout.reconfigure(errors="backslashreplace")
    try:
        args = parse_args(argv)
        with naming(args.directory):
            faults = args.run(args) or []
    except DataError as fault:
        faults = [str(fault)]
    except KeyboardInterrupt:
        faults, status = ["interrupted; the same command again goes on"], 130
    for fault in faults:
        print(("\r\033[K" if sys.stderr.isatty() else "") + f"data.py: error: {one_line(fault)}",
              file=sys.stderr)
    return status if faults else 0


if __name__ == "__main__":
    sys.exit(main())
