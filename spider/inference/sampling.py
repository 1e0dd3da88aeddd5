"""Run a trained model: load it, continue texts, hold a dialogue, score texts, and adapt to what it
reads.

    read_checkpoint, best_of   find and load a checkpoint, an export, or the newest of a run
    model_of, decoder_of       build the model of a checkpoint
    Sampler, complete          continue a prompt
    converse                   hold a dialogue in a terminal
    score_windows              score a text by overlapping windows
    Adaptation                 score a text while the model learns from it
    count_characters           count the characters of a text, for bits per character

A text to score is a stream of ids, as data.Stream reads them.
"""

import argparse
import codecs
import math
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from loguru import logger
from torch import Tensor

from spider.config import SpiderConfig
from spider.errors import CheckpointError, ProgressBar, UsageError, one_line
from spider.flags import quoted
from spider.machine import has_bf16
from spider.model.decode import PIECE, DecodingState
from spider.model.memory import tables_of
from spider.training.checkpoint import (
    best_checkpoint,
    check_weights,
    checkpoint_paths,
    find_checkpoints,
    good_checkpoints,
    is_export,
    load_checkpoint,
    lowest_loss,
)
from spider.training.distributed import UNSHARDED, World
from spider.training.optim import RowwiseAdagrad
from spider.training.scoring import BatchScore, Totals, score_batches, score_model
from spider.training.state import load_optimizers, materialize, on_meta
from spider.vocabulary import BOS_ID, EOS_ID, IGNORED, PAD_ID
from spider_model import Spider

if TYPE_CHECKING:
    from data import Stream

# --------------------------------------------------------------------------------------------------
# Loading. `saved` is the content of a checkpoint, as load_checkpoint returns it.

RUNS = "checkpoints"  # where train.py keeps runs by default


def read_checkpoint(name: str, model_class: type[Spider]) -> tuple[Path, dict]:
    """Return the path and content of a checkpoint or export, or of the newest good checkpoint of a
    run, see find_run. Raise UsageError or CheckpointError if there is none for the model class."""
    path = Path(name or RUNS)
    if path.is_file() and path.suffix != ".pt" and is_text(path):
        raise UsageError(
            f"{name} is not a checkpoint but a text: to train on it, python train.py --text "
            f"{quoted(name)}"
        )
    if path.is_file() or is_export(path):
        saved = load_checkpoint(path)
    else:
        run, called = find_run(name)
        newest = next(good_checkpoints(run), None)
        if newest is None:
            raise UsageError(f"{run}: no checkpoint in it is usable: name another")
        path, saved = newest
        logger.info(f"{path}, step {saved['step']}: the newest checkpoint of {called}")
        mention_best(run, saved)
    model = on_meta(model_class, SpiderConfig.from_saved(saved["cfg"]))
    check_weights(path, saved, model)
    return path, saved


def is_text(path: Path) -> bool:
    """Tell whether a file begins like a text: with bytes, and no NUL among them."""
    with open(path, "rb") as file:
        beginning = file.read(1024)
    return b"\0" not in beginning and len(beginning) > 0


def find_run(name: str) -> tuple[Path, str]:
    """Return the directory of a run, and what to call it in the log: the named directory if it has
    checkpoints, else the newest run below it. "" stands for the newest run in RUNS or below. The
    newest run is the one whose newest checkpoint changed last. Raise UsageError if there is no
    run."""
    directory = Path(name or RUNS)
    if name and checkpoint_paths(directory):
        return directory, name
    found = {path.parent for path in directory.rglob("spider-step*.pt")}
    newest = {run: paths[-1] for run in found if (paths := checkpoint_paths(run))}
    if not newest:
        raise UsageError(
            f"{directory}: no such directory, or no checkpoint in it: name another, or train "
            f"first: python train.py --text FILE"
        )
    run = max(newest, key=lambda run: newest[run].lstat().st_mtime)  # of a dead link, too
    return run, f"the newest run (of {len(newest)} in {directory})"


