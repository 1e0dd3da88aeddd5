"""Read shards as one stream of ids; describe the layout of an optimizer step. data.py, training and
inference share both.

torch is imported where it is used, because `data.py prepare` should not pay for torch's memory
and import time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from spider.data.shard_files import ID_BYTES
from spider.errors import DataError
from spider.vocabulary import IGNORED, PAD_ID, VOCAB_SIZE

if TYPE_CHECKING:
    from torch import Tensor


class Shard(NamedTuple):
    """The ids of a file, or a slice that begins at id `first` of the file."""

    path: str
    ids: np.ndarray  # uint16
    first: int = 0


class Stream:
    """Shards as one sequence of ids. Stream([Shard("memory", ids)]) needs no file."""

    def __init__(self, shards: Iterable[Shard]):
        self.shards = list(shards)
        # starts[i]: index in the stream of shard i's first id; the last entry is the length
        self.starts = [0, *accumulate(len(shard.ids) for shard in self.shards)]

    def __len__(self) -> int:
        return self.starts[-1]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return ids start .. stop - 1, uint16; a view if they are all in one shard."""
        number = bisect_right(self.starts, start) - 1
        shard_start = self.starts[number]
        if stop <= self.starts[number + 1]:
            return self.shards[number].ids[start - shard_start : stop - shard_start]
        return np.concatenate([shard.ids for shard in self.slice(start, stop).shards])

    def slice(self, start: int, stop: int) -> Stream:
        """Return the stream of ids start .. stop - 1."""
        parts = []
        for shard, shard_start in zip(self.shards, self.starts[:-1], strict=True):
            begin = max(0, start - shard_start)
            end = min(len(shard.ids), stop - shard_start)
            if begin < end:
                parts.append(Shard(shard.path, shard.ids[begin:end], shard.first + begin))
        return Stream(parts)

    def where(self, index: int) -> str:
        """Return the file and byte offset of an id."""
        number = bisect_right(self.starts, index) - 1
        shard = self.shards[number]
        index_in_file = shard.first + index - self.starts[number]
        return f"{shard.path}: byte offset {ID_BYTES * index_in_file}"

    def check(self, start: int, stop: int):
        """Raise DataError if one of the ids start .. stop - 1 is not below VOCAB_SIZE."""
        ids = self.read(start, stop)
        if ids.max() >= VOCAB_SIZE:
            first = int((ids >= VOCAB_SIZE).argmax())
            raise DataError(
                f"{self.where(start + first)}: id {ids[first]} is above {VOCAB_SIZE - 1}: "
                "damaged, or not a shard"
            )

    def rows(self, start: np.ndarray, stop: np.ndarray, seq_len: int) -> tuple[Tensor, Tensor]:
        """Read windows as (input_ids, labels), int64 [n, seq_len].

        start, stop [n]: the inputs of a window are ids start .. stop - 1, its labels ids start + 1
        .. stop. Windows shorter than seq_len are padded with PAD. PAD labels become IGNORED.
        """
        import torch

        spans = list(zip(start.tolist(), stop.tolist(), strict=True))
        input_ids = np.full((len(spans), seq_len), PAD_ID)
        labels = input_ids.copy()
        for row, (begin, end) in enumerate(spans):
            ids = self.read(begin, end + 1)
            input_ids[row, : end - begin] = ids[:-1]
            labels[row, : end - begin] = ids[1:]
        if max(input_ids.max(), labels.max()) >= VOCAB_SIZE:
            for begin, end in spans:
                self.check(begin, end + 1)
        labels[labels == PAD_ID] = IGNORED
        return torch.from_numpy(input_ids), torch.from_numpy(labels)


class StepLayout(NamedTuple):
    """How the sequences of an optimizer step are spread over ranks and micro-steps. The layout does
    not choose the sequences."""

    micro_batch: int  # sequences per rank and micro-step
    grad_accum: int  # micro-steps
    ranks: int = 1

    @property
    def sequences(self) -> int:
        """Sequences per optimizer step, on all ranks together."""
        return self.micro_batch * self.grad_accum * self.ranks
