"""Look inside a model as it reads a text: segments, loops, surprise, routing, gates and votes
(`sample.py --show`).

read          run a model over a text and record what it does
in_terminal   show the text with its segments in a terminal
write_page    show all of it as an HTML page

page.html is the page's template; its script draws the embedded JSON data. The page is one file that
loads nothing. Its content security policy only allows its own script, and all data (text,
checkpoint, names) is inserted as text. It may be shared: it has names of files, but no paths.
"""

import base64
import hashlib
import html
import json
import math
import os
import re
import sys
from bisect import bisect
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from loguru import logger
from torch import Tensor, nn

from spider.common import DataError, ProgressBar, durable, one_line, printable
from spider.export import facts_of
from spider.layers import rms_norm
from tokenizer import BOS_ID

TEMPLATE = Path(__file__).with_name("page.html")
LONGEST = 1 << 20  # maximum bytes of a text, for a page that a browser can open
PRINTED = 4096  # bytes that a terminal shows
WINDOW = 8192  # bytes that the model reads at once, half of them context
LIKELIEST = 3  # bytes that are named as expected

# Thresholds between eight shades
BITS = (0.5, 1, 2, 3, 4, 6, 8)  # of surprise,
LOADS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)  # of an expert's load,
VOTES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)  # of a vote, in nats,
GATES = tuple(step / 8 for step in range(1, 8))  # and of a gate
SHADES_OF = dict(bits=BITS, loads=LOADS, gates=GATES, votes=VOTES)

# --------------------------------------------------------------------------------------------------
# Reading


class Record:
    """Record the internals of a model by forward hooks, inside its context, for forward passes over
    one row.

    A text may take several passes (`begin`). Segments are numbered through the text, including that
    of BOS."""

    def __init__(self, model: nn.Module):
        self.model, self.handles = model, []
        self.ends: list[bool] = []  # by id: whether it ended a segment
        self.loops: list[int] = []  # by finished segment
        self.load: dict[tuple[int, int], Tensor] = {}  # by (layer, loop): tokens per expert, [E]
        # by (layer, loop): Engram's gate by segment
        self.gates: dict[tuple[int, int], dict[int, float]] = {}
        self.byte_gates: list[Tensor] = []  # of each pass [ids, orders and match contexts]
        # of each pass [ids, contexts]: the newest vote's weight, NaN for none
        self.votes: list[Tensor] = []

    def begin(self, context: int, length: int, is_last: bool):
        """Prepare a pass over `length` ids, of which the first `context` have been recorded before.
        Unless it is the last one, it is recorded up to the last end of a segment: `recorded` is the
        slice of its ids."""
        self.recorded, self.is_last = slice(context, length), is_last

    def __enter__(self) -> "Record":
        model, core = self.model, self.model.core
        if model.engram_output is not None:
            self.handles.append(model.engram_output.gate.register_forward_hook(self._read_bytes))
            if model.engram_output.votes is not None:
                self.handles.append(model.engram_output.register_forward_hook(self._read_votes))
        if core is not None:
            model.boundaries = self._cut
            # else halted segments are not told apart
            self.drop_halted, core.drop_halted = core.drop_halted, True
            self.handles.append(core.register_forward_pre_hook(self._enter_core))
            for i, layer in enumerate(core.layers):
                self.handles.append(layer.register_forward_hook(partial(self._visit, i)))
                if layer.engram is not None:
                    self.handles.append(
                        layer.engram.register_forward_hook(partial(self._recall, i))
                    )
        return self

    def __exit__(self, *_):
        if self.model.core is not None:
            del self.model.boundaries  # restores the class's method
            self.model.core.drop_halted = self.drop_halted
        for handle in self.handles:
            handle.remove()

    def _read_bytes(self, _, args, logits):
        self.byte_gates.append(logits[self.recorded].float().sigmoid().cpu())

    def _read_votes(self, engram, args, _):
        x, _, matches = args
        # of the newest occurrence
        followed, weights = (
            cast[self.recorded, :: self.model.config.engram_votes]
            for cast in engram.cast_votes(rms_norm(x), matches)
        )
        is_byte = (followed >= 0) & (followed < 256)
        self.votes.append(weights.float().masked_fill(~is_byte, math.nan).cpu())

    def _cut(self, *args):
        b = type(self.model).boundaries(self.model, *args)
        ends = (b > 0).tolist()
        context = self.recorded.start
        if not self.is_last and any(ends[context:]):
            self.recorded = slice(context, len(ends) - ends[::-1].index(True))
        self.ends += ends[self.recorded]
        # of this pass, recorded
        self.segments = range(sum(ends[:context]), sum(ends[: self.recorded.stop]))
        return b

    def _enter_core(self, _, args):
        # visits: by layer
        self.first, self.rows, self.visits = len(self.loops), len(args[0]), Counter()
        self.loops += [0] * len(self.segments)

    def _running(self, active) -> dict[int, int]:
        """Return the segments that had not halted before this loop, with their computed rows."""
        rows = range(self.rows) if active.index is None else active.index.tolist()
        halted = [False] * len(rows) if active.halted is None else active.halted.tolist()
        return {
            self.first + row - self.segments.start: i
            for i, (row, over) in enumerate(zip(rows, halted, strict=True))
            if row in self.segments and not over
        }

    def _recall(self, i: int, engram, args, _):
        h, recalled, active = args[:3]
        gate = engram.gate(h, active.select(recalled.key)).flatten().tolist()
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
    bits: list[float]  # [bytes] surprise: -log2 of the byte's probability
    likeliest: Tensor  # int64 [bytes, LIKELIEST] ids
    shares: Tensor  # [bytes, LIKELIEST] their probabilities
    segment: list[int]  # [bytes] number of the byte's segment
    ends: list[bool]  # [bytes] whether the byte ends its segment
    record: Record