def mention_best(directory: Path, newest: dict):
    """Log which checkpoint of a directory has a lower validation loss than the newest one, given
    the content of the newest."""
    if newest.get("best_loss", math.inf) in (newest.get("val_loss"), math.inf):
        return  # the newest is the best, or none was evaluated: no other file is opened
    best = lowest_loss(find_checkpoints(directory))
    if best is not None and best.step != newest["step"]:
        logger.info(
            f"{best.path.name} has the lowest validation loss, {best.val_bpb:.4f} bits per byte: "
            f"to use it, add --best"
        )


def best_of(name: str) -> str:
    """Return the path of the checkpoint with the lowest validation loss of a run, see find_run."""
    run, called = find_run(name)
    best = best_checkpoint(run)
    logger.info(
        f"{best.path}: the lowest validation loss of {called}, {best.val_bpb:.4f} bits per byte"
    )
    return str(best.path)


def model_of(
    saved: dict, device: torch.device, dtype: torch.dtype, model_class: type[Spider]
) -> Spider:
    """Build the model of a checkpoint in evaluation mode, with products in a dtype."""
    model = on_meta(model_class, SpiderConfig.from_saved(saved["cfg"]))
    materialize(model, device, saved["model_state_dict"])
    model.compute_dtype = dtype
    remark = model.choose_backend()
    if remark:
        logger.info(remark)
    return model.eval()


def decoder_of(saved: dict, device: torch.device, model_class: type[Spider]) -> Spider:
    """Build the model of a checkpoint in the precision that decodes fastest.

    That is bf16 on a GPU, and fp32 on a CPU, where bf16 takes several times as long for a single
    row."""
    dtype = torch.float32
    if device.type == "cuda" and has_bf16(device):
        dtype = torch.bfloat16
    return model_of(saved, device, dtype, model_class)


# --------------------------------------------------------------------------------------------------
# Continuing texts


class Sampler:
    """A model that draws bytes by the flags of sample.py for talking, from one random generator."""

    def __init__(self, model: Spider, flags: argparse.Namespace):
        self.model = model
        self.flags = flags
        self.generator = torch.Generator(model.embed_tokens.device).manual_seed(flags.seed)

    def read(self, state: DecodingState, ids: list[int]) -> Tensor:
        """Feed ids to a state with one row; return the logits of the next byte, [1, vocab_size]."""
        pieces = torch.tensor([ids], device=self.model.embed_tokens.device).split(PIECE, dim=1)
        with self.model.cast_weights_once():
            for piece in pieces:  # the logits of a long text would not fit into memory
                logits = self.model.step(piece, state)  # [1, n, vocab_size]
        return logits[:, -1]

    def generate(self, logits: Tensor, state: DecodingState) -> Iterator[list[int | None]]:
        """Yield the next byte of each row, until the limit of --bytes. After a row's EOS its byte
        is None."""
        flags = self.flags
        return self.model.generate_batch(
            logits,
            state,
            flags.bytes,
            temperature=flags.temperature,
            top_k=flags.top_k,
            top_p=flags.top_p,
            generator=self.generator,
            no_repeat_ngram_size=flags.no_repeat_ngram_size,
        )


def prompt_ids(prompt: bytes) -> list[int]:
    """Return the ids of a prompt. An empty one becomes a line break, since BOS alone is rare in
    training."""
    if not prompt:
        return list(b"\n")
    return [BOS_ID, *prompt]


def in_notebook() -> bool:
    """Tell whether a notebook runs this process, whose cells may be terminals."""
    return "JPY_PARENT_PID" in os.environ


