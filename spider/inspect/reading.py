"""Read a text with a model and record what happens inside."""

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
from tokenizer import BOS_ID

LONGEST = 4096                            # bytes of a text that are shown
BITS = (0.5, 1, 2, 3, 4, 6, 8)            # where the next of eight shades of surprise begins


class Record:
    """Records what a model does with a text while this is entered, by forward hooks: nothing in the model knows of it.

    It goes with Spider.step on one row. Segments are numbered through the text, BOS's bytes included."""

    def __init__(self, model: nn.Module):
        self.model, self.handles = model, []
        self.ends: list[bool] = []                                # of each id read: whether it ended a segment
        self.loops: list[int] = []                                # of each finished segment
        self.load: dict[tuple[int, int], torch.Tensor] = {}       # (layer, loop): tokens of each expert, [E]
        self.gates: dict[tuple[int, int], dict[int, float]] = {}  # (layer, loop): Engram's gate, by segment
        self.byte_gates: list[list[float]] = []                   # of each id read: a gate for each order

    def __enter__(self) -> "Record":
        model, core = self.model, self.model.core
        if model.engram_output is not None:
            self.handles.append(model.engram_output.gate.register_forward_hook(self._read_bytes))
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
            del self.model.boundaries                             # the class's own again
        for handle in self.handles:
            handle.remove()

    def _read_bytes(self, _, args, logits):
        self.byte_gates += logits.float().sigmoid().tolist()

    def _cut(self, *args):
        b = type(self.model).boundaries(self.model, *args)
        self.ends += (b > 0).tolist()
        return b

    def _enter_core(self, _, args):
        self.first, self.visits = len(self.loops), Counter()      # segments before this pass; of each layer, in it
        self.loops += [0] * len(args[0])

    def _running(self, active) -> dict[int, int]:
        """Segments that had not halted before this loop, and the row of each among those that are computed."""
        rows = range(len(self.loops) - self.first) if active.index is None else active.index.tolist()
        halted = [False] * len(rows) if active.halted is None else active.halted.tolist()
        return {self.first + row: i for i, (row, over) in enumerate(zip(rows, halted)) if not over}

    def _recall(self, i: int, engram, args, _):
        h, recalled, active = args[:3]
        gate = engram.gate(h, active.pick(recalled.key)).flatten().tolist()
        for segment, row in self._running(active).items():
            self.gates.setdefault((i, self.visits[i]), {})[segment] = gate[row]

    def _visit(self, i: int, layer, args, output):
        place, (_, routing, _), running = (i, self.visits[i]), output, self._running(args[3])
        self.visits[i] += 1
        for segment in running if i == 0 else ():
            self.loops[segment] += 1
        if routing.topk_idx is not None and running:
            chosen = routing.topk_idx[[*running.values()]].flatten()
            tokens = chosen.bincount(minlength=self.model.config.n_routed_experts).cpu()
            self.load[place] = self.load.get(place, 0) + tokens


@dataclass
class Shown:
    """A text, and what a model did with it."""
    text: bytes
    bits: list[float]                     # [bytes] surprise, -log2 of the probability that the byte had
    likeliest: list[str]                  # [bytes] what the model had expected, for people
    segment: list[int]                    # [bytes] number of the segment that the byte is in
    ends: list[bool]                      # [bytes] whether the byte ends it
    record: Record

    @property
    def bits_per_byte(self) -> float:
        return sum(self.bits) / len(self.bits)

    def loops_of(self, byte: int) -> int | None:
        """Loops that the byte's segment took; None where it is not finished."""
        segment = self.segment[byte]
        return self.record.loops[segment] if segment < len(self.record.loops) else None


@torch.no_grad()
def read(model: nn.Module, text: bytes, n_loops: int) -> Shown:
    """Has the model, in evaluation mode, read a text of at least a byte, piece by piece.

    FloatingPointError where a logit is no finite number."""
    ids = torch.tensor([[BOS_ID, *text]], device=model.embed_tokens.device)
    state, logits = model.decoding_state(n_loops=n_loops), []
    progress = console.ProgressBar("reads", len(text)) if sys.stderr.isatty() else None
    with Record(model) as record, model.cast_weights_once():
        for part in ids[:, :-1].split(PIECE, dim=1):
            logits.append(model.step(part, state)[0])
            if progress:
                progress.add(part.shape[1])
        model.step(ids[:, -1:], state)    # for what the record says of the last byte
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
    """Whole UTF-8 characters with their places, (what is shown, start, stop): control characters, what is invisible and
    bytes that are no UTF-8 as escapes."""
    start = 0
    for c in text.decode("utf-8", "surrogateescape"):
        stop = start + len(raw := c.encode("utf-8", "surrogateescape"))
        is_byte = "\udc80" <= c <= "\udcff"
        yield f"\\x{raw[0]:02x}" if is_byte else console.one_line(c), start, stop
        start = stop


def take_text(argument: str) -> tuple[bytes, str]:
    """The text that --show names, at most LONGEST bytes of it, and a line that says what it is."""
    if argument == "-":
        text, name = sys.stdin.buffer.read(LONGEST + 4), "standard input"
    elif os.path.exists(argument):
        with files.naming(argument), open(argument, "rb") as file:
            text, name = file.read(LONGEST + 4), argument
    else:
        text, name = os.fsencode(argument), "a text"
    if not text:
        raise errors.DataError(f"--show: {name} is empty: there is nothing to read in it")
    stop = LONGEST
    while stop > LONGEST - 3 and text[stop:stop + 1] and text[stop] & 0xC0 == 0x80:
        stop -= 1                         # before the character that does not fit
    if text[stop:]:
        name = f"the first {stop:,} bytes of {name}"
        logger.warning(f"--show: {name}, and no more of it")
    return text[:stop], name


def facts(shown: Shown) -> list[str]:
    """Lines of figures, without what every text has."""
    loops, count = Counter(shown.record.loops), len(shown.text)
    lines = [f"{count:,} bytes, {shown.bits_per_byte:.3f} bits per byte"]
    if segments := sum(shown.ends):
        lines.append(f"{segments:,} segments, {count / segments:.2f} bytes each")
        lines.append("loops: " + ", ".join(f"{loop} ({times:,} segments)" for loop, times in sorted(loops.items())))
    return lines
