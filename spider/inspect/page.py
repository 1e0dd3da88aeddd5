"""Show a text and its model's training curves as an HTML page: `show`, for `sample.py --show`.

page.html is the template; its script draws the embedded JSON data. The page is one file that loads nothing. Its content
security policy only allows its own script, and all data (text, checkpoint, names) is inserted as text.
"""

import base64
import hashlib
import html
import json
import os
import re
import sys
from pathlib import Path

from torch import nn

from spider import console, errors, files
from spider.inspect.reading import BITS, Shown, characters, facts, read, take_text
from spider.inspect.terminal import in_terminal
from spider.model.config import SpiderConfig
from spider.training.checkpoint_files import is_sharded
from spider.training.curves import (BY_SOURCE, PANELS, SOURCE, axis_of, curve, read_metrics, smoothed, sources_of,
                                    span)

TEMPLATE = Path(__file__).with_name("page.html")
LOADS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)    # thresholds between eight shades of an expert's load,
VOTES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)    # of a vote, in nats,
GATES = tuple(step / 8 for step in range(1, 8))  # and of a gate


def write_page(shown: Shown, title: str, model: nn.Module, lines: list[dict]) -> str:
    """Fill the template and return the page as HTML."""
    text, title = TEMPLATE.read_text(encoding="utf-8"), html.escape(console.one_line(title))
    style, script = (hash_of(re.search(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)[1]) for tag in ("style", "script"))
    data = json.dumps(page_data(shown, model, lines), allow_nan=False, separators=(",", ":"))     # in ASCII
    fields = dict(title=title, policy=f"default-src 'none'; script-src '{script}'; style-src '{style}'",
                  data=re.sub("[<>&]", lambda sign: f"\\u{ord(sign[0]):04x}", data))
    return re.sub("{{([a-z]+)}}", lambda field: fields[field[1]], text)


def hash_of(text: str) -> str:
    """Return the hash of a script or style for a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def page_data(shown: Shown, model: nn.Module, lines: list[dict]) -> dict:
    """Return the data that page.html draws, as plain values; bytes and segments count from 0."""
    record, gates = shown.record, gate_rows(shown, model)
    load = [dict(name=f"{layer + 1}, {loop + 1}", tokens=[int(tokens) for tokens in load])
            for (layer, loop), load in sorted(record.load.items())]
    return dict(
        facts=[f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters", *facts(shown)],
        shades=dict(bits=BITS, loads=LOADS, gates=GATES, votes=VOTES), characters=list(characters(shown.text)),
        bytes=list(shown.text), bits=[round(bits, 4) for bits in shown.bits], likeliest=shown.likeliest,
        segment=shown.segment, ends=[int(end) for end in shown.ends], loops=record.loops, load=load,
        gates=[dict(name=name, values=values, shades=shades) for name, values, _, shades in gates],
        meanings=list(dict(meaning for _, _, meaning, _ in gates).items()),
        axis=axis_of([lines])[2], charts=charts(lines))


def gate_rows(shown: Shown, model: nn.Module) -> list[tuple[str, list, tuple[str, str], str]]:
    """Return Engram's gates and votes: name, value by byte (None: its segment was not computed, or there is no vote),
    (rows, their meaning), and name of the shades."""
    c, record = model.config, shown.record
    memory = "last n bytes", "what the Engram tables learned about these bytes"
    match = "last n, in the text", "the byte that followed the last earlier occurrence of these n bytes in this text"
    words = "word n, in the text", (
        "the same for all bytes since the n-th last end of a word: word 1 is the current word, word 2 the current word "
        "and the one before it")
    vote = "last n, its vote", (
        "the weight in nats that is added to the logit of the byte that followed the last earlier occurrence of these "
        "n bytes in this text; empty where there is none")
    word_vote = "word n, its vote", words[1]
    segment = "layer, loop", "what a layer of the core looks up in its Engram tables for a segment, in each loop"
    rows = [(f"last {n} byte{'s' * (n > 1)}", memory) for n in c.engram_byte_orders]
    rows += contexts(c, match, words) if c.matches_before_head else []
    found = [(name, [round(gate, 3) for gate in gates], meaning, "gates")
             for (name, meaning), gates in zip(rows, zip(*record.byte_gates[1:]))]
    found += [(name, [weight and round(weight, 3) for weight in weights], meaning, "votes")
              for (name, meaning), weights in zip(contexts(c, vote, word_vote), zip(*record.votes[1:]))]
    for (layer, loop), gates in sorted(record.gates.items()):
        values = [round(gates[number], 3) if number in gates else None for number in shown.segment]
        found.append((f"layer {layer + 1}, loop {loop + 1}", values, segment, "gates"))
    return found


def contexts(c: SpiderConfig, last: tuple[str, str], word: tuple[str, str]) -> list[tuple[str, tuple[str, str]]]:
    """Return a row's name for each context of the match memory, with `last` or `word`, (rows, their meaning)."""
    return [(kind[0].replace(" n,", f" {n},"), kind)
            for kind, numbers in ((last, c.engram_match_orders), (word, c.engram_match_words)) for n in numbers]


def charts(lines: list[dict]) -> list[dict]:
    """Return the charts of a run, one per panel with data: a smoothed line, and dots for validation; and one of
    validation by source."""
    axis, drawn = axis_of([lines]), []
    for panel in PANELS:
        line, dots = curve(lines, axis, panel.name, panel.factor), curve(lines, axis, panel.val)
        drawn.append((panel.title, [
            dict(kind="raw", points=line if panel.smooth else []), dict(kind="dot", name="validation", points=dots),
            dict(kind="line", name="training", points=smoothed(line) if panel.smooth else line)]))
    sources = [(name.removeprefix(SOURCE), curve(lines, axis, name)) for name in sources_of([lines])]
    drawn.append((BY_SOURCE, [dict(kind="line", label=console.one_line(name), points=points)
                              for name, points in sources]))
    found = []
    for title, curves in drawn:
        if curves := [one for one in curves if one["points"]]:
            low, high = span([[y for one in curves for _, y in one["points"]]])
            found.append(dict(title=title, low=low, high=high, curves=curves))
    return found


def show(model: nn.Module, n_loops: int, argument: str, checkpoint: Path, page: str | None):
    """Print the analysis of the text that --show names, and write the page to `page` or beside the checkpoint."""
    text, name = take_text(argument)
    directory = checkpoint if checkpoint.is_dir() and not is_sharded(checkpoint) else checkpoint.parent
    out = directory / "look.html" if page is None else Path(page)
    if not files.is_replaceable(out):
        raise errors.DataError(f"--html: {out} is not a regular file: use another name")
    shown = read(model, text, n_loops)
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    print("".join(in_terminal(shown, colour)), flush=True)
    content = write_page(shown, f"{checkpoint} reads {name}", model, read_metrics(directory / "metrics.jsonl"))
    try:
        with files.durable(out, "wb") as file:
            file.write(content.encode())
    except OSError as fault:
        raise errors.DataError(f"{out}: {fault.strerror}: use --html to write the page elsewhere") from None
    print(console.one_line(f"the page: {out}"))