def print_bytes(pieces: Iterable[bytes], raw: bool):
    """Print bytes as they arrive, and a line break in the end.

    raw: unchanged. Else they are decoded, and control characters are escaped, except for line
    breaks and tabs.

    Only a terminal shows each byte at once. A notebook makes an output of whatever is written if
    PYTHONUNBUFFERED is set, else of what is flushed, so there, in files and in pipes, bytes appear
    at most every tenth of a second."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    is_terminal = sys.stdout.isatty() and not in_notebook()

    def show(written: bytes):
        if raw:
            sys.stdout.buffer.write(written)
        else:
            text = decoder.decode(written)
            print("".join(c if c in "\n\t" else one_line(c) for c in text), end="")
        sys.stdout.flush()

    waiting = b""
    shown = -math.inf
    try:
        for piece in pieces:
            waiting += piece
            now = time.monotonic()
            if is_terminal or now - shown >= 0.1:
                show(waiting)
                waiting = b""
                shown = now
    finally:
        show(waiting)
        print(decoder.decode(b"", final=True), flush=True)


class Continuation:
    """The bytes that a row writes, up to EOS or the first stop text."""

    def __init__(self, stop: Sequence[bytes]):
        self.stop = stop
        self.written = bytearray()  # with the stop text
        self.length = 0  # of what is written before a stop text
        self.ended = False  # by a stop text or EOS

    def add(self, byte: int | None):
        """Add the row's next byte, or None after its EOS."""
        if byte is None or self.ended:
            self.ended = True
            return
        self.written.append(byte)
        reached = [len(stop) for stop in self.stop if self.written.endswith(stop)]
        self.length = len(self.written) - max(reached, default=0)
        self.ended = bool(reached)

    @property
    def stopped(self) -> bool:
        """Return whether a stop text has ended the row."""
        return self.length < len(self.written)


def write(
    columns: Iterable[list[int | None]], rows: list[Continuation], interrupts: Sequence = ()
) -> Iterator[bytes]:
    """Add generated bytes to rows until all rows have ended, or `interrupts` has an entry; yield
    what to print of the first row. As many of its last bytes are held back as may belong to a stop
    text."""
    first = rows[0]
    held_back = max(map(len, first.stop), default=1) - 1
    printed = 0
    for column in columns:
        for row, byte in zip(rows, column, strict=True):
            row.add(byte)
        end = max(printed, first.length - held_back)
        yield bytes(first.written[printed:end])
        printed = end
        if interrupts or all(row.ended for row in rows):
            break
    yield bytes(first.written[printed : first.length])


def complete(sampler: Sampler, state: DecodingState, prompt: bytes):
    """Print samples that continue a prompt. They are generated as a batch. The first is printed
    while it is generated, the others after it."""
    flags = sampler.flags
    count = flags.samples
    rows = [Continuation(flags.stop) for _ in range(count)]
    logits = sampler.read(state, prompt_ids(prompt)).expand(count, -1)
    state = state.copy([0] * count)
    echo = b"" if flags.no_echo else prompt
    for number, row in enumerate(rows, 1):
        if count > 1:
            print(f"--- {number} of {count}", flush=True)
        pieces: Iterable[bytes] = [bytes(row.written[: row.length])]
        if number == 1:
            pieces = write(sampler.generate(logits, state), rows)
        print_bytes(chain([echo], pieces), flags.raw)


# --------------------------------------------------------------------------------------------------
# A dialogue


