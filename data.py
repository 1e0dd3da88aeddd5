"""Prepare text as byte shards, verify and print them, and read them in one global order, the input
of training.

    python data.py prepare books.txt web/ --out data  # text, JSON, directories of them; -: stdin
    python data.py prepare src/ --ext .py,.md --out code  # a document per file
    python data.py prepare HuggingFaceFW/fineweb-edu --config sample-10BT --out data  # from the Hub
    python data.py verify data                           # check sizes, checksums and ids
    python data.py show data --first 12544 --count 448   # print sequences as a run reads them

A shard is a headerless file of little-endian uint16 ids (see tokenizer.py); `metadata.json` beside
the shards describes them. The shards of a split form one stream, in the order of their names.
Sequence g of a run is a pure function of (seed, g): any step, rank or restart computes it
independently, in O(1) memory. Each source of a mixture is read to its end, in its own order, before
it repeats.
"""

from __future__ import annotations

import argparse
import dataclasses
import errno
import hashlib
import json
import math
import os
import random
import re
import stat
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from spider.common import (
    DataError,
    Parser,
    ProgressBar,
    durable,
    integer,
    locked,
    note,
    one_line,
    path_name,
    printable,
    quoted,
    real,
    run_program,
    say,
    sync,
)
from spider.datasets_import import (
    BOM,
    COMPRESSED,
    TABLES,
    hub_cells,
    is_compressed,
    json_lines,
    json_records,
    naming,
    open_input,
    pieces,
    table_cells,
    text_of,
    uncompressed_name,
)
from spider.noise import step_seed
from tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE

if TYPE_CHECKING:  # torch is imported where it is used: it takes seconds, and neither `prepare`
    import torch  # nor a mistyped flag needs it
    from torch import Tensor

MIB = 1 << 20
HELD_OUT = 10_000_000  # most ids to hold out where there is no validation shard
# names of validation shards and their folders
VALIDATION = re.compile(r"val(id(ation)?)?([^a-z]|$)", re.IGNORECASE)

# --------------------------------------------------------------------------------------------------
# Shards


class Shard(NamedTuple):
    """The ids of a file, or a slice of them that begins at id `first` of the file."""

    path: str
    ids: np.ndarray  # uint16
    first: int = 0


