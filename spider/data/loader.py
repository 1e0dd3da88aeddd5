"""Assign training sequences to steps, as a pure function of seed and step, and cut validation rows.

Loader            the training sequences in their global order
validation_sets   the rows of every evaluation, by source
"""

from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import accumulate

import numpy as np

from spider.data.shards import Source, Stream, check_ids
from spider.errors import DataError
from tokenizer import PAD_ID, VOCAB_SIZE

BLOCK = 10_000                # sequences in which each source of a mixture has exactly its share

AHEAD = 4096                  # sequences whose spans are computed at a time, to amortize numpy's call overhead

# Constants of SplitMix64, as numpy scalars, which are twice as fast as Python's.
ADD, MUL_1, MUL_2, BITS_27, BITS_30, BITS_31, BITS_32 = map(
    np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 27, 30, 31, 32))


def mix(x: np.ndarray) -> np.ndarray:
    """Apply a step of SplitMix64, uint64 -> uint64: a bijection where every input bit affects every output bit."""
    x = x + ADD
    x = (x ^ (x >> BITS_30)) * MUL_1
    x = (x ^ (x >> BITS_27)) * MUL_2
    return x ^ (x >> BITS_31)


def key(seed: int, *numbers) -> np.ndarray:
    """Hash a seed and non-negative numbers or arrays to uint64; the result has at least one dimension."""
    x = mix(np.array([seed % 2 ** 64], np.uint64))
    for number in numbers:
        x = mix(x ^ np.asarray(number).astype(np.uint64))
    return x


def permute(index: np.ndarray, n: np.ndarray | int, keys: np.ndarray) -> np.ndarray:
    """Map indices [m] by keyed bijections of [0, n), n < 2**52, under keys [m]; n [m] or a number; int64 [m].

    A Feistel network of four rounds on two digits in a base just above sqrt(n). Values of n or more are mapped again
    (cycle walking), which is rare with this base.
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
    """Split `total` into integers in proportion to weights (largest remainder, ties to the first)."""
    exact = [weight / sum(weights) * total for weight in weights]
    out = [int(x) for x in exact]
    for k in sorted(range(len(out)), key=lambda k: out[k] - exact[k])[:total - sum(out)]:
        out[k] += 1
    return out


@lru_cache(maxsize=4)
def deal(seed: int, counts: tuple[int, ...], block: int) -> tuple[np.ndarray, np.ndarray]:
    """Assign each slot of a block to a source; return the source and the slot's rank within it, int64 [slots]."""
    ends = np.cumsum(counts)
    slots = np.arange(ends[-1])
    source = np.searchsorted(ends, permute(slots, len(slots), key(seed, 0, np.full_like(slots, block))), side="right")
    rank = np.empty_like(slots)
    rank[np.argsort(source, kind="stable")] = slots           # by source, in order
    return source, rank - (ends - counts)[source]


