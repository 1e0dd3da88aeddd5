"""Run a model over a text and record its segments, loops, routing and gates (`read`)."""

import math
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from loguru import logger
from torch import nn

from spider import console, errors, files
from spider.data import shards
from spider.model.decoding import PIECE
from spider.model.norm import rms_norm
from tokenizer import BOS_ID

LONGEST = 4096                            # maximum bytes of a text
BITS = (0.5, 1, 2, 3, 4, 6, 8)            # thresholds between eight shades of surprise


class Record:
    """Record the internals of a model by forward hooks, inside its context, for Spider.step on one row.

    Segments are numbered through the text, including that of BOS."""

    def __init__(self, model: nn.Module):
        self.model, self.handles = model, []
        self.ends: list[bool] = []                                # by id: whether it ended a segment
        self.loops: list[int] = []                                # by finished segment
        self.load: dict[tuple[int, int], torch.Tensor] = {}       # by (layer, loop): tokens per expert, [E]
        self.gates: dict[tuple[int, int], dict[int, float]] = {}  # by (layer, loop): Engram's gate by segment
        self.byte_gates: list[list[float]] = []                   # by id: a gate per order and match context
        self.votes: list[list[float | None]] = []                 # by id: the weight of each context's newest vote

    def __enter__(self) -> "Record":
        model, core = self.model, self.model.core
        if model.engram_output is not None:
            self.handles.append(model.engram_output.gate.register_forward_hook(self._read_bytes))
            if model.engram_output.votes is not None:
                self.handles.append(model.engram_output.register_forward_hook(self._read_votes))
        if core is not None:
            model.boundaries = self._cut
            self.handles.append(core.register_forward_pre_hook(self._enter_core))
            for i, layer in enumerate(core.layers):
                self.handles.append(layer.register_forward_hook(partial(self._visit, i)))
                if layer.engram is not None:
                    self.handles.append(layer.engram.register_forward_hook(partial(self._recall, i)))
        return self

    def __exit__(self, *_):
        if self.model.core is not None:
            del self.model.boundaries                             # restores the class's method
        for handle in self.handles:
            handle.remove()

    def _read_bytes(self, _, args, logits):
        self.byte_gates += logits.float().sigmoid().tolist()

    def _read_votes(self, engram, args, _):
        x, _, matches = args
        followed, weights = (cast[:, ::self.model.config.engram_votes].tolist()              # of the newest occurrence
                             for cast in engram.cast_votes(rms_norm(x), matches))
        self.votes += [[weight if 0 <= byte < 256 else None for byte, weight in zip(*row)]
                       for row in zip(followed, weights)]

    def _cut(self, *args):
        b = type(self.model).boundaries(self.model, *args)
        self.ends += (b > 0).tolist()
        return b

    def _enter_core(self, _, args):
        self.first, self.visits = len(self.loops), Counter()      # segments before this pass; visits by layer in it
        self.loops += [0] * len(args[0])

    def _running(self, active) -> dict[int, int]:
        """Return the segments that had not halted before this loop, with their computed rows."""
        rows = range(len(self.loops) - self.first) if active.index is None else active.index.tolist()
        halted = [False] * len(rows) if active.halted is None else active.halted.tolist()
        return {self.first + row: i for i, (row, over) in enumerate(zip(rows, halted)) if not over}

    def _recall(self, i: int, engram, args, _):
        h, recalled, active = args[:3]
        gate = engram.gate(h, active.pick(recalled.key)).flatten().tolist()
        for segment, row in self._running(active).items():
            self.gates.setdefault((i, self.visits[i]), {})[segment] = gate[row]

    def _visit(self, i: int, layer, args, output):
        key, (_, routing, _), running = (i, self.visits[i]), output, self._running(args[3])
        self.visits[i] += 1
        for segment in running if i == 0 else ():
            self.loops[segment] += 1
        if routing.topk_idx is not None and running:
            chosen = routing.topk_idx[[*running.values()]].flatten()
            tokens = chosen.bincount(minlength=self.model.config.n_routed_experts).cpu()
            self.load[key] = self.load.get(key, 0) + tokens


