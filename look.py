"""What a model shows of itself: a text as it reads it, in a terminal and as a page; the curves of runs.

    python sample.py checkpoints/shakespeare --show "First Citizen:"             # sample.py's part of it
    python look.py curves.png "default=checkpoints" "three loops=checkpoints-3"  # the curves of runs in one picture

The text is one document: BOS stands before it, and every byte has all bytes before it in context, those too that lie
further back than a training sequence reaches. The page is one file that loads nothing; whatever in it comes from a
text, a checkpoint, a file or a name is escaped, and its policy lets no script run but its own.
"""

import base64
import hashlib
import html
import math
import os
import sys
from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby
from pathlib import Path

import torch
from loguru import logger

import data
import files
from checkpoint import is_in_parts, numbers_of
from optim import quiet
from spider_model import PIECE, Spider
from tokenizer import BOS_ID

LONGEST = 4096                            # bytes of a text that are shown
BITS = (0.5, 1, 2, 3, 4, 6, 8)            # where the next of eight shades of surprise begins


# ---------------------------------------------------------------------------------------------------------------------
# What a model does with a text

class Record:
    """What a model did with a text while this was entered, by forward hooks: nothing in the model knows of it.

    It goes with Spider.step on one row. Segments are numbered through the text, BOS's bytes included."""

    def __init__(self, model: Spider):
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
        b = Spider.boundaries(self.model, *args)
        self.ends += (b > 0).tolist()
        return b

    def _enter_core(self, _, args):
        self.first, self.visits = len(self.loops), Counter()      # segments before this pass; of each layer, in it
        self.loops += [0] * len(args[0])

    def _running(self, left) -> dict[int, int]:
        """Segments that had not halted before this loop, and the row of each among those that are computed."""
        rows = range(len(self.loops) - self.first) if left.index is None else left.index.tolist()
        halted = [False] * len(rows) if left.halted is None else left.halted.tolist()
        return {self.first + row: i for i, (row, over) in enumerate(zip(rows, halted)) if not over}

    def _recall(self, i: int, engram, args, _):
        h, recalled, left = args[:3]
        gate = engram.gate(h, left.pick(recalled.key)).flatten().tolist()
        for segment, row in self._running(left).items():
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
def read(model: Spider, text: bytes, n_loops: int) -> Shown:
    """Has the model, in evaluation mode, read a text of at least a byte, piece by piece.

    FloatingPointError where a logit is no finite number."""
    ids = torch.tensor([[BOS_ID, *text]], device=model.embed_tokens.device)
    state, logits = model.decoding_state(n_loops=n_loops), []
    progress = files.Progress("reads", len(text)) if sys.stderr.isatty() else None
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
    likeliest = [", ".join(f"{data.printable([i])} {share:.0%}" for i, share in zip(*row))
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
        yield f"\\x{raw[0]:02x}" if is_byte else files.one_line(c), start, stop
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
        raise data.DataError(f"--show: {name} is empty: there is nothing to read in it")
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


def show(model: Spider, n_loops: int, argument: str, checkpoint: Path, page: str | None):
    """Prints the text that --show names as the model reads it, and writes the page: to `page`, or beside the
    checkpoint, a file or a directory with metrics.jsonl."""
    text, name = take_text(argument)
    directory = checkpoint if checkpoint.is_dir() and not is_in_parts(checkpoint) else checkpoint.parent
    out = directory / "look.html" if page is None else Path(page)
    if not files.is_replaceable(out):
        raise data.DataError(f"--html: {out} is no regular file: name another")
    shown = read(model, text, n_loops)
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    sys.stdout.reconfigure(errors="backslashreplace")
    print("".join(in_terminal(shown, colour)), flush=True)
    content = write_page(shown, f"{checkpoint} reads {name}", model, read_metrics(directory / "metrics.jsonl"))
    try:
        with files.durable(out, "wb") as file:
            file.write(content.encode())
    except OSError as fault:
        raise data.DataError(f"{out}: {fault.strerror}: --html names another place for the page") from None
    print(files.one_line(f"the page: {out}"))


# ---------------------------------------------------------------------------------------------------------------------
# In a terminal

SHADES = ((252, 234), (255, 53), (255, 89), (255, 125), (16, 166), (16, 208), (16, 220), (16, 229))  # of 256 colours:
                                          # text and ground, ever lighter as in "inferno", whatever the terminal's own
SMALL_DIGITS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def in_terminal(shown: Shown, colour: bool) -> Iterator[str]:
    """The text, its segments apart, with a legend; in plain characters or with ANSI colours."""
    differ, now = len(set(shown.record.loops)) > 1, ""

    def turn(style: str) -> str:
        nonlocal now
        before, now = now, style
        return f"\x1b[0{style}m" if colour and style != before else ""

    def shade(level: int) -> str:
        return ";38;5;{};48;5;{}".format(*SHADES[level])
    for glyph, start, stop in characters(shown.text):
        level = bisect(BITS, sum(shown.bits[start:stop]))
        yield turn(shade(level) + ";4" * (shown.segment[stop - 1] % 2)) + glyph.replace("\\n", "↵")
        if any(shown.ends[start:stop]):
            if differ:
                yield turn(";2") + str(shown.loops_of(stop - 1)).translate(SMALL_DIGITS)
            elif not colour:
                yield "│"
        if glyph == "\\n":
            yield turn("") + "\n"
    yield turn("") + "\n" * (1 if shown.text.endswith(b"\n") else 2)
    if colour:
        names = ("0", *(f"{bits:g}" for bits in BITS))
        yield "bits: " + "".join(turn(shade(level)) + f" {name} " for level, name in enumerate(names)) + turn("")
        yield " and more; every other segment is underlined" if any(shown.ends) else " and more"
    elif any(shown.ends):
        yield "segments end at │" if not differ else "segments end at a number, which says how many loops they took"
    if colour and differ:
        yield ", the small number says how many loops it took"
    yield "\n" + "\n".join(facts(shown))


# ---------------------------------------------------------------------------------------------------------------------
# Curves of metrics.jsonl

PANELS = (  # title, name in a line, factor, name of what validation says, its factor
    ("loss, nats per byte", "loss", 1, "val_loss", 1),
    ("bits per byte", "loss", 1 / math.log(2), "val_bpb", 1),
    ("bytes per segment", "bytes_per_segment", 1, "val_bytes_per_segment", 1),
    ("loops until halting", "mean_loops", 1, "", 1),
    ("learning rate", "lr", 1, "", 1),
    ("norm of the gradient", "grad_norm", 1, "", 1),
    ("balance: busiest expert, 1 is even", "expert_balance", 1, "", 1),
    ("bytes per second", "tok_per_sec", 1, "", 1),
)
POINTS = 300                              # of a curve, each a mean over as many steps as it takes

Points = list[tuple[float, float]]


def read_metrics(path: Path) -> list[dict]:
    """The numbers of each line of metrics.jsonl that is one of a step; nothing where there is no such file."""
    if not path.is_file():
        return []
    wanted, lines = {"step", "bytes_seen"}.union(*(panel[1::2] for panel in PANELS)), []
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in iter(partial(file.readline, 1 << 16), ""):
            with suppress(ValueError):                            # cut off or altered
                lines.append({name: value for name, value in numbers_of(line).items()
                              if name in wanted and type(value) in (int, float) and abs(value) < 1e30})
    return lines


def axis_of(runs: Iterable[list[dict]]) -> tuple[str, float, str]:
    """What the curves of these runs lie over: name in a line, factor, name for people."""
    if all("bytes_seen" in line for lines in runs for line in lines):
        return "bytes_seen", 1e-6, "million bytes"
    return "step", 1, "steps"


def curve(lines: list[dict], axis: tuple[str, float, str], name: str, factor: float) -> Points:
    """Values of `name` over the axis, at most POINTS, means of equally many steps."""
    found = [(line[axis[0]] * axis[1], line[name] * factor) for line in lines if name in line]
    size = max(1, math.ceil(len(found) / POINTS))
    return [(part[-1][0], sum(value for _, value in part) / len(part))
            for part in (found[i:i + size] for i in range(0, len(found), size))]


def span(values: list[float]) -> tuple[float, float]:
    """Where a vertical axis begins and ends: without the few largest of many values, since a loss begins high."""
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1 - len(ordered) // 25]
    room = max((high - low) * 0.06, abs(high) * 0.01) or 1.0      # of a constant, not its rounding
    return low - room, high + room


def draw_curves(out: Path, runs: dict[str, list[dict]]):
    """Draws lines of metrics.jsonl by label into a PNG. ImportError without matplotlib."""
    from matplotlib.figure import Figure
    axis = axis_of(runs.values())
    figure = Figure(figsize=(14, 6.4))
    figure.subplots_adjust(0.04, 0.08, 0.99, 0.94, wspace=0.2, hspace=0.34)  # its own layouts take as long again
    for axes, (title, name, factor, val, val_factor) in zip(figure.subplots(2, 4).flat, PANELS):
        values = []
        for number, lines in enumerate(runs.values()):
            line, dots = curve(lines, axis, name, factor), curve(lines, axis, val, val_factor)
            axes.plot(*zip(*line or [((), ())]), lw=1.2, color=f"C{number}", label=f"run {number}")
            axes.plot(*zip(*dots or [((), ())]), "o", ms=4, color=f"C{number}", mec="black", mew=0.6,
                      label=None if number else "validation")
            values += [value for _, value in line + dots]
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
        if values:
            axes.set_ylim(*span(values))
    for axes in figure.axes[4:]:
        axes.set_xlabel(axis[2])
    labels = {f"run {number}": files.one_line(label) for number, label in enumerate(runs)}
    for text in figure.axes[0].legend(fontsize=9).get_texts():    # before, $ and a leading _ would have meant something
        text.set(text=labels.get(text.get_text(), text.get_text()), parse_math=False)
    with files.durable(out, "wb") as file:
        figure.savefig(file, dpi=90, format="png")


def chart(lines: list[dict], axis: tuple[str, float, str], title: str, name: str, factor: float, val: str,
          val_factor: float) -> str:
    """One of PANELS as SVG, 360 by 190; nothing where there is no value."""
    line, dots = curve(lines, axis, name, factor), curve(lines, axis, val, val_factor)
    if not line + dots:
        return ""
    (left, right), (low, high) = (min(x := [x for x, _ in line + dots]), max(x)), span([y for _, y in line + dots])

    def at(x: float, y: float) -> tuple[str, str]:
        y = max(low, min(high, y))        # what is higher runs along the edge
        return f"{48 + 304 * (x - left) / (right - left or 1):.1f}", f"{160 - 152 * (y - low) / (high - low):.1f}"
    parts = []
    for y in ticks(low, high):
        parts.append(f'<path class="grid" d="M48 {at(left, y)[1]}H352"/><text class="end" x="44" y="{at(left, y)[1]}" '
                     f'dy="3.5">{brief(y)}</text>')
    for x in ticks(left, right):
        parts.append(f'<path class="grid" d="M{at(x, low)[0]} 8V160"/><text class="mid" x="{at(x, low)[0]}" y="173">'
                     f'{brief(x)}</text>')
    if line:
        parts.append(f'<path class="line" d="M{"L".join(" ".join(at(*point)) for point in line)}"/>')
    parts += ['<circle class="dot" cx="{}" cy="{}" r="3.2"/>'.format(*at(*point)) for point in dots]
    last = ", ".join(f"{what} {points[-1][1]:.4g}"
                     for what, points in (("training", line), ("validation", dots)) if points)
    return (f'<figure><figcaption>{title}<small>{last}</small></figcaption><svg viewBox="0 0 360 190" role="img" '
            f'aria-label="{title}: {last}">{"".join(parts)}<text class="mid" x="200" y="187">{axis[2]}</text></svg>'
            f'</figure>')


def ticks(low: float, high: float) -> list[float]:
    """Round numbers between two, about four."""
    rough = (high - low) / 4 or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * (1, 2, 5, 10)[bisect((1.5, 3.5, 7.5), rough / power)]
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def brief(x: float) -> str:
    return f"{x / 1000:.6g}k" if 10_000 <= abs(x) < 1e9 else f"{x:.6g}"


# ---------------------------------------------------------------------------------------------------------------------
# As a page

PER_LINE = 64                             # bytes side by side where gates stand below them
OPEN_LINES = 4                            # of these, how many are unfolded
LOADS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)    # where the next of eight shades begins: of an expert's load,
GATES = tuple(part / 8 for part in range(1, 8))  # of a gate