def converse(sampler: Sampler, state: DecodingState):
    """Hold a dialogue: input from the terminal and the model's output form one text.

    Input starts a new line, or a new document after the model's EOS. After a stop text, which stays
    in the context, it follows directly. Ctrl-C stops the model."""
    with suppress(ImportError):
        import readline  # noqa: F401     # lines can be edited then
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="surrogateescape")
    unread: list[int] | None = None  # ids that the state has not read; None before the first turn
    starts_line = False  # whether the next input starts a line, unless it is empty
    while (line := ask()) is not None:
        typed = os.fsencode(line)
        if unread is None:
            ids = prompt_ids(typed)
        elif typed and starts_line:
            ids = [*unread, ord("\n"), *typed]
        else:
            ids = [*unread, *typed]
        row = Continuation(sampler.flags.stop)
        columns = sampler.generate(sampler.read(state, ids), state)
        with interrupts_deferred() as interrupts:
            print_bytes(write(columns, [row], interrupts), sampler.flags.raw)
        ended_early = len(row.written) < sampler.flags.bytes
        wrote_eos = ended_early and not interrupts and not row.stopped
        if wrote_eos or not row.written:
            unread = [EOS_ID, BOS_ID]
            starts_line = False
        else:
            unread = list(row.written[-1:])  # drawn, but not fed to the state
            starts_line = not row.stopped and unread != [ord("\n")]


def ask() -> str | None:
    """Read the lines of a turn, without the final line break; return None at the end of input."""
    try:
        text = input("> ")
        while text.endswith("\\"):
            text = text[:-1] + "\n" + input("  ")
        return text
    except EOFError:
        print()
        return None
    except KeyboardInterrupt:
        print()
        raise


@contextmanager
def interrupts_deferred() -> Iterator[list[int]]:
    """Add an entry to a list for Ctrl-C instead of raising, because an exception could leave a
    decoding state half advanced."""
    interrupts: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


# --------------------------------------------------------------------------------------------------
# Scoring


class Span(NamedTuple):
    """A row of a text: the model reads ids start .. stop - 1, and predicts start + 1 .. stop."""

    start: int
    stop: int
    context: int  # number of first labels that do not count: another row has scored them


def cut(length: int, first: int, counted: int, context: int) -> Iterator[Span]:
    """Cut a text of `length` ids into rows: the first one counts its `first` labels, each further
    one `counted` labels after at most `context` others. Every id after the first counts once."""
    last = length - 1
    begin = 0
    stop = first
    while begin < last:
        start = max(0, begin - context)
        yield Span(start, min(stop, last), begin - start)
        begin = stop
        stop += counted