@dataclass
class Shown:
    """A text, and a model's record of it."""
    text: bytes
    bits: list[float]                     # [bytes] surprise: -log2 of the byte's probability
    likeliest: list[str]                  # [bytes] the likeliest bytes with their probabilities, as text
    segment: list[int]                    # [bytes] number of the byte's segment
    ends: list[bool]                      # [bytes] whether the byte ends its segment
    record: Record

    @property
    def bits_per_byte(self) -> float:
        return sum(self.bits) / len(self.bits)

    def loops_of(self, byte: int) -> int | None:
        """Return the loops of the byte's segment; None if that is not finished."""
        segment = self.segment[byte]
        return self.record.loops[segment] if segment < len(self.record.loops) else None


@torch.no_grad()
def read(model: nn.Module, text: bytes, n_loops: int) -> Shown:
    """Run a model in evaluation mode over a text of at least one byte, in pieces.

    Raise FloatingPointError for a non-finite logit."""
    ids = torch.tensor([[BOS_ID, *text]], device=model.embed_tokens.device)
    state, logits = model.decoding_state(n_loops=n_loops), []
    progress = console.ProgressBar("reading", len(text)) if sys.stderr.isatty() else None
    with Record(model) as record, model.cast_weights_once():
        for piece in ids[:, :-1].split(PIECE, dim=1):
            logits.append(model.step(piece, state)[0])
            if progress:
                progress.add(piece.shape[1])
        model.step(ids[:, -1:], state)    # for the record of the last byte
    log_p = torch.cat(logits).log_softmax(-1)                                                # [bytes, vocab_size]
    if not log_p.isfinite().all():
        raise FloatingPointError("the model's logits are not finite numbers: its weights are ruined")
    bits = -log_p.gather(1, ids[0, 1:, None])[:, 0] / math.log(2)
    p, id_ = log_p.exp().topk(3)
    likeliest = [", ".join(f"{shards.printable([i])} {share:.0%}" for i, share in zip(*row))
                 for row in zip(id_.tolist(), p.tolist())]
    ends = record.ends or [False] * ids.shape[1]                                             # a model without core
    before = list(accumulate(ends, initial=0))
    return Shown(text, bits.tolist(), likeliest, before[1:-1], ends[1:], record)


def characters(text: bytes) -> Iterator[tuple[str, int, int]]:
    """Yield the UTF-8 characters as (glyph, start, stop); control characters, invisible ones and bytes that are not
    UTF-8 are escaped."""
    start = 0
    for c in text.decode("utf-8", "surrogateescape"):
        stop = start + len(raw := c.encode("utf-8", "surrogateescape"))
        is_byte = "\udc80" <= c <= "\udcff"
        yield f"\\x{raw[0]:02x}" if is_byte else console.one_line(c), start, stop
        start = stop


def take_text(argument: str) -> tuple[bytes, str]:
    """Return the first LONGEST bytes of the text that --show names, and its name."""
    if argument == "-":
        text, name = sys.stdin.buffer.read(LONGEST + 4), "standard input"
    elif os.path.exists(argument):
        with files.naming(argument), open(argument, "rb") as file:
            text, name = file.read(LONGEST + 4), argument
    else:
        text, name = os.fsencode(argument), "a text"
    if not text:
        raise errors.DataError(f"--show: {name} is empty")
    stop = LONGEST
    while stop > LONGEST - 3 and text[stop:stop + 1] and text[stop] & 0xC0 == 0x80:
        stop -= 1                         # before the character that does not fit
    if text[stop:]:
        name = f"the first {stop:,} bytes of {name}"
        logger.warning(f"--show: only {name}")
    return text[:stop], name


def facts(shown: Shown) -> list[str]:
    """Summarize a text in lines: bits per byte and, if there are any, segments and loops."""
    loops, count = Counter(shown.record.loops), len(shown.text)
    lines = [f"{count:,} bytes, {shown.bits_per_byte:.3f} bits per byte"]
    if segments := sum(shown.ends):
        lines.append(f"{segments:,} segments, {count / segments:.2f} bytes each")
        lines.append("loops: " + ", ".join(f"{loop} ({times:,} segments)" for loop, times in sorted(loops.items())))
    return lines
