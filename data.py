"""Turn text into shards of bytes, verify them, print them, and read them in the order of training.

    python data.py prepare books.txt web/ --out data  # text, JSON, directories of them; -: stdin
    python data.py prepare src/ --out code               # source code: a document per file
    python data.py prepare HuggingFaceFW/fineweb-edu --config sample-10BT --out data  # from the Hub
    python data.py verify data                           # check sizes, checksums and ids
    python data.py show data --first 12544 --count 448   # print sequences as a run reads them

A shard is a headerless file of little-endian uint16 ids (see tokenizer.py). `metadata.json` next to
the shards describes them. The shards of a split form one stream, in the order of their names.
Sequence g of a run is a pure function of (seed, g): any step, rank or restart computes it
independently, in O(1) memory. Each source of a mixture is read to its end, in an order of its own,
before it repeats.
"""

from __future__ import annotations

from spider.threads import start_script

if __name__ == "__main__":
    start_script("data.py")

import argparse
import hashlib
import math
import os
import random
import re
import resource
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from spider.data.prepare import SHARD_MB, Documents, prepare
from spider.data.shard_files import ID_BYTES, METADATA, ShardEntry, files_below, read_metadata
from spider.data.stream import Shard, StepLayout, Stream
from spider.errors import (
    DataError,
    ProgressBar,
    print_line,
    print_status,
    printable,
    raise_on_signals,
    run_command,
)
from spider.flags import Parser, integer, path_name, quoted, real, refuse_url
from spider.model.noise import splitmix, step_seed
from spider.vocabulary import IGNORED
from tokenizer import BOS_ID, EOS_ID, PAD_ID

# torch is imported where it is used, because `prepare` needs neither its memory nor its seconds.
if TYPE_CHECKING:
    import torch
    from torch import Tensor

MAX_HELD_OUT = 10_000_000  # ids, if there is no validation shard
VALIDATION_NAME = re.compile(r"val(id(ation)?)?([^a-z]|$)", re.IGNORECASE)  # files and folders

# --------------------------------------------------------------------------------------------------
# Shards


def find_shards(directory: str) -> dict[str, ShardEntry | None]:
    """Map the sorted paths of the .bin files below a directory to their entries in a metadata.json,
    or to None if no metadata.json lists them."""
    text = quoted(directory) if os.path.exists(directory) else "FILE"
    remedy = f"to train on a text: python train.py --text {text}"
    if not os.path.isdir(directory):
        raise DataError(f"{directory}: not a directory of shards; {remedy}")
    paths = files_below(os.path.normpath(directory))
    entries = {}
    for path in paths:
        folder, file = os.path.split(path)
        if file == METADATA:
            for entry in read_metadata(path)["shards"]:
                entries[os.path.join(folder, entry.name)] = entry
    for path in sorted(entries.keys() - set(paths)):
        raise DataError(
            f"{path}: missing, though metadata.json lists it: copy it here, or delete the "
            f"directory and prepare again"
        )
    shards = {path: entries.get(path) for path in paths if path.endswith(".bin")}
    if not shards:
        raise DataError(f"{directory}: contains no .bin file; {remedy}")
    return shards


def split_by_name(name: str) -> str:
    """Return "val" if a file or folder in a relative path has a name like val, val_00, valid or
    validation-1, else "train"."""
    is_validation = any(VALIDATION_NAME.match(part) for part in Path(name).parts)
    return "val" if is_validation else "train"


def map_shard(path: str, entry: ShardEntry | None = None) -> Shard:
    """Map a file into memory. Raise DataError if its size differs from its entry in metadata.json,
    or is impossible for a shard."""
    size = os.path.getsize(path)
    if entry is not None and size != ID_BYTES * entry.ids:
        raise DataError(
            f"{path}: has {size:,} bytes, but metadata.json says {ID_BYTES * entry.ids:,}: "
            "truncated or altered; copy or prepare it again"
        )
    if size == 0 or size % ID_BYTES:
        raise DataError(
            f"{path}: has {size:,} bytes; a shard has two for each id: truncated, or not a shard"
        )
    # as a plain array: slices of np.memmap are slow
    return Shard(path, np.memmap(path, "<u2", "r").view(np.ndarray))


