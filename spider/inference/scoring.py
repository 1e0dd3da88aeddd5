"""Score texts in bits per byte: prepared shards like in training, any other file by overlapping windows; or both in
order, while the model adapts."""

import math
import os
import sys
from collections.abc import Iterator

import numpy as np
import torch
from loguru import logger
from torch import Tensor, nn

from spider.console import ProgressBar
from spider.data import loader, readers, shards
from spider.errors import DataError
from spider.inference.adaptation import CHUNK, Adaptation
from spider.training.evaluation import evaluate, means, sum_losses
from tokenizer import PAD_ID

READ_AT_ONCE = 1 << 14                    # ids


def windows(stream: shards.Stream, seq_len: int, batch: int) -> tuple[Iterator[tuple[Tensor, Tensor]], int]:
    """Cut a stream into batches (ids, labels) [n, seq_len]; return them and the total number of ids. Windows overlap by
    half. Every byte after the first id is a label once, in the first window that has it."""
    last, stride = len(stream) - 1, max(1, seq_len // 2)
    starts = np.arange(0, max(1, last - seq_len + stride), stride)

    def batches():
        for start in np.split(starts, range(batch, len(starts), batch)):
            ids, labels = loader.cut_rows(stream, start, np.minimum(start + seq_len, last), seq_len)
            labels[torch.from_numpy(start > 0), :seq_len - stride] = -100
            yield ids, labels.masked_fill_(labels > 255, -100)
    return batches(), len(starts) * seq_len


def score(model: nn.Module, file: str, text: shards.Stream | list[shards.Source], seq_len: int, eval_tokens: int,
          batch: int, n_loops: int, device: torch.device, adaptation: Adaptation | None = None) -> tuple[int, float]:
    """Return the number of predicted bytes and bits per byte; for prepared sources these are the trainer's. With an
    adaptation of the model, that reads the text.

    Raise DataError if there is no byte to predict, and FloatingPointError for a non-finite loss."""
    if adaptation is not None:
        count, bits = score_adapting(adaptation, file, text, eval_tokens)
    elif isinstance(text, list):
        sets = loader.validation_sets(text, seq_len, eval_tokens)
        count = sum(int((labels != -100).sum()) for _, labels in sets.values())
        bits = evaluate(model, sets, batch, n_loops, device)["val_bpb"]
    else:
        batches, size = windows(text, min(seq_len, max(2, len(text) - 1)), batch) if len(text) > 1 else ((), 0)
        nats, count, rate = means(sum_losses(model, batches, size, n_loops, device))
        bits = nats / math.log(2)
        logger.info(f"{file}: {bits:.4f} bits per byte with --n_loops {n_loops}, {rate:.2f} bytes per segment")
    if not count:
        raise DataError(f"{file}: no byte to predict")
    if not math.isfinite(bits):
        raise FloatingPointError("the model's loss is not a finite number: its weights are ruined")
    return count, bits


def score_adapting(adaptation: Adaptation, file: str, text: shards.Stream | list[shards.Source],
                   eval_tokens: int) -> tuple[int, float]:
    """Return the same of a text that is read in order; of prepared sources, the same targets as the trainer's."""
    prepared, streams = isinstance(text, list), [text]
    if prepared:
        targets = {name: int((labels != -100).sum())
                   for name, (_, labels) in loader.validation_sets(text, CHUNK, eval_tokens).items()}
        streams = [source.val.slice(0, targets[source.name] + 1) for source in text if source.name in targets]
    progress = ProgressBar("adapting", sum(map(len, streams))) if sys.stderr.isatty() else None
    for stream in streams:
        adaptation.start()
        for first in range(0, len(stream), READ_AT_ONCE):
            ids = torch.from_numpy(stream.read(first, min(first + READ_AT_ONCE, len(stream))).astype(np.int64))
            adaptation.read(ids, ids != PAD_ID if prepared else ids < 256)
            if progress:
                progress.add(len(ids))
        adaptation.flush()
        adaptation.rewind()
    bits = adaptation.nats / adaptation.count / math.log(2) if adaptation.count else math.nan
    logger.info(f"{file}: {bits:.4f} bits per byte with --n_loops {adaptation.n_loops}, adapted "
                f"{'within each document' if adaptation.per_document else 'through all of it'}")
    return adaptation.count, bits


def read_texts(names: list[str], field: str) -> dict[str, shards.Stream | list[shards.Source]]:
    """Open texts by name: directories of shards as sources, any other file as a stream."""
    texts = {}
    for file in names:
        texts[file] = shards.open_data(file) if os.path.isdir(file) else readers.read_stream(file, field)
        if isinstance(texts[file], list):
            shards.check(texts[file])
    return texts