def half_overlapping(length: int, seq_len: int) -> Iterator[Span]:
    """Cut a text of `length` ids into windows of at most seq_len that overlap by half."""
    stride = max(1, seq_len // 2)
    return cut(length, seq_len, stride, seq_len - stride)


def read_rows(
    stream: "Stream", spans: Sequence[Span], seq_len: int, special: bool
) -> tuple[Tensor, Tensor]:
    """Read spans of at most seq_len ids, see Stream.rows. special: whether labels above 255, such
    as EOS, count."""
    start, stop, context = np.array(spans).T
    ids, labels = stream.rows(start, stop, seq_len)
    labels[torch.arange(seq_len) < torch.from_numpy(context)[:, None]] = IGNORED
    if not special:
        labels[labels > 255] = IGNORED
    return ids, labels


def windows(stream: "Stream", seq_len: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut a stream into batches of (ids, labels), int64 [n, seq_len], of windows that overlap by
    half. Every byte after the first id is a label once."""
    spans = half_overlapping(len(stream), seq_len)
    while rows := list(islice(spans, batch)):
        yield read_rows(stream, rows, seq_len, special=False)


def progress_bar(title: str, n_ids: int) -> ProgressBar | None:
    """Make a progress bar over ids that a model reads; None where nobody watches."""
    return ProgressBar(title, n_ids) if sys.stderr.isatty() else None


def score_windows(
    model: Spider, stream: "Stream", seq_len: int, batch: int, n_loops: int
) -> Totals:
    """Score the bytes of a stream by windows of at most seq_len bytes, `batch` at a time."""
    seq_len = min(seq_len, max(2, len(stream) - 1))
    n_ids = seq_len * sum(1 for _ in half_overlapping(len(stream), seq_len))
    return score_model(
        model,
        windows(stream, seq_len, batch),
        n_loops,
        World({}, model.embed_tokens.device),
        progress_bar("evaluating", n_ids),
    )


COUNTED = 1 << 20  # ids of a text that are decoded at once, to count characters


def count_characters(stream: "Stream", special: bool) -> int:
    """Count the characters of a stream after its first id, which nothing predicts: code points of
    UTF-8, and each byte that is not UTF-8. PAD is none. special: whether other ids above 255, such
    as EOS, count as one each."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    count = 0
    for start in range(1, len(stream), COUNTED):
        padded = stream.read(start, min(start + COUNTED, len(stream)))
        ids = padded[padded != PAD_ID]
        above = ids > 255
        as_bytes = np.where(above, 0, ids).astype(np.uint8).tobytes()  # a special id is one NUL
        count += len(decoder.decode(as_bytes))
        if not special:
            count -= int(above.sum())
    return count + len(decoder.decode(b"", final=True))


# --------------------------------------------------------------------------------------------------
# Adapting: dynamic evaluation, Krause et al., arXiv 1709.07432. Rates, chunk and context are
# measured in docs/results/learning.md, "Adaptation".

RATE = 0.4  # the tables' learning rate; in training 0.25
DENSE_RATE = 1.5e-4  # AdamW's learning rate, for all other weights
CHUNK = 1024  # bytes between two steps
CONTEXT = 1024  # bytes before a chunk that the model sees, at most


class Adaptation:
    """A model that learns from what it reads.

    It scores a chunk. Then all weights take one step on the chunk's gradient. So every byte is
    scored before anything learns from it."""

    def __init__(self, model: Spider, saved: dict, n_loops: int):
        """saved: the content of the model's checkpoint, whose accumulators set the size of each
        table row's steps. Raise CheckpointError if it has none."""
        tables = tables_of(model)
        accumulators = saved.get("optimizer_state_dict", {}).get("engram")
        if not tables or not accumulators or not saved.get("bytes_seen") or not saved["step"]:
            raise CheckpointError(
                "--adapt needs a model with Engram tables and their optimizer state: use a "
                "checkpoint that train.py wrote (an export has no optimizer state)"
            )
        self.model = model
        self.n_loops = n_loops
        self.adagrad = RowwiseAdagrad(tables, RATE)
        load_optimizers(UNSHARDED, {"engram": self.adagrad}, {"engram": accumulators})
        dense = [p for p in model.parameters() if p not in self.adagrad.tables]
        self.adamw = torch.optim.AdamW(dense, DENSE_RATE, weight_decay=0, fused=True)
        # The accumulators are of gradients of a mean over so many bytes.
        self.bytes_per_step = saved["bytes_seen"] / saved["step"]

    def learn(self, ids: Tensor, labels: Tensor) -> BatchScore:
        """Score a row, ids and labels [1, n], then step the weights."""
        with torch.enable_grad(), self.model.cast_weights_once():
            out = self.model(ids, n_loops=self.n_loops)
            nats = F.cross_entropy(out.logits[0], labels[0], ignore_index=IGNORED, reduction="sum")
            (nats / self.bytes_per_step).backward()
        for optimizer in (self.adagrad, self.adamw):
            optimizer.step()
            optimizer.zero_grad()
        targets = (labels != IGNORED).sum()
        return BatchScore(nats.detach().double(), targets, out.segments)

    def score(self, stream: "Stream", special: bool) -> Totals:
        """Read a stream. special: whether ids above 255 count, too."""
        spans = list(cut(len(stream), CHUNK, CHUNK, CONTEXT))
        n_ids = sum(span.stop - span.start for span in spans)
        rows = (read_rows(stream, [span], span.stop - span.start, special) for span in spans)
        # a row without a label has no gradient to step by
        counted = ((ids, labels) for ids, labels in rows if (labels != IGNORED).any())
        return score_batches(
            counted,
            self.learn,
            World({}, self.model.embed_tokens.device),
            progress_bar("adapting", n_ids),
        )
