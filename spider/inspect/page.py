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
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from torch import nn

from spider import console, errors, files
from spider.inspect.reading import BITS, Record, Shown, characters, facts, read, take_text
from spider.inspect.terminal import in_terminal
from spider.training.checkpoint import is_in_parts
from spider.training.curves import PANELS, axis_of, curve, read_metrics, span


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


def write_page(shown: Shown, title: str, model: nn.Module, lines: list[dict]) -> str:
    """The page as HTML."""
    title, record = html.escape(console.one_line(title)), shown.record
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


def tape(shown: Shown, model: nn.Module) -> Iterator[str]:
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

def show(model: nn.Module, n_loops: int, argument: str, checkpoint: Path, page: str | None):
    """Prints the text that --show names as the model reads it, and writes the page: to `page`, or beside the
    checkpoint, a file or a directory with metrics.jsonl."""
    text, name = take_text(argument)
    directory = checkpoint if checkpoint.is_dir() and not is_in_parts(checkpoint) else checkpoint.parent
    out = directory / "look.html" if page is None else Path(page)
    if not files.is_replaceable(out):
        raise errors.DataError(f"--html: {out} is no regular file: name another")
    shown = read(model, text, n_loops)
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    sys.stdout.reconfigure(errors="backslashreplace")
    print("".join(in_terminal(shown, colour)), flush=True)
    content = write_page(shown, f"{checkpoint} reads {name}", model, read_metrics(directory / "metrics.jsonl"))
    try:
        with files.durable(out, "wb") as file:
            file.write(content.encode())
    except OSError as fault:
        raise errors.DataError(f"{out}: {fault.strerror}: --html names another place for the page") from None
    print(console.one_line(f"the page: {out}"))