class Stream:
    """Shards as one sequence of ids; Stream([Shard("memory", ids)]) needs no file."""

    def __init__(self, shards: Iterable[Shard]):
        self.shards = list(shards)
        self.starts = [0, *accumulate(len(shard.ids) for shard in self.shards)]

    def __len__(self) -> int:
        return self.starts[-1]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return ids start .. stop - 1, uint16; a view if they are all in one shard."""
        i = bisect_right(self.starts, start) - 1
        if stop <= self.starts[i + 1]:
            return self.shards[i].ids[start - self.starts[i] : stop - self.starts[i]]
        return np.concatenate([shard.ids for shard in self.slice(start, stop).shards])

    def slice(self, start: int, stop: int) -> Stream:
        """Return the stream of ids start .. stop - 1."""
        cuts = [
            (shard, max(0, start - begin), min(len(shard.ids), stop - begin))
            for shard, begin in zip(self.shards, self.starts[:-1], strict=True)
        ]
        return Stream(
            shard._replace(ids=shard.ids[a:b], first=shard.first + a)
            for shard, a, b in cuts
            if a < b
        )

    def where(self, index: int) -> str:
        """Return the file and byte offset of an id."""
        i = bisect_right(self.starts, index) - 1
        shard = self.shards[i]
        return f"{shard.path}: byte offset {2 * (shard.first + index - self.starts[i])}"

    def check(self, start: int, stop: int):
        """Raise DataError at the first of the ids start .. stop - 1 that is above 271."""
        ids = self.read(start, stop)
        if ids.max() >= VOCAB_SIZE:
            i = int((ids >= VOCAB_SIZE).argmax())
            raise DataError(
                f"{self.where(start + i)}: id {ids[i]} is above {VOCAB_SIZE - 1}: damaged, or "
                f"not a shard"
            )

    def rows(self, start: np.ndarray, stop: np.ndarray, seq_len: int) -> tuple[Tensor, Tensor]:
        """Return (input_ids, labels), int64 [n, seq_len], of windows given by start and stop [n]:
        ids start .. stop - 1 are inputs, the ids one further their labels, so id stop is a label
        only. Short windows are padded with PAD; labels that are PAD become -100."""
        import torch

        ids = np.full((len(start), seq_len + 1), PAD_ID, np.uint16)
        for row, a, b in zip(ids, start.tolist(), stop.tolist(), strict=True):
            row[: b - a + 1] = self.read(a, b + 1)
        if ids.max() >= VOCAB_SIZE:
            for a, b in zip(start.tolist(), stop.tolist(), strict=True):
                self.check(a, b + 1)
        input_ids, labels = ids[:, :-1].astype(np.int64), ids[:, 1:].astype(np.int64)
        # a window's last id is a target only
        input_ids[np.arange(seq_len) >= (stop - start)[:, None]] = PAD_ID
        labels[labels == PAD_ID] = -100
        return torch.from_numpy(input_ids), torch.from_numpy(labels)


def files_below(directory: str, skip: Callable[[OSError], None] | None = None) -> list[str]:
    """List the files below a directory, sorted, without hidden names. Links are followed; a file is
    listed once, and a directory is searched once. `skip` gets the error of a directory that cannot
    be read, which is raised without it."""

    def stop(fault: OSError):
        raise fault

    searched: set[str] = set()
    found: dict[str, str] = {}  # path as it is listed, by real path
    for folder, folders, names in os.walk(directory, onerror=skip or stop, followlinks=True):
        real_folder = os.path.realpath(folder)
        if real_folder in searched:  # links may form a circle
            folders.clear()
            continue
        searched.add(real_folder)
        shown = (name for name in folders if not name.startswith("."))
        folders[:] = sorted(shown, key=lambda name: name + "/")  # in the order of the paths in them
        for name in names:
            if not name.startswith("."):
                path = os.path.join(folder, name)
                real_path = os.path.realpath(path)
                found[real_path] = min(path, found.get(real_path, path))
    return sorted(found.values())


def read_metadata(path: str) -> list[dict]:
    """Return the entries of shards (name, split, ids, sha256) in a metadata.json; none if another
    program wrote it. Raise DataError if they lack something."""
    remedy = "delete it if it does not belong to these shards"
    if not os.path.isfile(path):  # opening a pipe would wait for its writer
        raise DataError(f"{path}: not a regular file; {remedy}")
    try:
        metadata = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as fault:
        raise DataError(f"{path}: not JSON: {fault}; {remedy}") from None
    if not isinstance(metadata, dict) or metadata.get("vocab_size") != VOCAB_SIZE:
        return []
    entries = metadata.get("shards")
    if not isinstance(entries, list):
        raise DataError(f"{path}: has no list of shards; {remedy}")
    names = set()
    for number, entry in enumerate(entries):
        if wrong := wrong_field(entry):
            raise DataError(f"{path}: shard {number} has no valid {wrong}; {remedy}")
        if entry["name"] in names:
            raise DataError(f"{path}: lists {entry['name']} twice; {remedy}")
        names.add(entry["name"])
    return entries


def wrong_field(entry: object) -> str | None:
    """Return the first field of a shard's entry in metadata.json that is missing or invalid, None
    if all are valid."""
    if not isinstance(entry, dict):
        return "entry"
    name = entry.get("name")
    if not isinstance(name, str) or not name.endswith(".bin") or "\0" in name:
        return "name"
    if os.path.isabs(name) or ".." in Path(name).parts or name != os.path.normpath(name):
        return "name"
    if entry.get("split") not in ("train", "val"):
        return "split"
    ids = entry.get("ids")
    if type(ids) is not int or not 0 < ids < 1 << 62:
        return "ids"
    sha256 = entry.get("sha256")
    if not isinstance(sha256, str) or not re.fullmatch("[0-9a-f]{64}", sha256):
        return "sha256"
    return None


def find_shards(directory: str) -> list[tuple[str, str, dict | None]]:
    """List (path, split, entry in metadata.json) of the .bin files below a directory, sorted by
    relative path.

    Without an entry, the split is "val" if a file or folder name is like val, val_00, valid or
    validation-1, else "train".
    """
    remedy = f"make shards by `python data.py prepare INPUT --out {quoted(directory)}`"
    if not os.path.isdir(directory):
        raise DataError(f"{directory}: no such directory; {remedy}")
    names = sorted(os.path.relpath(path, directory) for path in files_below(directory))
    entries, found = {}, []
    for folder in sorted({os.path.dirname(name) for name in names}):
        path = os.path.join(directory, folder, "metadata.json")
        if os.path.lexists(path):
            for entry in read_metadata(path):
                entries[os.path.join(folder, entry["name"])] = entry
    if missing := sorted(entries.keys() - set(names)):
        raise DataError(
            f"{os.path.join(directory, missing[0])}: missing, though metadata.json lists it"
        )
    for name in names:
        if name.endswith(".bin"):
            split = "val" if any(map(VALIDATION.match, Path(name).parts)) else "train"
            split = entries[name]["split"] if name in entries else split
            found.append((os.path.join(directory, name), split, entries.get(name)))
    if not found:
        raise DataError(f"{directory}: no .bin file in it; {remedy}")
    return found


def map_shard(path: str, entry: dict | None = None) -> Shard:
    """Map a file as a plain uint16 array, since slices of np.memmap are slow; `entry`: of
    metadata.json."""
    size = os.path.getsize(path)
    if entry is not None and size != 2 * entry["ids"]:
        raise DataError(
            f"{path}: has {size:,} bytes, but metadata.json says {2 * entry['ids']:,}: truncated "
            f"or "
            "altered; copy or prepare it again"
        )
    if size == 0 or size % 2:
        raise DataError(
            f"{path}: has {size:,} bytes, none or an odd number: truncated, or not a shard"
        )
    return Shard(path, np.memmap(path, "<u2", "r").view(np.ndarray))


# --------------------------------------------------------------------------------------------------
# Sources: what --data_dir and --mock_data name


@dataclass
class Source:
    """The data of one directory, and its weight in the mixture."""

    name: str
    weight: float
    train: Stream
    val: Stream
    held_out: bool = False  # whether `val` is the end of the training shards

    def __str__(self) -> str:
        validation = f"{len(self.val):,} validation ids" if len(self.val) else "no validation ids"
        origin = (
            " (the end of its data, held out: it has no validation shard)" if self.held_out else ""
        )
        return f"{self.name}: {len(self.train):,} training and {validation}{origin}"

    def documents_per_byte(self) -> float:
        """Estimate how many documents begin per byte of training text, by its first million ids."""
        import torch

        from spider.packing import document_starts

        ids = self.train.read(0, min(len(self.train), 1_000_000))
        return float(document_starts(torch.from_numpy(ids.astype(np.int64))[None]).float().mean())


def open_data(spec: str) -> list[Source]:
    """Open a directory, or a mixture such as web:0.7,code:0.3 (positive weights, of any sum)."""
    if ":" not in spec or os.path.isdir(spec):
        return [open_source(spec, 1.0)]
    names, _, weights = zip(*(part.rpartition(":") for part in spec.split(",")), strict=True)
    try:
        weights = [float(weight) for weight in weights]
    except ValueError:
        weights = [0]
    if not all(names) or not all(weight > 0 for weight in weights) or not sum(weights) < math.inf:
        raise DataError(
            f"{spec}: neither a directory nor a mixture dir:weight,dir:weight with positive weights"
        )
    if len(set(map(os.path.realpath, names))) < len(names):
        raise DataError(
            f"{spec}: a directory is named twice: give it once, with the sum of its weights"
        )
    return [
        open_source(name, weight / sum(weights))
        for name, weight in zip(names, weights, strict=True)
    ]


def open_source(directory: str, weight: float) -> Source:
    """Map a directory's shards; without a validation shard, hold out the last 1% of the ids."""
    with suppress(ImportError):  # Windows has no such limit
        import resource

        low, high = resource.getrlimit(resource.RLIMIT_NOFILE)  # a mapped file keeps its descriptor
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(low, min(high, 1 << 16)), high))
    shards = [(split, map_shard(path, entry)) for path, split, entry in find_shards(directory)]
    train, val = (
        Stream(shard for its_split, shard in shards if its_split == split)
        for split in ("train", "val")
    )
    if not len(train):
        raise DataError(f"{directory}: has only validation shards, none for training")
    if len(val):
        return Source(directory, weight, train, val)
    cut = len(train) - min(len(train) // 100, HELD_OUT)
    return Source(
        directory, weight, train.slice(0, cut), train.slice(cut, len(train)), held_out=True
    )


def mock_source(seed: int) -> Source:
    """Generate about 1 MB of sentences that a model learns within a few steps, and 70 kB for
    validation, in memory."""
    rng = random.Random(seed)
    words = [
        "".join(
            rng.choice("bdfgklmnprst") + rng.choice("aeiou")
            for _ in range(rng.choice((1, 2, 2, 3)))
        )
        for _ in range(20)
    ]
    often = [1 / (i + 1) for i in range(40)]
    sentences = [
        " ".join(rng.choices(words, often[:20], k=rng.randint(3, 5))) + ". " for _ in range(40)
    ]

    def stream(documents: int) -> Stream:  # 8 sentences each; 0x02 and 0x03 stand for BOS and EOS
        text = "".join(
            "\x02" + "".join(rng.choices(sentences, often, k=8)) + "\x03" for _ in range(documents)
        )
        ids = np.frombuffer(text.encode(), np.uint8).astype(np.uint16)
        ids[ids == 2], ids[ids == 3] = BOS_ID, EOS_ID
        return Stream([Shard("mock data", ids)])

    return Source("mock", 1.0, stream(5000), stream(350))


# --------------------------------------------------------------------------------------------------
# The order of training, and the rows of an evaluation

BLOCK = 10_000  # sequences in which each source of a mixture has exactly its share

# Constants of SplitMix64, as numpy scalars, which are twice as fast as Python's.
ADD, MUL_1, MUL_2, BITS_27, BITS_30, BITS_31, BITS_32 = map(
    np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 27, 30, 31, 32)
)


