"""Run a trained model: load it, continue texts, hold a dialogue, score texts, and adapt to what it
reads.

read_checkpoint, best_of, model_of, decoder_of   load a checkpoint, an export, or the newest
checkpoint of a directory complete, converse, Continuation                 continue a prompt; hold a
dialogue in a terminal; end at a stop text score_windows                                    bits per
byte of a text, by overlapping windows count_characters                                 characters
of a text, for bits per character Adaptation                                       score a text
while the model learns from it

A text to score is a stream of ids: len(stream), and stream.read(start, stop) as a numpy array.
"""

import codecs
import math
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from loguru import logger
from torch import Tensor, nn

from spider.checkpoint import (
    best_checkpoint,
    check_weights,
    find_checkpoints,
    is_export,
    load_checkpoint,
    load_newest,
    lowest_loss,
)
from spider.common import CheckpointError, ProgressBar, UsageError, one_line
from spider.config import SpiderConfig
from spider.decode import PIECE, DecodingState
from spider.machine import multiplies_bf16
from spider.memory import EngramTable
from spider.optim import RowwiseAdagrad
from spider.state import load_optimizer
from tokenizer import BOS_ID, EOS_ID, PAD_ID

# --------------------------------------------------------------------------------------------------
# Loading


def is_directory_of_checkpoints(path: Path) -> bool:
    return path.is_dir() and not is_export(path)


def read_checkpoint(name: str, model_class: type[nn.Module]) -> tuple[Path, dict]:
    """Return the path and content of a checkpoint or export, or of the newest good checkpoint of a
    directory. Raise UsageError or CheckpointError if there is none for the model class."""
    path = Path(name)
    if path.exists() and not is_directory_of_checkpoints(path):
        found = path, load_checkpoint(path)
    else:
        found = load_newest(path)
        if found is None:
            raise UsageError(f"{name}: there is no usable checkpoint: name another, or train first")
        logger.info(f"{found[0]}: the newest checkpoint in {name}, step {found[1]['step']}")
        mention_best(path, found[1])
    with torch.device("meta"):
        model = model_class(SpiderConfig.from_saved(found[1]["cfg"]))
    check_weights(*found, model)
    return found


def mention_best(directory: Path, newest: dict):
    """Log which checkpoint of a directory has a lower validation loss than the newest one, given
    its content."""
    loss = newest.get("val_loss")
    if newest.get("best_loss", math.inf) in (loss, math.inf):
        return  # the newest is the best, or none was evaluated: no other file is opened
    best = lowest_loss(find_checkpoints(directory))
    if best is not None and best.step != newest["step"]:
        own = "its own was not evaluated" if loss is None else f"its own is {loss:.4f}"
        logger.info(
            f"{best.path.name} has the lowest validation loss, {best.val_loss:.4f} nats per byte "
            f"({own}): to "
            f"use it, add --best"
        )


def best_of(name: str) -> str:
    """Return the path of the checkpoint with the lowest validation loss in a directory; raise
    UsageError for anything but a directory of checkpoints."""
    if not is_directory_of_checkpoints(Path(name)):
        raise UsageError(f"--best: {name} is not a directory of checkpoints")
    best = best_checkpoint(Path(name))
    logger.info(
        f"{best.path}: the checkpoint with the lowest validation loss, {best.val_loss:.4f} nats "
        f"per byte"
    )
    return str(best.path)


def trained_loops(state: dict) -> int:
    """Return the number of loops in training, from a checkpoint's content."""
    return state.get("n_loops", SpiderConfig.from_saved(state["cfg"]).n_loops)


def model_of(
    state: dict, device: torch.device, dtype: torch.dtype, model_class: type[nn.Module]
) -> nn.Module:
    """Build the model of a checkpoint's content in evaluation mode, with products in a dtype."""
    with torch.device("meta"):
        model = model_class(SpiderConfig.from_saved(state["cfg"]))
    model.to_empty(device=device).init_weights()
    model.load_state_dict(state["model_state_dict"])
    model.compute_dtype = dtype
    if remark := model.choose_backend():
        logger.info(remark)
    return model.eval()