# --------------------------------------------------------------------------------------------------
# Sources: the data that --data_dir and --mock_data name


@dataclass
class Source:
    """The data of one directory, and its weight in the mixture."""

    name: str
    weight: float
    train: Stream
    val: Stream
    held_out: bool = False  # whether `val` is the end of the training shards

    def __str__(self) -> str:
        whose = "its last " if self.held_out else ""
        return (
            f"data: {len(self.train):,} ids in {self.name}, {whose}{len(self.val):,} for validation"
        )


def open_data(spec: str) -> list[Source]:
    """Open a directory, or a mixture such as web:0.7,code:0.3. Weights are positive and need not
    sum to 1."""
    if ":" not in spec or os.path.isdir(spec):
        return [open_source(spec, 1.0)]
    names = []
    weights = []
    for part in spec.split(","):
        name, _, weight = part.rpartition(":")
        names.append(name)
        try:
            weights.append(float(weight))
        except ValueError:
            weights.append(math.nan)
    total = sum(weights)
    if not (all(names) and all(weight > 0 for weight in weights) and total < math.inf):
        refuse_url(spec)
        raise DataError(
            f"{spec}: neither a directory nor a mixture dir:weight,dir:weight with positive weights"
        )
    if len({os.path.realpath(name) for name in names}) < len(names):
        raise DataError(
            f"{spec}: names a directory twice: name it once, with the sum of its weights"
        )
    return [open_source(name, weight / total) for name, weight in zip(names, weights, strict=True)]


