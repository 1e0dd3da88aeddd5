"""Score texts in bits per byte: prepared shards like in training, any other file by overlapping windows."""

import math
import os
from collections.abc import Iterator

import numpy as np
import torch
from loguru import logger
from torch import Tensor, nn

from spider.data import loader, readers, shards
from spider.errors import DataError
from spider.training.evaluation import evaluate, means, sum_losses


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
          batch: int, n_loops: int, device: torch.device) -> tuple[int, float]:
    """Return the number of predicted bytes and bits per byte; for prepared sources these are the trainer's.

    Raise DataError if there is no byte to predict, and FloatingPointError for a non-finite loss."""
    if isinstance(text, list):
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


def read_texts(names: list[str], field: str) -> dict[str, shards.Stream | list[shards.Source]]:
    """Open texts by name: directories of shards as sources, any other file as a stream."""
    texts = {}
    for file in names:
        texts[file] = shards.open_data(file) if os.path.isdir(file) else readers.read_stream(file, field)
        if isinstance(texts[file], list):
            shards.check(texts[file])
    return texts
