"""Byte shards: what training reads, and the commands that make and check them.

    python data.py prepare books.txt web/ --out data      # .txt, .jsonl, .parquet, directories of them, or - for stdin
    python data.py prepare src/ --ext .py,.md --out code  # each file a document; --ext text: whatever is UTF-8
    python data.py verify data                            # sizes, checksums and ids
    python data.py show data --first 12544 --count 448    # what a run with --data_dir data read there

A shard is a headerless file of little-endian uint16 ids (tokenizer.py says which); `metadata.json` beside the shards
describes them. The shards of a split are read as one stream, in the order of their names. What sequence g of a run
holds is a pure function of (seed, g): any step, rank or restart works it out by itself, in O(1) memory. Each source
of a mixture is read to its end, in its own order, before it is read again.
"""

import argparse
import hashlib
import json
import math
import os
import random
import re
import resource
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from files import (DataError, Progress, a_path, checked, each_once, identity, naming, note_again, number, one_line,
                   open_plain, reader_may_leave, say, walk)
from tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE

MIB = 1 << 20
BLOCK = 10_000                # sequences in which the sources of a mixture have their exact shares
CHECK_ALL = 2048 * MIB        # up to here, `check` looks at all of the data
AHEAD = 4096                  # sequences whose places are worked out at a time: numpy's calls cost more than their work
HELD_OUT = 10_000_000         # most ids held out where no shard is for validation
RECORD_LIMIT = 256 * MIB      # longest metadata.json or prepare.jsonl that is read: a million shards
VALIDATION = re.compile(r"val(id(ation)?)?([^a-z]|$)", re.IGNORECASE)
RECORDS = "metadata.json", "prepare.jsonl"  # what `prepare` says of its shards, done and under way


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
        weights = [number(weight) for weight in weights]
    except ValueError:
        weights = [0]
    if not all(names) or not all(weight > 0 for weight in weights) or not sum(weights) < math.inf:
        raise DataError(f"{spec}: neither a directory nor a mixture, written dir:weight,dir:weight, weights above 0")
    sources = [open_source(name, weight / sum(weights)) for name, weight in zip(names, weights)]
    if len({identity(name) for name in names}) < len(names):
        raise DataError(f"{spec}: names a directory twice: give it once, with the sum of its weights")
    return sources


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


@lru_cache(maxsize=4)
def deal(seed: int, counts: tuple[int, ...], block: int) -> tuple[np.ndarray, np.ndarray]:
    """Assign each slot of a block to a source; return its number and the slot's rank among its own, int64 [slots]."""
    ends = np.cumsum(counts)
    slots = np.arange(ends[-1])
    source = np.searchsorted(ends, permute(slots, len(slots), key(seed, 0, np.full_like(slots, block))), side="right")
    rank = np.empty_like(slots)
    rank[np.argsort(source, kind="stable")] = slots           # by source, in order
    return source, rank - (ends - counts)[source]


class Loader:
    """The training sequences of a run, numbered from 0 in one global order that ranks and micro-steps share out.

    Each epoch of a source covers every one of its targets (every id but the first) exactly once, cut anew into windows
    of up to seq_len, in another order. Blocks of 10,000 sequences hold the sources in exact proportion to the weights,
    in drawn order; each slot takes the next sequence of its source.
    """

    def __init__(self, sources: Sequence[Source], seq_len: int, seed: int):
        self.stream, self.offsets = join([source.train for source in sources])
        self.seq_len, self.seed = seq_len, seed
        self.targets = np.array([len(source.train) - 1 for source in sources])
        self.windows = -(-self.targets // seq_len)                                    # in an epoch
        self.counts = np.array(shares([source.weight for source in sources], BLOCK))  # in a block
        self.share, self.deal = self.counts / BLOCK, partial(deal, seed, tuple(self.counts.tolist()))
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

    def epochs(self, g: int) -> np.ndarray:
        """Count the passes over each source that were completed before sequence g; int64 [sources]."""
        block, slot = divmod(g, BLOCK)
        read = block * self.counts + np.bincount(self.deal(block)[0][:slot], minlength=len(self.counts))
        return read // self.windows

    def epoch(self, g: int) -> int:
        """Return the epoch of sequence g, from 0; of a mixture the mean of `epochs` by weight, rounded down."""
        return int(self.counts @ self.epochs(g)) // BLOCK

    def _deal(self, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Source number of sequences g, and their index in that source's own endless sequence."""
        block, slot = np.divmod(g, BLOCK)
        source, index = np.empty_like(g), np.empty_like(g)
        for number in np.unique(block).tolist():
            here = block == number
            owner, rank = (part[slot[here]] for part in self.deal(number))
            source[here], index[here] = owner, number * self.counts[owner] + rank
        return source, index

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


def whole(low: int, high: int = (1 << 62) - 1) -> Callable:
    def parse(text: str) -> int:
        value = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
        return value
    return parse


class Parser(argparse.ArgumentParser):
    """Refuses with an exception; train.py's is made of it."""

    def parse_args(self, argv: Sequence[str] | None = None, namespace=None) -> argparse.Namespace:
        for word in sys.argv[1:] if argv is None else argv:
            if word.startswith("--") and word.endswith("=--"):  # of which argparse makes []
                self.error(f"argument {word[:-3]}: '--' is no value")
        return super().parse_args(argv, namespace)

    def print_help(self, file: IO | None = None):
        with reader_may_leave():
            super().print_help(file)

    def error(self, message: str):
        raise DataError(f"{message}; see data.py --help")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    from prepare import FORMATS, endings, prepare  # here: it imports from this file
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="{prepare,verify,show}")
    command = commands.add_parser("prepare", help="make shards; the same command again goes on after a kill")
    command.add_argument("inputs", nargs="+", type=checked(a_path), metavar="INPUT",
                         help="text, JSON-lines, parquet, directory, - (stdin)")
    command.add_argument("--ext", type=endings, metavar="ENDINGS", help="take the files that end so (.py,.md,.rst) or "
                         "whatever is UTF-8 (text), and no others, each as one document")
    command.add_argument("--format", choices=FORMATS, help="what standard input is (txt)")  # all else has a name
    command.add_argument("--out", dest="directory", required=True, type=checked(a_path), metavar="DIR",
                         help="where the shards go")
    command.add_argument("--field", default="text", help="JSON field or parquet column with the text (text)")
    command.add_argument("--val_fraction", type=checked(number), default=0.1,
                         help="part that validates, 0 <= fraction < 1 (0.1)")
    command.add_argument("--workers", type=whole(1, 1 << 10), default=os.cpu_count(), help="processes (one per core)")
    command.add_argument("--unit_mb", type=checked(number), default=64,
                         help="MB of input per unit of work and shard (64)")
    command.set_defaults(run=prepare)
    command = commands.add_parser("verify", help="check shards against metadata.json, or else their format")
    command.add_argument("directory", type=checked(a_path), metavar="DIR")
    command.set_defaults(run=verify)
    command = commands.add_parser("show", help="print what a run read: sequences by their number in its order")
    command.add_argument("directory", nargs="?", type=checked(a_path), metavar="SPEC",
                         help="the run's --data_dir: a directory or a mixture")
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
    import data  # as prepare.py does: of the two copies, this one and __main__, one does all the work
    sys.exit(data.main())