@torch.no_grad()
def read(model: nn.Module, text: bytes, n_loops: int) -> Shown:
    """Run a model in evaluation mode over a text of at least one byte. A long one is read in
    overlapping windows, like one that --eval scores.

    Raise FloatingPointError for a non-finite logit."""
    ids = torch.tensor([BOS_ID, *text], device=model.embed_tokens.device)
    progress = ProgressBar("reading", len(ids)) if sys.stderr.isatty() else None
    bits, likeliest, shares = [], [], []
    done = 0
    with Record(model) as record, model.cast_weights_once():
        while done < len(ids):
            first = max(0, done - WINDOW // 2)
            window = ids[first : first + WINDOW]
            record.begin(done - first, len(window), first + len(window) == len(ids))
            logits = model(window[None], n_loops=n_loops).logits[0, record.recorded]
            labels = ids[done + 1 : done + 1 + len(logits)]
            log_p = logits[: len(labels)].log_softmax(-1)  # [bytes, vocab_size]
            if not log_p.isfinite().all():
                raise FloatingPointError(
                    "the model's logits are not finite numbers: its weights are ruined"
                )
            bits += (-log_p.gather(1, labels[:, None])[:, 0] / math.log(2)).tolist()
            for found, of_window in zip(
                (shares, likeliest), log_p.exp().topk(LIKELIEST), strict=False
            ):
                found.append(of_window.cpu())
            done += len(logits)
            if progress:
                progress.add(len(logits))
    ends = record.ends or [False] * len(ids)  # a model without core
    before = list(accumulate(ends, initial=0))
    return Shown(
        text, bits, torch.cat(likeliest), torch.cat(shares), before[1:-1], ends[1:], record
    )


def take_text(argument: str) -> tuple[bytes, str]:
    """Return the first LONGEST bytes of the text that --show names, and its name without a path."""
    if argument == "-":
        text, name = sys.stdin.buffer.read(LONGEST + 1), "standard input"
    elif os.path.exists(argument):
        with open(argument, "rb") as file:
            text, name = file.read(LONGEST + 1), Path(argument).name
    else:
        text, name = os.fsencode(argument), "a text"
        logger.info(f"--show: there is no file {argument!r}, so this is the text")
    if not text:
        raise DataError(f"--show: {name} is empty")
    if len(text) > LONGEST:
        text, name = text[:LONGEST], f"the first {LONGEST:,} bytes of {name}"
        logger.warning(f"--show: only {name}")
    return text, name


def characters(text: bytes) -> Iterator[tuple[str, int, int]]:
    """Yield the UTF-8 characters as (glyph, start, stop); control characters, invisible ones and
    bytes that are not UTF-8 are escaped."""
    start = 0
    for c in text.decode("utf-8", "surrogateescape"):
        raw = c.encode("utf-8", "surrogateescape")
        is_byte = "\udc80" <= c <= "\udcff"
        yield f"\\x{raw[0]:02x}" if is_byte else one_line(c), start, start + len(raw)
        start += len(raw)


def facts(shown: Shown) -> list[str]:
    """Summarize a text in lines: bits per byte and, if there are any, segments and loops."""
    count, segments = len(shown.text), sum(shown.ends)
    lines = [f"{count:,} bytes, {sum(shown.bits) / count:.3f} bits per byte"]
    if segments:
        loops = Counter(
            shown.record.loops[shown.segment[i]] for i, end in enumerate(shown.ends) if end
        )
        lines.append(f"{segments:,} segments, {count / segments:.2f} bytes each")
        lines.append(
            "loops: "
            + ", ".join(f"{loop} ({times:,} segments)" for loop, times in sorted(loops.items()))
        )
    return lines


# --------------------------------------------------------------------------------------------------
# In a terminal

# of 256 colours:
SHADES = ((252, 234), (255, 53), (255, 89), (255, 125), (16, 166), (16, 208), (16, 220), (16, 229))
# (text, background), as in the color map "inferno", for
# any terminal theme
SMALL_DIGITS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def in_terminal(shown: Shown, colour: bool) -> Iterator[str]:
    """Yield the first PRINTED bytes of the text with its segments, and a legend, in plain
    characters or with ANSI colors."""
    differ, now, glyph = len(set(shown.record.loops)) > 1, "", ""

    def turn(style: str) -> str:
        nonlocal now
        before, now = now, style
        return f"\x1b[0{style}m" if colour and style != before else ""

    def shade(level: int) -> str:
        return ";38;5;{};48;5;{}".format(*SHADES[level])

    for glyph, start, stop in characters(shown.text):
        if start >= PRINTED:
            break
        underlined = ";4" if shown.segment[stop - 1] % 2 else ""
        yield turn(shade(bisect(BITS, sum(shown.bits[start:stop]))) + underlined) + glyph.replace(
            "\\n", "↵"
        )
        if any(shown.ends[start:stop]):
            if differ:
                last = stop - 1 - shown.ends[start:stop][::-1].index(True)
                yield turn(";2") + str(shown.record.loops[shown.segment[last]]).translate(
                    SMALL_DIGITS
                )
            elif not colour:
                yield "│"
        if glyph == "\\n":
            yield turn("") + "\n"
    if start >= PRINTED:
        yield turn("") + f" ... (all {len(shown.text):,} bytes are on the page)\n\n"
    else:
        yield turn("") + ("\n" if glyph == "\\n" else "\n\n")
    if colour:
        names = ("0", *(f"{bits:g}" for bits in BITS))
        yield (
            "bits: "
            + "".join(turn(shade(level)) + f" {name} " for level, name in enumerate(names))
            + turn("")
        )
        yield " and more; every other segment is underlined" if any(shown.ends) else " and more"
    if differ:
        yield "; a small number after a segment is the number of its loops"
    elif any(shown.ends) and not colour:
        yield "segments end at │"
    yield "\n" + "\n".join(facts(shown))


# --------------------------------------------------------------------------------------------------
# As a page


def write_page(shown: Shown, title: str, model: nn.Module, run: list[str]) -> str:
    """Fill the template and return the page as HTML. run: facts of the training run."""
    text, title = TEMPLATE.read_text(encoding="utf-8"), html.escape(one_line(title))
    style, script = (
        hash_of(re.search(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)[1])
        for tag in ("style", "script")
    )
    # in ASCII
    data = json.dumps(page_data(shown, model, run), allow_nan=False, separators=(",", ":"))
    fields = dict(
        title=title,
        policy=f"default-src 'none'; script-src '{script}'; style-src '{style}'",
        data=re.sub("[<>&]", lambda sign: f"\\u{ord(sign[0]):04x}", data),
    )
    return re.sub("{{([a-z]+)}}", lambda field: fields[field[1]], text)


def hash_of(text: str) -> str:
    """Return the hash of a script or style for a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def run_facts(path: Path, state: dict, model: nn.Module) -> list[str]:
    """Summarize a model and its training run, given its checkpoint and content. Paths are left
    out."""
    facts = facts_of(path, dict(flags={}) | state)
    size = f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters"
    lines = [
        f"{facts['recipe']}, {size}" if "recipe" in facts else size,
        f"step {facts.get('step', 0):,}",
    ]
    if "bytes_seen" in facts:
        lines.append(f"trained on {facts['bytes_seen']:,} bytes")
    if "data_dir" in facts["flags"]:
        lines.append(f"data: {one_line(facts['flags']['data_dir'])}")
    if "val_bpb" in facts:
        lines.append(
            f"validation at step {facts['val_bpb_at_step']:,}: {facts['val_bpb']:.3f} bits per byte"
        )
    return lines


def page_data(shown: Shown, model: nn.Module, run: list[str]) -> dict:
    """Return the data that page.html draws, as plain values; bytes and segments count from 0. What
    has a value for each byte is a string where it can be, to keep the page small."""
    record, glyphs = shown.record, list(characters(shown.text))
    load = [
        dict(name=f"{layer + 1}, {loop + 1}", tokens=[int(tokens) for tokens in load])
        for (layer, loop), load in sorted(record.load.items())
    ]
    gates = [
        dict(name=name, kind=kind, shades=shades, levels=levels_of(values, SHADES_OF[shades]))
        for name, values, kind, shades in gate_rows(shown, model)
    ]
    return dict(
        run=run,
        facts=facts(shown),
        shades=SHADES_OF,
        names=[printable([i]) for i in range(model.config.vocab_size)],
        glyphs=[glyph for glyph, _, _ in glyphs],
        lengths="".join(str(stop - start) for _, start, stop in glyphs),
        bytes=shown.text.hex(),
        bits=[round(bits, 2) for bits in shown.bits],
        likeliest=shown.likeliest.flatten().tolist(),
        percent=(100 * shown.shares).round().int().flatten().tolist(),
        ends="".join(str(int(end)) for end in shown.ends),
        first_segment=shown.segment[0],
        loops=record.loops,
        load=load,
        gates=gates,
        meanings=[(kind, MEANINGS[kind]) for kind in dict.fromkeys(gate["kind"] for gate in gates)],
    )


def levels_of(values: Tensor, limits: tuple[float, ...]) -> str:
    """Return the shade of each value as a digit, a space for NaN."""
    levels = torch.bucketize(values.contiguous(), torch.tensor(limits), right=True) + ord("0")
    return bytes(levels.masked_fill(values.isnan(), ord(" ")).tolist()).decode()


OF_WORDS = (
    "the same for all bytes since the n-th last end of a word: word 1 is the current word, word "
    "2 the current "
    "word and the one before it"
)
MEANINGS = {
    "last n bytes": "what the Engram tables learned about these bytes",
    "last n, in the text": "the byte that followed the last earlier occurrence of these n bytes "
    "in this text",
    "word n, in the text": OF_WORDS,
    "last n, its vote": "the weight in nats that is added to the logit of the byte that followed "
    "the last earlier "
    "occurrence of these n bytes in this text; empty where there is none",
    "word n, its vote": OF_WORDS,
    "layer, loop": "what a layer of the core looks up in its Engram tables for a segment, in "
    "each loop",
}


def gate_rows(shown: Shown, model: nn.Module) -> list[tuple[str, Tensor, str, str]]:
    """Return Engram's gates and votes: name, value by byte (NaN: its segment was not computed, or
    there is no vote), key of MEANINGS, and key of SHADES_OF."""
    c, record = model.config, shown.record
    contexts = [("last", n) for n in c.engram_match_orders] + [
        ("word", n) for n in c.engram_match_words
    ]
    rows = [(f"last {n} byte{'s' * (n > 1)}", "last n bytes") for n in c.engram_byte_orders]
    if c.matches_before_head:
        rows += [(f"{kind} {n}, in the text", f"{kind} n, in the text") for kind, n in contexts]
    found = []
    if record.byte_gates:
        found += [
            (name, gates, meaning, "gates")
            for (name, meaning), gates in zip(rows, torch.cat(record.byte_gates)[1:].T, strict=True)
        ]
    if record.votes:
        found += [
            (f"{kind} {n}, its vote", weights, f"{kind} n, its vote", "votes")
            for (kind, n), weights in zip(contexts, torch.cat(record.votes)[1:].T, strict=True)
        ]
    for (layer, loop), gates in sorted(record.gates.items()):
        by_segment = torch.full((len(record.loops) + 1,), math.nan)  # one may be unfinished
        by_segment[[*gates]] = torch.tensor([*gates.values()])
        found.append(
            (
                f"layer {layer + 1}, loop {loop + 1}",
                by_segment[shown.segment],
                "layer, loop",
                "gates",
            )
        )
    return found


def show(
    model: nn.Module, n_loops: int, argument: str, checkpoint: Path, state: dict, page: str | None
):
    """Print the analysis of the text that --show names, and write the page to `page` or beside the
    checkpoint, whose content is `state`."""
    text, name = take_text(argument)
    directory = checkpoint if checkpoint.is_dir() else checkpoint.parent
    out = directory / "look.html" if page is None else Path(page)
    shown = read(model, text, n_loops)
    colour = (
        sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )
    print("".join(in_terminal(shown, colour)), flush=True)
    run = run_facts(directory / checkpoint.name, state, model)
    content = write_page(shown, f"{checkpoint.absolute().name} reads {name}", model, run)
    try:
        with durable(out, "wb") as file:
            file.write(content.encode())
    except OSError as fault:
        raise DataError(
            f"{out}: {fault.strerror}: use --html to write the page elsewhere"
        ) from None
    print(one_line(f"the page: {out}"))