class Loader:
    """Read the training sequences of a run, numbered from 0 in one global order over ranks and micro-steps.

    Each epoch of a source covers each of its targets (every id but the first) exactly once, in new windows of up to
    seq_len and in a new order. Blocks of 10,000 sequences contain the sources in exact proportion to the weights,
    shuffled; each slot takes the next sequence of its source.
    """

    def __init__(self, sources: Sequence[Source], seq_len: int, seed: int):
        streams = [source.train for source in sources]
        self.stream = Stream([shard for stream in streams for shard in stream.shards])
        self.offsets = np.array([0, *accumulate(map(len, streams))][:-1])                    # where each begins
        self.seq_len, self.seed = seq_len, seed
        self.targets = np.array([len(source.train) - 1 for source in sources])
        self.windows = -(-self.targets // seq_len)                                    # in an epoch
        self.counts = np.array(shares([source.weight for source in sources], BLOCK))  # in a block
        self.share, self.deal = self.counts / BLOCK, partial(deal, seed, tuple(self.counts.tolist()))
        self.ahead_from, self.ahead = 0, self._spans(np.arange(0))  # spans of sequences computed together
        for source, targets, count in zip(sources, self.targets, self.counts):
            if targets < seq_len:
                raise DataError(f"{source.name}: a sequence of {seq_len:,} bytes is longer than the data "
                                f"({max(0, targets):,} bytes): lower --seq_len")
            if count == 0:
                raise DataError(f"{source.name}: weight {source.weight:g} is less than one sequence in {BLOCK:,}: "
                                f"raise it")

    def micro_batch(self, first: int, micro_step: int, micro_batch: int, rank: int = 0, ranks: int = 1):
        """Return a rank's (input_ids, labels, g) of a micro-step; g int64 [micro_batch] are the sequence numbers.

        `first`: number of sequences before this optimizer step. Its sequences do not depend on the number of ranks.
        """
        import torch
        begin = first + (micro_step * ranks + rank) * micro_batch - self.ahead_from
        if not 0 <= begin <= len(self.ahead[0]) - micro_batch:
            self.ahead_from, begin = begin + self.ahead_from, 0
            self.ahead = self._spans(self.ahead_from + np.arange(max(micro_batch, AHEAD)))
        spans = (bounds[begin:begin + micro_batch] for bounds in self.ahead)
        g = self.ahead_from + begin + np.arange(micro_batch)
        return *cut_rows(self.stream, *spans, self.seq_len), torch.from_numpy(g)

    def rows(self, g: np.ndarray):
        """Return sequences g [n] as (input_ids, labels), int64 [n, seq_len]; labels are shifted, those of -100
        do not count."""
        return cut_rows(self.stream, *self._spans(np.asarray(g)), self.seq_len)

    def describe(self, g: int) -> tuple[int, int, str]:
        """Return sequence g's number of source, that source's epoch, and the file and byte offset where it begins."""
        (k,), (index,) = self._deal(np.array([g]))
        (start,), _ = self._spans(np.array([g]))
        return int(k), int(index // self.windows[k]), self.stream.where(start)

    def epochs(self, g: int) -> np.ndarray:
        """Count the passes over each source that were completed before sequence g; int64 [sources]."""
        block, slot = divmod(g, BLOCK)
        read = block * self.counts + np.bincount(self.deal(block)[0][:slot], minlength=len(self.counts))
        return read // self.windows

    def epoch(self, g: int) -> int:
        """Return the epoch of sequence g, from 0; of a mixture the mean of `epochs` by weight, rounded down."""
        return int(self.counts @ self.epochs(g)) // BLOCK

    def _deal(self, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source number of sequences g, and their index in that source's own endless sequence."""
        block, slot = np.divmod(g, BLOCK)
        source, index = np.empty_like(g), np.empty_like(g)
        for number in np.unique(block).tolist():
            here = block == number
            owner, rank = (dealt[slot[here]] for dealt in self.deal(number))
            source[here], index[here] = owner, number * self.counts[owner] + rank
        return source, index

    def _spans(self, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return start and stop of sequences g in the joined stream: inputs are ids start .. stop - 1, labels one
        further."""
        source, index = self._deal(g)
        targets, windows = self.targets[source], self.windows[source]
        epoch, position = np.divmod(index, windows)
        keys = key(self.seed, 1 + source, epoch)
        # Where windows do not fit evenly, each epoch's first one has another length, which moves the cuts after it.
        rest = targets % self.seq_len
        head = np.where(rest == 0, self.seq_len, rest + (mix(keys) >> 32).astype(np.int64) % (self.seq_len - rest))
        stop = head + permute(position, windows, keys) * self.seq_len
        begin = self.offsets[source]
        return begin + np.maximum(stop - self.seq_len, 0), begin + np.minimum(stop, targets)


def cut_rows(stream: Stream, start: np.ndarray, stop: np.ndarray, seq_len: int):
    """Return (input_ids, labels), int64 [n, seq_len], of windows start .. stop [n] of a stream, both ends included.

    Short windows are padded with PAD; labels that are PAD become -100.
    """
    import torch  # imported here, since without it the workers of `prepare` start ten times as fast
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


def validation_sets(sources: Sequence[Source], seq_len: int, eval_tokens: int) -> dict:
    """Return the rows of every evaluation by source name: (input_ids, labels), int64 [n, seq_len].

    They have the first `eval_tokens` validation targets, split by weight. A source with fewer targets than its share
    contributes all of them; one without targets is left out. Raise DataError if there are no targets.
    """
    sets = {}
    for source, share in zip(sources, shares([source.weight for source in sources], eval_tokens)):
        count = min(share, len(source.val) - 1)
        if count > 0:
            starts = np.arange(0, count, seq_len)
            sets[source.name] = cut_rows(source.val, starts, np.minimum(starts + seq_len, count), seq_len)
    if not sets:
        raise DataError(f"{', '.join(source.name for source in sources)}: no validation data; prepare more data, raise "
                        "--eval_tokens, or disable evaluation with --eval_every 0")
    return sets