def decoder_of(state: dict, device: torch.device, model_class: type[nn.Module]) -> nn.Module:
    """Build the model in the precision that decodes fastest: bf16 on a GPU; fp32 on a CPU, where
    bf16 takes several times as long for a single row."""
    bf16 = device.type == "cuda" and multiplies_bf16(device)
    return model_of(state, device, torch.bfloat16 if bf16 else torch.float32, model_class)


# --------------------------------------------------------------------------------------------------
# Continuing texts


@dataclass
class Sampler:
    """A model with the settings of its samples; see sample.py's flags of these names."""

    model: nn.Module
    bytes: int
    temperature: float
    top_k: int | None
    top_p: float | None
    no_repeat_ngram_size: int
    samples: int
    seed: int
    raw: bool
    stop: Sequence[bytes] | None = None
    no_echo: bool = False

    def __post_init__(self):
        self.generator = torch.Generator(self.model.embed_tokens.device).manual_seed(self.seed)

    def read(self, state: DecodingState, ids: list[int]) -> Tensor:
        """Feed ids to a state with one row; return the logits of the next byte, [1, vocab_size]."""
        with self.model.cast_weights_once():
            for piece in torch.tensor([ids], device=self.model.embed_tokens.device).split(
                PIECE, dim=1
            ):
                logits = self.model.step(piece, state)[:, -1]
            return logits

    def write(self, logits: Tensor, state: DecodingState) -> Iterator[list[int | None]]:
        """Yield the next bytes of all rows, one column at a time."""
        return self.model.generate_batch(
            logits,
            state,
            self.bytes,
            self.temperature,
            self.top_k,
            self.top_p,
            self.generator,
            self.no_repeat_ngram_size,
        )


def beginning(prompt: bytes) -> list[int]:
    """Return the ids of a prompt; an empty one becomes a line break, since BOS alone is rare in
    training."""
    return [BOS_ID, *prompt] if prompt else list(b"\n")


