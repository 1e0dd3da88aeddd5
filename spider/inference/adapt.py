"""Score texts with a model that stays the same, or that learns from them.

    score_windows       score a text in windows
    DynamicEvaluation   score a text while the model learns from it (--adapt)
    count_characters    count the characters of a text, for bits per character

A text is a stream of ids.
"""

import codecs
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from spider.data.stream import Stream
from spider.errors import CheckpointError, ProgressBar
from spider.model.memory import tables_of
from spider.training import optim, state
from spider.training.distributed import UNSHARDED, World
from spider.training.scoring import BatchScore, Totals, score_batches, score_model
from spider.vocabulary import IGNORED, PAD_ID
from spider_model import Spider

# --------------------------------------------------------------------------------------------------
# Scoring


class Span(NamedTuple):
    """A row of a text: the model reads ids start .. stop - 1 and predicts ids start + 1 .. stop."""

    start: int
    stop: int
    context: int  # number of first labels that do not count, since an earlier row has scored them


def cut_spans(length: int, first: int, counted: int, context: int) -> Iterator[Span]:
    """Cut a text of `length` ids into rows. The first row counts `first` labels; each further row
    counts `counted` labels after at most `context` others. Every id after the first counts once."""
    last = length - 1
    begin = 0
    stop = first
    while begin < last:
        start = max(0, begin - context)
        yield Span(start, min(stop, last), begin - start)
        begin = stop
        stop += counted


def cut_windows(length: int, seq_len: int, overlap: bool) -> Iterator[Span]:
    """Cut a text of `length` ids into windows of at most seq_len ids, which may overlap by half."""
    stride = seq_len // 2 if overlap else seq_len
    return cut_spans(length, seq_len, stride, seq_len - stride)


def read_rows(
    stream: Stream, spans: Sequence[Span], seq_len: int, special: bool
) -> tuple[Tensor, Tensor]:
    """Read spans of at most seq_len ids, see Stream.rows. special: also count labels above 255,
    such as EOS."""
    start, stop, context = np.array(spans).T
    ids, labels = stream.rows(start, stop, seq_len)
    labels[torch.arange(seq_len) < torch.from_numpy(context)[:, None]] = IGNORED
    if not special:
        labels[labels > 255] = IGNORED
    return ids, labels


def window_batches(
    stream: Stream, seq_len: int, batch: int, special: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut a stream into windows, see score_windows. Yield batches of (ids, labels), int64
    [n, seq_len]. Every id after the first is a label once, if it counts."""
    spans = cut_windows(len(stream), seq_len, overlap=not special)
    while rows := list(islice(spans, batch)):
        yield read_rows(stream, rows, seq_len, special)


def progress_bar(title: str, n_ids: int) -> ProgressBar | None:
    """Return a progress bar for the ids that a model reads, or None if nobody watches."""
    return ProgressBar(title, n_ids) if sys.stderr.isatty() else None


def score_windows(
    model: Spider, stream: Stream, seq_len: int, batch: int, n_loops: int, special: bool
) -> Totals:
    """Score a stream in windows of at most seq_len ids, `batch` at a time.

    special: score as training evaluates: windows do not overlap, and labels above 255 count too.
    Else windows overlap by half, and only bytes count."""
    seq_len = min(seq_len, max(2, len(stream) - 1))
    n_ids = seq_len * sum(1 for _ in cut_windows(len(stream), seq_len, overlap=not special))
    return score_model(
        model,
        window_batches(stream, seq_len, batch, special),
        n_loops,
        World({}, model.embed_tokens.device),
        progress_bar("evaluating", n_ids),
    )


DECODE_CHUNK = 1 << 20  # ids that are decoded at once to count characters


def count_characters(stream: Stream, special: bool) -> int:
    """Count the characters of a stream after its first id, which nothing predicts: code points of
    UTF-8, and bytes that are not UTF-8. special: also count ids above 255, such as EOS, as one
    each. PAD never counts."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    count = 0
    for start in range(1, len(stream), DECODE_CHUNK):
        padded = stream.read(start, min(start + DECODE_CHUNK, len(stream)))
        ids = padded[padded != PAD_ID]
        above = ids > 255
        as_bytes = np.where(above, 0, ids).astype(np.uint8).tobytes()  # special ids become NUL
        count += len(decoder.decode(as_bytes))
        if not special:
            count -= int(above.sum())
    return count + len(decoder.decode(b"", final=True))


# --------------------------------------------------------------------------------------------------
# Dynamic evaluation: Krause et al., arXiv 1709.07432. Rates, chunk and context are measured in
# docs/results/learning.md, "Adaptation".

TABLE_LR = 0.4  # learning rate of the tables; in training 0.25
DENSE_LR = 1.5e-4  # learning rate of AdamW, for all other weights
CHUNK = 1024  # bytes between two steps
CONTEXT = 1024  # maximum bytes before a chunk that the model sees


class DynamicEvaluation:
    """Score a text with a model that learns from it.

    The model scores a chunk. Then all weights take one step on the chunk's gradient. So every byte
    is scored before anything learns from it."""

    def __init__(self, model: Spider, saved: dict, n_loops: int):
        """saved: the content of the model's checkpoint. Its Adagrad accumulators set the step sizes
        of table rows. Raise CheckpointError if the checkpoint has none."""
        tables = tables_of(model)
        accumulators = saved.get("optimizer_state_dict", {}).get("engram")
        if not tables or not accumulators or not saved.get("bytes_seen") or not saved["step"]:
            raise CheckpointError(
                "--adapt needs a model with Engram tables and their optimizer state: use a "
                "checkpoint that train.py wrote (an export has no optimizer state)"
            )
        self.model = model
        self.n_loops = n_loops
        self.adagrad = optim.RowwiseAdagrad(tables, TABLE_LR)
        state.load_optimizers(UNSHARDED, {"engram": self.adagrad}, {"engram": accumulators})
        dense = [p for p in model.parameters() if p not in self.adagrad.tables]
        self.adamw = torch.optim.AdamW(dense, DENSE_LR, weight_decay=0, fused=True)
        # The accumulators sum squared gradients of a mean over this many bytes.
        self.bytes_per_step = saved["bytes_seen"] / saved["step"]

    def learn(self, ids: Tensor, labels: Tensor) -> BatchScore:
        """Score one row, ids and labels [1, n], then step the weights."""
        with torch.enable_grad(), self.model.cast_weights_once():
            out = self.model(ids, n_loops=self.n_loops)
            nats = torch.nn.functional.cross_entropy(
                out.logits[0], labels[0], ignore_index=IGNORED, reduction="sum"
            )
            (nats / self.bytes_per_step).backward()
        for optimizer in (self.adagrad, self.adamw):
            optimizer.step()
            optimizer.zero_grad()
        return BatchScore(nats.detach().double(), (labels != IGNORED).sum(), out.segments)

    def score(self, stream: Stream, special: bool) -> Totals:
        """Score a stream. special: also count ids above 255."""
        spans = list(cut_spans(len(stream), CHUNK, CHUNK, CONTEXT))
        n_ids = sum(span.stop - span.start for span in spans)
        rows = (read_rows(stream, [span], span.stop - span.start, special) for span in spans)
        # a row without labels has no gradient
        counted = ((ids, labels) for ids, labels in rows if (labels != IGNORED).any())
        return score_batches(
            counted,
            self.learn,
            World({}, self.model.embed_tokens.device),
            progress_bar("adapting", n_ids),
        )