def write_page(shown: Shown, title: str, model: Spider, lines: list[dict]) -> str:
    """The page as HTML."""
    title, record = html.escape(files.one_line(title)), shown.record
    about = [f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters", *facts(shown)]
    parts = [f"<h1>{title}</h1>", f"<p class=facts>{''.join(f'<span>{line}</span>' for line in about)}</p>",
             "<section><h2>Surprise, segments, loops</h2><p>", key("s", ("0", *(f"{bits:g}" for bits in BITS)), "bits")]
    if record.loops:
        parts.append(" Each underlined piece is a segment" + "; the small number behind it says how many loops it took"
                     * (len(set(record.loops)) > 1) + ".")
    parts.append(" Point at a character, or touch it, for its figures.</p><div class=text tabindex=0>")
    parts += [*text_view(shown), "</div></section>"]
    if record.load:
        parts += ["<section><h2>Experts: load by layer and loop</h2><p>What an expert received as a multiple of an "
                  "even share: 1 is even. ", key("g", ("0", *(f"{load:g}" for load in LOADS)), "of an even share"),
                  '</p><div class=wide tabindex=0>', *load_table(record), "</div></section>"]
    if record.byte_gates or record.gates:
        parts += ["<section><h2>Engram: how far the gates open</h2><p>Byte-rate gates weigh what is remembered of the "
                  "last bytes, by their number, and what followed them earlier in the text; "
                  "segment-rate gates, by layer and loop, what is remembered at a segment's end. 0 is shut, 1 open; a "
                  "bar ends a segment. ",
                  key("g", ("0", *(f"{gate:.3g}" for gate in GATES)), "open"),
                  "</p><div class=\"wide tapes\" tabindex=0>", *tape(shown, model), "</section>"]
    axis = axis_of([lines])
    if charts := "".join(chart(lines, axis, *panel) for panel in PANELS):
        parts.append(f"<section><h2>Curves of its training</h2><div class=charts>{charts}</div></section>")
    script, style = (base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in (SCRIPT, STYLE))
    policy = f"default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'"
    return (f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<meta name="color-scheme" content="light dark"><title>{title}</title><style>{STYLE}</style></head>\n'
            f'<body><main>{"".join(parts)}</main><output id=about></output><script>{SCRIPT}</script></body></html>\n')


def key(kind: str, names: Iterable[str], unit: str) -> str:
    """A legend: the shades, each with where it begins."""
    return (f'<span class=key>{"".join(f"<i class={kind}{level}>{name}</i>" for level, name in enumerate(names))} '
            f'{unit}</span>')


def text_view(shown: Shown) -> Iterator[str]:
    """The text with its surprise as ground, each segment in a frame, figures in title attributes."""
    differ, open_ = len(set(shown.record.loops)) > 1, False
    for glyph, start, stop in characters(shown.text):
        if not open_ and shown.loops_of(start) is not None:
            yield "<u>"
            open_ = True
        title = html.escape(describe(shown, glyph, start, stop))
        sign = "↵" if glyph == "\\n" else html.escape(glyph)
        yield f'<b class=s{bisect(BITS, sum(shown.bits[start:stop]))} title="{title}">{sign}</b>'
        if any(shown.ends[start:stop]):
            yield f"</u><sub>{shown.loops_of(stop - 1)}</sub>" if differ else "</u>"
            open_ = False
        yield "\n" * (glyph == "\\n")
    yield "</u>" * open_


def describe(shown: Shown, glyph: str, start: int, stop: int) -> str:
    """A character's figures, for people."""
    loops, segment = shown.loops_of(start), shown.segment[start] + 1
    parts = [f"{glyph}  byte {start + 1}" + f" to {stop}" * (stop > start + 1)]
    parts += [f"{text:#04x}: {bits:.2f} bits, expected {likeliest}" for text, bits, likeliest in
              zip(shown.text[start:stop], shown.bits[start:stop], shown.likeliest[start:stop])]
    if loops is not None:
        parts.append(f"segment {segment}, {loops} loop" + "s" * (loops > 1))
    return " · ".join(parts)


def load_table(record: Record) -> Iterator[str]:
    """Rows of layers and loops, columns of experts."""
    experts = len(next(iter(record.load.values())))
    yield f"<table><tr><th>layer, loop<th>tokens{''.join(f'<th>{expert + 1}' for expert in range(experts))}</tr>"
    for (layer, loop), tokens in sorted(record.load.items()):
        loads = [f"<td class=g{bisect(LOADS, load)}>{load:.2f}" for load in (tokens * experts / tokens.sum()).tolist()]
        yield f"<tr><th>{layer + 1}, {loop + 1}<td class=count>{int(tokens.sum()):,}{''.join(loads)}</tr>"
    yield "</table>"


def tape(shown: Shown, model: Spider) -> Iterator[str]:
    """The text in lines of PER_LINE bytes; below them their surprise and gates as strips of shaded cells."""
    rows = [("surprise", "s", [bisect(BITS, bits) for bits in shown.bits])]
    c = model.config
    names = [f"last {n} byte{'s' * (n > 1)}" for n in c.engram_byte_orders]
    names += [f"last {n}, in the text" for n in c.engram_match_orders]
    names += [f"word {n}, in the text" for n in c.engram_match_words]
    for name, gates in zip(names, zip(*shown.record.byte_gates[1:])):
        rows.append((name, "g", [bisect(GATES, gate) for gate in gates]))
    for (layer, loop), gates in sorted(shown.record.gates.items()):
        levels = [bisect(GATES, gates[segment]) if segment in gates else None for segment in shown.segment]
        rows.append((f"layer {layer + 1}, loop {loop + 1}", "g", levels))
    glyphs = list(characters(shown.text))
    for first in range(0, len(shown.text), PER_LINE):
        if first == OPEN_LINES * PER_LINE:
            yield "</div><details><summary>the rest of the text</summary><div class=\"wide tapes\" tabindex=0>"
        yield tape_line(shown, glyphs, rows, first, min(first + PER_LINE, len(shown.text)))
    yield "</div>" + "</details>" * (len(shown.text) > OPEN_LINES * PER_LINE)


def tape_line(shown: Shown, glyphs: list[tuple[str, int, int]], rows: list[tuple], first: int, last: int) -> str:
    """Bytes from `first` to before `last` as SVG; a cell is 10 by 10."""
    height = 18 + 10 * len(rows)
    parts = [f'<svg viewBox="-96 0 {96 + 10 * PER_LINE} {height}" class=tape role="img" '
             f'aria-label="bytes {first + 1} to {last}">']
    for glyph, start, stop in glyphs:
        if first <= start < last:
            sign = glyph if len(glyph) == 1 else "↵" if glyph == "\\n" else "·"
            parts.append(f'<text class="mid" x="{5 * (start + stop - 2 * first)}" y="12">{html.escape(sign)}</text>')
    for number, (name, kind, levels) in enumerate(rows):
        parts.append(f'<text class="end" x="-6" y="{26 + 10 * number}">{name}</text>')
        paths: dict[int, str] = {}        # of each shade, equal neighbours as one cell
        for level, run in groupby(range(first, last), levels.__getitem__):
            if level is not None:
                left, width = 10 * ((run := list(run))[0] - first), 10 * len(run)
                paths[level] = paths.get(level, "") + f"M{left} {18 + 10 * number}h{width}v10h-{width}z"
        parts += [f'<path class={kind}{level} d="{path}"/>' for level, path in paths.items()]
    bars = "".join(f"M{10 * (byte + 1 - first)} 15V{height}" for byte in range(first, last) if shown.ends[byte])
    return "".join(parts) + f'<path class="bar" d="{bars}"/></svg>'


SCRIPT = """
const about = document.getElementById("about");
addEventListener("pointerover", event => {
  const at = event.target.closest("b");
  if (at && at.title) { at.dataset.about = at.title; at.removeAttribute("title"); }
  about.textContent = at ? at.dataset.about : "";
});
"""

STYLE = """
:root { color-scheme: light dark; --ground: #fdfdfc; --ink: #1b1d21; --quiet: #62666f; --rule: #d9dbe0; --line: #0b64a8;
  --pale: #9dbbd6; --dot: #c44a00; --bar: #1b1d21;
  --s0: #fff7e8; --s1: #fff0b8; --s2: #fee08b; --s3: #fec44f;
  --s4: #fb9a29; --s5: #e8720f; --s6: #b84402; --s7: #7f2704;
  --g0: #eef3fa; --g1: #d6e4f5; --g2: #b3d0ea; --g3: #85b8de;
  --g4: #559ccd; --g5: #2a74b0; --g6: #135aa0; --g7: #083a75;
  --low: #1b1d21; --high: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --ground: #121417; --ink: #e4e6ea; --quiet: #9aa0aa; --rule: #33373e;
  --line: #5fb0e8; --pale: #2f5878; --dot: #f0a04b; --bar: #e4e6ea;
  --s0: #1f1a15; --s1: #38210f; --s2: #5a2d0a; --s3: #7a3606;
  --s4: #984907; --s5: #b3590b; --s6: #f5b044; --s7: #fff0b8;
  --g0: #171d27; --g1: #14283f; --g2: #163a5c; --g3: #1c5080;
  --g4: #2c6ba3; --g5: #5a9fd6; --g6: #a3cff0; --g7: #d9ecfc;
  --low: #e4e6ea; --high: #101114; } }
* { box-sizing: border-box }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif }
main { max-width: 1500px; margin: 0 auto; padding: 16px clamp(12px, 3vw, 40px) 72px }
h1 { font-size: 1.35rem; margin: 8px 0; overflow-wrap: anywhere }
h2 { font-size: 1.05rem; margin: 0 0 4px }
section { border-top: 1px solid var(--rule); padding: 14px 0; margin-top: 14px }
p { margin: 0 0 10px; color: var(--quiet); max-width: 110ch }
.facts span { display: inline-block; margin-right: 1.6em; color: var(--ink) }
.key { display: inline-flex; flex-wrap: wrap; align-items: center; gap: 0 1px; font-size: 12px; white-space: pre;
  vertical-align: middle }
.key i { font-style: normal; padding: 1px 7px }
.text { font: 14px/2 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; max-height: 34rem; overflow-y: auto; border: 1px solid var(--rule); border-radius: 4px;
  padding: 8px 12px }
.text b { font-weight: normal; padding: 3px 0 }
.text b:hover { outline: 2px solid var(--line); outline-offset: -1px }
.text u { text-decoration: none; border-bottom: 3px solid var(--line); padding-bottom: 3px }
.text u:nth-of-type(even) { border-color: var(--pale) }
.text sub { color: var(--line); font-size: 10px; line-height: 1; margin-right: 4px }
.wide { overflow-x: auto }
table { border-collapse: separate; border-spacing: 2px; font-size: 12px; font-variant-numeric: tabular-nums }
th { font-weight: normal; color: var(--quiet); padding: 0 6px; white-space: nowrap }
td { padding: 4px 7px; text-align: right; min-width: 40px }
.tapes { display: grid; grid-template-columns: repeat(auto-fill, minmax(760px, 1fr)); gap: 12px 20px }
.tape { display: block; width: 100%; max-width: 1100px }
svg text { font: 9px system-ui, sans-serif; fill: var(--quiet) }
.tape .mid { font: 10px ui-monospace, "DejaVu Sans Mono", monospace; fill: var(--ink) }
.mid { text-anchor: middle }
.end { text-anchor: end }
.bar { stroke: var(--bar); stroke-width: 0.9 }
summary { cursor: pointer; color: var(--line); margin: 4px 0 10px }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 330px), 1fr)); gap: 14px 22px }
figure { margin: 0 }
figcaption { display: flex; justify-content: space-between; gap: 1em; font-size: 13px }
small { color: var(--quiet); font-variant-numeric: tabular-nums }
.charts svg { width: 100%; display: block }
.charts svg text { font-size: 10px }
.grid { stroke: var(--rule); stroke-width: 1 }
.line { fill: none; stroke: var(--line); stroke-width: 1.5; stroke-linejoin: round }
.dot { fill: var(--dot); stroke: var(--ground); stroke-width: 1 }
#about { position: fixed; inset: auto 0 0 0; background: var(--ground); border-top: 1px solid var(--rule);
  padding: 8px clamp(12px, 3vw, 40px); font-size: 13px; white-space: pre-wrap; overflow-wrap: anywhere }
#about:empty { display: none }
""" + "".join(f".{kind}{level} {{ background: var(--{kind}{level}); fill: var(--{kind}{level}); "
              f"color: var(--{'low' if level < (6 - (kind == 'g')) else 'high'}) }}\n"
              for kind in "sg" for level in range(8))


# ---------------------------------------------------------------------------------------------------------------------

def main(argv: list[str]) -> int:
    """Draws the curves of runs in one picture. Exit status: 0; 2 with one line on stderr."""
    if argv in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    out, *runs = argv or [""]
    places = {label: directory for label, _, directory in (run.partition("=") for run in runs)}
    if not out or not runs or not all(map(all, places.items())) or len(places) < len(runs):
        print("look.py: error: python look.py OUT.png LABEL=DIR ..., each LABEL once, each DIR with a metrics.jsonl",
              file=sys.stderr)
        return 2
    try:
        found = {label: read_metrics(Path(directory) / "metrics.jsonl") for label, directory in places.items()}
        if missing := [label for label, lines in found.items() if not lines]:
            raise data.DataError(f"{', '.join(missing)}: there are no lines in metrics.jsonl")
        with quiet():                     # of signs that the font lacks
            draw_curves(Path(out), found)
    except ImportError as fault:
        fault = f"{fault}: pip install -e \".[bench]\""
        print(f"look.py: error: {files.one_line(fault)}", file=sys.stderr)
        return 2
    except (data.DataError, OSError) as fault:
        print(f"look.py: error: {files.one_line(fault)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