def print_bytes(pieces: Iterable[bytes], raw: bool):
    """Print bytes as they arrive: unchanged if `raw`, else as text with control characters escaped,
    but for line breaks and tabs."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    try:
        for piece in pieces:
            if raw:
                sys.stdout.buffer.write(piece)
            else:
                print(
                    *(c if c in "\n\t" else one_line(c) for c in decoder.decode(piece)),
                    sep="",
                    end="",
                )
            sys.stdout.flush()
    finally:
        print(decoder.decode(b"", final=True), flush=True)


class Continuation:
    """The bytes that a row writes, up to the first stop text. Its last bytes are held back while
    they may begin one."""

    def __init__(self, stop: Sequence[bytes] | None):
        self.stop = stop or ()
        self.text = bytearray()  # without the stop text
        self.released = 0  # bytes of it
        self.stopped = False  # by a stop text
        self.ended = False  # by a stop text or EOS

    def add(self, byte: int | None) -> bytes:
        """Add the row's next byte, or None after its EOS; return the bytes that come before any
        stop text for sure."""
        if byte is None or self.ended:
            self.ended = True
            return self.rest()
        self.text.append(byte)
        found = [stop for stop in self.stop if self.text.endswith(stop)]
        if found:
            del self.text[-max(map(len, found)) :]
            self.stopped = self.ended = True
        return self._release(len(self.text) - self._may_begin_a_stop())

    def rest(self) -> bytes:
        """Return the bytes that were held back."""
        return self._release(len(self.text))

    def _may_begin_a_stop(self) -> int:
        """Return how many of the last bytes begin a stop text."""
        longest = max(map(len, self.stop), default=1) - 1
        tail = b"" if self.ended else bytes(self.text[max(0, len(self.text) - longest) :])
        for start in range(len(tail)):
            if any(stop.startswith(tail[start:]) for stop in self.stop):
                return len(tail) - start
        return 0

    def _release(self, stop: int) -> bytes:
        piece = bytes(self.text[self.released : stop])
        self.released = stop
        return piece


def complete(sampler: Sampler, state: DecodingState, prompt: bytes):
    """Print samples that continue a prompt, generated as a batch: the first while it is generated,
    then the others."""
    count = sampler.samples
    rows = [Continuation(sampler.stop) for _ in range(count)]
    logits = sampler.read(state, beginning(prompt)).expand(count, -1)
    state = state if count == 1 else state.copy([0] * count)
    echo = b"" if sampler.no_echo else prompt

    def first() -> Iterator[bytes]:
        yield echo
        for column in sampler.write(logits, state):
            pieces = [row.add(byte) for row, byte in zip(rows, column, strict=True)]
            yield pieces[0]
            if all(row.ended for row in rows):
                return
        yield rows[0].rest()

    for number, row in enumerate(rows, 1):
        if count > 1:
            print(f"--- {number} of {count}", flush=True)
        print_bytes(first() if number == 1 else [echo, bytes(row.text)], sampler.raw)


def converse(sampler: Sampler, state: DecodingState):
    """Hold a dialogue: input from the terminal and the model's output form one text. Input starts a
    new line, or a new document after the model's EOS; after a stop text, which stays in the
    context, it follows directly. Ctrl-C stops the model."""
    with suppress(ImportError):
        import readline  # noqa: F401     # lines can be edited then
    sys.stdin.reconfigure(errors="surrogateescape")
    unread = None  # ids that the state has not read; None before the first turn
    starts_line = False  # whether the next input does, unless it is empty
    while (typed := ask()) is not None:
        typed = os.fsencode(typed)
        if unread is None:
            ids = beginning(typed)
        elif typed and starts_line:
            ids = [*unread, ord("\n"), *typed]
        else:
            ids = [*unread, *typed]
        logits, written, row = sampler.read(state, ids), [], Continuation(sampler.stop)

        def turn(logits=logits, written=written, row=row) -> Iterator[bytes]:
            for (byte,) in sampler.write(logits, state):
                written.append(byte)
                yield row.add(byte)
                if asked or row.ended:  # noqa: B023 `asked` of this turn
                    break
            yield row.rest()

        with interrupts_that_wait() as asked:
            print_bytes(turn(), sampler.raw)
        ended = not written or len(written) < sampler.bytes and not asked and not row.stopped
        unread = [EOS_ID, BOS_ID] if ended else written[-1:]
        starts_line = not (ended or row.stopped or written[-1] == ord("\n"))


def ask() -> str | None:
    """Read the lines of a turn, without the final line break; return None at the end of input."""
    try:
        text = input("> ")
        while text.endswith("\\"):
            text = text[:-1] + "\n" + input("  ")
        return text
    except EOFError:
        print()
    except KeyboardInterrupt:
        print()
        raise


@contextmanager
def interrupts_that_wait() -> Iterator[list]:
    """Record Ctrl-C in the yielded list instead of raising, so that it cannot leave the state
    inconsistent."""
    asked = []
    before = signal.signal(signal.SIGINT, lambda *_: asked.append(True))
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


# --------------------------------------------------------------------------------------------------
# Scoring


def windows(stream, seq_len: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut a stream into batches of (ids, labels), int64 [n, seq_len]. Windows overlap by half.
    Every byte after the first id is a label once, in the first window that has it."""
    last, stride = len(stream) - 1, max(1, seq_len // 2)
    starts = range(0, max(1, last - seq_len + stride), stride)
    for i in range(0, len(starts), batch):
        rows = np.full((len(starts[i : i + batch]), seq_len + 1), PAD_ID, np.int64)
        for row, start in zip(rows, starts[i : i + batch], strict=True):
            ids = stream.read(start, min(start + seq_len, last) + 1)
            row[: len(ids)] = ids
        labels = torch.from_numpy(rows[:, 1:].copy())
        labels[labels > 255] = -100
        # row with a window before it, which has seen this row's first half
        first = 1 if i == 0 else 0
        labels[first:, : seq_len - stride] = -100
        yield torch.from_numpy(rows[:, :-1].copy()), labels


@torch.no_grad()
def score_windows(
    model: nn.Module, stream, seq_len: int, batch: int, n_loops: int
) -> tuple[int, float]:
    """Return the number of predicted bytes of a stream, and bits per byte."""
    device, nats, count = model.embed_tokens.device, 0.0, 0
    seq_len = min(seq_len, max(2, len(stream) - 1))
    progress = ProgressBar("evaluating", 2 * len(stream)) if sys.stderr.isatty() else None
    with model.cast_weights_once():
        for ids, labels in windows(stream, seq_len, batch) if len(stream) > 1 else ():
            counted = int((labels != -100).sum())
            out = model(ids.to(device), labels.to(device), n_loops=n_loops)
            nats += out.nats_per_byte.item() * counted
            count += counted
            if progress:
                progress.add(ids.numel())
    return count, nats / max(1, count) / math.log(2)


def count_characters(pieces: Iterable[np.ndarray], special: bool) -> int:
    """Count the characters of ids, read in pieces: code points of UTF-8, and each byte that is not
    UTF-8. special: whether ids above 255, such as EOS, count as one each."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    count = 0
    for ids in pieces:
        above = ids > 255
        count += len(decoder.decode(np.where(above, 0, ids).astype(np.uint8).tobytes()))
        if not special:
            count -= int(above.sum())
    return count + len(decoder.decode(b"", final=True))


# --------------------------------------------------------------------------------------------------
# Adapting: dynamic evaluation, Krause et al., arXiv 1709.07432. Rates, chunk and context are
# measured in docs/results/learning.md, "Adaptation".

RATE = 0.4  # the tables' learning rate; in training 0.25
DENSE_RATE = 1.5e-4  # of AdamW, for all other weights
CHUNK = 1024  # bytes between two steps
CONTEXT = 1024  # bytes before a chunk that the model sees, at most


class Adaptation:
    """A model that learns from what it reads. It scores a chunk; then all weights take one step on
    the chunk's gradient, so every byte is scored before anything learns from it. nats: the loss of
    all ids that counted; count: their number."""

    def __init__(self, model: nn.Module, state: dict, n_loops: int):
        """state: the content of the model's checkpoint, whose accumulators set the size of each
        row's steps. Raise CheckpointError if it has none."""
        tables = [module for module in model.modules() if isinstance(module, EngramTable)]
        saved = state.get("optimizer_state_dict", {}).get("engram")
        if not tables or not saved or not state.get("bytes_seen") or not state["step"]:
            raise CheckpointError(
                "--adapt needs a model with Engram tables and their optimizer state: use a "
                "checkpoint that train.py wrote (an export has no optimizer state)"
            )
        self.model, self.n_loops, self.device = model, n_loops, model.embed_tokens.device
        self.adagrad = RowwiseAdagrad(tables, RATE)
        load_optimizer("engram", self.adagrad, deepcopy(saved))
        dense = [p for p in model.parameters() if p not in self.adagrad.tables]
        self.adamw = torch.optim.AdamW(dense, DENSE_RATE, weight_decay=0, fused=True)
        # over which the loss of training is a mean
        self.bytes_per_step = state["bytes_seen"] / state["step"]
        self.nats, self.count = 0.0, 0

    def _learn(self, ids: Tensor, labels: Tensor):
        """Score a window, ids and labels [1, n], then step the weights."""
        with torch.enable_grad(), self.model.cast_weights_once():
            out = self.model(ids, n_loops=self.n_loops)
            nats = F.cross_entropy(out.logits[0], labels[0], ignore_index=-100, reduction="sum")
            (nats / self.bytes_per_step).backward()
        for optimizer in (self.adagrad, self.adamw):
            optimizer.step()
            optimizer.zero_grad()
        self.nats += nats.item()
        self.count += int((labels != -100).sum())

    def score(self, streams: list, special: bool) -> tuple[int, float]:
        """Read streams in order, each with nothing in context at its start; return the number of
        ids that counted so far, and bits per id. special: whether BOS and EOS count, too."""
        progress = ProgressBar("adapting", sum(map(len, streams))) if sys.stderr.isatty() else None
        for stream in streams:
            for done in range(0, len(stream) - 1, CHUNK):
                first, last = max(0, done - CONTEXT), min(done + CHUNK, len(stream) - 1)
                ids = torch.from_numpy(stream.read(first, last + 1).astype(np.int64))
                labels = ids[1:].clone()
                labels[labels == PAD_ID if special else labels > 255] = -100
                labels[: done - first] = -100
                if (labels != -100).any():
                    self._learn(ids[None, :-1].to(self.device), labels[None].to(self.device))
                if progress:
                    progress.add(last - done)
        return self.count, self.nats / max(1, self.count) / math.log(2)