def open_source(directory: str, weight: float) -> Source:
    """Map the shards of a directory. If there is no validation shard, hold out the last 1% of the
    ids."""
    raise_file_limit()
    shards: dict[str, list[Shard]] = {"train": [], "val": []}
    for path, entry in find_shards(directory).items():
        split = split_by_name(os.path.relpath(path, directory)) if entry is None else entry.split
        shards[split].append(map_shard(path, entry))
    train = Stream(shards["train"])
    val = Stream(shards["val"])
    if not len(train):
        raise DataError(f"{directory}: has only validation shards, none for training")
    if len(val):
        return Source(directory, weight, train, val)
    cut = len(train) - min(len(train) // 100, MAX_HELD_OUT)
    held_out = train.slice(cut, len(train))
    return Source(directory, weight, train.slice(0, cut), held_out, held_out=True)


def raise_file_limit():
    """Raise this process's limit of open files to 65,536 if possible: each mapped shard keeps a
    file descriptor."""
    with suppress(ValueError, OSError):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        # macOS reports no hard limit, but may refuse more than this
        limit = 10_240 if hard == resource.RLIM_INFINITY else min(1 << 16, hard)
        if limit > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def mock_source(seed: int) -> Source:
    """Generate in memory about 1 MB of sentences that a model learns within a few steps, and 70 kB
    for validation."""
    rng = random.Random(seed)
    words = []
    for _ in range(20):
        n_syllables = rng.choice((1, 2, 2, 3))
        syllables = [rng.choice("bdfgklmnprst") + rng.choice("aeiou") for _ in range(n_syllables)]
        words.append("".join(syllables))
    # The first words and sentences are the most frequent.
    word_weights = [1 / rank for rank in range(1, 21)]
    sentence_weights = [1 / rank for rank in range(1, 41)]
    sentences = []
    for _ in range(40):
        n_words = rng.randint(3, 5)
        sentences.append(" ".join(rng.choices(words, word_weights, k=n_words)) + ". ")

    def mock_stream(n_documents: int) -> Stream:
        documents = []
        for _ in range(n_documents):
            text = "".join(rng.choices(sentences, sentence_weights, k=8))
            documents.append(np.array([BOS_ID, *text.encode(), EOS_ID], np.uint16))
        return Stream([Shard("mock data", np.concatenate(documents))])

    train = mock_stream(5000)
    return Source("mock", 1.0, train, mock_stream(350))


# --------------------------------------------------------------------------------------------------
# Random permutations as functions of a key, so that there is no generator state to save

ADD = np.uint64(0x9E3779B97F4A7C15)  # the increment of SplitMix64's state
BITS_32 = np.uint64(32)
ONE = np.ones(1, np.int64)  # selects the first number after a state


def mix(x: np.ndarray) -> np.ndarray:
    """Return SplitMix64's first number after each state x, uint64 -> uint64: a bijection in which
    every input bit affects every output bit."""
    return splitmix(x.view(np.int64), ONE).view(np.uint64)


def key(seed: int, *numbers: int | np.ndarray) -> np.ndarray:
    """Hash a seed and non-negative numbers or arrays to uint64. The result has at least one
    dimension."""
    x = mix(np.array([seed % 2**64], np.uint64))
    for number in numbers:
        x = mix(x ^ np.asarray(number).astype(np.uint64))
    return x


def permute(index: np.ndarray, n: np.ndarray | int, keys: np.ndarray) -> np.ndarray:
    """Map each index with the permutation of [0, n) that its key selects; int64 [m].

    index [m]: integers in [0, n). n: [m] or one number, below 2**52. keys [m]: uint64.

    A Feistel network with four rounds, on two digits in a base just above sqrt(n), permutes a range
    slightly larger than n. A result of n or more is mapped again until it is below n (cycle
    walking); with this base such results are rare.
    """
    n = np.asarray(n)
    base = np.sqrt(n).astype(np.uint64) + np.uint64(1)
    high, low = np.divmod(index.astype(np.uint64), base)
    round_keys = keys
    for _ in range(4):
        random_digits = mix(round_keys ^ low) >> BITS_32
        high, low = low, (high + random_digits) % base
        round_keys = round_keys + ADD
    out = (high * base + low).astype(np.int64)
    beyond = np.flatnonzero(out >= n)
    if beyond.size:
        n_beyond = np.broadcast_to(n, out.shape)[beyond]
        out[beyond] = permute(out[beyond], n_beyond, keys[beyond])
    return out


# --------------------------------------------------------------------------------------------------
# The order of training

BLOCK = 10_000  # sequences; in each block, every source of a mixture has exactly its share


def apportion(weights: Sequence[float], total: int) -> list[int]:
    """Split `total` into integers proportional to weights with the largest remainder method; ties
    go to the first."""
    exact = [weight / sum(weights) * total for weight in weights]
    out = [int(part) for part in exact]
    missing = total - sum(out)
    by_remainder = sorted(range(len(out)), key=lambda k: out[k] - exact[k])
    for k in by_remainder[:missing]:
        out[k] += 1
    return out


class PickedWindows(NamedTuple):
    """The windows of n sequences: the result of step 2 (see Loader). All arrays are [n]."""

    source: np.ndarray  # number of the source, int64
    epoch: np.ndarray  # number of this source's epoch, int64
    epoch_key: np.ndarray  # random number of this source and epoch, uint64
    window: np.ndarray  # number of the window, in the order of the text, int64


class Loader:
    """Read the training sequences of a run.

    Sequences are numbered g = 0, 1, ... in one global order over ranks and micro-steps. Three steps
    lead from g to ids. Each step is a function of (seed, g) alone, and computes many g at once:

    1. `_pick_sources`: which source, and how many of its sequences came before? Every 10,000
       sequences form a block in which each source has exactly its share, in random order.
    2. `_pick_windows`: which window of the source's text? Each epoch of a source reads every window
       once, in a random order of its own.
    3. `_cut_spans`: which ids? A window has seq_len targets, except the first and last window of an
       epoch. The windows cover every target (every id except the stream's first) exactly once, and
       each epoch cuts at different offsets.

    For example, sequence 12,345 of two sources with weights 0.7 and 0.3:

    1. It is slot 2,345 of block 1. If block 1 deals this slot and 700 earlier ones to the second
       source, 3,000 + 700 sequences of the second source came before.
    2. If an epoch of the second source has 1,000 windows, this is number 700 of epoch 3. The
       permutation of this source and epoch maps 700 to window 42, for example.
    3. Window 42 has up to seq_len ids and the id after them.

    Checkpoints do not store the order, only seed, seq_len, the bytes read and `mixture`. So a
    change to any step would give a resumed run different text.
    """

    def __init__(self, sources: Sequence[Source], seq_len: int, seed: int, block: int = BLOCK):
        """block: sequences per block, in which each source has exactly its share."""
        streams = [source.train for source in sources]
        self.seq_len = seq_len
        self.seed = seed
        self.block = block
        # All sources as one stream, and the index of each source's first id in it.
        self.stream = Stream(shard for stream in streams for shard in stream.shards)
        self.offsets = np.array([0, *accumulate(len(stream) for stream in streams)][:-1])
        # Per source: targets and windows of an epoch, and sequences of a block.
        self.targets = np.array([len(stream) - 1 for stream in streams])
        self.windows_per_epoch = -(-self.targets // seq_len)
        self.block_counts = np.array(apportion([source.weight for source in sources], block))
        self.share = self.block_counts / block  # the exact fraction of the sequences
        self.deal = lru_cache(maxsize=4)(self._deal)
        # With seed and seq_len, this decides which sequences a step reads. Saved in checkpoints.
        self.mixture = dict(targets=self.targets.tolist(), shares=self.share.tolist())
        for source, targets, count in zip(sources, self.targets, self.block_counts, strict=True):
            if targets < seq_len:
                raise DataError(
                    f"{source.name}: a sequence of {seq_len:,} bytes is longer than the data "
                    f"({max(0, targets):,} bytes): lower --seq_len"
                )
            if count == 0:
                raise DataError(
                    f"{source.name}: weight {source.weight:g} is less than one sequence in "
                    f"{block:,}: raise it"
                )

    def batches(self, step: int, first: int, layout: StepLayout, rank: int = 0) -> Iterator[Batch]:
        """Yield a rank's micro-batches of an optimizer step. first: the number of the step's first
        sequence."""
        step_noise = step_seed(self.seed, step, "noise")
        for micro_step in range(layout.grad_accum):
            begin = (micro_step * layout.ranks + rank) * layout.micro_batch
            input_ids, labels = self.rows(first + begin + np.arange(layout.micro_batch))
            yield Batch.of(input_ids, labels, step_noise + begin)

    def rows(self, g: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return sequences g [n] as (input_ids, labels), int64 [n, seq_len]. Labels are already
        shifted; IGNORED labels do not count."""
        start, stop = self._cut_spans(self._pick_windows(g))
        return self.stream.rows(start, stop, self.seq_len)

    def locate(self, g: int) -> tuple[int, int, str]:
        """Locate sequence g: return the number of its source, the source's epoch, and the file and
        byte offset of its first id."""
        windows = self._pick_windows(np.array([g]))
        start, _ = self._cut_spans(windows)
        offset = self.stream.where(int(start[0]))
        return int(windows.source[0]), int(windows.epoch[0]), offset

    def epochs(self, g: int) -> np.ndarray:
        """Count each source's epochs that are complete before sequence g; int64 [sources]."""
        block, slot = divmod(g, self.block)
        sources, _ = self.deal(block)
        in_this_block = np.bincount(sources[:slot], minlength=len(self.block_counts))
        return (block * self.block_counts + in_this_block) // self.windows_per_epoch

    def epoch(self, g: int) -> int:
        """Return the epoch of sequence g, counted from 0. For a mixture this is the weighted mean
        of `epochs`, rounded down."""
        return int(self.block_counts @ self.epochs(g)) // self.block

    def _deal(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Deal the slots of a block to the sources, in random order.

        Return for each slot the number of its source, in the order of --data_dir, and how many
        earlier slots of the block have the same source; int64 [slots]."""
        slots = np.arange(self.block)
        shuffled = permute(slots, self.block, key(self.seed, 0, np.full_like(slots, block)))
        # The lowest block_counts[0] shuffled numbers belong to the first source, and so on.
        source = np.searchsorted(np.cumsum(self.block_counts), shuffled, side="right")
        before = np.empty_like(slots)
        for number, count in enumerate(self.block_counts):
            before[source == number] = np.arange(count)
        return source, before

    def _pick_sources(self, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Step 1: return the source of each sequence g [n], and how many sequences of this source
        came before, over all epochs; int64 [n]."""
        block, slot = np.divmod(g, self.block)
        source = np.empty_like(g)
        position = np.empty_like(g)
        for number in np.unique(block).tolist():
            in_block = block == number
            sources, positions = self.deal(number)
            slots = slot[in_block]
            source[in_block] = sources[slots]
            position[in_block] = number * self.block_counts[sources[slots]] + positions[slots]
        return source, position

    def _pick_windows(self, g: np.ndarray) -> PickedWindows:
        """Step 2: find the epoch of each sequence g [n], and permute the windows of the epoch."""
        source, position = self._pick_sources(g)
        windows = self.windows_per_epoch[source]
        epoch, position_in_epoch = np.divmod(position, windows)
        epoch_key = key(self.seed, 1 + source, epoch)
        window = permute(position_in_epoch, windows, epoch_key)
        return PickedWindows(source, epoch, epoch_key, window)

    def _cut_spans(self, windows: PickedWindows) -> tuple[np.ndarray, np.ndarray]:
        """Step 3: cut the text of each source into the windows of an epoch. Return start and stop,
        int64 [n]: the inputs of a window are ids start .. stop - 1 of the joined stream, its labels
        ids start + 1 .. stop.

        With rest = targets % seq_len, windows end after these numbers of targets:

            rest == 0   seq_len, 2 * seq_len, ..., targets
            rest > 0    head, head + seq_len, ..., targets; head is random, rest <= head < seq_len

        The last window then has seq_len + rest - head targets, so that every epoch has the same
        number of windows.
        """
        seq_len = self.seq_len
        targets = self.targets[windows.source]
        rest = targets % seq_len
        random_number = (mix(windows.epoch_key) >> BITS_32).astype(np.int64)
        head = np.where(rest == 0, seq_len, rest + random_number % (seq_len - rest))
        stop = head + windows.window * seq_len
        start = np.maximum(stop - seq_len, 0)
        offset = self.offsets[windows.source]
        return offset + start, offset + np.minimum(stop, targets)


# --------------------------------------------------------------------------------------------------
# Evaluation


def validation_sets(
    sources: Sequence[Source], seq_len: int, eval_tokens: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the rows that every evaluation scores, by source name: (input_ids, labels), int64
    [n, seq_len].

    `eval_tokens` is split among the sources by weight. Each source contributes its first validation
    targets, or all of them if it has too few. A source without targets, or with only PAD, is left
    out. Raise DataError if no source remains.
    """
    sets = {}
    counts = apportion([source.weight for source in sources], eval_tokens)
    for source, count in zip(sources, counts, strict=True):
        n_targets = min(count, len(source.val) - 1)
        if n_targets <= 0:
            continue
        starts = np.arange(0, n_targets, seq_len)
        stops = np.minimum(starts + seq_len, n_targets)
        input_ids, labels = source.val.rows(starts, stops, seq_len)
        if (labels != IGNORED).any():
            sets[source.name] = input_ids, labels
    if not sets:
        names = ", ".join(source.name for source in sources)
        raise DataError(
            f"{names}: no validation data: prepare more data, or train with --eval_every 0"
        )
    return sets


# --------------------------------------------------------------------------------------------------
# Batches of training


@dataclass
class Batch:
    """The sequences of a micro-step, with counts that the host computes before the copy to the
    device."""

    ids: Tensor  # [B, T] int64
    labels: Tensor  # [B, T] int64, -100 is ignored
    noise_seed: int  # for segments and dropout of row 0; row i has noise_seed + i
    cu_seqlens: Tensor  # int32 [documents + 1]
    max_seqlen: int  # upper bound of a document's length
    targets: int  # labels other than -100
    n_bytes: int  # ids that are not PAD

    @classmethod
    def of(cls, ids: Tensor, labels: Tensor, noise_seed: int) -> Batch:
        """Make a batch on the host."""
        from spider.model.packing import document_cu_seqlens, max_seqlen_of

        cu_seqlens = document_cu_seqlens(ids)
        return cls(
            ids,
            labels,
            noise_seed,
            cu_seqlens,
            max_seqlen=max_seqlen_of(cu_seqlens, ids.shape[1]),
            targets=int((labels != IGNORED).sum()),
            n_bytes=int((ids != PAD_ID).sum()),
        )

    def to(self, device: torch.device) -> Batch:
        """Copy the batch to a device, from pinned memory so that the host does not wait."""
        if device.type == "cpu":
            return self

        def copy(tensor: Tensor) -> Tensor:
            return tensor.pin_memory().to(device, non_blocking=True)

        return replace(
            self,
            ids=copy(self.ids),
            labels=copy(self.labels),
            cu_seqlens=copy(self.cu_seqlens),
        )


@dataclass
class Prefetcher:
    """Return a rank's batches step by step, on its device, while a thread fetches the batches of
    the next step."""

    loader: Loader
    layout: StepLayout
    rank: int
    device: torch.device
    step: int  # the step to fetch next
    first: int  # the number of its first sequence

    def __post_init__(self):
        # Not a daemon thread, which would abort inside torch when the process ends.
        self.thread = ThreadPoolExecutor(1)
        self.fetched = self.thread.submit(self._fetch)  # the batches that `take` returns next

    def take(self) -> list[Batch]:
        """Return the next step's batches, and start to fetch the batches of the step after it."""
        batches = self.fetched.result()
        self.step += 1
        self.first += self.layout.sequences
        self.fetched = self.thread.submit(self._fetch)
        return batches

    def _fetch(self) -> list[Batch]:
        batches = self.loader.batches(self.step, self.first, self.layout, self.rank)
        return [batch.to(self.device) for batch in batches]


# --------------------------------------------------------------------------------------------------
# verify and show


def verify(directory: str):
    """Check the shards of a directory. Print an error for each damaged shard, and raise DataError
    if there is one."""
    shards = find_shards(directory)
    progress = ProgressBar("verify", sum(os.path.getsize(path) for path in shards))
    damaged = 0
    for path, entry in shards.items():
        try:
            verify_shard(path, entry)
        except DataError as error:
            print_status(str(error))
            damaged += 1
        progress.add(os.path.getsize(path))
    if damaged:
        raise DataError(f"{directory}: damaged shards: {damaged:,} of {len(shards):,}")
    print_line(f"{directory}: valid shards: {len(shards):,}")
    unlisted = list(shards.values()).count(None)
    if unlisted:
        print_line(
            f"only their format was checked, since no metadata.json lists them: {unlisted:,}"
        )


def verify_shard(path: str, entry: ShardEntry | None):
    """Check the size, ids and checksum of a shard. Raise DataError if it is damaged."""
    shard = map_shard(path, entry)
    stream = Stream([shard])
    stream.check(0, len(stream))
    if entry is not None and hashlib.sha256(shard.ids.data).hexdigest() != entry.sha256:
        raise DataError(
            f"{path}: altered: its SHA-256 does not match metadata.json; copy or prepare it again"
        )


def show(sources: Sequence[Source], seq_len: int, seed: int, first: int, count: int):
    """Print sequences of a run in two lines each: number, epoch, source, and file and byte offset
    of the first id; then the text."""
    loader = Loader(sources, seq_len, seed)
    for g in range(first, first + count):
        (input_ids,), (labels,) = loader.rows(np.array([g]))
        ids = [int(input_ids[0]), *labels.masked_fill(labels == IGNORED, PAD_ID).tolist()]
        number, epoch, offset = loader.locate(g)
        print_line(f"{g}: epoch {epoch}, {sources[number].name}, {offset}")
        print("    " + printable(ids))


# --------------------------------------------------------------------------------------------------
# The command line


def extensions(text: str) -> tuple[str, ...]:
    """Parse a list of extensions such as .py,md, as the `type` of a flag."""
    return tuple("." + name.lstrip(".") for name in text.lower().split(","))


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="data.py", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command", metavar="{prepare,verify,show}")
    preparing = commands.add_parser("prepare", help="make shards from text")
    add = preparing.add_argument
    add(
        "inputs",
        nargs="+",
        type=path_name,
        metavar="INPUT",
        help="text, code, JSON, parquet, csv or arrow file, possibly compressed; directory of such "
        "files; - for standard input; OWNER/NAME, a data set of the Hugging Face hub; or pydoc, "
        "Python's own documentation",
    )
    add(
        "--out",
        dest="directory",
        type=path_name,
        metavar="DIR",
        help="directory for the shards",
    )
    add(
        "--ext",
        type=extensions,
        default=(),
        metavar=".py,.md",
        help="read only files with these extensions, each as one document",
    )
    add("--field", default=Documents.field, metavar="NAME", help="JSON field or column with text")
    add(
        "--val_fraction",
        type=real(0, 0.999),
        default=Documents.val_fraction,
        metavar="FRACTION",
        help="fraction to hold out for validation, below 1: the end of a text file, and documents "
        "that are drawn by a hash of their text",
    )
    add("--config", "--name", help="configuration of a data set of the hub")
    add("--split", default="train", help="split of a data set of the hub")
    add(
        "--binary",
        action="store_true",
        help="read any bytes as text, instead of skipping binary files and files not in UTF-8",
    )
    add("--strict", action="store_true", help="stop at the first bad record instead of skipping it")
    add("--shard_mb", type=real(1e-6, 1e9), default=SHARD_MB, metavar="MB", help="size of a shard")
    verifying = commands.add_parser(
        "verify", help="check shards: ids, and size and checksum against metadata.json"
    )
    verifying.add_argument("directory", type=path_name, metavar="DIR")
    showing = commands.add_parser("show", help="print the sequences that a run reads, by number")
    data = showing.add_mutually_exclusive_group(required=True)
    data.add_argument(
        "directory",
        nargs="?",
        type=path_name,
        metavar="SPEC",
        help="the run's --data_dir: a directory or a mixture",
    )
    data.add_argument("--mock_data", action="store_true", help="synthetic data instead of SPEC")
    add = showing.add_argument
    add("--seq_len", type=integer(1), default=2048, metavar="BYTES", help="the run's --seq_len")
    add("--seed", type=integer(0), default=0, metavar="N", help="the run's --seed")
    add("--first", type=integer(0), default=0, metavar="G", help="number of the first sequence")
    add("--count", type=integer(1), default=1, metavar="N", help="sequences to print")
    args = parser.parse_args(argv)
    # Not a required flag of the parser, so that a misspelled --out is reported first.
    if args.command == "prepare" and args.directory is None:
        preparing.error("--out DIR is missing")
    return args


def run_subcommand(args: argparse.Namespace):
    if args.command == "prepare":
        documents = Documents(
            field=args.field,
            val_fraction=args.val_fraction,
            extensions=args.ext,
            hub_config=args.config,
            hub_split=args.split,
            strict=args.strict,
            binary=args.binary,
        )
        prepare(args.inputs, Path(args.directory), documents, args.shard_mb)
    elif args.command == "verify":
        verify(args.directory)
    else:
        sources = [mock_source(args.seed)] if args.mock_data else open_data(args.directory)
        show(sources, args.seq_len, args.seed, args.first, args.count)


def main(argv: list[str] | None = None) -> int:
    """Run a command. Return the exit status: 0, 2 after an error (one line on stderr), or 130 after
    Ctrl-C."""
    return run_command(
        lambda: run_subcommand(parse_args(argv)), "data.py", interrupted="interrupted"
    )


if __name__ == "__main__":
    raise_on_signals()
    sys.exit(main())