def mix(x: np.ndarray) -> np.ndarray:
    """Apply a step of SplitMix64, uint64 -> uint64: a bijection where every input bit affects every
    output bit."""
    x = x + ADD
    x = (x ^ (x >> BITS_30)) * MUL_1
    x = (x ^ (x >> BITS_27)) * MUL_2
    return x ^ (x >> BITS_31)


def key(seed: int, *numbers) -> np.ndarray:
    """Hash a seed and non-negative numbers or arrays to uint64; the result has at least one
    dimension."""
    x = mix(np.array([seed % 2**64], np.uint64))
    for number in numbers:
        x = mix(x ^ np.asarray(number).astype(np.uint64))
    return x


def permute(index: np.ndarray, n: np.ndarray | int, keys: np.ndarray) -> np.ndarray:
    """Map indices [m] by keyed bijections of [0, n), n < 2**52, under keys [m]; n [m] or a number;
    int64 [m].

    A Feistel network of four rounds on two digits in a base just above sqrt(n). Values of n or more
    are mapped again (cycle walking), which is rare with this base.
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
    """Split `total` into integers in proportion to weights (largest remainder, ties to the
    first)."""
    exact = [weight / sum(weights) * total for weight in weights]
    out = [int(x) for x in exact]
    for k in sorted(range(len(out)), key=lambda k: out[k] - exact[k])[: total - sum(out)]:
        out[k] += 1
    return out


@lru_cache(maxsize=4)
def deal(seed: int, counts: tuple[int, ...], block: int) -> tuple[np.ndarray, np.ndarray]:
    """Assign each slot of a block to a source; return the source and the slot's rank within it,
    int64 [slots]."""
    ends = np.cumsum(counts)
    slots = np.arange(ends[-1])
    source = np.searchsorted(
        ends, permute(slots, len(slots), key(seed, 0, np.full_like(slots, block))), side="right"
    )
    rank = np.empty_like(slots)
    rank[np.argsort(source, kind="stable")] = slots  # by source, in order
    return source, rank - (ends - counts)[source]


class StepLayout(NamedTuple):
    """How the sequences of an optimizer step are spread; it does not choose them."""

    micro_batch: int  # sequences per rank and micro-step
    grad_accum: int  # micro-steps
    ranks: int = 1

    @property
    def sequences(self) -> int:
        """Sequences per optimizer step, on all ranks together."""
        return self.micro_batch * self.grad_accum * self.ranks


class Loader:
    """Read the training sequences of a run, numbered from 0 in one global order over ranks and
    micro-steps.

    Each epoch of a source covers each of its targets (every id but the first) exactly once, in new
    windows of up to seq_len and in a new order. Blocks of 10,000 sequences contain the sources in
    exact proportion to the weights, shuffled; each slot takes the next sequence of its source.
    """

    def __init__(self, sources: Sequence[Source], seq_len: int, seed: int):
        streams = [source.train for source in sources]
        self.stream = Stream(shard for stream in streams for shard in stream.shards)
        self.offsets = np.array([0, *accumulate(map(len, streams))][:-1])  # where each begins
        self.seq_len, self.seed = seq_len, seed
        self.targets = np.array([len(stream) - 1 for stream in streams])
        self.windows = -(-self.targets // seq_len)  # in an epoch
        self.counts = np.array(shares([source.weight for source in sources], BLOCK))  # in a block
        self.share = self.counts / BLOCK  # of each source, as dealt
        # of a block: source and rank of each slot
        self.deal = partial(deal, seed, tuple(self.counts.tolist()))
        for source, targets, count in zip(sources, self.targets, self.counts, strict=True):
            if targets < seq_len:
                raise DataError(
                    f"{source.name}: a sequence of {seq_len:,} bytes is longer than the data "
                    f"({max(0, targets):,} bytes): lower --seq_len"
                )
            if count == 0:
                raise DataError(
                    f"{source.name}: weight {source.weight:g} is less than one sequence in "
                    f"{BLOCK:,}: "
                    "raise it"
                )

    def mixture(self) -> dict[str, list]:
        """Return the targets of each source and its share of the sequences; beside seed and
        seq_len, these decide which sequences a step reads."""
        return dict(targets=self.targets.tolist(), shares=self.share.tolist())

    def batches(self, step: int, first: int, plan, rank: int = 0) -> Iterator[Batch]:
        """Yield a rank's micro-batches of an optimizer step. `first`: number of sequences before
        it; `plan`: has micro_batch, grad_accum and ranks, which cut the step's sequences into
        batches, but do not choose them."""
        noise = step_seed(self.seed, step, "noise")
        for micro_step in range(plan.grad_accum):
            begin = (micro_step * plan.ranks + rank) * plan.micro_batch
            yield Batch.of(*self.rows(first + begin + np.arange(plan.micro_batch)), noise + begin)

    def rows(self, g: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return sequences g [n] as (input_ids, labels), int64 [n, seq_len]; labels are shifted,
        those of -100 do not count."""
        return self.stream.rows(*self._spans(np.asarray(g)), self.seq_len)

    def describe(self, g: int) -> tuple[int, int, str]:
        """Return sequence g's number of source, that source's epoch, and the file and byte offset
        where it begins."""
        (k,), (index,) = self._source_and_index(np.array([g]))
        (start,), _ = self._spans(np.array([g]))
        return int(k), int(index // self.windows[k]), self.stream.where(start)

    def epochs(self, g: int) -> np.ndarray:
        """Count the passes over each source that were completed before sequence g; int64
        [sources]."""
        block, slot = divmod(g, BLOCK)
        read = block * self.counts + np.bincount(
            self.deal(block)[0][:slot], minlength=len(self.counts)
        )
        return read // self.windows

    def epoch(self, g: int) -> int:
        """Return the epoch of sequence g, from 0; of a mixture the mean of `epochs` by weight,
        rounded down."""
        return int(self.counts @ self.epochs(g)) // BLOCK

    def _source_and_index(self, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source number of sequences g, and their index in that source's own endless
        sequence."""
        block, slot = np.divmod(g, BLOCK)
        source, index = np.empty_like(g), np.empty_like(g)
        for number in np.unique(block).tolist():
            here = block == number
            owner, rank = (dealt[slot[here]] for dealt in self.deal(number))
            source[here], index[here] = owner, number * self.counts[owner] + rank
        return source, index

    def _spans(self, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return start and stop of sequences g in the joined stream: inputs are ids start .. stop -
        1, labels one further."""
        source, index = self._source_and_index(g)
        targets, windows = self.targets[source], self.windows[source]
        epoch, position = np.divmod(index, windows)
        keys = key(self.seed, 1 + source, epoch)  # an order of its own for each source and epoch
        # Windows end at head, head + seq_len, ..., and the last at `targets`. Where they do not fit
        # evenly, the first has head targets and the last seq_len + rest - head: each epoch cuts
        # elsewhere, with equally many windows.
        rest = targets % self.seq_len
        head = np.where(
            rest == 0,
            self.seq_len,
            rest + (mix(keys) >> 32).astype(np.int64) % (self.seq_len - rest),
        )
        stop = head + permute(position, windows, keys) * self.seq_len
        begin = self.offsets[source]
        return begin + np.maximum(stop - self.seq_len, 0), begin + np.minimum(stop, targets)


def validation_sets(
    sources: Sequence[Source], seq_len: int, eval_tokens: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the rows of every evaluation by source name: (input_ids, labels), int64 [n, seq_len].

    They have the first `eval_tokens` validation targets, split by weight. A source with fewer
    targets than its share contributes all of them; one without targets (or with PAD alone) is left
    out. Raise DataError if none is left.
    """
    sets = {}
    for source, share in zip(
        sources, shares([source.weight for source in sources], eval_tokens), strict=True
    ):
        count = min(share, len(source.val) - 1)
        if count > 0:
            starts = np.arange(0, count, seq_len)
            ids, labels = source.val.rows(starts, np.minimum(starts + seq_len, count), seq_len)
            if (labels != -100).any():
                sets[source.name] = ids, labels
    if not sets:
        raise DataError(
            f"{', '.join(source.name for source in sources)}: no validation data: prepare more "
            f"data, or "
            "train with --eval_every 0"
        )
    return sets


# --------------------------------------------------------------------------------------------------
# Batches of training


@dataclass
class Batch:
    """The sequences of a micro-step, with counts that are cheap to compute on the host before the
    copy."""

    ids: Tensor  # [B, T] int64
    labels: Tensor  # [B, T] int64, -100 is ignored
    noise_seed: int  # of the first row's segments and dropout
    cu_seqlens: Tensor  # int32 [documents + 1]
    longest: int  # upper bound of a document's length
    targets: int  # labels other than -100
    n_bytes: int  # ids that are not PAD

    @classmethod
    def of(cls, ids: Tensor, labels: Tensor, noise_seed: int) -> Batch:
        """Make a batch on the host."""
        from spider.packing import document_cu_seqlens, longest_bound

        cu_seqlens = document_cu_seqlens(ids)
        targets = int((labels != -100).sum())
        n_bytes = int((ids != PAD_ID).sum())
        return cls(
            ids,
            labels,
            noise_seed,
            cu_seqlens,
            longest_bound(cu_seqlens, ids.shape[1]),
            targets,
            n_bytes,
        )

    def to(self, device: torch.device) -> Batch:
        """Copy it to a device; from pinned memory, so that the host does not wait."""
        if device.type == "cpu":
            return self
        moved = {
            name: getattr(self, name).pin_memory().to(device, non_blocking=True)
            for name in ("ids", "labels", "cu_seqlens")
        }
        return dataclasses.replace(self, **moved)


class Feed:
    """Give a rank's batches step by step, on its device. A thread fetches those of the next step
    meanwhile."""

    def __init__(
        self, loader: Loader, plan, rank: int, device: torch.device, step: int, first: int
    ):
        """step, first: the next step, and the number of sequences before it; for `plan` see
        Loader.batches."""
        self.loader, self.plan, self.rank, self.device = loader, plan, rank, device
        # its thread is no daemon, which would abort inside of torch at the end
        self.thread = ThreadPoolExecutor(1)
        self._fetch(step, first)

    def take(self) -> list[Batch]:
        """Return the batches of the next step, and start to fetch those of the step after it."""
        batches = self.fetched.result()
        self._fetch(self.step + 1, self.first + self.plan.sequences)
        return batches

    def _fetch(self, step: int, first: int):
        def fetch() -> list[Batch]:
            return [
                batch.to(self.device)
                for batch in self.loader.batches(step, first, self.plan, self.rank)
            ]

        self.step, self.first, self.fetched = step, first, self.thread.submit(fetch)


# --------------------------------------------------------------------------------------------------
# prepare: inputs become documents, documents become shards

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")  # of a data set: owner/name
KINDS = {".txt": "text", ".jsonl": "lines", ".ndjson": "lines", ".json": "json"} | dict.fromkeys(
    TABLES, "table"
)


class Input(NamedTuple):
    """A file, standard input (-) or a data set of the hub, and how it is read."""

    path: str
    kind: str  # one of KINDS, or document, stdin, hub
    named: bool = True  # on the command line, not found in a directory

    def size(self) -> int | None:
        """Return the bytes that are read of it; None if they are not known before."""
        if self.kind in ("table", "hub", "stdin") or is_compressed(self.path):
            return None
        try:
            status = os.stat(self.path)
        except OSError:  # such an input is skipped, or its error raised when it is opened
            return 0
        return status.st_size if stat.S_ISREG(status.st_mode) else None


@dataclass
class Documents:
    """Read the documents of inputs. Bad records are skipped and counted by kind, or with `strict`
    raise DataError."""

    field: str  # of a JSON object, or the column of a table, with the text
    val_fraction: float
    endings: tuple[str, ...]  # if any, only files with these are read, each as a document
    config: str | None  # of a data set of the hub
    split: str  # the same
    strict: bool
    # count and first place by kind
    skipped: dict[str, list] = dataclasses.field(default_factory=dict)

    def find(self, argument: str) -> list[Input]:
        """List the inputs that an argument names; directories are searched in sorted order."""
        if argument == "-":
            return [Input("-", "stdin")]
        if not os.path.exists(argument):
            is_file = os.path.lexists(argument) or Path(argument).suffix.lower() in (
                *KINDS,
                *COMPRESSED,
            )
            if self.endings or is_file or not HUB_NAME.fullmatch(argument):
                raise DataError(f"{argument}: no such file or directory")
            return [Input(argument, "hub")]
        in_directory = os.path.isdir(argument)
        faults: list[OSError] = []  # of directories
        paths = (
            sorted(map(Path, files_below(argument, faults.append)))
            if in_directory
            else [Path(argument)]
        )
        for fault in faults:
            if fault.filename == argument:
                raise fault
            self.skip(f"unreadable: {fault.strerror}", fault.filename)
        kinds = [(str(path), self.kind_of(uncompressed_name(path))) for path in paths]
        found = [
            Input(path, kind, named=not in_directory) for path, kind in kinds if kind is not None
        ]
        if not found and not faults:
            raise DataError(
                f"{argument}: no {' '.join(self.endings or KINDS)} file; --ext names other text "
                f"files"
            )
        if len(found) < len(paths):
            note(
                f"prepare: {argument}: skipped {len(paths) - len(found):,} other files; --ext "
                f"names those to read as "
                "documents"
            )
        return found

    def kind_of(self, name: str) -> str | None:
        """Return how a file is read by its name; None if it is not."""
        if self.endings:
            return "document" if name.endswith(self.endings) else None
        return KINDS.get(Path(name).suffix)

    def read(self, source: Input, scratch: Path) -> Iterator[tuple[str, Iterable[bytes]]]:
        """Yield (split, pieces of the text) for each document of an input; `scratch`: see
        open_input."""
        path, kind, named = source
        if kind == "hub":
            yield from self.texts(path, hub_cells(path, self.field, self.config, self.split))
            return
        if not (named or os.path.isfile(path)):
            self.skip("missing, a dead link or no regular file", path)
            return
        try:
            file = open_input(path, scratch)
        except OSError as fault:
            if named or fault.filename != path:  # the other one is of `scratch`
                raise
            self.skip(f"unreadable: {fault.strerror}", path)
            return
        with file, naming(path):
            head = file.read(MIB)
            start = len(BOM) if head.startswith(BOM) else 0
            size = file.seek(0, os.SEEK_END) - start
            file.seek(start)
            if kind == "stdin":
                kind = "text"
                if found := re.match(rb'\s*(\[?)\s*\{\s*"', head[start:]):
                    kind = "json" if found[1] else "lines"
                label = dict(text="text", json="a JSON array", lines="JSON lines")[kind]
                note(f"prepare: -: read as {label}, by its first bytes")
            if size == 0:
                self.skip("empty", path)
            elif head.startswith((b"\xff\xfe", b"\xfe\xff")):  # its byte order mark
                self.skip("UTF-16: convert it by `iconv -f UTF-16 -t UTF-8`", path)
            elif kind == "table":
                yield from self.texts(path, table_cells(path, file, self.field))
            elif kind == "lines":
                yield from self.texts(path, json_lines(file))
            elif kind == "json":
                yield from self.texts(path, json_records(file))
            elif kind == "document":
                split = self.draw_split(pieces(file, size, path))
                file.seek(start)
                yield split, pieces(file, size, path)
            else:  # a text: its end is the validation split
                cut = int(size * (1 - self.val_fraction))
                for split, count in ("train", cut), ("val", size - cut):
                    if count:
                        yield split, pieces(file, count, path)

    def texts(self, path: str, records: Iterator[object]) -> Iterator[tuple[str, Iterable[bytes]]]:
        """Yield the documents of an input's records (see text_of), but for bad ones and blank
        lines."""
        number = 0
        while True:
            number += 1
            try:
                text = text_of(next(records), self.field)
            except StopIteration:
                return
            except ValueError as fault:
                self.skip(str(fault), f"{path}:{number}")
            else:
                if text is not None:
                    yield self.draw_split([text]), [text]

    def draw_split(self, text: Iterable[bytes]) -> str:
        """Draw the split of a document by a hash of its text, so that equal ones never fall into
        both; a document that validates at one --val_fraction does so at any higher one."""
        digest = hashlib.blake2b(digest_size=8, person=b"validation")
        for piece in text:
            digest.update(piece)
        return (
            "val"
            if int.from_bytes(digest.digest(), "little") < self.val_fraction * 2**64
            else "train"
        )

    def skip(self, kind: str, place: str):
        if self.strict:
            raise DataError(f"{place}: {kind}")
        self.skipped.setdefault(kind, [0, place])[0] += 1


class ShardWriter:
    """Write the shards of a split under temporary names, each of `limit` ids but the last."""

    BOS, EOS = np.array([BOS_ID], "<u2"), np.array([EOS_ID], "<u2")

    def __init__(self, out: Path, split: str, limit: int):
        # entries: of metadata.json
        self.out, self.split, self.limit, self.entries = out, split, limit, []
        # of the shard being written
        self.file, self.digest, self.ids, self.documents = None, None, 0, 0

    def write(self, document: Iterable[bytes], progress: ProgressBar):
        """Write a document; `progress`: counts its bytes."""
        self._put(self.BOS)
        self.documents += 1
        for piece in document:
            self._put(np.frombuffer(piece, np.uint8).astype("<u2"))
            progress.add(len(piece))
        self._put(self.EOS)

    def _put(self, ids: np.ndarray):
        while len(ids):
            if self.file is None:
                self.name = f"{self.split}-{len(self.entries):05d}.bin"
                # x: no link of this name is followed
                self.file = open(temporary(self.out, self.name), "xb", MIB)
                self.digest = hashlib.sha256()
            part, ids = ids[: self.limit - self.ids], ids[self.limit - self.ids :]
            self.file.write(part)
            self.digest.update(part)
            self.ids += len(part)
            if self.ids == self.limit:
                self.finish()

    def finish(self):
        """Complete the shard that is being written, if there is one."""
        if self.file is not None:
            self.file.close()
            sync(temporary(self.out, self.name))
            self.entries.append(
                dict(
                    name=self.name,
                    split=self.split,
                    ids=self.ids,
                    documents=self.documents,
                    sha256=self.digest.hexdigest(),
                )
            )
            self.file, self.ids, self.documents = None, 0, 0


def temporary(out: Path, name: str) -> Path:
    """Return the path of a shard until all are complete."""
    return out / f".{name}.tmp"


def prepare(arguments: Sequence[str], out: Path, documents: Documents, limit: int):
    """Turn inputs into shards of `limit` ids and metadata.json, in one pass; after a failure
    nothing is left.

    Shards get their names at the end, after metadata.json, so that nothing of a killed process is
    taken for data; it is deleted by the next one."""

    def clear():
        for path in (
            *out.glob("*.bin"),
            *out.glob(".*.bin.tmp"),
            *out.glob(".metadata.json.*.tmp"),
            out / "metadata.json",
        ):
            path.unlink(missing_ok=True)

    inputs = [found for argument in arguments for found in documents.find(argument)]
    sizes = [source.size() for source in inputs]
    progress = ProgressBar("prepare", 0 if None in sizes else sum(sizes))
    out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        described = (out / "metadata.json").exists()
        killed = described and any(out.glob(".*.bin.tmp"))
        if not killed and (described or any(out.rglob("*.bin"))):
            raise DataError(f"{out}: has shards already: use another --out, or delete it")
        clear()
        try:
            with naming(out):
                writers = {split: ShardWriter(out, split, limit) for split in ("train", "val")}
                for source, end in zip(
                    inputs, accumulate(size or 0 for size in sizes), strict=True
                ):
                    for split, document in documents.read(source, out):
                        writers[split].write(document, progress)
                    # of JSON lines only the texts were counted
                    progress.add(max(0, end - progress.done))
                for writer in writers.values():
                    writer.finish()
                totals = summarize(arguments, documents, writers)
                shards = [entry for writer in writers.values() for entry in writer.entries]
                with durable(out / "metadata.json") as file:
                    json.dump(
                        dict(
                            vocab_size=VOCAB_SIZE,
                            dtype="uint16",
                            totals=totals,
                            inputs=arguments,
                            field=documents.field,
                            ext=documents.endings,
                            val_fraction=documents.val_fraction,
                            split_by="blake2b of the text",
                            skipped={kind: count for kind, (count, _) in documents.skipped.items()},
                            shards=shards,
                        ),
                        file,
                        indent=1,
                    )
                for shard in shards:
                    os.replace(temporary(out, shard["name"]), out / shard["name"])
                sync(out)
        except OSError as fault:
            clear()
            if fault.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise DataError(
                f"{fault.filename}: {fault.strerror}: shards take two bytes for each byte of "
                f"text, and "
                "inputs that are compressed or piped a copy; make room, or use another --out"
            ) from None
        except BaseException:
            clear()
            raise
    say(
        f"{out}: "
        + "; ".join(
            f"{split} {total['ids']:,} ids, {total['documents']:,} documents"
            for split, total in totals.items()
        )
    )


def summarize(
    arguments: Sequence[str], documents: Documents, writers: dict[str, ShardWriter]
) -> dict[str, dict]:
    """Return the ids and documents of each split, and print what was skipped. Raise DataError
    without training data."""
    totals = {
        split: {
            count: sum(entry[count] for entry in writer.entries) for count in ("ids", "documents")
        }
        for split, writer in writers.items()
    }
    skipped = ", ".join(
        f"{count:,} {kind} (first: {place})" for kind, (count, place) in documents.skipped.items()
    )
    if not totals["train"]["ids"]:
        reason = skipped or "no document"
        if totals["val"]["ids"]:
            reason = "every document fell into the validation split: lower --val_fraction"
        raise DataError(f"{', '.join(arguments)}: nothing to train on: {reason}")
    if skipped:
        note(f"prepare: skipped {skipped}")
    if not totals["val"]["ids"]:
        note(
            "prepare: no validation split: training will hold out the last 1% of its data; for a "
            "real one "
            "raise --val_fraction or add documents"
        )
    return totals


# --------------------------------------------------------------------------------------------------
# verify and show


def verify(directory: str):
    """Check the shards of a directory; print each that is damaged, and raise DataError if there is
    one."""
    shards, damaged = find_shards(directory), 0
    progress = ProgressBar("verify", sum(os.path.getsize(path) for path, _, _ in shards))
    for path, _, entry in shards:
        try:
            stream, digest = Stream([map_shard(path, entry)]), hashlib.sha256()
            for start in range(0, len(stream), MIB):
                stop = min(start + MIB, len(stream))
                stream.check(start, stop)
                digest.update(stream.read(start, stop))
                progress.add(2 * (stop - start))
            if entry is not None and digest.hexdigest() != entry["sha256"]:
                raise DataError(
                    f"{path}: altered: its SHA-256 does not match metadata.json; copy or prepare "
                    f"it again"
                )
        except DataError as fault:
            note(str(fault))
            damaged += 1
    if damaged:
        raise DataError(f"{directory}: {damaged:,} of {len(shards):,} shards are damaged")
    say(f"{directory}: {len(shards):,} shards are valid")
    if unlisted := sum(entry is None for _, _, entry in shards):
        say(f"{unlisted:,} of them are not in a metadata.json: only their format was checked")


def show(sources: Sequence[Source], seq_len: int, seed: int, first: int, count: int):
    """Print sequences of a run: number, epoch, source, file and byte offset of the first id, then
    the text."""
    loader = Loader(sources, seq_len, seed)
    for g in range(first, first + count):
        k, epoch, offset = loader.describe(g)
        (inputs,), (labels,) = loader.rows([g])
        print(one_line(f"{g}: epoch {epoch}, {sources[k].name}, {offset}"))
        print(
            "    " + printable([int(inputs[0]), *labels.masked_fill(labels < 0, PAD_ID).tolist()])
        )


# --------------------------------------------------------------------------------------------------
# The command line


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="data.py", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command", metavar="{prepare,verify,show}")
    add = commands.add_parser("prepare", help="make shards from text").add_argument
    add(
        "inputs",
        nargs="+",
        type=path_name,
        metavar="INPUT",
        help="text, JSON, parquet, csv or arrow file, also "
        "compressed; directory of them; - (standard input); or OWNER/NAME, a data set of the "
        "Hugging Face hub",
    )
    add(
        "--out",
        dest="directory",
        required=True,
        type=path_name,
        metavar="DIR",
        help="directory for the shards",
    )
    add(
        "--ext",
        type=lambda text: tuple("." + ending.lstrip(".") for ending in text.lower().split(",")),
        default=(),
        metavar=".py,.md",
        help="read the files with these extensions alone, each as one document",
    )
    add("--field", default="text", metavar="NAME", help="JSON field or column with the text")
    add(
        "--val_fraction",
        type=real(0, 0.999),
        default=0.1,
        metavar="FRACTION",
        help="fraction for validation, below 1: the end of a text; of documents, those that a "
        "hash of them draws",
    )
    add("--config", "--name", help="configuration of a data set of the hub")
    add("--split", default="train", help="split of a data set of the hub")
    add("--strict", action="store_true", help="stop at the first bad record instead of skipping it")
    add("--shard_mb", type=real(1e-6, 1e9), default=256, metavar="MB", help="size of a shard")
    add = commands.add_parser(
        "verify", help="check shards: size and checksum by metadata.json, ids"
    ).add_argument
    add("directory", type=path_name, metavar="DIR")
    command = commands.add_parser("show", help="print the sequences that a run reads, by number")
    add = command.add_mutually_exclusive_group(required=True).add_argument
    add(
        "directory",
        nargs="?",
        type=path_name,
        metavar="SPEC",
        help="the run's --data_dir: a directory or a mixture",
    )
    add("--mock_data", action="store_true", help="synthetic data instead of SPEC")
    add = command.add_argument
    add("--seq_len", type=integer(1), default=2048, metavar="BYTES", help="the run's --seq_len")
    add("--seed", type=integer(0), default=0, metavar="N", help="the run's --seed")
    add("--first", type=integer(0), default=0, metavar="G", help="number of the first sequence")
    add("--count", type=integer(1), default=1, metavar="N", help="sequences to print")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run a command. Exit status: 0; 2 with a line on stderr for an error; 130 after Ctrl-C."""

    def command():
        args = parse_args(argv)
        if args.command == "prepare":
            documents = Documents(
                args.field, args.val_fraction, args.ext, args.config, args.split, args.strict
            )
            prepare(
                args.inputs, Path(args.directory), documents, max(1, int(args.shard_mb * 1e6 / 2))
            )
        elif args.command == "verify":
            verify(args.directory)
        else:
            sources = [mock_source(args.seed)] if args.mock_data else open_data(args.directory)
            show(sources, args.seq_len, args.seed, args.first, args.count)

    return run_program(command, "data.py", interrupted="interrupted")


if __name__ == "__main__":
    sys.exit(main())
